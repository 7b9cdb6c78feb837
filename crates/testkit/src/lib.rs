//! Shared parts of the tests: event sinks, connectors, simulated fleets, the built binary in a temporary directory, and
//! waiting for states. A dev-dependency only; no part of the product depends on it.
//!
//! | module | contents |
//! | --- | --- |
//! | [`home`] | a temporary home in which the built binary runs, and the check that it leaves no process |
//! | [`fleet`] | the actor tree over simulated servers, with records of starts and events |
//! | [`pipe`], [`scripted_servers`] | servers that a test writes itself, behind a pipe |
//! | [`sink`], [`spec`] | sinks that record events, and configurations of instances |
//! | [`wait`] | waiting for states; a time limit only bounds a failure |
//! | [`certificate`], [`port`], [`process`], [`signals`], [`installed`] | resources of the machine |
#![allow(missing_docs, reason = "names of fixtures say enough")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(clippy::new_without_default, clippy::return_self_not_must_use, reason = "fixtures are made to be used")]

pub mod certificate;
pub mod fleet;
pub mod home;
pub mod installed;
pub mod pipe;
pub mod port;
pub mod process;
pub mod scripted_servers;
pub mod signals;
pub mod sink;
pub mod spec;
pub mod wait;
