//! The whole runtime on real processes in real time: every way in which a server starts, answers, misbehaves and ends,
//! and that nothing of it is left afterwards, no process, no descriptor, no thread.
//!
//! Every test runs alone in this process, because descriptors and children are counted. Nothing here asserts how long
//! something took, and nothing sleeps for a state: states are waited for, and given up far beyond what they need.

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
