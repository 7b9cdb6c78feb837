//! Checks of servers.

use mcp_satellite_http::client::is_loopback;
use mcp_satellite_model::era::{Era, NEWEST_SESSION_VERSION, STATELESS_VERSION};
use mcp_satellite_model::policy::HealthCheck;
use mcp_satellite_model::spec::{
    ConfigTier, ConfigValue, InstanceConfig, RemoteTransport, ServerTarget, is_reserved_header,
};
use mcp_satellite_model::variables::{WithheldReason, is_code_variable, is_never_passed};
use reqwest::header::{HeaderName, HeaderValue};
use toml_span::{Span, Spanned};

use super::check::{ALLOWED, ConfigCheck};
use super::file;
use super::oauth::OAuthPlan;
use super::reader::{ParsedValue, SpannedText};
use super::secrets::{has_reference, is_likely_secret, parse_reference};

const AUTHORIZATION: &str = "Authorization";

#[derive(Clone)]
pub(crate) struct CheckedServer {
    pub(crate) target: Option<ServerTarget>,
    /// Protocol era of the server; `None` if it is negotiated.
    pub(crate) protocol: Option<Era>,
    pub(crate) layer: ConfigTier,
    pub(crate) user_required: Vec<String>,
    pub(crate) oauth: Option<(Span, OAuthPlan)>,
}

impl ConfigCheck<'_, '_> {
    pub(crate) fn server(&mut self, subject: &str, typed: file::ServerTable, near: Option<&str>) -> CheckedServer {
        #[derive(Clone, Copy, Default)]
        enum TransportWord {
            #[default]
            Stdio,
            Remote(RemoteTransport),
        }
        let words = [
            ("stdio", TransportWord::Stdio),
            ("http", TransportWord::Remote(RemoteTransport::Http)),
            ("sse", TransportWord::Remote(RemoteTransport::Sse)),
        ];
        let mut query = Vec::new();
        let mut target = match self.keyword(&typed.transport, "transport", &words) {
            None => None,
            Some(TransportWord::Stdio) => {
                if let Some(url) = typed.url.get() {
                    let hint = "set transport = \"http\", or \"sse\" for HTTP+SSE, or remove the url";
                    self.findings.error(url.span, format!("{subject} is a stdio server with a `url`"), hint);
                } else if typed.command.is_absent() {
                    let hint = near.map(|near| format!("did you mean the template `{near}`? Otherwise add a command"));
                    let hint = hint.unwrap_or_else(|| "add command = \"…\", such as \"npx\"".to_owned());
                    self.findings.error(typed.at, format!("{subject} has no `command`"), hint);
                }
                let command = typed.command.get().map(|command| self.command(command));
                let cwd = typed.cwd.get().map(|cwd| cwd.value.clone());
                command.map(|command| ServerTarget::Stdio { command, cwd })
            }
            Some(TransportWord::Remote(transport)) => {
                for (key, misplaced) in [("command", &typed.command), ("cwd", &typed.cwd)] {
                    if let Some(text) = misplaced.get() {
                        let hint = "remove it, or set transport = \"stdio\"";
                        self.findings.error(text.span, format!("{subject} is a remote server with a `{key}`"), hint);
                    }
                }
                if typed.url.is_absent() {
                    self.findings.error(typed.at, format!("{subject} has no `url`"), "add url = \"https://…\"");
                }
                typed.url.get().and_then(|text| {
                    let mut url = self.url("url", text)?;
                    query = self.query_pairs(text, &url);
                    url.set_query(None);
                    url.set_fragment(None);
                    Some(ServerTarget::Remote { transport, url: url.into(), health_url: None })
                })
            }
        };
        let protocol = self.protocol(subject, &typed.protocol, target.as_ref());
        self.health_url(&typed.tier, &mut target);
        let mut layer = ConfigTier::default();
        // Query parameters in the URL are often secrets, so they are treated like configured ones.
        query.extend(typed.tier.query);
        self.layer(subject, target.as_ref(), file::ServerTierTable { query, ..typed.tier }, &mut layer);
        let oauth = typed.oauth.map(|oauth| (oauth.at(), oauth.into_plan(subject, self)));
        CheckedServer { target, protocol, layer, user_required: self.user_required(&typed.user_required), oauth }
    }

    pub(crate) fn protocol(
        &mut self,
        subject: &str,
        typed: &ParsedValue<String>,
        target: Option<&ServerTarget>,
    ) -> Option<Era> {
        let (sessions, stateless) = (Some(Era::Sessions), Some(Era::Stateless));
        let words = [("auto", None), (NEWEST_SESSION_VERSION, sessions), (STATELESS_VERSION, stateless)];
        let protocol = self.keyword(typed, "protocol", &words).flatten();
        let is_older = matches!(target, Some(ServerTarget::Remote { transport: RemoteTransport::Sse, .. }));
        if let (Some(Era::Stateless), true, Some(word)) = (protocol, is_older, typed.get()) {
            let message = format!("{subject} uses the older HTTP+SSE, which does not support `{}`", word.value);
            self.findings.error(word.span, message, "set transport = \"http\", or remove the protocol");
        }
        protocol
    }

    /// Sets the URL for health checks. The URL is displayed, so it must not contain secrets. Health checks are sent
    /// with the headers and the query of the server.
    pub(crate) fn health_url(&mut self, tier: &file::ServerTierTable, target: &mut Option<ServerTarget>) {
        let Some(ServerTarget::Remote { health_url, .. }) = target else { return };
        let Some(text) = tier.health_url.get() else { return };
        let Some(mut url) = self.url("health_url", text) else { return };
        if url.query_pairs().any(|(name, value)| is_likely_secret(&name, &value)) {
            let hint = "remove it: a health check sends the headers and the query of the server";
            self.findings.error(text.span, "`health_url` seems to contain a secret", hint);
        }
        url.set_fragment(None);
        *health_url = Some(url.into());
    }

    /// Checks that a GET health check has a URL, and that a health check URL is used. `instances` are those of one
    /// installation.
    pub(crate) fn health(&mut self, subject: &str, at: Span, instances: &[InstanceConfig]) {
        let remotes = || {
            instances.iter().filter_map(|instance| match &instance.target {
                ServerTarget::Remote { health_url, .. } => Some((health_url.is_some(), instance.policy.health.check)),
                ServerTarget::Stdio { .. } => None,
            })
        };
        if remotes().any(|(address, check)| !address && check == HealthCheck::Get) {
            let hint = "add health_url = \"https://…\", or set check = \"ping\" in its policy.health";
            self.findings.error(
                at,
                format!("{subject} has check = \"get\" in its policy.health and no `health_url`"),
                hint,
            );
        }
        if remotes().any(|(address, check)| address && check != HealthCheck::Get) {
            let message =
                format!("{subject} has a `health_url`, which has no effect without check = \"get\" in [policy.health]");
            self.findings.warning(at, message);
        }
    }

    /// Warns about credentials that are sent unencrypted or to a second host.
    pub(crate) fn warn_insecure_transport(&mut self, subject: &str, at: Span, instances: &[InstanceConfig]) {
        let mut warnings: Vec<String> = Vec::new();
        for instance in instances {
            let layers = [&instance.server_tier, &instance.team_tier, &instance.user_tier];
            let has_credentials = !instance.user_required.is_empty()
                || layers
                    .into_iter()
                    .any(|layer| !layer.headers.is_empty() || layer.query.values().any(|value| value.secret));
            let ServerTarget::Remote { url, health_url, .. } = &instance.target else { continue };
            if !has_credentials {
                continue;
            }
            let parsed = |url: &str| reqwest::Url::parse(url).ok();
            let url = parsed(url);
            let health_url = health_url.as_deref().and_then(parsed);
            for (key, url) in [("url", &url), ("health_url", &health_url)] {
                if url.as_ref().is_some_and(|url| url.scheme() == "http" && !is_loopback(url)) {
                    warnings.push(format!("{subject} may send a secret unencrypted: its `{key}` is http, not https"));
                }
            }
            if let (Some(url), Some(health_url)) = (url, health_url)
                && url.origin() != health_url.origin()
            {
                warnings.push(format!("{subject} sends its credentials to the host of its `health_url` as well"));
            }
        }
        warnings.sort();
        warnings.dedup();
        for message in warnings {
            self.findings.warning(at, message);
        }
    }

    fn query_pairs(&mut self, text: &SpannedText, url: &reqwest::Url) -> Vec<(SpannedText, SpannedText)> {
        let mut names = Vec::new();
        let spanned = |part: &str| Spanned::with_span(part.to_owned(), text.span);
        let mut pairs = Vec::new();
        for (name, value) in url.query_pairs() {
            if names.contains(&name) {
                let message = format!("the query parameter `{name}` is in the `url` twice");
                self.findings.error(text.span, message, "give it once");
            }
            pairs.push((spanned(&name), spanned(&value)));
            names.push(name);
        }
        pairs
    }

    fn command(&mut self, command: &SpannedText) -> String {
        let text = &command.value;
        let program = text.split_whitespace().next().unwrap_or_default();
        if program.is_empty() || text.contains('\0') {
            self.findings.error(command.span, "`command` is empty", "give the name of a program or its path");
        } else if program.len() < text.len() && ALLOWED.contains(&program) {
            let hint = format!("write command = \"{program}\" and the rest, word by word, in args = [\"…\"]");
            self.findings.error(command.span, "`command` is a command line, not a program", hint);
        } else if self.allowed.as_ref().is_some_and(|allowed| !allowed.contains(text)) {
            let message = format!("the command `{text}` is not allowed in the production profile");
            let hint = "use one of npx, node, uvx, uv, python, python3, deno and bun, or name it in \
                        allowed_commands under [satellite]";
            self.findings.error(command.span, message, hint);
        }
        text.clone()
    }

    pub(crate) fn user_required(&mut self, typed: &[SpannedText]) -> Vec<String> {
        for name in typed.iter().filter(|name| name.value.trim().is_empty()) {
            self.findings.error(name.span, "`user_required` has an empty name", "name a key of env, headers or query");
        }
        // A bearer token becomes a header.
        let header_name = |name: &str| if name == "bearer_token" { AUTHORIZATION } else { name }.to_owned();
        typed.iter().map(|name| header_name(&name.value)).collect()
    }

    /// Removes variables from a user's tier that make a server run other code, with a warning for each.
    pub(crate) fn remove_code_variables(&mut self, subject: &str, tier: &mut file::ServerTierTable) {
        for (name, _) in tier.env.extract_if(.., |(name, _)| is_code_variable(&name.value)) {
            let message = format!(
                "`{}` in the env of {subject} is not passed on: users cannot set a variable that makes a server run \
                 other code; remove it, or set it in the env of the server or the team",
                name.value
            );
            self.findings.warning(name.span, message);
        }
    }

    /// Warns about required values that users of a stdio server cannot set.
    pub(crate) fn warn_required_code_variables(&mut self, subject: &str, at: Span, server: &CheckedServer) {
        let Some(ServerTarget::Stdio { .. }) = server.target else { return };
        for name in server.user_required.iter().filter(|name| is_code_variable(name)) {
            let message = format!(
                "{subject} waits for `{name}` in its `user_required`, but users cannot set a variable that makes a server \
                 run other code; remove it, and set it in the env of the server or the team"
            );
            self.findings.warning(at, message);
        }
    }

    pub(crate) fn layer(
        &mut self,
        subject: &str,
        target: Option<&ServerTarget>,
        typed: file::ServerTierTable,
        layer: &mut ConfigTier,
    ) {
        let first = |pairs: &[(SpannedText, SpannedText)]| pairs.first().map(|(name, _)| name.span);
        let (env, headers, query) = (first(&typed.env), first(&typed.headers), first(&typed.query));
        let args = typed.args.first().map(|argument| argument.span);
        let (kind, misplaced) = match target {
            None => ("", vec![]),
            Some(ServerTarget::Stdio { .. }) => {
                let of = |typed: &ParsedValue<String>| typed.get().map(|text| text.span);
                let (bearer_token, health_url) = (of(&typed.bearer_token), of(&typed.health_url));
                let misplaced = [headers, query, bearer_token, health_url];
                ("stdio", ["headers", "query", "bearer_token", "health_url"].into_iter().zip(misplaced).collect())
            }
            Some(ServerTarget::Remote { .. }) => ("remote", vec![("args", args), ("env", env)]),
        };
        for (key, at) in misplaced {
            if let Some(at) = at {
                let hint = "a stdio server takes args and env, a remote one takes headers and query";
                self.findings.error(at, format!("{subject} is a {kind} server with `{key}`"), hint);
            }
        }

        for argument in typed.args {
            if has_reference(&argument.value) {
                let hint = "an argument is visible to every process on the machine; pass the secret in `env`";
                self.findings.error(argument.span, "`args` refers to a secret", hint);
            } else if argument.value.contains('\0') {
                self.findings.error(argument.span, "an argument contains a zero byte", "remove it");
            }
            layer.args.push(argument.value.into());
        }
        for (name, text) in typed.env {
            if name.value.is_empty() || name.value.contains(['=', '\0']) {
                let message =
                    format!("`{}` is not a valid name for an environment variable", name.value.escape_debug());
                self.findings.error(
                    name.span,
                    message,
                    "use a name that is not empty and contains neither = nor a zero byte",
                );
            }
            if is_never_passed(&name.value) {
                let message = format!("`{}` in the env of {subject} {}", name.value, WithheldReason::Never);
                self.findings.warning(name.span, message);
            }
            let Some(value) = self.value(&name, &text) else { continue };
            if value.text.expose().contains('\0') {
                self.findings.error(
                    text.span,
                    format!("the value of `{}` contains a zero byte", name.value),
                    "remove it",
                );
            }
            layer.env.insert(name.value, value);
        }
        for (name, text) in typed.query {
            if let Some(value) = self.value(&name, &text) {
                layer.query.insert(name.value, value);
            }
        }
        self.headers(subject, typed.headers, &typed.bearer_token, layer);
    }

    fn headers(
        &mut self,
        subject: &str,
        typed: Vec<(SpannedText, SpannedText)>,
        bearer_token: &ParsedValue<String>,
        layer: &mut ConfigTier,
    ) {
        let mut names: Vec<String> = Vec::new();
        for (name, text) in typed {
            let shown = name.value.escape_debug();
            let folded = name.value.to_ascii_lowercase();
            if HeaderName::from_bytes(name.value.as_bytes()).is_err() {
                self.findings.error(
                    name.span,
                    format!("`{shown}` is not a valid name for a header"),
                    "use letters, digits and -",
                );
            } else if is_reserved_header(&folded) {
                let message = format!("the header `{shown}` cannot be configured: the satellite sets it");
                self.findings.error(name.span, message, "remove it");
            } else if names.contains(&folded) {
                let hint = "header names do not distinguish upper and lower case; remove one";
                self.findings.error(name.span, format!("the header `{shown}` is given twice"), hint);
            }
            names.push(folded);
            let Some(value) = self.header(&text) else { continue };
            if HeaderValue::from_str(value.text.expose()).is_err() {
                let message = format!("the value of the header `{}` cannot be sent", name.value.escape_debug());
                self.findings.error(text.span, message, "it must be one line of printable characters");
            }
            layer.headers.insert(name.value, value);
        }
        let Some(text) = bearer_token.get() else { return };
        if names.contains(&AUTHORIZATION.to_ascii_lowercase()) {
            let message = format!("{subject} has a `bearer_token` and a header `{AUTHORIZATION}`, which are the same");
            self.findings.error(text.span, message, "remove one");
        }
        let what = format!("the `bearer_token` of {subject}");
        let Some(token) = self.secret_sources.resolve_secret(&what, text, self.findings) else { return };
        let value = format!("Bearer {}", token.expose());
        if token.expose().to_ascii_lowercase().starts_with("bearer ") {
            let hint = "remove `Bearer` from the token: the satellite adds it";
            self.findings.error(text.span, format!("{what} begins with `Bearer`"), hint);
        } else if HeaderValue::from_str(&value).is_err() {
            let hint = "it must be one line of printable characters";
            self.findings.error(text.span, format!("{what} cannot be sent"), hint);
        }
        layer.headers.insert(AUTHORIZATION.to_owned(), ConfigValue::secret(value));
    }

    fn value(&mut self, name: &SpannedText, text: &SpannedText) -> Option<ConfigValue> {
        match parse_reference(&text.value) {
            Some(reference) => {
                self.secret_sources.resolve(&reference, text.span, self.findings).map(ConfigValue::secret)
            }
            None if is_likely_secret(&name.value, &text.value) => Some(ConfigValue::secret(text.value.as_str())),
            None => Some(ConfigValue::plain(text.value.as_str())),
        }
    }

    /// Reads the value of a header, which is always a secret: `env:NAME`, `Bearer env:NAME`, or a literal.
    fn header(&mut self, text: &SpannedText) -> Option<ConfigValue> {
        let (scheme, rest) = match text.value.split_once(' ') {
            Some((scheme, rest)) if parse_reference(rest).is_some() => (Some(scheme), rest),
            _ => (None, text.value.as_str()),
        };
        let Some(reference) = parse_reference(rest) else { return Some(ConfigValue::secret(rest)) };
        let secret = self.secret_sources.resolve(&reference, text.span, self.findings)?;
        Some(ConfigValue::secret(match scheme {
            Some(scheme) => format!("{scheme} {}", secret.expose()).into(),
            None => secret,
        }))
    }
}
