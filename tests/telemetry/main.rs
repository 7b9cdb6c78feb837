//! Metrics and traces of the built binary: a receiver on loopback decodes what it exports, and a real Prometheus reads
//! what it exposes.
//!
//! `.ci/install-console-tools` installs Prometheus; the tests that need it are ignored without it unless
//! `MCP_CONSOLE=required`.

#![cfg(all(feature = "cli", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod allocations;
mod convention;
mod exports;
mod fixture;
mod metrics;
mod own_requests;
mod prometheus;
mod receiver;
mod traces;

/// The binary under test.
const SATELLITE: &str = env!("CARGO_BIN_EXE_satellite");
