//! The reference backend over real HTTP: requests, rejections and storage.
#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod bodies;
mod commands;
mod config;
mod console;
mod events;
mod fleet;
mod heartbeat;
mod instances;
mod isolation;
#[cfg(target_os = "linux")]
mod link;
mod migration;
mod process;
mod registration;
mod restart;
mod schemas;
mod support;
mod validators;

/// The binary under test.
const SATELLITE: &str = env!("CARGO_BIN_EXE_satellite");
