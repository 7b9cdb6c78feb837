//! Simulated keeper: it holds the pipes of simulated servers and the descriptions of their sessions, so that the next
//! satellite can adopt them after the death of the present one.
//!
//! A satellite that is killed drops nothing in reality. Its runtime in the same test does, later and in any order:
//! everything that a dead satellite still does has no effect.

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::session_description::SessionDescription;
use mcp_satellite_actors::model::spec::InstanceSpec;
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};

use super::control::SimProcessState;

/// Each satellite has this many ids for its requests to one server.
const IDS_BITS: u32 = 32;

#[derive(Default)]
pub(super) struct SimKeeper(Mutex<SimKeeperState>);

#[derive(Default)]
struct SimKeeperState {
    generation: u64,
    held: HashMap<InstanceId, Vec<HeldServer>>,
}

/// Server of a kept satellite. `attached` is the generation of the satellite that started or adopted it last.
pub(super) struct HeldServer {
    pub(super) spec: Arc<InstanceSpec>,
    pub(super) pid: u32,
    pub(super) control: Arc<SimProcessState>,
    pub(super) stdin: HeldPipe,
    pub(super) stdout: HeldPipe,
    pub(super) stderr: Option<HeldPipe>,
    description: Option<Vec<u8>>,
    attached: u64,
}

impl HeldServer {
    pub(super) fn new(
        spec: Arc<InstanceSpec>,
        pid: u32,
        control: Arc<SimProcessState>,
        [stdin, stdout]: [HeldPipe; 2],
        stderr: Option<HeldPipe>,
    ) -> Self {
        Self { spec, pid, control, stdin, stdout, stderr, description: None, attached: 0 }
    }

    fn is_adoptable(&self, spec: &InstanceSpec, generation: u64) -> bool {
        self.attached < generation
            && self.description.is_some()
            && self.control.end().is_none()
            && self.spec.can_continue_as(spec)
    }
}

impl SimKeeper {
    fn state(&self) -> MutexGuard<'_, SimKeeperState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the membership of a satellite that lives now.
    pub(super) fn attach(self: &Arc<Self>) -> SatelliteLife {
        SatelliteLife { keeper: Arc::clone(self), generation: self.state().generation }
    }

    /// Ends the present satellite. The next one begins without a server.
    pub(super) fn end_satellite(&self) {
        self.state().generation += 1;
    }

    pub(super) fn hold(&self, server: HeldServer) {
        let mut state = self.state();
        let attached = state.generation;
        let servers = state.held.entry(server.spec.id.clone()).or_default();
        servers.retain(|server| server.control.end().is_none());
        servers.push(HeldServer { attached, ..server });
    }

    pub(super) fn can_adopt(&self, spec: &InstanceSpec) -> bool {
        let state = self.state();
        let servers = state.held.get(&spec.id);
        servers.is_some_and(|servers| servers.iter().any(|server| server.is_adoptable(spec, state.generation)))
    }

    /// Attaches a server to the present satellite. Calls `adopt` with it, its session, and the id of the first request.
    pub(super) fn adopt<T>(
        &self,
        spec: &InstanceSpec,
        adopt: impl FnOnce(&HeldServer, SessionDescription, u64) -> T,
    ) -> Option<T> {
        let mut state = self.state();
        let generation = state.generation;
        let servers = state.held.get_mut(&spec.id)?;
        let server = servers.iter_mut().find(|server| server.is_adoptable(spec, generation))?;
        let session = SessionDescription::from_bytes(server.description.as_deref()?).ok()?;
        server.attached = generation;
        Some(adopt(server, session, generation << IDS_BITS))
    }

    /// Kills the servers of one instance, or of all, that the present satellite has neither started nor adopted. Returns
    /// them.
    pub(super) fn kill_unclaimed(&self, of: Option<&InstanceId>) -> Vec<Arc<SimProcessState>> {
        let state = self.state();
        let held = state.held.iter().filter(|(id, _)| of.is_none_or(|of| of == *id));
        let servers = held.flat_map(|(_, servers)| servers);
        let unclaimed = servers.filter(|server| server.attached < state.generation);
        let unclaimed: Vec<_> = unclaimed.map(|server| Arc::clone(&server.control)).collect();
        drop(state);
        for server in &unclaimed {
            server.kill();
        }
        unclaimed
    }
}

/// Life of one satellite, as its servers' handles see it.
#[derive(Clone)]
pub(super) struct SatelliteLife {
    keeper: Arc<SimKeeper>,
    generation: u64,
}

impl SatelliteLife {
    pub(super) fn is_over(&self) -> bool {
        self.keeper.state().generation != self.generation
    }

    pub(super) fn describe(&self, id: &InstanceId, pid: u32, session: &SessionDescription) {
        let mut state = self.keeper.state();
        if state.generation != self.generation {
            return;
        }
        let servers = state.held.get_mut(id).into_iter().flatten();
        servers.filter(|server| server.pid == pid).for_each(|server| server.description = session.to_bytes());
    }
}

/// End of a pipe, which is closed when it is taken out.
#[derive(Clone)]
pub(super) struct HeldPipe(Arc<Mutex<Option<DuplexStream>>>);

impl HeldPipe {
    pub(super) fn new(pipe: DuplexStream) -> Self {
        Self(Arc::new(Mutex::new(Some(pipe))))
    }

    fn pipe(&self) -> MutexGuard<'_, Option<DuplexStream>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// End of a pipe in a satellite. As a writer it closes the pipe when it is dropped; a reader leaves it to the keeper.
pub(super) struct AttachedPipe {
    pub(super) pipe: HeldPipe,
    pub(super) life: SatelliteLife,
    pub(super) closes: bool,
}

impl AttachedPipe {
    fn poll<T>(
        &self,
        closed: T,
        poll: impl FnOnce(Pin<&mut DuplexStream>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if self.life.is_over() {
            return Poll::Pending;
        }
        match &mut *self.pipe.pipe() {
            Some(pipe) => poll(Pin::new(pipe)),
            None => Poll::Ready(Ok(closed)),
        }
    }
}

impl AsyncRead for AttachedPipe {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.poll((), |pipe| pipe.poll_read(cx, buffer))
    }
}

impl AsyncWrite for AttachedPipe {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll(0, |pipe| pipe.poll_write(cx, bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll((), |pipe| pipe.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll((), |pipe| pipe.poll_shutdown(cx))
    }
}

impl Drop for AttachedPipe {
    fn drop(&mut self) {
        if self.closes && !self.life.is_over() {
            self.pipe.pipe().take();
        }
    }
}
