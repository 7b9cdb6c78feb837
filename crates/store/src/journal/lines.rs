//! Tables of the last log lines and calls of each instance.
//!
//! Lines are stored in their events. Only the last ones of each instance are copied to a table, once a minute or after
//! [`COPY_AT`] events, because of a thousand lines of a busy instance nine hundred would be removed again. Readers add
//! the lines of the events that are not copied yet.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use jiff::Timestamp;
use mcp_satellite_actors::model::event::{Envelope, Event, EventSubject};
use rusqlite::{Connection, OptionalExtension, params};
use serde::Serialize;

use super::JournalLimits;
use super::read::{read_chunk, to_i64};
use super::store::{get, set};

/// Number of events with lines after which the lines are copied.
pub(super) const COPY_AT: usize = 20_000;
const CHUNK: usize = 500;

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

    /// Returns the type of the events that contain lines of this table.
    pub(super) fn event_type(self) -> &'static str {
        match self {
            Self::ServerLogs => "mcp.server.logs",
            Self::RequestLogs => "mcp.request.logs",
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
}

impl UncopiedEvent {
    fn from_event(seq: u64, event: &Event) -> Option<Self> {
        let (table, of, lines) = match event {
            Event::ServerLogs { of, logs } => (LineTable::ServerLogs, of, logs.len()),
            Event::RequestLogs { of, requests } => (LineTable::RequestLogs, of, requests.len()),
            _ => return None,
        };
        Some(Self { seq, table, instance: of.process_id.clone(), lines })
    }
}

/// Stored events whose lines are not in the tables yet, in order.
#[derive(Debug, Default)]
pub(super) struct UncopiedLines {
    events: Vec<UncopiedEvent>,
}

impl UncopiedLines {
    /// Reads the events after the last copied one, after a start.
    pub(super) fn read(connection: &Connection) -> rusqlite::Result<Self> {
        let mut uncopied = Self::default();
        let mut after = copied_through(connection)?.unwrap_or(0);
        loop {
            let before = after;
            read_chunk(connection, before, CHUNK, |stored| {
                after = stored.seq;
                if let Ok(envelope) = serde_json::from_str::<Envelope>(stored.body) {
                    uncopied.add(&envelope);
                }
                Ok(())
            })?;
            if after == before {
                return Ok(uncopied);
            }
        }
    }

    pub(super) fn add(&mut self, envelope: &Envelope) {
        self.events.extend(UncopiedEvent::from_event(envelope.seq, &envelope.event));
    }

    pub(super) fn is_due(&self) -> bool {
        self.events.len() >= COPY_AT
    }

    pub(super) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.events.clear();
    }

    /// Copies the last lines of each instance to the tables, within the caller's transaction. `through` is the number of
    /// the last stored event.
    pub(super) fn copy(&self, connection: &Connection, through: u64, limits: &JournalLimits) -> rusqlite::Result<()> {
        let mut counts: HashMap<(LineTable, &str), usize> = HashMap::new();
        let mut needed = BTreeSet::new();
        for UncopiedEvent { seq, table, instance, lines } in self.events.iter().rev() {
            let count = counts.entry((*table, instance)).or_default();
            if *count < table.limit_of(limits) {
                needed.insert(*seq);
            }
            *count += lines;
        }
        let mut after = needed.first().map_or(through, |first| first - 1);
        while let Some(next) = needed.range(after + 1..).next().copied() {
            read_chunk(connection, next - 1, CHUNK, |stored| {
                after = stored.seq;
                if needed.contains(&stored.seq)
                    && let Ok(envelope) = serde_json::from_str::<Envelope>(stored.body)
                {
                    insert_lines(connection, &envelope)?;
                }
                Ok(())
            })?;
            // The event may have been removed.
            after = after.max(next);
        }
        for (table, instance) in counts.keys() {
            trim(connection, *table, instance, table.limit_of(limits))?;
        }
        set(connection, COPIED_THROUGH, &through)
    }
}

fn insert_lines(connection: &Connection, envelope: &Envelope) -> rusqlite::Result<()> {
    match &envelope.event {
        Event::ServerLogs { of, logs } => logs
            .iter()
            .try_for_each(|line| insert(connection, LineTable::ServerLogs, envelope.seq, of, line.timestamp, line)),
        Event::RequestLogs { of, requests } => requests
            .iter()
            .try_for_each(|line| insert(connection, LineTable::RequestLogs, envelope.seq, of, line.timestamp, line)),
        _ => Ok(()),
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
