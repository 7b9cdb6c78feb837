//! Remote servers that misbehave in every way that HTTP allows, on real sockets in real time. The server is the
//! scripted `peer`.
//!
//! The tests assert no durations and do not sleep: they wait for states, with a generous time limit.
#![cfg(feature = "remote")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod credentials;
mod force;
mod health;
mod line;
mod lists;
mod misbehaviour_table;
mod peer;
mod peer_tests;
mod removal;
mod retries;
mod streams;
mod support;
