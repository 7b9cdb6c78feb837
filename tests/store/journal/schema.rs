//! Databases of other versions.

use std::fs;

use mcp_satellite::journal::{self, EventFollower, StoredEventQuery};
use mcp_satellite_actors::seam::SinkAnswer;
use rusqlite::Connection;
use testkit::home::make_private;

use super::support::*;

/// A database of version 1. Never change it: such files exist.
const VERSION_1: &str = "
CREATE TABLE events (
  seq INTEGER PRIMARY KEY, at INTEGER NOT NULL, type TEXT NOT NULL, team TEXT, user TEXT, instance TEXT, server TEXT,
  body TEXT NOT NULL
) STRICT;
CREATE TABLE server_logs (
  n INTEGER PRIMARY KEY, seq INTEGER NOT NULL, at INTEGER NOT NULL, team TEXT NOT NULL, user TEXT NOT NULL,
  installation TEXT NOT NULL, instance TEXT NOT NULL, server TEXT NOT NULL, body TEXT NOT NULL
) STRICT;
CREATE INDEX server_logs_of ON server_logs (instance, n);
CREATE TABLE request_logs (
  n INTEGER PRIMARY KEY, seq INTEGER NOT NULL, at INTEGER NOT NULL, team TEXT NOT NULL, user TEXT NOT NULL,
  installation TEXT NOT NULL, instance TEXT NOT NULL, server TEXT NOT NULL, body TEXT NOT NULL
) STRICT;
CREATE INDEX request_logs_of ON request_logs (instance, n);
CREATE TABLE memos (
  team TEXT NOT NULL, user TEXT NOT NULL, installation TEXT NOT NULL, body TEXT NOT NULL,
  PRIMARY KEY (team, user, installation)
) STRICT, WITHOUT ROWID;
CREATE TABLE commands (id TEXT PRIMARY KEY, at INTEGER NOT NULL, result TEXT) STRICT, WITHOUT ROWID;
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
PRAGMA user_version = 1;

INSERT INTO events VALUES (41, 1780000041000, 'mcp.tool.executed', 'acme', 'alice', 'filesystem-acme-alice-abc123', 'filesystem',
  '{\"seq\":41,\"timestamp\":\"2026-05-28T20:27:21.000Z\",\"type\":\"mcp.tool.executed\",\"data\":{\"installation_id\":\"abc123\",\"team_id\":\"acme\",\"user_id\":\"alice\",\"process_id\":\"filesystem-acme-alice-abc123\",\"server_slug\":\"filesystem\",\"tool_name\":\"tool \\n 41\",\"duration_ms\":1,\"success\":true,\"error_message\":null}}');
INSERT INTO server_logs VALUES (1, 41, 32503680000000, 'acme', 'alice', 'abc123', 'filesystem-acme-alice-abc123', 'filesystem',
  '{\"level\":\"warn\",\"message\":\"an old line\",\"metadata\":null,\"timestamp\":\"2026-05-28T20:27:21.000Z\"}');
INSERT INTO memos VALUES ('acme', 'alice', 'abc123', '{\"stopped\":true}');
INSERT INTO commands VALUES ('c1', 32503680000000, '{}');
INSERT INTO meta VALUES ('cursor', '40'), ('sending', '{\"id\":4294967297,\"first\":41,\"last\":41}'), ('next_batch', '4294967298'), ('last', '41');
";

fn create_database(home: &Home, sql: &str) {
    home.make_directory();
    Connection::open(home.database()).unwrap().execute_batch(sql).unwrap();
    make_private(&home.database());
}

#[tokio::test]
async fn a_database_of_version_1_is_read_and_continued() {
    let home = Home::new();
    create_database(&home, VERSION_1);
    let read: Vec<_> = journal::read(home.path(), StoredEventQuery::default()).unwrap().collect();
    assert_eq!(read, [event(41)], "a reader must not depend on the migration");
    // The event is older than the limit, so only a pending delivery keeps it.
    let journal = home.open();
    journal.expect_delivery();
    assert_eq!(journal.next_seq(), 42);
    assert_eq!(journal.memos().values().collect::<Vec<_>>(), ["{\"stopped\":true}"]);
    let state = journal.delivery().await.unwrap();
    assert_eq!(state.cursor, 40);
    assert_eq!(state.sending.map(|sending| (sending.id, sending.first, sending.last)), Some((4_294_967_297, 41, 41)));
    assert_eq!(journal.command("c1").await, Ok(Some(journal::CommandRecord::Done("{}".into()))));
    let logs = journal::server_logs(home.path(), |_| true).unwrap();
    assert_eq!(logs.lines[0].line.message, "an old line");
    append_all(&journal, 42..=43).await;
    assert_eq!(home.stored().last(), Some(&43));
}

#[tokio::test]
async fn a_reader_continues_while_a_database_of_version_1_is_migrated() {
    let home = Home::new();
    create_database(&home, VERSION_1);
    let mut follow = EventFollower::new(home.path(), StoredEventQuery::default());
    assert_eq!(follow.poll().unwrap(), Some(event(41)));
    let journal = home.open();
    journal.expect_delivery();
    append_all(&journal, 42..=142).await;
    let rest: Vec<_> = std::iter::from_fn(|| follow.poll().unwrap()).map(|event| event.seq).collect();
    assert_same_numbers(rest, range(42..=142));
    assert_eq!(follow.skipped(), 0);
    let rows = |sql| home.sqlite().query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap();
    assert_eq!(rows("SELECT count(*) FROM events WHERE block IS NULL"), 1, "the old event stays in its row");
    let version = home.sqlite().pragma_query_value(None, "user_version", |row| row.get::<_, i64>(0));
    assert_eq!(version, Ok(VERSION));
    // Lines of version 1 are in their table only, those of version 2 in their events.
    assert_eq!(journal.append(batch_of(vec![server_logs(143, "alice", 1..=2)])).await, SinkAnswer::Accepted);
    let lines = journal::server_logs(home.path(), |_| true).unwrap().lines;
    let messages: Vec<_> = lines.into_iter().map(|stored| stored.line.message).collect();
    assert_eq!(messages, ["an old line", "line 1", "line 2"]);
}

#[tokio::test]
async fn a_database_without_tables_is_initialized() {
    for sql in ["", "PRAGMA journal_mode = WAL;"] {
        let home = Home::new();
        create_database(&home, sql);
        let journal = home.open();
        append_all(&journal, 1..=2).await;
        assert_ok(&journal);
        assert_eq!(home.stored(), [1, 2]);
    }
}

#[tokio::test]
async fn a_database_of_a_newer_version_is_reported_and_left_unchanged() {
    let home = Home::new().filled(1..=5).await;
    home.sqlite().execute_batch("PRAGMA user_version = 9").unwrap();
    let before = fs::read(home.database()).unwrap();
    let journal = home.open();
    assert!(assert_in_memory(&journal).contains("written by a newer satellite (table version 9"), "{journal:?}");
    assert!(journal.next_seq() > 5, "numbers were reused: {}", journal.next_seq());
    assert_unavailable(journal.append(batch(journal.next_seq()..=journal.next_seq())).await);
    assert_eq!(fs::read(home.database()).unwrap(), before);
    let error = journal::read(home.path(), StoredEventQuery::default()).unwrap_err();
    assert!(error.to_string().contains("newer satellite"), "{error}");

    home.sqlite().pragma_update(None, "user_version", VERSION).unwrap();
    assert_eq!(journal.append(batch(journal.next_seq()..=journal.next_seq())).await, SinkAnswer::Accepted);
    assert_ok(&journal);
}

#[tokio::test]
async fn a_foreign_database_is_reported_and_left_unchanged() {
    let home = Home::new();
    create_database(&home, "CREATE TABLE events (a INTEGER); INSERT INTO events VALUES (7);");
    let journal = home.open();
    assert!(assert_in_memory(&journal).contains("table events already exists"), "{journal:?}");
    journal.close().await;
    let found = home.sqlite().query_row("SELECT a FROM events", [], |row| row.get::<_, i64>(0));
    assert_eq!(found, Ok(7));
}
