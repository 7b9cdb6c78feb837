//! Settings of a run.

use std::path::PathBuf;

use super::random::RunSeed;
use super::scenario::Scenario;
use super::test_hooks::TestHooks;
use super::types::ServerEnvironment;

pub struct RunSetup {
    pub scenario: Scenario,
    /// Seed of all random decisions.
    pub seed: RunSeed,
    pub mode: ServerEnvironment,
    /// True if calls go through the MCP endpoint.
    pub gateway: bool,
    /// Path of the `satellite` executable that runs as a real server.
    pub program: PathBuf,
    /// Command that repeats the run.
    pub repeat: String,
    /// File to which each event is written.
    pub trace: Option<PathBuf>,
    pub hooks: TestHooks,
}
