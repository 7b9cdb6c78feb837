//! What is counted from events: how long everybody took to be online, and how long to be there again after a fault.

use std::collections::BTreeMap;
use std::time::Duration;

use mcp_satellite_actors::model::event::Event;
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::status::Status;

use super::checks;
use super::measure::Latency;
use super::scenario::Limits;
use super::types::{FaultKind, Nth, Violation};

/// What is known of each instance, and of all together.
pub(crate) struct Books {
    cards: Vec<Card>,
    limits: Limits,
    delays: Vec<Duration>,
    /// The longest handshake of a server that is well.
    handshake: Duration,
    online: usize,
    /// When the last of them was online for the first time.
    pub(crate) all_online: Option<Duration>,
    pub(crate) times_to_online: Latency,
    pub(crate) recoveries: BTreeMap<FaultKind, Latency>,
    pub(crate) permanently_failed: u64,
}

/// Of one instance. There are as many as instances, so it is small.
#[derive(Debug, Clone, Copy, Default)]
struct Card {
    born: Option<Duration>,
    status: Option<Status>,
    was_online: bool,
    fault: Option<Fault>,
}

/// A fault that it has not recovered from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fault {
    kind: FaultKind,
    from: Duration,
    /// Whether it has been anything else than online since.
    left: bool,
    /// What its policy makes it wait for.
    delay: Duration,
}

impl Books {
    pub(crate) fn new(instances: usize, policy: &Policy, limits: &Limits, handshake: Duration) -> Self {
        Self {
            cards: vec![Card::default(); instances],
            limits: limits.clone(),
            delays: policy.restart.delays.clone(),
            handshake,
            online: 0,
            all_online: None,
            times_to_online: Latency::default(),
            recoveries: BTreeMap::new(),
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

    /// A fault befalls it. Gives what it had not recovered from.
    pub(crate) fn hurt(&mut self, at: Duration, nth: Nth, kind: FaultKind) -> Option<Fault> {
        let card = self.cards.get_mut(nth.0 as usize)?;
        let before = card.fault;
        // A supervisor that dies again waits before it is there again, as a server does.
        let delay = if kind == FaultKind::TeamPanic { self.delays.iter().max() } else { None };
        let left = card.status != Some(Status::Online);
        // Who was ill already when its team died is back when both are over, which is no measure of either.
        let is_second = kind == FaultKind::TeamPanic && before.is_some();
        let is_measured = kind.recovers() && !is_second;
        card.fault = is_measured.then(|| Fault { kind, from: at, left, delay: delay.copied().unwrap_or_default() });
        before
    }

    /// The fault found nobody: what there was before is waited for as ever.
    pub(crate) fn missed(&mut self, nth: Nth, before: Option<Fault>) {
        if let Some(card) = self.cards.get_mut(nth.0 as usize) {
            card.fault = before;
        }
    }

    /// It is taken back. One who is there again by then has recovered before.
    pub(crate) fn healed(&mut self, at: Duration, nth: Nth) {
        if let Some(fault) = self.cards.get_mut(nth.0 as usize).and_then(|card| card.fault.as_mut()) {
            fault.from = at;
        }
    }

    /// What is told of an instance; gives what is wrong with it.
    pub(crate) fn told(&mut self, at: Duration, nth: Nth, event: &Event) -> Option<Violation> {
        let all = self.cards.len();
        let card = self.cards.get_mut(nth.0 as usize)?;
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
                if let Some(fault) = &mut card.fault {
                    fault.left |= *status != Status::Online;
                }
                *status == Status::Online && card.fault.is_some_and(|fault| fault.left)
            }
            Event::Crashed { crash_count, will_restart: true, .. } => {
                let nth = crash_count.saturating_sub(1);
                let delay = self.delays.get(nth).or(self.delays.last()).copied().unwrap_or_default();
                if let Some(fault) = &mut card.fault {
                    fault.delay = fault.delay.max(delay);
                }
                false
            }
            Event::Exited { will_restart: true, .. } => {
                // Which exit it was is not told.
                if let Some(fault) = &mut card.fault {
                    fault.delay = fault.delay.max(self.delays.iter().max().copied().unwrap_or_default());
                }
                false
            }
            Event::Reconnecting { next_retry_ms, .. } => {
                if let Some(fault) = &mut card.fault {
                    fault.delay += Duration::from_millis(*next_retry_ms);
                }
                false
            }
            Event::PermanentlyFailed { .. } => {
                self.permanently_failed += 1;
                card.fault = None;
                false
            }
            Event::Reconnected { .. } | Event::Respawned { .. } | Event::Restarted { .. } => {
                card.status == Some(Status::Online)
            }
            _ => false,
        };
        let fault = card.fault.take_if(|fault| is_back && fault.from <= at)?;
        let took = at.saturating_sub(fault.from);
        self.recoveries.entry(fault.kind).or_default().record(took);
        let is_promised =
            matches!(fault.kind, FaultKind::Crash | FaultKind::Exit0 | FaultKind::WorkerPanic | FaultKind::TeamPanic);
        let late = || checks::recovery(&self.limits, nth, fault.from, took, fault.delay, self.handshake);
        is_promised.then(late).flatten()
    }
}
