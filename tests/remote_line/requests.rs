//! Streamable HTTP: messages out, answers back.

use std::sync::Arc;

use mcp_satellite_actors::model::failure::{ExchangeFailure, FailureKind};
use mcp_satellite_actors::model::spec::ServerTarget;
use mcp_satellite_actors::seam::{LineEvent, LineOutput};

use super::peer::Peer;
use super::support::{Dialed, VERSION, http, policy};

#[tokio::test]
async fn nothing_is_connected_before_something_is_sent() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(http(&peer));
    line.is_silent().await;
    assert_eq!(peer.connections_ever(), 0);
    line.request(1, "initialize");
    line.asks(&mut peer).await.result().await;
    assert_eq!(line.message().await["id"], 1);
}

#[tokio::test]
async fn every_message_after_the_handshake_names_the_session_and_the_version() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::connected(&mut peer).await;
    line.is_silent().await;
    line.request(1, "tools/list");
    let asked = line.asks(&mut peer).await;
    assert_eq!(asked.line(), "POST /mcp");
    assert_eq!(asked.says("method"), "tools/list");
    assert_eq!(asked.header("accept"), Some("application/json, text/event-stream"));
    assert_eq!(asked.header("content-type"), Some("application/json"));
    assert_eq!(asked.header("mcp-session-id"), Some("s-1"));
    assert_eq!(asked.header("mcp-protocol-version"), Some(VERSION));
    assert_eq!(asked.header("user-agent"), Some(concat!("mcp-satellite/", env!("CARGO_PKG_VERSION"))));
    let answer = "{\"jsonrpc\":\"2.0\", \"id\":1,\n\"result\":{\"unknown\":18446744073709551616}}";
    asked.json(answer).await;
    assert_eq!(line.text().await, answer, "as it was sent");
    assert_eq!(peer.connections_ever(), 1, "connections are used again");
}

#[tokio::test]
async fn nothing_overtakes_the_word_that_the_handshake_is_done() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(http(&peer));
    line.request(0, "initialize");
    line.asks(&mut peer).await.result().await;
    line.message().await;
    line.initialized();
    line.request(1, "tools/list");
    line.request(2, "prompts/list");
    line.notify("notifications/roots/list_changed");
    line.send(LineOutput::Abandon { id: 2 });
    let initialized = line.asks(&mut peer).await;
    assert_eq!(initialized.says("method"), "notifications/initialized");
    line.is_silent().await;
    assert!(!peer.was_asked(), "something was sent before the server had taken it");
    initialized.accepted().await;
    let mut methods = Vec::new();
    for _ in 0..3 {
        let asked = line.asks(&mut peer).await;
        match asked.method.as_str() {
            "GET" => methods.push("GET".to_owned()),
            _ => methods.push(asked.says("method").as_str().unwrap().to_owned()),
        }
    }
    methods.sort();
    assert_eq!(methods, ["GET", "notifications/roots/list_changed", "tools/list"]);
}

#[tokio::test]
async fn a_server_that_does_not_take_the_end_of_the_handshake_is_lost() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(http(&peer));
    line.request(0, "initialize");
    line.asks(&mut peer).await.result().await;
    line.message().await;
    line.initialized();
    line.asks(&mut peer).await.answer(400, &[], "").await;
    assert_eq!(line.lost().await, FailureKind::from_status(400));
}

#[tokio::test]
async fn a_server_that_may_speak_the_older_transport_is_said_to() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(http(&peer));
    for (status, why) in [
        (400, "the server refused the request (HTTP 400)"),
        (404, "there is no MCP server at this address (HTTP 404)"),
        (405, "the server refused the request (HTTP 405)"),
    ] {
        line.request(0, "initialize");
        line.asks(&mut peer).await.answer(status, &[], "").await;
        let hint = "if the server supports only HTTP+SSE, set transport = \"sse\"";
        let told = FailureKind::Handshake(format!("{why}; {hint}"));
        assert_eq!(line.failed(0).await, ExchangeFailure::sent(told));
    }
    line.request(0, "initialize");
    line.asks(&mut peer).await.answer(418, &[], "").await;
    assert_eq!(line.failed(0).await.kind, FailureKind::Status { status: 418, message: None });
}

#[tokio::test]
async fn an_answer_may_come_in_a_batch() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::connected(&mut peer).await;
    line.request(1, "tools/call");
    let batch = r#"[{"jsonrpc":"2.0","method":"notifications/progress"}, {"jsonrpc":"2.0","id":1,"result":{}}]"#;
    line.asks(&mut peer).await.json(batch).await;
    assert_eq!(line.message().await["method"], "notifications/progress");
    assert_eq!(line.message().await["id"], 1);
    line.is_silent().await;
}

#[tokio::test]
async fn a_stream_brings_what_comes_before_the_answer_and_its_connection_is_used_again() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::connected(&mut peer).await;
    line.request(1, "tools/call");
    let mut stream = line.asks(&mut peer).await.stream(&[]).await;
    stream.chunk(": ping\n\nevent: message\ndata: {\"jsonrpc\":\"2.0\",\n").await;
    stream.chunk("data: \"method\":\"notifications/progress\"}\n\ndata: what is this?\n\n").await;
    assert_eq!(line.message().await["method"], "notifications/progress");
    assert_eq!(line.text().await, "what is this?", "the session counts what is malformed");
    stream.chunk("event: other\ndata: nothing of ours\n\n").await;
    stream.chunk("data: {\"jsonrpc\":\"2.0\",\"id\":7,\"method\":\"sampling/createMessage\"}\n\n").await;
    assert_eq!(line.message().await["method"], "sampling/createMessage");
    // What the server asks is answered by a message of our own.
    line.respond(7);
    line.asks(&mut peer).await.accepted().await;
    stream
        .chunk("data: [{\"jsonrpc\":\"2.0\",\"method\":\"m\"},{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{}}]\n\n")
        .await;
    assert_eq!(line.message().await["method"], "m");
    assert_eq!(line.message().await["id"], 1);
    stream.chunk("data: {\"jsonrpc\":\"2.0\",\"method\":\"late\"}\n\n").await;
    assert_eq!(line.message().await["method"], "late");
    let before = peer.connections_ever();
    stream.end().await;
    line.is_silent().await;
    for id in 2..4 {
        line.request(id, "tools/call");
    }
    for _ in 2..4 {
        line.asks(&mut peer).await.result().await;
    }
    assert_eq!(peer.connections_ever(), before);
}

#[tokio::test]
async fn a_stream_that_breaks_off_is_taken_up_where_it_was() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::connected(&mut peer).await;
    line.request(1, "tools/call");
    let mut stream = line.asks(&mut peer).await.stream(&[]).await;
    // Only whole events count.
    stream.chunk("id: e-1\ndata: {\"jsonrpc\":\"2.0\",\"method\":\"one\"}\n\nid: e-2\ndata: {").await;
    assert_eq!(line.message().await["method"], "one");
    drop(stream);
    let asked = line.asks(&mut peer).await;
    assert_eq!(asked.line(), "GET /mcp");
    assert_eq!(asked.header("last-event-id"), Some("e-1"));
    assert_eq!(asked.header("accept"), Some("text/event-stream"));
    assert_eq!(asked.header("mcp-session-id"), Some("s-1"));
    let mut stream = asked.stream(&[]).await;
    stream.chunk("id: e-2\nretry: 10\ndata:\n\n").await;
    stream.end().await;
    let asked = line.asks(&mut peer).await;
    assert_eq!(asked.header("last-event-id"), Some("e-2"));
    let mut stream = asked.stream(&[]).await;
    stream.chunk("data: {\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{}}\n\n").await;
    assert_eq!(line.message().await["id"], 1);
}

#[tokio::test]
async fn a_stream_that_breaks_off_without_a_way_back_is_a_failure() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::connected(&mut peer).await;
    line.request(1, "tools/call");
    let mut stream = line.asks(&mut peer).await.stream(&[]).await;
    stream.chunk("data: {\"jsonrpc\":\"2.0\",\"method\":\"one\"}\n\n").await;
    drop(stream);
    assert_eq!(line.message().await["method"], "one");
    assert_eq!(line.failed(1).await, ExchangeFailure::sent(FailureKind::Cut));
    line.request(2, "tools/call");
    line.asks(&mut peer).await.stream(&[]).await.end().await;
    assert_eq!(line.failed(2).await, ExchangeFailure::sent(FailureKind::Cut));
}

#[tokio::test]
async fn a_server_that_does_not_let_a_stream_be_taken_up_says_what_became_of_it() {
    for (status, headers, kind) in [
        (405, &[][..], FailureKind::Cut),
        (500, &[], FailureKind::Cut),
        (200, &[("content-type", "text/html")], FailureKind::Cut),
        (404, &[], FailureKind::session_expired(404)),
        (401, &[], FailureKind::Unauthorized { challenge: None }),
    ] {
        let mut peer = Peer::new().await;
        let mut line = Dialed::connected(&mut peer).await;
        line.request(1, "tools/call");
        let mut stream = line.asks(&mut peer).await.stream(&[]).await;
        stream.chunk("id: 1\n\n").await;
        stream.end().await;
        line.asks(&mut peer).await.answer(status, headers, "").await;
        // A refusal of the continuation does not mean that the request was not carried out.
        let expected =
            if kind == FailureKind::Cut { ExchangeFailure::sent(kind) } else { ExchangeFailure::answering(kind) };
        assert_eq!(line.failed(1).await, expected, "{status}");
    }
    let mut peer = Peer::new().await;
    let mut line = Dialed::connected(&mut peer).await;
    line.request(1, "tools/call");
    let mut stream = line.asks(&mut peer).await.stream(&[]).await;
    stream.chunk("id: 1\n\n").await;
    peer.die().await;
    drop(stream);
    assert_eq!(line.failed(1).await, ExchangeFailure::answering(FailureKind::Refused), "the request itself was sent");
}

#[tokio::test]
async fn a_message_over_the_limit_ends_its_exchange() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(policy(http(&peer), |policy| policy.session.line_max = 100));
    line.greet(&mut peer, None).await.answer(405, &[], "").await;
    let too_long = ExchangeFailure::sent(FailureKind::TooLong(100));
    let long = format!(r#"{{"jsonrpc":"2.0","id":1,"result":"{}"}}"#, "x".repeat(100));

    line.request(1, "tools/call");
    line.asks(&mut peer).await.json(&long).await;
    assert_eq!(line.failed(1).await, too_long);
    line.request(2, "tools/call");
    let asked = line.asks(&mut peer).await;
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
    let mut endless = asked.say(head).await;
    line.during(endless.endlessly("          ")).await;
    assert_eq!(line.failed(2).await, too_long);
    line.request(3, "tools/call");
    let mut endless = line.asks(&mut peer).await.stream(&[]).await;
    line.during(endless.endlessly("data: and on and on")).await;
    assert_eq!(line.failed(3).await, too_long);
    line.request(4, "tools/call");
    let mut endless = line.asks(&mut peer).await.stream(&[]).await;
    line.during(endless.endlessly("data: and\n")).await;
    assert_eq!(line.failed(4).await, too_long);
}

#[tokio::test]
async fn an_abandoned_request_is_dropped_with_its_connection() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::connected(&mut peer).await;
    line.request(1, "tools/call");
    let unanswered = line.asks(&mut peer).await;
    line.request(2, "tools/call");
    let streaming = line.asks(&mut peer).await.stream(&[]).await;
    line.send(LineOutput::Abandon { id: 1 });
    line.send(LineOutput::Abandon { id: 2 });
    line.during(unanswered.closed()).await;
    line.during(streaming.closed()).await;
    line.is_silent().await;
}

#[tokio::test]
async fn a_request_that_failed_is_not_repeated_by_the_line_and_sent_again_under_another_number() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::connected(&mut peer).await;
    line.request(1, "tools/call");
    drop(line.asks(&mut peer).await);
    assert!(matches!(line.failed(1).await.kind, FailureKind::Broken(_)));
    line.is_silent().await;
    assert!(!peer.was_asked(), "it was repeated, which is not the line's to decide");
    line.request(2, "tools/call");
    let again = line.asks(&mut peer).await;
    line.send(LineOutput::Abandon { id: 2 });
    line.during(again.closed()).await;
}

#[tokio::test]
async fn headers_and_parameters_of_the_instance_go_with_everything_and_can_be_changed() {
    let mut peer = Peer::new().await;
    let mut spec = http(&peer);
    spec.headers = [
        ("Authorization".to_owned(), "Bearer one".into()),
        ("Accept".to_owned(), "text/plain".into()),
        ("Host".to_owned(), "elsewhere".into()),
        ("mcp-session-id".to_owned(), "stolen".into()),
        ("Content-Type".to_owned(), "text/plain".into()),
        ("MCP-Protocol-Version".to_owned(), "1".into()),
        ("Content-Length".to_owned(), "1".into()),
    ]
    .into();
    spec.query = [("key".to_owned(), "a b&c".into())].into();
    let mut line = Dialed::new(spec.clone());
    line.request(0, "initialize");
    let asked = line.asks(&mut peer).await;
    assert_eq!(asked.line(), "POST /mcp?key=a+b%26c");
    assert_eq!(asked.header("authorization"), Some("Bearer one"));
    assert_eq!(asked.header("accept"), Some("application/json, text/event-stream"));
    assert_eq!(asked.header("content-type"), Some("application/json"));
    assert_eq!(asked.header("host"), Some(peer.address.to_string().as_str()));
    assert_eq!((asked.header("mcp-session-id"), asked.header("mcp-protocol-version")), (None, None));
    asked.result().await;
    line.message().await;
    line.initialized();
    line.asks(&mut peer).await.accepted().await;
    let listening = line.asks(&mut peer).await;
    assert_eq!(listening.line(), "GET /mcp?key=a+b%26c");
    assert_eq!(listening.header("authorization"), Some("Bearer one"));
    let stream = listening.stream(&[]).await;

    spec.headers = [("Authorization".to_owned(), "Bearer two".into()), ("X-More".to_owned(), "1".into())].into();
    spec.query = [("key".to_owned(), "new".into())].into();
    line.send(LineOutput::Credentials(Arc::new(spec)));
    line.request(1, "tools/call");
    let asked = line.asks(&mut peer).await;
    assert_eq!(asked.line(), "POST /mcp?key=new");
    assert_eq!((asked.header("authorization"), asked.header("x-more")), (Some("Bearer two"), Some("1")));
    asked.result().await;
    line.message().await;
    line.is_silent().await;
    assert!(!peer.was_asked(), "what is open stays open");
    stream.end().await;
    let listening = line.asks(&mut peer).await;
    assert_eq!(listening.line(), "GET /mcp?key=new");
    assert_eq!(listening.header("authorization"), Some("Bearer two"));
}

#[tokio::test]
async fn a_probe_is_a_get_of_the_health_url_with_the_credentials_and_no_part_of_the_session() {
    let mut peer = Peer::new().await;
    let mut spec = http(&peer);
    if let ServerTarget::Remote { health_url, .. } = &mut spec.target {
        *health_url = Some(peer.url("/health"));
    }
    spec.headers = [("X-Key".to_owned(), "k".into())].into();
    spec.query = [("q".to_owned(), "1".into())].into();
    let mut line = Dialed::new(spec);
    line.send(LineOutput::Probe { id: 5 });
    let asked = line.asks(&mut peer).await;
    assert_eq!(asked.line(), "GET /health?q=1");
    assert_eq!((asked.header("x-key"), asked.header("cache-control")), (Some("k"), Some("no-cache")));
    assert_eq!(asked.header("mcp-session-id"), None);
    asked.answer(204, &[], "").await;
    assert!(matches!(line.next().await, LineEvent::Probed { id: 5 }));
    line.send(LineOutput::Probe { id: 6 });
    line.asks(&mut peer).await.answer(503, &[("retry-after", "1")], "").await;
    assert!(matches!(line.failed(6).await.kind, FailureKind::ServerError { status: 503, .. }));
    line.send(LineOutput::Probe { id: 7 });
    let asked = line.asks(&mut peer).await;
    line.send(LineOutput::Abandon { id: 7 });
    line.during(asked.closed()).await;

    let mut line = Dialed::new(http(&peer));
    line.send(LineOutput::Probe { id: 8 });
    assert!(matches!(line.failed(8).await.kind, FailureKind::BadAddress(_)), "there is no health_url");
}

#[tokio::test]
async fn a_session_that_has_a_name_is_ended_at_the_server() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(http(&peer));
    let stream = line.greet(&mut peer, Some("s-1")).await.stream(&[]).await;
    line.request(1, "tools/call");
    let unanswered = line.asks(&mut peer).await;
    line.send(LineOutput::Close);
    let asked = line.asks(&mut peer).await;
    assert_eq!(asked.line(), "DELETE /mcp");
    assert_eq!(asked.header("mcp-session-id"), Some("s-1"));
    assert_eq!(asked.header("mcp-protocol-version"), Some(VERSION));
    stream.closed().await;
    unanswered.closed().await;
    line.request(2, "tools/call");
    asked.answer(405, &[], "").await;
    assert!(matches!(line.next().await, LineEvent::Closed));
    assert!(!peer.was_asked(), "nothing is sent after the end");

    let mut line = Dialed::new(http(&peer));
    line.greet(&mut peer, None).await.answer(405, &[], "").await;
    line.send(LineOutput::Close);
    assert!(matches!(line.next().await, LineEvent::Closed), "there is nothing to end");
    assert!(!peer.was_asked());
}

#[tokio::test]
async fn a_server_that_does_not_confirm_the_end_is_not_waited_for() {
    let mut peer = Peer::new().await;
    let close_timeout = std::time::Duration::from_millis(100);
    let mut line = Dialed::new(policy(http(&peer), |policy| policy.remote.close_timeout = close_timeout));
    line.greet(&mut peer, Some("s-1")).await.answer(405, &[], "").await;
    line.send(LineOutput::Close);
    let asked = line.asks(&mut peer).await;
    assert!(matches!(line.next().await, LineEvent::Closed));
    asked.closed().await;
}

#[tokio::test]
async fn dropping_a_line_closes_all_its_connections_at_once() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(http(&peer));
    let listening = line.greet(&mut peer, Some("s-1")).await.stream(&[]).await;
    line.request(1, "tools/call");
    let unanswered = line.asks(&mut peer).await;
    line.request(2, "tools/call");
    let streaming = line.asks(&mut peer).await.stream(&[]).await;
    drop(line);
    listening.closed().await;
    unanswered.closed().await;
    streaming.closed().await;
    // What is idle in the pool is there for others.
    peer.die().await;
    peer.deserted().await;
}

#[tokio::test]
async fn a_notification_that_cannot_be_delivered_is_the_loss_and_one_that_is_not_liked_is_nothing() {
    for (status, kind) in [
        (404, FailureKind::session_expired(404)),
        (401, FailureKind::Unauthorized { challenge: None }),
        (403, FailureKind::Forbidden { challenge: None }),
    ] {
        let mut peer = Peer::new().await;
        let mut line = Dialed::connected(&mut peer).await;
        line.notify("notifications/cancelled");
        line.asks(&mut peer).await.answer(status, &[], "").await;
        assert_eq!(line.lost().await, kind);
    }
    let mut peer = Peer::new().await;
    let mut line = Dialed::connected(&mut peer).await;
    for status in [200, 204, 400, 429, 500] {
        line.notify("notifications/cancelled");
        line.asks(&mut peer).await.answer(status, &[], "").await;
    }
    line.notify("notifications/cancelled");
    drop(line.asks(&mut peer).await);
    line.is_silent().await;
    peer.die().await;
    line.notify("notifications/cancelled");
    assert_eq!(line.lost().await, FailureKind::Refused);
}

#[tokio::test]
async fn what_waits_for_the_end_of_the_handshake_is_known_not_to_have_been_sent_when_that_is_refused() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(http(&peer));
    line.request(0, "initialize");
    line.asks(&mut peer).await.result().await;
    line.message().await;
    line.initialized();
    line.request(1, "tools/list");
    line.notify("notifications/cancelled");
    line.request(2, "tools/call");
    line.asks(&mut peer).await.answer(401, &[], "").await;
    let refused = FailureKind::Unauthorized { challenge: None };
    for id in [1, 2] {
        assert_eq!(line.failed(id).await, ExchangeFailure::unsent(refused.clone()));
    }
    assert_eq!(line.lost().await, refused);
}

#[tokio::test]
async fn what_waits_for_the_end_of_the_handshake_is_known_not_to_have_been_sent_when_the_session_is_ended() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(http(&peer));
    line.request(0, "initialize");
    line.asks(&mut peer).await.result().await;
    line.message().await;
    line.initialized();
    let _untaken = line.asks(&mut peer).await;
    // The door bounds how many there are, not the line.
    for id in 1..=5000 {
        line.request(id, "tools/call");
    }
    line.is_silent().await;
    line.send(LineOutput::Close);
    for id in 1..=5000 {
        assert!(!line.failed(id).await.sent);
    }
    assert!(matches!(line.next().await, LineEvent::Closed));
}

#[tokio::test]
async fn a_server_that_asks_and_asks_gets_its_answers_a_few_at_a_time() {
    const MANY: usize = 100;
    let mut peer = Peer::new().await;
    let mut line = Dialed::connected(&mut peer).await;
    for id in 0..MANY {
        line.respond(id);
    }
    let mut asked = Vec::new();
    for _ in 0..4 {
        asked.push(line.asks(&mut peer).await);
    }
    line.is_silent().await;
    assert!(!peer.was_asked(), "more than a few at once");
    for _ in 4..MANY {
        asked.remove(0).accepted().await;
        asked.push(line.asks(&mut peer).await);
    }
    // Whatever waits, a request does not wait for it.
    for id in 0..MANY {
        line.respond(id);
    }
    line.request(1, "tools/list");
    let request = line.asks(&mut peer).await;
    assert_eq!(request.says("method"), "tools/list");
    request.result().await;
    assert_eq!(line.message().await["id"], 1);
}

#[tokio::test]
async fn a_server_that_asks_without_end_and_takes_no_answer_is_lost() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::connected(&mut peer).await;
    for id in 0..4096 {
        line.respond(id);
    }
    line.is_silent().await;
    for id in 0..5 {
        line.respond(id);
    }
    assert_eq!(line.lost().await, FailureKind::Flooded);

    let mut peer = Peer::new().await;
    let mut line = Dialed::new(http(&peer));
    line.request(0, "initialize");
    line.asks(&mut peer).await.result().await;
    line.message().await;
    line.initialized();
    let _untaken = line.asks(&mut peer).await;
    for id in 0..=4096 {
        line.respond(id);
    }
    assert_eq!(line.lost().await, FailureKind::Flooded, "also before the session has begun");
}

#[tokio::test]
async fn a_server_that_takes_no_notifications_loses_the_oldest_of_them_and_nothing_else() {
    const MANY: usize = 5000;
    let mut peer = Peer::new().await;
    let mut line = Dialed::connected(&mut peer).await;
    for nth in 0..MANY {
        line.notify(&format!("notifications/{nth}"));
    }
    let mut asked = Vec::new();
    for _ in 0..4 {
        asked.push(line.asks(&mut peer).await);
    }
    line.respond(7);
    let answer = line.asks(&mut peer).await;
    assert_eq!(answer.says("id"), 7, "it does not wait for the others");
    answer.accepted().await;
    line.is_silent().await;
    assert!(!peer.was_asked(), "more than a few at once");
    let newest = format!("notifications/{}", MANY - 1);
    let mut told = 4;
    while asked.iter().all(|asked| asked.says("method") != newest.as_str()) {
        asked.remove(0).accepted().await;
        asked.push(line.asks(&mut peer).await);
        told += 1;
    }
    assert_eq!(told, 4 + 256);

    let mut peer = Peer::new().await;
    let mut line = Dialed::new(http(&peer));
    line.request(0, "initialize");
    line.asks(&mut peer).await.result().await;
    line.message().await;
    line.initialized();
    let initialized = line.asks(&mut peer).await;
    line.request(1, "tools/list");
    for nth in 0..MANY {
        line.notify(&format!("notifications/{nth}"));
    }
    line.is_silent().await;
    initialized.accepted().await;
    line.request(2, "tools/list");
    let mut ids = Vec::new();
    while ids.len() < 2 {
        let asked = line.asks(&mut peer).await;
        match asked.method.as_str() {
            "GET" => asked.answer(405, &[], "").await,
            _ if asked.says("id").is_null() => asked.accepted().await,
            _ => ids.push(asked.says("id")),
        }
    }
    ids.sort_by_key(serde_json::Value::as_u64);
    assert_eq!(ids, [1, 2], "also before the session has begun");
}
