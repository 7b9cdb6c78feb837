//! The file `DIR/journal/seq`: the event numbers that may have been visible, in case the database is lost, loses its end, or
//! does not accept events. It is a single line of fixed length, written in place, so that it can be written on a full
//! disk.
//!
//! ```text
//! 00000000000000020000 stored 00000000000000012345 open   00000000000000012400 bcdd54da-c541-4144-a403-ff5dee86d4ae
//! │                    │      │                    │      │                    └ boot id of the machine
//! │                    │      │                    │      └ last granted number: events have numbers up to it
//! │                    │      │                    └ `closed`: the satellite ended in an orderly way
//! │                    │      └ number that was stored in the database when the line was written
//! │                    └ the database contains every number in use; `ahead`: larger numbers are in use
//! └ last reserved number: no larger number was visible; synced, to survive a loss of power
//! ```
//!
//! The database is the record of the stored numbers. The line only proves whether the database still is what the
//! satellite left: the stored number is written with the first transaction after the database was opened or its WAL was
//! moved into it, before a WAL is moved, and otherwise once a second. So a database that has lost its WAL ends before that
//! number. Before that first transaction its numbers are granted, because a reader may see them at once. These writes are
//! not synced: like the WAL, they survive a `kill -9`. After a loss of power neither is reliable, so the line contains the
//! boot id.
//!
//! Numbers become visible when their events are stored. If the disk stores nothing, they are granted before events with
//! them are shown or sent from memory (`SeqFile::grant`). A disk that hangs cannot be written, so such events stay
//! invisible. A later start therefore never reuses a number that anybody has seen.

use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use super::shared::JournalHome;
use mcp_satellite_files::data_dir::OpenMode;

const FILE: &str = "seq";
/// Maximum size of the file in bytes. A longer file is treated as missing.
const FILE_MAX: u64 = 4096;
pub(super) const STEP: u64 = 10_000;
/// Numbers reserved at once if the last ones were used up within `STORM`, because each reservation waits for the disk.
const STORM_STEP: u64 = 100_000;
const STORM: Duration = Duration::from_secs(1);
/// Interval in which the last stored number is written.
const RECORD_INTERVAL: Duration = Duration::from_secs(1);
const NO_BOOT: &str = "-";
const BOOT_LEN: usize = 36;

#[derive(Debug, Clone)]
pub(super) struct SeqFile {
    home: JournalHome,
    record: SeqRecord,
    /// True if the file contains `record`.
    written: bool,
    boot: String,
    reserved_at: Option<Instant>,
    /// Last number stored in the database.
    stored: u64,
    /// Last granted number that was written in this run, also if a later write failed.
    granted: u64,
    /// True if the recorded number is larger than every number in the database without its WAL.
    covers_wal: bool,
    recorded_at: Option<Instant>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct SeqRecord {
    reserved: u64,
    ahead: bool,
    reached: u64,
    closed: bool,
    boot: String,
    granted: u64,
}

impl SeqRecord {
    fn parse(text: &str, boot: &str) -> Option<Self> {
        let fields: Vec<&str> = text.split_ascii_whitespace().collect();
        let (reserved, word, rest) = match fields.as_slice() {
            [reserved, word, rest @ ..] => (reserved.parse::<u64>().ok()?, *word, rest),
            _ => return None,
        };
        let (reached, end, boot, granted) = match rest {
            // Oldest format: one step was reserved beyond the stored numbers.
            [] => (reserved.saturating_sub(STEP), "open", boot, 0),
            // Second format, without granted numbers.
            [reached, end, boot] => (reached.parse().ok()?, *end, *boot, 0),
            [reached, end, granted, boot] => (reached.parse().ok()?, *end, *boot, granted.parse().ok()?),
            _ => return None,
        };
        let is_complete = boot == NO_BOOT || boot.len() == BOOT_LEN;
        let known = is_complete && matches!(word, "stored" | "ahead") && matches!(end, "open" | "closed");
        let (ahead, closed) = (word == "ahead", end == "closed");
        known.then(|| Self { reserved, ahead, reached, closed, boot: boot.to_owned(), granted })
    }

    fn to_line(&self) -> String {
        let Self { reserved, reached, boot, granted, .. } = self;
        let word = if self.ahead { "ahead" } else { "stored" };
        let end = if self.closed { "closed" } else { "open" };
        format!("{reserved:020} {word:<6} {reached:020} {end:<6} {granted:020} {boot:<36}\n")
    }
}

impl SeqFile {
    /// Reads the file. If it is missing or invalid, nothing is reserved.
    pub(super) fn read(home: &JournalHome) -> Self {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let boot = Some(boot.trim()).filter(|boot| boot.len() == BOOT_LEN).unwrap_or(NO_BOOT).to_owned();
        let found = home.directory().and_then(|directory| directory.read(FILE, FILE_MAX)).ok().flatten();
        let says = SeqRecord::parse(&String::from_utf8(found.unwrap_or_default()).unwrap_or_default(), &boot);
        let nothing =
            SeqRecord { reserved: 0, ahead: false, reached: 0, closed: false, boot: boot.clone(), granted: 0 };
        Self {
            home: home.clone(),
            written: says.is_some(),
            record: says.unwrap_or(nothing),
            boot,
            reserved_at: None,
            stored: 0,
            granted: 0,
            covers_wal: false,
            recorded_at: None,
        }
    }

    /// Returns the last number that may be in use. `stored` is the last number in a complete database; `None` if there
    /// is no database or it is not reliable.
    pub(super) fn last_used(&self, stored: Option<u64>) -> u64 {
        let SeqRecord { reserved, ahead, reached, closed, boot, granted } = &self.record;
        // An unknown boot may be another boot.
        let same_boot = *boot == self.boot && boot != NO_BOOT;
        let has_all = stored.is_some_and(|stored| stored >= *reached) && same_boot;
        let used = if *ahead || !(*closed || has_all) { *reserved } else { *reached };
        used.max(*granted).max(stored.unwrap_or(0))
    }

    /// Reserves numbers up to `seq`, which are about to be stored. The reservation starts at `stored`, the last stored
    /// number. After an error no event may be stored under these numbers.
    pub(super) fn reserve(&mut self, stored: u64, seq: u64) -> io::Result<()> {
        // While the database lacks events, readers may see numbers of events that wait in memory.
        let needed = if self.record.ahead { seq.saturating_add(STEP) } else { seq };
        let reserved = if needed >= self.record.reserved || self.record.closed || !self.written {
            self.next_block(stored, needed)
        } else {
            self.record.reserved
        };
        let granted = if self.covers_wal { self.record.granted } else { self.record.granted.max(seq) };
        let before = self.record.clone();
        self.try_store_record(SeqRecord { reserved, granted, ..self.open_record() })
            .inspect_err(|_| self.record = before)
    }

    /// Permits events to use the numbers up to `seq`; those up to `stored` are stored. After an error no event may use
    /// them, because the next start could use them again.
    pub(super) fn grant(&mut self, stored: u64, seq: u64) -> io::Result<()> {
        if seq <= self.granted {
            return Ok(());
        }
        let reserved = if seq < self.record.reserved { self.record.reserved } else { self.next_block(stored, seq) };
        let before = self.record.clone();
        let granted = before.granted.max(seq);
        self.try_store_record(SeqRecord { reserved, granted, ..self.open_record() })
            .inspect_err(|_| self.record = before)
    }

    fn next_block(&mut self, stored: u64, needed: u64) -> u64 {
        let storm = self.reserved_at.is_some_and(|at| at.elapsed() < STORM);
        let step = if storm { STORM_STEP } else { STEP };
        self.reserved_at = Some(Instant::now());
        stored.saturating_add(step).max(needed.saturating_add(1)).max(self.record.reserved)
    }

    /// Records that numbers up to `seq` are used. `ahead` is true if the database may lack some of them. A failure is
    /// repaired by the next write.
    pub(super) fn record_used(&mut self, seq: u64, ahead: bool) {
        self.stored = self.stored.max(seq);
        self.recorded_at = Some(Instant::now());
        let reserved = if seq < self.record.reserved { self.record.reserved } else { seq.saturating_add(STEP) };
        self.store_record(SeqRecord { reserved, ahead, reached: self.record.reached.max(seq), ..self.open_record() });
    }

    /// Records that the database contains numbers up to `seq`, at once if the file must prove it, else within a second.
    pub(super) fn record_stored(&mut self, seq: u64) {
        self.stored = self.stored.max(seq);
        if !self.covers_wal || self.record.ahead || self.record_due() == Some(Duration::ZERO) {
            self.record_used(seq, false);
            self.covers_wal = self.written;
        }
    }

    /// Returns the time until [`Self::record`] is due; `None` if the last stored number is recorded.
    pub(super) fn record_due(&self) -> Option<Duration> {
        let elapsed = self.recorded_at.map_or(Duration::MAX, |at| at.elapsed());
        (self.stored > self.record.reached).then(|| RECORD_INTERVAL.saturating_sub(elapsed))
    }

    /// Records the last stored number.
    pub(super) fn record(&mut self) {
        self.record_used(self.stored, self.record.ahead);
    }

    /// Records the last stored number before the WAL is moved into the database, or the database is opened again.
    pub(super) fn record_before_checkpoint(&mut self) {
        if self.record_due().is_some() {
            self.record();
        }
        self.covers_wal = false;
    }

    pub(super) fn close(&mut self) {
        // A file that was never written is not created now.
        if self.record.reserved > 0 {
            let reached = self.record.reached.max(self.stored);
            self.store_record(SeqRecord { closed: true, reached, ..self.open_record() });
        }
    }

    fn open_record(&self) -> SeqRecord {
        SeqRecord { closed: false, boot: self.boot.clone(), ..self.record.clone() }
    }

    fn store_record(&mut self, says: SeqRecord) {
        if let Err(error) = self.try_store_record(says) {
            tracing::debug!(%error, data_dir = %self.home.path().display(), "cannot store the used event numbers");
        }
    }

    fn try_store_record(&mut self, says: SeqRecord) -> io::Result<()> {
        if self.written && says == self.record {
            return Ok(());
        }
        // Synced to survive a loss of power: `reserved` covers the numbers of all events.
        let SeqRecord { reached, granted, .. } = says;
        let sync = !self.written || says != SeqRecord { reached, granted, ..self.record.clone() };
        self.record = says;
        self.written = false;
        self.write(sync)?;
        self.written = true;
        self.granted = granted;
        Ok(())
    }

    fn write(&self, sync: bool) -> io::Result<()> {
        let directory = self.home.directory()?;
        let known = directory.stat(FILE).is_some();
        let file = directory.open_file(FILE, OpenMode::Write)?;
        file.write_all_at(self.record.to_line().as_bytes(), 0)?;
        if sync {
            file.sync_data()?;
        }
        if !known {
            // Syncs the directory entry, too.
            directory.sync()?;
        }
        Ok(())
    }

    pub(super) fn mark_unwritten(&mut self) {
        self.written = false;
        self.covers_wal = false;
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::*;

    fn text(dir: &Path) -> String {
        std::fs::read_to_string(dir.join("journal/seq")).unwrap()
    }

    fn read(dir: &Path) -> SeqFile {
        SeqFile::read(&JournalHome::Named(dir.to_owned()))
    }

    #[test]
    fn a_seq_file_is_read_back_and_a_truncated_one_is_ignored() {
        let dir = mcp_satellite_files::data_dir::private_tempdir();
        let mut mark = read(dir.path());
        assert_eq!(mark.last_used(None), 0);
        mark.record_used(5, false);
        assert_eq!(read(dir.path()).record, mark.record);
        let length = text(dir.path()).len();
        mark.record_used(10_006, true);
        let again = read(dir.path());
        assert_eq!((&again.record, again.record.reserved, again.record.ahead), (&mark.record, 20_006, true));
        mark.record_used(10_007, false);
        mark.close();
        let again = read(dir.path());
        assert_eq!((again.record.reached, again.record.ahead, again.record.closed), (10_007, false, true));
        assert_eq!(text(dir.path()).len(), length);
        std::fs::write(dir.path().join("journal/seq"), &text(dir.path())[..60]).unwrap();
        assert_eq!(read(dir.path()).last_used(None), 0);
    }

    #[test]
    fn possibly_used_numbers_are_distinguished_from_reserved_ones() {
        let here = "bcdd54da-c541-4144-a403-ff5dee86d4ae";
        let other = "00000000-0000-0000-0000-000000000000";
        // Line of the file, last number in the database, last used number.
        for (line, stored, used) in [
            ("20000 stored 12000 open HERE", Some(12_000), 12_000),
            ("20000 stored 12000 open HERE", Some(12_050), 12_050),
            ("20000 stored 12000 open HERE", Some(11_999), 20_000),
            ("20000 stored 12000 open HERE", None, 20_000),
            ("20000 stored 12000 open OTHER", Some(12_000), 20_000),
            ("20000 stored 12000 open OTHER", Some(30_000), 30_000),
            ("20000 stored 12000 open -", Some(12_000), 20_000),
            ("20000 stored 12000 closed HERE", Some(12_000), 12_000),
            ("20000 stored 12000 closed OTHER", Some(12_000), 12_000),
            ("20000 stored 12000 closed OTHER", Some(11_999), 12_000),
            ("20000 stored 12000 closed HERE", None, 12_000),
            ("20000 ahead 12000 closed HERE", Some(12_000), 20_000),
            ("20000 ahead 12000 open HERE", Some(12_000), 20_000),
            ("10000 stored 0 open HERE", Some(0), 0),
            // Older format.
            ("20000 stored", Some(10_000), 10_000),
            ("20000 stored", Some(9_999), 20_000),
            ("20000 ahead", Some(15_000), 20_000),
        ] {
            let text = line.replace("HERE", here).replace("OTHER", other);
            let says = SeqRecord::parse(&text, here).unwrap();
            let home = JournalHome::Named(PathBuf::new());
            let mark = SeqFile { record: says, written: true, boot: here.to_owned(), ..SeqFile::read(&home) };
            assert_eq!(mark.last_used(stored), used, "{line}, {stored:?}");
        }
    }

    #[test]
    fn a_granted_number_counts_as_used_without_a_stored_event() {
        let dir = mcp_satellite_files::data_dir::private_tempdir();
        let mut mark = read(dir.path());
        mark.record_used(5, false);
        mark.grant(5, 324).unwrap();
        assert_eq!(read(dir.path()).last_used(Some(5)), 324, "only granted numbers count as used");
        assert_eq!(read(dir.path()).last_used(Some(324)), 324);
        mark.close();
        assert_eq!(read(dir.path()).last_used(Some(5)), 324);
    }

    #[test]
    fn a_number_is_not_granted_if_the_write_fails() {
        let dir = mcp_satellite_files::data_dir::private_tempdir();
        let mut mark = read(dir.path());
        std::fs::create_dir(dir.path().join("journal/seq")).unwrap();
        mark.grant(0, 10).unwrap_err();
        std::fs::remove_dir(dir.path().join("journal/seq")).unwrap();
        assert_eq!(mark.last_used(None), 0, "a failed grant uses no number");
        mark.grant(0, 10).unwrap();
        assert_eq!(read(dir.path()).last_used(Some(0)), 10);
    }

    #[test]
    fn a_reservation_starts_at_the_end_of_the_database() {
        let dir = mcp_satellite_files::data_dir::private_tempdir();
        let mut mark = read(dir.path());
        mark.record_used(5, false);
        mark.reserve(10_000, 12_000).unwrap();
        assert_eq!(read(dir.path()).record.reserved, 20_000);
        mark.reserve(12_000, 19_999).unwrap();
        assert_eq!(read(dir.path()).record.reserved, 20_000);
        mark.record_used(12_000, false);
        mark.reserve(12_000, 40_000).unwrap();
        assert!(read(dir.path()).record.reserved > 40_000, "a large range is reserved at once");
    }

    #[test]
    fn a_reservation_includes_events_that_wait_in_memory() {
        let dir = mcp_satellite_files::data_dir::private_tempdir();
        let mut mark = read(dir.path());
        mark.record_used(100, true);
        mark.reserve(100, 50_000).unwrap();
        assert!(read(dir.path()).record.reserved >= 50_000 + STEP);
    }

    #[test]
    fn reservations_are_extended_in_large_steps() {
        let dir = mcp_satellite_files::data_dir::private_tempdir();
        let mut mark = read(dir.path());
        let mut reserved = std::collections::BTreeSet::new();
        for seq in 1..=50_000 {
            mark.reserve(seq - 1, seq).unwrap();
            mark.record_stored(seq);
            reserved.insert(mark.record.reserved);
        }
        assert!(reserved.len() <= 6, "{reserved:?}");
        mark.close();
        assert_eq!(read(dir.path()).record.reached, 50_000);
    }

    #[test]
    fn the_stored_number_is_recorded_with_the_first_batch_and_before_the_wal_is_moved() {
        let dir = mcp_satellite_files::data_dir::private_tempdir();
        let mut mark = read(dir.path());
        let reached = || read(dir.path()).record.reached;
        for (seq, expected) in [(10, 10), (20, 10), (30, 10)] {
            mark.reserve(seq - 10, seq).unwrap();
            mark.record_stored(seq);
            assert_eq!(reached(), expected, "{seq}");
        }
        assert!(mark.record_due().is_some());
        assert_eq!(read(dir.path()).last_used(Some(30)), 30, "only stored numbers are used");
        assert!(read(dir.path()).last_used(Some(9)) >= 30, "the database lost its WAL");
        mark.record_before_checkpoint();
        assert_eq!((reached(), mark.record_due()), (30, None));
        // The database file contains 30, so only a larger number proves that the WAL is missing.
        mark.reserve(30, 40).unwrap();
        assert_eq!(read(dir.path()).last_used(Some(30)), 40, "a reader may see the batch before it is recorded");
        mark.record_stored(40);
        assert_eq!(reached(), 40);
    }
}
