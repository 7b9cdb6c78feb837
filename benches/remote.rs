//! Time from the return of a remote server until its instance is callable, compared with a bare connect and handshake
//! with the same server; and memory and CPU of a thousand idle remote instances. Servers are separate processes.
#![allow(clippy::unwrap_used, reason = "a bench that cannot go on says so by panicking")]

#[expect(dead_code, reason = "each bench uses its part of it")]
mod common;

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use mcp_satellite::connect::process::raise_descriptor_limit;
use mcp_satellite::connect::remote::RemoteConnector;
use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::policy::{Policy, ReconnectPolicy};
use mcp_satellite_actors::model::remote::ConnectionState;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::spec::{InstanceSpec, RemoteTransport, ServerTarget};
use reqwest::header::{ACCEPT, CONTENT_TYPE};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use common::{
    BenchReport, CpuClock, GIVE_UP, NullSink, format_duration, format_number, is_online, median, quantile, resident,
    server_everything, spec, start,
};

/// Backoff that never expires during the bench.
const NEVER: Duration = Duration::from_secs(60 * 60);

const SESSION: &str = "mcp-session-id";

const WAITING: usize = 100;

const INSTANCES: usize = 1000;
const TEAMS: usize = 100;
const USERS: usize = 10;

const FLEETS: usize = 5;

/// Environment variable that marks a child process; its value selects whether CPU time is measured, too.
const CHILD: &str = "SATELLITE_BENCH_REMOTE";

const MINUTE: Duration = Duration::from_secs(60);

/// Time after connecting at which the minute with health checks begins: by default each instance is checked once, after
/// 120 s ± 10 %.
const BEFORE_CHECKS: Duration = Duration::from_secs(90);

fn main() {
    match std::env::var(CHILD).as_deref() {
        Ok(cpu) => child(cpu == "cpu"),
        Err(_) => parent(),
    }
}

fn parent() {
    // reqwest is built without a provider; no connection here is encrypted.
    rustls::crypto::ring::default_provider().install_default().unwrap();
    let runtime = common::tokio_runtime();
    runtime.block_on(returns());
    runtime.block_on(schedule());
    idle();
}

// ---- latency of a reconnect ----

struct RemoteSubject {
    name: &'static str,
    program: Vec<String>,
    rounds: usize,
    echo: &'static str,
    /// Backoff between attempts; the server restarts within it.
    pause: Duration,
}

struct RemoteRound {
    initialized: Duration,
    answered: Duration,
}

async fn returns() {
    let satellite = env!("CARGO_BIN_EXE_satellite").to_owned();
    let mut subjects = vec![RemoteSubject {
        name: "sim-server",
        program: vec![satellite, "sim-server".to_owned(), "--http".to_owned()],
        rounds: 101,
        echo: r#"{"text":"hello"}"#,
        pause: Duration::from_millis(200),
    }];
    if let Some(script) = server_everything() {
        subjects.push(RemoteSubject {
            name: "server-everything",
            program: ["node".to_owned(), script, "streamableHttp".to_owned()].to_vec(),
            rounds: 21,
            echo: r#"{"message":"hello"}"#,
            pause: Duration::from_millis(1500),
        });
    }
    let columns = ["server", "brought back by", "until", "ours", "bare", "ratio", "difference"];
    let mut report = BenchReport::new("remote", columns);
    for subject in subjects {
        for (pause, by) in [(NEVER, "a call"), (subject.pause, "its schedule")] {
            let (ours, bare) = compare(&subject, pause).await;
            for (state, of) in [
                ("initialized", (|round| round.initialized) as fn(&RemoteRound) -> Duration),
                ("a call is answered", |round| round.answered),
            ] {
                // Ratios of adjacent rounds, because the load of the machine varies.
                let ratios = ours.iter().zip(&bare).map(|(ours, bare)| of(ours).div_duration_f64(of(bare)));
                let mut ratios: Vec<f64> = ratios.collect();
                ratios.sort_by(f64::total_cmp);
                let (ours, bare) = (median(ours.iter().map(of)), median(bare.iter().map(of)));
                report.row([
                    subject.name.to_owned(),
                    by.to_owned(),
                    state.to_owned(),
                    format_duration(ours),
                    format_duration(bare),
                    format_number(ratios[ratios.len() / 2]),
                    format_duration(ours.saturating_sub(bare)),
                ]);
            }
        }
    }
    report.publish();
}

/// Measures ours and the bare client in turns, each with its own server that was just restarted.
async fn compare(subject: &RemoteSubject, pause: Duration) -> (Vec<RemoteRound>, Vec<RemoteRound>) {
    let reconnect = ReconnectPolicy { backoff_min: pause, backoff_max: pause, ..ReconnectPolicy::default() };
    let policy = Arc::new(Policy { reconnect, ..Policy::default() });
    let (mut server, mut other) =
        (RemoteServerProcess::start(&subject.program), RemoteServerProcess::start(&subject.program));
    let runtime = start(RemoteConnector::new().unwrap(), NullSink, |_| {}).await;
    let spec = server.spec(0, &policy);
    let id = spec.id.clone();
    runtime.install(spec).await.unwrap();
    until(&runtime, &id, is_online).await;

    let (mut ours, mut bare) = (Vec::new(), Vec::new());
    while ours.len() < subject.rounds {
        server.kill();
        until(&runtime, &id, |view| view.connection == Some(ConnectionState::Reconnecting)).await;
        server.start_again();
        let round = if pause == NEVER {
            Some(called(&runtime, &id, subject).await)
        } else {
            let due = runtime.snapshot().get(&id).unwrap().next_retry_at;
            // If the server started too slowly, an attempt may have come too early.
            match due.filter(|due| *due > Instant::now()) {
                Some(due) => Some(awaited(&runtime, &id, due, subject).await),
                None => None,
            }
        };
        until(&runtime, &id, is_online).await;
        if let Some(round) = round {
            ours.push(round);
            other.kill();
            other.start_again();
            bare.push(bare_start(&other, subject).await);
        }
    }
    runtime.shutdown().await;
    (ours, bare)
}

/// Measures a reconnect triggered by a call.
async fn called(runtime: &RuntimeHandle, id: &InstanceId, subject: &RemoteSubject) -> RemoteRound {
    let began = Instant::now();
    let look_on = async {
        until(runtime, id, |view| view.port.is_some()).await;
        began.elapsed()
    };
    let (initialized, ()) = tokio::join!(look_on, call(runtime, id, subject));
    RemoteRound { initialized, answered: began.elapsed() }
}

/// Measures a scheduled reconnect; the call follows.
async fn awaited(runtime: &RuntimeHandle, id: &InstanceId, due: Instant, subject: &RemoteSubject) -> RemoteRound {
    until(runtime, id, |view| view.port.is_some()).await;
    let initialized = due.elapsed();
    call(runtime, id, subject).await;
    RemoteRound { initialized, answered: due.elapsed() }
}

async fn call(runtime: &RuntimeHandle, id: &InstanceId, subject: &RemoteSubject) {
    let arguments = RawValue::from_string(subject.echo.to_owned()).unwrap();
    let answer = runtime.call(id, "echo", Some(arguments), None).await.unwrap();
    assert!(answer.get().contains("hello"));
}

/// Measures the minimum: a connection, the handshake and the call.
async fn bare_start(server: &RemoteServerProcess, subject: &RemoteSubject) -> RemoteRound {
    let client = reqwest::Client::builder().http1_only().no_proxy().tcp_nodelay(true).build().unwrap();
    let (url, mut session) = (server.url(), None);
    let mut post = async |message: String| {
        let request = client.post(&url).header(CONTENT_TYPE, "application/json");
        let mut request = request.header(ACCEPT, "application/json, text/event-stream").body(message);
        if let Some(session) = &session {
            request = request.header(SESSION, session).header("mcp-protocol-version", "2025-11-25");
        }
        let answer = request.send().await.unwrap().error_for_status().unwrap();
        session = session.take().or(answer.headers().get(SESSION).cloned());
        answer.text().await.unwrap()
    };
    let began = Instant::now();
    let greeting = post(r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"bench","version":"0"}}}"#.to_owned()).await;
    let initialized = began.elapsed();
    assert!(greeting.contains("serverInfo"));
    post(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#.to_owned()).await;
    let arguments = subject.echo;
    let answer = post(format!(
        r#"{{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{{"name":"echo","arguments":{arguments}}}}}"#
    ))
    .await;
    assert!(answer.contains("hello"));
    RemoteRound { initialized, answered: began.elapsed() }
}

async fn until(runtime: &RuntimeHandle, id: &InstanceId, wanted: impl FnMut(&InstanceView) -> bool) {
    tokio::time::timeout(GIVE_UP, runtime.wait_for(id, wanted)).await.unwrap().unwrap();
}

async fn until_all(runtime: &RuntimeHandle, wanted: impl Fn(&InstanceView) -> bool) {
    let mut watch = runtime.watch();
    let all = watch.wait_for(|snapshot| snapshot.iter().all(|view| wanted(view)));
    tokio::time::timeout(GIVE_UP, all).await.unwrap().unwrap();
}

// ---- waits of the default backoff ----

/// Outages in seconds, and the attempt that first succeeds after each, in seconds after the loss.
const OUTAGES: [(u64, u64); 3] = [(2, 3), (5, 7), (10, 15)];

async fn schedule() {
    let columns = ["the server was away for", "attempt, from the loss", "callable after its return", "the last of 100"];
    let mut report = BenchReport::new("remote_schedule", columns);
    let mut server =
        RemoteServerProcess::start(&[env!("CARGO_BIN_EXE_satellite"), "sim-server", "--http"].map(str::to_owned));
    let runtime = start(RemoteConnector::new().unwrap(), NullSink, |_| {}).await;
    let policy = Arc::new(Policy::default());
    for nth in 0..WAITING {
        runtime.install(server.spec(nth, &policy)).await.unwrap();
    }
    until_all(&runtime, is_online).await;
    for (away, attempt) in OUTAGES {
        server.kill();
        tokio::time::sleep(Duration::from_secs(away)).await;
        server.start_again();
        let back = Instant::now();
        until_all(&runtime, is_online).await;
        let snapshot = runtime.snapshot();
        let waits = snapshot.iter().map(|view| view.initialized_at.unwrap().saturating_duration_since(back));
        let waits: Vec<Duration> = waits.collect();
        let [middle, last] = [0.5, 1.0].map(|part| format_duration(quantile(waits.iter().copied(), part)));
        report.row([format!("{away} s"), format!("{attempt} s ± 10 %"), middle, last]);
    }
    runtime.shutdown().await;
    report.publish();
}

// ---- a thousand idle instances ----

#[derive(Serialize, Deserialize)]
struct IdleFindings {
    bytes: usize,
    bytes_at_most: usize,
    /// CPU time of a minute without health checks, and of one in which each instance is checked once.
    minutes: Option<[Duration; 2]>,
}

fn idle() {
    let mut report = BenchReport::new("remote_idle", ["1,000 remote instances, idle", "each", "all"]);
    let mut found: Vec<IdleFindings> = (1..FLEETS).map(|_| run("memory")).collect();
    found.push(run("cpu"));
    let minutes = found.iter().find_map(|found| found.minutes).unwrap();
    found.sort_by_key(|found| found.bytes);
    let found = found.swap_remove(FLEETS / 2);
    let instances = INSTANCES as f64;
    let kib = |bytes: usize| bytes as f64 / 1024.0;
    for (name, bytes) in [("memory", found.bytes), ("memory, at most", found.bytes_at_most)] {
        let [each, all] = [format_number(kib(bytes) / instances), format_number(kib(bytes) / 1024.0)];
        report.row([name.to_owned(), format!("{each} KiB"), format!("{all} MiB")]);
    }
    let of = ["CPU of a minute without checks", "CPU of a minute in which each is checked"];
    for (name, taken) in of.into_iter().zip(minutes) {
        report.row([name.to_owned(), format_duration(taken.div_f64(instances)), format_duration(taken)]);
    }
    report.goal("memory of each idle remote instance", 80.0, "KiB", kib(found.bytes) / instances);
    report.publish();
}

/// Runs a fleet in a separate process, so that it does not reuse memory of another fleet.
fn run(kind: &str) -> IdleFindings {
    let child = Command::new(std::env::current_exe().unwrap()).env(CHILD, kind).stderr(Stdio::inherit()).output();
    let child = child.unwrap();
    assert!(child.status.success(), "the fleet did not come up");
    serde_json::from_slice(&child.stdout).unwrap()
}

#[expect(clippy::print_stdout, reason = "what the parent reads")]
fn child(cpu: bool) {
    let (limit, needed) = (raise_descriptor_limit().unwrap(), 3 * INSTANCES as u64);
    assert!(limit >= needed, "the hard limit of open files (`ulimit -Hn`) is {limit} here, and this needs {needed}");
    let found = common::tokio_runtime().block_on(fleet(cpu));
    println!("{}", serde_json::to_string(&found).unwrap());
}

async fn fleet(cpu: bool) -> IdleFindings {
    let server =
        RemoteServerProcess::start(&[env!("CARGO_BIN_EXE_satellite"), "sim-server", "--http"].map(str::to_owned));
    let connector = RemoteConnector::new().unwrap();
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let ((before, _), open_before) = (resident(), descriptors());
    let policy = Arc::new(Policy::default());
    let specs: Vec<InstanceSpec> = (0..INSTANCES).map(|nth| server.spec(nth, &policy)).collect();
    let runtime = start(connector, NullSink, |_| {}).await;
    for spec in specs {
        runtime.install(spec).await.unwrap();
    }
    until_all(&runtime, is_online).await;
    assert_eq!(runtime.snapshot().len(), INSTANCES);
    let online = Instant::now();

    // Wait until temporary memory is freed: queued events, connections of finished requests and pages held by the
    // allocator. Each instance keeps one connection, for its event stream.
    runtime.flush().await;
    while descriptors() > open_before + INSTANCES {
        assert!(online.elapsed() < GIVE_UP, "{} descriptors are open, not {INSTANCES}", descriptors() - open_before);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let (bytes, bytes_at_most) = resident();
    let minutes = if cpu { Some(minutes(&runtime, online).await) } else { None };
    runtime.shutdown().await;
    IdleFindings { bytes: bytes - before, bytes_at_most: bytes_at_most - before, minutes }
}

async fn minutes(runtime: &RuntimeHandle, online: Instant) -> [Duration; 2] {
    let quiet = minute(runtime, 0).await;
    tokio::time::sleep(BEFORE_CHECKS.saturating_sub(online.elapsed())).await;
    [quiet, minute(runtime, INSTANCES).await]
}

/// Returns the CPU time of a minute in which this many instances are checked.
async fn minute(runtime: &RuntimeHandle, checked: usize) -> Duration {
    let (clock, began) = (CpuClock::start(), Timestamp::now());
    tokio::time::sleep(MINUTE).await;
    let taken = clock.elapsed();
    let is_checked = |view: &&Arc<InstanceView>| view.counters.last_check().is_some_and(|at| at > began);
    assert_eq!(runtime.snapshot().iter().filter(is_checked).count(), checked);
    taken
}

// ---- server process ----

struct RemoteServerProcess {
    program: Vec<String>,
    port: u16,
    child: Option<Child>,
}

impl RemoteServerProcess {
    fn start(program: &[String]) -> Self {
        // Outside the range of ephemeral ports: a client whose own port equals the target would connect to itself.
        let is_free = |port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
        let first = u16::try_from(std::process::id() % 10_000).unwrap();
        let port = (0..10_000).map(|offset| 20_000 + (first + offset) % 10_000).find(is_free).unwrap();
        let mut server = Self { program: program.to_vec(), port, child: None };
        server.start_again();
        server
    }

    fn start_again(&mut self) {
        let mut command = Command::new(&self.program[0]);
        command.args(&self.program[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        if self.program.last().is_some_and(|last| last == "--http") {
            command.arg(format!("127.0.0.1:{}", self.port));
        } else {
            command.env("PORT", self.port.to_string());
        }
        self.child = Some(command.spawn().unwrap());
        let began = Instant::now();
        while TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).is_err() {
            assert!(began.elapsed() < GIVE_UP, "{} does not listen", self.program[0]);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}/mcp", self.port)
    }

    fn spec(&self, nth: usize, policy: &Arc<Policy>) -> InstanceSpec {
        let target = ServerTarget::Remote { transport: RemoteTransport::Http, url: self.url(), health_url: None };
        InstanceSpec { target, ..spec(nth, TEAMS, USERS, &self.program[..1], policy) }
    }
}

impl Drop for RemoteServerProcess {
    fn drop(&mut self) {
        self.kill();
    }
}
