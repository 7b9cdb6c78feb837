//! Bridge from MCP over stdin and stdout to the HTTP endpoint of a running satellite. The text of every message passes
//! unchanged in both directions.
//!
//! ```text
//! stdin ──► input ──► bridge ──► request (one task each) ──► http ──► satellite
//! stdout ◄── output ◄────────────────┴── session_stream ◄─────┘
//!                                    link: finds the satellite, opens the session again
//! ```
//!
//! `server_requests` keeps the ids of the satellite's requests apart that belong to different sessions.
//!
//! Requests run concurrently. Notifications and responses of the client are sent in order, before the next message is
//! read. If the satellite ends, `link` connects to the next one and opens a session with the client's own
//! `initialize`; requests in flight fail with their fate, and new ones wait.
//!
//! Memory is bounded: a message has a maximum size, requests in flight share a budget, each stream buffers a small
//! message, and only one stream at a time buffers a large one. Nothing is queued for a client that does not read: the
//! streams of the satellite wait instead.

#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "the embedding API documents its own items; this crate is internal")]

mod bridge;
mod certificate;
mod failure;
mod headers;
mod http;
mod input;
mod link;
mod output;
mod request;
mod server_requests;
mod session_stream;

pub use bridge::{BridgeSettings, run};
pub use http::SatelliteAddress;
pub use link::{LocateError, SatelliteLocator};
