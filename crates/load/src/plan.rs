//! Plan of a run: all faults and calls, drawn before the run starts. The same scenario and seed give the same plan. The
//! draws of a rule do not depend on other rules, except that a victim has only one fault at a time. Rare faults choose
//! their victims first, so that each kind of fault occurs in a small fleet too.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use mcp_satellite_actors::model::policy::RestartPolicy;
use rand::RngExt;
use rand::rngs::StdRng;

use super::random::{DurationDistribution, RunSeed, ZipfIndexes};
use super::scenario::{
    CallLoad, FaultRule, FaultTiming, FleetShape, Scenario, ScenarioServer, VictimSelection, fault_name,
};
use super::types::{
    FaultKind, FaultVictim, InstanceNo, LoadTransport, PlannedCall, PlannedFault, ServerEnvironment, TeamNo,
    VictimClass,
};
use mcp_satellite_sim::SimScript;

// Number of different scripts of a kind of server.
const SCRIPTS: u64 = 32;
// Random draws of a healthy victim before all healthy ones are listed.
const DRAWS: usize = 4;
// Victims that write huge lines, of more than 1 MiB, at the same time.
const HUGE_MAX: usize = 8;

/// Planned faults and scripts of the servers.
#[derive(Debug, Clone, PartialEq)]
pub struct FaultPlan {
    /// Faults in the order of their time.
    pub injections: Vec<PlannedFault>,
    /// Faults that cannot be injected in this mode or have no healthy victim, by kind.
    pub impossible: Vec<(FaultKind, usize)>,
    /// Scripts of each kind of server, which differ in handshake and seed. [`script_of`] selects one of them.
    pub scripts: Vec<Vec<Arc<SimScript>>>,
}

/// Draws the faults and the scripts of the servers.
pub fn plan(scenario: &Scenario, seed: RunSeed, mode: ServerEnvironment) -> FaultPlan {
    let kinds: Vec<usize> = scenario.fleet.all().map(|nth| kind_of(scenario, seed, nth)).collect();
    let mut draft = PlanBuilder::new(scenario, seed, &kinds);
    let mut rules: BTreeMap<FaultKind, u64> = BTreeMap::new();
    let mut named = Vec::new();
    for (rule_index, rule) in scenario.faults.iter().enumerate() {
        // The stream is named by the kind, not by the position, so that a new rule does not change other rules.
        let nth = rules.entry(rule.kind).or_default();
        let name = format!("{} {nth}", fault_name(rule.kind));
        *nth += 1;
        let times = draft.times(rule, &name);
        named.push((rule_index, rule, name, times));
    }
    // The sort is stable: rules with the same number of faults choose in the order of the file.
    named.sort_by_key(|(_, _, _, times)| times.len());
    for (rule_index, rule, name, times) in named {
        draft.draw(rule_index, rule, &name, times, mode);
    }
    let PlanBuilder { mut drawn, impossible, .. } = draft;
    // Faults at the same time are in the order of the file.
    drawn.sort_by_key(|(rule_index, injection)| (injection.at, *rule_index));
    let mut injections: Vec<_> = drawn.into_iter().map(|(_, injection)| injection).collect();
    for (serial, injection) in (0..).zip(&mut injections) {
        injection.serial = serial;
    }
    let scripts = scenario.kinds.iter().map(|kind| scripts(kind, seed)).collect();
    FaultPlan { injections, impossible: impossible.into_iter().collect(), scripts }
}

/// Returns the kind of server of an instance, as an index into the kinds of the scenario.
pub fn kind_of(scenario: &Scenario, seed: RunSeed, nth: InstanceNo) -> usize {
    let all: u64 = scenario.kinds.iter().map(|kind| u64::from(kind.weight)).sum();
    let mut drawn = seed.derive("kind", nth.0.into()) % all.max(1);
    for (index, kind) in scenario.kinds.iter().enumerate() {
        match drawn.checked_sub(kind.weight.into()) {
            Some(rest) => drawn = rest,
            None => return index,
        }
    }
    0
}

/// Returns the script of an instance, as an index into [`FaultPlan::scripts`] of its kind.
pub fn script_of(nth: InstanceNo) -> usize {
    (u64::from(nth.0) % SCRIPTS) as usize
}

fn scripts(kind: &ScenarioServer, seed: RunSeed) -> Vec<Arc<SimScript>> {
    let one = |nth| {
        let handshake_delay = kind.handshake.draw(&mut seed.stream(&format!("handshake {}", kind.name), nth));
        let seed = seed.derive(&format!("script {}", kind.name), nth);
        Arc::new(SimScript { seed, handshake_delay, ..kind.script.clone() })
    };
    (0..SCRIPTS).map(one).collect()
}

/// Victim that has one fault at a time. `Huge` is one of the `HUGE_MAX` slots for huge lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum FaultSlot {
    Instance(InstanceNo),
    Team(TeamNo),
    Registry,
    Batcher,
    Sink,
    Huge(usize),
}

// End of each fault of a victim, by its start. Faults never overlap.
type FaultPeriods = BTreeMap<Duration, Duration>;

struct PlanBuilder<'a> {
    scenario: &'a Scenario,
    seed: RunSeed,
    stdio: Vec<InstanceNo>,
    remote: Vec<InstanceNo>,
    all: Vec<InstanceNo>,
    fault_periods: HashMap<FaultSlot, FaultPeriods>,
    // Each fault with the position of its rule in the file.
    drawn: Vec<(usize, PlannedFault)>,
    impossible: BTreeMap<FaultKind, usize>,
}

impl<'a> PlanBuilder<'a> {
    fn new(scenario: &'a Scenario, seed: RunSeed, kinds: &[usize]) -> Self {
        let of = |transport| {
            let fitting = move |(_, kind): &(InstanceNo, &usize)| scenario.kinds[**kind].transport == transport;
            scenario.fleet.all().zip(kinds).filter(fitting).map(|(nth, _)| nth).collect()
        };
        let (stdio, remote) = (of(LoadTransport::Stdio), of(LoadTransport::Remote));
        let all = scenario.fleet.all().collect();
        let (fault_periods, drawn, impossible) = (HashMap::new(), Vec::new(), BTreeMap::new());
        Self { scenario, seed, stdio, remote, all, fault_periods, drawn, impossible }
    }

    fn draw(&mut self, rule_index: usize, rule: &FaultRule, name: &str, times: Vec<Duration>, mode: ServerEnvironment) {
        for (nth, at) in (0..).zip(times) {
            // Each fault has its own streams, so that a repeated draw of a victim changes no other fault.
            let mut victim_rng = self.seed.stream(&format!("whom {name}"), nth);
            let mut lasts = self.seed.stream(&format!("lasts {name}"), nth);
            let possible = rule.kind.is_possible(mode);
            let rest = recovery_pause(self.scenario, rule.kind);
            match (rule.victims, rule.kind.victim_class()) {
                (_, VictimClass::Satellite) => {
                    let lasts = rule.duration.draw(&mut lasts);
                    let is_added =
                        possible && self.add_fault(rule_index, rule.kind, FaultVictim::Satellite, at, lasts, rest);
                    self.count_impossible(rule.kind, is_added);
                }
                (VictimSelection::One, _) => {
                    let lasts = rule.duration.draw(&mut lasts);
                    let is_added = possible
                        && self
                            .draw_victim(rule.kind, at, at + lasts + rest, &mut victim_rng)
                            .is_some_and(|victim| self.add_fault(rule_index, rule.kind, victim, at, lasts, rest));
                    self.count_impossible(rule.kind, is_added);
                }
                (VictimSelection::Share(share), _) => {
                    let all = self.candidates(rule.kind).to_vec();
                    let count = share_of(share, all.len());
                    let victims = shuffled(all, &mut victim_rng).into_iter().map(FaultVictim::Instance);
                    self.add_faults(rule_index, rule, victims, count, at, &mut lasts, possible);
                }
                (VictimSelection::TeamsShare(share), befalls) => {
                    let teams: Vec<_> = (0..self.scenario.fleet.teams)
                        .filter_map(|team| u32::try_from(team).ok())
                        .map(TeamNo)
                        .collect();
                    let count = share_of(share, teams.len());
                    let mut teams = shuffled(teams, &mut victim_rng);
                    teams.truncate(count);
                    let victims: Vec<_> = if befalls == VictimClass::Team {
                        teams.into_iter().map(FaultVictim::Team).collect()
                    } else {
                        let fleet = self.scenario.fleet;
                        let members = teams.into_iter().flat_map(|team| fleet.members(team).collect::<Vec<_>>());
                        let fitting = self.candidates(rule.kind);
                        members.filter(|nth| fitting.binary_search(nth).is_ok()).map(FaultVictim::Instance).collect()
                    };
                    let count = victims.len();
                    self.add_faults(rule_index, rule, victims.into_iter(), count, at, &mut lasts, possible);
                }
            }
        }
    }

    fn times(&self, rule: &FaultRule, name: &str) -> Vec<Duration> {
        let run = self.scenario.duration;
        match rule.timing {
            FaultTiming::At(at) => vec![at.time_in(run)],
            FaultTiming::Every { mean, from, until } => {
                let mut rng = self.seed.stream(&format!("when {name}"), 0);
                let (mut at, until) = (from.time_in(run), until.time_in(run));
                let mut times = Vec::new();
                loop {
                    at += DurationDistribution::Exp(mean).draw(&mut rng);
                    if at >= until {
                        return times;
                    }
                    times.push(at);
                }
            }
        }
    }

    // In ascending order.
    fn candidates(&self, kind: FaultKind) -> &[InstanceNo] {
        match kind.victim_class() {
            VictimClass::Stdio => &self.stdio,
            VictimClass::Remote => &self.remote,
            VictimClass::Any | VictimClass::Team | VictimClass::Satellite => &self.all,
        }
    }

    fn draw_victim(&self, kind: FaultKind, at: Duration, until: Duration, rng: &mut StdRng) -> Option<FaultVictim> {
        if kind.victim_class() == VictimClass::Team {
            let teams: Vec<_> = (0..u32::try_from(self.scenario.fleet.teams).unwrap_or(u32::MAX)).map(TeamNo).collect();
            let one = choose(&teams, |team| !self.has_fault(FaultSlot::Team(*team), at, until), rng);
            return one.map(FaultVictim::Team);
        }
        choose(self.candidates(kind), |nth| !self.has_fault(FaultSlot::Instance(*nth), at, until), rng)
            .map(FaultVictim::Instance)
    }

    #[expect(clippy::too_many_arguments, reason = "all parameters of one occurrence of a rule")]
    fn add_faults(
        &mut self,
        rule_index: usize,
        rule: &FaultRule,
        victims: impl Iterator<Item = FaultVictim>,
        count: usize,
        at: Duration,
        lasts: &mut StdRng,
        possible: bool,
    ) {
        let rest = recovery_pause(self.scenario, rule.kind);
        let mut added = 0;
        for victim in victims {
            if added == count || !possible {
                break;
            }
            let lasts = rule.duration.draw(lasts);
            added += usize::from(self.add_fault(rule_index, rule.kind, victim, at, lasts, rest));
        }
        if added < count {
            *self.impossible.entry(rule.kind).or_default() += count - added;
        }
    }

    fn count_impossible(&mut self, kind: FaultKind, is_added: bool) {
        if !is_added {
            *self.impossible.entry(kind).or_default() += 1;
        }
    }

    // Returns false if the victim has another fault at that time.
    fn add_fault(
        &mut self,
        rule_index: usize,
        kind: FaultKind,
        victim: FaultVictim,
        at: Duration,
        lasts: Duration,
        rest: Duration,
    ) -> bool {
        let patient = match (victim, kind) {
            (FaultVictim::Instance(nth), _) => FaultSlot::Instance(nth),
            (FaultVictim::Team(team), _) => FaultSlot::Team(team),
            (FaultVictim::Satellite, FaultKind::RegistryPanic) => FaultSlot::Registry,
            (FaultVictim::Satellite, FaultKind::BatcherPanic) => FaultSlot::Batcher,
            (FaultVictim::Satellite, _) => FaultSlot::Sink,
        };
        let until = at + lasts + rest;
        if self.has_fault(patient, at, until) {
            return false;
        }
        if kind == FaultKind::Huge {
            let Some(huge) = (0..HUGE_MAX).map(FaultSlot::Huge).find(|huge| !self.has_fault(*huge, at, until)) else {
                return false;
            };
            self.fault_periods.entry(huge).or_default().insert(at, until);
        }
        self.fault_periods.entry(patient).or_default().insert(at, until);
        self.drawn.push((rule_index, PlannedFault { serial: 0, at, kind, victim, duration: lasts }));
        true
    }

    fn has_fault(&self, patient: FaultSlot, at: Duration, until: Duration) -> bool {
        let last = self.fault_periods.get(&patient).and_then(|times| times.range(..until).next_back());
        last.is_some_and(|(_, to)| at < *to)
    }
}

/// Returns the pause after a fault before its victim can have another one: about the time of a recovery.
pub fn recovery_pause(scenario: &Scenario, kind: FaultKind) -> Duration {
    let policy = &scenario.policy;
    let delay = policy.restart.delays.iter().max().copied().unwrap_or_default();
    let handshake = scenario.kinds.iter().map(|kind| kind.handshake.longest()).max().unwrap_or_default();
    let again = handshake + Duration::from_secs(1);
    let grace = policy.session.terminate_grace;
    let reconnect = policy.reconnect.backoff_min * 4;
    match kind {
        FaultKind::Crash
        | FaultKind::Exit0
        | FaultKind::CrashLoop
        | FaultKind::Huge
        | FaultKind::MemoryGrowth
        | FaultKind::WorkerPanic => delay + again,
        FaultKind::TeamPanic => longest_team_delay() + again,
        FaultKind::SlowHandshake | FaultKind::NoHandshake => delay + again + policy.session.handshake_timeout + grace,
        FaultKind::Hang => {
            let found = policy.session.request_timeout + policy.watchdog.silence + policy.watchdog.ping_timeout;
            delay + again + found + grace
        }
        FaultKind::SlowSigterm | FaultKind::IgnoreSigterm => again + 2 * grace,
        FaultKind::StderrFlood | FaultKind::Garbage | FaultKind::StrayAnswers => again + grace,
        FaultKind::Unauthorized | FaultKind::SessionLost | FaultKind::Refused | FaultKind::StreamCut => {
            again + reconnect
        }
        FaultKind::RegistryPanic | FaultKind::BatcherPanic => Duration::from_millis(100),
        FaultKind::SinkFails | FaultKind::SinkPanics => Duration::ZERO,
    }
}

/// Returns the longest restart delay of a team supervisor. No scenario can change it.
pub fn longest_team_delay() -> Duration {
    RestartPolicy::default().delays.into_iter().max().unwrap_or_default()
}

fn share_of(share: f64, all: usize) -> usize {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the result is at most `all`")]
    let count = (share * all as f64).round() as usize;
    count.min(all)
}

fn random_below(count: usize, rng: &mut StdRng) -> u32 {
    rng.random_range(0..u32::try_from(count).unwrap_or(u32::MAX).max(1))
}

// The list of all healthy elements is built only if a few random draws fail.
fn choose<T: Copy>(all: &[T], is_well: impl Fn(&T) -> bool, rng: &mut StdRng) -> Option<T> {
    if all.is_empty() {
        return None;
    }
    let drawn = (0..DRAWS).map(|_| all[rng.random_range(0..all.len())]).find(&is_well);
    drawn.or_else(|| {
        let well: Vec<T> = all.iter().copied().filter(is_well).collect();
        (!well.is_empty()).then(|| well[rng.random_range(0..well.len())])
    })
}

fn shuffled<T>(mut all: Vec<T>, rng: &mut StdRng) -> Vec<T> {
    for last in (1..all.len()).rev() {
        all.swap(last, rng.random_range(0..=last));
    }
    all
}

/// Endless source of calls: those of one caller in a closed loop, or all arrivals of an open loop.
pub struct CallSource {
    // Own generator: the calls do not depend on the number of other sources.
    rng: StdRng,
    caller: String,
    call_count: u64,
    pause: DurationDistribution,
    teams: ZipfIndexes,
    timeout: Duration,
    fleet: FleetShape,
    call_durations: Vec<DurationDistribution>,
    kinds: Arc<[u32]>,
}

impl CallSource {
    /// Creates the source of one caller in a closed loop. `kinds` is the result of [`kinds`], shared by all callers.
    pub fn closed_loop(scenario: &Scenario, seed: RunSeed, caller: usize, kinds: &Arc<[u32]>) -> Self {
        let pause = match &scenario.load {
            CallLoad::Closed { think, .. } => *think,
            CallLoad::Open { .. } => DurationDistribution::default(),
        };
        Self::new(scenario, seed, caller as u64, &caller.to_string(), pause, kinds)
    }

    /// Creates the source of all calls of an open loop. `kinds` is the result of [`kinds`].
    pub fn open_loop(scenario: &Scenario, seed: RunSeed, kinds: &Arc<[u32]>) -> Self {
        let per_second = match &scenario.load {
            CallLoad::Open { per_second, .. } => *per_second,
            CallLoad::Closed { .. } => 1.0,
        };
        let pause = DurationDistribution::Exp(Duration::from_secs(1).div_f64(per_second.max(1e-6)));
        Self::new(scenario, seed, u64::MAX, "open", pause, kinds)
    }

    fn new(
        scenario: &Scenario,
        seed: RunSeed,
        nth: u64,
        caller: &str,
        pause: DurationDistribution,
        kinds: &Arc<[u32]>,
    ) -> Self {
        Self {
            rng: seed.stream("calls", nth),
            caller: format!("{:x}-{caller}", seed.0),
            call_count: 0,
            pause,
            teams: ZipfIndexes::new(scenario.fleet.teams, scenario.load.skew()),
            timeout: scenario.load.timeout(),
            fleet: scenario.fleet,
            call_durations: scenario.kinds.iter().map(|kind| kind.call).collect(),
            kinds: kinds.clone(),
        }
    }
}

/// Returns the kind of each instance, by its number.
pub fn kinds(scenario: &Scenario, seed: RunSeed) -> Arc<[u32]> {
    let kind = |nth| u32::try_from(kind_of(scenario, seed, nth)).unwrap_or_default();
    scenario.fleet.all().map(kind).collect()
}

impl Iterator for CallSource {
    type Item = PlannedCall;

    fn next(&mut self) -> Option<PlannedCall> {
        let pause = self.pause.draw(&mut self.rng);
        let team = self.teams.draw(&mut self.rng);
        let team = TeamNo(u32::try_from(team).unwrap_or_default());
        let member = random_below(self.fleet.size_of(team), &mut self.rng);
        let nth = InstanceNo(team.0 + member * u32::try_from(self.fleet.teams).unwrap_or(1));
        let kind = self.kinds.get(nth.0 as usize).copied().unwrap_or_default();
        let after = self.call_durations.get(kind as usize).map(|work| work.draw(&mut self.rng)).unwrap_or_default();
        self.call_count += 1;
        let token = format!("{}-{}", self.caller, self.call_count).into();
        Some(PlannedCall { pause, nth, after, token, timeout: self.timeout })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::scenario::{ScenarioOverrides, can_hit, load, parse};

    fn mixed(instances: usize) -> Scenario {
        let overrides = ScenarioOverrides {
            instances: Some(instances),
            teams: Some(instances / 20),
            ..ScenarioOverrides::default()
        };
        load("mixed").unwrap().with_overrides(overrides).unwrap()
    }

    fn calls(scenario: &Scenario, seed: RunSeed, count: usize) -> Vec<PlannedCall> {
        CallSource::open_loop(scenario, seed, &kinds(scenario, seed)).take(count).collect()
    }

    // Serial numbers are removed: they depend on the whole plan.
    fn without_serials(plan: &FaultPlan, rules: &[FaultRule]) -> Vec<PlannedFault> {
        let known = |injection: &&PlannedFault| rules.iter().any(|rule| rule.kind == injection.kind);
        plan.injections.iter().filter(known).map(|injection| PlannedFault { serial: 0, ..injection.clone() }).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        #[test]
        fn the_seed_determines_the_plan_and_the_calls(seed: u64) {
            let (scenario, seed) = (mixed(200), RunSeed(seed));
            let drawn = plan(&scenario, seed, ServerEnvironment::Simulated);
            prop_assert_eq!(&drawn, &plan(&scenario, seed, ServerEnvironment::Simulated));
            prop_assert_eq!(calls(&scenario, seed, 1000), calls(&scenario, seed, 1000));
            let other = RunSeed(seed.0 ^ 1);
            prop_assert_ne!(&drawn, &plan(&scenario, other, ServerEnvironment::Simulated));
            let tokenless = |calls: Vec<PlannedCall>| calls.into_iter().map(|call| (call.pause, call.nth, call.after)).collect::<Vec<_>>();
            prop_assert_ne!(tokenless(calls(&scenario, seed, 100)), tokenless(calls(&scenario, other, 100)));
        }

        #[test]
        fn an_additional_fault_changes_neither_calls_nor_rarer_faults(seed: u64, left_out in 0..23_usize) {
            let (whole, seed) = (mixed(2000), RunSeed(seed));
            let mut less = whole.clone();
            let left_out = less.faults.remove(left_out);
            prop_assert_eq!(calls(&whole, seed, 100), calls(&less, seed, 100));
            let (whole, with_less) = (plan(&whole, seed, ServerEnvironment::Simulated), plan(&less, seed, ServerEnvironment::Simulated));
            // More frequent rules choose later, so the removed rule may have taken their victims.
            // A planned fault without a victim counts, too: rules choose in the order of their planned faults.
            let impossible = |rule: &FaultRule| whole.impossible.iter().find(|(kind, _)| *kind == rule.kind).map_or(0, |it| it.1);
            let count = |rule: &FaultRule| without_serials(&whole, std::slice::from_ref(rule)).len() + impossible(rule);
            let all = less.faults.clone();
            less.faults.retain(|rule| count(rule) < count(&left_out));
            prop_assert_eq!(without_serials(&whole, &less.faults), without_serials(&with_less, &less.faults));
            let times = |plan: &FaultPlan| {
                // Faults of the satellite itself have only one possible victim.
                let of_servers = without_serials(plan, &all).into_iter().filter(|it| it.kind.victim_class() != VictimClass::Satellite);
                of_servers.map(|it| (it.at, it.kind)).collect::<Vec<_>>()
            };
            prop_assert_eq!(times(&whole), times(&with_less), "a large fleet must always have a victim");
        }

        #[test]
        fn every_kind_of_fault_occurs_in_a_small_fleet(seed: u64) {
            let overrides = ScenarioOverrides { instances: Some(150), duration: Some(Duration::from_secs(60)), ..ScenarioOverrides::default() };
            let scenario = load("mixed").unwrap().with_overrides(overrides).unwrap();
            let drawn = plan(&scenario, RunSeed(seed), ServerEnvironment::Simulated);
            // Faults of the satellite itself occur once or twice, or not at all.
            for (kind, count) in drawn.impossible.iter().filter(|(kind, _)| kind.victim_class() != VictimClass::Satellite) {
                let name = fault_name(*kind);
                let happened = drawn.injections.iter().any(|injection| injection.kind == *kind);
                prop_assert!(happened, "{name} never occurred; {count} times no instance was available");
            }
        }

        #[test]
        fn faults_of_an_instance_do_not_overlap(seed: u64) {
            // A small fleet, so that faults meet.
            let scenario = mixed(60);
            let drawn = plan(&scenario, RunSeed(seed), ServerEnvironment::Simulated);
            let mut until: HashMap<InstanceNo, Duration> = HashMap::new();
            for injection in &drawn.injections {
                if let FaultVictim::Instance(nth) = injection.victim {
                    let well = until.entry(nth).or_default();
                    prop_assert!(*well <= injection.at, "{injection:?} overlaps a fault that ends at {well:?}");
                    *well = injection.at + injection.duration;
                }
            }
            prop_assert!(!drawn.impossible.is_empty(), "in a small fleet some faults must be impossible");
            let serials: Vec<u32> = drawn.injections.iter().map(|injection| injection.serial).collect();
            prop_assert!(serials.into_iter().eq(0..u32::try_from(drawn.injections.len()).unwrap()));
            prop_assert!(drawn.injections.is_sorted_by_key(|injection| injection.at));
        }
    }

    #[test]
    fn faults_hit_only_suitable_victims_within_their_time() {
        let scenario = mixed(400);
        let drawn = plan(&scenario, RunSeed(5), ServerEnvironment::Simulated);
        assert!(drawn.injections.len() > 150, "{}", drawn.injections.len());
        for injection in &drawn.injections {
            assert!((scenario.duration / 5..scenario.duration * 3 / 4).contains(&injection.at), "{injection:?}");
            match injection.victim {
                FaultVictim::Instance(nth) => {
                    let kind = &scenario.kinds[kind_of(&scenario, RunSeed(5), nth)];
                    assert!(can_hit(injection.kind, kind.transport), "{injection:?}");
                }
                FaultVictim::Team(_) => assert_eq!(injection.kind, FaultKind::TeamPanic),
                FaultVictim::Satellite => assert_eq!(injection.kind.victim_class(), VictimClass::Satellite),
            }
        }
    }

    #[test]
    fn faults_that_are_impossible_on_real_servers_are_counted() {
        let drawn = plan(&mixed(400), RunSeed(5), ServerEnvironment::Real);
        let cannot = |kind: &FaultKind| !kind.is_possible(ServerEnvironment::Real);
        assert!(drawn.injections.iter().all(|injection| !cannot(&injection.kind)));
        let impossible: Vec<_> = drawn.impossible.iter().map(|(kind, _)| *kind).filter(cannot).collect();
        assert_eq!(impossible, [FaultKind::Unauthorized, FaultKind::StreamCut]);
    }

    fn shares(victims: &str) -> FaultPlan {
        let text = format!(
            r#"
about = "Shares."
seconds = 10
fleet = {{ instances = 10_000, teams = 100 }}
servers = [{{ name = "tools" }}]
load = {{ loop = "open", per_second = 5 }}
faults = [{{ kind = "crash", at = "50 %", {victims} }}]
"#
        );
        plan(&parse("shares.toml", &text).unwrap(), RunSeed(3), ServerEnvironment::Simulated)
    }

    #[test]
    fn a_third_of_ten_thousand_are_3333_different_victims() {
        let drawn = shares(&format!("share = {}", 1.0 / 3.0));
        let victims: std::collections::HashSet<_> =
            drawn.injections.iter().map(|it| format!("{:?}", it.victim)).collect();
        assert_eq!((drawn.injections.len(), victims.len()), (3333, 3333));
        assert!(drawn.injections.iter().all(|injection| injection.at == Duration::from_secs(5)));
    }

    #[test]
    fn a_share_of_teams_includes_all_their_members() {
        let drawn = shares("teams = 0.33");
        let mut teams: BTreeMap<u32, usize> = BTreeMap::new();
        for injection in &drawn.injections {
            let FaultVictim::Instance(nth) = injection.victim else { panic!("{injection:?}") };
            *teams.entry(nth.0 % 100).or_default() += 1;
        }
        assert_eq!(teams.len(), 33);
        assert!(teams.values().all(|members| *members == 100));
    }

    #[test]
    fn at_most_eight_instances_write_huge_lines_at_a_time() {
        let text = r#"
about = "Huge."
seconds = 10
fleet = { instances = 1000 }
servers = [{ name = "tools" }]
load = { loop = "open", per_second = 5 }
faults = [{ kind = "huge", at = "50 %", share = 0.1 }]
"#;
        let drawn = plan(&parse("huge.toml", text).unwrap(), RunSeed(3), ServerEnvironment::Simulated);
        assert_eq!(drawn.injections.len(), 8);
        assert_eq!(drawn.impossible, [(FaultKind::Huge, 92)]);
    }

    #[test]
    fn every_call_has_a_unique_token_and_an_existing_instance() {
        let scenario = load("flap").unwrap();
        let of_all = kinds(&scenario, RunSeed(9));
        let mut tokens = std::collections::HashSet::new();
        for caller in 0..32 {
            for call in CallSource::closed_loop(&scenario, RunSeed(9), caller, &of_all).take(500) {
                assert!((call.nth.0 as usize) < scenario.fleet.instances);
                assert!(call.token.len() <= 24, "{}", call.token);
                assert!(tokens.insert(call.token));
            }
        }
        let mut by_team = [0_u32; 50];
        for call in CallSource::closed_loop(&scenario, RunSeed(9), 0, &of_all).take(5000) {
            by_team[scenario.fleet.team_of(call.nth).0 as usize] += 1;
        }
        assert!(by_team[0] > 3 * by_team[10], "calls must be skewed between teams: {by_team:?}");
    }

    #[test]
    fn calls_arrive_at_the_configured_rate() {
        let scenario = mixed(200);
        let pauses: Duration = calls(&scenario, RunSeed(2), 10_000).iter().map(|call| call.pause).sum();
        let rate = 10_000.0 / pauses.as_secs_f64();
        assert!((380.0..420.0).contains(&rate), "{rate}");
    }

    #[test]
    fn kinds_of_servers_are_distributed_by_weight() {
        let scenario = mixed(10_000);
        let mut counts = [0_u32; 3];
        kinds(&scenario, RunSeed(4)).iter().for_each(|kind| counts[*kind as usize] += 1);
        let [tools, chatty, cloud] = counts;
        assert!((5800..6200).contains(&tools) && (900..1100).contains(&chatty) && (2800..3200).contains(&cloud));
        let scripts = plan(&scenario, RunSeed(4), ServerEnvironment::Simulated).scripts;
        let handshakes: std::collections::HashSet<_> = scripts[0].iter().map(|script| script.handshake_delay).collect();
        assert_eq!(handshakes.len(), 32);
        assert_eq!(scripts[0][script_of(InstanceNo(33))].tools, 12);
    }
}
