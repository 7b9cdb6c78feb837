//! The validated configuration. `check` and `teams` build it from a parsed file.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use mcp_satellite_model::ids::InstanceId;
use mcp_satellite_model::policy::{BatchPolicy, MemoryPolicy, TeamBudgetPolicy};
use mcp_satellite_model::secret::Secret;
use mcp_satellite_model::spec::{InstanceConfig, ServerTarget};
use mcp_satellite_model::variables::{VariableScope, WithheldReason};

use super::backend::BackendPlan;
use super::console::ConsolePlan;
use super::errors::ConfigErrors;
use super::gateway::{EndpointAuth, GatewayPlan};
use super::oauth::OAuthPlan;
use super::origin::ConfigOrigin;
use super::policy::EffectivePolicy;
use super::telemetry::TelemetryPlan;
use mcp_satellite_model::settings::CgroupMode;
use mcp_satellite_model::settings::JournalLimits;
use mcp_satellite_model::settings::{Isolation, UidRange};

/// The configuration of a satellite: complete, validated, with defaults filled in.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Name of the satellite: 10–32 characters of `a-z 0-9 - _`.
    pub name: String,
    pub profile: Profile,
    pub isolation: Isolation,
    pub cgroups: CgroupMode,
    /// User ids for servers without a sandbox; each team gets one of them.
    pub uid_range: Option<UidRange>,
    pub watch: bool,
    /// Retention time for the data of an instance that was removed from the configuration.
    pub retention: Duration,
    /// Time within which the actors must answer, or the keeper kills the satellite; `Duration::MAX` is no limit.
    pub hang_timeout: Duration,
    /// True if the keeper starts another satellite after one that crashes or hangs.
    pub keep_servers: bool,
    pub gateway: GatewayPlan,
    pub console: ConsolePlan,
    /// Backend that configures the instances and receives the events; `None` if the files configure the instances.
    pub backend: Option<BackendPlan>,
    pub journal: JournalLimits,
    /// Destination of events if there is no backend.
    pub sink: SinkPlan,
    pub batch: BatchPolicy,
    pub telemetry: TelemetryPlan,
    pub team_budget: TeamBudgetPolicy,
    pub memory: MemoryPolicy,
    /// Maximum number of concurrent process starts; `None` is twice the number of cores, at least 4.
    pub start_permits: Option<usize>,
    /// Maximum number of concurrent connection attempts to remote servers; `None` is 64.
    pub connect_permits: Option<usize>,
    /// Instances, one for each installation and user, in the order of the file. Instances with equal policies share
    /// one.
    pub instances: Vec<InstanceConfig>,
    pub oauth: BTreeMap<InstanceId, Arc<OAuthPlan>>,
    pub teams: usize,
    /// Number of users, each counted once per team.
    pub users: usize,
    /// Environment variables that the satellite read as secrets. Servers must not inherit them.
    pub secret_variables: BTreeSet<String>,
    pub base: PlanRestrictions,
    /// Warnings about settings that work and are probably unintended, each with its place in front.
    pub warnings: Vec<String>,
    pub origin: ConfigOrigin,
}

/// Restrictions on the commands that may be started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Profile {
    #[default]
    Development,
    /// Only commands on the allow-list may be started, and only in a sandbox unless that is switched off.
    Production,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum SinkPlan {
    /// No destination beyond the journal.
    #[default]
    Journal,
    File {
        /// Size in bytes at which a file is closed and the next one is started.
        rotate_bytes: u64,
        /// Number of closed files to keep.
        keep: usize,
    },
    Stdout,
    Http {
        /// URL with the scheme `http` or `https`, without credentials.
        url: String,
        token: Option<Secret>,
    },
}

/// The default of [`Plan::retention`].
pub const RETENTION: Duration = Duration::from_secs(24 * 60 * 60);
/// The default of [`Plan::hang_timeout`].
pub(crate) const HANG_TIMEOUT: Duration = Duration::from_secs(60);
/// The shortest [`Plan::hang_timeout`]: actors of a busy machine may need a second to answer.
pub(crate) const HANG_TIMEOUT_MIN: Duration = Duration::from_secs(2);
/// The default of [`SinkPlan::File`]'s `rotate_bytes`.
pub const ROTATE_BYTES: u64 = 64 << 20;
/// The default of [`SinkPlan::File`]'s `keep`.
pub const KEEP: usize = 8;

/// Restrictions that the satellite's own configuration imposes on the servers of every other file.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PlanRestrictions {
    pub(crate) allowed_commands: Option<Vec<String>>,
    pub(crate) effective_policy: EffectivePolicy,
    /// True if the control plane is an MCP server, whose name no other server may have.
    pub(crate) has_control_server: bool,
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
            hang_timeout: HANG_TIMEOUT,
            keep_servers: true,
            gateway: GatewayPlan::default(),
            console: ConsolePlan::default(),
            backend: None,
            journal: JournalLimits::default(),
            sink: SinkPlan::default(),
            batch: BatchPolicy::default(),
            telemetry: TelemetryPlan::default(),
            team_budget: TeamBudgetPolicy::default(),
            memory: MemoryPolicy::default(),
            start_permits: None,
            connect_permits: None,
            instances: Vec::new(),
            oauth: BTreeMap::new(),
            teams: 0,
            users: 0,
            secret_variables: BTreeSet::new(),
            base: PlanRestrictions::default(),
            warnings: Vec::new(),
            origin: ConfigOrigin::default(),
        }
    }
}

impl Plan {
    pub fn ids(&self) -> HashSet<InstanceId> {
        self.instances.iter().map(id).collect()
    }

    pub fn with_listen_address(mut self, address: SocketAddr) -> Result<Self, ConfigErrors> {
        match self.gateway.set_listen_address(address) {
            Ok(()) => {
                self.origin.overrides.push(("gateway.listen", address.to_string()));
                Ok(self)
            }
            Err((message, hint)) => {
                let message = format!("the endpoint cannot be served at {address}: {message}");
                Err(ConfigErrors::without_place("", vec![(message, hint.to_owned())]))
            }
        }
    }

    /// Finishes the plan after all files are merged: gives the only user a token and adds warnings.
    ///
    /// # Errors
    /// Returns an error if authentication is off and `as` does not select one user.
    pub fn finalize(mut self) -> Result<Self, ConfigErrors> {
        self.store_token_for_only_user();
        if self.backend.is_none()
            && self.gateway.auth == EndpointAuth::Bearer
            && self.gateway.address().is_some()
            && self.gateway.users_with_token().next().is_none()
        {
            let message = "no client can connect to the MCP endpoint: no user has a token; run `satellite token` and set \
                           token = \"sha256:…\" for a user of [[teams.users]]";
            self.warnings.push(message.to_owned());
        }
        let warning = self.shared_user_warning();
        for warning in warning.into_iter().chain(self.withheld_variable_warnings()) {
            // Users of an installation share its configuration, and a plan can be finalized twice.
            if !self.warnings.contains(&warning) {
                self.warnings.push(warning);
            }
        }
        // The backend provides the users later.
        let later = self.backend.is_some() && self.gateway.users.is_empty();
        if later || self.gateway.auth == EndpointAuth::Bearer || self.gateway.address().is_none() {
            return Ok(self);
        }
        let Err(message) = self.gateway.single_user() else { return Ok(self) };
        let hint = "name a user in [gateway] as \"TEAM/USER\", by slugs: as = \"acme/alice\"";
        Err(ConfigErrors::without_place("", vec![(message, hint.to_owned())]))
    }

    /// Gives the only user a token that the satellite creates. A backend gives its users their tokens itself.
    pub(crate) fn store_token_for_only_user(&mut self) {
        if self.backend.is_none() {
            self.gateway.store_token_for_only_user();
        }
    }

    pub(crate) fn is_sandboxed(&self) -> bool {
        match self.isolation {
            Isolation::None => false,
            Isolation::Auto => self.profile == Profile::Production,
            Isolation::Nsjail | Isolation::Bubblewrap => true,
        }
    }

    fn shared_user_warning(&self) -> Option<String> {
        let processes = self.instances.iter().filter(|one| matches!(one.target, ServerTarget::Stdio { .. }));
        let teams = processes.map(|one| &one.team).collect::<BTreeSet<_>>().len();
        (teams > 1 && !self.is_sandboxed() && self.uid_range.is_none()).then(|| {
            format!(
                "the servers of {teams} teams run as the same user without a sandbox, so that each can read the secrets of \
                 the others in /proc/PID/environ; choose a sandbox with `isolation`, or give `uid_range`, both under \
                 [satellite]"
            )
        })
    }

    /// Returns a warning for each variable that a server does not get because of the profile or the sandbox. Variables
    /// that no server gets are reported where they are typed.
    fn withheld_variable_warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        for instance in &self.instances {
            let scope = VariableScope {
                is_production: self.profile == Profile::Production,
                in_sandbox: self.is_sandboxed(),
                allow_env: &instance.policy.isolation.allow_env,
            };
            let names: BTreeSet<_> = instance.server_tier.env.keys().chain(instance.team_tier.env.keys()).collect();
            for name in names {
                if let Some(reason) = scope.withheld(name).filter(|reason| *reason != WithheldReason::Never) {
                    let (installation, team) = (&instance.installation, &instance.team_slug);
                    warnings.push(format!("installation `{installation}` of team `{team}`: `{name}` {reason}"));
                }
            }
        }
        warnings
    }

    /// Adds the instances of an `mcp.json`; every other setting stays unchanged. An instance or an instance name that this
    /// plan has already is left out with a warning.
    ///
    /// # Errors
    /// Returns an error if this plan has a backend.
    pub fn merge(self, other: Self) -> Result<Self, ConfigErrors> {
        if self.backend.is_some() {
            let message = "--mcp-json conflicts with [backend]: the backend configures the servers".to_owned();
            let hint = "leave out --mcp-json, or remove [backend] from the configuration".to_owned();
            return Err(ConfigErrors::without_place("", vec![(message, hint)]));
        }
        Ok(self.join(other))
    }

    pub(crate) fn join(mut self, mut other: Self) -> Self {
        let ids: BTreeSet<_> = self.instances.iter().map(id).collect();
        let names: BTreeSet<_> = self.instances.iter().map(name).collect();
        other.instances.retain(|instance| {
            let (id, name) = (id(instance), name(instance));
            let message = if ids.contains(&id) {
                format!("the instance `{id}` of the second file is left out: the first file configures it as well")
            } else if names.contains(&name) {
                format!("an instance of the second file is left out: the first file has the name `{name}` as well")
            } else {
                return true;
            };
            other.oauth.remove(&id);
            self.warnings.push(message);
            false
        });

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
        self
    }
}

fn common<K: Ord>(one: &Plan, other: &Plan, of: impl Fn(&InstanceConfig) -> K) -> usize {
    let keys = |plan: &Plan| plan.instances.iter().map(&of).collect::<BTreeSet<_>>();
    keys(one).intersection(&keys(other)).count()
}

pub(crate) fn id(instance: &InstanceConfig) -> InstanceId {
    InstanceId::new(instance.team.clone(), instance.user.clone(), instance.installation.clone())
}

/// Returns the name of an instance. Slugs can contain hyphens, so two instances can get the same name.
pub(crate) fn name(instance: &InstanceConfig) -> String {
    format!("{}-{}-{}-{}", instance.server, instance.team_slug, instance.user_slug, instance.installation)
}
