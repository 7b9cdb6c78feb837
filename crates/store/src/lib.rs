//! Stored data: the journal of events, logs and states, the delivery of events from it, sinks to files, standard output
//! and HTTP, and the state database with the stores in it.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "the embedding API documents its own items; this crate is internal")]

#[cfg(feature = "state")]
pub mod catalogue_cache;
#[cfg(feature = "journal")]
pub mod delivery;
#[cfg(feature = "journal")]
mod durations;
#[cfg(feature = "state")]
pub mod erasures;
#[cfg(feature = "state")]
pub mod identity;
#[cfg(feature = "journal")]
pub mod journal;
#[cfg(feature = "state")]
pub mod memos;
pub mod sink;
#[cfg(feature = "state")]
pub mod state;
#[cfg(feature = "state")]
pub mod values;
