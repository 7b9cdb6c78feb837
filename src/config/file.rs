//! The parsed configuration: each value can be missing and contains its place in the file. Only the types of values are
//! checked here. There is no `Debug`, because values can be secrets.

use std::time::Duration;

use toml_span::Span;
use toml_span::value::Value;

use super::backend::Backend;
use super::errors::Findings;
use super::gateway::Gateway;
use super::oauth::OAuth;
use super::policy::{self, Batching, Memory, TeamBudget};
use super::reader::{Fields, Text, Typed};

#[derive(Default)]
pub(super) struct File {
    pub(super) name: Typed<String>,
    pub(super) profile: Typed<String>,
    pub(super) allowed_commands: Vec<Text>,
    pub(super) isolation: Typed<String>,
    pub(super) cgroups: Typed<String>,
    pub(super) uid_range: Typed<String>,
    pub(super) watch: Typed<bool>,
    pub(super) retention: Option<Duration>,
    pub(super) gateway: Gateway,
    pub(super) backend: Backend,
    pub(super) journal: Journal,
    pub(super) events: Events,
    pub(super) policy: policy::Tier,
    pub(super) team_budget: TeamBudget,
    pub(super) memory: Memory,
    pub(super) start_permits: Option<usize>,
    pub(super) connect_permits: Option<usize>,
    pub(super) servers: Vec<(Text, Server)>,
    pub(super) teams: Vec<Team>,
}

#[derive(Default)]
#[expect(clippy::struct_field_names, reason = "limits, as they are typed")]
pub(super) struct Journal {
    pub(super) events_age_max: Option<Duration>,
    pub(super) size_max: Typed<u64>,
    pub(super) server_logs_max: Option<usize>,
    pub(super) request_logs_max: Option<usize>,
    pub(super) logs_age_max: Option<Duration>,
}

#[derive(Default)]
pub(super) struct Events {
    pub(super) at: Span,
    pub(super) sink: Typed<String>,
    pub(super) rotate_at: Typed<u64>,
    pub(super) keep: Option<usize>,
    pub(super) url: Typed<String>,
    pub(super) token: Typed<String>,
    pub(super) batch: Batching,
}

#[derive(Default)]
pub(super) struct Tier {
    pub(super) args: Vec<Text>,
    pub(super) env: Vec<(Text, Text)>,
    pub(super) headers: Vec<(Text, Text)>,
    pub(super) query: Vec<(Text, Text)>,
    pub(super) bearer_token: Typed<String>,
    pub(super) health_url: Typed<String>,
}

#[derive(Default)]
pub(super) struct Server {
    pub(super) at: Span,
    pub(super) transport: Typed<String>,
    pub(super) protocol: Typed<String>,
    pub(super) command: Typed<String>,
    pub(super) url: Typed<String>,
    pub(super) cwd: Typed<String>,
    pub(super) tier: Tier,
    pub(super) user_required: Vec<Text>,
    pub(super) oauth: Option<OAuth>,
}

#[derive(Default)]
pub(super) struct Team {
    pub(super) at: Span,
    pub(super) id: Typed<String>,
    pub(super) slug: Typed<String>,
    pub(super) policy: policy::Tier,
    pub(super) users: Vec<User>,
    pub(super) installations: Vec<Installation>,
}

#[derive(Default)]
pub(super) struct User {
    pub(super) at: Span,
    pub(super) id: Typed<String>,
    pub(super) slug: Typed<String>,
    pub(super) token: Typed<String>,
    pub(super) tokens: Vec<Text>,
    pub(super) token_kept: bool,
    pub(super) mcp_mode: Typed<String>,
    pub(super) tiers: Vec<(Text, Tier)>,
}

#[derive(Default)]
pub(super) struct Installation {
    pub(super) id: Typed<String>,
    pub(super) server: Typed<String>,
    pub(super) own: Server,
    pub(super) team: Tier,
    pub(super) keep: Typed<String>,
    pub(super) update: Typed<String>,
    pub(super) request_logging: Typed<bool>,
    /// Users of the installation; `None` is all users of the team.
    pub(super) users: Option<Vec<Text>>,
    pub(super) policy: policy::Tier,
}

impl File {
    pub(super) fn read(tree: Value<'_>, findings: &mut Findings) -> Self {
        let at = Span::new(0, 0);
        let Some(mut fields) = Fields::open(tree, at, "the file".to_owned(), findings) else { return Self::default() };
        let mut file = Self::default();
        fields.section("satellite", |fields| {
            file.name = fields.text("name");
            file.profile = fields.text("profile");
            file.allowed_commands = fields.texts("allowed_commands").unwrap_or_default();
            file.isolation = fields.text("isolation");
            file.cgroups = fields.text("cgroups");
            file.uid_range = fields.text("uid_range");
            file.watch = fields.flag("watch");
            file.retention = fields.duration("retention");
        });
        file.gateway = fields.section("gateway", Gateway::read);
        file.backend = fields.section("backend", Backend::read);
        file.journal = fields.section("journal", Journal::read);
        file.events = fields.section("events", Events::read);
        fields.section("policy", |fields| {
            file.policy = policy::Tier::read(fields);
            file.team_budget = fields.section("team", TeamBudget::read);
            file.memory = fields.section("memory", Memory::read);
            fields.section("start", |fields| {
                file.start_permits = fields.count::<1, _>("permits");
                file.connect_permits = fields.count::<1, _>("connect_permits");
            });
        });
        file.servers = fields.named("servers", |slug, fields| (slug, Server::read(fields)));
        file.teams = fields.list("teams", Team::read);
        fields.close();
        file
    }
}

impl Journal {
    fn read(fields: &mut Fields<'_, '_>) -> Self {
        Self {
            events_age_max: fields.positive("events_age_max"),
            size_max: fields.bytes("size_max"),
            server_logs_max: fields.count::<0, _>("server_logs_max"),
            request_logs_max: fields.count::<0, _>("request_logs_max"),
            logs_age_max: fields.positive("logs_age_max"),
        }
    }
}

impl Events {
    fn read(fields: &mut Fields<'_, '_>) -> Self {
        Self {
            at: fields.at,
            sink: fields.text("sink"),
            rotate_at: fields.bytes("rotate_at"),
            keep: fields.count::<1, _>("keep"),
            url: fields.text("url"),
            token: fields.text("token"),
            batch: Batching::read(fields),
        }
    }
}

impl Tier {
    pub(super) fn read(fields: &mut Fields<'_, '_>) -> Self {
        Self {
            args: fields.texts("args").unwrap_or_default(),
            env: fields.text_map("env"),
            headers: fields.text_map("headers"),
            query: fields.text_map("query"),
            bearer_token: fields.text("bearer_token"),
            health_url: fields.text("health_url"),
        }
    }
}

impl Server {
    fn read(fields: &mut Fields<'_, '_>) -> Self {
        Self {
            at: fields.at,
            transport: fields.text("transport"),
            protocol: fields.text("protocol"),
            command: fields.text("command"),
            url: fields.text("url"),
            cwd: fields.text("cwd"),
            tier: Tier::read(fields),
            user_required: fields.texts("user_required").unwrap_or_default(),
            oauth: fields.section("oauth", |fields| Some(OAuth::read(fields))),
        }
    }
}

impl Team {
    fn read(fields: &mut Fields<'_, '_>) -> Self {
        Self {
            at: fields.at,
            id: fields.text("id"),
            slug: fields.text("slug"),
            policy: fields.section("policy", policy::Tier::read),
            users: fields.list("users", User::read),
            installations: fields.list("installations", Installation::read),
        }
    }
}

impl User {
    fn read(fields: &mut Fields<'_, '_>) -> Self {
        Self {
            at: fields.at,
            id: fields.text("id"),
            slug: fields.text("slug"),
            token: fields.text("token"),
            tokens: fields.texts("tokens").unwrap_or_default(),
            token_kept: false,
            mcp_mode: fields.text("mcp_mode"),
            tiers: fields.named("servers", |installation, fields| (installation, Tier::read(fields))),
        }
    }
}

impl Installation {
    fn read(fields: &mut Fields<'_, '_>) -> Self {
        Self {
            id: fields.text("id"),
            server: fields.text("server"),
            own: Server::read(fields),
            team: fields.section("team", Tier::read),
            keep: fields.text("keep"),
            update: fields.text("update"),
            request_logging: fields.flag("request_logging_enabled"),
            users: fields.texts("users"),
            policy: fields.section("policy", policy::Tier::read),
        }
    }
}
