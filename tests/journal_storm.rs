//! `kill -9` in the middle of a storm of 50,000 events, held against what this process, which causes them, has noted: what
//! it was answered, what it was told with which number, and how far it was told that they are stored.
//!
//! `STORM_KILLS` says how often (five times by default, which is one storm), `STORM_EVENTS` how large a storm is.

#![cfg(all(feature = "cli", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
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

#[allow(dead_code, reason = "shared with the tests of the command line, which need all of it")]
#[path = "cli/support.rs"]
mod support;

use support::{Home, Satellite, seq, wait_for};

const CALLERS: usize = 16;
const KILLS_IN_A_STORM: usize = 5;

fn from_environment(name: &str, default: usize) -> usize {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

#[test]
fn what_was_stored_before_a_kill_is_there_once_in_order_and_gets_where_it_was_to_go() {
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
    peer.forget();
    NEXT.store(0, Ordering::Release);
    let home = Home::new();
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
        // Somewhere in the middle of its part of the storm, and not at the same place in each run of this.
        let nanoseconds = SystemTime::UNIX_EPOCH.elapsed().unwrap().subsec_nanos() as usize;
        let part = events / kills;
        let kill_at = nth * part + part / 10 + nanoseconds % (part * 8 / 10);
        let satellite = home.run(&args);
        if nth == 0 {
            // Each call of a server that is stopped is refused and told: nothing but events is worked on. It stays so.
            home.wait_online("sim");
            home.satellite(&["stop", "sim"]).exits(0);
        }
        let cause = Cause::new(&home, events);
        cause.until_killed(satellite, kill_at);
        stored = checked(&home, &cause.log, &stored);
        answered.extend(cause.log.answered.lock().unwrap().drain(..));
        println!("killed at {kill_at}: {} events stored, {} calls answered", stored.len(), answered.len());
    }

    let mut last = home.run(&args);
    let cause = Cause::new(&home, events);
    cause.to_the_end();
    wait_delivered(&home);
    last.signal(nix::sys::signal::Signal::SIGTERM);
    last.ended().exits(0);
    let all = checked(&home, &cause.log, &stored);
    let tools = tools_of(&all);
    println!("{} of {} calls that were answered are stored", tools.len(), answered.len() + cause.log.answered().len());
    assert!(cause.log.answered().iter().all(|tool| tools.contains(tool)), "nothing is missing where nobody was killed");
    peer.has_all(&all);
}

/// What is stored now: all that was stored before, and what was told since, as it was told. Nobody runs, so the files speak
/// for themselves.
#[track_caller]
fn checked(home: &Home, log: &Log, before: &[String]) -> Vec<String> {
    let stored: Vec<String> =
        home.satellite(&["events", "--json"]).exits(0).stdout.lines().map(ToOwned::to_owned).collect();
    assert!(stored.len() >= before.len() && stored[..before.len()] == *before, "what was stored is as it was");
    in_order(&stored);
    let (through, last) = (log.through.load(Ordering::Acquire), stored.last().map_or(0, |line| seq_of(line)));
    assert!(last >= through, "{last} of {through}");
    for line in &*log.told.lock().unwrap() {
        let at = stored.binary_search_by_key(&seq_of(line), |line| seq_of(line));
        assert_eq!(at.ok().map(|at| &stored[at]), Some(line), "it is as it was told");
    }
    tools_of(&stored);
    stored
}

/// Numbers count up from one, and those that are missing are announced: events that had a number when the satellite was
/// killed, and were not stored yet.
#[track_caller]
fn in_order(lines: &[String]) {
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

/// Without parsing all of it: the lines are ours.
fn seq_of(line: &str) -> u64 {
    let rest = line.strip_prefix("{\"seq\":").unwrap_or_else(|| panic!("{line}"));
    rest.split(',').next().unwrap().parse().unwrap()
}

fn parse(line: &str) -> Value {
    serde_json::from_str(line).unwrap()
}

/// The tools that were called, each once.
#[track_caller]
fn tools_of(lines: &[String]) -> HashSet<String> {
    let mut tools = HashSet::new();
    for line in lines.iter().filter(|line| line.contains("\"mcp.tool.executed\"")) {
        let event = parse(line);
        let tool = event["data"]["tool_name"].as_str().unwrap().to_owned();
        assert!(tools.insert(tool), "told twice: {line}");
    }
    tools
}

fn wait_delivered(home: &Home) {
    let mut line = Line::connect(&home.data_dir().join("control.sock")).unwrap();
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

/// What this process knows.
#[derive(Clone, Default)]
struct Log {
    /// Tools whose call was answered.
    answered: Arc<Mutex<Vec<String>>>,
    /// Events as they were told, one a line.
    told: Arc<Mutex<Vec<String>>>,
    /// Up to this one events are stored.
    through: Arc<AtomicU64>,
}

impl Log {
    fn answered(&self) -> Vec<String> {
        self.answered.lock().unwrap().clone()
    }
}

/// Whoever calls tools, each under another name.
struct Cause {
    socket: PathBuf,
    log: Log,
    last: usize,
}

static NEXT: AtomicUsize = AtomicUsize::new(0);

impl Cause {
    fn new(home: &Home, last: usize) -> Self {
        Self { socket: home.data_dir().join("control.sock"), log: Log::default(), last }
    }

    fn until_killed(&self, satellite: Satellite<'_>, kill_at: usize) {
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| self.follow());
            scope.spawn(|| self.look(&over));
            for _ in 0..CALLERS {
                scope.spawn(|| self.call());
            }
            while NEXT.load(Ordering::Acquire) < kill_at {
                thread::sleep(Duration::from_millis(1));
            }
            satellite.kill();
            over.store(true, Ordering::Release);
        });
        let known = (self.log.told.lock().unwrap().len(), self.log.through.load(Ordering::Acquire));
        assert!(known.0 > 0 && known.1 > 0, "this is no storm in which anything is known: {known:?}");
    }

    fn to_the_end(&self) {
        thread::scope(|scope| {
            for _ in 0..CALLERS {
                scope.spawn(|| self.call());
            }
        });
    }

    /// Until all is called, or nobody answers.
    fn call(&self) {
        let mut line = Line::connect(&self.socket).unwrap();
        loop {
            let nth = NEXT.fetch_add(1, Ordering::AcqRel);
            if nth >= self.last {
                return;
            }
            let tool = format!("t-{nth:06}");
            let body = format!(r#"{{"selector":{{"server":"sim"}},"tool":"{tool}"}}"#);
            match line.request("POST", "/v1/call", &body) {
                Ok((409, _)) => self.log.answered.lock().unwrap().push(tool),
                Ok((status, body)) => panic!("{status}: {}", String::from_utf8_lossy(&body)),
                Err(_) => return,
            }
        }
    }

    /// Listens to what is told, as far as it comes whole.
    fn follow(&self) {
        let mut line = Line::connect(&self.socket).unwrap();
        line.send("GET", "/v1/events?follow=true", "").unwrap();
        let mut chunks = line.head().map(|_| Chunks { line, rest: Vec::new() }).unwrap();
        while let Ok(Some(event)) = chunks.next() {
            self.log.told.lock().unwrap().push(event);
        }
    }

    /// Looks how far events are stored.
    fn look(&self, over: &AtomicBool) {
        let mut line = Line::connect(&self.socket).unwrap();
        while !over.load(Ordering::Acquire) {
            let Ok((200, body)) = line.request("GET", "/v1/status", "") else { return };
            let status: Value = serde_json::from_slice(&body).unwrap();
            let through = status["satellite"]["journal"]["journalled_through"].as_u64().unwrap();
            self.log.through.fetch_max(through, Ordering::AcqRel);
            thread::sleep(Duration::from_millis(50));
        }
    }
}

/// HTTP over the control socket, one request after another.
struct Line(BufReader<UnixStream>);

impl Line {
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

    /// The status, and the length if there is one.
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

/// Lines that come in chunks.
struct Chunks {
    line: Line,
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

/// Whoever gets the events: it is not always there, and does not always say what it has taken.
struct Peer {
    url: String,
    took: Arc<Mutex<Took>>,
}

#[derive(Default)]
struct Took {
    requests: u64,
    /// By key, the numbers.
    batches: HashMap<String, Vec<u64>>,
    /// By number, the event; and how often it came again.
    events: BTreeMap<u64, String>,
    repeats: u64,
}

impl Peer {
    fn start() -> Self {
        let took = Arc::<Mutex<Took>>::default();
        let (sender, address) = std::sync::mpsc::channel();
        let state = took.clone();
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
                sender.send(listener.local_addr().unwrap()).unwrap();
                axum::serve(listener, Router::new().fallback(take).with_state(state)).await.unwrap();
            });
        });
        Self { url: format!("http://{}/events", address.recv().unwrap()), took }
    }

    fn forget(&self) {
        *self.took.lock().unwrap() = Took::default();
    }

    /// At least once, as they are stored, and nothing else.
    #[track_caller]
    fn has_all(&self, lines: &[String]) {
        let took = self.took.lock().unwrap();
        println!("{} events in {} batches, {} of them again", took.events.len(), took.batches.len(), took.repeats);
        // The last of them are told while the satellite ends.
        assert_eq!(took.events.len(), lines.len());
        for line in lines {
            let found = took.events.get(&seq_of(line));
            assert_eq!(found.map(|event| parse(event)), Some(parse(line)));
        }
    }
}

async fn take(State(took): State<Arc<Mutex<Took>>>, request: Request) -> StatusCode {
    let (parts, body) = request.into_parts();
    let body: Value = serde_json::from_slice(&to_bytes(body, usize::MAX).await.unwrap()).unwrap();
    let key = parts.headers["idempotency-key"].to_str().unwrap().to_owned();
    let events = body["events"].as_array().unwrap();
    let mut took = took.lock().unwrap();
    took.requests += 1;
    if took.requests % 40 == 7 {
        return StatusCode::SERVICE_UNAVAILABLE;
    }
    let seqs: Vec<u64> = events.iter().map(seq).collect();
    let known = took.batches.entry(key).or_insert_with(|| seqs.clone());
    assert_eq!(*known, seqs, "one id, one batch");
    for event in events {
        let text = event.to_string();
        if let Some(before) = took.events.insert(seq(event), text.clone()) {
            assert_eq!(before, text, "one number, one event");
            took.repeats += 1;
        }
    }
    // Taken, and this is not always said.
    if took.requests % 40 == 23 { StatusCode::BAD_GATEWAY } else { StatusCode::OK }
}
