//! State of a simulated process as an operating system would have it: whether it exists, how it ended, and which
//! signals it got.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;

use futures::task::AtomicWaker;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::seam::ProcessEnd;
use tokio::sync::Notify;

use super::registry::SimRegistry;
use super::script::{Grandchild, SimScript};

const SIGKILL: i32 = 9;
const SIGTERM: i32 = 15;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OnSigterm {
    Default,
    Handle,
    Ignore,
}

impl OnSigterm {
    pub(super) fn from_script(script: &SimScript) -> Self {
        match (script.ignore_sigterm, script.sigterm_delay) {
            (true, _) => Self::Ignore,
            (false, Some(_)) => Self::Handle,
            (false, None) => Self::Default,
        }
    }
}

pub(super) struct SimProcessState {
    on_sigterm: OnSigterm,
    state: Mutex<SimControlState>,
    server: AtomicWaker,
    changed: Notify,
    // Registry from which the process is removed once it is gone.
    registry: Option<(Weak<SimRegistry>, InstanceId)>,
}

#[derive(Default)]
struct SimControlState {
    end: Option<ProcessEnd>,
    grandchild: Option<Grandchild>,
    sigterm: bool,
    frozen: bool,
}

impl SimControlState {
    fn is_gone(&self) -> bool {
        self.end.is_some() && self.grandchild.is_none()
    }
}

impl SimProcessState {
    pub(super) fn for_simulation(script: &SimScript, census: Weak<SimRegistry>, id: InstanceId) -> Self {
        let state = SimControlState { grandchild: script.grandchild, ..SimControlState::default() };
        Self { registry: Some((census, id)), state: Mutex::new(state), ..Self::for_process(script) }
    }

    /// Creates the control of this process, which only reports signals to its engine.
    pub(super) fn for_process(script: &SimScript) -> Self {
        Self {
            on_sigterm: OnSigterm::from_script(script),
            state: Mutex::default(),
            server: AtomicWaker::new(),
            changed: Notify::new(),
            registry: None,
        }
    }

    pub(super) fn register(&self, waker: &Waker) {
        self.server.register(waker);
    }

    pub(super) fn end(&self) -> Option<ProcessEnd> {
        self.state().end
    }

    pub(super) fn is_frozen(&self) -> bool {
        self.state().frozen
    }

    pub(super) fn take_sigterm(&self) -> bool {
        std::mem::take(&mut self.state().sigterm)
    }

    /// Records the end of the leader; only the first one counts.
    pub(super) fn finish(&self, end: ProcessEnd) {
        self.change(|state| {
            state.end.get_or_insert(end);
        });
    }

    pub(super) fn freeze(&self) {
        self.change(|state| state.frozen = true);
    }

    pub(super) fn terminate(&self) {
        self.change(|state| {
            if state.grandchild == Some(Grandchild::Plain) {
                state.grandchild = None;
            }
            match self.on_sigterm {
                OnSigterm::Default => {
                    state.end.get_or_insert(ProcessEnd { code: None, signal: Some(SIGTERM) });
                }
                OnSigterm::Handle => state.sigterm = true,
                OnSigterm::Ignore => {}
            }
        });
    }

    pub(super) fn kill(&self) {
        self.change(|state| {
            state.grandchild = None;
            state.end.get_or_insert(ProcessEnd { code: None, signal: Some(SIGKILL) });
        });
    }

    pub(super) async fn wait(&self) -> ProcessEnd {
        self.wait_for(|state| state.end).await
    }

    pub(super) async fn wait_all(&self) {
        self.wait_for(|state| state.is_gone().then_some(())).await;
    }

    #[cfg(feature = "rmcp")]
    pub(super) async fn wait_sigterm(&self) {
        self.wait_for(|state| state.sigterm.then_some(())).await;
    }

    async fn wait_for<T>(&self, found: impl Fn(&SimControlState) -> Option<T>) -> T {
        loop {
            // Created before the check, so that a change in between is not missed.
            let changed = self.changed.notified();
            if let Some(found) = found(&self.state()) {
                return found;
            }
            changed.await;
        }
    }

    fn change(&self, change: impl FnOnce(&mut SimControlState)) {
        let went = {
            let mut state = self.state();
            let before = state.is_gone();
            change(&mut state);
            !before && state.is_gone()
        };
        let census = self.registry.as_ref().filter(|_| went);
        if let Some((census, id)) = census.and_then(|(census, id)| Some((census.upgrade()?, id))) {
            census.remove(id, self);
        }
        self.server.wake();
        self.changed.notify_waiters();
    }

    fn state(&self) -> MutexGuard<'_, SimControlState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends the process if its task is dropped without a result, because the runtime shut down or the task panicked.
pub(super) struct TaskGuard(pub(super) Arc<SimProcessState>);

impl Drop for TaskGuard {
    fn drop(&mut self) {
        self.0.finish(ProcessEnd { code: None, signal: Some(SIGKILL) });
    }
}
