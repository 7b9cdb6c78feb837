//! Load harness: it runs a fleet of simulated or real servers under the real runtime. One seed determines all calls and
//! faults, and invariants are checked during the run. Operators use it to size machines and to test supervision; the
//! project uses it to find its own defects.
//!
//! In virtual time nothing may wait for the operating system: every `select!` is biased, and the number of permits is
//! the same on every machine.
#![cfg_attr(not(test), forbid(unsafe_code))]
#![allow(missing_docs, reason = "the embedding API documents its own items; this crate is internal")]

#[cfg(test)]
mod broken_runtimes;
pub mod checks;
mod drive;
mod fleet;
mod inject;
pub mod measure;
mod panics;
pub mod plan;
pub mod random;
mod recorder;
mod recovery_log;
pub mod report;
mod run;
pub mod scenario;
pub mod setup;
mod test_hooks;
#[cfg(test)]
mod tests;
pub mod types;
mod watch;
mod world;

pub use panics::silence_deliberate_panics;
pub use run::{LoadError, build_runtime, run};
pub use test_hooks::TestHooks;
