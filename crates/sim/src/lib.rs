//! A simulated MCP server: one script in three forms.
//!
//! ```text
//!            Script ──> Server (which answer when: no I/O, time is an argument)
//!                          │
//!                        Engine (one task: reads, writes, one timer, signals)
//!                 ┌────────┴─────────┐
//!           SimConnector        serve_stdio              SimConnector, ServerKind::Rmcp
//!      in process, 10,000 at   a real process with      the same tools served by rmcp, as
//!      once, in paused time    real faults              the baseline of the benches
//! ```
//!
//! A remote server has the same answers behind a line of messages instead of pipes (`remote`), and an endpoint that
//! outlives its sessions (`endpoint`) and is changed by tests.
//!
//! The first two share the engine, so that results of a fleet in paused time hold for processes. All time is tokio's,
//! all random numbers derive from the script's seed.
#![deny(unsafe_code)]
#![allow(missing_docs, reason = "the embedding API documents its own items; this crate is internal")]

mod connector;
mod control;
mod endpoint;
mod engine;
#[cfg(feature = "cli")]
mod http;
mod keeper;
mod process;
mod registry;
mod remote;
#[cfg(feature = "rmcp")]
mod rmcp_server;
mod script;
mod server;
mod stateless;
mod tools;
mod wire;

pub use connector::{ServerKind, SimConnector, SimHandle, SimPlan};
pub use endpoint::{SimBehavior, SimHandshake, SimRemote, SimSessionCounts};
#[cfg(feature = "cli")]
pub use http::{AnswerFormat, HttpOptions, HttpStats, serve_http};
pub use process::serve_stdio;
pub use script::{Grandchild, SimScript, SpokenEras};
