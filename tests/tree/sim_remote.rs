//! The simulated remote server, driven by hand-written messages over its line, with a paused clock.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mcp_satellite::connect::sim::{SimConnector, SimRemote, SimScript, SimSessionCounts};
use mcp_satellite_actors::model::failure::{ExchangeFailure, FailureKind};
use mcp_satellite_actors::model::ids::RunNumber;
use mcp_satellite_actors::model::spec::{InstanceSpec, RemoteTransport};
use mcp_satellite_actors::seam::{LineConnector, LineEvent, LineOutput, ServerLine};
use serde_json::{Value, json};
use testkit::spec::remote;
use tokio::time::{Instant, sleep, timeout};

const SECOND: Duration = Duration::from_secs(1);

/// Longer than any step of a test. With the paused clock it takes no time.
const LONG: Duration = Duration::from_secs(24 * 3600);

const UNAUTHORIZED: FailureKind = FailureKind::Unauthorized { challenge: None };
const EXPIRED: FailureKind = FailureKind::session_expired(404);

fn spec() -> InstanceSpec {
    InstanceSpec {
        headers: BTreeMap::from([("Authorization".to_owned(), "Bearer old".into())]),
        ..testkit::spec::spec(remote(RemoteTransport::Http, "http://files.example/mcp"))
    }
}

fn sse() -> InstanceSpec {
    InstanceSpec { target: remote(RemoteTransport::Sse, "http://files.example/sse"), ..spec() }
}

fn request(id: u64, method: &str, params: &Value) -> LineOutput {
    let body = json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).to_string().into();
    LineOutput::Request { id, body, header_timeout: None, routing: None }
}

fn initialize(id: u64) -> LineOutput {
    request(id, "initialize", &json!({"protocolVersion": "2025-11-25"}))
}

fn call(id: u64, tool: &str, arguments: &Value) -> LineOutput {
    request(id, "tools/call", &json!({"name": tool, "arguments": arguments}))
}

fn notification(method: &str) -> Bytes {
    json!({"jsonrpc": "2.0", "method": method}).to_string().into()
}

fn initialized() -> LineOutput {
    LineOutput::Initialized { version: "2025-11-25".to_owned(), body: notification("notifications/initialized") }
}

struct Client {
    line: Box<dyn ServerLine>,
    remote: SimRemote,
    connector: SimConnector,
}

impl Client {
    fn dial(connector: &SimConnector, spec: InstanceSpec, run: u64) -> Self {
        let remote = connector.remote(&spec.id);
        Self { line: connector.dial(&Arc::new(spec), RunNumber(run)), remote, connector: connector.clone() }
    }

    fn with_script(script: SimScript) -> Self {
        Self::dial(&SimConnector::new(script), spec(), 1)
    }

    async fn ready(script: SimScript) -> Self {
        let mut client = Self::with_script(script);
        client.handshake().await;
        client
    }

    async fn handshake(&mut self) -> Value {
        let answer = self.result(initialize(1)).await;
        self.line.send(initialized());
        answer
    }

    async fn next(&mut self) -> LineEvent {
        timeout(LONG, poll_fn(|cx| self.line.poll_next(cx))).await.unwrap()
    }

    async fn is_silent(&mut self) -> bool {
        timeout(LONG, poll_fn(|cx| self.line.poll_next(cx))).await.is_err()
    }

    async fn message(&mut self) -> Value {
        match self.next().await {
            LineEvent::Message { message, .. } => serde_json::from_slice(&message).unwrap(),
            other => panic!("expected a message, not {other:?}"),
        }
    }

    async fn result(&mut self, message: LineOutput) -> Value {
        self.line.send(message);
        self.message().await
    }

    async fn failure(&mut self, message: LineOutput) -> ExchangeFailure {
        self.line.send(message);
        match self.next().await {
            LineEvent::Failed { failure, .. } => failure,
            other => panic!("expected a failure, not {other:?}"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_history_contains_each_step_of_a_session_with_its_time() {
    let mut client = Client::with_script(SimScript::default());
    let began = Instant::now();
    assert_eq!(client.handshake().await["result"]["serverInfo"]["name"], "sim-server");
    sleep(SECOND).await;
    assert_eq!(client.result(call(2, "add", &json!({"a": 1, "b": 2}))).await["result"]["content"][0]["text"], "3");
    client.line.send(LineOutput::Close);
    assert!(matches!(client.next().await, LineEvent::Closed));
    let remote = &client.remote;
    assert_eq!(remote.sessions(), SimSessionCounts { opened: 1, closed: 1, ..SimSessionCounts::default() });
    let attempt = &remote.attempts()[0];
    assert_eq!((attempt.run, attempt.began, attempt.ended), (RunNumber(1), began, Some(began)));
    assert!(attempt.succeeded);
    assert_eq!(remote.served_at("tools/call add"), [began + SECOND]);
    assert_eq!(remote.served_at("notifications/initialized"), [began]);
    assert_eq!((remote.received_at("DELETE").len(), remote.tried_at("tools/call").len()), (1, 1));
    assert_eq!(client.connector.line_count(), 1);
    let Client { line, connector, .. } = client;
    drop(line);
    assert_eq!(connector.line_count(), 0);
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_that_is_down_fails_each_attempt_with_the_given_failure() {
    let mut client = Client::with_script(SimScript::default());
    let timed_out = FailureKind::ConnectTimeout(10 * SECOND);
    let table = [
        (FailureKind::Refused, 0, false),
        (FailureKind::Dns, 0, false),
        (timed_out, 10, false),
        (FailureKind::Tls("unknown issuer".to_owned()), 0, false),
        (FailureKind::Broken("reset".to_owned()), 0, true),
        (FailureKind::ServerError { status: 502, retry_after: None }, 0, true),
    ];
    for (kind, after, sent) in table {
        let began = Instant::now();
        client.remote.take_down(kind.clone());
        assert_eq!(client.failure(initialize(1)).await, ExchangeFailure { kind, sent, answering: false });
        assert_eq!(began.elapsed().as_secs(), after);
    }
    client.remote.bring_up();
    client.handshake().await;
    let succeeded: Vec<bool> = client.remote.attempts().iter().map(|attempt| attempt.succeeded).collect();
    assert_eq!(succeeded, [false, false, false, false, false, false, true]);
    assert_eq!(client.remote.received_at("initialize").len(), 3, "not three received handshakes, two of which failed");
    assert_eq!(client.remote.served_at("initialize").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_slow_connection_delays_its_first_exchange_or_times_out() {
    let mut client = Client::with_script(SimScript { handshake_delay: SECOND, ..SimScript::default() });
    client.remote.change(|behavior| (behavior.connect_delay, behavior.delay) = (2 * SECOND, SECOND));
    let began = Instant::now();
    client.handshake().await;
    assert_eq!(began.elapsed(), 4 * SECOND);
    client.result(call(2, "echo", &json!({"text": 1}))).await;
    assert_eq!(began.elapsed(), 5 * SECOND, "not one delay without a new connection");

    client.remote.change(|behavior| behavior.connect_delay = 30 * SECOND);
    let mut late = Client::dial(&client.connector, spec(), 2);
    let kind = FailureKind::ConnectTimeout(10 * SECOND);
    assert_eq!(late.failure(initialize(1)).await, ExchangeFailure::unsent(kind));
    assert_eq!(began.elapsed(), 15 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn the_delays_depend_only_on_the_seed() {
    let takes = async |seed| {
        let connector = SimConnector::new(SimScript::default());
        connector.remote(&spec().id).change(|behavior| {
            (behavior.delay, behavior.jitter, behavior.seed) = (SECOND, 0.5, seed);
        });
        let began = Instant::now();
        Client::dial(&connector, spec(), 1).result(initialize(1)).await;
        began.elapsed()
    };
    let first = takes(1).await;
    assert_eq!(first, takes(1).await);
    assert_ne!(first, takes(2).await);
    assert!((SECOND / 2..=3 * SECOND / 2).contains(&first), "{first:?}");
}

#[tokio::test(start_paused = true)]
async fn requests_of_a_forgotten_session_fail_until_a_new_handshake() {
    let mut client = Client::ready(SimScript::default()).await;
    client.remote.expire(404);
    assert_eq!(client.failure(call(2, "echo", &json!({}))).await, ExchangeFailure::sent(EXPIRED));
    client.line.send(LineOutput::Notification { body: notification("notifications/cancelled") });
    assert!(matches!(client.next().await, LineEvent::Lost(ExchangeFailure { kind: EXPIRED, .. })));
    client.remote.expire(400);
    let kind = FailureKind::session_expired(400);
    assert_eq!(client.failure(call(3, "echo", &json!({}))).await, ExchangeFailure::sent(kind));
    assert!(client.remote.served_at("tools/call").is_empty());
    let mut again = Client::dial(&client.connector, spec(), 2);
    again.handshake().await;
    assert!(again.result(call(2, "echo", &json!({}))).await["result"].is_object());
    drop(again);
    assert_eq!(
        client.remote.sessions(),
        SimSessionCounts { opened: 2, forgotten: 1, dropped: 1, ..SimSessionCounts::default() }
    );
}

#[tokio::test(start_paused = true)]
async fn a_killed_server_cuts_its_responses_and_forgets_its_sessions() {
    let mut client = Client::ready(SimScript::default()).await;
    client.line.send(call(2, "sleep", &json!({"ms": 5000})));
    assert!(timeout(SECOND, client.next()).await.is_err());
    client.remote.kill(FailureKind::Refused);
    let LineEvent::Failed { id: 2, failure } = client.next().await else { panic!("not a failure of request 2") };
    assert_eq!(failure, ExchangeFailure::sent(FailureKind::Cut));
    assert_eq!(client.remote.served_at("tools/call sleep").len(), 1);
    assert_eq!(client.failure(call(3, "echo", &json!({}))).await, ExchangeFailure::unsent(FailureKind::Refused));
    client.line.send(LineOutput::Close);
    assert!(matches!(client.next().await, LineEvent::Closed), "no close after the server was killed");
    client.remote.bring_up();
    assert_eq!(client.failure(call(4, "echo", &json!({}))).await, ExchangeFailure::sent(EXPIRED));
}

#[tokio::test(start_paused = true)]
async fn only_the_older_transport_loses_its_session_with_its_stream() {
    for (spec, is_lost) in [(spec(), false), (sse(), true)] {
        let mut client = Client::dial(&SimConnector::new(SimScript::default()), spec, 1);
        client.handshake().await;
        client.remote.cut();
        assert_eq!(timeout(SECOND, client.next()).await.is_ok(), is_lost);
        client.remote.report_session_lost(FailureKind::Broken("reset".to_owned()));
        assert!(matches!(
            client.next().await,
            LineEvent::Lost(ExchangeFailure { kind: FailureKind::Broken(_), sent: true, .. })
        ));
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_accepts_only_the_required_credentials_also_within_a_session() {
    let mut client = Client::ready(SimScript::default()).await;
    client.remote.change(|behavior| behavior.required_header = Some(("authorization".to_owned(), "Bearer new".into())));
    assert_eq!(client.failure(call(2, "echo", &json!({}))).await, ExchangeFailure::sent(UNAUTHORIZED));
    let forbidden = FailureKind::Forbidden { challenge: Some("Bearer".to_owned()) };
    client.remote.change(|behavior| behavior.refusal = Some(forbidden.clone()));
    assert_eq!(client.failure(initialize(3)).await, ExchangeFailure::sent(forbidden.clone()));
    assert_eq!(client.failure(LineOutput::Probe { id: 4 }).await, ExchangeFailure::sent(forbidden));
    let headers = BTreeMap::from([("Authorization".to_owned(), "Bearer new".into())]);
    client.line.send(LineOutput::Credentials(Arc::new(InstanceSpec { headers, ..spec() })));
    assert!(client.result(call(5, "echo", &json!({}))).await["result"].is_object(), "the session was lost");
}

#[tokio::test(start_paused = true)]
async fn fail_next_fails_exactly_the_next_requests() {
    let mut client = Client::ready(SimScript::default()).await;
    let throttled = FailureKind::Throttled { retry_after: Some(7 * SECOND) };
    client.remote.fail_next([throttled.clone(), FailureKind::Refused]);
    client.line.send(LineOutput::Notification { body: notification("notifications/cancelled") });
    assert_eq!(client.failure(call(2, "echo", &json!({}))).await, ExchangeFailure::sent(throttled));
    assert_eq!(client.failure(call(3, "echo", &json!({}))).await, ExchangeFailure::unsent(FailureKind::Refused));
    client.result(call(4, "echo", &json!({}))).await;
    let count = |method: fn(&SimRemote, &str) -> Vec<Instant>| method(&client.remote, "tools/call echo").len();
    assert_eq!((count(SimRemote::tried_at), count(SimRemote::received_at), count(SimRemote::served_at)), (3, 2, 1));
}

#[tokio::test(start_paused = true)]
async fn a_health_check_succeeds_fails_or_hangs_as_configured() {
    let mut client = Client::ready(SimScript::default()).await;
    assert_eq!(client.result(request(2, "ping", &json!({}))).await["result"], json!({}));
    client.remote.change(|behavior| behavior.unknown_methods = ["ping"].into());
    assert_eq!(client.result(request(3, "ping", &json!({}))).await["error"]["code"], -32601);
    client.remote.change(|behavior| behavior.silent_on = ["ping", "GET"].into());
    client.line.send(request(4, "ping", &json!({})));
    client.line.send(LineOutput::Probe { id: 5 });
    assert!(client.is_silent().await);
    client.line.send(LineOutput::Abandon { id: 4 });
    client.line.send(LineOutput::Abandon { id: 5 });
    client.remote.change(|behavior| behavior.silent_on.clear());
    client.line.send(LineOutput::Probe { id: 6 });
    assert!(matches!(client.next().await, LineEvent::Probed { id: 6 }));
    client.remote.change(|behavior| behavior.health_failure = Some(FailureKind::from_status(503)));
    assert_eq!(client.failure(LineOutput::Probe { id: 7 }).await, ExchangeFailure::sent(FailureKind::from_status(503)));
    assert_eq!((client.remote.received_at("ping").len(), client.remote.received_at("GET").len()), (3, 3));
}

#[tokio::test(start_paused = true)]
async fn a_hanging_request_fails_at_its_header_timeout_unless_it_is_abandoned() {
    let mut client = Client::with_script(SimScript::default());
    client.remote.change(|behavior| behavior.silent_on = ["*"].into());
    let began = Instant::now();
    let LineOutput::Request { id, body, .. } = initialize(1) else { unreachable!() };
    let kind = FailureKind::HeaderTimeout(3 * SECOND);
    let handshake = LineOutput::Request { id, body, header_timeout: Some(3 * SECOND), routing: None };
    assert_eq!(client.failure(handshake).await, ExchangeFailure::sent(kind));
    assert_eq!(began.elapsed(), 3 * SECOND);

    client.remote.change(|behavior| behavior.silent_on.clear());
    client.handshake().await;
    client.line.send(call(2, "sleep", &json!({"ms": 1000})));
    client.line.send(LineOutput::Abandon { id: 2 });
    assert!(client.is_silent().await);
    client.remote.change(|behavior| behavior.silent_on = ["DELETE"].into());
    let began = Instant::now();
    client.line.send(LineOutput::Close);
    assert!(matches!(client.next().await, LineEvent::Closed));
    assert_eq!(began.elapsed(), 2 * SECOND, "not the close_timeout of the policy");
    assert_eq!(client.remote.sessions().closed, 0);
}

#[tokio::test(start_paused = true)]
async fn a_server_sends_notifications_and_lists_other_tools_in_new_sessions() {
    let mut client = Client::ready(SimScript::default()).await;
    client.remote.say(notification("notifications/tools/list_changed"));
    assert_eq!(client.message().await["method"], "notifications/tools/list_changed");
    client.remote.change(|behavior| behavior.script = Some(SimScript { tools: 5, ..SimScript::default() }.into()));
    let count = |list: &Value| list["result"]["tools"].as_array().unwrap().len();
    assert_eq!(
        count(&client.result(request(2, "tools/list", &json!({}))).await),
        3,
        "the open session has other tools"
    );
    let mut again = Client::dial(&client.connector, spec(), 2);
    again.handshake().await;
    assert_eq!(count(&again.result(request(2, "tools/list", &json!({}))).await), 5);
}

#[tokio::test(start_paused = true)]
async fn a_server_lists_resources_templates_and_prompts_if_it_has_them() {
    let script = SimScript { resources: 3, resource_templates: 1, prompts: 2, page_size: 2, ..SimScript::default() };
    let mut client = Client::with_script(script);
    let capabilities = client.handshake().await["result"]["capabilities"].clone();
    let changes = json!({"listChanged": true});
    assert_eq!(capabilities, json!({"tools": changes, "resources": changes, "prompts": changes}));
    let first = client.result(request(2, "resources/list", &json!({}))).await["result"].clone();
    assert_eq!(first["resources"][1]["uri"], "sim://resource/2");
    let rest = client.result(request(3, "resources/list", &json!({"cursor": first["nextCursor"]}))).await;
    assert_eq!(rest["result"], json!({"resources": [{"uri": "sim://resource/3", "name": "Resource 3"}]}));
    let templates = client.result(request(4, "resources/templates/list", &json!({}))).await["result"].clone();
    assert_eq!(templates["resourceTemplates"][0]["uriTemplate"], "sim://template/1/{name}");
    let prompts = client.result(request(5, "prompts/list", &json!({}))).await["result"].clone();
    assert_eq!(prompts, json!({"prompts": [{"name": "prompt_1"}, {"name": "prompt_2"}]}));

    let mut plain = Client::with_script(SimScript { no_tools_capability: true, ..SimScript::default() });
    assert_eq!(plain.handshake().await["result"]["capabilities"], json!({}));
    for method in ["tools/list", "resources/list", "resources/templates/list", "prompts/list"] {
        assert_eq!(plain.result(request(2, method, &json!({}))).await["error"]["code"], -32601, "{method}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_its_script_ends_forgets_its_sessions() {
    let mut client = Client::ready(SimScript::default()).await;
    assert_eq!(client.failure(call(2, "crash", &json!({}))).await, ExchangeFailure::sent(FailureKind::Cut));
    assert_eq!(client.failure(call(3, "echo", &json!({}))).await, ExchangeFailure::sent(EXPIRED));
    assert_eq!(client.remote.sessions(), SimSessionCounts { opened: 1, forgotten: 1, ..SimSessionCounts::default() });
}

#[tokio::test(start_paused = true)]
async fn concurrent_handshakes_are_counted_as_overlaps() {
    let connector = SimConnector::new(SimScript { handshake_delay: SECOND, ..SimScript::default() });
    let mut one = Client::dial(&connector, spec(), 1);
    assert_eq!(connector.overlaps(), 0);
    let mut other = Client::dial(&connector, spec(), 2);
    assert_eq!(connector.overlaps(), 1, "no overlap of two open lines");
    one.line.send(initialize(1));
    one.message().await;
    assert_eq!((one.remote.overlaps(), connector.handshakes_max()), (0, 1));
    one.line.send(initialize(2));
    other.line.send(initialize(1));
    assert_eq!((one.remote.overlaps(), connector.handshakes_max()), (1, 2));
    drop(one.line);
    other.message().await;
    let attempts = other.remote.attempts();
    assert!(attempts.iter().all(|attempt| attempt.ended.is_some()), "an attempt of a dropped client has no end");
}

#[tokio::test(start_paused = true)]
async fn a_connector_without_history_keeps_only_the_current_attempt() {
    let connector = SimConnector::new(SimScript::default()).without_history();
    let mut client = Client::dial(&connector, spec(), 1);
    for _ in 0..3 {
        client.handshake().await;
    }
    assert_eq!(client.remote.attempts().len(), 1);
    assert_eq!(client.remote.sessions().opened, 3);
    assert!(client.remote.tried_at("initialize").is_empty());
}
