//! Storage and delivery of events: the journal, the sinks, and the delivery between them.

#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod delivery;
mod journal;
mod sinks;
