//! Remote servers with OAuth: the built binary, an authorization server and a protected MCP server, all on loopback.

#![cfg(all(feature = "cli", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod authority;
mod first;
mod machines;
mod people;
mod protected;
mod renewal;
mod secrets;
mod served;
#[allow(dead_code, reason = "shared with the tests of the command line")]
#[path = "../cli/support.rs"]
mod support;
mod yard;
