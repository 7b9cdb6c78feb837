//! Spans of requests besides the calls of clients: those that open sessions, those of the satellite itself, and the
//! repetition of a call.

use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use serde_json::json;
use testkit::wait::wait_until;

use crate::convention::{self, Place};
use crate::fixture::Traced;
use crate::receiver::{Answering, Receiver, attribute, histogram_points};
use crate::traces::{check_peer, check_spans, hex, is_kind, recording};

fn find<'a>(spans: &'a [Span], name: &str, kind: SpanKind) -> Option<&'a Span> {
    spans.iter().find(|span| span.name == name && is_kind(span, kind))
}

#[test]
fn requests_of_the_satellite_begin_traces_that_the_server_receives() {
    for (flags, opening) in [("", "initialize"), ("--speaks stateless", "server/discover")] {
        let receiver = Receiver::start(Answering::Ok);
        let traced = Traced::new(&recording(&receiver), flags);
        let (_satellite, _client) = traced.run();
        let methods = [opening, "tools/list"];
        let all = |spans: &[Span]| {
            let is_there = |method: &&str| spans.iter().any(|span| span.name == **method && is_answered(span));
            methods.iter().all(is_there)
        };
        let spans = receiver.wait_spans("the requests of the satellite", all);
        check_spans(&spans);
        let input = traced.input();
        for method in methods {
            let span = spans.iter().find(|span| span.name == method && is_answered(span)).unwrap();
            assert!(is_kind(span, SpanKind::Client), "{span:?}");
            assert!(span.parent_span_id.is_empty(), "no call of a client causes it: {span:?}");
            let context = format!("00-{}-{}-01", hex(&span.trace_id), hex(&span.span_id));
            let is_received = input
                .iter()
                .any(|message| message["method"] == method && message["params"]["_meta"]["traceparent"] == *context);
            assert!(is_received, "{context}: {input:#?}");
        }
        assert!(spans.iter().all(|span| span.name != "ping"), "health checks are no spans");
    }
}

fn is_answered(span: &Span) -> bool {
    attribute(&span.attributes, "error.type").is_none()
}

#[test]
fn a_request_of_the_satellite_that_is_not_recorded_has_no_metadata() {
    let receiver = Receiver::start(Answering::Ok);
    let traced = Traced::new(&format!("endpoint = \"http://{}\"\nsample = 0", receiver.address), "");
    let (_satellite, _client) = traced.run();
    let input = traced.input();
    let of = |method: &str| input.iter().find(|message| message["method"] == method).unwrap();
    assert!(of("initialize")["params"]["_meta"].is_null(), "{input:#?}");
    assert!(of("tools/list")["params"].is_null(), "{input:#?}");
    // They are counted, recorded or not.
    let count = |method: &str| {
        let text = traced.scrape();
        let start = format!("mcp_client_operation_duration_seconds_count{{mcp_method_name=\"{method}\"");
        text.lines().filter(|line| line.starts_with(&start)).count()
    };
    wait_until("the counted requests", || count("initialize") == 1 && count("tools/list") == 1);
}

#[test]
fn requests_of_clients_that_open_sessions_are_spans() {
    let receiver = Receiver::start(Answering::Ok);
    let traced = Traced::new(&recording(&receiver), "");
    let (_satellite, mut client) = traced.run();
    client.initialize();
    let spans = receiver.wait_spans("initialize", |spans| find(spans, "initialize", SpanKind::Server).is_some());
    check_spans(&spans);
    let opening = find(&spans, "initialize", SpanKind::Server).unwrap();
    check_peer(opening, &client);
    assert_eq!(attribute(&opening.attributes, "mcp.protocol.version").as_deref(), Some("2025-11-25"));
    assert_eq!(attribute(&opening.attributes, "satellite.user").as_deref(), Some("alice"));
    client.end_session();

    let sent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let answer = client.request_stateless("server/discover", "", json!({}), Some(sent));
    assert!(answer["result"]["supportedVersions"].is_array(), "{answer}");
    let is_there = |spans: &[Span]| find(spans, "server/discover", SpanKind::Server).is_some();
    let spans = receiver.wait_spans("server/discover", is_there);
    check_spans(&spans);
    let described = find(&spans, "server/discover", SpanKind::Server).unwrap();
    assert_eq!(hex(&described.trace_id), sent[3..35]);
    check_peer(described, &client);
}

#[test]
fn a_repeated_call_has_a_span_for_each_attempt() {
    let receiver = Receiver::start(Answering::Ok);
    let mut traced = Traced::new(&recording(&receiver), "--exit-on-call 2").without_copy();
    traced.append("[policy.restart]\ndelays = [\"10ms\"]\n");
    let (_satellite, mut client) = traced.run();
    client.initialize();
    client.call("echo", &json!({"text": "a"}));
    // The tool is idempotent.
    let answer = client.call("add", &json!({"a": 1, "b": 2}));
    assert_eq!(answer["result"]["content"][0]["text"], "3", "{answer}");
    let name = "tools/call add";
    let attempts = |spans: &[Span]| {
        let of_call = |span: &&Span| span.name == name && is_kind(span, SpanKind::Client);
        let mut attempts: Vec<Span> = spans.iter().filter(of_call).cloned().collect();
        attempts.sort_by_key(|span| span.start_time_unix_nano);
        attempts
    };
    let is_complete = |spans: &[Span]| attempts(spans).len() == 2 && find(spans, name, SpanKind::Server).is_some();
    let spans = receiver.wait_spans("both attempts", is_complete);
    check_spans(&spans);
    let whole = find(&spans, name, SpanKind::Server).unwrap();
    let attempts = attempts(&spans);
    let of =
        |attribute_name| attempts.iter().map(|span| attribute(&span.attributes, attribute_name)).collect::<Vec<_>>();
    assert_eq!(of("satellite.attempt"), [None, Some("2".to_owned())]);
    assert_eq!(of("satellite.fate"), [Some("maybe_executed".to_owned()), None]);
    assert!(attempts.iter().all(|span| span.parent_span_id == whole.span_id), "{attempts:#?}");
    assert_eq!(attribute(&whole.attributes, "error.type"), None);
}

#[test]
fn sessions_with_remote_servers_name_their_host() {
    let receiver = Receiver::start(Answering::Ok);
    let mut traced = Traced::new(&recording(&receiver), "").with_env(&[("OTEL_METRIC_EXPORT_INTERVAL", "200")]);
    let server = traced.home.shell(&format!("{} sim-server --http 127.0.0.1:0", traced.home.binary.display()));
    let listening = server.wait_stdout(|text| text.contains("/mcp"));
    let url = listening.trim().strip_prefix("listening on ").unwrap().to_owned();
    traced.append(&format!(
        "[[teams.installations]]\nid = \"far\"\nserver = \"far\"\ntransport = \"http\"\nurl = \"{url}\"\n"
    ));
    let (satellite, _client) = traced.run();
    traced.home.wait_online("far");
    traced.home.satellite(&["restart", "far"]).exits(0);
    let name = "mcp.client.session.duration";
    wait_until("the session", || !histogram_points(&receiver.metrics(), name).is_empty());
    let points = histogram_points(&receiver.metrics(), name);
    for point in &points {
        convention::check(Place::ClientSession, point);
    }
    let port = url.rsplit(':').next().unwrap().strip_suffix("/mcp").unwrap();
    let of = |name| attribute(&points[0], name);
    assert_eq!(of("server.address").as_deref(), Some("127.0.0.1"));
    assert_eq!(of("server.port").as_deref(), Some(port));
    assert_eq!(of("network.transport").as_deref(), Some("tcp"));
    // Bytes of messages are counted for each transport.
    let bytes = |direction: &str| {
        traced.sample(&format!("satellite_server_bytes_total{{transport=\"http\",direction=\"{direction}\"}}"))
    };
    wait_until("bytes of both directions", || bytes("received") > 0.0 && bytes("sent") > 0.0);
    // A simulated server that is running counts as one that the satellite has left.
    drop(server);
    satellite.terminate().exits(0);
}
