//! The whole tree — Root, teams, workers, registry, batcher — over simulated servers, in paused time: hours pass in
//! milliseconds, and at the end of each test nothing may be left.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on says so by panicking")]

mod calls;
mod control;
mod embedding;
mod events;
mod panics;
mod restart;
mod statuses;
mod storm;
mod support;
mod watchdog;
