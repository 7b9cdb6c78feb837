//! Names of members of `_meta` that the protocol defines.

/// Protocol version of a request.
pub const VERSION: &str = "io.modelcontextprotocol/protocolVersion";
/// Identity of the client that sends a request.
pub const CLIENT_INFO: &str = "io.modelcontextprotocol/clientInfo";
/// Capabilities of the client that sends a request.
pub const CAPABILITIES: &str = "io.modelcontextprotocol/clientCapabilities";
/// Minimum level of log messages on behalf of a request.
pub const LOG_LEVEL: &str = "io.modelcontextprotocol/logLevel";
/// Identity of the server, in the result of `server/discover`.
pub const SERVER_INFO: &str = "io.modelcontextprotocol/serverInfo";
/// Id of the `subscriptions/listen` request to whose stream a notification belongs.
pub const SUBSCRIPTION_ID: &str = "io.modelcontextprotocol/subscriptionId";
/// Trace context of a request (W3C Trace Context).
pub const TRACEPARENT: &str = "traceparent";
