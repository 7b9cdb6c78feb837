//! Readers, with and without a writer.

use std::fs;
use std::thread;
use std::time::Instant;

use jiff::Timestamp;
use mcp_satellite::journal::{self, EventFollower, StoredEventQuery};
use mcp_satellite_actors::model::event::{Envelope, Event};
use mcp_satellite_actors::seam::SinkAnswer;
use testkit::home::make_private;

use super::support::*;

#[tokio::test]
async fn queries_filter_by_seq_type_instance_server_team_and_user() {
    let home = Home::new();
    let journal = home.open();
    let timestamp = Timestamp::from_millisecond(now().as_millisecond()).unwrap();
    let of = |seq, team, user| Envelope {
        seq,
        timestamp,
        event: Event::Disconnected { of: subject(team, user), was_intentional: true },
    };
    let client = Event::ClientDisconnected {
        team_id: "acme".into(),
        user_id: "bob".into(),
        session_id: "s".into(),
        duration: 1,
        tool_execution_count: 0,
        reason: "closed".into(),
    };
    let throttled = Event::TeamThrottled { team_id: "acme".into(), exits_in_window: 61, window_seconds: 60 };
    let events = vec![
        event(1),
        of(2, "acme", "bob"),
        of(3, "globex", "alice"),
        Envelope { seq: 4, timestamp, event: client },
        Envelope { seq: 5, timestamp, event: throttled },
        Envelope { seq: 6, timestamp, event: Event::EventsDropped { from_seq: 7, to_seq: 8 } },
        of(9, "acme", "alice"),
    ];
    assert_eq!(journal.append(batch_of(events)).await, SinkAnswer::Accepted);
    let some = |text: &str| Some(text.to_owned());
    let all = StoredEventQuery::default;
    let chosen = |query| chosen(home.path(), query);
    assert_eq!(chosen(all()), [1, 2, 3, 4, 5, 6, 9]);
    for since in [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, u64::MAX] {
        let expected: Vec<_> = [1, 2, 3, 4, 5, 6, 9].into_iter().filter(|seq| *seq > since).collect();
        assert_eq!(chosen(StoredEventQuery { since: Some(since), ..all() }), expected);
    }
    let types = vec!["mcp.tool.executed".into(), "events.dropped".into()];
    assert_eq!(chosen(StoredEventQuery { types, ..all() }), [1, 6]);
    assert_eq!(chosen(StoredEventQuery { instance: some("filesystem-acme-alice-abc123"), ..all() }), [1, 9]);
    assert_eq!(chosen(StoredEventQuery { server: some("filesystem"), ..all() }), [1, 2, 3, 9]);
    assert_eq!(chosen(StoredEventQuery { team: some("acme"), ..all() }), [1, 2, 4, 5, 9]);
    assert_eq!(chosen(StoredEventQuery { user: some("bob"), ..all() }), [2, 4]);
    let both = StoredEventQuery { team: some("acme"), user: some("alice"), since: Some(1), ..all() };
    assert_eq!(chosen(both), [9]);

    let mut events = journal::read(home.path(), StoredEventQuery { user: some("bob"), ..all() }).unwrap();
    assert_eq!(events.by_ref().count(), 2);
    assert_eq!(events.last_read(), Some(9), "the position must include filtered events");
}

#[tokio::test]
async fn events_of_a_large_batch_are_read_from_any_position() {
    let home = Home::new();
    let journal = home.open();
    let mut events: Vec<_> = (1..=3_000).map(|seq| event_at(seq, now())).collect();
    for (envelope, team) in events.iter_mut().step_by(3).zip(["acme", "globex"].iter().cycle()) {
        envelope.event = Event::Disconnected { of: subject(team, "bob"), was_intentional: true };
    }
    assert_eq!(journal.append(batch_of(events.clone())).await, SinkAnswer::Accepted);
    let rows = home.sqlite().query_row("SELECT count(*) FROM events", [], |row| row.get::<_, u64>(0)).unwrap();
    assert!((2..20).contains(&rows), "{rows} rows");
    let all = StoredEventQuery::default;
    assert_eq!(journal::read(home.path(), all()).unwrap().collect::<Vec<_>>(), events);
    for since in [1, 2, 699, 1_500, 2_999, 3_000] {
        let query = StoredEventQuery { since: Some(since), ..all() };
        assert_same_numbers(chosen(home.path(), query.clone()), range(since + 1..=3_000));
        let mut follow = EventFollower::new(home.path(), query);
        assert_eq!(follow.poll().unwrap().as_ref(), events.get(usize::try_from(since).unwrap()));
        let outbox = journal.outbox(since, 250).await.unwrap();
        assert_same_numbers(outbox.iter().map(|envelope| envelope.seq), since + 1..=3_000.min(since + 250));
    }
    let of_type = StoredEventQuery { types: vec!["mcp.server.disconnected".into()], ..all() };
    assert_eq!(chosen(home.path(), of_type).len(), 1_000);
    let of_team = StoredEventQuery { team: Some("globex".into()), ..all() };
    let expected: Vec<u64> = (4..=3_000).step_by(6).collect();
    assert_eq!(chosen(home.path(), of_team), expected);
    // The satellite restarts within the numbers of a block.
    journal.close().await;
    let journal = home.open();
    assert_eq!(journal.next_seq(), 3_001);
    append_all(&journal, 2_990..=3_010).await;
    assert_same_numbers(home.stored(), range(1..=3_010));
}

#[tokio::test]
async fn a_search_ends_at_its_deadline_although_nothing_matches_and_continues_from_there() {
    let home = Home::new();
    let journal = home.open();
    let mut events: Vec<_> = (1..=3_000).map(|seq| event_at(seq, now())).collect();
    events[2_900].event = Event::Disconnected { of: subject("acme", "bob"), was_intentional: true };
    assert_eq!(journal.append(batch_of(events)).await, SinkAnswer::Accepted);
    let (mut since, mut found, mut searches) = (None, Vec::new(), 0);
    loop {
        let query = StoredEventQuery { since, user: Some("bob".into()), ..StoredEventQuery::default() };
        let mut search = journal::read(home.path(), query).unwrap().until(Instant::now());
        found.extend(search.by_ref().map(|event| event.seq));
        searches += 1;
        assert!(search.last_read() > since || !search.is_cut(), "{since:?}");
        since = search.last_read();
        if !search.is_cut() {
            break;
        }
    }
    assert_eq!((found, since), (vec![2_901], Some(3_000)));
    assert!((3..=10).contains(&searches), "each search reads one part: {searches}");
}

#[test]
fn a_missing_directory_is_an_error_and_a_missing_journal_is_empty() {
    let home = Home::new();
    assert_eq!(home.stored(), [0; 0]);
    let error = journal::read(home.path().join("nowhere"), StoredEventQuery::default()).unwrap_err();
    assert!(error.to_string().starts_with("cannot read "), "{error}");
    home.make_directory();
    fs::write(home.database(), "").unwrap();
    make_private(&home.database());
    assert_eq!(home.stored(), [0; 0], "an empty file is an empty journal");
    assert_eq!(journal::server_logs(home.path(), |_| true).unwrap().lines, []);
}

#[tokio::test]
async fn unknown_and_invalid_events_are_skipped_and_counted() {
    let home = Home::new().filled(1..=5).await;
    let sqlite = home.sqlite();
    sqlite.execute("UPDATE events SET body = replace(body, 'executed', 'invented') WHERE seq = 2", []).unwrap();
    sqlite.execute("UPDATE events SET body = '{' WHERE seq = 4", []).unwrap();
    let mut events = journal::read(home.path(), StoredEventQuery::default()).unwrap();
    assert_eq!(events.by_ref().map(|event| event.seq).collect::<Vec<_>>(), [1, 3, 5]);
    assert_eq!(events.skipped(), 2);
}

#[tokio::test]
async fn a_follower_returns_each_event_once_despite_gaps_and_restarts() {
    let home = Home::new();
    let mut follow =
        EventFollower::new(home.path(), StoredEventQuery { since: Some(1), ..StoredEventQuery::default() });
    let mut poll = || follow.poll().unwrap().map(|event| event.seq);
    assert_eq!(poll(), None);
    let journal = home.open();
    assert_eq!(poll(), None);
    journal.append(batch_of(vec![event(1), event(2)])).await;
    assert_eq!((poll(), poll()), (Some(2), None));
    journal.append(batch_of(vec![event(5), event(1_000_000)])).await;
    assert_eq!((poll(), poll(), poll()), (Some(5), Some(1_000_000), None));
    journal.close().await;
    assert_eq!(poll(), None);
    let journal = home.open();
    append_all(&journal, 1_000_001..=1_000_001).await;
    assert_eq!((poll(), poll()), (Some(1_000_001), None));

    journal.close().await;
    fs::remove_dir_all(journal::directory(home.path())).unwrap();
    assert_eq!(poll(), None);
    let journal = home.open();
    append_all(&journal, 1_000_002..=1_000_003).await;
    assert_eq!((poll(), poll(), poll()), (Some(1_000_002), Some(1_000_003), None));
}

#[tokio::test]
async fn concurrent_readers_see_each_event_once() {
    const LAST: u64 = 20_000;
    let home = Home::new();
    let journal = home.open();
    let path = home.path().to_owned();
    let follower = thread::spawn(move || {
        let mut follow = EventFollower::new(path, StoredEventQuery::default());
        let mut seen = Vec::new();
        while seen.last() != Some(&LAST) {
            match follow.poll().unwrap() {
                Some(event) => seen.push(event.seq),
                None => thread::yield_now(),
            }
        }
        assert_eq!(follow.skipped(), 0);
        seen
    });
    let path = home.path().to_owned();
    let reader = thread::spawn(move || {
        let mut count = 0;
        while count < LAST {
            let seqs = stored(&path);
            let now = seqs.len() as u64;
            assert!(now >= count, "stored events disappeared");
            assert_same_numbers(seqs, range(1..=now));
            count = now;
        }
    });
    for seq in (1..=LAST).step_by(100) {
        assert_eq!(journal.append(batch(seq..=seq + 99)).await, SinkAnswer::Accepted);
    }
    assert_same_numbers(follower.join().unwrap(), range(1..=LAST));
    reader.join().unwrap();
}

#[tokio::test]
async fn a_long_read_transaction_blocks_no_writer() {
    let home = Home::new().filled(1..=10).await;
    let sqlite = home.sqlite();
    sqlite.execute_batch("BEGIN").unwrap();
    assert_eq!(count_events(&sqlite), 10);
    let journal = home.open();
    append_all(&journal, 11..=5_000).await;
    assert_eq!(count_events(&sqlite), 10, "the transaction does not see its snapshot");
    assert_same_numbers(home.stored(), range(1..=5_000));
}

#[tokio::test]
async fn large_events_are_read_in_parts_without_a_gap() {
    let home = Home::new();
    let journal = home.open();
    let large = |seq| {
        let mut envelope = event(seq);
        if let Event::ToolExecuted { error_message, .. } = &mut envelope.event {
            *error_message = Some("x".repeat(100_000));
        }
        envelope
    };
    for seq in [1, 11, 21] {
        assert_eq!(journal.append(batch_of((seq..seq + 10).map(large).collect())).await, SinkAnswer::Accepted);
    }
    let all: Vec<u64> = (1..=30).collect();
    assert_eq!(chosen(home.path(), StoredEventQuery::default()), all);
    let mut events =
        journal::read(home.path(), StoredEventQuery { since: Some(4), ..StoredEventQuery::default() }).unwrap();
    assert_eq!((events.next().unwrap().seq, events.last_read()), (5, Some(5)));
    assert_eq!(events.by_ref().map(|envelope| envelope.seq).collect::<Vec<_>>(), all[5..]);
    assert_eq!((events.last_read(), events.skipped()), (Some(30), 0));
    assert!(events.take_error().is_none());
}
