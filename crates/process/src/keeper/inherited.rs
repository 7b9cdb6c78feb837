//! State that a satellite inherits from its keeper by the fork: the identity of the keeper, and the runs of earlier satellites.

use std::fs::File;
use std::os::fd::OwnedFd;

use super::runs::KeptRun;

/// The keeper above a satellite. Servers are its children, so cgroups, marks and ledger are named after it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KeeperIdentity {
    pub(crate) pid: u32,
    /// Start time in clock ticks since boot.
    pub(crate) start_time: u64,
    /// Random id, contained in the marks of all servers.
    pub(crate) id: String,
    /// Number of the first run that this satellite may start.
    pub(crate) first_run: u64,
}

/// Descriptors of a run for the next satellite.
pub(super) struct RunDescriptors {
    /// Write end of stdin, until the satellite closes it.
    pub(super) stdin: Option<OwnedFd>,
    pub(super) stdout: OwnedFd,
    pub(super) stderr: OwnedFd,
    /// Description of the session. It exists after the handshake.
    pub(super) description: Option<OwnedFd>,
}

impl RunDescriptors {
    /// Returns `None` if descriptors are missing: they did not fit into the limit of this process.
    pub(super) fn new(descriptors: Vec<OwnedFd>) -> Option<Self> {
        let [stdin, stdout, stderr] = descriptors.try_into().ok()?;
        Some(Self { stdin: Some(stdin), stdout, stderr, description: None })
    }
}

/// Runs of earlier satellites and the flags of incomplete lines, which a satellite inherits by its fork.
pub(super) struct InheritedRuns {
    pub(super) runs: Vec<(KeptRun, RunDescriptors)>,
    pub(super) open_lines: File,
}
