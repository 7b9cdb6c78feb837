//! `kill -9` in the middle of a storm of 50,000 events. The test process causes the events and compares the journal
//! with its own observations: answered calls, received events and the reported storage position.
//!
//! `STORM_KILLS` sets the number of kills (default 5, which is one storm), `STORM_EVENTS` the size of a storm.

#![allow(clippy::print_stdout, reason = "shown with a test that has failed")]

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, SystemTime};

use axum::Router;
use axum::body::to_bytes;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use serde_json::Value;
use testkit::home::{Home, Satellite, seq};
use testkit::wait::wait_for;

use crate::SATELLITE;

const CALLERS: usize = 16;
const KILLS_IN_A_STORM: usize = 5;

fn from_environment(name: &str, default: usize) -> usize {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

#[test]
fn stored_events_survive_kills_once_in_order_and_are_delivered() {
    let (kills, events) = (from_environment("STORM_KILLS", 5), from_environment("STORM_EVENTS", 50_000));
    let peer = Peer::start();
    let mut left = kills;
    while left > 0 {
        let here = left.min(KILLS_IN_A_STORM);
        left -= here;
        storm(&peer, events, here);
    }
}

fn storm(peer: &Peer, events: usize, kills: usize) {
    peer.reset();
    NEXT.store(0, Ordering::Release);
    let home = Home::new(SATELLITE);
    let config = home.write(
        "satellite.toml",
        &format!(
            r#"
[events]
sink = "http"
url = "{}"
interval = "50ms"
[[teams]]
id = "team_acme"
slug = "acme"
users = [{{ id = "user_alice", slug = "alice" }}]
[[teams.installations]]
id = "sim"
server = "sim"
keep = "always_on"
SIM
"#,
            peer.url
        ),
    );
    let args = ["--config", config.to_str().unwrap()];
    let (mut stored, mut answered) = (Vec::new(), Vec::new());
    for nth in 0..kills {
        // A position in the middle of this part of the storm, different in each run.
        let nanoseconds = SystemTime::UNIX_EPOCH.elapsed().unwrap().subsec_nanos() as usize;
        let part = events / kills;
        let kill_at = nth * part + part / 10 + nanoseconds % (part * 8 / 10);
        let satellite = home.run(&args);
        if nth == 0 {
            // Calls to a stopped server are rejected and logged as events, so the satellite only works on events. The
            // server stays stopped.
            home.wait_online("sim");
            home.satellite(&["stop", "sim"]).exits(0);
        }
        let callers = Callers::new(&home, events);
        callers.run_until_killed(satellite, kill_at);
        stored = check_stored(&home, &callers.observations, &stored);
        answered.extend(callers.observations.answered.lock().unwrap().drain(..));
        println!("killed at {kill_at}: {} events stored, {} calls answered", stored.len(), answered.len());
    }

    let mut last = home.run(&args);
    let callers = Callers::new(&home, events);
    callers.run_to_the_end();
    wait_delivered(&home);
    last.signal(nix::sys::signal::Signal::SIGTERM);
    last.ended().exits(0);
    let all = check_stored(&home, &callers.observations, &stored);
    let tools = tools_of(&all);
    println!(
        "{} of {} calls that were answered are stored",
        tools.len(),
        answered.len() + callers.observations.answered().len()
    );
    assert!(
        callers.observations.answered().iter().all(|tool| tools.contains(tool)),
        "an answered call is missing without a kill"
    );
    peer.assert_received(&all);
}

/// Asserts that the journal contains all events stored before and all events received since, unchanged. No satellite
/// runs, so this reads the files.
#[track_caller]
fn check_stored(home: &Home, observations: &Observations, before: &[String]) -> Vec<String> {
    let stored: Vec<String> =
        home.satellite(&["events", "--json"]).exits(0).stdout.lines().map(ToOwned::to_owned).collect();
    assert!(stored.len() >= before.len() && stored[..before.len()] == *before, "stored events have changed");
    assert_in_order(&stored);
    let (through, last) = (observations.through.load(Ordering::Acquire), stored.last().map_or(0, |line| seq_of(line)));
    assert!(last >= through, "{last} of {through}");
    for line in &*observations.received_events.lock().unwrap() {
        let at = stored.binary_search_by_key(&seq_of(line), |line| seq_of(line));
        assert_eq!(at.ok().map(|at| &stored[at]), Some(line), "a received event differs from the stored one");
    }
    tools_of(&stored);
    stored
}

/// Asserts that seqs start at 1, increase, and that every gap is covered by an `events.dropped`: events that had a
/// number but were not stored at the kill.
#[track_caller]
fn assert_in_order(lines: &[String]) {
    let dropped = lines.iter().filter(|line| line.contains("\"events.dropped\"")).map(|line| parse(line));
    let range = |event: Value| event["data"]["from_seq"].as_u64().unwrap()..=event["data"]["to_seq"].as_u64().unwrap();
    let announced: HashSet<u64> = dropped.flat_map(range).collect();
    let mut next = 1;
    for line in lines {
        let seq = seq_of(line);
        assert!(seq >= next, "{line} comes after {next}");
        assert!((next..seq).all(|missing| announced.contains(&missing)), "{next} to {seq} is missing: {line}");
        next = seq + 1;
    }
}

/// The seq of a line, without parsing the rest.
fn seq_of(line: &str) -> u64 {
    let rest = line.strip_prefix("{\"seq\":").unwrap_or_else(|| panic!("{line}"));
    rest.split(',').next().unwrap().parse().unwrap()
}

fn parse(line: &str) -> Value {
    serde_json::from_str(line).unwrap()
}

/// The called tools. Panics if a call is stored twice.
#[track_caller]
fn tools_of(lines: &[String]) -> HashSet<String> {
    let mut tools = HashSet::new();
    for line in lines.iter().filter(|line| line.contains("\"mcp.tool.executed\"")) {
        let event = parse(line);
        let tool = event["data"]["tool_name"].as_str().unwrap().to_owned();
        assert!(tools.insert(tool), "stored twice: {line}");
    }
    tools
}

fn wait_delivered(home: &Home) {
    let mut line = ControlConnection::connect(&home.data_dir().join("control.sock")).unwrap();
    let mut status = || {
        let (_, body) = line.request("GET", "/v1/status", "").unwrap();
        serde_json::from_slice::<Value>(&body).unwrap()["satellite"].take()
    };
    let mut seen = Value::Null;
    wait_for(
        "everything to be delivered",
        || {
            seen = status();
            let done = seen["delivery"]["backlog"] == 0 && seen["events"]["queue_size"] == 0;
            done.then_some(())
        },
        String::new,
    );
}

/// Observations of the test process.
#[derive(Clone, Default)]
struct Observations {
    /// Tools whose call received a response.
    answered: Arc<Mutex<Vec<String>>>,
    /// Received events, one line each.
    received_events: Arc<Mutex<Vec<String>>>,
    /// The reported storage position.
    through: Arc<AtomicU64>,
}

impl Observations {
    fn answered(&self) -> Vec<String> {
        self.answered.lock().unwrap().clone()
    }
}

/// Callers that use a unique tool name per call.
struct Callers {
    socket: PathBuf,
    observations: Observations,
    last: usize,
}

static NEXT: AtomicUsize = AtomicUsize::new(0);

impl Callers {
    fn new(home: &Home, last: usize) -> Self {
        Self { socket: home.data_dir().join("control.sock"), observations: Observations::default(), last }
    }

    fn run_until_killed(&self, satellite: Satellite<'_>, kill_at: usize) {
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| self.follow());
            scope.spawn(|| self.poll_status(&is_over));
            for _ in 0..CALLERS {
                scope.spawn(|| self.call());
            }
            while NEXT.load(Ordering::Acquire) < kill_at {
                thread::sleep(Duration::from_millis(1));
            }
            satellite.kill();
            is_over.store(true, Ordering::Release);
        });
        let known = (
            self.observations.received_events.lock().unwrap().len(),
            self.observations.through.load(Ordering::Acquire),
        );
        assert!(known.0 > 0 && known.1 > 0, "no events or positions were observed: {known:?}");
    }

    fn run_to_the_end(&self) {
        thread::scope(|scope| {
            for _ in 0..CALLERS {
                scope.spawn(|| self.call());
            }
        });
    }

    /// Calls tools until all calls are made or the satellite is gone.
    fn call(&self) {
        let mut line = ControlConnection::connect(&self.socket).unwrap();
        loop {
            let nth = NEXT.fetch_add(1, Ordering::AcqRel);
            if nth >= self.last {
                return;
            }
            let tool = format!("t-{nth:06}");
            let body = format!(r#"{{"selector":{{"server":"sim"}},"tool":"{tool}"}}"#);
            match line.request("POST", "/v1/call", &body) {
                Ok((409, _)) => self.observations.answered.lock().unwrap().push(tool),
                Ok((status, body)) => panic!("{status}: {}", String::from_utf8_lossy(&body)),
                Err(_) => return,
            }
        }
    }

    /// Collects complete events from the event stream.
    fn follow(&self) {
        let mut line = ControlConnection::connect(&self.socket).unwrap();
        line.send("GET", "/v1/events?follow=true", "").unwrap();
        let mut chunks = line.head().map(|_| Chunks { line, rest: Vec::new() }).unwrap();
        while let Ok(Some(event)) = chunks.next() {
            self.observations.received_events.lock().unwrap().push(event);
        }
    }

    /// Polls the storage position.
    fn poll_status(&self, is_over: &AtomicBool) {
        let mut line = ControlConnection::connect(&self.socket).unwrap();
        while !is_over.load(Ordering::Acquire) {
            let Ok((200, body)) = line.request("GET", "/v1/status", "") else { return };
            let status: Value = serde_json::from_slice(&body).unwrap();
            let through = status["satellite"]["journal"]["journalled_through"].as_u64().unwrap();
            self.observations.through.fetch_max(through, Ordering::AcqRel);
            thread::sleep(Duration::from_millis(50));
        }
    }
}

/// HTTP over the control socket, one request after another.
struct ControlConnection(BufReader<UnixStream>);

impl ControlConnection {
    fn connect(socket: &Path) -> io::Result<Self> {
        Ok(Self(BufReader::new(UnixStream::connect(socket)?)))
    }

    fn send(&mut self, method: &str, path: &str, body: &str) -> io::Result<()> {
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: satellite\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        self.0.get_mut().write_all(request.as_bytes())
    }

    /// Reads the response head: status and content length.
    fn head(&mut self) -> io::Result<(u16, Option<usize>)> {
        let (mut line, mut status, mut length) = (String::new(), 0, None);
        loop {
            line.clear();
            if self.0.read_line(&mut line)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let text = line.trim_end().to_ascii_lowercase();
            if text.is_empty() {
                return Ok((status, length));
            }
            if let Some(rest) = text.strip_prefix("http/1.1 ") {
                status = rest[..3].parse().unwrap();
            }
            if let Some(rest) = text.strip_prefix("content-length: ") {
                length = Some(rest.parse().unwrap());
            }
        }
    }

    fn request(&mut self, method: &str, path: &str, body: &str) -> io::Result<(u16, Vec<u8>)> {
        self.send(method, path, body)?;
        let (status, length) = self.head()?;
        let mut body = vec![0; length.unwrap_or(0)];
        self.0.read_exact(&mut body)?;
        Ok((status, body))
    }
}

/// Lines of a chunked response body.
struct Chunks {
    line: ControlConnection,
    rest: Vec<u8>,
}

impl Chunks {
    fn next(&mut self) -> io::Result<Option<String>> {
        loop {
            if let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                return Ok(Some(String::from_utf8(line[..end].to_vec()).unwrap()));
            }
            let mut size = String::new();
            self.line.0.read_line(&mut size)?;
            let Ok(size) = usize::from_str_radix(size.trim_end(), 16) else { return Ok(None) };
            if size == 0 {
                return Ok(None);
            }
            let mut chunk = vec![0; size + 2];
            self.line.0.read_exact(&mut chunk)?;
            self.rest.extend_from_slice(&chunk[..size]);
        }
    }
}

/// The HTTP sink. Some of its requests fail before and some after it has stored the events.
struct Peer {
    url: String,
    received: Arc<Mutex<Received>>,
}

#[derive(Default)]
struct Received {
    requests: u64,
    /// Seqs by idempotency key.
    batches: HashMap<String, Vec<u64>>,
    /// Events by seq.
    events: BTreeMap<u64, String>,
    repeats: u64,
}

impl Peer {
    fn start() -> Self {
        let received = Arc::<Mutex<Received>>::default();
        let (sender, address) = std::sync::mpsc::channel();
        let state = received.clone();
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
                sender.send(listener.local_addr().unwrap()).unwrap();
                axum::serve(listener, Router::new().fallback(receive).with_state(state)).await.unwrap();
            });
        });
        Self { url: format!("http://{}/events", address.recv().unwrap()), received }
    }

    fn reset(&self) {
        *self.received.lock().unwrap() = Received::default();
    }

    /// Asserts that the sink has received exactly the stored events, at least once each.
    #[track_caller]
    fn assert_received(&self, lines: &[String]) {
        let received = self.received.lock().unwrap();
        println!(
            "{} events in {} batches, {} of them again",
            received.events.len(),
            received.batches.len(),
            received.repeats
        );
        // The last events are delivered during the shutdown.
        assert_eq!(received.events.len(), lines.len());
        for line in lines {
            let found = received.events.get(&seq_of(line));
            assert_eq!(found.map(|event| parse(event)), Some(parse(line)));
        }
    }
}

async fn receive(State(received): State<Arc<Mutex<Received>>>, request: Request) -> StatusCode {
    let (parts, body) = request.into_parts();
    let body: Value = serde_json::from_slice(&to_bytes(body, usize::MAX).await.unwrap()).unwrap();
    let key = parts.headers["idempotency-key"].to_str().unwrap().to_owned();
    let events = body["events"].as_array().unwrap();
    let mut received = received.lock().unwrap();
    received.requests += 1;
    if received.requests % 40 == 7 {
        return StatusCode::SERVICE_UNAVAILABLE;
    }
    let seqs: Vec<u64> = events.iter().map(seq).collect();
    let known = received.batches.entry(key).or_insert_with(|| seqs.clone());
    assert_eq!(*known, seqs, "an idempotency key was reused for another batch");
    for event in events {
        let text = event.to_string();
        if let Some(before) = received.events.insert(seq(event), text.clone()) {
            assert_eq!(before, text, "a seq was reused for another event");
            received.repeats += 1;
        }
    }
    // The events are stored, but some responses report a failure.
    if received.requests % 40 == 23 { StatusCode::BAD_GATEWAY } else { StatusCode::OK }
}
