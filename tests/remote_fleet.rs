//! A thousand remote instances of one server, which dies and returns: real sockets, the whole runtime, a separate
//! process.
//!
//! The reconnects must be spread over time, no instance may make two attempts at once, all must reconnect, and the
//! outage may leave no descriptors and little memory. Both are counted for the whole process, so there is one test
//! here.

#![cfg(all(feature = "cli", feature = "remote", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::net::Ipv4Addr;
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
    ConfigTier, ConfigValue as Configured, InstanceConfig, InstanceSpec, RemoteTransport,
};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::seam::{
    Connectors, EventSink, LineConnector, LineEvent, LineOutput, ServerLine, SinkAnswer, SinkBatch,
};
use mcp_satellite_actors::{RuntimeHandle, RuntimeOptions, ShutdownReport};
use testkit::port::free_port;
use testkit::spec::{config, remote};
use testkit::wait::{GIVE_UP, until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const INSTANCES: usize = 1000;
const TEAMS: usize = 50;

/// The heap growth per instance that an outage may cause, in bytes. Tables do not shrink, and the queue of events grows
/// by half a megabyte at once; a leaked message, timer or buffer per instance would be more.
const KEPT_EACH: usize = 1024;

/// Counts the bytes on the heap. The resident memory of the process depends more on the allocator.
struct CountingAllocator;

static HEAP: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

// SAFETY: every call is passed to the system's allocator; counting touches none of its memory.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HEAP.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller upholds the same contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        HEAP.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller upholds the same contract.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// The resources of this process.
#[derive(Debug, Clone, Copy)]
struct Resources {
    descriptors: usize,
    heap: usize,
}

impl Resources {
    fn now() -> Self {
        let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
        Self { descriptors, heap: HEAP.load(Ordering::Relaxed) }
    }

    /// Waits until this many descriptors are open: the pool closes idle connections after some seconds.
    async fn with(descriptors: usize) -> Self {
        let what = format!("{descriptors} descriptors are open");
        until(&what, async || Self::now(), |now| now.descriptors == descriptors).await
    }
}

/// The schedule of all attempts according to the events: by number, the delays of all instances in milliseconds.
#[derive(Default)]
struct ReportedSchedule {
    scheduled: BTreeMap<u32, BTreeMap<InstallationId, u64>>,
    duplicates: usize,
    /// The number of attempts of each reconnection.
    reconnected: BTreeMap<InstallationId, Vec<u32>>,
}

/// A connector that counts the lines of every instance and passes calls to the real connector.
struct CountingConnector {
    connector: RemoteConnector,
    lines: Arc<Mutex<BTreeMap<InstallationId, LineStats>>>,
}

/// Statistics of the lines of one instance; each line is one attempt.
#[derive(Debug, Default, Clone)]
struct LineStats {
    open: u32,
    /// Lines that were dialled while another one was open.
    overlaps: u32,
    ended: Option<Instant>,
    /// The pauses between the end of each line and the next one.
    pauses: Vec<Duration>,
}

impl LineConnector for CountingConnector {
    fn dial(&self, spec: &Arc<InstanceSpec>, run: RunNumber) -> Box<dyn ServerLine> {
        let installation = spec.id.installation.clone();
        let mut all = self.lines.lock().unwrap();
        let lines = all.entry(installation.clone()).or_default();
        lines.overlaps += u32::from(lines.open > 0);
        lines.open += 1;
        lines.pauses.extend(lines.ended.map(|ended| ended.elapsed()));
        Box::new(CountedLine { line: self.connector.dial(spec, run), installation, lines: Arc::clone(&self.lines) })
    }
}

struct CountedLine {
    line: Box<dyn ServerLine>,
    installation: InstallationId,
    lines: Arc<Mutex<BTreeMap<InstallationId, LineStats>>>,
}

impl ServerLine for CountedLine {
    fn send(&mut self, message: LineOutput) {
        self.line.send(message);
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<LineEvent> {
        self.line.poll_next(cx)
    }
}

impl Drop for CountedLine {
    fn drop(&mut self) {
        let mut all = self.lines.lock().unwrap();
        let lines = all.get_mut(&self.installation).unwrap();
        lines.open -= 1;
        lines.ended = Some(Instant::now());
    }
}

struct RecordingSink(Arc<Mutex<ReportedSchedule>>);

impl EventSink for RecordingSink {
    fn send(&self, batch: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
        let mut reported = self.0.lock().unwrap();
        for envelope in &batch.events {
            match &envelope.event {
                Event::Reconnecting { of, attempt, next_retry_ms } => {
                    let delays = reported.scheduled.entry(*attempt).or_default();
                    let again = delays.insert(of.installation_id.clone(), *next_retry_ms).is_some();
                    reported.duplicates += usize::from(again);
                }
                Event::Reconnected { of, attempts_taken, .. } => {
                    reported.reconnected.entry(of.installation_id.clone()).or_default().push(*attempts_taken);
                }
                Event::EventsDropped { .. } => panic!("events are missing"),
                _ => {}
            }
        }
        Box::pin(async { SinkAnswer::Accepted })
    }
}

/// The server of all instances, in its own process.
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

    /// Kills the server and waits for its end.
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

    /// Waits until each instance has a session and a stream, and asserts that each connected once.
    async fn wait_for_all(&self) {
        let is_there = |stats: &HttpStats| stats.sessions >= INSTANCES && stats.streams >= INSTANCES as u64;
        let stats = until("all sessions and streams are open", async || self.stats().await, is_there).await;
        let HttpStats { sessions, initializes, instances, overlaps, strangers, .. } = stats;
        assert_eq!((sessions, initializes, instances, overlaps, strangers), (INSTANCES, INSTANCES, INSTANCES, 0, 0));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns the default policy with enough time for a loaded machine to end a thousand sessions regularly.
fn patient_policy() -> Policy {
    let mut policy = Policy::default();
    (policy.session.terminate_grace, policy.remote.close_timeout) = (GIVE_UP, GIVE_UP);
    policy
}

/// Returns the specification of an instance as from a configuration file.
fn spec(nth: usize, port: u16, policy: &Arc<Policy>) -> InstanceSpec {
    let team = nth % TEAMS;
    let header = ("x-instance".to_owned(), Configured::plain(nth.to_string().as_str()));
    let target = remote(RemoteTransport::Http, &format!("http://127.0.0.1:{port}/mcp"));
    let config = InstanceConfig {
        team: format!("team_{team}").into(),
        team_slug: format!("team-{team}").into(),
        installation: format!("installation_{nth}").into(),
        server: "server".into(),
        server_tier: ConfigTier { headers: [header].into(), ..ConfigTier::default() },
        policy: Arc::clone(policy),
        ..config(target, Policy::default())
    };
    config.merge()
}

/// Asserts that the delays before one attempt are spread evenly over the delay of the policy, plus or minus ten
/// percent.
fn assert_spread(delays: &BTreeMap<InstallationId, u64>, delay: u64) {
    assert_eq!(delays.len(), INSTANCES, "an instance has no schedule of its own");
    let (earliest, width) = (delay - delay / 10, delay / 5);
    let mut tenths = [0; 10];
    for late in delays.values() {
        // The event contains the remaining delay, in whole milliseconds.
        let after = late.checked_sub(earliest - 1).unwrap_or_else(|| panic!("{late} ms is too early for {delay} ms"));
        let tenth = usize::try_from(10 * after.saturating_sub(1) / width).unwrap().min(9);
        tenths[tenth] += 1;
        assert!(after <= width + 1, "{late} ms is too late for {delay} ms");
    }
    // The seed is constant, so every run has the same delays.
    assert!(tenths.iter().all(|tenth| (50..=150).contains(tenth)), "not spread evenly: {tenths:?}");
}

#[test]
fn a_thousand_instances_reconnect_spread_over_time_after_a_server_restart() {
    let (limit, needed) = (raise_descriptor_limit().unwrap(), 3 * INSTANCES as u64);
    assert!(limit >= needed, "the hard limit of open files (`ulimit -Hn`) is {limit}; this test needs {needed}");
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    // The first runtime of a process opens descriptors for signals that the process keeps.
    drop(runtime());
    let at_first = Resources::now();
    let runtime = runtime();
    runtime.block_on(run_outage());
    drop(runtime);
    assert_eq!(Resources::now().descriptors, at_first.descriptors);
}

async fn run_outage() {
    let (reported, lines) =
        (Arc::<Mutex<ReportedSchedule>>::default(), Arc::<Mutex<BTreeMap<_, LineStats>>>::default());
    let connector = CountingConnector { connector: RemoteConnector::new().unwrap(), lines: Arc::clone(&lines) };
    let sink = RecordingSink(Arc::clone(&reported));
    let mut options =
        RuntimeOptions::new(Connectors::default().with_line(connector), Arc::new(sink), Arc::new(Timestamp::now));
    options.batch =
        BatchPolicy { interval: Duration::from_millis(10), flush_timeout: GIVE_UP, ..BatchPolicy::default() };
    let (satellite, join) = mcp_satellite_actors::start(options).await.unwrap();
    let empty = Resources::now();

    // The server starts after the instances, so that one-time allocations of an outage happen before memory is
    // compared.
    let (policy, port) = (Arc::new(patient_policy()), free_port());
    for nth in 0..INSTANCES {
        satellite.install(spec(nth, port, &policy)).await.unwrap();
    }
    wait_scheduled(&reported, 1).await;
    let mut server = Server::start(port);
    wait_all_online(&satellite, &server).await;
    // At rest each instance has one connection: its stream.
    let at_rest = Resources::with(empty.descriptors + INSTANCES).await;

    *reported.lock().unwrap() = ReportedSchedule::default();
    lines.lock().unwrap().values_mut().for_each(|lines| lines.pauses.clear());
    server.kill();
    wait_scheduled(&reported, 2).await;
    let away =
        satellite.snapshot().iter().filter(|view| view.connection == Some(ConnectionState::Reconnecting)).count();
    assert_eq!(away, INSTANCES);
    let mut server = Server::start(port);
    wait_all_online(&satellite, &server).await;
    // No assertion under a lock: a failure would poison it, and other threads would panic.
    let outage = (std::mem::take(&mut *reported.lock().unwrap()), lines.lock().unwrap().clone());
    assert_schedule_is_kept(&outage.0, &outage.1);
    drop(outage);
    let back = Resources::with(at_rest.descriptors).await;
    let kept = back.heap.saturating_sub(at_rest.heap) / INSTANCES;
    assert!(kept <= KEPT_EACH, "an outage leaves {kept} bytes per instance: {at_rest:?}, {back:?}");

    assert_eq!(satellite.shutdown().await, ShutdownReport { events_lost: 0, in_time: true });
    join.await.unwrap();
    until("all sessions are ended", async || server.stats().await, |stats| stats.sessions == 0).await;
    server.kill();
}

/// Waits until each instance has scheduled this attempt after a loss or a failed attempt.
async fn wait_scheduled(reported: &Mutex<ReportedSchedule>, times: u32) {
    let scheduled = async || reported.lock().unwrap().scheduled.get(&times).map_or(0, BTreeMap::len);
    until(&format!("all have scheduled attempt {times}"), scheduled, |scheduled| *scheduled == INSTANCES).await;
}

/// Waits until all instances are online, also at the server, and all events are flushed.
async fn wait_all_online(satellite: &RuntimeHandle, server: &Server) {
    let online = async || satellite.snapshot().iter().filter(|view| view.status == Status::Online).count();
    until("all are online", online, |online| *online == INSTANCES).await;
    server.wait_for_all().await;
    satellite.flush().await;
}

fn assert_schedule_is_kept(reported: &ReportedSchedule, lines: &BTreeMap<InstallationId, LineStats>) {
    assert_spread(&reported.scheduled[&1], 1000);
    assert_spread(&reported.scheduled[&2], 2000);
    assert_eq!(reported.duplicates, 0, "an attempt was scheduled twice");
    assert_eq!((reported.reconnected.len(), lines.len()), (INSTANCES, INSTANCES));
    for (instance, lines) in lines {
        // Each reported attempt is one line, and each line is one reported attempt.
        let attempts = u32::try_from(lines.pauses.len()).unwrap();
        assert_eq!((reported.reconnected[instance].as_slice(), lines.open, lines.overlaps), (&[attempts][..], 1, 0));
        for (attempt, pause) in (1..).zip(&lines.pauses) {
            let scheduled = Duration::from_millis(reported.scheduled[&attempt][instance]);
            assert!(*pause >= scheduled, "attempt {attempt} came after {pause:?}, not {scheduled:?}");
        }
    }
}
