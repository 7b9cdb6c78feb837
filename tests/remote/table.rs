//! Every misbehaviour at every moment: what the instance is then, what its peer saw, what the caller got, what was told.
//!
//! The clock decides nothing here: the next attempt by itself is an hour away, so that after the one failure the world
//! stands still, and is looked at. Then the peer behaves again, and a call, or whatever its status asks for, brings the
//! instance back.

use std::time::Duration;

use futures::{StreamExt, stream};
use mcp_satellite_actors::model::exit::{CallError, CallFate};
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::status::Status;
use serde_json::Value;

use super::peer::{Answers, Deed, Expiry, Peer, Record, Seen, When};
use super::support::{Fleet, Instance, Remote};

/// What takes longer than this is given up, in the cases that say so.
const SHORT: Duration = Duration::from_millis(300);

/// A message may be this long, in bytes.
const LONGEST: usize = 64 * 1024;

/// So many rows are played at once.
const AT_ONCE: usize = 8;

/// What goes wrong.
#[derive(Clone, Copy)]
enum How {
    /// The peer does this with a request.
    Deed(fn() -> Deed),
    /// It is closed.
    Closed,
    /// It is full.
    Full,
    /// It has forgotten its sessions, and says so in its way.
    Forgotten(Expiry),
    /// It is not to be found.
    Nowhere,
    /// Its certificate is nobody's.
    SelfSigned,
    /// It speaks no TLS, and is asked to.
    PlainText,
}

/// When it goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    /// At the first connect.
    Connect,
    /// In a call of a tool that may do anything, over a connection that is there.
    Call,
    /// The same of a tool that only reads.
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

/// One misbehaviour, and the status that it comes to.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    how: How,
    /// Over the older transport.
    legacy: bool,
    /// Whether it happens to the first such request only.
    once: bool,
    /// Whether the peer gives sessions.
    sessions: bool,
    /// What is special about the instance.
    policy: Option<fn(&mut Policy)>,
    /// The caller's own deadline.
    deadline: Option<Duration>,
    connect: Option<Status>,
    call: Option<Status>,
    read: Option<Status>,
}

impl Case {
    /// Comes to this status whenever it happens.
    fn new(name: &'static str, how: How, status: Status) -> Self {
        let all = Some(status);
        let (policy, deadline) = (None, None);
        Self {
            name,
            how,
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

    fn deed(name: &'static str, deed: fn() -> Deed, status: Status) -> Self {
        Self::new(name, How::Deed(deed), status)
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

    /// What it comes to in a call.
    fn in_calls(self, status: Status) -> Self {
        Self { call: Some(status), read: Some(status), ..self }
    }

    /// What it comes to in a call of a tool that only reads: whether it was repeated makes the difference.
    fn in_reads(self, status: Status) -> Self {
        Self { read: Some(status), ..self }
    }

    /// A call runs into its own deadline.
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

/// All of them.
fn cases() -> Vec<Case> {
    use Status::{Error, Offline, Online, RequiresReauth};
    let deed = Case::deed;
    let in_time = |policy: &mut Policy| policy.remote.header_timeout = SHORT;
    vec![
        // Nobody is there.
        Case::new("refused", How::Closed, Offline),
        Case::new("its name is not known", How::Nowhere, Offline).at_connect_only(),
        Case::new("no connection in time", How::Full, Offline).policy(|policy| policy.remote.connect_timeout = SHORT),
        Case::new("a certificate of nobody", How::SelfSigned, Offline).at_connect_only(),
        Case::new("no TLS where it is expected", How::PlainText, Offline).at_connect_only(),
        deed("the connection is closed without an answer", || Deed::HangUp, Offline),
        deed("the server dies with the request in hand", || Deed::Die, Offline),
        // Somebody is there and does not come to an answer.
        deed("no answer begins", || Deed::Silence, Offline).policy(in_time).at_connect_only(),
        deed("no answer begins, over HTTP+SSE", || Deed::Silence, Offline).legacy().policy(in_time).at_connect_only(),
        deed("half open", || Deed::Freeze, Offline).policy(in_time).at_connect_only(),
        deed("no answer before the deadline", || Deed::Silence, Online).until_deadline(),
        deed("half open until the deadline", || Deed::Freeze, Online).until_deadline(),
        deed("comments for ever", || Deed::DripForever { pause: Duration::from_millis(5) }, Offline)
            .policy(|policy| policy.session.handshake_timeout = SHORT)
            .at_connect_only(),
        deed("comments until the deadline", || Deed::DripForever { pause: Duration::from_millis(5) }, Online)
            .until_deadline(),
        deed("no endpoint is named, over HTTP+SSE", || Deed::DripForever { pause: Duration::from_millis(5) }, Offline)
            .legacy()
            .policy(in_time)
            .at_connect_only(),
        deed("the right answer, slowly", || Deed::Drip { pause: Duration::from_micros(200) }, Online),
        deed("an answer cut off (JSON)", || Deed::Cut(Answers::Json), Offline),
        deed("an answer cut off (SSE)", || Deed::Cut(Answers::Sse), Offline),
        deed("a connection closed once without an answer", || Deed::HangUp, Offline)
            .once()
            .in_calls_only()
            .in_reads(Online),
        deed("the stream ends before the answer, over HTTP+SSE", || Deed::EndStreams, Offline)
            .legacy()
            .once()
            .in_calls_only()
            .in_reads(Online),
        deed("the connection is closed without an answer, over HTTP+SSE", || Deed::HangUp, Offline).legacy(),
        // An answer that is none.
        deed("garbage in a stream", || Deed::GarbageSse, Offline),
        deed("garbage in a stream, over HTTP+SSE", || Deed::GarbageSse, Offline).legacy().at_connect_only(),
        deed("a page", Deed::html, Error),
        deed("a page, over HTTP+SSE", Deed::html, Error).legacy().at_connect_only(),
        deed("JSON that is none", || json_body("{not json"), Error),
        deed("an answer to something else", || json_body(r#"{"jsonrpc":"2.0","id":4711,"result":{}}"#), Error),
        deed("success and nothing in it", || Deed::status(200), Error),
        deed("accepted, and that is all", || Deed::status(202), Error),
        deed("an endless line (JSON)", || Deed::EndlessLine(Answers::Json), Error),
        deed("an endless line (SSE)", || Deed::EndlessLine(Answers::Sse), Error),
        deed("an endless line, over HTTP+SSE", || Deed::EndlessLine(Answers::Sse), Error).legacy().at_connect_only(),
        deed("an endpoint elsewhere, over HTTP+SSE", || Deed::Endpoint("http://localhost:1/message".to_owned()), Error)
            .legacy()
            .at_connect_only(),
        // Statuses.
        deed("302", || Deed::status_with(302, "location", "/elsewhere?key=value"), Error),
        deed(
            "302 to another origin",
            || Deed::status_with(302, "location", "https://u:p@elsewhere.invalid/?k=v"),
            Error,
        ),
        deed("401 without a challenge", || Deed::status(401), RequiresReauth),
        deed(
            "401 with a challenge",
            || Deed::status_with(401, "www-authenticate", "Bearer realm=\"r\""),
            RequiresReauth,
        ),
        deed("403 without a challenge", || Deed::status(403), RequiresReauth),
        deed(
            "403 with a challenge",
            || Deed::status_with(403, "www-authenticate", "Bearer error=\"e\""),
            RequiresReauth,
        ),
        deed("401, over HTTP+SSE", || Deed::status(401), RequiresReauth).legacy(),
        deed("400", || Deed::status(400), Error).in_calls(Online),
        deed("400 without a session", || Deed::status(400), Error).sessionless().in_calls(Online),
        deed("400, over HTTP+SSE", || Deed::status(400), Error).legacy().in_calls(Online),
        deed("400 with an error about something else", error_about_something_else, Error).once().in_calls(Online),
        deed("404 without a session", || Deed::status(404), Error).sessionless(),
        deed("404, over HTTP+SSE", || Deed::status(404), Error).legacy().at_connect_only(),
        Case::new("404 with a session, over HTTP+SSE", How::Forgotten(Expiry::NotFound), Online)
            .legacy()
            .in_calls_only(),
        Case::new("404 with a session", How::Forgotten(Expiry::NotFound), Online).in_calls_only(),
        Case::new("400 about a session", How::Forgotten(Expiry::BadRequest), Online).in_calls_only(),
        Case::new("400 to everything in a session", How::Forgotten(Expiry::Plainly), Offline).in_calls_only(),
        deed("413", || Deed::status(413), Error).in_calls(Online),
        deed("413, over HTTP+SSE", || Deed::status(413), Error).legacy().in_calls(Online),
        deed("429", || Deed::status(429), Error).in_calls(Online),
        deed("429 with Retry-After", || Deed::status_with(429, "retry-after", "3600"), Error).in_calls(Online),
        deed("500", || Deed::status(500), Error).in_calls(Online),
        deed("502", || Deed::status(502), Error).in_calls(Online),
        deed("500, over HTTP+SSE", || Deed::status(500), Error).legacy().in_calls(Online),
        deed("503 with Retry-After", || Deed::status_with(503, "retry-after", "3600"), Error).in_calls(Online),
        deed("5xx once too often", || Deed::status(503), Error)
            .policy(|policy| policy.remote.server_errors_max = 1)
            .in_calls_only(),
        // Nothing is wrong with the connection.
        deed("a JSON-RPC error", || Deed::RpcError { code: -32000, message: "not today" }, Online).in_calls_only(),
        deed("a handshake that is refused", || Deed::RpcError { code: -32000, message: "not today" }, Error)
            .at_connect_only(),
    ]
}

/// The Python SDK's way to refuse a request whose session it does not like.
fn error_about_something_else() -> Deed {
    let said = "Bad Request: No valid session ID provided";
    let error = serde_json::json!({"code": -32600, "message": said});
    let body = serde_json::json!({"jsonrpc": "2.0", "id": "server-error", "error": error});
    let headers = vec![("content-type", "application/json".to_owned())];
    Deed::Answer { status: 400, headers, body: body.to_string() }
}

fn json_body(body: &str) -> Deed {
    Deed::Answer { status: 200, headers: vec![("content-type", "application/json".to_owned())], body: body.to_owned() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_misbehaviour_at_every_moment_has_its_status_its_retries_its_fate_and_its_message() {
    let fleet = Fleet::start().await;
    let moments = [Moment::Connect, Moment::Call, Moment::Read];
    let rows = cases().into_iter().flat_map(|case| moments.map(|moment| (case, moment)));
    let rows = rows.filter_map(|(case, moment)| Some((case, moment, case.status(moment)?)));
    let played: Vec<Played> = stream::iter(rows)
        .map(|(case, moment, status)| Box::pin(play(&fleet, case, moment, status)))
        .buffered(AT_ONCE)
        .collect()
        .await;
    let table: Vec<String> = played.iter().map(|played| played.text.clone()).collect();
    let peers: Vec<&Peer> = played.iter().map(|played| &played.peer).collect();
    for peer in &peers {
        // Those that are half open see nobody go.
        peer.thaw();
    }
    fleet.finish_untidily(&peers).await;
    insta::assert_snapshot!(table.concat());
}

struct Played {
    text: String,
    peer: Peer,
}

/// Plays one row.
async fn play(fleet: &Fleet, case: Case, moment: Moment, status: Status) -> Played {
    let peer = if let How::SelfSigned = case.how { Peer::start_tls().await } else { Peer::start().await };
    // What is noticed by a stream is not noticed by a call; it has its own tests.
    peer.manners(|manners| (manners.streams, manners.sessions) = (false, case.sessions));
    // Whether a connection that was kept is found closed before or after something was sent on it is a race.
    peer.manners(|manners| manners.keeps_alive = !matches!(case.how, How::Closed | How::Full));
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
                peer.until("it was asked for a stream", |seen| seen.http("GET") == 1).await;
            }
            misbehave(&peer, &case, Some(tool)).await;
            let (requests, events) = (peer.seen(|seen| seen.requests.len()), instance.story().await.len());
            let answer = instance.call_within(case.deadline, tool).await;
            (instance, Some(answer), requests, events)
        }
    };
    let view = arrives(&instance, status).await;
    let text = |text: &str| told(text, &peer, &instance);
    let head = match answer {
        None => format!("{}\n", case.name),
        Some(answer) => format!("{}, in a call of {}\n", case.name, moment.tool().unwrap()) + &text(&answered(&answer)),
    };
    let is = text(&what_is(&view));
    let arrived = peer.seen(|seen| came(seen, requests_before));
    let story = instance.story().await;
    let news = &story[events_before..];
    let told = if news.is_empty() { "nothing".to_owned() } else { news.join(", ") };
    let row = format!("\n{head}    is    {is}\n    came  {arrived}\n    told  {told}\n");
    mend(&peer, &case, &remote, &instance, &view, is_special).await;
    Played { text: row, peer }
}

fn remote(case: &Case, peer: &Peer) -> Remote {
    let remote = match (case.how, case.legacy) {
        (How::Nowhere, _) => Remote::http("http://nowhere.invalid/mcp"),
        (How::PlainText, _) => Remote::http(peer.url().replace("http:", "https:")),
        (_, true) => Remote::sse(peer.sse_url()),
        (_, false) => Remote::http(peer.url()),
    };
    remote.policy(|policy| policy.session.line_max = LONGEST)
}

async fn misbehave(peer: &Peer, case: &Case, tool: Option<&'static str>) {
    match case.how {
        How::Deed(deed) => {
            let when = match tool {
                Some(tool) => When::tool(tool),
                None if case.legacy => When::path("/sse"),
                None => When::rpc("initialize"),
            };
            if case.once {
                peer.on_next(1, when, deed());
            } else {
                peer.on(when, deed());
            }
        }
        How::Closed => peer.close().await,
        How::Full => peer.fill().await,
        How::Forgotten(expiry) => {
            peer.manners(|manners| manners.expiry = expiry);
            peer.forget_sessions();
        }
        How::Nowhere | How::SelfSigned | How::PlainText => {}
    }
}

/// Waits until it has come to this; where nothing is to change, nothing has.
async fn arrives(instance: &Instance, status: Status) -> std::sync::Arc<InstanceView> {
    match status {
        Status::Online => instance.online().await,
        Status::RequiresReauth => instance.status(status).await,
        // An attempt that was made for a call is over when the next one is due again.
        _ => instance.until(status.as_str(), |view| view.status == status && view.attempt.is_some()).await,
    }
}

/// Then the peer behaves, and what the status asks for brings it back.
async fn mend(peer: &Peer, case: &Case, remote: &Remote, instance: &Instance, view: &InstanceView, is_special: bool) {
    if let How::Nowhere | How::SelfSigned | How::PlainText = case.how {
        return;
    }
    let handshakes = peer.seen(|seen| seen.rpc("initialize"));
    peer.heal().await;
    if is_special {
        // Otherwise what is short for the sake of the misbehaviour may be too short for a loaded machine.
        instance.update(remote).await;
        instance.until("connected anew", |view| view.spec.policy == remote.spec().policy).await;
    }
    match view.status {
        // It is tried, and found out to be there.
        Status::Offline | Status::Error => instance.assert_callable().await,
        // It is left alone until it has other credentials.
        Status::RequiresReauth => {
            let refused = instance.call("echo").await;
            assert!(matches!(refused, Err(CallError::Refused { status: Status::RequiresReauth, .. })), "{refused:?}");
            assert_eq!(peer.seen(|seen| seen.rpc("initialize")), handshakes, "{}: it was not left alone", case.name);
            instance.update(&remote.clone().header("authorization", "Bearer another")).await;
        }
        // Nothing was lost.
        _ => {
            instance.assert_callable().await;
            let now = peer.seen(|seen| seen.rpc("initialize"));
            assert!(is_special || now == handshakes, "{}: it was connected anew", case.name);
        }
    }
    instance.online().await;
}

fn answered(answer: &Result<Value, CallError>) -> String {
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

fn what_is(view: &InstanceView) -> String {
    let connection = view.connection.map_or("none", |connection| connection.as_str());
    let message = view.message.as_ref().map_or(String::new(), |message| format!(": {message}"));
    let attempt = view.attempt.map_or(String::new(), |attempt| format!(" [attempt {attempt} is next]"));
    format!("{}, {connection}{message}{attempt}", view.status)
}

/// The handshakes and calls that came since, in order; what came several times in a row is counted. Lists are read
/// beside the calls, in no order with them.
fn came(seen: &Seen, since: usize) -> String {
    let counts =
        |record: &&Record| matches!(record.rpc.as_deref(), Some("initialize" | "tools/call")) || is_opening(record);
    let mut groups: Vec<(String, usize)> = Vec::new();
    for record in seen.requests[since..].iter().filter(counts) {
        match groups.last_mut() {
            Some((last, times)) if *last == record.what() => *times += 1,
            _ => groups.push((record.what(), 1)),
        }
    }
    let named = groups.into_iter().map(|(what, times)| if times == 1 { what } else { format!("{what} ×{times}") });
    let named: Vec<String> = named.collect();
    if named.is_empty() { "nothing".to_owned() } else { named.join(", ") }
}

fn is_opening(record: &Record) -> bool {
    record.http == "GET" && record.path == "/sse"
}

/// A text without what differs from run to run and from machine to machine.
fn told(text: &str, peer: &Peer, instance: &Instance) -> String {
    let text = text.replace(&peer.origin(), "http://PEER");
    let text = text.replace(&*instance.view().spec.name, "NAME");
    match text.split_once("no secure connection: ") {
        Some((before, _)) => format!("{before}no secure connection: …\n"),
        None => text,
    }
}
