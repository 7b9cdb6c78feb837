//! The instances as a stream of changes for browsers.
//!
//! ```text
//! RowSource ─► task of a scope ─► one frame ─► all watchers of the scope
//!              collects changes     shared        Last-Event-ID or a page's revision: the missed frames, else `reset`
//! ```
//!
//! A stream begins with `reset` (all rows) or with the deltas that the watcher missed. A `delta` contains the rows that
//! changed from one revision to a later one. A `tick` follows every [`TICK`], also when nothing changes, as long as the
//! source of the rows answers: a page without a tick is out of date. Each frame is encoded once, however many browsers
//! watch.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures::Stream;
use mcp_satellite_actors::model::event::rfc3339;
use serde::Serialize;
use tokio::sync::{broadcast, mpsc, oneshot};
use tokio::time::Instant;

use crate::principal::Principal;
use crate::problem::Problem;
pub use crate::row::{Attention, COLUMNS, DORMANT, InstanceRow, RECOVERING, STOPPED};
use crate::sse;

/// Pause between two ticks.
pub const TICK: Duration = Duration::from_secs(2);

/// Time for which changes are collected. It doubles while the frames are large.
const COALESCING_MIN: Duration = Duration::from_millis(100);
const COALESCING_MAX: Duration = Duration::from_millis(400);
/// Bytes of a frame for whose changes the next frame waits longer.
const LARGE_FRAME: usize = 100_000;
/// Deltas that a watcher can miss without a `reset`, and their bytes in total.
const DELTAS_MAX: usize = 64;
const DELTA_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Frames that wait for a slow watcher. Then its stream ends, and it continues with a new one.
const BACKLOG: usize = 16;
/// Ticks without a watcher after which the task of a scope ends: a page that is loaded again finds it running.
const IDLE_TICKS: u32 = 5;
/// Requests that wait for the task of a scope.
const REQUESTS_MAX: usize = 64;

/// Changes of rows.
#[derive(Debug, Clone, Default)]
pub struct RowChanges {
    /// New and changed rows.
    pub set: Vec<InstanceRow>,
    /// Names of removed rows.
    pub gone: Vec<Arc<str>>,
}

/// The rows of a scope. Its position is the revision that was read last.
pub trait RowSource: Send + 'static {
    /// Returns the revision of the position.
    fn revision(&self) -> u64;

    /// Returns all rows at the position.
    fn rows(&self) -> Vec<InstanceRow>;

    /// Moves the position to the present and returns the changes up to it.
    fn take_changes(&mut self) -> RowChanges;

    /// Waits until there is a later revision. Returns false if none will follow.
    fn changed(&mut self) -> impl Future<Output = bool> + Send;

    /// Returns the number of unanswered calls.
    fn calls_in_flight(&self) -> usize;

    /// Returns true if the publisher of the rows answers within about a second, so that later changes will appear.
    fn answers(&self) -> impl Future<Output = bool> + Send;
}

/// Instances that a watcher sees.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct FeedScope {
    /// Team by id or slug; `None` is all teams.
    pub team: Option<String>,
    /// Full name of the only instance.
    pub instance: Option<String>,
}

/// Position of a watcher: the process of the satellite, and a revision.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FeedPosition {
    pub boot: Arc<str>,
    pub revision: u64,
}

impl FeedPosition {
    /// Reads the id of an event: `BOOT-REVISION`.
    pub fn parse(id: &str) -> Option<Self> {
        let (boot, revision) = id.rsplit_once('-')?;
        Some(Self { boot: boot.into(), revision: revision.parse().ok()? })
    }

    pub(crate) fn id(&self) -> String {
        format!("{}-{}", self.boot, self.revision)
    }
}

/// All rows of a scope at one revision.
#[derive(Debug, Clone, Default)]
pub struct FeedRows {
    pub position: FeedPosition,
    pub rows: Arc<Vec<InstanceRow>>,
    /// Data of the event `reset`: JSON.
    pub json: Bytes,
}

#[derive(Serialize)]
struct ResetData<'a> {
    boot: &'a str,
    revision: u64,
    at: String,
    columns: [&'static str; COLUMNS.len()],
    rows: &'a [InstanceRow],
}

#[derive(Serialize)]
struct DeltaData<'a> {
    from: u64,
    revision: u64,
    at: String,
    set: &'a [InstanceRow],
    gone: &'a [Arc<str>],
}

#[derive(Serialize)]
struct TickData<'a> {
    boot: &'a str,
    revision: u64,
    at: String,
    calls_in_flight: usize,
}

enum FeedRequest {
    Watch(Option<FeedPosition>, oneshot::Sender<(Vec<Bytes>, broadcast::Receiver<Bytes>)>),
    Rows(oneshot::Sender<FeedRows>),
}

type Open<S> = Box<dyn Fn(&FeedScope) -> S + Send + Sync>;

/// The feeds of a satellite, one for each watched scope.
pub struct InstanceFeeds<S> {
    boot: Arc<str>,
    open: Open<S>,
    tasks: Mutex<HashMap<FeedScope, mpsc::Sender<FeedRequest>>>,
}

impl<S: RowSource> InstanceFeeds<S> {
    /// `boot` identifies the process of the satellite; `open` returns the rows of a scope.
    pub fn new(boot: &str, open: impl Fn(&FeedScope) -> S + Send + Sync + 'static) -> Self {
        Self { boot: boot.into(), open: Box::new(open), tasks: Mutex::default() }
    }

    pub fn boot(&self) -> &str {
        &self.boot
    }

    /// Returns all rows of a scope.
    ///
    /// # Errors
    /// The satellite is ending.
    pub async fn rows(&self, scope: &FeedScope) -> Result<FeedRows, Problem> {
        self.ask(scope, FeedRequest::Rows).await
    }

    /// Returns the frames of a stream, beginning after `last`. With `once` the stream ends at the present revision.
    ///
    /// # Errors
    /// The satellite is ending.
    pub async fn watch(
        &self,
        scope: &FeedScope,
        last: Option<FeedPosition>,
        once: bool,
    ) -> Result<impl Stream<Item = io::Result<Bytes>> + Send + use<S>, Problem> {
        let (missed, frames) = self.ask(scope, |reply| FeedRequest::Watch(last.clone(), reply)).await?;
        let later = futures::stream::unfold((!once).then_some(frames), |frames| async move {
            let mut frames = frames?;
            // A watcher that is too slow gets the end of its stream, and continues from its position with a new one.
            frames.recv().await.ok().map(|frame| (Ok(frame), Some(frames)))
        });
        Ok(futures::StreamExt::chain(futures::stream::iter(missed.into_iter().map(Ok)), later))
    }

    async fn ask<T>(
        &self,
        scope: &FeedScope,
        request: impl Fn(oneshot::Sender<T>) -> FeedRequest,
    ) -> Result<T, Problem> {
        // A task that ends while the request waits drops it; the second one has a watcher from its begin.
        for _ in 0..3 {
            let (reply, answer) = oneshot::channel();
            let task = self.task(scope);
            if task.send(request(reply)).await.is_ok()
                && let Ok(answer) = answer.await
            {
                return Ok(answer);
            }
        }
        Err(Problem::new("closing", "the satellite is ending"))
    }

    fn task(&self, scope: &FeedScope) -> mpsc::Sender<FeedRequest> {
        let mut tasks = self.tasks();
        tasks.retain(|_, task| !task.is_closed());
        let start = || {
            let (task, requests) = mpsc::channel(REQUESTS_MAX);
            let source = (self.open)(scope);
            tokio::spawn(FeedTask::new(self.boot.clone(), source).run(requests));
            task
        };
        tasks.entry(scope.clone()).or_insert_with(start).clone()
    }

    fn tasks(&self) -> MutexGuard<'_, HashMap<FeedScope, mpsc::Sender<FeedRequest>>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct FeedTask<S> {
    boot: Arc<str>,
    source: S,
    frames: broadcast::Sender<Bytes>,
    /// The last deltas, with the revisions that they lead to. The oldest begins at `base`.
    deltas: VecDeque<(u64, Bytes)>,
    delta_bytes: usize,
    base: u64,
    coalescing: Duration,
    /// The rows at the current revision, once a page or a watcher has needed them.
    reset: Option<FeedRows>,
    /// Time of the last check whether the source answers, and its result.
    checked: Option<(Instant, bool)>,
}

impl<S: RowSource> FeedTask<S> {
    fn new(boot: Arc<str>, source: S) -> Self {
        let base = source.revision();
        let frames = broadcast::Sender::new(BACKLOG);
        let (deltas, coalescing) = (VecDeque::new(), COALESCING_MIN);
        Self { boot, source, frames, deltas, delta_bytes: 0, base, coalescing, reset: None, checked: None }
    }

    async fn run(mut self, mut requests: mpsc::Receiver<FeedRequest>) {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (mut idle_ticks, mut is_open) = (0, true);
        // Time of the next frame, while changes are collected.
        let mut due: Option<Instant> = None;
        while idle_ticks < IDLE_TICKS {
            tokio::select! {
                request = requests.recv() => match request {
                    Some(request) => {
                        idle_ticks = 0;
                        self.answer(request).await;
                    }
                    None => return,
                },
                changed = self.source.changed(), if due.is_none() && is_open => {
                    is_open = changed;
                    due = Some(Instant::now() + self.coalescing);
                }
                () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    due = None;
                    self.publish();
                }
                _ = ticks.tick() => {
                    idle_ticks = if self.frames.receiver_count() == 0 { idle_ticks + 1 } else { 0 };
                    self.checked = None;
                    if let Some(tick) = self.tick().await {
                        // An error means that nobody watches.
                        let _ = self.frames.send(tick);
                    }
                }
            }
        }
    }

    async fn answer(&mut self, request: FeedRequest) {
        // An error means that the client has disconnected.
        match request {
            FeedRequest::Rows(reply) => drop(reply.send(self.rows())),
            FeedRequest::Watch(last, reply) => {
                let mut missed = self.frames_after(last.as_ref());
                missed.extend(self.tick().await);
                let _ = reply.send((missed, self.frames.subscribe()));
            }
        }
    }

    fn rows(&mut self) -> FeedRows {
        let (boot, revision, source) = (&self.boot, self.source.revision(), &self.source);
        let encode = || {
            let rows = Arc::new(source.rows());
            let data = ResetData { boot, revision, at: now(), columns: COLUMNS, rows: &rows };
            FeedRows {
                position: FeedPosition { boot: boot.clone(), revision },
                json: serde_json::to_vec(&data).unwrap_or_default().into(),
                rows,
            }
        };
        self.reset.get_or_insert_with(encode).clone()
    }

    /// Returns the frames that bring a watcher to the current revision.
    fn frames_after(&mut self, last: Option<&FeedPosition>) -> Vec<Bytes> {
        if last.is_some_and(|last| last.boot == self.boot && last.revision > self.source.revision()) {
            // A page was rendered from a later revision than that of the last frame.
            self.publish();
        }
        let known = self.base..=self.source.revision();
        let mut missed = Vec::new();
        match last {
            Some(last) if last.boot == self.boot && known.contains(&last.revision) => {
                let later = self.deltas.iter().filter(|(revision, _)| *revision > last.revision);
                missed.extend(later.map(|(_, delta)| delta.clone()));
            }
            _ => {
                let FeedRows { position, json, .. } = self.rows();
                missed.push(sse::frame(Some("reset"), Some(&position.id()), &json));
            }
        }
        missed
    }

    /// Publishes the changes since the last delta.
    fn publish(&mut self) {
        let from = self.deltas.back().map_or(self.base, |(revision, _)| *revision);
        let RowChanges { set, gone } = self.source.take_changes();
        self.reset = None;
        if set.is_empty() && gone.is_empty() {
            return;
        }
        let revision = self.source.revision();
        let data = DeltaData { from, revision, at: now(), set: &set, gone: &gone };
        let json = serde_json::to_vec(&data).unwrap_or_default();
        let frame = sse::frame(Some("delta"), Some(&self.id()), &json);
        let factor = if frame.len() > LARGE_FRAME { 2 } else { 1 };
        self.coalescing = (self.coalescing * factor).min(COALESCING_MAX);
        if factor == 1 {
            self.coalescing = COALESCING_MIN;
        }
        self.delta_bytes += frame.len();
        self.deltas.push_back((revision, frame.clone()));
        while self.deltas.len() > DELTAS_MAX || self.delta_bytes > DELTA_BYTES_MAX {
            let Some((revision, oldest)) = self.deltas.pop_front() else { break };
            self.delta_bytes -= oldest.len();
            self.base = revision;
        }
        let _ = self.frames.send(frame);
    }

    /// Returns a tick; `None` if the source has not answered within the last [`TICK`].
    async fn tick(&mut self) -> Option<Bytes> {
        let answers = match self.checked {
            Some((at, answers)) if at.elapsed() < TICK => answers,
            _ => {
                let answers = self.source.answers().await;
                self.checked = Some((Instant::now(), answers));
                answers
            }
        };
        if !answers {
            return None;
        }
        let calls_in_flight = self.source.calls_in_flight();
        let data = TickData { boot: &self.boot, revision: self.source.revision(), at: now(), calls_in_flight };
        Some(sse::frame(Some("tick"), Some(&self.id()), &serde_json::to_vec(&data).unwrap_or_default()))
    }

    fn id(&self) -> String {
        FeedPosition { boot: self.boot.clone(), revision: self.source.revision() }.id()
    }
}

/// Open streams of all browsers. Each needs a connection.
#[derive(Debug, Clone, Default)]
pub struct StreamLimits(Arc<Mutex<HashMap<String, usize>>>);

/// Maximum number of streams, of one principal and of all.
const STREAMS_OF_ONE: usize = 64;
const STREAMS_MAX: usize = 256;

/// An open stream. Dropping it makes room for another one.
#[derive(Debug)]
pub struct OpenStream {
    limits: StreamLimits,
    principal: String,
}

impl StreamLimits {
    /// # Errors
    /// The principal, or all together, have too many streams.
    pub fn open(&self, principal: &Principal) -> Result<OpenStream, Problem> {
        let kind: &str = (&principal.kind).into();
        let key = format!("{kind} {}", principal.name.as_deref().unwrap_or_default());
        let mut open = self.counts();
        let (own, all) = (open.get(&key).copied().unwrap_or(0), open.values().sum::<usize>());
        if own >= STREAMS_OF_ONE || all >= STREAMS_MAX {
            let why = format!(
                "{own} streams of this client and {all} in total are open; at most {STREAMS_OF_ONE} and {STREAMS_MAX} \
                 are possible: close pages that you do not need"
            );
            return Err(Problem::new("busy", why));
        }
        *open.entry(key.clone()).or_default() += 1;
        drop(open);
        Ok(OpenStream { limits: self.clone(), principal: key })
    }

    /// Returns the number of open streams.
    pub fn open_count(&self) -> usize {
        self.counts().values().sum()
    }

    fn counts(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        let mut open = self.limits.counts();
        if let Some(count) = open.get_mut(&self.principal) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.principal);
            }
        }
    }
}

fn now() -> String {
    rfc3339(jiff::Timestamp::now())
}
