//! The processes of a simulated connector.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mcp_satellite_actors::model::ids::InstanceId;

use super::control::SimProcessState;

#[derive(Default)]
pub(super) struct SimRegistry(Mutex<SimRegistryState>);

#[derive(Default)]
pub(super) struct SimRegistryState {
    pub(super) servers: HashMap<InstanceId, Vec<Arc<SimProcessState>>>,
    pub(super) alive: usize,
    pub(super) opened: u64,
    pub(super) overlaps: u64,
}

impl SimRegistry {
    pub(super) fn insert(&self, id: InstanceId, control: Arc<SimProcessState>) {
        let mut registry = self.state();
        registry.alive += 1;
        registry.opened += 1;
        let processes = registry.servers.entry(id).or_insert_with(|| Vec::with_capacity(1));
        processes.push(control);
        if processes.len() > 1 {
            registry.overlaps += 1;
        }
    }

    pub(super) fn remove(&self, id: &InstanceId, ended: &SimProcessState) {
        let mut registry = self.state();
        let Some(processes) = registry.servers.get_mut(id) else { return };
        processes.retain(|control| !std::ptr::eq(&raw const **control, ended));
        if processes.is_empty() {
            registry.servers.remove(id);
        }
        registry.alive -= 1;
    }

    pub(super) fn state(&self) -> MutexGuard<'_, SimRegistryState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
