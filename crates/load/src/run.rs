//! Sequence of a run: set up, bring all instances online, apply load and faults, wait for recoveries, shut down, check.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use futures::StreamExt;
use jiff::Timestamp;
use mcp_satellite_actors::model::exit::RuntimeEnd;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::{ControlError, RuntimeHandle, RuntimeOptions, ShutdownReport, start};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::{JoinError, JoinHandle};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::checks::InvariantChecks;
use super::drive::{
    CallCounters, CallResults, CallSources, EndpointParts, LoadCaller, LoadEndpoint, LoadGenerator, LoadPeriods,
    Prober, RuntimeCaller,
};
use super::fleet::LoadFleet;
use super::inject::{FaultInjector, InjectionResults};
use super::measure::{self, CpuClock, Latency};
use super::plan::{self, CallSource, FaultPlan};
use super::recorder::{RunClock, RunRecorder};
use super::recovery_log::RecoveryLog;
use super::scenario::{CallLoad, Scenario, ScenarioErrors};
use super::setup::RunSetup;
use super::types::{
    EventFindings, FaultKind, FaultVictim, InstanceNo, Invariant, InvariantViolation, LeftoverResources, PlannedFault,
    ProgressDisplay, RunEndState, RunFindings, RunSample, ServerEnvironment,
};
use super::watch::{ResponseTimes, RunSampler};
use super::world::{CountingConnector, FleetScripts, ProcessWorld, ServerFaults, ServerWorld, SimWorld};

// Concurrent installations.
const CONCURRENT_INSTALLS: usize = 64;
// Default number of concurrent starts, and of concurrent connections, of simulated servers.
const SIMULATED_STARTS: usize = 256;
const POLL_INTERVAL: Duration = Duration::from_millis(5);
// Time limit for all instances to come online after the last installation. Without them there is nothing to load.
const ONLINE_MAX: Duration = Duration::from_secs(300);
// Memory samples. The lowest counts: memory that the allocator has not purged yet is not in use.
const MEMORY_SAMPLES: u32 = 5;
const MEMORY_SAMPLE_PAUSE: Duration = Duration::from_millis(100);
// Pause in real time when the clock of the run is virtual: the allocator returns memory by real time.
const MEMORY_SAMPLE_PAUSE_REAL: Duration = Duration::from_millis(60);
// Time limit for resources to be released after the end.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);
const PROBE_EVERY: Duration = Duration::from_millis(250);
// Minimum number of simultaneous faults of a kind that get a mark and are checked for effects on other teams.
const LARGE_FAULT_MIN: usize = 5;
// Start of virtual time: 2026-01-01 00:00 UTC.
const EPOCH: Timestamp = Timestamp::constant(1_767_225_600, 0);

/// Reasons why a run has no results.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The scenario is invalid, or invalid in this mode.
    #[error(transparent)]
    Scenario(#[from] ScenarioErrors),
    /// The async runtime did not start.
    #[error("cannot start the async runtime")]
    Threads(#[source] io::Error),
    /// The satellite's runtime did not start.
    #[error("cannot start the runtime")]
    Runtime(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The servers cannot be prepared.
    #[error("cannot prepare the servers")]
    World(#[source] io::Error),
    /// The MCP endpoint cannot be opened.
    #[error("cannot open the MCP endpoint")]
    Endpoint(#[source] io::Error),
    /// The trace cannot be written.
    #[error("cannot write the trace")]
    Trace(#[source] io::Error),
    /// The runtime rejected an instance.
    #[error("cannot install {instance}")]
    Install {
        instance: String,
        /// Reason for the rejection.
        source: ControlError,
    },
    /// The user stopped the run before all instances were online.
    #[error("stopped before all servers were online")]
    Stopped,
    /// Some instances did not come online.
    #[error("{online} of {of} servers were online after {} s; first of the others: {instance}", after.as_secs())]
    NeverOnline {
        /// Time waited.
        after: Duration,
        /// Number of instances that were online.
        online: usize,
        /// Number of all instances.
        of: usize,
        /// First instance that was not online, and its status.
        instance: String,
    },
    /// A task of the harness panicked.
    #[error("a task of the load harness failed")]
    Harness(#[from] JoinError),
}

/// Builds the async runtime for a mode. Virtual time uses one thread and a paused clock that advances only when all
/// tasks wait.
///
/// # Errors
///
/// Fails if the async runtime cannot be started.
pub fn build_runtime(mode: ServerEnvironment) -> Result<tokio::runtime::Runtime, LoadError> {
    let built = match mode {
        ServerEnvironment::Virtual => {
            tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build()
        }
        ServerEnvironment::Simulated | ServerEnvironment::Real => {
            tokio::runtime::Builder::new_multi_thread().enable_all().build()
        }
    };
    built.map_err(LoadError::Threads)
}

struct InitialUsage {
    tasks: usize,
    descriptors: usize,
    memory: u64,
}

/// Components of a run after the start of the satellite's runtime.
struct RunContext<'a> {
    setup: &'a RunSetup,
    plan: Arc<FaultPlan>,
    fleet: Arc<LoadFleet>,
    world: Arc<dyn ServerWorld>,
    scripts: Arc<FleetScripts>,
    // Present if calls go through the MCP endpoint.
    endpoint_parts: Option<EndpointParts>,
    recorder: Arc<RunRecorder>,
    runtime: RuntimeHandle,
    tally: Arc<CallCounters>,
    injected: Arc<AtomicU64>,
    stop: CancellationToken,
    initial_usage: InitialUsage,
}

/// Measurements from the first installation until all instances have recovered.
struct LoadResults {
    all_online: Duration,
    memory_before: u64,
    memory_after: u64,
    children_cpu: Option<Duration>,
    times: LoadPeriods,
    calls: CallResults,
    injection: InjectionResults,
}

/// Runs a scenario and returns the results. In virtual time the caller must use a runtime built by [`build_runtime`].
///
/// # Errors
///
/// Fails if the run cannot be started, or if it ends before all instances were online.
pub async fn run(setup: RunSetup, show: &dyn ProgressDisplay) -> Result<RunFindings, LoadError> {
    let (took, cpu) = (std::time::Instant::now(), CpuClock::start());
    if setup.mode == ServerEnvironment::Virtual {
        setup.scenario.check_virtual_time()?;
    }
    let (context, join, given_up) = RunContext::start(&setup).await?;
    let (mut samples, waits) = (Vec::new(), Arc::<ResponseTimes>::default());
    let watch = RunSampler {
        runtime: context.runtime.clone(),
        ids: Arc::clone(&context.fleet.ids),
        response_times: Arc::clone(&waits),
        recorder: Arc::clone(&context.recorder),
        tally: Arc::clone(&context.tally),
        injected: Arc::clone(&context.injected),
        mode: setup.mode,
        display: show,
        stop: context.stop.clone(),
    };
    let middle = tokio::select! {
        biased;
        middle = context.run_load(show, given_up) => middle?,
        () = watch.run(setup.scenario.duration, &mut samples) => unreachable!("the sampler runs until it is dropped"),
    };
    drop(watch);
    show.show_phase("ending");
    let mut findings = context.finish(join, middle, samples, took.elapsed(), cpu).await?;
    (findings.supervisors, findings.registry) = waits.take();
    Ok(findings)
}

impl<'a> RunContext<'a> {
    async fn start(
        setup: &'a RunSetup,
    ) -> Result<(Self, JoinHandle<RuntimeEnd>, mpsc::UnboundedReceiver<InstanceNo>), LoadError> {
        let before = InitialUsage {
            tasks: Handle::current().metrics().num_alive_tasks(),
            descriptors: measure::descriptors(),
            memory: (setup.hooks.memory)(),
        };
        let scenario = &setup.scenario;
        let plan = plan::plan(scenario, setup.seed, setup.mode);
        let fleet = Arc::new(LoadFleet::new(scenario, setup.seed, setup.hooks.spec));
        let scripts = Arc::new(FleetScripts { fleet: Arc::clone(&fleet), scripts: plan.scripts.clone() });
        let world: Arc<dyn ServerWorld> = match setup.mode {
            ServerEnvironment::Simulated | ServerEnvironment::Virtual => Arc::new(SimWorld::new(scenario, &scripts)),
            ServerEnvironment::Real => {
                let world = ProcessWorld::new(&scripts, &setup.program).await;
                Arc::new(world.map_err(LoadError::World)?)
            }
        };
        let epoch = if setup.mode == ServerEnvironment::Virtual { EPOCH } else { Timestamp::now() };
        let clock = RunClock::start(epoch);
        let checks = InvariantChecks::new(&fleet.teams_by_instance(), &scenario.policy.restart, &scenario.limits);
        let handshake = plan.scripts.iter().flatten().map(|script| script.handshake_delay).max();
        let recovery_log =
            RecoveryLog::new(fleet.shape, &scenario.policy, &scenario.limits, handshake.unwrap_or_default());
        let (recorder, given_up) =
            RunRecorder::new(clock, checks, recovery_log, setup.trace.as_deref()).map_err(LoadError::Trace)?;
        let connectors = world.connectors();
        let counting = CountingConnector { connectors: connectors.clone(), recorder: Arc::clone(&recorder) };
        let defaults = RuntimeOptions::new(
            (setup.hooks.connectors)(connectors.with_process(counting)),
            (setup.hooks.sink)(Arc::clone(&recorder) as _),
            clock.wall_clock(),
        );
        let parts = setup.gateway.then(EndpointParts::new);
        let options = RuntimeOptions {
            audience: parts.as_ref().map_or(defaults.audience, EndpointParts::audience),
            batch: scenario.batch.clone(),
            team_budget: scenario.team_budget.clone(),
            start_permits: scenario.start_permits.unwrap_or(match setup.mode {
                // Start permits protect the cores from forks; simulated servers do not fork. A fixed number makes runs
                // comparable.
                ServerEnvironment::Simulated | ServerEnvironment::Virtual => SIMULATED_STARTS,
                ServerEnvironment::Real => defaults.start_permits,
            }),
            connect_permits: scenario.connect_permits.unwrap_or(match setup.mode {
                ServerEnvironment::Simulated | ServerEnvironment::Virtual => SIMULATED_STARTS,
                ServerEnvironment::Real => defaults.connect_permits,
            }),
            seed: setup.seed.derive("runtime", 0),
            ..defaults
        };
        let (runtime, join) = start(options).await.map_err(|error| LoadError::Runtime(error.into()))?;
        let context = Self {
            setup,
            plan: Arc::new(plan),
            fleet,
            world,
            scripts,
            endpoint_parts: parts,
            recorder,
            runtime,
            tally: Arc::default(),
            injected: Arc::default(),
            stop: CancellationToken::new(),
            initial_usage: before,
        };
        Ok((context, join, given_up))
    }

    async fn run_load(
        &self,
        show: &dyn ProgressDisplay,
        given_up: mpsc::UnboundedReceiver<InstanceNo>,
    ) -> Result<LoadResults, LoadError> {
        show.show_phase("starting");
        let installing = self.recorder.clock.now();
        self.install(show).await?;
        self.wait_until_online(show).await?;
        let now = self.recorder.clock.now();
        let children_cpu = self.children_cpu();
        let endpoint = self.open_endpoint().await?;
        // Call every instance before measuring memory, as at the end: memory of a first call is no growth.
        show.show_phase("first calls");
        self.prober(self.stop.clone(), endpoint.as_ref()).probe_all(self.fleet.shape.all().collect()).await;
        let memory_before = self.settled_memory().await;
        // Prefer the time of the event; the snapshot is read a little later.
        let all_online = self.recorder.state().recovery_log.all_online.unwrap_or(now).saturating_sub(installing);

        show.show_phase("calls and faults");
        let times = self.load_periods();
        let (ended, well) = (CancellationToken::new(), CancellationToken::new());
        let load_task = tokio::spawn(self.load_generator(self.load_periods(), endpoint.as_ref()).run(self.sources()));
        let prober = self.prober(well.clone(), endpoint.as_ref());
        let (injector, plan) = (self.injector(times.from, prober.clone(), ended.clone()), Arc::clone(&self.plan));
        let prober = tokio::spawn(prober.run());
        let injector = tokio::spawn(async move { injector.run(&plan.injections, given_up).await });
        let calls = load_task.await?;
        show.show_phase("recovering");
        ended.cancel();
        let injection = injector.await?;
        well.cancel();
        prober.await?;
        let memory_after = self.settled_memory().await;
        if let Some(endpoint) = endpoint {
            endpoint.close().await;
        }
        Ok(LoadResults { all_online, memory_before, memory_after, children_cpu, times, calls, injection })
    }

    async fn open_endpoint(&self) -> Result<Option<LoadEndpoint>, LoadError> {
        let Some(parts) = &self.endpoint_parts else { return Ok(None) };
        let deadline = self.setup.scenario.load.timeout();
        parts.open(&self.runtime, &self.fleet, deadline).await.map(Some).map_err(LoadError::Endpoint)
    }

    async fn install(&self, show: &dyn ProgressDisplay) -> Result<(), LoadError> {
        let install = |nth: InstanceNo| async move {
            let target = self.world.target(nth, self.fleet.kind(nth));
            let spec = self.fleet.spec(nth, target, "Bearer first");
            let instance = spec.name.to_string();
            self.runtime.install(spec).await.map_err(|source| LoadError::Install { instance, source })
        };
        let mut installs = futures::stream::iter(self.fleet.shape.all()).map(install).buffered(CONCURRENT_INSTALLS);
        while let Some(installed) = installs.next().await {
            installed?;
            if show.is_stopped() {
                return Err(LoadError::Stopped);
            }
        }
        Ok(())
    }

    // Instances that have been online are not checked again.
    async fn wait_until_online(&self, show: &dyn ProgressDisplay) -> Result<(), LoadError> {
        let (all, began) = (self.fleet.ids.len(), Instant::now());
        let mut online = 0;
        loop {
            let snapshot = self.runtime.snapshot();
            let status = |id| snapshot.get(id).map(|view| view.status);
            let rest = &self.fleet.ids[online..];
            let Some(ready) = rest.iter().position(|id| status(id) != Some(Status::Online)) else { return Ok(()) };
            online += ready;
            show.show_online(online.max(self.recorder.state().recovery_log.online_count()), all);
            if show.is_stopped() {
                return Err(LoadError::Stopped);
            }
            // Check all instances only if the first pending one has failed: the check is expensive.
            let is_over = |status: Option<Status>| matches!(status, Some(Status::Online)) || is_given_up(status);
            let is_hopeless = is_given_up(status(&rest[ready])) && rest.iter().all(|id| is_over(status(id)));
            if is_hopeless || began.elapsed() >= ONLINE_MAX {
                let id = &rest[ready];
                let what = status(id).map_or("not registered", Status::as_str);
                let others = rest.iter().filter(|id| status(id) == Some(Status::Online)).count();
                return Err(LoadError::NeverOnline {
                    after: began.elapsed(),
                    online: online - ready + others,
                    of: all,
                    instance: format!("{id} ({what})"),
                });
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Returns the memory in bytes beyond that before the run, after all pending work is done.
    async fn settled_memory(&self) -> u64 {
        self.runtime.sync_snapshot().await;
        self.runtime.flush().await;
        let mut least = u64::MAX;
        for _ in 0..MEMORY_SAMPLES {
            sleep(MEMORY_SAMPLE_PAUSE).await;
            if self.setup.mode == ServerEnvironment::Virtual {
                // The allocator uses real time.
                std::thread::sleep(MEMORY_SAMPLE_PAUSE_REAL);
            }
            least = least.min((self.setup.hooks.memory)());
        }
        least.saturating_sub(self.initial_usage.memory)
    }

    fn children_cpu(&self) -> Option<Duration> {
        let pids = || self.runtime.snapshot().iter().filter_map(|view| view.pid).collect::<Vec<_>>();
        (self.setup.mode == ServerEnvironment::Real).then(|| pids().into_iter().filter_map(measure::cpu_of).sum())
    }

    // The load starts now.
    fn load_periods(&self) -> LoadPeriods {
        let (from, lasts) = (self.recorder.clock.now(), self.setup.scenario.duration);
        let first = self.plan.injections.first().map_or(lasts, |first| first.at);
        let mut storms = Vec::new();
        for (at, together) in large_faults(&self.plan.injections) {
            let teams: HashSet<_> = together.iter().filter_map(|injection| self.team_of(injection)).collect();
            storms.push((from + at, teams));
        }
        let mut untouched: HashSet<_> = self.fleet.shape.all().map(|nth| self.fleet.shape.team_of(nth)).collect();
        for injection in &self.plan.injections {
            match self.team_of(injection) {
                Some(team) => drop(untouched.remove(&team)),
                // While the registry restarts, lookups of all teams may fail.
                None if injection.kind == FaultKind::RegistryPanic => untouched.clear(),
                None => {}
            }
        }
        LoadPeriods { from, until: from + lasts, quiet_until: from + first, storms, untouched }
    }

    fn team_of(&self, injection: &PlannedFault) -> Option<super::types::TeamNo> {
        match injection.victim {
            FaultVictim::Instance(nth) => Some(self.fleet.shape.team_of(nth)),
            FaultVictim::Team(team) => Some(team),
            FaultVictim::Satellite => None,
        }
    }

    fn sources(&self) -> CallSources {
        let (scenario, seed, kinds) = (&self.setup.scenario, self.setup.seed, &self.fleet.kinds);
        match &scenario.load {
            CallLoad::Open { in_flight_max, .. } => {
                CallSources::Open(Box::new(CallSource::open_loop(scenario, seed, kinds)), *in_flight_max)
            }
            CallLoad::Closed { callers, .. } => CallSources::Closed(
                (0..*callers).map(|nth| CallSource::closed_loop(scenario, seed, nth, kinds)).collect(),
            ),
        }
    }

    fn load_generator(&self, times: LoadPeriods, endpoint: Option<&LoadEndpoint>) -> LoadGenerator {
        LoadGenerator {
            caller: (self.setup.hooks.caller)(self.caller(endpoint)),
            clock: self.recorder.clock,
            shape: self.fleet.shape,
            times,
            tally: Arc::clone(&self.tally),
            timeout: self.setup.scenario.load.timeout(),
            stop: self.stop.clone(),
        }
    }

    // The prober uses this caller: tests replace only the caller of the load.
    fn caller(&self, endpoint: Option<&LoadEndpoint>) -> Arc<dyn LoadCaller> {
        let direct = || Arc::new(RuntimeCaller { runtime: self.runtime.clone(), ids: Arc::clone(&self.fleet.ids) });
        endpoint.map_or_else(|| direct() as _, LoadEndpoint::caller)
    }

    fn prober(&self, stop: CancellationToken, endpoint: Option<&LoadEndpoint>) -> Prober {
        Prober {
            caller: self.caller(endpoint),
            runtime: self.runtime.clone(),
            fleet: Arc::clone(&self.fleet),
            recorder: Arc::clone(&self.recorder),
            policy: Arc::clone(&self.setup.scenario.policy),
            timeout: self.setup.scenario.load.timeout(),
            seed: self.setup.seed,
            every: PROBE_EVERY,
            stop,
        }
    }

    fn injector(&self, from: Duration, prober: Prober, ended: CancellationToken) -> FaultInjector {
        let policy = &self.setup.scenario.policy;
        let delay = policy.restart.delays.iter().max().copied().unwrap_or_default();
        let delay = delay.max(plan::longest_team_delay());
        let found = policy.session.request_timeout + policy.watchdog.silence + policy.watchdog.ping_timeout;
        FaultInjector {
            runtime: self.runtime.clone(),
            server_faults: ServerFaults::new(
                Arc::clone(&self.world),
                Arc::clone(&self.scripts),
                self.runtime.clone(),
                &self.setup.scenario,
            ),
            fleet: Arc::clone(&self.fleet),
            recorder: Arc::clone(&self.recorder),
            from,
            recovery_timeout: delay
                + policy.session.handshake_timeout
                + policy.reconnect.backoff_max
                + found
                + Duration::from_secs(60),
            injected: Arc::clone(&self.injected),
            prober,
            ended,
            stop: self.stop.clone(),
        }
    }

    async fn finish(
        self,
        join: JoinHandle<RuntimeEnd>,
        middle: LoadResults,
        samples: Vec<RunSample>,
        took: Duration,
        cpu: CpuClock,
    ) -> Result<RunFindings, LoadError> {
        let Self {
            setup,
            plan,
            fleet,
            world,
            endpoint_parts: parts,
            recorder,
            runtime,
            stop,
            initial_usage: before,
            ..
        } = self;
        let ShutdownReport { events_lost, .. } = runtime.shutdown().await;
        let events = runtime.event_statistics();
        join.await?;
        drop((runtime, parts));
        world.close();
        // Close the trace first: its descriptor does not count as left.
        recorder.state().close();
        let left = leftover_resources(setup, &before, &*world).await;

        let scenario = &setup.scenario;
        let at = recorder.clock.now();
        let mut ledger = recorder.state();
        let order = ledger.order_hash();
        let none = InvariantChecks::new(&[], &scenario.policy.restart, &scenario.limits);
        let mut checks = std::mem::replace(&mut ledger.checks, none);
        let LoadResults { all_online, memory_before, memory_after, children_cpu, times, calls, injection } = middle;
        let CallResults { findings: calls, answers, neighbours_quiet, unexcused } = calls;
        checks.add_responses(answers);
        checks.add_violations(injection.missing.iter().map(|(nth, status)| unrecovered_violation(*nth, *status, at)));
        checks.add_violations(unexcused);
        checks.check_calls(at, &calls, &neighbours_quiet);
        checks.check_samples(&samples, took);
        // Other programs cannot delay virtual time.
        if setup.mode != ServerEnvironment::Virtual {
            checks.excuse_starved(&samples);
        }
        checks.add_checks(Invariant::Recovery, ledger.recovery_log.checked_recoveries);
        let instances = fleet.ids.len();
        let events_emitted = events.emitted;
        let end = RunEndState { at, left, memory_before, memory_after, instances, events_lost, events_emitted };
        let checked = checks.coverage(&end);
        let violations = checks.finish(&end);
        let each = |bytes: u64| bytes / (instances.max(1) as u64);
        Ok(RunFindings {
            repeat: setup.repeat.clone(),
            scenario: scenario.name.clone(),
            about: scenario.about.clone(),
            seed: setup.seed.0,
            mode: match setup.mode {
                ServerEnvironment::Simulated => "simulated",
                ServerEnvironment::Virtual => "virtual",
                ServerEnvironment::Real => "real",
            }
            .to_owned(),
            gateway: setup.gateway,
            stopped: stop.is_cancelled(),
            trace_ends_early: ledger.trace_error(),
            machine: measure::machine(),
            instances,
            teams: scenario.fleet.teams,
            seconds: at.as_secs_f64(),
            took_seconds: took.as_secs_f64(),
            cpu_seconds: cpu.elapsed().as_secs_f64(),
            all_online_ms: all_online.as_secs_f64() * 1e3,
            children_cpu_ms: children_cpu.map(|cpu| cpu.as_secs_f64() * 1e3),
            online: std::mem::take(&mut ledger.recovery_log.times_to_online),
            bytes_each: each(memory_before),
            bytes_each_after: each(memory_after),
            calls,
            outcomes: ledger.recovery_log.take_outcomes(),
            recoveries: std::mem::take(&mut ledger.recovery_log.recoveries),
            never_injected: never_injected(scenario, &injection.injected),
            checked,
            injected: injection.injected,
            impossible: impossible_faults(&plan, injection.missed),
            supervisors: Latency::default(),
            registry: Latency::default(),
            events: EventFindings {
                emitted: events.emitted,
                sent: events.sent,
                failed: events.failed,
                dropped: events.dropped,
                lost: events_lost as u64,
            },
            permanently_failed: ledger.recovery_log.permanently_failed,
            manual_restarts: injection.manual_restarts,
            left,
            samples,
            marks: marks(&plan.injections, times.from),
            order: format!("{order:016x}"),
            violations_in_all: violations.len() as u64,
            violations: first_of_each(violations),
        })
    }
}

// True if only a person can bring the instance online.
fn is_given_up(status: Option<Status>) -> bool {
    matches!(status, Some(Status::PermanentlyFailed | Status::RequiresReauth | Status::AwaitingUserConfig))
}

// Waits for the release of resources, up to a limit.
async fn leftover_resources(setup: &RunSetup, before: &InitialUsage, world: &dyn ServerWorld) -> LeftoverResources {
    let give_up_at = Instant::now() + RELEASE_TIMEOUT;
    loop {
        let descriptors = match setup.mode {
            // Virtual runs open no descriptors, but other tests in this process may.
            ServerEnvironment::Virtual => 0,
            ServerEnvironment::Simulated | ServerEnvironment::Real => {
                measure::descriptors().saturating_sub(before.descriptors)
            }
        };
        let tasks = Handle::current().metrics().num_alive_tasks().saturating_sub(before.tasks);
        let left =
            LeftoverResources { servers: world.server_count(), tasks, descriptors, processes: world.process_count() };
        if left == LeftoverResources::default() || Instant::now() >= give_up_at {
            return left;
        }
        sleep(Duration::from_millis(10)).await;
    }
}

fn unrecovered_violation(nth: InstanceNo, status: Option<Status>, at: Duration) -> InvariantViolation {
    let what = match status {
        None => "the registry does not contain the instance any more".to_owned(),
        Some(Status::Online) => "the instance has not recovered from a fault that ended long ago".to_owned(),
        Some(status) => format!("the instance is {status} long after the last fault ended"),
    };
    InvariantViolation {
        invariant: Invariant::Recovery,
        since_ms: u64::try_from(at.as_millis()).unwrap_or(u64::MAX),
        at_ms: u64::try_from(at.as_millis()).unwrap_or(u64::MAX),
        instance: Some(format!("i{}", nth.0)),
        what,
    }
}

// Groups of faults with the same time and kind and at least `LARGE_FAULT_MIN` victims.
fn large_faults(injections: &[PlannedFault]) -> impl Iterator<Item = (Duration, &[PlannedFault])> {
    injections
        .chunk_by(|a, b| a.at == b.at && a.kind == b.kind)
        .filter(|chunk| chunk.len() >= LARGE_FAULT_MIN)
        .map(|chunk| (chunk[0].at, chunk))
}

fn never_injected(scenario: &Scenario, injected: &BTreeMap<FaultKind, u64>) -> Vec<FaultKind> {
    let scheduled: BTreeSet<_> = scenario.faults.iter().map(|rule| rule.kind).collect();
    scheduled.into_iter().filter(|kind| injected.get(kind).is_none_or(|times| *times == 0)).collect()
}

fn marks(injections: &[PlannedFault], from: Duration) -> Vec<(u64, String)> {
    let mark = |at: Duration, text| (u64::try_from((from + at).as_millis()).unwrap_or(u64::MAX), text);
    let large = large_faults(injections)
        .map(|(at, many)| mark(at, format!("{} × {}", super::scenario::fault_name(many[0].kind), many.len())));
    let satellite_faults = injections
        .iter()
        .filter(|injection| !matches!(injection.victim, FaultVictim::Instance(_)))
        .map(|injection| mark(injection.at, super::scenario::fault_name(injection.kind).to_owned()));
    let mut marks: Vec<_> = large.chain(satellite_faults).collect();
    marks.sort();
    marks
}

fn impossible_faults(plan: &FaultPlan, missed: BTreeMap<FaultKind, u64>) -> BTreeMap<FaultKind, u64> {
    let mut impossible = missed;
    for (kind, count) in &plan.impossible {
        *impossible.entry(*kind).or_insert(0) += *count as u64;
    }
    impossible
}

// More violations of the same kind add little information.
fn first_of_each(violations: Vec<InvariantViolation>) -> Vec<InvariantViolation> {
    const OF_EACH: usize = 10;
    let mut seen: BTreeMap<Invariant, usize> = BTreeMap::new();
    let is_first = |violation: &InvariantViolation| {
        let count = seen.entry(violation.invariant).or_insert(0);
        *count += 1;
        *count <= OF_EACH
    };
    violations
        .into_iter()
        .filter({
            let mut is_first = is_first;
            move |violation| is_first(violation)
        })
        .collect()
}
