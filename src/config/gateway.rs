//! The MCP endpoint: as typed in `[gateway]`, as meant, and the way between. Who may come in is said with the users.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use mcp_satellite_actors::model::ids::{Slug, TeamId, UserId};
use mcp_satellite_actors::model::secret::Secret;
use toml_span::Span;

use super::check::Check;
use super::policy::Limits;
use super::reader::{Fields, Text, Typed};
use crate::gateway::{self, Unusable};

/// Where clients find the endpoint if nobody says another place.
pub const LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 7300);

/// A token of 128 random bits has as many letters in base64.
const TOKEN_LETTERS_MIN: usize = 22;

/// The MCP endpoint, as meant.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GatewayPlan {
    /// Whether anybody wants it: a `[gateway]`, a user with a token, an `mcp.json`, `--listen`.
    pub asked: bool,
    /// Where it listens.
    pub listen: Listen,
    /// What clients call it, where that is not where it listens: without a slash at its end.
    pub public_url: Option<String>,
    /// Names by which clients may call it beside those of loopback: `host` or `host:port`, in lower case.
    pub hosts: Vec<String>,
    /// Web origins that may call it beside those of loopback: `scheme://host:port`, in lower case; a port of `*` is any.
    pub origins: Vec<String>,
    /// Who comes in.
    pub auth: Auth,
    /// URLs of authorization servers, for its metadata. Without any there are no metadata.
    pub authorization_servers: Vec<String>,
    /// Addresses from which many clients come: `unauthenticated_per_peer_max` does not hold for them.
    pub trusted_proxies: Vec<IpAddr>,
    /// Whether it speaks TLS.
    pub tls: Option<Tls>,
    /// How a request is answered where either way would do.
    pub answers: Answers,
    /// Its numbers.
    pub limits: GatewayLimits,
    /// All users of all teams, in the order of the files.
    pub users: Vec<GatewayUser>,
}

/// Reads an address to listen on. `localhost:PORT` and `:PORT` stand for 127.0.0.1: an endpoint that other machines can
/// reach is asked for by an IP address.
pub(crate) fn listen_address(text: &str) -> Result<SocketAddr, String> {
    let local = match text.rsplit_once(':') {
        Some((host, port)) if host.is_empty() || host.eq_ignore_ascii_case("localhost") => port.parse().ok(),
        _ => None,
    };
    let local = local.map(|port| SocketAddr::new(LISTEN.ip(), port));
    local.or_else(|| text.parse().ok()).ok_or_else(|| "write an address and a port, such as 127.0.0.1:7300".to_owned())
}

/// See [`GatewayPlan::listen`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Listen {
    /// Nowhere.
    Off,
    /// At [`LISTEN`]; at another port if that one is taken.
    #[default]
    Anywhere,
    /// Exactly there.
    At(SocketAddr),
}

/// See [`GatewayPlan::auth`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Auth {
    /// Whoever shows a user's token is that user.
    #[default]
    Bearer,
    /// Every process of this machine is the same user: of `TEAM/USER`, or the only one that there is.
    None(Option<String>),
}

/// See [`GatewayPlan::answers`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Answers {
    /// With the answer alone, unless something comes before it.
    #[default]
    Json,
    /// With a stream of events.
    Sse,
}

/// Files of a certificate chain and its key, in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tls {
    /// The chain, the server's own certificate first.
    pub cert: PathBuf,
    /// The private key.
    pub key: PathBuf,
}

/// The endpoint's numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayLimits {
    /// Bytes of a request's body.
    pub body_max: usize,
    /// Bytes of all bodies that are being read or answered.
    pub bodies_max: usize,
    /// Bytes of what is said to clients and not read yet; half of it for those who might come back.
    pub streams_max: usize,
    /// A session that nobody uses ends after this.
    pub session_idle: Duration,
    /// And every session after this.
    pub session_age_max: Duration,
    /// Sessions of all users.
    pub sessions_max: usize,
    /// Sessions of one user.
    pub sessions_per_user_max: usize,
    /// Connections of all clients.
    pub connections_max: usize,
    /// Connections on which no request has shown a valid token yet; at most three quarters of `connections_max`. Over it the
    /// oldest is closed.
    pub unauthenticated_max: usize,
    /// The same, of one address; not of loopback and of [`GatewayPlan::trusted_proxies`].
    pub unauthenticated_per_peer_max: usize,
    /// Time from a connection to the whole head of a request with a valid token.
    pub header_timeout: Duration,
    /// Requests of one user, on average; 0 is no limit, written as `"off"`.
    pub requests_per_second: u32,
    /// And so many at once.
    pub burst: u32,
    /// Calls of one user that are under way; 0 is no limit, written as `"off"`.
    pub calls_per_user_max: usize,
    /// How long an answer is waited for; `None` is the instance's own `request_timeout`.
    pub request_timeout: Option<Duration>,
    /// A client whose stream has broken has so long to come back to it.
    pub resume_grace: Duration,
    /// How long calls under way are waited for at the end.
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

/// Who can come in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayUser {
    /// The team.
    pub team: TeamId,
    /// The team's name for people.
    pub team_slug: Slug,
    /// The user.
    pub user: UserId,
    /// The user's name for people.
    pub slug: Slug,
    /// Each of them opens the door. Nobody comes in as a user without one.
    pub tokens: Vec<TokenHash>,
    /// Whether there is one more, which the satellite makes and keeps in its data directory.
    pub token_kept: bool,
    /// Whether `/mcp` shows the tools themselves if the client does not say.
    pub flat: bool,
}

/// The SHA-256 of a token. The token itself is kept nowhere.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenHash(pub(crate) [u8; 32]);

impl TokenHash {
    /// Of a token as it is sent.
    pub fn of(token: &str) -> Self {
        let mut hash = [0; 32];
        hash.copy_from_slice(ring::digest::digest(&ring::digest::SHA256, token.as_bytes()).as_ref());
        Self(hash)
    }

    /// From 64 hexadecimal digits.
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

/// As it is written in a configuration.
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
    /// Where it is to listen; `None` if it is switched off or nobody wants it.
    pub fn address(&self) -> Option<SocketAddr> {
        match self.listen {
            Listen::Off => None,
            Listen::Anywhere => self.asked.then_some(LISTEN),
            Listen::At(address) => self.asked.then_some(address),
        }
    }

    /// What clients are told of it where it listens at `address`.
    pub fn url(&self, address: SocketAddr) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let base = self.public_url.clone().unwrap_or_else(|| format!("{scheme}://{address}"));
        format!("{base}/mcp")
    }

    /// Has it listen exactly there, whatever the file says. What is wrong with that, and what to do.
    pub fn listen_at(&mut self, address: SocketAddr) -> Result<(), (&'static str, &'static str)> {
        (self.asked, self.listen) = (true, Listen::At(address));
        self.objection(address).map_or(Ok(()), Err)
    }

    /// The one user that everybody is, if there is no authentication.
    pub fn alone(&self) -> Result<&GatewayUser, String> {
        let named: Vec<&str> = match &self.auth {
            Auth::None(Some(name)) => name.split('/').collect(),
            Auth::None(None) | Auth::Bearer => Vec::new(),
        };
        match (&named[..], &self.users[..]) {
            ([], [only]) => Ok(only),
            ([], users) => Err(format!("without authentication everybody is one user, and there are {}", users.len())),
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

    /// Gives the users whose token the satellite keeps that token.
    pub fn give(&mut self, kept: &Secret) {
        let hash = TokenHash::of(kept.expose());
        let users = self.users.iter_mut().filter(|user| user.token_kept && !user.tokens.contains(&hash));
        users.for_each(|user| user.tokens.push(hash));
    }

    /// Has the satellite keep a token of a user.
    pub fn keep_token(&mut self, team: &str, user: &str) {
        let users = self.users.iter_mut().filter(|one| one.team.as_str() == team && one.user.as_str() == user);
        users.for_each(|user| user.token_kept = true);
        self.asked = true;
    }

    /// Makes the satellite create and store a token for the only user if that user has none.
    pub(super) fn keep_only_token(&mut self) {
        if let (Auth::Bearer, [only]) = (&self.auth, &mut self.users[..])
            && only.tokens.is_empty()
        {
            only.token_kept = true;
        }
    }

    /// Users with a token.
    pub fn admitted(&self) -> impl Iterator<Item = &GatewayUser> {
        self.users.iter().filter(|user| !user.tokens.is_empty() || user.token_kept)
    }

    /// The users of another file come in, too.
    pub(super) fn merge(&mut self, other: Self) {
        self.asked |= other.asked;
        for more in other.users {
            match self.users.iter_mut().find(|user| user.team == more.team && user.user == more.user) {
                Some(user) => {
                    user.tokens.extend(more.tokens);
                    user.token_kept |= more.token_kept;
                }
                None => self.users.push(more),
            }
        }
    }

    /// Why it cannot be served there.
    fn objection(&self, address: SocketAddr) -> Option<(&'static str, &'static str)> {
        if address.ip().is_loopback() {
            None
        } else if self.auth != Auth::Bearer {
            let message = "without authentication it may listen on this machine only";
            Some((message, "listen on 127.0.0.1 or [::1], or set auth = \"bearer\""))
        } else if self.hosts.is_empty() {
            let message = "it listens to other machines, and `hosts` does not say by which names they call it";
            Some((message, "add hosts = [\"mcp.example.com\"]: a web page must not get in under a name of its own"))
        } else {
            None
        }
    }
}

/// `[gateway]`
#[derive(Default)]
pub(super) struct Gateway {
    at: Span,
    /// Whether there is one.
    pub(super) given: bool,
    listen: Typed<String>,
    public_url: Typed<String>,
    hosts: Vec<Text>,
    origins: Vec<Text>,
    auth: Typed<String>,
    alone: Typed<String>,
    authorization_servers: Vec<Text>,
    trusted_proxies: Vec<Text>,
    tls: Files,
    answers: Typed<String>,
    limits: Limits,
}

/// `tls = { cert, key }`
#[derive(Default)]
struct Files {
    at: Span,
    given: bool,
    cert: Typed<String>,
    key: Typed<String>,
}

impl Gateway {
    pub(super) fn read(fields: &mut Fields<'_, '_>) -> Self {
        Self {
            at: fields.at,
            given: true,
            listen: fields.text("listen"),
            public_url: fields.text("public_url"),
            hosts: fields.texts("hosts").unwrap_or_default(),
            origins: fields.texts("origins").unwrap_or_default(),
            auth: fields.text("auth"),
            alone: fields.text("as"),
            authorization_servers: fields.texts("authorization_servers").unwrap_or_default(),
            trusted_proxies: fields.texts("trusted_proxies").unwrap_or_default(),
            tls: fields.section("tls", |fields| Files {
                at: fields.at,
                given: true,
                cert: fields.text("cert"),
                key: fields.text("key"),
            }),
            answers: fields.text("answers"),
            limits: Limits::read(fields),
        }
    }

    /// What it means, with the users that come with it.
    pub(super) fn meant(self, users: Vec<GatewayUser>, check: &mut Check<'_, '_>) -> GatewayPlan {
        let asked = self.given || users.iter().any(|user| !user.tokens.is_empty() || user.token_kept);
        let mut plan = GatewayPlan { asked, users, ..GatewayPlan::default() };
        match self.listen.given() {
            Some(off) if off.value == "off" => plan.listen = Listen::Off,
            Some(text) => plan.listen = check.address(text).map_or(Listen::Anywhere, Listen::At),
            None => {}
        }
        plan.public_url = self.public_url.given().and_then(|text| check.base_url("public_url", text));
        plan.hosts = self.hosts.iter().filter_map(|text| check.host(text)).collect();
        plan.origins = self.origins.iter().filter_map(|text| check.origin(text)).collect();
        let servers = self.authorization_servers.iter();
        plan.authorization_servers = servers.filter_map(|text| check.issuer(text)).collect();
        plan.trusted_proxies = self.trusted_proxies.iter().filter_map(|text| check.proxy(text)).collect();
        let words = [("json", Answers::Json), ("sse", Answers::Sse)];
        plan.answers = check.word(&self.answers, "way to answer", &words).unwrap_or_default();
        plan.tls = self.tls.meant(check);
        self.authentication(&mut plan, check);

        let at = self.listen.given().map_or(self.at, |text| text.span);
        if let Listen::At(address) = plan.listen {
            if let Some((message, hint)) = plan.objection(address) {
                check.findings.error(at, message, hint);
            } else if !address.ip().is_loopback() && plan.tls.is_none() {
                let message = "tokens and all that is said go over the network in the clear: there is no `tls`";
                check.findings.warning(at, message.to_owned());
            }
        }
        plan.limits = self.limits.meant(check.findings);
        plan
    }

    /// A token may have been typed in the place of a word, so none of these texts is repeated.
    fn authentication(&self, plan: &mut GatewayPlan, check: &mut Check<'_, '_>) {
        let alone = self.alone.given();
        match self.auth.given() {
            Some(auth) if auth.value == "none" => {
                plan.auth = Auth::None(alone.map(|text| text.value.clone()));
                let hint = "name one as \"TEAM/USER\", by their slugs: as = \"acme/alice\"";
                // Those of an `mcp.json` beside this file come later.
                let may_come = plan.users.is_empty() || alone.is_some_and(|text| text.value == "local/me");
                match plan.alone() {
                    Err(message) if !may_come => {
                        check.findings.error(alone.unwrap_or(auth).span, message, hint);
                    }
                    Ok(_) | Err(_) => {
                        let message = "every process of this machine may come in without a token: auth is \"none\"";
                        check.findings.warning(auth.span, message);
                    }
                }
                return;
            }
            Some(auth) if auth.value != "bearer" => {
                let hint = "write \"bearer\", or \"none\"; tokens are given to users";
                check.findings.error(auth.span, "this is no way to say who may come in", hint);
            }
            Some(_) | None => {}
        }
        if let Some(text) = alone {
            let hint = "remove it, or set auth = \"none\"";
            check.findings.error(text.span, "`as` says nothing where clients show who they are", hint);
        }
    }
}

impl Files {
    fn meant(&self, check: &mut Check<'_, '_>) -> Option<Tls> {
        if !self.given {
            return None;
        }
        let mut file = |key: &str, typed: &Typed<String>| {
            if typed.is_absent() {
                check.findings.error(
                    self.at,
                    format!("`tls` has no `{key}`"),
                    "write tls = { cert = \"…\", key = \"…\" }",
                );
            }
            let text = typed.given()?;
            let path = check.surroundings.folder.join(&text.value);
            let opened = std::fs::File::open(&path);
            let is_there = opened.is_ok();
            if let Err(error) = opened {
                let hint = "give the path of a PEM file; it is relative to the folder of the configuration file";
                // Who typed the key itself here sees it nowhere again.
                check.findings.error(text.span, format!("cannot read the file of `{key}`: {error}"), hint);
            }
            Some((path, is_there))
        };
        let (cert, key) = (file("cert", &self.cert), file("key", &self.key));
        let ((cert, cert_is_there), (key, key_is_there)) = (cert?, key?);
        let tls = Tls { cert, key };
        if cert_is_there
            && key_is_there
            && let Err(Unusable { is_key, why }) = gateway::check(&tls)
        {
            let (name, typed) = if is_key { ("key", &self.key) } else { ("cert", &self.cert) };
            let at = typed.given().map_or(self.at, |text| text.span);
            let hint = "give the certificate's chain in `cert` and its own private key in `key`, both in PEM";
            check.findings.error(at, format!("cannot use the file of `{name}`: {why}"), hint);
        }
        Some(tls)
    }
}

impl Check<'_, '_> {
    fn base_url(&mut self, key: &str, text: &Text) -> Option<String> {
        let url = self.url(key, text)?;
        if url.query().is_some() || url.fragment().is_some() {
            self.findings.error(text.span, format!("`{key}` has a query or a fragment"), "end it before");
        }
        Some(url.as_str().trim_end_matches('/').to_owned())
    }

    /// As it was typed: it is compared, letter for letter.
    fn issuer(&mut self, text: &Text) -> Option<String> {
        self.url("authorization_servers", text).map(|_| text.value.clone())
    }

    fn proxy(&mut self, text: &Text) -> Option<IpAddr> {
        let address = text.value.parse().ok();
        if address.is_none() {
            let message = format!("`{}` is no IP address", text.value.escape_debug());
            self.findings.error(text.span, message, "write it as \"10.0.0.7\" or \"2001:db8::7\", without a port");
        }
        address
    }

    /// `host`, `host:port`, `[::1]:port`.
    fn host(&mut self, text: &Text) -> Option<String> {
        let host = text.value.to_ascii_lowercase();
        let good = is_authority(&host);
        if !good {
            let message = format!("`{}` is no name of a host", text.value.escape_debug());
            self.findings.error(text.span, message, "write it as \"mcp.example.com\" or \"mcp.example.com:8443\"");
        }
        good.then_some(host)
    }

    /// `scheme://host`, `scheme://host:port`, `scheme://host:*`.
    fn origin(&mut self, text: &Text) -> Option<String> {
        let origin = text.value.to_ascii_lowercase();
        let good = origin.split_once("://").is_some_and(|(scheme, host)| {
            !scheme.is_empty()
                && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
                && is_authority(host.strip_suffix(":*").unwrap_or(host))
        });
        if !good {
            let message = format!("`{}` is no web origin", text.value.escape_debug());
            self.findings.error(text.span, message, "write it as \"https://app.example.com\", without a path");
        }
        good.then_some(origin)
    }

    /// One token of a user: the digest of it. `what` names it for people.
    pub(super) fn token(&mut self, what: &str, text: &Text) -> Option<TokenHash> {
        if let Some(digits) = text.value.strip_prefix("sha256:") {
            let hash = TokenHash::parse(digits);
            if hash.is_none() {
                let hint = "`satellite token` makes a token and prints what to write here";
                self.findings.error(text.span, format!("{what} is not the 64 hexadecimal digits of a SHA-256"), hint);
            }
            return hash;
        }
        if super::secrets::reference(&text.value).is_none() {
            let hint = if self.surroundings.closed {
                "give \"sha256:…\" of it: nobody else needs the token itself"
            } else {
                "write \"sha256:…\" of it (`satellite token` makes both), \"env:NAME\" or \"file:PATH\", so that it is \
                 not in this file"
            };
            self.findings.error(text.span, format!("{what} is written out"), hint);
            return None;
        }
        let secret = self.surroundings.referred(what, text, self.findings)?;
        let token = secret.expose();
        if !is_sendable(token) {
            let hint = "use letters, digits and -._~+/ only; `satellite token` makes one";
            self.findings.error(text.span, format!("{what} cannot be sent as a bearer token"), hint);
            return None;
        }
        if token.len() < TOKEN_LETTERS_MIN {
            let message = format!("{what} is so short that it could be guessed; `satellite token` makes a good one");
            self.findings.warning(text.span, message);
        }
        Some(TokenHash::of(token))
    }
}

/// A host and perhaps a port, and nothing else.
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

/// The letters of a bearer token: RFC 6750, 2.1.
pub(super) fn is_sendable(token: &str) -> bool {
    let letters = token.trim_end_matches('=');
    !letters.is_empty() && letters.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._~+/".contains(&byte))
}
