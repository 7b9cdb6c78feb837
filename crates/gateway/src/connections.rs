//! Admission of TCP connections. A connection is unauthenticated until a request on it has a valid token, which must
//! happen within `header_timeout`. Only a part of all connections may be unauthenticated, so that capacity remains for
//! clients with a token. At a limit, the oldest unauthenticated connection is closed for the new one.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Context;

use futures::task::AtomicWaker;
use tokio::sync::Notify;
use tokio::time::{Duration, Instant, timeout};

use mcp_satellite_config::GatewayLimits;
use mcp_satellite_process::process::DescriptorReserve;

use super::traffic::HttpTraffic;

// Minimum time between two warnings about closed connections.
const WARNING_PAUSE: Duration = Duration::from_secs(60);

// Maximum time to wait for closed connections to return their descriptors.
const CLOSING_MAX: Duration = Duration::from_secs(1);

const UNAUTHENTICATED: u8 = 0;
const AUTHENTICATED: u8 = 1;
const EVICTED: u8 = 2;

#[derive(Debug, Clone)]
pub(crate) struct ConnectionLimits {
    max: usize,
    unauthenticated_max: usize,
    unauthenticated_per_peer_max: usize,
    // Addresses that many clients share, without a limit per address.
    trusted_proxies: Vec<IpAddr>,
    header_timeout: Duration,
    descriptors: DescriptorReserve,
}

impl ConnectionLimits {
    pub(crate) fn new(limits: &GatewayLimits, trusted_proxies: &[IpAddr]) -> Self {
        Self {
            max: limits.connections_max,
            // A quarter of the connections is always left to clients with a token.
            unauthenticated_max: limits.unauthenticated_max.min(limits.connections_max - limits.connections_max / 4),
            unauthenticated_per_peer_max: limits.unauthenticated_per_peer_max,
            trusted_proxies: trusted_proxies.iter().map(IpAddr::to_canonical).collect(),
            header_timeout: limits.header_timeout,
            descriptors: DescriptorReserve::from_process_limit(),
        }
    }

    fn has_peer_limit(&self, address: IpAddr) -> bool {
        !address.is_loopback() && !self.trusted_proxies.contains(&address)
    }
}

#[derive(Debug)]
pub(crate) struct Connections {
    table: Mutex<ConnectionTable>,
    closed: Notify,
    traffic: Arc<HttpTraffic>,
}

#[derive(Debug)]
struct ConnectionTable {
    limits: ConnectionLimits,
    // Connections that are open and not evicted.
    open: usize,
    // Evicted connections that still have their descriptors.
    closing: usize,
    accepted: u64,
    // Unauthenticated connections by their number, the oldest first.
    unauthenticated: BTreeMap<u64, UnauthenticatedConnection>,
    numbers: HashMap<SocketAddr, u64>,
    warned_at: Option<Instant>,
    evicted: u64,
    refused: u64,
}

#[derive(Debug)]
struct UnauthenticatedConnection {
    peer: SocketAddr,
    state: Arc<ConnectionAdmissionState>,
}

#[derive(Debug, Default)]
struct ConnectionAdmissionState {
    phase: AtomicU8,
    waker: AtomicWaker,
}

/// Registration of one connection. Dropping it frees the capacity.
#[derive(Debug)]
pub(crate) struct ConnectionPlace {
    connections: Arc<Connections>,
    number: u64,
    state: Arc<ConnectionAdmissionState>,
    pub header_timeout: Duration,
}

impl ConnectionPlace {
    pub(crate) fn traffic(&self) -> &HttpTraffic {
        &self.connections.traffic
    }

    pub(crate) fn is_authenticated(&self) -> bool {
        self.state.phase.load(Ordering::Acquire) == AUTHENTICATED
    }

    /// Returns true if the connection was evicted for another one. If not, the task is woken when that happens.
    pub(crate) fn poll_evicted(&self, context: &Context<'_>) -> bool {
        let evicted = || self.state.phase.load(Ordering::Acquire) == EVICTED;
        if self.state.phase.load(Ordering::Acquire) == UNAUTHENTICATED {
            self.state.waker.register(context.waker());
        }
        evicted()
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        let mut table = self.connections.table();
        if self.state.phase.load(Ordering::Acquire) != EVICTED {
            table.open -= 1;
            table.remove_unauthenticated(self.number);
            return;
        }
        table.closing -= 1;
        if table.closing == 0 {
            self.connections.closed.notify_waiters();
        }
    }
}

impl Connections {
    /// Returns the number of connections with and without a valid token.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let table = self.table();
        let others = table.unauthenticated.len();
        (table.open.saturating_sub(others), others)
    }

    /// `traffic` counts the bytes of the connections.
    pub(crate) fn new(limits: ConnectionLimits, traffic: Arc<HttpTraffic>) -> Arc<Self> {
        let table = ConnectionTable {
            limits,
            open: 0,
            closing: 0,
            accepted: 0,
            unauthenticated: BTreeMap::new(),
            numbers: HashMap::new(),
            warned_at: None,
            evicted: 0,
            refused: 0,
        };
        Arc::new(Self { table: Mutex::new(table), closed: Notify::new(), traffic })
    }

    pub(crate) fn set_limits(&self, limits: ConnectionLimits) {
        self.table().limits = limits;
    }

    pub(crate) fn admit(
        self: &Arc<Self>,
        peer: SocketAddr,
        descriptor: RawFd,
        now: Instant,
    ) -> Option<ConnectionPlace> {
        let mut table = self.table();
        let admitted = table.make_room(peer.ip().to_canonical(), descriptor);
        if !admitted {
            table.refused += 1;
        }
        table.warn(now);
        if !admitted {
            return None;
        }
        table.accepted += 1;
        table.open += 1;
        let (number, state) = (table.accepted, Arc::<ConnectionAdmissionState>::default());
        table.unauthenticated.insert(number, UnauthenticatedConnection { peer, state: Arc::clone(&state) });
        table.numbers.insert(peer, number);
        let header_timeout = table.limits.header_timeout;
        Some(ConnectionPlace { connections: Arc::clone(self), number, state, header_timeout })
    }

    /// Evicts the oldest unauthenticated connection if this descriptor is reserved for other work. Returns true if it
    /// did: the new connection can take the descriptor of the evicted one once that is closed.
    pub(crate) fn evict_for_descriptor(&self, descriptor: RawFd) -> bool {
        let mut table = self.table();
        table.limits.descriptors.is_reserved(descriptor) && table.evict_oldest()
    }

    pub(crate) async fn wait_evicted_closed(&self) {
        let all_closed = async {
            loop {
                let closed = self.closed.notified();
                if self.table().closing == 0 {
                    return;
                }
                closed.await;
            }
        };
        // After the time limit, `admit` decides by the remaining descriptors.
        let _ = timeout(CLOSING_MAX, all_closed).await;
    }

    pub(crate) fn mark_authenticated(&self, peer: SocketAddr) {
        let mut table = self.table();
        let Some(number) = table.numbers.get(&peer).copied() else { return };
        if let Some(connection) = table.remove_unauthenticated(number) {
            connection.state.phase.store(AUTHENTICATED, Ordering::Release);
        }
    }

    fn table(&self) -> MutexGuard<'_, ConnectionTable> {
        // No call under the lock can leave the value half changed, so a poisoned lock is still usable.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ConnectionTable {
    fn make_room(&mut self, address: IpAddr, descriptor: RawFd) -> bool {
        let limits = &self.limits;
        let (max, of_peer_max) = (limits.unauthenticated_max, limits.unauthenticated_per_peer_max);
        let (few, too_few) = (limits.descriptors.is_reserved(descriptor), limits.descriptors.is_last(descriptor));
        if limits.has_peer_limit(address) {
            let network = peer_network(address);
            let is_its =
                |connection: &UnauthenticatedConnection| peer_network(connection.peer.ip().to_canonical()) == network;
            let of_peer = || self.unauthenticated.iter().filter(|(_, connection)| is_its(connection));
            let oldest = of_peer().next().map(|(number, _)| *number);
            if let Some(oldest) = oldest.filter(|_| of_peer().count() >= of_peer_max) {
                self.evict(oldest);
            }
        }
        if self.unauthenticated.len() >= max || self.open >= self.limits.max || few {
            // The evicted connection keeps its descriptor until its task has run.
            return self.evict_oldest() && !too_few;
        }
        true
    }

    fn evict_oldest(&mut self) -> bool {
        let oldest = self.unauthenticated.first_key_value().map(|(number, _)| *number);
        oldest.is_some_and(|oldest| self.evict(oldest))
    }

    fn evict(&mut self, number: u64) -> bool {
        let Some(connection) = self.remove_unauthenticated(number) else { return false };
        connection.state.phase.store(EVICTED, Ordering::Release);
        connection.state.waker.wake();
        self.open -= 1;
        self.closing += 1;
        self.evicted += 1;
        true
    }

    fn remove_unauthenticated(&mut self, number: u64) -> Option<UnauthenticatedConnection> {
        let connection = self.unauthenticated.remove(&number)?;
        // Another connection may have the same address and port by now.
        if self.numbers.get(&connection.peer) == Some(&number) {
            self.numbers.remove(&connection.peer);
        }
        Some(connection)
    }

    fn warn(&mut self, now: Instant) {
        let is_due = self.warned_at.is_none_or(|at| now.saturating_duration_since(at) >= WARNING_PAUSE);
        if !is_due || self.evicted + self.refused == 0 {
            return;
        }
        self.warned_at = Some(now);
        let (closed, refused) = (std::mem::take(&mut self.evicted), std::mem::take(&mut self.refused));
        let (open, unauthenticated) = (self.open, self.unauthenticated.len());
        tracing::warn!(
            closed,
            refused,
            open,
            unauthenticated,
            "the endpoint has too many connections without a valid token: it closes the oldest of them"
        );
    }
}

/// Returns the address, or the /64 network for IPv6, because one host usually has a whole /64.
fn peer_network(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << 64)).into(),
        IpAddr::V4(_) => address,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    const LOW: RawFd = 3;

    fn limits(max: usize, unauthenticated_max: usize, unauthenticated_per_peer_max: usize) -> ConnectionLimits {
        let limits = GatewayLimits {
            connections_max: max,
            unauthenticated_max,
            unauthenticated_per_peer_max,
            ..GatewayLimits::default()
        };
        let descriptors = DescriptorReserve::from_limit(1024);
        ConnectionLimits { descriptors, ..ConnectionLimits::new(&limits, &[IpAddr::from([192, 0, 2, 9])]) }
    }

    fn peer(host: u8, port: u16) -> SocketAddr {
        SocketAddr::from(([192, 0, 2, host], port))
    }

    fn is_evicted(place: &ConnectionPlace) -> bool {
        place.poll_evicted(&Context::from_waker(futures::task::noop_waker_ref()))
    }

    #[test]
    fn only_the_oldest_unauthenticated_connection_is_evicted() {
        let (connections, now) = (Connections::new(limits(4, 2, 9), Arc::default()), Instant::now());
        let admit = |port| connections.admit(peer(1, port), LOW, now);
        let known = admit(1).unwrap();
        connections.mark_authenticated(peer(1, 1));
        let (first, second) = (admit(2).unwrap(), admit(3).unwrap());
        let third = admit(4).unwrap();
        assert!(is_evicted(&first) && !is_evicted(&second) && !is_evicted(&third));
        assert!(known.is_authenticated() && !is_evicted(&known) && !third.is_authenticated());
        // An evicted connection that ends does not count a second time.
        drop(first);
        assert_eq!(connections.table().open, 3);
        for port in [3, 4] {
            connections.mark_authenticated(peer(1, port));
        }
        let fourth = admit(5).unwrap();
        connections.mark_authenticated(peer(1, 5));
        assert!(admit(6).is_none(), "all connections are authenticated");
        drop((known, second, third, fourth));
        let table = connections.table();
        assert_eq!((table.open, table.unauthenticated.len(), table.numbers.len()), (0, 0, 0));
    }

    #[test]
    fn unauthenticated_connections_are_limited_per_address_except_shared_ones() {
        let (connections, now) = (Connections::new(limits(100, 70, 2), Arc::default()), Instant::now());
        let admit = |peer| connections.admit(peer, LOW, now).unwrap();
        let places: Vec<_> = [1, 2, 3].map(|port| admit(peer(1, port))).into();
        assert_eq!(places.iter().map(is_evicted).collect::<Vec<_>>(), [true, false, false]);
        let of_v6 = |number: u16| SocketAddr::from(([0x2001, 0xdb8, 0, 1, 0, 0, 0, number], 443));
        let first = admit(of_v6(1));
        let _others = [admit(of_v6(2)), admit(of_v6(3))];
        assert!(is_evicted(&first), "all addresses are of one network");
        let local = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let others: Vec<_> =
            [1, 2, 3].into_iter().flat_map(|port| [admit(peer(9, port)), admit(local(port))]).collect();
        assert!(!others.iter().any(is_evicted));
    }

    #[test]
    fn descriptors_are_reserved_for_the_satellite() {
        let (connections, now) = (Connections::new(limits(5000, 3000, 9000), Arc::default()), Instant::now());
        let first = connections.admit(peer(1, 1), 767, now).unwrap();
        let second = connections.admit(peer(1, 2), 768, now).unwrap();
        assert!(is_evicted(&first) && !is_evicted(&second));
        assert!(connections.admit(peer(1, 3), 900, now).is_none(), "the last descriptors are reserved");
        assert!(is_evicted(&second));
        assert!(connections.admit(peer(1, 4), 800, now).is_none(), "no connection can be evicted");
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_connection_waits_for_the_descriptor_of_the_evicted_one() {
        let (connections, now) = (Connections::new(limits(2, 2, 9), Arc::default()), Instant::now());
        connections.wait_evicted_closed().await;
        let places: Vec<_> = (1..=4).map(|port| connections.admit(peer(1, port), LOW, now).unwrap()).collect();
        let mut waiting = Box::pin(connections.wait_evicted_closed());
        let mut places = places.into_iter();
        assert!(waiting.as_mut().now_or_never().is_none());
        drop(places.next());
        assert!(waiting.as_mut().now_or_never().is_none(), "one of two is still open");
        drop(places.next());
        waiting.await;
        assert_eq!(now.elapsed(), Duration::ZERO);

        assert!(!connections.evict_for_descriptor(767));
        assert!(connections.evict_for_descriptor(768));
        connections.wait_evicted_closed().await;
        assert_eq!(now.elapsed(), CLOSING_MAX, "a connection that does not close delays the others at most this long");
    }
}
