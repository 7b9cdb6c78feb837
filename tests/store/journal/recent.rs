//! The reader of the newest events, log lines and calls.

use std::time::Duration;

use jiff::Timestamp;
use mcp_satellite::journal::{
    self, Journal, JournalLimits, LinePosition, StoredCallQuery, StoredEventQuery, StoredLineQuery,
};
use mcp_satellite_actors::model::event::{Envelope, Event, EventSubject};
use mcp_satellite_actors::seam::SinkAnswer;
use proptest::prelude::*;

use super::support::*;

const LONG: Duration = Duration::from_secs(60);

/// Reads all pages of the events that match, newest first.
fn pages(home: &Home, query: &StoredEventQuery, limit: usize, within: Duration) -> Vec<u64> {
    let (mut seqs, mut before) = (Vec::new(), None);
    loop {
        let page = journal::recent(home.path(), query, limit, before, within).unwrap();
        assert!(page.events.len() <= limit);
        assert_eq!(page.skipped, 0);
        seqs.extend(page.events.iter().map(|envelope| envelope.seq));
        let Some(next) = page.searched_to else { return seqs };
        assert!(before.is_none_or(|before| next < before), "{next} after {before:?}");
        before = Some(next);
    }
}

fn an_event(seq: u64, nth: u64) -> Envelope {
    let (team, user) = (["acme", "globex"][(nth % 2) as usize], ["alice", "bob \"b\"", "carol"][(nth % 3) as usize]);
    let mut envelope = event_at(seq, now());
    if nth.is_multiple_of(5) {
        envelope.event = Event::Disconnected { of: subject(team, user), was_intentional: true };
    } else if let Event::ToolExecuted { of, tool_name, .. } = &mut envelope.event {
        *of = subject(team, user);
        // Some are too large for a block, and some names look like a condition.
        *tool_name = if nth.is_multiple_of(11) {
            random_text(nth, 2_000)
        } else {
            "\"carol\" \"mcp.server.disconnected\"".into()
        };
    }
    envelope
}

fn a_query() -> impl Strategy<Value = StoredEventQuery> {
    let optional = |values: &'static [&'static str]| proptest::option::of(proptest::sample::select(values));
    (
        proptest::option::of(0..900_u64),
        proptest::sample::subsequence(vec!["mcp.tool.executed", "mcp.server.disconnected"], 0..=2),
        optional(&["acme", "globex", "none"]),
        optional(&["bob \"b\"", "carol"]),
        optional(&["filesystem-acme-alice-abc123", "filesystem-globex-carol-abc123"]),
    )
        .prop_map(|(since, types, team, user, instance)| StoredEventQuery {
            since,
            types: types.into_iter().map(str::to_owned).collect(),
            instance: instance.map(str::to_owned),
            server: None,
            team: team.map(str::to_owned),
            user: user.map(str::to_owned),
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn recent_events_are_those_of_a_filtered_full_read(
        batches in proptest::collection::vec((1..400_u64, 0..40_u64, any::<u64>()), 1..5),
        queries in proptest::collection::vec((a_query(), 1..200_usize), 1..6),
    ) {
        let home = Home::new();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (journal, mut next) = (home.open(), 1);
            for (count, hole, kinds) in batches {
                next += hole;
                let events = (next..next + count).map(|seq| an_event(seq, seq.wrapping_mul(kinds) >> 7)).collect();
                assert_eq!(journal.append(batch_of(events)).await, SinkAnswer::Accepted);
                next += count;
            }
            journal.close().await;
        });
        for (query, limit) in queries {
            let mut expected = chosen(home.path(), query.clone());
            expected.reverse();
            prop_assert_eq!(&pages(&home, &query, limit, LONG), &expected);
            // One transaction for each page.
            prop_assert_eq!(&pages(&home, &query, limit, Duration::ZERO), &expected);
            prop_assert_eq!(&pages(&home, &query, 1_000_000, LONG), &expected);
        }
    }
}

#[tokio::test]
async fn a_search_ends_in_time_and_continues_where_it_ended() {
    // Single rows, so that one transaction covers few events.
    let home = Home::new();
    let journal = home.open();
    for seq in 1..=200 {
        assert_eq!(journal.append(batch(seq..=seq)).await, SinkAnswer::Accepted);
    }
    journal.close().await;
    let rare = StoredEventQuery { types: vec!["mcp.server.disconnected".into()], ..StoredEventQuery::default() };
    let first = journal::recent(home.path(), &rare, 10, None, Duration::ZERO).unwrap();
    let searched_to = first.searched_to.unwrap();
    assert!(first.events.is_empty() && (2..=199).contains(&searched_to), "{searched_to}");
    let second = journal::recent(home.path(), &rare, 10, Some(searched_to), Duration::ZERO).unwrap();
    assert!(second.searched_to.unwrap() < searched_to);
    let all = journal::recent(home.path(), &rare, 10, None, LONG).unwrap();
    assert_eq!((all.events.len(), all.searched_to), (0, None));
    let missing = journal::recent(Home::new().path(), &rare, 10, None, LONG).unwrap();
    assert_eq!((missing.events.len(), missing.searched_to), (0, None));
}

#[tokio::test]
async fn recent_events_skip_damage_and_count_it() {
    let home = Home::new();
    let journal = home.open();
    append_large(&journal, 1..=2_000).await;
    append_all(&journal, 2_001..=2_010).await;
    journal.close().await;
    let sqlite = home.sqlite();
    let damaged =
        sqlite.execute("UPDATE events SET block = x'00ff' WHERE seq BETWEEN 800 AND 1500 AND block NOT NULL", []);
    assert!(damaged.unwrap() > 0);
    sqlite.execute("UPDATE events SET block = NULL, body = '{' WHERE seq = (SELECT max(seq) FROM events)", []).unwrap();
    let readable = journal::read(home.path(), StoredEventQuery::default());
    let mut readable = readable.unwrap();
    let mut expected: Vec<u64> = readable.by_ref().map(|envelope| envelope.seq).collect();
    expected.reverse();
    let found = journal::recent(home.path(), &StoredEventQuery::default(), 10_000, None, LONG).unwrap();
    assert_same_numbers(found.events.iter().map(|envelope| envelope.seq), expected);
    assert_eq!((found.skipped, found.searched_to), (readable.skipped(), None));
}

type NamedLine = (u64, String);

fn call_pages(home: &Home, query: &StoredCallQuery, limit: usize, within: Duration) -> Vec<NamedLine> {
    let (mut lines, mut before) = (Vec::new(), None);
    loop {
        let page = journal::recent_calls(home.path(), query, limit, before, within).unwrap();
        assert!(page.lines.len() <= limit);
        lines.extend(page.lines.iter().map(|found| (found.seq, found.line.tool_name.clone())));
        let Some(next) = page.next else { return lines };
        assert_ne!(Some(next), before);
        before = Some(next);
    }
}

/// Calls that a reader of all lines returns, newest first.
fn all_calls(home: &Home, wanted: impl Fn(&EventSubject) -> bool) -> Vec<NamedLine> {
    let stored = journal::request_logs(home.path(), wanted).unwrap();
    stored.lines.into_iter().rev().map(|found| (found.seq, found.line.tool_name)).collect()
}

/// Stores calls of two users, each event with the lines `2 * seq` and `2 * seq + 1`.
async fn append_calls(journal: &Journal, seqs: std::ops::RangeInclusive<u64>) {
    for seq in seqs {
        let user = if seq % 3 == 0 { "bob" } else { "alice" };
        let events = vec![request_logs(2 * seq, user, 2 * seq..=2 * seq + 1), event_at(2 * seq + 1, now())];
        assert_eq!(journal.append(batch_of(events)).await, SinkAnswer::Accepted);
    }
}

#[tokio::test]
async fn recent_calls_are_found_in_tables_and_events() {
    let home = Home::new();
    let limits = JournalLimits { request_logs_max: 100_000, ..JournalLimits::default() };
    let journal = Journal::open(home.path(), limits.clone()).unwrap();
    append_calls(&journal, 1..=30).await;
    journal.close().await;
    // The first lines are in the table, as after a copy.
    let sqlite = home.sqlite();
    let copied = journal::request_logs(home.path(), |_| true).unwrap();
    for found in copied.lines.iter().filter(|found| found.seq <= 31) {
        let EventSubject { installation_id, team_id, user_id, process_id, server_slug } = &found.subject;
        let insert = "INSERT INTO request_logs (seq, at, team, user, installation, instance, server, body)
                      VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)";
        let body = serde_json::to_string(&found.line).unwrap();
        let (seq, at) = (i64::try_from(found.seq).unwrap(), found.line.timestamp.as_millisecond());
        let ids = (team_id.as_str(), user_id.as_str(), installation_id.as_str());
        let params = rusqlite::params![seq, at, ids.0, ids.1, ids.2, &**process_id, server_slug.as_str(), body];
        sqlite.execute(insert, params).unwrap();
    }
    sqlite.execute("INSERT OR REPLACE INTO meta VALUES ('lines_through', '31')", []).unwrap();
    drop(sqlite);
    let all = StoredCallQuery::default;
    let lines = StoredLineQuery::default;
    let expected = all_calls(&home, |_| true);
    assert_eq!(expected.len(), 60);
    for limit in [1, 3, 7, 60, 1_000] {
        assert_eq!(call_pages(&home, &all(), limit, LONG), expected, "{limit} in a page");
    }
    assert_eq!(call_pages(&home, &all(), 1_000, Duration::ZERO), expected);
    let bob = subject("acme", "bob").process_id.to_string();
    let of_bob = all_calls(&home, |subject| subject.user_id.as_str() == "bob");
    assert_eq!(of_bob.len(), 20);
    for lines in [
        StoredLineQuery { instance: Some(bob), ..lines() },
        StoredLineQuery { user: Some("bob".into()), server: Some("filesystem".into()), ..lines() },
    ] {
        assert_eq!(call_pages(&home, &StoredCallQuery { lines, ..all() }, 3, LONG), of_bob);
    }
    let team = |team: &str| StoredCallQuery { lines: StoredLineQuery { team: Some(team.into()), ..lines() }, ..all() };
    assert_eq!(call_pages(&home, &team("acme"), 9, LONG), expected);
    assert_eq!(call_pages(&home, &team("globex"), 9, LONG), []);
    let tool = |seq: u64| StoredCallQuery { tool: Some(format!("tool {seq}")), ..all() };
    assert_eq!(call_pages(&home, &tool(12), 9, LONG), [(12, "tool 12".to_owned())]);
    assert_eq!(call_pages(&home, &tool(47), 9, LONG), [(46, "tool 47".to_owned())]);
    assert_eq!(call_pages(&home, &StoredCallQuery { success: Some(false), ..all() }, 9, LONG), []);
    assert_eq!(call_pages(&home, &StoredCallQuery { success: Some(true), ..all() }, 9, LONG), expected);
    let at = copied.lines[0].line.timestamp;
    for (since, until, count) in [(Some(at), None, 60), (None, Some(at), 0), (Some(Timestamp::MAX), None, 0)] {
        let query = StoredCallQuery { lines: StoredLineQuery { since, until, ..lines() }, ..all() };
        assert_eq!(call_pages(&home, &query, 9, LONG).len(), count, "{since:?} to {until:?}");
    }
}

#[tokio::test]
async fn a_position_in_lines_stays_valid_while_lines_are_added() {
    let home = Home::new();
    let journal = home.open();
    append_calls(&journal, 1..=10).await;
    let expected = all_calls(&home, |_| true);
    let page = |before: Option<LinePosition>| {
        journal::recent_calls(home.path(), &StoredCallQuery::default(), 3, before, LONG).unwrap()
    };
    let (mut lines, mut before) = (Vec::new(), None);
    for round in 11.. {
        let found = page(before);
        lines.extend(found.lines.into_iter().map(|found| (found.seq, found.line.tool_name)));
        before = found.next;
        if before.is_none() {
            break;
        }
        append_calls(&journal, round..=round).await;
    }
    assert_eq!(lines, expected, "each line once");
    let through = page(None).through;
    assert_eq!(Some(through), home.stored().last().copied());
}

#[tokio::test]
async fn recent_logs_of_an_instance_are_its_last_lines() {
    let home = Home::new();
    let journal = home.open();
    let events = vec![server_logs(1, "alice", 1..=5), server_logs(2, "bob", 6..=9), server_logs(3, "alice", 10..=12)];
    assert_eq!(journal.append(batch_of(events)).await, SinkAnswer::Accepted);
    let of = |user: &str| StoredLineQuery {
        instance: Some(subject("acme", user).process_id.to_string()),
        ..StoredLineQuery::default()
    };
    let logs = |user: &str, limit, before| journal::recent_logs(home.path(), &of(user), limit, before, LONG).unwrap();
    let messages = |found: &journal::RecentLines<_>| -> Vec<String> {
        let found: &journal::RecentLines<mcp_satellite_actors::model::event::LogLine> = found;
        found.lines.iter().map(|found| found.line.message.clone()).collect()
    };
    let first = logs("alice", 4, None);
    assert_eq!(messages(&first), ["line 12", "line 11", "line 10", "line 5"]);
    let second = logs("alice", 4, first.next);
    assert_eq!(messages(&second), ["line 4", "line 3", "line 2", "line 1"]);
    assert_eq!(messages(&logs("alice", 4, second.next)), [""; 0]);
    assert_eq!(messages(&logs("bob", 100, None)), ["line 9", "line 8", "line 7", "line 6"]);
    assert_eq!(logs("nobody", 100, None).lines, []);
}
