//! Bookkeeping of a run from its events: time until each instance was online, and recovery time after each fault.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use mcp_satellite_actors::model::event::Event;
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::status::Status;

use super::checks;
use super::fleet::LoadFleet;
use super::measure::Latency;
use super::plan;
use super::scenario::{FleetShape, ScenarioLimits};
use super::types::{FaultKind, FaultOutcomes, InstanceNo, InvariantViolation, TeamNo};

// Latest delay between an event and its delivery to the sink.
const EVENT_DELAY_MAX: Duration = Duration::from_secs(10);

pub(crate) struct RecoveryLog {
    records: Vec<InstanceRecord>,
    shape: FleetShape,
    // Teams that spent their budget. Their starts run one at a time, so no recovery time is guaranteed for them.
    throttled: BTreeSet<TeamNo>,
    limits: ScenarioLimits,
    delays: Vec<Duration>,
    // Longest uptime of a run that still lengthens the next restart delay.
    quick_uptime: Duration,
    // Longest handshake of a healthy server.
    handshake: Duration,
    online: usize,
    // Time at which the last instance was online for the first time.
    pub all_online: Option<Duration>,
    pub times_to_online: Latency,
    pub recoveries: BTreeMap<FaultKind, Latency>,
    // Outcomes without a recovery time; the others are in `recoveries`.
    outcomes: BTreeMap<FaultKind, FaultOutcomes>,
    // Number of recoveries that were checked against a time limit.
    pub checked_recoveries: u64,
    pub permanently_failed: u64,
}

// Kept small: the memory of this process counts as memory of the fleet.
#[derive(Debug, Clone, Default)]
struct InstanceRecord {
    first_event: Option<Duration>,
    status: Option<Status>,
    was_online: bool,
    // Consecutive runs that were quick to end.
    quick_exits: usize,
    faults: Vec<OpenFault>,
}

#[derive(Debug, Clone, Copy)]
struct OpenFault {
    serial: u32,
    kind: FaultKind,
    from: Duration,
    healed_at: Option<Duration>,
    // The instance has not been online all the time since the fault, or was not online when the fault came.
    went_offline: bool,
    // The instance was not online when the fault came, so an earlier delay may still be pending.
    was_offline: bool,
    // Another fault or the team's budget may lengthen the recovery.
    is_disturbed: bool,
    // Restart or reconnect delay of the policy.
    delay: Duration,
}

impl OpenFault {
    // Since the healing if that came before `at`, else since the fault.
    fn recovery_time(&self, at: Duration) -> Duration {
        at.saturating_sub(self.healed_at.filter(|healed| *healed <= at).unwrap_or(self.from))
    }
}

impl RecoveryLog {
    pub(crate) fn new(shape: FleetShape, policy: &Policy, limits: &ScenarioLimits, handshake: Duration) -> Self {
        Self {
            records: vec![InstanceRecord::default(); shape.instances],
            shape,
            throttled: BTreeSet::new(),
            limits: limits.clone(),
            delays: policy.restart.delays.clone(),
            quick_uptime: policy.restart.quick,
            handshake,
            online: 0,
            all_online: None,
            times_to_online: Latency::default(),
            recoveries: BTreeMap::new(),
            outcomes: BTreeMap::new(),
            checked_recoveries: 0,
            permanently_failed: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.records.len()
    }

    // Instances that have been online at least once.
    pub(crate) fn online_count(&self) -> usize {
        self.online
    }

    // The caller leaves out instances that failed permanently, by their present status: events are delivered late.
    pub(crate) fn record_fault(&mut self, at: Duration, nth: InstanceNo, serial: u32, kind: FaultKind) {
        let Some(card) = self.records.get_mut(nth.0 as usize) else { return };
        if !kind.needs_recovery() {
            return;
        }
        // A team supervisor that panics repeatedly is restarted with delays, as a server is.
        let delay = if kind == FaultKind::TeamPanic { plan::longest_team_delay() } else { Duration::ZERO };
        let left = card.status != Some(Status::Online);
        // Close faults that are over and never changed the status: they did no harm, and a later recovery is not
        // theirs.
        let is_past = |fault: &mut OpenFault| {
            let ended_at = fault.healed_at.unwrap_or(fault.from);
            fault.kind.is_withstood() && !fault.went_offline && ended_at + EVENT_DELAY_MAX < at
        };
        for fault in card.faults.extract_if(.., is_past) {
            self.outcomes.entry(fault.kind).or_default().unharmed += 1;
        }
        let is_disturbed = self.throttled.contains(&self.shape.team_of(nth));
        card.faults.iter_mut().for_each(|fault| fault.is_disturbed = true);
        card.faults.push(OpenFault {
            serial,
            kind,
            from: at,
            healed_at: None,
            went_offline: left,
            was_offline: left,
            is_disturbed,
            delay,
        });
    }

    /// Removes a fault that could not be injected.
    pub(crate) fn remove_fault(&mut self, nth: InstanceNo, serial: u32) {
        if let Some(card) = self.records.get_mut(nth.0 as usize) {
            card.faults.retain(|fault| fault.serial != serial);
        }
    }

    /// Notes the healing of a fault. A victim that is already online has recovered before.
    pub(crate) fn record_healing(&mut self, at: Duration, nth: InstanceNo, serial: u32) {
        let card = self.records.get_mut(nth.0 as usize);
        if let Some(fault) = card.and_then(|card| card.faults.iter_mut().find(|fault| fault.serial == serial)) {
            fault.healed_at = Some(at);
        }
    }

    pub(crate) fn instances_with_faults(&self) -> impl Iterator<Item = InstanceNo> {
        (0..).zip(&self.records).filter(|(_, card)| !card.faults.is_empty()).map(|(nth, _)| InstanceNo(nth))
    }

    /// Closes the faults of an instance that is online and answered a call, after all earlier events were recorded. A
    /// fault during which the instance stayed online did no harm. Returns the kinds of faults that no server can
    /// withstand but that left no trace: they were not injected.
    pub(crate) fn close_recovered_faults(&mut self, nth: InstanceNo) -> Vec<FaultKind> {
        let Some(card) = self.records.get_mut(nth.0 as usize) else { return Vec::new() };
        let mut without_effect = Vec::new();
        for fault in card.faults.drain(..) {
            let outcome = self.outcomes.entry(fault.kind).or_default();
            match (fault.went_offline, fault.kind.is_withstood()) {
                // The event with the recovery time was dropped.
                (true, _) => outcome.recovered += 1,
                (false, true) => outcome.unharmed += 1,
                (false, false) => without_effect.push(fault.kind),
            }
        }
        without_effect
    }

    /// Closes the faults of an instance that a person restarts. Its event `PermanentlyFailed` may have been dropped.
    pub(crate) fn close_given_up_faults(&mut self, nth: InstanceNo) {
        let Some(card) = self.records.get_mut(nth.0 as usize) else { return };
        for fault in card.faults.drain(..) {
            self.outcomes.entry(fault.kind).or_default().failed_permanently += 1;
        }
    }

    // A victim that has not recovered yet counts as missing.
    pub(crate) fn take_outcomes(&mut self) -> BTreeMap<FaultKind, FaultOutcomes> {
        let mut outcomes = std::mem::take(&mut self.outcomes);
        for (kind, latency) in &self.recoveries {
            outcomes.entry(*kind).or_default().recovered += latency.len();
        }
        for fault in self.records.iter().flat_map(|card| &card.faults) {
            outcomes.entry(fault.kind).or_default().not_recovered += 1;
        }
        outcomes
    }

    pub(crate) fn record_team_event(&mut self, event: &Event) {
        match event {
            Event::TeamThrottled { team_id, .. } => {
                let Some(team) = LoadFleet::team_no(team_id) else { return };
                self.throttled.insert(team);
                for nth in self.shape.members(team) {
                    let faults = self.records.get_mut(nth.0 as usize).into_iter().flat_map(|card| &mut card.faults);
                    faults.for_each(|fault| fault.is_disturbed = true);
                }
            }
            Event::TeamUnthrottled { team_id, .. } => {
                if let Some(team) = LoadFleet::team_no(team_id) {
                    self.throttled.remove(&team);
                }
            }
            _ => {}
        }
    }

    pub(crate) fn record_event(&mut self, at: Duration, nth: InstanceNo, event: &Event) -> Vec<InvariantViolation> {
        let all = self.records.len();
        let Some(card) = self.records.get_mut(nth.0 as usize) else { return Vec::new() };
        card.first_event.get_or_insert(at);
        let is_back = match event {
            Event::StatusChanged { status, .. } => {
                card.status = Some(*status);
                if *status == Status::Online && !card.was_online {
                    card.was_online = true;
                    self.online += 1;
                    self.times_to_online.record(at.saturating_sub(card.first_event.unwrap_or(at)));
                    if self.online == all {
                        self.all_online = Some(at);
                    }
                }
                for fault in &mut card.faults {
                    // Events are delivered late: this status precedes the fault.
                    if at < fault.from {
                        fault.was_offline = *status != Status::Online;
                        fault.went_offline = fault.was_offline;
                    } else {
                        fault.went_offline |= *status != Status::Online;
                    }
                }
                *status == Status::Online
            }
            Event::Crashed { uptime_seconds, will_restart: true, .. }
            | Event::Exited { uptime_seconds, will_restart: true, .. } => {
                // The event contains whole seconds only. At the limit the longer delay is allowed.
                card.quick_exits = if *uptime_seconds > self.quick_uptime.as_secs() { 0 } else { card.quick_exits + 1 };
                let delay = match card.quick_exits {
                    0 => Duration::ZERO,
                    quick => self.delays.get(quick - 1).or(self.delays.last()).copied().unwrap_or_default(),
                };
                card.faults.iter_mut().for_each(|fault| fault.delay = fault.delay.max(delay));
                false
            }
            Event::Reconnecting { next_retry_ms, .. } => {
                let again = Duration::from_millis(*next_retry_ms);
                card.faults.iter_mut().for_each(|fault| fault.delay += again);
                false
            }
            Event::PermanentlyFailed { .. } => {
                self.permanently_failed += 1;
                for fault in card.faults.extract_if(.., |fault| fault.from <= at) {
                    self.outcomes.entry(fault.kind).or_default().failed_permanently += 1;
                }
                false
            }
            Event::Reconnected { .. } | Event::Respawned { .. } | Event::Restarted { .. } => {
                let is_online = card.status == Some(Status::Online);
                card.faults
                    .iter_mut()
                    .filter(|fault| fault.from <= at)
                    .for_each(|fault| fault.went_offline |= is_online);
                is_online
            }
            _ => false,
        };
        if !is_back {
            return Vec::new();
        }
        let mut late = Vec::new();
        for fault in card.faults.extract_if(.., |fault| fault.went_offline && fault.from <= at) {
            let took = fault.recovery_time(at);
            self.recoveries.entry(fault.kind).or_default().record(took);
            let is_guaranteed = !fault.is_disturbed
                && !fault.was_offline
                && matches!(
                    fault.kind,
                    FaultKind::Crash | FaultKind::Exit0 | FaultKind::WorkerPanic | FaultKind::TeamPanic
                );
            if is_guaranteed {
                self.checked_recoveries += 1;
                late.extend(checks::check_recovery(
                    &self.limits,
                    nth,
                    at.saturating_sub(took),
                    took,
                    fault.delay,
                    self.handshake,
                ));
            }
        }
        if card.faults.is_empty() {
            // Free the capacity: the memory of this process is measured.
            card.faults = Vec::new();
        }
        late
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use mcp_satellite_actors::model::event::EventSubject;

    use super::*;

    #[test]
    fn a_fault_between_a_restart_and_its_event_is_counted() {
        let scenario = crate::scenario::load("flap").unwrap();
        let mut log = RecoveryLog::new(scenario.fleet, &scenario.policy, &scenario.limits, Duration::ZERO);
        let nth = InstanceNo(0);
        let of = Arc::new(EventSubject {
            installation_id: "s-0".into(),
            team_id: "team-0".into(),
            user_id: "u0".into(),
            process_id: "s-0".into(),
            server_slug: "s".into(),
        });
        let status_changed = |log: &mut RecoveryLog, at, status| {
            let event = Event::StatusChanged { of: Arc::clone(&of), status, status_message: None, remedy: None };
            assert_eq!(log.record_event(Duration::from_millis(at), nth, &event), []);
        };
        status_changed(&mut log, 1, Status::PermanentlyFailed);
        log.record_fault(Duration::from_millis(3), nth, 1, FaultKind::Crash);
        // The restart preceded the fault, and its event is delivered after it.
        status_changed(&mut log, 2, Status::Online);
        status_changed(&mut log, 4, Status::Connecting);
        status_changed(&mut log, 5, Status::Online);
        assert_eq!(log.take_outcomes()[&FaultKind::Crash].recovered, 1);
    }
}
