//! Carries out the plan: one task sleeps to the next fault or the next healing, and at the end until everybody is back and
//! was asked. What a fault takes to be brought about holds up no other.

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

use super::drive::Prober;
use super::fleet::Fleet;
use super::recorder::{Mood, Recorder};
use super::scenario::fault_name;
use super::types::{FaultKind, Injection, Nth, Pardon, Victim};
use super::world::{Hand, heals_by_restart, hurts_by_restart};

/// After so long a person has seen that an instance was given up, and restarts it.
const PERSON: Duration = Duration::from_secs(10);

/// Between two looks whether everybody is back.
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(200);

/// See the module.
pub(crate) struct Injector {
    pub(crate) runtime: RuntimeHandle,
    pub(crate) hand: Hand,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) recorder: Arc<Recorder>,
    /// When the plan's time begins.
    pub(crate) from: Duration,
    /// Whoever is not back so long after the last healing will never be.
    pub(crate) patience: Duration,
    pub(crate) injected: Arc<AtomicU64>,
    /// Asks everybody at the end.
    pub(crate) prober: Prober,
    /// Nobody calls any more.
    pub(crate) ended: CancellationToken,
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
    /// Those that did not come back, and what they are instead: nothing, where nobody knows of them.
    pub(crate) missing: Vec<(Nth, Option<Status>)>,
}

/// What is to be done later, by time and then by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    /// The fault at this place of the plan is taken back.
    Heal(usize),
    /// A person restarts one that was given up.
    Pardon(Nth),
}

/// What has come of what was under way.
enum Done {
    /// Whether a fault was brought about.
    Hurt(FaultKind, bool),
    /// Somebody was asked, who was found to have had none of these.
    Asked(Vec<FaultKind>),
    Other,
}

impl Injector {
    /// Carries out the plan until it is through or stopped, takes everything back, and waits until everybody is well.
    pub(crate) async fn run(self, plan: &[Injection], mut given_up: mpsc::UnboundedReceiver<Nth>) -> Deeds {
        let mut deeds = Deeds::default();
        let mut due: BinaryHeap<Reverse<(Duration, Due)>> = BinaryHeap::new();
        let mut under_way: FuturesUnordered<BoxFuture<'_, Done>> = FuturesUnordered::new();
        let mut coming = plan.iter().enumerate().peekable();
        let (mut give_up_at, mut everybody_was_asked) = (None, false);
        loop {
            let has_ended = self.ended.is_cancelled();
            if has_ended {
                // Nobody calls any more: what is ill for longer than that shows nothing.
                let now = self.recorder.clock.now();
                let earlier = |Reverse((at, what)): Reverse<(Duration, Due)>| match what {
                    Due::Heal(_) => Reverse((at.min(now), what)),
                    Due::Pardon(_) => Reverse((at, what)),
                };
                due = due.into_iter().map(earlier).collect();
            }
            let fault = coming.peek().map(|(_, injection)| self.from + injection.at);
            let healing = due.peek().map(|Reverse((at, _))| *at);
            let next = fault.into_iter().chain(healing).min();
            let is_quiet = fault.is_none() && has_ended;
            let is_over = give_up_at.is_some_and(|at| Instant::now() >= at);
            if is_quiet && under_way.is_empty() && (next.is_none() || is_over) {
                // What was done last is noticed, and told.
                self.runtime.see().await;
                self.runtime.flush().await;
                while let Ok(nth) = given_up.try_recv() {
                    due.push(Reverse((self.recorder.clock.now() + PERSON, Due::Pardon(nth))));
                }
                let missing = self.missing();
                if due.is_empty() {
                    // Of whom that was told by an event that was given up.
                    let given_up = missing.iter().filter(|(_, status)| *status == Some(Status::PermanentlyFailed));
                    due.extend(
                        given_up.map(|(nth, _)| Reverse((self.recorder.clock.now() + PERSON, Due::Pardon(*nth)))),
                    );
                }
                let is_waiting = !missing.is_empty() || !due.is_empty();
                let give_up_at = give_up_at.get_or_insert_with(|| Instant::now() + self.patience);
                if is_waiting && Instant::now() < *give_up_at {
                    // They are waited for, and whoever is to come for them.
                } else if !everybody_was_asked {
                    everybody_was_asked = true;
                    *give_up_at = Instant::now() + self.patience;
                    under_way.push(self.ask(self.fleet.shape.all().collect()).boxed());
                } else {
                    let ill: Vec<_> = self.recorder.ledger().books.ill().collect();
                    if ill.is_empty() || Instant::now() >= *give_up_at {
                        let ill = ill.into_iter().map(|nth| (nth, self.status(nth)));
                        deeds.missing =
                            missing.into_iter().chain(ill).collect::<BTreeMap<_, _>>().into_iter().collect();
                        break;
                    }
                    under_way.push(self.ask(ill).boxed());
                }
            }
            let Some(next) = next else {
                let ended = OptionFuture::from((!is_quiet).then(|| self.ended.cancelled()));
                tokio::select! {
                    biased;
                    Some(done) = under_way.next(), if !under_way.is_empty() => deeds.note(done),
                    Some(nth) = given_up.recv() => {
                        due.push(Reverse((self.recorder.clock.now() + PERSON, Due::Pardon(nth))));
                    }
                    Some(()) = ended => {}
                    () = sleep(LOOK_AGAIN_AFTER) => {}
                }
                continue;
            };
            let stopped = OptionFuture::from(fault.map(|_| self.stop.cancelled()));
            let ended = OptionFuture::from((!has_ended).then(|| self.ended.cancelled()));
            tokio::select! {
                biased;
                Some(()) = stopped => while coming.next().is_some() {},
                Some(()) = ended => {}
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

    async fn hurt(&self, what: &Injection) -> Done {
        if let Victim::Instance(nth) = what.victim
            && self.status(nth).is_none_or(|status| status == Status::PermanentlyFailed)
        {
            // It waits for a person, and only a person's deed would befall it.
            self.note(what.victim, format_args!("fault {} found nobody", fault_name(what.kind)));
            return Done::Hurt(what.kind, false);
        }
        self.note(what.victim, format_args!("fault {}", fault_name(what.kind)));
        let by_restart = hurts_by_restart(what.kind);
        if by_restart {
            self.pardoned(what.victim);
        } else {
            self.book(what);
        }
        let done = match (what.kind, what.victim) {
            (FaultKind::WorkerPanic, Victim::Instance(nth)) => {
                // While its team's supervisor is down there is no worker that could.
                self.status(nth) == Some(Status::Online) && self.panics(Part::Worker(self.fleet.id(nth).clone()))
            }
            (FaultKind::TeamPanic, Victim::Team(team)) => {
                self.recorder.pardoned(Pardon::Team(team));
                self.panics(Part::Team(Fleet::team(team)))
            }
            (FaultKind::RegistryPanic, _) => self.panics(Part::Registry),
            (FaultKind::BatcherPanic, _) => self.panics(Part::Batcher),
            (FaultKind::SinkFails, _) => self.sink(Mood::Fails),
            (FaultKind::SinkPanics, _) => self.sink(Mood::Panics),
            _ => match self.hand.hurt(what).await {
                Ok(()) => true,
                Err(why) => {
                    tracing::debug!(kind = ?what.kind, victim = ?what.victim, why, "a fault found nobody");
                    false
                }
            },
        };
        if !done {
            self.note(what.victim, format_args!("fault {} found nobody", fault_name(what.kind)));
        }
        if by_restart {
            self.pardoned(what.victim);
            if done {
                self.book(what);
            }
        } else if !done && let Victim::Instance(nth) = what.victim {
            self.recorder.ledger().books.missed(nth, what.serial);
        }
        Done::Hurt(what.kind, done)
    }

    async fn heal(&self, what: &Injection) -> Done {
        self.note(what.victim, format_args!("healing {}", fault_name(what.kind)));
        let by_restart = heals_by_restart(what.kind);
        if by_restart {
            self.pardoned(what.victim);
        }
        if let Victim::Instance(nth) = what.victim {
            // Before it is done: who is back at once is back after it.
            let at = self.recorder.clock.now();
            self.recorder.ledger().books.healed(at, nth, what.serial);
        }
        match what.kind {
            FaultKind::SinkFails | FaultKind::SinkPanics => drop(self.sink(Mood::Takes)),
            _ => {
                if let Err(why) = self.hand.heal(what).await {
                    tracing::debug!(kind = ?what.kind, victim = ?what.victim, why, "a fault is not taken back");
                }
            }
        }
        if by_restart {
            self.pardoned(what.victim);
        }
        Done::Other
    }

    /// As a person would. Whoever has come up again meanwhile is left alone.
    async fn pardon(&self, nth: Nth) -> Done {
        if self.status(nth) == Some(Status::PermanentlyFailed) {
            self.note(Victim::Instance(nth), format_args!("pardon"));
            self.recorder.ledger().books.given_up(nth);
            self.recorder.pardoned(Pardon::Instance(nth));
            let _ = self.runtime.restart(self.fleet.id(nth)).await;
            self.recorder.pardoned(Pardon::Instance(nth));
        }
        Done::Other
    }

    /// Calls each of them once: what is online must answer, and has recovered if it does.
    async fn ask(&self, whom: Vec<Nth>) -> Done {
        let answered = self.prober.ask(whom).await;
        self.runtime.flush().await;
        let books = &mut self.recorder.ledger().books;
        Done::Asked(answered.into_iter().flat_map(|nth| books.is_well(nth)).collect())
    }

    /// Nothing, where nobody knows of it.
    fn status(&self, nth: Nth) -> Option<Status> {
        self.runtime.status(self.fleet.id(nth)).map(|view| view.status)
    }

    /// Who is not online, and what they are instead. Whoever is not even shown is missed most.
    fn missing(&self) -> Vec<(Nth, Option<Status>)> {
        let snapshot = self.runtime.snapshot();
        let all = self.fleet.shape.all();
        let statuses = all.map(|nth| (nth, snapshot.get(self.fleet.id(nth)).map(|view| view.status)));
        statuses.filter(|(_, status)| *status != Some(Status::Online)).collect()
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
    fn book(&self, what: &Injection) {
        let at = self.recorder.clock.now();
        let books = &mut self.recorder.ledger().books;
        match what.victim {
            Victim::Instance(nth) => books.hurt(at, nth, what.serial, what.kind),
            Victim::Team(team) => {
                self.fleet.shape.members(team).for_each(|nth| books.hurt(at, nth, what.serial, what.kind));
            }
            Victim::Us => {}
        }
    }
}

impl Deeds {
    fn note(&mut self, done: Done) {
        let missed = match done {
            Done::Hurt(kind, true) => {
                *self.injected.entry(kind).or_insert(0) += 1;
                return;
            }
            Done::Hurt(kind, false) => vec![kind],
            Done::Asked(in_vain) => {
                for kind in &in_vain {
                    self.injected.entry(*kind).and_modify(|count| *count = count.saturating_sub(1));
                }
                in_vain
            }
            Done::Other => return,
        };
        for kind in missed {
            *self.missed.entry(kind).or_insert(0) += 1;
        }
    }
}
