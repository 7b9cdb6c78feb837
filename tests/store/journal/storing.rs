//! Storage of events, logs, memos and commands, and its transactions.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use mcp_satellite::journal::{self, CommandRecord, Journal, JournalLimits, server_logs as read_server_logs};
use mcp_satellite_actors::model::event::Event;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::seam::SinkAnswer;
use testkit::wait::wait_until;

use super::support::*;

#[tokio::test]
async fn stored_events_are_read_back_unchanged() {
    let home = Home::new();
    let journal = home.open();
    assert_eq!(journal.next_seq(), 1);
    let events: Vec<_> = (1..=3).map(event).collect();
    assert_eq!(journal.append(batch_of(events.clone())).await, SinkAnswer::Accepted);
    assert_eq!(journal::read(home.path(), journal::StoredEventQuery::default()).unwrap().collect::<Vec<_>>(), events);
    let status = assert_ok(&journal);
    assert_eq!((status.journalled_through, status.first_seq, status.last_seq), (3, Some(1), Some(3)));
    assert_eq!((status.path, status.backlog), (home.database(), 0));
    assert!(status.bytes > 0);
    assert_eq!(*journal.watch_appended().borrow(), 3);
}

#[tokio::test]
async fn only_the_owner_can_read_the_journal() {
    let home = Home::new();
    let journal = home.open();
    append_all(&journal, 1..=10).await;
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&journal::directory(home.path())), 0o700);
    let files: Vec<_> =
        fs::read_dir(journal::directory(home.path())).unwrap().map(|file| file.unwrap().path()).collect();
    assert_eq!(files.len(), 4, "database, log, shared memory, numbers: {files:?}");
    for file in files {
        assert_eq!(mode(&file), 0o600, "{file:?}");
    }
}

#[tokio::test]
async fn numbers_continue_after_a_restart_and_a_repeated_batch_is_stored_once() {
    let home = Home::new().filled(1..=7).await;
    let journal = home.open();
    assert_eq!(journal.next_seq(), 8);
    assert_eq!(assert_ok(&journal).journalled_through, 7);
    for _ in 0..2 {
        assert_eq!(journal.append(batch(6..=9)).await, SinkAnswer::Accepted);
    }
    assert_same_numbers(home.stored(), range(1..=9));
    let files: Vec<_> =
        fs::read_dir(journal::directory(home.path())).unwrap().map(|file| file.unwrap().file_name()).collect();
    journal.close().await;
    assert!(files.len() > fs::read_dir(journal::directory(home.path())).unwrap().count(), "a clean close left a WAL");
    assert_eq!(home.open().next_seq(), 10);
}

#[tokio::test]
async fn a_batch_is_stored_completely_or_not_at_all() {
    let home = Home::new();
    let journal = home.open();
    append_all(&journal, 1..=5).await;
    // A trigger simulates an error in the middle of the batch.
    home.sqlite()
        .execute_batch(
            "CREATE TRIGGER t BEFORE INSERT ON events WHEN new.seq = 50 BEGIN SELECT raise(ABORT, 'no'); END",
        )
        .unwrap();
    // The events before and after an `events.dropped` are in separate rows.
    let batch = || {
        let mut events: Vec<_> = (6..=60).map(|seq| event_at(seq, now())).collect();
        events[44].event = Event::EventsDropped { from_seq: 1, to_seq: 2 };
        batch_of(events)
    };
    assert!(assert_unavailable(journal.append(batch()).await).ends_with("no"));
    assert_same_numbers(home.stored(), range(1..=5));
    assert_eq!(journal.status().journalled_through, 5);
    home.sqlite().execute_batch("DROP TRIGGER t").unwrap();
    assert_eq!(journal.append(batch()).await, SinkAnswer::Accepted);
    assert_same_numbers(home.stored(), range(1..=60));
    assert_ok(&journal);
}

#[tokio::test]
async fn logs_of_each_instance_are_limited() {
    let home = Home::new();
    let limits = JournalLimits { server_logs_max: 5, request_logs_max: 3, ..JournalLimits::default() };
    let journal = Journal::open(home.path(), limits).unwrap();
    journal.append(batch_of(vec![server_logs(1, "alice", 1..=4), server_logs(2, "bob", 1..=2)])).await;
    journal.append(batch_of(vec![server_logs(3, "alice", 5..=8), request_logs(4, "alice", 1..=20)])).await;
    let of = |user: &'static str| {
        let logs = read_server_logs(home.path(), |of| of.user_id.as_str() == user).unwrap();
        logs.lines.into_iter().map(|logged| (logged.seq, logged.line.message)).collect::<Vec<_>>()
    };
    let line = |seq, number| (seq, format!("line {number}"));
    assert_eq!(of("alice"), [line(1, 4), line(3, 5), line(3, 6), line(3, 7), line(3, 8)]);
    assert_eq!(of("bob"), [line(2, 1), line(2, 2)]);
    let calls = journal::request_logs(home.path(), |_| true).unwrap();
    assert_eq!(calls.lines.iter().map(|logged| logged.line.response_time_ms).collect::<Vec<_>>(), [18, 19, 20]);
    assert_eq!((calls.through, calls.skipped), (4, 0));
    assert_eq!(*calls.lines[0].subject.process_id, *subject("acme", "alice").process_id);

    // The limit applies to the log lines and not to their events.
    assert_same_numbers(home.stored(), range(1..=4));
}

#[tokio::test]
async fn log_lines_are_copied_to_their_tables_once_there_are_many() {
    let home = Home::new();
    let mut journal = home.open();
    let copied =
        || home.sqlite().query_row("SELECT count(*) FROM request_logs", [], |row| row.get::<_, u64>(0)).unwrap();
    let last_calls = |user: &'static str| {
        let calls = journal::request_logs(home.path(), |of| of.user_id.as_str() == user).unwrap();
        calls.lines.iter().map(|stored| stored.line.response_time_ms).collect::<Vec<_>>()
    };
    let mut seq = 0;
    let mut append = async |journal: &Journal, user: &str, calls: std::ops::RangeInclusive<u64>| {
        let calls: Vec<u64> = calls.collect();
        let events = calls.chunks(20).map(|calls| {
            seq += 1;
            request_logs(seq, user, calls[0]..=*calls.last().unwrap())
        });
        assert_eq!(journal.append(batch_of(events.collect())).await, SinkAnswer::Accepted);
    };
    append(&journal, "bob", 1..=30).await;
    append(&journal, "alice", 1..=15_000).await;
    assert_eq!((last_calls("alice"), last_calls("bob")), (range(14_901..=15_000), range(1..=30)));
    assert_eq!(copied(), 0, "the calls are stored with their events");
    // The events before a restart are copied, too.
    journal.close().await;
    journal = home.open();
    append(&journal, "alice", 15_001..=35_200).await;
    // A hundred calls of an instance at most.
    wait_until("the calls to be copied", || copied() == 130);
    append(&journal, "alice", 35_201..=35_250).await;
    assert_eq!((last_calls("alice"), last_calls("bob")), (range(35_151..=35_250), range(1..=30)));
    assert_eq!(copied(), 130);
    // The calls of a removed event stay.
    home.sqlite().execute("DELETE FROM events", []).unwrap();
    assert_eq!((last_calls("alice"), last_calls("bob")), (range(35_101..=35_200), range(1..=30)));
}

#[tokio::test]
async fn the_latest_memo_of_each_instance_is_stored() {
    let home = Home::new();
    let id = |user: &str| InstanceId::new("acme".into(), user.into(), "abc123".into());
    let journal = home.open();
    assert!(journal.memos().is_empty());
    for count in 1..=100 {
        journal.remember(&id("alice"), format!("{{\"count\":{count}}}"));
    }
    journal.remember(&id("bob"), "{}".into());
    journal.remember(&id("carol"), "{}".into());
    journal.forget(&id("carol"));
    journal.close().await;
    let journal = home.open();
    let mut memos: Vec<_> = journal.memos().iter().collect();
    memos.sort();
    assert_eq!(memos, [(&id("alice"), &"{\"count\":100}".to_owned()), (&id("bob"), &"{}".to_owned())]);
    journal.forget(&id("alice"));
    journal.close().await;
    assert_eq!(home.open().memos().keys().collect::<Vec<_>>(), [&id("bob")]);
}

#[tokio::test]
async fn a_started_command_is_known_after_a_restart() {
    let home = Home::new();
    let journal = home.open();
    assert_eq!(journal.command("c1").await, Ok(None));
    journal.record_command_start("c1").await.unwrap();
    journal.record_command_start("c2").await.unwrap();
    journal.record_command_result("c2", "{\"ok\":true}".into()).await.unwrap();
    journal.record_command_start("c2").await.unwrap();
    journal.close().await;
    assert_eq!(journal.command("c1").await, Err(journal::JournalError::Closed));
    let journal = home.open();
    assert_eq!(journal.command("c1").await, Ok(Some(CommandRecord::Started)));
    assert_eq!(journal.command("c2").await, Ok(Some(CommandRecord::Done("{\"ok\":true}".into()))));
}

#[tokio::test]
async fn wait_stored_returns_after_the_transaction() {
    let home = Home::new();
    let journal = home.open();
    let mut waiting = std::pin::pin!(journal.wait_stored(2));
    assert!(futures::poll!(&mut waiting).is_pending());
    append_all(&journal, 1..=1).await;
    assert!(futures::poll!(&mut waiting).is_pending());
    append_all(&journal, 2..=3).await;
    waiting.await;
}
