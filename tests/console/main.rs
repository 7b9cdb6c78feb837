//! The console in a real browser: a headless Chromium looks at the pages of a real satellite, or at made-up ones.
//!
//! The tests assert no durations: they wait for states, and report the times that they measure.

#![cfg(all(feature = "cli", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(clippy::print_stdout, reason = "measured times are for people")]

mod accessibility;
mod backend;
mod browser;
mod faults;
mod hostile;
mod large;
mod live;
mod made_up;
mod pages;
mod playground;
mod screenshots;
mod streams;
mod support;

use std::path::PathBuf;

/// The binary under test.
const SATELLITE: &str = env!("CARGO_BIN_EXE_satellite");

/// Returns the directory of the tools that `.ci/install-console-tools` installs.
fn tools() -> PathBuf {
    let default = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("target/console-tools");
    std::env::var_os("MCP_CONSOLE_DIR").map_or_else(default, PathBuf::from)
}
