//! The satellite's side of its connection to the keeper.

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use tokio::sync::mpsc;

use super::messages::{
    DescriptorName, KeeperEvent, KeeperMessage, KeeperRequest, KeeperSocket, PIPED_SIGNALS, PreviousGeneration,
};
use super::run_client::RunClient;
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
    pub(super) fn open(socket: Arc<KeeperSocket>) -> io::Result<(Self, SatelliteGeneration)> {
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
        Ok((Self { socket, left: Arc::new(Mutex::new(left)) }, generation))
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
        let left = std::mem::take(&mut *self.left());
        for name in left.into_keys() {
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

    /// Passes the keeper's messages on. When the keeper has ended, runs the cleanup and ends the process.
    pub(super) fn receive_messages(&self, sender: &mpsc::UnboundedSender<Signal>, runs: &RunClient) {
        loop {
            match self.socket.receive() {
                Ok(Some((KeeperMessage::Run(event), descriptors))) => runs.receive(event, descriptors),
                Ok(Some((KeeperMessage::Lifecycle(KeeperEvent::Signal { number }), _))) => {
                    if let Some(signal) = PIPED_SIGNALS.iter().find(|signal| **signal as i32 == number) {
                        // The receiver is gone once the satellite is ending.
                        let _ = sender.send(*signal);
                    }
                }
                // They are sent before the fork.
                Ok(Some((KeeperMessage::Lifecycle(_), _))) => {}
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a client that has received these listeners, and the end of the keeper.
    fn client(listeners: &[(DescriptorName, &TcpListener)]) -> (KeeperClient, SatelliteGeneration, KeeperSocket) {
        let (keeper, below) = KeeperSocket::pair().unwrap();
        let previous = PreviousGeneration { reason: "killed by SIGKILL".to_owned(), uptime_ms: 70, down_ms: 50 };
        keeper.send(&KeeperEvent::Welcome { generation: 2, previous: Some(previous) }).unwrap();
        for (name, listener) in listeners {
            keeper.send_with(&KeeperEvent::Descriptor { name: *name }, &[listener.as_fd()]).unwrap();
        }
        keeper.send(&KeeperEvent::DescriptorsEnd).unwrap();
        let (client, generation) = KeeperClient::open(Arc::new(below)).unwrap();
        (client, generation, keeper)
    }

    fn requests(keeper: &KeeperSocket) -> Vec<KeeperRequest> {
        std::iter::from_fn(|| keeper.try_receive().ok().flatten().map(|(request, _)| request)).collect()
    }

    #[test]
    fn a_satellite_learns_of_the_crash_before_it() {
        let (_, generation, _keeper) = client(&[]);
        let previous = generation.previous.unwrap();
        assert_eq!((generation.number, previous.reason.as_str()), (2, "killed by SIGKILL"));
        assert_eq!(previous.uptime, Duration::from_millis(70));
        assert!(previous.lost_at.elapsed() >= Duration::from_millis(50));
    }

    #[test]
    fn a_connection_without_the_first_messages_is_an_error() {
        let (_keeper, below) = KeeperSocket::pair().unwrap();
        assert!(KeeperClient::open(Arc::new(below)).is_err());
    }

    #[test]
    fn a_socket_is_taken_over_only_at_the_same_address() {
        let listener = || TcpListener::bind("127.0.0.1:0").unwrap();
        let [endpoint, console, metrics] = [listener(), listener(), listener()];
        let address = |listener: &TcpListener| listener.local_addr().unwrap();
        let (client, _, keeper) = client(&[
            (DescriptorName::Endpoint, &endpoint),
            (DescriptorName::Console, &console),
            (DescriptorName::Metrics, &metrics),
        ]);
        let taken = client.take_listener_at(DescriptorName::Endpoint, address(&endpoint)).unwrap();
        assert_eq!(address(&taken), address(&endpoint));
        assert!(client.take_listener_at(DescriptorName::Endpoint, address(&endpoint)).is_none(), "it is taken over");
        assert!(requests(&keeper).is_empty());
        assert!(client.take_listener_at(DescriptorName::Console, address(&endpoint)).is_none());
        assert_eq!(requests(&keeper), [KeeperRequest::ForgetDescriptor { name: DescriptorName::Console }]);
        let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
        assert!(client.take_listener_at(DescriptorName::Metrics, any_port).is_some());
    }

    #[test]
    fn what_is_not_taken_over_is_forgotten() {
        let [old, new] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let (client, _, keeper) = client(&[(DescriptorName::Endpoint, &old), (DescriptorName::Console, &old)]);
        client.keep(DescriptorName::Endpoint, &new);
        client.forget_left();
        let (kept, forgotten) = (
            KeeperRequest::KeepDescriptor { name: DescriptorName::Endpoint },
            KeeperRequest::ForgetDescriptor { name: DescriptorName::Console },
        );
        assert_eq!(requests(&keeper), [kept, forgotten]);
    }
}
