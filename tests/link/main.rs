//! The link to a backend: real HTTP to a backend that responds correctly or not, and simulated servers whose statuses
//! show the effect of its commands.

#![cfg(all(feature = "cli", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod binary;
mod commands;
mod configuration;
mod peer;
mod registration;
mod strange;
#[path = "../cli/support.rs"]
#[allow(dead_code, reason = "shared with the tests of the command line")]
mod support;
mod yard;
