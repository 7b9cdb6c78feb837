//! Reads the journal backwards, from the newest event, for pages that show the last events, log lines and calls. A search
//! ends when it has found enough or its time is over, and returns the place from which it can continue. It blocks on a
//! file, so it must not run on an async thread.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use mcp_satellite_actors::model::event::{Envelope, Event, EventSubject, LogLine, RequestLine};
use rusqlite::{Connection, OptionalExtension, params};
use serde::de::DeserializeOwned;

use super::lines::{self, LineTable};
use super::read::{
    EventFacets, EventLines, EventText, LINE_COLUMNS, StoredEventQuery, StoredLine, block_of, is_damage, log_lines_of,
    nearest_readable, open, read_error, request_lines_of, select_events, single_event, subject_of, to_i64,
};
use super::shared::database;

/// Number of rows that one transaction reads; a longer one keeps `SQLite` from restarting the WAL.
const ROWS: i64 = 64;
/// Number of lines after which the time is checked.
const LINES_PER_CHECK: usize = 1_024;

const ROWS_BEFORE: &str = "WHERE seq < ?1 ORDER BY seq DESC LIMIT ?2";
const ROW_FROM: &str = "WHERE seq >= ?1 ORDER BY seq LIMIT 1";

/// Result of a search for the newest events.
#[derive(Debug, Default)]
pub struct RecentEvents {
    /// Matching events, newest first.
    pub events: Vec<Envelope>,
    /// All events with this number and higher ones were searched, and another search can continue with `before` set to it.
    /// `None` if the journal contains no further event.
    pub searched_to: Option<u64>,
    /// Number of unreadable events that were skipped.
    pub skipped: u64,
}

/// Returns the newest events that match the query, at most `limit`, of those with a number below `before`. After `within`
/// the search ends with the events found so far.
///
/// # Errors
/// Returns an error if the data directory or its journal cannot be read.
pub fn recent(
    data_dir: &Path,
    query: &StoredEventQuery,
    limit: usize,
    before: Option<u64>,
    within: Duration,
) -> io::Result<RecentEvents> {
    let mut found = RecentEvents::default();
    let Some(connection) = open(data_dir)? else { return Ok(found) };
    let mut search = BackwardSearch::new(&connection, before, query.since.unwrap_or(0), within);
    let filter = TextFilter::new(query);
    let outcome = search.run(|stored| {
        if stored.facets.is_some_and(|facets| !query.matches_facets(&facets)) || !filter.may_match(stored.body) {
            return Ok(Searched::Further);
        }
        let Ok(envelope) = serde_json::from_str::<Envelope>(stored.body) else { return Err(UnreadableEvent) };
        if query.matches_facets(&EventFacets::from_event(&envelope.event)) {
            found.events.push(envelope);
        }
        Ok(if found.events.len() < limit { Searched::Further } else { Searched::Enough })
    });
    outcome.map_err(|error| read_error(&database(data_dir), &error))?;
    (found.searched_to, found.skipped) = (search.continue_before(), search.skipped);
    Ok(found)
}

/// Decision after an event was searched.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Searched {
    Further,
    Enough,
}

struct UnreadableEvent;

/// Search from newer to older events.
struct BackwardSearch<'a> {
    connection: &'a Connection,
    /// All events with this number and higher ones were searched. Numbers begin at 1.
    before: u64,
    /// Events up to this number are not searched.
    after: u64,
    /// True if there is no further event.
    is_complete: bool,
    /// Number of the last event, as far as it is known.
    last: u64,
    until: Instant,
    skipped: u64,
}

impl<'a> BackwardSearch<'a> {
    fn new(connection: &'a Connection, before: Option<u64>, after: u64, within: Duration) -> Self {
        let until = Instant::now() + within;
        let last = connection.query_row("SELECT max(seq) FROM events", [], |row| row.get::<_, Option<i64>>(0));
        let last = last.ok().flatten().map_or(0, i64::unsigned_abs);
        let before = before.unwrap_or(u64::MAX);
        // A damaged end of the table makes the number unknown, and then all rows are searched.
        let before = if last > 0 { before.min(last + 1) } else { before };
        Self { connection, before, after, is_complete: false, last: last + 1, until, skipped: 0 }
    }

    fn continue_before(&self) -> Option<u64> {
        (!self.is_complete).then_some(self.before)
    }

    /// Passes the events to `take`, newest first, until it has enough or the time is over.
    fn run(
        &mut self,
        mut take: impl FnMut(&EventText<'_>) -> Result<Searched, UnreadableEvent>,
    ) -> rusqlite::Result<()> {
        loop {
            self.is_complete |= self.before <= self.after.saturating_add(1);
            if self.is_complete {
                return Ok(());
            }
            let before = self.before;
            match self.read_rows(&mut take) {
                Ok(Searched::Enough) => return Ok(()),
                Ok(Searched::Further) => {}
                // The rows before the damage were read.
                Err(_) if self.before != before => {}
                Err(error) if is_damage(&error) => match self.previous_readable() {
                    Some(readable) => {
                        // The number of the last event is unknown if it is unreadable.
                        self.skipped += if before > self.last { 1 } else { before - readable - 1 };
                        self.before = readable + 1;
                    }
                    None => return Err(error),
                },
                Err(error) => return Err(error),
            }
            if Instant::now() >= self.until {
                return Ok(());
            }
        }
    }

    fn read_rows(
        &mut self,
        take: &mut impl FnMut(&EventText<'_>) -> Result<Searched, UnreadableEvent>,
    ) -> rusqlite::Result<Searched> {
        let connection = self.connection;
        // In one transaction, because a writer may migrate the database after the version was read.
        let _transaction = connection.is_autocommit().then(|| connection.unchecked_transaction()).transpose()?;
        let mut from = connection.prepare_cached(&select_events(connection, ROW_FROM)?)?;
        let mut rows = from.query(params![to_i64(self.before)])?;
        if let Some(row) = rows.next()?
            && row.get::<_, Option<i64>>(4)?.is_some_and(|first| first.unsigned_abs() < self.before)
            && self.read_row(row, take)? == Searched::Enough
        {
            return Ok(Searched::Enough);
        }
        let mut select = connection.prepare_cached(&select_events(connection, ROWS_BEFORE)?)?;
        let mut rows = select.query(params![to_i64(self.before), ROWS])?;
        let mut count = 0;
        while self.before > self.after.saturating_add(1)
            && let Some(row) = rows.next()?
        {
            if self.read_row(row, take)? == Searched::Enough {
                return Ok(Searched::Enough);
            }
            count += 1;
        }
        self.is_complete = count < ROWS;
        Ok(Searched::Further)
    }

    fn read_row(
        &mut self,
        row: &rusqlite::Row<'_>,
        take: &mut impl FnMut(&EventText<'_>) -> Result<Searched, UnreadableEvent>,
    ) -> rusqlite::Result<Searched> {
        let Some((first, events)) = block_of(row)? else {
            let event = single_event(row)?;
            return Ok(self.read_event(&event, take));
        };
        let at = row.get(1)?;
        let numbered: Vec<(u64, &str)> = (first..).zip(events.split_terminator('\n')).collect();
        let (after, before) = (self.after, self.before);
        for (seq, body) in numbered.into_iter().rev().filter(|(seq, _)| *seq > after && *seq < before) {
            if self.read_event(&EventText { seq, at, body, facets: None }, take) == Searched::Enough {
                return Ok(Searched::Enough);
            }
        }
        self.before = self.before.min(first);
        Ok(Searched::Further)
    }

    fn read_event(
        &mut self,
        event: &EventText<'_>,
        take: &mut impl FnMut(&EventText<'_>) -> Result<Searched, UnreadableEvent>,
    ) -> Searched {
        self.before = event.seq;
        if event.seq <= self.after {
            return Searched::Further;
        }
        take(event).unwrap_or_else(|UnreadableEvent| {
            self.skipped += 1;
            Searched::Further
        })
    }

    /// Returns the number of the last readable event before an unreadable one, which is the last one before `before`.
    fn previous_readable(&self) -> Option<u64> {
        let (connection, before) = (self.connection, self.before);
        nearest_readable(before, |step| {
            let before = before - step;
            let mut select = connection.prepare_cached(&select_events(connection, ROWS_BEFORE).ok()?).ok()?;
            // Reads the body or block too, because part of it may be on another page.
            let found = select.query_row(params![to_i64(before), 1], |row| {
                let seq = row.get::<_, i64>(0)?.unsigned_abs();
                row.get::<_, String>(2)?;
                block_of(row)?;
                Ok(seq)
            });
            // Without a further row, the beginning was reached.
            found.optional().ok().map(Option::unwrap_or_default)
        })
    }
}

/// Texts that occur in the JSON of every matching event. Most events need not be parsed.
struct TextFilter {
    kinds: Vec<String>,
    texts: Vec<String>,
}

impl TextFilter {
    fn new(query: &StoredEventQuery) -> Self {
        let StoredEventQuery { since: _, types, instance, server, team, user } = query;
        // The text of a string is always the same, because `serde_json` wrote all events.
        let quoted = |text: &String| serde_json::Value::from(text.as_str()).to_string();
        let texts = [instance, server, team, user].into_iter().flatten().map(quoted).collect();
        Self { kinds: types.iter().map(quoted).collect(), texts }
    }

    fn may_match(&self, body: &str) -> bool {
        let has = |text: &String| body.contains(text.as_str());
        (self.kinds.is_empty() || self.kinds.iter().any(has)) && self.texts.iter().all(has)
    }
}

/// Filter for lines. All given conditions must hold.
#[derive(Debug, Clone, Default)]
pub struct StoredLineQuery {
    /// Only lines of the instance with this name (`process_id`).
    pub instance: Option<String>,
    /// Only lines of instances of the server with this slug.
    pub server: Option<String>,
    /// Only lines of instances of the team with this id.
    pub team: Option<String>,
    /// Only lines of instances of the user with this id.
    pub user: Option<String>,
    /// Only lines from this time on.
    pub since: Option<Timestamp>,
    /// Only lines before this time.
    pub until: Option<Timestamp>,
}

impl StoredLineQuery {
    fn matches(&self, subject: &EventSubject, at: Timestamp) -> bool {
        let Self { instance, server, team, user, since, until } = self;
        let is = |wanted: &Option<String>, found: &str| wanted.as_deref().is_none_or(|wanted| wanted == found);
        is(instance, &subject.process_id)
            && is(server, subject.server_slug.as_str())
            && is(team, subject.team_id.as_str())
            && is(user, subject.user_id.as_str())
            && since.is_none_or(|since| at >= since)
            && until.is_none_or(|until| at < until)
    }
}

/// Filter for calls. All given conditions must hold.
#[derive(Debug, Clone, Default)]
pub struct StoredCallQuery {
    /// Conditions for the instance and the time.
    pub lines: StoredLineQuery,
    /// Only calls of the tool with this name.
    pub tool: Option<String>,
    /// Only calls that succeeded, or only those that failed.
    pub success: Option<bool>,
    /// Only calls that failed for this reason.
    pub fate: Option<String>,
    /// Only calls of clients with this name.
    pub client: Option<String>,
}

impl StoredCallQuery {
    /// Returns true if the call of an instance fulfils all conditions.
    pub fn matches(&self, subject: &EventSubject, line: &RequestLine) -> bool {
        self.lines.matches(subject, line.timestamp)
            && self.tool.as_ref().is_none_or(|tool| *tool == line.tool_name)
            && self.success.is_none_or(|success| success == line.success)
            && self.fate.as_ref().is_none_or(|fate| line.fate.as_ref() == Some(fate))
            && self.client.as_ref().is_none_or(|client| line.client.as_ref() == Some(client))
    }
}

/// Position in the lines, from which a search continues with older ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinePosition {
    /// Number of the event; the lines of later ones were searched.
    pub seq: u64,
    /// Number of matching lines of this event that were returned, newest first.
    pub returned: usize,
}

/// Result of a search for the newest lines.
#[derive(Debug)]
pub struct RecentLines<T> {
    /// Matching lines, newest first.
    pub lines: Vec<StoredLine<T>>,
    /// Position from which another search continues with the same query. `None` if there are no further lines.
    pub next: Option<LinePosition>,
    /// Number of the last event stored at that time. Later lines are in the events after it.
    pub through: u64,
    /// Number of unreadable lines and events that were skipped.
    pub skipped: u64,
}

/// Returns the newest log lines that match the query, at most `limit`, from the position `before` on. After `within` the
/// search ends with the lines found so far. There may be more lines of an instance than the journal keeps in the long
/// run.
///
/// # Errors
/// Returns an error if the data directory or its journal cannot be read.
pub fn recent_logs(
    data_dir: &Path,
    query: &StoredLineQuery,
    limit: usize,
    before: Option<LinePosition>,
    within: Duration,
) -> io::Result<RecentLines<LogLine>> {
    let matches = |subject: &EventSubject, line: &LogLine| query.matches(subject, line.timestamp);
    let search = LineSearch { table: LineTable::ServerLogs, query, limit, within, matches, lines_of: log_lines_of };
    search.run(data_dir, before)
}

/// Returns the newest calls that match the query, at most `limit`, from the position `before` on. See [`recent_logs`].
///
/// # Errors
/// Returns an error if the data directory or its journal cannot be read.
pub fn recent_calls(
    data_dir: &Path,
    query: &StoredCallQuery,
    limit: usize,
    before: Option<LinePosition>,
    within: Duration,
) -> io::Result<RecentLines<RequestLine>> {
    let matches = |subject: &EventSubject, line: &RequestLine| query.matches(subject, line);
    let (table, lines) = (LineTable::RequestLogs, &query.lines);
    let search = LineSearch { table, query: lines, limit, within, matches, lines_of: request_lines_of };
    search.run(data_dir, before)
}

struct LineSearch<'a, T, M> {
    table: LineTable,
    query: &'a StoredLineQuery,
    limit: usize,
    within: Duration,
    matches: M,
    lines_of: fn(Event) -> EventLines<T>,
}

impl<T: DeserializeOwned, M: Fn(&EventSubject, &T) -> bool> LineSearch<'_, T, M> {
    fn run(&self, data_dir: &Path, before: Option<LinePosition>) -> io::Result<RecentLines<T>> {
        let found = RecentLines { lines: Vec::new(), next: None, through: 0, skipped: 0 };
        let Some(connection) = open(data_dir)? else { return Ok(found) };
        self.search(&connection, before, found).map_err(|error| read_error(&database(data_dir), &error))
    }

    fn search(
        &self,
        connection: &Connection,
        before: Option<LinePosition>,
        mut found: RecentLines<T>,
    ) -> rusqlite::Result<RecentLines<T>> {
        // One transaction, so that no line is missed between the events and the table.
        let _transaction = connection.unchecked_transaction()?;
        let last = connection.query_row("SELECT max(seq) FROM events", [], |row| row.get::<_, Option<i64>>(0))?;
        found.through = last.map_or(0, i64::unsigned_abs);
        // A database of version 1 contains all lines in its tables.
        let copied = lines::copied_through(connection)?.unwrap_or(found.through);
        let before = before.unwrap_or(LinePosition { seq: u64::MAX - 1, returned: 0 });
        let mut page = LinePage { limit: self.limit, before, matched: LinePosition { returned: 0, ..before } };
        let mut search = BackwardSearch::new(connection, Some(before.seq.saturating_add(1)), copied, self.within);
        let mut is_full = false;
        search.run(|stored| {
            if !lines::may_have_lines(self.table, stored.body) {
                return Ok(Searched::Further);
            }
            let Ok(envelope) = serde_json::from_str::<Envelope>(stored.body) else { return Err(UnreadableEvent) };
            let Some((subject, event_lines)) = (self.lines_of)(envelope.event) else { return Ok(Searched::Further) };
            for line in event_lines.into_iter().rev().filter(|line| (self.matches)(&subject, line)) {
                if page.admits(stored.seq) {
                    found.lines.push(StoredLine { seq: stored.seq, subject: (*subject).clone(), line });
                }
                if page.is_full(found.lines.len()) {
                    is_full = true;
                    return Ok(Searched::Enough);
                }
            }
            Ok(Searched::Further)
        })?;
        found.skipped += search.skipped;
        if is_full {
            found.next = Some(page.matched);
        } else if let Some(before) = search.continue_before() {
            found.next = Some(LinePosition { seq: before.saturating_sub(1), returned: 0 });
        } else {
            self.search_table(connection, search.until, &mut page, &mut found)?;
        }
        Ok(found)
    }

    fn search_table(
        &self,
        connection: &Connection,
        until: Instant,
        page: &mut LinePage,
        found: &mut RecentLines<T>,
    ) -> rusqlite::Result<()> {
        let StoredLineQuery { instance, server, team, user, since, until: _ } = self.query;
        let mut select = connection.prepare(&select_lines(self.table, instance.is_some()))?;
        let since = since.map_or(i64::MIN, Timestamp::as_millisecond);
        let mut rows = select.query(params![to_i64(page.before.seq), since, team, user, server, instance])?;
        let mut count = 0_usize;
        while let Some(row) = rows.next()? {
            let seq = row.get::<_, i64>(0)?.unsigned_abs();
            count += 1;
            if count.is_multiple_of(LINES_PER_CHECK) && Instant::now() >= until {
                found.next = Some(page.position_at(seq));
                return Ok(());
            }
            let subject = subject_of(row)?;
            let Ok(line) = serde_json::from_str::<T>(row.get_ref(6)?.as_str()?) else {
                found.skipped += 1;
                continue;
            };
            if (self.matches)(&subject, &line) && page.admits(seq) {
                found.lines.push(StoredLine { seq, subject, line });
                if page.is_full(found.lines.len()) {
                    found.next = Some(page.matched);
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

/// Returns the SQL that reads the lines of a table, newest first: up to an event, from a time on, and those of a team, a
/// user, a server and an instance.
fn select_lines(table: LineTable, of_instance: bool) -> String {
    let of_instance = if of_instance { "instance = ?6" } else { "?6 IS NULL" };
    format!(
        "SELECT {LINE_COLUMNS} FROM {} WHERE {of_instance} AND seq <= ?1 AND at >= ?2 AND (?3 IS NULL OR team = ?3)
         AND (?4 IS NULL OR user = ?4) AND (?5 IS NULL OR server = ?5) ORDER BY n DESC",
        table.name()
    )
}

/// Progress of a search for lines.
struct LinePage {
    limit: usize,
    before: LinePosition,
    /// Event of the last matching line, and the number of its matching lines so far.
    matched: LinePosition,
}

impl LinePage {
    /// Counts a matching line of the event. Returns false if an earlier search has returned it.
    fn admits(&mut self, seq: u64) -> bool {
        self.matched = LinePosition { returned: self.position_at(seq).returned + 1, seq };
        seq < self.before.seq || self.matched.returned > self.before.returned
    }

    fn is_full(&self, found: usize) -> bool {
        found >= self.limit
    }

    fn position_at(&self, seq: u64) -> LinePosition {
        if self.matched.seq == seq { self.matched } else { LinePosition { seq, returned: 0 } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::schema;

    #[test]
    fn lines_of_an_instance_are_read_by_an_index() {
        let mut connection = Connection::open_in_memory().unwrap();
        schema::migrate(&mut connection, schema::MIGRATIONS).unwrap();
        for table in [LineTable::ServerLogs, LineTable::RequestLogs] {
            let plan = format!("EXPLAIN QUERY PLAN {}", select_lines(table, true));
            let steps: Vec<String> = connection
                .prepare(&plan)
                .unwrap()
                .query_map(params![1, 1, None::<&str>, None::<&str>, None::<&str>, "a"], |row| row.get(3))
                .unwrap()
                .collect::<Result<_, _>>()
                .unwrap();
            let expected = format!("SEARCH {0} USING INDEX {0}_of (instance=?)", table.name());
            assert_eq!(steps, [expected], "no other instance is read, and nothing is sorted");
        }
    }
}
