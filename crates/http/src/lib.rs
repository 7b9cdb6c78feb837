//! HTTP: settings that all clients of the satellite share, and the server loop of the MCP endpoint and the reference
//! backend.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "the embedding API documents its own items; this crate is internal")]

pub mod client;
#[cfg(feature = "server")]
pub mod server;
pub mod tls;
