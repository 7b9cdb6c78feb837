//! A thousand remote instances of one server, which dies and returns: real sockets, the whole runtime, another process.
//!
//! They must not come back as one, none may try twice at once, all must be back, and what the outage cost must be given
//! back: descriptors and memory. These are counted for this process, so there is one test here.

#![cfg(all(feature = "cli", feature = "remote", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use jiff::Timestamp;
use mcp_satellite::connect::process::raise_descriptor_limit;
use mcp_satellite::connect::remote::RemoteConnector;
use mcp_satellite::connect::sim::HttpStats;
use mcp_satellite_actors::model::event::Event;
use mcp_satellite_actors::model::ids::{InstallationId, RunNumber};
use mcp_satellite_actors::model::policy::{BatchPolicy, Policy};
use mcp_satellite_actors::model::remote::ConnectionState;
use mcp_satellite_actors::model::spec::{
    ConfigTier, ConfigValue as Configured, InstanceConfig, InstanceSpec, ProcessLifetime, RemoteTransport,
    ServerTarget, UpdateMethod,
};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::seam::{
    Connector, EventSink, LineEvent, LineOutput, OpenError, ProcessLink, ServerLine, SinkAnswer, SinkBatch,
};
use mcp_satellite_actors::{RuntimeHandle, RuntimeOptions, ShutdownReport};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const INSTANCES: usize = 1000;
const TEAMS: usize = 50;

/// When a state that was waited for is given up. Far beyond what a loaded machine needs.
const GIVE_UP: Duration = Duration::from_secs(120);

/// What another outage may leave on the heap for each instance, in bytes. Tables do not shrink, and the queue of events is
/// one that grows by half a megabyte at once; a message, a timer or a buffer that stayed with each would be more.
const KEPT_EACH: usize = 1024;

/// Counts what is on the heap: the kernel's idea of our memory says more of the allocator than of us.
struct Counting;

static HEAP: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: everything is left to the system's allocator; counting touches no memory of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HEAP.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        HEAP.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are the same.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// What this process holds.
#[derive(Debug, Clone, Copy)]
struct Held {
    descriptors: usize,
    heap: usize,
}

impl Held {
    fn now() -> Self {
        let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
        Self { descriptors, heap: HEAP.load(Ordering::Relaxed) }
    }

    /// Waits until so many descriptors are left: the pool lets go of connections after some seconds.
    async fn with(descriptors: usize) -> Self {
        let what = format!("{descriptors} descriptors are left");
        until(&what, async || Self::now(), |now| now.descriptors == descriptors).await
    }
}

/// The schedule of every attempt, as it was told: by number, the delays of all instances in milliseconds.
#[derive(Default)]
struct Told {
    scheduled: BTreeMap<u32, BTreeMap<InstallationId, u64>>,
    twice: usize,
    /// The attempts that each reconnection took.
    reconnected: BTreeMap<InstallationId, Vec<u32>>,
}

/// Counts what every instance dials, on its way to the real connector.
struct Switchboard {
    connector: RemoteConnector,
    lines: Arc<Mutex<BTreeMap<InstallationId, Lines>>>,
}

/// The lines of one instance: each is one attempt.
#[derive(Debug, Default, Clone)]
struct Lines {
    open: u32,
    /// Dialled while another one was open.
    overlaps: u32,
    ended: Option<Instant>,
    /// Between the end of each line and the next one.
    pauses: Vec<Duration>,
}

impl Connector for Switchboard {
    fn open(&self, spec: Arc<InstanceSpec>, run: RunNumber) -> BoxFuture<'static, Result<ProcessLink, OpenError>> {
        self.connector.open(spec, run)
    }

    fn dial(&self, spec: &Arc<InstanceSpec>, run: RunNumber) -> Box<dyn ServerLine> {
        let of = spec.id.installation.clone();
        let mut all = self.lines.lock().unwrap();
        let lines = all.entry(of.clone()).or_default();
        lines.overlaps += u32::from(lines.open > 0);
        lines.open += 1;
        lines.pauses.extend(lines.ended.map(|ended| ended.elapsed()));
        Box::new(Counted { line: self.connector.dial(spec, run), of, lines: Arc::clone(&self.lines) })
    }
}

struct Counted {
    line: Box<dyn ServerLine>,
    of: InstallationId,
    lines: Arc<Mutex<BTreeMap<InstallationId, Lines>>>,
}

impl ServerLine for Counted {
    fn send(&mut self, message: LineOutput) {
        self.line.send(message);
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<LineEvent> {
        self.line.poll_next(cx)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut all = self.lines.lock().unwrap();
        let lines = all.get_mut(&self.of).unwrap();
        lines.open -= 1;
        lines.ended = Some(Instant::now());
    }
}

struct Recorder(Arc<Mutex<Told>>);

impl EventSink for Recorder {
    fn send(&self, batch: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
        let mut told = self.0.lock().unwrap();
        for envelope in &batch.events {
            match &envelope.event {
                Event::Reconnecting { of, attempt, next_retry_ms } => {
                    let delays = told.scheduled.entry(*attempt).or_default();
                    let again = delays.insert(of.installation_id.clone(), *next_retry_ms).is_some();
                    told.twice += usize::from(again);
                }
                Event::Reconnected { of, attempts_taken, .. } => {
                    told.reconnected.entry(of.installation_id.clone()).or_default().push(*attempts_taken);
                }
                Event::EventsDropped { .. } => panic!("events are missing"),
                _ => {}
            }
        }
        Box::pin(async { SinkAnswer::Accepted })
    }
}

/// The one server of all, in a process of its own.
struct Server {
    child: Child,
    port: u16,
}

impl Server {
    fn start(port: u16) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_satellite"));
        let address = format!("127.0.0.1:{port}");
        command.args(["sim-server", "--http", &address]).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, format!("listening on http://{address}/mcp\n"));
        Self { child, port }
    }

    /// SIGKILL, and gone.
    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    async fn stats(&self) -> HttpStats {
        let mut connection = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).await.unwrap();
        connection.write_all(b"GET /stats HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        connection.read_to_string(&mut answer).await.unwrap();
        serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
    }

    /// Waits until each instance has its session and listens, and checks that each came once.
    async fn has_all(&self) {
        let is_there = |stats: &HttpStats| stats.sessions >= INSTANCES && stats.streams >= INSTANCES as u64;
        let stats = until("all are there", async || self.stats().await, is_there).await;
        let HttpStats { sessions, initializes, instances, overlaps, strangers, .. } = stats;
        assert_eq!((sessions, initializes, instances, overlaps, strangers), (INSTANCES, INSTANCES, INSTANCES, 0, 0));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A port that stays free while the server is away. Not one of those from which the kernel takes the ports of clients: a
/// client that knocks there a thousand times could be connected with itself.
fn free_port() -> u16 {
    let first = u16::try_from(std::process::id() % 10_000).unwrap();
    let is_free = |port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
    (0..10_000).map(|offset| 20_000 + (first + offset) % 10_000).find(is_free).unwrap()
}

/// Asks until the answer is as wanted.
async fn until<T: Debug>(what: &str, mut ask: impl AsyncFnMut() -> T, wanted: impl Fn(&T) -> bool) -> T {
    let given_up = Instant::now() + GIVE_UP;
    loop {
        let answer = ask().await;
        if wanted(&answer) {
            return answer;
        }
        assert!(Instant::now() < given_up, "given up waiting until {what}: {answer:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The defaults, but that a loaded machine has time to end a thousand sessions tidily.
fn patient() -> Policy {
    let mut policy = Policy::default();
    (policy.session.terminate_grace, policy.remote.close_timeout) = (GIVE_UP, GIVE_UP);
    policy
}

/// As a configuration file would ask for it.
fn spec(nth: usize, port: u16, policy: &Arc<Policy>) -> InstanceSpec {
    let team = nth % TEAMS;
    let header = ("x-instance".to_owned(), Configured::plain(nth.to_string().as_str()));
    let config = InstanceConfig {
        team: format!("team_{team}").into(),
        team_slug: format!("team-{team}").into(),
        user: "user_alice".into(),
        user_slug: "alice".into(),
        installation: format!("installation_{nth}").into(),
        server: "server".into(),
        target: ServerTarget::Remote {
            transport: RemoteTransport::Http,
            url: format!("http://127.0.0.1:{port}/mcp"),
            health_url: None,
        },
        server_tier: ConfigTier { headers: [header].into(), ..ConfigTier::default() },
        team_tier: ConfigTier::default(),
        user_tier: ConfigTier::default(),
        user_required: Vec::new(),
        lifetime: ProcessLifetime::default(),
        update_method: UpdateMethod::default(),
        request_logging: true,
        policy: Arc::clone(policy),
    };
    config.merge()
}

/// The delays before one attempt are those of the policy, ten percent more or less, and use that width evenly.
fn assert_spread(delays: &BTreeMap<InstallationId, u64>, delay: u64) {
    assert_eq!(delays.len(), INSTANCES, "each instance has a schedule of its own");
    let (earliest, width) = (delay - delay / 10, delay / 5);
    let mut tenths = [0; 10];
    for late in delays.values() {
        // What is left of the delay is told, in whole milliseconds.
        let after = late.checked_sub(earliest - 1).unwrap_or_else(|| panic!("{late} ms is too early for {delay} ms"));
        let tenth = usize::try_from(10 * after.saturating_sub(1) / width).unwrap().min(9);
        tenths[tenth] += 1;
        assert!(after <= width + 1, "{late} ms is too late for {delay} ms");
    }
    // All of one seed, so this is the same in every run.
    assert!(tenths.iter().all(|tenth| (50..=150).contains(tenth)), "not spread evenly: {tenths:?}");
}

#[test]
fn a_thousand_instances_of_a_server_that_dies_and_returns_are_back_one_by_one() {
    let (limit, needed) = (raise_descriptor_limit().unwrap(), 3 * INSTANCES as u64);
    assert!(limit >= needed, "the hard limit of open files (`ulimit -Hn`) is {limit} here, and this needs {needed}");
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    // The first runtime of a process opens what the process then keeps for signals.
    drop(runtime());
    let at_first = Held::now();
    let runtime = runtime();
    runtime.block_on(dies_and_returns());
    drop(runtime);
    assert_eq!(Held::now().descriptors, at_first.descriptors);
}

async fn dies_and_returns() {
    let (told, lines) = (Arc::<Mutex<Told>>::default(), Arc::<Mutex<BTreeMap<_, Lines>>>::default());
    let connector = Switchboard { connector: RemoteConnector::new().unwrap(), lines: Arc::clone(&lines) };
    let sink = Recorder(Arc::clone(&told));
    let mut options = RuntimeOptions::new(Arc::new(connector), Arc::new(sink), Arc::new(Timestamp::now));
    options.batch =
        BatchPolicy { interval: Duration::from_millis(10), flush_timeout: GIVE_UP, ..BatchPolicy::default() };
    let (satellite, join) = mcp_satellite_actors::start(options).await.unwrap();
    let empty = Held::now();

    // The server comes after them, so that what an outage leaves once and for all is there before memory is compared.
    let (policy, port) = (Arc::new(patient()), free_port());
    for nth in 0..INSTANCES {
        satellite.install(spec(nth, port, &policy)).await.unwrap();
    }
    each_has_failed(&told, 1).await;
    let mut server = Server::start(port);
    all_are_back(&satellite, &server).await;
    // At rest each has one connection, on which it listens.
    let at_rest = Held::with(empty.descriptors + INSTANCES).await;

    *told.lock().unwrap() = Told::default();
    lines.lock().unwrap().values_mut().for_each(|lines| lines.pauses.clear());
    server.kill();
    each_has_failed(&told, 2).await;
    let away =
        satellite.snapshot().iter().filter(|view| view.connection == Some(ConnectionState::Reconnecting)).count();
    assert_eq!(away, INSTANCES);
    let mut server = Server::start(port);
    all_are_back(&satellite, &server).await;
    // Nothing is asserted under a lock: others would hear of its poison instead.
    let outage = (std::mem::take(&mut *told.lock().unwrap()), lines.lock().unwrap().clone());
    assert_spread_and_not_doubled(&outage.0, &outage.1);
    drop(outage);
    let back = Held::with(at_rest.descriptors).await;
    let kept = back.heap.saturating_sub(at_rest.heap) / INSTANCES;
    assert!(kept <= KEPT_EACH, "of an outage each keeps {kept} bytes: {at_rest:?}, {back:?}");

    assert_eq!(satellite.shutdown().await, ShutdownReport { events_lost: 0, in_time: true });
    join.await.unwrap();
    until("all sessions are ended", async || server.stats().await, |stats| stats.sessions == 0).await;
    server.kill();
}

/// Waits until each of them has tried in vain so often, or was lost, and told when it tries again.
async fn each_has_failed(told: &Mutex<Told>, times: u32) {
    let scheduled = async || told.lock().unwrap().scheduled.get(&times).map_or(0, BTreeMap::len);
    until(&format!("all have failed {times} times"), scheduled, |scheduled| *scheduled == INSTANCES).await;
}

/// Waits until all are online, to the server's knowledge too, and all of that is told.
async fn all_are_back(satellite: &RuntimeHandle, server: &Server) {
    let online = async || satellite.snapshot().iter().filter(|view| view.status == Status::Online).count();
    until("all are online", online, |online| *online == INSTANCES).await;
    server.has_all().await;
    satellite.flush().await;
}

fn assert_spread_and_not_doubled(told: &Told, lines: &BTreeMap<InstallationId, Lines>) {
    assert_spread(&told.scheduled[&1], 1000);
    assert_spread(&told.scheduled[&2], 2000);
    assert_eq!(told.twice, 0, "an attempt is scheduled once");
    assert_eq!((told.reconnected.len(), lines.len()), (INSTANCES, INSTANCES));
    for (instance, lines) in lines {
        // Each attempt that was told is one line, and each line is one attempt that was told.
        let attempts = u32::try_from(lines.pauses.len()).unwrap();
        assert_eq!((told.reconnected[instance].as_slice(), lines.open, lines.overlaps), (&[attempts][..], 1, 0));
        for (attempt, pause) in (1..).zip(&lines.pauses) {
            let scheduled = Duration::from_millis(told.scheduled[&attempt][instance]);
            assert!(*pause >= scheduled, "attempt {attempt} came after {pause:?}, not {scheduled:?}");
        }
    }
}
