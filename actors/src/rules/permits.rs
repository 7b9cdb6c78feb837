//! Start permits. They limit the number of concurrent starts in the whole satellite, are fair between teams, and prefer
//! starts for which a caller waits. Without them a mass crash would fork thousands of processes at once.
//!
//! The wait for a permit counts against the deadline of a caller, never against the handshake timeout: that one starts
//! with the run. A team over its budget holds one permit at a time.

use std::collections::{HashMap, HashSet, VecDeque};

use crate::model::actor_tree::{PermitKind, PermitLoad};
use crate::model::ids::{InstanceId, RunNumber, TeamId};

/// Permits of processes and of connections to remote servers. They are separate, because connections need few local
/// resources and may take long: neither must wait for the other.
#[derive(Debug)]
pub struct PermitPools {
    processes: StartPermits,
    connections: StartPermits,
}

/// Permits that are held, and instances that wait for one.
#[derive(Debug)]
pub struct StartPermits {
    limit: usize,
    held: HashMap<RunNumber, TeamId>,
    held_by_team: HashMap<TeamId, usize>,
    waiting: HashMap<InstanceId, StartPriority>,
    urgent: PermitLane,
    normal: PermitLane,
    throttled_teams: HashSet<TeamId>,
    // Remaining starts while memory is short; `None` for no limit.
    allowance: Option<usize>,
}

/// Priority of a start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum StartPriority {
    /// No caller waits.
    Normal,
    /// A caller waits.
    Urgent,
}

// One queue per team, and the order of the teams. Entries that were withdrawn or moved to the other lane are skipped
// when their turn comes: only `Permits::waiting` is authoritative.
#[derive(Debug, Default)]
struct PermitLane {
    turns: VecDeque<TeamId>,
    queues: HashMap<TeamId, VecDeque<InstanceId>>,
}

impl PermitLane {
    fn push(&mut self, instance: InstanceId) {
        let queue = self.queues.entry(instance.team.clone()).or_insert_with(|| {
            self.turns.push_back(instance.team.clone());
            VecDeque::new()
        });
        queue.push_back(instance);
    }

    // Removes the next instance of the first team that `may` start. Instances that are no longer `wanted` are dropped.
    fn pop(&mut self, may: impl Fn(&TeamId) -> bool, wanted: impl Fn(&InstanceId) -> bool) -> Option<InstanceId> {
        for _ in 0..self.turns.len() {
            let team = self.turns.pop_front()?;
            if !may(&team) {
                self.turns.push_back(team);
                continue;
            }
            let Some(queue) = self.queues.get_mut(&team) else { continue };
            while let Some(instance) = queue.pop_front() {
                if wanted(&instance) {
                    self.turns.push_back(team);
                    return Some(instance);
                }
            }
            self.queues.remove(&team);
        }
        None
    }
}

impl PermitPools {
    /// Creates pools with these maximum numbers of concurrent starts of processes and of connection attempts.
    pub fn new(processes: usize, connections: usize) -> Self {
        Self { processes: StartPermits::new(processes), connections: StartPermits::new(connections) }
    }

    /// Queues an instance in the pool of its current kind. An earlier request in the other pool, from before a change
    /// of its configuration, is withdrawn.
    pub fn request(&mut self, instance: InstanceId, urgency: StartPriority, remote: bool) {
        let (here, there) = if remote {
            (&mut self.connections, &mut self.processes)
        } else {
            (&mut self.processes, &mut self.connections)
        };
        there.withdraw(&instance);
        here.request(instance, urgency);
    }

    /// Withdraws the request of an instance from both pools.
    pub fn withdraw(&mut self, instance: &InstanceId) {
        self.processes.withdraw(instance);
        self.connections.withdraw(instance);
    }

    /// Releases a permit. A second release has no effect.
    pub fn release(&mut self, run: RunNumber) {
        self.processes.release(run);
        self.connections.release(run);
    }

    /// Returns the number of permits held and of instances waiting, of processes and of connections.
    pub fn load(&self) -> [(usize, usize); 2] {
        [self.processes.load(), self.connections.load()]
    }

    /// Returns the number of teams whose instances start one at a time.
    pub fn throttled_teams(&self) -> usize {
        self.processes.throttled_teams.len()
    }

    /// Removes the requests and permits of a team whose supervisor has ended.
    pub fn forget_team(&mut self, team: &TeamId) {
        self.processes.forget_team(team);
        self.connections.forget_team(team);
    }

    /// Sets whether the processes of a team start one at a time. Its connections are not limited, because they need few
    /// local resources.
    pub fn throttle(&mut self, team: TeamId, one_at_a_time: bool) {
        self.processes.throttle(team, one_at_a_time);
    }

    /// Limits the number of processes that may still start; `None` for no limit. Connections are not limited, because
    /// they need little memory.
    pub fn allow_processes(&mut self, allowance: Option<usize>) {
        self.processes.allow(allowance);
    }

    /// Returns the number of processes that wait for a permit.
    pub fn processes_waiting(&self) -> usize {
        self.processes.load().1
    }

    /// Returns the load of both pools.
    pub fn loads(&self) -> [PermitLoad; 2] {
        self.pools().map(|(pool, permits)| {
            let (held, waiting) = permits.load();
            PermitLoad { pool, held, waiting, max: Some(permits.limit) }
        })
    }

    /// Returns the load of each team that holds or waits for permits, in the pools in which it does.
    pub fn loads_by_team(&self) -> HashMap<TeamId, Vec<PermitLoad>> {
        let mut loads: HashMap<TeamId, Vec<PermitLoad>> = HashMap::new();
        for (pool, permits) in self.pools() {
            for (team, (held, waiting)) in permits.load_by_team() {
                loads.entry(team.clone()).or_default().push(PermitLoad { pool, held, waiting, max: None });
            }
        }
        loads
    }

    fn pools(&self) -> [(PermitKind, &StartPermits); 2] {
        [(PermitKind::Processes, &self.processes), (PermitKind::Connections, &self.connections)]
    }

    /// Grants the next start, if a permit is free, as the run with this number. To be called until it returns `None`.
    pub fn grant(&mut self, run: RunNumber) -> Option<(InstanceId, RunNumber)> {
        self.processes.grant(|| run).or_else(|| self.connections.grant(|| run))
    }
}

impl StartPermits {
    /// Creates permits for `limit` concurrent starts, at least one.
    pub fn new(limit: usize) -> Self {
        Self {
            limit: limit.max(1),
            held: HashMap::new(),
            held_by_team: HashMap::new(),
            waiting: HashMap::new(),
            urgent: PermitLane::default(),
            normal: PermitLane::default(),
            throttled_teams: HashSet::new(),
            allowance: None,
        }
    }

    /// Queues an instance. A repeated request can only raise the priority.
    pub fn request(&mut self, instance: InstanceId, urgency: StartPriority) {
        if self.waiting.get(&instance).is_some_and(|known| *known >= urgency) {
            return;
        }
        self.waiting.insert(instance.clone(), urgency);
        match urgency {
            StartPriority::Urgent => self.urgent.push(instance),
            StartPriority::Normal => self.normal.push(instance),
        }
    }

    /// Withdraws the request of an instance. A permit that was already granted is returned with `release`.
    pub fn withdraw(&mut self, instance: &InstanceId) {
        self.waiting.remove(instance);
    }

    /// Releases a permit. A second release has no effect.
    pub fn release(&mut self, run: RunNumber) {
        if let Some(team) = self.held.remove(&run)
            && let Some(count) = self.held_by_team.get_mut(&team)
        {
            *count -= 1;
            if *count == 0 {
                self.held_by_team.remove(&team);
            }
        }
    }

    /// Removes the requests and permits of a team whose supervisor has ended.
    pub fn forget_team(&mut self, team: &TeamId) {
        self.waiting.retain(|instance, _| instance.team != *team);
        self.held.retain(|_, holder| holder != team);
        self.held_by_team.remove(team);
        self.throttled_teams.remove(team);
    }

    /// Sets whether the instances of a team start one at a time.
    pub fn throttle(&mut self, team: TeamId, one_at_a_time: bool) {
        if one_at_a_time {
            self.throttled_teams.insert(team);
        } else {
            self.throttled_teams.remove(&team);
        }
    }

    /// Limits the number of starts that may still be granted; `None` for no limit.
    pub fn allow(&mut self, allowance: Option<usize>) {
        self.allowance = allowance;
    }

    /// Grants the next start, if a permit is free; `draw` provides the number of the run. To be called until it returns
    /// `None`.
    pub fn grant(&mut self, draw: impl FnOnce() -> RunNumber) -> Option<(InstanceId, RunNumber)> {
        if self.held.len() >= self.limit || self.waiting.is_empty() || self.allowance == Some(0) {
            return None;
        }
        let may = |team: &TeamId| !self.throttled_teams.contains(team) || !self.held_by_team.contains_key(team);
        let waits = |instance: &InstanceId, urgency| self.waiting.get(instance) == Some(&urgency);
        let instance = self
            .urgent
            .pop(may, |instance| waits(instance, StartPriority::Urgent))
            .or_else(|| self.normal.pop(may, |instance| waits(instance, StartPriority::Normal)))?;
        self.waiting.remove(&instance);
        self.allowance = self.allowance.map(|left| left - 1);
        let run = draw();
        self.held.insert(run, instance.team.clone());
        *self.held_by_team.entry(instance.team.clone()).or_default() += 1;
        Some((instance, run))
    }

    /// Returns the number of permits held and of instances waiting.
    pub fn load(&self) -> (usize, usize) {
        (self.held.len(), self.waiting.len())
    }

    fn load_by_team(&self) -> HashMap<&TeamId, (usize, usize)> {
        let mut loads: HashMap<&TeamId, (usize, usize)> = HashMap::new();
        for (team, held) in &self.held_by_team {
            loads.entry(team).or_default().0 = *held;
        }
        for instance in self.waiting.keys() {
            loads.entry(&instance.team).or_default().1 += 1;
        }
        loads
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instance(team: &str, nth: usize) -> InstanceId {
        InstanceId::new(team.into(), "u".into(), format!("{nth}").into())
    }

    struct NumberedPermits(StartPermits, u64);

    impl NumberedPermits {
        fn next(&mut self) -> Option<String> {
            let number = self.1 + 1;
            let (instance, run) = self.0.grant(|| RunNumber(number))?;
            self.1 = run.0;
            Some(format!("{}{}", instance.team, instance.installation))
        }
    }

    #[test]
    fn teams_take_turns_and_urgent_requests_go_first() {
        let mut permits = NumberedPermits(StartPermits::new(5), 0);
        for nth in 0..3 {
            permits.0.request(instance("a", nth), StartPriority::Normal);
        }
        permits.0.request(instance("b", 0), StartPriority::Normal);
        permits.0.request(instance("a", 2), StartPriority::Urgent);
        let order: Vec<String> = std::iter::from_fn(|| permits.next()).collect();
        assert_eq!(order, ["a2", "a0", "b0", "a1"]);
    }

    #[test]
    fn permits_do_not_exceed_the_limit_and_a_release_grants_the_next() {
        let mut permits = NumberedPermits(StartPermits::new(1), 0);
        permits.0.request(instance("a", 0), StartPriority::Normal);
        permits.0.request(instance("b", 0), StartPriority::Normal);
        assert_eq!(permits.next().as_deref(), Some("a0"));
        assert_eq!(permits.next(), None);
        permits.0.release(RunNumber(1));
        permits.0.release(RunNumber(1));
        assert_eq!(permits.next().as_deref(), Some("b0"));
    }

    #[test]
    fn an_allowance_limits_grants_and_urgent_requests_go_first() {
        let mut permits = NumberedPermits(StartPermits::new(10), 0);
        permits.0.allow(Some(0));
        for nth in 0..3 {
            permits.0.request(instance("a", nth), StartPriority::Normal);
        }
        permits.0.request(instance("b", 0), StartPriority::Urgent);
        assert_eq!(permits.next(), None);
        permits.0.allow(Some(1));
        assert_eq!((permits.next().as_deref(), permits.next()), (Some("b0"), None));
        permits.0.allow(None);
        let order: Vec<String> = std::iter::from_fn(|| permits.next()).collect();
        assert_eq!(order, ["a0", "a1", "a2"]);
    }

    #[test]
    fn a_throttled_team_holds_one_permit_without_affecting_others() {
        let mut permits = NumberedPermits(StartPermits::new(10), 0);
        permits.0.throttle("a".into(), true);
        for nth in 0..3 {
            permits.0.request(instance("a", nth), StartPriority::Urgent);
            permits.0.request(instance("b", nth), StartPriority::Normal);
        }
        let order: Vec<String> = std::iter::from_fn(|| permits.next()).collect();
        assert_eq!(order, ["a0", "b0", "b1", "b2"]);
        permits.0.release(RunNumber(1));
        assert_eq!(permits.next().as_deref(), Some("a1"));
    }

    #[test]
    fn withdrawn_requests_and_those_of_a_forgotten_team_get_no_permit() {
        let mut permits = NumberedPermits(StartPermits::new(10), 0);
        permits.0.request(instance("a", 0), StartPriority::Normal);
        permits.0.request(instance("a", 1), StartPriority::Normal);
        permits.0.request(instance("b", 0), StartPriority::Normal);
        permits.0.withdraw(&instance("a", 0));
        assert_eq!(permits.next().as_deref(), Some("a1"));
        permits.0.forget_team(&"b".into());
        assert_eq!(permits.next(), None);
        assert_eq!(permits.0.load(), (1, 0));
        permits.0.request(instance("a", 0), StartPriority::Normal);
        assert_eq!(permits.next().as_deref(), Some("a0"), "a new request after a withdrawal is granted");
    }

    #[test]
    fn loads_count_held_and_waiting_permits_of_each_pool_and_team() {
        let mut pools = PermitPools::new(2, 1);
        for nth in 0..3 {
            pools.request(instance("a", nth), StartPriority::Normal, false);
        }
        pools.request(instance("b", 0), StartPriority::Normal, true);
        pools.request(instance("b", 1), StartPriority::Normal, true);
        for run in 1..=3 {
            assert!(pools.grant(RunNumber(run)).is_some());
        }
        let load = |pool, held, waiting, max| PermitLoad { pool, held, waiting, max };
        let loads = [load(PermitKind::Processes, 2, 1, Some(2)), load(PermitKind::Connections, 1, 1, Some(1))];
        assert_eq!(pools.loads(), loads);
        let by_team = pools.loads_by_team();
        assert_eq!(by_team.len(), 2);
        assert_eq!(by_team[&"a".into()], [load(PermitKind::Processes, 2, 1, None)]);
        assert_eq!(by_team[&"b".into()], [load(PermitKind::Connections, 1, 1, None)]);
    }

    #[test]
    fn an_instance_that_becomes_remote_waits_in_only_one_pool() {
        let (mut pools, changed, process) = (PermitPools::new(1, 1), instance("a", 0), instance("a", 1));
        pools.request(changed.clone(), StartPriority::Urgent, false);
        pools.request(changed.clone(), StartPriority::Normal, true);
        assert_eq!(pools.grant(RunNumber(1)), Some((changed.clone(), RunNumber(1))));
        assert_eq!(pools.grant(RunNumber(2)), None, "the instance already holds a permit");
        pools.request(process.clone(), StartPriority::Normal, false);
        assert_eq!(
            pools.grant(RunNumber(2)),
            Some((process, RunNumber(2))),
            "the instance holds a connect permit, so the start permit is free"
        );
        pools.request(changed.clone(), StartPriority::Urgent, true);
        pools.request(changed.clone(), StartPriority::Normal, false);
        pools.release(RunNumber(1));
        assert_eq!(pools.grant(RunNumber(3)), None, "the instance waits for the start permit of the other process");
        pools.release(RunNumber(2));
        assert_eq!(pools.grant(RunNumber(3)), Some((changed.clone(), RunNumber(3))));
        pools.request(changed.clone(), StartPriority::Normal, true);
        pools.withdraw(&changed);
        assert_eq!(pools.grant(RunNumber(4)), None);
        pools.request(changed.clone(), StartPriority::Normal, true);
        assert_eq!(pools.grant(RunNumber(4)), Some((changed, RunNumber(4))), "the connect permit is free again");
    }

    #[test]
    fn throttling_does_not_limit_connect_permits() {
        let mut pools = PermitPools::new(4, 4);
        pools.throttle("a".into(), true);
        for nth in 0..2 {
            pools.request(instance("a", nth), StartPriority::Normal, false);
            pools.request(instance("a", nth + 2), StartPriority::Normal, true);
        }
        let order: Vec<InstanceId> =
            (1..).map_while(|number| pools.grant(RunNumber(number)).map(|(instance, _)| instance)).collect();
        assert_eq!(order, [instance("a", 0), instance("a", 2), instance("a", 3)]);
        pools.forget_team(&"a".into());
        assert_eq!(pools.grant(RunNumber(4)), None);
    }
}
