//! Calls as MCP clients make them: through a satellite's endpoint over HTTP. Each user has one session, which calls
//! `execute_mcp_tool` and uses one connection per call in flight. All sessions number their requests from 1, as clients
//! do, so that mixed-up ids are detected.

use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, TryStreamExt};
use mcp_satellite_actors::audience::Audience;
use mcp_satellite_actors::model::ids::{TeamId, UserId};
use mcp_satellite_actors::runtime::RuntimeHandle;
use mcp_satellite_protocol::era::NEWEST_SESSION_VERSION;
use mcp_satellite_protocol::header::{PROTOCOL_VERSION, SESSION_ID};
use mcp_satellite_protocol::method;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use super::LoadCaller;
use super::direct::parse_echo;
use crate::fleet::LoadFleet;
use crate::types::{CallOutcome, PlannedCall};
use mcp_satellite_config::{GatewayLimits, GatewayPlan, GatewayUser, ListenSetting, TokenHash};
use mcp_satellite_gateway::access::Access;
use mcp_satellite_gateway::audience::GatewayAudience;
use mcp_satellite_gateway::dispatch::EndpointDispatcher;
use mcp_satellite_gateway::sessions::Sessions;
use mcp_satellite_gateway::{self, Gateway, GatewaySettings};

// Concurrent session starts.
const CONCURRENT_OPENINGS_MAX: usize = 32;
// Time that a client waits beyond the deadline of its call. The endpoint enforces the same deadline.
const PATIENCE: Duration = Duration::from_secs(5);
// Time after which an idle connection is closed.
const IDLE_MAX: Duration = Duration::from_secs(30);
const OPEN_MAX: Duration = Duration::from_secs(30);
// Limit for a response body: the harness never expects a longer one.
const ANSWER_MAX: usize = 16 << 20;

const INITIALIZED: &str = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;

/// Parts of the endpoint that must exist before the runtime starts.
pub(crate) struct EndpointParts {
    sessions: Arc<Sessions>,
    audience: Arc<GatewayAudience>,
}

impl EndpointParts {
    pub(crate) fn new() -> Self {
        let sessions = Arc::new(Sessions::new());
        Self { audience: Arc::new(GatewayAudience::new(Arc::clone(&sessions))), sessions }
    }

    pub(crate) fn audience(&self) -> Arc<dyn Audience> {
        self.audience.clone()
    }

    /// Starts the endpoint and opens a session for each user of the fleet. `deadline` is the timeout of a call.
    pub(crate) async fn open(
        &self,
        runtime: &RuntimeHandle,
        fleet: &Arc<LoadFleet>,
        deadline: Duration,
    ) -> io::Result<LoadEndpoint> {
        let mut tokens: HashMap<(TeamId, UserId), String> = HashMap::new();
        for id in &*fleet.ids {
            let owner = (id.team.clone(), id.user.clone());
            tokens.entry(owner).or_insert_with_key(|(team, user)| format!("token-of-{team}-{user}"));
        }
        let user = |((team, user), token): (&(TeamId, UserId), &String)| GatewayUser {
            team: team.clone(),
            team_slug: team.as_str().into(),
            user: user.clone(),
            slug: user.as_str().into(),
            tokens: vec![TokenHash::from_token(token)],
            has_stored_token: false,
            access: None,
            flat: false,
        };
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        // Only the time of a call is limited: the run measures the runtime, not the limits of the endpoint.
        let limits = GatewayLimits {
            requests_per_second: 0,
            calls_per_user_max: 0,
            sessions_max: tokens.len().max(1) * 2,
            connections_max: 65_536,
            unauthenticated_max: 65_536,
            request_timeout: Some(deadline),
            ..GatewayLimits::default()
        };
        let plan = GatewayPlan {
            requested: true,
            listen: ListenSetting::Address(any),
            limits,
            users: tokens.iter().map(user).collect(),
            ..GatewayPlan::default()
        };
        let listener = mcp_satellite_gateway::bind(any)?;
        let settings = GatewaySettings::new("load", &plan, listener.local_addr()?);
        let access = Arc::new(Access::new(&plan)?);
        let handler = Arc::new(EndpointDispatcher::new(runtime, Arc::clone(&self.audience)));
        let emitter = runtime.emitter().clone();
        let event_sink = Box::new(move |event| emitter.emit(event));
        let gateway = Gateway::start(listener, settings, access, handler, Arc::clone(&self.sessions), event_sink)?;
        let address = gateway.address();
        let open = |(owner, token): ((TeamId, UserId), String)| async move {
            let session = timeout(OPEN_MAX, LoadSession::open(address, &token)).await;
            Ok::<_, io::Error>((owner, session.map_err(|_| io::ErrorKind::TimedOut)??))
        };
        let sessions =
            futures::stream::iter(tokens).map(open).buffer_unordered(CONCURRENT_OPENINGS_MAX).try_collect().await?;
        Ok(LoadEndpoint {
            gateway,
            clients: Arc::new(EndpointClients { fleet: Arc::clone(fleet), sessions, deadline }),
        })
    }
}

pub(crate) struct LoadEndpoint {
    gateway: Gateway,
    clients: Arc<EndpointClients>,
}

impl LoadEndpoint {
    // Uses the session of the user to whom the called instance belongs.
    pub(crate) fn caller(&self) -> Arc<dyn LoadCaller> {
        self.clients.clone()
    }

    pub(crate) async fn close(self) {
        self.gateway.drain().await;
        for session in self.clients.sessions.values() {
            session.idle().clear();
        }
    }
}

struct EndpointClients {
    fleet: Arc<LoadFleet>,
    sessions: HashMap<(TeamId, UserId), LoadSession>,
    deadline: Duration,
}

impl LoadCaller for EndpointClients {
    fn call<'a>(&'a self, call: &'a PlannedCall) -> BoxFuture<'a, CallOutcome> {
        async move {
            let id = self.fleet.id(call.nth);
            let Some(session) = self.sessions.get(&(id.team.clone(), id.user.clone())) else {
                return failed_outcome(None, &"the user of the instance has no session");
            };
            let path = format!("{}:echo", self.fleet.slug(call.nth));
            let after_ms = u64::try_from(call.after.as_millis()).unwrap_or(u64::MAX);
            let body = serde_json::json!({
                "jsonrpc": "2.0",
                "id": session.next_id.fetch_add(1, Ordering::Relaxed),
                "method": method::TOOLS_CALL,
                "params": {
                    "name": "execute_mcp_tool",
                    "arguments": { "tool_path": path, "arguments": { "text": call.token, "after_ms": after_ms } },
                },
            });
            match timeout(self.deadline + PATIENCE, session.post(&body.to_string())).await {
                Ok(Ok(reply)) if reply.status == 200 => parse_response(&reply.body),
                Ok(Ok(reply)) => {
                    let body_text = String::from_utf8_lossy(&reply.body);
                    failed_outcome(None, &format!("HTTP {}: {body_text}", reply.status))
                }
                Ok(Err(error)) => failed_outcome(None, &error),
                Err(_) => failed_outcome(Some("timed_out".to_owned()), &"the endpoint did not respond in time"),
            }
        }
        .boxed()
    }
}

fn failed_outcome(fate: Option<String>, why: &dyn std::fmt::Display) -> CallOutcome {
    CallOutcome::Failed { fate, why: why.to_string() }
}

// Parses the response to `tools/call`.
fn parse_response(body: &[u8]) -> CallOutcome {
    #[derive(Deserialize)]
    struct Message<'a> {
        #[serde(borrow)]
        result: Option<&'a RawValue>,
        error: Option<Error>,
    }
    #[derive(Deserialize)]
    struct Error {
        message: String,
        data: Option<SatelliteError>,
    }
    #[derive(Deserialize)]
    struct MarkedResult {
        #[serde(rename = "_meta")]
        meta: Option<LoadCallMeta>,
    }
    #[derive(Deserialize)]
    struct LoadCallMeta {
        #[serde(rename = "mcp-satellite/error")]
        error: Option<SatelliteError>,
    }
    #[derive(Deserialize)]
    struct SatelliteError {
        kind: Option<String>,
        #[serde(default)]
        message: String,
        fate: Option<String>,
    }
    let Ok(text) = std::str::from_utf8(body) else { return failed_outcome(None, &"the response is not text") };
    // In an event stream the response is the last message, after keep-alives and progress.
    let message = if text.trim_start().starts_with('{') {
        text
    } else {
        text.lines().rev().find_map(|line| line.strip_prefix("data:")).unwrap_or_default()
    };
    match serde_json::from_str(message.trim()) {
        Ok(Message { result: Some(result), .. }) => {
            let marked = serde_json::from_str::<MarkedResult>(result.get()).ok();
            match marked.and_then(|marked| marked.meta?.error) {
                Some(refused) => failed_outcome(refused.fate, &refused.message),
                None => parse_echo(result.get()),
            }
        }
        Ok(Message { error: Some(error), .. }) => match error.data {
            Some(SatelliteError { kind: Some(_), fate, .. }) => failed_outcome(fate, &error.message),
            _ => CallOutcome::ServerError(error.message),
        },
        Ok(_) => failed_outcome(None, &"the response has neither a result nor an error"),
        Err(error) => failed_outcome(None, &format!("the response cannot be parsed: {error}")),
    }
}

struct LoadSession {
    address: SocketAddr,
    // Request line and headers, without the length of the body.
    head: String,
    next_id: AtomicU64,
    // Idle connections, each with the time of its last use. The most recent one is used next.
    idle: Mutex<Vec<(Instant, BufReader<TcpStream>)>>,
}

struct EndpointResponse {
    status: u16,
    session: Option<String>,
    body: Vec<u8>,
    // False if the server closes the connection after this response.
    keep_alive: bool,
}

impl LoadSession {
    async fn open(address: SocketAddr, token: &str) -> io::Result<Self> {
        let head = format!(
            "POST /mcp HTTP/1.1\r\nhost: {address}\r\nauthorization: Bearer {token}\r\n\
             content-type: application/json\r\naccept: application/json, text/event-stream\r\n\
             {PROTOCOL_VERSION}: {NEWEST_SESSION_VERSION}\r\n"
        );
        let mut session = Self { address, head, next_id: AtomicU64::new(1), idle: Mutex::default() };
        let refused = |reply: &EndpointResponse| {
            let body_text = String::from_utf8_lossy(&reply.body).into_owned();
            io::Error::other(format!("the endpoint refused a session with HTTP {}: {body_text}", reply.status))
        };
        let initialize = format!(
            r#"{{"jsonrpc":"2.0","id":0,"method":"initialize","params":{{"protocolVersion":"{NEWEST_SESSION_VERSION}","capabilities":{{}},"clientInfo":{{"name":"load","version":"0"}}}}}}"#
        );
        let reply = session.post(&initialize).await?;
        let id = reply.session.as_ref().filter(|_| reply.status == 200).ok_or_else(|| refused(&reply))?;
        session.head.extend([SESSION_ID, ": ", id, "\r\n"]);
        let reply = session.post(INITIALIZED).await?;
        if reply.status == 202 { Ok(session) } else { Err(refused(&reply)) }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<(Instant, BufReader<TcpStream>)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn post(&self, body: &str) -> io::Result<EndpointResponse> {
        let request = format!("{}content-length: {}\r\n\r\n{body}", self.head, body.len());
        let idle_connection = self.idle().pop();
        if let Some((_, mut idle_connection)) = idle_connection {
            // The server may have closed the idle connection before it read the request; then send it on a new
            // connection.
            if idle_connection.get_mut().write_all(request.as_bytes()).await.is_ok()
                && !idle_connection.fill_buf().await?.is_empty()
            {
                return self.read_reply(idle_connection).await;
            }
        }
        let stream = TcpStream::connect(self.address).await?;
        stream.set_nodelay(true)?;
        let mut stream = BufReader::new(stream);
        stream.get_mut().write_all(request.as_bytes()).await?;
        self.read_reply(stream).await
    }

    async fn read_reply(&self, mut stream: BufReader<TcpStream>) -> io::Result<EndpointResponse> {
        let reply = read_reply(&mut stream).await?;
        if reply.keep_alive {
            let mut idle = self.idle();
            // Close the connections that a burst of calls has left.
            idle.retain(|(since, _)| since.elapsed() < IDLE_MAX);
            idle.push((Instant::now(), stream));
        }
        Ok(reply)
    }
}

async fn read_reply(stream: &mut BufReader<TcpStream>) -> io::Result<EndpointResponse> {
    let unreadable = || io::Error::new(io::ErrorKind::InvalidData, "the endpoint's response is not HTTP");
    let status = read_line(stream).await?;
    let status = status.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or_else(unreadable)?;
    let (mut length, mut chunked, mut session, mut keep_alive) = (0, false, None, true);
    loop {
        let header = read_line(stream).await?;
        let Some((name, value)) = header.split_once(": ") else { break };
        if name.eq_ignore_ascii_case("content-length") {
            length = value.parse().map_err(|_| unreadable())?;
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            chunked = true;
        } else if name.eq_ignore_ascii_case(SESSION_ID) {
            session = Some(value.to_owned());
        } else if name.eq_ignore_ascii_case("connection") {
            keep_alive = !value.eq_ignore_ascii_case("close");
        }
    }
    let mut body = Vec::new();
    if !chunked {
        read_part(stream, &mut body, length).await?;
    }
    while chunked {
        let length = usize::from_str_radix(&read_line(stream).await?, 16).map_err(|_| unreadable())?;
        read_part(stream, &mut body, length).await?;
        read_line(stream).await?;
        chunked = length > 0;
    }
    Ok(EndpointResponse { status, session, body, keep_alive })
}

// Without the line break.
async fn read_line(stream: &mut BufReader<TcpStream>) -> io::Result<String> {
    let mut line = String::new();
    if stream.read_line(&mut line).await? == 0 {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the endpoint closed the connection"));
    }
    line.truncate(line.trim_end().len());
    Ok(line)
}

async fn read_part(stream: &mut BufReader<TcpStream>, body: &mut Vec<u8>, length: usize) -> io::Result<()> {
    let begin = body.len();
    if length > ANSWER_MAX.saturating_sub(begin) {
        let why = format!("the endpoint's response is longer than {ANSWER_MAX} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    body.resize(begin + length, 0);
    stream.read_exact(&mut body[begin..]).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_is_parsed_as_text_server_error_or_failure() {
        let text = |body_text: &str| CallOutcome::Text(body_text.to_owned());
        let echo = r#"{"jsonrpc":"2.0","id":1,"result":{"content":[{"type":"text","text":"\"a-1\""}]}}"#;
        assert_eq!(parse_response(echo.as_bytes()), text("a-1"));
        let stream = format!(": keep-alive\n\nid: 1\ndata:\n\nevent: message\ndata: {echo}\n\n");
        assert_eq!(parse_response(stream.as_bytes()), text("a-1"));
        let own = br#"{"jsonrpc":"2.0","id":1,"result":{"content":[{"type":"text","text":"no"}],"isError":true}}"#;
        assert_eq!(parse_response(own), CallOutcome::ServerError("no".to_owned()));
        let own = br#"{"jsonrpc":"2.0","id":1,"error":{"code":-32601,"message":"no such tool"}}"#;
        assert_eq!(parse_response(own), CallOutcome::ServerError("no such tool".to_owned()));
        let response = br#"{"jsonrpc":"2.0","id":1,"result":{"content":[{"type":"text","text":"x"}],"isError":true,
            "_meta":{"mcp-satellite/error":{"kind":"terminated","message":"it ended","fate":"maybe_executed"}}}}"#;
        let fate = Some("maybe_executed".to_owned());
        assert_eq!(parse_response(response), CallOutcome::Failed { fate: fate.clone(), why: "it ended".to_owned() });
        let response = br#"{"jsonrpc":"2.0","id":1,"error":{"code":-32000,"message":"it ended","data":{"kind":"terminated","fate":"maybe_executed"}}}"#;
        assert_eq!(parse_response(response), CallOutcome::Failed { fate, why: "it ended".to_owned() });
        assert!(matches!(parse_response(b"{"), CallOutcome::Failed { .. }));
    }
}
