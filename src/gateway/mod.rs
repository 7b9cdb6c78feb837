//! The MCP endpoint: streamable HTTP for every client. It holds no server and decides nothing about one.
//!
//! ```text
//! listen   TCP, TLS, limits of connections
//! front    guard → path → access → method → body → access → drain → rate → era → session, or none
//! call     one request in a session: JSON, or a stream
//!                                     session   one client: open requests, questions, streams
//! visit    one request without one              or one request, whose client is a guest
//! ────────────────────────────── face: the seam ──────────────────────────────
//! one instance as if directly · the tools that find tools · the tools themselves
//! ```

pub mod access;
pub mod behind;
mod call;
pub mod clients;
mod connections;
mod era;
pub mod face;
pub mod flat;
mod forward;
mod front;
pub mod guard;
mod instance;
mod instructions;
mod listen;
mod metadata;
pub mod names;
mod parked;
pub mod refusal;
mod reply;
pub mod room;
pub mod search;
pub mod session;
pub mod sessions;
pub mod stream;
pub mod subscription;
pub mod tools;
mod visit;
mod wishes;

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mcp_satellite_actors::model::event::Event;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Duration, Instant, timeout};

use crate::config::{Answers, GatewayLimits, GatewayPlan, Listen, Tls};
use access::Access;
use call::Form;
use clients::ClientStatus;
use connections::{ConnectionLimits, Connections};
use face::{Endpoint, Faces};
use front::Front;
use guard::Guard;
pub(crate) use listen::Unusable;
use listen::{Door, Identity, Terms};
use session::End;
use sessions::Sessions;
use visit::Visit;

/// Where events of clients go.
pub type Teller = Box<dyn Fn(Event) + Send + Sync>;

const SSE_AFTER: Duration = Duration::from_secs(1);
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// All that can be set.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The satellite's name, for metadata.
    pub name: String,
    /// The address that clients know, if it is not the one that they connect to.
    pub public_url: Option<String>,
    /// Hosts and origins.
    pub guard: Guard,
    /// Authorization servers, for metadata. Without any, clients are told of none.
    pub authorization_servers: Vec<String>,
    /// Addresses that many clients share: the limit of connections of one address does not hold for them.
    pub trusted_proxies: Vec<IpAddr>,
    /// A certificate's chain and its key.
    pub tls: Option<Tls>,
    /// JSON or streams.
    pub answers: Answers,
    /// Its numbers.
    pub limits: GatewayLimits,
    /// A stream begins so long after its request without an answer: proxies close what is silent.
    pub sse_after: Duration,
    /// And says something so often.
    pub keep_alive: Duration,
}

impl Settings {
    /// What `plan` says of an endpoint that listens at `address`.
    pub fn new(name: &str, plan: &GatewayPlan, address: SocketAddr) -> Self {
        Self {
            name: name.to_owned(),
            public_url: plan.public_url.clone(),
            guard: Guard {
                loopback: address.ip().is_loopback(),
                hosts: plan.hosts.clone(),
                origins: plan.origins.clone(),
            },
            authorization_servers: plan.authorization_servers.clone(),
            trusted_proxies: plan.trusted_proxies.clone(),
            tls: plan.tls.clone(),
            answers: plan.answers,
            limits: plan.limits.clone(),
            sse_after: SSE_AFTER,
            keep_alive: KEEP_ALIVE,
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

    /// Whether there is anything that would keep the endpoint from being served.
    pub fn check(&self) -> io::Result<()> {
        self.identity().map(drop)
    }

    fn form(&self) -> Form {
        match self.answers {
            Answers::Json => Form::Either,
            Answers::Sse => Form::Stream,
        }
    }

    fn connections(&self) -> ConnectionLimits {
        ConnectionLimits::new(&self.limits, &self.trusted_proxies)
    }

    fn identity(&self) -> io::Result<Option<Identity>> {
        self.tls.as_ref().map(|tls| listen::identity(&tls.cert, &tls.key)).transpose()
    }
}

/// The endpoint at work. Dropped, it ends at once.
pub struct Gateway {
    front: Arc<Front>,
    terms: Arc<Terms>,
    doors: Mutex<Doors>,
    sweeper: JoinHandle<()>,
}

/// Where clients come in.
struct Doors {
    address: SocketAddr,
    /// None once the endpoint stops.
    open: Option<Door>,
    /// Those of earlier settings, until their clients are gone.
    closing: JoinSet<()>,
}

impl fmt::Debug for Gateway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gateway").field("address", &self.address()).finish_non_exhaustive()
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.sweeper.abort();
        // Each of them holds on to what it belongs to.
        self.front.parked.clear();
    }
}

/// What is wrong with a certificate and its key, before anything is served with them.
pub(crate) fn check(tls: &Tls) -> Result<(), Unusable> {
    listen::check(&tls.cert, &tls.key)
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
        let connections = Connections::new(settings.connections());
        let terms = Arc::new(Terms::new(settings.identity()?, connections.clone()));
        let address = listener.local_addr()?;
        let front = Arc::new(Front::new(faces, sessions, tell, access, connections, settings));
        let door = Door::open(listener, front.clone(), terms.clone())?;
        let doors = Doors { address, open: Some(door), closing: JoinSet::new() };
        let sweeper = tokio::spawn(sweep(front.clone()));
        Ok(Self { front, terms, doors: Mutex::new(doors), sweeper })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.doors().address
    }

    /// The certificate that it has.
    pub fn tls(&self) -> Option<Tls> {
        self.front.settings().tls.clone()
    }

    /// How many sessions there are.
    pub fn sessions(&self) -> usize {
        self.front.sessions.len()
    }

    /// The clients that are connected.
    pub fn clients(&self) -> Vec<ClientStatus> {
        self.front.sessions.clients(Instant::now())
    }

    /// Another place for it, if `listen` names one: taken already, to be given to [`apply`](Self::apply).
    pub fn elsewhere(&self, listen: Listen) -> io::Result<Option<TcpListener>> {
        let now = self.address();
        match listen {
            // Any port will do, and it has one.
            Listen::At(address) if address.port() == 0 && address.ip() == now.ip() => Ok(None),
            Listen::At(address) if address != now => bind(address).map(Some),
            Listen::At(_) | Listen::Anywhere | Listen::Off => Ok(None),
        }
    }

    /// Goes on with other settings, and at another place if one is given. Sessions of clients that would not be let in any
    /// more end. Connections that would not be made in the same way any more end with what is being answered on them, at
    /// the latest after [`GatewayLimits::drain_timeout`]; sessions outlive them. An error says that the certificate or the
    /// place cannot be used: both stay as they were, since one was meant for the other, and all else holds.
    pub fn apply(&self, mut settings: Settings, elsewhere: Option<TcpListener>) -> io::Result<()> {
        let (before, former) = (self.front.settings(), self.terms.identity());
        let taken = settings.identity().and_then(|identity| {
            let switched = settings.tls.is_some() != before.tls.is_some();
            self.terms.set(identity, settings.connections());
            self.front.set(Arc::new(settings.clone()));
            self.move_to(elsewhere, switched, settings.limits.drain_timeout)
        });
        if taken.is_err() {
            settings.tls.clone_from(&before.tls);
            settings.guard.loopback = before.guard.loopback;
            self.terms.set(former, settings.connections());
            self.front.set(Arc::new(settings));
        }
        self.revoke();
        taken
    }

    /// Opens another door in the place of the one that is open, if there is a reason to.
    fn move_to(&self, elsewhere: Option<TcpListener>, switched: bool, left: Duration) -> io::Result<()> {
        let mut doors = self.doors();
        while doors.closing.try_join_next().is_some() {}
        let Some(open) = doors.open.as_ref().filter(|_| switched || elsewhere.is_some()) else { return Ok(()) };
        let (front, terms) = (self.front.clone(), self.terms.clone());
        let (address, door) = match elsewhere {
            Some(listener) => (listener.local_addr()?, Door::open(listener, front, terms)?),
            None => (doors.address, open.again(front, terms)?),
        };
        doors.address = address;
        if let Some(old) = doors.open.replace(door) {
            doors.closing.spawn(old.close(left));
        }
        Ok(())
    }

    /// Ends the sessions of clients that would not be let in any more.
    pub fn revoke(&self) {
        for session in self.front.sessions.all() {
            if !self.front.access.stands(&session.opening.pass) {
                self.end(&session, End::Revoked);
            }
        }
        self.part(End::Revoked, |guest| !self.front.access.stands(&guest.opening.pass));
    }

    /// Ends the requests of some guests.
    fn part(&self, why: End, leaves: impl Fn(&session::Session) -> bool) {
        for guest in self.front.sessions.guests() {
            if leaves(&guest) {
                guest.end(why);
            }
        }
        self.front.parked.sweep(Instant::now(), Visit::is_over);
    }

    /// An instance is not there any more: its sessions end.
    pub fn removed(&self, endpoint: &Endpoint) {
        for session in self.front.sessions.all() {
            if session.opening.endpoint == *endpoint {
                self.end(&session, End::Removed);
            }
        }
        self.part(End::Removed, |guest| guest.opening.endpoint == *endpoint);
    }

    fn end(&self, session: &Arc<session::Session>, why: End) {
        if let Some(session) = self.front.sessions.close(session, why) {
            self.front.gone(&session);
        }
    }

    fn doors(&self) -> MutexGuard<'_, Doors> {
        // Nothing is called in between that could leave it half changed.
        self.doors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes no more requests, waits for those that are being answered as long as it may, and ends.
    pub async fn drain(&self) {
        let until = Instant::now() + self.front.settings().limits.drain_timeout;
        self.front.drain();
        // An error says that some are not answered: they are cancelled with their sessions.
        let _ = timeout(until.saturating_duration_since(Instant::now()), self.front.rest()).await;
        for session in self.front.sessions.all() {
            self.end(&session, End::Drained);
        }
        self.part(End::Drained, |_| true);
        let (open, mut closing) = {
            let mut doors = self.doors();
            (doors.open.take(), std::mem::take(&mut doors.closing))
        };
        let left = until.saturating_duration_since(Instant::now()).max(LAST_WORDS);
        if let Some(door) = open {
            closing.spawn(door.close(left));
        }
        // Those of earlier settings may have had more time left; now they have no more than the others.
        let _ = timeout(left + LAST_WORDS, closing.join_all()).await;
    }
}

/// For what was answered at the last moment to be written.
const LAST_WORDS: Duration = Duration::from_millis(100);

/// Ends what is idle or old, and forgets what is too much, for ever.
async fn sweep(front: Arc<Front>) {
    const AT_MOST: Duration = Duration::from_secs(5);
    loop {
        let limits = front.settings().limits.clone();
        let shortest = limits.session_idle.min(limits.session_age_max) / 2;
        let pause = AT_MOST.min(shortest).max(Duration::from_millis(10));
        // An error says that the time has passed; without one there are other settings.
        let _ = timeout(pause, front.changed()).await;
        for session in front.sessions.sweep(&front.settings().limits, Instant::now()) {
            front.gone(&session);
        }
        front.parked.sweep(Instant::now(), Visit::is_over);
        front.sessions.relieve();
    }
}
