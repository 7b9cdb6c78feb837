//! The whole runtime with real processes in real time: every way in which a server starts, responds, misbehaves and
//! ends. Each test leaves no process, no descriptor and no thread.
//!
//! The tests run one at a time, because they count the descriptors and children of this process. They assert no
//! durations and do not sleep: they wait for states, with a generous time limit.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod calls;
mod dormancy;
mod ends;
mod orphans;
mod output;
#[path = "../real_servers/mod.rs"]
mod real_servers;
mod servers;
mod starts;
mod support;
