//! The console and its HTTP API: the parsed `[console]` table, the checks, and the validated configuration.

use std::net::SocketAddr;

use strum::VariantArray as _;
use toml_span::Span;

use super::check::{ConfigCheck, UniqueNames};
use super::gateway::{GatewayPlan, TokenHash};
use super::reader::{ParsedValue, SpannedText, TableReader, nearest};
use super::role::{Role, RoleAccess};

/// Name of the control plane's MCP server, at `/i/satellite/mcp`.
pub const CONTROL_SERVER: &str = "satellite";

/// The HTTP API, the web console, and the control plane as an MCP server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ConsolePlan {
    /// `None` if the configuration does not say: on if it is reachable from this machine only.
    pub enabled: Option<bool>,
    /// Address of an own listener; `None` is the listener of the MCP endpoint.
    pub listen: Option<SocketAddr>,
    /// True if the control plane is also an MCP server at `/i/satellite/mcp`.
    pub mcp: bool,
    pub tokens: Vec<ConsoleToken>,
}

/// A token of the HTTP API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsoleToken {
    /// Name for events and lists.
    pub name: String,
    pub hash: TokenHash,
    pub access: RoleAccess,
    /// Team, by id or slug; `None` is all teams.
    pub team: Option<String>,
}

impl ConsolePlan {
    /// Returns true if the console is served beside this endpoint.
    pub fn is_on(&self, gateway: &GatewayPlan) -> bool {
        let of_endpoint = || gateway.address().is_some_and(|address| address.ip().is_loopback());
        self.enabled.unwrap_or_else(|| self.listen.is_some() || of_endpoint())
    }
}

#[derive(Default)]
pub(crate) struct ConsoleTable {
    enabled: ParsedValue<bool>,
    listen: ParsedValue<String>,
    mcp: ParsedValue<bool>,
    tokens: Vec<ConsoleTokenTable>,
}

struct ConsoleTokenTable {
    at: Span,
    name: ParsedValue<String>,
    token: ParsedValue<String>,
    team: ParsedValue<String>,
    access: RoleTable,
}

/// The keys `role` and `grants`, of a token or a user.
#[derive(Default)]
pub(crate) struct RoleTable {
    role: ParsedValue<String>,
    grants: Vec<SpannedText>,
}

impl ConsoleTable {
    pub(crate) fn read(fields: &mut TableReader<'_, '_>) -> Self {
        Self {
            enabled: fields.flag("enabled"),
            listen: fields.text("listen"),
            mcp: fields.flag("mcp"),
            tokens: fields.list("tokens", |fields| ConsoleTokenTable {
                at: fields.at,
                name: fields.text("name"),
                token: fields.text("token"),
                team: fields.text("team"),
                access: RoleTable::read(fields),
            }),
        }
    }

    pub(crate) fn has_mcp_server(&self) -> bool {
        self.mcp.get().is_some_and(|mcp| mcp.value)
    }

    /// Checks the table. `tokens` contains the tokens of the users.
    pub(crate) fn into_plan(
        self,
        gateway: &GatewayPlan,
        teams: &[&str],
        tokens: &mut UniqueNames,
        check: &mut ConfigCheck<'_, '_>,
    ) -> ConsolePlan {
        let mcp = self.has_mcp_server();
        let enabled = self.enabled.get().map(|enabled| enabled.value);
        let listen = self.listen.get().and_then(|text| {
            let address = check.address(text)?;
            if !address.ip().is_loopback() && gateway.hosts.is_empty() {
                let message = "the console listens for other machines, and `hosts` in [gateway] does not list its host names";
                let hint = "add hosts = [\"mcp.example.com\"] to [gateway], so that a web page cannot use the console by DNS rebinding";
                check.findings.error(text.span, message, hint);
            }
            if enabled == Some(false) {
                check.findings.warning(text.span, "`listen` has no effect with enabled = false".to_owned());
            }
            Some(address)
        });
        if let Some(typed) = self.enabled.get()
            && typed.value
            && listen.is_none()
            && gateway.address().is_none()
        {
            let hint = "add listen = \"127.0.0.1:7400\" to [console], or a table [gateway]";
            check.findings.error(typed.span, "the console has no listener: the MCP endpoint is off", hint);
        }
        let mut names = UniqueNames::default();
        let tokens = self.tokens.into_iter().filter_map(|typed| {
            let name = check.id(&typed.name, "a token", "name", typed.at, &mut names);
            let what = format!("the token `{name}`");
            let team = typed.team.get().map(|team| {
                if !teams.is_empty() && !teams.contains(&team.value.as_str()) {
                    let hint = match nearest(&team.value, teams) {
                        Some(near) => format!("did you mean `{near}`?"),
                        None => "write the id or the slug of a team, or remove `team` for all teams".to_owned(),
                    };
                    check.findings.error(team.span, format!("there is no team `{}`", team.value), hint);
                }
                team.value.clone()
            });
            let access = typed.access.to_access(check);
            if access.is_none() && typed.access.role.is_absent() {
                let hint = "write role = \"viewer\", \"operator\" or \"admin\"";
                check.findings.error(typed.at, format!("{what} has no `role`"), hint);
            }
            let Some(text) = typed.token.get() else {
                if typed.token.is_absent() {
                    let hint = "`satellite token` creates a token and its digest; write token = \"sha256:…\"";
                    check.findings.error(typed.at, format!("{what} has no `token`"), hint);
                }
                return None;
            };
            let hash = check.token(&what, text)?;
            let digits = SpannedText::with_span(hash.to_string(), text.span);
            check.check_unique(&digits, &format!("{what} is used twice"), tokens);
            Some(ConsoleToken { name, hash, access: access?, team })
        });
        ConsolePlan { enabled, listen, mcp, tokens: tokens.collect() }
    }
}

impl RoleTable {
    pub(crate) fn read(fields: &mut TableReader<'_, '_>) -> Self {
        Self { role: fields.text("role"), grants: fields.texts("grants").unwrap_or_default() }
    }

    /// Returns the place of the first key; `None` if there is none.
    pub(crate) fn place(&self) -> Option<Span> {
        self.role.get().or(self.grants.first()).map(|typed| typed.span)
    }

    /// Returns `None` if there is no valid role.
    pub(crate) fn to_access(&self, check: &mut ConfigCheck<'_, '_>) -> Option<RoleAccess> {
        let (mut reads_calls, mut acts_as) = (false, false);
        for grant in &self.grants {
            match grant.value.as_str() {
                "calls:read" => reads_calls = true,
                "act_as" => acts_as = true,
                other => {
                    let message = format!("`{}` is not a grant", other.escape_debug());
                    check.findings.error(grant.span, message, "use \"calls:read\" or \"act_as\"");
                }
            }
        }
        let Some(typed) = self.role.get() else {
            if let Some(grant) = self.grants.first().filter(|_| self.role.is_absent()) {
                check.findings.error(grant.span, "`grants` has no effect without `role`", "add a role, or remove it");
            }
            return None;
        };
        let role = Role::VARIANTS.iter().find(|role| typed.value == <&str>::from(**role));
        if role.is_none() {
            let message = format!("`{}` is not a role", typed.value.escape_debug());
            check.findings.error(typed.span, message, "use \"viewer\", \"operator\" or \"admin\"");
        }
        Some(RoleAccess { role: *role?, reads_calls, acts_as })
    }
}
