//! Spans and histograms as a receiver gets them.

use std::collections::BTreeSet;

use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{Span, Status};
use serde_json::{Value, json};
use testkit::process::has_in_environment;
use testkit::wait::wait_until;

use crate::convention::{self, BOUNDS, Place};
use crate::fixture::{Client, Traced};
use crate::receiver::{Answering, Receiver, attribute, histogram_points};

const SENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

/// Lines of `[telemetry]` that record all traces at this receiver.
pub(crate) fn recording(receiver: &Receiver) -> String {
    format!("endpoint = \"http://{}\"\nsample = 1.0", receiver.address)
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

pub(crate) fn is_kind(span: &Span, kind: SpanKind) -> bool {
    span.kind == kind as i32
}

/// Returns the two spans of a tool call: towards the client, and towards the server.
fn pair<'a>(spans: &'a [Span], tool: &str) -> Option<(&'a Span, &'a Span)> {
    let name = format!("tools/call {tool}");
    let of = |kind| spans.iter().find(|span| span.name == name && is_kind(span, kind));
    Some((of(SpanKind::Server)?, of(SpanKind::Client)?))
}

fn has_pair(tool: &'static str) -> impl Fn(&[Span]) -> bool {
    move |spans| pair(spans, tool).is_some()
}

#[track_caller]
pub(crate) fn check_spans(spans: &[Span]) {
    for span in spans {
        let place = if is_kind(span, SpanKind::Server) { Place::ServerSpan } else { Place::ClientSpan };
        convention::check(place, &span.attributes);
        let method = attribute(&span.attributes, "mcp.method.name").unwrap();
        let target =
            ["gen_ai.tool.name", "gen_ai.prompt.name"].iter().find_map(|name| attribute(&span.attributes, name));
        let name = target.map_or(method.clone(), |target| format!("{method} {target}"));
        assert_eq!(span.name, name);
        let failed = attribute(&span.attributes, "error.type").is_some();
        let code = span.status.as_ref().map_or(StatusCode::Unset, Status::code);
        assert_eq!(code == StatusCode::Error, failed, "{span:?}");
    }
}

/// Checks that the span names the connection of the client's last request.
#[track_caller]
pub(crate) fn check_peer(server: &Span, client: &Client) {
    let of = |name| attribute(&server.attributes, name);
    let wanted = (Some("127.0.0.1".to_owned()), Some(client.port.to_string()));
    assert_eq!((of("client.address"), of("client.port")), wanted);
}

/// The trace context that the server received with its last tool call.
#[track_caller]
fn received_trace(traced: &Traced) -> Option<String> {
    let input = traced.input();
    let call = input.iter().rfind(|message| message["method"] == "tools/call").unwrap();
    call["params"]["_meta"]["traceparent"].as_str().map(str::to_owned)
}

#[track_caller]
fn check_trace(traced: &Traced, spans: &[Span], tool: &str) {
    let (server, client) = pair(spans, tool).unwrap();
    let (trace, parent) = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331");
    assert_eq!((&*hex(&server.trace_id), &*hex(&server.parent_span_id)), (trace, parent));
    assert_eq!((&*hex(&client.trace_id), &client.parent_span_id), (trace, &server.span_id));
    assert_eq!(received_trace(traced).unwrap(), format!("00-{trace}-{}-01", hex(&client.span_id)));
}

#[test]
fn client_gateway_and_server_form_one_trace_in_both_eras() {
    for (flags, is_stateless_server) in [("", false), ("--speaks stateless", true)] {
        let receiver = Receiver::start(Answering::Ok);
        let traced = Traced::new(&recording(&receiver), flags);
        let (_satellite, mut client) = traced.run();
        let session = client.initialize();
        let params =
            json!({"name": "echo", "arguments": {"text": "a"}, "_meta": {"traceparent": SENT, "tracestate": "v=1"}});
        assert_eq!(client.request("tools/call", &params)["result"]["structuredContent"]["text"], "a");
        let spans = receiver.wait_spans("the spans of the session", has_pair("echo"));
        check_spans(&spans);
        check_trace(&traced, &spans, "echo");
        let input = traced.input();
        let call = input.iter().rfind(|message| message["method"] == "tools/call").unwrap();
        assert_eq!(call["params"]["_meta"]["tracestate"], "v=1");
        let (server, _) = pair(&spans, "echo").unwrap();
        // The rest of the id is a credential.
        assert_eq!(attribute(&server.attributes, "mcp.session.id").as_deref(), Some(&session[..16]));
        assert_eq!(attribute(&server.attributes, "network.transport").as_deref(), Some("tcp"));
        check_peer(server, &client);

        client.end_session();
        let answer = client.call_stateless("add", &json!({"a": 1, "b": 2}), Some(SENT));
        assert_eq!(answer["result"]["content"][0]["text"], "3", "{answer}");
        let spans = receiver.wait_spans("the spans without a session", has_pair("add"));
        check_spans(&spans);
        check_trace(&traced, &spans, "add");
        let (server, client_span) = pair(&spans, "add").unwrap();
        assert_eq!(attribute(&server.attributes, "mcp.session.id"), None);
        check_peer(server, &client);
        assert_eq!(attribute(&server.attributes, "mcp.protocol.version").as_deref(), Some("2026-07-28"));
        let version = if is_stateless_server { "2026-07-28" } else { "2025-11-25" };
        assert_eq!(attribute(&client_span.attributes, "mcp.protocol.version").as_deref(), Some(version));
        assert_eq!(attribute(&client_span.attributes, "network.transport").as_deref(), Some("pipe"));
        for received in receiver.received() {
            let text = String::from_utf8_lossy(&received.body).into_owned();
            assert!(!text.contains(&session[16..]), "the whole session id was exported");
        }
    }
}

#[test]
fn errors_are_described_as_the_convention_says() {
    let receiver = Receiver::start(Answering::Ok);
    let traced = Traced::new(&recording(&receiver), "");
    let (_satellite, mut client) = traced.run();
    client.initialize();
    client.call("tool_error", &json!({"message": "x"}));
    client.call("fail", &json!({"message": "x", "code": -32050}));
    client.request("prompts/get", &json!({"name": "greet"}));
    let all = |spans: &[Span]| {
        has_pair("tool_error")(spans)
            && has_pair("fail")(spans)
            && spans.iter().any(|span| span.name == "prompts/get greet")
    };
    let spans = receiver.wait_spans("the spans", all);
    check_spans(&spans);
    let error = |tool: &str, name: &str| {
        let (server, client) = pair(&spans, tool).unwrap();
        let values = [server, client].map(|span| attribute(&span.attributes, name));
        assert_eq!(values[0], values[1], "{tool}");
        values[0].clone()
    };
    assert_eq!(error("tool_error", "error.type").as_deref(), Some("tool_error"));
    assert_eq!(error("tool_error", "rpc.response.status_code"), None);
    assert_eq!(error("fail", "error.type").as_deref(), Some("-32050"));
    assert_eq!(error("fail", "rpc.response.status_code").as_deref(), Some("-32050"));
    let status = pair(&spans, "fail").unwrap().0.status.clone().unwrap();
    assert_eq!(status.message, "failed as asked: x");
}

#[test]
fn a_call_that_is_not_recorded_passes_byte_for_byte() {
    let receiver = Receiver::start(Answering::Ok);
    let traced = Traced::new(&format!("endpoint = \"http://{}\"\nsample = 0", receiver.address), "");
    let (_satellite, mut client) = traced.run();
    client.initialize();
    let not_sampled = SENT.replace("-01", "-00");
    let params = json!({"name": "echo", "arguments": {"text": "a"}, "_meta": {"traceparent": not_sampled}});
    client.request("tools/call", &params);
    assert_eq!(received_trace(&traced), Some(not_sampled));
    client.call("echo", &json!({"text": "b"}));
    assert_eq!(received_trace(&traced), None);
    // The client's decision has precedence over the share.
    let params = json!({"name": "add", "arguments": {"a": 1, "b": 2}, "_meta": {"traceparent": SENT}});
    client.request("tools/call", &params);
    let spans = receiver.wait_spans("the recorded call", has_pair("add"));
    assert_eq!(spans.len(), 2, "{spans:#?}");
}

#[test]
fn log_lines_of_a_recorded_call_carry_its_ids() {
    let receiver = Receiver::start(Answering::Ok);
    let traced = Traced::new(&recording(&receiver), "").with_env(&[("RUST_LOG", "info,mcp_satellite_actors=debug")]);
    let (satellite, mut client) = traced.run();
    client.initialize();
    client.call("echo", &json!({"text": "a"}));
    let spans = receiver.wait_spans("the spans", has_pair("echo"));
    let (server, _) = pair(&spans, "echo").unwrap();
    let (trace, span) = (hex(&server.trace_id), hex(&server.span_id));
    let is_of_call = |line: &Value| {
        line["message"] == "request" && line["span"]["trace_id"] == *trace && line["span"]["span_id"] == *span
    };
    wait_until("the log line", || satellite.log().iter().any(is_of_call));
}

#[test]
fn histograms_are_exported_with_the_bounds_of_the_convention() {
    let receiver = Receiver::start(Answering::Ok);
    let traced = Traced::new(&recording(&receiver), "").with_env(&[("OTEL_METRIC_EXPORT_INTERVAL", "200")]);
    let (_satellite, mut client) = traced.run();
    client.initialize();
    client.call("echo", &json!({"text": "a"}));
    client.call("fail", &json!({"message": "x"}));
    client.end_session();
    traced.home.satellite(&["restart", "files"]).exits(0);
    let places = [
        ("mcp.server.operation.duration", Place::ServerOperation),
        ("mcp.client.operation.duration", Place::ClientOperation),
        ("mcp.server.session.duration", Place::ServerSession),
        ("mcp.client.session.duration", Place::ClientSession),
    ];
    wait_until("all histograms", || {
        places.iter().all(|(name, _)| !histogram_points(&receiver.metrics(), name).is_empty())
    });
    let metrics = receiver.metrics();
    let names: BTreeSet<&str> = metrics.iter().map(|metric| &*metric.name).collect();
    assert_eq!(names, places.iter().map(|(name, _)| *name).collect());
    for (name, place) in places {
        for attributes in histogram_points(&metrics, name) {
            convention::check(place, &attributes);
        }
    }
    for metric in &metrics {
        assert_eq!(metric.unit, "s");
        let Some(Data::Histogram(histogram)) = &metric.data else { panic!("{metric:?}") };
        for point in &histogram.data_points {
            assert_eq!(point.explicit_bounds, BOUNDS);
            assert_eq!(
                (point.bucket_counts.len(), point.bucket_counts.iter().sum::<u64>()),
                (BOUNDS.len() + 1, point.count)
            );
        }
    }
    let failed = histogram_points(&metrics, "mcp.client.operation.duration");
    assert!(failed.iter().any(|point| attribute(point, "error.type").as_deref() == Some("-32603")), "{failed:?}");
}

#[test]
fn a_useless_receiver_costs_only_spans() {
    let absent = {
        let receiver = Receiver::start(Answering::Ok);
        // Nothing listens at port 9 of loopback.
        let mut absent = receiver;
        absent.address.set_port(9);
        absent
    };
    for receiver in [absent, Receiver::start(Answering::Failing), Receiver::start(Answering::Silent)] {
        let traced = Traced::new(&recording(&receiver), "").with_env(&[("OTEL_EXPORTER_OTLP_TIMEOUT", "300")]);
        let (satellite, mut client) = traced.run();
        client.initialize();
        for nth in 0..20 {
            let text = format!("call {nth}");
            assert_eq!(client.call("echo", &json!({"text": text}))["result"]["structuredContent"]["text"], *text);
        }
        wait_until("the dropped spans", || traced.sample("satellite_spans_total{result=\"export_failed\"}") >= 40.0);
        assert!(traced.sample("satellite_spans_total{result=\"exported\"}") < 1.0);
        let warned = |line: &Value| line["message"] == "cannot export telemetry" && line["reason"].is_string();
        assert!(satellite.log().iter().any(warned), "{:?}", satellite.log());
    }
}

/// Calls that put a secret into arguments, results and errors.
fn call_with_secrets(client: &mut Client, secret: &str) {
    client.call("echo", &json!({"text": secret}));
    client.call("env", &json!({"name": "PLANTED"}));
    client.call("fail", &json!({"message": secret}));
    client.call("tool_error", &json!({"message": format!("{}{secret}", "x".repeat(240))}));
    client.request("resources/read", &json!({"uri": format!("file:///{secret}/{}", "y".repeat(250))}));
}

#[test]
fn no_secret_is_exported() {
    let receiver = Receiver::start(Answering::Ok);
    let telemetry = format!("{}\npayloads = true", recording(&receiver));
    let secret = "planted-sekrit-8731";
    let key = "key-of-the-receiver-5521";
    let headers = format!("authorization=Bearer%20{key}");
    let mut traced = Traced::new(&telemetry, "").with_env(&[
        ("PLANTED_VALUE", secret),
        ("OTEL_EXPORTER_OTLP_HEADERS", &headers),
        ("OTEL_METRIC_EXPORT_INTERVAL", "200"),
        ("RUST_LOG", "trace"),
    ]);
    traced.append("[teams.installations.env]\nPLANTED = \"env:PLANTED_VALUE\"\n");
    let (satellite, mut client) = traced.run();
    client.initialize();
    call_with_secrets(&mut client, secret);
    let all = |spans: &[Span]| {
        let tools = ["echo", "env", "fail", "tool_error"];
        tools.iter().all(|tool| pair(spans, tool).is_some())
            && spans.iter().filter(|span| span.name == "resources/read").count() == 2
    };
    let spans = receiver.wait_spans("the spans", all);
    check_spans(&spans);
    let (server, client_span) = pair(&spans, "echo").unwrap();
    for span in [server, client_span] {
        let of = |name| attribute(&span.attributes, name).unwrap();
        assert!(of("gen_ai.tool.call.arguments").contains("text"), "{span:?}");
        assert!(of("gen_ai.tool.call.result").contains("content"), "{span:?}");
    }
    wait_until("the metrics", || !receiver.metrics().is_empty());
    // Fragments of a secret at a cut must not remain, either.
    for fragment in [secret, &secret[..12]] {
        for received in receiver.received() {
            let text = String::from_utf8_lossy(&received.body).into_owned();
            assert!(!text.contains(fragment), "exported to {}: {text}", received.path);
        }
        assert!(!traced.scrape().contains(fragment));
    }
    // The key reaches the receiver and nothing else.
    assert!(receiver.received().iter().all(|received| received.head.contains(key)));
    for text in [traced.scrape(), satellite.process.stderr()] {
        assert!(!text.contains(key), "{text}");
    }
    for pid in traced.home.processes() {
        assert!(!has_in_environment(pid, key), "{pid}");
    }
}

#[test]
fn payloads_are_exported_on_request_only() {
    let receiver = Receiver::start(Answering::Ok);
    let traced = Traced::new(&recording(&receiver), "");
    let (_satellite, mut client) = traced.run();
    client.initialize();
    client.call("echo", &json!({"text": "private-text"}));
    receiver.wait_spans("the spans", has_pair("echo"));
    for received in receiver.received() {
        assert!(!String::from_utf8_lossy(&received.body).contains("private-text"));
    }
}

#[test]
fn servers_do_not_receive_the_variables_of_the_receiver() {
    let names = ["OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_ENDPOINT"];
    let traced = Traced::new("", "").with_env(&names.map(|name| (name, "http://127.0.0.1:9")));
    // The variables that a server inherits from the satellite are unaffected.
    let (_satellite, _client) = traced.run();
    let processes = traced.home.processes();
    assert!(!processes.is_empty());
    for pid in processes {
        assert!(has_in_environment(pid, "PATH="), "{pid}");
        assert!(!has_in_environment(pid, "OTEL_EXPORTER_OTLP"), "{pid}");
    }
}

#[test]
fn the_last_spans_are_exported_at_the_end() {
    let receiver = Receiver::start(Answering::Ok);
    let traced = Traced::new(&recording(&receiver), "");
    let (satellite, mut client) = traced.run();
    client.initialize();
    client.call("echo", &json!({"text": "a"}));
    traced.home.satellite(&["down"]).exits(0);
    satellite.ended();
    assert!(pair(&receiver.spans(), "echo").is_some(), "{:#?}", receiver.spans());
}
