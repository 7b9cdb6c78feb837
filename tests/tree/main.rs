//! The whole actor tree — root, teams, workers, registry, batcher — over simulated servers in paused time: hours pass
//! in milliseconds. Each test checks at its end that no server, connection or task is left.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(clippy::float_cmp, reason = "virtual time is rounded to tenths, which compare exactly with tenths")]

mod adoption;
mod attention;
mod calls;
mod control;
mod discovery;
mod dormancy;
mod embedding;
mod events;
mod handles;
mod lazy;
mod memory;
mod panics;
mod pressure;
mod relay;
mod remote_backoff;
mod remote_call_fates;
mod remote_credentials;
mod remote_edges;
mod remote_eras;
mod remote_first;
mod remote_force;
mod remote_health;
mod remote_loss;
mod remote_panics;
mod remote_recovery;
mod remote_removal;
mod remote_storm;
mod remote_support;
mod requests;
mod restart;
mod rolling;
mod sim;
mod sim_remote;
mod statuses;
mod storm;
mod watchdog;
