//! Clients and remote servers that others have written, in their own processes.
//!
//! `.ci/install-servers` installs them. Without them the tests are ignored unless `MCP_REAL_SERVERS=required`.

#![cfg(all(feature = "cli", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod clients;
mod remote;
