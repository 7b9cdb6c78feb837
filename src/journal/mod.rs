//! What happened, kept over restarts: events, what servers wrote, calls, and what a satellite has to remember, in one
//! embedded database.
//!
//! ```text
//!  batcher ── append ──►┐
//!  delivery ─ outbox ──►│ a mailbox ──► one thread ──► DIR/journal/journal.db   SQLite, WAL
//!  slots ──── memos ───►┘                    │         DIR/journal/seq          the numbers that are spoken for
//!                                            └──► status, journalled_through
//!  readers, also without a satellite: open the file themselves (`read`)
//! ```
//!
//! Only that thread waits for the disk, and its callers wait for it at most one second. An event gets a number only
//! after the file `seq` has reserved it (`mark`); while that file cannot be written, events wait in the batcher without
//! numbers. What is committed survives a `kill -9` of the satellite (not a loss of
//! power: the disk is asked to sync at checkpoints only). A disk that is full, read-only or broken is a state that is
//! told and tried again, never an end: events then stay in the batcher's memory, within its limit.

mod gone;
mod keeper;
mod mark;
mod pulse;
mod read;
mod salvage;
mod schema;
mod sink;
mod store;

use std::collections::HashMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use jiff::Timestamp;
use mcp_satellite_actors::model::event::Envelope;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::seam::{Answer, Batch, Numbers};
use serde::{Deserialize, Serialize};
use tokio::sync::{oneshot, watch};

use crate::data_dir::{DataDir, FileStat};
use keeper::Keeper;
use pulse::Pulse;

pub use read::{Events, Follow, Logged, Logs, Query, read, request_logs, server_logs};
pub use sink::JournalSink;
pub(crate) use store::Memos;

/// In the data directory.
const DIRECTORY: &str = "journal";
/// In the directory of the journal.
const DATABASE: &str = "journal.db";

/// What is kept, and for how long. Whatever is reached first ends it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Events older than this go, unless they are still to be delivered.
    pub events_age_max: Duration,
    /// Over this size of the file, in bytes, the oldest events go, also those that are still to be delivered.
    pub size_max: u64,
    /// Lines of each instance's log.
    pub server_logs_max: usize,
    /// Calls of each instance.
    pub request_logs_max: usize,
    /// Lines and calls older than this go.
    pub logs_age_max: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        const DAY: Duration = Duration::from_secs(24 * 3600);
        Self {
            events_age_max: 30 * DAY,
            size_max: 512 << 20,
            server_logs_max: 100,
            request_logs_max: 100,
            logs_age_max: 30 * DAY,
        }
    }
}

/// Where events are: on disk, or in memory for as long as the disk does not take them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JournalState {
    /// What is appended is stored.
    #[default]
    Ok,
    /// Nothing can be stored now; it is tried again.
    Memory,
}

/// For `status`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JournalStatus {
    /// The database.
    pub path: PathBuf,
    /// Whether events are stored.
    pub state: JournalState,
    /// Why they are not.
    pub reason: Option<String>,
    /// Every event up to this one is stored, or was before it made room; 0 if there is none.
    pub journalled_through: u64,
    /// The oldest event that is stored.
    pub first_seq: Option<u64>,
    /// The newest one.
    pub last_seq: Option<u64>,
    /// How many events are still to be delivered, counted by their numbers; 0 where nothing is delivered.
    pub backlog: u64,
    /// Size on disk.
    pub bytes: u64,
    /// Where the last damaged database was put aside.
    pub damaged: Option<PathBuf>,
    /// Events that made room before they were delivered, since the start.
    pub pruned_unsent: u64,
    /// Instances whose history could not be read when they were installed, and was not taken into account.
    #[serde(default)]
    pub memos_missed: u64,
}

/// What the journal could not do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JournalError {
    /// The disk does not let us; it is tried again when somebody asks again.
    #[error("{0}")]
    Unavailable(String),
    /// The journal has been closed.
    #[error("the journal is closed")]
    Closed,
}

/// A batch that is with the backend, or was when the satellite was killed: the same events go again under the same id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sending {
    /// Of the batch.
    pub id: u64,
    /// Its first event.
    pub first: u64,
    /// Its last one.
    pub last: u64,
    /// Between them, and no part of it: refused for good before.
    #[serde(default)]
    pub refused: Vec<u64>,
}

/// How far delivery is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeliveryState {
    /// Everything up to this event is taken, refused for good, or gone.
    pub cursor: u64,
    /// What is under way.
    pub sending: Option<Sending>,
}

/// What is known of a command of the backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandRecord {
    /// It was begun, and its result is not known.
    Begun,
    /// It was done: its result, as JSON.
    Done(String),
}

/// The directory of the journal in a data directory.
pub fn directory(data_dir: &Path) -> PathBuf {
    data_dir.join(DIRECTORY)
}

/// The database in a data directory.
pub fn database(data_dir: &Path) -> PathBuf {
    directory(data_dir).join(DATABASE)
}

/// The data directory as the journal reaches it.
#[derive(Debug, Clone)]
enum JournalHome {
    /// The open directory of a satellite.
    Open(DataDir),
    /// A path that a host gave: it is opened whenever it is needed, because it may be created or replaced later.
    Named(PathBuf),
}

impl JournalHome {
    fn path(&self) -> &Path {
        match self {
            Self::Open(directory) => directory.path(),
            Self::Named(path) => path,
        }
    }

    /// The directory of the journal, which is created if it does not exist.
    fn directory(&self) -> io::Result<DataDir> {
        match self {
            Self::Open(directory) => directory.subdirectory(DIRECTORY),
            Self::Named(path) => DataDir::create(path)?.subdirectory(DIRECTORY),
        }
    }

    /// Returns device, inode and length of the database, or of the file beside it with this suffix.
    fn stat(&self, suffix: &str) -> Option<FileStat> {
        let name = Path::new(DIRECTORY).join(format!("{DATABASE}{suffix}"));
        match self {
            Self::Open(directory) => directory.stat(name),
            Self::Named(path) => {
                let found = std::fs::symlink_metadata(path.join(name)).ok()?;
                Some(FileStat { identity: (found.dev(), found.ino()), len: found.len() })
            }
        }
    }
}

/// Tells the time of day.
pub type Clock = Arc<dyn Fn() -> Timestamp + Send + Sync>;

/// Who is given memos that could not be read at the start, and says what is to be remembered of their instances instead,
/// and of how many the history was not taken into account.
type OnMemos = Box<dyn Fn(HashMap<InstanceId, String>) -> (Memos, u64) + Send>;

/// Who is told that events are gone, with the first and the last number.
type OnDropped = Box<dyn Fn(u64, u64) + Send>;

/// The journal of a satellite, of which there is one for a data directory. Cheap to clone; the thread ends, tidily, with
/// the last clone.
#[derive(Clone)]
pub struct Journal {
    jobs: mpsc::Sender<Job>,
    shared: Arc<Shared>,
}

type Job = Box<dyn FnOnce(&mut Keeper) + Send>;

/// What the thread shows to everybody else.
struct Shared {
    status: watch::Sender<JournalStatus>,
    appended: watch::Sender<u64>,
    /// Read at open.
    next_seq: u64,
    /// Read at open.
    memos: HashMap<InstanceId, String>,
    /// Not yet written, the latest of each instance; `None` is to be forgotten.
    pending_memos: Mutex<HashMap<InstanceId, Option<String>>>,
    /// Whether the thread has been told that there are some.
    memos_told: AtomicBool,
    /// Whether there is somebody to whom events are still to be delivered.
    delivers: AtomicBool,
    on_dropped: Mutex<Option<OnDropped>>,
    on_memos: Mutex<Option<OnMemos>>,
    /// Whether what is remembered could not be read yet.
    memos_unread: AtomicBool,
    pulse: Arc<Pulse>,
}

impl Journal {
    /// Opens the journal in a data directory, which is created if it is missing and must be accessible to its owner
    /// only. The only error is that no thread can be started. Problems of the disk are logged, shown in
    /// [`Journal::status`] and retried. Waits for the disk.
    pub fn open(data_dir: &Path, limits: Limits) -> io::Result<Self> {
        Self::open_at(data_dir, limits, Arc::new(Timestamp::now))
    }

    /// [`Journal::open`] with another clock.
    pub fn open_at(data_dir: &Path, limits: Limits, clock: Clock) -> io::Result<Self> {
        Self::open_home(JournalHome::Named(data_dir.to_owned()), limits, clock)
    }

    /// [`Journal::open`] in a data directory that is open already: its path is not looked up again.
    pub fn open_in(data_dir: DataDir, limits: Limits) -> io::Result<Self> {
        Self::open_home(JournalHome::Open(data_dir), limits, Arc::new(Timestamp::now))
    }

    fn open_home(home: JournalHome, limits: Limits, clock: Clock) -> io::Result<Self> {
        let (jobs, inbox) = mpsc::channel::<Job>();
        let shared = Keeper::start(home, limits, clock, inbox)?;
        Ok(Self { jobs, shared })
    }

    /// The number of the next event: nobody has seen it on another one.
    pub fn next_seq(&self) -> u64 {
        self.shared.next_seq
    }

    /// How it is now.
    pub fn status(&self) -> JournalStatus {
        self.shared.status.borrow().clone()
    }

    /// The last event that is stored, as it grows.
    pub fn appended(&self) -> watch::Receiver<u64> {
        self.shared.appended.subscribe()
    }

    /// Resolves when the event is stored, or cannot be for now.
    pub async fn stored(&self, seq: u64) {
        let mut status = self.shared.status.subscribe();
        let settled = |status: &JournalStatus| status.journalled_through >= seq || status.state == JournalState::Memory;
        // An error says that the journal has ended: then it will never be.
        let _ = status.wait_for(settled).await;
    }

    /// Has `hook` told, from the journal's thread, from where to where events have gone that nobody has got: for want
    /// of room, or with a damaged file. It is told again after a restart unless an `events.dropped` with these numbers has been
    /// appended. What happened before is told now, and nothing goes for its age before this.
    pub fn on_dropped(&self, hook: impl Fn(u64, u64) + Send + 'static) {
        *self.shared.on_dropped.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(hook));
        self.tell(Keeper::attend);
    }

    /// There is somebody to whom events are delivered; to be said before [`Journal::on_dropped`]. From now on the journal counts what is not, keeps it beyond its age, and
    /// tells what goes before it is.
    pub fn expect_delivery(&self) {
        self.shared.delivers.store(true, Ordering::Release);
        self.tell(Keeper::show);
    }

    /// There is nobody to whom events are delivered. Should there be somebody with a later start, that one is told what
    /// comes from then on, or goes on where the last one was if that one has not got everything.
    pub fn expect_nobody(&self) {
        self.tell(Keeper::expect_nobody);
    }

    /// Stores a batch, in one transaction. What is stored already is passed over, so a batch may come again.
    /// `Accepted`, `Invalid` or `Unavailable`.
    pub fn append(&self, batch: Arc<Batch>) -> BoxFuture<'static, Answer> {
        let (reply, answer) = oneshot::channel::<Answer>();
        self.tell(move |keeper| {
            // Sent even if the caller no longer waits: the satellite may be ending, and a repeated batch does no harm.
            let _ = reply.send(keeper.append(&batch));
        });
        let journal = self.clone();
        async move { journal.in_time(answer).await.unwrap_or_else(|error| Answer::Unavailable(error.to_string())) }
            .boxed()
    }

    /// These events were delivered without being stored: they are stored when the disk takes them, as far as there is
    /// memory until then.
    pub(crate) fn went_directly(&self, batch: Arc<Batch>) {
        self.tell(move |keeper| keeper.owe(batch));
    }

    /// The next events after `after`, at most `max`. Those that cannot be read are passed over and logged.
    pub async fn outbox(&self, after: u64, max: usize) -> Result<Vec<Envelope>, JournalError> {
        let bodies = self.ask(move |keeper| keeper.outbox(after, max)).await?;
        let parse = |(seq, body): &(u64, String)| {
            serde_json::from_str(body)
                .inspect_err(|error| tracing::error!(seq, %error, "a stored event cannot be read; it is not delivered"))
                .ok()
        };
        Ok(bodies.iter().filter_map(parse).collect())
    }

    /// How far delivery is.
    pub async fn delivery(&self) -> Result<DeliveryState, JournalError> {
        self.ask(Keeper::delivery).await
    }

    /// Delivery has got so far: `settled` is the cursor, `sending` what is under way. One transaction. The cursor never goes
    /// back.
    pub async fn sending(&self, settled: u64, sending: Option<Sending>) -> Result<(), JournalError> {
        self.ask(move |keeper| keeper.sending(settled, sending.as_ref())).await
    }

    /// What was remembered of instances when the journal was opened, as JSON.
    pub fn memos(&self) -> &HashMap<InstanceId, String> {
        &self.shared.memos
    }

    /// Whether it is not known yet what was remembered: the database is there and cannot be read. `hook` is then given
    /// it, once, as soon as it can be, on the journal's thread; what it returns replaces what is stored, except where something was
    /// remembered meanwhile.
    pub(crate) fn memos_come_late(
        &self,
        hook: impl Fn(HashMap<InstanceId, String>) -> (Memos, u64) + Send + 'static,
    ) -> bool {
        if !self.shared.memos_unread.load(Ordering::Acquire) {
            return false;
        }
        *self.shared.on_memos.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(hook));
        // They may have been read meanwhile.
        self.tell(Keeper::tell_memos);
        true
    }

    /// Remembers `memo`, JSON, of an instance: at once as far as the caller is concerned, with the next transaction on disk.
    pub fn remember(&self, instance: &InstanceId, memo: String) {
        self.memo(instance, Some(memo));
    }

    /// Forgets what was remembered of an instance.
    pub fn forget(&self, instance: &InstanceId) {
        self.memo(instance, None);
    }

    /// Resolves when what was remembered and forgotten before is stored. The error is the reason why it is not: it is stored
    /// when the disk takes it, and lost if the satellite is killed before.
    pub(crate) async fn memos_stored(&self) -> Result<(), JournalError> {
        self.while_it_answers(self.ask(Keeper::write_memos)).await.flatten()
    }

    fn memo(&self, instance: &InstanceId, memo: Option<String>) {
        let mut pending = self.shared.pending_memos.lock().unwrap_or_else(PoisonError::into_inner);
        pending.insert(instance.clone(), memo);
        drop(pending);
        if !self.shared.memos_told.swap(true, Ordering::AcqRel) {
            // An error is the state; the memos go with the next transaction that succeeds.
            self.tell(|keeper| drop(keeper.write_memos()));
        }
    }

    /// What is known of a command; `None` if it was never begun. It is known for seven days.
    pub async fn command(&self, id: &str) -> Result<Option<CommandRecord>, JournalError> {
        let id = id.to_owned();
        self.ask(move |keeper| keeper.command(&id)).await
    }

    /// A command is being carried out.
    pub async fn command_begun(&self, id: &str) -> Result<(), JournalError> {
        let id = id.to_owned();
        self.ask(move |keeper| keeper.record_command(&id, None)).await
    }

    /// It was: `result` is JSON.
    pub async fn command_done(&self, id: &str, result: String) -> Result<(), JournalError> {
        let id = id.to_owned();
        self.ask(move |keeper| keeper.record_command(&id, Some(&result))).await
    }

    /// Waits for something that waits for the disk, no longer than a disk may take: else it says so, and is given up.
    pub(crate) async fn while_it_answers<T>(&self, waiting: impl Future<Output = T>) -> Result<T, JournalError> {
        tokio::select! {
            biased;
            done = waiting => Ok(done),
            () = self.shared.pulse.overdue() => Err(JournalError::Unavailable(format!(
                "the disk of the journal {} does not answer",
                self.shared.status.borrow().path.display()
            ))),
        }
    }

    /// Whether the disk does not answer now.
    #[cfg(feature = "cli")]
    pub(crate) fn hangs(&self) -> bool {
        self.shared.pulse.is_hanging()
    }

    /// Resolves when the disk has not answered for so long that whoever reads it need not be waited for.
    pub(crate) async fn is_given_up(&self) {
        self.shared.pulse.hangs().await;
        self.shared.pulse.overdue().await;
    }

    /// Stores what is pending and closes the database; everything after that finds it closed. Resolves when that is done,
    /// or the disk does not answer: it then has what was committed.
    pub async fn close(&self) {
        let (reply, closed) = oneshot::channel();
        self.tell(move |keeper| {
            keeper.close();
            // If nobody waits it is closed all the same.
            let _ = reply.send(());
        });
        let closed = tokio::select! {
            biased;
            // An error within means that the thread has ended, which closes as well.
            closed = self.while_it_answers(closed) => closed.map(drop),
            // It hung before, and is not waited for again.
            () = self.shared.pulse.hangs() => Err(self.unanswered()),
        };
        if let Err(error) = closed {
            tracing::error!(%error, "the journal is not closed; what was committed is stored");
        }
    }

    fn tell(&self, job: impl FnOnce(&mut Keeper) + Send + 'static) {
        // An error says that the thread has ended: who waits for an answer sees that.
        let _ = self.jobs.send(Box::new(job));
    }

    async fn ask<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Keeper) -> Result<T, JournalError> + Send + 'static,
    ) -> Result<T, JournalError> {
        let (reply, answer) = oneshot::channel();
        self.tell(move |keeper| {
            // Somebody who has given up will ask again.
            let _ = reply.send(job(keeper));
        });
        self.in_time(answer).await?
    }

    /// What the thread answers. What it does later all the same does no harm: who does not know of it asks again.
    async fn in_time<T>(&self, answer: oneshot::Receiver<T>) -> Result<T, JournalError> {
        tokio::select! {
            biased;
            answer = answer => answer.map_err(|_| JournalError::Closed),
            () = self.shared.pulse.hangs() => Err(self.unanswered()),
        }
    }

    fn unanswered(&self) -> JournalError {
        let path = &self.shared.status.borrow().path.clone();
        let reason = format!("the journal {} cannot be used: the disk does not answer", path.display());
        let news = self.shared.status.send_if_modified(|status| {
            let news = status.state == JournalState::Ok;
            status.state = JournalState::Memory;
            status.reason = Some(reason.clone());
            news
        });
        if news {
            tracing::error!("{reason}; events are kept in memory, and it is tried again");
            // As soon as the thread goes on it says how it is.
            self.tell(Keeper::show);
        }
        JournalError::Unavailable(reason)
    }
}

impl Numbers for Journal {
    fn reserve(&self, through: u64) -> BoxFuture<'static, Result<(), String>> {
        let journal = self.clone();
        async move { journal.ask(move |keeper| keeper.grant(through)).await.map_err(|error| error.to_string()) }.boxed()
    }
}

impl std::fmt::Debug for Journal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Journal").field("status", &*self.shared.status.borrow()).finish_non_exhaustive()
    }
}
