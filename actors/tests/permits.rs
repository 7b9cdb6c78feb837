//! Start permits against a simple model: never more than the limit, one at a time for a throttled team, only for
//! waiting instances, and finally for all of them.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::{BTreeMap, BTreeSet};

use mcp_satellite_actors::model::ids::{InstanceId, RunNumber, TeamId};
use mcp_satellite_actors::rules::permits::{StartPermits, StartPriority};
use proptest::prelude::*;

const TEAMS: [&str; 3] = ["a", "b", "c"];
const LIMIT: usize = 3;

#[derive(Debug, Clone, Copy)]
enum Step {
    Request { team: usize, instance: u8, urgent: bool },
    Withdraw { team: usize, instance: u8 },
    Grant,
    Release(usize),
    Throttle { team: usize, one_at_a_time: bool },
    TeamDies(usize),
}

fn id(team: usize, instance: u8) -> InstanceId {
    InstanceId::new(TEAMS[team].into(), "u".into(), instance.to_string().into())
}

fn step() -> impl Strategy<Value = Step> {
    let (team, instance) = (0..TEAMS.len(), 0..4_u8);
    prop_oneof![
        6 => (team.clone(), instance.clone(), any::<bool>())
            .prop_map(|(team, instance, urgent)| Step::Request { team, instance, urgent }),
        2 => (team.clone(), instance).prop_map(|(team, instance)| Step::Withdraw { team, instance }),
        6 => Just(Step::Grant),
        4 => (0..LIMIT).prop_map(Step::Release),
        1 => (team.clone(), any::<bool>())
            .prop_map(|(team, one_at_a_time)| Step::Throttle { team, one_at_a_time }),
        1 => team.prop_map(Step::TeamDies),
    ]
}

#[derive(Default)]
struct Model {
    waiting: BTreeMap<InstanceId, StartPriority>,
    held: BTreeMap<RunNumber, TeamId>,
    throttled: BTreeSet<TeamId>,
    runs: u64,
}

impl Model {
    fn may_start(&self, team: &TeamId) -> bool {
        !self.throttled.contains(team) || self.held.values().all(|holder| holder != team)
    }

    /// Returns true if an instance of at least this priority could receive a permit now.
    fn has_eligible(&self, least: StartPriority) -> bool {
        self.waiting.iter().any(|(instance, urgency)| *urgency >= least && self.may_start(&instance.team))
    }

    fn grant(&mut self, permits: &mut StartPermits) -> Result<bool, TestCaseError> {
        let next = RunNumber(self.runs + 1);
        let granted = permits.grant(|| next);
        let free = self.held.len() < LIMIT;
        prop_assert_eq!(
            granted.is_some(),
            free && self.has_eligible(StartPriority::Normal),
            "granted exactly if a permit is free and an eligible instance waits"
        );
        let Some((instance, run)) = granted else { return Ok(false) };
        let urgency = self.waiting.get(&instance).copied();
        prop_assert!(urgency.is_some(), "{} does not wait", instance);
        prop_assert!(self.may_start(&instance.team), "{} is throttled", instance.team);
        prop_assert!(
            urgency == Some(StartPriority::Urgent) || !self.has_eligible(StartPriority::Urgent),
            "an urgent request was passed over"
        );
        self.waiting.remove(&instance);
        self.runs += 1;
        self.held.insert(run, instance.team.clone());
        Ok(true)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn permits_go_only_to_eligible_instances_and_finally_to_all(steps in prop::collection::vec(step(), 1..100)) {
        let (mut permits, mut model) = (StartPermits::new(LIMIT), Model::default());
        for step in steps {
            match step {
                Step::Request { team, instance, urgent } => {
                    let urgency = if urgent { StartPriority::Urgent } else { StartPriority::Normal };
                    permits.request(id(team, instance), urgency);
                    let known = model.waiting.entry(id(team, instance)).or_insert(urgency);
                    *known = urgency.max(*known);
                }
                Step::Withdraw { team, instance } => {
                    permits.withdraw(&id(team, instance));
                    model.waiting.remove(&id(team, instance));
                }
                Step::Grant => drop(model.grant(&mut permits)?),
                Step::Release(nth) => {
                    if let Some(run) = model.held.keys().nth(nth).copied() {
                        model.held.remove(&run);
                        permits.release(run);
                        permits.release(run);
                    }
                }
                Step::Throttle { team, one_at_a_time } => {
                    let team = TeamId::from(TEAMS[team]);
                    permits.throttle(team.clone(), one_at_a_time);
                    if one_at_a_time { model.throttled.insert(team) } else { model.throttled.remove(&team) };
                }
                Step::TeamDies(team) => {
                    let team = TeamId::from(TEAMS[team]);
                    permits.forget_team(&team);
                    model.waiting.retain(|instance, _| instance.team != team);
                    model.held.retain(|_, holder| *holder != team);
                    model.throttled.remove(&team);
                }
            }
            prop_assert_eq!(permits.load(), (model.held.len(), model.waiting.len()));
        }
        while !model.waiting.is_empty() {
            if !model.grant(&mut permits)? {
                let (run, _) = model.held.pop_first().unwrap();
                permits.release(run);
            }
        }
    }
}
