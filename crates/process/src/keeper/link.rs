//! The satellite's side of its connection to the keeper.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::sys::signal::Signal;
use tokio::sync::mpsc;

use super::PIPED_SIGNALS;
use super::messages::{KeeperEvent, KeeperMessage, KeeperRequest, KeeperSocket};
use super::run_client::RunClient;
use crate::service_manager::ServiceManager;

type OrphanCleanup = Box<dyn FnOnce() + Send>;

static ORPHAN_CLEANUP: Mutex<Option<OrphanCleanup>> = Mutex::new(None);

/// Connection of the satellite to the processes above it.
pub struct KeeperLink {
    pub signals: mpsc::UnboundedReceiver<Signal>,
    pub service_manager: ServiceManager,
    pub keeper: KeeperClient,
}

/// Reports the state of the satellite to the keeper. A message that cannot be sent at once is dropped: the keeper has
/// ended or is stopped.
#[derive(Debug, Clone)]
pub struct KeeperClient(pub(super) Arc<KeeperSocket>);

impl KeeperClient {
    /// Sets the cleanup that runs on its own thread if the keeper is killed. The process exits afterwards.
    pub fn on_orphaned(act: impl FnOnce() + Send + 'static) {
        *ORPHAN_CLEANUP.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(act));
    }

    /// Reports that the actors run. From now on the keeper kills the satellite if no [`report_alive`](Self::report_alive)
    /// follows within `hang_timeout`; `None` is no limit.
    pub fn report_ready(&self, hang_timeout: Option<Duration>) {
        let milliseconds = |timeout: Duration| u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        self.send(&KeeperRequest::Ready { hang_timeout_ms: hang_timeout.map(milliseconds) });
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

    fn send(&self, request: &KeeperRequest) {
        if let Err(error) = self.0.send(request) {
            tracing::debug!(%error, "cannot reach the keeper");
        }
    }

    /// Passes the keeper's messages on. When the keeper has ended, runs the cleanup and ends the process.
    pub(super) fn receive_messages(&self, sender: &mpsc::UnboundedSender<Signal>, runs: &RunClient) {
        loop {
            match self.0.receive() {
                Ok(Some((KeeperMessage::Run(event), descriptors))) => runs.receive(&event, descriptors),
                Ok(Some((KeeperMessage::Lifecycle(KeeperEvent::Signal { number }), _))) => {
                    if let Some(signal) = PIPED_SIGNALS.iter().find(|signal| **signal as i32 == number) {
                        // The receiver is gone once the satellite is ending.
                        let _ = sender.send(*signal);
                    }
                }
                Ok(None) => break,
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    tracing::warn!(%error, "the keeper sent a message that this version does not understand");
                }
                Err(_) => break,
            }
        }
        runs.close();
        tracing::error!("the keeper was killed: ending every server at once");
        if let Some(act) = ORPHAN_CLEANUP.lock().unwrap_or_else(PoisonError::into_inner).take() {
            act();
        }
        std::process::exit(1);
    }
}
