//! Events as JSON lines in a directory, kept over restarts and a `kill -9` (not over a loss of power: nothing is
//! synced).
//!
//! ```text
//! DIR/events.00000000000000000001.jsonl    full; its first event has seq 1
//! DIR/events.00000000000000000842.jsonl    full; its first event has seq 842
//! DIR/events.jsonl                         being written
//! ```
//!
//! A full file is named for its first event and never renamed again, so names tell the order, and a reader misses
//! none and reads none twice because another one was added meanwhile.
//!
//! Rotation is our own: `file-rotate` 0.8 answers `Ok` to a write when it could not open its file, panics where a
//! directory cannot be made or a file has vanished, and renumbers every old file at each rotation, under the readers.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures::future::BoxFuture;
use mcp_satellite_actors::seam::{Answer, Batch, EventSink};
use serde::Deserialize;

use super::writer::Writer;
use crate::data_dir::{Access, DataDir};

/// The file that is being written.
const CURRENT: &str = "events.jsonl";

/// Appends each batch to `events.jsonl`, and begins a new file when it is full.
#[derive(Debug)]
pub struct FileSink {
    writer: Writer,
}

impl FileSink {
    /// Opens the files in `dir`, which is made if need be and must be accessible to its owner only, and returns it
    /// with the seq that the next event gets: one more than the last one stored, or 1. Whatever a killed satellite left is repaired.
    ///
    /// A batch that would make `events.jsonl` larger than `rotate_bytes` goes to a new file; beside that file the
    /// `keep` latest full ones stay. All are readable by their owner only. One directory has one writer.
    pub fn open(dir: impl Into<PathBuf>, rotate_bytes: u64, keep: usize) -> io::Result<(Self, u64)> {
        let dir = dir.into();
        Self::open_in(DataDir::create(&dir).map_err(|error| at("make", &dir, &error))?, rotate_bytes, keep)
    }

    /// [`FileSink::open`] in a directory that is open already.
    pub fn open_in(dir: DataDir, rotate_bytes: u64, keep: usize) -> io::Result<(Self, u64)> {
        let mut store = Store { dir, rotate_bytes, keep, last: None, open: None };
        store.open = match store.recover() {
            Ok(current) => Some(current),
            // Events wait until there is room: no reason not to start.
            Err(error) if is_want_of_room(&error) => {
                tracing::error!(%error, "cannot open the file of events; trying again with the first event");
                None
            }
            Err(error) => return Err(error),
        };
        if store.last.is_none() {
            store.last = store.last_in_full_files()?;
        }
        let next_seq = store.last.map_or(1, |last| last.saturating_add(1));
        Ok((Self { writer: Writer::start(move |batch| store.write(batch))? }, next_seq))
    }
}

impl EventSink for FileSink {
    fn send(&self, batch: Arc<Batch>) -> BoxFuture<'static, Answer> {
        self.writer.send(batch)
    }
}

/// What the writing thread owns.
struct Store {
    dir: DataDir,
    rotate_bytes: u64,
    keep: usize,
    /// The last event that was written whole. An event at or before it comes from a repeated batch.
    last: Option<u64>,
    /// `None` after a failure: what was written of a batch is then found out from the file itself.
    open: Option<Current>,
}

/// `events.jsonl`, ending with a complete line.
struct Current {
    file: File,
    len: u64,
    first: Option<u64>,
}

impl Store {
    fn write(&mut self, batch: &Batch) -> Answer {
        match self.append(batch) {
            Ok(answer) => answer,
            Err(error) => Answer::Unavailable(error.to_string()),
        }
    }

    fn append(&mut self, batch: &Batch) -> io::Result<Answer> {
        let mut current = match self.open.take() {
            // Somebody may have moved the file away; what went into it now would be seen by nobody.
            Some(current) if is_current(&current.file, &self.dir) => current,
            _ => self.recover()?,
        };
        let (mut lines, mut first, mut last) = (Vec::new(), None, self.last);
        for (index, event) in batch.events.iter().enumerate().filter(|(_, event)| Some(event.seq) > self.last) {
            if let Err(error) = serde_json::to_writer(&mut lines, event) {
                self.open = Some(current);
                return Ok(Answer::Invalid(Some(index), format!("cannot be written as JSON: {error}")));
            }
            lines.push(b'\n');
            first = first.or(Some(event.seq));
            last = Some(event.seq);
        }
        if let Some(oldest) = current.first
            && !lines.is_empty()
            && current.len.saturating_add(lines.len() as u64) > self.rotate_bytes
        {
            self.rotate(oldest)?;
            current = self.recover()?;
        }
        current.file.write_all(&lines).map_err(|error| self.at("write", CURRENT, &error))?;
        current.len += lines.len() as u64;
        current.first = current.first.or(first);
        self.last = last;
        self.open = Some(current);
        Ok(Answer::Accepted)
    }

    /// Opens `events.jsonl`, cuts off what was left of a line, and learns what is in it. The file is read whole, once
    /// per start and failure.
    fn recover(&mut self) -> io::Result<Current> {
        let (current, last) = open_current(&self.dir).map_err(|error| self.at("write", CURRENT, &error))?;
        self.last = self.last.max(last);
        Ok(current)
    }

    /// The last seq of the newest full file that tells. A file whose lines are all damaged still tells its first one
    /// by its name, which must not be used again.
    fn last_in_full_files(&self) -> io::Result<Option<u64>> {
        let Some(first) = full_files(&self.dir)?.pop() else { return Ok(None) };
        let name = full_name(first);
        let file = self.dir.open_file(&name, Access::Read).map_err(|error| self.at("read", &name, &error))?;
        let lines = Lines::of(&file).map_err(|error| self.at("read", &name, &error))?;
        Ok(lines.last.max(Some(first)))
    }

    fn rotate(&self, first: u64) -> io::Result<()> {
        self.dir.rename(CURRENT, &full_name(first)).map_err(|error| self.at("rename", CURRENT, &error))?;
        let mut old = full_files(&self.dir)?;
        old.truncate(old.len().saturating_sub(self.keep));
        for name in old.into_iter().map(full_name) {
            if let Err(error) = self.dir.remove(&name) {
                // Events are not held up by what is only tidiness; the next rotation tries again.
                tracing::warn!("cannot remove the old events in {}: {error}", self.dir.path().join(name).display());
            }
        }
        Ok(())
    }

    fn at(&self, doing: &str, name: &str, error: &io::Error) -> io::Error {
        at(doing, &self.dir.path().join(name), error)
    }
}

fn is_want_of_room(error: &io::Error) -> bool {
    use io::ErrorKind::{QuotaExceeded, ReadOnlyFilesystem, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | ReadOnlyFilesystem)
}

/// `events.jsonl`, repaired, with the last seq in it.
fn open_current(dir: &DataDir) -> io::Result<(Current, Option<u64>)> {
    let mut file = dir.open_file(CURRENT, Access::Append)?;
    let Lines { first, last, mut len, tail } = Lines::of(&file)?;
    match tail {
        Tail::None => {}
        Tail::Torn => file.set_len(len)?,
        Tail::Unterminated { line_len } => {
            file.write_all(b"\n")?;
            len += line_len + 1;
        }
    }
    Ok((Current { file, len, first }, last))
}

/// What one reading of a file tells.
struct Lines {
    first: Option<u64>,
    last: Option<u64>,
    /// Bytes up to the last newline.
    len: u64,
    tail: Tail,
}

/// What comes after the last newline.
enum Tail {
    None,
    /// A part of an event.
    Torn,
    /// A whole event without its newline.
    Unterminated {
        line_len: u64,
    },
}

impl Lines {
    fn of(file: &File) -> io::Result<Self> {
        let mut lines = Self { first: None, last: None, len: 0, tail: Tail::None };
        let (mut reader, mut line) = (BufReader::new(file), Vec::new());
        loop {
            line.clear();
            let read = reader.read_until(b'\n', &mut line)? as u64;
            if read == 0 {
                return Ok(lines);
            }
            let seq = seq_of(&line);
            lines.first = lines.first.or(seq);
            lines.last = lines.last.max(seq);
            if line.last() == Some(&b'\n') {
                lines.len += read;
            } else {
                lines.tail = if seq.is_some() { Tail::Unterminated { line_len: read } } else { Tail::Torn };
            }
        }
    }
}

fn is_current(file: &File, dir: &DataDir) -> bool {
    match (file.metadata(), dir.stat(CURRENT)) {
        (Ok(ours), Some(found)) => (ours.dev(), ours.ino()) == found.identity,
        _ => false,
    }
}

/// The part of a line that tells whether it is an event.
#[derive(Deserialize)]
struct Head {
    seq: u64,
}

/// The seq of a stored line, or `None` if it is not a complete event.
fn seq_of(line: &[u8]) -> Option<u64> {
    serde_json::from_slice::<Head>(line).ok().map(|head| head.seq)
}

/// The full file that begins with the event `first`.
fn full_name(first: u64) -> String {
    format!("events.{first:020}.jsonl")
}

/// The full files by their first seq, oldest first.
fn full_files(dir: &DataDir) -> io::Result<Vec<u64>> {
    let mut found = Vec::new();
    for name in dir.names().map_err(|error| at("read", dir.path(), &error))? {
        let digits = name.strip_prefix("events.").and_then(|name| name.strip_suffix(".jsonl"));
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

/// An error that says what was being done to which file.
fn at(doing: &str, path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("cannot {doing} {}: {error}", path.display()))
}
