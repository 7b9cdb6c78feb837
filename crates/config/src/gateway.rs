//! The MCP endpoint: the parsed `[gateway]` table, the checks, and the validated configuration. Tokens are set with the
//! users.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use mcp_satellite_model::ids::{Slug, TeamId, UserId};
use mcp_satellite_model::secret::Secret;
use toml_span::Span;

use super::check::ConfigCheck;
use super::policy::GatewayLimitsTable;
use super::reader::{ParsedValue, SpannedText, TableReader};
use super::role::RoleAccess;
use super::small_file;
use mcp_satellite_http::tls::{self, CertificateError};

/// Default address of the endpoint.
pub const LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 7300);

/// Minimum length of a token: 128 random bits in base64.
const TOKEN_LETTERS_MIN: usize = 22;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GatewayPlan {
    /// True if the endpoint is requested: by `[gateway]`, a user with a token, an `mcp.json` or `--listen`.
    pub requested: bool,
    pub listen: ListenSetting,
    /// Base URL for clients if it differs from the listen address, without a trailing slash.
    pub public_url: Option<String>,
    /// Host names that clients may use in addition to those of loopback: `host` or `host:port`, in lower case.
    pub hosts: Vec<String>,
    /// Web origins that are accepted in addition to those of loopback: `scheme://host:port`, in lower case. The port
    /// `*` matches every port.
    pub origins: Vec<String>,
    pub auth: EndpointAuth,
    /// URLs of authorization servers for the OAuth metadata of the endpoint. If empty, it publishes no metadata.
    pub authorization_servers: Vec<String>,
    /// Addresses that many clients share, such as proxies. They are exempt from `unauthenticated_per_peer_max`.
    pub trusted_proxies: Vec<IpAddr>,
    /// Certificate and key for TLS; `None` is plain HTTP.
    pub tls: Option<TlsFiles>,
    pub response_style: ResponseStyle,
    pub limits: GatewayLimits,
    pub users: Vec<GatewayUser>,
}

/// Parses an address to listen on. `localhost:PORT` and `:PORT` mean 127.0.0.1. An endpoint that other machines can
/// reach requires an IP address.
pub fn listen_address(text: &str) -> Result<SocketAddr, String> {
    let local = match text.rsplit_once(':') {
        Some((host, port)) if host.is_empty() || host.eq_ignore_ascii_case("localhost") => port.parse().ok(),
        _ => None,
    };
    let local = local.map(|port| SocketAddr::new(LISTEN.ip(), port));
    local.or_else(|| text.parse().ok()).ok_or_else(|| "write an address and a port, such as 127.0.0.1:7300".to_owned())
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ListenSetting {
    Off,
    /// The address [`LISTEN`], or another port if that one is in use.
    #[default]
    DefaultAddress,
    Address(SocketAddr),
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum EndpointAuth {
    #[default]
    Bearer,
    /// No authentication: every process of this machine acts as the user `TEAM/USER`, or as the only user.
    None(Option<String>),
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ResponseStyle {
    /// A JSON response, unless other messages precede it.
    #[default]
    Json,
    Sse,
}

/// PEM files of a certificate chain and its private key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// Path of the certificate chain, with the server's own certificate first.
    pub cert: PathBuf,
    pub key: PathBuf,
}

#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct GatewayLimits {
    /// Maximum size of a request body, in bytes.
    pub body_max: usize,
    /// Maximum size of all request bodies in progress, in bytes.
    pub bodies_max: usize,
    /// Maximum size of the unread messages to all clients, in bytes. If the messages for disconnected clients exceed
    /// half of it, those of the client that has been away longest are dropped first.
    pub streams_max: usize,
    pub session_idle: Duration,
    pub session_age_max: Duration,
    pub sessions_max: usize,
    pub sessions_per_user_max: usize,
    pub connections_max: usize,
    /// Maximum number of connections that have not yet sent a valid token; at most three quarters of `connections_max`.
    /// If it is exceeded, the oldest of them is closed.
    pub unauthenticated_max: usize,
    /// Maximum number of connections without a valid token per address, except for loopback and
    /// [`GatewayPlan::trusted_proxies`].
    pub unauthenticated_per_peer_max: usize,
    /// Timeout from the connection to the complete header of a request with a valid token.
    pub header_timeout: Duration,
    /// Average number of requests per second and user; 0 is no limit, written as `"off"`.
    pub requests_per_second: u32,
    pub burst: u32,
    /// Maximum number of calls in flight per user; 0 is no limit, written as `"off"`.
    pub calls_per_user_max: usize,
    /// Timeout for a response; `None` is the `request_timeout` of the instance.
    pub request_timeout: Option<Duration>,
    pub resume_grace: Duration,
    pub drain_timeout: Duration,
}

impl Default for GatewayLimits {
    fn default() -> Self {
        Self {
            body_max: 16 << 20,
            bodies_max: 256 << 20,
            streams_max: 128 << 20,
            session_idle: Duration::from_secs(30 * 60),
            session_age_max: Duration::from_secs(7 * 24 * 3600),
            sessions_max: 16_384,
            sessions_per_user_max: 256,
            connections_max: 4096,
            unauthenticated_max: 1024,
            unauthenticated_per_peer_max: 64,
            header_timeout: Duration::from_secs(5),
            requests_per_second: 500,
            burst: 1000,
            calls_per_user_max: 128,
            request_timeout: None,
            resume_grace: Duration::from_secs(5),
            drain_timeout: Duration::from_secs(2),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayUser {
    pub team: TeamId,
    pub team_slug: Slug,
    pub user: UserId,
    pub slug: Slug,
    /// Hashes of the user's tokens. Without a token the user cannot connect.
    pub tokens: Vec<TokenHash>,
    /// True if the user has an additional token, which the satellite creates and stores in its data directory.
    pub has_stored_token: bool,
    /// Permissions of the user's tokens in the HTTP API; `None` is none.
    pub access: Option<RoleAccess>,
    /// True if `/mcp` lists the servers' tools themselves unless the client selects a mode.
    pub flat: bool,
}

/// SHA-256 hash of a token. The token itself is not stored.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenHash(pub [u8; 32]);

impl TokenHash {
    pub fn from_token(token: &str) -> Self {
        let mut hash = [0; 32];
        hash.copy_from_slice(ring::digest::digest(&ring::digest::SHA256, token.as_bytes()).as_ref());
        Self(hash)
    }

    fn parse(digits: &str) -> Option<Self> {
        let mut hash = [0; 32];
        if digits.len() != 64 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        for (byte, pair) in hash.iter_mut().zip(digits.as_bytes().chunks(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
        }
        Some(Self(hash))
    }
}

impl fmt::Display for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("sha256:")?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[token]")
    }
}

impl GatewayPlan {
    pub fn address(&self) -> Option<SocketAddr> {
        match self.listen {
            ListenSetting::Off => None,
            ListenSetting::DefaultAddress => self.requested.then_some(LISTEN),
            ListenSetting::Address(address) => self.requested.then_some(address),
        }
    }

    pub fn url(&self, address: SocketAddr) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let base = self.public_url.clone().unwrap_or_else(|| format!("{scheme}://{address}"));
        format!("{base}/mcp")
    }

    /// Sets the listen address, regardless of the file.
    ///
    /// # Errors
    /// Returns a message and a hint if the endpoint must not listen on this address.
    pub fn set_listen_address(&mut self, address: SocketAddr) -> Result<(), (&'static str, &'static str)> {
        (self.requested, self.listen) = (true, ListenSetting::Address(address));
        self.listen_error(address).map_or(Ok(()), Err)
    }

    /// Returns the user as which all clients act if there is no authentication.
    ///
    /// # Errors
    /// Returns a message if there is no such user, or if `as` is missing and there are several users.
    pub fn single_user(&self) -> Result<&GatewayUser, String> {
        let named: Vec<&str> = match &self.auth {
            EndpointAuth::None(Some(name)) => name.split('/').collect(),
            EndpointAuth::None(None) | EndpointAuth::Bearer => Vec::new(),
        };
        match (&named[..], &self.users[..]) {
            ([], [only]) => Ok(only),
            ([], users) => {
                Err(format!("without authentication all clients are one user, but {} are configured", users.len()))
            }
            ([team, user], users) => {
                let is = |one: &&GatewayUser| {
                    (one.team_slug.as_str() == *team || one.team.as_str() == *team)
                        && (one.slug.as_str() == *user || one.user.as_str() == *user)
                };
                users.iter().find(is).ok_or_else(|| format!("there is no user `{team}/{user}`"))
            }
            (_, _) => Err(format!("`{}` does not name a team and a user", named.join("/"))),
        }
    }

    pub fn add_stored_token(&mut self, token: &Secret) {
        let hash = TokenHash::from_token(token.expose());
        let users = self.users.iter_mut().filter(|user| user.has_stored_token && !user.tokens.contains(&hash));
        users.for_each(|user| user.tokens.push(hash));
    }

    pub fn enable_stored_token(&mut self, team: &str, user: &str) {
        let users = self.users.iter_mut().filter(|one| one.team.as_str() == team && one.user.as_str() == user);
        users.for_each(|user| user.has_stored_token = true);
        self.requested = true;
    }

    pub(crate) fn store_token_for_only_user(&mut self) {
        if let (EndpointAuth::Bearer, [only]) = (&self.auth, &mut self.users[..])
            && only.tokens.is_empty()
        {
            only.has_stored_token = true;
        }
    }

    pub fn users_with_token(&self) -> impl Iterator<Item = &GatewayUser> {
        self.users.iter().filter(|user| !user.tokens.is_empty() || user.has_stored_token)
    }

    pub(crate) fn merge(&mut self, other: Self) {
        self.requested |= other.requested;
        for more in other.users {
            match self.users.iter_mut().find(|user| user.team == more.team && user.user == more.user) {
                Some(user) => {
                    user.tokens.extend(more.tokens);
                    user.has_stored_token |= more.has_stored_token;
                }
                None => self.users.push(more),
            }
        }
    }

    fn listen_error(&self, address: SocketAddr) -> Option<(&'static str, &'static str)> {
        if address.ip().is_loopback() {
            None
        } else if self.auth != EndpointAuth::Bearer {
            let message = "without authentication the MCP endpoint may only listen on this machine";
            Some((message, "listen on 127.0.0.1 or [::1], or set auth = \"bearer\""))
        } else if self.hosts.is_empty() {
            let message = "the MCP endpoint listens for other machines, and `hosts` does not list its host names";
            Some((
                message,
                "add hosts = [\"mcp.example.com\"], so that a web page cannot use the endpoint by DNS rebinding",
            ))
        } else {
            None
        }
    }
}

#[derive(Default)]
pub(crate) struct GatewayTable {
    at: Span,
    pub(crate) is_present: bool,
    listen: ParsedValue<String>,
    public_url: ParsedValue<String>,
    hosts: Vec<SpannedText>,
    origins: Vec<SpannedText>,
    auth: ParsedValue<String>,
    as_user: ParsedValue<String>,
    authorization_servers: Vec<SpannedText>,
    trusted_proxies: Vec<SpannedText>,
    tls: TlsTable,
    answers: ParsedValue<String>,
    limits: GatewayLimitsTable,
}

#[derive(Default)]
struct TlsTable {
    at: Span,
    is_present: bool,
    cert: ParsedValue<String>,
    key: ParsedValue<String>,
}

impl GatewayTable {
    pub(crate) fn has_authentication(&self) -> bool {
        self.auth.get().is_none_or(|auth| auth.value != "none")
    }

    pub(crate) fn read(fields: &mut TableReader<'_, '_>) -> Self {
        Self {
            at: fields.at,
            is_present: true,
            listen: fields.text("listen"),
            public_url: fields.text("public_url"),
            hosts: fields.texts("hosts").unwrap_or_default(),
            origins: fields.texts("origins").unwrap_or_default(),
            auth: fields.text("auth"),
            as_user: fields.text("as"),
            authorization_servers: fields.texts("authorization_servers").unwrap_or_default(),
            trusted_proxies: fields.texts("trusted_proxies").unwrap_or_default(),
            tls: fields.section("tls", |fields| TlsTable {
                at: fields.at,
                is_present: true,
                cert: fields.text("cert"),
                key: fields.text("key"),
            }),
            answers: fields.text("answers"),
            limits: GatewayLimitsTable::read(fields),
        }
    }

    pub(crate) fn into_plan(self, users: Vec<GatewayUser>, check: &mut ConfigCheck<'_, '_>) -> GatewayPlan {
        let requested = self.is_present || users.iter().any(|user| !user.tokens.is_empty() || user.has_stored_token);
        let mut plan = GatewayPlan { requested, users, ..GatewayPlan::default() };
        match self.listen.get() {
            Some(off) if off.value == "off" => plan.listen = ListenSetting::Off,
            Some(text) => {
                plan.listen = check.address(text).map_or(ListenSetting::DefaultAddress, ListenSetting::Address);
            }
            None => {}
        }
        plan.public_url = self.public_url.get().and_then(|text| check.base_url("public_url", text));
        plan.hosts = self.hosts.iter().filter_map(|text| check.host(text)).collect();
        plan.origins = self.origins.iter().filter_map(|text| check.origin(text)).collect();
        let servers = self.authorization_servers.iter();
        plan.authorization_servers = servers.filter_map(|text| check.issuer(text)).collect();
        plan.trusted_proxies = self.trusted_proxies.iter().filter_map(|text| check.proxy(text)).collect();
        let words = [("json", ResponseStyle::Json), ("sse", ResponseStyle::Sse)];
        plan.response_style = check.keyword(&self.answers, "answers", &words).unwrap_or_default();
        plan.tls = self.tls.to_tls_files(check);
        self.validate_auth(&mut plan, check);

        let at = self.listen.get().map_or(self.at, |text| text.span);
        if let ListenSetting::Address(address) = plan.listen {
            if let Some((message, hint)) = plan.listen_error(address) {
                check.findings.error(at, message, hint);
            } else if !address.ip().is_loopback() && plan.tls.is_none() {
                let message = "tokens and all requests go over the network unencrypted: `tls` is missing";
                check.findings.warning(at, message.to_owned());
            }
        }
        plan.limits = self.limits.into_limits(check.findings);
        plan
    }

    /// Validates `auth` and `as`. The messages do not repeat the values: one of them may be a misplaced token.
    fn validate_auth(&self, plan: &mut GatewayPlan, check: &mut ConfigCheck<'_, '_>) {
        let as_user = self.as_user.get();
        match self.auth.get() {
            Some(auth) if auth.value == "none" => {
                plan.auth = EndpointAuth::None(as_user.map(|text| text.value.clone()));
                let hint = "name a user as \"TEAM/USER\", by slugs: as = \"acme/alice\"";
                // The user of an `mcp.json` is added later.
                let may_come = plan.users.is_empty() || as_user.is_some_and(|text| text.value == "local/me");
                match plan.single_user() {
                    Err(message) if !may_come => {
                        check.findings.error(as_user.unwrap_or(auth).span, message, hint);
                    }
                    Ok(_) | Err(_) => {
                        let message =
                            "every process on this machine can use the MCP endpoint without a token: auth is \"none\"";
                        check.findings.warning(auth.span, message);
                    }
                }
                return;
            }
            Some(auth) if auth.value != "bearer" => {
                let hint = "write \"bearer\" or \"none\"; tokens belong to users";
                check.findings.error(auth.span, "the value of `auth` is not valid", hint);
            }
            Some(_) | None => {}
        }
        if let Some(text) = as_user {
            let hint = "remove it, or set auth = \"none\"";
            check.findings.error(text.span, "`as` has no effect without auth = \"none\"", hint);
        }
    }
}

impl TlsTable {
    fn to_tls_files(&self, check: &mut ConfigCheck<'_, '_>) -> Option<TlsFiles> {
        if !self.is_present {
            return None;
        }
        let mut file = |key: &str, typed: &ParsedValue<String>| {
            if typed.is_absent() {
                check.findings.error(
                    self.at,
                    format!("`tls` has no `{key}`"),
                    "write tls = { cert = \"…\", key = \"…\" }",
                );
            }
            let text = typed.get()?;
            let path = check.secret_sources.folder.join(&text.value);
            let opened = small_file::open(&path);
            let is_there = opened.is_ok();
            if let Err(error) = opened {
                let hint = "give the path of a PEM file; it is relative to the folder of the configuration file";
                // The message does not repeat the path: the private key itself may have been typed here.
                check.findings.error(text.span, format!("cannot read the file of `{key}`: {error}"), hint);
            }
            Some((path, is_there))
        };
        let (cert, key) = (file("cert", &self.cert), file("key", &self.key));
        let ((cert, cert_is_there), (key, key_is_there)) = (cert?, key?);
        let tls = TlsFiles { cert, key };
        if cert_is_there
            && key_is_there
            && let Err(CertificateError { is_key, why }) = tls::check(&tls.cert, &tls.key)
        {
            let (name, typed) = if is_key { ("key", &self.key) } else { ("cert", &self.cert) };
            let at = typed.get().map_or(self.at, |text| text.span);
            let hint = "give the certificate's chain in `cert` and its own private key in `key`, both in PEM";
            check.findings.error(at, format!("cannot use the file of `{name}`: {why}"), hint);
        }
        Some(tls)
    }
}

impl ConfigCheck<'_, '_> {
    fn base_url(&mut self, key: &str, text: &SpannedText) -> Option<String> {
        let url = self.url(key, text)?;
        if url.query().is_some() || url.fragment().is_some() {
            self.findings.error(text.span, format!("`{key}` has a query or a fragment"), "remove it");
        }
        Some(url.as_str().trim_end_matches('/').to_owned())
    }

    /// Returns the text as typed, because clients compare issuers character by character.
    fn issuer(&mut self, text: &SpannedText) -> Option<String> {
        self.url("authorization_servers", text).map(|_| text.value.clone())
    }

    fn proxy(&mut self, text: &SpannedText) -> Option<IpAddr> {
        let address = text.value.parse().ok();
        if address.is_none() {
            let message = format!("`{}` is not an IP address", text.value.escape_debug());
            self.findings.error(text.span, message, "write it as \"10.0.0.7\" or \"2001:db8::7\", without a port");
        }
        address
    }

    fn host(&mut self, text: &SpannedText) -> Option<String> {
        let host = text.value.to_ascii_lowercase();
        let good = is_authority(&host);
        if !good {
            let message = format!("`{}` is not a host name", text.value.escape_debug());
            self.findings.error(text.span, message, "write it as \"mcp.example.com\" or \"mcp.example.com:8443\"");
        }
        good.then_some(host)
    }

    fn origin(&mut self, text: &SpannedText) -> Option<String> {
        let origin = text.value.to_ascii_lowercase();
        let good = origin.split_once("://").is_some_and(|(scheme, host)| {
            !scheme.is_empty()
                && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
                && is_authority(host.strip_suffix(":*").unwrap_or(host))
        });
        if !good {
            let message = format!("`{}` is not a web origin", text.value.escape_debug());
            self.findings.error(text.span, message, "write it as \"https://app.example.com\", without a path");
        }
        good.then_some(origin)
    }

    pub(crate) fn token(&mut self, what: &str, text: &SpannedText) -> Option<TokenHash> {
        if let Some(digits) = text.value.strip_prefix("sha256:") {
            let hash = TokenHash::parse(digits);
            if hash.is_none() {
                let hint = "`satellite token` creates a token and prints the digest to write here";
                self.findings.error(text.span, format!("{what} is not the 64 hexadecimal digits of a SHA-256"), hint);
            }
            return hash;
        }
        if super::secrets::parse_reference(&text.value).is_none() {
            let hint = if self.secret_sources.rejects_references {
                "write its digest \"sha256:…\": only the user needs the token itself"
            } else {
                "write its digest \"sha256:…\" (`satellite token` creates both), \"env:NAME\" or \"file:PATH\""
            };
            self.findings.error(text.span, format!("{what} is written in plain text"), hint);
            return None;
        }
        let secret = self.secret_sources.resolve_secret(what, text, self.findings)?;
        let token = secret.expose();
        if !is_sendable(token) {
            let hint = "use letters, digits and -._~+/ only; `satellite token` creates a token";
            self.findings.error(text.span, format!("{what} cannot be sent as a bearer token"), hint);
            return None;
        }
        if token.len() < TOKEN_LETTERS_MIN {
            let message = format!("{what} is short enough to be guessed; create one with `satellite token`");
            self.findings.warning(text.span, message);
        }
        Some(TokenHash::from_token(token))
    }
}

fn is_authority(text: &str) -> bool {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:[]".contains(&byte);
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (text, None),
    };
    let bracketed = host.starts_with('[') && host.ends_with(']');
    !host.is_empty()
        && text.bytes().all(good)
        && (bracketed || !host.contains([':', '[', ']']))
        && port.is_none_or(|port| port.parse::<u16>().is_ok())
}

/// Returns true if all characters are permitted in a bearer token (RFC 6750, section 2.1).
pub(crate) fn is_sendable(token: &str) -> bool {
    let letters = token.trim_end_matches('=');
    !letters.is_empty() && letters.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._~+/".contains(&byte))
}
