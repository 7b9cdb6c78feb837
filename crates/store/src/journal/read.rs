//! Reads the journal, once or continuously, with or without a running satellite. A reader opens the database itself. A
//! reader of events holds a read transaction only for some hundred rows, because a longer one keeps `SQLite` from
//! restarting the WAL; a reader of lines needs one transaction for all of them.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mcp_satellite_actors::model::event::{Envelope, Event, EventSubject, LogLine, RequestLine};
use mcp_satellite_actors::model::ids::{TeamId, UserId};
use rusqlite::types::{Type, ValueRef};
use rusqlite::{Connection, ErrorCode, OpenFlags, OptionalExtension, Row, params};
use serde::de::DeserializeOwned;

use super::block;
use super::lines::{self, LineTable};
use super::schema::{self, SchemaError};
use super::shared::{DATABASE, DIRECTORY, JournalHome, database};
use mcp_satellite_files::data_dir::DataDir;

const CHUNK: usize = 500;
/// Bytes of matching events after which a reader of events parses no further ones of a chunk.
const CHUNK_BYTES: usize = 256 * 1024;
/// Timeout for the writer's lock, which it holds only while it opens the database.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// Filter for events. All given conditions must hold.
#[derive(Debug, Clone, Default)]
pub struct StoredEventQuery {
    /// Only events after this number.
    pub since: Option<u64>,
    /// Only these event types, by their wire names; empty means all types.
    pub types: Vec<String>,
    /// Only events about the instance with this name (`process_id`).
    pub instance: Option<String>,
    /// Only events about an instance of the server with this slug.
    pub server: Option<String>,
    /// Only events about the team with this id or one of its instances or clients.
    pub team: Option<String>,
    /// Only events about an instance or a client of the user with this id.
    pub user: Option<String>,
}

impl StoredEventQuery {
    pub fn matches(&self, envelope: &Envelope) -> bool {
        self.since.is_none_or(|since| envelope.seq > since)
            && self.matches_facets(&EventFacets::from_event(&envelope.event))
    }

    pub(super) fn matches_facets(&self, facets: &EventFacets<'_>) -> bool {
        let Self { since: _, types, instance, server, team, user } = self;
        let is = |wanted: &Option<String>, found: Option<&str>| wanted.is_none() || wanted.as_deref() == found;
        (types.is_empty() || types.iter().any(|kind| kind == facets.kind))
            && is(instance, facets.instance)
            && is(server, facets.server)
            && is(team, facets.team)
            && is(user, facets.user)
    }
}

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct EventFacets<'a> {
    pub(super) kind: &'a str,
    pub(super) team: Option<&'a str>,
    pub(super) user: Option<&'a str>,
    pub(super) instance: Option<&'a str>,
    pub(super) server: Option<&'a str>,
}

impl<'a> EventFacets<'a> {
    pub(super) fn from_event(event: &'a Event) -> Self {
        let subject = event.subject();
        let (team, user) = match event {
            Event::ClientConnected { team_id, user_id, .. } | Event::ClientDisconnected { team_id, user_id, .. } => {
                (Some(team_id), Some(user_id))
            }
            Event::TeamThrottled { team_id, .. } | Event::TeamUnthrottled { team_id, .. } => (Some(team_id), None),
            _ => (subject.map(|of| &of.team_id), subject.map(|of| &of.user_id)),
        };
        Self {
            kind: event.kind(),
            team: team.map(TeamId::as_str),
            user: user.map(UserId::as_str),
            instance: subject.map(|of| &*of.process_id),
            server: subject.map(|of| of.server_slug.as_str()),
        }
    }
}

/// Reads the events that are currently stored in the journal of `data_dir`, in order of their numbers.
///
/// # Errors
/// Returns an error if the data directory or its journal cannot be opened.
pub fn read(data_dir: impl Into<PathBuf>, query: StoredEventQuery) -> io::Result<JournalEvents> {
    let mut follow = EventFollower::new(data_dir, query);
    follow.open()?;
    Ok(JournalEvents { follow, error: None })
}

#[derive(Debug)]
pub struct JournalEvents {
    follow: EventFollower,
    error: Option<io::Error>,
}

impl JournalEvents {
    /// Returns the number of unreadable events skipped so far. They were written by a newer version, or are damaged;
    /// damaged ones are counted by their numbers.
    pub fn skipped(&self) -> u64 {
        self.follow.skipped
    }

    pub fn take_error(&mut self) -> Option<io::Error> {
        self.error.take()
    }

    pub fn last_read(&self) -> Option<u64> {
        self.follow.last_read()
    }

    /// Ends the iteration after `deadline`, also while no event matches. At least one part of the file is read, so that a
    /// reader that continues after [`last_read`](Self::last_read) comes to the end.
    #[must_use]
    pub fn until(mut self, deadline: Instant) -> Self {
        self.follow.deadline = Some(deadline);
        self
    }

    /// Returns true if the iteration has ended because of its deadline.
    pub fn is_cut(&self) -> bool {
        self.follow.is_cut
    }
}

impl Iterator for JournalEvents {
    type Item = Envelope;

    fn next(&mut self) -> Option<Envelope> {
        if self.error.is_some() {
            return None;
        }
        self.follow.poll().unwrap_or_else(|error| {
            self.error = Some(error);
            None
        })
    }
}

/// Reads events as they are stored, starting with the existing ones after [`StoredEventQuery::since`]. Continues over restarts of
/// the satellite, and with a new file if the first one is replaced.
#[derive(Debug)]
pub struct EventFollower {
    data_dir: PathBuf,
    path: PathBuf,
    query: StoredEventQuery,
    /// Highest number read from the file, whether the event passed the filter or not. Reading continues after it.
    last_read: Option<u64>,
    waiting: VecDeque<Envelope>,
    open: Option<(Connection, Option<(u64, u64)>)>,
    skipped: u64,
    deadline: Option<Instant>,
    /// True if the last search has ended because of the deadline.
    is_cut: bool,
}

impl EventFollower {
    /// Creates a reader of the journal of `data_dir`. Opens no file.
    pub fn new(data_dir: impl Into<PathBuf>, query: StoredEventQuery) -> Self {
        let data_dir = data_dir.into();
        let (path, last_read) = (database(&data_dir), query.since);
        Self {
            data_dir,
            path,
            query,
            last_read,
            waiting: VecDeque::new(),
            open: None,
            skipped: 0,
            deadline: None,
            is_cut: false,
        }
    }

    /// Returns the next event, or `None` if there is none at present. Blocks on a file, so it must not run on an async
    /// thread. After an error, the next call continues after the last returned event.
    ///
    /// # Errors
    /// Returns an error if the journal cannot be read.
    pub fn poll(&mut self) -> io::Result<Option<Envelope>> {
        loop {
            if let Some(envelope) = self.waiting.pop_front() {
                return Ok(Some(envelope));
            }
            if self.is_cut {
                return Ok(None);
            }
            match self.fill() {
                Ok(true) => self.is_cut = self.deadline.is_some_and(|deadline| Instant::now() >= deadline),
                Ok(false) => return Ok(None),
                Err(error) => {
                    self.open = None;
                    return Err(error);
                }
            }
        }
    }

    pub fn last_read(&self) -> Option<u64> {
        // Events in `waiting` were not returned yet.
        self.waiting.front().map_or(self.last_read, |next| next.seq.checked_sub(1))
    }

    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    fn open(&mut self) -> io::Result<()> {
        let found = JournalHome::Named(self.data_dir.clone()).stat("").map(|found| found.identity);
        if self.open.as_ref().is_some_and(|(_, opened)| *opened != found) {
            // The file was put aside or deleted. Numbers continue, so only the file must be opened again.
            self.open = None;
        }
        if self.open.is_none() {
            self.open = open(&self.data_dir)?.map(|connection| (connection, found));
        }
        Ok(())
    }

    fn fill(&mut self) -> io::Result<bool> {
        self.open()?;
        let Some((connection, _)) = &self.open else { return Ok(false) };
        let before = self.last_read;
        let (query, read, waiting, skipped) = (&self.query, &mut self.last_read, &mut self.waiting, &mut self.skipped);
        let mut bytes = 0;
        let outcome = read_chunk(connection, before.unwrap_or(0), CHUNK, |stored| {
            if bytes >= CHUNK_BYTES {
                // Ends the chunk; the next one begins with this event.
                return Err(rusqlite::Error::InvalidQuery);
            }
            *read = Some(stored.seq);
            if stored.facets.as_ref().is_some_and(|facets| !query.matches_facets(facets)) {
                return Ok(());
            }
            match serde_json::from_str::<Envelope>(stored.body) {
                Ok(envelope) if query.matches_facets(&EventFacets::from_event(&envelope.event)) => {
                    bytes += stored.body.len();
                    waiting.push_back(envelope);
                }
                Ok(_) => {}
                Err(_) => *skipped += 1,
            }
            Ok(())
        });
        match outcome {
            Ok(count) => Ok(count > 0),
            // Rows before the damage, or before the end of the chunk, are returned first.
            Err(_) if self.last_read != before => Ok(true),
            Err(error) if is_damage(&error) => {
                let after = before.unwrap_or(0);
                let Some(next) = next_readable(connection, after) else { return Err(read_error(&self.path, &error)) };
                self.skipped += next - after - 1;
                self.last_read = Some(next - 1);
                Ok(true)
            }
            Err(error) => Err(read_error(&self.path, &error)),
        }
    }
}

/// Event as it is stored.
pub(super) struct EventText<'a> {
    pub(super) seq: u64,
    /// Time of the event, or of the last event of its block, in milliseconds since 1970.
    pub(super) at: i64,
    pub(super) body: &'a str,
    /// Columns for queries; `None` if the event is part of a block.
    pub(super) facets: Option<EventFacets<'a>>,
}

/// Returns the SQL that reads rows of events: number, time, body, block, its first number, and the columns for queries.
/// `rows` contains its condition, order and limit.
pub(super) fn select_events(connection: &Connection, rows: &str) -> rusqlite::Result<String> {
    let version = connection.pragma_query_value(None, "user_version", |row| row.get::<_, i64>(0))?;
    let block =
        if version < i64::try_from(schema::WITH_BLOCKS).unwrap_or(i64::MAX) { "NULL, NULL" } else { "block, first" };
    Ok(format!("SELECT seq, at, body, {block}, type, team, user, instance, server FROM events {rows}"))
}

const ROWS_AFTER: &str = "WHERE seq > ?1 ORDER BY seq LIMIT ?2";

/// Returns the events of a row: the number of the first one, and their JSON, one in each line. `None` if the row contains
/// one event.
pub(super) fn block_of(row: &Row<'_>) -> rusqlite::Result<Option<(u64, String)>> {
    let Some(bytes) = row.get_ref(3)?.as_blob_or_null()? else { return Ok(None) };
    let (first, last) = (row.get::<_, i64>(4)?.unsigned_abs(), row.get::<_, i64>(0)?.unsigned_abs());
    match block::decompress(first, last, bytes) {
        Some(events) => Ok(Some((first, events))),
        None => Err(rusqlite::Error::FromSqlConversionFailure(3, Type::Blob, "the block is damaged".into())),
    }
}

/// Passes the events after `after`, at most `max`, to `take` in order, and returns their number. Before an error, the
/// readable ones were passed.
pub(super) fn read_chunk(
    connection: &Connection,
    after: u64,
    max: usize,
    mut take: impl FnMut(&EventText<'_>) -> rusqlite::Result<()>,
) -> rusqlite::Result<usize> {
    // In one transaction, because a writer may migrate the database after the version was read.
    let _transaction = connection.is_autocommit().then(|| connection.unchecked_transaction()).transpose()?;
    let mut select = connection.prepare_cached(&select_events(connection, ROWS_AFTER)?)?;
    let mut rows = select.query(params![to_i64(after), i64::try_from(max).unwrap_or(i64::MAX)])?;
    let mut count = 0;
    while count < max
        && let Some(row) = rows.next()?
    {
        let at = row.get(1)?;
        if let Some((first, events)) = block_of(row)? {
            let numbered = (first..).zip(events.split_terminator('\n')).filter(|(seq, _)| *seq > after);
            for (seq, body) in numbered.take(max - count) {
                take(&EventText { seq, at, body, facets: None })?;
                count += 1;
            }
        } else {
            take(&single_event(row)?)?;
            count += 1;
        }
    }
    Ok(count)
}

/// Returns the event of a row without a block.
pub(super) fn single_event<'a>(row: &'a Row<'_>) -> rusqlite::Result<EventText<'a>> {
    let text = |at: usize| match row.get_ref(at) {
        Ok(ValueRef::Text(text)) => std::str::from_utf8(text).ok(),
        _ => None,
    };
    let facets =
        EventFacets { kind: text(5).unwrap_or(""), team: text(6), user: text(7), instance: text(8), server: text(9) };
    let (seq, body) = (row.get::<_, i64>(0)?.unsigned_abs(), row.get_ref(2)?.as_str()?);
    Ok(EventText { seq, at: row.get(1)?, body, facets: Some(facets) })
}

/// Returns the first readable event after an unreadable one that follows `after`.
pub(super) fn next_readable(connection: &Connection, after: u64) -> Option<u64> {
    nearest_readable(u64::MAX / 2, |step| {
        let after = after.saturating_add(step);
        let mut select = connection.prepare_cached(&select_events(connection, ROWS_AFTER).ok()?).ok()?;
        // Reads the body or block too, because part of it may be on another page.
        let found = select.query_row(params![to_i64(after), 1], |row| {
            let seq = row.get::<_, i64>(0)?.unsigned_abs();
            row.get::<_, String>(2)?;
            Ok(block_of(row)?.map_or(seq, |(first, _)| first.max(after + 1)))
        });
        found.optional().ok()?
    })
}

/// Returns the result of `probe` for the smallest step, at most `max`, for which there is one. There must be one for all
/// larger steps, and none for 0.
pub(super) fn nearest_readable(max: u64, probe: impl Fn(u64) -> Option<u64>) -> Option<u64> {
    let mut step = 1;
    let mut good = loop {
        match probe(step) {
            Some(found) => break found,
            None if step >= max => return None,
            None => step = step.saturating_mul(2).min(max),
        }
    };
    // Invariant: the probe fails at `bad` and returns `good` at `well`.
    let (mut bad, mut well) = (step / 2, step);
    while well - bad > 1 {
        let middle = bad + (well - bad) / 2;
        match probe(middle) {
            Some(found) => (well, good) = (middle, found),
            None => bad = middle,
        }
    }
    Some(good)
}

#[derive(Debug, Clone, PartialEq)]
pub struct StoredLine<T> {
    pub seq: u64,
    pub subject: EventSubject,
    pub line: T,
}

/// Stored log lines or calls, in order of their arrival.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredLines<T> {
    pub lines: Vec<StoredLine<T>>,
    /// Number of the last event stored at that time. Later lines are in the events after it.
    pub through: u64,
    pub skipped: u64,
}

/// Lines of an event with its instance; `None` if it has none of this kind.
pub(super) type EventLines<T> = Option<(Arc<EventSubject>, Vec<T>)>;

pub fn server_logs(data_dir: &Path, wanted: impl Fn(&EventSubject) -> bool) -> io::Result<StoredLines<LogLine>> {
    logs(data_dir, LineTable::ServerLogs, wanted, log_lines_of)
}

pub(super) fn log_lines_of(event: Event) -> EventLines<LogLine> {
    match event {
        Event::ServerLogs { of, logs } => Some((of, logs)),
        _ => None,
    }
}

pub fn request_logs(data_dir: &Path, wanted: impl Fn(&EventSubject) -> bool) -> io::Result<StoredLines<RequestLine>> {
    logs(data_dir, LineTable::RequestLogs, wanted, request_lines_of)
}

pub(super) fn request_lines_of(event: Event) -> EventLines<RequestLine> {
    match event {
        Event::RequestLogs { of, requests } => Some((of, requests)),
        _ => None,
    }
}

/// Reads the lines of a table, and those of the later events, which `lines_of` returns.
fn logs<T: DeserializeOwned>(
    data_dir: &Path,
    table: LineTable,
    wanted: impl Fn(&EventSubject) -> bool,
    lines_of: impl Fn(Event) -> EventLines<T>,
) -> io::Result<StoredLines<T>> {
    let mut logs = StoredLines { lines: Vec::new(), through: 0, skipped: 0 };
    let Some(connection) = open(data_dir)? else { return Ok(logs) };
    let mut fill = || -> rusqlite::Result<()> {
        // One transaction, so that `through` matches the lines.
        let transaction = connection.unchecked_transaction()?;
        let last = transaction.query_row("SELECT max(seq) FROM events", [], |row| row.get::<_, Option<i64>>(0))?;
        logs.through = last.map_or(0, i64::unsigned_abs);
        let mut select = transaction.prepare(&format!("SELECT {LINE_COLUMNS} FROM {} ORDER BY n", table.name()))?;
        let mut rows = select.query([])?;
        while let Some(row) = rows.next()? {
            let subject = subject_of(row)?;
            if wanted(&subject) {
                match serde_json::from_str(row.get_ref(6)?.as_str()?) {
                    Ok(line) => {
                        logs.lines.push(StoredLine { seq: row.get::<_, i64>(0)?.unsigned_abs(), subject, line });
                    }
                    Err(_) => logs.skipped += 1,
                }
            }
        }
        // A database of version 1 contains all lines in its tables.
        let mut after = lines::copied_through(&transaction)?.unwrap_or(logs.through);
        loop {
            let before = after;
            let outcome = read_chunk(&transaction, before, CHUNK, |stored| {
                after = stored.seq;
                if !lines::may_have_lines(table, stored.body) {
                    return Ok(());
                }
                match serde_json::from_str::<Envelope>(stored.body) {
                    Ok(envelope) => {
                        if let Some((subject, found)) = lines_of(envelope.event).filter(|(subject, _)| wanted(subject))
                        {
                            let stored_line = |line| StoredLine { seq: stored.seq, subject: (*subject).clone(), line };
                            logs.lines.extend(found.into_iter().map(stored_line));
                        }
                    }
                    Err(_) => logs.skipped += 1,
                }
                Ok(())
            });
            match outcome {
                // Rows before the damage were read.
                Err(error) if after == before && is_damage(&error) => {
                    let Some(next) = next_readable(&transaction, before) else { return Err(error) };
                    logs.skipped += next - before - 1;
                    after = next - 1;
                }
                Err(error) if after == before => return Err(error),
                Ok(_) | Err(_) => {}
            }
            if after == before {
                break;
            }
        }
        if let Some(max) = lines::limit(&transaction, table)? {
            trim_lines(&mut logs.lines, max);
        }
        Ok(())
    };
    fill().map_err(|error| read_error(&database(data_dir), &error))?;
    Ok(logs)
}

/// Columns of the tables of lines, as `subject_of` reads them, with the body at 6.
pub(super) const LINE_COLUMNS: &str = "seq, team, user, installation, instance, server, body";

pub(super) fn subject_of(row: &Row<'_>) -> rusqlite::Result<EventSubject> {
    let text = |at: usize| row.get::<_, String>(at);
    Ok(EventSubject {
        installation_id: text(3)?.as_str().into(),
        team_id: text(1)?.as_str().into(),
        user_id: text(2)?.as_str().into(),
        process_id: text(4)?.into(),
        server_slug: text(5)?.as_str().into(),
    })
}

/// Removes all lines but the last `max` of each instance.
fn trim_lines<T>(lines: &mut Vec<StoredLine<T>>, max: usize) {
    let mut counts: HashMap<Arc<str>, usize> = HashMap::new();
    let mut kept: Vec<bool> = lines
        .iter()
        .rev()
        .map(|line| {
            let count = counts.entry(line.subject.process_id.clone()).or_default();
            *count += 1;
            *count <= max
        })
        .collect();
    lines.retain(|_| kept.pop().unwrap_or(true));
}

/// Opens the database for reading. Returns `None` if it does not exist or contains nothing yet.
pub(super) fn open(data_dir: &Path) -> io::Result<Option<Connection>> {
    let cannot =
        |error: io::Error| io::Error::new(error.kind(), format!("cannot read {}: {error}", data_dir.display()));
    // An unreadable directory is an error; a directory without a journal is not.
    let directory = match DataDir::open(data_dir).map_err(cannot)?.open_subdirectory(DIRECTORY) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        directory => directory.map_err(cannot)?,
    };
    if directory.stat(DATABASE).is_none() {
        return Ok(None);
    }
    let path = directory.database_path(DATABASE).map_err(cannot)?;
    match open_at(&path, false) {
        Err(SchemaError::Sqlite(error))
            if matches!(error.sqlite_error_code(), Some(ErrorCode::CannotOpen | ErrorCode::ReadOnly))
                && directory.stat(format!("{DATABASE}-wal")).map_or(0, |found| found.len) == 0 =>
        {
            // On a read-only disk there is no shared memory for the WAL, and no writer either.
            open_at(&path, true)
        }
        opened => opened,
    }
    .map_err(|error| read_error(&path, &error))
}

fn open_at(path: &Path, immutable: bool) -> Result<Option<Connection>, SchemaError> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_NOFOLLOW;
    let connection = if immutable {
        Connection::open_with_flags(immutable_uri(path), flags | OpenFlags::SQLITE_OPEN_URI)?
    } else {
        Connection::open_with_flags(path, flags)?
    };
    connection.busy_timeout(BUSY_TIMEOUT)?;
    connection.pragma_update(None, "trusted_schema", false)?;
    let version = schema::version(&connection, schema::MIGRATIONS)?;
    Ok((version > 0).then_some(connection))
}

fn immutable_uri(path: &Path) -> String {
    let mut uri = "file:".to_owned();
    for &byte in std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str()) {
        match byte {
            b'/' | b'.' | b'-' | b'_' | b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z' => uri.push(char::from(byte)),
            other => uri.extend(format!("%{other:02X}").chars()),
        }
    }
    uri + "?immutable=1"
}

/// Returns true if the error means a damaged file, and not a problem of the disk or a lock.
pub(crate) fn is_damage(error: &rusqlite::Error) -> bool {
    match error {
        rusqlite::Error::SqliteFailure(..) => {
            matches!(error.sqlite_error_code(), Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase))
        }
        // The schema prevents values of the wrong type, so they mean damage.
        rusqlite::Error::Utf8Error(..)
        | rusqlite::Error::FromSqlConversionFailure(..)
        | rusqlite::Error::InvalidColumnType(..)
        | rusqlite::Error::IntegralValueOutOfRange(..) => true,
        _ => false,
    }
}

/// Converts a number for the database. Larger numbers than `i64::MAX` do not occur.
pub(super) fn to_i64(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

pub(super) fn read_error(path: &Path, error: &dyn std::error::Error) -> io::Error {
    io::Error::other(format!("cannot read {}: {error}", path.display()))
}
