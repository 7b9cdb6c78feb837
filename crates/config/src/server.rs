//! Checks of servers.

use std::collections::{BTreeMap, BTreeSet};

use mcp_satellite_clients::{may_be_secret, secret_in_arg};
use mcp_satellite_http::client::is_loopback;
use mcp_satellite_model::era::{Era, NEWEST_SESSION_VERSION, STATELESS_VERSION};
use mcp_satellite_model::policy::{HealthCheck, ToolFilter};
use mcp_satellite_model::spec::{
    ConfigTier, ConfigValue, InstanceConfig, InstanceInputs, RemoteTransport, ServerTarget, TargetField, UserValueSpec,
    ValuePart, ValueTemplate, is_reserved_header,
};
use mcp_satellite_model::variables::{WithheldReason, is_code_variable, is_never_passed};
use reqwest::header::{HeaderName, HeaderValue};
use toml_span::{Span, Spanned};

use super::check::{ALLOWED, ConfigCheck};
use super::env_file::parse_env_file;
use super::file;
use super::oauth::OAuthPlan;
use super::reader::{ParsedValue, SpannedText};
use super::secrets::{parse_reference, split_argument, unreadable_file};
use super::template::is_value_key;

const AUTHORIZATION: &str = "Authorization";

#[derive(Clone)]
pub(crate) struct CheckedServer {
    pub(crate) target: Option<ServerTarget>,
    /// Protocol era of the server; `None` if it is negotiated.
    pub(crate) protocol: Option<Era>,
    pub(crate) layer: ConfigTier,
    pub(crate) user_required: Vec<String>,
    pub(crate) inputs: InstanceInputs,
    pub(crate) secret_args: bool,
    pub(crate) tools: ToolFilter,
    pub(crate) oauth: Option<(Span, OAuthPlan)>,
}

/// The server to which a tier belongs.
pub(crate) struct TierContext<'a> {
    pub(crate) subject: &'a str,
    pub(crate) target: Option<&'a ServerTarget>,
    pub(crate) inputs: &'a InstanceInputs,
    pub(crate) secret_args: bool,
}

impl CheckedServer {
    pub(crate) fn tier_context<'a>(&'a self, subject: &'a str) -> TierContext<'a> {
        let Self { target, inputs, secret_args, .. } = self;
        TierContext { subject, target: target.as_ref(), inputs, secret_args: *secret_args }
    }
}

pub(crate) fn tool_names(names: Vec<SpannedText>) -> BTreeSet<String> {
    names.into_iter().map(|name| name.value).collect()
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
        let mut inputs = InstanceInputs { declared: self.user_values(&typed.values), ..InstanceInputs::default() };
        let mut layer = ConfigTier::default();
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
                let command = typed.command.get().map(|command| self.command(command, &mut inputs));
                let cwd = typed.cwd.get().map(|cwd| self.target_text(TargetField::Cwd, cwd, &mut inputs));
                command.map(|command| ServerTarget::Stdio { command, cwd })
            }
            Some(TransportWord::Remote(transport)) => {
                for (key, misplaced) in
                    [("command", &typed.command), ("cwd", &typed.cwd), ("env_file", &typed.env_file)]
                {
                    if let Some(text) = misplaced.get() {
                        let hint = "remove it, or set transport = \"stdio\"";
                        self.findings.error(text.span, format!("{subject} is a remote server with a `{key}`"), hint);
                    }
                }
                if typed.url.is_absent() {
                    self.findings.error(typed.at, format!("{subject} has no `url`"), "add url = \"https://…\"");
                }
                let url = typed.url.get().and_then(|text| self.remote_url(text, &mut inputs, &mut layer));
                url.map(|url| ServerTarget::Remote { transport, url, health_url: None })
            }
        };
        let protocol = self.protocol(subject, &typed.protocol, target.as_ref());
        self.health_url(&typed.tier, &mut target);
        let secret_args = typed.secret_args.get().is_some_and(|permitted| permitted.value);
        let context = TierContext { subject, target: target.as_ref(), inputs: &inputs, secret_args };
        self.layer(&context, typed.tier, &mut layer);
        if let Some(ServerTarget::Stdio { .. }) = target {
            self.env_file(subject, &typed.env_file, &mut inputs, &mut layer);
        }
        let oauth = typed.oauth.map(|oauth| (oauth.at(), oauth.into_plan(subject, self)));
        let user_required = self.user_required(&typed.user_required);
        let tools = ToolFilter {
            allowed: typed.allow_tools.map(tool_names),
            denied: typed.deny_tools.map(tool_names).unwrap_or_default(),
        };
        CheckedServer { target, protocol, layer, user_required, inputs, secret_args, tools, oauth }
    }

    pub(crate) fn user_values(
        &mut self,
        typed: &[(SpannedText, file::UserValueTable)],
    ) -> BTreeMap<String, UserValueSpec> {
        let mut declared = BTreeMap::new();
        for (key, value) in typed {
            if !is_value_key(&key.value) {
                let message = format!("`{}` is not a valid key of a value", key.value.escape_debug());
                self.findings.error(key.span, message, "use 1 to 64 characters of A-Z, a-z, 0-9, dot, - and _");
            }
            let spec = UserValueSpec {
                description: value.description.get().map(|text| text.value.clone()),
                is_public: value.secret.get().is_some_and(|secret| !secret.value),
                default: value.default.get().map(|text| text.value.as_str().into()),
            };
            declared.insert(key.value.clone(), spec);
        }
        declared
    }

    /// Resolves the variables of a field of the target. Returns the text that is known.
    pub(crate) fn target_text(
        &mut self,
        field: TargetField,
        text: &SpannedText,
        inputs: &mut InstanceInputs,
    ) -> String {
        inputs.target.retain(|(other, _)| *other != field);
        let Some(template) = self.template(text) else { return text.value.clone() };
        let known = template.known_text().expose().to_owned();
        inputs.target.push((field, template));
        known
    }

    /// Reads the variables of `env_file`. They are secrets, and those of `env` take precedence. A file that cannot be read
    /// keeps the instances from starting.
    pub(crate) fn env_file(
        &mut self,
        subject: &str,
        typed: &ParsedValue<String>,
        inputs: &mut InstanceInputs,
        layer: &mut ConfigTier,
    ) {
        let Some(text) = typed.get() else { return };
        if self.secret_sources.reject_reference(text.span, self.findings) {
            return;
        }
        let path = match self.template(text) {
            None => text.value.clone(),
            Some(template) if template.is_complete() => template.known_text().expose().to_owned(),
            Some(_) => {
                let hint = "set the variable where the satellite is started, or write the path";
                self.findings.error(text.span, "`env_file` contains a variable that is not set", hint);
                return;
            }
        };
        let content = match self.secret_sources.files.read(self.secret_sources.folder.join(&path)) {
            Ok(content) => content,
            Err(error) => {
                inputs.problems.push(unreadable_file("the env_file", &path, &error));
                return;
            }
        };
        let (variables, bad_lines) = parse_env_file(content.expose());
        for number in bad_lines {
            let message = format!("line {number} of the env_file of {subject} is not KEY=VALUE and is not used");
            self.findings.warning(text.span, message);
        }
        let mut from_file = BTreeMap::new();
        for (name, value) in variables {
            if is_never_passed(name) {
                let message = format!("`{name}` in the env_file of {subject} is never passed to a server");
                self.findings.warning(text.span, message);
            }
            if value.contains('\0') {
                let message = format!("`{name}` in the env_file of {subject} contains a zero byte and is not used");
                self.findings.warning(text.span, message);
                continue;
            }
            from_file.insert(name.to_owned(), ConfigValue::secret(value));
        }
        for (name, value) in from_file {
            layer.env.entry(name).or_insert(value);
        }
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
        if url.query_pairs().any(|(name, value)| may_be_secret(&name, &value)) {
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

    /// Checks a URL. Its query parameters are often secrets, so they become parameters of `layer`, and the URL is returned
    /// without them.
    fn remote_url(
        &mut self,
        text: &SpannedText,
        inputs: &mut InstanceInputs,
        layer: &mut ConfigTier,
    ) -> Option<String> {
        let Some(template) = self.template(text) else {
            let mut url = self.url("url", text)?;
            self.query_pairs(text.span, &url, layer);
            url.set_query(None);
            url.set_fragment(None);
            return Some(url.into());
        };
        if template.parts.is_empty() {
            return None; // An invalid variable was reported.
        }
        if !template.is_complete() {
            return Some(self.incomplete_url(text, template, inputs, layer));
        }
        let known = Spanned::with_span(template.known_text().expose().to_owned(), text.span);
        let mut url = self.url("url", &known)?;
        self.query_pairs(text.span, &url, layer);
        for value in layer.query.values_mut() {
            value.secret = true;
        }
        url.set_query(None);
        url.set_fragment(None);
        let url = String::from(url);
        let before_query = template
            .parts
            .iter()
            .take_while(|part| !matches!(part, ValuePart::Literal(text) if text.expose().contains(['?', '#'])));
        let hidden = before_query.filter_map(|part| match part {
            ValuePart::Hidden(text) => Some(text.expose()),
            ValuePart::Literal(_) | ValuePart::UserValue(_) | ValuePart::Unavailable(_) => None,
        });
        inputs.target.push((TargetField::Url, hide_parts(&url, hidden)));
        Some(url)
    }

    /// Checks a URL of which the user gives a part: with a placeholder for each value.
    fn incomplete_url(
        &mut self,
        text: &SpannedText,
        template: ValueTemplate,
        inputs: &mut InstanceInputs,
        layer: &mut ConfigTier,
    ) -> String {
        let Some((base, query)) = split_query(template) else {
            self.findings.error(text.span, "a variable in the query of `url` has no name", "write ?name=${env:NAME}");
            return String::new();
        };
        let begins_with_value = !matches!(base.parts.first(), Some(ValuePart::Literal(_)));
        if !begins_with_value {
            let sample = base.parts.iter().map(|part| match part {
                ValuePart::Literal(text) | ValuePart::Hidden(text) => text.expose(),
                ValuePart::UserValue(_) | ValuePart::Unavailable(_) => "1",
            });
            self.url("url", &Spanned::with_span(sample.collect(), text.span));
        }
        for (name, value) in query {
            layer.query.insert(name, ConfigValue::from_template(value, true));
        }
        let known = base.known_text().expose().to_owned();
        inputs.target.push((TargetField::Url, base));
        known
    }

    fn query_pairs(&mut self, at: Span, url: &reqwest::Url, layer: &mut ConfigTier) {
        for (name, value) in url.query_pairs() {
            if layer.query.contains_key(&*name) {
                let message = format!("the query parameter `{name}` is in the `url` twice");
                self.findings.error(at, message, "give it once");
            }
            let [name, value] = [name, value].map(|part| Spanned::with_span(part.into_owned(), at));
            if let Some(value) = self.value(&name, &value) {
                layer.query.insert(name.value, value);
            }
        }
    }

    fn command(&mut self, command: &SpannedText, inputs: &mut InstanceInputs) -> String {
        let text = &self.target_text(TargetField::Command, command, inputs);
        let is_known =
            inputs.target.iter().all(|(field, template)| *field != TargetField::Command || template.is_complete());
        if !is_known && self.allowed.is_none() {
            return text.clone();
        }
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

    pub(crate) fn layer(&mut self, context: &TierContext<'_>, typed: file::ServerTierTable, layer: &mut ConfigTier) {
        let TierContext { subject, target, .. } = *context;
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

        let mut previous: Option<String> = None;
        for argument in typed.args {
            let value = self.argument(context, &argument, previous.as_deref());
            layer.args.push(value);
            previous = Some(argument.value);
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
            let user_values = value.template.iter().flat_map(ValueTemplate::keys).cloned().collect::<Vec<_>>();
            if is_code_variable(&name.value) && !user_values.is_empty() {
                let message = format!(
                    "`{}` in the env of {subject} contains `{}` of the user, who cannot set a variable that makes a server \
                     run other code",
                    name.value,
                    user_values.join("`, `")
                );
                let hint = "write the value, set the variable where the satellite is started, or give a default: \
                            ${env:NAME:-default}";
                self.findings.error(text.span, message, hint);
            }
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

    /// Resolves the references and variables of an argument, and hides secrets in it.
    fn argument(&mut self, context: &TierContext<'_>, text: &SpannedText, previous: Option<&str>) -> ConfigValue {
        let reference = split_argument(&text.value);
        let template = match &reference {
            Some((_, reference)) if context.secret_args => {
                self.secret_sources.resolve(reference, text.span, self.findings).map(ValuePart::Hidden)
            }
            _ => None,
        };
        let template = match (template, &reference) {
            (Some(hidden), Some((prefix, _))) => {
                Some(ValueTemplate { parts: vec![ValuePart::Literal((*prefix).into()), hidden] })
            }
            (_, Some(_)) => None,
            (_, None) => self.template(text),
        };
        let is_public = |part: &ValuePart| match part {
            ValuePart::Literal(_) => true,
            ValuePart::UserValue(key) => context.inputs.declared.get(key).is_some_and(|value| value.is_public),
            ValuePart::Hidden(_) | ValuePart::Unavailable(_) => false,
        };
        let is_secret = match &template {
            Some(template) => !template.parts.iter().all(is_public),
            None => reference.is_some(),
        };
        if is_secret && !context.secret_args {
            let hint = "an argument is visible to every process on the machine; pass the secret in `env`, or permit it \
                        with secret_args = true";
            self.findings.error(text.span, "`args` refers to a secret", hint);
        }
        let parts =
            template.map_or_else(|| vec![ValuePart::Literal(text.value.as_str().into())], |template| template.parts);
        let value = ConfigValue::from_template(hide_literal_secrets(parts, previous), false);
        if value.text.expose().contains('\0') {
            self.findings.error(text.span, "an argument contains a zero byte", "remove it");
        }
        value
    }

    fn value(&mut self, name: &SpannedText, text: &SpannedText) -> Option<ConfigValue> {
        if let Some(reference) = parse_reference(&text.value) {
            return self.secret_sources.resolve(&reference, text.span, self.findings).map(ConfigValue::secret);
        }
        if let Some(template) = self.template(text) {
            let is_secret = may_be_secret(&name.value, template.known_text().expose());
            return Some(ConfigValue::from_template(template, is_secret));
        }
        let is_secret = may_be_secret(&name.value, &text.value);
        let value = text.value.as_str();
        Some(if is_secret { ConfigValue::secret(value) } else { ConfigValue::plain(value) })
    }

    /// Reads the value of a header, which is always a secret: `env:NAME`, `Bearer env:NAME`, a text with variables, or a
    /// literal.
    fn header(&mut self, text: &SpannedText) -> Option<ConfigValue> {
        let (scheme, rest) = match text.value.split_once(' ') {
            Some((scheme, rest)) if parse_reference(rest).is_some() => (Some(scheme), rest),
            _ => (None, text.value.as_str()),
        };
        let Some(reference) = parse_reference(rest) else {
            return Some(match self.template(text) {
                Some(template) => ConfigValue::from_template(template, true),
                None => ConfigValue::secret(rest),
            });
        };
        let secret = self.secret_sources.resolve(&reference, text.span, self.findings)?;
        Some(ConfigValue::secret(match scheme {
            Some(scheme) => format!("{scheme} {}", secret.expose()).into(),
            None => secret,
        }))
    }
}

/// Masks the secrets in the literal parts of an argument.
fn hide_literal_secrets(parts: Vec<ValuePart>, previous: Option<&str>) -> ValueTemplate {
    let mut masked = ValueTemplate::default();
    for (index, part) in parts.into_iter().enumerate() {
        let ValuePart::Literal(text) = &part else {
            masked.parts.push(part);
            continue;
        };
        let text = text.expose();
        let Some(secret) = secret_in_arg(previous.filter(|_| index == 0), text) else {
            masked.parts.push(part);
            continue;
        };
        let (before, after) = (&text[..secret.start], &text[secret.end..]);
        let literals = [ValuePart::Literal(before.into()), ValuePart::Hidden(text[secret].into())];
        masked.parts.extend(literals.into_iter().chain([ValuePart::Literal(after.into())]));
    }
    masked
}

/// Returns `text` with the parts of `hidden` masked. They are searched in their order; if one is not found, because it is
/// encoded, the whole text is masked.
fn hide_parts<'a>(text: &str, hidden: impl IntoIterator<Item = &'a str>) -> ValueTemplate {
    let (mut parts, mut rest) = (Vec::new(), text);
    for part in hidden.into_iter().filter(|part| !part.is_empty()) {
        let Some((before, after)) = rest.split_once(part) else {
            return ValueTemplate { parts: vec![ValuePart::Hidden(text.into())] };
        };
        parts.extend([ValuePart::Literal(before.into()), ValuePart::Hidden(part.into())]);
        rest = after;
    }
    parts.push(ValuePart::Literal(rest.into()));
    ValueTemplate { parts }
}

/// Splits a template of a URL at its query. A fragment is left out. Returns `None` if the query begins with a variable.
fn split_query(template: ValueTemplate) -> Option<(ValueTemplate, Vec<(String, ValueTemplate)>)> {
    let mut base = ValueTemplate::default();
    let mut query: Vec<(String, ValueTemplate)> = Vec::new();
    let mut in_query = false;
    for part in template.parts {
        let ValuePart::Literal(text) = &part else {
            match query.last_mut() {
                Some((_, value)) => value.parts.push(part),
                None if in_query => return None,
                None => base.parts.push(part),
            }
            continue;
        };
        let (mut text, fragment) =
            text.expose().split_once('#').map_or((text.expose(), false), |(text, _)| (text, true));
        if !in_query {
            let (before, after) = text.split_once('?').map_or((text, None), |(before, after)| (before, Some(after)));
            base.parts.push(ValuePart::Literal(before.into()));
            in_query = after.is_some();
            text = after.unwrap_or_default();
        } else if let Some((_, value)) = query.last_mut() {
            // The rest of the value that a variable began.
            let (rest, after) = text.split_once('&').unwrap_or((text, ""));
            value.parts.push(ValuePart::Literal(decode(rest).into()));
            text = after;
        }
        for pair in text.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let parts = vec![ValuePart::Literal(decode(value).into())];
            query.push((decode(name), ValueTemplate { parts }));
        }
        if fragment {
            break;
        }
    }
    Some((base, query))
}

/// Decodes a part of a query.
fn decode(text: &str) -> String {
    let url = reqwest::Url::parse(&format!("http://localhost/?v={text}"));
    let pair = url.ok().and_then(|url| url.query_pairs().next().map(|(_, value)| value.into_owned()));
    pair.unwrap_or_else(|| text.to_owned())
}
