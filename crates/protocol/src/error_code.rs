//! Error codes of JSON-RPC and MCP.

use rmcp::model::ErrorCode;

/// The text is not JSON.
pub const PARSE_ERROR: i64 = ErrorCode::PARSE_ERROR.0 as i64;
/// The text is JSON, but not a valid message.
pub const INVALID_REQUEST: i64 = ErrorCode::INVALID_REQUEST.0 as i64;
/// The receiver does not support the method.
pub const METHOD_NOT_FOUND: i64 = ErrorCode::METHOD_NOT_FOUND.0 as i64;
/// The params are invalid.
pub const INVALID_PARAMS: i64 = ErrorCode::INVALID_PARAMS.0 as i64;
/// The receiver failed.
pub const INTERNAL_ERROR: i64 = ErrorCode::INTERNAL_ERROR.0 as i64;
/// Any other error of the receiver: the first code that JSON-RPC leaves to implementations.
pub const SERVER_ERROR: i64 = -32000;
/// The resource does not exist. Only up to version 2025-11-25.
pub const RESOURCE_NOT_FOUND: i64 = ErrorCode::RESOURCE_NOT_FOUND.0 as i64;
/// The user must open a URL first. Only in version 2025-11-25.
pub const URL_ELICITATION_REQUIRED: i64 = -32042;
/// The headers differ from the message. Since version 2026-07-28.
pub const HEADER_MISMATCH: i64 = ErrorCode::HEADER_MISMATCH.0 as i64;
/// The client lacks a capability that the request needs. Since version 2026-07-28.
pub const MISSING_CAPABILITY: i64 = ErrorCode::MISSING_REQUIRED_CLIENT_CAPABILITY.0 as i64;
/// The receiver does not support the version of the request. Since version 2026-07-28.
pub const UNSUPPORTED_VERSION: i64 = ErrorCode::UNSUPPORTED_PROTOCOL_VERSION.0 as i64;
