//! Fixtures: events, journals and small disks.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::ops::RangeInclusive;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use jiff::Timestamp;
use mcp_satellite::data_dir::private_tempdir;
use mcp_satellite::journal::{self, Journal, JournalLimits, JournalState, JournalStatus, StoredEventQuery};
use mcp_satellite_actors::model::event::{Envelope, Event, EventSubject, LogLevel, LogLine, RequestLine};
use mcp_satellite_actors::seam::{SinkAnswer, SinkBatch};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::json;
use tempfile::{TempDir, tempdir};

/// Version of the tables.
pub(crate) const VERSION: i64 = 2;

pub(crate) fn subject(team: &str, user: &str) -> Arc<EventSubject> {
    Arc::new(EventSubject {
        installation_id: "abc123".into(),
        team_id: team.into(),
        user_id: user.into(),
        process_id: format!("filesystem-{team}-{user}-abc123").into(),
        server_slug: "filesystem".into(),
    })
}

pub(crate) fn now() -> Timestamp {
    Timestamp::now()
}

pub(crate) fn event_at(seq: u64, at: Timestamp) -> Envelope {
    let event = Event::ToolExecuted {
        of: subject("acme", "alice"),
        tool_name: format!("tool \n {seq}"),
        duration_ms: 1,
        success: true,
        error_message: None,
    };
    // The journal stores milliseconds.
    Envelope { seq, timestamp: Timestamp::from_millisecond(at.as_millisecond()).unwrap(), event }
}

pub(crate) fn event(seq: u64) -> Envelope {
    event_at(seq, Timestamp::from_second(1_780_000_000 + i64::try_from(seq).unwrap()).unwrap())
}

pub(crate) fn batch_of(events: Vec<Envelope>) -> Arc<SinkBatch> {
    Arc::new(SinkBatch { id: events[0].seq, events })
}

/// An event of half a kilobyte that does not resemble others, so that it is stored in its full size.
pub(crate) fn large_event(seq: u64) -> Envelope {
    let mut envelope = event_at(seq, now());
    if let Event::ToolExecuted { tool_name, .. } = &mut envelope.event {
        *tool_name = random_text(seq, 480);
    }
    envelope
}

/// Text that cannot be compressed much, the same for each `seed`.
pub(crate) fn random_text(seed: u64, len: usize) -> String {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        char::from(b'!' + u8::try_from(state >> 58).unwrap())
    };
    (0..len).map(|_| next()).collect()
}

/// A batch of current events, which the journal does not delete because of their age.
pub(crate) fn batch(seqs: RangeInclusive<u64>) -> Arc<SinkBatch> {
    let at = now();
    batch_of(seqs.map(|seq| event_at(seq, at)).collect())
}

pub(crate) fn server_logs(seq: u64, user: &str, lines: RangeInclusive<u64>) -> Envelope {
    let line = |line| LogLine {
        level: LogLevel::Info,
        message: format!("line {line}"),
        metadata: json!({ "source": "stderr" }),
        timestamp: event_at(0, now()).timestamp,
    };
    Envelope {
        event: Event::ServerLogs { of: subject("acme", user), logs: lines.map(line).collect() },
        ..event_at(seq, now())
    }
}

pub(crate) fn request_logs(seq: u64, user: &str, calls: RangeInclusive<u64>) -> Envelope {
    let call = |call| RequestLine {
        tool_name: format!("tool {call}"),
        tool_params: json!({ "call": call }).into(),
        tool_response: json!(null).into(),
        response_time_ms: call,
        success: true,
        error_message: None,
        fate: None,
        client: None,
        timestamp: event_at(0, now()).timestamp,
    };
    let event = Event::RequestLogs { of: subject("acme", user), requests: calls.map(call).collect() };
    Envelope { event, ..event_at(seq, now()) }
}

pub(crate) fn range(seqs: RangeInclusive<u64>) -> Vec<u64> {
    seqs.collect()
}

pub(crate) struct Home {
    pub(crate) dir: TempDir,
}

impl Home {
    pub(crate) fn new() -> Self {
        Self { dir: private_tempdir() }
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn database(&self) -> PathBuf {
        journal::database(self.path())
    }

    /// Creates the directory of the journal with the journal's mode.
    pub(crate) fn make_directory(&self) {
        make_directory(self.path());
    }

    pub(crate) fn open(&self) -> Journal {
        open(self.path())
    }

    pub(crate) fn stored(&self) -> Vec<u64> {
        stored(self.path())
    }

    /// Stores events and closes the journal.
    pub(crate) async fn filled(self, seqs: RangeInclusive<u64>) -> Self {
        let journal = self.open();
        append_all(&journal, seqs).await;
        journal.close().await;
        self
    }

    /// Stores events as [`Self::filled`] does, in their full size.
    pub(crate) async fn filled_with_large(self, seqs: RangeInclusive<u64>) -> Self {
        let journal = self.open();
        append_large(&journal, seqs).await;
        journal.close().await;
        self
    }

    /// A separate database connection to the database.
    pub(crate) fn sqlite(&self) -> rusqlite::Connection {
        rusqlite::Connection::open(self.database()).unwrap()
    }
}

pub(crate) fn make_directory(data_dir: &Path) {
    fs::DirBuilder::new().mode(0o700).create(journal::directory(data_dir)).unwrap();
}

pub(crate) fn open(data_dir: &Path) -> Journal {
    Journal::open(data_dir, JournalLimits::default()).unwrap()
}

pub(crate) async fn append_all(journal: &Journal, seqs: RangeInclusive<u64>) {
    let seqs = range(seqs);
    for seqs in seqs.chunks(1_000) {
        assert_eq!(journal.append(batch(seqs[0]..=*seqs.last().unwrap())).await, SinkAnswer::Accepted);
    }
}

pub(crate) async fn append_large(journal: &Journal, seqs: RangeInclusive<u64>) {
    let seqs = range(seqs);
    for seqs in seqs.chunks(1_000) {
        let events = seqs.iter().copied().map(large_event).collect();
        assert_eq!(journal.append(batch_of(events)).await, SinkAnswer::Accepted);
    }
}

/// Number of events in a database.
pub(crate) fn count_events(sqlite: &rusqlite::Connection) -> u64 {
    let sql = "SELECT coalesce(sum(seq - coalesce(first, seq) + 1), 0) FROM events";
    sqlite.query_row(sql, [], |row| row.get(0)).unwrap()
}

/// The seqs of all stored events. Panics if any cannot be read.
pub(crate) fn stored(data_dir: &Path) -> Vec<u64> {
    chosen(data_dir, StoredEventQuery::default())
}

pub(crate) fn chosen(data_dir: &Path, query: StoredEventQuery) -> Vec<u64> {
    let mut events = journal::read(data_dir, query).unwrap();
    let seqs = events.by_ref().map(|event| event.seq).collect();
    assert!(events.take_error().is_none());
    assert_eq!(events.skipped(), 0);
    seqs
}

pub(crate) fn assert_unavailable(answer: SinkAnswer) -> String {
    match answer {
        SinkAnswer::Unavailable(reason) => reason,
        other => panic!("expected `Unavailable`, got {other:?}"),
    }
}

/// Asserts the state `memory` and returns the reason.
pub(crate) fn assert_in_memory(journal: &Journal) -> String {
    let status = journal.status();
    assert_eq!(status.state, JournalState::Memory, "{status:?}");
    status.reason.unwrap()
}

#[track_caller]
pub(crate) fn assert_ok(journal: &Journal) -> JournalStatus {
    let status = journal.status();
    assert_eq!((status.state, &status.reason), (JournalState::Ok, &None), "{status:?}");
    status
}

/// Asserts that two lists of numbers are equal. A failure prints ranges.
#[track_caller]
pub(crate) fn assert_same_numbers(found: impl IntoIterator<Item = u64>, expected: impl IntoIterator<Item = u64>) {
    let ranges = |numbers: Vec<u64>| {
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        for number in numbers {
            match ranges.last_mut() {
                Some(last) if last.1 + 1 == number => last.1 = number,
                _ => ranges.push((number, number)),
            }
        }
        ranges
    };
    assert_eq!(ranges(found.into_iter().collect()), ranges(expected.into_iter().collect()));
}

/// The ranges of lost events that a journal has reported.
#[derive(Clone, Default)]
pub(crate) struct DroppedRanges(Arc<Mutex<Vec<(u64, u64)>>>);

impl DroppedRanges {
    pub(crate) fn subscribe(journal: &Journal) -> Self {
        let dropped_ranges = Self::default();
        let into = dropped_ranges.clone();
        journal.on_dropped(move |from, to| into.0.lock().unwrap().push((from, to)));
        dropped_ranges
    }

    pub(crate) fn now(&self) -> Vec<(u64, u64)> {
        self.0.lock().unwrap().clone()
    }

    /// The ranges reported after the journal has processed all earlier requests.
    pub(crate) async fn ranges(&self, journal: &Journal) -> Vec<(u64, u64)> {
        let _ = journal.delivery().await;
        self.now()
    }

    pub(crate) async fn numbers(&self, journal: &Journal) -> BTreeSet<u64> {
        self.ranges(journal).await.into_iter().flat_map(|(from, to)| from..=to).collect()
    }
}

/// A tmpfs of a few megabytes.
pub(crate) struct Disk {
    pub(crate) dir: TempDir,
}

impl Disk {
    /// Mounts the disk, which requires root.
    pub(crate) fn new(bytes: usize) -> Self {
        let dir = tempdir().unwrap();
        let options = format!("size={bytes},mode=700");
        mount(Some("tmpfs"), dir.path(), Some("tmpfs"), MsFlags::empty(), Some(options.as_str())).unwrap();
        Self { dir }
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn remount(&self, read_only: bool) {
        let mode = if read_only { MsFlags::MS_RDONLY } else { MsFlags::empty() };
        mount(None::<&str>, self.path(), None::<&str>, MsFlags::MS_REMOUNT | mode, None::<&str>).unwrap();
    }

    /// Fills the disk except for `free` bytes.
    pub(crate) fn fill(&self, free: usize) {
        let mut file = fs::File::create(self.path().join("filler")).unwrap();
        while file.write_all(&[0; 4096]).is_ok() {}
        let len = file.metadata().unwrap().len();
        file.set_len(len.saturating_sub(free as u64)).unwrap();
    }

    pub(crate) fn free_space(&self) {
        fs::remove_file(self.path().join("filler")).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Lazy unmount: a failed test may still have files open there.
        let _ = umount2(self.path(), MntFlags::MNT_DETACH);
    }
}
