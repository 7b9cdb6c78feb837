//! The load harness: a fleet of simulated or real servers beneath the real runtime, calls and faults drawn from one seed,
//! and promises that are checked while it runs. Whoever runs fleets sizes machines with it and proves that their
//! supervision holds; we find our own faults with it.

mod books;
#[cfg(test)]
mod broken;
pub mod chance;
pub mod checks;
mod drive;
mod fleet;
mod inject;
pub mod measure;
mod panics;
pub mod plan;
mod recorder;
pub mod report;
mod run;
pub mod scenario;
mod seams;
#[cfg(test)]
mod tests;
pub mod types;
mod watch;
mod world;

pub use panics::hush;
pub use run::{LoadError, run, threads};
pub(crate) use seams::Seams;
