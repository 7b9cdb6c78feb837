//! The stored events, read back: once, or as they come, beside a satellite that writes them.
//!
//! ```text
//! DIR/events.00000000000000000001.jsonl    full; its first event has seq 1
//! DIR/events.00000000000000000842.jsonl    full; its first event has seq 842
//! DIR/events.jsonl                         being written by `sink::file::FileSink`
//! ```
//!
//! A full file is named for its first event and never renamed again, so names tell the order, a reader can pass over
//! files without opening them, and none is read twice or missed because another one was added meanwhile.

use std::borrow::Cow;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use mcp_satellite_actors::model::event::{Envelope, Event};
use mcp_satellite_actors::model::ids::{TeamId, UserId};
use serde::Deserialize;

/// Which events are wanted: those for which everything that is given holds.
#[derive(Debug, Clone, Default)]
pub struct Query {
    /// Only events after this seq.
    pub since: Option<u64>,
    /// Only these types, by their names on the wire; all of them if empty.
    pub types: Vec<String>,
    /// Only those about the instance of this name (`process_id`).
    pub instance: Option<String>,
    /// Only those about an instance of the server with this slug.
    pub server: Option<String>,
    /// Only those about this team or one of its instances or clients, by its id.
    pub team: Option<String>,
    /// Only those about an instance or a client of this user, by its id.
    pub user: Option<String>,
}

impl Query {
    /// Whether `envelope` is wanted.
    pub fn matches(&self, envelope: &Envelope) -> bool {
        let Self { since, types, instance, server, team, user } = self;
        let is = |wanted: &Option<String>, found: Option<&str>| wanted.is_none() || wanted.as_deref() == found;
        let subject = envelope.event.subject();
        let (team_found, user_found) = match &envelope.event {
            Event::ClientConnected { team_id, user_id, .. } | Event::ClientDisconnected { team_id, user_id, .. } => {
                (Some(team_id), Some(user_id))
            }
            Event::TeamThrottled { team_id, .. } | Event::TeamUnthrottled { team_id, .. } => (Some(team_id), None),
            _ => (subject.map(|of| &of.team_id), subject.map(|of| &of.user_id)),
        };
        since.is_none_or(|since| envelope.seq > since)
            && (types.is_empty() || types.iter().any(|kind| kind == envelope.event.kind()))
            && is(instance, subject.map(|of| &*of.process_id))
            && is(server, subject.map(|of| of.server_slug.as_str()))
            && is(team, team_found.map(TeamId::as_str))
            && is(user, user_found.map(UserId::as_str))
    }
}

/// Reads the events that are stored in `dir` now, in order of seq, one line in memory at a time.
pub fn read(dir: impl Into<PathBuf>, query: Query) -> io::Result<Events> {
    let mut follow = Follow::new(dir, query);
    follow.open = follow.open_next()?;
    Ok(Events { follow, error: None })
}

/// What [`read`] found.
#[derive(Debug)]
pub struct Events {
    follow: Follow,
    error: Option<io::Error>,
}

impl Events {
    /// Lines passed over so far because they are no event: damaged, or written by a version that knows more.
    pub fn skipped(&self) -> u64 {
        self.follow.skipped
    }

    /// Why the iteration ended early, if it did.
    pub fn take_error(&mut self) -> Option<io::Error> {
        self.error.take()
    }
}

impl Iterator for Events {
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

/// Reads the events as they come. It starts with those that are stored already; [`Query::since`] passes over them.
#[derive(Debug)]
pub struct Follow {
    dir: PathBuf,
    query: Query,
    /// The highest seq that was read, wanted or not. Nothing at or below it is given again.
    passed: Option<u64>,
    /// The first seq of the last full file that is done with.
    finished: Option<u64>,
    open: Option<Source>,
    line: Vec<u8>,
    skipped: u64,
}

impl Follow {
    /// Follows the events in `dir`. Nothing is opened yet.
    pub fn new(dir: impl Into<PathBuf>, query: Query) -> Self {
        let passed = query.since;
        Self { dir: dir.into(), query, passed, finished: None, open: None, line: Vec::new(), skipped: 0 }
    }

    /// The next event, or `None` while there is none: ask again later. It reads files, so not from an async thread
    /// that has other things to do. After an error it goes on behind the last event that it gave.
    pub fn poll(&mut self) -> io::Result<Option<Envelope>> {
        let outcome = self.advance();
        if outcome.is_err() {
            self.open = None;
        }
        outcome
    }

    /// See [`Events::skipped`].
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    fn advance(&mut self) -> io::Result<Option<Envelope>> {
        loop {
            let Some(source) = &mut self.open else {
                self.open = self.open_next()?;
                if self.open.is_none() {
                    return Ok(None);
                }
                continue;
            };
            if source.read_line(&mut self.line).map_err(|error| at("read the events in", &self.dir, &error))? {
                if let Some(envelope) = self.take_line() {
                    return Ok(Some(envelope));
                }
            } else if source.full {
                self.finished = self.finished.max(source.first);
                self.open = None;
            } else if source.is_still(&current_path(&self.dir))? {
                return Ok(None);
            } else {
                // Lines may have been added between our reaching the end and the rotation: the end is looked for again.
                source.full = true;
            }
        }
    }

    /// The event of the line just read, if it is a wanted one.
    fn take_line(&mut self) -> Option<Envelope> {
        let Ok(head) = serde_json::from_slice::<Head>(&self.line) else {
            self.skipped += 1;
            return None;
        };
        if let Some(source) = &mut self.open {
            source.first.get_or_insert(head.seq);
        }
        if self.passed.is_some_and(|passed| head.seq <= passed) {
            return None;
        }
        self.passed = Some(head.seq);
        if !self.query.types.is_empty() && !self.query.types.iter().any(|kind| *kind == *head.kind) {
            return None;
        }
        let Ok(envelope) = serde_json::from_slice::<Envelope>(&self.line) else {
            self.skipped += 1;
            return None;
        };
        self.query.matches(&envelope).then_some(envelope)
    }

    fn open_next(&mut self) -> io::Result<Option<Source>> {
        loop {
            // The current file is opened before the full ones are listed: if it becomes full in between, it is in the
            // list. The other way round it could be in neither place.
            let current = open_if_there(&current_path(&self.dir))?;
            let mut waiting = full_files(&self.dir)?;
            waiting.retain(|first| Some(*first) > self.finished);
            // A file whose successor begins at or before what comes next has nothing for us.
            let next = self.passed.map_or(0, |passed| passed.saturating_add(1));
            let start = waiting.partition_point(|first| *first <= next).saturating_sub(1);
            let Some(&first) = waiting.get(start) else {
                return Ok(current.map(|file| Source::new(file, None)));
            };
            if let Some(file) = open_if_there(&full_path(&self.dir, first))? {
                return Ok(Some(Source::new(file, Some(first))));
            }
            // It was the oldest and made room for a new one.
            self.finished = Some(first);
        }
    }
}

/// A file being read, to the end of its last complete line.
#[derive(Debug)]
struct Source {
    reader: BufReader<File>,
    offset: u64,
    first: Option<u64>,
    full: bool,
}

impl Source {
    /// `first` is known of a full file only.
    fn new(file: File, first: Option<u64>) -> Self {
        Self { reader: BufReader::new(file), offset: 0, first, full: first.is_some() }
    }

    /// Whether there was a complete line. One that is still being written stays for later: should the satellite be
    /// killed in the middle of it, its next start cuts it off.
    fn read_line(&mut self, line: &mut Vec<u8>) -> io::Result<bool> {
        line.clear();
        let read = self.reader.read_until(b'\n', line)?;
        if line.last() == Some(&b'\n') {
            self.offset += read as u64;
            return Ok(true);
        }
        if read > 0 {
            self.reader.seek(SeekFrom::Start(self.offset))?;
        }
        Ok(false)
    }

    /// Whether `path` still names this file. If it was emptied by somebody, it is read from its start again.
    fn is_still(&mut self, path: &Path) -> io::Result<bool> {
        let found = match fs::metadata(path) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(at("read", path, &error)),
        };
        let ours = self.reader.get_ref().metadata()?;
        if (found.dev(), found.ino()) != (ours.dev(), ours.ino()) {
            return Ok(false);
        }
        if found.len() < self.offset {
            self.offset = 0;
            self.reader.rewind()?;
        }
        Ok(true)
    }
}

/// The parts of a line that decide whether the rest is looked at.
#[derive(Deserialize)]
struct Head<'a> {
    seq: u64,
    #[serde(rename = "type", borrow)]
    kind: Cow<'a, str>,
}

/// The seq of a stored line, or `None` if it is not a complete event.
pub(crate) fn seq_of(line: &[u8]) -> Option<u64> {
    serde_json::from_slice::<Head>(line).ok().map(|head| head.seq)
}

/// The file that is being written.
pub(crate) fn current_path(dir: &Path) -> PathBuf {
    dir.join("events.jsonl")
}

/// The full file that begins with the event `first`.
pub(crate) fn full_path(dir: &Path, first: u64) -> PathBuf {
    dir.join(format!("events.{first:020}.jsonl"))
}

/// The full files by their first seq, oldest first.
pub(crate) fn full_files(dir: &Path) -> io::Result<Vec<u64>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).map_err(|error| at("read", dir, &error))? {
        let name = entry.map_err(|error| at("read", dir, &error))?.file_name();
        let digits = name.to_str().and_then(|name| name.strip_prefix("events.")?.strip_suffix(".jsonl"));
        // Twenty digits hold every seq; anything else is not ours.
        if let Some(digits) = digits.filter(|digits| digits.len() == 20)
            && let Ok(first) = digits.parse()
        {
            found.push(first);
        }
    }
    found.sort_unstable();
    Ok(found)
}

fn open_if_there(path: &Path) -> io::Result<Option<File>> {
    match File::open(path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(at("read", path, &error)),
    }
}

/// An error that says what was being done to which file.
pub(crate) fn at(doing: &str, path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("cannot {doing} {}: {error}", path.display()))
}
