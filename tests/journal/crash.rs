//! `kill -9` of a process that writes, at any moment.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use mcp_satellite_actors::seam::SinkAnswer;

use super::support::*;

/// Of the child: one more with each batch, so that batches end everywhere in pages.
const BATCH: u64 = 37;

/// What a killed process leaves.
pub(crate) struct Killed {
    pub(crate) home: Home,
    /// The last event that it has told to be stored.
    told: u64,
}

impl Killed {
    /// Everything that was told to be stored is there, once and in order, and batches are whole.
    #[track_caller]
    pub(crate) fn holds(&self, found: &[u64]) {
        let last = found.len() as u64;
        assert!(last >= self.told, "{} were told to be stored, {last} are", self.told);
        same(found.iter().copied(), range(1..=last));
        assert_eq!(last % BATCH, 0, "a part of a batch is stored");
    }
}

/// A child process that appends, killed when it has told of so many batches.
pub(crate) fn killed_after(batches: usize) -> Killed {
    let home = Home::new();
    let told = kill_after(&home, batches);
    Killed { home, told }
}

fn kill_after(home: &Home, batches: usize) -> u64 {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "--nocapture", "crash::child_that_appends_until_it_is_killed"]);
    let mut child = command.env("JOURNAL_DIR", home.path()).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let told = lines.filter_map(|line| line.strip_prefix("through ")?.parse().ok()).nth(batches).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    told
}

#[tokio::test]
async fn what_was_told_to_be_stored_survives_every_kill() {
    let home = Home::new();
    let mut told = 0;
    for round in 0..10_usize {
        told = kill_after(&home, round * 7).max(told);
        // A reader needs nobody who mends anything.
        Killed { home: Home { dir: private_tempdir() }, told }.holds(&home.stored());
    }
    assert!(home.database().with_extension("db-wal").metadata().unwrap().len() > 0, "it was killed with its log full");
    let journal = home.open();
    let last = *home.stored().last().unwrap();
    assert_eq!(journal.next_seq(), last + 1);
    append_all(&journal, last + 1..=last + 3).await;
    same(home.stored(), range(1..=last + 3));
    assert_eq!(Told::by(&journal).ranges(&journal).await, []);
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
