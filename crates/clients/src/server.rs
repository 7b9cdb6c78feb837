//! The servers of a client's file, in the same form for every client.

use std::fmt;
use std::time::Duration;

use crate::hidden::HiddenText;
use crate::locations::ClientScope;
use crate::template::TextTemplate;

/// The servers of one file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClientServers {
    /// The servers that were understood, in the order of the file.
    pub servers: Vec<ClientServer>,
    /// The servers that were not understood, in the order of the file.
    pub unreadable: Vec<UnreadableServer>,
    /// The values that the client asks the user for.
    pub inputs: Vec<ClientInput>,
    /// Notes about the file as a whole.
    pub notes: Vec<ImportNote>,
}

/// A server in a client's file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientServer {
    /// The name as it is written.
    pub name: String,
    /// The scope of the server.
    pub scope: ClientScope,
    /// How the client reaches the server.
    pub transport: ServerTransport,
    /// False if the client does not use the server.
    pub enabled: bool,
    /// True for an entry that connects the client to the satellite, under any name.
    pub is_satellite: bool,
    /// The tools that the client shows.
    pub tools: ToolSelection,
    /// The timeouts that are set.
    pub timeouts: ServerTimeouts,
    /// Keys that have no effect on the result, and changes that were made while reading.
    pub notes: Vec<ImportNote>,
    /// The keys of the notes that are not understood and have a text, a number or a boolean, as text.
    pub unknown_texts: Vec<(String, HiddenText)>,
    /// First byte of the name in the file; `None` if the format has no places.
    pub at: Option<usize>,
}

/// A server that cannot be imported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnreadableServer {
    /// The name as it is written.
    pub name: String,
    /// The scope of the server.
    pub scope: ClientScope,
    /// Why it cannot be imported, with the next step where there is one. Contains no value of the file.
    pub reason: String,
    /// First byte of the name in the file; `None` if the format has no places.
    pub at: Option<usize>,
}

/// How a client reaches a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerTransport {
    /// The client starts a process and uses its standard input and output.
    Stdio {
        /// The executable.
        command: TextTemplate,
        /// The arguments.
        args: Vec<TextTemplate>,
        /// Environment variables, in the order of the file.
        env: Vec<(String, TextTemplate)>,
        /// The working directory.
        cwd: Option<TextTemplate>,
        /// A file with further environment variables.
        env_file: Option<TextTemplate>,
    },
    /// The client sends HTTP requests.
    Http {
        /// The URL of the endpoint.
        url: TextTemplate,
        /// The protocol over HTTP.
        kind: HttpProtocol,
        /// Headers of every request, in the order of the file.
        headers: Vec<(String, TextTemplate)>,
        /// The environment variable with the bearer token.
        bearer_token_env: Option<String>,
        /// Headers and the environment variables that contain their values.
        env_headers: Vec<(String, String)>,
        /// OAuth settings, if there are any. A server without them can require OAuth as well.
        oauth: Option<OAuthHints>,
    },
}

/// The protocol of a remote server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum HttpProtocol {
    /// Streamable HTTP.
    Streamable,
    /// The older HTTP+SSE.
    Sse,
    /// The client finds out.
    Unspecified,
}

/// OAuth settings of a remote server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OAuthHints {
    /// The client does not use OAuth for this server.
    pub disabled: bool,
    /// Id of the registered OAuth client.
    pub client_id: Option<TextTemplate>,
    /// Secret of the registered OAuth client.
    pub client_secret: Option<TextTemplate>,
    /// Requested scopes.
    pub scopes: Vec<String>,
    /// Resource indicator (RFC 8707).
    pub resource: Option<String>,
    /// URL of the authorization endpoint.
    pub authorization_url: Option<String>,
    /// URL of the token endpoint.
    pub token_url: Option<String>,
    /// URL of the authorization server's metadata.
    pub metadata_url: Option<String>,
    /// Redirect URI of the client.
    pub redirect_uri: Option<String>,
}

/// The tools that a client shows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ToolSelection {
    /// The only tools that are shown. `None` is all tools.
    pub allowed: Option<Vec<String>>,
    /// Tools that are not shown.
    pub denied: Vec<String>,
}

/// Timeouts of a server, converted from the units of the clients.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ServerTimeouts {
    /// From the start to the first list of tools.
    pub startup: Option<Duration>,
    /// One call.
    pub call: Option<Duration>,
}

/// A value that the client asks the user for (`inputs` of VS Code).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientInput {
    /// The id in `${input:ID}`.
    pub id: String,
    /// How the client gets the value.
    pub kind: InputKind,
    /// The question to the user.
    pub description: Option<String>,
    /// True if the value is a secret.
    pub password: bool,
    /// The value if the user enters none.
    pub default: Option<HiddenText>,
}

/// How a client gets the value of an input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InputKind {
    /// The user enters a text.
    Prompt,
    /// The user selects one of the values.
    Choice(Vec<HiddenText>),
    /// An extension of the client computes the value with this command.
    Command(String),
    /// A type that is not understood.
    Other(String),
}

/// Something that an import does not take over, or changes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ImportNote {
    /// A key that is not understood.
    UnknownKey(String),
    /// A key that is understood and for which the satellite has no setting.
    NoCounterpart {
        /// The key.
        key: String,
        /// The meaning of the key in the client.
        meaning: &'static str,
    },
    /// A value that was read differently than it is written, or not at all.
    Adjusted {
        /// The key.
        key: String,
        /// The change.
        change: String,
    },
}

impl fmt::Display for ImportNote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownKey(key) => write!(f, "ignored key `{key}`"),
            Self::NoCounterpart { key, meaning } => write!(f, "`{key}` ({meaning}) is not imported"),
            Self::Adjusted { key, change } => write!(f, "`{key}`: {change}"),
        }
    }
}
