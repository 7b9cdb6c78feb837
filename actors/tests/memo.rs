//! Memos that outlive the satellite: an instance is restored to the state that another satellite stored, also after
//! changes of the wall clock.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[allow(dead_code, reason = "other tests use the rest")]
mod samples;

use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use mcp_satellite_actors::model::era::Era;
use mcp_satellite_actors::model::ids::RunNumber;
use mcp_satellite_actors::model::memo::{StoredDelay, StoredExit, StoredMemo, StoredSleep};
use mcp_satellite_actors::model::policy::RestartPolicy;
use mcp_satellite_actors::model::spec::{InstanceSpec, ProcessLifetime};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::jitter::JitterRng;
use mcp_satellite_actors::rules::slot::SlotPhase::Down;
use mcp_satellite_actors::rules::slot::{
    DownState, RequestedState, Slot, SlotEffect, SlotInput, SlotMemo, StartReason,
};
use samples::{catalogue, incomplete, remote, server_info, spec};

/// The start of a satellite, with the times of both clocks.
struct Startup {
    now: Instant,
    wall: Timestamp,
}

impl Startup {
    fn new() -> Self {
        Self { now: Instant::now() + Duration::from_secs(100_000), wall: "2026-11-21T06:33:00Z".parse().unwrap() }
    }

    /// Returns the wall-clock time this many seconds before the start, or after it if negative.
    fn ago(&self, seconds: i64) -> Timestamp {
        self.wall - SignedDuration::from_secs(seconds)
    }

    fn memo(&self, spec: &InstanceSpec, stored: &StoredMemo, tools: bool) -> SlotMemo {
        SlotMemo::from_stored(spec, stored, tools.then(|| catalogue("read")), self.now, self.wall)
    }

    fn slot(&self, spec: &Arc<InstanceSpec>, stored: &StoredMemo, tools: bool) -> (Slot, Vec<SlotEffect>) {
        let (slot, effects) = Slot::from_memo(spec.clone(), JitterRng::new(0, "a"), &self.memo(spec, stored, tools));
        let refused = effects.iter().find(|effect| matches!(effect, SlotEffect::LogInvalidTransition { .. }));
        assert!(refused.is_none(), "a transition is not in the status table: {refused:?}");
        (slot, effects)
    }

    fn asleep(&self, seconds: i64) -> StoredMemo {
        StoredMemo { dormant: Some(StoredSleep { since: self.ago(seconds) }), ..StoredMemo::default() }
    }
}

fn failed() -> StoredMemo {
    StoredMemo { failed: Some("Process crashed 3 times".to_owned()), ..StoredMemo::default() }
}

fn requests_permit(effects: &[SlotEffect]) -> bool {
    effects.iter().any(|effect| matches!(effect, SlotEffect::RequestPermit { .. }))
}

#[test]
fn a_stored_memo_is_restored_unchanged() {
    let start = Startup::new();
    let exits = vec![StoredExit { at: start.ago(250), crash: true }, StoredExit { at: start.ago(20), crash: false }];
    let stored = StoredMemo {
        config: None,
        stopped: true,
        failed: Some("once too often".to_owned()),
        dormant: Some(StoredSleep { since: start.ago(77) }),
        delayed: Some(StoredDelay { from: start.wall, until: start.ago(-9) }),
        exits,
        quick: 2,
        restarts: 5,
        last_exit: Some("exit code 1".to_owned()),
        last_error: Some("boom".to_owned()),
        era: Some(Era::Stateless),
    };
    assert_eq!(start.memo(&spec(|_| {}), &stored, true).to_stored(start.now, start.wall), stored);
    let text = serde_json::to_string(&stored).unwrap();
    assert_eq!(serde_json::from_str::<StoredMemo>(&text).unwrap(), stored);
}

#[test]
fn a_permanent_failure_lasts_until_a_restart_command() {
    let start = Startup::new();
    for keep in [ProcessLifetime::Listed, ProcessLifetime::Lazy, ProcessLifetime::AlwaysOn] {
        let spec = spec(|config| config.lifetime = keep);
        let (mut slot, effects) = start.slot(&spec, &failed(), true);
        assert_eq!((slot.status, &slot.phase), (Status::PermanentlyFailed, &Down(DownState::Failed)), "{keep:?}");
        assert_eq!(slot.message.as_deref(), Some("Process crashed 3 times"));
        assert!(!requests_permit(&effects));
        slot.handle(start.now, SlotInput::Call);
        assert_eq!(slot.phase, Down(DownState::Failed), "a call does not clear a permanent failure");
        assert!(requests_permit(&slot.handle(start.now, SlotInput::Restart)));
    }
}

#[test]
fn a_stored_stop_takes_precedence_over_failure_and_dormancy() {
    let start = Startup::new();
    let asleep = StoredMemo { stopped: true, ..start.asleep(5) };
    for stored in [StoredMemo { stopped: true, ..failed() }, asleep] {
        for spec in
            [spec(|_| {}), spec(|config| config.lifetime = ProcessLifetime::Lazy), spec(incomplete), spec(remote)]
        {
            let (slot, effects) = start.slot(&spec, &stored, true);
            let expected = if spec.missing.is_empty() {
                (RequestedState::Stopped, Status::Offline, &Down(DownState::Stopped))
            } else {
                // The status still asks the user for the value.
                (RequestedState::Stopped, Status::AwaitingUserConfig, &Down(DownState::Unconfigured))
            };
            assert_eq!((slot.requested_state, slot.status, &slot.phase), expected);
            assert!(!requests_permit(&effects));
        }
    }
}

#[test]
fn a_dormant_instance_stays_dormant_if_its_tools_are_known() {
    let start = Startup::new();
    let slept = start.asleep(60);
    let (mut slot, effects) = start.slot(&spec(|_| {}), &slept, true);
    let since = start.now.checked_sub(Duration::from_secs(60)).unwrap();
    assert_eq!(
        (slot.status, &slot.phase),
        (Status::Online, &Down(DownState::Dormant { since, not_before: start.now }))
    );
    assert!(slot.record.catalogue.is_some() && !requests_permit(&effects));
    assert!(requests_permit(&slot.handle(start.now, SlotInput::Call)), "a call wakes it");
    for (spec, tools) in [
        (spec(|_| {}), false),
        (spec(|config| config.lifetime = ProcessLifetime::AlwaysOn), true),
        (spec(remote), true),
    ] {
        let (slot, effects) = start.slot(&spec, &slept, tools);
        assert!(!slot.is_dormant() && requests_permit(&effects), "{:?} is started", spec.lifetime);
    }
    let (slot, _) = start.slot(&spec(incomplete), &slept, true);
    assert_eq!(slot.status, Status::AwaitingUserConfig);
}

#[test]
fn an_instance_that_was_not_dormant_is_started_although_its_tools_are_known() {
    let start = Startup::new();
    let (slot, effects) = start.slot(&spec(|_| {}), &StoredMemo::default(), true);
    assert!(requests_permit(&effects) && slot.record.catalogue.is_none());
}

#[test]
fn a_restored_delay_is_never_longer_than_the_stored_one() {
    let start = Startup::new();
    let delayed = |from: i64, until: i64| StoredMemo {
        delayed: Some(StoredDelay { from: start.ago(from), until: start.ago(until) }),
        exits: vec![StoredExit { at: start.ago(from), crash: true }],
        quick: 1,
        ..StoredMemo::default()
    };
    // Seconds since the delay began, seconds since it ended, and the expected rest.
    for (from, until, left) in [(5, -10, 10), (-3600, -3615, 15), (3600, 3585, 0), (5, 0, 0)] {
        let (mut slot, effects) = start.slot(&spec(|_| {}), &delayed(from, until), false);
        if left == 0 {
            assert!(requests_permit(&effects), "{from} {until}");
            continue;
        }
        let until = start.now + Duration::from_secs(left);
        assert!(
            matches!(slot.phase, Down(DownState::Backoff { until: at, why: StartReason::Restart { attempt: 1, .. } }) if at == until)
        );
        assert_eq!(slot.next_retry_at(), Some(until));
        assert!(!requests_permit(&effects) && !requests_permit(&slot.handle(start.now, SlotInput::Call)));
        assert!(requests_permit(&slot.handle(until, SlotInput::Tick(None))));
    }
}

#[test]
fn a_call_wakes_a_dormant_instance_only_after_its_restored_delay() {
    let start = Startup::new();
    let delayed = Some(StoredDelay { from: start.wall, until: start.ago(-5) });
    let (mut slot, _) = start.slot(&spec(|_| {}), &StoredMemo { delayed, ..start.asleep(1) }, true);
    assert!(!requests_permit(&slot.handle(start.now, SlotInput::Call)));
    assert!(requests_permit(&slot.handle(start.now + Duration::from_secs(5), SlotInput::Tick(None))));
}

#[test]
fn restored_exits_count_within_their_window_and_future_ones_as_now() {
    let start = Startup::new();
    let policy = RestartPolicy::default();
    let count = |seconds: &[i64], later: u64| {
        let exits = seconds.iter().map(|ago| StoredExit { at: start.ago(*ago), crash: true }).collect();
        let (slot, _) = start.slot(&spec(|_| {}), &StoredMemo { exits, ..StoredMemo::default() }, false);
        slot.record.history.exits_in_window(&policy, start.now + Duration::from_secs(later))
    };
    assert_eq!(count(&[299, 10], 0), 2);
    assert_eq!(count(&[299, 10], 2), 1, "the window continues over the restart");
    assert_eq!(count(&[301, 86_400], 0), 0);
    assert_eq!(count(&[-86_400, -10], 299), 2, "the clock was set back: the exits count as now");
    assert_eq!(count(&[-86_400, -10], 300), 0);
    assert_eq!(count(&[4_000_000_000], 0), 0, "an exit before the range of the clock");
}

#[test]
fn only_changes_of_the_stored_state_require_a_save() {
    let start = Startup::new();
    let (mut slot, _) = Slot::new(spec(|_| {}), JitterRng::new(0, "a"));
    let nothing = SlotMemo::default();
    assert!(slot.memo().has_same_stored_state(&nothing));
    slot.handle(start.now, SlotInput::Stop);
    let stopped = slot.memo();
    assert!(!stopped.has_same_stored_state(&nothing));
    slot.handle(start.now, SlotInput::Stop);
    assert!(slot.memo().has_same_stored_state(&stopped));
    slot.handle(start.now, SlotInput::Start);
    assert!(!slot.memo().has_same_stored_state(&stopped) && slot.memo().has_same_stored_state(&nothing));
}

#[test]
fn only_an_era_other_than_the_default_is_stored() {
    let start = Startup::new();
    for (remembered, found, written) in [
        (None, Era::Sessions, None),
        (None, Era::Stateless, Some(Era::Stateless)),
        (Some(Era::Stateless), Era::Sessions, None),
    ] {
        let stored = StoredMemo { era: remembered, ..StoredMemo::default() };
        let (mut slot, _) = start.slot(&spec(|_| {}), &stored, false);
        assert_eq!(slot.record.era, remembered);
        let (run, other) = (RunNumber(1), RunNumber(2));
        slot.handle(start.now, SlotInput::Granted(run));
        // The era is also known from a refusal of a run that ended before its handshake.
        slot.handle(start.now, SlotInput::EraChanged(other, found.other()));
        assert_eq!(slot.record.era, remembered, "a message about another run");
        slot.handle(start.now, SlotInput::EraChanged(run, found));
        assert_eq!(slot.memo().to_stored(start.now, start.wall).era, written);
        let mut server = server_info();
        Arc::get_mut(&mut server).unwrap().era = found;
        slot.handle(start.now, SlotInput::Initialized(run, server));
        assert_eq!(slot.memo().to_stored(start.now, start.wall).era, written);
    }
}
