//! Builds a plan from a parsed file: the settings, then for each team its users, its installations and their instances.

use std::collections::BTreeMap;
use std::sync::Arc;

use mcp_satellite_model::policy::Policy;
use mcp_satellite_model::spec::{ConfigTier, InstanceConfig, ProcessLifetime, ServerTarget, TargetField, UpdateMethod};
use toml_span::{Span, Spanned};

use super::check::{ConfigCheck, UniqueNames};
use super::console::CONTROL_SERVER;
use super::errors::{ConfigFindings, ConfigText};
use super::file;
use super::gateway::{GatewayUser, TokenHash};
use super::oauth;
use super::plan::{self, Plan, PlanRestrictions, Profile};
use super::policy::EffectivePolicy;
use super::reader::{ParsedValue, SpannedText, nearest};
use super::secrets::SecretSources;
use super::server::{CheckedServer, TierContext, tool_names};
use mcp_satellite_model::settings::CgroupMode;
use mcp_satellite_model::settings::Isolation;

/// Builds the plan. It is valid only if the findings contain no error.
///
/// With `leaves_out_failed`, an installation with an error is left out with a warning.
pub(crate) fn build(
    file: file::ConfigFile,
    leaves_out_failed: bool,
    base: &PlanRestrictions,
    source: &ConfigText<'_>,
    sources: &mut SecretSources<'_>,
    findings: &mut ConfigFindings,
) -> Plan {
    let mut check = ConfigCheck::new(source, sources, base.allowed_commands.clone(), findings);
    let mut plan = Plan::default();
    if let Some(name) = file.name.get() {
        check.satellite_name(name);
        plan.name.clone_from(&name.value);
    }
    let profiles = [("development", Profile::Development), ("production", Profile::Production)];
    plan.profile = check.keyword(&file.profile, "profile", &profiles).unwrap_or_default();
    if plan.profile == Profile::Production {
        check.restrict_commands(&file.allowed_commands);
    }
    let isolations = [
        ("auto", Isolation::Auto),
        ("none", Isolation::None),
        ("nsjail", Isolation::Nsjail),
        ("bubblewrap", Isolation::Bubblewrap),
    ];
    plan.isolation = check.keyword(&file.isolation, "isolation", &isolations).unwrap_or_default();
    let cgroups = [("auto", CgroupMode::Auto), ("off", CgroupMode::Off), ("required", CgroupMode::Required)];
    plan.cgroups = check.keyword(&file.cgroups, "cgroups", &cgroups).unwrap_or_default();
    if let Some(range) = file.uid_range.get() {
        match range.value.parse() {
            Ok(range) => plan.uid_range = Some(range),
            Err(why) => {
                let message = format!("`{}` is not a valid range of user ids: {why}", range.value);
                check.findings.error(range.span, message, "write it as uid_range = \"200000-200999\"");
            }
        }
        if plan.is_sandboxed() {
            check.findings.warning(range.span, "`uid_range` has no effect on servers in a sandbox".to_owned());
        }
    }
    if let Some(at) = file.isolation.get().filter(|_| plan.isolation == Isolation::None)
        && plan.profile == Profile::Production
    {
        check.findings.warning(at.span, "servers run without a sandbox in production".to_owned());
    }
    plan.retention = file.retention.unwrap_or(plan::RETENTION);
    plan.hang_timeout = file.hang_timeout.unwrap_or(plan::HANG_TIMEOUT);
    plan.keep_servers = file.keep_servers.get().is_none_or(|keep| keep.value);
    plan.watch = file.watch.get().is_none_or(|watch| watch.value);
    plan.start_permits = file.start_permits;
    plan.connect_permits = file.connect_permits;
    plan.team_budget = file.team_budget.into_policy();
    plan.memory = file.memory.into_policy();
    let held = file.policy.merge_over(&base.effective_policy, check.findings);
    let has_control_server = base.has_control_server || file.console.has_mcp_server();
    plan.base = PlanRestrictions {
        allowed_commands: check.allowed.clone(),
        effective_policy: held.clone(),
        has_control_server,
    };
    if file.backend.is_present() {
        report_backend_conflicts(&file.servers, &file.teams, &file.events.sink, check.findings);
    }
    plan.backend = file.backend.into_plan(&mut check);
    let (sink, batch) = check.sink(file.events);
    plan.journal = check.journal(&file.journal);
    plan.sink = sink;
    plan.batch = batch.into_policy(check.findings);
    plan.telemetry = file.telemetry.into_plan(&mut check);

    let mut templates = BTreeMap::new();
    for (slug, server) in file.servers {
        check.slug(&slug, "the name of a template");
        let subject = format!("the template `{}`", slug.value);
        let server = check.server(&subject, server, None);
        templates.insert(slug.value, server);
    }
    let mut teams = ConfigPlanBuilder {
        check,
        plan,
        templates,
        ids: UniqueNames::default(),
        slugs: UniqueNames::default(),
        tokens: UniqueNames::default(),
        gateway_users: Vec::new(),
        names: BTreeMap::new(),
        policies: Vec::new(),
        leaves_out_failed,
        has_control_server,
        has_authentication: file.gateway.has_authentication(),
    };
    for team in file.teams {
        teams.add_team(team, &held);
    }
    let ConfigPlanBuilder { mut check, mut plan, gateway_users: doors, ids, slugs, mut tokens, .. } = teams;
    plan.gateway = file.gateway.into_plan(doors, &mut check);
    let teams: Vec<&str> = ids.names().chain(slugs.names()).collect();
    plan.console = file.console.into_plan(&plan.gateway, &teams, &mut tokens, &mut check);
    plan
}

fn report_backend_conflicts(
    servers: &[(SpannedText, file::ServerTable)],
    teams: &[file::TeamTable],
    sink: &ParsedValue<String>,
    findings: &mut ConfigFindings,
) {
    let elsewhere = "remove it here and configure it at the backend, or remove [backend]";
    for (name, _) in servers {
        let message = format!("`servers.{}` conflicts with [backend]: the backend configures the servers", name.value);
        findings.error(name.span, message, elsewhere);
    }
    for team in teams {
        findings.error(team.at, "`teams` conflicts with [backend]: the backend configures the teams", elsewhere);
    }
    if let Some(sink) = sink.get() {
        let hint = "remove `sink`, or remove [backend]";
        findings.error(sink.span, "`sink` conflicts with [backend]: events go to the backend", hint);
    }
}

struct ConfigPlanBuilder<'a, 's> {
    check: ConfigCheck<'a, 's>,
    plan: Plan,
    templates: BTreeMap<String, CheckedServer>,
    ids: UniqueNames,
    slugs: UniqueNames,
    /// Tokens of all users. A token identifies the team and the user, so it must be unique.
    tokens: UniqueNames,
    gateway_users: Vec<GatewayUser>,
    names: BTreeMap<String, [String; 3]>,
    policies: Vec<Arc<Policy>>,
    leaves_out_failed: bool,
    has_control_server: bool,
    has_authentication: bool,
}

struct CheckedTeam {
    id: String,
    slug: String,
    users: Vec<CheckedUser>,
    effective_policy: EffectivePolicy,
}

struct CheckedUser {
    id: String,
    slug: String,
    /// Tiers by installation. Each is removed when its installation is built; the rest are errors.
    tiers: Vec<(SpannedText, file::ServerTierTable)>,
}

impl ConfigPlanBuilder<'_, '_> {
    fn add_team(&mut self, typed: file::TeamTable, above: &EffectivePolicy) {
        let id = self.check.id(&typed.id, "a team", "id", typed.at, &mut self.ids);
        // Filters, tokens and events accept both names of a team, so no name may mean two teams.
        let id_is_taken = self.slugs.contains(&id);
        let slug = self.check.id(&typed.slug, "a team", "slug", typed.at, &mut self.slugs);
        let slug_is_taken = slug != id && self.ids.contains(&slug);
        for (is_taken, key, name, other) in [(id_is_taken, "id", &id, "slug"), (slug_is_taken, "slug", &slug, "id")] {
            if is_taken {
                let message = format!("the {key} `{name}` of a team is the {other} of another team");
                self.check.findings.error(typed.at, message, format!("choose another {key}"));
            }
        }
        let held = typed.policy.merge_over(above, self.check.findings);
        let users = self.add_users(&id, &slug, typed.users);
        self.plan.teams += 1;
        self.plan.users += users.len();
        if users.is_empty() && !typed.installations.is_empty() {
            let message = format!("the team `{slug}` has installations and no users, so nothing runs for it");
            self.check.findings.warning(typed.at, message);
        }

        let installed = typed.installations.iter().filter_map(|installation| installation.id.get());
        let installed: Vec<String> = installed.map(|id| id.value.clone()).collect();
        let mut team = CheckedTeam { id, slug, users, effective_policy: held };
        let mut ids = UniqueNames::default();
        for installation in typed.installations {
            let (errors, instances) = (self.check.findings.error_count(), self.plan.instances.len());
            let subject = installation.id.get().map(|id| format!("`{}` is left out", id.value)).unwrap_or_default();
            self.add_installation(&mut team, installation, &mut ids);
            if self.leaves_out_failed && self.check.findings.demote_errors(errors, &subject) {
                for instance in self.plan.instances.split_off(instances) {
                    self.plan.oauth.remove(&plan::id(&instance));
                }
            }
        }
        let known: Vec<&str> = installed.iter().map(String::as_str).collect();
        for (user, (installation, _)) in
            team.users.iter().flat_map(|user| user.tiers.iter().map(move |tier| (user, tier)))
        {
            let message = if known.contains(&installation.value.as_str()) {
                format!("`{}` is not installed for the user `{}`", installation.value, user.slug)
            } else {
                format!("the team has no installation `{}`", installation.value)
            };
            let others: Vec<&str> = known.iter().copied().filter(|id| *id != installation.value).collect();
            let hint = match nearest(&installation.value, &others) {
                Some(near) => format!("did you mean `{near}`?"),
                None => "use the `id` of an installation whose `users` include this user".to_owned(),
            };
            self.check.findings.error(installation.span, message, hint);
        }
    }

    fn add_users(&mut self, team: &str, team_slug: &str, typed: Vec<file::UserTable>) -> Vec<CheckedUser> {
        let (mut ids, mut slugs) = (UniqueNames::default(), UniqueNames::default());
        let mut users = Vec::new();
        for user in typed {
            let id = self.check.id(&user.id, "a user", "id", user.at, &mut ids);
            let slug = self.check.id(&user.slug, "a user", "slug", user.at, &mut slugs);
            let modes = [("tools", false), ("flat", true)];
            let flat = self.check.keyword(&user.mcp_mode, "mcp_mode", &modes).unwrap_or_default();
            let tokens = self.check_tokens(&slug, &user);
            if let Some(place) = user.access.place().filter(|_| !self.has_authentication) {
                let message = "a role needs a token: auth is \"none\", which makes every client a viewer";
                self.check.findings.error(place, message, "remove it, or set auth = \"bearer\"");
            }
            let access = user.access.to_access(&mut self.check);
            self.gateway_users.push(GatewayUser {
                team: team.to_owned().into(),
                team_slug: team_slug.to_owned().into(),
                user: id.clone().into(),
                slug: slug.clone().into(),
                tokens,
                has_stored_token: user.has_stored_token,
                access,
                flat,
            });
            users.push(CheckedUser { id, slug, tiers: user.tiers });
        }
        users
    }

    fn check_tokens(&mut self, slug: &str, user: &file::UserTable) -> Vec<TokenHash> {
        let mut tokens = Vec::new();
        for text in user.token.get().into_iter().chain(&user.tokens) {
            let what = format!("the token of the user `{slug}`");
            let Some(hash) = self.check.token(&what, text) else { continue };
            if tokens.contains(&hash) {
                self.check.findings.error(text.span, format!("{what} is given twice"), "remove one");
                continue;
            }
            let digits = Spanned::with_span(hash.to_string(), text.span);
            self.check.check_unique(&digits, &format!("{what} is also the token of another user"), &mut self.tokens);
            tokens.push(hash);
        }
        tokens
    }

    fn add_installation(&mut self, team: &mut CheckedTeam, typed: file::InstallationTable, ids: &mut UniqueNames) {
        let at = typed.own.at;
        let id = self.check.id(&typed.id, "an installation", "id", at, ids);
        let subject = if id.is_empty() { "an installation".to_owned() } else { format!("installation `{id}`") };
        let keeps = [
            ("listed", ProcessLifetime::Listed),
            ("always_on", ProcessLifetime::AlwaysOn),
            ("lazy", ProcessLifetime::Lazy),
        ];
        let keep = self.check.keyword(&typed.keep, "keep", &keeps).unwrap_or_default();
        let updates = [("restart", UpdateMethod::Restart), ("rolling", UpdateMethod::Rolling)];
        let on_update = self.check.keyword(&typed.update, "update", &updates).unwrap_or_default();
        if keep == ProcessLifetime::AlwaysOn && typed.policy.has_idle_settings() {
            let message = format!("{subject} is `always_on`, so its [policy.idle] has no effect");
            self.check.findings.warning(typed.keep.get().map_or(at, |keep| keep.span), message);
        }
        let slug = self.server_slug(&typed.server, &subject, at);
        if self.has_control_server && slug == CONTROL_SERVER {
            let hint = "give the server another name, or remove `mcp` from [console]";
            let message = format!("{subject} has the name of the control plane's MCP server, `{CONTROL_SERVER}`");
            self.check.findings.error(typed.server.get().map_or(at, |server| server.span), message, hint);
        }
        let members = self.members(team, typed.users, at);

        // If there is a template, the installation contains only the additions of the team.
        let mut team_layer = ConfigTier::default();
        let url_at = typed.own.url.get().map_or(at, |url| url.span);
        let mut server = if let Some(template) = self.templates.get(&slug).cloned() {
            self.apply_overrides(&subject, &slug, template, typed.own, &mut team_layer)
        } else {
            let templates: Vec<&str> = self.templates.keys().map(String::as_str).collect();
            let near = nearest(&slug, &templates).map(str::to_owned);
            self.check.server(&subject, typed.own, near.as_deref())
        };
        if let Some(ServerTarget::Remote { .. }) = &server.target {
            let words =
                [(keep == ProcessLifetime::Lazy, &typed.keep), (on_update == UpdateMethod::Rolling, &typed.update)];
            for word in words.into_iter().filter_map(|(is_set, word)| word.get().filter(|_| is_set)) {
                let message =
                    format!("{subject} is a remote server: `{}` has an effect only on child processes", word.value);
                self.check.findings.warning(word.span, message);
            }
        }
        for (section, at) in server.target.iter().flat_map(|target| typed.policy.unused_sections(target)) {
            let kind = if matches!(server.target, Some(ServerTarget::Stdio { .. })) { "stdio" } else { "remote" };
            let message = format!("{subject} is a {kind} server, so its [policy.{section}] has no effect");
            self.check.findings.warning(at, message);
        }
        let EffectivePolicy { mut policy, .. } = typed.policy.merge_over(&team.effective_policy, self.check.findings);
        policy.session.protocol = server.protocol;
        policy.session.tools = server.tools.clone();
        let policy = self.share_policy(policy);
        self.check.health_url(&typed.team, &mut server.target);
        self.check.layer(&server.tier_context(&subject), typed.team, &mut team_layer);
        self.check.warn_required_code_variables(&subject, at, &server);

        let mut instances = Vec::new();
        for index in members {
            let user = &mut team.users[index];
            let mut user_layer = ConfigTier::default();
            let mut target = server.target.clone();
            if let Some(position) = user.tiers.iter().position(|(installation, _)| installation.value == id) {
                let (_, mut tier) = user.tiers.remove(position);
                let subject = format!("{subject} of `{}`", user.slug);
                self.check.remove_code_variables(&subject, &mut tier);
                self.check.health_url(&tier, &mut target);
                self.check.layer(&server.tier_context(&subject), tier, &mut user_layer);
            }
            let Some(target) = target else { continue };
            let mut instance = InstanceConfig {
                team: team.id.clone().into(),
                team_slug: team.slug.clone().into(),
                user: user.id.clone().into(),
                user_slug: user.slug.clone().into(),
                installation: id.clone().into(),
                server: slug.clone().into(),
                target,
                server_tier: server.layer.clone(),
                team_tier: team_layer.clone(),
                user_tier: user_layer,
                user_required: server.user_required.clone(),
                inputs: server.inputs.clone(),
                lifetime: keep,
                update_method: on_update,
                request_logging: typed.request_logging.get().is_none_or(|logging| logging.value),
                policy: Arc::clone(&policy),
            };
            unify_header_spelling(&mut instance);
            hide_required(&mut instance);
            self.check_unique_name(&instance, typed.id.get().map_or(at, |id| id.span));
            instances.push(instance);
        }
        if let Some((at, oauth)) = server.oauth {
            oauth::check_conflicts(&subject, at, &instances, &mut self.check);
            let oauth = Arc::new(oauth);
            self.plan.oauth.extend(instances.iter().map(|instance| (plan::id(instance), Arc::clone(&oauth))));
        }
        self.check.health(&subject, at, &instances);
        self.check.warn_insecure_transport(&subject, url_at, &instances);
        self.plan.instances.extend(instances);
    }

    /// Checks that the name is unique. Slugs can contain hyphens, so different slugs can result in the same name.
    /// (Equal slugs are reported elsewhere.)
    fn check_unique_name(&mut self, instance: &InstanceConfig, at: Span) {
        let slugs = [&instance.server, &instance.team_slug, &instance.user_slug].map(|slug| slug.as_str().to_owned());
        let name = plan::name(instance);
        match self.names.get(&name) {
            None => {
                self.names.insert(name, slugs);
            }
            Some(others) if *others == slugs => {}
            Some(_) => {
                let message = format!("two instances would be named `{name}`");
                let hint = "give this installation another id, or its server, team or user another slug";
                self.check.findings.error(at, message, hint);
            }
        }
    }

    fn server_slug(&mut self, typed: &ParsedValue<String>, subject: &str, at: Span) -> String {
        if let Some(slug) = typed.get() {
            self.check.slug(slug, "the name of a server");
            return slug.value.clone();
        }
        if typed.is_absent() {
            let hint = "add server = \"…\", the name of the server";
            self.check.findings.error(at, format!("{subject} has no `server`"), hint);
        }
        String::new()
    }

    fn members(&mut self, team: &CheckedTeam, typed: Option<Vec<SpannedText>>, at: Span) -> Vec<usize> {
        let Some(names) = typed else { return (0..team.users.len()).collect() };
        if names.is_empty() {
            self.check.findings.error(at, "`users` is empty", "leave it out for all users of the team");
        }
        let mut members = Vec::new();
        for name in names {
            let position = team.users.iter().position(|user| user.id == name.value);
            match position {
                Some(index) if members.contains(&index) => {
                    let message = format!("the user `{}` is named twice", name.value);
                    self.check.findings.error(name.span, message, "remove one");
                }
                Some(index) => members.push(index),
                None => {
                    let known: Vec<&str> = team.users.iter().map(|user| user.id.as_str()).collect();
                    let by_slug = team.users.iter().find(|user| user.slug == name.value).map(|user| user.id.as_str());
                    let hint = match by_slug.or_else(|| nearest(&name.value, &known)) {
                        Some(near) => format!("did you mean `{near}`?"),
                        None => format!("use the id of a user; this team has: {}", known.join(", ")),
                    };
                    self.check.findings.error(name.span, format!("the team has no user `{}`", name.value), hint);
                }
            }
        }
        members
    }

    fn apply_overrides(
        &mut self,
        subject: &str,
        slug: &str,
        template: CheckedServer,
        own: file::ServerTable,
        team: &mut ConfigTier,
    ) -> CheckedServer {
        let CheckedServer {
            mut target,
            mut protocol,
            layer,
            mut user_required,
            mut inputs,
            mut secret_args,
            mut tools,
            oauth,
        } = template;
        for (key, typed) in [("transport", &own.transport), ("command", &own.command), ("url", &own.url)] {
            if let Some(text) = typed.get() {
                let message = format!("{subject} and its template `{slug}` both have a `{key}`");
                let hint = format!("remove it, or the template [servers.{slug}]");
                self.check.findings.error(text.span, message, hint);
            }
        }
        if let Some(text) = own.cwd.get() {
            match &mut target {
                Some(ServerTarget::Stdio { cwd, .. }) => {
                    *cwd = Some(self.check.target_text(TargetField::Cwd, text, &mut inputs));
                }
                Some(ServerTarget::Remote { .. }) => {
                    self.check.findings.error(
                        text.span,
                        format!("{subject} is a remote server with a `cwd`"),
                        "remove it",
                    );
                }
                None => {}
            }
        }
        self.check.health_url(&own.tier, &mut target);
        inputs.declared.extend(self.check.user_values(&own.values));
        secret_args = own.secret_args.get().map_or(secret_args, |permitted| permitted.value);
        let context = TierContext { subject, target: target.as_ref(), inputs: &inputs, secret_args };
        self.check.layer(&context, own.tier, team);
        match (&target, own.env_file.get()) {
            (Some(ServerTarget::Remote { .. }), Some(text)) => {
                let message = format!("{subject} is a remote server with an `env_file`");
                self.check.findings.error(text.span, message, "remove it");
            }
            _ => self.check.env_file(subject, &own.env_file, &mut inputs, team),
        }
        user_required.extend(self.check.user_required(&own.user_required));
        user_required.sort();
        user_required.dedup();
        if !own.protocol.is_absent() {
            protocol = self.check.protocol(subject, &own.protocol, target.as_ref());
        }
        let oauth = own.oauth.map(|oauth| (oauth.at(), oauth.into_plan(subject, &mut self.check))).or(oauth);
        if let Some(allowed) = own.allow_tools {
            tools.allowed = Some(tool_names(allowed));
        }
        if let Some(denied) = own.deny_tools {
            tools.denied = tool_names(denied);
        }
        CheckedServer { target, protocol, layer, user_required, inputs, secret_args, tools, oauth }
    }

    fn share_policy(&mut self, policy: Policy) -> Arc<Policy> {
        if let Some(known) = self.policies.iter().find(|known| ***known == policy) {
            return Arc::clone(known);
        }
        let policy = Arc::new(policy);
        self.policies.push(Arc::clone(&policy));
        policy
    }
}

/// Gives a header the same spelling in all tiers, so that a tier overrides a header that another tier spells
/// differently. The spelling of `user_required` takes precedence.
fn unify_header_spelling(instance: &mut InstanceConfig) {
    let required = instance.user_required.iter().map(|name| (name.to_ascii_lowercase(), name.clone()));
    let mut spellings: BTreeMap<String, String> = required.collect();
    for layer in [&mut instance.server_tier, &mut instance.team_tier, &mut instance.user_tier] {
        let headers = std::mem::take(&mut layer.headers);
        layer.headers = headers
            .into_iter()
            .map(|(name, value)| (spellings.entry(name.to_ascii_lowercase()).or_insert(name).clone(), value))
            .collect();
    }
}

/// Marks the values that a user must provide as secrets, regardless of their source and content.
fn hide_required(instance: &mut InstanceConfig) {
    for layer in [&mut instance.server_tier, &mut instance.team_tier, &mut instance.user_tier] {
        for tier in [&mut layer.env, &mut layer.headers, &mut layer.query] {
            for (_, value) in tier.iter_mut().filter(|(name, _)| instance.user_required.contains(name)) {
                value.secret = true;
            }
        }
    }
}
