//! Lines to remote servers, held against a scripted peer that speaks HTTP byte by byte, over loopback.
#![cfg(feature = "remote")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod failures;
mod legacy;
mod listening;
mod peer;
mod requests;
mod stateless;
mod support;
mod surroundings;
