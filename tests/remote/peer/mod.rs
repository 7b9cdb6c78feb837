//! The scripted HTTP peer: at its best a complete small MCP server, over streamable HTTP (`/mcp`) and over the older
//! HTTP+SSE (`/sse`), with a page at `/health`. A script makes it misbehave, by request and by count, and everything
//! that came is written down.
//!
//! It writes HTTP by hand, because a server that is meant to break off in the middle of a chunk must own its bytes.
//!
//! ```text
//! Peer ── accepting task ──┬── connection task ── script, manners ── bytes
//!                          └── connection task
//! ```

mod connection;
mod http;
mod mcp;
mod record;
mod script;

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use serde_json::json;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::select;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;

use self::connection::{Counted, serve};
use self::mcp::Server;
pub(crate) use self::mcp::{Expiry, Manners};
pub(crate) use self::record::{Record, Seen};
use self::script::Script;
pub(crate) use self::script::{Answers, Deed, When};
use super::GIVE_UP;

const BACKLOG: u32 = 1024;

/// A server of ours on a port of its own.
pub(crate) struct Peer {
    port: u16,
    tls: Option<TlsAcceptor>,
    shared: Arc<Shared>,
    network: Mutex<Network>,
    /// Bound and never listening: while nobody else listens the port is refused, and nobody can take it.
    _reserved: TcpSocket,
}

/// What a client meets at the port.
enum Network {
    /// Nobody: refused.
    Closed,
    Open(JoinHandle<()>),
    /// A listener that has not room for one more: what comes is dropped on the floor by the kernel.
    Full {
        _listener: TcpListener,
        _first: TcpStream,
    },
}

struct Shared {
    script: Mutex<Script>,
    server: Mutex<Server>,
    seen: watch::Sender<Seen>,
    frozen: watch::Sender<bool>,
    /// How many calls of `sleep` may be answered.
    released: watch::Sender<bool>,
    /// Set when it is to die, by the script or by a test; unset before it lives again.
    dying: watch::Sender<bool>,
}

impl Peer {
    /// Listens, in the clear.
    pub(crate) async fn start() -> Self {
        Self::with(None).await
    }

    /// Listens with a certificate that nobody has signed.
    pub(crate) async fn start_tls() -> Self {
        let made = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).unwrap();
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()));
        let config = rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key)
            .unwrap();
        Self::with(Some(Arc::new(config).into())).await
    }

    async fn with(tls: Option<TlsAcceptor>) -> Self {
        let reserved = socket(0);
        let port = reserved.local_addr().unwrap().port();
        let shared = Shared {
            script: Mutex::default(),
            server: Mutex::default(),
            seen: watch::Sender::default(),
            frozen: watch::Sender::default(),
            released: watch::Sender::default(),
            dying: watch::Sender::default(),
        };
        let network = Mutex::new(Network::Closed);
        let peer = Self { port, tls, shared: Arc::new(shared), network, _reserved: reserved };
        peer.open().await;
        peer
    }

    /// Where it says that it is: `http://127.0.0.1:PORT`.
    pub(crate) fn origin(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://127.0.0.1:{}", self.port)
    }

    /// Its endpoint for streamable HTTP.
    pub(crate) fn url(&self) -> String {
        format!("{}/mcp", self.origin())
    }

    /// Its endpoint for HTTP+SSE.
    pub(crate) fn sse_url(&self) -> String {
        format!("{}/sse", self.origin())
    }

    /// A page that says whether it is well.
    pub(crate) fn health_url(&self) -> String {
        format!("{}/health", self.origin())
    }

    /// Changes how it behaves when it behaves.
    pub(crate) fn manners(&self, change: impl FnOnce(&mut Manners)) {
        change(&mut self.shared.server.lock().unwrap().manners);
    }

    /// Such requests come to this from now on.
    pub(crate) fn on(&self, when: When, deed: Deed) {
        self.shared.script.lock().unwrap().push(when, None, deed);
    }

    /// So many of such requests come to this.
    pub(crate) fn on_next(&self, times: usize, when: When, deed: Deed) {
        self.shared.script.lock().unwrap().push(when, Some(times), deed);
    }

    /// It behaves, whatever was scripted, and is there.
    pub(crate) async fn heal(&self) {
        self.shared.script.lock().unwrap().clear();
        self.thaw();
        self.open().await;
    }

    /// Everything closes, and nobody listens; the port stays its own.
    pub(crate) async fn close(&self) {
        let network = std::mem::replace(&mut *self.network.lock().unwrap(), Network::Closed);
        if let Network::Open(accepting) = network {
            self.shared.dying.send_replace(true);
            accepting.await.unwrap();
        }
    }

    /// Listens, if it does not.
    pub(crate) async fn open(&self) {
        // It may be dying by the script.
        if matches!(*self.network.lock().unwrap(), Network::Open(_)) && !*self.shared.dying.borrow() {
            return;
        }
        self.close().await;
        let listener = listen(self.port, BACKLOG).await;
        self.shared.dying.send_replace(false);
        let accepting = tokio::spawn(accept(listener, self.tls.clone(), self.shared.clone()));
        *self.network.lock().unwrap() = Network::Open(accepting);
    }

    /// Dies and comes back on its port, and knows no session.
    pub(crate) async fn restart(&self) {
        self.close().await;
        self.forget_sessions();
        self.open().await;
    }

    /// Everything closes, and who comes is not even refused.
    pub(crate) async fn fill(&self) {
        self.close().await;
        let listener = listen(self.port, 0).await;
        let first = TcpStream::connect(address(self.port)).await.unwrap();
        *self.network.lock().unwrap() = Network::Full { _listener: listener, _first: first };
    }

    /// Stops as a machine does whose network cable is pulled: nothing is read, answered or closed.
    pub(crate) fn freeze(&self) {
        self.shared.frozen.send_replace(true);
    }

    /// Goes on where it stopped.
    pub(crate) fn thaw(&self) {
        self.shared.frozen.send_replace(false);
    }

    /// Knows no session any more, and keeps its connections.
    pub(crate) fn forget_sessions(&self) {
        self.shared.server.lock().unwrap().forget_sessions();
    }

    /// How many sessions it knows.
    pub(crate) fn sessions(&self) -> usize {
        self.shared.server.lock().unwrap().sessions()
    }

    /// Tells everybody who listens that a list has changed: `tools`, `resources`, `prompts`.
    pub(crate) fn list_changed(&self, of: &str) {
        let method = format!("notifications/{of}/list_changed");
        self.shared.server.lock().unwrap().tell(&json!({"jsonrpc": "2.0", "method": method}));
    }

    /// Ends every stream tidily.
    pub(crate) fn end_streams(&self) {
        self.shared.server.lock().unwrap().end_streams();
    }

    /// Answers all calls of `sleep`, and those to come.
    pub(crate) fn release(&self) {
        self.shared.released.send_replace(true);
    }

    /// How often this tool was carried out.
    pub(crate) fn executed(&self, tool: &str) -> usize {
        self.shared.server.lock().unwrap().executed.iter().filter(|executed| *executed == tool).count()
    }

    /// What it has seen so far.
    pub(crate) fn seen<T>(&self, look: impl FnOnce(&Seen) -> T) -> T {
        look(&self.shared.seen.borrow())
    }

    /// Waits until it has seen this.
    pub(crate) async fn until(&self, what: &str, wanted: impl FnMut(&Seen) -> bool) {
        let mut seen = self.shared.seen.subscribe();
        let in_time = timeout(GIVE_UP, seen.wait_for(wanted)).await;
        assert!(in_time.is_ok(), "given up waiting until {what}: {:#?}", *self.shared.seen.borrow());
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if let Ok(Network::Open(accepting)) = self.network.get_mut() {
            accepting.abort();
        }
    }
}

fn address(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

/// Bound to a port that others of ours may be bound to as well, as long as one listens at most.
fn socket(port: u16) -> TcpSocket {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.bind(address(port)).unwrap();
    socket
}

/// Listens at a port where somebody may have listened a moment ago.
async fn listen(port: u16, backlog: u32) -> TcpListener {
    let again = async {
        loop {
            match socket(port).listen(backlog) {
                Ok(listener) => return listener,
                // The kernel has not done with the last one.
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => sleep(Duration::from_millis(5)).await,
                Err(error) => panic!("cannot listen at port {port}: {error}"),
            }
        }
    };
    timeout(GIVE_UP, again).await.unwrap()
}

/// Takes connections until the peer dies; with this task end all of them.
async fn accept(listener: TcpListener, tls: Option<TlsAcceptor>, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    let mut dying = shared.dying.subscribe();
    loop {
        select! {
            biased;
            _ = dying.wait_for(|dying| *dying) => break,
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else { continue };
                // Whoever is connected counts, even where nobody looks after him.
                let counted = Counted::new(shared.clone(), connected, |seen| seen.connections -= 1);
                let nth = shared.seen.borrow().connections_made;
                let connection = serve(nth, stream, tls.clone(), shared.clone());
                let connection = unless_frozen(connection, shared.frozen.subscribe());
                connections.spawn(async move {
                    let _counted = counted;
                    connection.await;
                });
            }
        }
    }
    drop(listener);
    connections.shutdown().await;
}

fn connected(seen: &mut Seen) {
    seen.connections_made += 1;
    seen.connections += 1;
}

/// Runs a connection, and leaves it as it is for as long as the peer is frozen.
async fn unless_frozen(connection: impl Future<Output = ()>, mut frozen: watch::Receiver<bool>) {
    let mut connection = pin!(connection);
    loop {
        select! {
            biased;
            Ok(_) = frozen.wait_for(|frozen| *frozen) => {}
            () = &mut connection => return,
        }
        // An error says that the peer is gone; so is this task.
        let _ = frozen.wait_for(|frozen| !*frozen).await;
    }
}
