//! The HTTP API of the built binary: roles, tokens, logins, the description, streams, health.

#![cfg(all(feature = "cli", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod changes;
mod client;
mod control_plane;
mod counted;
mod description;
mod fixture;
mod listener;
mod lists;
mod logins;
mod positions;
mod recorded;
mod revoked;
mod roles;
mod streams;
mod unanswered;

/// The binary under test.
const SATELLITE: &str = env!("CARGO_BIN_EXE_satellite");
