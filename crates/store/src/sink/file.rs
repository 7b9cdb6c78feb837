//! Event sink that writes JSON lines to files. Events survive restarts and `kill -9`, but not a power loss, because
//! nothing is synced.
//!
//! ```text
//! DIR/events.00000000000000000001.jsonl    full; its first event has seq 1
//! DIR/events.00000000000000000842.jsonl    full; its first event has seq 842
//! DIR/events.jsonl                         being written
//! ```
//!
//! A full file is named after its first event and never renamed again. File names therefore show the order, and a
//! reader neither misses nor repeats a file while another one is added.
//!
//! The rotation does not use `file-rotate`: version 0.8 returns `Ok` from a write that could not open its file, panics
//! if a directory cannot be created or a file has vanished, and renames every old file at each rotation.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures::future::BoxFuture;
use mcp_satellite_actors::seam::{EventSink, SinkAnswer, SinkBatch};
use serde::Deserialize;

use super::writer::WriterThread;
use mcp_satellite_files::data_dir::{DataDir, OpenMode};

const CURRENT: &str = "events.jsonl";

/// Event sink that appends batches to `events.jsonl` and starts a new file when it is full.
#[derive(Debug)]
pub struct FileSink {
    writer: WriterThread,
}

impl FileSink {
    /// Opens the files in `dir` and returns the sink with the `seq` of the next event: one more than the last stored
    /// one, or 1. The directory is created if it does not exist, and must be accessible only to its owner. Incomplete
    /// writes of a killed satellite are repaired.
    ///
    /// A batch that would make `events.jsonl` larger than `rotate_bytes` goes to a new file; in addition to that file,
    /// the `keep` latest full files are kept. Files are readable only by their owner. Only one sink may use a directory
    /// at a time.
    ///
    /// # Errors
    ///
    /// Returns an error if the directory or its files cannot be used. A full disk is not an error: events wait.
    pub fn open(dir: impl Into<PathBuf>, rotate_bytes: u64, keep: usize) -> io::Result<(Self, u64)> {
        let dir = dir.into();
        Self::open_in(DataDir::create(&dir).map_err(|error| path_error("create", &dir, &error))?, rotate_bytes, keep)
    }

    pub fn open_in(dir: DataDir, rotate_bytes: u64, keep: usize) -> io::Result<(Self, u64)> {
        let mut store = EventFiles { dir, rotate_bytes, keep, last: None, current: None };
        store.current = match store.recover() {
            Ok(current) => Some(current),
            // Without disk space, events wait; the satellite still starts.
            Err(error) if is_out_of_space(&error) => {
                tracing::error!(%error, "cannot open the file of events; trying again with the first event");
                None
            }
            Err(error) => return Err(error),
        };
        if store.last.is_none() {
            store.last = store.last_seq_in_full_files()?;
        }
        let next_seq = store.last.map_or(1, |last| last.saturating_add(1));
        Ok((Self { writer: WriterThread::start(move |batch| store.write(batch))? }, next_seq))
    }
}

impl EventSink for FileSink {
    fn send(&self, batch: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
        self.writer.send(batch)
    }
}

// Owned by the writer thread.
struct EventFiles {
    dir: DataDir,
    rotate_bytes: u64,
    keep: usize,
    // `seq` of the last complete event. Events up to it belong to a repeated batch.
    last: Option<u64>,
    // `None` after a failure: the file is then read to determine what was written.
    current: Option<CurrentEventFile>,
}

// `events.jsonl`, which ends with a complete line.
struct CurrentEventFile {
    file: File,
    len: u64,
    first: Option<u64>,
}

impl EventFiles {
    fn write(&mut self, batch: &SinkBatch) -> SinkAnswer {
        match self.append(batch) {
            Ok(answer) => answer,
            Err(error) => SinkAnswer::Unavailable(error.to_string()),
        }
    }

    fn append(&mut self, batch: &SinkBatch) -> io::Result<SinkAnswer> {
        let mut current = match self.current.take() {
            // Events written to a file that was moved away would be lost to readers.
            Some(current) if is_current(&current.file, &self.dir) => current,
            _ => self.recover()?,
        };
        let (mut lines, mut first, mut last) = (Vec::new(), None, self.last);
        for (index, event) in batch.events.iter().enumerate().filter(|(_, event)| Some(event.seq) > self.last) {
            if let Err(error) = serde_json::to_writer(&mut lines, event) {
                self.current = Some(current);
                return Ok(SinkAnswer::Invalid(Some(index), format!("cannot write the event as JSON: {error}")));
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
        current.file.write_all(&lines).map_err(|error| self.path_error("write", CURRENT, &error))?;
        current.len += lines.len() as u64;
        current.first = current.first.or(first);
        self.last = last;
        self.current = Some(current);
        Ok(SinkAnswer::Accepted)
    }

    /// Opens `events.jsonl`, removes an incomplete last line and determines the last `seq`. Reads the whole file, once
    /// per start and failure.
    fn recover(&mut self) -> io::Result<CurrentEventFile> {
        let (current, last) = open_current(&self.dir).map_err(|error| self.path_error("write", CURRENT, &error))?;
        self.last = self.last.max(last);
        Ok(current)
    }

    // The file name contains the first `seq`, which must not be used again even if all lines are damaged.
    fn last_seq_in_full_files(&self) -> io::Result<Option<u64>> {
        let Some(first) = full_files(&self.dir)?.pop() else { return Ok(None) };
        let name = full_file_name(first);
        let file = self.dir.open_file(&name, OpenMode::Read).map_err(|error| self.path_error("read", &name, &error))?;
        let lines = EventFileScan::from_file(&file).map_err(|error| self.path_error("read", &name, &error))?;
        Ok(lines.last.max(Some(first)))
    }

    fn rotate(&self, first: u64) -> io::Result<()> {
        self.dir.rename(CURRENT, &full_file_name(first)).map_err(|error| self.path_error("rename", CURRENT, &error))?;
        let mut old = full_files(&self.dir)?;
        old.truncate(old.len().saturating_sub(self.keep));
        for name in old.into_iter().map(full_file_name) {
            if let Err(error) = self.dir.remove(&name) {
                // Writing continues without the cleanup; the next rotation tries again.
                let file = self.dir.path().join(name);
                tracing::warn!(file = %file.display(), %error, "cannot remove old events");
            }
        }
        Ok(())
    }

    fn path_error(&self, doing: &str, name: &str, error: &io::Error) -> io::Error {
        path_error(doing, &self.dir.path().join(name), error)
    }
}

fn is_out_of_space(error: &io::Error) -> bool {
    use io::ErrorKind::{QuotaExceeded, ReadOnlyFilesystem, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | ReadOnlyFilesystem)
}

fn open_current(dir: &DataDir) -> io::Result<(CurrentEventFile, Option<u64>)> {
    let mut file = dir.open_file(CURRENT, OpenMode::Append)?;
    let EventFileScan { first, last, mut len, tail } = EventFileScan::from_file(&file)?;
    match tail {
        EventFileTail::None => {}
        EventFileTail::Torn => file.set_len(len)?,
        EventFileTail::Unterminated { line_len } => {
            file.write_all(b"\n")?;
            len += line_len + 1;
        }
    }
    Ok((CurrentEventFile { file, len, first }, last))
}

struct EventFileScan {
    first: Option<u64>,
    last: Option<u64>,
    // Bytes up to and including the last newline.
    len: u64,
    tail: EventFileTail,
}

// Remainder of a file after the last newline.
enum EventFileTail {
    None,
    Torn,
    /// Complete event without its newline.
    Unterminated {
        line_len: u64,
    },
}

impl EventFileScan {
    fn from_file(file: &File) -> io::Result<Self> {
        let mut lines = Self { first: None, last: None, len: 0, tail: EventFileTail::None };
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
                lines.tail =
                    if seq.is_some() { EventFileTail::Unterminated { line_len: read } } else { EventFileTail::Torn };
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

#[derive(Deserialize)]
struct EventSeq {
    seq: u64,
}

// `None` if the line is not a complete event.
fn seq_of(line: &[u8]) -> Option<u64> {
    serde_json::from_slice::<EventSeq>(line).ok().map(|head| head.seq)
}

fn full_file_name(first: u64) -> String {
    format!("events.{first:020}.jsonl")
}

// By their first `seq`, oldest first.
fn full_files(dir: &DataDir) -> io::Result<Vec<u64>> {
    let mut found = Vec::new();
    for name in dir.names().map_err(|error| path_error("read", dir.path(), &error))? {
        let digits = name.strip_prefix("events.").and_then(|name| name.strip_suffix(".jsonl"));
        // 20 digits hold every `seq`; other names belong to other programs.
        if let Some(digits) = digits.filter(|digits| digits.len() == 20)
            && let Ok(first) = digits.parse()
        {
            found.push(first);
        }
    }
    found.sort_unstable();
    Ok(found)
}

fn path_error(doing: &str, path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("cannot {doing} {}: {error}", path.display()))
}
