//! Every misbehaviour at every moment: the status of the instance, the requests at the peer, the result of the caller,
//! and the events.
//!
//! The next scheduled attempt is half an hour away, so that nothing changes after the failure while the test looks at
//! the state. Then the peer behaves again, and a call or new credentials reconnect the instance.

use std::time::Duration;

use futures::{StreamExt, stream};
use mcp_satellite_actors::model::exit::{CallError, CallFate};
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::status::Status;
use serde_json::Value;

use super::peer::{Action, Expiry, Peer, PeerLog, Record, ResponseFormat, When};
use super::support::{Fleet, Instance, Remote};

/// The timeout of the cases that wait for one.
const SHORT: Duration = Duration::from_millis(300);

/// The maximum length of a message, in bytes.
const LONGEST: usize = 64 * 1024;

/// The number of rows that run at once.
const AT_ONCE: usize = 8;

/// A misbehaviour.
#[derive(Clone, Copy)]
enum Fault {
    /// The peer performs this action on a request.
    Action(fn() -> Action),
    /// The peer is closed.
    Closed,
    /// The backlog of the peer is full.
    Full,
    /// The peer has forgotten its sessions and rejects requests this way.
    Forgotten(Expiry),
    /// The name of the host cannot be resolved.
    Nowhere,
    /// The certificate of the peer is self-signed.
    SelfSigned,
    /// The client uses TLS and the peer does not.
    PlainText,
}

/// The moment of the misbehaviour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    /// The first connect.
    Connect,
    /// A call of a tool with side effects over an open connection.
    Call,
    /// A call of a read-only tool over an open connection.
    Read,
}

impl Moment {
    fn tool(self) -> Option<&'static str> {
        match self {
            Self::Connect => None,
            Self::Call => Some("echo"),
            Self::Read => Some("read"),
        }
    }
}

/// One misbehaviour and the status that it leads to.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    fault: Fault,
    /// Whether the transport is HTTP+SSE.
    legacy: bool,
    /// Whether only the first matching request is affected.
    once: bool,
    /// Whether the peer uses sessions.
    sessions: bool,
    /// The changes of the instance's policy.
    policy: Option<fn(&mut Policy)>,
    /// The deadline of the caller.
    deadline: Option<Duration>,
    connect: Option<Status>,
    call: Option<Status>,
    read: Option<Status>,
}

impl Case {
    /// Leads to this status at every moment.
    fn new(name: &'static str, fault: Fault, status: Status) -> Self {
        let all = Some(status);
        let (policy, deadline) = (None, None);
        Self {
            name,
            fault,
            legacy: false,
            once: false,
            sessions: true,
            policy,
            deadline,
            connect: all,
            call: all,
            read: all,
        }
    }

    fn action(name: &'static str, action: fn() -> Action, status: Status) -> Self {
        Self::new(name, Fault::Action(action), status)
    }

    fn legacy(self) -> Self {
        Self { legacy: true, ..self }
    }

    fn once(self) -> Self {
        Self { once: true, ..self }
    }

    fn sessionless(self) -> Self {
        Self { sessions: false, ..self }
    }

    fn policy(self, policy: fn(&mut Policy)) -> Self {
        Self { policy: Some(policy), ..self }
    }

    fn at_connect_only(self) -> Self {
        Self { call: None, read: None, ..self }
    }

    fn in_calls_only(self) -> Self {
        Self { connect: None, ..self }
    }

    /// Leads to another status in a call.
    fn in_calls(self, status: Status) -> Self {
        Self { call: Some(status), read: Some(status), ..self }
    }

    /// Leads to another status in a call of a read-only tool, which is repeated.
    fn in_reads(self, status: Status) -> Self {
        Self { read: Some(status), ..self }
    }

    /// The call reaches the deadline of its caller.
    fn until_deadline(self) -> Self {
        Self { deadline: Some(SHORT), ..self.in_calls_only() }
    }

    fn status(&self, moment: Moment) -> Option<Status> {
        match moment {
            Moment::Connect => self.connect,
            Moment::Call => self.call,
            Moment::Read => self.read,
        }
    }
}

/// Returns all cases.
fn cases() -> Vec<Case> {
    use Status::{Error, Offline, Online, RequiresReauth};
    let action = Case::action;
    let in_time = |policy: &mut Policy| policy.remote.header_timeout = SHORT;
    vec![
        // No connection to the server.
        Case::new("refused", Fault::Closed, Offline),
        Case::new("its name is not known", Fault::Nowhere, Offline).at_connect_only(),
        Case::new("no connection in time", Fault::Full, Offline).policy(|policy| policy.remote.connect_timeout = SHORT),
        Case::new("a certificate of nobody", Fault::SelfSigned, Offline).at_connect_only(),
        Case::new("no TLS where it is expected", Fault::PlainText, Offline).at_connect_only(),
        action("the connection is closed without an answer", || Action::HangUp, Offline),
        action("the server dies with the request in hand", || Action::Die, Offline),
        // A connection without a complete response.
        action("no answer begins", || Action::Silence, Offline).policy(in_time).at_connect_only(),
        action("no answer begins, over HTTP+SSE", || Action::Silence, Offline)
            .legacy()
            .policy(in_time)
            .at_connect_only(),
        action("half open", || Action::Freeze, Offline).policy(in_time).at_connect_only(),
        action("no answer before the deadline", || Action::Silence, Online).until_deadline(),
        action("half open until the deadline", || Action::Freeze, Online).until_deadline(),
        action("comments for ever", || Action::DripForever { pause: Duration::from_millis(5) }, Offline)
            .policy(|policy| policy.session.handshake_timeout = SHORT)
            .at_connect_only(),
        action("comments until the deadline", || Action::DripForever { pause: Duration::from_millis(5) }, Online)
            .until_deadline(),
        action(
            "no endpoint is named, over HTTP+SSE",
            || Action::DripForever { pause: Duration::from_millis(5) },
            Offline,
        )
        .legacy()
        .policy(in_time)
        .at_connect_only(),
        action("the right answer, slowly", || Action::Drip { pause: Duration::from_micros(200) }, Online),
        action("an answer cut off (JSON)", || Action::Cut(ResponseFormat::Json), Offline),
        action("an answer cut off (SSE)", || Action::Cut(ResponseFormat::Sse), Offline),
        action("a connection closed once without an answer", || Action::HangUp, Offline)
            .once()
            .in_calls_only()
            .in_reads(Online),
        action("the stream ends before the answer, over HTTP+SSE", || Action::EndStreams, Offline)
            .legacy()
            .once()
            .in_calls_only()
            .in_reads(Online),
        action("the connection is closed without an answer, over HTTP+SSE", || Action::HangUp, Offline).legacy(),
        // Invalid responses.
        action("garbage in a stream", || Action::GarbageSse, Offline),
        action("garbage in a stream, over HTTP+SSE", || Action::GarbageSse, Offline).legacy().at_connect_only(),
        action("a page", Action::html, Error),
        action("a page, over HTTP+SSE", Action::html, Error).legacy().at_connect_only(),
        action("JSON that is none", || json_body("{not json"), Error),
        action("an answer to something else", || json_body(r#"{"jsonrpc":"2.0","id":4711,"result":{}}"#), Error),
        action("success and nothing in it", || Action::status(200), Error),
        action("accepted, and that is all", || Action::status(202), Error),
        action("an endless line (JSON)", || Action::EndlessLine(ResponseFormat::Json), Error),
        action("an endless line (SSE)", || Action::EndlessLine(ResponseFormat::Sse), Error),
        action("an endless line, over HTTP+SSE", || Action::EndlessLine(ResponseFormat::Sse), Error)
            .legacy()
            .at_connect_only(),
        action(
            "an endpoint elsewhere, over HTTP+SSE",
            || Action::Endpoint("http://localhost:1/message".to_owned()),
            Error,
        )
        .legacy()
        .at_connect_only(),
        // HTTP statuses.
        action("302", || Action::status_with(302, "location", "/elsewhere?key=value"), Error),
        action(
            "302 to another origin",
            || Action::status_with(302, "location", "https://u:p@elsewhere.invalid/?k=v"),
            Error,
        ),
        action("401 without a challenge", || Action::status(401), RequiresReauth),
        action(
            "401 with a challenge",
            || Action::status_with(401, "www-authenticate", "Bearer realm=\"r\""),
            RequiresReauth,
        ),
        action("403 without a challenge", || Action::status(403), RequiresReauth),
        action(
            "403 with a challenge",
            || Action::status_with(403, "www-authenticate", "Bearer error=\"e\""),
            RequiresReauth,
        ),
        action("401, over HTTP+SSE", || Action::status(401), RequiresReauth).legacy(),
        action("400", || Action::status(400), Error).in_calls(Online),
        action("400 without a session", || Action::status(400), Error).sessionless().in_calls(Online),
        action("400, over HTTP+SSE", || Action::status(400), Error).legacy().in_calls(Online),
        action("400 with an error about something else", error_about_something_else, Error).once().in_calls(Online),
        action("404 without a session", || Action::status(404), Error).sessionless(),
        action("404, over HTTP+SSE", || Action::status(404), Error).legacy().at_connect_only(),
        Case::new("404 with a session, over HTTP+SSE", Fault::Forgotten(Expiry::NotFound), Online)
            .legacy()
            .in_calls_only(),
        Case::new("404 with a session", Fault::Forgotten(Expiry::NotFound), Online).in_calls_only(),
        Case::new("400 about a session", Fault::Forgotten(Expiry::BadRequest), Online).in_calls_only(),
        Case::new("400 to everything in a session", Fault::Forgotten(Expiry::EmptyBadRequest), Offline).in_calls_only(),
        action("413", || Action::status(413), Error).in_calls(Online),
        action("413, over HTTP+SSE", || Action::status(413), Error).legacy().in_calls(Online),
        action("429", || Action::status(429), Error).in_calls(Online),
        action("429 with Retry-After", || Action::status_with(429, "retry-after", "3600"), Error).in_calls(Online),
        action("500", || Action::status(500), Error).in_calls(Online),
        action("502", || Action::status(502), Error).in_calls(Online),
        action("500, over HTTP+SSE", || Action::status(500), Error).legacy().in_calls(Online),
        action("503 with Retry-After", || Action::status_with(503, "retry-after", "3600"), Error).in_calls(Online),
        action("5xx once too often", || Action::status(503), Error)
            .policy(|policy| policy.remote.server_errors_max = 1)
            .in_calls_only(),
        // JSON-RPC errors over a working connection.
        action("a JSON-RPC error", || Action::RpcError { code: -32000, message: "not today" }, Online).in_calls_only(),
        action("a handshake that is refused", || Action::RpcError { code: -32000, message: "not today" }, Error)
            .at_connect_only(),
    ]
}

/// Returns the response of the Python SDK to a request with an invalid session.
fn error_about_something_else() -> Action {
    let message = "Bad Request: No valid session ID provided";
    let error = serde_json::json!({"code": -32600, "message": message});
    let body = serde_json::json!({"jsonrpc": "2.0", "id": "server-error", "error": error});
    let headers = vec![("content-type", "application/json".to_owned())];
    Action::Respond { status: 400, headers, body: body.to_string() }
}

fn json_body(body: &str) -> Action {
    Action::Respond {
        status: 200,
        headers: vec![("content-type", "application/json".to_owned())],
        body: body.to_owned(),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_misbehaviour_at_every_moment_matches_the_table() {
    let fleet = Fleet::start().await;
    let moments = [Moment::Connect, Moment::Call, Moment::Read];
    let rows = cases().into_iter().flat_map(|case| moments.map(|moment| (case, moment)));
    let rows = rows.filter_map(|(case, moment)| Some((case, moment, case.status(moment)?)));
    let played: Vec<Row> = stream::iter(rows)
        .map(|(case, moment, status)| Box::pin(run_row(&fleet, case, moment, status)))
        .buffered(AT_ONCE)
        .collect()
        .await;
    let table: Vec<String> = played.iter().map(|played| played.text.clone()).collect();
    let peers: Vec<&Peer> = played.iter().map(|played| &played.peer).collect();
    for peer in &peers {
        // Half-open peers do not notice that a client disconnects.
        peer.thaw();
    }
    fleet.finish_with_overlaps(&peers).await;
    insta::assert_snapshot!(table.concat());
}

struct Row {
    text: String,
    peer: Peer,
}

async fn run_row(fleet: &Fleet, case: Case, moment: Moment, status: Status) -> Row {
    let peer = if let Fault::SelfSigned = case.fault { Peer::start_tls().await } else { Peer::start().await };
    // Without streams a failure is noticed by the call. `streams.rs` tests streams.
    peer.configure(|behavior| (behavior.streams, behavior.sessions) = (false, case.sessions));
    // A kept-alive connection could be found closed before or after a request is sent on it, which is a race.
    peer.configure(|behavior| behavior.keeps_alive = !matches!(case.fault, Fault::Closed | Fault::Full));
    let remote = remote(&case, &peer);
    let strict = case.policy.map_or(remote.clone(), |policy| remote.clone().policy(policy));
    let is_special = case.policy.is_some();

    let (instance, answer, requests_before, events_before) = match moment.tool() {
        None => {
            misbehave(&peer, &case, None).await;
            (fleet.install(strict).await, None, 0, 0)
        }
        Some(tool) => {
            let instance = fleet.online(strict).await;
            if !case.legacy {
                peer.until("a stream is requested", |log| log.http("GET") == 1).await;
            }
            misbehave(&peer, &case, Some(tool)).await;
            let (requests, events) = (peer.log(|log| log.requests.len()), instance.timeline().await.len());
            let answer = instance.call_within(case.deadline, tool).await;
            (instance, Some(answer), requests, events)
        }
    };
    let view = wait_for_status(&instance, status).await;
    let text = |text: &str| normalized(text, &peer, &instance);
    let head = match answer {
        None => format!("{}\n", case.name),
        Some(answer) => {
            format!("{}, in a call of {}\n", case.name, moment.tool().unwrap()) + &text(&call_line(&answer))
        }
    };
    let is = text(&status_line(&view));
    let arrived = peer.log(|log| requests_line(log, requests_before));
    let timeline = instance.timeline().await;
    let new_events = &timeline[events_before..];
    let events = if new_events.is_empty() { "nothing".to_owned() } else { new_events.join(", ") };
    let row = format!("\n{head}    is    {is}\n    came  {arrived}\n    told  {events}\n");
    assert_recovers(&peer, &case, &remote, &instance, &view, is_special).await;
    Row { text: row, peer }
}

fn remote(case: &Case, peer: &Peer) -> Remote {
    let remote = match (case.fault, case.legacy) {
        (Fault::Nowhere, _) => Remote::http("http://nowhere.invalid/mcp"),
        (Fault::PlainText, _) => Remote::http(peer.url().replace("http:", "https:")),
        (_, true) => Remote::sse(peer.sse_url()),
        (_, false) => Remote::http(peer.url()),
    };
    remote.policy(|policy| policy.session.line_max = LONGEST)
}

async fn misbehave(peer: &Peer, case: &Case, tool: Option<&'static str>) {
    match case.fault {
        Fault::Action(action) => {
            let when = match tool {
                Some(tool) => When::tool(tool),
                None if case.legacy => When::path("/sse"),
                None => When::rpc("initialize"),
            };
            if case.once {
                peer.on_next(1, when, action());
            } else {
                peer.on(when, action());
            }
        }
        Fault::Closed => peer.close().await,
        Fault::Full => peer.fill().await,
        Fault::Forgotten(expiry) => {
            peer.configure(|behavior| behavior.expiry = expiry);
            peer.forget_sessions();
        }
        Fault::Nowhere | Fault::SelfSigned | Fault::PlainText => {}
    }
}

async fn wait_for_status(instance: &Instance, status: Status) -> std::sync::Arc<InstanceView> {
    match status {
        Status::Online => instance.online().await,
        Status::RequiresReauth => instance.status(status).await,
        // The attempt of a call has ended once the next attempt is scheduled again.
        _ => instance.until(status.as_str(), |view| view.status == status && view.attempt.is_some()).await,
    }
}

/// Lets the peer behave and asserts that a call or new credentials reconnect the instance.
async fn assert_recovers(
    peer: &Peer,
    case: &Case,
    remote: &Remote,
    instance: &Instance,
    view: &InstanceView,
    is_special: bool,
) {
    if let Fault::Nowhere | Fault::SelfSigned | Fault::PlainText = case.fault {
        return;
    }
    let handshakes = peer.log(|log| log.rpc("initialize"));
    peer.heal().await;
    if is_special {
        // The short timeouts of the case may be too short for a loaded machine.
        instance.update(remote).await;
        instance.until("connected with the new policy", |view| view.spec.policy == remote.spec().policy).await;
    }
    match view.status {
        // The call reconnects the instance.
        Status::Offline | Status::Error => instance.assert_callable().await,
        // No attempt is made until the credentials change.
        Status::RequiresReauth => {
            let refused = instance.call("echo").await;
            assert!(matches!(refused, Err(CallError::Refused { status: Status::RequiresReauth, .. })), "{refused:?}");
            assert_eq!(peer.log(|log| log.rpc("initialize")), handshakes, "{}: another attempt was made", case.name);
            instance.update(&remote.clone().header("authorization", "Bearer another")).await;
        }
        // The connection still works.
        _ => {
            instance.assert_callable().await;
            let now = peer.log(|log| log.rpc("initialize"));
            assert!(is_special || now == handshakes, "{}: the instance was connected again", case.name);
        }
    }
    instance.online().await;
}

fn call_line(answer: &Result<Value, CallError>) -> String {
    match answer {
        Ok(result) => format!("    got   {}\n", result["content"][0]["text"]),
        Err(error) => {
            let fate = error.fate().map_or("answered", fate_name);
            format!("    got   {} ({fate}): {error}\n", error.kind())
        }
    }
}

fn fate_name(fate: CallFate) -> &'static str {
    match fate {
        CallFate::NotSent => "not_sent",
        CallFate::MaybeExecuted => "maybe_executed",
        CallFate::TimedOut => "timed_out",
    }
}

fn status_line(view: &InstanceView) -> String {
    let connection = view.connection.map_or("none", |connection| connection.as_str());
    let message = view.message.as_ref().map_or(String::new(), |message| format!(": {message}"));
    let attempt = view.attempt.map_or(String::new(), |attempt| format!(" [attempt {attempt} is next]"));
    format!("{}, {connection}{message}{attempt}", view.status)
}

/// Describes the handshakes and calls that the peer has received since, in order, with the number of repetitions.
/// Lists are omitted: their order varies.
fn requests_line(log: &PeerLog, since: usize) -> String {
    let counts =
        |record: &&Record| matches!(record.rpc.as_deref(), Some("initialize" | "tools/call")) || is_opening(record);
    let mut groups: Vec<(String, usize)> = Vec::new();
    for record in log.requests[since..].iter().filter(counts) {
        match groups.last_mut() {
            Some((last, times)) if *last == record.label() => *times += 1,
            _ => groups.push((record.label(), 1)),
        }
    }
    let named = groups.into_iter().map(|(what, times)| if times == 1 { what } else { format!("{what} ×{times}") });
    let named: Vec<String> = named.collect();
    if named.is_empty() { "nothing".to_owned() } else { named.join(", ") }
}

fn is_opening(record: &Record) -> bool {
    record.http == "GET" && record.path == "/sse"
}

/// Replaces the parts of a text that differ between runs and machines.
fn normalized(text: &str, peer: &Peer, instance: &Instance) -> String {
    let text = text.replace(&peer.origin(), "http://PEER");
    let text = text.replace(&*instance.view().spec.name, "NAME");
    match text.split_once("no secure connection: ") {
        Some((before, _)) => format!("{before}no secure connection: …\n"),
        None => text,
    }
}
