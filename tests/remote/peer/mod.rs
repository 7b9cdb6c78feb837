//! The scripted HTTP peer: a small but complete MCP server over streamable HTTP (`/mcp`) and over the older HTTP+SSE
//! (`/sse`), with a page at `/health`. A script makes it misbehave, by request and by count. It records all requests.
//!
//! It writes HTTP itself: only this way can it break off in the middle of a chunk.
//!
//! ```text
//! Peer ── accepting task ──┬── connection task ── script, behavior ── bytes
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
use testkit::wait::GIVE_UP;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::select;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;

use self::connection::{CountGuard, serve};
use self::mcp::Server;
pub(crate) use self::mcp::{Behavior, Expiry};
pub(crate) use self::record::{PeerLog, Record};
use self::script::Script;
pub(crate) use self::script::{Action, ResponseFormat, When};

const BACKLOG: u32 = 1024;

/// A scripted server on its own port.
pub(crate) struct Peer {
    port: u16,
    tls: Option<TlsAcceptor>,
    shared: Arc<Shared>,
    network: Mutex<Network>,
    /// Bound but not listening: reserves the port while the peer is closed; connections are refused then.
    _reserved: TcpSocket,
}

/// The state of the port.
enum Network {
    /// Connections are refused.
    Closed,
    Open(JoinHandle<()>),
    /// The backlog of the listener is full: the kernel drops further connections.
    Full {
        _listener: TcpListener,
        _first: TcpStream,
    },
}

struct Shared {
    script: Mutex<Script>,
    server: Mutex<Server>,
    log: watch::Sender<PeerLog>,
    frozen: watch::Sender<bool>,
    /// Whether calls of `sleep` are answered.
    released: watch::Sender<bool>,
    /// Set by the script or by a test to close everything; unset before the peer listens again.
    dying: watch::Sender<bool>,
}

impl Peer {
    /// Starts a peer without TLS.
    pub(crate) async fn start() -> Self {
        Self::with(None).await
    }

    /// Starts a peer with a self-signed certificate.
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
            log: watch::Sender::default(),
            frozen: watch::Sender::default(),
            released: watch::Sender::default(),
            dying: watch::Sender::default(),
        };
        let network = Mutex::new(Network::Closed);
        let peer = Self { port, tls, shared: Arc::new(shared), network, _reserved: reserved };
        peer.open().await;
        peer
    }

    /// Returns the origin: `http://127.0.0.1:PORT`.
    pub(crate) fn origin(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://127.0.0.1:{}", self.port)
    }

    /// Returns the URL for streamable HTTP.
    pub(crate) fn url(&self) -> String {
        format!("{}/mcp", self.origin())
    }

    pub(crate) fn sse_url(&self) -> String {
        format!("{}/sse", self.origin())
    }

    pub(crate) fn health_url(&self) -> String {
        format!("{}/health", self.origin())
    }

    /// Changes the behavior for requests that no rule matches.
    pub(crate) fn configure(&self, change: impl FnOnce(&mut Behavior)) {
        change(&mut self.shared.server.lock().unwrap().behavior);
    }

    /// Performs an action on all matching requests from now on.
    pub(crate) fn on(&self, when: When, action: Action) {
        self.shared.script.lock().unwrap().push(when, None, action);
    }

    /// Performs an action on the next `times` matching requests.
    pub(crate) fn on_next(&self, times: usize, when: When, action: Action) {
        self.shared.script.lock().unwrap().push(when, Some(times), action);
    }

    /// Clears the script, thaws the peer and listens again.
    pub(crate) async fn heal(&self) {
        self.shared.script.lock().unwrap().clear();
        self.thaw();
        self.open().await;
    }

    /// Closes all connections and stops listening. The port stays reserved.
    pub(crate) async fn close(&self) {
        let network = std::mem::replace(&mut *self.network.lock().unwrap(), Network::Closed);
        if let Network::Open(accepting) = network {
            self.shared.dying.send_replace(true);
            accepting.await.unwrap();
        }
    }

    /// Listens unless the peer listens already.
    pub(crate) async fn open(&self) {
        // The script may be closing the peer.
        if matches!(*self.network.lock().unwrap(), Network::Open(_)) && !*self.shared.dying.borrow() {
            return;
        }
        self.close().await;
        let listener = listen(self.port, BACKLOG).await;
        self.shared.dying.send_replace(false);
        let accepting = tokio::spawn(accept(listener, self.tls.clone(), self.shared.clone()));
        *self.network.lock().unwrap() = Network::Open(accepting);
    }

    /// Closes all connections, forgets all sessions and listens again.
    pub(crate) async fn restart(&self) {
        self.close().await;
        self.forget_sessions();
        self.open().await;
    }

    /// Closes all connections. New connections are neither accepted nor refused.
    pub(crate) async fn fill(&self) {
        self.close().await;
        let listener = listen(self.port, 0).await;
        let first = TcpStream::connect(address(self.port)).await.unwrap();
        *self.network.lock().unwrap() = Network::Full { _listener: listener, _first: first };
    }

    /// Stops as if the network cable were pulled: nothing is read, answered or closed.
    pub(crate) fn freeze(&self) {
        self.shared.frozen.send_replace(true);
    }

    /// Continues after `freeze`.
    pub(crate) fn thaw(&self) {
        self.shared.frozen.send_replace(false);
    }

    /// Forgets all sessions and keeps the connections.
    pub(crate) fn forget_sessions(&self) {
        self.shared.server.lock().unwrap().forget_sessions();
    }

    pub(crate) fn sessions(&self) -> usize {
        self.shared.server.lock().unwrap().sessions()
    }

    /// Sends a `list_changed` notification on all streams, for `tools`, `resources` or `prompts`.
    pub(crate) fn list_changed(&self, of: &str) {
        let method = format!("notifications/{of}/list_changed");
        self.shared.server.lock().unwrap().broadcast(&json!({"jsonrpc": "2.0", "method": method}));
    }

    /// Ends every stream regularly.
    pub(crate) fn end_streams(&self) {
        self.shared.server.lock().unwrap().end_streams();
    }

    /// Answers all current and later calls of `sleep`.
    pub(crate) fn release(&self) {
        self.shared.released.send_replace(true);
    }

    /// Returns how often a tool was executed.
    pub(crate) fn executed(&self, tool: &str) -> usize {
        self.shared.server.lock().unwrap().executed.iter().filter(|executed| *executed == tool).count()
    }

    /// Passes the log so far to a function.
    pub(crate) fn log<T>(&self, look: impl FnOnce(&PeerLog) -> T) -> T {
        look(&self.shared.log.borrow())
    }

    /// Waits until the log meets a condition.
    pub(crate) async fn until(&self, what: &str, wanted: impl FnMut(&PeerLog) -> bool) {
        let mut log = self.shared.log.subscribe();
        let in_time = timeout(GIVE_UP, log.wait_for(wanted)).await;
        assert!(in_time.is_ok(), "gave up waiting until {what}: {:#?}", *self.shared.log.borrow());
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

/// Binds a port. Several sockets of the peer may bind it as long as at most one listens.
fn socket(port: u16) -> TcpSocket {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.bind(address(port)).unwrap();
    socket
}

/// Listens at a port that an earlier listener may just have released.
async fn listen(port: u16, backlog: u32) -> TcpListener {
    let again = async {
        loop {
            match socket(port).listen(backlog) {
                Ok(listener) => return listener,
                // The kernel has not released the last listener.
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => sleep(Duration::from_millis(5)).await,
                Err(error) => panic!("cannot listen at port {port}: {error}"),
            }
        }
    };
    timeout(GIVE_UP, again).await.unwrap()
}

/// Accepts connections until the peer closes. All connections end with this task.
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
                // A connection counts from its acceptance, before its task runs.
                let counted = CountGuard::new(shared.clone(), connected, |log| log.connections -= 1);
                let nth = shared.log.borrow().connections_made;
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

fn connected(log: &mut PeerLog) {
    log.connections_made += 1;
    log.connections += 1;
}

/// Runs a connection and pauses it while the peer is frozen.
async fn unless_frozen(connection: impl Future<Output = ()>, mut frozen: watch::Receiver<bool>) {
    let mut connection = pin!(connection);
    loop {
        select! {
            biased;
            Ok(_) = frozen.wait_for(|frozen| *frozen) => {}
            () = &mut connection => return,
        }
        // An error means that the peer is dropped; this task ends then.
        let _ = frozen.wait_for(|frozen| !*frozen).await;
    }
}
