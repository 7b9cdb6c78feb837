//! Each check finds a violation of its own invariant only, and none in a correct run.

use std::sync::Arc;

use mcp_satellite_actors::model::event::{EventSubject, StopKind};
use mcp_satellite_actors::model::status::Status::{
    AwaitingUserConfig, CommandReceived, Connecting, DiscoveringTools, Offline, Online, Provisioning, SyncingTools,
};
use mcp_satellite_actors::model::status::{Status, StatusCause, next};

use super::limits::{check_flat, check_neighbours};
use super::*;
use crate::types::{CallOutcome, LeftoverResources};

// Simulated history of three instances in two teams.
struct SimulatedHistory {
    checks: InvariantChecks,
    seq: u64,
    now_ms: i64,
}

const UP: [Status; 6] = [Provisioning, CommandReceived, Connecting, DiscoveringTools, SyncingTools, Online];

impl SimulatedHistory {
    fn new() -> Self {
        let budget = RestartPolicy { max_crashes: 3, ..RestartPolicy::default() };
        let checks = InvariantChecks::new(&[TeamNo(0), TeamNo(1), TeamNo(0)], &budget, &ScenarioLimits::default());
        Self { checks, seq: 1, now_ms: 0 }
    }

    // All three instances are online.
    fn all_online() -> Self {
        let mut told = Self::new();
        for nth in 0..3 {
            told.start(nth);
            for status in UP {
                told.status(nth, status);
            }
        }
        told
    }

    fn now(&self) -> Duration {
        Duration::from_millis(u64::try_from(self.now_ms).unwrap())
    }

    fn advance(&mut self, seconds: i64) {
        self.now_ms += 1000 * seconds;
    }

    fn subject(nth: u32) -> Arc<EventSubject> {
        Arc::new(EventSubject {
            installation_id: format!("i{nth}").into(),
            team_id: "t".into(),
            user_id: "u".into(),
            process_id: format!("s-t-u-i{nth}").into(),
            server_slug: "s".into(),
        })
    }

    fn record(&mut self, event: Event) {
        self.now_ms += 1;
        let timestamp = Timestamp::from_millisecond(1_800_000_000_000 + self.now_ms).unwrap();
        self.checks.record_event(&Envelope { seq: self.seq, timestamp, event });
        self.seq += 1;
    }

    fn status(&mut self, nth: u32, status: Status) {
        self.record(Event::StatusChanged { of: Self::subject(nth), status, status_message: None, remedy: None });
    }

    fn start(&mut self, nth: u32) {
        let at = self.now();
        self.checks.record_start(InstanceNo(nth), RunNumber(1), at);
    }

    // Unexpected end and restart.
    fn restart(&mut self, nth: u32) {
        self.status(nth, Connecting);
        self.start(nth);
        for status in [DiscoveringTools, SyncingTools, Online] {
            self.status(nth, status);
        }
    }

    fn dropped(&mut self, from_seq: u64, to_seq: u64) {
        self.record(Event::EventsDropped { from_seq, to_seq });
    }

    fn end_state(&self) -> RunEndState {
        RunEndState {
            at: self.now(),
            left: LeftoverResources::default(),
            memory_before: 1000 << 20,
            memory_after: 1100 << 20,
            instances: 3,
            events_lost: 0,
            events_emitted: self.seq - 1,
        }
    }

    fn violations_at(self, end: impl FnOnce(&mut RunEndState)) -> Vec<(Invariant, String)> {
        let mut last = self.end_state();
        end(&mut last);
        self.checks.finish(&last).into_iter().map(|violation| (violation.invariant, violation.what)).collect()
    }

    fn violations(self) -> Vec<(Invariant, String)> {
        self.violations_at(|_| ())
    }
}

fn single_violation(broken: &[(Invariant, String)], invariant: Invariant) -> &str {
    let [(of, what)] = broken else { panic!("one promise is broken once: {broken:#?}") };
    assert_eq!(*of, invariant);
    what
}

#[test]
fn nothing_is_said_of_a_run_in_which_all_is_well() {
    let mut told = SimulatedHistory::all_online();
    told.restart(0);
    let answer = CallOutcome::Text("x".to_owned());
    told.checks.record_probe(&ProbeResult {
        nth: InstanceNo(1),
        at: told.now(),
        answer,
        token: "x".into(),
        changed: false,
    });
    let mut answers = ResponseCheck::new();
    for token in ["a", "b", "c"] {
        answers.record_call(token);
    }
    answers.record_response("b", "b");
    answers.record_error("a");
    answers.record_response("c", "c");
    told.checks.add_responses(answers);
    told.seq += 10;
    told.dropped(told.seq - 10, told.seq - 1);
    told.status(2, Offline);
    assert_eq!(told.checks.violation_count(), 0);
    assert_eq!(told.violations(), []);
}

#[test]
fn the_answer_of_another_call_is_caught() {
    let mut told = SimulatedHistory::all_online();
    let mut answers = ResponseCheck::new();
    answers.record_call("a");
    answers.record_call("b");
    answers.record_response("a", "b");
    answers.record_response("b", "b");
    told.checks.add_responses(answers);
    assert_eq!(single_violation(&told.violations(), Invariant::OwnAnswer), "the call a got the answer `b`");
}

#[test]
fn a_second_answer_and_one_that_never_comes_are_caught() {
    let mut told = SimulatedHistory::all_online();
    let mut answers = ResponseCheck::new();
    answers.record_call("a");
    answers.record_response("a", "a");
    answers.record_error("a");
    told.checks.add_responses(answers);
    assert_eq!(single_violation(&told.violations(), Invariant::OwnAnswer), "the call a was answered more than once");

    let mut told = SimulatedHistory::all_online();
    let mut answers = ResponseCheck::new();
    answers.record_call("a");
    told.checks.add_responses(answers);
    assert_eq!(single_violation(&told.violations(), Invariant::OwnAnswer), "the call a was never answered");
}

#[test]
fn a_number_that_is_missing_is_caught_and_one_that_is_explained_is_not() {
    let mut told = SimulatedHistory::all_online();
    told.seq += 1;
    told.restart(0);
    let missing = told.violations();
    assert_eq!(single_violation(&missing, Invariant::NoGap), "event 19 is missing, and no event reports it as dropped");

    // Drop events right after the gap, later, and in two parts.
    let mut told = SimulatedHistory::all_online();
    told.seq = 24;
    told.dropped(19, 23);
    told.restart(0);
    told.seq += 10;
    told.restart(0);
    let gap = told.seq - 14;
    told.dropped(gap, gap + 3);
    told.dropped(gap + 4, gap + 9);
    assert_eq!(told.violations(), []);
}

#[test]
fn a_gap_that_is_explained_in_part_is_caught_for_the_rest() {
    let mut told = SimulatedHistory::all_online();
    told.seq = 34;
    told.dropped(19, 24);
    told.dropped(27, 33);
    assert_eq!(
        single_violation(&told.violations(), Invariant::NoGap),
        "events 25 to 26 (2) are missing, and no event reports them as dropped"
    );
}

#[test]
fn a_number_that_comes_again_is_caught() {
    let mut told = SimulatedHistory::all_online();
    told.seq -= 1;
    told.status(0, Online);
    assert_eq!(single_violation(&told.violations(), Invariant::NoGap), "event 18 came after event 18");
}

#[test]
fn events_that_are_lost_at_the_end_are_caught() {
    let lost = |end: &mut RunEndState| (end.events_lost, end.events_emitted) = (3, end.events_emitted + 3);
    assert_eq!(
        single_violation(&SimulatedHistory::all_online().violations_at(lost), Invariant::NoGap),
        "3 events were lost at the end"
    );
    // The runtime does not report the loss.
    let silent = SimulatedHistory::all_online().violations_at(|end| end.events_emitted += 2);
    assert_eq!(
        single_violation(&silent, Invariant::NoGap),
        "events 19 to 20 (2) are missing, and no event reports them as dropped"
    );
}

#[test]
fn an_event_that_is_missing_before_all_others_is_caught() {
    let mut told = SimulatedHistory::new();
    told.seq = 3;
    told.start(0);
    told.status(0, Provisioning);
    assert_eq!(
        single_violation(&told.violations(), Invariant::NoGap),
        "events 1 to 2 (2) are missing, and no event reports them as dropped"
    );
}

#[test]
fn a_drop_event_is_believed_of_nothing_that_came_and_of_nothing_to_come() {
    let mut told = SimulatedHistory::all_online();
    told.seq = 24;
    told.dropped(17, 23);
    let what = "events 17 to 23 are reported as dropped, but 2 of them were delivered or reported before";
    assert_eq!(single_violation(&told.violations(), Invariant::NoGap), what);

    let mut told = SimulatedHistory::all_online();
    told.seq = 20;
    told.dropped(19, u64::MAX);
    told.seq = 30;
    told.status(0, Offline);
    let broken = told.violations();
    assert_eq!(broken.len(), 2, "{broken:#?}");
    assert!(broken[0].1.ends_with("which is not a range of earlier events"), "{broken:#?}");
    assert!(broken[1].1.starts_with("events 21 to 29 (9) are missing"), "{broken:#?}");
}

#[test]
fn a_status_that_is_skipped_is_caught() {
    let mut told = SimulatedHistory::all_online();
    for status in [Connecting, SyncingTools, Online] {
        told.status(1, status);
    }
    let broken = told.violations();
    assert_eq!(
        single_violation(&broken, Invariant::LegalTransitions),
        "the status changed from connecting to syncing_tools, which is not a legal transition"
    );
}

#[test]
fn a_life_that_begins_in_the_middle_is_caught() {
    let mut told = SimulatedHistory::new();
    told.status(0, AwaitingUserConfig);
    told.status(1, Connecting);
    assert_eq!(
        single_violation(&told.violations(), Invariant::LegalTransitions),
        "the first reported status is connecting"
    );
}

#[test]
fn statuses_that_are_told_in_the_wrong_order_are_caught() {
    let mut told = SimulatedHistory::all_online();
    told.advance(1);
    told.status(0, Offline);
    told.now_ms -= 500;
    told.status(0, Connecting);
    let broken = told.violations();
    assert_eq!(
        single_violation(&broken, Invariant::LegalTransitions),
        "connecting was reported after offline and has a timestamp 499 ms before it"
    );
}

#[test]
fn a_team_that_panicked_is_shown_anew_once_and_another_team_is_not() {
    let mut told = SimulatedHistory::all_online();
    told.status(0, Offline);
    told.status(1, Offline);
    told.checks.record_reset(BudgetReset::Team(TeamNo(0)), told.now());
    told.status(0, Online);
    told.status(1, Online);
    told.status(0, Offline);
    told.status(0, Online);
    let broken = told.violations();
    assert_eq!(broken.len(), 2, "the other team's, and the second one: {broken:#?}");
}

#[test]
fn after_a_gap_nobody_knows_what_came_before() {
    let mut told = SimulatedHistory::all_online();
    told.status(0, Offline);
    told.seq += 1;
    told.dropped(told.seq - 1, told.seq - 1);
    told.status(0, Online);
    assert_eq!(told.violations(), []);
}

#[test]
fn what_is_legal_here_is_what_is_legal_in_the_runtime() {
    for (from, legal) in transitions::LEGAL {
        let by_cause = |to: &Status| StatusCause::ALL.into_iter().any(|cause| next(from, cause) == Some(*to));
        let of_the_runtime: Vec<_> = Status::ALL.into_iter().filter(by_cause).collect();
        assert_eq!(legal, of_the_runtime, "from {from}");
    }
    assert!(transitions::LEGAL.iter().map(|(from, _)| *from).eq(Status::ALL), "each has its line");
}

#[test]
fn a_restart_too_many_is_caught() {
    let mut told = SimulatedHistory::all_online();
    told.restart(0);
    told.restart(0);
    told.advance(10);
    told.status(1, Online);
    assert_eq!(told.checks.violation_count(), 0, "three starts follow at most two crashes");
    told.restart(0);
    told.advance(11);
    told.status(1, Online);
    assert_eq!(told.checks.violation_count(), 1, "caught while it runs");
    assert_eq!(
        single_violation(&told.violations(), Invariant::RestartBudget),
        "start number 4 within 5m; 3 are allowed"
    );
}

#[test]
fn a_restart_is_not_too_many_once_the_window_is_over() {
    let mut told = SimulatedHistory::all_online();
    for _ in 0..10 {
        told.advance(151);
        told.restart(0);
    }
    assert_eq!(told.violations(), []);
}

#[test]
fn who_is_pardoned_has_a_new_budget_and_nobody_else() {
    let run = |pardoned: u32| {
        let mut told = SimulatedHistory::all_online();
        (0..2).for_each(|_| told.restart(0));
        told.checks.record_reset(BudgetReset::Instance(InstanceNo(pardoned)), told.now());
        (0..3).for_each(|_| told.restart(0));
        told.violations()
    };
    assert_eq!(run(0), []);
    assert_eq!(run(1).len(), 3);
}

#[test]
fn a_start_after_sleep_or_a_stop_or_a_panic_of_the_team_is_charged_to_nobody() {
    let run = |excuse: &dyn Fn(&mut SimulatedHistory)| {
        let mut told = SimulatedHistory::all_online();
        (0..2).for_each(|_| told.restart(0));
        excuse(&mut told);
        told.restart(0);
        told.violations().len()
    };
    assert_eq!(run(&|_| ()), 1);
    let of = SimulatedHistory::subject(0);
    let stopped = Event::Stopped {
        of: of.clone(),
        kind: StopKind::Manual,
        exit_code: None,
        signal: None,
        forced: false,
        active: None,
        dormant: None,
    };
    assert_eq!(run(&|told| told.record(stopped.clone())), 0);
    let last_activity_at = Timestamp::UNIX_EPOCH;
    let dormant = Event::Dormant { of, pid: None, idle_duration_seconds: 1, last_activity_at };
    assert_eq!(run(&|told| told.record(dormant.clone())), 0);
    assert_eq!(run(&|told| told.checks.record_reset(BudgetReset::Team(TeamNo(0)), told.now())), 0);
    assert_eq!(run(&|told| told.checks.record_reset(BudgetReset::Team(TeamNo(1)), told.now())), 1);
}

#[test]
fn one_that_is_online_and_deaf_is_caught_and_one_that_moved_is_not() {
    let mut told = SimulatedHistory::all_online();
    let failed = CallOutcome::Failed { fate: Some("timed_out".to_owned()), why: "no answer within 5s".to_owned() };
    let probe = |answer: &CallOutcome, moved| ProbeResult {
        nth: InstanceNo(2),
        at: Duration::ZERO,
        answer: answer.clone(),
        token: "p".into(),
        changed: moved,
    };
    told.checks.record_probe(&probe(&failed, true));
    told.checks.record_probe(&probe(&CallOutcome::ServerError("no such tool".to_owned()), false));
    assert_eq!(told.checks.violation_count(), 0);
    told.checks.record_probe(&probe(&failed, false));
    let broken = told.violations();
    assert_eq!(
        single_violation(&broken, Invariant::OnlineIsCallable),
        "the instance is shown as online, but a call to it failed: no answer within 5s"
    );
}

#[test]
fn a_probe_that_gets_the_answer_of_another_is_caught() {
    let mut told = SimulatedHistory::all_online();
    let answer = CallOutcome::Text("q".to_owned());
    told.checks.record_probe(&ProbeResult {
        nth: InstanceNo(2),
        at: Duration::ZERO,
        answer,
        token: "p".into(),
        changed: false,
    });
    assert_eq!(single_violation(&told.violations(), Invariant::OwnAnswer), "the probe p got the answer `q`");
}

#[test]
fn it_is_told_how_much_was_looked_at_and_what_was_not() {
    let looks = |judge: &InvariantChecks, end: &RunEndState| -> BTreeMap<_, _> {
        judge.coverage(end).into_iter().map(|it| (it.invariant, (it.looks, it.not_checked))).collect()
    };
    let idle = SimulatedHistory::new();
    let nothing = looks(&idle.checks, &idle.end_state());
    let unseen = (0, Some("nothing to check occurred".to_owned()));
    for invariant in [Invariant::OwnAnswer, Invariant::OnlineIsCallable, Invariant::RestartBudget, Invariant::NoGap] {
        assert_eq!(nothing[&invariant], unseen, "{invariant:?}");
    }
    assert!(
        !nothing.contains_key(&Invariant::Neighbours) && !nothing.contains_key(&Invariant::Flat),
        "these limits are not set"
    );

    let mut told = SimulatedHistory::all_online();
    told.checks.limits = ScenarioLimits { neighbours: Some(2.0), flat: Some(0.02), ..ScenarioLimits::default() };
    let calls = CallFindings { answered: 12, neighbours_failed: 75, ..CallFindings::default() };
    told.checks.check_calls(told.now(), &calls, &Latency::default());
    told.checks.check_samples(&[RunSample { at_ms: 900_000, ..RunSample::default() }], Duration::from_secs(90));
    let much = looks(&told.checks, &told.end_state());
    assert_eq!(much[&Invariant::OwnAnswer], (12, None));
    assert_eq!(much[&Invariant::RestartBudget], (3, None));
    assert_eq!((&much[&Invariant::LegalTransitions], &much[&Invariant::NoGap]), (&(18, None), &(18, None)));
    let too_few = "0 calls before and 75 after the faults; 500 of each are required";
    assert_eq!(much[&Invariant::Neighbours], (75, Some(too_few.to_owned())));
    let short = "the run took 1m 30s; runs of less than 10m consist of warm-up only";
    assert_eq!(much[&Invariant::Flat], (1, Some(short.to_owned())));
}

#[test]
fn each_thing_that_is_left_is_caught() {
    let broken = SimulatedHistory::all_online().violations_at(|end| end.left.processes = 1);
    assert_eq!(single_violation(&broken, Invariant::NothingLeft), "1 process is left");
    let broken = SimulatedHistory::all_online().violations_at(|end| end.left.tasks = 2);
    assert_eq!(single_violation(&broken, Invariant::NothingLeft), "2 tasks are left");
    let all = LeftoverResources { servers: 1, tasks: 1, descriptors: 1, processes: 1 };
    assert_eq!(SimulatedHistory::all_online().violations_at(|end| end.left = all).len(), 4);
}

#[test]
fn memory_that_is_kept_is_caught() {
    let broken = SimulatedHistory::all_online().violations_at(|end| end.memory_after = 1201 << 20);
    assert!(
        single_violation(&broken, Invariant::MemoryBack).starts_with("an instance uses 409941.3 KiB after the faults"),
        "{broken:?}"
    );
    assert_eq!(SimulatedHistory::all_online().violations_at(|end| end.memory_after = 1199 << 20), []);
}

#[test]
fn memory_of_a_small_fleet_is_not_judged_by_a_multiple_but_a_leak_is_caught() {
    let small = |after: u64| RunEndState {
        memory_before: 30 << 20,
        memory_after: after << 20,
        ..SimulatedHistory::all_online().end_state()
    };
    let why = |end: &RunEndState| growth::not_checked_reason(end, &ScenarioLimits::default());
    let what = "the fleet uses 30.0 MiB: a growth to 1.2 × of that is within the 48.0 MiB that are always allowed";
    assert_eq!(why(&small(77)).as_deref(), Some(what));
    assert_eq!(SimulatedHistory::all_online().violations_at(|end| *end = small(77)), []);
    let broken = SimulatedHistory::all_online().violations_at(|end| *end = small(79));
    single_violation(&broken, Invariant::MemoryBack);
    assert_eq!(why(&small(79)), None, "the violation was found");
    assert_eq!(why(&SimulatedHistory::all_online().end_state()), None, "the fleet is large enough");
}

#[test]
fn who_is_back_too_late_is_caught() {
    let millis = Duration::from_millis;
    let late = |took| {
        check_recovery(&ScenarioLimits::default(), InstanceNo(4), millis(100), millis(took), millis(1000), millis(50))
    };
    assert_eq!(late(2050), None);
    let violation = late(2051).unwrap();
    assert_eq!((violation.invariant, violation.at_ms), (Invariant::Recovery, 2151));
    assert_eq!(violation.what, "the instance recovered 2051 ms after the fault; 2050 ms are allowed");
}

#[test]
fn who_is_late_on_a_starved_machine_is_not_counted_and_the_report_says_so() {
    let millis = Duration::from_millis;
    let judged = |foreign_cpu_percent: u8| {
        let mut told = SimulatedHistory::all_online();
        told.checks.add_checks(Invariant::Recovery, 1);
        told.checks.add_violations(check_recovery(
            &ScenarioLimits::default(),
            InstanceNo(4),
            millis(60_000),
            millis(5000),
            millis(1000),
            millis(50),
        ));
        let sample = |at: u64| RunSample {
            at_ms: at * 1000,
            // Other programs use the CPU only during the recovery.
            foreign_cpu_percent: if (55..=67).contains(&at) { foreign_cpu_percent } else { 0 },
            ..RunSample::default()
        };
        told.checks.excuse_starved(&(0..200).map(sample).collect::<Vec<_>>());
        let checked = told.checks.coverage(&told.end_state());
        let recovery = checked.into_iter().find(|checked| checked.invariant == Invariant::Recovery).unwrap();
        (told.checks.violation_count(), recovery.not_checked)
    };
    assert_eq!(judged(50), (1, None));
    let why = "1 violation is not counted: other programs used up to 97 % of the CPU time meanwhile";
    assert_eq!(judged(97), (0, Some(why.to_owned())));
}

#[test]
fn neighbours_that_are_slowed_are_caught_if_enough_of_them_were_asked() {
    let limits = ScenarioLimits { neighbours: Some(2.0), ..ScenarioLimits::default() };
    let calls = |count: u64, millis| {
        let mut latency = Latency::default();
        (0..count).for_each(|_| latency.record(Duration::from_millis(millis)));
        latency
    };
    let judged = |storm: &Latency, failed| check_neighbours(&limits, Duration::ZERO, &calls(500, 10), storm, failed);
    assert_eq!(judged(&calls(500, 19), 0), Ok(None));
    assert!(judged(&calls(499, 100), 0).is_err(), "too few calls");
    assert_eq!(judged(&calls(500, 21), 0).unwrap().unwrap().invariant, Invariant::Neighbours);
    let (quiet, storm) = (calls(500, 1), calls(500, 100));
    assert_eq!(
        check_neighbours(&ScenarioLimits::default(), Duration::ZERO, &quiet, &storm, 9),
        Ok(None),
        "these limits are not set"
    );
}

#[test]
fn neighbours_whose_calls_fail_are_slower_than_any() {
    let limits = ScenarioLimits { neighbours: Some(2.0), ..ScenarioLimits::default() };
    let mut storm = Latency::default();
    (0..1000).for_each(|_| storm.record(Duration::from_millis(10)));
    let quiet = storm.clone();
    let judged = |failed| check_neighbours(&limits, Duration::ZERO, &quiet, &storm, failed).unwrap();
    assert_eq!(judged(9), None, "one call in a hundred is ignored");
    assert!(judged(11).unwrap().what.starts_with("11 of 1011 calls to teams without a fault failed"));
    let none = check_neighbours(&limits, Duration::ZERO, &quiet, &Latency::default(), 500).unwrap();
    assert!(none.unwrap().what.starts_with("500 of 500 calls"));
}

#[test]
fn memory_and_descriptors_that_grow_with_time_are_caught() {
    let limits = ScenarioLimits { flat: Some(0.02), ..ScenarioLimits::default() };
    let run = |rss: fn(u64) -> u64, descriptors: fn(u64) -> u32| {
        let sample = |at: u64| RunSample {
            at_ms: at * 1000,
            rss: rss(at),
            descriptors: descriptors(at),
            ..RunSample::default()
        };
        check_flat(&limits, &(0..=600).map(sample).collect::<Vec<_>>(), Duration::from_secs(600)).unwrap()
    };
    // A warm-up and single peaks are no growth.
    assert_eq!(run(|at| if at < 100 { 0 } else { 1000 + at % 7 * 2 }, |at| 50 + u32::from(at == 590) * 900), []);
    // A burst at the end, whose memory the allocator returns slowly, is no growth.
    assert_eq!(run(|at| if at < 500 { 1000 } else { 1400 - (at - 500) }, |_| 50), []);
    // Waves are no growth, such as the descriptors of the connections of calls in flight.
    let waves = |at: u64| [144, 153, 142, 119, 127, 141, 173, 190, 191][((at.max(240) - 240) / 41).min(8) as usize];
    assert_eq!(run(|_| 1000, waves), []);
    let leaking = run(|at| 100_000 + at * 100, |_| 50);
    assert_eq!(leaking.len(), 1);
    assert!(leaking[0].what.contains("bytes of memory"), "{leaking:?}");
    assert!(run(|_| 1000, |at| u32::try_from(at).unwrap())[0].what.contains("descriptors"));
}
