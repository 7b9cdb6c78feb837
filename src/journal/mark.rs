//! `DIR/journal/seq`: how far numbers are spoken for, should the database be lost, lose its end, or not take events. It is one
//! line of one length, written in place, so that it can be written on a full disk.
//!
//! ```text
//! 00000000000000020000 stored 00000000000000012345 open   00000000000000012400 bcdd54da-c541-4144-a403-ff5dee86d4ae
//! │                    │      │                    │      │                    └ the boot of the machine that it was written under
//! │                    │      │                    │      └ events have numbers up to here
//! │                    │      │                    └ `closed`: the satellite has ended tidily
//! │                    │      └ the database has reached to here
//! │                    └ every number that anybody has seen is in the database; `ahead`: numbers beyond it have been seen
//! └ no number beyond has been seen: synced, so that it holds after a loss of power
//! ```
//!
//! What the database is said to reach to is written with each transaction, before anybody is told of it, and not synced: it
//! outlives a `kill -9`, as the log of the database does. After a loss of power neither can be relied on: hence the boot.
//!
//! The last number is written, and not synced, before any event gets a number up to it ([`Mark::grant`]). On a disk that
//! hangs it cannot be written, so events then get no numbers, and a later start never uses a number again that an event
//! had and that was lost with the satellite.

use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use super::JournalHome;
use crate::data_dir::Access;

/// In the directory of the journal.
const FILE: &str = "seq";
/// The file is one line; a longer one is read as no mark.
const FILE_MAX: u64 = 4096;
/// So many numbers are reserved at once.
pub(super) const STEP: u64 = 10_000;
/// And so many where the last ones were used up within `STORM`: each time waits for the disk.
const STORM_STEP: u64 = 100_000;
const STORM: Duration = Duration::from_secs(1);
/// A boot that the machine does not tell.
const NO_BOOT: &str = "-";
const BOOT_LEN: usize = 36;

#[derive(Debug, Clone)]
pub(super) struct Mark {
    home: JournalHome,
    /// As in the file, as far as is known.
    says: Says,
    /// Whether the file says so.
    written: bool,
    /// This one.
    boot: String,
    reserved_at: Option<Instant>,
}

/// What the file says.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Says {
    reserved: u64,
    ahead: bool,
    reached: u64,
    closed: bool,
    boot: String,
    granted: u64,
}

impl Says {
    fn parse(text: &str, boot: &str) -> Option<Self> {
        let words: Vec<&str> = text.split_ascii_whitespace().collect();
        let (reserved, word, rest) = match words.as_slice() {
            [reserved, word, rest @ ..] => (reserved.parse::<u64>().ok()?, *word, rest),
            _ => return None,
        };
        let (reached, end, boot, granted) = match rest {
            // The first form: all that is known is that a step was reserved beyond what was stored.
            [] => (reserved.saturating_sub(STEP), "open", boot, 0),
            // The second form.
            [reached, end, boot] => (reached.parse().ok()?, *end, *boot, 0),
            [reached, end, granted, boot] => (reached.parse().ok()?, *end, *boot, granted.parse().ok()?),
            _ => return None,
        };
        let whole = boot == NO_BOOT || boot.len() == BOOT_LEN;
        let known = whole && matches!(word, "stored" | "ahead") && matches!(end, "open" | "closed");
        let (ahead, closed) = (word == "ahead", end == "closed");
        known.then(|| Self { reserved, ahead, reached, closed, boot: boot.to_owned(), granted })
    }

    fn line(&self) -> String {
        let Self { reserved, reached, boot, granted, .. } = self;
        let word = if self.ahead { "ahead" } else { "stored" };
        let end = if self.closed { "closed" } else { "open" };
        format!("{reserved:020} {word:<6} {reached:020} {end:<6} {granted:020} {boot:<36}\n")
    }
}

impl Mark {
    /// What the file says; nothing is reserved if there is none or it says something else.
    pub(super) fn read(home: &JournalHome) -> Self {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let boot = Some(boot.trim()).filter(|boot| boot.len() == BOOT_LEN).unwrap_or(NO_BOOT).to_owned();
        let found = home.directory().and_then(|directory| directory.read(FILE, FILE_MAX)).ok().flatten();
        let says = Says::parse(&String::from_utf8(found.unwrap_or_default()).unwrap_or_default(), &boot);
        let nothing = Says { reserved: 0, ahead: false, reached: 0, closed: false, boot: boot.clone(), granted: 0 };
        Self { home: home.clone(), written: says.is_some(), says: says.unwrap_or(nothing), boot, reserved_at: None }
    }

    /// The last number that may have been seen by somebody. `stored` is how far a database reaches that has all that was
    /// committed to it as far as can be told from it alone; `None` if there is none, or it cannot be relied on.
    pub(super) fn used(&self, stored: Option<u64>) -> u64 {
        let Says { reserved, ahead, reached, closed, boot, granted } = &self.says;
        // Where no boot is known each may be another one.
        let same_boot = *boot == self.boot && boot != NO_BOOT;
        let has_all = stored.is_some_and(|stored| stored >= *reached) && same_boot;
        let used = if *ahead || !(*closed || has_all) { *reserved } else { *reached };
        used.max(*granted).max(stored.unwrap_or(0))
    }

    /// Numbers up to `seq` are about to be stored, those up to `stored` are. What is reserved is counted from the latter.
    pub(super) fn reserve(&mut self, stored: u64, seq: u64) {
        // Beyond what is to be stored somebody may be told of what waits in memory.
        let needed = if self.says.ahead { seq.saturating_add(STEP) } else { seq };
        if needed >= self.says.reserved || self.says.closed || !self.written {
            let reserved = self.next_block(stored, needed);
            self.put(Says { reserved, ..self.open() });
        }
    }

    /// Lets events have the numbers up to `seq`; those up to `stored` are stored. After an error no event may get one: the
    /// file does not say so, and the next start could use it again.
    pub(super) fn grant(&mut self, stored: u64, seq: u64) -> io::Result<()> {
        if self.written && !self.says.closed && seq <= self.says.granted {
            return Ok(());
        }
        let reserved = if seq < self.says.reserved { self.says.reserved } else { self.next_block(stored, seq) };
        let before = self.says.clone();
        let granted = before.granted.max(seq);
        self.try_put(Says { reserved, granted, ..self.open() }).inspect_err(|_| self.says = before)
    }

    fn next_block(&mut self, stored: u64, needed: u64) -> u64 {
        let storm = self.reserved_at.is_some_and(|at| at.elapsed() < STORM);
        let step = if storm { STORM_STEP } else { STEP };
        self.reserved_at = Some(Instant::now());
        stored.saturating_add(step).max(needed.saturating_add(1)).max(self.says.reserved)
    }

    /// Numbers up to `seq` are used, and `ahead` says whether the database may lack some. A failure leaves it to the next
    /// time.
    pub(super) fn note(&mut self, seq: u64, ahead: bool) {
        let reserved = if seq < self.says.reserved { self.says.reserved } else { seq.saturating_add(STEP) };
        self.put(Says { reserved, ahead, reached: self.says.reached.max(seq), ..self.open() });
    }

    /// The database is closed, and nobody is told any more.
    pub(super) fn close(&mut self) {
        // One that was never written is not begun now.
        if self.says.reserved > 0 {
            self.put(Says { closed: true, ..self.open() });
        }
    }

    fn open(&self) -> Says {
        Says { closed: false, boot: self.boot.clone(), ..self.says.clone() }
    }

    fn put(&mut self, says: Says) {
        if let Err(error) = self.try_put(says) {
            tracing::debug!(%error, data_dir = %self.home.path().display(), "cannot store the used event numbers");
        }
    }

    fn try_put(&mut self, says: Says) -> io::Result<()> {
        if self.written && says == self.says {
            return Ok(());
        }
        // Synced because it must survive a loss of power: `reserved` covers all numbers that events have.
        let Says { reached, granted, .. } = says;
        let sync = !self.written || says != Says { reached, granted, ..self.says.clone() };
        self.says = says;
        self.written = false;
        self.write(sync)?;
        self.written = true;
        Ok(())
    }

    fn write(&self, sync: bool) -> io::Result<()> {
        let directory = self.home.directory()?;
        let known = directory.stat(FILE).is_some();
        let file = directory.open_file(FILE, Access::Write)?;
        file.write_all_at(self.says.line().as_bytes(), 0)?;
        if sync {
            file.sync_data()?;
        }
        if !known {
            // Its name, too.
            directory.sync()?;
        }
        Ok(())
    }

    /// The directory has gone, and the file with it.
    pub(super) fn lost(&mut self) {
        self.written = false;
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::*;

    fn text(dir: &Path) -> String {
        std::fs::read_to_string(dir.join("journal/seq")).unwrap()
    }

    fn read(dir: &Path) -> Mark {
        Mark::read(&JournalHome::Named(dir.to_owned()))
    }

    #[test]
    fn a_mark_is_read_as_it_was_written_and_a_torn_one_says_nothing() {
        let dir = crate::data_dir::private_tempdir();
        let mut mark = read(dir.path());
        assert_eq!(mark.used(None), 0);
        mark.note(5, false);
        assert_eq!(read(dir.path()).says, mark.says);
        let length = text(dir.path()).len();
        mark.note(10_006, true);
        let again = read(dir.path());
        assert_eq!((&again.says, again.says.reserved, again.says.ahead), (&mark.says, 20_006, true));
        mark.note(10_007, false);
        mark.close();
        let again = read(dir.path());
        assert_eq!((again.says.reached, again.says.ahead, again.says.closed), (10_007, false, true));
        assert_eq!(text(dir.path()).len(), length);
        std::fs::write(dir.path().join("journal/seq"), &text(dir.path())[..60]).unwrap();
        assert_eq!(read(dir.path()).used(None), 0);
    }

    #[test]
    fn numbers_that_may_have_been_seen_are_told_from_those_that_were_reserved_only() {
        let here = "bcdd54da-c541-4144-a403-ff5dee86d4ae";
        let other = "00000000-0000-0000-0000-000000000000";
        // What the note says, how far the database reaches, what is used.
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
            // As it was written before.
            ("20000 stored", Some(10_000), 10_000),
            ("20000 stored", Some(9_999), 20_000),
            ("20000 ahead", Some(15_000), 20_000),
        ] {
            let text = line.replace("HERE", here).replace("OTHER", other);
            let says = Says::parse(&text, here).unwrap();
            let home = JournalHome::Named(PathBuf::new());
            let mark = Mark { home, says, written: true, boot: here.to_owned(), reserved_at: None };
            assert_eq!(mark.used(stored), used, "{line}, {stored:?}");
        }
    }

    #[test]
    fn a_number_that_an_event_had_is_used_also_when_the_event_was_not_stored() {
        let dir = crate::data_dir::private_tempdir();
        let mut mark = read(dir.path());
        mark.note(5, false);
        mark.grant(5, 324).unwrap();
        assert_eq!(read(dir.path()).used(Some(5)), 324, "no more than the events had");
        assert_eq!(read(dir.path()).used(Some(324)), 324);
        mark.close();
        assert_eq!(read(dir.path()).used(Some(5)), 324);
    }

    #[test]
    fn a_number_that_cannot_be_written_down_is_not_granted() {
        let dir = crate::data_dir::private_tempdir();
        let mut mark = read(dir.path());
        std::fs::create_dir(dir.path().join("journal/seq")).unwrap();
        mark.grant(0, 10).unwrap_err();
        std::fs::remove_dir(dir.path().join("journal/seq")).unwrap();
        assert_eq!(mark.used(None), 0, "and no number is skipped for it");
        mark.grant(0, 10).unwrap();
        assert_eq!(read(dir.path()).used(Some(0)), 10);
    }

    #[test]
    fn what_is_about_to_be_stored_is_reserved_from_where_the_database_ends() {
        let dir = crate::data_dir::private_tempdir();
        let mut mark = read(dir.path());
        mark.note(5, false);
        mark.reserve(10_000, 12_000);
        assert_eq!(read(dir.path()).says.reserved, 20_000);
        mark.reserve(12_000, 19_999);
        assert_eq!(read(dir.path()).says.reserved, 20_000);
        mark.note(12_000, false);
        mark.reserve(12_000, 40_000);
        assert!(read(dir.path()).says.reserved > 40_000, "more than a step at once");
    }

    #[test]
    fn while_the_database_takes_nothing_what_waits_in_memory_is_reserved_as_well() {
        let dir = crate::data_dir::private_tempdir();
        let mut mark = read(dir.path());
        mark.note(100, true);
        mark.reserve(100, 50_000);
        assert!(read(dir.path()).says.reserved >= 50_000 + STEP);
    }

    #[test]
    fn what_is_reserved_is_not_raised_for_each_event() {
        let dir = crate::data_dir::private_tempdir();
        let mut mark = read(dir.path());
        let mut reserved = std::collections::BTreeSet::new();
        for seq in 1..=50_000 {
            mark.reserve(seq - 1, seq);
            mark.note(seq, false);
            reserved.insert(mark.says.reserved);
        }
        assert!(reserved.len() <= 6, "{reserved:?}");
        assert_eq!(read(dir.path()).says.reached, 50_000);
    }
}
