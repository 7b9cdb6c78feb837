//! The database, for the only thread that writes it. Each method executes one transaction or only reads.
//!
//! In this process only `SQLite` opens the file of the database: closing another descriptor would release its locks on
//! the file. Other code uses `stat`.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use mcp_satellite_actors::model::event::{Envelope, Event};
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::seam::{SinkAnswer, SinkBatch};
use rusqlite::hooks::Wal;
use rusqlite::{Connection, OpenFlags, OptionalExtension, Transaction, TransactionBehavior, params};

use super::JournalLimits;
use super::block::{BlockBuilder, EventBlock};
use super::lines::{self, UncopiedLines};
use super::lost_ranges::LostRanges;
use super::meta::{get, set};
use super::read::{EventFacets, read_chunk, to_i64};
use super::schema::{self, SchemaError};
use super::shared::{BatchInFlight, CommandRecord, DATABASE, DeliveryState, JournalHome, Memos};
use mcp_satellite_files::data_dir::OpenMode;

/// Timeout for locks of other processes. Only the satellite writes, so this is a person with a tool.
const BUSY_TIMEOUT: Duration = Duration::from_secs(3);
/// Number of WAL pages (16 MiB) after which the WAL is moved into the database. The WAL file keeps its largest length.
const WAL_CHECKPOINT: u32 = 4096;
/// Number of further WAL pages after which a checkpoint that was blocked by a reader is tried again.
const WAL_RETRY: u32 = 1024;
/// Number of WAL pages (64 MiB) beyond which a checkpoint waits for the readers that block it.
const WAL_MAX: u32 = 4 * WAL_CHECKPOINT;
/// Size of the header of a WAL page, in bytes.
const WAL_HEADER: u64 = 24;
const READER_PATIENCE: Duration = Duration::from_millis(200);
/// Number of events in a batch from which they are stored in blocks. A few events are stored in rows, which tools can
/// read.
const BLOCK_MIN: usize = 8;
const PRUNE_MAX: u32 = 5_000;
const PRUNE_MIN: u32 = 50;
const LINES_MAX: u32 = 500;
/// Fraction of the size limit down to which events are pruned, so that not every batch prunes.
const PRUNE_TO: (u64, u64) = (19, 20);
/// Approximate overhead of a stored line, in bytes.
const LINE_BYTES: u32 = 48;
/// Number of pages that are returned to the file system in one step.
const VACUUM_STEP: u64 = 2_048;
const COMMANDS_KEPT_MS: i64 = 7 * 24 * 3600 * 1000;

#[derive(Debug, Default)]
pub(super) struct StoredState {
    pub(super) last: u64,
    pub(super) memos: HashMap<InstanceId, String>,
}

pub(super) struct JournalDatabase {
    connection: Connection,
    home: JournalHome,
    /// Device and inode of the open file, to detect that another file is at its path.
    identity: (u64, u64),
    wal: Option<(u64, u64)>,
    /// Number of pages in the WAL, as of the last transaction.
    wal_pages: Arc<AtomicU32>,
    /// Number of WAL pages at which the next checkpoint is due.
    checkpoint_at: u32,
    page_size: u64,
    /// Last event that was ever stored here. It may have been pruned.
    last: u64,
    delivery: DeliveryState,
    delivery_pending: bool,
    /// Last event that was passed to the delivery. It may be in flight and is not pruned for lack of space.
    handed_out: u64,
    lost_ranges: LostRanges,
    uncopied: UncopiedLines,
    limits_stored: bool,
    block: BlockBuilder,
}

pub(super) struct StoredExtent {
    pub(super) first: Option<u64>,
    pub(super) last: Option<u64>,
    pub(super) bytes: u64,
}

impl JournalDatabase {
    /// Opens or creates the database. `facts` receives its state before anything is written, even if writing then
    /// fails.
    pub(super) fn open(home: &JournalHome, facts: &mut Option<StoredState>) -> Result<Self, SchemaError> {
        let directory = home.directory()?;
        if directory.stat(DATABASE).is_none() {
            // Created here so that only its owner has access. SQLite copies the permissions to the files beside it and
            // reports a failure itself when it opens the file.
            // An existing file is not opened, because closing it would release SQLite's locks on it.
            drop(directory.open_file(DATABASE, OpenMode::Write));
        }
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
            | OpenFlags::SQLITE_OPEN_CREATE
            | OpenFlags::SQLITE_OPEN_NO_MUTEX
            | OpenFlags::SQLITE_OPEN_NOFOLLOW;
        let mut connection = Connection::open_with_flags(directory.database_path(DATABASE)?, flags)?;
        connection.busy_timeout(BUSY_TIMEOUT)?;
        connection.set_prepared_statement_cache_capacity(64);
        let version = schema::version(&connection, schema::MIGRATIONS)?;
        if version > 0 {
            *facts = Some(read_stored_state(&connection)?);
        }
        // Has an effect only before the first table exists.
        connection.pragma_update(None, "auto_vacuum", "incremental")?;
        let mode: String = connection.pragma_update_and_check(None, "journal_mode", "wal", |row| row.get(0))?;
        if mode != "wal" {
            tracing::warn!(
                mode,
                "this file system has no shared memory for the journal: readers and the satellite wait for each other"
            );
        }
        connection.pragma_update(None, "synchronous", "normal")?;
        // The thread of the journal starts checkpoints itself: before one it records the stored numbers (`seq_file`).
        let wal_pages = Arc::new(AtomicU32::new(0));
        let pages_seen = Arc::clone(&wal_pages);
        let on_commit = move |_: &mut Wal, pages| {
            pages_seen.store(u32::try_from(pages).unwrap_or(0), Ordering::Relaxed);
            Ok(())
        };
        connection.wal_hook(Some(on_commit))?;
        connection.pragma_update(None, "journal_size_limit", i64::from(WAL_MAX) * 4096)?;
        connection.pragma_update(None, "trusted_schema", false)?;
        connection.pragma_update(None, "cell_size_check", true)?;
        schema::migrate(&mut connection, schema::MIGRATIONS)?;
        let read = read_stored_state(&connection)?;
        let last = read.last;
        *facts = Some(read);
        let page_size = connection.pragma_query_value(None, "page_size", |row| row.get::<_, i64>(0))?;
        let mut store = Self {
            identity: home.stat("").map(|found| found.identity).unwrap_or_default(),
            home: home.clone(),
            connection,
            wal: None,
            wal_pages,
            checkpoint_at: WAL_CHECKPOINT,
            page_size: page_size.unsigned_abs(),
            last,
            delivery: DeliveryState::default(),
            delivery_pending: false,
            handed_out: 0,
            lost_ranges: LostRanges::default(),
            uncopied: UncopiedLines::default(),
            limits_stored: false,
            block: BlockBuilder::default(),
        };
        store.init_delivery()?;
        store.uncopied = UncopiedLines::open(&store.connection, last)?;
        Ok(store)
    }

    /// Reads the progress of the delivery and writes it back, so that a disk that accepts nothing is noticed before the
    /// first event.
    fn init_delivery(&mut self) -> Result<(), rusqlite::Error> {
        let transaction = self.connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        // A new receiver gets the events from now on.
        let cursor = get(&transaction, "cursor")?.and_then(|text| text.parse().ok()).unwrap_or(self.last);
        set(&transaction, "cursor", &cursor)?;
        let sending = get(&transaction, "sending")?.and_then(|text| serde_json::from_str(&text).ok()).flatten();
        let lost = get(&transaction, "gone")?.and_then(|text| serde_json::from_str(&text).ok());
        transaction.commit()?;
        self.lost_ranges = LostRanges::from_stored(lost.unwrap_or_default());
        self.handed_out = sending.as_ref().map_or(cursor, |sending: &BatchInFlight| sending.last.max(cursor));
        self.delivery = DeliveryState { cursor, sending };
        self.stat_wal();
        Ok(())
    }

    pub(super) fn is_database_in_place(&self) -> bool {
        self.home.stat("").map(|found| found.identity) == Some(self.identity)
    }

    /// Returns true if the open files are still at their paths, so that other processes find what is written.
    pub(super) fn is_in_place(&mut self) -> bool {
        if !self.is_database_in_place() {
            return false;
        }
        let known = self.wal;
        self.stat_wal();
        known.is_none() || known == self.wal
    }

    fn stat_wal(&mut self) {
        self.wal = self.home.stat("-wal").map(|found| found.identity);
    }

    pub(super) fn last(&self) -> u64 {
        self.last
    }

    pub(super) fn import_with<T>(&mut self, act: impl FnOnce(&mut Connection) -> T) -> rusqlite::Result<T> {
        let outcome = act(&mut self.connection);
        self.last = read_stored_state(&self.connection)?.last;
        self.init_delivery()?;
        self.uncopied = UncopiedLines::open(&self.connection, self.last)?;
        Ok(outcome)
    }

    pub(super) fn stored_state(&self) -> rusqlite::Result<StoredState> {
        read_stored_state(&self.connection)
    }

    pub(super) fn delivery(&self) -> DeliveryState {
        self.delivery.clone()
    }

    pub(super) fn append(
        &mut self,
        batch: &SinkBatch,
        memos: &Memos,
        limits: &JournalLimits,
    ) -> rusqlite::Result<SinkAnswer> {
        let transaction = self.connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let (mut lost_ranges, mut announced) = (self.lost_ranges.clone(), false);
        let new = || batch.events.iter().enumerate().filter(|(_, envelope)| envelope.seq > self.last);
        let last = new().next_back().map_or(self.last, |(_, envelope)| envelope.seq);
        let in_rows = new().count() < BLOCK_MIN;
        let invalid = |index, error: &serde_json::Error| {
            Ok(SinkAnswer::Invalid(Some(index), format!("the event cannot be written as JSON: {error}")))
        };
        // A batch that failed may have left events in the block.
        self.block.clear();
        for (index, envelope) in new() {
            let mut in_block = false;
            if let Event::EventsDropped { from_seq, to_seq } = &envelope.event {
                announced |= lost_ranges.remove_covered(*from_seq, *to_seq);
            } else if !in_rows {
                match self.block.push(envelope) {
                    Ok(true) => in_block = true,
                    Ok(false) => {
                        insert_block(&transaction, self.block.take().as_ref())?;
                        in_block = self.block.push(envelope).unwrap_or(false);
                    }
                    Err(error) => return invalid(index, &error),
                }
            }
            if !in_block {
                match serde_json::to_string(envelope) {
                    Ok(body) => insert_row(&transaction, envelope, &body)?,
                    Err(error) => return invalid(index, &error),
                }
            }
        }
        insert_block(&transaction, self.block.take().as_ref())?;
        if !self.limits_stored {
            lines::store_limits(&transaction, limits)?;
        }
        write_memos(&transaction, memos)?;
        if self.delivery_pending {
            write_delivery(&transaction, &self.delivery)?;
        }
        if announced {
            set(&transaction, "gone", &lost_ranges.to_stored())?;
        }
        transaction.commit()?;
        new().for_each(|(_, envelope)| self.uncopied.add(envelope, limits));
        self.last = last;
        self.limits_stored = true;
        self.delivery_pending = false;
        self.lost_ranges = lost_ranges;
        Ok(SinkAnswer::Accepted)
    }

    /// Copies some of the last lines of each instance from their events to the tables of lines, if many are not copied
    /// yet. Returns true if more must be copied.
    pub(super) fn copy_lines_if_due(&mut self, limits: &JournalLimits) -> rusqlite::Result<bool> {
        if self.uncopied.is_due(self.last) { self.copy_lines(limits) } else { Ok(false) }
    }

    fn copy_lines(&mut self, limits: &JournalLimits) -> rusqlite::Result<bool> {
        self.uncopied.copy_step(&mut self.connection, self.last, limits)
    }

    pub(super) fn remember(&mut self, memos: &Memos) -> rusqlite::Result<()> {
        let transaction = self.connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        write_memos(&transaction, memos)?;
        transaction.commit()
    }

    pub(super) fn outbox(&mut self, after: u64, max: usize) -> rusqlite::Result<Vec<(u64, String)>> {
        let mut rows = Vec::new();
        read_chunk(&self.connection, after, max, |stored| {
            rows.push((stored.seq, stored.body.to_owned()));
            Ok(())
        })?;
        self.handed_out = rows.last().map_or(self.handed_out, |(seq, _)| self.handed_out.max(*seq));
        Ok(rows)
    }

    /// Stores the progress of the delivery. If that fails, it is kept in memory and written with the next successful
    /// transaction; a `kill -9` before that causes events to be sent again.
    pub(super) fn store_delivery(&mut self, settled: u64, sending: Option<BatchInFlight>) -> rusqlite::Result<()> {
        self.delivery = DeliveryState { cursor: self.delivery.cursor.max(settled), sending };
        self.handed_out = self.handed_out.max(self.delivery.cursor);
        self.delivery_pending = true;
        let transaction = self.connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        write_delivery(&transaction, &self.delivery)?;
        transaction.commit()?;
        self.delivery_pending = false;
        Ok(())
    }

    pub(super) fn expect_no_delivery(&mut self) -> rusqlite::Result<()> {
        let DeliveryState { cursor, .. } = self.delivery;
        if cursor < self.last {
            tracing::warn!(
                from = cursor + 1,
                to = self.last,
                "no sink is configured for these events; they are kept, as long as others, for a start with a sink"
            );
            return Ok(());
        }
        self.connection.execute("DELETE FROM meta WHERE key IN ('cursor', 'sending')", [])?;
        Ok(())
    }

    /// Tests the disk with a write that changes nothing.
    pub(super) fn probe(&mut self) -> rusqlite::Result<()> {
        set(&self.connection, "last", &self.last)
    }

    pub(super) fn command(&self, id: &str) -> rusqlite::Result<Option<CommandRecord>> {
        let mut select = self.connection.prepare_cached("SELECT result FROM commands WHERE id = ?1")?;
        let found = select.query_row([id], |row| row.get::<_, Option<String>>(0)).optional()?;
        Ok(found.map(|result| result.map_or(CommandRecord::Started, CommandRecord::Done)))
    }

    pub(super) fn record_command(&self, id: &str, result: Option<&str>, now: Timestamp) -> rusqlite::Result<()> {
        // A completed command does not become a started one.
        let mut upsert = self.connection.prepare_cached(
            "INSERT INTO commands (id, at, result) VALUES (?1, ?2, ?3)
             ON CONFLICT (id) DO UPDATE SET at = excluded.at, result = coalesce(excluded.result, result)",
        )?;
        upsert.execute(params![id, now.as_millisecond(), result])?;
        Ok(())
    }

    pub(super) fn store_lost_ranges(&mut self, more: &LostRanges) -> rusqlite::Result<()> {
        let mut lost = self.lost_ranges.clone();
        lost.merge(more);
        if lost != self.lost_ranges {
            set(&self.connection, "gone", &lost.to_stored())?;
            self.lost_ranges = lost;
        }
        Ok(())
    }

    pub(super) fn take_unreported(&mut self) -> Vec<(u64, u64)> {
        self.lost_ranges.take_unreported()
    }

    pub(super) fn into_lost_ranges(self) -> LostRanges {
        self.lost_ranges
    }

    pub(super) fn checkpoint_deleted_wal(&mut self) {
        if let Err(error) = self.connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())) {
            tracing::warn!(%error, "cannot save the content of the deleted write-ahead log");
        }
    }

    pub(super) fn extent(&self) -> rusqlite::Result<StoredExtent> {
        let mut select = self.connection.prepare_cached(
            "SELECT (SELECT coalesce(first, seq) FROM events ORDER BY seq LIMIT 1), (SELECT max(seq) FROM events)",
        )?;
        let (first, last) =
            select.query_row([], |row| Ok((row.get::<_, Option<i64>>(0)?, row.get::<_, Option<i64>>(1)?)))?;
        let wal = u64::from(self.wal_pages.load(Ordering::Relaxed)) * (self.page_size + WAL_HEADER);
        let bytes = self.pages()?.0 * self.page_size + wal;
        Ok(StoredExtent { first: first.map(i64::unsigned_abs), last: last.map(i64::unsigned_abs), bytes })
    }

    fn pages(&self) -> rusqlite::Result<(u64, u64)> {
        let value = |sql: &str| {
            self.connection.prepare_cached(sql)?.query_row([], |row| row.get::<_, i64>(0)).map(i64::unsigned_abs)
        };
        Ok((value("PRAGMA page_count")?, value("PRAGMA freelist_count")?))
    }

    /// Prunes one step if the database is too large. Lines are pruned if they occupy more than half of the limit. Otherwise delivered events are
    /// pruned first, then the oldest undelivered ones, which are reported as lost if `delivers`.
    pub(super) fn make_room(
        &mut self,
        limits: &JournalLimits,
        delivers: bool,
        pruning: &mut PruningProgress,
    ) -> rusqlite::Result<PruningStep> {
        let size_max = limits.size_max;
        let (pages, free) = self.pages()?;
        let used = (pages - free.min(pages)) * self.page_size;
        let limit = if pruning.under_way { size_max / PRUNE_TO.1 * PRUNE_TO.0 } else { size_max };
        if used <= limit {
            *pruning = PruningProgress { unsent: pruning.unsent, ..PruningProgress::default() };
            return Ok(PruningStep::Nothing);
        }
        let lines = match pruning.lines {
            Some(lines) => lines,
            None => self.size_of_lines()?,
        };
        pruning.lines = Some(lines);
        if lines > size_max / 2 {
            let (count, bytes) = self.delete_lines()?;
            pruning.lines = Some(lines.saturating_sub(bytes));
            pruning.under_way = count > 0;
            return Ok(if count > 0 { PruningStep::Removed(count) } else { PruningStep::Nothing });
        }
        let StoredExtent { first, last, .. } = self.extent()?;
        let count = last.unwrap_or(0).saturating_sub(first.unwrap_or(0));
        let step = u32::try_from(count / PRUNE_TO.1).unwrap_or(PRUNE_MAX).clamp(PRUNE_MIN, PRUNE_MAX);
        let settled = if delivers { self.delivery.cursor } else { u64::MAX };
        let mut oldest = oldest_events(&self.connection, 0, settled, step)?;
        let is_lost = oldest.is_none() && delivers;
        if is_lost {
            oldest = oldest_events(&self.connection, self.handed_out, u64::MAX, step)?;
        }
        // Lines stay longer than their events.
        if oldest.is_some_and(|oldest| oldest.last > self.uncopied.copied_through()) {
            pruning.lines = None;
            if self.copy_lines(limits)? {
                return Ok(PruningStep::Copied);
            }
        }
        let transaction = self.connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let mut lost = self.lost_ranges.clone();
        let mut unsent = 0;
        let removed = oldest.map(|oldest| delete_events(&transaction, oldest)).transpose()?;
        if is_lost && let Some(removed) = &removed {
            // A pruned `events.dropped` event announced a loss that was not delivered, so the loss must be reported
            // again.
            removed.announced.iter().for_each(|(from, to)| lost.add(*from, *to));
            lost.add(removed.first, removed.last);
            set(&transaction, "gone", &lost.to_stored())?;
            unsent = removed.count;
        }
        set(&transaction, "last", &self.last)?;
        transaction.commit()?;
        self.lost_ranges = lost;
        pruning.unsent += unsent;
        let Some(removed) = removed else {
            // The remaining data is too large, and another attempt would change nothing.
            if !std::mem::replace(&mut pruning.stuck, true) {
                tracing::warn!(used, size_max, "the journal exceeds its size limit, and nothing more can be removed");
            }
            pruning.under_way = false;
            return Ok(PruningStep::Nothing);
        };
        pruning.under_way = true;
        Ok(PruningStep::Removed(removed.count))
    }

    fn size_of_lines(&self) -> rusqlite::Result<u64> {
        let size = |table| {
            let sql = format!("SELECT coalesce(sum({}), 0) FROM {table}", size_of_line());
            self.connection.query_row(&sql, [], |row| row.get::<_, i64>(0)).map(i64::unsigned_abs)
        };
        Ok(size("server_logs")? + size("request_logs")?)
    }

    fn delete_lines(&mut self) -> rusqlite::Result<(u64, u64)> {
        let transaction = self.connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let (mut count, mut bytes) = (0, 0);
        for table in ["server_logs", "request_logs"] {
            let mut delete = transaction.prepare_cached(&format!(
                "DELETE FROM {table} WHERE n IN (SELECT n FROM {table} ORDER BY n LIMIT {LINES_MAX}) RETURNING {}",
                size_of_line()
            ))?;
            for size in delete.query_map([], |row| row.get::<_, i64>(0))? {
                bytes += size?.unsigned_abs();
                count += 1;
            }
        }
        transaction.commit()?;
        Ok((count, bytes))
    }

    /// Prunes one step of the data that is too old. Returns true if more must be pruned.
    pub(super) fn prune_old(
        &mut self,
        limits: &JournalLimits,
        now: Timestamp,
        delivers: bool,
    ) -> rusqlite::Result<bool> {
        let ago =
            |age: Duration| now.as_millisecond().saturating_sub(i64::try_from(age.as_millis()).unwrap_or(i64::MAX));
        let (events, lines, commands) =
            (ago(limits.events_age_max), ago(limits.logs_age_max), now.as_millisecond() - COMMANDS_KEPT_MS);
        // Stops at the first event that is young enough: events are ordered by `seq`, and the clock may have jumped.
        let (through, mut removed) = {
            let mut select =
                self.connection.prepare_cached("SELECT coalesce(first, seq), seq, at FROM events ORDER BY seq")?;
            let mut rows = select.query([])?;
            let (mut through, mut count) = (None, 0);
            while count < u64::from(PRUNE_MAX)
                && let Some(row) = rows.next()?
            {
                let (first, last, at) = (row.get::<_, i64>(0)?, row.get::<_, i64>(1)?, row.get::<_, i64>(2)?);
                if at >= events || delivers && last > to_i64(self.delivery.cursor) {
                    break;
                }
                through = Some(last);
                count += last.abs_diff(first) + 1;
            }
            (through, count)
        };
        let is_uncopied = |through: i64| through.unsigned_abs() > self.uncopied.copied_through();
        if (self.uncopied.has_older(lines) || through.is_some_and(is_uncopied)) && self.copy_lines(limits)? {
            return Ok(true);
        }
        let transaction = self.connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        if let Some(through) = through {
            transaction.execute("DELETE FROM events WHERE seq <= ?1", [through])?;
            set(&transaction, "last", &self.last)?;
        }
        for (table, before) in [("server_logs", lines), ("request_logs", lines)] {
            let sql = format!("DELETE FROM {table} WHERE n IN (SELECT n FROM {table} WHERE at < ?1 LIMIT {PRUNE_MAX})");
            removed += transaction.execute(&sql, [before])? as u64;
        }
        transaction.execute("DELETE FROM commands WHERE at < ?1", [commands])?;
        transaction.commit()?;
        Ok(removed >= u64::from(PRUNE_MAX))
    }

    /// Returns one step of free pages to the file system if there are many. Returns true if more must be returned.
    pub(super) fn shrink(&mut self, size_max: u64) -> rusqlite::Result<bool> {
        let (pages, free) = self.pages()?;
        let too_many = free > pages / 4 || pages * self.page_size > size_max;
        if free < VACUUM_STEP / 2 || !too_many {
            return Ok(false);
        }
        // The pragma returns a row for each page.
        let mut vacuum = self.connection.prepare(&format!("PRAGMA incremental_vacuum({VACUUM_STEP})"))?;
        let mut rows = vacuum.query([])?;
        while rows.next()?.is_some() {}
        drop(rows);
        drop(vacuum);
        Ok(self.pages()?.0 < pages)
    }

    pub(super) fn is_checkpoint_due(&mut self) -> bool {
        let pages = self.wal_pages.load(Ordering::Relaxed);
        if pages < WAL_CHECKPOINT {
            // The WAL begins anew.
            self.checkpoint_at = WAL_CHECKPOINT;
        }
        pages >= self.checkpoint_at
    }

    /// Moves the WAL into the database, as far as readers permit. A failure is only logged; the next transaction reports
    /// it.
    pub(super) fn checkpoint(&mut self) {
        let pages = self.wal_pages.load(Ordering::Relaxed);
        self.checkpoint_at = pages + WAL_RETRY;
        if let Err(error) = self.try_checkpoint(pages > WAL_MAX) {
            tracing::debug!(%error, pages, "cannot checkpoint the write-ahead log of the journal now");
        }
    }

    /// Moves the WAL. `wait_for_readers` also truncates the file, or it would stay long.
    fn try_checkpoint(&self, wait_for_readers: bool) -> rusqlite::Result<()> {
        if !wait_for_readers {
            return self.connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()));
        }
        self.connection.busy_timeout(READER_PATIENCE)?;
        let truncated = self.connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()));
        self.connection.busy_timeout(BUSY_TIMEOUT)?;
        truncated
    }
}

/// Result of one step of pruning.
pub(super) enum PruningStep {
    /// The database is small enough, or nothing more can be removed.
    Nothing,
    /// Number of removed events or lines.
    Removed(u64),
    /// Some lines of the events to be pruned were copied.
    Copied,
}

#[derive(Debug, Default)]
pub(super) struct PruningProgress {
    under_way: bool,
    pub(super) unsent: u64,
    lines: Option<u64>,
    stuck: bool,
}

fn size_of_line() -> String {
    format!(
        "length(body) + length(team) + length(user) + length(installation) + 2 * length(instance) + length(server) + {LINE_BYTES}"
    )
}

/// Events that are removed together.
#[derive(Clone, Copy)]
struct OldestEvents {
    first: u64,
    last: u64,
    count: u64,
}

struct RemovedEvents {
    first: u64,
    last: u64,
    count: u64,
    /// Losses that the removed `events.dropped` events announced.
    announced: Vec<(u64, u64)>,
}

/// Returns the oldest events between `after` and `through`: about `max`, because a block is removed as a whole.
fn oldest_events(
    connection: &Connection,
    after: u64,
    through: u64,
    max: u32,
) -> rusqlite::Result<Option<OldestEvents>> {
    let mut oldest: Option<OldestEvents> = None;
    let mut select = connection.prepare_cached(
        "SELECT coalesce(first, seq), seq FROM events
         WHERE seq > ?1 AND seq <= ?2 AND coalesce(first, seq) > ?1 ORDER BY seq",
    )?;
    let mut rows = select.query([to_i64(after), to_i64(through)])?;
    while oldest.as_ref().is_none_or(|oldest| oldest.count < u64::from(max))
        && let Some(row) = rows.next()?
    {
        let (first, last) = (row.get::<_, i64>(0)?.unsigned_abs(), row.get::<_, i64>(1)?.unsigned_abs());
        let before = oldest.unwrap_or(OldestEvents { first, last, count: 0 });
        oldest = Some(OldestEvents { last, count: before.count + last.abs_diff(first) + 1, ..before });
    }
    Ok(oldest)
}

fn delete_events(transaction: &Transaction<'_>, oldest: OldestEvents) -> rusqlite::Result<RemovedEvents> {
    let OldestEvents { first, last, count } = oldest;
    let range = [to_i64(first), to_i64(last)];
    let announced = {
        let mut select = transaction
            .prepare_cached("SELECT body FROM events WHERE seq BETWEEN ?1 AND ?2 AND type = 'events.dropped'")?;
        let bodies = select.query_map(range, |row| row.get::<_, String>(0))?;
        let range = |body: String| match serde_json::from_str::<Envelope>(&body).ok()?.event {
            Event::EventsDropped { from_seq, to_seq } => Some((from_seq, to_seq)),
            _ => None,
        };
        bodies.filter_map(|body| body.map(range).transpose()).collect::<rusqlite::Result<_>>()?
    };
    transaction.execute("DELETE FROM events WHERE seq BETWEEN ?1 AND ?2", range)?;
    Ok(RemovedEvents { first, last, count, announced })
}

fn insert_row(transaction: &Transaction<'_>, envelope: &Envelope, body: &str) -> rusqlite::Result<()> {
    let EventFacets { kind, team, user, instance, server } = EventFacets::from_event(&envelope.event);
    let mut insert = transaction.prepare_cached(
        "INSERT INTO events (seq, at, type, team, user, instance, server, body) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
    )?;
    let at = envelope.timestamp.as_millisecond();
    insert.execute(params![to_i64(envelope.seq), at, kind, team, user, instance, server, body])?;
    Ok(())
}

fn insert_block(transaction: &Transaction<'_>, block: Option<&EventBlock<'_>>) -> rusqlite::Result<()> {
    let Some(EventBlock { first, last, at, bytes }) = block else { return Ok(()) };
    let mut insert = transaction
        .prepare_cached("INSERT INTO events (seq, at, type, body, first, block) VALUES (?1, ?2, '', '', ?3, ?4)")?;
    insert.execute(params![to_i64(*last), at, to_i64(*first), bytes])?;
    Ok(())
}

fn write_memos(transaction: &Transaction<'_>, memos: &Memos) -> rusqlite::Result<()> {
    for (instance, memo) in memos {
        let key = [instance.team.as_str(), instance.user.as_str(), instance.installation.as_str()];
        match memo {
            Some(memo) => transaction
                .prepare_cached(
                    "INSERT OR REPLACE INTO memos (team, user, installation, body) VALUES (?1, ?2, ?3, ?4)",
                )?
                .execute(params![key[0], key[1], key[2], memo])?,
            None => transaction
                .prepare_cached("DELETE FROM memos WHERE team = ?1 AND user = ?2 AND installation = ?3")?
                .execute(key)?,
        };
    }
    Ok(())
}

fn write_delivery(transaction: &Transaction<'_>, state: &DeliveryState) -> rusqlite::Result<()> {
    set(transaction, "cursor", &state.cursor)?;
    set(transaction, "sending", &state.sending)
}

pub(super) fn read_stored_state(connection: &Connection) -> rusqlite::Result<StoredState> {
    let stored = connection.query_row("SELECT max(seq) FROM events", [], |row| row.get::<_, Option<i64>>(0))?;
    let noted = get(connection, "last")?.and_then(|text| text.parse().ok()).unwrap_or(0);
    let mut select = connection.prepare("SELECT team, user, installation, body FROM memos")?;
    let memos = select.query_map([], |row| {
        let text = |at| row.get::<_, String>(at);
        Ok((InstanceId::new(text(0)?.as_str().into(), text(1)?.as_str().into(), text(2)?.as_str().into()), text(3)?))
    })?;
    Ok(StoredState { last: stored.map_or(0, i64::unsigned_abs).max(noted), memos: memos.collect::<Result<_, _>>()? })
}
