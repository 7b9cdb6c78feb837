//! Servers of an earlier satellite, until an instance adopts them.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use mcp_satellite_actors::model::ids::InstanceId;

use super::process::{LeftServer, LeftTree};

/// Numbers of servers that an earlier satellite has left running.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AdoptionCounts {
    /// Servers that an instance has adopted.
    pub adopted: usize,
    /// Servers that were ended: their instance is stopped, was removed or has another configuration, or the session cannot be
    /// continued.
    pub ended: usize,
}

pub(super) struct LeftServers(Mutex<LeftServersState>);

#[derive(Default)]
struct LeftServersState {
    all: usize,
    adopted: usize,
    unclaimed: HashMap<InstanceId, Vec<LeftServer>>,
    // Killed and not yet gone.
    ending: HashMap<InstanceId, Vec<LeftTree>>,
}

impl LeftServersState {
    /// Kills a server that nobody adopts.
    fn end(&mut self, id: InstanceId, server: LeftServer) {
        self.ending.entry(id).or_default().push(server.tree());
        drop(server);
    }
}

impl LeftServers {
    /// `all` also counts the servers that cannot be adopted and were killed.
    pub(super) fn new(all: usize, servers: impl Iterator<Item = LeftServer>) -> Self {
        let mut state = LeftServersState { all, ..LeftServersState::default() };
        for server in servers {
            state.unclaimed.entry(server.instance.clone()).or_default().push(server);
        }
        Self(Mutex::new(state))
    }

    fn state(&self) -> MutexGuard<'_, LeftServersState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if a server of this instance runs with this configuration.
    pub(super) fn contains(&self, id: &InstanceId, config: impl FnOnce() -> Option<String>) -> bool {
        let state = self.state();
        let Some(servers) = state.unclaimed.get(id) else { return false };
        config().is_some_and(|config| servers.iter().any(|server| server.config == config && !server.has_ended()))
    }

    /// Returns the server of this instance with this configuration, at most once.
    pub(super) fn claim(&self, id: &InstanceId, config: impl FnOnce() -> Option<String>) -> Option<LeftServer> {
        let mut state = self.state();
        let servers = state.unclaimed.get_mut(id)?;
        let config = config()?;
        let index = servers.iter().position(|server| server.config == config && !server.has_ended())?;
        let server = servers.remove(index);
        state.adopted += 1;
        Some(server)
    }

    /// Kills the servers of this instance that were not adopted. Returns the trees that must be gone before another server of
    /// the instance starts.
    pub(super) fn release(&self, id: &InstanceId) -> Vec<LeftTree> {
        let mut state = self.state();
        for server in state.unclaimed.remove(id).unwrap_or_default() {
            state.end(id.clone(), server);
        }
        state.ending.remove(id).unwrap_or_default()
    }

    /// Kills all servers that were not adopted.
    pub(super) fn drop_unclaimed(&self) -> AdoptionCounts {
        let mut state = self.state();
        for (id, servers) in std::mem::take(&mut state.unclaimed) {
            for server in servers {
                state.end(id.clone(), server);
            }
        }
        for trees in state.ending.values_mut() {
            trees.retain(|tree| !tree.is_gone());
        }
        AdoptionCounts { adopted: state.adopted, ended: state.all - state.adopted }
    }

    /// Notes a server whose adoption has failed and that was killed.
    pub(super) fn note_ending(&self, id: &InstanceId, tree: LeftTree) {
        let mut state = self.state();
        state.adopted -= 1;
        state.ending.entry(id.clone()).or_default().push(tree);
    }
}
