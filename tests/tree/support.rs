//! A fleet: one runtime over simulated servers, with everything that a test wants to know about it written down.

use std::collections::{BTreeMap, HashMap};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::future::BoxFuture;
use jiff::{SignedDuration, Timestamp};
use mcp_satellite::connect::sim::{SimConnector, SimHandle, SimPlan, SimRemote, SimScript};
use mcp_satellite_actors::model::event::Envelope;
use mcp_satellite_actors::model::exit::{CallError, RuntimeEnd};
use mcp_satellite_actors::model::ids::{InstanceId, RunNumber};
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::secret::SecretMask;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::spec::{InstanceSpec, ProcessLifetime, RemoteTransport, ServerTarget, UpdateMethod};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::seam::{Connector, EventSink, OpenError, ProcessLink, ServerLine, SinkAnswer, SinkBatch};
use mcp_satellite_actors::{InstallOutcome, RuntimeHandle, RuntimeOptions, ShutdownReport, WallClock, start};
use serde_json::Value;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

/// Longer than anything here takes; in paused time it costs little.
pub(crate) const LONG: Duration = Duration::from_secs(3600);

pub(crate) fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

/// To a tenth of a second: timers round up to milliseconds, and several may follow each other.
pub(crate) fn tenths(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 10.0).round() / 10.0
}

/// An instance to be installed, and what each run of its server does.
#[derive(Clone)]
pub(crate) struct Server {
    pub(crate) spec: InstanceSpec,
    plans: Vec<SimPlan>,
}

impl Server {
    /// A healthy server of alice in team acme.
    pub(crate) fn new(name: &str) -> Self {
        Self::of("acme", name)
    }

    pub(crate) fn of(team: &str, name: &str) -> Self {
        let spec = InstanceSpec {
            id: InstanceId::new(team.into(), "alice".into(), name.into()),
            name: format!("files-{team}-alice-{name}").into(),
            server: "files".into(),
            team_slug: team.into(),
            user_slug: "alice".into(),
            target: ServerTarget::Stdio { command: "files".to_owned(), cwd: None },
            args: Vec::new(),
            env: BTreeMap::new(),
            headers: BTreeMap::new(),
            query: BTreeMap::new(),
            missing: Vec::new(),
            lifetime: ProcessLifetime::Listed,
            update_method: UpdateMethod::default(),
            request_logging: true,
            mask: SecretMask::default(),
            policy: Arc::new(Policy::default()),
        };
        Self { spec, plans: vec![SimScript::default().into()] }
    }

    /// A healthy server of alice in team acme that is somewhere else. No delay of it is left to chance unless a test
    /// says so.
    pub(crate) fn remote(name: &str) -> Self {
        Self::remote_of("acme", name)
    }

    pub(crate) fn remote_of(team: &str, name: &str) -> Self {
        let mut server = Self::of(team, name);
        server.spec.target = ServerTarget::Remote {
            transport: RemoteTransport::Http,
            url: "http://files.example/mcp".to_owned(),
            health_url: Some("http://files.example/health".to_owned()),
        };
        server.policy(|policy| policy.reconnect.jitter_percent = 0)
    }

    /// Over the older transport.
    pub(crate) fn sse(mut self) -> Self {
        if let ServerTarget::Remote { transport, .. } = &mut self.spec.target {
            *transport = RemoteTransport::Sse;
        }
        self
    }

    /// With another header.
    pub(crate) fn header(mut self, name: &str, value: &str) -> Self {
        self.spec.headers.insert(name.to_owned(), value.into());
        self
    }

    /// Every run follows this script.
    pub(crate) fn script(self, script: SimScript) -> Self {
        self.plans([script.into()])
    }

    /// One plan for each run; the last one repeats.
    pub(crate) fn plans(mut self, plans: impl IntoIterator<Item = SimPlan>) -> Self {
        self.plans = plans.into_iter().collect();
        self
    }

    pub(crate) fn policy(mut self, change: impl FnOnce(&mut Policy)) -> Self {
        change(Arc::make_mut(&mut self.spec.policy));
        self
    }

    pub(crate) fn always_on(mut self) -> Self {
        self.spec.lifetime = ProcessLifetime::AlwaysOn;
        self
    }

    pub(crate) fn lazy(mut self) -> Self {
        self.spec.lifetime = ProcessLifetime::Lazy;
        self
    }

    pub(crate) fn rolling(mut self) -> Self {
        self.spec.update_method = UpdateMethod::Rolling;
        self
    }

    pub(crate) fn missing(mut self, key: &str) -> Self {
        self.spec.missing = vec![key.to_owned()];
        self
    }

    /// Another configuration of the same instance.
    pub(crate) fn env(mut self, key: &str, value: &str) -> Self {
        self.spec.env.insert(key.to_owned(), value.into());
        self.spec.missing.retain(|missing| missing != key);
        self
    }
}

/// Ends this long after `initialized`, by this code.
pub(crate) fn exits(after: f64, code: i32) -> SimScript {
    SimScript { exit_after: Some(seconds(after)), exit_code: code, ..SimScript::default() }
}

/// What the connector was asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Opening {
    pub(crate) run: RunNumber,
    pub(crate) at: Instant,
}

/// The simulated connector, watched.
#[derive(Clone)]
pub(crate) struct World {
    pub(crate) sim: SimConnector,
    books: Arc<Mutex<Books>>,
}

#[derive(Default)]
struct Books {
    plans: HashMap<InstanceId, Vec<SimPlan>>,
    openings: HashMap<InstanceId, Vec<Opening>>,
    /// Starts by team that have not brought a byte.
    starting: BTreeMap<String, usize>,
    /// The most of them at once: over all teams, and by team.
    starting_max: usize,
    starting_max_by_team: BTreeMap<String, usize>,
    /// How often two servers of one instance are there at once, because it is rolled out.
    rolled_out: u64,
}

impl World {
    fn new() -> Self {
        let books = Arc::<Mutex<Books>>::default();
        let planned = books.clone();
        let sim = SimConnector::with_plan(move |spec, run| {
            let books = planned.lock().unwrap();
            let nth = books.openings[&spec.id].iter().position(|opening| opening.run == run).unwrap();
            let plans = &books.plans[&spec.id];
            plans[nth.min(plans.len() - 1)].clone()
        });
        Self { sim, books }
    }
}

impl Connector for World {
    fn open(&self, spec: Arc<InstanceSpec>, run: RunNumber) -> BoxFuture<'static, Result<ProcessLink, OpenError>> {
        let team = spec.id.team.to_string();
        {
            let mut books = self.books.lock().unwrap();
            books.openings.entry(spec.id.clone()).or_default().push(Opening { run, at: Instant::now() });
            let of_team = books.starting.entry(team.clone()).or_default();
            *of_team += 1;
            let of_team = *of_team;
            let all = books.starting.values().sum();
            books.starting_max = books.starting_max.max(all);
            let known = books.starting_max_by_team.entry(team.clone()).or_default();
            *known = of_team.max(*known);
        }
        let starting = Starting { books: self.books.clone(), team };
        let opening = self.sim.open(spec, run);
        Box::pin(async move {
            let link = opening.await?;
            Ok(ProcessLink { reader: Box::new(FirstByte { reader: link.reader, starting: Some(starting) }), ..link })
        })
    }

    fn dial(&self, spec: &Arc<InstanceSpec>, run: RunNumber) -> Box<dyn ServerLine> {
        let opening = Opening { run, at: Instant::now() };
        self.books.lock().unwrap().openings.entry(spec.id.clone()).or_default().push(opening);
        self.sim.dial(spec, run)
    }
}

/// A start that has not brought a byte.
struct Starting {
    books: Arc<Mutex<Books>>,
    team: String,
}

impl Drop for Starting {
    fn drop(&mut self) {
        *self.books.lock().unwrap().starting.get_mut(&self.team).unwrap() -= 1;
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

/// What the sink does with the next batch.
#[derive(Debug, Clone)]
pub(crate) enum Mood {
    Accept,
    /// Waits until it is in another mood.
    Block,
    Answer(SinkAnswer),
    Panic,
}

/// A batch that came, and when.
#[derive(Debug, Clone)]
pub(crate) struct Attempt {
    pub(crate) at: Instant,
    pub(crate) batch: Arc<SinkBatch>,
}

/// A sink in memory.
#[derive(Clone)]
pub(crate) struct MemorySink {
    mood: watch::Sender<Mood>,
    attempts: Arc<Mutex<Vec<Attempt>>>,
    accepted: Arc<Mutex<Vec<Envelope>>>,
}

impl MemorySink {
    pub(crate) fn new() -> Self {
        Self { mood: watch::Sender::new(Mood::Accept), attempts: Arc::default(), accepted: Arc::default() }
    }

    pub(crate) fn is(&self, mood: Mood) {
        self.mood.send_replace(mood);
    }

    pub(crate) fn attempts(&self) -> Vec<Attempt> {
        self.attempts.lock().unwrap().clone()
    }

    pub(crate) fn accepted(&self) -> Vec<Envelope> {
        self.accepted.lock().unwrap().clone()
    }

    /// Waits until so many batches have come.
    pub(crate) async fn until_attempts(&self, count: usize) {
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
        let (mut mood, accepted) = (self.mood.subscribe(), self.accepted.clone());
        Box::pin(async move {
            let mood = mood.wait_for(|mood| !matches!(mood, Mood::Block)).await.unwrap().clone();
            match mood {
                Mood::Accept | Mood::Block => {
                    accepted.lock().unwrap().extend(batch.events.iter().cloned());
                    SinkAnswer::Accepted
                }
                Mood::Answer(answer) => answer,
                Mood::Panic => panic!("the sink panics as asked"),
            }
        })
    }
}

/// One runtime, and the world around it.
pub(crate) struct Fleet {
    pub(crate) runtime: RuntimeHandle,
    pub(crate) world: World,
    pub(crate) sink: MemorySink,
    join: JoinHandle<RuntimeEnd>,
    tasks_before: usize,
}

/// What a runtime needs, for those who start it themselves.
pub(crate) fn options() -> (RuntimeOptions, World, MemorySink) {
    let (world, sink) = (World::new(), MemorySink::new());
    let (epoch, began): (Timestamp, _) = ("2026-11-21T06:33:00Z".parse().unwrap(), Instant::now());
    let wall: WallClock = Arc::new(move || epoch + SignedDuration::try_from(began.elapsed()).unwrap());
    let mut options = RuntimeOptions::new(Arc::new(world.clone()), Arc::new(sink.clone()), wall);
    options.start_permits = 8;
    (options, world, sink)
}

impl Fleet {
    pub(crate) async fn start() -> Self {
        Self::with(|_| ()).await
    }

    pub(crate) async fn with(change: impl FnOnce(&mut RuntimeOptions)) -> Self {
        let tasks_before = alive_tasks();
        let (mut options, world, sink) = options();
        change(&mut options);
        let (runtime, join) = start(options).await.unwrap();
        Self { runtime, world, sink, join, tasks_before }
    }

    /// Installs a new instance.
    pub(crate) async fn add(&self, server: Server) -> InstanceId {
        let id = server.spec.id.clone();
        self.world.plan(&server);
        assert_eq!(self.runtime.install(server.spec).await.unwrap(), InstallOutcome::New);
        id
    }

    /// Installs a new instance and waits until it is online.
    pub(crate) async fn online(&self, server: Server) -> InstanceId {
        let id = self.add(server).await;
        self.until(&id, Status::Online).await;
        id
    }

    pub(crate) async fn until(&self, id: &InstanceId, status: Status) -> Arc<InstanceView> {
        self.until_view(id, |view| view.status == status).await
    }

    pub(crate) async fn until_view(
        &self,
        id: &InstanceId,
        wanted: impl FnMut(&InstanceView) -> bool,
    ) -> Arc<InstanceView> {
        let Ok(view) = timeout(LONG, self.runtime.wait_for(id, wanted)).await else {
            panic!("{id} does not come to what is waited for: {:?}", self.runtime.snapshot().get(id));
        };
        view.unwrap()
    }

    /// Waits until it is online with another process than this one.
    pub(crate) async fn until_replaced(&self, id: &InstanceId, old_pid: Option<u32>) -> Arc<InstanceView> {
        self.until_view(id, |view| view.status == Status::Online && view.pid.is_some() && view.pid != old_pid).await
    }

    pub(crate) fn view(&self, id: &InstanceId) -> Arc<InstanceView> {
        self.runtime.snapshot().get(id).unwrap().clone()
    }

    pub(crate) fn pid(&self, id: &InstanceId) -> Option<u32> {
        self.view(id).pid
    }

    /// Its server, to be hurt.
    pub(crate) fn server(&self, id: &InstanceId) -> SimHandle {
        self.world.sim.handle(id).unwrap()
    }

    /// The far end of a remote one, to be hurt and healed.
    pub(crate) fn remote(&self, id: &InstanceId) -> SimRemote {
        self.world.sim.remote(id)
    }

    pub(crate) async fn call(&self, id: &InstanceId, tool: &str, arguments: Value) -> Result<Value, CallError> {
        self.call_within(id, tool, arguments, None).await
    }

    pub(crate) async fn call_within(
        &self,
        id: &InstanceId,
        tool: &str,
        arguments: Value,
        limit: Option<Duration>,
    ) -> Result<Value, CallError> {
        call(&self.runtime, id, tool, arguments, limit).await
    }

    /// What the server has received: `{calls, cancelled, pings, initialized}`.
    pub(crate) async fn received(&self, id: &InstanceId) -> Value {
        self.call(id, "received", serde_json::json!({})).await.unwrap()["structuredContent"].clone()
    }

    /// Every event so far.
    pub(crate) async fn events(&self) -> Vec<Envelope> {
        self.runtime.flush().await;
        self.sink.accepted()
    }

    /// Every event of one instance so far, as it goes over the wire.
    pub(crate) async fn told_of(&self, id: &InstanceId) -> Vec<Value> {
        let is_its = |envelope: &&Envelope| {
            envelope.event.subject().is_some_and(|of| of.installation_id == id.installation && of.team_id == id.team)
        };
        self.events().await.iter().filter(is_its).map(|envelope| serde_json::to_value(envelope).unwrap()).collect()
    }

    /// The `data` of its events of one type so far.
    pub(crate) async fn told(&self, id: &InstanceId, kind: &str) -> Vec<Value> {
        let told = self.told_of(id).await;
        told.into_iter().filter(|event| event["type"] == kind).map(|event| event["data"].clone()).collect()
    }

    /// The statuses that it was said to have, in order, with their messages.
    pub(crate) async fn statuses(&self, id: &InstanceId) -> Vec<(String, Option<String>)> {
        let text = |value: &Value| value.as_str().map(ToOwned::to_owned);
        let told = self.told(id, "mcp.server.status_changed").await;
        told.iter().map(|data| (text(&data["status"]).unwrap(), text(&data["status_message"]))).collect()
    }

    /// Shuts down, and sees that nothing is left.
    pub(crate) async fn finish(self) {
        let farewell = timeout(LONG, self.runtime.shutdown()).await.unwrap();
        assert_eq!(farewell, ShutdownReport { events_lost: 0, in_time: true });
        assert_no_gap(&self.sink.accepted());
        self.finish_after_shutdown().await;
    }

    /// Sees that nothing is left of a runtime that is ending already.
    pub(crate) async fn finish_after_shutdown(self) -> RuntimeEnd {
        let Self { runtime, world, join, tasks_before, .. } = self;
        let end = timeout(LONG, join).await.unwrap().unwrap();
        drop(runtime);
        nothing_is_left(&world, tasks_before).await;
        end
    }
}

impl World {
    pub(crate) fn plan(&self, server: &Server) {
        self.books.lock().unwrap().plans.insert(server.spec.id.clone(), server.plans.clone());
    }

    /// Its starts so far.
    pub(crate) fn openings(&self, id: &InstanceId) -> Vec<Opening> {
        self.books.lock().unwrap().openings.get(id).cloned().unwrap_or_default()
    }

    /// All starts so far.
    pub(crate) fn all_openings(&self) -> Vec<Opening> {
        self.books.lock().unwrap().openings.values().flatten().copied().collect()
    }

    /// So often two servers of one instance are there at once in this test.
    pub(crate) fn rolls_out(&self, times: u64) {
        self.books.lock().unwrap().rolled_out = times;
    }

    /// The times between its starts, to a tenth of a second.
    pub(crate) fn gaps(&self, id: &InstanceId) -> Vec<f64> {
        self.openings(id).windows(2).map(|pair| tenths(pair[1].at - pair[0].at)).collect()
    }

    /// Waits until it has been started so often.
    pub(crate) async fn until_openings(&self, id: &InstanceId, count: usize) {
        let enough = async {
            while self.openings(id).len() < count {
                sleep(Duration::from_millis(10)).await;
            }
        };
        assert!(timeout(LONG, enough).await.is_ok(), "{id} was started {} times only", self.openings(id).len());
    }

    /// The most starts that were under way at once since this was asked last: over all, and of one team.
    pub(crate) fn take_starting_max(&self, team: &str) -> (usize, usize) {
        let mut books = self.books.lock().unwrap();
        let of_team = books.starting_max_by_team.insert(team.to_owned(), 0).unwrap_or_default();
        (std::mem::take(&mut books.starting_max), of_team)
    }
}

/// One call, as a gateway makes it; the answer parsed.
pub(crate) async fn call(
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

pub(crate) fn alive_tasks() -> usize {
    Handle::current().metrics().num_alive_tasks()
}

/// No server, no line to one, and no task beyond those that were there before.
pub(crate) async fn nothing_is_left(world: &World, tasks_before: usize) {
    let clear = async {
        while alive_tasks() > tasks_before || world.sim.alive_count() + world.sim.line_count() > 0 {
            sleep(Duration::from_millis(1)).await;
        }
    };
    let cleared = timeout(seconds(60.0), clear).await;
    assert!(
        cleared.is_ok(),
        "left over: {} servers, {} lines, {} tasks beyond {tasks_before}",
        world.sim.alive_count(),
        world.sim.line_count(),
        alive_tasks().saturating_sub(tasks_before)
    );
    let rolled_out = world.books.lock().unwrap().rolled_out;
    assert_eq!(world.sim.overlaps(), rolled_out, "two servers of one instance at once");
}

/// `seq` counts up by one from 1.
pub(crate) fn assert_no_gap(events: &[Envelope]) {
    for (nth, envelope) in (1..).zip(events) {
        assert_eq!(envelope.seq, nth, "{}", envelope.event.kind());
    }
}
