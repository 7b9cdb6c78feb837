//! The parsed configuration: each value can be missing and contains its place in the file. Only the types of values are
//! checked here. There is no `Debug`, because values can be secrets.

use std::time::Duration;

use toml_span::Span;
use toml_span::value::Value;

use super::backend::BackendTable;
use super::console::{ConsoleTable, RoleTable};
use super::errors::ConfigFindings;
use super::gateway::GatewayTable;
use super::oauth::OAuthTable;
use super::plan::HANG_TIMEOUT_MIN;
use super::policy::{self, BatchingTable, MemoryTable, TeamBudgetTable};
use super::reader::{ParsedValue, SpannedText, TableReader};
use super::telemetry::TelemetryTable;

#[derive(Default)]
pub(crate) struct ConfigFile {
    pub(crate) name: ParsedValue<String>,
    pub(crate) profile: ParsedValue<String>,
    pub(crate) allowed_commands: Vec<SpannedText>,
    pub(crate) isolation: ParsedValue<String>,
    pub(crate) cgroups: ParsedValue<String>,
    pub(crate) uid_range: ParsedValue<String>,
    pub(crate) watch: ParsedValue<bool>,
    pub(crate) retention: Option<Duration>,
    pub(crate) hang_timeout: Option<Duration>,
    pub(crate) keep_servers: ParsedValue<bool>,
    pub(crate) gateway: GatewayTable,
    pub(crate) console: ConsoleTable,
    pub(crate) backend: BackendTable,
    pub(crate) journal: JournalTable,
    pub(crate) events: EventsTable,
    pub(crate) telemetry: TelemetryTable,
    pub(crate) policy: policy::PolicyTier,
    pub(crate) team_budget: TeamBudgetTable,
    pub(crate) memory: MemoryTable,
    pub(crate) start_permits: Option<usize>,
    pub(crate) connect_permits: Option<usize>,
    pub(crate) servers: Vec<(SpannedText, ServerTable)>,
    pub(crate) teams: Vec<TeamTable>,
}

#[derive(Default)]
#[expect(clippy::struct_field_names, reason = "limits, as they are typed")]
pub(crate) struct JournalTable {
    pub(crate) events_age_max: Option<Duration>,
    pub(crate) size_max: ParsedValue<u64>,
    pub(crate) server_logs_max: Option<usize>,
    pub(crate) request_logs_max: Option<usize>,
    pub(crate) logs_age_max: Option<Duration>,
}

#[derive(Default)]
pub(crate) struct EventsTable {
    pub(crate) at: Span,
    pub(crate) sink: ParsedValue<String>,
    pub(crate) rotate_at: ParsedValue<u64>,
    pub(crate) keep: Option<usize>,
    pub(crate) url: ParsedValue<String>,
    pub(crate) token: ParsedValue<String>,
    pub(crate) batch: BatchingTable,
}

#[derive(Default)]
pub(crate) struct ServerTierTable {
    pub(crate) args: Vec<SpannedText>,
    pub(crate) env: Vec<(SpannedText, SpannedText)>,
    pub(crate) headers: Vec<(SpannedText, SpannedText)>,
    pub(crate) query: Vec<(SpannedText, SpannedText)>,
    pub(crate) bearer_token: ParsedValue<String>,
    pub(crate) health_url: ParsedValue<String>,
}

#[derive(Default)]
pub(crate) struct ServerTable {
    pub(crate) at: Span,
    pub(crate) transport: ParsedValue<String>,
    pub(crate) protocol: ParsedValue<String>,
    pub(crate) command: ParsedValue<String>,
    pub(crate) url: ParsedValue<String>,
    pub(crate) cwd: ParsedValue<String>,
    pub(crate) tier: ServerTierTable,
    pub(crate) user_required: Vec<SpannedText>,
    pub(crate) values: Vec<(SpannedText, UserValueTable)>,
    pub(crate) env_file: ParsedValue<String>,
    pub(crate) secret_args: ParsedValue<bool>,
    pub(crate) allow_tools: Option<Vec<SpannedText>>,
    pub(crate) deny_tools: Option<Vec<SpannedText>>,
    pub(crate) oauth: Option<OAuthTable>,
}

#[derive(Default)]
pub(crate) struct UserValueTable {
    pub(crate) description: ParsedValue<String>,
    pub(crate) secret: ParsedValue<bool>,
    pub(crate) default: ParsedValue<String>,
}

#[derive(Default)]
pub(crate) struct TeamTable {
    pub(crate) at: Span,
    pub(crate) id: ParsedValue<String>,
    pub(crate) slug: ParsedValue<String>,
    pub(crate) policy: policy::PolicyTier,
    pub(crate) users: Vec<UserTable>,
    pub(crate) installations: Vec<InstallationTable>,
}

#[derive(Default)]
pub(crate) struct UserTable {
    pub(crate) at: Span,
    pub(crate) id: ParsedValue<String>,
    pub(crate) slug: ParsedValue<String>,
    pub(crate) token: ParsedValue<String>,
    pub(crate) tokens: Vec<SpannedText>,
    pub(crate) has_stored_token: bool,
    pub(crate) mcp_mode: ParsedValue<String>,
    pub(crate) access: RoleTable,
    pub(crate) tiers: Vec<(SpannedText, ServerTierTable)>,
}

#[derive(Default)]
pub(crate) struct InstallationTable {
    pub(crate) id: ParsedValue<String>,
    pub(crate) server: ParsedValue<String>,
    pub(crate) own: ServerTable,
    pub(crate) team: ServerTierTable,
    pub(crate) keep: ParsedValue<String>,
    pub(crate) update: ParsedValue<String>,
    pub(crate) request_logging: ParsedValue<bool>,
    /// Users of the installation; `None` is all users of the team.
    pub(crate) users: Option<Vec<SpannedText>>,
    pub(crate) policy: policy::PolicyTier,
}

impl ConfigFile {
    pub(crate) fn read(tree: Value<'_>, findings: &mut ConfigFindings) -> Self {
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
            file.hang_timeout = fields.at_least_or_off("hang_timeout", HANG_TIMEOUT_MIN, Duration::MAX);
            file.keep_servers = fields.flag("keep_servers");
        });
        file.gateway = fields.section("gateway", GatewayTable::read);
        file.console = fields.section("console", ConsoleTable::read);
        file.backend = fields.section("backend", BackendTable::read);
        file.journal = fields.section("journal", JournalTable::read);
        file.events = fields.section("events", EventsTable::read);
        file.telemetry = fields.section("telemetry", TelemetryTable::read);
        fields.section("policy", |fields| {
            file.policy = policy::PolicyTier::read(fields);
            file.team_budget = fields.section("team", TeamBudgetTable::read);
            file.memory = fields.section("memory", MemoryTable::read);
            fields.section("start", |fields| {
                file.start_permits = fields.count::<1, _>("permits");
                file.connect_permits = fields.count::<1, _>("connect_permits");
            });
        });
        file.servers = fields.named_tables("servers", |slug, fields| (slug, ServerTable::read(fields)));
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
    pub(crate) fn read(fields: &mut TableReader<'_, '_>) -> Self {
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
            values: fields.named_tables("values", |key, fields| (key, UserValueTable::read(fields))),
            env_file: fields.text("env_file"),
            secret_args: fields.flag("secret_args"),
            allow_tools: fields.texts("allow_tools"),
            deny_tools: fields.texts("deny_tools"),
            oauth: fields.section("oauth", |fields| Some(OAuthTable::read(fields))),
        }
    }
}

impl UserValueTable {
    fn read(fields: &mut TableReader<'_, '_>) -> Self {
        Self { description: fields.text("description"), secret: fields.flag("secret"), default: fields.text("default") }
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
            has_stored_token: false,
            mcp_mode: fields.text("mcp_mode"),
            access: RoleTable::read(fields),
            tiers: fields.named_tables("servers", |installation, fields| (installation, ServerTierTable::read(fields))),
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
