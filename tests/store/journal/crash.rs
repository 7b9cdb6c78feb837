//! `kill -9` of a writing process.

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use mcp_satellite::data_dir::private_tempdir;
use mcp_satellite_actors::seam::SinkAnswer;
use testkit::process::ignored_test_command;

use super::support::*;

/// Events per batch of the child, a number that makes batches end at different positions within pages.
const BATCH: u64 = 37;

/// The data directory of a killed process.
pub(crate) struct Killed {
    pub(crate) home: Home,
    /// The last event that the process has reported as stored.
    reported: u64,
}

impl Killed {
    /// Asserts that every reported event is stored once and in order, and that every batch is complete.
    #[track_caller]
    pub(crate) fn assert_holds(&self, found: &[u64]) {
        let last = found.len() as u64;
        assert!(last >= self.reported, "{} events were reported as stored, {last} are", self.reported);
        assert_same_numbers(found.iter().copied(), range(1..=last));
        assert_eq!(last % BATCH, 0, "a part of a batch is stored");
    }
}

/// Starts a child that appends and kills it after it has reported `batches` batches.
pub(crate) fn killed_after(batches: usize) -> Killed {
    let home = Home::new();
    let reported = kill_after(&home, batches);
    Killed { home, reported }
}

fn kill_after(home: &Home, batches: usize) -> u64 {
    let mut command = ignored_test_command(module_path!(), "child_that_appends_until_it_is_killed");
    let mut child = command.env("JOURNAL_DIR", home.path()).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let reported = lines.filter_map(|line| line.strip_prefix("through ")?.parse().ok()).nth(batches).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    reported
}

#[tokio::test]
async fn events_reported_as_stored_survive_every_kill() {
    let home = Home::new();
    let mut reported = 0;
    for round in 0..10_usize {
        reported = kill_after(&home, round * 7).max(reported);
        // A reader works without a previous recovery by the journal.
        Killed { home: Home { dir: private_tempdir() }, reported }.assert_holds(&home.stored());
    }
    assert!(home.database().with_extension("db-wal").metadata().unwrap().len() > 0, "the WAL is empty after the kill");
    let journal = home.open();
    let last = *home.stored().last().unwrap();
    assert_eq!(journal.next_seq(), last + 1);
    append_all(&journal, last + 1..=last + 3).await;
    assert_same_numbers(home.stored(), range(1..=last + 3));
    assert_eq!(DroppedRanges::subscribe(&journal).ranges(&journal).await, []);
}

#[tokio::test]
#[ignore = "the child process of the test above"]
async fn child_that_appends_until_it_is_killed() {
    let Some(dir) = std::env::var_os("JOURNAL_DIR") else { return };
    let journal = open(dir.as_ref());
    let mut next = journal.next_seq();
    loop {
        assert_eq!(journal.append(batch(next..=next + BATCH - 1)).await, SinkAnswer::Accepted);
        next += BATCH;
        writeln!(std::io::stdout(), "through {}", journal.status().journalled_through).unwrap();
    }
}
