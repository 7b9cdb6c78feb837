//! End-to-end tests of every command of the command line: the built binary, real servers, real signals.

#![cfg(all(feature = "cli", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod call;
mod check;
mod configure;
mod control;
mod data_dir;
mod demo;
mod disk;
mod dormancy;
mod endpoint;
mod events;
mod help;
mod limits;
mod load;
#[allow(dead_code, reason = "shared with the tests of secrets")]
mod mcp;
mod memory;
mod peer;
mod reload;
mod remote;
mod run;
mod sim_server;
mod sim_server_http;
mod status;
#[allow(dead_code, reason = "shared with the tests of what is left behind")]
mod support;
mod terminal;
mod token;
mod watch;
