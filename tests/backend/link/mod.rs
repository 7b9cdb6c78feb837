//! The link to a backend: real HTTP to a backend that responds correctly or not, and simulated servers whose statuses
//! show the effect of its commands.

mod binary;
mod commands;
mod configuration;
mod fixture;
mod fleet;
mod peer;
mod registration;
mod strange;
