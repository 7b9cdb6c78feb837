//! Specification of an instance in two forms: the configuration in three tiers, and the merged result.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use mcp_satellite_protocol::header;
use serde::Serialize;

use super::ids::{InstallationId, InstanceId, Slug, TeamId, UserId};
use super::policy::Policy;
use super::secret::{Secret, SecretMask};
use super::variables::is_code_variable;

// Headers that the protocol or the connection sets.
const RESERVED_HEADERS: [&str; 18] = [
    "accept",
    "accept-encoding",
    "connection",
    "content-length",
    "content-type",
    "expect",
    "host",
    "keep-alive",
    header::LAST_EVENT_ID,
    header::METHOD,
    header::NAME,
    header::PROTOCOL_VERSION,
    header::SESSION_ID,
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Returns true if a configured header of this name is left out of an instance's requests.
pub fn is_reserved_header(header: &str) -> bool {
    RESERVED_HEADERS.iter().any(|reserved| reserved.eq_ignore_ascii_case(header))
}

/// A configured argument, or the value of an environment variable, header or query parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigValue {
    /// Text of the value. Without the parts that only the user gives, if there is a template.
    pub text: Secret,
    /// True if the whole value is a secret, which is masked where a server echoes it.
    pub secret: bool,
    /// Parts of the value, if it is more than a fixed text.
    pub template: Option<ValueTemplate>,
}

impl ConfigValue {
    /// Creates a value that is not masked in the output of a server.
    pub fn plain(text: impl Into<Secret>) -> Self {
        Self { text: text.into(), secret: false, template: None }
    }

    /// Creates a value that is masked everywhere.
    pub fn secret(text: impl Into<Secret>) -> Self {
        Self { text: text.into(), secret: true, template: None }
    }

    /// Creates a value from parts. The secret parts are masked, and with `secret` the whole value.
    pub fn from_template(template: ValueTemplate, secret: bool) -> Self {
        Self { text: template.known_text(), secret, template: Some(template) }
    }
}

impl From<&str> for ConfigValue {
    fn from(text: &str) -> Self {
        Self::plain(text)
    }
}

impl From<String> for ConfigValue {
    fn from(text: String) -> Self {
        Self::plain(text)
    }
}

/// A text of several parts, some of which are known only when the instance starts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ValueTemplate {
    /// Parts in order.
    pub parts: Vec<ValuePart>,
}

/// A part of a [`ValueTemplate`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ValuePart {
    /// A text that is not masked.
    Literal(Secret),
    /// The content of a variable or file, or a secret in the configuration. It is masked.
    Hidden(Secret),
    /// The value that the user gives for this key.
    UserValue(String),
    /// A content that cannot be read, with the reason and the next step. The instance does not start.
    Unavailable(String),
}

impl ValueTemplate {
    /// Returns true if neither the user nor the file system must provide a part.
    pub fn is_complete(&self) -> bool {
        self.parts.iter().all(|part| matches!(part, ValuePart::Literal(_) | ValuePart::Hidden(_)))
    }

    /// Returns the parts that are known, joined.
    pub fn known_text(&self) -> Secret {
        let known = self.parts.iter().map(|part| match part {
            ValuePart::Literal(text) | ValuePart::Hidden(text) => text.expose(),
            ValuePart::UserValue(_) | ValuePart::Unavailable(_) => "",
        });
        known.collect::<String>().into()
    }

    /// Returns the keys of the user's values.
    pub fn keys(&self) -> impl Iterator<Item = &String> {
        self.parts.iter().filter_map(|part| if let ValuePart::UserValue(key) = part { Some(key) } else { None })
    }
}

/// Declaration of a value that the user gives.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UserValueSpec {
    /// Meaning of the value, for people.
    pub description: Option<String>,
    /// True if the value is not masked.
    pub is_public: bool,
    /// Value if the user gives none.
    pub default: Option<Secret>,
}

/// Field of a [`ServerTarget`] that can be a template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TargetField {
    /// Command of a process.
    Command,
    /// Working directory of a process.
    Cwd,
    /// URL of a remote server.
    Url,
}

/// The parts of a configuration that are completed when the instance is specified.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct InstanceInputs {
    /// Declared values of the user by key. A template can use other keys as well; those are secrets.
    pub declared: BTreeMap<String, UserValueSpec>,
    /// Values that the user has given.
    pub given: BTreeMap<String, Secret>,
    /// Templates of the target.
    pub target: Vec<(TargetField, ValueTemplate)>,
    /// Reasons why the instance cannot start, each with its next step.
    pub problems: Vec<String>,
}

/// Configuration of one tier: server, team or user.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ConfigTier {
    /// Arguments, appended to those of the tiers before.
    pub args: Vec<ConfigValue>,
    /// Environment variables. They override the tiers before, key by key.
    pub env: BTreeMap<String, ConfigValue>,
    /// HTTP headers. They override the tiers before, key by key.
    pub headers: BTreeMap<String, ConfigValue>,
    /// Query parameters. They override the tiers before, key by key.
    pub query: BTreeMap<String, ConfigValue>,
}

/// Process to start or server to connect to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerTarget {
    /// A child process that speaks MCP over stdin and stdout.
    Stdio {
        /// Path, or name of an executable in `PATH`.
        command: String,
        /// Working directory; the satellite's own if `None`.
        cwd: Option<String>,
    },
    /// A remote server.
    Remote {
        /// Transport of the connection.
        transport: RemoteTransport,
        /// Address without a query, which is among the query parameters.
        url: String,
        /// Address for a health check with GET.
        health_url: Option<String>,
    },
}

/// Transport of a remote server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemoteTransport {
    /// Transport `http`: Streamable HTTP.
    Http,
    /// Transport `sse`: the older HTTP+SSE.
    Sse,
}

/// Lifetime of the process of an instance.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ProcessLifetime {
    /// The process starts at installation and sleeps when idle or after a clean exit. The next call wakes it.
    #[default]
    Listed,
    /// The process never sleeps; a clean exit is restarted like a crash.
    AlwaysOn,
    /// The process starts only to read unknown tools, and sleeps at once after that. The first call wakes it.
    Lazy,
}

/// Effect of a new configuration on the current run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum UpdateMethod {
    /// The old run ends before the new one starts.
    #[default]
    Restart,
    /// The new run is ready before calls move over to it and the old one ends. If the new run does not start, the old
    /// one stays.
    Rolling,
}

/// Configuration of an instance: the server's template and the three tiers, not yet merged.
#[derive(Debug, Clone)]
pub struct InstanceConfig {
    /// Identity of the team.
    pub team: TeamId,
    /// Name of the team, for people.
    pub team_slug: Slug,
    /// Identity of the user.
    pub user: UserId,
    /// Name of the user, for people.
    pub user_slug: Slug,
    /// Identity of the installation.
    pub installation: InstallationId,
    /// Name of the server, for people.
    pub server: Slug,
    /// Process to start or server to connect to.
    pub target: ServerTarget,
    /// Lowest tier; the tiers of team and user override it.
    pub server_tier: ConfigTier,
    /// Middle tier.
    pub team_tier: ConfigTier,
    /// Highest tier.
    pub user_tier: ConfigTier,
    /// Keys of environment, headers or query that the user must set.
    pub user_required: Vec<String>,
    /// Values for templates, and templates of the target.
    pub inputs: InstanceInputs,
    /// Lifetime of the process.
    pub lifetime: ProcessLifetime,
    /// Method of applying a new configuration.
    pub update_method: UpdateMethod,
    /// True if requests may be logged.
    pub request_logging: bool,
    /// Limits and timings.
    pub policy: Arc<Policy>,
}

/// Specification of an instance: merged and complete, ready to start unless a value is `missing`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstanceSpec {
    /// Identity of the instance.
    pub id: InstanceId,
    /// Name for people and logs: `{server_slug}-{team_slug}-{user_slug}-{installation_id}`.
    pub name: Arc<str>,
    /// Name of the server, for people.
    pub server: Slug,
    /// Name of the team, for people.
    pub team_slug: Slug,
    /// Name of the user, for people.
    pub user_slug: Slug,
    /// Process to start or server to connect to.
    pub target: ServerTarget,
    /// Arguments of the three tiers, in order.
    pub args: Vec<Secret>,
    /// Environment variables, merged.
    pub env: BTreeMap<String, Secret>,
    /// HTTP headers, merged.
    pub headers: BTreeMap<String, Secret>,
    /// Query parameters, merged.
    pub query: BTreeMap<String, Secret>,
    /// Keys that the user must set and has not set. The instance does not start until this is empty.
    pub missing: Vec<String>,
    /// Other reasons why the instance cannot start, each with its next step. The instance does not start until this is
    /// empty.
    pub problems: Vec<String>,
    /// Lifetime of the process.
    pub lifetime: ProcessLifetime,
    /// Method of applying this configuration to a running instance.
    pub update_method: UpdateMethod,
    /// True if requests may be logged.
    pub request_logging: bool,
    /// Mask that hides the secrets of this instance where its server echoes them.
    pub mask: SecretMask,
    /// Limits and timings.
    pub policy: Arc<Policy>,
}

impl InstanceConfig {
    /// Merges server → team → user: arguments are appended in that order, everything else is overridden key by key. The
    /// user's tier cannot set a variable that makes a program load or run other code. Then completes the templates.
    pub fn merge(mut self) -> InstanceSpec {
        self.user_tier.env.retain(|name, _| !is_code_variable(name));
        let given = |key: &String| {
            [&self.user_tier.env, &self.user_tier.headers, &self.user_tier.query]
                .iter()
                .any(|tier| tier.contains_key(key))
        };
        let missing = self.user_required.iter().filter(|key| !given(key)).cloned().collect();
        let name = format!("{}-{}-{}-{}", self.server, self.team_slug, self.user_slug, self.installation);

        let mut merged = ConfigTier::default();
        for tier in [self.server_tier, self.team_tier, self.user_tier] {
            merged.args.extend(tier.args);
            merged.env.extend(tier.env);
            merged.headers.extend(tier.headers);
            merged.query.extend(tier.query);
        }
        let mut completion =
            TemplateCompletion { inputs: &self.inputs, missing, problems: Vec::new(), secrets: Vec::new() };
        let mut target = self.target;
        for (field, template) in &self.inputs.target {
            completion.set_target(&mut target, *field, template);
        }
        let args = merged.args.into_iter().map(|value| completion.text(value)).collect();
        let [env, headers, query] = [merged.env, merged.headers, merged.query]
            .map(|tier| tier.into_iter().map(|(key, value)| (key, completion.text(value))).collect::<BTreeMap<_, _>>());
        let TemplateCompletion { missing, mut problems, secrets, .. } = completion;
        problems.extend(self.inputs.problems.iter().cloned());
        // A server echoes a credential with or without its scheme: `Bearer X` hides X too.
        let credentials = headers.values().filter_map(|value: &Secret| value.expose().split_once(' '));
        let credentials = credentials.map(|(_scheme, credential)| credential.trim());
        let mask = SecretMask::new(secrets.iter().map(Secret::expose).chain(credentials));
        InstanceSpec {
            id: InstanceId::new(self.team, self.user, self.installation),
            name: name.into(),
            server: self.server,
            team_slug: self.team_slug,
            user_slug: self.user_slug,
            target,
            args,
            env,
            headers,
            query,
            missing,
            problems,
            lifetime: self.lifetime,
            update_method: self.update_method,
            request_logging: self.request_logging,
            mask,
            policy: self.policy,
        }
    }

    /// Returns the keys of all values that templates take from the user, and the declared ones, in alphabetical order.
    pub fn value_keys(&self) -> BTreeSet<&String> {
        let tiers = [&self.server_tier, &self.team_tier, &self.user_tier];
        let values = tiers.into_iter().flat_map(|ConfigTier { args, env, headers, query }| {
            args.iter().chain(env.values()).chain(headers.values()).chain(query.values())
        });
        let templates = values.filter_map(|value| value.template.as_ref());
        let templates = templates.chain(self.inputs.target.iter().map(|(_, template)| template));
        templates.flat_map(ValueTemplate::keys).chain(self.inputs.declared.keys()).collect()
    }
}

/// Completes the templates of one instance and collects what is missing.
struct TemplateCompletion<'a> {
    inputs: &'a InstanceInputs,
    missing: Vec<String>,
    problems: Vec<String>,
    secrets: Vec<Secret>,
}

impl TemplateCompletion<'_> {
    fn text(&mut self, value: ConfigValue) -> Secret {
        let text = match &value.template {
            Some(template) => self.complete(template),
            None => value.text,
        };
        if value.secret {
            self.secrets.push(text.clone());
        }
        text
    }

    fn complete(&mut self, template: &ValueTemplate) -> Secret {
        let mut text = String::new();
        for part in &template.parts {
            match part {
                ValuePart::Literal(part) => text.push_str(part.expose()),
                ValuePart::Hidden(part) => {
                    text.push_str(part.expose());
                    self.secrets.push(part.clone());
                }
                ValuePart::UserValue(key) => {
                    let declared = self.inputs.declared.get(key);
                    let value = self.inputs.given.get(key).or(declared.and_then(|value| value.default.as_ref()));
                    if let Some(value) = value {
                        text.push_str(value.expose());
                        if !declared.is_some_and(|value| value.is_public) {
                            self.secrets.push(value.clone());
                        }
                    } else if !self.missing.contains(key) {
                        self.missing.push(key.clone());
                    }
                }
                ValuePart::Unavailable(reason) if self.problems.contains(reason) => {}
                ValuePart::Unavailable(reason) => self.problems.push(reason.clone()),
            }
        }
        text.into()
    }

    fn set_target(&mut self, target: &mut ServerTarget, field: TargetField, template: &ValueTemplate) {
        let awaited = (self.missing.len(), self.problems.len());
        let text = self.complete(template).expose().to_owned();
        let is_complete = awaited == (self.missing.len(), self.problems.len())
            && template.keys().all(|key| !self.missing.contains(key));
        match (target, field) {
            (ServerTarget::Stdio { command, .. }, TargetField::Command) => *command = text,
            (ServerTarget::Stdio { cwd, .. }, TargetField::Cwd) => *cwd = Some(text),
            (ServerTarget::Remote { url, .. }, TargetField::Url) => {
                if is_complete && !is_plain_url(&text) {
                    self.problems.push(
                        "the completed `url` is not an http or https URL without credentials; check the values in it"
                            .to_owned(),
                    );
                }
                *url = text;
            }
            (ServerTarget::Stdio { .. }, TargetField::Url)
            | (ServerTarget::Remote { .. }, TargetField::Command | TargetField::Cwd) => {}
        }
    }
}

/// Returns true for an http or https URL with a host and without credentials, query and fragment.
fn is_plain_url(url: &str) -> bool {
    let rest = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://"));
    let authority = rest.map(|rest| rest.split('/').next().unwrap_or_default());
    authority.is_some_and(|authority| !authority.is_empty() && !authority.contains('@'))
        && !url.contains(|c: char| c == '?' || c == '#' || c.is_whitespace() || c.is_control())
}

impl InstanceSpec {
    /// Returns true if nothing that the user or the operator must provide keeps the instance from starting.
    pub fn is_complete(&self) -> bool {
        self.missing.is_empty() && self.problems.is_empty()
    }

    /// Returns the transport: `stdio`, `http` or `sse`.
    pub fn transport(&self) -> &'static str {
        match self.target {
            ServerTarget::Stdio { .. } => "stdio",
            ServerTarget::Remote { transport: RemoteTransport::Http, .. } => "http",
            ServerTarget::Remote { transport: RemoteTransport::Sse, .. } => "sse",
        }
    }

    /// Returns true if both send the same headers and query parameters.
    pub fn has_same_credentials(&self, other: &Self) -> bool {
        self.headers == other.headers && self.query == other.query
    }

    /// Returns true if a run of this specification can continue under `new`. The process or the remote server must have
    /// been started with the same parameters; numbers of the policy and data sent with each request may differ.
    pub fn can_continue_as(&self, new: &Self) -> bool {
        // Every field is named, so that a new field must be considered here.
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
            problems,
            policy,
            headers: _,
            query: _,
            lifetime: _,
            update_method: _,
            request_logging: _,
            mask: _,
        } = self;
        let named = (id, name, server, team_slug, user_slug)
            == (&new.id, &new.name, &new.server, &new.team_slug, &new.user_slug);
        let same_target = match (target, &new.target) {
            (
                ServerTarget::Remote { transport, url, health_url: _ },
                ServerTarget::Remote { transport: new_transport, url: new_url, health_url: _ },
            ) => transport == new_transport && url == new_url,
            (target, new_target) => target == new_target,
        };
        let same_sandbox = self.is_remote() || policy.isolation == new.policy.isolation;
        named
            && same_target
            && same_sandbox
            && (args, env, missing, problems) == (&new.args, &new.env, &new.missing, &new.problems)
            && (&policy.session.protocol, &policy.session.tools)
                == (&new.policy.session.protocol, &new.policy.session.tools)
    }

    /// Returns true if the server is remote.
    pub fn is_remote(&self) -> bool {
        matches!(self.target, ServerTarget::Remote { .. })
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
            target: ServerTarget::Stdio { command: "npx".to_owned(), cwd: None },
            server_tier: ConfigTier::default(),
            team_tier: ConfigTier::default(),
            user_tier: ConfigTier::default(),
            user_required: Vec::new(),
            inputs: InstanceInputs::default(),
            lifetime: ProcessLifetime::Listed,
            update_method: UpdateMethod::Restart,
            request_logging: true,
            policy: Arc::default(),
        }
    }

    fn tier<const N: usize>(pairs: [(&str, ConfigValue); N]) -> BTreeMap<String, ConfigValue> {
        pairs.map(|(key, value)| (key.to_owned(), value)).into()
    }

    fn texts(tier: &BTreeMap<String, Secret>) -> Vec<(&str, &str)> {
        tier.iter().map(|(key, value)| (key.as_str(), value.expose())).collect()
    }

    #[test]
    fn arguments_of_server_team_and_user_are_appended_in_order() {
        let mut config = config();
        config.user_tier.args = vec!["user".into()];
        config.server_tier.args = vec!["-y".into(), "server".into()];
        config.team_tier.args = vec!["team".into(), "-y".into()];
        let spec = config.merge();
        let args: Vec<&str> = spec.args.iter().map(Secret::expose).collect();
        assert_eq!(args, ["-y", "server", "team", "-y", "user"]);
    }

    #[test]
    fn env_headers_and_query_are_overridden_key_by_key_and_never_mixed() {
        let mut config = config();
        for (layer, name) in
            [(&mut config.server_tier, "server"), (&mut config.team_tier, "team"), (&mut config.user_tier, "user")]
        {
            layer.env = tier([("ALL", ConfigValue::plain(format!("env of {name}")))]);
            layer.headers = tier([("ALL", ConfigValue::plain(format!("header of {name}")))]);
            layer.query = tier([("ALL", ConfigValue::plain(format!("query of {name}")))]);
        }
        config
            .server_tier
            .env
            .extend(tier([("SERVER", ConfigValue::plain("1")), ("BOTH", ConfigValue::plain("server"))]));
        config.team_tier.env.extend(tier([("TEAM", ConfigValue::plain("2")), ("BOTH", ConfigValue::plain("team"))]));
        config.user_tier.env.extend(tier([("USER", ConfigValue::plain("3"))]));
        let spec = config.merge();
        assert_eq!(
            texts(&spec.env),
            [("ALL", "env of user"), ("BOTH", "team"), ("SERVER", "1"), ("TEAM", "2"), ("USER", "3")]
        );
        assert_eq!(texts(&spec.headers), [("ALL", "header of user")]);
        assert_eq!(texts(&spec.query), [("ALL", "query of user")]);
    }

    #[test]
    fn the_user_tier_cannot_set_a_variable_that_runs_other_code() {
        let mut config = config();
        config.user_required = vec!["NODE_OPTIONS".to_owned()];
        config.team_tier.env = tier([("PYTHONPATH", ConfigValue::plain("/srv/team"))]);
        config.user_tier.env = tier([
            ("NODE_OPTIONS", ConfigValue::plain("--require=/tmp/x")),
            ("PYTHONPATH", ConfigValue::plain("/home/alice")),
            ("REGION", ConfigValue::plain("eu")),
        ]);
        let spec = config.merge();
        assert_eq!(texts(&spec.env), [("PYTHONPATH", "/srv/team"), ("REGION", "eu")]);
        assert_eq!(spec.missing, ["NODE_OPTIONS"]);
    }

    #[test]
    fn only_values_of_the_user_satisfy_required_keys() {
        let mut config = config();
        config.user_required = ["A", "B", "C", "D", "E"].map(str::to_owned).to_vec();
        config.server_tier.env = tier([("D", ConfigValue::plain("from the server"))]);
        config.team_tier.headers = tier([("E", ConfigValue::plain("from the team"))]);
        config.user_tier.env = tier([("A", ConfigValue::plain(""))]);
        config.user_tier.headers = tier([("B", ConfigValue::plain("b"))]);
        config.user_tier.query = tier([("C", ConfigValue::plain("c"))]);
        assert_eq!(config.merge().missing, ["D", "E"]);
    }

    #[test]
    fn echoed_secrets_are_masked_with_and_without_their_auth_scheme() {
        let mut config = config();
        config.server_tier.env =
            tier([("OLD", ConfigValue::secret("overridden")), ("PLAIN", ConfigValue::plain("not-hidden"))]);
        config.user_tier.env = tier([("OLD", ConfigValue::secret("sk-of-alice"))]);
        config.user_tier.headers = tier([
            ("Authorization", ConfigValue::secret("Bearer abc.def")),
            ("X-Auth", ConfigValue::plain("Token plain-token")),
        ]);
        config.user_tier.query = tier([("key", ConfigValue::secret("in-the-url"))]);
        let spec = config.merge();
        let echoed = "sk-of-alice|not-hidden|Bearer abc.def|abc.def|plain-token|in-the-url";
        assert_eq!(spec.mask.apply(echoed), "[secret]|not-hidden|[secret]|[secret]|[secret]|[secret]");
    }

    fn template(parts: &[ValuePart]) -> ConfigValue {
        ConfigValue::from_template(ValueTemplate { parts: parts.to_vec() }, false)
    }

    fn literal(text: &str) -> ValuePart {
        ValuePart::Literal(text.into())
    }

    fn user_value(key: &str) -> ValuePart {
        ValuePart::UserValue(key.to_owned())
    }

    #[test]
    fn templates_are_completed_with_values_of_the_user_and_their_secrets_are_masked() {
        let mut config = config();
        config.server_tier.args = vec!["-y".into(), template(&[literal("--token="), user_value("TOKEN")])];
        config.server_tier.env = tier([
            ("URL", template(&[literal("https://"), user_value("HOST"), literal("/"), user_value("TOKEN")])),
            ("OVERRIDDEN", template(&[user_value("UNUSED")])),
        ]);
        config.team_tier.env = tier([("OVERRIDDEN", ConfigValue::plain("1"))]);
        config.inputs.target = vec![(
            TargetField::Cwd,
            ValueTemplate { parts: vec![ValuePart::Hidden("/srv/hush-directory".into()), literal("/data")] },
        )];
        let public = UserValueSpec { is_public: true, default: Some("example.com".into()), ..UserValueSpec::default() };
        config.inputs.declared = [("HOST".to_owned(), public)].into();
        let spec = config.clone().merge();
        assert_eq!((&spec.missing[..], spec.is_complete()), (&["TOKEN".to_owned()][..], false));

        config.inputs.given = [("TOKEN".to_owned(), "hush-token".into())].into();
        assert_eq!(config.value_keys().into_iter().collect::<Vec<_>>(), ["HOST", "TOKEN", "UNUSED"]);
        let spec = config.merge();
        let args: Vec<&str> = spec.args.iter().map(Secret::expose).collect();
        assert_eq!(args, ["-y", "--token=hush-token"]);
        assert_eq!(texts(&spec.env), [("OVERRIDDEN", "1"), ("URL", "https://example.com/hush-token")]);
        let ServerTarget::Stdio { cwd, .. } = &spec.target else { panic!("{:?}", spec.target) };
        assert_eq!((cwd.as_deref(), spec.is_complete()), (Some("/srv/hush-directory/data"), true));
        assert_eq!(spec.mask.apply("example.com hush-token /srv/hush-directory"), "example.com [secret] [secret]");
    }

    #[test]
    fn an_unreadable_content_and_an_invalid_completed_url_keep_the_instance_from_starting() {
        let mut config = config();
        let transport = RemoteTransport::Http;
        config.target = ServerTarget::Remote { transport, url: String::new(), health_url: None };
        config.inputs.target =
            vec![(TargetField::Url, ValueTemplate { parts: vec![literal("https://"), user_value("HOST")] })];
        config.server_tier.headers =
            tier([("X", template(&[ValuePart::Unavailable("cannot read the file `x`".to_owned())]))]);
        for (host, problems) in [("e.com/mcp", 1), ("user@e.com", 2), ("e.com/?a=b", 2), ("", 2)] {
            config.inputs.given = [("HOST".to_owned(), host.into())].into();
            let spec = config.clone().merge();
            assert_eq!((spec.problems.len(), spec.is_complete()), (problems, false), "{host}: {:?}", spec.problems);
        }
        config.inputs.given.clear();
        let spec = config.merge();
        assert_eq!((spec.problems.len(), spec.missing), (1, vec!["HOST".to_owned()]));
    }

    #[test]
    fn debug_output_of_configuration_and_spec_contains_no_values() {
        let mut config = config();
        config.server_tier.args = vec!["hush-args".into()];
        config.team_tier.env = tier([("KEY", ConfigValue::plain("hush-env"))]);
        config.user_tier.headers = tier([("Authorization", ConfigValue::secret("Bearer hush-header"))]);
        config.user_tier.query = tier([("q", ConfigValue::secret("hush-query"))]);
        assert!(!format!("{config:?}").contains("hush"));
        assert!(!format!("{:?}", config.merge()).contains("hush"));
    }

    #[test]
    fn an_instance_has_a_readable_name_and_a_structured_id() {
        let spec = config().merge();
        assert_eq!(&*spec.name, "sequential-thinking-acme-alice-abc123");
        assert_eq!(spec.id, InstanceId::new("team_acme".into(), "user_alice".into(), "abc123".into()));
    }

    fn policy(config: &mut InstanceConfig) -> &mut Policy {
        Arc::make_mut(&mut config.policy)
    }

    #[test]
    fn a_run_continues_with_a_new_policy_but_not_with_new_process_settings() {
        let started = config().merge();
        let can_continue = |change: fn(&mut InstanceConfig)| {
            let mut other = config();
            change(&mut other);
            started.can_continue_as(&other.merge())
        };
        let in_place: [fn(&mut InstanceConfig); 7] = [
            |config| policy(config).restart.max_crashes = 9,
            |config| policy(config).idle.idle = std::time::Duration::from_secs(1),
            |config| policy(config).session.request_timeout = std::time::Duration::from_secs(1),
            |config| policy(config).logs.line_max = 99,
            |config| config.lifetime = ProcessLifetime::AlwaysOn,
            |config| config.update_method = UpdateMethod::Rolling,
            |config| config.request_logging = false,
        ];
        assert!(in_place.into_iter().all(can_continue));
        let seen_by_the_process: [fn(&mut InstanceConfig); 7] = [
            |config| policy(config).isolation.network = false,
            |config| policy(config).session.protocol = Some(crate::era::Era::Stateless),
            |config| policy(config).session.tools.denied = ["remove".to_owned()].into(),
            |config| config.user_tier.args = vec!["more".into()],
            |config| drop(config.user_tier.env.insert("KEY".to_owned(), ConfigValue::plain("v"))),
            |config| config.target = ServerTarget::Stdio { command: "npx".to_owned(), cwd: Some("/".to_owned()) },
            |config| config.user_required = vec!["KEY".to_owned()],
        ];
        assert!(!seen_by_the_process.into_iter().any(can_continue));
    }

    #[test]
    fn a_spec_names_its_transport() {
        let mut config = config();
        assert_eq!(config.clone().merge().transport(), "stdio");
        for (transport, name) in [(RemoteTransport::Http, "http"), (RemoteTransport::Sse, "sse")] {
            config.target = ServerTarget::Remote { transport, url: "http://127.0.0.1".to_owned(), health_url: None };
            assert_eq!(config.clone().merge().transport(), name);
        }
    }
}
