//! `DIR/journal/seq`: how far numbers are spoken for, should the database be lost or not take events. It is one line of one length, written
//! in place, so that it can be written on a full disk.
//!
//! ```text
//! 00000000000000020000 stored     every number that anybody has seen is in the database
//! 00000000000000020000 ahead      numbers beyond the database have been seen
//! ```

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// So many numbers are reserved at once.
pub(super) const STEP: u64 = 10_000;

#[derive(Debug)]
pub(super) struct Mark {
    path: PathBuf,
    /// As in the file, as far as is known.
    reserved: u64,
    ahead: bool,
    /// Whether the file says so.
    written: bool,
}

impl Mark {
    /// What the file says; nothing is reserved if there is none or it says something else.
    pub(super) fn read(directory: &Path) -> Self {
        let path = directory.join("seq");
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let (number, word) = text.trim_end().split_once(' ').unwrap_or_default();
        let reserved = number.parse::<u64>().ok().filter(|_| matches!(word, "stored" | "ahead"));
        Self { path, reserved: reserved.unwrap_or(0), ahead: word == "ahead", written: reserved.is_some() }
    }

    /// The last number that may have been seen by somebody, where the database does not tell.
    pub(super) fn reserved(&self) -> u64 {
        self.reserved
    }

    /// Whether numbers beyond the database may have been seen.
    pub(super) fn is_ahead(&self) -> bool {
        self.ahead
    }

    /// Numbers up to `seq` are about to be stored, those up to `stored` are. What is reserved is counted from the latter: should we
    /// be killed before it is done, the database reaches to where it may.
    pub(super) fn reserve(&mut self, stored: u64, seq: u64) {
        if seq >= self.reserved || !self.written {
            let reserved = stored.saturating_add(STEP).max(seq.saturating_add(1)).max(self.reserved);
            if let Err(error) = self.put(reserved, self.ahead) {
                tracing::debug!(%error, path = %self.path.display(), "cannot note how far the numbers of events are used");
            }
        }
    }

    /// Numbers up to `seq` are used, and `ahead` says whether the database may lack some. The file is written only where
    /// that changes what it says. A failure leaves it to the next time.
    pub(super) fn note(&mut self, seq: u64, ahead: bool) {
        if let Err(error) = self.write(seq, ahead) {
            tracing::debug!(%error, path = %self.path.display(), "cannot note how far the numbers of events are used");
        }
    }

    fn write(&mut self, seq: u64, ahead: bool) -> io::Result<()> {
        // Beyond a step once something is stored: a file that is emptied after that does not reach so far.
        let enough = seq < self.reserved && self.reserved > STEP;
        let reserved = if enough { self.reserved } else { seq.saturating_add(STEP) };
        self.put(reserved, ahead)
    }

    fn put(&mut self, reserved: u64, ahead: bool) -> io::Result<()> {
        if self.written && reserved == self.reserved && ahead == self.ahead {
            return Ok(());
        }
        self.reserved = reserved;
        self.ahead = ahead;
        self.written = false;
        let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&self.path)?;
        let word = if ahead { "ahead " } else { "stored" };
        file.write_all_at(format!("{:020} {word}\n", self.reserved).as_bytes(), 0)?;
        self.written = true;
        Ok(())
    }

    /// The directory has gone, and the file with it.
    pub(super) fn lost(&mut self) {
        self.written = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_read_as_it_was_written_and_a_torn_one_says_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let mut mark = Mark::read(dir.path());
        assert_eq!((mark.reserved(), mark.is_ahead()), (0, false));
        mark.note(5, false);
        let again = Mark::read(dir.path());
        assert_eq!((again.reserved(), again.is_ahead()), (10_005, false));
        mark.note(10_006, true);
        let again = Mark::read(dir.path());
        assert_eq!((again.reserved(), again.is_ahead()), (20_006, true));
        mark.note(10_007, false);
        assert!(!Mark::read(dir.path()).is_ahead());
        std::fs::write(dir.path().join("seq"), "0000000000").unwrap();
        assert_eq!(Mark::read(dir.path()).reserved(), 0);
    }

    #[test]
    fn what_is_about_to_be_stored_is_reserved_from_where_the_database_ends() {
        let dir = tempfile::tempdir().unwrap();
        let mut mark = Mark::read(dir.path());
        mark.note(5, false);
        mark.reserve(10_000, 12_000);
        assert_eq!(Mark::read(dir.path()).reserved(), 20_000);
        mark.reserve(12_000, 19_999);
        assert_eq!(Mark::read(dir.path()).reserved(), 20_000);
        mark.note(12_000, false);
        mark.reserve(12_000, 40_000);
        assert_eq!(Mark::read(dir.path()).reserved(), 40_001, "more than a step at once");
    }

    #[test]
    fn once_something_is_stored_a_file_that_is_emptied_is_told_from_one_that_was_never_filled() {
        let dir = tempfile::tempdir().unwrap();
        let mut mark = Mark::read(dir.path());
        mark.reserve(0, 5);
        assert_eq!(Mark::read(dir.path()).reserved(), STEP, "killed now, the first number is still free");
        mark.note(5, false);
        assert_eq!(Mark::read(dir.path()).reserved(), STEP + 5);
    }

    #[test]
    fn a_mark_is_not_written_for_each_event() {
        let dir = tempfile::tempdir().unwrap();
        let mut mark = Mark::read(dir.path());
        mark.note(1, false);
        std::fs::remove_file(dir.path().join("seq")).unwrap();
        mark.note(9_999, false);
        assert!(!dir.path().join("seq").exists());
        mark.note(10_001, false);
        assert!(dir.path().join("seq").exists());
    }
}
