//! Remote servers that misbehave in every way that HTTP has: what the satellite makes of each, on real sockets in real
//! time. The other side is ours, too: see `peer`.
//!
//! Nothing here asserts how long something took, and nothing sleeps for a state: states are waited for, and given up far
//! beyond what they need.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod credentials;
mod ends;
mod force;
mod health;
mod itself;
mod lists;
mod peer;
mod retries;
mod streams;
mod support;
mod table;

use std::time::Duration;

/// When a state that was waited for is given up. Far beyond what a loaded machine needs.
const GIVE_UP: Duration = Duration::from_secs(60);
