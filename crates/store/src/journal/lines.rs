//! Tables of the last log lines and calls of each instance.
//!
//! Lines are stored in their events. Only the last ones of each instance are copied to a table, and only after many
//! lines: of a thousand lines of a busy instance nine hundred would be removed again. Readers add the lines of the events
//! that are not copied yet. Events are pruned only after their lines were copied.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use jiff::Timestamp;
use mcp_satellite_actors::model::event::{Envelope, Event, EventSubject};
use rusqlite::{Connection, TransactionBehavior, params};
use serde::Serialize;

use super::JournalLimits;
use super::meta::{get, set};
use super::read::{read_chunk, to_i64};

/// Minimum number of uncopied lines, so that copying costs little per line.
const LINES_MIN: usize = 20_000;
/// Uncopied lines for each line that the tables keep of the same instances.
const LINES_PER_KEPT: usize = 10;
/// Maximum number of uncopied events with lines; bounds the memory.
const WITH_LINES_MAX: usize = 100_000;
/// Maximum number of uncopied events; bounds the time of readers.
const UNCOPIED_MAX: u64 = 500_000;
const CHUNK: usize = 500;
/// Maximum number of lines that one step copies, about: the events of a step are copied as a whole.
const LINES_PER_STEP: usize = 2_000;
/// Lines whose copy takes about as long as the trimming of one instance.
const LINES_PER_TRIM: usize = 10;
/// Number of chunks of earlier events that one step reads.
const CHUNKS_PER_STEP: usize = 10;

/// Number of the last event whose lines are in the tables.
const COPIED_THROUGH: &str = "lines_through";

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum LineTable {
    ServerLogs,
    RequestLogs,
}

impl LineTable {
    const ALL: [Self; 2] = [Self::ServerLogs, Self::RequestLogs];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::ServerLogs => "server_logs",
            Self::RequestLogs => "request_logs",
        }
    }

    fn marker(self) -> &'static str {
        match self {
            Self::ServerLogs => r#""type":"mcp.server.logs""#,
            Self::RequestLogs => r#""type":"mcp.request.logs""#,
        }
    }

    fn limit_key(self) -> &'static str {
        match self {
            Self::ServerLogs => "server_logs_max",
            Self::RequestLogs => "request_logs_max",
        }
    }

    fn limit_of(self, limits: &JournalLimits) -> usize {
        match self {
            Self::ServerLogs => limits.server_logs_max,
            Self::RequestLogs => limits.request_logs_max,
        }
    }
}

/// Returns the number of the last event whose lines are in the tables; `None` in a database of version 1.
pub(super) fn copied_through(connection: &Connection) -> rusqlite::Result<Option<u64>> {
    Ok(get(connection, COPIED_THROUGH)?.and_then(|text| text.parse().ok()))
}

/// Corrects the number of the last copied event in a database that was salvaged, in case its table `meta` was not
/// readable.
pub(super) fn recover_copied_through(connection: &Connection) -> rusqlite::Result<()> {
    let sql =
        "SELECT max(coalesce((SELECT max(seq) FROM server_logs), 0), coalesce((SELECT max(seq) FROM request_logs), 0))";
    let in_tables = connection.query_row(sql, [], |row| row.get::<_, i64>(0))?.unsigned_abs();
    if copied_through(connection)?.unwrap_or(0) < in_tables {
        set(connection, COPIED_THROUGH, &in_tables)?;
    }
    Ok(())
}

/// Returns true if the event may have lines of this table. Spares most events the parsing.
pub(super) fn may_have_lines(table: LineTable, body: &str) -> bool {
    may_have_any_lines(body) && body.contains(table.marker())
}

fn may_have_any_lines(body: &str) -> bool {
    body.contains(r#".logs","data":"#)
}

/// Returns the maximum number of lines per instance, as stored by the last satellite.
pub(super) fn limit(connection: &Connection, table: LineTable) -> rusqlite::Result<Option<usize>> {
    Ok(get(connection, table.limit_key())?.and_then(|text| text.parse().ok()))
}

/// Stores the limits for readers.
pub(super) fn store_limits(connection: &Connection, limits: &JournalLimits) -> rusqlite::Result<()> {
    LineTable::ALL.into_iter().try_for_each(|table| set(connection, table.limit_key(), &table.limit_of(limits)))
}

/// Event whose lines are not copied yet.
#[derive(Debug)]
struct UncopiedEvent {
    seq: u64,
    table: LineTable,
    instance: Arc<str>,
    lines: usize,
    /// Time of the oldest line, in milliseconds since 1970.
    oldest: i64,
}

impl UncopiedEvent {
    fn from_event(seq: u64, event: &Event) -> Option<Self> {
        let (table, of, lines, oldest) = match event {
            Event::ServerLogs { of, logs } => {
                (LineTable::ServerLogs, of, logs.len(), logs.iter().map(|line| line.timestamp).min())
            }
            Event::RequestLogs { of, requests } => {
                (LineTable::RequestLogs, of, requests.len(), requests.iter().map(|line| line.timestamp).min())
            }
            _ => return None,
        };
        let oldest = oldest.map_or(i64::MAX, Timestamp::as_millisecond);
        Some(Self { seq, table, instance: of.process_id.clone(), lines, oldest })
    }
}

/// Stored events whose lines are not in the tables yet. They are copied in steps, each in a transaction of its own, so
/// that new events do not wait for long.
#[derive(Debug, Default)]
pub(super) struct UncopiedLines {
    /// Number of the last event whose lines are in the tables.
    copied_through: u64,
    /// Number of the last event in `earlier` or before it.
    read_through: u64,
    /// Number of the last event of earlier runs.
    unread_through: u64,
    /// Events of earlier runs, in order, as far as they were read.
    earlier: Vec<UncopiedEvent>,
    /// Events of this run, in order.
    events: Vec<UncopiedEvent>,
    instances: HashSet<(LineTable, Arc<str>)>,
    lines: usize,
    /// Number of lines that the tables keep of `instances`.
    kept: usize,
    /// Time of the oldest line of `events`; `None` if there is none.
    oldest: Option<i64>,
    copy: Option<LineCopy>,
}

/// Copy in progress.
#[derive(Debug)]
struct LineCopy {
    /// Number of the last event that the copy covers.
    through: u64,
    /// Events that remain to be copied.
    needed: BTreeSet<u64>,
    /// Instances whose tables remain to be trimmed.
    untrimmed: Vec<(LineTable, Arc<str>)>,
}

impl UncopiedLines {
    /// Returns the state after a start. `last` is the number of the last stored event.
    pub(super) fn open(connection: &Connection, last: u64) -> rusqlite::Result<Self> {
        let copied_through = copied_through(connection)?.unwrap_or(0);
        Ok(Self { copied_through, read_through: copied_through, unread_through: last, ..Self::default() })
    }

    pub(super) fn copied_through(&self) -> u64 {
        self.copied_through
    }

    pub(super) fn add(&mut self, envelope: &Envelope, limits: &JournalLimits) {
        self.events.extend(UncopiedEvent::from_event(envelope.seq, &envelope.event));
        if let Some(last) = self.events.last().filter(|last| last.seq == envelope.seq) {
            self.lines += last.lines;
            self.oldest = Some(self.oldest.map_or(last.oldest, |oldest| oldest.min(last.oldest)));
            if self.instances.insert((last.table, last.instance.clone())) {
                self.kept += last.table.limit_of(limits);
            }
        }
    }

    /// Returns true if the lines must be copied. `last` is the number of the last stored event.
    pub(super) fn is_due(&self, last: u64) -> bool {
        self.copy.is_some()
            || self.lines >= LINES_MIN.max(LINES_PER_KEPT.saturating_mul(self.kept))
            || self.events.len() >= WITH_LINES_MAX
            || last.saturating_sub(self.copied_through) >= UNCOPIED_MAX
    }

    /// Returns true if there may be lines older than `limit`, which must be copied to be removed.
    pub(super) fn has_older(&self, limit: i64) -> bool {
        self.copied_through < self.unread_through || self.oldest.is_some_and(|oldest| oldest < limit)
    }

    /// Copies lines to the tables, in one step. Returns true if the copy is not complete. `last` is the number of the last
    /// stored event.
    pub(super) fn copy_step(
        &mut self,
        connection: &mut Connection,
        last: u64,
        limits: &JournalLimits,
    ) -> rusqlite::Result<bool> {
        if self.read_through < self.unread_through {
            self.read_earlier(connection)?;
            return Ok(true);
        }
        let copy = match self.copy.take() {
            Some(copy) => copy,
            None => self.plan_copy(last, limits),
        };
        // Put back before it can fail.
        let copy = self.copy.insert(copy);
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let mut lines = 0;
        let mut through = self.copied_through;
        while lines < LINES_PER_STEP
            && let Some(next) = copy.needed.range(through + 1..).next().copied()
        {
            through = next;
            read_chunk(&transaction, next - 1, CHUNK, |stored| {
                if lines < LINES_PER_STEP && copy.needed.contains(&stored.seq) {
                    through = stored.seq;
                    // An unreadable event is counted by the readers of events.
                    if let Ok(envelope) = serde_json::from_str::<Envelope>(stored.body) {
                        lines += insert_lines(&transaction, &envelope)?;
                    }
                }
                Ok(())
            })?;
        }
        let is_copied = copy.needed.range(through + 1..).next().is_none();
        let mut trimmed = 0;
        if is_copied {
            through = copy.through;
            trimmed = copy.untrimmed.len().min((LINES_PER_STEP - lines.min(LINES_PER_STEP)) / LINES_PER_TRIM);
            for (table, instance) in copy.untrimmed.iter().rev().take(trimmed) {
                trim(&transaction, *table, instance, table.limit_of(limits))?;
            }
        }
        set(&transaction, COPIED_THROUGH, &through)?;
        transaction.commit()?;
        copy.needed = copy.needed.split_off(&(through + 1));
        copy.untrimmed.truncate(copy.untrimmed.len() - trimmed);
        self.copied_through = through;
        if !is_copied || !copy.untrimmed.is_empty() {
            return Ok(true);
        }
        self.finish_copy(limits);
        Ok(false)
    }

    /// Determines the events that contain the last lines of each instance.
    fn plan_copy(&self, last: u64, limits: &JournalLimits) -> LineCopy {
        let mut counts: HashMap<(LineTable, &Arc<str>), usize> = HashMap::new();
        let mut needed = BTreeSet::new();
        for UncopiedEvent { seq, table, instance, lines, .. } in self.earlier.iter().chain(&self.events).rev() {
            let count = counts.entry((*table, instance)).or_default();
            if *count < table.limit_of(limits) {
                needed.insert(*seq);
            }
            *count += lines;
        }
        let untrimmed = counts.into_keys().map(|(table, instance)| (table, instance.clone())).collect();
        LineCopy { through: last, needed, untrimmed }
    }

    /// Forgets the copied events.
    fn finish_copy(&mut self, limits: &JournalLimits) {
        let through = self.copied_through;
        let later = self.events.partition_point(|event| event.seq <= through);
        let events = self.events.split_off(later);
        let instances: HashSet<_> = events.iter().map(|event| (event.table, event.instance.clone())).collect();
        *self = Self {
            copied_through: through,
            read_through: through,
            unread_through: through,
            lines: events.iter().map(|event| event.lines).sum(),
            kept: instances.iter().map(|(table, _)| table.limit_of(limits)).sum(),
            oldest: events.iter().map(|event| event.oldest).min(),
            instances,
            events,
            ..Self::default()
        };
    }

    /// Reads some of the events of earlier runs.
    fn read_earlier(&mut self, connection: &Connection) -> rusqlite::Result<()> {
        for _ in 0..CHUNKS_PER_STEP {
            let before = self.read_through;
            read_chunk(connection, before, CHUNK, |stored| {
                self.read_through = stored.seq;
                if stored.seq <= self.unread_through
                    && may_have_any_lines(stored.body)
                    && let Ok(envelope) = serde_json::from_str::<Envelope>(stored.body)
                {
                    self.earlier.extend(UncopiedEvent::from_event(stored.seq, &envelope.event));
                }
                Ok(())
            })?;
            if self.read_through == before {
                self.read_through = self.unread_through;
            }
            if self.read_through >= self.unread_through {
                break;
            }
        }
        Ok(())
    }
}

/// Inserts the lines of the event. Returns their number.
fn insert_lines(connection: &Connection, envelope: &Envelope) -> rusqlite::Result<usize> {
    match &envelope.event {
        Event::ServerLogs { of, logs } => {
            for line in logs {
                insert(connection, LineTable::ServerLogs, envelope.seq, of, line.timestamp, line)?;
            }
            Ok(logs.len())
        }
        Event::RequestLogs { of, requests } => {
            for line in requests {
                insert(connection, LineTable::RequestLogs, envelope.seq, of, line.timestamp, line)?;
            }
            Ok(requests.len())
        }
        _ => Ok(0),
    }
}

fn insert(
    connection: &Connection,
    table: LineTable,
    seq: u64,
    of: &EventSubject,
    at: Timestamp,
    line: &impl Serialize,
) -> rusqlite::Result<()> {
    // The event that contains the line was read from JSON.
    let Ok(body) = serde_json::to_string(line) else { return Ok(()) };
    let EventSubject { installation_id, team_id, user_id, process_id, server_slug } = of;
    let mut insert = connection.prepare_cached(&format!(
        "INSERT INTO {} (seq, at, team, user, installation, instance, server, body) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
        table.name()
    ))?;
    insert.execute(params![
        to_i64(seq),
        at.as_millisecond(),
        team_id.as_str(),
        user_id.as_str(),
        installation_id.as_str(),
        &**process_id,
        server_slug.as_str(),
        body
    ])?;
    Ok(())
}

fn trim(connection: &Connection, table: LineTable, instance: &str, max: usize) -> rusqlite::Result<()> {
    let table = table.name();
    let mut delete = connection.prepare_cached(&format!(
        "DELETE FROM {table} WHERE instance = ?1 AND n <=
         (SELECT n FROM {table} WHERE instance = ?1 ORDER BY n DESC LIMIT 1 OFFSET ?2)"
    ))?;
    delete.execute(params![instance, i64::try_from(max).unwrap_or(i64::MAX)])?;
    Ok(())
}
