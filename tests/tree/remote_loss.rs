//! Loss of a remote server: detection, events, and the fates of calls.

use mcp_satellite::connect::sim::SimScript;
use mcp_satellite_actors::CallerRequest;
use mcp_satellite_actors::model::exit::{CallError, CallFate};
use mcp_satellite_actors::model::failure::{ExchangeFailure, FailureKind};
use mcp_satellite_actors::model::remote::{ConnectionState, ServerHealth};
use mcp_satellite_actors::model::status::Status;
use serde_json::json;
use testkit::fleet::{Fleet, Server, seconds, tenths};
use tokio::time::{Instant, sleep};

use crate::remote_support::{
    FORBIDDEN, INTERNAL_ERROR, REFUSED, UNAUTHORIZED, event_lines_after_start, until_reconnected, until_seen,
};

const EXPIRED: FailureKind = FailureKind::session_expired(404);

#[tokio::test(start_paused = true)]
async fn a_loss_and_a_recovery_emit_statuses_and_events_in_order() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    remote.kill(REFUSED);
    sleep(seconds(60.0)).await;
    assert_eq!(fleet.view(&id).status, Status::Online, "over HTTP only a request detects a loss");
    assert!(fleet.call(&id, "echo", json!({"text": 1})).await.is_err());
    let view = fleet.view(&id);
    assert_eq!((view.status, view.connection), (Status::Offline, Some(ConnectionState::Reconnecting)));
    assert_eq!((view.health, view.attempt), (ServerHealth::Unknown, Some(1)));
    assert!(fleet.runtime.tools(&id).is_none() && view.catalogue.is_some(), "the tools are kept, but not offered");
    fleet.until_view(&id, |view| view.attempt == Some(3)).await;
    remote.bring_up();
    until_reconnected(&fleet, &id).await;
    let expected = [
        "disconnected",
        "offline: Server unreachable: connection refused",
        "attempt 1 in 1000 ms",
        "attempt 2 in 2000 ms",
        "attempt 3 in 4000 ms",
        "connecting: Server recovered, re-discovering tools",
        "discovering_tools",
        "syncing_tools",
        "discovered 3 tools",
        "online",
        // The call itself caused one attempt before the schedule.
        "reconnected at attempt 4",
    ];
    assert_eq!(event_lines_after_start(&fleet, &id).await, expected);
    let capabilities = &fleet.event_data(&id, "mcp.server.reconnected").await[0]["capabilities"];
    assert_eq!(capabilities, &json!({"tools": {"listChanged": true}}));
    let view = fleet.view(&id);
    assert_eq!((view.health, view.next_retry_at, view.attempt), (ServerHealth::Healthy, None, None));
    fleet.finish().await;
}

/// A failure of every exchange, and its expected effects on a call of a tool that must not be repeated.
struct FailureCase {
    kind: FailureKind,
    status: Status,
    message: Option<&'static str>,
    /// How often the call was tried before the session was given up.
    tried: usize,
    fate: CallFate,
    /// Whether the error reports an attempt to connect that was made for the call.
    attempted: bool,
}

#[tokio::test(start_paused = true)]
async fn each_failure_of_a_connected_server_has_a_status_retries_and_a_fate() {
    use CallFate::{MaybeExecuted, NotSent};
    let lost = |kind, status, message, tried, fate, attempted| FailureCase {
        kind,
        status,
        message: Some(message),
        tried,
        fate,
        attempted,
    };
    let (offline, error, reauth) = (Status::Offline, Status::Error, Status::RequiresReauth);
    let timeout = seconds(3.0);
    let table = [
        lost(FailureKind::Dns, offline, "Server unreachable: the host name cannot be resolved", 3, NotSent, true),
        lost(REFUSED, offline, "Server unreachable: connection refused", 3, NotSent, true),
        lost(
            FailureKind::ConnectTimeout(timeout),
            offline,
            "Server unreachable: no connection within 3 s",
            3,
            NotSent,
            true,
        ),
        lost(
            FailureKind::Tls("expired".to_owned()),
            offline,
            "Server unreachable: no secure connection: expired",
            1,
            NotSent,
            true,
        ),
        lost(
            FailureKind::Broken("reset".to_owned()),
            offline,
            "Server unreachable: connection broken: reset",
            1,
            MaybeExecuted,
            false,
        ),
        lost(
            FailureKind::Cut,
            offline,
            "Server unreachable: the response ended before it was complete",
            1,
            MaybeExecuted,
            false,
        ),
        lost(
            FailureKind::HeaderTimeout(timeout),
            offline,
            "Server unreachable: the server did not begin to respond within 3 s",
            1,
            MaybeExecuted,
            false,
        ),
        lost(UNAUTHORIZED, reauth, "Authentication failed (HTTP 401)", 1, NotSent, false),
        lost(FORBIDDEN, reauth, "Access forbidden (HTTP 403)", 1, NotSent, false),
        lost(
            FailureKind::Redirected { status: 307, to: None },
            error,
            "the server redirects (HTTP 307), which is not followed: configure the right address",
            1,
            MaybeExecuted,
            false,
        ),
        lost(
            FailureKind::from_status(418),
            error,
            "the server refused the request (HTTP 418)",
            1,
            MaybeExecuted,
            false,
        ),
        lost(
            FailureKind::NotMcp { content_type: Some("text/html".to_owned()) },
            error,
            "the response is text/html, not MCP; check the address",
            1,
            MaybeExecuted,
            false,
        ),
        lost(
            FailureKind::TooLong(100),
            error,
            "a message from the server is longer than 100 bytes",
            1,
            MaybeExecuted,
            false,
        ),
        FailureCase {
            kind: FailureKind::Throttled { retry_after: None },
            status: Status::Online,
            message: None,
            tried: 1,
            fate: NotSent,
            attempted: false,
        },
        FailureCase {
            kind: INTERNAL_ERROR,
            status: Status::Online,
            message: None,
            tried: 1,
            fate: MaybeExecuted,
            attempted: false,
        },
    ];
    let fleet = Fleet::start().await;
    for (nth, expected) in table.into_iter().enumerate() {
        let FailureCase { kind, status, message, tried, fate, attempted } = expected;
        let id = fleet.online(Server::remote(&format!("s{nth}"))).await;
        let remote = fleet.remote(&id);
        remote.take_down(kind.clone());
        let Err(call_error) = fleet.call(&id, "echo", json!({"text": 1})).await else { panic!("{kind:?}") };
        assert_eq!(call_error.fate(), Some(fate), "{kind:?}: {call_error:?}");
        assert_eq!(matches!(call_error, CallError::Reconnecting { .. }), attempted, "{kind:?}: {call_error:?}");
        assert_eq!(remote.tried_at("tools/call").len(), tried, "{kind:?}");
        let view = fleet.until(&id, status).await;
        assert_eq!(view.message.as_deref(), message, "{kind:?}");
        assert!(remote.served_at("tools/call").is_empty());
        remote.bring_up();
        if status == Status::RequiresReauth {
            assert!(matches!(call_error, CallError::Refused { status: Status::RequiresReauth, .. }), "{call_error:?}");
            continue;
        }
        until_reconnected(&fleet, &id).await;
        let losses = usize::from(status != Status::Online);
        assert_eq!(remote.attempts().iter().filter(|attempt| attempt.succeeded).count(), 1 + losses, "{kind:?}");
    }
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn errors_timeouts_and_throttling_do_not_end_the_connection() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a").script(SimScript { all_tools: true, ..SimScript::default() })).await;
    let remote = fleet.remote(&id);
    let refused = fleet.call(&id, "fail", json!({"message": "no"})).await;
    assert!(matches!(refused, Err(CallError::Server { code: -32603, .. })), "{refused:?}");
    let failed = fleet.call(&id, "tool_error", json!({"message": "no"})).await;
    assert_eq!(failed.unwrap()["isError"], true);
    let late = fleet.call_within(&id, "sleep", json!({"ms": 5000}), Some(seconds(1.0))).await;
    assert!(matches!(late, Err(CallError::TimedOut { .. })), "{late:?}");
    let throttled = FailureKind::Throttled { retry_after: Some(seconds(60.0)) };
    remote.fail_next([throttled.clone()]);
    let busy = fleet.call(&id, "echo", json!({})).await;
    assert_eq!(busy, Err(CallError::Remote { fate: CallFate::NotSent, failure: ExchangeFailure::sent(throttled) }));
    assert_eq!(remote.served_at("notifications/cancelled").len(), 1, "the late call is cancelled");
    assert!(fleet.call(&id, "echo", json!({})).await.is_ok());
    assert_eq!(event_lines_after_start(&fleet, &id).await, Vec::<String>::new());
    assert_eq!(remote.attempts().len(), 1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn three_consecutive_server_failures_end_the_connection() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    for _ in 0..2 {
        for _ in 0..2 {
            remote.fail_next([INTERNAL_ERROR]);
            let failed = fleet.call(&id, "echo", json!({})).await;
            let failure = ExchangeFailure::sent(INTERNAL_ERROR);
            assert_eq!(failed, Err(CallError::Remote { fate: CallFate::MaybeExecuted, failure }));
        }
        assert_eq!(fleet.view(&id).status, Status::Online);
        assert!(fleet.call(&id, "echo", json!({})).await.is_ok());
    }
    remote.take_down(INTERNAL_ERROR);
    for _ in 0..3 {
        let failed = fleet.call(&id, "echo", json!({})).await;
        assert!(matches!(failed, Err(CallError::Remote { fate: CallFate::MaybeExecuted, .. })), "{failed:?}");
    }
    let view = fleet.until(&id, Status::Error).await;
    assert_eq!(view.message.as_deref(), Some("the server failed (HTTP 500)"));
    remote.bring_up();
    until_reconnected(&fleet, &id).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_loss_fails_calls_in_flight_and_repeats_read_only_ones() {
    let fleet = Fleet::start().await;
    let slow = SimScript { call_delay: seconds(5.0), ..SimScript::default() };
    let id = fleet.online(Server::remote("a").script(slow)).await;
    let remote = fleet.remote(&id);
    let (plain, other, read_only, ()) = futures::join!(
        fleet.call(&id, "echo", json!({"text": 1})),
        fleet.call(&id, "sleep", json!({"ms": 1})),
        fleet.call(&id, "add", json!({"a": 1, "b": 2})),
        async {
            sleep(seconds(1.0)).await;
            // The server crashes and is back at once.
            remote.kill(REFUSED);
            remote.bring_up();
        }
    );
    for lost in [plain, other] {
        let Err(CallError::Terminated { fate: CallFate::MaybeExecuted, reason }) = lost else { panic!("{lost:?}") };
        assert_eq!(reason, "Server disconnected: the response ended before it was complete");
    }
    assert_eq!(read_only.unwrap()["structuredContent"]["result"], 3);
    assert_eq!(remote.served_at("tools/call add").len(), 2, "repeated on the next connection without a delay");
    assert_eq!(remote.served_at("tools/call").len(), 4);
    assert_eq!(remote.attempts().len(), 2);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_repeatable_call_fails_after_two_losses() {
    let fleet = Fleet::start().await;
    let slow = SimScript { call_delay: seconds(5.0), ..SimScript::default() };
    let id = fleet.online(Server::remote("a").script(slow)).await;
    let remote = fleet.remote(&id);
    let (read_only, ()) = futures::join!(fleet.call(&id, "add", json!({"a": 1, "b": 2})), async {
        for nth in 1..=2 {
            until_seen(&remote, |remote| remote.served_at("tools/call add").len() == nth).await;
            remote.expire(404);
            remote.report_session_lost(EXPIRED);
        }
    });
    let Err(CallError::Terminated { fate: CallFate::MaybeExecuted, .. }) = read_only else { panic!("{read_only:?}") };
    sleep(seconds(60.0)).await;
    assert_eq!(remote.served_at("tools/call add").len(), 2);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_repeatable_call_is_tried_three_times_within_its_session() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    let began = Instant::now();
    let tried = |tool: &str| -> Vec<f64> { remote.tried_at(tool).iter().map(|at| tenths(*at - began)).collect() };
    remote.fail_next([FailureKind::Cut, FailureKind::Broken("reset".to_owned())]);
    let answer = fleet.call(&id, "add", json!({"a": 1, "b": 2})).await;
    assert_eq!(
        answer.unwrap()["structuredContent"]["result"],
        3,
        "a read-only call is repeated after a broken response"
    );
    assert_eq!(tried("tools/call add"), [0.0, 0.5, 1.5]);
    sleep(seconds(8.5)).await;
    remote.fail_next([REFUSED, FailureKind::Dns]);
    assert!(fleet.call(&id, "echo", json!({})).await.is_ok(), "an unsent call is tried again");
    assert_eq!(tried("tools/call echo"), [10.0, 10.5, 11.5]);
    assert_eq!(remote.served_at("tools/call").len(), 2);
    assert_eq!(remote.attempts().len(), 1, "the connection was not lost");
    sleep(seconds(8.5)).await;
    remote.take_down(REFUSED);
    let short = fleet.call_within(&id, "echo", json!({}), Some(seconds(1.2))).await;
    assert!(short.is_err());
    assert_eq!(remote.tried_at("tools/call echo").len(), 5, "no attempt after the deadline of the caller");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn an_expired_session_is_renewed_and_its_calls_are_repeated() {
    for status in [404, 400] {
        let fleet = Fleet::start().await;
        let id = fleet.online(Server::remote("a")).await;
        let remote = fleet.remote(&id);
        remote.expire(status);
        let answer = fleet.call(&id, "add", json!({"a": 1, "b": 2})).await;
        assert_eq!(answer.unwrap()["structuredContent"]["result"], 3, "the call is repeated in a new session");
        assert_eq!((remote.received_at("tools/call").len(), remote.served_at("tools/call").len()), (2, 1));
        until_reconnected(&fleet, &id).await;
        remote.expire(status);
        let calls = (0..5).map(|nth| fleet.call(&id, "echo", json!({"text": nth})));
        for (nth, answer) in futures::future::join_all(calls).await.into_iter().enumerate() {
            assert_eq!(answer.unwrap()["structuredContent"]["text"], nth, "none of them was executed before");
        }
        // The first call meets the expired session; the others are not sent in it any more.
        assert_eq!((remote.received_at("tools/call echo").len(), remote.served_at("tools/call echo").len()), (6, 5));
        until_reconnected(&fleet, &id).await;
        let offline = format!("offline: Server disconnected: the session has expired (HTTP {status})");
        let event_lines = event_lines_after_start(&fleet, &id).await;
        assert_eq!(event_lines.iter().filter(|line| **line == offline).count(), 2, "{event_lines:#?}");
        // A request past the runtime is not repeated: its error says that it was not sent.
        remote.expire(status);
        let port = fleet.view(&id).port.clone().unwrap();
        let ping = CallerRequest::Method { method: "ping".to_owned(), params: None };
        let error = port.request(ping, seconds(5.0)).await.unwrap_err();
        assert!(matches!(error, CallError::Terminated { fate: CallFate::NotSent, .. }), "{error:?}");
        until_reconnected(&fleet, &id).await;
        assert_eq!(remote.sessions().opened, 4);
        fleet.finish().await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_sse_transport_detects_the_end_of_its_stream_at_once() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a").sse()).await;
    let remote = fleet.remote(&id);
    let (lost, ()) = futures::join!(fleet.call(&id, "sleep", json!({"ms": 60_000})), async {
        until_seen(&remote, |remote| remote.served_at("tools/call").len() == 1).await;
        remote.kill(REFUSED);
    });
    assert!(matches!(lost, Err(CallError::Terminated { fate: CallFate::MaybeExecuted, .. })), "{lost:?}");
    let idle = fleet.online(Server::remote("b").sse()).await;
    fleet.remote(&idle).kill(REFUSED);
    let view = fleet.until(&idle, Status::Offline).await;
    assert_eq!(
        view.message.as_deref(),
        Some("Server unreachable: the response ended before it was complete"),
        "detected without a call"
    );
    for id in [&id, &idle] {
        fleet.remote(id).bring_up();
        until_reconnected(&fleet, id).await;
    }
    assert_eq!(fleet.event_data(&id, "mcp.server.started").await[0]["transport"], "sse");
    fleet.finish().await;
}
