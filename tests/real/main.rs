//! The whole runtime with real processes in real time: every way in which a server starts, responds, misbehaves and
//! ends. Each test leaves no process, no descriptor and no thread.
//!
//! Each test runs in a process of its own, because it counts the descriptors and children of its process. The tests
//! assert no durations and do not sleep: they wait for states, with a generous time limit.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod calls;
mod dormancy;
mod ends;
mod orphans;
mod output;
mod servers;
mod starts;
mod support;
mod usage;
