//! Callers: open and closed loops, and a prober that calls instances shown as online.

mod direct;
mod http;
mod prober;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::task::JoinSet;
use tokio::time::{sleep, sleep_until, timeout_at};
use tokio_util::sync::CancellationToken;

use super::checks::{ResponseCheck, unexcused_failure};
use super::measure::Latency;
use super::plan::CallSource;
use super::recorder::RunClock;
use super::scenario::FleetShape;
use super::types::{CallFindings, CallOutcome, InvariantViolation, PlannedCall, TeamNo};

pub(crate) use direct::RuntimeCaller;
pub(crate) use http::{EndpointParts, LoadEndpoint};
pub(crate) use prober::Prober;

pub trait LoadCaller: Send + Sync {
    fn call<'a>(&'a self, call: &'a PlannedCall) -> BoxFuture<'a, CallOutcome>;
}

// Time after the deadline of a call until it counts as never answered, once no more calls are made.
const PATIENCE: Duration = Duration::from_secs(30);

// Period after a large fault in which calls to other teams are measured.
const NEIGHBOURS: Duration = Duration::from_secs(3);

pub(crate) enum CallSources {
    // Open loop: calls do not wait for responses. The number limits the calls in flight.
    Open(Box<CallSource>, usize),
    // Closed loop: one source per caller, which waits for its response.
    Closed(Vec<CallSource>),
}

#[derive(Debug, Default)]
pub(crate) struct CallCounters {
    pub ended: AtomicU64,
    pub failed: AtomicU64,
    pub in_flight: AtomicU64,
}

/// Periods of the load, which classify calls.
pub(crate) struct LoadPeriods {
    pub from: Duration,
    // No calls are made from this time on.
    pub until: Duration,
    // First fault, or the end of the load without faults.
    pub quiet_until: Duration,
    // Large faults, each with the teams that it hits.
    pub storms: Vec<(Duration, HashSet<TeamNo>)>,
    // Teams without a fault during the whole run.
    pub untouched: HashSet<TeamNo>,
}

impl LoadPeriods {
    /// Returns true if a call at this time follows shortly after a large fault that does not hit the called team.
    fn is_near_storm(&self, at: Duration, team: TeamNo) -> bool {
        self.storms.iter().any(|(from, hit)| *from <= at && at < *from + NEIGHBOURS && !hit.contains(&team))
    }

    /// Returns true if there are large faults and none of them ever hits the team.
    fn is_neighbour(&self, team: TeamNo) -> bool {
        !self.storms.is_empty() && self.storms.iter().all(|(_, hit)| !hit.contains(&team))
    }
}

pub(crate) struct LoadGenerator {
    pub caller: Arc<dyn LoadCaller>,
    pub clock: RunClock,
    pub shape: FleetShape,
    pub times: LoadPeriods,
    pub tally: Arc<CallCounters>,
    pub timeout: Duration,
    pub stop: CancellationToken,
}

#[derive(Default)]
pub(crate) struct CallResults {
    pub findings: CallFindings,
    pub answers: ResponseCheck,
    // Calls before the first fault to the teams that no large fault hits.
    pub neighbours_quiet: Latency,
    // Failed calls before the first fault, or to teams without a fault during the whole run.
    pub unexcused: Vec<InvariantViolation>,
}

struct FinishedCall {
    call: PlannedCall,
    planned: Duration,
    // Outcome and latency; `None` if the call was not made.
    result: Option<(CallOutcome, Duration)>,
    // Index of the caller in a closed loop.
    source: usize,
}

impl LoadGenerator {
    pub(crate) async fn run(self, sources: CallSources) -> CallResults {
        let mut calls = CallResults::default();
        let mut under_way = JoinSet::new();
        let made = async {
            match sources {
                CallSources::Open(source, in_flight_max) => {
                    self.run_open_loop(*source, in_flight_max, &mut under_way, &mut calls).await;
                }
                CallSources::Closed(sources) => self.run_closed_loop(sources, &mut under_way, &mut calls).await,
            }
            // Keep the load period even if no source has another call.
            self.wait_for_end().await;
            self.clock.now().saturating_sub(self.times.from)
        };
        // A closed-loop caller that never gets its response must not block the run.
        let took = tokio::select! {
            biased;
            took = made => took,
            () = self.wait_past_timeouts() => self.times.until.saturating_sub(self.times.from),
        };
        self.drain_in_flight(&mut under_way, &mut calls).await;
        calls.findings.per_second = calls.findings.answered as f64 / took.as_secs_f64().max(1e-3);
        calls
    }

    // Waits for the end of the load.
    async fn wait_for_end(&self) {
        tokio::select! {
            biased;
            () = self.stop.cancelled() => {}
            () = sleep_until(self.clock.instant(self.times.until)) => {}
        }
    }

    // Waits until a call in flight counts as never answered.
    async fn wait_past_timeouts(&self) {
        self.wait_for_end().await;
        sleep(self.timeout + PATIENCE).await;
    }

    async fn run_open_loop(
        &self,
        source: CallSource,
        in_flight_max: usize,
        under_way: &mut JoinSet<FinishedCall>,
        calls: &mut CallResults,
    ) {
        let mut planned = self.times.from;
        for call in source {
            planned += call.pause;
            if planned >= self.times.until {
                return;
            }
            let arrival = sleep_until(self.clock.instant(planned));
            tokio::pin!(arrival);
            loop {
                tokio::select! {
                    biased;
                    () = self.stop.cancelled() => return,
                    Some(done) = under_way.join_next(), if !under_way.is_empty() => self.record_result(done, calls),
                    () = &mut arrival => break,
                }
            }
            if under_way.len() >= in_flight_max {
                calls.findings.shed += 1;
                let is_beside = self.times.is_near_storm(planned, self.shape.team_of(call.nth));
                calls.findings.neighbours_failed += u64::from(is_beside);
            } else {
                self.start_call(call, planned, 0, under_way, calls);
            }
        }
    }

    async fn run_closed_loop(
        &self,
        mut sources: Vec<CallSource>,
        under_way: &mut JoinSet<FinishedCall>,
        calls: &mut CallResults,
    ) {
        for nth in 0..sources.len() {
            self.start_next(&mut sources, nth, self.times.from, under_way, calls);
        }
        while let Some(done) = under_way.join_next().await {
            let source = done.as_ref().map(|done| done.source).ok();
            self.record_result(done, calls);
            if let Some(source) = source {
                self.start_next(&mut sources, source, self.clock.now(), under_way, calls);
            }
        }
    }

    fn start_next(
        &self,
        sources: &mut [CallSource],
        nth: usize,
        now: Duration,
        under_way: &mut JoinSet<FinishedCall>,
        calls: &mut CallResults,
    ) {
        let Some(call) = sources.get_mut(nth).and_then(Iterator::next) else { return };
        let planned = now + call.pause;
        if planned < self.times.until && !self.stop.is_cancelled() {
            self.start_call(call, planned, nth, under_way, calls);
        }
    }

    fn start_call(
        &self,
        call: PlannedCall,
        planned: Duration,
        source: usize,
        under_way: &mut JoinSet<FinishedCall>,
        calls: &mut CallResults,
    ) {
        calls.answers.record_call(&call.token);
        let (caller, tally, stop) = (Arc::clone(&self.caller), Arc::clone(&self.tally), self.stop.clone());
        let at = self.clock.instant(planned);
        under_way.spawn(async move {
            tokio::select! {
                biased;
                () = sleep_until(at) => {}
                () = stop.cancelled() => return FinishedCall { call, planned, result: None, source },
            }
            tally.in_flight.fetch_add(1, Ordering::Relaxed);
            let answered = caller.call(&call).await;
            tally.in_flight.fetch_sub(1, Ordering::Relaxed);
            // Measured from the planned time: a delay in the harness must not make a server look faster.
            FinishedCall { call, planned, result: Some((answered, at.elapsed())), source }
        });
    }

    async fn drain_in_flight(&self, under_way: &mut JoinSet<FinishedCall>, calls: &mut CallResults) {
        let longest = self.clock.instant(self.clock.now().max(self.times.until)) + self.timeout + PATIENCE;
        while let Ok(Some(done)) = timeout_at(longest, under_way.join_next()).await {
            self.record_result(done, calls);
        }
        under_way.abort_all();
    }

    fn record_result(&self, done: Result<FinishedCall, tokio::task::JoinError>, calls: &mut CallResults) {
        // A caller that panicked received no response: its token stays open.
        let Ok(FinishedCall { call, planned, result: came_of_it, .. }) = done else { return };
        let Some((answered, took)) = came_of_it else { return calls.answers.record_error(&call.token) };
        let findings = &mut calls.findings;
        findings.planned += 1;
        self.tally.ended.fetch_add(1, Ordering::Relaxed);
        let team = self.shape.team_of(call.nth);
        let (fate, why) = match answered {
            CallOutcome::Text(text) => {
                calls.answers.record_response(&call.token, &text);
                findings.answered += 1;
                if planned < self.times.quiet_until {
                    findings.quiet.record(took);
                    if self.times.is_neighbour(team) {
                        calls.neighbours_quiet.record(took);
                    }
                } else {
                    findings.storm.record(took);
                    if self.times.is_near_storm(planned, team) {
                        findings.neighbours.record(took);
                    }
                }
                return;
            }
            CallOutcome::ServerError(why) => ("server_error".to_owned(), why),
            CallOutcome::Failed { fate, why } => (fate.unwrap_or_else(|| "unknown".to_owned()), why),
        };
        if planned < self.times.quiet_until {
            findings.quiet_failed += 1;
        } else {
            findings.storm_failed += 1;
            findings.neighbours_failed += u64::from(self.times.is_near_storm(planned, team));
        }
        let ended = planned + took;
        if ended < self.times.quiet_until || self.times.untouched.contains(&team) {
            calls.unexcused.push(unexcused_failure(ended, call.nth, &call.token, &why));
        }
        calls.answers.record_error(&call.token);
        findings.failed += 1;
        self.tally.failed.fetch_add(1, Ordering::Relaxed);
        *findings.by_fate.entry(fate).or_insert(0) += 1;
    }
}
