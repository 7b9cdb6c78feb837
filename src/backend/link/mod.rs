//! The satellite's side of a backend: it registers, asks for commands and for its configuration, and tells how it is. All
//! of it is asked by the satellite, and none of it is needed for supervision: whatever the backend does, what runs goes on.
//!
//! ```text
//! registration ──► key ──► poll ──► desk ──► effect ──► result        every call ──► contact ──► `satellite status`
//!                   │                 └──► document ──► Fleet::take_on
//!                   ├────► document      now and then
//!                   ├────► heartbeat     metrics
//!                   └────► way           events, driven by the delivery
//! ```
//!
//! Decisions are in [`rules`]; the rest carries them out. A 401 to anything but events gives the key up, and registration begins
//! again; events wait for what the next poll finds out.

mod calls;
mod contact;
mod desk;
mod document;
mod done;
mod effect;
mod heartbeat;
mod key;
mod metrics;
mod orders;
mod poll;
mod registration;
pub mod rules;
mod way;

use std::collections::HashMap;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::secret::Secret;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::rules::jitter::Dice;
use mcp_satellite_actors::seam::EventSink;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

pub use document::CONFIG_FILE;
pub use done::{Done, InMemory, Progress};
pub use key::KEY_FILE;

use calls::{Backend, CallError};
use contact::{Contact, Matter};
use document::Taken;
use done::Both;
use key::Key;
use metrics::Metrics;
use rules::Scope;

use super::wire::{EventProgress, PollingMode};
use crate::config::{BackendPlan, ConfigErrors, Document};
use crate::console::api::{BackendStatus, rfc3339};
use crate::data_dir::DataDir;

/// After a fault of ours.
const BEGIN_AGAIN_AFTER: Duration = Duration::from_secs(5);

/// Answers that wait for the desk.
const INBOX: usize = 4;

/// What is to run.
pub type Specs = HashMap<InstanceId, InstanceSpec>;

/// What the link needs of a satellite.
pub trait Fleet: Send + Sync {
    /// The runtime.
    fn runtime(&self) -> &RuntimeHandle;
    /// Brings the fleet to what a backend wants, by difference, and tells what that is; the snapshot shows it then. What
    /// cannot be used changes nothing. `since` is when the document was asked for, and `expected` what a command of the
    /// backend says to be removed.
    fn take_on<'a>(
        &'a self,
        document: Document,
        since: std::time::Instant,
        expected: Option<&'a Scope>,
    ) -> BoxFuture<'a, Result<Arc<Specs>, ConfigErrors>>;
    /// Erases, now, the data of instances in `removed` that are not configured any more.
    fn erase<'a>(&'a self, removed: &'a Scope) -> BoxFuture<'a, ()>;
    /// How far the events are.
    fn events(&self) -> EventProgress;
}

/// What a link is made of.
pub struct Options {
    /// Of the satellite.
    pub name: String,
    /// What the configuration says.
    pub plan: BackendPlan,
    /// Where key and configuration are kept.
    pub data_dir: DataDir,
    /// Which commands were carried out.
    pub done: Arc<dyn Done>,
    /// For delays that are not the same for all.
    pub seed: u64,
    /// How long the machine was suspended, counted from some moment: [`suspended`](crate::connect::suspend::suspended).
    pub suspended: Arc<dyn Fn() -> Duration + Send + Sync>,
}

/// Why there is no link.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The URL cannot be used.
    #[error("the URL of the backend cannot be used: {0}")]
    Url(String),
    /// The client could not be built, for example because the machine has no CA certificates.
    #[error("cannot prepare the HTTP client for the backend")]
    Client(#[source] reqwest::Error),
}

/// See the module. Cheap to clone.
#[derive(Clone)]
pub struct Link(Arc<Shared>);

/// What all parts of a link know.
struct Shared {
    name: String,
    plan: BackendPlan,
    data_dir: DataDir,
    seed: u64,
    suspended: Arc<dyn Fn() -> Duration + Send + Sync>,
    started: std::time::Instant,
    backend: Backend,
    token: watch::Sender<Option<Secret>>,
    /// None as long as the satellite is not registered.
    key: watch::Sender<Option<Arc<Key>>>,
    /// Whether the backend has answered to the key.
    proven: AtomicBool,
    /// The key that was refused last, and when.
    refused: Mutex<Option<(Instant, Arc<Key>)>>,
    contact: Contact,
    /// Held while the configuration is looked at.
    taken: tokio::sync::Mutex<Taken>,
    done: Both,
    /// Commands that wait or run.
    in_hand: AtomicUsize,
    /// Those, and those whose results are being told.
    held: AtomicUsize,
    metrics: Arc<Metrics>,
    /// Counts the suspends of the machine.
    wakes: watch::Sender<u64>,
    /// Counts what may make a document good that was not.
    reasons: watch::Sender<u64>,
}

impl Link {
    /// Nothing is asked yet.
    pub fn new(options: Options) -> Result<Self, LinkError> {
        let Options { name, plan, data_dir, done, seed, suspended } = options;
        let backend = Backend::new(&plan.url, plan.request_timeout)?;
        let metrics = Metrics::new(data_dir.path());
        Ok(Self(Arc::new(Shared {
            name,
            token: watch::Sender::new(plan.token.clone()),
            plan,
            data_dir,
            seed,
            suspended,
            started: std::time::Instant::now(),
            backend,
            key: watch::Sender::new(None),
            proven: AtomicBool::new(false),
            refused: Mutex::new(None),
            contact: Contact::default(),
            taken: tokio::sync::Mutex::default(),
            done: Both::new(done),
            in_hand: AtomicUsize::new(0),
            held: AtomicUsize::new(0),
            metrics,
            wakes: watch::Sender::new(0),
            reasons: watch::Sender::new(0),
        })))
    }

    /// The last good configuration of this backend, for a start without it. It waits for the file system.
    pub fn remembered(data_dir: &DataDir, url: &str) -> Option<Document> {
        document::load(data_dir, url)
    }

    /// The document of this hash is applied already.
    pub async fn has_taken_on(&self, hash: String) {
        self.0.contact.took_on(Some(hash.clone()));
        *self.0.taken.lock().await = Taken::of(hash);
    }

    /// Asks and answers. Never ends by itself; what it does is over when this is dropped.
    pub async fn run(&self, fleet: &dyn Fleet) {
        let link = &*self.0;
        loop {
            let (inbox, received) = mpsc::channel(INBOX);
            let all = async {
                tokio::join!(
                    registration::run(link),
                    poll::run(link, inbox),
                    desk::run(link, fleet, received),
                    document::run(link, fleet),
                    heartbeat::run(link, fleet),
                )
            };
            // What it holds is replaced with it, and what is shared is whole at every moment.
            if AssertUnwindSafe(all).catch_unwind().await.is_err() {
                tracing::error!("the link to the backend has failed, which is a fault of ours; it begins again");
            }
            tokio::time::sleep(BEGIN_AGAIN_AFTER).await;
        }
    }

    /// The last word, at the end of the satellite: bounded, whatever the backend does.
    pub async fn end(&self, fleet: &dyn Fleet) {
        heartbeat::last(&self.0, fleet).await;
    }

    /// Takes on another registration token, for the next time that one is needed. Nothing else of a plan can change.
    pub fn renew(&self, plan: &BackendPlan) {
        self.0.token.send_if_modified(|token| {
            let changed = *token != plan.token;
            token.clone_from(&plan.token);
            changed
        });
    }

    /// The machine was suspended, and the clock that timers go by has not seen it: what is overdue is done now.
    pub fn woke(&self) {
        self.0.wakes.send_modify(|wakes| *wakes += 1);
    }

    /// The satellite's own configuration has changed: what the backend gives, and was refused, may go with it now.
    pub fn reconsider(&self) {
        self.0.reasons.send_modify(|reasons| *reasons += 1);
    }

    /// Where events go. They are not taken as long as the satellite is not registered.
    pub fn way(&self) -> Arc<dyn EventSink> {
        way::Way::new(self.0.clone())
    }

    /// For `satellite status`.
    pub fn status(&self, backlog: u64) -> BackendStatus {
        let link = &self.0;
        let now = link.contact.now();
        let key = link.key.borrow().clone();
        let mode = match (now.mode, &key) {
            (_, None) => "registering",
            (Some(_), Some(_)) if now.backing_off => "backing_off",
            (None | Some(PollingMode::Normal), Some(_)) => "normal",
            (Some(PollingMode::Immediate), Some(_)) => "immediate",
            (Some(PollingMode::High), Some(_)) => "high",
            (Some(PollingMode::Idle), Some(_)) => "idle",
        };
        BackendStatus {
            connected: now.connected,
            url: link.plan.url.clone(),
            satellite_id: key.map(|key| key.satellite_id.clone()),
            last_contact: now.last_contact.map(rfc3339),
            last_error: now.last_error(),
            mode: mode.to_owned(),
            next_poll_ms: now.next_poll.map(|next| milliseconds(next.saturating_duration_since(Instant::now()))),
            commands: link.in_hand(),
            backlog,
            config_hash: now.config_hash,
        }
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("url", &self.0.plan.url).finish_non_exhaustive()
    }
}

impl Shared {
    /// Who the satellite is, once it is registered.
    async fn key(&self) -> Arc<Key> {
        let mut keys = self.key.subscribe();
        loop {
            if let Some(key) = &*keys.borrow_and_update() {
                return key.clone();
            }
            // The sender is here, so there is always another change.
            let _ = keys.changed().await;
        }
    }

    /// Resolves when another key than this one is there.
    async fn another_key(&self, key: &Arc<Key>) {
        let mut keys = self.key.subscribe();
        let is_another = |now: &Option<Arc<Key>>| now.as_ref().is_some_and(|now| !Arc::ptr_eq(now, key));
        // The sender is here, so this comes to an end only with such a key.
        let _ = keys.wait_for(is_another).await;
    }

    /// What came of a call as whoever has this key.
    fn heard<T>(&self, matter: Matter, key: &Arc<Key>, answer: &Result<T, CallError>) {
        match answer {
            Ok(_) => {
                self.prove();
                self.contact.went_well(matter);
            }
            Err(error) => self.missed(matter, key, error),
        }
    }

    fn missed(&self, matter: Matter, key: &Arc<Key>, error: &CallError) {
        let answered = matches!(error, CallError::Refused { .. } | CallError::Malformed { .. });
        self.contact.went_wrong(matter, answered, &error.to_string());
        if error.is_unauthorized() {
            self.refuse(key);
        }
    }

    /// Until then, or until the machine wakes from a suspend.
    async fn pause_until(&self, until: Instant) {
        let mut wakes = self.wakes.subscribe();
        tokio::select! {
            () = tokio::time::sleep_until(until) => {}
            _ = wakes.changed() => {}
        }
    }

    fn in_hand(&self) -> usize {
        self.in_hand.load(Ordering::Relaxed)
    }

    fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    fn dice(&self, matter: &str) -> Dice {
        Dice::new(self.seed, &format!("{}/{matter}", self.name))
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
