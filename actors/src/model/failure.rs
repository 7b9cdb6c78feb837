//! Why an exchange with a remote server failed. Everything that is decided about it is decided by its kind, never by
//! searching its text.

use std::fmt;
use std::time::Duration;

/// One exchange that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// How.
    pub kind: FailureKind,
    /// Whether the server may have got the message: if not, repeating it is safe.
    pub sent: bool,
    /// Whether the server had begun to answer: then it has taken the message, even if it refuses the rest of the answer.
    pub answering: bool,
}

/// See [`Failure::kind`]. Texts are for people, without a secret: an address is told without its query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FailureKind {
    /// The host's name could not be resolved.
    Dns,
    /// Nobody listens there.
    Refused,
    /// No connection within this time.
    ConnectTimeout(Duration),
    /// No secure connection, and why.
    Tls(String),
    /// The connection broke, or could not be made for another reason.
    Broken(String),
    /// Connected, and no answer began within this time.
    HeaderTimeout(Duration),
    /// The answer began and broke off, or ended without an answer in it.
    Cut,
    /// 401, and what the server asks for.
    Unauthorized {
        /// `WWW-Authenticate`.
        challenge: Option<String>,
    },
    /// 403, and what the server asks for.
    Forbidden {
        /// `WWW-Authenticate`.
        challenge: Option<String>,
    },
    /// It wants an authorization that there is none of, or that is not valid any more.
    Ungranted {
        /// What is the matter with it.
        why: String,
    },
    /// 403: the authorization does not reach as far as this one request.
    InsufficientScope {
        /// The scopes that it would take, as far as the server says, separated by spaces.
        scopes: String,
    },
    /// The authorization is to be renewed, and whoever does that cannot be asked, and why. Nothing is wrong with it.
    NotRenewed(String),
    /// The server does not know the session any more: 404, or in some servers 400, for a request that named one.
    SessionExpired {
        /// The HTTP status that said so.
        status: u16,
        /// In the server's words.
        said: Option<String>,
    },
    /// The server does not speak the era of the protocol any more in which it was spoken to, and what it said to that.
    OtherEra(String),
    /// 429, and when to come back.
    Throttled {
        /// `Retry-After`.
        retry_after: Option<Duration>,
    },
    /// 5xx.
    ServerError {
        /// The HTTP status.
        status: u16,
        /// `Retry-After`.
        retry_after: Option<Duration>,
    },
    /// 3xx: redirects are not followed, because credentials would go with them.
    Redirected {
        /// The HTTP status.
        status: u16,
        /// Where to, as far as it may be told.
        to: Option<String>,
    },
    /// Any other HTTP status that is no success.
    Status {
        /// It.
        status: u16,
        /// In the server's words.
        said: Option<String>,
    },
    /// A success that is not MCP.
    NotMcp {
        /// What it is instead.
        content_type: Option<String>,
    },
    /// A message longer than this many bytes.
    TooLong(usize),
    /// The messages of all servers use the memory that there is for them: the answer was not read.
    NoMemory,
    /// An HTTP+SSE server named an endpoint on another origin than its own: the credentials do not go there.
    ForeignEndpoint {
        /// That origin.
        origin: String,
    },
    /// The address cannot be used, and why.
    BadAddress(String),
    /// It does not take what it is told, and there is too much of that.
    Flooded,
    /// No connector of this host serves the transport.
    Unserved,
    /// The server refused the handshake or does not speak a version that is known.
    Handshake(String),
    /// It was connected, and its health checks failed this often in a row.
    Unhealthy(u32),
    /// A fault of ours.
    Panicked(String),
}

impl Failure {
    /// Before anything could have reached the server.
    pub fn unsent(kind: FailureKind) -> Self {
        Self { kind, sent: false, answering: false }
    }

    /// When the server may have got the message.
    pub fn sent(kind: FailureKind) -> Self {
        Self { kind, sent: true, answering: false }
    }

    /// When the server had begun to answer.
    pub fn answering(kind: FailureKind) -> Self {
        Self { kind, sent: true, answering: true }
    }
}

impl FailureKind {
    /// An HTTP status and no more.
    pub const fn status(status: u16) -> Self {
        Self::Status { status, said: None }
    }

    /// The end of a session, told by an HTTP status and no more.
    pub const fn expired(status: u16) -> Self {
        Self::SessionExpired { status, said: None }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind.fmt(f)
    }
}

impl fmt::Display for FailureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dns => f.write_str("its name cannot be resolved"),
            Self::Refused => f.write_str("connection refused"),
            Self::ConnectTimeout(after) => write!(f, "no connection within {} s", after.as_secs_f64()),
            Self::Tls(why) => write!(f, "no secure connection: {why}"),
            Self::Broken(why) => write!(f, "connection broken: {why}"),
            Self::HeaderTimeout(after) => write!(f, "no answer began within {} s", after.as_secs_f64()),
            Self::Cut => f.write_str("the answer broke off"),
            Self::Unauthorized { .. } => f.write_str("Authentication failed (HTTP 401)"),
            Self::Forbidden { .. } => f.write_str("Access forbidden (HTTP 403)"),
            Self::Ungranted { why } => f.write_str(why),
            Self::InsufficientScope { scopes } if scopes.is_empty() => {
                f.write_str("the authorization does not reach as far as this (HTTP 403)")
            }
            Self::InsufficientScope { scopes } => {
                write!(f, "the authorization lacks the scopes `{scopes}` (HTTP 403)")
            }
            Self::NotRenewed(why) => write!(f, "its authorization cannot be renewed: {why}"),
            Self::SessionExpired { status, said: None } => write!(f, "the session has expired (HTTP {status})"),
            Self::SessionExpired { status, said: Some(said) } => {
                write!(f, "the session has expired (HTTP {status}): {said}")
            }
            Self::OtherEra(why) => write!(f, "it does not speak this era of the protocol any more: {why}"),
            Self::Throttled { retry_after: None } => f.write_str("too many requests (HTTP 429)"),
            Self::Throttled { retry_after: Some(after) } => {
                write!(f, "too many requests (HTTP 429); again in {} s", after.as_secs_f64().ceil())
            }
            Self::ServerError { status, .. } => write!(f, "the server failed (HTTP {status})"),
            Self::Redirected { status, to: Some(to) } => {
                write!(f, "the server redirects to {to} (HTTP {status}), which is not followed: configure that address")
            }
            Self::Redirected { status, to: None } => {
                write!(f, "the server redirects (HTTP {status}), which is not followed: configure the right address")
            }
            Self::Status { status: 404, said: None } => {
                f.write_str("there is no MCP server at this address (HTTP 404)")
            }
            Self::Status { status, said: None } => write!(f, "the server refused the request (HTTP {status})"),
            Self::Status { status, said: Some(said) } => {
                write!(f, "the server refused the request (HTTP {status}): {said}")
            }
            Self::NotMcp { content_type: Some(content_type) } => {
                write!(f, "the answer is {content_type} and not MCP: is the address right?")
            }
            Self::NotMcp { content_type: None } => f.write_str("the answer is not MCP: is the address right?"),
            Self::TooLong(limit) => write!(f, "a message from the server is longer than {limit} bytes"),
            Self::NoMemory => {
                f.write_str("the answer was not read: too much memory is in use for messages; ask again later")
            }
            Self::ForeignEndpoint { origin } => {
                write!(f, "the server names an endpoint on another origin, {origin}: its credentials do not go there")
            }
            Self::BadAddress(why) => write!(f, "its address cannot be used: {why}"),
            Self::Flooded => f.write_str("the server does not take what it is told: too much waits for it"),
            Self::Unserved => f.write_str("no connector of this host serves its transport"),
            Self::Handshake(why) => write!(f, "handshake failed: {why}"),
            Self::Unhealthy(checks) => write!(f, "{checks} health checks in a row have failed"),
            Self::Panicked(how) => write!(f, "worker panicked: {how}"),
        }
    }
}
