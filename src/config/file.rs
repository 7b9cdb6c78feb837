//! The parsed configuration: each value can be missing and contains its place in the file. Only the types of values are
//! checked here. There is no `Debug`, because values can be secrets.

use std::time::Duration;

use toml_span::Span;
use toml_span::value::Value;

use super::backend::BackendTable;
use super::errors::ConfigFindings;
use super::gateway::GatewayTable;
use super::oauth::OAuthTable;
use super::policy::{self, BatchingTable, MemoryTable, TeamBudgetTable};
use super::reader::{ParsedValue, SpannedText, TableReader};

#[derive(Default)]
pub(super) struct ConfigFile {
    pub(super) name: ParsedValue<String>,
    pub(super) profile: ParsedValue<String>,
    pub(super) allowed_commands: Vec<SpannedText>,
    pub(super) isolation: ParsedValue<String>,
    pub(super) cgroups: ParsedValue<String>,
    pub(super) uid_range: ParsedValue<String>,
    pub(super) watch: ParsedValue<bool>,
    pub(super) retention: Option<Duration>,
    pub(super) gateway: GatewayTable,
    pub(super) backend: BackendTable,
    pub(super) journal: JournalTable,
    pub(super) events: EventsTable,
    pub(super) policy: policy::PolicyTier,
    pub(super) team_budget: TeamBudgetTable,
    pub(super) memory: MemoryTable,
    pub(super) start_permits: Option<usize>,
    pub(super) connect_permits: Option<usize>,
    pub(super) servers: Vec<(SpannedText, ServerTable)>,
    pub(super) teams: Vec<TeamTable>,
}

#[derive(Default)]
#[expect(clippy::struct_field_names, reason = "limits, as they are typed")]
pub(super) struct JournalTable {
    pub(super) events_age_max: Option<Duration>,
    pub(super) size_max: ParsedValue<u64>,
    pub(super) server_logs_max: Option<usize>,
    pub(super) request_logs_max: Option<usize>,
    pub(super) logs_age_max: Option<Duration>,
}

#[derive(Default)]
pub(super) struct EventsTable {
    pub(super) at: Span,
    pub(super) sink: ParsedValue<String>,
    pub(super) rotate_at: ParsedValue<u64>,
    pub(super) keep: Option<usize>,
    pub(super) url: ParsedValue<String>,
    pub(super) token: ParsedValue<String>,
    pub(super) batch: BatchingTable,
}

#[derive(Default)]
pub(super) struct ServerTierTable {
    pub(super) args: Vec<SpannedText>,
    pub(super) env: Vec<(SpannedText, SpannedText)>,
    pub(super) headers: Vec<(SpannedText, SpannedText)>,
    pub(super) query: Vec<(SpannedText, SpannedText)>,
    pub(super) bearer_token: ParsedValue<String>,
    pub(super) health_url: ParsedValue<String>,
}

#[derive(Default)]
pub(super) struct ServerTable {
    pub(super) at: Span,
    pub(super) transport: ParsedValue<String>,
    pub(super) protocol: ParsedValue<String>,
    pub(super) command: ParsedValue<String>,
    pub(super) url: ParsedValue<String>,
    pub(super) cwd: ParsedValue<String>,
    pub(super) tier: ServerTierTable,
    pub(super) user_required: Vec<SpannedText>,
    pub(super) oauth: Option<OAuthTable>,
}

#[derive(Default)]
pub(super) struct TeamTable {
    pub(super) at: Span,
    pub(super) id: ParsedValue<String>,
    pub(super) slug: ParsedValue<String>,
    pub(super) policy: policy::PolicyTier,
    pub(super) users: Vec<UserTable>,
    pub(super) installations: Vec<InstallationTable>,
}

#[derive(Default)]
pub(super) struct UserTable {
    pub(super) at: Span,
    pub(super) id: ParsedValue<String>,
    pub(super) slug: ParsedValue<String>,
    pub(super) token: ParsedValue<String>,
    pub(super) tokens: Vec<SpannedText>,
    pub(super) token_kept: bool,
    pub(super) mcp_mode: ParsedValue<String>,
    pub(super) tiers: Vec<(SpannedText, ServerTierTable)>,
}

#[derive(Default)]
pub(super) struct InstallationTable {
    pub(super) id: ParsedValue<String>,
    pub(super) server: ParsedValue<String>,
    pub(super) own: ServerTable,
    pub(super) team: ServerTierTable,
    pub(super) keep: ParsedValue<String>,
    pub(super) update: ParsedValue<String>,
    pub(super) request_logging: ParsedValue<bool>,
    /// Users of the installation; `None` is all users of the team.
    pub(super) users: Option<Vec<SpannedText>>,
    pub(super) policy: policy::PolicyTier,
}

impl ConfigFile {
    pub(super) fn read(tree: Value<'_>, findings: &mut ConfigFindings) -> Self {
        let at = Span::new(0, 0);
        let Some(mut fields) = TableReader::open(tree, at, "the file".to_owned(), findings) else {
            return Self::default();
        };
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
        file.gateway = fields.section("gateway", GatewayTable::read);
        file.backend = fields.section("backend", BackendTable::read);
        file.journal = fields.section("journal", JournalTable::read);
        file.events = fields.section("events", EventsTable::read);
        fields.section("policy", |fields| {
            file.policy = policy::PolicyTier::read(fields);
            file.team_budget = fields.section("team", TeamBudgetTable::read);
            file.memory = fields.section("memory", MemoryTable::read);
            fields.section("start", |fields| {
                file.start_permits = fields.count::<1, _>("permits");
                file.connect_permits = fields.count::<1, _>("connect_permits");
            });
        });
        file.servers = fields.named("servers", |slug, fields| (slug, ServerTable::read(fields)));
        file.teams = fields.list("teams", TeamTable::read);
        fields.close();
        file
    }
}

impl JournalTable {
    fn read(fields: &mut TableReader<'_, '_>) -> Self {
        Self {
            events_age_max: fields.positive("events_age_max"),
            size_max: fields.bytes("size_max"),
            server_logs_max: fields.count::<0, _>("server_logs_max"),
            request_logs_max: fields.count::<0, _>("request_logs_max"),
            logs_age_max: fields.positive("logs_age_max"),
        }
    }
}

impl EventsTable {
    fn read(fields: &mut TableReader<'_, '_>) -> Self {
        Self {
            at: fields.at,
            sink: fields.text("sink"),
            rotate_at: fields.bytes("rotate_at"),
            keep: fields.count::<1, _>("keep"),
            url: fields.text("url"),
            token: fields.text("token"),
            batch: BatchingTable::read(fields),
        }
    }
}

impl ServerTierTable {
    pub(super) fn read(fields: &mut TableReader<'_, '_>) -> Self {
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

impl ServerTable {
    fn read(fields: &mut TableReader<'_, '_>) -> Self {
        Self {
            at: fields.at,
            transport: fields.text("transport"),
            protocol: fields.text("protocol"),
            command: fields.text("command"),
            url: fields.text("url"),
            cwd: fields.text("cwd"),
            tier: ServerTierTable::read(fields),
            user_required: fields.texts("user_required").unwrap_or_default(),
            oauth: fields.section("oauth", |fields| Some(OAuthTable::read(fields))),
        }
    }
}

impl TeamTable {
    fn read(fields: &mut TableReader<'_, '_>) -> Self {
        Self {
            at: fields.at,
            id: fields.text("id"),
            slug: fields.text("slug"),
            policy: fields.section("policy", policy::PolicyTier::read),
            users: fields.list("users", UserTable::read),
            installations: fields.list("installations", InstallationTable::read),
        }
    }
}

impl UserTable {
    fn read(fields: &mut TableReader<'_, '_>) -> Self {
        Self {
            at: fields.at,
            id: fields.text("id"),
            slug: fields.text("slug"),
            token: fields.text("token"),
            tokens: fields.texts("tokens").unwrap_or_default(),
            token_kept: false,
            mcp_mode: fields.text("mcp_mode"),
            tiers: fields.named("servers", |installation, fields| (installation, ServerTierTable::read(fields))),
        }
    }
}

impl InstallationTable {
    fn read(fields: &mut TableReader<'_, '_>) -> Self {
        Self {
            id: fields.text("id"),
            server: fields.text("server"),
            own: ServerTable::read(fields),
            team: fields.section("team", ServerTierTable::read),
            keep: fields.text("keep"),
            update: fields.text("update"),
            request_logging: fields.flag("request_logging_enabled"),
            users: fields.texts("users"),
            policy: fields.section("policy", policy::PolicyTier::read),
        }
    }
}
