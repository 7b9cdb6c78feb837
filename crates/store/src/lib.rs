//! Stored data: the journal of events, logs and states, the delivery of events from it, the state database, and sinks to
//! files, standard output and HTTP.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "the embedding API documents its own items; this crate is internal")]

#[cfg(feature = "journal")]
pub mod delivery;
#[cfg(feature = "journal")]
pub mod journal;
pub mod sink;
#[cfg(feature = "journal")]
pub mod state;
