//! The output of a server: stderr is read within limits, lines without JSON-RPC are skipped, and a line over the limit
//! ends the run.

use mcp_satellite_actors::model::event::{Envelope, Event, LogLevel, LogLine};
use mcp_satellite_actors::model::exit::CallError;
use serde_json::json;
use testkit::wait::{GIVE_UP, until};

use super::support::{Instance, Server, real};

/// Waits for the summary, the last line of the log. Returns the other lines and the number of dropped lines.
async fn log_with_summary(server: &Instance) -> (Vec<LogLine>, usize) {
    let dropped =
        |line: &LogLine| line.message.strip_suffix(" lines of output dropped: more than 20 per second")?.parse().ok();
    let summary = |event: &Event| match event {
        Event::ServerLogs { logs, .. } => logs.iter().find_map(dropped),
        _ => None,
    };
    let count = server.wait_event("summary", summary).await;
    let mut log = server.log();
    log.retain(|line| dropped(line).is_none());
    (log, count)
}

/// Asserts at most twenty lines per second. The first and the last second may be incomplete.
fn assert_limited(log: &[LogLine]) {
    let span = log.last().unwrap().timestamp.duration_since(log[0].timestamp);
    let most = 20 * (usize::try_from(span.as_secs()).unwrap() + 2);
    assert!(log.len() <= most, "{} lines in {span:#}", log.len());
}

#[test]
fn a_burst_of_1_mib_on_stderr_blocks_no_call() {
    const BURST: usize = 1024 * 1024;
    real(async |satellite| {
        let flag = format!("--stderr-burst-bytes={BURST}");
        let server = satellite.online(Server::sim(&[&flag])).await;
        server.assert_callable().await;
        server.handle.stop(&server.id).await.unwrap();
        let (log, dropped) = log_with_summary(&server).await;
        assert_limited(&log);
        assert_eq!(log.len() + dropped, BURST.div_ceil(80), "a line was neither kept nor counted");
        assert_eq!(log[0].message, "#".repeat(79));
    });
}

#[test]
fn a_flood_on_stderr_blocks_no_call() {
    real(async |satellite| {
        let flags = ["--stderr-lines-per-second=5000", "--stderr-text=warning: here I am"];
        let server = satellite.online(Server::sim(&flags)).await;
        for _ in 0..100 {
            server.assert_callable().await;
        }
        // The calls may be faster than the flood: wait until the limit is reached.
        until("20 lines are kept", async || server.log().len(), |lines| *lines >= 20).await;
        server.handle.stop(&server.id).await.unwrap();
        let (log, dropped) = log_with_summary(&server).await;
        assert_limited(&log);
        assert!(dropped > 0);
        assert!(log.iter().all(|line| line.level == LogLevel::Warn && line.message == "warning: here I am"));
    });
}

#[test]
fn the_last_stderr_lines_of_a_crashed_server_are_in_its_log() {
    real(async |satellite| {
        let dying = Server::sh("echo starting >&2; printf 'fatal error: no database' >&2; exit 9").once();
        // The test checks the order, not the time limit: the machine may be loaded.
        let dying = dying.policy(|policy| policy.session.exit_drain = GIVE_UP);
        let server = satellite.install(dying).await;
        assert_eq!(server.crashed().await.0, "exited with code 9: fatal error: no database");
        let log: Vec<_> = server.log().into_iter().map(|line| (line.level, line.message)).collect();
        let expected = [
            (LogLevel::Info, "starting"),
            (LogLevel::Error, "fatal error: no database"),
            (LogLevel::Error, "the server did not start: exited with code 9"),
        ];
        assert_eq!(log, expected.map(|(level, text)| (level, text.to_owned())));

        let events = server.events();
        let position = |wanted: fn(&Event) -> bool| events.iter().position(|event: &Envelope| wanted(&event.event));
        let logged = position(|event| matches!(event, Event::ServerLogs { .. }));
        assert!(logged.is_some() && logged < position(|event| matches!(event, Event::Crashed { .. })), "{events:#?}");
    });
}

#[test]
fn garbage_on_stdout_is_skipped_and_counted() {
    real(async |satellite| {
        let server = satellite.online(Server::sim(&["--stdout-garbage-at-start=5", "--garbage-lines=4"])).await;
        server.assert_callable().await;
        // Five lines at the start, four before each response: initialize, tools/list and the call.
        assert_eq!(server.view().counters.malformed(), 5 + 3 * 4);
        assert_eq!((server.view().restarts, server.view().counters.messages()), (0, 3));
    });
}

#[test]
fn a_line_over_the_limit_ends_the_run_with_its_reason() {
    real(async |satellite| {
        let server = Server::sim(&["--huge-line-bytes=131072"]);
        let server = satellite.online(server.policy(|policy| policy.session.line_max = 65536)).await;
        let old = server.pid();
        let answer = server.call("huge", json!({})).await;
        let expected = "connection broken: a line from the server is longer than 65536 bytes";
        assert!(matches!(&answer, Err(CallError::Terminated { reason, .. }) if reason == expected), "{answer:?}");
        assert_eq!(server.crashed().await.0, expected);
        server.online_again(old).await;
        server.assert_callable().await;
    });
}

#[test]
fn a_server_that_closes_its_stdout_is_ended() {
    real(async |satellite| {
        let server = satellite.install(Server::sh("exec >&-; sleep 3600").once()).await;
        assert_eq!(server.crashed().await.0, "connection broken: the server closed its stdout");
        assert_eq!(satellite.scope.processes(), []);
    });
}

#[test]
fn lines_on_stderr_are_cut_at_their_limit() {
    real(async |satellite| {
        let text = format!("--stderr-text={}", "é".repeat(1000));
        let server = satellite.online(Server::sim(&[&text])).await;
        let logged = |event: &Event| match event {
            Event::ServerLogs { logs, .. } => Some(logs[0].message.clone()),
            _ => None,
        };
        assert_eq!(server.wait_event("log", logged).await, format!("{}…", "é".repeat(512)));
    });
}
