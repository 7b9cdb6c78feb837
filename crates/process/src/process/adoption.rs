//! Servers that an earlier satellite below the same keeper has left running.

use std::path::PathBuf;
use std::sync::Arc;

use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::session_description::SessionDescription;
use mcp_satellite_actors::seam::{AdoptedProcess, ProcessLink};
use serde::{Deserialize, Serialize};

use super::fork::StartedProcess;
use super::group::ProcessGroup;
use super::launch::Confinement;
use super::ledger::StartedRow;
use super::limits::ResourceLimits;
use super::run_mark::RunMark;
use super::tree::ProcessTree;
use super::{ProcessLauncher, ServerLabel, TreeGuard};
use crate::keeper::run_client::{LeftRun, RunClient};

/// Part of the description of a session that rebuilds the process tree of its server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct ProcessRecord {
    /// Name of the instance.
    name: String,
    identity: String,
    cgroup: Option<PathBuf>,
    sandbox: Option<SandboxRecord>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct SandboxRecord {
    name: String,
    depth: usize,
    limits: ResourceLimits,
}

impl ProcessRecord {
    pub(super) fn new(tree: &ProcessTree, label: &ServerLabel) -> Self {
        let sandbox = |Confinement { sandbox, depth, limits, .. }: Confinement| {
            let name = sandbox.to_owned();
            SandboxRecord { name, depth, limits }
        };
        Self {
            name: label.name.clone(),
            identity: label.identity.clone(),
            cgroup: tree.cgroup_path().map(PathBuf::from),
            sandbox: tree.confinement().map(sandbox),
        }
    }

    /// Returns the confinement of a server that runs.
    fn confinement(&self, known: &[&'static str]) -> Option<Confinement> {
        let SandboxRecord { name, depth, limits } = self.sandbox.as_ref()?;
        let sandbox = known.iter().find(|known| *known == name).copied().unwrap_or("unknown");
        // The last two are of use at the start only.
        Some(Confinement { sandbox, depth: *depth, limits: *limits, namespaces_below: 0, is_own_failure: |_, _| false })
    }
}

/// A run that an earlier satellite has left, with the readable part of its description.
pub(crate) struct DescribedRun {
    left: LeftRun,
    session: Option<(SessionDescription, ProcessRecord)>,
}

impl DescribedRun {
    /// Returns all runs that earlier satellites of this keeper have left, once.
    pub(crate) fn take_all() -> Vec<Self> {
        RunClient::current().map(|runs| runs.take_left()).unwrap_or_default().into_iter().map(Self::read).collect()
    }

    fn read(left: LeftRun) -> Self {
        let session = left.description.as_deref().and_then(|description| {
            let session = SessionDescription::from_bytes(description);
            let session = session.inspect_err(|error| {
                tracing::warn!(run = left.held.run(), pid = left.pid, %error, "the server cannot be adopted");
            });
            let session = session.ok()?;
            let record = serde_json::from_value(session.process.clone()).ok()?;
            Some((session, record))
        });
        Self { left, session }
    }

    pub(super) fn ledger_row(&self) -> StartedRow {
        let LeftRun { held, pid, start_time, .. } = &self.left;
        let name = self.session.as_ref().map(|(_, record)| record.name.clone());
        let instance = name.unwrap_or_else(|| "unknown".to_owned());
        StartedRow { run: held.run(), instance, pid: *pid, start_time: *start_time }
    }
}

/// Running server of an earlier satellite. Its processes are killed when this is dropped.
pub(crate) struct LeftServer {
    pub(crate) instance: InstanceId,
    /// Fingerprint of the configuration with which it was started.
    pub(crate) config: String,
    session: SessionDescription,
    first_id: u64,
    started: StartedProcess,
    label: ServerLabel,
}

impl LeftServer {
    pub(crate) fn has_ended(&self) -> bool {
        self.started.tree.end().is_some()
    }

    pub(crate) fn tree(&self) -> LeftTree {
        LeftTree(Arc::clone(&self.started.tree))
    }
}

/// Process tree of a server that an earlier satellite has left.
#[derive(Clone)]
pub(crate) struct LeftTree(Arc<ProcessTree>);

impl LeftTree {
    pub(crate) fn is_gone(&self) -> bool {
        self.0.is_reaped()
    }
}

impl ProcessLauncher {
    /// Takes over the processes of a run. Returns `None` if it cannot be adopted: its processes are then killed.
    ///
    /// `sandboxes` are the names of all sandboxes.
    pub(crate) fn take_over(&self, run: DescribedRun, sandboxes: &[&'static str]) -> Option<LeftServer> {
        let DescribedRun { left, session } = run;
        let LeftRun { held, pid, start_time, first_id, stdin, stdout, stderr, description: _ } = left;
        let run = held.run();
        let opened = ProcessGroup::adopt(pid, start_time, held);
        let failed =
            |error: &std::io::Error| tracing::warn!(run, pid, %error, "cannot take over the process of a server");
        let group = opened.inspect_err(failed).ok()?;
        let confinement = session.as_ref().and_then(|(_, record)| record.confinement(sandboxes));
        let mark = RunMark::new(self.trees.satellite_id(), run);
        let cgroup = self.trees.find_cgroup(run);
        let tree = Arc::new(ProcessTree::new(group, run, cgroup, mark, confinement, Arc::clone(&self.trees.ledger)));
        self.trees.insert(&tree);
        let (trees, scanner, fork) = (Arc::clone(&self.trees), self.scanner.clone(), self.fork.clone());
        // Dropped, and the processes killed, if one of the following conditions is not met.
        let guard = TreeGuard { tree: Arc::clone(&tree), trees, scanner, _fork: fork };
        let (session, record) = session?;
        let stdin = stdin?;
        let is_same = tree.end().is_none() && record.cgroup.as_deref() == tree.cgroup_path();
        if !is_same || !tree.find_sandboxed_server().is_ok_and(|found| found) {
            return None;
        }
        let (instance, config) = (session.instance(), session.config.clone()?);
        let label = ServerLabel { name: record.name, identity: record.identity, config: Some(config.clone()) };
        let started = StartedProcess { tree, guard, stdin, stdout, stderr };
        Some(LeftServer { instance, config, session, first_id, started, label })
    }

    /// Returns a server for the instance that continues its session.
    ///
    /// # Errors
    /// No descriptor is left. The processes are then killed.
    pub(crate) fn adopt(&self, server: LeftServer) -> std::io::Result<AdoptedProcess> {
        let LeftServer { session, first_id, started, label, .. } = server;
        let link: ProcessLink = self.link(started, label, Vec::new())?;
        Ok(AdoptedProcess { link, session, first_id })
    }

    /// Waits until all processes of a tree that was killed are gone.
    pub(crate) async fn wait_gone(&self, tree: &LeftTree) {
        self.scanner.wait_all(&tree.0).await;
    }
}
