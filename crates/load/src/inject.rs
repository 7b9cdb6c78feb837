//! Injection of the planned faults. One task sleeps until the next fault or healing is due. At the end it waits until
//! all instances are online and have answered a call. Slow injections do not delay others.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::StreamExt;
use futures::future::{BoxFuture, FutureExt, OptionFuture};
use futures::stream::FuturesUnordered;
use mcp_satellite_actors::RuntimePart;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::runtime::RuntimeHandle;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use super::drive::Prober;
use super::fleet::LoadFleet;
use super::recorder::{RunRecorder, SinkBehavior};
use super::scenario::fault_name;
use super::types::{BudgetReset, FaultKind, FaultVictim, InstanceNo, PlannedFault};
use super::world::{ServerFaults, is_healed_by_restart, is_injected_by_restart};

// Time after which the harness, in the role of a person, restarts an instance that failed permanently.
const MANUAL_RESTART_DELAY: Duration = Duration::from_secs(10);

const POLL_INTERVAL: Duration = Duration::from_millis(200);

pub(crate) struct FaultInjector {
    pub runtime: RuntimeHandle,
    pub server_faults: ServerFaults,
    pub fleet: Arc<LoadFleet>,
    pub recorder: Arc<RunRecorder>,
    // Start of the load; the times of the plan are relative to it.
    pub from: Duration,
    // Time to wait for recoveries after the last healing.
    pub recovery_timeout: Duration,
    pub injected: Arc<AtomicU64>,
    pub prober: Prober,
    // Cancelled when no more calls are made.
    pub ended: CancellationToken,
    pub stop: CancellationToken,
}

#[derive(Debug, Default)]
pub(crate) struct InjectionResults {
    pub injected: BTreeMap<FaultKind, u64>,
    // Faults without a suitable victim.
    pub missed: BTreeMap<FaultKind, u64>,
    // Restarts of instances that failed permanently.
    pub manual_restarts: u64,
    // Instances that did not recover, with their status; `None` if the runtime does not list them.
    pub missing: Vec<(InstanceNo, Option<Status>)>,
}

// Simultaneous actions are carried out in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum DelayedAction {
    Heal(usize),
    // Restart of an instance that failed permanently.
    Restart(InstanceNo),
}

enum ActionResult {
    // The flag is true if the fault was injected.
    Injected(FaultKind, bool),
    // Kinds of faults that turned out to have had no effect.
    Probed(Vec<FaultKind>),
    Other,
}

impl FaultInjector {
    /// Injects all faults of the plan, or those before a stop, heals them and waits until all instances have recovered.
    pub(crate) async fn run(
        self,
        plan: &[PlannedFault],
        mut given_up: mpsc::UnboundedReceiver<InstanceNo>,
    ) -> InjectionResults {
        let mut results = InjectionResults::default();
        let mut due: BinaryHeap<Reverse<(Duration, DelayedAction)>> = BinaryHeap::new();
        let mut under_way: FuturesUnordered<BoxFuture<'_, ActionResult>> = FuturesUnordered::new();
        let mut upcoming = plan.iter().enumerate().peekable();
        let (mut give_up_at, mut were_all_probed) = (None, false);
        loop {
            let has_ended = self.ended.is_cancelled();
            if has_ended {
                // No more calls are made, so faults that last longer prove nothing: heal them now.
                let now = self.recorder.clock.now();
                let earlier = |Reverse((at, what)): Reverse<(Duration, DelayedAction)>| match what {
                    DelayedAction::Heal(_) => Reverse((at.min(now), what)),
                    DelayedAction::Restart(_) => Reverse((at, what)),
                };
                due = due.into_iter().map(earlier).collect();
            }
            let fault = upcoming.peek().map(|(_, injection)| self.from + injection.at);
            let healing = due.peek().map(|Reverse((at, _))| *at);
            let next = fault.into_iter().chain(healing).min();
            let is_quiet = fault.is_none() && has_ended;
            let is_over = give_up_at.is_some_and(|at| Instant::now() >= at);
            if is_quiet && under_way.is_empty() && (next.is_none() || is_over) {
                // Wait until the effects of the last actions are published and their events delivered.
                self.runtime.sync_snapshot().await;
                self.runtime.flush().await;
                while let Ok(nth) = given_up.try_recv() {
                    due.push(Reverse((self.recorder.clock.now() + MANUAL_RESTART_DELAY, DelayedAction::Restart(nth))));
                }
                let missing = self.offline_instances();
                if due.is_empty() {
                    // The event of the permanent failure was dropped; use the status instead.
                    let given_up = missing.iter().filter(|(_, status)| *status == Some(Status::PermanentlyFailed));
                    due.extend(given_up.map(|(nth, _)| {
                        Reverse((self.recorder.clock.now() + MANUAL_RESTART_DELAY, DelayedAction::Restart(*nth)))
                    }));
                }
                let is_waiting = !missing.is_empty() || !due.is_empty();
                let give_up_at = give_up_at.get_or_insert_with(|| Instant::now() + self.recovery_timeout);
                if is_waiting && Instant::now() < *give_up_at {
                    // Wait for recoveries and for pending restarts.
                } else if !were_all_probed {
                    were_all_probed = true;
                    *give_up_at = Instant::now() + self.recovery_timeout;
                    under_way.push(self.probe(self.fleet.shape.all().collect()).boxed());
                } else {
                    let failing: Vec<_> = self.recorder.state().recovery_log.instances_with_faults().collect();
                    if failing.is_empty() || Instant::now() >= *give_up_at {
                        let failing = failing.into_iter().map(|nth| (nth, self.status(nth)));
                        results.missing =
                            missing.into_iter().chain(failing).collect::<BTreeMap<_, _>>().into_iter().collect();
                        break;
                    }
                    under_way.push(self.probe(failing).boxed());
                }
            }
            let Some(next) = next else {
                let ended = OptionFuture::from((!is_quiet).then(|| self.ended.cancelled()));
                tokio::select! {
                    biased;
                    Some(done) = under_way.next(), if !under_way.is_empty() => results.record(done),
                    Some(nth) = given_up.recv() => {
                        due.push(Reverse((self.recorder.clock.now() + MANUAL_RESTART_DELAY, DelayedAction::Restart(nth))));
                    }
                    Some(()) = ended => {}
                    () = sleep(POLL_INTERVAL) => {}
                }
                continue;
            };
            let stopped = OptionFuture::from(fault.map(|_| self.stop.cancelled()));
            let ended = OptionFuture::from((!has_ended).then(|| self.ended.cancelled()));
            tokio::select! {
                biased;
                Some(()) = stopped => while upcoming.next().is_some() {},
                Some(()) = ended => {}
                Some(done) = under_way.next(), if !under_way.is_empty() => results.record(done),
                Some(nth) = given_up.recv() => due.push(Reverse((self.recorder.clock.now() + MANUAL_RESTART_DELAY, DelayedAction::Restart(nth)))),
                () = sleep_until(self.recorder.clock.instant(next)) => {
                    if healing == Some(next) {
                        match due.pop() {
                            Some(Reverse((_, DelayedAction::Heal(index)))) => under_way.push(self.heal(&plan[index]).boxed()),
                            Some(Reverse((_, DelayedAction::Restart(nth)))) => {
                                results.manual_restarts += 1;
                                under_way.push(self.restart_failed(nth).boxed());
                            }
                            None => {}
                        }
                    } else if let Some((index, injection)) = upcoming.next() {
                        self.injected.fetch_add(1, Ordering::Relaxed);
                        under_way.push(self.inject(injection).boxed());
                        if !injection.duration.is_zero() {
                            due.push(Reverse((next + injection.duration, DelayedAction::Heal(index))));
                        }
                    }
                }
            }
        }
        results
    }

    fn trace(&self, victim: FaultVictim, what: std::fmt::Arguments<'_>) {
        let at = self.recorder.clock.now();
        self.recorder.state().trace_action(at, victim, what);
    }

    async fn inject(&self, what: &PlannedFault) -> ActionResult {
        if let FaultVictim::Instance(nth) = what.victim
            && self.status(nth).is_none_or(|status| status == Status::PermanentlyFailed)
        {
            // Only a restart by a person could affect this instance.
            self.trace(what.victim, format_args!("fault {} without a victim", fault_name(what.kind)));
            return ActionResult::Injected(what.kind, false);
        }
        self.trace(what.victim, format_args!("fault {}", fault_name(what.kind)));
        let by_restart = is_injected_by_restart(what.kind);
        if by_restart {
            self.record_reset(what.victim);
        } else {
            self.record_fault(what);
        }
        let done = match (what.kind, what.victim) {
            (FaultKind::WorkerPanic, FaultVictim::Instance(nth)) => {
                // While the team's supervisor is down there is no worker that could panic.
                self.status(nth) == Some(Status::Online)
                    && self.inject_panic(RuntimePart::Worker(self.fleet.id(nth).clone()))
            }
            (FaultKind::TeamPanic, FaultVictim::Team(team)) => {
                self.recorder.record_reset(BudgetReset::Team(team));
                self.inject_panic(RuntimePart::Team(LoadFleet::team(team)))
            }
            (FaultKind::RegistryPanic, _) => self.inject_panic(RuntimePart::Registry),
            (FaultKind::BatcherPanic, _) => self.inject_panic(RuntimePart::Batcher),
            (FaultKind::SinkFails, _) => self.set_sink_behavior(SinkBehavior::Fail),
            (FaultKind::SinkPanics, _) => self.set_sink_behavior(SinkBehavior::Panic),
            _ => match self.server_faults.inject(what).await {
                Ok(()) => true,
                Err(why) => {
                    tracing::debug!(kind = ?what.kind, victim = ?what.victim, why, "fault could not be injected");
                    false
                }
            },
        };
        if !done {
            self.trace(what.victim, format_args!("fault {} without a victim", fault_name(what.kind)));
        }
        if by_restart {
            self.record_reset(what.victim);
            if done {
                self.record_fault(what);
            }
        } else if !done && let FaultVictim::Instance(nth) = what.victim {
            self.recorder.state().recovery_log.remove_fault(nth, what.serial);
        }
        ActionResult::Injected(what.kind, done)
    }

    async fn heal(&self, what: &PlannedFault) -> ActionResult {
        self.trace(what.victim, format_args!("healing {}", fault_name(what.kind)));
        let by_restart = is_healed_by_restart(what.kind);
        if by_restart {
            self.record_reset(what.victim);
        }
        if let FaultVictim::Instance(nth) = what.victim {
            // Note the healing first: the recovery may follow at once.
            let at = self.recorder.clock.now();
            self.recorder.state().recovery_log.record_healing(at, nth, what.serial);
        }
        match what.kind {
            FaultKind::SinkFails | FaultKind::SinkPanics => drop(self.set_sink_behavior(SinkBehavior::Accept)),
            _ => {
                if let Err(why) = self.server_faults.heal(what).await {
                    tracing::debug!(kind = ?what.kind, victim = ?what.victim, why, "fault could not be ended");
                }
            }
        }
        if by_restart {
            self.record_reset(what.victim);
        }
        ActionResult::Other
    }

    // Restarts the instance as a person would, unless it has recovered meanwhile.
    async fn restart_failed(&self, nth: InstanceNo) -> ActionResult {
        if self.status(nth) == Some(Status::PermanentlyFailed) {
            self.trace(FaultVictim::Instance(nth), format_args!("restart"));
            self.recorder.state().recovery_log.close_given_up_faults(nth);
            self.recorder.record_reset(BudgetReset::Instance(nth));
            let _ = self.runtime.restart(self.fleet.id(nth)).await;
            self.recorder.record_reset(BudgetReset::Instance(nth));
        }
        ActionResult::Other
    }

    // An instance that answers has recovered from its faults.
    async fn probe(&self, instances: Vec<InstanceNo>) -> ActionResult {
        let answered = self.prober.probe_all(instances).await;
        self.runtime.flush().await;
        let log = &mut self.recorder.state().recovery_log;
        ActionResult::Probed(answered.into_iter().flat_map(|nth| log.close_recovered_faults(nth)).collect())
    }

    fn status(&self, nth: InstanceNo) -> Option<Status> {
        self.runtime.status(self.fleet.id(nth)).map(|view| view.status)
    }

    fn offline_instances(&self) -> Vec<(InstanceNo, Option<Status>)> {
        let snapshot = self.runtime.snapshot();
        let all = self.fleet.shape.all();
        let statuses = all.map(|nth| (nth, snapshot.get(self.fleet.id(nth)).map(|view| view.status)));
        statuses.filter(|(_, status)| *status != Some(Status::Online)).collect()
    }

    fn inject_panic(&self, part: RuntimePart) -> bool {
        self.runtime.panic(part);
        true
    }

    fn set_sink_behavior(&self, behavior: SinkBehavior) -> bool {
        self.recorder.set_sink_behavior(behavior);
        true
    }

    fn record_reset(&self, victim: FaultVictim) {
        if let FaultVictim::Instance(nth) = victim {
            self.recorder.record_reset(BudgetReset::Instance(nth));
        }
    }

    fn record_fault(&self, what: &PlannedFault) {
        let at = self.recorder.clock.now();
        let log = &mut self.recorder.state().recovery_log;
        match what.victim {
            FaultVictim::Instance(nth) => log.record_fault(at, nth, what.serial, what.kind),
            FaultVictim::Team(team) => {
                let members = self.fleet.shape.members(team);
                let affected = members.filter(|nth| self.status(*nth) != Some(Status::PermanentlyFailed));
                affected.for_each(|nth| log.record_fault(at, nth, what.serial, what.kind));
            }
            FaultVictim::Satellite => {}
        }
    }
}

impl InjectionResults {
    fn record(&mut self, done: ActionResult) {
        let missed = match done {
            ActionResult::Injected(kind, true) => {
                *self.injected.entry(kind).or_insert(0) += 1;
                return;
            }
            ActionResult::Injected(kind, false) => vec![kind],
            ActionResult::Probed(in_vain) => {
                for kind in &in_vain {
                    self.injected.entry(*kind).and_modify(|count| *count = count.saturating_sub(1));
                }
                in_vain
            }
            ActionResult::Other => return,
        };
        for kind in missed {
            *self.missed.entry(kind).or_insert(0) += 1;
        }
    }
}
