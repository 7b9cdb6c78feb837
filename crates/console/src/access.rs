//! Authentication: the token of a script, the cookie of a browser, or a client on this machine without either.
//!
//! A browser logs in with a token or with a code that is valid once, and gets a cookie. A request with a cookie can be
//! sent by any page that the browser shows. Therefore a change needs the origin of the console and a second token,
//! which only its own pages can read.

use std::collections::{HashMap, VecDeque};
use std::fmt::Write as _;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, header, request};
use mcp_satellite_actors::model::ids::{TeamId, UserId};
use mcp_satellite_actors::model::secret::Secret;
use mcp_satellite_config::{ConsoleToken, GatewayUser, Role, RoleAccess, TokenHash};
use mcp_satellite_gateway::access::{AccessDenied, TokenCheck, TokenTable, is_local, new_token};
use mcp_satellite_gateway::pages::PageConnection;
use ring::hmac;
use ring::rand::SystemRandom;
use subtle::ConstantTimeEq as _;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use crate::principal::{Entrance, Principal, PrincipalKind};
use crate::problem::Problem;

/// File in the data directory with the owner's token.
pub const OWNER_TOKEN_FILE: &str = "console-token";
/// Header of a change that a page of the console sends.
pub const CSRF_HEADER: HeaderName = HeaderName::from_static("x-csrf-token");

const CODE_AGE_MAX: Duration = Duration::from_secs(60);
const CODES_MAX: usize = 8;
const LOGIN_AGE_MAX: Duration = Duration::from_secs(12 * 3600);
const LOGINS_MAX: usize = 256;
/// Interval in which the login of an open stream is checked for its age.
const LOGIN_CHECK_INTERVAL: Duration = Duration::from_secs(60);
const COOKIE_PREFIX: &str = "satellite_session_";
const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Tokens and logins of the API and the console.
pub struct ConsoleAccess {
    check: TokenCheck,
    holders: RwLock<TokenHolders>,
    logins: Mutex<Logins>,
    csrf_key: hmac::Key,
    /// Sends a value after tokens or logins have changed.
    changes: watch::Sender<()>,
}

#[derive(Default)]
struct TokenHolders {
    is_on: bool,
    has_own_listener: bool,
    allows_anonymous: bool,
    by_token: TokenTable<Principal>,
    /// Users with a role, if the control plane is an MCP server.
    users: HashMap<(TeamId, UserId), Principal>,
}

#[derive(Default)]
struct Logins {
    /// Codes that are valid once, oldest first.
    codes: VecDeque<(TokenHash, Instant)>,
    by_id: HashMap<TokenHash, Login>,
}

struct Login {
    since: Instant,
    /// Token of the login; `None` if a code was used, which only the owner gets.
    token: Option<TokenHash>,
}

/// Clients of the API, according to the configuration.
#[derive(Default)]
pub struct AccessSettings<'a> {
    /// True if the console is on. If it is off, every path is missing.
    pub is_on: bool,
    /// True if the console is not served on the listener of the MCP endpoint.
    pub has_own_listener: bool,
    /// True if clients on this machine are viewers without a token.
    pub allows_anonymous: bool,
    /// True if the control plane is also an MCP server.
    pub has_mcp_server: bool,
    pub owner_token: Option<&'a Secret>,
    pub tokens: &'a [ConsoleToken],
    pub users: &'a [GatewayUser],
}

/// Result of a login.
pub struct LoginCookie {
    pub principal: Principal,
    /// Value of the header `Set-Cookie`.
    pub set_cookie: String,
}

impl ConsoleAccess {
    /// # Errors
    /// The system provides no random numbers.
    pub fn new() -> io::Result<Self> {
        let no_chance = |_| io::Error::other("the system provides no random numbers");
        let csrf_key = hmac::Key::generate(hmac::HMAC_SHA256, &SystemRandom::new()).map_err(no_chance)?;
        let (check, changes) = (TokenCheck::new()?, watch::Sender::default());
        Ok(Self { check, holders: RwLock::default(), logins: Mutex::default(), csrf_key, changes })
    }

    /// Replaces the tokens. Logins with a removed token end, and so do the streams of clients whose permissions change.
    pub fn apply(&self, settings: &AccessSettings<'_>) {
        let owner =
            settings.owner_token.map(|token| (TokenHash::from_token(token.expose()), Principal::owner(Entrance::Http)));
        let tokens = settings.tokens.iter().map(|token| {
            let ConsoleToken { name, hash, access, team } = token.clone();
            let name = Some(name);
            let principal =
                Principal { kind: PrincipalKind::Token, name, access, team, entrance: Entrance::Http, address: None };
            (hash, principal)
        });
        let of_users = settings.users.iter().filter_map(|user| Some((user, user.access?))).map(|(user, access)| {
            let principal = Principal {
                kind: PrincipalKind::User { team: user.team.clone(), user: user.user.clone() },
                name: Some(format!("{}/{}", user.team_slug, user.slug)),
                access,
                team: Some(user.team.to_string()),
                entrance: Entrance::Http,
                address: None,
            };
            (user, principal)
        });
        let of_users: Vec<_> = of_users.collect();
        let user_tokens = of_users
            .iter()
            .flat_map(|(user, principal)| user.tokens.iter().map(move |token| (*token, principal.clone())));
        let by_token = self.check.table(owner.into_iter().chain(tokens).chain(user_tokens));
        let users = of_users.iter().filter(|_| settings.has_mcp_server && settings.is_on).map(|(user, principal)| {
            let principal = Principal { entrance: Entrance::Mcp, ..principal.clone() };
            ((user.team.clone(), user.user.clone()), principal)
        });
        let users = users.collect();
        let AccessSettings { is_on, has_own_listener, allows_anonymous, .. } = *settings;
        let holders = TokenHolders { is_on, has_own_listener, allows_anonymous, by_token, users };
        self.logins()
            .by_id
            .retain(|_, login| login.token.is_none_or(|token| self.check.holder(&holders.by_token, &token).is_some()));
        *self.holders.write().unwrap_or_else(PoisonError::into_inner) = holders;
        self.changes.send_replace(());
    }

    /// Returns true if the console is on and served on the listener of this connection.
    pub fn is_served(&self, connection: &PageConnection) -> bool {
        let holders = self.holders();
        holders.is_on && holders.has_own_listener == connection.is_own
    }

    /// Returns the name and the role of each token, in order. The owner's token has no name in the configuration.
    pub fn token_names(&self) -> Vec<(String, String)> {
        let name =
            |principal: &Principal| principal.name.clone().unwrap_or_else(|| format!("owner ({OWNER_TOKEN_FILE})"));
        let holders = self.holders();
        let mut names: Vec<_> =
            holders.by_token.holders().map(|holder| (name(holder), holder.access.role.to_string())).collect();
        names.sort();
        names.dedup();
        names
    }

    /// Returns the permissions of a user of the control plane's MCP server; `None` if the user may not use it.
    pub fn mcp_user(&self, team: &TeamId, user: &UserId) -> Option<Principal> {
        self.holders().users.get(&(team.clone(), user.clone())).cloned()
    }

    /// Returns the number of logged-in browsers.
    pub fn login_count(&self) -> usize {
        self.logins().by_id.values().filter(|login| login.since.elapsed() < LOGIN_AGE_MAX).count()
    }

    /// Authenticates a request. `is_change` is false if it only reads.
    ///
    /// # Errors
    /// The client is unknown, or a page of another origin may have sent the request.
    pub fn authenticate(
        &self,
        request: &request::Parts,
        connection: &PageConnection,
        is_change: bool,
    ) -> Result<Principal, Problem> {
        let (holders, headers) = (self.holders(), &request.headers);
        let Some(principal) = self.find_principal(&holders, headers, connection) else {
            // Counts a wrong token.
            return Err(self.check.admit(&holders.by_token, headers).err().unwrap_or(AccessDenied::NoToken).into());
        };
        if principal.entrance == Entrance::Console {
            check_fetch_site(headers)?;
            if is_change {
                check_origin(headers, connection)?;
                self.check_csrf_token(headers)?;
            }
        }
        connection.mark_authenticated();
        Ok(principal)
    }

    /// Waits until a request with these headers would be refused or get other permissions than `admitted` has: its
    /// token was removed or changed, its login has ended, or the console is switched off.
    pub(crate) async fn wait_revoked(&self, admitted: &Principal, headers: &HeaderMap, connection: &PageConnection) {
        let mut changes = self.changes.subscribe();
        while self.is_served(connection)
            && self.find_principal(&self.holders(), headers, connection).as_ref() == Some(admitted)
        {
            // A login also ends by its age. The sender is part of `self`, so waiting cannot fail.
            let _ = timeout(LOGIN_CHECK_INTERVAL, changes.changed()).await;
        }
    }

    /// Returns a code for one login as the owner.
    ///
    /// # Errors
    /// The system provides no random numbers.
    pub fn create_login_code(&self) -> io::Result<Secret> {
        let code = new_token()?;
        let mut logins = self.logins();
        logins.codes.push_back((TokenHash::from_token(code.expose()), Instant::now()));
        while logins.codes.len() > CODES_MAX {
            logins.codes.pop_front();
        }
        Ok(code)
    }

    /// Logs a browser in with a token or a login code.
    ///
    /// # Errors
    /// The token or code is not valid, or a page of another origin has sent the request.
    pub fn log_in(
        &self,
        headers: &HeaderMap,
        connection: &PageConnection,
        token: &str,
    ) -> Result<LoginCookie, Problem> {
        check_origin(headers, connection)?;
        let (holders, now) = (self.holders(), Instant::now());
        let (token, mut principal) = if self.use_code(token, now) {
            (None, Principal::owner(Entrance::Console))
        } else {
            let (hash, principal) = self.check.admit_token(&holders.by_token, Some(token))?;
            (Some(hash), principal.clone())
        };
        principal.entrance = Entrance::Console;
        principal.address = Some(connection.peer.ip());
        let id = new_token().map_err(|error| Problem::new("closing", error.to_string()))?;
        let mut logins = self.logins();
        logins.by_id.retain(|_, login| now.duration_since(login.since) < LOGIN_AGE_MAX);
        if logins.by_id.len() >= LOGINS_MAX
            && let Some(oldest) = logins.by_id.iter().min_by_key(|(_, login)| login.since).map(|(id, _)| *id)
        {
            logins.by_id.remove(&oldest);
            self.changes.send_replace(());
        }
        logins.by_id.insert(TokenHash::from_token(id.expose()), Login { since: now, token });
        let secure = if connection.is_tls { "; Secure" } else { "" };
        let set_cookie = format!(
            "{}={}; HttpOnly; SameSite=Strict; Path=/; Max-Age={}{secure}",
            cookie_name(headers),
            id.expose(),
            LOGIN_AGE_MAX.as_secs()
        );
        connection.mark_authenticated();
        Ok(LoginCookie { principal, set_cookie })
    }

    /// Ends the login of a browser. Returns the `Set-Cookie` that removes its cookie.
    pub fn log_out(&self, headers: &HeaderMap) -> String {
        if let Some(id) = login_id(headers) {
            self.logins().by_id.remove(&TokenHash::from_token(id));
            self.changes.send_replace(());
        }
        format!("{}=; HttpOnly; SameSite=Strict; Path=/; Max-Age=0", cookie_name(headers))
    }

    /// Returns the token that the console's pages send with a change; `None` without a login.
    pub fn csrf_token(&self, headers: &HeaderMap) -> Option<String> {
        let tag = hmac::sign(&self.csrf_key, login_id(headers)?.as_bytes());
        Some(tag.as_ref().iter().fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        }))
    }

    fn check_csrf_token(&self, headers: &HeaderMap) -> Result<(), Problem> {
        let (wanted, given) = (self.csrf_token(headers).unwrap_or_default(), headers.get(&CSRF_HEADER));
        let is_equal = given.is_some_and(|given| given.as_bytes().ct_eq(wanted.as_bytes()).into());
        let why = "a change with a login cookie needs the header X-CSRF-Token with the token of the page; a script sends \
                   `Authorization: Bearer TOKEN` instead of a cookie";
        is_equal.then_some(()).ok_or_else(|| Problem::new("forbidden", why))
    }

    /// Returns the client of a request; `None` if it is unknown.
    fn find_principal(
        &self,
        holders: &TokenHolders,
        headers: &HeaderMap,
        connection: &PageConnection,
    ) -> Option<Principal> {
        let address = connection.peer.ip();
        let principal = if headers.contains_key(header::AUTHORIZATION) {
            self.check.find(&holders.by_token, headers)?.clone()
        } else if let Some(principal) = self.find_login(holders, headers) {
            principal
        } else if holders.allows_anonymous && is_local(headers, address) {
            Principal {
                kind: PrincipalKind::Anonymous,
                name: None,
                access: RoleAccess { role: Role::Viewer, reads_calls: false, acts_as: false },
                team: None,
                entrance: Entrance::Http,
                address: None,
            }
        } else {
            return None;
        };
        Some(Principal { address: Some(address), ..principal })
    }

    fn find_login(&self, holders: &TokenHolders, headers: &HeaderMap) -> Option<Principal> {
        let id = TokenHash::from_token(login_id(headers)?);
        let mut logins = self.logins();
        let login = logins.by_id.get(&id)?;
        if login.since.elapsed() >= LOGIN_AGE_MAX {
            logins.by_id.remove(&id);
            return None;
        }
        let principal = match &login.token {
            None => Principal::owner(Entrance::Console),
            Some(token) => self.check.holder(&holders.by_token, token)?.clone(),
        };
        Some(Principal { entrance: Entrance::Console, ..principal })
    }

    fn use_code(&self, code: &str, now: Instant) -> bool {
        let presented = TokenHash::from_token(code);
        let mut logins = self.logins();
        logins.codes.retain(|(_, created)| now.duration_since(*created) < CODE_AGE_MAX);
        let before = logins.codes.len();
        // Digests are compared, so the time that a comparison takes reveals nothing about a code.
        logins.codes.retain(|(code, _)| *code != presented);
        logins.codes.len() < before
    }

    fn holders(&self) -> std::sync::RwLockReadGuard<'_, TokenHolders> {
        self.holders.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn logins(&self) -> MutexGuard<'_, Logins> {
        self.logins.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the name of the login cookie. A browser sends a cookie to all ports of a host, so the name contains the port.
fn cookie_name(headers: &HeaderMap) -> String {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let port = host.rsplit_once(':').map_or("", |(_, port)| port);
    let port = if port.bytes().all(|digit| digit.is_ascii_digit()) { port } else { "" };
    format!("{COOKIE_PREFIX}{port}")
}

fn login_id(headers: &HeaderMap) -> Option<&str> {
    let name = cookie_name(headers);
    let cookies = headers.get_all(header::COOKIE).iter().filter_map(|cookies| cookies.to_str().ok());
    cookies.flat_map(|cookies| cookies.split(';')).find_map(|cookie| {
        let (its_name, value) = cookie.trim().split_once('=')?;
        (its_name == name && !value.is_empty()).then_some(value)
    })
}

fn check_fetch_site(headers: &HeaderMap) -> Result<(), Problem> {
    let is_own = headers.get(&FETCH_SITE).is_none_or(|site| matches!(site.as_bytes(), b"same-origin" | b"none"));
    is_own.then_some(()).ok_or_else(|| Problem::new("forbidden", "a page of another site has sent this request"))
}

/// Accepts only the origin of the console itself. The guard of the listener accepts all ports of this machine.
fn check_origin(headers: &HeaderMap, connection: &PageConnection) -> Result<(), Problem> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let own = text(header::ORIGIN).and_then(|origin| origin.split_once("://")).is_some_and(|(scheme, authority)| {
        let is_scheme = scheme == "https" || (scheme == "http" && !connection.is_tls);
        is_scheme && text(header::HOST).is_some_and(|host| host.eq_ignore_ascii_case(authority))
    });
    let why = "the request needs the header Origin with the address of the console: a page of another origin may have \
               sent it";
    own.then_some(()).ok_or_else(|| Problem::new("forbidden", why))?;
    check_fetch_site(headers)
}
