//! Carries out the plan: one task sleeps to the next fault or the next healing, and at the end until everybody is back. What
//! a fault takes to be brought about holds up no other.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::StreamExt;
use futures::future::{BoxFuture, FutureExt, OptionFuture};
use futures::stream::FuturesUnordered;
use mcp_satellite_actors::Part;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::runtime::RuntimeHandle;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use super::books::Fault;
use super::fleet::Fleet;
use super::recorder::{Mood, Recorder};
use super::scenario::fault_name;
use super::types::{FaultKind, Injection, Nth, Pardon, Victim};
use super::world::{World, heals_by_restart, hurts_by_restart};

/// After so long a person has seen that an instance was given up, and restarts it.
const PERSON: Duration = Duration::from_secs(10);

/// Between two looks whether everybody is back.
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(200);

/// See the module.
pub(crate) struct Injector {
    pub(crate) runtime: RuntimeHandle,
    pub(crate) world: Arc<dyn World>,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) recorder: Arc<Recorder>,
    /// When the plan's time begins.
    pub(crate) from: Duration,
    /// Whoever is not back so long after the last healing will never be.
    pub(crate) patience: Duration,
    pub(crate) injected: Arc<AtomicU64>,
    pub(crate) stop: CancellationToken,
}

/// What was done.
#[derive(Debug, Default)]
pub(crate) struct Deeds {
    pub(crate) injected: BTreeMap<FaultKind, u64>,
    /// Those that found nobody whom they could befall.
    pub(crate) missed: BTreeMap<FaultKind, u64>,
    /// Restarts by hand of those that had been given up.
    pub(crate) pardons: u64,
    /// Those that did not come back, and what they are instead.
    pub(crate) missing: Vec<(Nth, Status)>,
}

/// What is to be done later, by time and then by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    /// The fault at this place of the plan is taken back.
    Heal(usize),
    /// A person restarts one that was given up.
    Pardon(Nth),
}

impl Injector {
    /// Carries out the plan until it is through or stopped, takes everything back, and waits until everybody is well.
    pub(crate) async fn run(self, plan: &[Injection], mut given_up: mpsc::UnboundedReceiver<Nth>) -> Deeds {
        let mut deeds = Deeds::default();
        let mut due: BinaryHeap<Reverse<(Duration, Due)>> = BinaryHeap::new();
        let mut under_way: FuturesUnordered<BoxFuture<'_, Option<(FaultKind, bool)>>> = FuturesUnordered::new();
        let mut coming = plan.iter().enumerate().peekable();
        let mut patience_ends = None;
        loop {
            let fault = coming.peek().map(|(_, injection)| self.from + injection.at);
            let healing = due.peek().map(|Reverse((at, _))| *at);
            let Some(next) = fault.into_iter().chain(healing).min() else {
                let give_up_at = *patience_ends.get_or_insert_with(|| Instant::now() + self.patience);
                let missing = self.missing();
                if under_way.is_empty() && (missing.is_empty() || Instant::now() >= give_up_at) {
                    deeds.missing = missing;
                    break;
                }
                tokio::select! {
                    biased;
                    Some(done) = under_way.next(), if !under_way.is_empty() => deeds.note(done),
                    Some(nth) = given_up.recv() => {
                        due.push(Reverse((self.recorder.clock.now() + PERSON, Due::Pardon(nth))));
                        patience_ends = None;
                    }
                    () = sleep(LOOK_AGAIN_AFTER) => {}
                }
                continue;
            };
            let stopped = OptionFuture::from(fault.map(|_| self.stop.cancelled()));
            tokio::select! {
                biased;
                Some(()) = stopped => while coming.next().is_some() {},
                Some(done) = under_way.next(), if !under_way.is_empty() => deeds.note(done),
                Some(nth) = given_up.recv() => due.push(Reverse((self.recorder.clock.now() + PERSON, Due::Pardon(nth)))),
                () = sleep_until(self.recorder.clock.instant(next)) => {
                    if healing == Some(next) {
                        match due.pop() {
                            Some(Reverse((_, Due::Heal(place)))) => under_way.push(self.heal(&plan[place]).boxed()),
                            Some(Reverse((_, Due::Pardon(nth)))) => {
                                deeds.pardons += 1;
                                under_way.push(self.pardon(nth).boxed());
                            }
                            None => {}
                        }
                    } else if let Some((place, injection)) = coming.next() {
                        self.injected.fetch_add(1, Ordering::Relaxed);
                        under_way.push(self.hurt(injection).boxed());
                        if !injection.lasts.is_zero() {
                            due.push(Reverse((next + injection.lasts, Due::Heal(place))));
                        }
                    }
                }
            }
        }
        deeds
    }

    /// Into the trace.
    fn note(&self, whom: Victim, what: std::fmt::Arguments<'_>) {
        let at = self.recorder.clock.now();
        self.recorder.ledger().done(at, whom, what);
    }

    /// What it was, and whether it could be done.
    async fn hurt(&self, what: &Injection) -> Option<(FaultKind, bool)> {
        self.note(what.victim, format_args!("fault {}", fault_name(what.kind)));
        let by_restart = hurts_by_restart(what.kind);
        if by_restart {
            self.pardoned(what.victim);
        }
        let before = if by_restart { None } else { self.book(what) };
        let done = match (what.kind, what.victim) {
            (FaultKind::WorkerPanic, Victim::Instance(nth)) => {
                let id = self.fleet.id(nth);
                // While its team's supervisor is down there is no worker that could.
                let is_there = self.runtime.status(id).is_some_and(|view| view.status == Status::Online);
                is_there && self.panics(Part::Worker(id.clone()))
            }
            (FaultKind::TeamPanic, Victim::Team(team)) => {
                self.recorder.pardoned(Pardon::Team(team));
                self.panics(Part::Team(Fleet::team(team)))
            }
            (FaultKind::RegistryPanic, _) => self.panics(Part::Registry),
            (FaultKind::BatcherPanic, _) => self.panics(Part::Batcher),
            (FaultKind::SinkFails, _) => self.sink(Mood::Fails),
            (FaultKind::SinkPanics, _) => self.sink(Mood::Panics),
            _ => self.world.hurt(what, &self.runtime).await.is_ok(),
        };
        if !done {
            self.note(what.victim, format_args!("fault {} found nobody", fault_name(what.kind)));
        }
        if by_restart {
            self.pardoned(what.victim);
            self.book(what);
        } else if !done && let Victim::Instance(nth) = what.victim {
            self.recorder.ledger().books.missed(nth, before);
        }
        Some((what.kind, done))
    }

    async fn heal(&self, what: &Injection) -> Option<(FaultKind, bool)> {
        self.note(what.victim, format_args!("healing {}", fault_name(what.kind)));
        let by_restart = heals_by_restart(what.kind);
        if by_restart {
            self.pardoned(what.victim);
        }
        match what.kind {
            FaultKind::SinkFails | FaultKind::SinkPanics => drop(self.sink(Mood::Takes)),
            _ => {
                if let Err(why) = self.world.heal(what, &self.runtime).await {
                    tracing::debug!(kind = ?what.kind, victim = ?what.victim, why, "a fault is not taken back");
                }
            }
        }
        if by_restart {
            self.pardoned(what.victim);
        }
        if let Victim::Instance(nth) = what.victim {
            let at = self.recorder.clock.now();
            self.recorder.ledger().books.healed(at, nth);
        }
        None
    }

    /// As a person would. Whoever has come up again meanwhile is left alone.
    async fn pardon(&self, nth: Nth) -> Option<(FaultKind, bool)> {
        let id = self.fleet.id(nth);
        if self.runtime.status(id).is_some_and(|view| view.status == Status::PermanentlyFailed) {
            self.note(Victim::Instance(nth), format_args!("pardon"));
            self.recorder.pardoned(Pardon::Instance(nth));
            let _ = self.runtime.restart(id).await;
            self.recorder.pardoned(Pardon::Instance(nth));
        }
        None
    }

    /// Who is not online, and what they are instead.
    fn missing(&self) -> Vec<(Nth, Status)> {
        let snapshot = self.runtime.snapshot();
        let ill = snapshot.iter().filter(|view| view.status != Status::Online);
        ill.filter_map(|view| Some((Nth::of(view.spec.id.installation.as_str())?, view.status))).collect()
    }

    fn panics(&self, part: Part) -> bool {
        self.runtime.panic(part);
        true
    }

    fn sink(&self, mood: Mood) -> bool {
        self.recorder.is(mood);
        true
    }

    fn pardoned(&self, victim: Victim) {
        if let Victim::Instance(nth) = victim {
            self.recorder.pardoned(Pardon::Instance(nth));
        }
    }

    /// From now on it is waited for.
    fn book(&self, what: &Injection) -> Option<Fault> {
        let at = self.recorder.clock.now();
        let books = &mut self.recorder.ledger().books;
        match what.victim {
            Victim::Instance(nth) => books.hurt(at, nth, what.kind),
            Victim::Team(team) => {
                self.fleet.shape.members(team).for_each(|nth| _ = books.hurt(at, nth, what.kind));
                None
            }
            Victim::Us => None,
        }
    }
}

impl Deeds {
    fn note(&mut self, done: Option<(FaultKind, bool)>) {
        match done {
            Some((kind, true)) => *self.injected.entry(kind).or_insert(0) += 1,
            Some((kind, false)) => *self.missed.entry(kind).or_insert(0) += 1,
            None => {}
        }
    }
}
