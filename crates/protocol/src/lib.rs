//! The text of the protocol: JSON-RPC messages, error codes, methods, header names, eras and versions, server-sent
//! events. Each is defined here and nowhere else. Nothing here does I/O or reads a clock.
//!
//! The error codes and methods come from `rmcp`, as do the types of the handshake, which `mcp-satellite-session` uses.
//! These parts are written by hand:
//!
//! | part | reason |
//! | --- | --- |
//! | [`rpc`] | the types of `rmcp` lose unknown members, large numbers and the order of members, and parse each message completely; a relay replaces an id and passes on the rest |
//! | [`body`] | a body can be a batch, or an error without an id: `rmcp` rejects both |
//! | [`header`] | the names in `rmcp` have capitals, and `http::HeaderName::from_static` requires lower case |
//! | [`header_params`] | the functions of `rmcp` are private, and need the arguments as parsed values |
//! | [`era`] | the versions in `rmcp` cannot be read in constants; a test compares them |
//! | [`meta`] | the names in `rmcp` are private |
//! | [`sse`] | `sse-stream`, which `rmcp` uses, has no limit, and an idle stream holds a buffer |

#![forbid(unsafe_code)]

pub mod body;
pub mod era;
pub mod error_code;
pub mod header;
pub mod header_params;
pub mod meta;
pub mod method;
pub mod rpc;
pub mod sse;
pub mod trace;
