//! The configuration as meant. `check` and `teams` are the way from what was typed to here.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::policy::{BatchPolicy, MemoryPolicy, TeamBudgetPolicy};
use mcp_satellite_actors::model::secret::Secret;
use mcp_satellite_actors::model::spec::{InstanceConfig, Target};

use super::backend::{BackendPlan, Document};
use super::errors::ConfigErrors;
use super::gateway::{Auth, GatewayPlan};
use super::oauth::OAuthPlan;
use super::origin::Origin;
use super::policy::Held;
use crate::connect::isolation::{Isolation, UidRange};
use crate::connect::process::CgroupMode;
use crate::journal::Limits;

/// What the satellite is to do: complete, checked, defaults filled in.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Of the satellite: 10–32 characters of `a-z 0-9 - _`.
    pub name: String,
    /// What is permitted.
    pub profile: Profile,
    /// What servers are started in.
    pub isolation: Isolation,
    /// Whether each run gets a cgroup.
    pub cgroups: CgroupMode,
    /// The user ids of which each team gets one for its servers without a sandbox.
    pub uid_range: Option<UidRange>,
    /// Whether the files are looked at while the satellite runs, and taken on when they change.
    pub watch: bool,
    /// The time for which the data of an instance that was removed from the configuration is kept.
    pub retention: Duration,
    /// The MCP endpoint.
    pub gateway: GatewayPlan,
    /// Who says what to run, if it is not the files; then events go there.
    pub backend: Option<BackendPlan>,
    /// What is kept of events and logs.
    pub journal: Limits,
    /// Where events go without a backend.
    pub sink: SinkPlan,
    /// How events are batched.
    pub batch: BatchPolicy,
    /// What each team may spend on unwanted exits.
    pub team_budget: TeamBudgetPolicy,
    /// When memory is short, and starts are delayed.
    pub memory: MemoryPolicy,
    /// Spawns under way at once; `None` is twice the cores, at least 4.
    pub start_permits: Option<usize>,
    /// Connections to remote servers that are being made at once; `None` is 64.
    pub connect_permits: Option<usize>,
    /// One for each installation and user, in the order of the file. Instances with equal policies share one.
    pub instances: Vec<InstanceConfig>,
    /// How those are authorized that say so.
    pub oauth: BTreeMap<InstanceId, Arc<OAuthPlan>>,
    /// How many teams there are.
    pub teams: usize,
    /// How many users there are, each counted once for each of its teams.
    pub users: usize,
    /// Variables of the satellite's environment that it read as secrets: no server may inherit them.
    pub secret_variables: BTreeSet<String>,
    /// What servers of further files are held to.
    pub base: Base,
    /// What works and is probably not what was meant, with its place in front.
    pub warnings: Vec<String>,
    /// What it was made of.
    pub(crate) origin: Origin,
}

/// What is permitted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Profile {
    /// Every command may be started.
    #[default]
    Development,
    /// Only commands on the allow-list may be started, and only in a sandbox unless that is switched off.
    Production,
}

/// Where events go.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum SinkPlan {
    /// Nowhere beyond the journal.
    #[default]
    Journal,
    /// Files in the data directory.
    File {
        /// A file of this many bytes is closed and the next one begun.
        rotate_bytes: u64,
        /// Closed files that are kept.
        keep: usize,
    },
    /// Lines on stdout.
    Stdout,
    /// Batches to an HTTP endpoint.
    Http {
        /// `http` or `https`, without credentials.
        url: String,
        /// Sent as a bearer token.
        token: Option<Secret>,
    },
}

/// The default of [`Plan::retention`].
pub const RETENTION: Duration = Duration::from_secs(24 * 60 * 60);
/// The default of [`SinkPlan::File`]'s `rotate_bytes`.
pub const ROTATE_BYTES: u64 = 64 << 20;
/// The default of [`SinkPlan::File`]'s `keep`.
pub const KEEP: usize = 8;

/// What a satellite holds every file's servers to.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Base {
    /// The only commands that may be started; `None` is any, as in the development profile.
    pub(super) allowed_commands: Option<Vec<String>>,
    /// The top-level `[policy]`.
    pub(super) held: Held,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            name: "mcp-satellite".to_owned(),
            profile: Profile::default(),
            isolation: Isolation::default(),
            cgroups: CgroupMode::default(),
            uid_range: None,
            watch: true,
            retention: RETENTION,
            gateway: GatewayPlan::default(),
            backend: None,
            journal: Limits::default(),
            sink: SinkPlan::default(),
            batch: BatchPolicy::default(),
            team_budget: TeamBudgetPolicy::default(),
            memory: MemoryPolicy::default(),
            start_permits: None,
            connect_permits: None,
            instances: Vec::new(),
            oauth: BTreeMap::new(),
            teams: 0,
            users: 0,
            secret_variables: BTreeSet::new(),
            base: Base::default(),
            warnings: Vec::new(),
            origin: Origin::default(),
        }
    }
}

impl Plan {
    /// The identities of all instances.
    pub(crate) fn ids(&self) -> HashSet<InstanceId> {
        self.instances.iter().map(id).collect()
    }

    /// This plan with its MCP endpoint exactly there, whatever the files say.
    pub fn listening_at(mut self, address: SocketAddr) -> Result<Self, ConfigErrors> {
        match self.gateway.listen_at(address) {
            Ok(()) => Ok(self),
            Err((message, hint)) => {
                let message = format!("the endpoint cannot be served at {address}: {message}");
                Err(ConfigErrors::nowhere("", vec![(message, hint.to_owned())]))
            }
        }
    }

    /// This plan, if it is good now that all files are in it.
    pub fn settled(mut self) -> Result<Self, ConfigErrors> {
        self.keep_only_token();
        if self.backend.is_none()
            && self.gateway.auth == Auth::Bearer
            && self.gateway.address().is_some()
            && self.gateway.admitted().next().is_none()
        {
            let message = "no client can connect to the MCP endpoint: no user has a token; run `satellite token` and set \
                           token = \"sha256:…\" for a user of [[teams.users]]";
            self.warnings.push(message.to_owned());
        }
        let warning = self.shared_user();
        self.warnings.extend(warning.filter(|warning| !self.warnings.contains(warning)));
        // Who comes in is said by the backend, and that comes later.
        let later = self.backend.is_some() && self.gateway.users.is_empty();
        if later || self.gateway.auth == Auth::Bearer || self.gateway.address().is_none() {
            return Ok(self);
        }
        let Err(message) = self.gateway.alone() else { return Ok(self) };
        let hint = "name one in [gateway] as \"TEAM/USER\", by their slugs: as = \"acme/alice\"";
        Err(ConfigErrors::nowhere("", vec![(message, hint.to_owned())]))
    }

    /// Gives the only user a token that the satellite creates, as a user of an `mcp.json` has one. A backend gives its
    /// users their tokens itself.
    pub(super) fn keep_only_token(&mut self) {
        if self.backend.is_none() {
            self.gateway.keep_only_token();
        }
    }

    /// Whether servers are started in a sandbox, or not at all.
    pub(super) fn is_sandboxed(&self) -> bool {
        match self.isolation {
            Isolation::None => false,
            Isolation::Auto => self.profile == Profile::Production,
            Isolation::Nsjail | Isolation::Bubblewrap => true,
        }
    }

    /// A warning where servers of several teams run as one user without a sandbox.
    fn shared_user(&self) -> Option<String> {
        let processes = self.instances.iter().filter(|one| matches!(one.target, Target::Stdio { .. }));
        let teams = processes.map(|one| &one.team).collect::<BTreeSet<_>>().len();
        (teams > 1 && !self.is_sandboxed() && self.uid_range.is_none()).then(|| {
            format!(
                "the servers of {teams} teams run as the same user without a sandbox, so that each can read the secrets of \
                 the others in /proc/PID/environ; choose a sandbox with `isolation`, or give `uid_range`, both under \
                 [satellite]"
            )
        })
    }

    /// This plan with the other's instances too; every other setting stays this one's. An instance, or an instance's
    /// name, that is in both is an error.
    pub fn merge(self, other: Self) -> Result<Self, ConfigErrors> {
        if self.backend.is_some() {
            let message = "an mcp.json is given, and the backend says what to run".to_owned();
            let hint = "leave out --mcp-json, or remove [backend] from the configuration".to_owned();
            return Err(ConfigErrors::nowhere("", vec![(message, hint)]));
        }
        self.join(other)
    }

    /// This plan with what its backend gives, held to what this one says.
    pub fn with(self, document: &Document) -> Result<Self, ConfigErrors> {
        let given = document.plan(&self.base)?;
        self.join(given)?.settled()
    }

    pub(super) fn join(mut self, other: Self) -> Result<Self, ConfigErrors> {
        let ids: BTreeSet<_> = self.instances.iter().map(id).collect();
        let names: BTreeSet<_> = self.instances.iter().map(name).collect();
        let hint = "remove it from one of the two, or give it another name in one of them";
        let clash = |instance: &InstanceConfig| {
            let (id, name) = (id(instance), name(instance));
            if ids.contains(&id) {
                Some((format!("instance `{id}` is configured twice, in two files"), hint.to_owned()))
            } else {
                let message = || format!("two instances in two files are named `{name}`");
                names.contains(&name).then(|| (message(), hint.to_owned()))
            }
        };
        let clashes: Vec<_> = other.instances.iter().filter_map(clash).collect();
        if !clashes.is_empty() {
            return Err(ConfigErrors::nowhere("", clashes));
        }

        let team = |instance: &InstanceConfig| instance.team.clone();
        let user = |instance: &InstanceConfig| (instance.team.clone(), instance.user.clone());
        self.teams += other.teams - common(&self, &other, team);
        self.users += other.users - common(&self, &other, user);
        self.instances.extend(other.instances);
        self.oauth.extend(other.oauth);
        self.gateway.merge(other.gateway);
        self.secret_variables.extend(other.secret_variables);
        self.warnings.extend(other.warnings);
        self.origin.merge(other.origin);
        Ok(self)
    }
}

/// How many teams, or users, have instances in both plans.
fn common<K: Ord>(one: &Plan, other: &Plan, of: impl Fn(&InstanceConfig) -> K) -> usize {
    let keys = |plan: &Plan| plan.instances.iter().map(&of).collect::<BTreeSet<_>>();
    keys(one).intersection(&keys(other)).count()
}

/// What the runtime will know an instance by.
pub(super) fn id(instance: &InstanceConfig) -> InstanceId {
    InstanceId::new(instance.team.clone(), instance.user.clone(), instance.installation.clone())
}

/// The name that the runtime will give to an instance. Slugs hold hyphens, so two instances can come to the same one.
pub(super) fn name(instance: &InstanceConfig) -> String {
    format!("{}-{}-{}-{}", instance.server, instance.team_slug, instance.user_slug, instance.installation)
}
