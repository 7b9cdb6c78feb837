//! What an instance is to be, in two shapes: as configured in three tiers, and as meant, with nothing left open.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;

use super::ids::{InstallationId, InstanceId, Slug, TeamId, UserId};
use super::policy::Policy;
use super::secret::{Mask, Secret};

/// One value as configured, and whether it must be hidden wherever it appears.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Value {
    /// The value itself.
    pub text: Secret,
    /// Whether it is known to be a secret, and therefore masked where a server echoes it.
    pub secret: bool,
}

impl Value {
    /// A value that need not be masked where a server prints it.
    pub fn plain(text: impl Into<Secret>) -> Self {
        Self { text: text.into(), secret: false }
    }

    /// A value that is masked everywhere.
    pub fn secret(text: impl Into<Secret>) -> Self {
        Self { text: text.into(), secret: true }
    }
}

/// One tier of configuration: of the server, the team or the user.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Layer {
    /// Appended to the arguments of the tiers before.
    pub args: Vec<Secret>,
    /// Overrides the tiers before, key by key.
    pub env: BTreeMap<String, Value>,
    /// Overrides the tiers before, key by key.
    pub headers: BTreeMap<String, Value>,
    /// Overrides the tiers before, key by key.
    pub query: BTreeMap<String, Value>,
}

/// What is started or connected to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// A child process that speaks MCP over stdin and stdout.
    Stdio {
        /// A name to be found in `PATH`, or a path.
        command: String,
        /// The working directory; the satellite's own if none.
        cwd: Option<String>,
    },
    /// A remote endpoint.
    Remote {
        /// `http` or `sse`.
        transport: RemoteTransport,
        /// Where it listens, without a query: that is among the query parameters.
        url: String,
        /// What is asked for by a health check that is a GET.
        health_url: Option<String>,
    },
}

/// The wire of a remote server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemoteTransport {
    /// Streamable HTTP.
    Http,
    /// The older HTTP+SSE.
    Sse,
}

/// When an instance's process is there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Keep {
    /// Started when installed; it sleeps when nobody needs it, and after a clean exit. The next call wakes it.
    #[default]
    Listed,
    /// Never put to sleep; a clean exit is restarted like a crash.
    AlwaysOn,
    /// Started only to be discovered where its tools are not known, and put to sleep at once. The first call wakes it.
    Lazy,
}

/// What a new configuration does to the run that is there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OnUpdate {
    /// The old run ends, then the new one starts.
    #[default]
    Restart,
    /// The new run is up before calls move over to it and the old one ends. If it does not come up the old one stays.
    Rolling,
}

/// An instance as configured: the server's template and the three tiers, not yet merged.
#[derive(Debug, Clone)]
pub struct InstanceConfig {
    /// The team.
    pub team: TeamId,
    /// The team's name for people.
    pub team_slug: Slug,
    /// The user.
    pub user: UserId,
    /// The user's name for people.
    pub user_slug: Slug,
    /// The installation.
    pub installation: InstallationId,
    /// The server's name for people.
    pub server: Slug,
    /// What is started or connected to.
    pub target: Target,
    /// The tiers, in the order server, team, user.
    pub server_layer: Layer,
    /// See `server_layer`.
    pub team_layer: Layer,
    /// See `server_layer`.
    pub user_layer: Layer,
    /// Keys of env, headers or query that the user must give.
    pub user_required: Vec<String>,
    /// When the process is there.
    pub keep: Keep,
    /// How a new configuration is taken on.
    pub on_update: OnUpdate,
    /// Whether requests may be logged.
    pub request_logging: bool,
    /// What it is held to.
    pub policy: Arc<Policy>,
}

/// An instance as meant: merged, complete, ready to be started unless something is `missing`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstanceSpec {
    /// Identity.
    pub id: InstanceId,
    /// `{server_slug}-{team_slug}-{user_slug}-{installation_id}`: for people and logs.
    pub name: Arc<str>,
    /// The server's name for people.
    pub server: Slug,
    /// The team's name for people.
    pub team_slug: Slug,
    /// The user's name for people.
    pub user_slug: Slug,
    /// What is started or connected to.
    pub target: Target,
    /// Arguments of the three tiers, in order.
    pub args: Vec<Secret>,
    /// Environment, merged.
    pub env: BTreeMap<String, Secret>,
    /// Headers, merged.
    pub headers: BTreeMap<String, Secret>,
    /// Query parameters, merged.
    pub query: BTreeMap<String, Secret>,
    /// Required of the user and not given: nothing is started until this is empty.
    pub missing: Vec<String>,
    /// When the process is there.
    pub keep: Keep,
    /// How a new configuration, this one, is taken on.
    pub on_update: OnUpdate,
    /// Whether requests may be logged.
    pub request_logging: bool,
    /// Hides this instance's secrets where its server echoes them.
    pub mask: Mask,
    /// What it is held to.
    pub policy: Arc<Policy>,
}

impl InstanceConfig {
    /// Merges server → team → user: args appended in that order, the rest overridden key by key.
    pub fn merge(self) -> InstanceSpec {
        let given = |key: &String| {
            [&self.user_layer.env, &self.user_layer.headers, &self.user_layer.query]
                .iter()
                .any(|tier| tier.contains_key(key))
        };
        let missing = self.user_required.iter().filter(|key| !given(key)).cloned().collect();
        let name = format!("{}-{}-{}-{}", self.server, self.team_slug, self.user_slug, self.installation);

        let mut merged = Layer::default();
        for tier in [self.server_layer, self.team_layer, self.user_layer] {
            merged.args.extend(tier.args);
            merged.env.extend(tier.env);
            merged.headers.extend(tier.headers);
            merged.query.extend(tier.query);
        }
        let values = || merged.env.values().chain(merged.headers.values()).chain(merged.query.values());
        // A server echoes a credential with or without its scheme: `Bearer X` hides X too.
        let credentials = merged.headers.values().filter_map(|value| value.text.expose().split_once(' '));
        let credentials = credentials.map(|(_scheme, credential)| credential.trim());
        let secrets = values().filter(|value| value.secret).map(|value| value.text.expose());
        let mask = Mask::new(secrets.chain(credentials));
        let texts = |tier: BTreeMap<String, Value>| tier.into_iter().map(|(key, value)| (key, value.text)).collect();
        InstanceSpec {
            id: InstanceId::new(self.team, self.user, self.installation),
            name: name.into(),
            server: self.server,
            team_slug: self.team_slug,
            user_slug: self.user_slug,
            target: self.target,
            args: merged.args,
            env: texts(merged.env),
            headers: texts(merged.headers),
            query: texts(merged.query),
            missing,
            keep: self.keep,
            on_update: self.on_update,
            request_logging: self.request_logging,
            mask,
            policy: self.policy,
        }
    }
}

impl InstanceSpec {
    /// `stdio`, `http` or `sse`.
    pub fn transport(&self) -> &'static str {
        match self.target {
            Target::Stdio { .. } => "stdio",
            Target::Remote { transport: RemoteTransport::Http, .. } => "http",
            Target::Remote { transport: RemoteTransport::Sse, .. } => "sse",
        }
    }

    /// Whether it says the same of itself to its server as the other does.
    pub fn has_credentials_of(&self, other: &Self) -> bool {
        self.headers == other.headers && self.query == other.query
    }

    /// Whether a run that was started with this specification can go on under `new`: nothing that its process, or the
    /// server at the other end of its connection, was started with is another. Numbers of the policy, and what a
    /// connection is told with each request, may differ.
    pub fn can_go_on_as(&self, new: &Self) -> bool {
        // Every field by name, so that a new one has to be placed.
        let Self {
            id,
            name,
            server,
            team_slug,
            user_slug,
            target,
            args,
            env,
            missing,
            policy,
            headers: _,
            query: _,
            keep: _,
            on_update: _,
            request_logging: _,
            mask: _,
        } = self;
        let named = (id, name, server, team_slug, user_slug)
            == (&new.id, &new.name, &new.server, &new.team_slug, &new.user_slug);
        let same_target = match (target, &new.target) {
            (
                Target::Remote { transport, url, health_url: _ },
                Target::Remote { transport: new_transport, url: new_url, health_url: _ },
            ) => transport == new_transport && url == new_url,
            (target, new_target) => target == new_target,
        };
        let same_sandbox = self.is_remote() || policy.isolation == new.policy.isolation;
        named
            && same_target
            && same_sandbox
            && (args, env, missing) == (&new.args, &new.env, &new.missing)
            && policy.session.protocol == new.policy.session.protocol
    }

    /// Whether its server is somewhere else.
    pub fn is_remote(&self) -> bool {
        matches!(self.target, Target::Remote { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> InstanceConfig {
        InstanceConfig {
            team: "team_acme".into(),
            team_slug: "acme".into(),
            user: "user_alice".into(),
            user_slug: "alice".into(),
            installation: "abc123".into(),
            server: "sequential-thinking".into(),
            target: Target::Stdio { command: "npx".to_owned(), cwd: None },
            server_layer: Layer::default(),
            team_layer: Layer::default(),
            user_layer: Layer::default(),
            user_required: Vec::new(),
            keep: Keep::Listed,
            on_update: OnUpdate::Restart,
            request_logging: true,
            policy: Arc::default(),
        }
    }

    fn tier<const N: usize>(pairs: [(&str, Value); N]) -> BTreeMap<String, Value> {
        pairs.map(|(key, value)| (key.to_owned(), value)).into()
    }

    fn texts(tier: &BTreeMap<String, Secret>) -> Vec<(&str, &str)> {
        tier.iter().map(|(key, value)| (key.as_str(), value.expose())).collect()
    }

    #[test]
    fn arguments_are_appended_server_team_user() {
        let mut config = config();
        config.user_layer.args = vec!["user".into()];
        config.server_layer.args = vec!["-y".into(), "server".into()];
        config.team_layer.args = vec!["team".into(), "-y".into()];
        let spec = config.merge();
        let args: Vec<&str> = spec.args.iter().map(Secret::expose).collect();
        assert_eq!(args, ["-y", "server", "team", "-y", "user"]);
    }

    #[test]
    fn env_headers_and_query_are_overridden_key_by_key_and_never_mixed() {
        let mut config = config();
        for (layer, name) in
            [(&mut config.server_layer, "server"), (&mut config.team_layer, "team"), (&mut config.user_layer, "user")]
        {
            layer.env = tier([("ALL", Value::plain(format!("env of {name}")))]);
            layer.headers = tier([("ALL", Value::plain(format!("header of {name}")))]);
            layer.query = tier([("ALL", Value::plain(format!("query of {name}")))]);
        }
        config.server_layer.env.extend(tier([("SERVER", Value::plain("1")), ("BOTH", Value::plain("server"))]));
        config.team_layer.env.extend(tier([("TEAM", Value::plain("2")), ("BOTH", Value::plain("team"))]));
        config.user_layer.env.extend(tier([("USER", Value::plain("3"))]));
        let spec = config.merge();
        assert_eq!(
            texts(&spec.env),
            [("ALL", "env of user"), ("BOTH", "team"), ("SERVER", "1"), ("TEAM", "2"), ("USER", "3")]
        );
        assert_eq!(texts(&spec.headers), [("ALL", "header of user")]);
        assert_eq!(texts(&spec.query), [("ALL", "query of user")]);
    }

    #[test]
    fn what_is_required_of_the_user_is_given_by_the_user_alone() {
        let mut config = config();
        config.user_required = ["A", "B", "C", "D", "E"].map(str::to_owned).to_vec();
        config.server_layer.env = tier([("D", Value::plain("from the server"))]);
        config.team_layer.headers = tier([("E", Value::plain("from the team"))]);
        config.user_layer.env = tier([("A", Value::plain(""))]);
        config.user_layer.headers = tier([("B", Value::plain("b"))]);
        config.user_layer.query = tier([("C", Value::plain("c"))]);
        assert_eq!(config.merge().missing, ["D", "E"]);
    }

    #[test]
    fn secrets_are_masked_where_a_server_echoes_them_and_so_is_a_credential_without_its_scheme() {
        let mut config = config();
        config.server_layer.env = tier([("OLD", Value::secret("overridden")), ("PLAIN", Value::plain("not-hidden"))]);
        config.user_layer.env = tier([("OLD", Value::secret("sk-of-alice"))]);
        config.user_layer.headers =
            tier([("Authorization", Value::secret("Bearer abc.def")), ("X-Auth", Value::plain("Token plain-token"))]);
        config.user_layer.query = tier([("key", Value::secret("in-the-url"))]);
        let spec = config.merge();
        let echoed = "sk-of-alice|not-hidden|Bearer abc.def|abc.def|plain-token|in-the-url";
        assert_eq!(spec.mask.apply(echoed), "[secret]|not-hidden|[secret]|[secret]|[secret]|[secret]");
    }

    #[test]
    fn neither_a_configuration_nor_its_spec_shows_a_value_when_printed() {
        let mut config = config();
        config.server_layer.args = vec!["hush-args".into()];
        config.team_layer.env = tier([("KEY", Value::plain("hush-env"))]);
        config.user_layer.headers = tier([("Authorization", Value::secret("Bearer hush-header"))]);
        config.user_layer.query = tier([("q", Value::secret("hush-query"))]);
        assert!(!format!("{config:?}").contains("hush"));
        assert!(!format!("{:?}", config.merge()).contains("hush"));
    }

    #[test]
    fn an_instance_is_named_for_people_and_identified_by_its_parts() {
        let spec = config().merge();
        assert_eq!(&*spec.name, "sequential-thinking-acme-alice-abc123");
        assert_eq!(spec.id, InstanceId::new("team_acme".into(), "user_alice".into(), "abc123".into()));
    }

    fn policy(config: &mut InstanceConfig) -> &mut Policy {
        Arc::make_mut(&mut config.policy)
    }

    #[test]
    fn a_run_goes_on_under_another_policy_and_not_under_what_its_process_sees() {
        let started = config().merge();
        let goes_on = |change: fn(&mut InstanceConfig)| {
            let mut other = config();
            change(&mut other);
            started.can_go_on_as(&other.merge())
        };
        let in_place: [fn(&mut InstanceConfig); 7] = [
            |config| policy(config).restart.max_crashes = 9,
            |config| policy(config).idle.idle = std::time::Duration::from_secs(1),
            |config| policy(config).session.request_timeout = std::time::Duration::from_secs(1),
            |config| policy(config).logs.line_max = 99,
            |config| config.keep = Keep::AlwaysOn,
            |config| config.on_update = OnUpdate::Rolling,
            |config| config.request_logging = false,
        ];
        assert!(in_place.into_iter().all(goes_on));
        let seen_by_the_process: [fn(&mut InstanceConfig); 6] = [
            |config| policy(config).isolation.network = false,
            |config| policy(config).session.protocol = Some(crate::model::era::Era::Stateless),
            |config| config.user_layer.args = vec!["more".into()],
            |config| drop(config.user_layer.env.insert("KEY".to_owned(), Value::plain("v"))),
            |config| config.target = Target::Stdio { command: "npx".to_owned(), cwd: Some("/".to_owned()) },
            |config| config.user_required = vec!["KEY".to_owned()],
        ];
        assert!(!seen_by_the_process.into_iter().any(goes_on));
    }

    #[test]
    fn a_spec_names_its_transport() {
        let mut config = config();
        assert_eq!(config.clone().merge().transport(), "stdio");
        for (transport, name) in [(RemoteTransport::Http, "http"), (RemoteTransport::Sse, "sse")] {
            config.target = Target::Remote { transport, url: "http://127.0.0.1".to_owned(), health_url: None };
            assert_eq!(config.clone().merge().transport(), name);
        }
    }
}
