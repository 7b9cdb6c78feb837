//! `satellite sim-server --http`: an MCP server over streamable HTTP, tested with hand-written requests.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};
use testkit::wait::{GIVE_UP, wait_for};

use crate::SATELLITE;

struct Server {
    child: Child,
    address: String,
    path: String,
}

/// A response: status, session and messages, from JSON or from an event stream.
#[derive(Debug)]
struct Answer {
    status: u16,
    content_type: String,
    session: Option<String>,
    messages: Vec<Value>,
}

impl Server {
    fn start(flags: &[&str]) -> Self {
        let mut command = Command::new(SATELLITE);
        command.args(["sim-server", "--http", "127.0.0.1:0"]).args(flags).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url = line.trim_end().strip_prefix("listening on http://").unwrap_or_else(|| panic!("{line:?}"));
        let (address, path) = url.split_once('/').unwrap();
        Self { child, address: address.to_owned(), path: format!("/{path}") }
    }

    /// Sends a request and returns the reader of its response.
    fn begin(&self, method: &str, path: &str, session: Option<&str>, body: &str) -> BufReader<TcpStream> {
        let mut connection = TcpStream::connect(&self.address).unwrap();
        connection.set_read_timeout(Some(GIVE_UP)).unwrap();
        let session = session.map_or(String::new(), |session| format!("Mcp-Session-Id: {session}\r\n"));
        let address = &self.address;
        let length = body.len();
        write!(
            connection,
            "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Accept: application/json, text/event-stream\r\nX-Instance: by-hand\r\n{session}Content-Length: {length}\r\n\
             \r\n{body}"
        )
        .unwrap();
        BufReader::new(connection)
    }

    fn exchange(&self, method: &str, session: Option<&str>, body: &str) -> Answer {
        let mut text = String::new();
        self.begin(method, &self.path, session, body).read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text:?}"));
        let header = |name: &str| {
            let lines = head.lines().filter_map(|line| line.split_once(": "));
            lines.filter(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value.to_owned()).next()
        };
        // Their prefixes distinguish the relevant lines from chunk sizes.
        let messages = body.lines().filter_map(|line| match line.strip_prefix("data: ") {
            Some(message) => Some(message),
            None => line.starts_with('{').then_some(line),
        });
        Answer {
            status: head.split(' ').nth(1).unwrap().parse().unwrap(),
            content_type: header("content-type").unwrap_or_default(),
            session: header("mcp-session-id"),
            messages: messages.map(|message| serde_json::from_str(message).unwrap()).collect(),
        }
    }

    fn post(&self, session: Option<&str>, message: &Value) -> Answer {
        self.exchange("POST", session, &message.to_string())
    }

    /// A session after the handshake.
    fn session(&self) -> String {
        let session = self.post(None, &initialize()).session.unwrap();
        let initialized = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
        assert_eq!(self.post(Some(&session), &initialized).status, 202);
        session
    }

    fn stats(&self) -> Value {
        let mut text = String::new();
        self.begin("GET", "/stats", None, "").read_to_string(&mut text).unwrap();
        serde_json::from_str(text.split_once("\r\n\r\n").unwrap().1).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn initialize() -> Value {
    let client = json!({"name": "by hand", "version": "1"});
    let params = json!({"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client});
    json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params})
}

fn call(tool: &str, arguments: &Value) -> Value {
    let params = json!({"name": tool, "arguments": arguments, "_meta": {"progressToken": "p"}});
    json!({"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": params})
}

#[test]
fn responses_are_json_or_events_as_the_flag_says() {
    for (answers, content_type) in [("json", "application/json"), ("sse", "text/event-stream")] {
        let server = Server::start(&["--name", "by-hand", "--answers", answers]);
        let answer = server.post(None, &initialize());
        assert_eq!((answer.status, &*answer.content_type), (200, content_type));
        assert_eq!(answer.messages[0]["result"]["serverInfo"]["name"], "by-hand");
        let session = answer.session.unwrap();
        let answer = server.post(Some(&session), &call("add", &json!({"a": 1, "b": 2})));
        assert_eq!(answer.messages[0]["result"]["structuredContent"]["result"], 3);
        assert_eq!((answer.status, answer.messages.len(), answer.session), (200, 1, None));

        // Progress notifications arrive only in a stream.
        let answer = server.post(Some(&session), &call("sleep", &json!({"ms": 50, "progress_every_ms": 20})));
        assert_eq!(answer.messages.last().unwrap()["result"]["content"][0]["text"], "slept 50 ms");
        let before: Vec<_> = answer.messages.iter().map(|message| message["method"].clone()).collect();
        let progress = json!("notifications/progress");
        let expected = if answers == "sse" { vec![progress.clone(), progress, Value::Null] } else { vec![Value::Null] };
        assert_eq!(before, expected);
    }
}

#[test]
fn sessions_are_isolated_and_unknown_sessions_are_rejected() {
    let server = Server::start(&[]);
    let [one, other] = [server.session(), server.session()];
    server.post(Some(&one), &call("echo", &json!({"text": "hello"})));
    let received = |session: &str| {
        let answer = server.post(Some(session), &call("received", &json!({})));
        answer.messages[0]["result"]["structuredContent"]["calls"].clone()
    };
    assert_eq!((received(&one), received(&other)), (json!(1), json!(0)));

    assert_eq!(server.exchange("DELETE", Some(&one), "").status, 200);
    let answer = server.post(Some(&one), &call("received", &json!({})));
    assert_eq!((answer.status, &answer.messages[0]["id"]), (404, &Value::Null));
    assert_eq!(server.post(None, &call("received", &json!({}))).status, 400);
    assert_eq!(received(&other), 0);
    // Another process does not know the session either.
    assert_eq!(Server::start(&[]).post(Some(&other), &call("received", &json!({}))).status, 404);
}

#[test]
fn a_get_opens_a_stream_for_notifications() {
    let server = Server::start(&["--list-changed-after", "50ms", "--path", "/elsewhere"]);
    let session = server.session();
    let mut stream = server.begin("GET", "/elsewhere", Some(&session), "").lines();
    let mut heard = stream.by_ref().map(Result::unwrap);
    assert_eq!(heard.next().unwrap(), "HTTP/1.1 200 OK");
    assert_eq!(server.exchange("GET", Some(&session), "").status, 409, "a second stream was accepted");
    assert!(heard.any(|line| line.contains("notifications/tools/list_changed")));
    assert_eq!(server.stats()["streams"], 1);
    drop(stream);
    wait_for("the end of the stream", || (server.stats()["streams"] == 0).then_some(()), || server.stats().to_string());

    let silent = Server::start(&["--no-get-stream"]);
    let session = silent.session();
    assert_eq!(silent.exchange("GET", Some(&session), "").status, 405);
}

#[test]
fn the_statistics_count_handshakes_and_overlapping_ones() {
    let server = Server::start(&["--handshake-delay", "200ms"]);
    let first = server.begin("POST", "/mcp", None, &initialize().to_string());
    wait_for(
        "the first request to arrive",
        || (server.stats()["posts_open"] == 1).then_some(()),
        || server.stats().to_string(),
    );
    let answer = server.post(None, &initialize());
    assert_eq!(answer.status, 200);
    drop(first);
    let open = || server.stats()["posts_open"].clone();
    wait_for("the first request to end", || (open() == 0).then_some(()), || open().to_string());
    let stats = server.stats();
    let counts = ["initializes", "instances", "overlaps", "sessions"].map(|name| stats[name].as_u64().unwrap());
    assert_eq!(counts, [2, 1, 1, 2], "{stats}");
    assert_eq!(stats["initialized_at_ms"].as_array().unwrap().len(), 2);
}

#[test]
fn a_session_that_crashes_the_server_ends_every_session() {
    let mut server = Server::start(&[]);
    let sessions = [server.session(), server.session()];
    let crash = call("crash", &json!({"code": 7})).to_string();
    let mut answer = String::new();
    let _ = server.begin("POST", "/mcp", Some(&sessions[0]), &crash).read_to_string(&mut answer);
    assert_eq!((server.child.wait().unwrap().code(), &*answer), (Some(7), ""));

    let mut server = Server::start(&["--exit-after", "50ms", "--exit-code", "3", "--no-get-stream"]);
    server.session();
    assert_eq!(server.child.wait().unwrap().code(), Some(3));
}
