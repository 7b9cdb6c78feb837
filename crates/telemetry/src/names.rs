//! Names of attributes and metrics of the MCP semantic conventions (`docs/gen-ai/mcp.md` of
//! `open-telemetry/semantic-conventions-genai`; status: development). A test compares them with a table.

/// Address of the client's connection.
pub const CLIENT_ADDRESS: &str = "client.address";
/// Port of the client's connection.
pub const CLIENT_PORT: &str = "client.port";
/// Code of the error, `tool_error`, or the kind of failure.
pub const ERROR_TYPE: &str = "error.type";
/// `execute_tool` for a tool call.
pub const OPERATION_NAME: &str = "gen_ai.operation.name";
/// Name of the tool.
pub const TOOL_NAME: &str = "gen_ai.tool.name";
/// Name of the prompt.
pub const PROMPT_NAME: &str = "gen_ai.prompt.name";
/// Arguments of a tool call; only on request.
pub const TOOL_ARGUMENTS: &str = "gen_ai.tool.call.arguments";
/// Result of a tool call; only on request.
pub const TOOL_RESULT: &str = "gen_ai.tool.call.result";
/// Id of the request.
pub const REQUEST_ID: &str = "jsonrpc.request.id";
/// Method of the request.
pub const METHOD_NAME: &str = "mcp.method.name";
/// Version of the protocol.
pub const PROTOCOL_VERSION: &str = "mcp.protocol.version";
/// URI of a resource.
pub const RESOURCE_URI: &str = "mcp.resource.uri";
/// Public part of the id of a client's session. The whole id is a credential.
pub const SESSION_ID: &str = "mcp.session.id";
/// Application protocol: `http`.
pub const NETWORK_PROTOCOL_NAME: &str = "network.protocol.name";
/// Version of that protocol: `1.1`.
pub const NETWORK_PROTOCOL_VERSION: &str = "network.protocol.version";
/// `pipe` or `tcp`.
pub const NETWORK_TRANSPORT: &str = "network.transport";
/// Code of a JSON-RPC error.
pub const RESPONSE_STATUS_CODE: &str = "rpc.response.status_code";
/// Host of a remote server.
pub const SERVER_ADDRESS: &str = "server.address";
/// Port of a remote server.
pub const SERVER_PORT: &str = "server.port";

/// Attributes of the satellite itself.
pub mod own {
    /// Number of the attempt, from 2: the call is repeated on the next run.
    pub const ATTEMPT: &str = "satellite.attempt";
    /// Name of the instance.
    pub const INSTANCE: &str = "satellite.instance";
    /// Team of the user.
    pub const TEAM: &str = "satellite.team";
    /// The user.
    pub const USER: &str = "satellite.user";
    /// Whether a call without an answer may have been executed.
    pub const FATE: &str = "satellite.fate";
}

/// Value of [`OPERATION_NAME`].
pub const EXECUTE_TOOL: &str = "execute_tool";
/// Value of [`ERROR_TYPE`] for a result that reports an error of the tool.
pub const TOOL_ERROR: &str = "tool_error";
/// Value of [`ERROR_TYPE`] beyond the limit of different values.
pub const OTHER_ERROR: &str = "_OTHER";

/// Duration of a request to a server.
pub const CLIENT_OPERATION_DURATION: &str = "mcp.client.operation.duration";
/// Duration of a request of a client.
pub const SERVER_OPERATION_DURATION: &str = "mcp.server.operation.duration";
/// Duration of a session with a server.
pub const CLIENT_SESSION_DURATION: &str = "mcp.client.session.duration";
/// Duration of a session of a client.
pub const SERVER_SESSION_DURATION: &str = "mcp.server.session.duration";

/// Upper bounds of the buckets of all four histograms, in seconds.
pub const DURATION_BOUNDS: [f64; 14] = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0];
