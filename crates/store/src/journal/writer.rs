//! The only thread that writes the journal. It executes jobs in order; between jobs it removes old data and retries
//! after disk errors.
//!
//! ```text
//!             opened, or written again
//!      ┌───────────────────────────────────┐
//!      ▼                                   │
//!     ok ── full, read-only, lost, broken ─┴─► memory      tried again with every job and every `RETRY`
//!      │
//!      └── damaged: put aside, salvaged, replaced ──► ok
//! ```
//!
//! At the start the noted numbers decide what is lost. After an orderly end, or a kill in the same boot with a database
//! that reaches as far as noted, only events with a granted number that were not stored are lost; other numbers that were
//! not stored are assigned again, because nobody has seen them. Otherwise numbering continues after the last reserved number, and the range between is reported as lost. The files are looked for at their
//! paths, because data in a deleted file reaches no reader: before a job, but no more than once a second on average.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::seam::{SinkAnswer, SinkBatch};
use rusqlite::ErrorCode;
use tokio::sync::watch;

use super::JournalLimits;
use super::disk_monitor::DiskMonitor;
use super::lost_ranges::LostRanges;
use super::read::{self, is_damage};
use super::salvage::{last_put_aside, put_aside, salvage};
use super::schema::SchemaError;
use super::seq_file::SeqFile;
use super::shared::{
    BatchInFlight, CommandRecord, DeliveryState, JournalClock, JournalError, JournalHome, JournalShared, JournalState,
    JournalStatus, Memos, database,
};
use super::store::{JournalDatabase, PruningProgress, PruningStep, StoredState, read_stored_state};
use crate::durations::DurationTotals;
use mcp_satellite_files::data_dir::DataDir;

/// Interval between attempts on a disk that does not accept writes. Each job tries earlier.
const RETRY: Duration = Duration::from_secs(3);
const TIDY_INTERVAL: Duration = Duration::from_secs(60);
/// Number of jobs that can check one after another whether the files are in place. One more can check in each second.
const CHECKS_MAX: u64 = 10;
/// Maximum number of delivered events that wait to be stored. The oldest beyond it are reported as lost.
const OWED_MAX: usize = 10_000;

pub(super) type JournalJob = Box<dyn FnOnce(&mut JournalWriter) + Send>;

pub(super) struct JournalWriter {
    home: JournalHome,
    path: PathBuf,
    limits: JournalLimits,
    time: AgeClock,
    shared: Arc<JournalShared>,
    seq_file: SeqFile,
    store: Option<JournalDatabase>,
    reason: Option<String>,
    /// True if the last batch was not stored. A smaller write that succeeds does not prove that there is room for a
    /// batch.
    batch_failed: bool,
    /// Batches that were delivered while the disk accepted nothing, and must still be stored, oldest first.
    delivered_unstored: VecDeque<Arc<SinkBatch>>,
    seq_error: Option<String>,
    /// Last number that may be in use, if the database exists but cannot be read.
    last_possible_seq: Option<u64>,
    closed: bool,
    pruning: PruningProgress,
    damaged: Option<PathBuf>,
    /// Last event that is, or was, stored.
    through: u64,
    lost_ranges: LostRanges,
    last_maintenance: Option<Instant>,
    checks_left: u64,
    last_check: Instant,
    /// True once the hook for lost events is set and delivery is declared. Events are not removed for their age before.
    age_pruning_enabled: bool,
    late_memos: Option<HashMap<InstanceId, String>>,
    memos_missed: u64,
}

/// Clock for ages. It follows the system clock except for jumps forward, which would make everything old at once.
struct AgeClock {
    clock: JournalClock,
    began: Timestamp,
    at: Instant,
}

impl AgeClock {
    fn now(&self) -> Timestamp {
        (self.clock)()
    }

    fn bounded_now(&self) -> Timestamp {
        let elapsed = jiff::SignedDuration::try_from(self.at.elapsed()).unwrap_or(jiff::SignedDuration::MAX);
        self.began.checked_add(elapsed).map_or_else(|_| self.now(), |most| most.min(self.now()))
    }
}

impl JournalWriter {
    /// Starts the thread and waits until it has opened the database, or failed to.
    pub(super) fn start(
        home: JournalHome,
        limits: JournalLimits,
        clock: JournalClock,
        inbox: mpsc::Receiver<JournalJob>,
    ) -> io::Result<Arc<JournalShared>> {
        let (opened, answer) = mpsc::channel();
        let pulse = DiskMonitor::start()?;
        thread::Builder::new().name("journal".into()).spawn(move || {
            let mut writer = Self::open(home, limits, clock, pulse);
            // If the caller stopped waiting, there will be no jobs either.
            let _ = opened.send(Arc::clone(&writer.shared));
            writer.run(&inbox);
        })?;
        answer.recv().map_err(io::Error::other)
    }

    fn open(home: JournalHome, limits: JournalLimits, clock: JournalClock, pulse: Arc<DiskMonitor>) -> Self {
        let path = database(home.path());
        let mark = SeqFile::read(&home);
        let time = AgeClock { began: clock(), at: Instant::now(), clock };
        let shared = Arc::new(JournalShared {
            status: watch::Sender::new(JournalStatus { path: path.clone(), ..JournalStatus::default() }),
            appended: watch::Sender::new(0),
            next_seq: 0,
            memos: HashMap::new(),
            pending_memos: Mutex::default(),
            memo_job_queued: AtomicBool::new(false),
            has_delivery: AtomicBool::new(false),
            on_dropped: Mutex::default(),
            on_memos: Mutex::default(),
            memos_unread: AtomicBool::new(false),
            disk_monitor: pulse,
            write_times: DurationTotals::default(),
        });
        let mut writer = Self {
            home,
            path,
            limits,
            time,
            shared,
            seq_file: mark,
            store: None,
            reason: None,
            batch_failed: false,
            delivered_unstored: VecDeque::new(),
            seq_error: None,
            last_possible_seq: None,
            closed: false,
            pruning: PruningProgress::default(),
            damaged: None,
            through: 0,
            lost_ranges: LostRanges::default(),
            last_maintenance: None,
            checks_left: CHECKS_MAX,
            last_check: Instant::now(),
            age_pruning_enabled: false,
            late_memos: None,
            memos_missed: 0,
        };
        let was_there = writer.home.stat("").is_some();
        // Copied before the errors of this start are recorded.
        let noted = writer.seq_file.clone();
        let mut facts = None;
        // An error is visible in the status.
        let _ = writer.ensure_open(&mut facts);
        if facts.is_none() && was_there {
            // The database cannot be opened for writing, but it may be readable.
            facts = read::open(writer.home.path())
                .ok()
                .flatten()
                .and_then(|connection| read_stored_state(&connection).ok());
        }
        writer.init_seq(facts, was_there, &noted);
        writer.store_lost_ranges();
        // The database stays aside for inspection and is reported until it is removed.
        writer.damaged = writer.damaged.or_else(|| last_put_aside(&writer.home.directory().ok()?));
        writer.publish_status();
        writer
    }

    /// Determines the number of the next event, which no earlier event may have had. If the database `was_there`, its
    /// last number is compared with the one `noted` by the last satellite.
    fn init_seq(&mut self, facts: Option<StoredState>, was_there: bool, noted: &SeqFile) {
        let last = facts.as_ref().map_or(0, |facts| facts.last);
        let reliable = was_there && facts.is_some() && self.damaged.is_none();
        let used = noted.last_used(reliable.then_some(last)).max(last);
        if facts.is_none() && was_there {
            // An unreadable database does not mean that its events are lost.
            self.last_possible_seq = Some(used);
            self.shared.memos_unread.store(true, Ordering::Release);
            tracing::error!(
                "cannot read the stored states of servers either; servers start anew until the states can be read"
            );
        } else {
            self.lost_ranges.add(last + 1, used);
        }
        self.through = last;
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.next_seq = used + 1;
            shared.memos = facts.map(|facts| facts.memos).unwrap_or_default();
            shared.appended.send_replace(last);
        }
        // Before the first event nothing is reserved, so that a database emptied later differs from one that was never
        // filled. Skipped numbers are reported as lost, so they count as stored.
        if used > 0 {
            self.seq_file.record_used(used, self.store.is_none());
        }
    }

    fn run(&mut self, inbox: &mpsc::Receiver<JournalJob>) {
        let pulse = Arc::clone(&self.shared.disk_monitor);
        loop {
            let due = self.seq_file.record_due().filter(|_| !self.closed).unwrap_or(Duration::MAX);
            match inbox.recv_timeout(due.min(self.maintenance_due())) {
                Ok(job) => pulse.run_monitored(|| {
                    job(self);
                    self.checkpoint_if_due();
                }),
                Err(mpsc::RecvTimeoutError::Timeout) => pulse.run_monitored(|| {
                    if self.maintenance_due().is_zero() {
                        self.run_maintenance();
                        self.checkpoint_if_due();
                    }
                    if !self.closed && self.seq_file.record_due() == Some(Duration::ZERO) {
                        self.seq_file.record();
                    }
                }),
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
            }
        }
        self.close();
    }

    fn maintenance_due(&self) -> Duration {
        let pause = if self.closed || self.reason.is_none() { TIDY_INTERVAL } else { RETRY };
        self.last_maintenance.map_or(Duration::ZERO, |at| pause.saturating_sub(at.elapsed()))
    }

    /// Moves the WAL into the database if it is long. Callers of the last job have their answer.
    fn checkpoint_if_due(&mut self) {
        if let Some(store) = &mut self.store
            && store.is_checkpoint_due()
        {
            self.seq_file.record_before_checkpoint();
            store.checkpoint();
        }
    }

    // ---- jobs ----

    pub(super) fn append(&mut self, batch: &SinkBatch) -> SinkAnswer {
        let began = Instant::now();
        // Older events first, so that events are stored in order.
        let answer = match self.append_delivered() {
            SinkAnswer::Accepted => self.append_one(batch),
            answer => answer,
        };
        self.shared.write_times.record(began.elapsed());
        answer
    }

    fn append_one(&mut self, batch: &SinkBatch) -> SinkAnswer {
        let last = batch.events.last().map_or(0, |envelope| envelope.seq);
        // Opening the database may read memos, which is required before newer ones are written.
        let through = self.through;
        let opened = self.ensure_open(&mut None);
        let reserved = self.write_seq_file(|file| file.reserve(through, last));
        if let Err(error) = opened.and(reserved) {
            self.batch_failed = true;
            return SinkAnswer::Unavailable(error.to_string());
        }
        let memos = self.take_memos();
        let limits = self.limits.clone();
        let answer = self.with_database(|store| store.append(batch, &memos, &limits));
        self.batch_failed = answer.is_err();
        if answer != Ok(SinkAnswer::Accepted) {
            self.put_memos_back(memos);
        }
        match answer {
            Ok(SinkAnswer::Accepted) => {
                self.through = self.through.max(last);
                self.clear_error();
                self.seq_file.record_stored(last);
                let copies = self.copy_lines_if_due();
                if self.make_room(batch.events.len()) || copies {
                    self.last_maintenance = None;
                }
                self.publish_status();
                SinkAnswer::Accepted
            }
            Ok(answer) => answer,
            Err(error) => SinkAnswer::Unavailable(error.to_string()),
        }
    }

    pub(super) fn grant(&mut self, through: u64) -> Result<(), JournalError> {
        // Another process may have deleted the directory. The error is visible in the status; the file of the numbers
        // may be usable.
        if let Err(error @ JournalError::Closed) = self.ensure_open(&mut None) {
            return Err(error);
        }
        let stored = self.through;
        self.write_seq_file(|file| file.grant(stored, through))
    }

    /// Writes the file of the numbers. Errors are recorded in the status.
    fn write_seq_file(&mut self, write: impl FnOnce(&mut SeqFile) -> io::Result<()>) -> Result<(), JournalError> {
        match write(&mut self.seq_file) {
            Ok(()) => {
                if self.seq_error.take().is_some() {
                    tracing::info!("event numbers can be reserved again");
                    self.publish_status();
                }
                Ok(())
            }
            Err(error) => {
                let reason = format!("cannot reserve event numbers in {}: {error}", self.home.path().display());
                if self.seq_error.as_ref() != Some(&reason) {
                    tracing::error!(reason, "cannot reserve event numbers: events wait in memory; trying again");
                    self.seq_error = Some(reason.clone());
                    self.publish_status();
                }
                Err(JournalError::Unavailable(reason))
            }
        }
    }

    pub(super) fn queue_delivered(&mut self, batch: Arc<SinkBatch>) {
        self.delivered_unstored.push_back(batch);
        let mut count: usize = self.delivered_unstored.iter().map(|batch| batch.events.len()).sum();
        while count > OWED_MAX
            && let Some(oldest) = self.delivered_unstored.pop_front()
        {
            count -= oldest.events.len();
            if let (Some(first), Some(last)) = (oldest.events.first(), oldest.events.last()) {
                self.lost_ranges.add(first.seq, last.seq);
            }
        }
    }

    fn append_delivered(&mut self) -> SinkAnswer {
        while let Some(batch) = self.delivered_unstored.front().cloned() {
            match self.append_one(&batch) {
                answer @ SinkAnswer::Unavailable(_) => return answer,
                // The batch was delivered. If it can never be stored, it is dropped.
                _ => self.delivered_unstored.pop_front(),
            };
        }
        if self.lost_ranges != LostRanges::default() {
            self.store_lost_ranges();
        }
        SinkAnswer::Accepted
    }

    pub(super) fn outbox(&mut self, after: u64, max: usize) -> Result<Vec<(u64, String)>, JournalError> {
        self.with_database(|store| store.outbox(after, max))
    }

    pub(super) fn delivery(&mut self) -> Result<DeliveryState, JournalError> {
        self.with_database(|store| Ok(store.delivery()))
    }

    pub(super) fn store_delivery(&mut self, settled: u64, sending: Option<&BatchInFlight>) -> Result<(), JournalError> {
        match self.write(|store| store.store_delivery(settled, sending.cloned())) {
            // On a full disk delivery continues with what can be read, because delivery allows pruning.
            Err(JournalError::Unavailable(_)) if self.store.is_some() => {}
            outcome => outcome?,
        }
        self.publish_status();
        Ok(())
    }

    pub(super) fn expect_no_delivery(&mut self) {
        if let Err(error) = self.write(JournalDatabase::expect_no_delivery) {
            tracing::debug!(%error, "cannot store that no sink is configured");
        }
    }

    pub(super) fn command(&mut self, id: &str) -> Result<Option<CommandRecord>, JournalError> {
        self.with_database(|store| store.command(id))
    }

    pub(super) fn record_command(&mut self, id: &str, result: Option<&str>) -> Result<(), JournalError> {
        let now = self.time.now();
        self.write(|store| store.record_command(id, result, now))
    }

    /// Stores the pending memos. After an error they stay pending for the next successful transaction.
    pub(super) fn write_memos(&mut self) -> Result<(), JournalError> {
        self.ensure_open(&mut None)?;
        let memos = self.take_memos();
        if memos.is_empty() {
            return Ok(());
        }
        let written = self.write(|store| store.remember(&memos));
        if written.is_err() {
            self.put_memos_back(memos);
        }
        written
    }

    pub(super) fn enable_age_pruning(&mut self) {
        self.age_pruning_enabled = true;
        self.last_maintenance = None;
        self.report_lost_ranges();
    }

    pub(super) fn report_lost_ranges(&mut self) {
        let hook = self.shared.on_dropped.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(hook) = &*hook else { return };
        // Losses that are not recorded in a database are reported once they are.
        for (from, to) in self.store.as_mut().map(JournalDatabase::take_unreported).unwrap_or_default() {
            hook(from, to);
        }
    }

    pub(super) fn close(&mut self) {
        self.append_delivered();
        // The error is logged and visible in the status.
        let _ = self.write_memos();
        self.store = None;
        if !std::mem::replace(&mut self.closed, true) {
            self.seq_file.close();
        }
    }

    // ---- the disk ----

    /// Runs `act` on the database and opens it if necessary. Errors are recorded in the status.
    fn with_database<T>(
        &mut self,
        mut act: impl FnMut(&mut JournalDatabase) -> rusqlite::Result<T>,
    ) -> Result<T, JournalError> {
        self.ensure_open(&mut None)?;
        for attempt in 0.. {
            let Some(store) = &mut self.store else { break };
            match act(store) {
                Ok(done) => return Ok(done),
                Err(error) if attempt == 0 && is_damage(&error) => self.replace_damaged(&error)?,
                Err(error) => return Err(self.record_error(&error)),
            }
        }
        Err(JournalError::Closed)
    }

    /// Runs `act` as [`Self::with_database`] does, and clears the recorded error after success.
    fn write<T>(&mut self, act: impl FnMut(&mut JournalDatabase) -> rusqlite::Result<T>) -> Result<T, JournalError> {
        let done = self.with_database(act)?;
        if !self.batch_failed {
            self.clear_error();
        }
        Ok(done)
    }

    fn ensure_open(&mut self, facts: &mut Option<StoredState>) -> Result<(), JournalError> {
        if self.closed {
            return Err(JournalError::Closed);
        }
        if self.store.is_some() && !self.may_check_files() {
            return Ok(());
        }
        match self.store.as_mut().map(JournalDatabase::is_in_place) {
            Some(true) => return Ok(()),
            Some(false) => self.abandon(),
            None => {}
        }
        self.seq_file.record_before_checkpoint();
        let was_there = self.home.stat("").is_some();
        match JournalDatabase::open(&self.home, facts) {
            Ok(store) => {
                let last = store.last();
                self.store = Some(store);
                self.read_late_memos();
                self.record_lost_ranges(last, if was_there { last + 1 } else { 1 });
                self.store_lost_ranges();
                self.clear_error();
                Ok(())
            }
            Err(SchemaError::Sqlite(error)) if is_damage(&error) => {
                self.replace_damaged(&error)?;
                *facts = self.store.as_ref().and_then(|store| store.stored_state().ok());
                Ok(())
            }
            Err(error) => Err(self.record_error(&error)),
        }
    }

    /// Returns true if a check of the files is permitted now. Without a limit every batch of a storm would resolve paths.
    fn may_check_files(&mut self) -> bool {
        let elapsed = self.last_check.elapsed().as_secs();
        if elapsed > 0 {
            self.checks_left = CHECKS_MAX.min(self.checks_left + elapsed);
            self.last_check = Instant::now();
        }
        let may = self.checks_left > 0;
        self.checks_left = self.checks_left.saturating_sub(1);
        may
    }

    /// Reads memos that could not be read at the start. Must run before newer ones are written.
    fn read_late_memos(&mut self) {
        if self.last_possible_seq.is_some()
            && let Some(Ok(facts)) = self.store.as_ref().map(JournalDatabase::stored_state)
        {
            self.late_memos = Some(facts.memos);
            self.call_late_memos_hook();
        }
    }

    pub(super) fn call_late_memos_hook(&mut self) {
        let hook = self.shared.on_memos.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(hook) = &*hook else { return };
        let Some(overdue) = self.late_memos.take() else { return };
        let (replacement, missed) = hook(overdue);
        self.memos_missed += missed;
        self.put_memos_back(replacement);
    }

    /// Records losses after the database was opened. It contains events up to `last`: known events after it are lost,
    /// and stored ones from `from` on.
    fn record_lost_ranges(&mut self, last: u64, from: u64) {
        if let Some(used) = self.last_possible_seq.take() {
            self.through = last;
            self.lost_ranges.add(last + 1, used);
        } else if last < self.through {
            self.lost_ranges.add(from, self.through);
        }
    }

    fn abandon(&mut self) {
        let Some(mut store) = self.store.take() else { return };
        if store.is_database_in_place() {
            tracing::error!(path = %self.path.display(), "the write-ahead log of the journal was deleted; repairing");
            store.checkpoint_deleted_wal();
        } else {
            tracing::error!(path = %self.path.display(), "the journal was deleted; starting a new one");
            self.lost_ranges.merge(&store.into_lost_ranges());
            self.seq_file.mark_unwritten();
        }
    }

    fn replace_damaged(&mut self, error: &rusqlite::Error) -> Result<(), JournalError> {
        // Closes the database before it is renamed, to release its locks and its log.
        if let Some(store) = self.store.take() {
            self.lost_ranges.merge(&store.into_lost_ranges());
        }
        let put = |directory: DataDir| -> io::Result<_> { Ok((put_aside(&directory, self.time.now())?, directory)) };
        let (name, directory) = match self.home.directory().and_then(put) {
            Ok(put) => put,
            Err(error) => return Err(self.record_error(&error)),
        };
        let aside = directory.path().join(&name);
        // If the satellite is killed before the copy is complete, the next one must not trust the new database.
        self.seq_file.record_used(self.through, true);
        tracing::error!(
            %error, aside = %aside.display(),
            "the journal is damaged: it was put aside, and its readable content is copied"
        );
        let mut store = match JournalDatabase::open(&self.home, &mut None) {
            Ok(store) => store,
            Err(error) => return Err(self.record_error(&error)),
        };
        let salvaged = match store.import_with(|connection| salvage(&directory, &name, connection)) {
            Ok(salvaged) => salvaged,
            Err(error) => return Err(self.record_error(&error)),
        };
        tracing::warn!(events = salvaged.events, "copied the readable content of the damaged journal");
        self.damaged = Some(aside);
        let last = store.last();
        self.store = Some(store);
        self.read_late_memos();
        salvaged.lost.iter().for_each(|(from, to)| self.lost_ranges.add(*from, *to));
        self.record_lost_ranges(last, last + 1);
        self.store_lost_ranges();
        self.clear_error();
        self.publish_status();
        Ok(())
    }

    fn record_error(&mut self, error: &(dyn std::error::Error + 'static)) -> JournalError {
        let reason = format!("the journal {} cannot be used: {error}", self.path.display());
        if self.reason.as_ref() != Some(&reason) {
            tracing::error!(reason, "the journal cannot be used: events are kept in memory; trying again");
        }
        self.reason = Some(reason.clone());
        if !error.downcast_ref().is_some_and(is_full) {
            // The error may concern only the open file, so the database is opened again. On a full disk it stays open,
            // because stored events can still be read and delivered.
            self.store = None;
        }
        // From now on numbers may be in use that are not stored.
        self.seq_file.record_used(self.through, true);
        self.shared.status.send_modify(|status| {
            status.state = JournalState::Memory;
            status.reason = Some(reason.clone());
        });
        JournalError::Unavailable(reason)
    }

    fn clear_error(&mut self) {
        if self.reason.take().is_some() {
            tracing::info!(path = %self.path.display(), "the journal is written again");
            self.publish_status();
        }
    }

    fn store_lost_ranges(&mut self) {
        let Some(store) = &mut self.store else { return };
        if store.store_lost_ranges(&self.lost_ranges).is_ok() {
            self.lost_ranges = LostRanges::default();
            self.report_lost_ranges();
        }
    }

    // ---- maintenance between jobs ----

    fn has_delivery(&self) -> bool {
        self.shared.has_delivery.load(Ordering::Acquire)
    }

    /// Prunes in steps until little more than twice the `added` events are removed, so that a batch does not wait for
    /// long; the rest is pruned in idle time. Returns true if more must be pruned.
    fn make_room(&mut self, added: usize) -> bool {
        let (delivers, limits) = (self.has_delivery(), self.limits.clone());
        let (mut removed, enough) = (0, 2 * added as u64);
        let more = loop {
            let Some(store) = &mut self.store else { return false };
            match store.make_room(&limits, delivers, &mut self.pruning) {
                Ok(PruningStep::Nothing) => break false,
                Ok(PruningStep::Removed(count)) => removed += count,
                Ok(PruningStep::Copied) => break true,
                Err(error) => {
                    self.handle_maintenance_error(&error);
                    break false;
                }
            }
            if removed > enough {
                break true;
            }
        };
        if !more {
            // Reported at the end, so that it is reported once.
            self.report_lost_ranges();
        }
        more
    }

    /// Copies some log lines to their tables. Returns true if more must be copied.
    fn copy_lines_if_due(&mut self) -> bool {
        let Some(store) = &mut self.store else { return false };
        let copied = store.copy_lines_if_due(&self.limits);
        self.more_or_handle_error(copied)
    }

    fn more_or_handle_error(&mut self, more: rusqlite::Result<bool>) -> bool {
        more.unwrap_or_else(|error| {
            self.handle_maintenance_error(&error);
            false
        })
    }

    /// Replaces a damaged database. The next maintenance tries again after any other error.
    fn handle_maintenance_error(&mut self, error: &rusqlite::Error) {
        if is_damage(error) {
            // An error is visible in the status.
            if self.replace_damaged(error).is_ok() {
                self.last_maintenance = None;
            }
        } else {
            tracing::warn!(%error, "cannot copy log lines or make room in the journal");
        }
    }

    fn run_maintenance(&mut self) {
        self.last_maintenance = Some(Instant::now());
        if self.closed || self.ensure_open(&mut None).is_err() {
            return;
        }
        self.catch_up();
        if self.copy_lines_if_due() {
            self.last_maintenance = None;
        }
        if !self.age_pruning_enabled {
            return;
        }
        let (limits, now, delivers) = (self.limits.clone(), self.time.bounded_now(), self.has_delivery());
        let Some(store) = &mut self.store else { return };
        let old = store.prune_old(&limits, now, delivers);
        let mut more = self.more_or_handle_error(old);
        more |= self.make_room(0);
        if !more && let Some(store) = &mut self.store {
            let shrunk = store.shrink(limits.size_max);
            more = self.more_or_handle_error(shrunk);
        }
        if more {
            // Immediately, but after the jobs that arrived in the meantime.
            self.last_maintenance = None;
        }
        self.publish_status();
    }

    fn catch_up(&mut self) {
        self.append_delivered();
        // An error is visible in the status.
        let _ = self.write_memos();
        if self.reason.is_some() && !self.batch_failed {
            // An error is visible in the status.
            let _ = self.write(JournalDatabase::probe);
        }
    }

    fn take_memos(&self) -> Memos {
        // Cleared first: a memo that is set after this sends a new notification.
        self.shared.memo_job_queued.store(false, Ordering::Release);
        std::mem::take(&mut *self.shared.pending_memos.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn put_memos_back(&self, memos: Memos) {
        let mut pending = self.shared.pending_memos.lock().unwrap_or_else(PoisonError::into_inner);
        for (instance, memo) in memos {
            // A memo that was set in the meantime is newer.
            pending.entry(instance).or_insert(memo);
        }
    }

    pub(super) fn publish_status(&mut self) {
        let extent = self.store.as_ref().and_then(|store| store.extent().ok());
        let delivers = self.has_delivery();
        let cursor = self.store.as_ref().map(|store| store.delivery().cursor);
        let through = self.through;
        self.shared.status.send_modify(|status| {
            let reason = self.reason.as_ref().or(self.seq_error.as_ref());
            status.state = if reason.is_some() { JournalState::Memory } else { JournalState::Ok };
            status.reason = reason.cloned();
            status.journalled_through = through;
            if let Some(extent) = extent {
                status.first_seq = extent.first;
                status.last_seq = extent.last;
                status.bytes = extent.bytes;
            }
            if let Some(cursor) = cursor {
                let last = status.last_seq.unwrap_or(0);
                let first_left = status.first_seq.unwrap_or(0).saturating_sub(1);
                status.backlog = if delivers { last.saturating_sub(cursor.max(first_left)) } else { 0 };
            }
            status.damaged.clone_from(&self.damaged);
            status.pruned_unsent = self.pruning.unsent;
            status.memos_missed = self.memos_missed;
        });
        self.shared.appended.send_if_modified(|appended| std::mem::replace(appended, through) != through);
    }
}

fn is_full(error: &rusqlite::Error) -> bool {
    error.sqlite_error_code() == Some(ErrorCode::DiskFull)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_age_clock_ignores_jumps_forward_and_follows_jumps_back() {
        let began = Timestamp::from_second(1_780_000_000).unwrap();
        let hour = jiff::SignedDuration::from_secs(3600);
        for (jump, expected) in [(24 * 365, hour), (1, hour), (0, jiff::SignedDuration::ZERO), (-48, hour * -48)] {
            let time = AgeClock {
                clock: Arc::new(move || began + hour * jump),
                began,
                at: Instant::now().checked_sub(Duration::from_secs(3600)).unwrap(),
            };
            assert_eq!(time.now(), began + hour * jump);
            let off = time.bounded_now().duration_since(began + expected);
            assert!(off.abs() < jiff::SignedDuration::from_secs(60), "{jump} hours: {}", time.bounded_now());
        }
    }
}
