//! Instances of a scenario: ids and configuration by number.

use std::collections::BTreeMap;
use std::sync::Arc;

use mcp_satellite_actors::model::ids::{InstanceId, TeamId, UserId};
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::spec::{
    ConfigTier, ConfigValue, InstanceConfig, InstanceInputs, InstanceSpec, ProcessLifetime, RemoteTransport,
    ServerTarget as Configured, UpdateMethod,
};

use super::plan;
use super::random::RunSeed;
use super::scenario::{FleetShape, Scenario};
use super::types::{InstanceNo, LoadTarget, LoadTransport, TeamNo};

// Header with the credentials of a remote instance.
pub(crate) const CREDENTIAL: &str = "Authorization";

pub(crate) struct LoadFleet {
    pub shape: FleetShape,
    // Kind of server of each instance.
    pub kinds: Arc<[u32]>,
    pub ids: Arc<[InstanceId]>,
    kind_settings: Vec<FleetKind>,
    policy: Arc<Policy>,
    change: fn(InstanceSpec) -> InstanceSpec,
}

struct FleetKind {
    name: String,
    transport: LoadTransport,
    keep: ProcessLifetime,
    request_logging: bool,
}

impl LoadFleet {
    pub(crate) fn new(scenario: &Scenario, seed: RunSeed, change: fn(InstanceSpec) -> InstanceSpec) -> Self {
        let shape = scenario.fleet;
        // Ids are shared: a hundred thousand instances must not allocate a team and user name each.
        let teams: Vec<TeamId> = (0..shape.teams).map(|team| team_id(team).as_str().into()).collect();
        let users: Vec<UserId> = (0..shape.users.max(1)).map(|user| format!("u{user}").into()).collect();
        let id = |nth: InstanceNo| {
            let team = teams[shape.team_of(nth).0 as usize].clone();
            InstanceId::new(team, users[shape.user_of(nth)].clone(), format!("i{}", nth.0).into())
        };
        let of_kind = scenario.kinds.iter().map(|kind| FleetKind {
            name: kind.name.clone(),
            transport: kind.transport,
            keep: kind.keep,
            request_logging: kind.request_logging,
        });
        Self {
            shape,
            kinds: plan::kinds(scenario, seed),
            ids: shape.all().map(id).collect(),
            kind_settings: of_kind.collect(),
            policy: Arc::clone(&scenario.policy),
            change,
        }
    }

    pub(crate) fn id(&self, nth: InstanceNo) -> &InstanceId {
        &self.ids[nth.0 as usize]
    }

    pub(crate) fn team(team: TeamNo) -> TeamId {
        team_id(team.0 as usize).into()
    }

    pub(crate) fn team_no(id: &TeamId) -> Option<TeamNo> {
        id.as_str().strip_prefix('t')?.parse().ok().map(TeamNo)
    }

    pub(crate) fn kind(&self, nth: InstanceNo) -> usize {
        self.kinds[nth.0 as usize] as usize
    }

    // Unique among all servers.
    pub(crate) fn slug(&self, nth: InstanceNo) -> String {
        format!("{}-{}", self.kind_settings[self.kind(nth)].name, nth.0)
    }

    pub(crate) fn is_remote(&self, nth: InstanceNo) -> bool {
        self.kind_settings[self.kind(nth)].transport == LoadTransport::Remote
    }

    pub(crate) fn teams_by_instance(&self) -> Vec<TeamNo> {
        self.shape.all().map(|nth| self.shape.team_of(nth)).collect()
    }

    // `credential` is used for remote servers only.
    pub(crate) fn spec(&self, nth: InstanceNo, target: LoadTarget, credential: &str) -> InstanceSpec {
        let (id, kind) = (self.id(nth), &self.kind_settings[self.kind(nth)]);
        let mut server_layer = ConfigTier::default();
        let target = match target {
            LoadTarget::Process(command, args) => {
                server_layer.args = args.into_iter().map(ConfigValue::plain).collect();
                Configured::Stdio { command, cwd: None }
            }
            LoadTarget::Remote(url) => {
                let value = ConfigValue::plain(credential);
                server_layer.headers = BTreeMap::from([(CREDENTIAL.to_owned(), value)]);
                Configured::Remote { transport: RemoteTransport::Http, url, health_url: None }
            }
        };
        let config = InstanceConfig {
            team: id.team.clone(),
            team_slug: id.team.as_str().into(),
            user: id.user.clone(),
            user_slug: id.user.as_str().into(),
            installation: id.installation.clone(),
            server: self.slug(nth).into(),
            target,
            server_tier: server_layer,
            team_tier: ConfigTier::default(),
            user_tier: ConfigTier::default(),
            user_required: Vec::new(),
            inputs: InstanceInputs::default(),
            lifetime: kind.keep,
            update_method: UpdateMethod::default(),
            request_logging: kind.request_logging,
            policy: Arc::clone(&self.policy),
        };
        (self.change)(config.merge())
    }
}

fn team_id(team: usize) -> String {
    format!("t{team}")
}
