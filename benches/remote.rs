//! Time from the restart of a remote server until its instance is callable, compared with a bare connection, handshake
//! and call; and memory and CPU of 1,000 idle remote instances. Servers are separate processes.
#![allow(clippy::unwrap_used, reason = "a bench panics on any unexpected error")]

#[expect(dead_code, reason = "each bench uses a part of this module")]
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
    BenchReport, CpuClock, NullSink, TIMEOUT, format_duration, format_number, is_online, median, quantile, resident,
    server_everything, spec, start,
};

/// Backoff that never expires during the bench.
const NEVER: Duration = Duration::from_secs(60 * 60);

const SESSION: &str = "mcp-session-id";

/// Number of instances that reconnect with the default backoff.
const RECONNECTING: usize = 100;

const INSTANCES: usize = 1000;
const TEAMS: usize = 100;
const USERS: usize = 10;

const FLEETS: usize = 5;

/// Environment variable that marks a child process; with the value `cpu` the child measures CPU time as well.
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
    runtime.block_on(reconnects());
    runtime.block_on(default_backoff());
    idle();
}

// ---- latency of reconnects ----

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
    completed: Duration,
}

async fn reconnects() {
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
    let columns = ["server", "trigger", "state", "satellite", "bare client", "ratio", "difference"];
    let mut report = BenchReport::new("remote", columns);
    for subject in subjects {
        for (pause, trigger) in [(NEVER, "call"), (subject.pause, "schedule")] {
            let (ours, bare) = compare(&subject, pause).await;
            for (state, time) in [
                ("initialized", (|round| round.initialized) as fn(&RemoteRound) -> Duration),
                ("call completed", |round| round.completed),
            ] {
                // Ratios of adjacent rounds, because the load of the machine varies.
                let ratios = ours.iter().zip(&bare).map(|(ours, bare)| time(ours).div_duration_f64(time(bare)));
                let mut ratios: Vec<f64> = ratios.collect();
                ratios.sort_by(f64::total_cmp);
                let (ours, bare) = (median(ours.iter().map(time)), median(bare.iter().map(time)));
                report.row([
                    subject.name.to_owned(),
                    trigger.to_owned(),
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

/// Measures the satellite and the bare client in turns, each with its own server that was just restarted.
async fn compare(subject: &RemoteSubject, pause: Duration) -> (Vec<RemoteRound>, Vec<RemoteRound>) {
    let reconnect = ReconnectPolicy { backoff_min: pause, backoff_max: pause, ..ReconnectPolicy::default() };
    let policy = Arc::new(Policy { reconnect, ..Policy::default() });
    let (mut server, mut bare_server) =
        (RemoteServerProcess::start(&subject.program), RemoteServerProcess::start(&subject.program));
    let runtime = start(RemoteConnector::new().unwrap(), NullSink, |_| {}).await;
    let spec = server.spec(0, &policy);
    let id = spec.id.clone();
    runtime.install(spec).await.unwrap();
    wait_until(&runtime, &id, is_online).await;

    let (mut ours, mut bare) = (Vec::new(), Vec::new());
    while ours.len() < subject.rounds {
        server.kill();
        wait_until(&runtime, &id, |view| view.connection == Some(ConnectionState::Reconnecting)).await;
        server.restart();
        let round = if pause == NEVER {
            Some(reconnect_by_call(&runtime, &id, subject).await)
        } else {
            let due = runtime.snapshot().get(&id).unwrap().next_retry_at;
            // If the server started too slowly, an attempt may have come too early.
            match due.filter(|due| *due > Instant::now()) {
                Some(due) => Some(reconnect_by_schedule(&runtime, &id, due, subject).await),
                None => None,
            }
        };
        wait_until(&runtime, &id, is_online).await;
        if let Some(round) = round {
            ours.push(round);
            bare_server.kill();
            bare_server.restart();
            bare.push(bare_start(&bare_server, subject).await);
        }
    }
    runtime.shutdown().await;
    (ours, bare)
}

/// Measures a reconnect triggered by a call.
async fn reconnect_by_call(runtime: &RuntimeHandle, id: &InstanceId, subject: &RemoteSubject) -> RemoteRound {
    let began = Instant::now();
    let port = async {
        wait_until(runtime, id, |view| view.port.is_some()).await;
        began.elapsed()
    };
    let (initialized, ()) = tokio::join!(port, call(runtime, id, subject));
    RemoteRound { initialized, completed: began.elapsed() }
}

/// Measures a scheduled reconnect from the time at which it was due, and a call after it.
async fn reconnect_by_schedule(
    runtime: &RuntimeHandle,
    id: &InstanceId,
    due: Instant,
    subject: &RemoteSubject,
) -> RemoteRound {
    wait_until(runtime, id, |view| view.port.is_some()).await;
    let initialized = due.elapsed();
    call(runtime, id, subject).await;
    RemoteRound { initialized, completed: due.elapsed() }
}

async fn call(runtime: &RuntimeHandle, id: &InstanceId, subject: &RemoteSubject) {
    let arguments = RawValue::from_string(subject.echo.to_owned()).unwrap();
    let result = runtime.call(id, "echo", Some(arguments), None).await.unwrap();
    assert!(result.get().contains("hello"));
}

/// Measures the baseline: a connection, the handshake and the call.
async fn bare_start(server: &RemoteServerProcess, subject: &RemoteSubject) -> RemoteRound {
    let client = reqwest::Client::builder().http1_only().no_proxy().tcp_nodelay(true).build().unwrap();
    let (url, mut session) = (server.url(), None);
    let mut post = async |message: String| {
        let request = client.post(&url).header(CONTENT_TYPE, "application/json");
        let mut request = request.header(ACCEPT, "application/json, text/event-stream").body(message);
        if let Some(session) = &session {
            request = request.header(SESSION, session).header("mcp-protocol-version", "2025-11-25");
        }
        let response = request.send().await.unwrap().error_for_status().unwrap();
        session = session.take().or(response.headers().get(SESSION).cloned());
        response.text().await.unwrap()
    };
    let began = Instant::now();
    let initialize = post(r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"bench","version":"0"}}}"#.to_owned()).await;
    let initialized = began.elapsed();
    assert!(initialize.contains("serverInfo"));
    post(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#.to_owned()).await;
    let arguments = subject.echo;
    let result = post(format!(
        r#"{{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{{"name":"echo","arguments":{arguments}}}}}"#
    ))
    .await;
    assert!(result.contains("hello"));
    RemoteRound { initialized, completed: began.elapsed() }
}

async fn wait_until(runtime: &RuntimeHandle, id: &InstanceId, condition: impl FnMut(&InstanceView) -> bool) {
    tokio::time::timeout(TIMEOUT, runtime.wait_for(id, condition)).await.unwrap().unwrap();
}

async fn wait_until_all(runtime: &RuntimeHandle, condition: impl Fn(&InstanceView) -> bool) {
    let mut watch = runtime.watch();
    let all = watch.wait_for(|snapshot| snapshot.iter().all(|view| condition(view)));
    tokio::time::timeout(TIMEOUT, all).await.unwrap().unwrap();
}

// ---- reconnects with the default backoff ----

/// Duration of each outage, and the time of the first successful attempt, in seconds after the loss.
const OUTAGES: [(u64, u64); 3] = [(2, 3), (5, 7), (10, 15)];

async fn default_backoff() {
    let columns = ["outage", "successful attempt after loss", "callable after return, p50", "max"];
    let mut report = BenchReport::new("remote_schedule", columns);
    let mut server =
        RemoteServerProcess::start(&[env!("CARGO_BIN_EXE_satellite"), "sim-server", "--http"].map(str::to_owned));
    let runtime = start(RemoteConnector::new().unwrap(), NullSink, |_| {}).await;
    let policy = Arc::new(Policy::default());
    for nth in 0..RECONNECTING {
        runtime.install(server.spec(nth, &policy)).await.unwrap();
    }
    wait_until_all(&runtime, is_online).await;
    for (outage, attempt) in OUTAGES {
        server.kill();
        tokio::time::sleep(Duration::from_secs(outage)).await;
        server.restart();
        let returned = Instant::now();
        wait_until_all(&runtime, is_online).await;
        let snapshot = runtime.snapshot();
        let waits = snapshot.iter().map(|view| view.initialized_at.unwrap().saturating_duration_since(returned));
        let waits: Vec<Duration> = waits.collect();
        let [p50, max] = [0.5, 1.0].map(|fraction| format_duration(quantile(waits.iter().copied(), fraction)));
        report.row([format!("{outage} s"), format!("{attempt} s ± 10 %"), p50, max]);
    }
    runtime.shutdown().await;
    report.publish();
}

// ---- idle instances ----

#[derive(Serialize, Deserialize)]
struct IdleFindings {
    bytes: usize,
    bytes_max: usize,
    /// CPU time of a minute without health checks, and of one in which each instance is checked once.
    minutes: Option<[Duration; 2]>,
}

fn idle() {
    let mut report = BenchReport::new("remote_idle", ["1,000 idle remote instances", "each", "total"]);
    let mut found: Vec<IdleFindings> = (1..FLEETS).map(|_| run("memory")).collect();
    found.push(run("cpu"));
    let minutes = found.iter().find_map(|found| found.minutes).unwrap();
    found.sort_by_key(|found| found.bytes);
    let found = found.swap_remove(FLEETS / 2);
    let instances = INSTANCES as f64;
    let kib = |bytes: usize| bytes as f64 / 1024.0;
    for (name, bytes) in [("RSS", found.bytes), ("peak RSS", found.bytes_max)] {
        let [each, all] = [format_number(kib(bytes) / instances), format_number(kib(bytes) / 1024.0)];
        report.row([name.to_owned(), format!("{each} KiB"), format!("{all} MiB")]);
    }
    let names = ["CPU per minute, no health checks", "CPU per minute, one health check each"];
    for (name, cpu_time) in names.into_iter().zip(minutes) {
        report.row([name.to_owned(), format_duration(cpu_time.div_f64(instances)), format_duration(cpu_time)]);
    }
    report.goal("RSS per idle remote instance", 80.0, "KiB", kib(found.bytes) / instances);
    report.publish();
}

/// Runs a fleet in a separate process, so that it does not reuse memory of another fleet.
fn run(kind: &str) -> IdleFindings {
    let child = Command::new(std::env::current_exe().unwrap()).env(CHILD, kind).stderr(Stdio::inherit()).output();
    let child = child.unwrap();
    assert!(child.status.success(), "the child process failed");
    serde_json::from_slice(&child.stdout).unwrap()
}

#[expect(clippy::print_stdout, reason = "the parent process reads the output")]
fn child(cpu: bool) {
    let (limit, needed) = (raise_descriptor_limit().unwrap(), 3 * INSTANCES as u64);
    assert!(limit >= needed, "the hard limit of open files (`ulimit -Hn`) is {limit}; this bench needs {needed}");
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
    wait_until_all(&runtime, is_online).await;
    assert_eq!(runtime.snapshot().len(), INSTANCES);
    let online = Instant::now();

    // Wait until temporary memory is freed: queued events, connections of finished requests and pages held by the
    // allocator. Each instance keeps one connection, for its event stream.
    runtime.flush().await;
    while descriptors() > open_before + INSTANCES {
        assert!(online.elapsed() < TIMEOUT, "{} descriptors are open, not {INSTANCES}", descriptors() - open_before);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let (bytes, bytes_max) = resident();
    let minutes = if cpu { Some(cpu_in_minutes(&runtime, online).await) } else { None };
    runtime.shutdown().await;
    IdleFindings { bytes: bytes - before, bytes_max: bytes_max - before, minutes }
}

async fn cpu_in_minutes(runtime: &RuntimeHandle, online: Instant) -> [Duration; 2] {
    let quiet = cpu_in_minute(runtime, 0).await;
    tokio::time::sleep(BEFORE_CHECKS.saturating_sub(online.elapsed())).await;
    [quiet, cpu_in_minute(runtime, INSTANCES).await]
}

/// Returns the CPU time of a minute in which this many instances are checked.
async fn cpu_in_minute(runtime: &RuntimeHandle, checked: usize) -> Duration {
    let (clock, began) = (CpuClock::start(), Timestamp::now());
    tokio::time::sleep(MINUTE).await;
    let cpu_time = clock.elapsed();
    let is_checked = |view: &&Arc<InstanceView>| view.counters.last_check().is_some_and(|at| at > began);
    assert_eq!(runtime.snapshot().iter().filter(is_checked).count(), checked);
    cpu_time
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
        server.restart();
        server
    }

    fn restart(&mut self) {
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
            assert!(began.elapsed() < TIMEOUT, "{} does not listen", self.program[0]);
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
