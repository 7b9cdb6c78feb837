//! Description of one instance, from which its specification is built.

use std::sync::Arc;

use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::secret::Secret;
use mcp_satellite_actors::model::spec::{
    ConfigTier, ConfigValue, InstanceConfig, InstanceInputs, InstanceSpec, ProcessLifetime, RemoteTransport,
    ServerTarget, UpdateMethod, is_reserved_header,
};
use mcp_satellite_actors::model::variables::is_never_passed;

use crate::functions::Functions;
use crate::handle::InstanceError;

const DEFAULT_NAME: &str = "default";

/// An MCP server to install: a child process, a remote server, or functions of the host.
///
/// Team, user and name are the identity of the instance: installing another one with the same three changes the first.
/// A wrong value, or one that the kind of server does not have, is reported by [`Runtime::install`].
///
/// ```
/// use mcp_satellite_embed::Instance;
///
/// let files = Instance::stdio("npx")
///     .args(["-y", "@modelcontextprotocol/server-filesystem", "/srv"])
///     .named("files")
///     .team("acme")
///     .user("alice")
///     .env("LOG_LEVEL", "info")
///     .secret_env("API_KEY", "s3cret")
///     .lazy();
/// let search = Instance::remote("https://example.com/mcp").secret_header("Authorization", "Bearer s3cret");
/// ```
///
/// [`Runtime::install`]: crate::Runtime::install
#[derive(Debug, Clone)]
#[must_use = "an instance does nothing before it is installed"]
pub struct Instance {
    config: InstanceConfig,
    functions: Option<Functions>,
    /// The first setting that this kind of server does not have.
    misplaced: Option<(&'static str, &'static str)>,
}

impl Instance {
    /// Describes a server that is a child process and speaks MCP over stdin and stdout. `command` is a path, or the
    /// name of an executable in `PATH`. The default name is the file name of the command.
    pub fn stdio(command: impl Into<String>) -> Self {
        let command = command.into();
        let name = command.rsplit('/').next().unwrap_or_default().to_owned();
        Self::new(&name, ServerTarget::Stdio { command, cwd: None })
    }

    /// Describes a remote server at an `http` or `https` URL without user, password and query. The default name is the
    /// host of the URL.
    pub fn remote(url: impl Into<String>) -> Self {
        let url = url.into();
        let name = host(&url).unwrap_or_default().to_owned();
        Self::new(&name, ServerTarget::Remote { transport: RemoteTransport::Http, url, health_url: None })
    }

    /// Describes a server that consists of functions of the host. It is supervised like any other server.
    pub fn functions(name: impl AsRef<str>, functions: Functions) -> Self {
        let target = ServerTarget::Stdio { command: functions.command(), cwd: None };
        Self { functions: Some(functions), ..Self::new(name.as_ref(), target) }
    }

    fn new(name: &str, target: ServerTarget) -> Self {
        let config = InstanceConfig {
            team: DEFAULT_NAME.into(),
            team_slug: DEFAULT_NAME.into(),
            user: DEFAULT_NAME.into(),
            user_slug: DEFAULT_NAME.into(),
            installation: name.into(),
            server: name.into(),
            target,
            server_tier: ConfigTier::default(),
            team_tier: ConfigTier::default(),
            user_tier: ConfigTier::default(),
            user_required: Vec::new(),
            inputs: InstanceInputs::default(),
            lifetime: ProcessLifetime::default(),
            update_method: UpdateMethod::default(),
            request_logging: true,
            policy: Arc::default(),
        };
        Self { config, functions: None, misplaced: None }
    }

    /// Sets the name, which identifies the instance among those of its user.
    pub fn named(mut self, name: impl AsRef<str>) -> Self {
        (self.config.server, self.config.installation) = (name.as_ref().into(), name.as_ref().into());
        self
    }

    /// Sets the team; `default` by default.
    pub fn team(mut self, team: impl AsRef<str>) -> Self {
        (self.config.team, self.config.team_slug) = (team.as_ref().into(), team.as_ref().into());
        self
    }

    /// Sets the user; `default` by default.
    pub fn user(mut self, user: impl AsRef<str>) -> Self {
        (self.config.user, self.config.user_slug) = (user.as_ref().into(), user.as_ref().into());
        self
    }

    /// Appends arguments of the command. They are not masked: a secret belongs into [`Instance::secret_env`].
    pub fn args(self, args: impl IntoIterator<Item = impl Into<Secret>>) -> Self {
        self.process("args", |config| config.server_tier.args.extend(args.into_iter().map(ConfigValue::plain)))
    }

    /// Sets the working directory; by default the host's.
    pub fn cwd(self, directory: impl Into<String>) -> Self {
        self.process("cwd", |config| {
            if let ServerTarget::Stdio { cwd, .. } = &mut config.target {
                *cwd = Some(directory.into());
            }
        })
    }

    /// Sets an environment variable.
    pub fn env(self, name: impl Into<String>, value: impl Into<Secret>) -> Self {
        self.process("env", |config| drop(config.server_tier.env.insert(name.into(), ConfigValue::plain(value))))
    }

    /// Sets an environment variable whose value is masked where the server prints it.
    pub fn secret_env(self, name: impl Into<String>, value: impl Into<Secret>) -> Self {
        self.process("secret_env", |config| {
            config.server_tier.env.insert(name.into(), ConfigValue::secret(value));
        })
    }

    /// Sets an HTTP header.
    pub fn header(self, name: impl Into<String>, value: impl Into<Secret>) -> Self {
        self.remote_only("header", |config| {
            config.server_tier.headers.insert(name.into(), ConfigValue::plain(value));
        })
    }

    /// Sets an HTTP header whose value is masked where the server repeats it.
    pub fn secret_header(self, name: impl Into<String>, value: impl Into<Secret>) -> Self {
        self.remote_only("secret_header", |config| {
            config.server_tier.headers.insert(name.into(), ConfigValue::secret(value));
        })
    }

    /// Sets a parameter of the query of the URL.
    pub fn query(self, name: impl Into<String>, value: impl Into<Secret>) -> Self {
        self.remote_only("query", |config| {
            config.server_tier.query.insert(name.into(), ConfigValue::plain(value));
        })
    }

    /// Sets a parameter of the query whose value is masked where the server repeats it.
    pub fn secret_query(self, name: impl Into<String>, value: impl Into<Secret>) -> Self {
        self.remote_only("secret_query", |config| {
            config.server_tier.query.insert(name.into(), ConfigValue::secret(value));
        })
    }

    /// Selects the older transport HTTP+SSE instead of Streamable HTTP.
    pub fn sse(self) -> Self {
        self.remote_only("sse", |config| {
            if let ServerTarget::Remote { transport, .. } = &mut config.target {
                *transport = RemoteTransport::Sse;
            }
        })
    }

    /// Sets limits and timings.
    pub fn policy(mut self, policy: impl Into<Arc<Policy>>) -> Self {
        self.config.policy = policy.into();
        self
    }

    /// Starts the server only to read its tools. The first call wakes it.
    pub fn lazy(mut self) -> Self {
        self.config.lifetime = ProcessLifetime::Lazy;
        self
    }

    /// Keeps the server running when it is idle, and restarts it after a clean exit. By default an idle process sleeps.
    pub fn always_on(mut self) -> Self {
        self.config.lifetime = ProcessLifetime::AlwaysOn;
        self
    }

    /// Keeps the old run until the new one is ready when the configuration changes. By default the old one ends first.
    pub fn rolling(mut self) -> Self {
        self.config.update_method = UpdateMethod::Rolling;
        self
    }

    /// Leaves arguments and results of calls out of the log and the events.
    pub fn without_request_logging(mut self) -> Self {
        self.config.request_logging = false;
        self
    }

    fn process(mut self, field: &'static str, set: impl FnOnce(&mut InstanceConfig)) -> Self {
        if matches!(self.config.target, ServerTarget::Stdio { .. }) && self.functions.is_none() {
            set(&mut self.config);
        } else {
            self.misplaced.get_or_insert((field, "only a child process has it"));
        }
        self
    }

    fn remote_only(mut self, field: &'static str, set: impl FnOnce(&mut InstanceConfig)) -> Self {
        if matches!(self.config.target, ServerTarget::Remote { .. }) {
            set(&mut self.config);
        } else {
            self.misplaced.get_or_insert((field, "only a remote server has it"));
        }
        self
    }

    pub(crate) fn into_spec(self) -> Result<(InstanceSpec, Option<Functions>), InstanceError> {
        match self.problem() {
            Some((field, problem)) => {
                Err(InstanceError::Invalid { instance: self.config.server.to_string(), field, problem })
            }
            None => Ok((self.config.merge(), self.functions)),
        }
    }

    /// Returns the first invalid field and the reason.
    fn problem(&self) -> Option<(&'static str, String)> {
        let InstanceConfig { team, user, server, target, server_tier, policy, .. } = &self.config;
        let wrong = |field, problem: &str| Some((field, problem.to_owned()));
        if let Some((field, problem)) = self.misplaced {
            return wrong(field, problem);
        }
        match target {
            ServerTarget::Stdio { command, .. } if command.is_empty() => return wrong("command", "it is empty"),
            ServerTarget::Stdio { command, .. } if command.contains('\0') => {
                return wrong("command", "it contains a NUL byte");
            }
            ServerTarget::Remote { url, .. } if host(url).is_none() => {
                return wrong("url", "it does not begin with http:// or https:// and a host");
            }
            ServerTarget::Remote { url, .. } if authority(url).is_some_and(|authority| authority.contains('@')) => {
                return wrong("url", "it contains a user name or a password, and URLs are shown; use `secret_header`");
            }
            ServerTarget::Remote { url, .. } if url.contains(['?', '#']) => {
                return wrong("url", "it contains a query or a fragment; set parameters with `query`");
            }
            ServerTarget::Stdio { .. } | ServerTarget::Remote { .. } => {}
        }
        for (field, text) in [("named", server.as_str()), ("team", team.as_str()), ("user", user.as_str())] {
            if text.is_empty() {
                return wrong(field, "it is empty");
            }
        }
        if server_tier.args.iter().any(|arg| arg.text.expose().contains('\0')) {
            return wrong("args", "an argument contains a NUL byte");
        }
        for (name, value) in &server_tier.env {
            if name.is_empty() || name.contains(['=', '\0']) || value.text.expose().contains('\0') {
                // The rest may be a secret: `KEY=value`.
                let name = name.split(['=', '\0']).next().unwrap_or_default();
                return Some(("env", format!("`{}` is no environment variable", name.escape_default())));
            }
            if is_never_passed(name) {
                return Some(("env", format!("`{name}` is never passed on, because it makes programs run other code")));
            }
        }
        if let Some(name) = server_tier.headers.keys().find(|name| name.is_empty() || is_reserved_header(name)) {
            return Some(("header", format!("`{name}` is set by the connection itself")));
        }
        let error = policy.check().err()?;
        Some((error.field, format!("it {}; {}", error.problem, error.remedy)))
    }
}

/// Returns the part of an `http` or `https` URL between scheme and path: user, host and port.
fn authority(url: &str) -> Option<&str> {
    let rest = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://"))?;
    rest.split(['/', '?', '#']).next()
}

/// Returns the host of an `http` or `https` URL, without user and port.
fn host(url: &str) -> Option<&str> {
    let host = authority(url)?.rsplit('@').next()?;
    let host = if host.starts_with('[') { host.split_inclusive(']').next()? } else { host.split(':').next()? };
    (!host.is_empty()).then_some(host)
}
