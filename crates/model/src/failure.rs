//! Failures of exchanges with remote servers. Every decision depends on the kind of a failure, never on its text.

use std::fmt;
use std::time::Duration;

// Maximum pause that a server can request.
const PAUSE_MAX: Duration = Duration::from_secs(60 * 60);

/// A failed exchange with a remote server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExchangeFailure {
    /// Kind of the failure.
    pub kind: FailureKind,
    /// True if the server may have received the message. If false, repeating the message is safe.
    pub sent: bool,
    /// True if the server had begun to answer. Then it has received the message, even if the answer was rejected.
    pub answering: bool,
}

/// Kinds of failures. The texts are for people and contain no secrets: an address is shown without its query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FailureKind {
    /// The host name cannot be resolved.
    Dns,
    /// The server refused the connection.
    Refused,
    /// No connection was established within this time.
    ConnectTimeout(Duration),
    /// The TLS handshake failed, with the reason.
    Tls(String),
    /// The connection broke or could not be established for another reason.
    Broken(String),
    /// The connection was established, but the server did not begin to respond within this time.
    HeaderTimeout(Duration),
    /// The answer broke off, or ended without a message.
    Cut,
    /// HTTP 401.
    Unauthorized {
        /// The header `WWW-Authenticate`.
        challenge: Option<String>,
    },
    /// HTTP 403.
    Forbidden {
        /// The header `WWW-Authenticate`.
        challenge: Option<String>,
    },
    /// The server requires an authorization that is missing or no longer valid.
    Ungranted {
        /// Reason, for people.
        why: String,
    },
    /// HTTP 403: the authorization does not cover this request.
    InsufficientScope {
        /// Required scopes as far as the server names them, separated by spaces.
        scopes: String,
    },
    /// The authorization is still valid, but its token cannot be renewed now, with the reason.
    NotRenewed(String),
    /// The server no longer has the session: 404, or 400 from some servers, for a request with a session ID.
    SessionExpired {
        /// HTTP status of the answer.
        status: u16,
        /// Error message of the server.
        message: Option<String>,
    },
    /// The server no longer speaks the protocol era of the request, with the reason.
    OtherEra(String),
    /// HTTP 429.
    Throttled {
        /// The header `Retry-After`.
        retry_after: Option<Duration>,
    },
    /// HTTP 5xx.
    ServerError {
        /// HTTP status of the answer.
        status: u16,
        /// The header `Retry-After`.
        retry_after: Option<Duration>,
    },
    /// HTTP 3xx. Redirects are not followed, because credentials would go with them.
    Redirected {
        /// HTTP status of the answer.
        status: u16,
        /// Redirect target, without parts that may be secret.
        to: Option<String>,
    },
    /// Any other HTTP status that is not a success.
    Status {
        /// HTTP status of the answer.
        status: u16,
        /// Error message of the server.
        message: Option<String>,
    },
    /// A successful HTTP answer that is not MCP.
    NotMcp {
        /// The header `Content-Type`.
        content_type: Option<String>,
    },
    /// A message is longer than this limit, in bytes.
    TooLong(usize),
    /// The memory for messages of all servers is in use, so the answer was not read.
    NoMemory,
    /// An HTTP+SSE server named an endpoint on another origin. The credentials are not sent there.
    ForeignEndpoint {
        /// Origin of the endpoint.
        origin: String,
    },
    /// The address is invalid, with the reason.
    BadAddress(String),
    /// Too many messages wait because the server does not read them.
    Flooded,
    /// No connector of this host supports the transport.
    UnsupportedTransport,
    /// The server rejected the handshake or speaks no supported protocol version.
    Handshake(String),
    /// This number of consecutive health checks failed on an established connection.
    Unhealthy(u32),
    /// The worker panicked.
    Panicked(String),
}

impl ExchangeFailure {
    /// Creates a failure that happened before anything could reach the server.
    pub fn unsent(kind: FailureKind) -> Self {
        Self { kind, sent: false, answering: false }
    }

    /// Creates a failure that happened when the server may have received the message.
    pub fn sent(kind: FailureKind) -> Self {
        Self { kind, sent: true, answering: false }
    }

    /// Creates a failure that happened after the server had begun to answer.
    pub fn answering(kind: FailureKind) -> Self {
        Self { kind, sent: true, answering: true }
    }
}

impl FailureKind {
    /// Creates a failure with an HTTP status and no message.
    pub const fn from_status(status: u16) -> Self {
        Self::Status { status, message: None }
    }

    /// Returns the pause that the server requests, at most one hour.
    pub fn requested_pause(&self) -> Duration {
        match self {
            Self::Throttled { retry_after } | Self::ServerError { retry_after, .. } => {
                retry_after.unwrap_or_default().min(PAUSE_MAX)
            }
            _ => Duration::ZERO,
        }
    }

    /// Creates a session expiry with an HTTP status and no message.
    pub const fn session_expired(status: u16) -> Self {
        Self::SessionExpired { status, message: None }
    }
}

impl fmt::Display for ExchangeFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind.fmt(f)
    }
}

impl fmt::Display for FailureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dns => f.write_str("the host name cannot be resolved"),
            Self::Refused => f.write_str("connection refused"),
            Self::ConnectTimeout(after) => write!(f, "no connection within {} s", after.as_secs_f64()),
            Self::Tls(why) => write!(f, "no secure connection: {why}"),
            Self::Broken(why) => write!(f, "connection broken: {why}"),
            Self::HeaderTimeout(after) => {
                write!(f, "the server did not begin to respond within {} s", after.as_secs_f64())
            }
            Self::Cut => f.write_str("the response ended before it was complete"),
            Self::Unauthorized { .. } => f.write_str("Authentication failed (HTTP 401)"),
            Self::Forbidden { .. } => f.write_str("Access forbidden (HTTP 403)"),
            Self::Ungranted { why } => f.write_str(why),
            Self::InsufficientScope { scopes } if scopes.is_empty() => {
                f.write_str("the authorization does not permit this request (HTTP 403)")
            }
            Self::InsufficientScope { scopes } => {
                write!(f, "the authorization lacks the scopes `{scopes}` (HTTP 403)")
            }
            Self::NotRenewed(why) => write!(f, "the authorization cannot be renewed: {why}"),
            Self::SessionExpired { status, message: None } => write!(f, "the session has expired (HTTP {status})"),
            Self::SessionExpired { status, message: Some(said) } => {
                write!(f, "the session has expired (HTTP {status}): {said}")
            }
            Self::OtherEra(why) => write!(f, "the server no longer speaks this era of the protocol: {why}"),
            Self::Throttled { retry_after: None } => f.write_str("too many requests (HTTP 429)"),
            Self::Throttled { retry_after: Some(after) } => {
                write!(f, "too many requests (HTTP 429); try again in {} s", after.as_secs_f64().ceil())
            }
            Self::ServerError { status, .. } => write!(f, "the server failed (HTTP {status})"),
            Self::Redirected { status, to: Some(to) } => {
                write!(f, "the server redirects to {to} (HTTP {status}), which is not followed: configure that address")
            }
            Self::Redirected { status, to: None } => {
                write!(f, "the server redirects (HTTP {status}), which is not followed: configure the right address")
            }
            Self::Status { status: 404, message: None } => {
                f.write_str("there is no MCP server at this address (HTTP 404)")
            }
            Self::Status { status, message: None } => write!(f, "the server refused the request (HTTP {status})"),
            Self::Status { status, message: Some(said) } => {
                write!(f, "the server refused the request (HTTP {status}): {said}")
            }
            Self::NotMcp { content_type: Some(content_type) } => {
                write!(f, "the response is {content_type}, not MCP; check the address")
            }
            Self::NotMcp { content_type: None } => f.write_str("the response is not MCP; check the address"),
            Self::TooLong(limit) => write!(f, "a message from the server is longer than {limit} bytes"),
            Self::NoMemory => {
                f.write_str("the response was not read: too much memory is in use for messages; try again later")
            }
            Self::ForeignEndpoint { origin } => {
                write!(f, "the server names an endpoint on another origin, {origin}; credentials are not sent there")
            }
            Self::BadAddress(why) => write!(f, "the address cannot be used: {why}"),
            Self::Flooded => f.write_str("too many undelivered messages: the server does not read them"),
            Self::UnsupportedTransport => f.write_str("this host has no connector for the transport of the server"),
            Self::Handshake(why) => write!(f, "handshake failed: {why}"),
            Self::Unhealthy(checks) => write!(f, "{checks} health checks in a row have failed"),
            Self::Panicked(how) => write!(f, "worker panicked: {how}"),
        }
    }
}
