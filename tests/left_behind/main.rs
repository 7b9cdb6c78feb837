//! The processes of a server end with it, however the server or the satellite ends, and no other process is signalled.
//! The tests run the built binary with servers that resist, with every containment mechanism of this machine.
//!
//! `LEFT_BEHIND_RUNS` sets the number of repetitions (default 1). A missing sandbox is skipped; the test that requires
//! both sandboxes is then ignored unless `MCP_SANDBOX=required`.

#![cfg(all(feature = "cli", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod ends;
mod fixture;
mod flood;
mod hang;
mod idle_memory;
mod kept;
mod mechanism;
mod process;
mod restart;
mod shutdown;
mod spawn_helper;
mod starts;
mod strangers;

/// The binary under test.
const SATELLITE: &str = env!("CARGO_BIN_EXE_satellite");
