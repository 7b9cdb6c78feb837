//! One satellite per test with real processes, and the assertion that the test leaves nothing behind.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use mcp_satellite::connect::stdio::StdioConnector;
use mcp_satellite_actors::model::event::{Envelope, Event, LogLine};
use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::spec::{
    ConfigTier, ConfigValue as Configured, InstanceConfig, InstanceSpec, ProcessLifetime, ServerTarget, UpdateMethod,
};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::{RuntimeHandle, RuntimeOptions};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use testkit::process::is_own_process;
use testkit::sink::{RecordingSink, real_time_options};
use testkit::spec::config;
use testkit::wait::{GIVE_UP, with_limit};
use tokio::sync::watch;

/// The environment variable that marks all processes of a test, also those that servers start.
const TAG: &str = "MCP_SATELLITE_TEST";

/// Runs a test with its own satellite, shuts the satellite down, and asserts that nothing is left.
pub(crate) fn real(test: impl AsyncFnOnce(&Satellite)) {
    run_alone(async |scope| {
        let satellite = scope.satellite().await;
        test(&satellite).await;
        satellite.handle.shutdown().await;
        satellite.ended().await;
    });
}

/// Runs a test that starts satellites itself and need not end them: they must end with the async runtime of the test.
/// Asserts that nothing is left then.
pub(crate) fn run_alone(test: impl AsyncFnOnce(&TestScope)) {
    static WARM: Once = Once::new();
    if !is_own_process() {
        return;
    }
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    // The first runtime of a process opens descriptors for signals that the process keeps.
    WARM.call_once(|| drop(runtime()));

    let given_up = Instant::now() + GIVE_UP;
    // Waits until the leftovers of a failed test are gone.
    let before = Footprint::settled(given_up);
    let scope = TestScope::new();
    let runtime = runtime();
    runtime.block_on(test(&scope));
    drop(runtime);
    let given_up = Instant::now() + GIVE_UP;
    loop {
        let left = (scope.processes(), Footprint::now());
        if left.0.is_empty() && left.1 == before {
            return;
        }
        assert!(Instant::now() < given_up, "left at the end: {left:#?}\nbefore the test: {before:#?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The system resources of this process.
#[derive(Debug, PartialEq)]
struct Footprint {
    descriptors: usize,
    /// Child processes, including zombies.
    children: Vec<u32>,
    /// The number of threads of the connector.
    threads: usize,
}

impl Footprint {
    /// Waits until no child and no thread of a satellite is left.
    fn settled(given_up: Instant) -> Self {
        loop {
            let footprint = Self::now();
            if footprint.children.is_empty() && footprint.threads == 0 {
                return footprint;
            }
            assert!(Instant::now() < given_up, "another test has left: {footprint:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn now() -> Self {
        let threads = fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = threads.filter_map(|thread| fs::read_to_string(thread.path().join("comm")).ok());
        let own = std::process::id().to_string();
        let is_child = |pid: &u32| stat(*pid).is_some_and(|stat| stat.get(1) == Some(&own));
        Self {
            descriptors: fs::read_dir("/proc/self/fd").unwrap().count(),
            children: pids().filter(is_child).collect(),
            threads: names.filter(|name| name.starts_with("satellite-")).count(),
        }
    }
}

fn pids() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Returns the fields of `/proc/PID/stat` after the name: state, parent, group …
fn stat(pid: u32) -> Option<Vec<String>> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Some(stat[stat.rfind(')')? + 1..].split_ascii_whitespace().map(ToOwned::to_owned).collect())
}

/// A running process that a test started directly or indirectly.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    pub(crate) name: String,
}

/// The directory of a test and the tag that marks its processes.
pub(crate) struct TestScope {
    tag: String,
    directory: tempfile::TempDir,
}

impl TestScope {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let tag = format!("{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        Self { tag, directory: tempfile::tempdir().unwrap() }
    }

    /// Returns the directory of the test.
    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Returns the running processes of the test.
    pub(crate) fn processes(&self) -> Vec<Process> {
        let variable = format!("{TAG}={}", self.tag);
        let is_ours = |pid: &u32| {
            // A zombie's environment is empty.
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|entry| entry == variable.as_bytes())
        };
        let named = |pid| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            Process { pid, name: name.trim_end().to_owned() }
        };
        pids().filter(is_ours).map(named).collect()
    }

    /// Starts a satellite.
    pub(crate) async fn satellite(&self) -> Satellite<'_> {
        self.satellite_with(StdioConnector::new(Vec::new()).unwrap()).await
    }

    /// Starts a satellite with this connector.
    pub(crate) async fn satellite_with(&self, connector: StdioConnector) -> Satellite<'_> {
        let (options, events) = options_with(connector);
        let (handle, _) = mcp_satellite_actors::start(options).await.unwrap();
        Satellite { scope: self, handle, events }
    }
}

pub(crate) fn options() -> (RuntimeOptions, Events) {
    options_with(StdioConnector::new(Vec::new()).unwrap())
}

fn options_with(connector: StdioConnector) -> (RuntimeOptions, Events) {
    let sink = RecordingSink::new();
    let options = real_time_options(connector, &sink);
    (options, Events(sink.watch()))
}

/// Kills the processes that a failed test has left.
impl Drop for TestScope {
    fn drop(&mut self) {
        for process in self.processes() {
            let _ = kill(Pid::from_raw(process.pid.cast_signed()), Signal::SIGKILL);
        }
    }
}

/// The events so far, and a way to wait for more.
#[derive(Clone)]
pub(crate) struct Events(watch::Receiver<Vec<Envelope>>);

impl Events {
    pub(crate) fn so_far(&self) -> Vec<Envelope> {
        self.0.borrow().clone()
    }

    /// Waits until a function of the events returns a value.
    async fn wait<T>(&self, what: &str, mut wanted: impl FnMut(&[Envelope]) -> Option<T>) -> T {
        let mut events = self.0.clone();
        let mut found = None;
        let waiting = events.wait_for(|events| {
            found = wanted(events);
            found.is_some()
        });
        if let Ok(Ok(_)) = tokio::time::timeout(GIVE_UP, waiting).await {
            return found.unwrap();
        }
        panic!("gave up waiting for the event {what}; events: {:#?}", self.so_far());
    }
}

/// A satellite with real processes.
pub(crate) struct Satellite<'a> {
    pub(crate) scope: &'a TestScope,
    pub(crate) handle: RuntimeHandle,
    pub(crate) events: Events,
}

impl Satellite<'_> {
    /// Installs a server without waiting until it is online.
    pub(crate) async fn install(&self, server: Server) -> Instance {
        install(self.scope, &self.handle, &self.events, server).await
    }

    /// Installs a server and waits until it is online.
    pub(crate) async fn online(&self, server: Server) -> Instance {
        let instance = self.install(server).await;
        instance.online().await;
        instance
    }

    /// Waits until the runtime has ended: its last actor has dropped the snapshot.
    pub(crate) async fn ended(&self) {
        let mut watch = self.handle.watch();
        with_limit("the runtime's end", async { while watch.changed().await.is_ok() {} }).await;
    }
}

/// Installs a server in a satellite that the test has started itself.
pub(crate) async fn install(scope: &TestScope, handle: &RuntimeHandle, events: &Events, server: Server) -> Instance {
    let spec = server.spec(scope);
    let id = spec.id.clone();
    handle.install(spec).await.unwrap();
    Instance { handle: handle.clone(), events: events.clone(), id }
}

/// The configuration of a server. By default the server is healthy and has short delays.
pub(crate) struct Server {
    command: String,
    args: Vec<String>,
    cwd: Option<String>,
    env: BTreeMap<String, Configured>,
    keep: ProcessLifetime,
    on_update: UpdateMethod,
    policy: Policy,
}

impl Server {
    pub(crate) fn command(command: &str, args: &[&str]) -> Self {
        let mut policy = Policy::default();
        policy.restart.delays = vec![Duration::from_millis(10), Duration::from_millis(50)];
        policy.session.request_timeout = GIVE_UP;
        policy.logs.batch_delay = Duration::from_millis(20);
        let args = args.iter().map(ToString::to_string).collect();
        Self {
            command: command.to_owned(),
            args,
            cwd: None,
            env: BTreeMap::new(),
            keep: ProcessLifetime::default(),
            on_update: UpdateMethod::default(),
            policy,
        }
    }

    /// Returns the simulated server of the binary, as a process.
    pub(crate) fn sim(flags: &[&str]) -> Self {
        let verb = ["sim-server"];
        Self::command(env!("CARGO_BIN_EXE_satellite"), &[&verb, flags].concat())
    }

    /// Returns a shell script as a server.
    pub(crate) fn sh(script: &str) -> Self {
        Self::command("/bin/sh", &["-c", script])
    }

    /// Returns the simulated server as the child of a wrapper, with a helper beside it that ignores SIGTERM.
    pub(crate) fn wrapped(flags: &[&str]) -> Self {
        let wrapper = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/real/wrapper.sh");
        let command = [wrapper, env!("CARGO_BIN_EXE_satellite"), "sim-server"];
        Self::command("/bin/sh", &[&command, flags].concat())
    }

    pub(crate) fn cwd(mut self, directory: impl AsRef<Path>) -> Self {
        self.cwd = Some(directory.as_ref().to_str().unwrap().to_owned());
        self
    }

    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.env.insert(name.to_owned(), Configured::plain(value));
        self
    }

    pub(crate) fn always_on(mut self) -> Self {
        self.keep = ProcessLifetime::AlwaysOn;
        self
    }

    pub(crate) fn policy(mut self, change: impl FnOnce(&mut Policy)) -> Self {
        change(&mut self.policy);
        self
    }

    /// Allows one crash: the first one is the last.
    pub(crate) fn once(self) -> Self {
        self.policy(|policy| policy.restart.max_crashes = 1)
    }

    fn spec(mut self, scope: &TestScope) -> InstanceSpec {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        self.env.insert(TAG.to_owned(), Configured::plain(scope.tag.as_str()));
        let args = self.args.into_iter().map(Into::into).collect();
        let target = ServerTarget::Stdio { command: self.command, cwd: self.cwd };
        let config = InstanceConfig {
            installation: format!("abc{}", COUNT.fetch_add(1, Ordering::Relaxed)).into(),
            server_tier: ConfigTier { args, env: self.env, ..ConfigTier::default() },
            lifetime: self.keep,
            update_method: self.on_update,
            ..config(target, self.policy)
        };
        config.merge()
    }
}

/// An installed server.
#[derive(Clone)]
pub(crate) struct Instance {
    pub(crate) handle: RuntimeHandle,
    events: Events,
    pub(crate) id: InstanceId,
}

impl Instance {
    /// Returns the published state of the instance.
    pub(crate) fn view(&self) -> Arc<InstanceView> {
        self.handle.snapshot().get(&self.id).unwrap().clone()
    }

    /// Waits until the instance has the wanted state.
    pub(crate) async fn until(&self, what: &str, wanted: impl FnMut(&InstanceView) -> bool) -> Arc<InstanceView> {
        let waiting = tokio::time::timeout(GIVE_UP, self.handle.wait_for(&self.id, wanted));
        let Ok(view) = waiting.await else {
            panic!("gave up waiting until it is {what}: {:#?}\n{:#?}", self.view(), self.events.so_far())
        };
        view.unwrap()
    }

    /// Waits until the instance is online and accepts calls.
    pub(crate) async fn online(&self) -> Arc<InstanceView> {
        self.until("online", |view| view.status == Status::Online && view.port.is_some()).await
    }

    /// Waits until the instance is online with another process than `old`.
    pub(crate) async fn online_again(&self, old: u32) -> Arc<InstanceView> {
        let is_new = |view: &InstanceView| view.port.is_some() && view.pid.is_some_and(|pid| pid != old);
        self.until("online again", |view| view.status == Status::Online && is_new(view)).await
    }

    pub(crate) async fn permanently_failed(&self) -> Arc<InstanceView> {
        self.until("permanently_failed", |view| view.status == Status::PermanentlyFailed).await
    }

    /// Returns the pid of the current run.
    pub(crate) fn pid(&self) -> u32 {
        self.view().pid.unwrap()
    }

    /// Sends a signal to the leader alone.
    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid().cast_signed()), signal).unwrap();
    }

    /// Waits for the first event of the instance for which `wanted` returns a value, and returns that value.
    pub(crate) async fn wait_event<T>(&self, what: &str, mut wanted: impl FnMut(&Event) -> Option<T>) -> T {
        self.events.wait(what, |events| self.own(events).find_map(|event| wanted(&event.event))).await
    }

    fn own<'a>(&self, events: &'a [Envelope]) -> impl Iterator<Item = &'a Envelope> {
        let is_own = move |event: &&Envelope| {
            event.event.subject().is_some_and(|subject| subject.installation_id == self.id.installation)
        };
        events.iter().filter(is_own)
    }

    /// Returns the events of the instance so far.
    pub(crate) fn events(&self) -> Vec<Envelope> {
        self.own(&self.events.so_far()).cloned().collect()
    }

    /// Returns the lines of the log so far.
    pub(crate) fn log(&self) -> Vec<LogLine> {
        let lines = |event: Envelope| match event.event {
            Event::ServerLogs { logs, .. } => logs,
            _ => Vec::new(),
        };
        self.events().into_iter().flat_map(lines).collect()
    }

    /// Waits for a crash and returns its `(reason, code, signal)`.
    pub(crate) async fn crashed(&self) -> (String, Option<i32>, Option<i32>) {
        let crash = |event: &Event| match event {
            Event::Crashed { reason, exit_code, signal, .. } => Some((reason.clone(), *exit_code, *signal)),
            _ => None,
        };
        self.wait_event("crashed", crash).await
    }

    /// Calls a tool and returns its result or the error.
    pub(crate) async fn call_within(
        &self,
        timeout: Option<Duration>,
        tool: &str,
        arguments: Value,
    ) -> Result<Value, CallError> {
        let arguments = serde_json::value::to_raw_value(&arguments).unwrap();
        let answer = with_limit(tool, self.handle.call(&self.id, tool, Some(arguments), timeout)).await;
        answer.map(|result| serde_json::from_str(result.get()).unwrap())
    }

    /// Calls a tool without a deadline of the caller.
    pub(crate) async fn call(&self, tool: &str, arguments: Value) -> Result<Value, CallError> {
        self.call_within(None, tool, arguments).await
    }

    /// Calls a tool and returns the text of its result.
    pub(crate) async fn text(&self, tool: &str, arguments: Value) -> String {
        text(&self.call(tool, arguments).await.unwrap())
    }

    /// Asserts that a call returns the right result.
    pub(crate) async fn assert_callable(&self) {
        assert_eq!(self.text("add", serde_json::json!({"a": 2, "b": 40})).await, "42");
    }

    /// Returns what the simulated server has received so far.
    pub(crate) async fn received(&self) -> Value {
        self.call("received", Value::Object(serde_json::Map::new())).await.unwrap()["structuredContent"].take()
    }
}

/// Returns the text of a tool's result.
pub(crate) fn text(result: &Value) -> String {
    result["content"][0]["text"].as_str().unwrap().to_owned()
}
