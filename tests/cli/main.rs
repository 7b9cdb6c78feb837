//! End-to-end tests of every command of the command line: the built binary, real servers, real signals.

#![cfg(all(feature = "cli", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod background;
mod call;
mod check;
mod configure;
mod connect;
mod control;
mod data_dir;
mod demo;
mod disk;
mod doctor;
mod dormancy;
mod endpoint;
mod events;
mod fixture_share;
mod fleet_edits;
mod help;
mod import;
mod journal_storm;
mod limits;
mod load;
mod mcp;
mod memory;
mod oauth;
mod peer;
mod reload;
mod remote;
mod run;
mod secrets;
mod service_manager;
mod sim_server;
mod sim_server_http;
mod status;
mod stdio;
mod terminal;
mod token;
mod watch;

/// The binary under test.
const SATELLITE: &str = env!("CARGO_BIN_EXE_satellite");
