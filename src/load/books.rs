//! What is counted from events: how long everybody took to be online, and how long to be there again after a fault.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use mcp_satellite_actors::model::event::Event;
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::status::Status;

use super::checks;
use super::fleet::Fleet;
use super::measure::Latency;
use super::plan;
use super::scenario::{FleetShape, Limits};
use super::types::{FaultKind, Nth, Outcome, TeamNo, Violation};

/// What events tell is told by then.
const UNNOTICED: Duration = Duration::from_secs(10);

/// What is known of each instance, and of all together.
pub(crate) struct Books {
    cards: Vec<Card>,
    shape: FleetShape,
    /// Teams that have spent their budget: their starts go one at a time, and how long that takes is not promised.
    throttled: BTreeSet<TeamNo>,
    limits: Limits,
    delays: Vec<Duration>,
    /// A run that was not longer than this makes the next delay longer.
    quick: Duration,
    /// The longest handshake of a server that is well.
    handshake: Duration,
    online: usize,
    /// When the last of them was online for the first time.
    pub(crate) all_online: Option<Duration>,
    pub(crate) times_to_online: Latency,
    pub(crate) recoveries: BTreeMap<FaultKind, Latency>,
    /// What became of those who were to recover, beside [`Self::recoveries`].
    outcomes: BTreeMap<FaultKind, Outcome>,
    /// How many recoveries there were for which a time is promised.
    pub(crate) promised: u64,
    pub(crate) permanently_failed: u64,
}

/// Of one instance. There are as many as instances, so it is small.
#[derive(Debug, Clone, Default)]
struct Card {
    born: Option<Duration>,
    status: Option<Status>,
    was_online: bool,
    /// Runs that were quick to end, one after the other.
    quick: usize,
    /// What it has not recovered from.
    faults: Vec<Fault>,
}

/// A fault that somebody has not recovered from.
#[derive(Debug, Clone, Copy)]
struct Fault {
    serial: u32,
    kind: FaultKind,
    from: Duration,
    healed: Option<Duration>,
    /// Whether it has been anything else than online since, or was when it came.
    left: bool,
    /// Whether it was: what it had to wait for then it may still have to wait for.
    found_ill: bool,
    /// Whether it may have to wait for something else as well: another fault, or its team's budget.
    is_disturbed: bool,
    /// What its policy makes it wait for.
    delay: Duration,
}

impl Fault {
    /// From its healing on, if that was before it.
    fn took(&self, at: Duration) -> Duration {
        at.saturating_sub(self.healed.filter(|healed| *healed <= at).unwrap_or(self.from))
    }
}

impl Books {
    pub(crate) fn new(shape: FleetShape, policy: &Policy, limits: &Limits, handshake: Duration) -> Self {
        Self {
            cards: vec![Card::default(); shape.instances],
            shape,
            throttled: BTreeSet::new(),
            limits: limits.clone(),
            delays: policy.restart.delays.clone(),
            quick: policy.restart.quick,
            handshake,
            online: 0,
            all_online: None,
            times_to_online: Latency::default(),
            recoveries: BTreeMap::new(),
            outcomes: BTreeMap::new(),
            promised: 0,
            permanently_failed: 0,
        }
    }

    /// How many instances there are.
    pub(crate) fn len(&self) -> usize {
        self.cards.len()
    }

    /// How many have been online.
    pub(crate) fn online(&self) -> usize {
        self.online
    }

    /// A fault befalls it, which is waited for from now on. Whoever was given up waits for a person and for nothing else.
    pub(crate) fn hurt(&mut self, at: Duration, nth: Nth, serial: u32, kind: FaultKind) {
        let Some(card) = self.cards.get_mut(nth.0 as usize) else { return };
        if !kind.recovers() || card.status == Some(Status::PermanentlyFailed) {
            return;
        }
        // A supervisor that dies again waits before it is there again, as a server does.
        let delay = if kind == FaultKind::TeamPanic { plan::longest_delay_of_a_team() } else { Duration::ZERO };
        let left = card.status != Some(Status::Online);
        // What has been over for a while and was never noticed has harmed nobody, and is not recovered from by what comes now.
        let is_past = |fault: &mut Fault| {
            let over = fault.healed.unwrap_or(fault.from);
            fault.kind.is_withstood() && !fault.left && over + UNNOTICED < at
        };
        for fault in card.faults.extract_if(.., is_past) {
            self.outcomes.entry(fault.kind).or_default().unharmed += 1;
        }
        let is_disturbed = self.throttled.contains(&self.shape.team_of(nth));
        card.faults.iter_mut().for_each(|fault| fault.is_disturbed = true);
        card.faults.push(Fault { serial, kind, from: at, healed: None, left, found_ill: left, is_disturbed, delay });
    }

    /// The fault could not be brought about.
    pub(crate) fn missed(&mut self, nth: Nth, serial: u32) {
        if let Some(card) = self.cards.get_mut(nth.0 as usize) {
            card.faults.retain(|fault| fault.serial != serial);
        }
    }

    /// It is taken back now. One who is there again by then has recovered before.
    pub(crate) fn healed(&mut self, at: Duration, nth: Nth, serial: u32) {
        let card = self.cards.get_mut(nth.0 as usize);
        if let Some(fault) = card.and_then(|card| card.faults.iter_mut().find(|fault| fault.serial == serial)) {
            fault.healed = Some(at);
        }
    }

    /// Those who have not recovered, each once.
    pub(crate) fn ill(&self) -> impl Iterator<Item = Nth> {
        (0..).zip(&self.cards).filter(|(_, card)| !card.faults.is_empty()).map(|(nth, _)| Nth(nth))
    }

    /// It is online and was called with success, and everything that was told before is known: it has recovered from
    /// all, and what it has never left online for has not harmed it. Gives the faults that no server withstands: they
    /// were never brought about.
    pub(crate) fn is_well(&mut self, nth: Nth) -> Vec<FaultKind> {
        let Some(card) = self.cards.get_mut(nth.0 as usize) else { return Vec::new() };
        let mut in_vain = Vec::new();
        for fault in card.faults.drain(..) {
            let outcome = self.outcomes.entry(fault.kind).or_default();
            match (fault.left, fault.kind.is_withstood()) {
                // Nobody was told when: that event was given up.
                (true, _) => outcome.back += 1,
                (false, true) => outcome.unharmed += 1,
                (false, false) => in_vain.push(fault.kind),
            }
        }
        in_vain
    }

    /// A person comes for it, so its budget was spent, whether or not that was told: the event may have been given up.
    pub(crate) fn given_up(&mut self, nth: Nth) {
        let Some(card) = self.cards.get_mut(nth.0 as usize) else { return };
        for fault in card.faults.drain(..) {
            self.outcomes.entry(fault.kind).or_default().given_up += 1;
        }
    }

    /// What became of all faults. Whoever has not recovered by now never will.
    pub(crate) fn outcomes(&mut self) -> BTreeMap<FaultKind, Outcome> {
        let mut outcomes = std::mem::take(&mut self.outcomes);
        for (kind, latency) in &self.recoveries {
            outcomes.entry(*kind).or_default().back += latency.len();
        }
        for fault in self.cards.iter().flat_map(|card| &card.faults) {
            outcomes.entry(fault.kind).or_default().missing += 1;
        }
        outcomes
    }

    /// What is told of no instance.
    pub(crate) fn told_of_others(&mut self, event: &Event) {
        match event {
            Event::TeamThrottled { team_id, .. } => {
                let Some(team) = Fleet::team_no(team_id) else { return };
                self.throttled.insert(team);
                for nth in self.shape.members(team) {
                    let faults = self.cards.get_mut(nth.0 as usize).into_iter().flat_map(|card| &mut card.faults);
                    faults.for_each(|fault| fault.is_disturbed = true);
                }
            }
            Event::TeamUnthrottled { team_id, .. } => {
                if let Some(team) = Fleet::team_no(team_id) {
                    self.throttled.remove(&team);
                }
            }
            _ => {}
        }
    }

    /// What is told of an instance; gives what is wrong with it.
    pub(crate) fn told(&mut self, at: Duration, nth: Nth, event: &Event) -> Vec<Violation> {
        let all = self.cards.len();
        let Some(card) = self.cards.get_mut(nth.0 as usize) else { return Vec::new() };
        card.born.get_or_insert(at);
        let is_back = match event {
            Event::StatusChanged { status, .. } => {
                card.status = Some(*status);
                if *status == Status::Online && !card.was_online {
                    card.was_online = true;
                    self.online += 1;
                    self.times_to_online.record(at.saturating_sub(card.born.unwrap_or(at)));
                    if self.online == all {
                        self.all_online = Some(at);
                    }
                }
                for fault in &mut card.faults {
                    // Events come late: how it was when the fault came may be told only now.
                    if at < fault.from {
                        fault.found_ill = *status != Status::Online;
                        fault.left = fault.found_ill;
                    } else {
                        fault.left |= *status != Status::Online;
                    }
                }
                *status == Status::Online
            }
            Event::Crashed { uptime_seconds, will_restart: true, .. }
            | Event::Exited { uptime_seconds, will_restart: true, .. } => {
                // The whole seconds of what the runtime counts by: on the edge it is the longer delay.
                card.quick = if *uptime_seconds > self.quick.as_secs() { 0 } else { card.quick + 1 };
                let delay = match card.quick {
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
                    self.outcomes.entry(fault.kind).or_default().given_up += 1;
                }
                false
            }
            Event::Reconnected { .. } | Event::Respawned { .. } | Event::Restarted { .. } => {
                let is_online = card.status == Some(Status::Online);
                card.faults.iter_mut().filter(|fault| fault.from <= at).for_each(|fault| fault.left |= is_online);
                is_online
            }
            _ => false,
        };
        if !is_back {
            return Vec::new();
        }
        let mut late = Vec::new();
        for fault in card.faults.extract_if(.., |fault| fault.left && fault.from <= at) {
            let took = fault.took(at);
            self.recoveries.entry(fault.kind).or_default().record(took);
            let is_promised = !fault.is_disturbed
                && !fault.found_ill
                && matches!(
                    fault.kind,
                    FaultKind::Crash | FaultKind::Exit0 | FaultKind::WorkerPanic | FaultKind::TeamPanic
                );
            if is_promised {
                self.promised += 1;
                late.extend(checks::recovery(
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
            // There are as many cards as instances, and this process's memory is among what is judged.
            card.faults = Vec::new();
        }
        late
    }
}
