//! The MCP endpoint: streamable HTTP for every client. It holds no server and decides nothing about one.
//!
//! ```text
//! listen   TCP, TLS, limits of connections
//! front    guard → path → access → method → body → drain → rate → session
//! call     one request: JSON, or a stream       session   one client: open requests, questions, streams
//! ────────────────────────────── face: the seam ──────────────────────────────
//! one instance as if directly · the tools that find tools · the tools themselves
//! ```

pub mod access;
pub mod behind;
mod call;
mod era;
pub mod face;
pub mod flat;
mod front;
pub mod guard;
mod instance;
mod listen;
mod metadata;
pub mod names;
pub mod refusal;
mod reply;
pub mod room;
pub mod search;
pub mod session;
pub mod sessions;
pub mod stream;
pub mod tools;
mod wishes;

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};

use mcp_satellite_actors::model::event::Event;
use tokio::task::JoinHandle;
use tokio::time::{Duration, Instant, sleep, timeout};

use crate::config::{Answers, GatewayPlan, Tls};
use access::Access;
use call::Form;
use face::{Endpoint, Faces};
use front::Front;
use guard::Guard;
use listen::{Door, Identity};
use session::End;
use sessions::{Limits, Sessions};

/// Where events of clients go.
pub type Teller = Box<dyn Fn(Event) + Send + Sync>;

/// All that can be set.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The satellite's name, for metadata.
    pub name: String,
    /// The address that clients know, if it is not the one that they connect to.
    pub public_url: Option<String>,
    /// Hosts and origins.
    pub guard: Guard,
    /// Who gives tokens, for metadata.
    pub authorization_servers: Vec<String>,
    /// A certificate's chain and its key.
    pub tls: Option<Tls>,
    /// JSON or streams.
    pub answers: Answers,
    /// Bytes of a message.
    pub body_max: usize,
    /// Of sessions.
    pub limits: Limits,
    /// How long a request may take; the instance's own, if nothing is said.
    pub request_timeout: Option<Duration>,
    /// At once.
    pub connections_max: usize,
    /// How long a client that has gone may take to come back before its calls are cancelled.
    pub resume_grace: Duration,
    /// How long calls may take when the endpoint stops.
    pub drain_timeout: Duration,
}

impl Settings {
    /// What `plan` says of an endpoint that listens at `address`.
    pub fn new(name: &str, plan: &GatewayPlan, address: SocketAddr) -> Self {
        let limits = &plan.limits;
        Self {
            name: name.to_owned(),
            public_url: plan.public_url.clone(),
            guard: Guard {
                loopback: address.ip().is_loopback(),
                hosts: plan.hosts.clone(),
                origins: plan.origins.clone(),
            },
            authorization_servers: plan.authorization_servers.clone(),
            tls: plan.tls.clone(),
            answers: plan.answers,
            body_max: limits.body_max,
            limits: Limits {
                sessions_max: limits.sessions_max,
                per_user_max: limits.sessions_per_user_max,
                idle: limits.session_idle,
                age_max: limits.session_age_max,
            },
            request_timeout: limits.request_timeout,
            connections_max: limits.connections_max,
            resume_grace: limits.resume_grace,
            drain_timeout: limits.drain_timeout,
        }
    }

    /// The endpoint's own address, for a client that has asked for `host`.
    fn base(&self, host: &str) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        match &self.public_url {
            Some(url) => url.trim_end_matches('/').to_owned(),
            None => format!("{scheme}://{host}"),
        }
    }

    fn form(&self) -> Form {
        match self.answers {
            Answers::Json => Form::Either,
            Answers::Sse => Form::Stream,
        }
    }

    fn identity(&self) -> io::Result<Option<Identity>> {
        self.tls.as_ref().map(|tls| listen::identity(&tls.cert, &tls.key)).transpose()
    }
}

/// The endpoint at work. Dropped, it ends at once.
pub struct Gateway {
    front: Arc<Front>,
    address: SocketAddr,
    identity: Option<Identity>,
    door: Mutex<Option<Door>>,
    sweeper: JoinHandle<()>,
}

impl fmt::Debug for Gateway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gateway").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.sweeper.abort();
    }
}

/// Takes the address, so that one that is taken is known before anything else begins.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    listen::bind(address)
}

impl Gateway {
    /// Serves. `sessions` is the table in which servers' messages find their clients.
    pub fn start(
        listener: TcpListener,
        settings: Settings,
        access: Arc<Access>,
        faces: Arc<dyn Faces>,
        sessions: Arc<Sessions>,
        tell: Teller,
    ) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let identity = settings.identity()?;
        let connections_max = settings.connections_max;
        let front = Arc::new(Front::new(faces, sessions, tell, access, settings));
        // Paths are few and told apart in one place; the router is what the server takes.
        let router = axum::Router::new().fallback(front::handle).with_state(front.clone());
        let door = Door::open(listener, router, identity.as_ref(), connections_max)?;
        let sweeper = tokio::spawn(sweep(front.clone()));
        Ok(Self { front, address, identity, door: Mutex::new(Some(door)), sweeper })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// How many sessions there are.
    pub fn sessions(&self) -> usize {
        self.front.sessions.len()
    }

    /// Goes on with other settings. Sessions of clients that would not be let in any more end. A certificate that cannot be read is told, and the old one stays.
    pub fn apply(&self, settings: Settings) -> io::Result<()> {
        let renewed = settings.identity();
        self.front.set(Arc::new(settings));
        for session in self.front.sessions.all() {
            if !self.front.access.stands(&session.opening.pass) {
                self.end(&session, End::Revoked);
            }
        }
        if let (Some(renewed), Some(identity)) = (renewed?, &self.identity) {
            identity.renew(&renewed);
        }
        Ok(())
    }

    /// An instance is not there any more: its sessions end.
    pub fn removed(&self, endpoint: &Endpoint) {
        for session in self.front.sessions.all() {
            if session.opening.endpoint == *endpoint {
                self.end(&session, End::Removed);
            }
        }
    }

    fn end(&self, session: &Arc<session::Session>, why: End) {
        if let Some(session) = self.front.sessions.close(session, why) {
            self.front.gone(&session);
        }
    }

    /// Takes no more requests, waits for those that are being answered as long as it may, and ends.
    pub async fn drain(&self) {
        let until = Instant::now() + self.front.settings().drain_timeout;
        self.front.drain();
        // An error says that some are not answered: they are cancelled with their sessions.
        let _ = timeout(until.saturating_duration_since(Instant::now()), self.front.rest()).await;
        for session in self.front.sessions.all() {
            self.end(&session, End::Drained);
        }
        let door = self.door.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(door) = door {
            door.close(until.saturating_duration_since(Instant::now()).max(LAST_WORDS)).await;
        }
    }
}

/// For what was answered at the last moment to be written.
const LAST_WORDS: Duration = Duration::from_millis(100);

/// Ends what is idle or old, for ever.
async fn sweep(front: Arc<Front>) {
    const AT_MOST: Duration = Duration::from_secs(5);
    loop {
        let limits = front.settings().limits;
        let pause = AT_MOST.min(limits.idle / 2).min(limits.age_max / 2).max(Duration::from_millis(10));
        sleep(pause).await;
        for session in front.sessions.sweep(&limits, Instant::now()) {
            front.gone(&session);
        }
    }
}
