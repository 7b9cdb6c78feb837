//! What must hold, watched from outside. Each promise has a checker of its own that is fed with what was seen: events as
//! a sink gets them, starts as a connector counts them, answers as callers got them. None of them has a clock, a lock or
//! a way into the runtime, so a checker can be wrong but not blind to what it was fed.

mod answers;
mod budget;
mod callable;
mod gaps;
mod growth;
mod leftovers;
mod limits;
mod transitions;

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use mcp_satellite_actors::model::event::{Envelope, Event};
use mcp_satellite_actors::model::ids::Run;
use mcp_satellite_actors::model::policy::RestartPolicy;

use super::measure::Latency;
use super::scenario::Limits;
use super::types::{CallFindings, Checked, End, Invariant, Nth, Pardon, Probe, Sample, TeamNo, Violation};

pub use answers::Answers;
pub use limits::{recovery, unexcused};

/// As many violations are kept; what is over is counted.
const KEPT_MAX: usize = 100_000;

/// What a look is at, of each promise.
const LOOKED_AT: [(Invariant, &str); 10] = [
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

/// All checkers of a run.
#[derive(Debug)]
pub struct Judge {
    limits: Limits,
    gaps: gaps::Gaps,
    transitions: transitions::Transitions,
    budget: budget::Budget,
    teams: Vec<TeamNo>,
    /// The first event's: the run began with it.
    origin: Option<Timestamp>,
    /// How often each promise was looked at.
    looks: BTreeMap<Invariant, u64>,
    /// Why what was asked for could not be judged.
    not_checked: BTreeMap<Invariant, String>,
    broken: Broken,
}

/// What was found so far.
#[derive(Debug, Default)]
struct Broken {
    violations: Vec<Violation>,
    count: u64,
}

impl Broken {
    fn push(&mut self, invariant: Invariant, at: Duration, whose: Option<Nth>, what: String) {
        self.count += 1;
        if self.violations.len() < KEPT_MAX {
            let at_ms = u64::try_from(at.as_millis()).unwrap_or(u64::MAX);
            let instance = whose.map(|nth| format!("i{}", nth.0));
            self.violations.push(Violation { invariant, since_ms: at_ms, at_ms, instance, what });
        }
    }
}

impl Judge {
    /// For a fleet, by the team of each instance, that is held to this budget.
    pub fn new(fleet: &[TeamNo], budget: &RestartPolicy, limits: &Limits) -> Self {
        Self {
            limits: limits.clone(),
            gaps: gaps::Gaps::default(),
            transitions: transitions::Transitions::new(fleet.len()),
            budget: budget::Budget::new(fleet.len(), budget),
            teams: fleet.to_vec(),
            origin: None,
            looks: BTreeMap::new(),
            not_checked: BTreeMap::new(),
            broken: Broken::default(),
        }
    }

    /// A sink was given this event and takes it. Events that it does not take, so that they come again, are not told.
    pub fn told(&mut self, envelope: &Envelope) {
        let at = self.since_origin(envelope.timestamp);
        self.looked(Invariant::NoGap, 1);
        let broken = &mut self.broken;
        if self.gaps.told(at, envelope, broken) {
            self.transitions.begin_anew();
            self.budget.deafened(at);
        }
        let nth = envelope.event.subject().and_then(|of| Nth::of(of.installation_id.as_str()));
        if let Some(nth) = nth {
            match &envelope.event {
                Event::StatusChanged { status, .. } => {
                    *self.looks.entry(Invariant::LegalTransitions).or_default() += 1;
                    self.transitions.changed(at, nth, *status, broken);
                }
                // Ends that are charged to nobody, each followed by a start.
                Event::Dormant { .. } | Event::Stopped { .. } => self.budget.excuse(at, nth),
                Event::Crashed { .. } | Event::Exited { .. } => self.budget.ended(at, nth),
                Event::PermanentlyFailed { .. } => self.budget.gave_up(at, nth, broken),
                _ => {}
            }
        }
        self.budget.settle(at, broken);
    }

    /// The runtime has asked for a process. Connections to remote servers are no starts: they have no budget.
    pub fn started(&mut self, nth: Nth, _run: Run, at: Duration) {
        self.looked(Invariant::RestartBudget, 1);
        self.budget.started(at, nth);
    }

    /// Somebody is about to be given a new start: told before it is asked for, and once more when it was granted, so that
    /// no start of the time between is charged to the wrong side. Of a team's panic only before.
    ///
    /// A wake needs no pardon: the event that told of the sleep is one.
    pub fn pardoned(&mut self, whom: Pardon, at: Duration) {
        match whom {
            Pardon::Instance(nth) => self.budget.pardoned(at, nth),
            Pardon::Team(team) => {
                // What it ran is started again, once, and not charged; what it showed is shown anew.
                for nth in (0..).zip(&self.teams).filter(|(_, of)| **of == team).map(|(nth, _)| Nth(nth)) {
                    self.budget.excuse(at, nth);
                    self.transitions.excuse(at, nth);
                }
            }
        }
    }

    /// Somebody has looked whether what is shown as online can be called.
    pub fn probed(&mut self, probe: &Probe) {
        self.looked(Invariant::OnlineIsCallable, 1);
        callable::probed(probe, &mut self.broken);
    }

    /// A caller has ended, and this is what it got.
    pub fn answers(&mut self, answers: Answers) {
        answers.settle(&mut self.broken);
    }

    /// So often somebody has looked whether a promise is kept: for those whose looks are not made here.
    pub fn looked(&mut self, invariant: Invariant, times: u64) {
        *self.looks.entry(invariant).or_default() += times;
    }

    /// The calls of the run, and those before the faults to teams that a fault of many did not befall.
    pub fn calls(&mut self, at: Duration, calls: &CallFindings, neighbours_quiet: &Latency) {
        self.looked(Invariant::OwnAnswer, calls.answered);
        if self.limits.neighbours.is_some() {
            self.looked(Invariant::Neighbours, calls.neighbours.len() + calls.neighbours_failed);
            let (storm, failed) = (&calls.neighbours, calls.neighbours_failed);
            match limits::neighbours(&self.limits, at, neighbours_quiet, storm, failed) {
                Ok(violation) => self.found(violation),
                Err(why) => drop(self.not_checked.insert(Invariant::Neighbours, why)),
            }
        }
    }

    /// The curves of the run, which took so long by the machine's clock.
    pub fn curves(&mut self, samples: &[Sample], took: Duration) {
        if self.limits.flat.is_some() {
            self.looked(Invariant::Flat, samples.len() as u64);
            match limits::flat(&self.limits, samples, took) {
                Ok(violations) => self.found(violations),
                Err(why) => drop(self.not_checked.insert(Invariant::Flat, why)),
            }
        }
    }

    /// How much each promise was looked at, as far as it was asked for.
    pub fn checked(&self, end: &End) -> Vec<Checked> {
        let checked = |(invariant, at)| {
            let (looks, why) = match invariant {
                Invariant::NothingLeft => (1, None),
                Invariant::MemoryBack => (1, growth::not_checked(end, &self.limits)),
                _ => (self.looks.get(&invariant).copied().unwrap_or(0), self.not_checked.get(&invariant).cloned()),
            };
            let why = why.or_else(|| (looks == 0).then(|| "there was nothing to look at".to_owned()));
            Checked { invariant, looks, at, not_checked: why }
        };
        let is_asked_for = |(invariant, _): &(Invariant, &str)| match invariant {
            Invariant::Neighbours => self.limits.neighbours.is_some(),
            Invariant::Flat => self.limits.flat.is_some(),
            _ => true,
        };
        LOOKED_AT.into_iter().filter(is_asked_for).map(checked).collect()
    }

    /// A promise whose numbers others have: [`recovery`], [`unexcused`].
    pub fn found(&mut self, violations: impl IntoIterator<Item = Violation>) {
        for violation in violations {
            self.broken.count += 1;
            self.broken.violations.push(violation);
        }
    }

    /// Takes back what broke while other programs used most of the machine's CPU time: the machine may have been late, and not
    /// the satellite. The promise counts as not checked then, with the reason.
    pub fn excuse_starved(&mut self, samples: &[Sample]) {
        let mut excused: BTreeMap<Invariant, (u64, u64)> = BTreeMap::new();
        self.broken.violations.retain(|violation| {
            let Some(share) = limits::starved(violation, samples) else { return true };
            let (count, most) = excused.entry(violation.invariant).or_default();
            (*count, *most) = (*count + 1, share.max(*most));
            false
        });
        for (invariant, (count, most)) in excused {
            self.broken.count -= count;
            let why = format!("{count} are not counted: other programs used up to {most} % of the CPU time meanwhile");
            self.not_checked.insert(invariant, why);
        }
    }

    /// How often a promise was broken so far.
    pub fn count(&self) -> u64 {
        self.broken.count
    }

    /// All that was found, by time.
    pub fn finish(self, end: &End) -> Vec<Violation> {
        let Self { limits, gaps, budget, mut broken, .. } = self;
        gaps.finish(end, &mut broken);
        budget.finish(&mut broken);
        leftovers::finish(end, &mut broken);
        growth::finish(end, &limits, &mut broken);
        let mut violations = broken.violations;
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
