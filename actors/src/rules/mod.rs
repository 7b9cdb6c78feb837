//! Decision logic as plain values and functions. Times and run numbers are arguments. Nothing here waits, spawns, logs
//! or reads a clock, so every rule is testable without a runtime.

pub mod health;
pub mod idle;
pub mod jitter;
pub mod memory;
pub mod outbox;
pub mod output;
pub mod permits;
pub mod request_log;
pub mod restart;
pub mod retry;
pub mod slot;
pub mod team_budget;
pub mod watchdog;
