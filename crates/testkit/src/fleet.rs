//! A fleet: one runtime over simulated servers, with records of starts, batches and events for the tests.

use std::collections::{BTreeMap, HashMap};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::future::BoxFuture;
use jiff::{SignedDuration, Timestamp};
use mcp_satellite_actors::model::event::Envelope;
use mcp_satellite_actors::model::exit::{CallError, RuntimeEnd};
use mcp_satellite_actors::model::ids::{InstanceId, RunNumber};
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::spec::{InstanceSpec, ProcessLifetime, RemoteTransport, ServerTarget, UpdateMethod};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::seam::{
    AdoptedProcess, Connectors, EventSink, LineConnector, OpenError, ProcessConnector, ProcessLink, ServerLine,
    SinkAnswer, SinkBatch,
};
use mcp_satellite_actors::{InstallOutcome, RuntimeHandle, RuntimeOptions, ShutdownReport, WallClock, start};
use mcp_satellite_sim::{SimConnector, SimHandle, SimPlan, SimRemote, SimScript};
use serde_json::Value;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::spec::{spec_of, stdio};

/// Longer than anything that these tests wait for. Paused time makes it cheap.
pub const LONG: Duration = Duration::from_secs(3600);

pub fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

/// Rounds to tenths of a second: timers round up to milliseconds, and several may follow each other.
pub fn tenths(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 10.0).round() / 10.0
}

/// An instance to be installed, and the plans of its runs.
#[derive(Clone)]
pub struct Server {
    pub spec: InstanceSpec,
    plans: Vec<SimPlan>,
}

impl Server {
    /// Returns a healthy server of user alice in team acme.
    pub fn new(name: &str) -> Self {
        Self::of("acme", name)
    }

    pub fn of(team: &str, name: &str) -> Self {
        let spec = spec_of(team, name, stdio("files"));
        Self { spec, plans: vec![SimScript::default().into()] }
    }

    /// Returns a healthy remote server of user alice in team acme, without jitter.
    pub fn remote(name: &str) -> Self {
        Self::remote_of("acme", name)
    }

    pub fn remote_of(team: &str, name: &str) -> Self {
        let mut server = Self::of(team, name);
        server.spec.target = ServerTarget::Remote {
            transport: RemoteTransport::Http,
            url: "http://files.example/mcp".to_owned(),
            health_url: Some("http://files.example/health".to_owned()),
        };
        server.policy(|policy| policy.reconnect.jitter_percent = 0)
    }

    /// Switches to the SSE transport.
    pub fn sse(mut self) -> Self {
        if let ServerTarget::Remote { transport, .. } = &mut self.spec.target {
            *transport = RemoteTransport::Sse;
        }
        self
    }

    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.spec.headers.insert(name.to_owned(), value.into());
        self
    }

    /// Sets the script of every run.
    pub fn script(self, script: SimScript) -> Self {
        self.plans([script.into()])
    }

    /// Sets one plan per run; the last one repeats.
    pub fn plans(mut self, plans: impl IntoIterator<Item = SimPlan>) -> Self {
        self.plans = plans.into_iter().collect();
        self
    }

    pub fn policy(mut self, change: impl FnOnce(&mut Policy)) -> Self {
        change(Arc::make_mut(&mut self.spec.policy));
        self
    }

    pub fn always_on(mut self) -> Self {
        self.spec.lifetime = ProcessLifetime::AlwaysOn;
        self
    }

    pub fn lazy(mut self) -> Self {
        self.spec.lifetime = ProcessLifetime::Lazy;
        self
    }

    pub fn rolling(mut self) -> Self {
        self.spec.update_method = UpdateMethod::Rolling;
        self
    }

    pub fn missing(mut self, key: &str) -> Self {
        self.spec.missing = vec![key.to_owned()];
        self
    }

    /// Sets a variable, which makes another configuration of the same instance.
    pub fn env(mut self, key: &str, value: &str) -> Self {
        self.spec.env.insert(key.to_owned(), value.into());
        self.spec.missing.retain(|missing| missing != key);
        self
    }
}

/// Returns a script that exits with `code` this many seconds after `initialized`.
pub fn exits(after: f64, code: i32) -> SimScript {
    SimScript { exit_after: Some(seconds(after)), exit_code: code, ..SimScript::default() }
}

/// A start or a connection that was requested from the connector.
#[derive(Debug, Clone, Copy)]
pub struct Opening {
    pub run: RunNumber,
    pub at: Instant,
}

/// The simulated connector with records of its use.
#[derive(Clone)]
pub struct World {
    pub sim: SimConnector,
    records: Arc<Mutex<Records>>,
    /// Time at which the wall clock of the satellites shows their epoch.
    began: Instant,
}

#[derive(Default)]
struct Records {
    plans: HashMap<InstanceId, Vec<SimPlan>>,
    openings: HashMap<InstanceId, Vec<Opening>>,
    adoptions: HashMap<InstanceId, usize>,
    /// By team: starts that have not sent a byte yet.
    starting: BTreeMap<String, usize>,
    /// The maximum of `starting` over all teams, and by team.
    starting_max: usize,
    starting_max_by_team: BTreeMap<String, usize>,
    /// The expected number of overlaps of two runs of one instance in rolling updates.
    rolling_updates: u64,
}

impl World {
    fn new() -> Self {
        let records = Arc::<Mutex<Records>>::default();
        let planned_records = records.clone();
        let sim = SimConnector::with_plan(move |spec, run| {
            let records = planned_records.lock().unwrap();
            // The next satellite begins again with the numbers of runs.
            let nth = records.openings[&spec.id].iter().rposition(|opening| opening.run == run).unwrap();
            let plans = &records.plans[&spec.id];
            plans[nth.min(plans.len() - 1)].clone()
        });
        Self { sim, records, began: Instant::now() }
    }
}

impl ProcessConnector for World {
    fn open(&self, spec: Arc<InstanceSpec>, run: RunNumber) -> BoxFuture<'static, Result<ProcessLink, OpenError>> {
        let team = spec.id.team.to_string();
        {
            let mut records = self.records.lock().unwrap();
            records.openings.entry(spec.id.clone()).or_default().push(Opening { run, at: Instant::now() });
            let of_team = records.starting.entry(team.clone()).or_default();
            *of_team += 1;
            let of_team = *of_team;
            let all = records.starting.values().sum();
            records.starting_max = records.starting_max.max(all);
            let known = records.starting_max_by_team.entry(team.clone()).or_default();
            *known = of_team.max(*known);
        }
        let starting = Starting { records: self.records.clone(), team };
        let opening = self.sim.open(spec, run);
        Box::pin(async move {
            let link = opening.await?;
            Ok(ProcessLink { reader: Box::new(FirstByte { reader: link.reader, starting: Some(starting) }), ..link })
        })
    }

    fn can_adopt(&self, spec: &InstanceSpec) -> bool {
        self.sim.can_adopt(spec)
    }

    fn adopt(&self, spec: &Arc<InstanceSpec>, run: RunNumber) -> Option<AdoptedProcess> {
        let adopted = self.sim.adopt(spec, run)?;
        *self.records.lock().unwrap().adoptions.entry(spec.id.clone()).or_default() += 1;
        Some(adopted)
    }
}

impl LineConnector for World {
    fn dial(&self, spec: &Arc<InstanceSpec>, run: RunNumber) -> Box<dyn ServerLine> {
        let opening = Opening { run, at: Instant::now() };
        self.records.lock().unwrap().openings.entry(spec.id.clone()).or_default().push(opening);
        self.sim.dial(spec, run)
    }
}

/// A start that has not sent a byte yet. Dropping it ends the count.
struct Starting {
    records: Arc<Mutex<Records>>,
    team: String,
}

impl Drop for Starting {
    fn drop(&mut self) {
        *self.records.lock().unwrap().starting.get_mut(&self.team).unwrap() -= 1;
    }
}

struct FirstByte {
    reader: Box<dyn AsyncRead + Send + Unpin>,
    starting: Option<Starting>,
}

impl AsyncRead for FirstByte {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let read = ready!(Pin::new(&mut self.reader).poll_read(cx, buffer));
        self.starting = None;
        Poll::Ready(read)
    }
}

/// Behavior of the sink for the next batch.
#[derive(Debug, Clone)]
pub enum SinkMode {
    Accept,
    /// Waits until the mode changes.
    Block,
    Answer(SinkAnswer),
    Panic,
}

/// A batch that the sink received.
#[derive(Debug, Clone)]
pub struct Attempt {
    pub at: Instant,
    pub batch: Arc<SinkBatch>,
}

#[derive(Clone)]
pub struct MemorySink {
    mode: watch::Sender<SinkMode>,
    attempts: Arc<Mutex<Vec<Attempt>>>,
    accepted: Arc<Mutex<Vec<Envelope>>>,
}

impl MemorySink {
    pub fn new() -> Self {
        Self { mode: watch::Sender::new(SinkMode::Accept), attempts: Arc::default(), accepted: Arc::default() }
    }

    pub fn set_mode(&self, mode: SinkMode) {
        self.mode.send_replace(mode);
    }

    pub fn attempts(&self) -> Vec<Attempt> {
        self.attempts.lock().unwrap().clone()
    }

    pub fn accepted(&self) -> Vec<Envelope> {
        self.accepted.lock().unwrap().clone()
    }

    /// Waits until the sink has received this many batches.
    pub async fn until_attempts(&self, count: usize) {
        let enough = async {
            while self.attempts.lock().unwrap().len() < count {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(LONG, enough).await.unwrap();
    }
}

impl EventSink for MemorySink {
    fn send(&self, batch: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
        self.attempts.lock().unwrap().push(Attempt { at: Instant::now(), batch: batch.clone() });
        let (mut mode, accepted) = (self.mode.subscribe(), self.accepted.clone());
        Box::pin(async move {
            let mode = mode.wait_for(|mode| !matches!(mode, SinkMode::Block)).await.unwrap().clone();
            match mode {
                SinkMode::Accept | SinkMode::Block => {
                    accepted.lock().unwrap().extend(batch.events.iter().cloned());
                    SinkAnswer::Accepted
                }
                SinkMode::Answer(answer) => answer,
                SinkMode::Panic => panic!("the sink panics on request"),
            }
        })
    }
}

/// One runtime with its simulated connector and its sink.
pub struct Fleet {
    pub runtime: RuntimeHandle,
    pub world: World,
    pub sink: MemorySink,
    join: JoinHandle<RuntimeEnd>,
    tasks_before: usize,
}

/// Returns the options of a runtime with their connector and sink, for tests that start it themselves.
pub fn options() -> (RuntimeOptions, World, MemorySink) {
    let world = World::new();
    let (options, sink) = options_in(&world);
    (options, world, sink)
}

fn options_in(world: &World) -> (RuntimeOptions, MemorySink) {
    let (sink, began) = (MemorySink::new(), world.began);
    let epoch: Timestamp = "2026-11-21T06:33:00Z".parse().unwrap();
    let wall: WallClock = Arc::new(move || epoch + SignedDuration::try_from(began.elapsed()).unwrap());
    let connectors = Connectors::default().with_process(world.clone()).with_line(world.clone());
    let mut options = RuntimeOptions::new(connectors, Arc::new(sink.clone()), wall);
    options.start_permits = 8;
    (options, sink)
}

impl Fleet {
    pub async fn start() -> Self {
        Self::with(|_| ()).await
    }

    pub async fn with(change: impl FnOnce(&mut RuntimeOptions)) -> Self {
        Self::in_world(World::new(), alive_tasks(), change).await
    }

    /// Starts a fleet whose servers outlive a satellite that is killed.
    pub async fn with_keeper(change: impl FnOnce(&mut RuntimeOptions)) -> Self {
        let world = World::new();
        let sim = world.sim.clone().with_keeper();
        Self::in_world(World { sim, ..world }, alive_tasks(), change).await
    }

    async fn in_world(world: World, tasks_before: usize, change: impl FnOnce(&mut RuntimeOptions)) -> Self {
        let (mut options, sink) = options_in(&world);
        change(&mut options);
        let (runtime, join) = start(options).await.unwrap();
        Self { runtime, world, sink, join, tasks_before }
    }

    /// Kills the satellite and starts the next one, without instances, over the servers that are left.
    pub async fn replace_killed(self, change: impl FnOnce(&mut RuntimeOptions)) -> Self {
        let Self { runtime, world, join, tasks_before, .. } = self;
        world.sim.kill_satellite();
        runtime.kill();
        timeout(LONG, join).await.unwrap().unwrap();
        Self::in_world(world, tasks_before, change).await
    }

    /// Installs a new instance.
    pub async fn add(&self, server: Server) -> InstanceId {
        let id = server.spec.id.clone();
        self.world.plan(&server);
        assert_eq!(self.runtime.install(server.spec).await.unwrap(), InstallOutcome::New);
        id
    }

    /// Installs a new instance and waits until it is online.
    pub async fn online(&self, server: Server) -> InstanceId {
        let id = self.add(server).await;
        self.until(&id, Status::Online).await;
        id
    }

    pub async fn until(&self, id: &InstanceId, status: Status) -> Arc<InstanceView> {
        self.until_view(id, |view| view.status == status).await
    }

    pub async fn until_view(&self, id: &InstanceId, wanted: impl FnMut(&InstanceView) -> bool) -> Arc<InstanceView> {
        let Ok(view) = timeout(LONG, self.runtime.wait_for(id, wanted)).await else {
            panic!("{id} did not reach the expected view: {:?}", self.runtime.snapshot().get(id));
        };
        view.unwrap()
    }

    /// Waits until the instance is online with another process than `old_pid`.
    pub async fn until_replaced(&self, id: &InstanceId, old_pid: Option<u32>) -> Arc<InstanceView> {
        self.until_view(id, |view| view.status == Status::Online && view.pid.is_some() && view.pid != old_pid).await
    }

    pub fn view(&self, id: &InstanceId) -> Arc<InstanceView> {
        self.runtime.snapshot().get(id).unwrap().clone()
    }

    pub fn pid(&self, id: &InstanceId) -> Option<u32> {
        self.view(id).pid
    }

    /// Returns the control of the simulated process of the instance.
    pub fn server(&self, id: &InstanceId) -> SimHandle {
        self.world.sim.handle(id).unwrap()
    }

    /// Returns the control of the simulated endpoint of a remote instance.
    pub fn remote(&self, id: &InstanceId) -> SimRemote {
        self.world.sim.remote(id)
    }

    pub async fn call(&self, id: &InstanceId, tool: &str, arguments: Value) -> Result<Value, CallError> {
        self.call_within(id, tool, arguments, None).await
    }

    pub async fn call_within(
        &self,
        id: &InstanceId,
        tool: &str,
        arguments: Value,
        limit: Option<Duration>,
    ) -> Result<Value, CallError> {
        call(&self.runtime, id, tool, arguments, limit).await
    }

    /// Returns the counts of the server: `{calls, cancelled, pings, initialized}`.
    pub async fn received(&self, id: &InstanceId) -> Value {
        self.call(id, "received", serde_json::json!({})).await.unwrap()["structuredContent"].clone()
    }

    /// Returns all events so far.
    pub async fn events(&self) -> Vec<Envelope> {
        self.runtime.flush().await;
        self.sink.accepted()
    }

    /// Returns all events of an instance so far, as JSON.
    pub async fn events_of(&self, id: &InstanceId) -> Vec<Value> {
        let is_its = |envelope: &&Envelope| {
            envelope.event.subject().is_some_and(|of| of.installation_id == id.installation && of.team_id == id.team)
        };
        self.events().await.iter().filter(is_its).map(|envelope| serde_json::to_value(envelope).unwrap()).collect()
    }

    /// Returns the `data` of all events of one type about an instance.
    pub async fn event_data(&self, id: &InstanceId, kind: &str) -> Vec<Value> {
        let events = self.events_of(id).await;
        events.into_iter().filter(|event| event["type"] == kind).map(|event| event["data"].clone()).collect()
    }

    /// Returns the statuses of an instance in order, with their messages.
    pub async fn statuses(&self, id: &InstanceId) -> Vec<(String, Option<String>)> {
        let text = |value: &Value| value.as_str().map(ToOwned::to_owned);
        let events = self.event_data(id, "mcp.server.status_changed").await;
        events.iter().map(|data| (text(&data["status"]).unwrap(), text(&data["status_message"]))).collect()
    }

    /// Shuts down and asserts that nothing is left.
    pub async fn finish(self) {
        let report = timeout(LONG, self.runtime.shutdown()).await.unwrap();
        assert_eq!(report, ShutdownReport { events_lost: 0, in_time: true });
        assert_no_gap(&self.sink.accepted());
        self.finish_after_shutdown().await;
    }

    /// Asserts that nothing is left of a runtime that is already ending.
    pub async fn finish_after_shutdown(self) -> RuntimeEnd {
        let Self { runtime, world, join, tasks_before, .. } = self;
        let end = timeout(LONG, join).await.unwrap().unwrap();
        drop(runtime);
        assert_nothing_left(&world, tasks_before).await;
        end
    }
}

impl World {
    pub fn plan(&self, server: &Server) {
        self.records.lock().unwrap().plans.insert(server.spec.id.clone(), server.plans.clone());
    }

    /// Returns the starts of an instance so far.
    pub fn openings(&self, id: &InstanceId) -> Vec<Opening> {
        self.records.lock().unwrap().openings.get(id).cloned().unwrap_or_default()
    }

    /// Returns the starts of all instances so far.
    pub fn all_openings(&self) -> Vec<Opening> {
        self.records.lock().unwrap().openings.values().flatten().copied().collect()
    }

    /// Returns how often a running server of an instance was adopted.
    pub fn adoptions(&self, id: &InstanceId) -> usize {
        self.records.lock().unwrap().adoptions.get(id).copied().unwrap_or_default()
    }

    /// Sets how often two runs of one instance may overlap in this test.
    pub fn expect_rolling_updates(&self, times: u64) {
        self.records.lock().unwrap().rolling_updates = times;
    }

    /// Returns the seconds between the starts of an instance, rounded to tenths.
    pub fn gaps(&self, id: &InstanceId) -> Vec<f64> {
        self.openings(id).windows(2).map(|pair| tenths(pair[1].at - pair[0].at)).collect()
    }

    /// Waits until the instance has been started this many times.
    pub async fn until_openings(&self, id: &InstanceId, count: usize) {
        let enough = async {
            while self.openings(id).len() < count {
                sleep(Duration::from_millis(10)).await;
            }
        };
        assert!(timeout(LONG, enough).await.is_ok(), "{id} was started only {} times", self.openings(id).len());
    }

    /// Returns and resets the maximum number of concurrent starts: over all teams, and of one team.
    pub fn take_starting_max(&self, team: &str) -> (usize, usize) {
        let mut records = self.records.lock().unwrap();
        let of_team = records.starting_max_by_team.insert(team.to_owned(), 0).unwrap_or_default();
        (std::mem::take(&mut records.starting_max), of_team)
    }
}

/// Makes a call as the gateway does and parses the result.
pub async fn call(
    runtime: &RuntimeHandle,
    id: &InstanceId,
    tool: &str,
    arguments: Value,
    limit: Option<Duration>,
) -> Result<Value, CallError> {
    let arguments = serde_json::value::to_raw_value(&arguments).unwrap();
    let answer = timeout(LONG, runtime.call(id, tool, Some(arguments), limit)).await.unwrap();
    answer.map(|result| serde_json::from_str(result.get()).unwrap())
}

pub fn alive_tasks() -> usize {
    Handle::current().metrics().num_alive_tasks()
}

/// Asserts that no server, no connection and no task beyond the earlier ones is left.
pub async fn assert_nothing_left(world: &World, tasks_before: usize) {
    let clear = async {
        while alive_tasks() > tasks_before || world.sim.alive_count() + world.sim.line_count() > 0 {
            sleep(Duration::from_millis(1)).await;
        }
    };
    let cleared = timeout(seconds(60.0), clear).await;
    assert!(
        cleared.is_ok(),
        "left over: {} servers, {} connections, {} tasks beyond {tasks_before}",
        world.sim.alive_count(),
        world.sim.line_count(),
        alive_tasks().saturating_sub(tasks_before)
    );
    let rolling_updates = world.records.lock().unwrap().rolling_updates;
    assert_eq!(world.sim.overlaps(), rolling_updates, "unexpected number of overlapping runs of one instance");
}

/// Asserts that `seq` counts up by one from 1.
pub fn assert_no_gap(events: &[Envelope]) {
    for (nth, envelope) in (1..).zip(events) {
        assert_eq!(envelope.seq, nth, "{}", envelope.event.kind());
    }
}
