use proptest::prelude::*;

use super::*;

const TIMEOUT: Duration = Duration::from_secs(60);
const JUST_IN_TIME: Duration = Duration::from_millis(59_999);
const SECOND: Duration = Duration::from_secs(1);
const KILL: ProcessExit = ProcessExit::Signal(9);
const KILLED_BY_SIGNAL: GenerationEnd = GenerationEnd::Signalled(9);

fn settings(keep_servers: bool) -> KeeperRequest {
    KeeperRequest::Configure { keep_servers, hang_timeout_ms: Some(60_000) }
}

fn serving(at: Instant, keep_servers: bool) -> KeeperRules {
    let mut rules = KeeperRules::new();
    rules.receive(at, &settings(keep_servers));
    rules.receive(at, &KeeperRequest::Ready);
    rules
}

/// Lets the delay of a restart pass. Returns the time of the start.
#[track_caller]
fn restart(rules: &mut KeeperRules, delay: Duration, now: Instant) -> Instant {
    assert_eq!(rules.deadline(), Some(now + delay), "{rules:?}");
    let now = now + delay;
    assert_eq!(rules.expire(now), Some(KeeperEffect::Start));
    now
}

#[track_caller]
fn assert_ended(rules: &KeeperRules, end: GenerationEnd, crashes: Option<usize>) {
    assert_eq!(rules.phase(), SatellitePhase::Ended { end, crashes });
    assert_eq!(rules.deadline(), None);
}

#[test]
fn a_satellite_is_killed_only_after_the_whole_timeout_without_an_answer() {
    let mut now = Instant::now();
    let mut rules = serving(now, false);
    for _ in 0..10 {
        now += JUST_IN_TIME;
        assert_eq!(rules.expire(now), None);
        rules.receive(now, &KeeperRequest::Alive);
    }
    assert_eq!(rules.deadline(), Some(now + TIMEOUT));
    let (lost_at, now) = (now, now + TIMEOUT);
    assert_eq!(rules.expire(now), Some(KeeperEffect::Kill));
    let end = GenerationEnd::Hung(TIMEOUT);
    assert_eq!(rules.phase(), SatellitePhase::Killed { end, lost_at, until: now + END_TIMEOUT });
    rules.satellite_ended(now, Some(KILL));
    assert_ended(&rules, end, None);
    assert_eq!(end.exit_code(), 137);
}

#[test]
fn a_satellite_is_killed_once_and_its_late_messages_do_not_revive_it() {
    let start = Instant::now();
    let mut rules = serving(start, true);
    let now = start + TIMEOUT;
    assert_eq!(rules.expire(now), Some(KeeperEffect::Kill));
    for late in [KeeperRequest::Alive, KeeperRequest::Ready, KeeperRequest::Stopping, KeeperRequest::Done { code: 0 }] {
        rules.receive(now, &late);
    }
    assert_eq!(rules.expire(now), None);
    assert_eq!(rules.expire(now + END_TIMEOUT), Some(KeeperEffect::Abandon));
    // A satellite that hangs in the kernel is replaced all the same.
    rules.satellite_ended(now + END_TIMEOUT, None);
    restart(&mut rules, SECOND, now + END_TIMEOUT);
}

#[test]
fn no_limit_applies_to_the_first_start_and_to_the_end_of_the_servers() {
    let start = Instant::now();
    let mut rules = KeeperRules::new();
    rules.receive(start, &settings(true));
    rules.receive(start, &KeeperRequest::Alive);
    assert_eq!(rules.deadline(), None);
    let mut rules = serving(start, true);
    rules.receive(start, &KeeperRequest::Stopping);
    // An answer to a probe that was sent before.
    rules.receive(start, &KeeperRequest::Alive);
    assert_eq!(rules.deadline(), None);
    assert_eq!(rules.expire(start + TIMEOUT * 100), None);
    let mut rules = serving(start, true);
    rules.receive(start, &KeeperRequest::Configure { keep_servers: true, hang_timeout_ms: None });
    assert_eq!(rules.expire(start + TIMEOUT * 100), None);
}

#[test]
fn a_finished_satellite_must_end_soon() {
    let start = Instant::now();
    let mut rules = serving(start, true);
    rules.receive(start, &KeeperRequest::Done { code: 7 });
    assert_eq!(rules.expire(start + END_TIMEOUT / 2), None);
    assert_eq!(rules.expire(start + END_TIMEOUT), Some(KeeperEffect::Abandon));
    rules.satellite_ended(start + END_TIMEOUT, None);
    assert_ended(&rules, GenerationEnd::Done(7), None);
}

#[test]
fn crashes_wait_1_and_5_seconds_and_the_third_one_ends_everything() {
    let mut now = Instant::now();
    let mut rules = serving(now, true);
    for (generation, delay) in [(2, 1), (3, 5)] {
        rules.satellite_ended(now, Some(KILL));
        let lost = LostGeneration { end: KILLED_BY_SIGNAL, uptime: Duration::ZERO, lost_at: now };
        assert_eq!(rules.previous(), Some(lost));
        now = restart(&mut rules, Duration::from_secs(delay), now);
        assert_eq!(rules.generation(), generation);
        rules.receive(now, &KeeperRequest::Ready);
    }
    rules.satellite_ended(now, Some(KILL));
    assert_ended(&rules, KILLED_BY_SIGNAL, Some(3));
    assert_eq!(KILLED_BY_SIGNAL.exit_code(), 137);
}

#[test]
fn a_satellite_that_was_ready_for_a_minute_is_restarted_at_once() {
    let start = Instant::now();
    let mut rules = serving(start, true);
    rules.satellite_ended(start + TIMEOUT + SECOND, Some(ProcessExit::Code(101)));
    let end = GenerationEnd::Exited(101);
    let lost = LostGeneration { end, uptime: TIMEOUT + SECOND, lost_at: start + TIMEOUT + SECOND };
    assert_eq!(rules.previous(), Some(lost));
    restart(&mut rules, Duration::ZERO, start + TIMEOUT + SECOND);
    // A hang is counted from the last answer.
    let mut rules = serving(start, true);
    let answered_at = start + SECOND;
    rules.receive(answered_at, &KeeperRequest::Alive);
    let now = answered_at + TIMEOUT;
    assert_eq!(rules.expire(now), Some(KeeperEffect::Kill));
    rules.satellite_ended(now, Some(KILL));
    assert_eq!(rules.previous().unwrap().uptime, SECOND);
    restart(&mut rules, SECOND, now);
}

#[test]
fn a_crash_is_forgotten_after_five_minutes() {
    let mut now = Instant::now();
    let mut rules = serving(now, true);
    for _ in 0..10 {
        now += Duration::from_secs(151);
        rules.satellite_ended(now, Some(KILL));
        now = restart(&mut rules, Duration::ZERO, now);
        rules.receive(now, &KeeperRequest::Ready);
    }
}

#[test]
fn the_first_start_is_not_repeated_and_a_failed_restart_is_charged() {
    let start = Instant::now();
    let mut rules = KeeperRules::new();
    rules.receive(start, &settings(true));
    rules.receive(start, &KeeperRequest::Done { code: 2 });
    rules.satellite_ended(start, Some(ProcessExit::Code(2)));
    assert_ended(&rules, GenerationEnd::Done(2), None);

    let mut rules = serving(start, true);
    rules.satellite_ended(start, Some(KILL));
    let now = restart(&mut rules, SECOND, start);
    // The configuration is broken, so the satellite sends no settings. Those of the last one apply.
    rules.receive(now, &KeeperRequest::Done { code: 2 });
    rules.satellite_ended(now, Some(ProcessExit::Code(2)));
    // Clients have had no satellite since the first crash.
    assert_eq!(
        rules.previous(),
        Some(LostGeneration { end: GenerationEnd::Done(2), uptime: Duration::ZERO, lost_at: start })
    );
    let now = restart(&mut rules, 5 * SECOND, now);
    rules.receive(now, &KeeperRequest::Done { code: 2 });
    rules.satellite_ended(now, Some(ProcessExit::Code(2)));
    assert_ended(&rules, GenerationEnd::Done(2), Some(3));
    assert_eq!(GenerationEnd::Done(2).exit_code(), 2);
}

#[test]
fn a_restart_that_is_not_ready_in_time_is_killed_and_charged() {
    let start = Instant::now();
    let mut rules = serving(start, true);
    rules.satellite_ended(start, Some(KILL));
    let now = restart(&mut rules, SECOND, start) + 2 * TIMEOUT;
    assert_eq!(rules.deadline(), Some(now));
    assert_eq!(rules.expire(now), Some(KeeperEffect::Kill));
    rules.satellite_ended(now, Some(KILL));
    assert_eq!(rules.previous().unwrap().end, GenerationEnd::NotReady(2 * TIMEOUT));
    let now = restart(&mut rules, 5 * SECOND, now);
    rules.fork_failed(now, 11);
    assert_ended(&rules, GenerationEnd::NotForked(11), Some(3));
}

#[test]
fn an_orderly_end_or_a_crash_after_a_request_to_end_is_the_last_one() {
    let start = Instant::now();
    let requests: [fn(&mut KeeperRules, Instant); 2] =
        [|rules, _| rules.request_end(), |rules, now| rules.receive(now, &KeeperRequest::Stopping)];
    for request in requests {
        let mut rules = serving(start, true);
        request(&mut rules, start);
        rules.satellite_ended(start, Some(KILL));
        assert_ended(&rules, KILLED_BY_SIGNAL, None);
    }
    let mut rules = serving(start, true);
    rules.receive(start, &KeeperRequest::Done { code: 0 });
    rules.satellite_ended(start, Some(ProcessExit::Code(0)));
    assert_ended(&rules, GenerationEnd::Done(0), None);
    // During the delay of a restart.
    let mut rules = serving(start, true);
    rules.satellite_ended(start, Some(KILL));
    rules.request_end();
    assert_ended(&rules, KILLED_BY_SIGNAL, None);
}

#[test]
fn the_watchdog_is_notified_within_the_limits_of_the_keeper() {
    let start = Instant::now();
    let interval = 30 * SECOND;
    assert!(!KeeperRules::new().allows_watchdog(start, interval), "the first start has a limit of the manager");
    let mut rules = serving(start, true);
    assert!(rules.allows_watchdog(start + JUST_IN_TIME, interval));
    assert_eq!(rules.expire(start + TIMEOUT), Some(KeeperEffect::Kill));
    rules.satellite_ended(start + TIMEOUT, Some(KILL));
    assert!(rules.allows_watchdog(start + TIMEOUT, interval));
    let now = restart(&mut rules, SECOND, start + TIMEOUT);
    assert!(rules.allows_watchdog(now + TIMEOUT, interval));
    // Without a limit of the keeper the watchdog detects that the satellite hangs.
    rules.receive(now, &KeeperRequest::Configure { keep_servers: true, hang_timeout_ms: None });
    rules.receive(now, &KeeperRequest::Ready);
    assert!(rules.allows_watchdog(now + SECOND, interval));
    assert!(!rules.allows_watchdog(now + interval, interval));
}

#[derive(Debug, Clone)]
enum Step {
    Message(KeeperRequest),
    Wait(Duration),
    End(ProcessExit),
    RequestEnd,
    ForkFails,
}

fn step() -> impl Strategy<Value = Step> {
    let message = prop_oneof![
        Just(settings(true)),
        Just(settings(true)),
        Just(settings(false)),
        Just(KeeperRequest::Configure { keep_servers: true, hang_timeout_ms: None }),
        Just(KeeperRequest::Ready),
        Just(KeeperRequest::Alive),
        Just(KeeperRequest::Stopping),
        (0..3_u8).prop_map(|code| KeeperRequest::Done { code }),
    ];
    let exit = prop_oneof![(0..3_u8).prop_map(ProcessExit::Code), (1..16).prop_map(ProcessExit::Signal)];
    prop_oneof![
        8 => message.prop_map(Step::Message),
        8 => (0..200_000_u64).prop_map(|milliseconds| Step::Wait(Duration::from_millis(milliseconds))),
        6 => exit.prop_map(Step::End),
        1 => Just(Step::RequestEnd),
        1 => Just(Step::ForkFails),
    ]
}

proptest! {
    /// Random satellites: the third crash within five minutes is the last one, one satellite runs at a time, and none
    /// is started after a request to end.
    #[test]
    fn restarts_stay_within_the_budget(steps in proptest::collection::vec(step(), 0..200)) {
        let mut now = Instant::now();
        let mut rules = KeeperRules::new();
        let (mut is_running, mut just_started, mut starts) = (true, false, 0);
        let (mut crashes, mut is_end_requested, mut was_permitted) = (Vec::new(), false, false);
        for step in steps {
            match step {
                Step::Message(message) if is_running => {
                    was_permitted |= matches!(message, KeeperRequest::Configure { keep_servers: true, .. });
                    rules.receive(now, &message);
                }
                Step::End(exit) if is_running => {
                    is_running = false;
                    rules.satellite_ended(now, Some(exit));
                }
                Step::RequestEnd => {
                    is_end_requested = true;
                    rules.request_end();
                }
                Step::Wait(time) => now += time,
                Step::ForkFails if just_started => {
                    is_running = false;
                    rules.fork_failed(now, 11);
                }
                Step::Message(_) | Step::End(_) | Step::ForkFails => {}
            }
            just_started = false;
            loop {
                if matches!(rules.phase(), SatellitePhase::Pausing { .. }) && !is_running && crashes.len() == starts {
                    crashes.push(now);
                    let recent = crashes.iter().filter(|at| now.duration_since(**at) < 5 * TIMEOUT);
                    prop_assert!(recent.count() <= 2, "{:?}", crashes);
                }
                match rules.expire(now) {
                    None => break,
                    Some(KeeperEffect::Kill) => prop_assert!(is_running),
                    Some(KeeperEffect::Abandon) => {
                        prop_assert!(is_running);
                        is_running = false;
                        rules.satellite_ended(now, None);
                    }
                    Some(KeeperEffect::Start) => {
                        prop_assert!(!is_running && !is_end_requested && was_permitted);
                        (is_running, just_started) = (true, true);
                        starts += 1;
                    }
                }
            }
            if let SatellitePhase::Ended { crashes, .. } = rules.phase() {
                prop_assert!(!is_running && crashes.is_none_or(|crashes| crashes == 3), "{:?}", crashes);
                break;
            }
            let is_pausing = matches!(rules.phase(), SatellitePhase::Pausing { .. });
            prop_assert!(is_running != is_pausing);
            prop_assert_eq!(rules.generation() as usize, starts + 1);
        }
    }
}
