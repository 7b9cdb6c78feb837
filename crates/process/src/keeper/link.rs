//! The satellite's side of its connection to the keeper.

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use tokio::sync::mpsc;

use super::messages::{DescriptorName, KeeperEvent, KeeperRequest, KeeperSocket, PIPED_SIGNALS, PreviousGeneration};
use crate::service_manager::ServiceManager;

type OrphanCleanup = Box<dyn FnOnce() + Send>;

static ORPHAN_CLEANUP: Mutex<Option<OrphanCleanup>> = Mutex::new(None);

/// Connection of the satellite to the processes above it.
pub struct KeeperLink {
    pub signals: mpsc::UnboundedReceiver<Signal>,
    pub service_manager: ServiceManager,
    pub keeper: KeeperClient,
    pub generation: SatelliteGeneration,
}

/// Number of a satellite below its keeper; the first one is 1.
#[derive(Debug, Clone)]
pub struct SatelliteGeneration {
    pub number: u32,
    /// The satellite that crashed before this one.
    pub previous: Option<LostSatellite>,
}

/// A satellite that has crashed.
#[derive(Debug, Clone)]
pub struct LostSatellite {
    /// Reason of its end, such as `killed by SIGKILL`.
    pub reason: String,
    /// Time for which it was ready.
    pub uptime: Duration,
    /// Time since which no satellite works.
    pub lost_at: Instant,
}

/// Reports the state of the satellite to the keeper, and lets it hold descriptors for the next satellite. A message that
/// cannot be sent at once is dropped: the keeper has ended or is stopped.
#[derive(Debug, Clone)]
pub struct KeeperClient {
    socket: Arc<KeeperSocket>,
    /// Descriptors that the last satellite has left and this one has not taken over.
    left: Arc<Mutex<BTreeMap<DescriptorName, OwnedFd>>>,
}

impl KeeperClient {
    /// Reads the messages that the keeper has sent before it has forked this process.
    ///
    /// # Errors
    /// They are not complete.
    pub(super) fn open(socket: KeeperSocket) -> io::Result<(Self, SatelliteGeneration)> {
        let mut generation = None;
        let mut left = BTreeMap::new();
        loop {
            match socket.try_receive()? {
                Some((KeeperEvent::Welcome { generation: number, previous }, _)) => {
                    let previous = previous.map(LostSatellite::from);
                    generation = Some(SatelliteGeneration { number, previous });
                }
                Some((KeeperEvent::Descriptor { name }, descriptors)) => {
                    left.extend(descriptors.into_iter().map(|descriptor| (name, descriptor)));
                }
                // It is sent after the fork.
                Some((KeeperEvent::Signal { .. }, _)) => {}
                Some((KeeperEvent::DescriptorsEnd, _)) => break,
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
        let generation = generation.ok_or(io::ErrorKind::InvalidData)?;
        Ok((Self { socket: Arc::new(socket), left: Arc::new(Mutex::new(left)) }, generation))
    }

    /// Sets the cleanup that runs on its own thread if the keeper is killed. The process exits afterwards.
    pub fn on_orphaned(act: impl FnOnce() + Send + 'static) {
        *ORPHAN_CLEANUP.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(act));
    }

    /// Sends the settings. With `keep_servers` the keeper starts another satellite if this one crashes. Once this one is
    /// ready, the keeper kills it if no [`report_alive`](Self::report_alive) follows within `hang_timeout`; `None` is no
    /// limit.
    pub fn configure(&self, keep_servers: bool, hang_timeout: Option<Duration>) {
        let hang_timeout_ms = hang_timeout.map(milliseconds);
        self.send(&KeeperRequest::Configure { keep_servers, hang_timeout_ms });
    }

    /// Reports that the actors run and the endpoint is open.
    pub fn report_ready(&self) {
        self.send(&KeeperRequest::Ready);
    }

    /// Reports that the actors have answered.
    pub fn report_alive(&self) {
        self.send(&KeeperRequest::Alive);
    }

    /// Reports that the satellite ends its servers: the actors do not answer any more.
    pub fn report_stopping(&self) {
        self.send(&KeeperRequest::Stopping);
    }

    pub(super) fn report_done(&self, code: u8) {
        self.send(&KeeperRequest::Done { code });
    }

    /// Lets the keeper hold a duplicate of a descriptor, instead of an earlier one of this name. The next satellite gets it
    /// if this one crashes.
    pub fn keep(&self, name: DescriptorName, descriptor: impl AsFd) {
        // The descriptor that the last satellite has left may be the same one, or is replaced by it.
        drop(self.left().remove(&name));
        if let Err(error) = self.socket.send_with(&KeeperRequest::KeepDescriptor { name }, &[descriptor.as_fd()]) {
            tracing::debug!(%error, ?name, "the keeper does not hold the descriptor");
        }
    }

    /// Makes the keeper close a descriptor. A listening socket accepts connections as long as any process holds it: it must
    /// be forgotten before the satellite stops to serve it.
    pub fn forget(&self, name: DescriptorName) {
        self.send(&KeeperRequest::ForgetDescriptor { name });
    }

    /// Forgets all descriptors that the last satellite has left and this one has not taken over.
    pub fn forget_left(&self) {
        for (name, _) in std::mem::take(&mut *self.left()) {
            self.forget(name);
        }
    }

    /// Takes over a descriptor that the last satellite has left. The keeper continues to hold it.
    pub fn take(&self, name: DescriptorName) -> Option<OwnedFd> {
        self.left().remove(&name)
    }

    /// Takes over a listening TCP socket if `accepts` its address, and forgets it otherwise.
    pub fn take_listener(&self, name: DescriptorName, accepts: impl FnOnce(SocketAddr) -> bool) -> Option<TcpListener> {
        let listener = TcpListener::from(self.take(name)?);
        if listener.local_addr().is_ok_and(accepts) {
            return Some(listener);
        }
        self.forget(name);
        None
    }

    /// Takes over a listening TCP socket as [`take_listener`](Self::take_listener) does. Port 0 of `address` is any port.
    pub fn take_listener_at(&self, name: DescriptorName, address: SocketAddr) -> Option<TcpListener> {
        self.take_listener(name, |bound| bound == address || (address.port() == 0 && bound.ip() == address.ip()))
    }

    fn left(&self) -> MutexGuard<'_, BTreeMap<DescriptorName, OwnedFd>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, request: &KeeperRequest) {
        if let Err(error) = self.socket.send(request) {
            tracing::debug!(%error, "cannot reach the keeper");
        }
    }

    /// Passes the keeper's signals on. When the keeper has ended, runs the cleanup and ends the process.
    pub(super) fn receive_signals(&self, sender: &mpsc::UnboundedSender<Signal>) {
        loop {
            match self.socket.receive() {
                Ok(Some((KeeperEvent::Signal { number }, _))) => {
                    if let Some(signal) = PIPED_SIGNALS.iter().find(|signal| **signal as i32 == number) {
                        // The receiver is gone once the satellite is ending.
                        let _ = sender.send(*signal);
                    }
                }
                // They are sent before the fork.
                Ok(Some((
                    KeeperEvent::Welcome { .. } | KeeperEvent::Descriptor { .. } | KeeperEvent::DescriptorsEnd,
                    _,
                ))) => {}
                Ok(None) => break,
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    tracing::warn!(%error, "the keeper sent a message that this version does not understand");
                }
                Err(_) => break,
            }
        }
        tracing::error!("the keeper was killed: ending every server at once");
        if let Some(act) = ORPHAN_CLEANUP.lock().unwrap_or_else(PoisonError::into_inner).take() {
            act();
        }
        std::process::exit(1);
    }
}

impl From<PreviousGeneration> for LostSatellite {
    fn from(previous: PreviousGeneration) -> Self {
        let (uptime, down) = (Duration::from_millis(previous.uptime_ms), Duration::from_millis(previous.down_ms));
        let now = Instant::now();
        // Only a machine that runs for less time has no such instant.
        Self { reason: previous.reason, uptime, lost_at: now.checked_sub(down).unwrap_or(now) }
    }
}

/// Returns a duration as messages contain it.
pub(super) fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
