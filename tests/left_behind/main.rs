//! Nothing that a server started outlives it, however it or the satellite ends, and nothing else is hit: the built binary
//! with servers that do not want to go, by every mechanism that this machine has.
//!
//! `LEFT_BEHIND_RUNS` sets how often (once by default). A sandbox that is missing takes no part, and the test that says so
//! is ignored unless `MCP_SANDBOX=required`.

#![cfg(all(feature = "cli", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod ends;
mod flood;
mod mechanism;
mod process;
mod scene;
mod shutdown;
mod strangers;
#[allow(dead_code, reason = "shared with the tests of the command line, which need all of it")]
#[path = "../cli/support.rs"]
mod support;
