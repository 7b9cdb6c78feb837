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
        let mut history = Self::new();
        for nth in 0..3 {
            history.start(nth);
            for status in UP {
                history.status(nth, status);
            }
        }
        history
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
        self.checks.record_start(InstanceNo(nth), at);
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

fn single_violation(violations: &[(Invariant, String)], invariant: Invariant) -> &str {
    let [(of, what)] = violations else { panic!("expected exactly one violation: {violations:#?}") };
    assert_eq!(*of, invariant);
    what
}

#[test]
fn a_correct_run_has_no_violations() {
    let mut history = SimulatedHistory::all_online();
    history.restart(0);
    let answer = CallOutcome::Text("x".to_owned());
    history.checks.record_probe(&ProbeResult {
        nth: InstanceNo(1),
        at: history.now(),
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
    history.checks.add_responses(answers);
    history.seq += 10;
    history.dropped(history.seq - 10, history.seq - 1);
    history.status(2, Offline);
    assert_eq!(history.checks.violation_count(), 0);
    assert_eq!(history.violations(), []);
}

#[test]
fn a_response_to_another_call_is_detected() {
    let mut history = SimulatedHistory::all_online();
    let mut answers = ResponseCheck::new();
    answers.record_call("a");
    answers.record_call("b");
    answers.record_response("a", "b");
    answers.record_response("b", "b");
    history.checks.add_responses(answers);
    assert_eq!(single_violation(&history.violations(), Invariant::OwnAnswer), "the call a got the answer `b`");
}

#[test]
fn repeated_and_missing_responses_are_detected() {
    let mut history = SimulatedHistory::all_online();
    let mut answers = ResponseCheck::new();
    answers.record_call("a");
    answers.record_response("a", "a");
    answers.record_error("a");
    history.checks.add_responses(answers);
    assert_eq!(single_violation(&history.violations(), Invariant::OwnAnswer), "the call a was answered more than once");

    let mut history = SimulatedHistory::all_online();
    let mut answers = ResponseCheck::new();
    answers.record_call("a");
    history.checks.add_responses(answers);
    assert_eq!(single_violation(&history.violations(), Invariant::OwnAnswer), "the call a was never answered");
}

#[test]
fn a_missing_event_is_detected_unless_reported_as_dropped() {
    let mut history = SimulatedHistory::all_online();
    history.seq += 1;
    history.restart(0);
    let missing = history.violations();
    assert_eq!(single_violation(&missing, Invariant::NoGap), "event 19 is missing, and no event reports it as dropped");

    // Drop events right after the gap, later, and in two parts.
    let mut history = SimulatedHistory::all_online();
    history.seq = 24;
    history.dropped(19, 23);
    history.restart(0);
    history.seq += 10;
    history.restart(0);
    let gap = history.seq - 14;
    history.dropped(gap, gap + 3);
    history.dropped(gap + 4, gap + 9);
    assert_eq!(history.violations(), []);
}

#[test]
fn the_unreported_part_of_a_gap_is_detected() {
    let mut history = SimulatedHistory::all_online();
    history.seq = 34;
    history.dropped(19, 24);
    history.dropped(27, 33);
    assert_eq!(
        single_violation(&history.violations(), Invariant::NoGap),
        "events 25 to 26 (2) are missing, and no event reports them as dropped"
    );
}

#[test]
fn a_repeated_event_number_is_detected() {
    let mut history = SimulatedHistory::all_online();
    history.seq -= 1;
    history.status(0, Online);
    assert_eq!(single_violation(&history.violations(), Invariant::NoGap), "event 18 came after event 18");
}

#[test]
fn events_lost_at_the_end_are_detected() {
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
fn a_missing_first_event_is_detected() {
    let mut history = SimulatedHistory::new();
    history.seq = 3;
    history.start(0);
    history.status(0, Provisioning);
    assert_eq!(
        single_violation(&history.violations(), Invariant::NoGap),
        "events 1 to 2 (2) are missing, and no event reports them as dropped"
    );
}

#[test]
fn a_drop_event_for_delivered_or_future_events_is_detected() {
    let mut history = SimulatedHistory::all_online();
    history.seq = 24;
    history.dropped(17, 23);
    let what = "events 17 to 23 are reported as dropped, but 2 of them were delivered or reported before";
    assert_eq!(single_violation(&history.violations(), Invariant::NoGap), what);

    let mut history = SimulatedHistory::all_online();
    history.seq = 20;
    history.dropped(19, u64::MAX);
    history.seq = 30;
    history.status(0, Offline);
    let violations = history.violations();
    assert_eq!(violations.len(), 2, "{violations:#?}");
    assert!(violations[0].1.ends_with("which is not a range of earlier events"), "{violations:#?}");
    assert!(violations[1].1.starts_with("events 21 to 29 (9) are missing"), "{violations:#?}");
}

#[test]
fn a_skipped_status_is_detected() {
    let mut history = SimulatedHistory::all_online();
    for status in [Connecting, SyncingTools, Online] {
        history.status(1, status);
    }
    let violations = history.violations();
    assert_eq!(
        single_violation(&violations, Invariant::LegalTransitions),
        "the status changed from connecting to syncing_tools, which is not a legal transition"
    );
}

#[test]
fn an_illegal_first_status_is_detected() {
    let mut history = SimulatedHistory::new();
    history.status(0, AwaitingUserConfig);
    history.status(1, Connecting);
    assert_eq!(
        single_violation(&history.violations(), Invariant::LegalTransitions),
        "the first reported status is connecting"
    );
}

#[test]
fn statuses_reported_out_of_order_are_detected() {
    let mut history = SimulatedHistory::all_online();
    history.advance(1);
    history.status(0, Offline);
    history.now_ms -= 500;
    history.status(0, Connecting);
    let violations = history.violations();
    assert_eq!(
        single_violation(&violations, Invariant::LegalTransitions),
        "connecting was reported after offline and has a timestamp 499 ms before it"
    );
}

#[test]
fn a_team_panic_permits_one_repeated_status_of_that_team_only() {
    let mut history = SimulatedHistory::all_online();
    history.status(0, Offline);
    history.status(1, Offline);
    history.checks.record_reset(BudgetReset::Team(TeamNo(0)), history.now());
    history.status(0, Online);
    history.status(1, Online);
    history.status(0, Offline);
    history.status(0, Online);
    let violations = history.violations();
    assert_eq!(
        violations.len(),
        2,
        "expected violations of the other team and of the second repetition: {violations:#?}"
    );
}

#[test]
fn a_gap_suspends_the_check_of_the_next_transition() {
    let mut history = SimulatedHistory::all_online();
    history.status(0, Offline);
    history.seq += 1;
    history.dropped(history.seq - 1, history.seq - 1);
    history.status(0, Online);
    assert_eq!(history.violations(), []);
}

#[test]
fn the_transition_table_equals_that_of_the_runtime() {
    for (from, legal) in transitions::LEGAL {
        let by_cause = |to: &Status| StatusCause::ALL.iter().any(|&cause| next(from, cause) == Some(*to));
        let of_the_runtime: Vec<_> = Status::ALL.iter().copied().filter(by_cause).collect();
        assert_eq!(legal, of_the_runtime, "from {from}");
    }
    assert!(
        transitions::LEGAL.iter().map(|(from, _)| *from).eq(Status::ALL.iter().copied()),
        "every status must have a row"
    );
}

#[test]
fn a_restart_beyond_the_budget_is_detected() {
    let mut history = SimulatedHistory::all_online();
    history.restart(0);
    history.restart(0);
    history.advance(10);
    history.status(1, Online);
    assert_eq!(history.checks.violation_count(), 0, "three starts follow at most two crashes");
    history.restart(0);
    history.advance(11);
    history.status(1, Online);
    assert_eq!(history.checks.violation_count(), 1, "the violation must be detected during the run");
    assert_eq!(
        single_violation(&history.violations(), Invariant::RestartBudget),
        "start number 4 within 5m; 3 are allowed"
    );
}

#[test]
fn restarts_outside_the_window_do_not_count() {
    let mut history = SimulatedHistory::all_online();
    for _ in 0..10 {
        history.advance(151);
        history.restart(0);
    }
    assert_eq!(history.violations(), []);
}

#[test]
fn a_manual_restart_resets_the_budget_of_that_instance_only() {
    let run = |restarted: u32| {
        let mut history = SimulatedHistory::all_online();
        (0..2).for_each(|_| history.restart(0));
        history.checks.record_reset(BudgetReset::Instance(InstanceNo(restarted)), history.now());
        (0..3).for_each(|_| history.restart(0));
        history.violations()
    };
    assert_eq!(run(0), []);
    assert_eq!(run(1).len(), 3);
}

#[test]
fn starts_after_dormancy_a_stop_or_a_team_panic_do_not_count() {
    let run = |excuse: &dyn Fn(&mut SimulatedHistory)| {
        let mut history = SimulatedHistory::all_online();
        (0..2).for_each(|_| history.restart(0));
        excuse(&mut history);
        history.restart(0);
        history.violations().len()
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
    assert_eq!(run(&|history| history.record(stopped.clone())), 0);
    let last_activity_at = Timestamp::UNIX_EPOCH;
    let dormant = Event::Dormant { of, pid: None, idle_duration_seconds: 1, last_activity_at };
    assert_eq!(run(&|history| history.record(dormant.clone())), 0);
    assert_eq!(run(&|history| history.checks.record_reset(BudgetReset::Team(TeamNo(0)), history.now())), 0);
    assert_eq!(run(&|history| history.checks.record_reset(BudgetReset::Team(TeamNo(1)), history.now())), 1);
}

#[test]
fn a_failed_probe_is_detected_unless_the_status_changed() {
    let mut history = SimulatedHistory::all_online();
    let failed = CallOutcome::Failed { fate: Some("timed_out".to_owned()), why: "no answer within 5s".to_owned() };
    let probe = |answer: &CallOutcome, moved| ProbeResult {
        nth: InstanceNo(2),
        at: Duration::ZERO,
        answer: answer.clone(),
        token: "p".into(),
        changed: moved,
    };
    history.checks.record_probe(&probe(&failed, true));
    history.checks.record_probe(&probe(&CallOutcome::ServerError("no such tool".to_owned()), false));
    assert_eq!(history.checks.violation_count(), 0);
    history.checks.record_probe(&probe(&failed, false));
    let violations = history.violations();
    assert_eq!(
        single_violation(&violations, Invariant::OnlineIsCallable),
        "the instance is shown as online, but a call to it failed: no answer within 5s"
    );
}

#[test]
fn a_probe_with_the_response_to_another_is_detected() {
    let mut history = SimulatedHistory::all_online();
    let answer = CallOutcome::Text("q".to_owned());
    history.checks.record_probe(&ProbeResult {
        nth: InstanceNo(2),
        at: Duration::ZERO,
        answer,
        token: "p".into(),
        changed: false,
    });
    assert_eq!(single_violation(&history.violations(), Invariant::OwnAnswer), "the probe p got the answer `q`");
}

#[test]
fn coverage_counts_checks_and_states_why_others_were_not_made() {
    let coverage = |judge: &InvariantChecks, end: &RunEndState| -> BTreeMap<_, _> {
        judge.coverage(end).into_iter().map(|it| (it.invariant, (it.checks, it.not_checked))).collect()
    };
    let idle = SimulatedHistory::new();
    let nothing = coverage(&idle.checks, &idle.end_state());
    let unseen = (0, Some("nothing to check occurred".to_owned()));
    for invariant in [Invariant::OwnAnswer, Invariant::OnlineIsCallable, Invariant::RestartBudget, Invariant::NoGap] {
        assert_eq!(nothing[&invariant], unseen, "{invariant:?}");
    }
    assert!(
        !nothing.contains_key(&Invariant::Neighbours) && !nothing.contains_key(&Invariant::Flat),
        "these limits are not set"
    );

    let mut history = SimulatedHistory::all_online();
    history.checks.limits = ScenarioLimits { neighbours: Some(2.0), flat: Some(0.02), ..ScenarioLimits::default() };
    let calls = CallFindings { answered: 12, neighbours_failed: 75, ..CallFindings::default() };
    history.checks.check_calls(history.now(), &calls, &Latency::default());
    history.checks.check_samples(&[RunSample { at_ms: 900_000, ..RunSample::default() }], Duration::from_secs(90));
    let much = coverage(&history.checks, &history.end_state());
    assert_eq!(much[&Invariant::OwnAnswer], (12, None));
    assert_eq!(much[&Invariant::RestartBudget], (3, None));
    assert_eq!((&much[&Invariant::LegalTransitions], &much[&Invariant::NoGap]), (&(18, None), &(18, None)));
    let too_few = "0 calls before and 75 after the faults; 500 of each are required";
    assert_eq!(much[&Invariant::Neighbours], (75, Some(too_few.to_owned())));
    let short = "the run took 1m 30s; runs of less than 10m consist of warm-up only";
    assert_eq!(much[&Invariant::Flat], (1, Some(short.to_owned())));
}

#[test]
fn every_kind_of_leftover_is_detected() {
    let violations = SimulatedHistory::all_online().violations_at(|end| end.left.processes = 1);
    assert_eq!(single_violation(&violations, Invariant::NothingLeft), "1 process is left");
    let violations = SimulatedHistory::all_online().violations_at(|end| end.left.tasks = 2);
    assert_eq!(single_violation(&violations, Invariant::NothingLeft), "2 tasks are left");
    let all = LeftoverResources { servers: 1, tasks: 1, descriptors: 1, processes: 1 };
    assert_eq!(SimulatedHistory::all_online().violations_at(|end| end.left = all).len(), 4);
}

#[test]
fn memory_growth_above_the_limit_is_detected() {
    let violations = SimulatedHistory::all_online().violations_at(|end| end.memory_after = 1201 << 20);
    assert!(
        single_violation(&violations, Invariant::MemoryBack)
            .starts_with("an instance uses 409941.3 KiB after the faults"),
        "{violations:?}"
    );
    assert_eq!(SimulatedHistory::all_online().violations_at(|end| end.memory_after = 1199 << 20), []);
}

#[test]
fn a_small_fleet_may_grow_by_a_fixed_amount_of_memory() {
    let small = |after: u64| RunEndState {
        memory_before: 30 << 20,
        memory_after: after << 20,
        ..SimulatedHistory::all_online().end_state()
    };
    let why = |end: &RunEndState| growth::not_checked_reason(end, &ScenarioLimits::default());
    let what = "the fleet uses 30.0 MiB: a growth to 1.2 × of that is within the 48.0 MiB that are always allowed";
    assert_eq!(why(&small(77)).as_deref(), Some(what));
    assert_eq!(SimulatedHistory::all_online().violations_at(|end| *end = small(77)), []);
    let violations = SimulatedHistory::all_online().violations_at(|end| *end = small(79));
    single_violation(&violations, Invariant::MemoryBack);
    assert_eq!(why(&small(79)), None, "the violation was found");
    assert_eq!(why(&SimulatedHistory::all_online().end_state()), None, "the fleet is large enough");
}

#[test]
fn a_late_recovery_is_detected() {
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
fn a_late_recovery_on_a_starved_machine_is_excused_and_reported() {
    let millis = Duration::from_millis;
    let judged = |foreign_cpu_percent: u8| {
        let mut history = SimulatedHistory::all_online();
        history.checks.add_checks(Invariant::Recovery, 1);
        history.checks.add_violations(check_recovery(
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
        history.checks.excuse_starved(&(0..200).map(sample).collect::<Vec<_>>());
        let checked = history.checks.coverage(&history.end_state());
        let recovery = checked.into_iter().find(|checked| checked.invariant == Invariant::Recovery).unwrap();
        (history.checks.violation_count(), recovery.not_checked)
    };
    assert_eq!(judged(50), (1, None));
    let why = "1 violation is not counted: other programs used up to 97 % of the CPU time meanwhile";
    assert_eq!(judged(97), (0, Some(why.to_owned())));
}

#[test]
fn slow_neighbours_are_detected_if_there_are_enough_calls() {
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
fn failed_calls_count_as_slowest_calls_of_neighbours() {
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
fn growth_of_memory_and_descriptors_over_time_is_detected() {
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
