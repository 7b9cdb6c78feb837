//! Checks of the invariants from outside the runtime. Each invariant has its own check, which receives only
//! observations: events as a sink receives them, starts as a connector counts them, responses as callers receive them.
//! The checks have no clock, no lock and no access to the runtime.

mod answers;
mod budget;
mod callable;
mod gaps;
mod growth;
mod leftovers;
mod limits;
mod transitions;
mod violations;

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use mcp_satellite_actors::model::event::{Envelope, Event};
use mcp_satellite_actors::model::policy::RestartPolicy;

use self::violations::FoundViolations;
use super::measure::Latency;
use super::scenario::ScenarioLimits;
use super::types::{
    BudgetReset, CallFindings, InstanceNo, Invariant, InvariantCoverage, InvariantViolation, ProbeResult, RunEndState,
    RunSample, TeamNo,
};

pub use answers::ResponseCheck;
pub use limits::{check_recovery, unexcused_failure};

// Unit in which the checks of each invariant are counted.
const CHECKED_UNITS: [(Invariant, &str); 10] = [
    (Invariant::OwnAnswer, "answers"),
    (Invariant::OnlineIsCallable, "probes"),
    (Invariant::RestartBudget, "starts"),
    (Invariant::LegalTransitions, "statuses"),
    (Invariant::NoGap, "events"),
    (Invariant::NothingLeft, "ends"),
    (Invariant::MemoryBack, "comparisons"),
    (Invariant::Recovery, "recoveries"),
    (Invariant::Neighbours, "calls"),
    (Invariant::Flat, "samples"),
];

/// Checks of a run, with their observations so far.
#[derive(Debug)]
pub struct InvariantChecks {
    limits: ScenarioLimits,
    gaps: gaps::EventGapCheck,
    transitions: transitions::TransitionCheck,
    budget: budget::BudgetCheck,
    teams: Vec<TeamNo>,
    // Timestamp of the first event, the time origin of all events.
    origin: Option<Timestamp>,
    // Number of checks.
    check_counts: BTreeMap<Invariant, u64>,
    // Reasons why an invariant could not be checked.
    not_checked: BTreeMap<Invariant, String>,
    found: FoundViolations,
}

impl InvariantChecks {
    /// Creates the checks for a fleet, given by the team of each instance, with this restart budget and these limits.
    pub fn new(fleet: &[TeamNo], budget: &RestartPolicy, limits: &ScenarioLimits) -> Self {
        Self {
            limits: limits.clone(),
            gaps: gaps::EventGapCheck::default(),
            transitions: transitions::TransitionCheck::new(fleet.len()),
            budget: budget::BudgetCheck::new(fleet.len(), budget),
            teams: fleet.to_vec(),
            origin: None,
            check_counts: BTreeMap::new(),
            not_checked: BTreeMap::new(),
            found: FoundViolations::default(),
        }
    }

    /// Records an event that the sink accepted. Rejected events must not be recorded: they will be sent again.
    pub fn record_event(&mut self, envelope: &Envelope) {
        let at = self.since_origin(envelope.timestamp);
        self.add_checks(Invariant::NoGap, 1);
        let violations = &mut self.found;
        if self.gaps.record_event(at, envelope, violations) {
            self.transitions.reset();
            self.budget.record_lost_events(at);
        }
        let nth = envelope.event.subject().and_then(|of| InstanceNo::from_installation_id(of.installation_id.as_str()));
        if let Some(nth) = nth {
            match &envelope.event {
                Event::StatusChanged { status, .. } => {
                    *self.check_counts.entry(Invariant::LegalTransitions).or_default() += 1;
                    self.transitions.record_status(at, nth, *status, violations);
                }
                // These ends are not charged to the budget, and a start follows each of them.
                Event::Dormant { .. } | Event::Stopped { .. } => self.budget.excuse(at, nth),
                Event::Crashed { .. } | Event::Exited { .. } => self.budget.record_end(at, nth),
                Event::PermanentlyFailed { .. } => self.budget.check_given_up(at, nth, violations),
                _ => {}
            }
        }
        self.budget.check_due(at, violations);
    }

    /// Records a start of a process. Connections to remote servers do not count: they have no restart budget.
    pub fn record_start(&mut self, nth: InstanceNo, at: Duration) {
        self.add_checks(Invariant::RestartBudget, 1);
        self.budget.record_start(at, nth);
    }

    /// Records a new restart budget. Callers record an instance's manual restart twice, before the request and after its
    /// completion, so that a start between the two can be assigned to either side. They record the panic of a team only
    /// once, before it.
    ///
    /// A wake-up needs no manual restart: the event of the earlier sleep excuses the start.
    pub fn record_reset(&mut self, reset: BudgetReset, at: Duration) {
        match reset {
            BudgetReset::Instance(nth) => self.budget.record_reset(at, nth),
            BudgetReset::Team(team) => {
                // Each instance of the team is started once without a charge, and its status is published anew.
                for nth in (0..).zip(&self.teams).filter(|(_, of)| **of == team).map(|(nth, _)| InstanceNo(nth)) {
                    self.budget.excuse(at, nth);
                    self.transitions.excuse(at, nth);
                }
            }
        }
    }

    pub fn record_probe(&mut self, probe: &ProbeResult) {
        self.add_checks(Invariant::OnlineIsCallable, 1);
        callable::check_probe(probe, &mut self.found);
    }

    /// Adds the results of a caller.
    pub fn add_responses(&mut self, answers: ResponseCheck) {
        answers.finish(&mut self.found);
    }

    pub fn add_checks(&mut self, invariant: Invariant, times: u64) {
        *self.check_counts.entry(invariant).or_default() += times;
    }

    /// Checks the calls of the run. `neighbours_quiet` contains the calls before the first fault to teams that no large
    /// fault hits.
    pub fn check_calls(&mut self, at: Duration, calls: &CallFindings, neighbours_quiet: &Latency) {
        self.add_checks(Invariant::OwnAnswer, calls.answered);
        if self.limits.neighbours.is_some() {
            self.add_checks(Invariant::Neighbours, calls.neighbours.len() + calls.neighbours_failed);
            let (storm, failed) = (&calls.neighbours, calls.neighbours_failed);
            match limits::check_neighbours(&self.limits, at, neighbours_quiet, storm, failed) {
                Ok(violation) => self.add_violations(violation),
                Err(why) => drop(self.not_checked.insert(Invariant::Neighbours, why)),
            }
        }
    }

    /// Checks the samples of the run. `took` is its duration in real time.
    pub fn check_samples(&mut self, samples: &[RunSample], took: Duration) {
        if self.limits.flat.is_some() {
            self.add_checks(Invariant::Flat, samples.len() as u64);
            match limits::check_flat(&self.limits, samples, took) {
                Ok(violations) => self.add_violations(violations),
                Err(why) => drop(self.not_checked.insert(Invariant::Flat, why)),
            }
        }
    }

    /// Returns the number of checks of each invariant that the scenario requires.
    pub fn coverage(&self, end: &RunEndState) -> Vec<InvariantCoverage> {
        let checked = |(invariant, unit)| {
            let (checks, why) = match invariant {
                Invariant::NothingLeft => (1, None),
                Invariant::MemoryBack => (1, growth::not_checked_reason(end, &self.limits)),
                _ => {
                    (self.check_counts.get(&invariant).copied().unwrap_or(0), self.not_checked.get(&invariant).cloned())
                }
            };
            let why = why.or_else(|| (checks == 0).then(|| "nothing to check occurred".to_owned()));
            InvariantCoverage { invariant, checks, unit, not_checked: why }
        };
        let is_required = |(invariant, _): &(Invariant, &str)| match invariant {
            Invariant::Neighbours => self.limits.neighbours.is_some(),
            Invariant::Flat => self.limits.flat.is_some(),
            _ => true,
        };
        CHECKED_UNITS.into_iter().filter(is_required).map(checked).collect()
    }

    /// Adds violations found elsewhere, such as those of [`check_recovery`] and [`unexcused_failure`].
    pub fn add_violations(&mut self, violations: impl IntoIterator<Item = InvariantViolation>) {
        for violation in violations {
            self.found.count += 1;
            self.found.violations.push(violation);
        }
    }

    /// Removes violations that occurred while other programs used most of the CPU time: the machine, not the satellite,
    /// may have been late. The invariant then counts as not checked, with this reason.
    pub fn excuse_starved(&mut self, samples: &[RunSample]) {
        let mut excused: BTreeMap<Invariant, (u64, u64)> = BTreeMap::new();
        self.found.violations.retain(|violation| {
            let Some(share) = limits::starvation_percent(violation, samples) else { return true };
            let (count, most) = excused.entry(violation.invariant).or_default();
            (*count, *most) = (*count + 1, share.max(*most));
            false
        });
        for (invariant, (count, most)) in excused {
            self.found.count -= count;
            let others = format!("other programs used up to {most} % of the CPU time meanwhile");
            let why = match count {
                1 => format!("1 violation is not counted: {others}"),
                _ => format!("{count} violations are not counted: {others}"),
            };
            self.not_checked.insert(invariant, why);
        }
    }

    /// Returns the number of violations so far.
    pub fn violation_count(&self) -> u64 {
        self.found.count
    }

    /// Performs the final checks and returns all violations in the order of their time.
    pub fn finish(self, end: &RunEndState) -> Vec<InvariantViolation> {
        let Self { limits, gaps, budget, mut found, .. } = self;
        gaps.finish(end, &mut found);
        budget.finish(&mut found);
        leftovers::finish(end, &mut found);
        growth::finish(end, &limits, &mut found);
        let mut violations = found.violations;
        violations.sort_by_key(|violation| violation.at_ms);
        violations
    }

    fn since_origin(&mut self, timestamp: Timestamp) -> Duration {
        let origin = *self.origin.get_or_insert(timestamp);
        Duration::try_from(timestamp.duration_since(origin)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;
