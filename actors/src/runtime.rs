//! The API for hosts and the gateway. A handle is cheap to clone; it sends messages to the actors and reads snapshots.

use std::borrow::Cow;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures::FutureExt;
use futures::future::Fuse;
use mcp_satellite_protocol::method;
use mcp_satellite_protocol::rpc::{MessageKind, RpcMessage, is_tool_error, join_parts, member, with_members};
use mcp_satellite_session::{AdmissionError, CallPermit, CallerRequest, ClientFacts, ClientRelay, TIMEOUT_MAX};
use ractor::{Actor, ActorCell, ActorRef, SpawnErr, cast};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::sync::{broadcast, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::audience::{Audience, NoAudience};
use crate::batcher::{EventSender, WallClock};
use crate::byte_budget::ServerMemory;
use crate::calls::CallPort;
use crate::model::actor_tree::ActorReport;
use crate::model::catalogue::Catalogue;
use crate::model::event::{Envelope, Event};
use crate::model::exit::{CallError, CallFate, RuntimeEnd};
use crate::model::ids::InstanceId;
use crate::model::policy::{BatchPolicy, MemoryPolicy, PolicyError, SessionPolicy, TeamBudgetPolicy};
use crate::model::remote::ServerInfo;
use crate::model::secret::SecretMask;
use crate::model::snapshot::{InstanceView, Snapshot};
use crate::model::spec::InstanceSpec;
use crate::probe::{ActorAnswers, ActorProbe};
use crate::root::{self, EarlierState, InstallOutcome, Root, RuntimePart, ShutdownReport};
use crate::rules::memory::{MemoryReading, MemoryStatus};
use crate::rules::outbox::OutboxStatistics;
use crate::rules::request_log::{self, LoggedPayload};
use crate::seam::{Connectors, EventSink, NoObserver, NullStateStore, RuntimeObserver, StateStore, ToolCallFate};
use crate::tasks::spawn_observer;
use crate::team_messages::{ControlError, ControlReply, InstanceCommand, ReconnectOutcome, UninstallOutcome};

// Pause between two requests to a team whose supervisor is being replaced.
const TEAM_RETRY_PAUSE: Duration = Duration::from_millis(50);
// A supervisor that has not answered after this time keeps failing.
const TEAM_RETRY_TIMEOUT: Duration = Duration::from_secs(60);

/// Components and settings of a runtime.
pub struct RuntimeOptions {
    /// Starters of servers.
    pub connectors: Connectors,
    /// Receiver of server messages for clients; by default there are no clients.
    pub audience: Arc<dyn Audience>,
    /// Memory budgets for data of servers; unlimited by default.
    pub server_memory: ServerMemory,
    /// Observer of calls, runs and sessions; by default nothing is observed.
    pub observer: Arc<dyn RuntimeObserver>,
    /// Destination of events.
    pub sink: Arc<dyn EventSink>,
    /// Store of instance state over restarts; by default nothing is stored.
    pub state_store: Arc<dyn StateStore>,
    /// The wall clock. It is used only for timestamps and for the age of events that an earlier satellite recorded.
    pub wall: WallClock,
    /// Number of the first event: one more than the last one that the sink has stored.
    pub next_seq: u64,
    /// Batching of events.
    pub batch: BatchPolicy,
    /// Limit of unwanted exits after which a team's starts run one at a time.
    pub team_budget: TeamBudgetPolicy,
    /// Maximum number of concurrent starts over all teams.
    pub start_permits: usize,
    /// Maximum number of concurrent connection attempts to remote servers over all teams.
    pub connect_permits: usize,
    /// Limits below which memory counts as short; [`RuntimeHandle::observe_memory`] reports the readings.
    pub memory_policy: MemoryPolicy,
    /// Seed of the jitter of delays: the same seed results in the same delays.
    pub seed: u64,
}

impl RuntimeOptions {
    /// Creates options with default settings. The number of concurrent starts is twice the number of cores, at least 4.
    pub fn new(connectors: impl Into<Connectors>, sink: Arc<dyn EventSink>, wall: WallClock) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            connectors: connectors.into(),
            audience: Arc::new(NoAudience),
            server_memory: ServerMemory::default(),
            observer: Arc::new(NoObserver),
            sink,
            state_store: Arc::new(NullStateStore),
            wall,
            next_seq: 1,
            batch: BatchPolicy::default(),
            team_budget: TeamBudgetPolicy::default(),
            start_permits: (2 * cores).max(4),
            connect_permits: 64,
            memory_policy: MemoryPolicy::default(),
            seed: 0,
        }
    }

    /// Validates the policies.
    ///
    /// # Errors
    ///
    /// Names the first field with an invalid value.
    pub fn check(&self) -> Result<(), PolicyError> {
        self.batch.check()?;
        self.team_budget.check()?;
        self.memory_policy.check()
    }
}

/// Handle to a runtime.
#[derive(Clone)]
pub struct RuntimeHandle {
    root: ActorRef<root::Msg>,
    snapshot: watch::Receiver<Arc<Snapshot>>,
    memory: watch::Receiver<MemoryStatus>,
    events: EventSender,
    observer: Arc<dyn RuntimeObserver>,
    request_payload_max: usize,
}

/// Starts an independent runtime. The join handle resolves to the reason when the runtime has ended.
///
/// # Errors
///
/// Fails if an option is invalid (`PolicyError`), or if an actor cannot be started.
pub async fn start(options: RuntimeOptions) -> Result<(RuntimeHandle, JoinHandle<RuntimeEnd>), SpawnErr> {
    let (args, parts) = prepare(options)?;
    let (root, join) = Root::spawn(None, Root, args).await?;
    Ok(parts.into_handle(root, join))
}

/// Starts a runtime under an actor of the host.
///
/// The host must handle each `SupervisionEvent` of this child by name (ractor's default stops the host with it), and
/// must call [`RuntimeHandle::shutdown`] and wait for it before it stops. If the host just stops, or is killed, ractor
/// kills the whole tree: every process is killed at once without grace, and queued events are lost.
///
/// # Errors
///
/// Fails if an option is invalid (`PolicyError`), or if an actor cannot be started.
pub async fn start_linked(
    options: RuntimeOptions,
    supervisor: ActorCell,
) -> Result<(RuntimeHandle, JoinHandle<RuntimeEnd>), SpawnErr> {
    let (args, parts) = prepare(options)?;
    let (root, join) = Root::spawn_linked(None, Root, args, supervisor).await?;
    Ok(parts.into_handle(root, join))
}

struct HandleParts {
    snapshot: watch::Receiver<Arc<Snapshot>>,
    memory: watch::Receiver<MemoryStatus>,
    events: EventSender,
    observer: Arc<dyn RuntimeObserver>,
    request_payload_max: usize,
    published: watch::Sender<Arc<Snapshot>>,
    end: Arc<OnceLock<RuntimeEnd>>,
}

impl HandleParts {
    fn into_handle(self, root: ActorRef<root::Msg>, join: JoinHandle<()>) -> (RuntimeHandle, JoinHandle<RuntimeEnd>) {
        let Self { snapshot, memory, events, observer, request_payload_max, published, end } = self;
        let join = spawn_observer(async move {
            // The join fails if the task was aborted with its tokio runtime.
            let _ = join.await;
            let end = end.get().cloned().unwrap_or(RuntimeEnd::Killed);
            published.send_modify(|snapshot| *snapshot = Arc::new(snapshot.with_end(&end)));
            end
        });
        (RuntimeHandle { root, snapshot, memory, events, observer, request_payload_max }, join)
    }
}

fn prepare(options: RuntimeOptions) -> Result<(root::Args, HandleParts), SpawnErr> {
    options.check().map_err(|error| SpawnErr::StartupFailed(error.into()))?;
    let (published, snapshot) = watch::channel(Arc::new(Snapshot::default()));
    let (memory_status, memory) = watch::channel(MemoryStatus::default());
    let end = Arc::<OnceLock<RuntimeEnd>>::default();
    let events = EventSender::new(&options.batch, options.wall);
    let request_payload_max = options.batch.request_payload_max;
    let args = root::Args {
        connectors: options.connectors,
        audience: options.audience,
        server_memory: options.server_memory,
        observer: options.observer.clone(),
        sink: options.sink,
        events: events.clone(),
        state_store: options.state_store,
        next_seq: options.next_seq,
        batch: options.batch,
        team_budget: options.team_budget,
        start_permits: options.start_permits,
        connect_permits: options.connect_permits,
        seed: options.seed,
        published: published.clone(),
        end: end.clone(),
        memory_policy: options.memory_policy,
        memory_status,
    };
    let observer = options.observer;
    Ok((args, HandleParts { snapshot, memory, events, observer, request_payload_max, published, end }))
}

impl fmt::Debug for RuntimeHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RuntimeHandle").finish_non_exhaustive()
    }
}

impl RuntimeHandle {
    /// Installs an instance, or changes the configuration of an installed one.
    ///
    /// # Errors
    ///
    /// Refuses an invalid policy ([`Policy::check`](crate::model::policy::Policy::check)), and any spec during a
    /// shutdown.
    pub async fn install(&self, spec: InstanceSpec) -> Result<InstallOutcome, ControlError> {
        self.install_with_state(spec, EarlierState::default()).await
    }

    /// Installs an instance with state from an earlier satellite under the same configuration. `known` is ignored if
    /// the instance is already installed.
    ///
    /// # Errors
    ///
    /// See [`RuntimeHandle::install`].
    pub async fn install_with_state(
        &self,
        spec: InstanceSpec,
        known: EarlierState,
    ) -> Result<InstallOutcome, ControlError> {
        let spec = validate(spec)?;
        self.request_root(|reply| root::Msg::Install(spec.clone(), known.clone(), reply)).await
    }

    /// Changes the configuration of an installed instance.
    ///
    /// # Errors
    ///
    /// Returns `NotFound` if the instance is not installed; see also [`RuntimeHandle::install`].
    pub async fn update(&self, spec: InstanceSpec) -> Result<InstallOutcome, ControlError> {
        let spec = validate(spec)?;
        self.request_root(|reply| root::Msg::Update(spec.clone(), reply)).await
    }

    /// Removes an instance. Returns when nothing of it is left.
    ///
    /// # Errors
    ///
    /// Returns `NotFound` if the instance is not installed.
    pub async fn uninstall(&self, id: &InstanceId) -> Result<UninstallOutcome, ControlError> {
        let before = self.status(id);
        let found = self.request_root(|reply| root::Msg::Uninstall(id.clone(), reply)).await;
        self.sync_snapshot().await;
        match (found, before) {
            // Removed with a supervisor that died during the removal.
            (Err(ControlError::NotFound), Some(view)) if self.status(id).is_none() => {
                Ok(UninstallOutcome { active: view.pid.is_some(), dormant: view.dormant })
            }
            (found, _) => found,
        }
    }

    /// Sets an instance to run, so that it takes calls. Returns when the start is under way.
    ///
    /// # Errors
    ///
    /// Returns `NotFound` if the instance is not installed, or `Refused` if it cannot be started.
    pub async fn start(&self, id: &InstanceId) -> Result<(), ControlError> {
        self.control(id, InstanceCommand::Start).await
    }

    /// Stops an instance until the next start. Returns when its process is gone.
    ///
    /// # Errors
    ///
    /// Returns `NotFound` if the instance is not installed, or `Superseded` if another request undoes the stop.
    pub async fn stop(&self, id: &InstanceId) -> Result<(), ControlError> {
        self.control(id, InstanceCommand::Stop).await
    }

    /// Restarts an instance with its failures cleared. Returns when the restart is under way.
    ///
    /// # Errors
    ///
    /// Returns `NotFound` if the instance is not installed, or `Refused` if it cannot be restarted.
    pub async fn restart(&self, id: &InstanceId) -> Result<(), ControlError> {
        self.control(id, InstanceCommand::Restart).await
    }

    /// Reconnects a remote instance, whatever its state, or restarts a process. Returns when the attempt has succeeded
    /// or failed.
    ///
    /// # Errors
    ///
    /// Returns `NotFound` if the instance is not installed, `Refused` if it cannot be reconnected, or `Superseded` if
    /// it is removed meanwhile.
    pub async fn reconnect(&self, id: &InstanceId) -> Result<ReconnectOutcome, ControlError> {
        let outcome = self.request_root(|reply| root::Msg::Reconnect(id.clone(), reply)).await;
        self.sync_snapshot().await;
        outcome
    }

    /// Reports that the machine was suspended for the duration `asleep`, which the clock of the timers did not count.
    /// Overdue work is done now.
    pub fn resumed_after_suspend(&self, asleep: Duration) {
        let _ = cast!(self.root, root::Msg::ResumedAfterSuspend(asleep));
    }

    /// Reports a memory reading. While memory is short, processes are started one by one, and the longest-idle servers
    /// are put to sleep.
    pub fn observe_memory(&self, reading: MemoryReading) {
        let _ = cast!(self.root, root::Msg::Memory(reading));
    }

    /// Returns the last memory reading and its effect.
    pub fn memory(&self) -> MemoryStatus {
        *self.memory.borrow()
    }

    async fn control(&self, id: &InstanceId, verb: InstanceCommand) -> Result<(), ControlError> {
        let done = self.request_root(|reply| root::Msg::Control(id.clone(), verb, reply)).await;
        self.sync_snapshot().await;
        done
    }

    /// Waits until the snapshot contains every change that was confirmed before: a team updates the registry before it
    /// answers.
    pub async fn sync_snapshot(&self) {
        let (reply, published) = oneshot::channel();
        let _ = cast!(self.root, root::Msg::Barrier(reply));
        // The wait fails if the registry died meanwhile; the next one receives everything.
        let _ = published.await;
    }

    /// Returns true if root, registry, batcher and all team supervisors handle a message `within` this time.
    pub async fn answers(&self, within: Duration) -> bool {
        let (probe, mut handled) = ActorProbe::new(false);
        // An actor that has died drops its messages; Root replaces it.
        let asked = cast!(self.root, root::Msg::Probe(probe)).is_ok();
        asked && tokio::time::timeout(within, handled.recv()).await.is_ok()
    }

    /// Returns the tree of all actors, as each one describes itself `within` this time. Actors that do not answer are
    /// reported as such by the actor above them.
    pub async fn describe(&self, within: Duration) -> ActorReport {
        let deadline = Instant::now() + within;
        let (probe, mut received) = ActorProbe::new(true);
        // If Root is gone, the cast fails, and there are no answers.
        let _ = cast!(self.root, root::Msg::Probe(probe));
        let mut answers = ActorAnswers::default();
        while let Ok(Some(answer)) = tokio::time::timeout_at(deadline, received.recv()).await {
            answers.add(answer);
        }
        answers.into_tree()
    }

    /// Returns the last published snapshot of all instances. Never blocks.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.snapshot.borrow().clone()
    }

    /// Returns the last published state of an instance; `None` if it is not installed.
    pub fn status(&self, id: &InstanceId) -> Option<Arc<InstanceView>> {
        self.snapshot().get(id).cloned()
    }

    /// Returns the tools that an instance offers now; `None` unless it is `online`.
    pub fn tools(&self, id: &InstanceId) -> Option<Arc<Catalogue>> {
        self.status(id).and_then(|view| view.offered_catalogue().cloned())
    }

    /// Returns a receiver that observes changes of the snapshot.
    pub fn watch(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.snapshot.clone()
    }

    /// Waits until `wanted` returns true for an instance. Returns `None` if it is not installed, is removed meanwhile,
    /// or the runtime ends.
    pub async fn wait_for(
        &self,
        id: &InstanceId,
        mut wanted: impl FnMut(&InstanceView) -> bool,
    ) -> Option<Arc<InstanceView>> {
        let mut watch = self.watch();
        loop {
            let snapshot = watch.borrow_and_update().clone();
            match snapshot.get(id) {
                Some(view) if wanted(view) => return Some(view.clone()),
                _ if snapshot.end().is_some() => return None,
                Some(_) => {}
                None if self.is_installed(id).await => {}
                None => return None,
            }
            watch.changed().await.ok()?;
        }
    }

    async fn is_installed(&self, id: &InstanceId) -> bool {
        let (reply, answer) = oneshot::channel();
        let _ = cast!(self.root, root::Msg::IsInstalled(id.clone(), reply));
        // The reply fails if Root is gone.
        answer.await.unwrap_or(false)
    }

    /// Waits until the runtime has ended, and returns the reason.
    pub async fn wait_for_end(&self) -> RuntimeEnd {
        let mut watch = self.watch();
        let last = watch.wait_for(|snapshot| snapshot.end().is_some()).await;
        // The wait fails if the tokio runtime ends with all its tasks.
        last.ok().and_then(|snapshot| snapshot.end().cloned()).unwrap_or(RuntimeEnd::Killed)
    }

    /// Returns a receiver of all later events.
    pub fn subscribe(&self) -> broadcast::Receiver<Arc<Envelope>> {
        self.events.subscribe()
    }

    /// Returns the emitter for events of the host, such as clients and configuration.
    pub fn emitter(&self) -> &EventSender {
        &self.events
    }

    /// Returns the observer of calls, runs and sessions.
    pub fn observer(&self) -> &dyn RuntimeObserver {
        &*self.observer
    }

    /// Returns the statistics of the event batcher.
    pub fn event_statistics(&self) -> OutboxStatistics {
        self.events.statistics()
    }

    /// Sends the queued events now. Returns when the sink has accepted or rejected them.
    pub async fn flush(&self) {
        let (reply, flushed) = oneshot::channel();
        let _ = cast!(self.root, root::Msg::FlushEvents(reply));
        // The wait fails if the batcher died meanwhile; the next one sends the queue.
        let _ = flushed.await;
    }

    /// Calls a tool of an instance, and starts it first if necessary. `timeout` covers both; the default is the
    /// instance's. Progress of the server extends the deadline up to the hard cap.
    ///
    /// A call that certainly did not reach the server is repeated once. A call that may have been executed is repeated
    /// once if the tool is annotated as idempotent or read-only.
    ///
    /// # Errors
    ///
    /// Returns the error of the server, or the reason why there is no response; [`CallError::fate`] shows whether the
    /// call may have been executed.
    pub async fn call(
        &self,
        id: &InstanceId,
        tool: &str,
        arguments: Option<Box<RawValue>>,
        timeout: Option<Duration>,
    ) -> Result<Box<RawValue>, CallError> {
        let started = Instant::now();
        let view = self.status(id);
        check_tool(view.as_deref(), tool)?;
        let known = view.as_ref().and_then(|view| view.catalogue.as_deref()?.tool(tool));
        let repeatable = known.is_some_and(|tool| tool.repeatable);
        let params = self.logged_payload(view.as_deref(), arguments.as_deref().map(RawValue::get));
        let call = ToolCallRequest { tool, arguments, repeatable };
        let reporter =
            CallReporter { runtime: self, id, view: view.clone(), tool: Some(tool), started, params, client: None };
        let answer = self.request(id, view.as_deref(), call, timeout, repeatable).await;
        match &answer {
            Ok(result) => reporter.report(Some(result.get()), tool_error(result.get())),
            Err(error) => reporter.report(None, Some(CallFailure::from_error(error))),
        }
        answer
    }

    /// Forwards a client's request to an instance, and starts it first if necessary. `timeout` covers both; the default
    /// is the instance's. Progress of the server extends the deadline. Returns the server's own message, a result or an
    /// error, with an id of ours.
    ///
    /// `withdrawn` receives the client's cancellation, which is forwarded; the method then returns `None`. A request
    /// that certainly did not reach the server is repeated once, and so is a [`ClientRelay::repeatable`] one that may have
    /// been executed.
    ///
    /// # Errors
    ///
    /// Returns the reason why there is no response.
    pub async fn relay(
        &self,
        id: &InstanceId,
        relay: ClientRelay,
        timeout: Option<Duration>,
        withdrawn: oneshot::Receiver<RpcMessage>,
    ) -> Result<Option<RpcMessage>, CallError> {
        let started = Instant::now();
        let view = self.status(id);
        if let Some(tool) = &relay.tool {
            check_tool(view.as_deref(), tool)?;
        }
        let arguments = relay.tool.as_ref().and_then(|_| member(relay.message.params()?, "arguments"));
        let params = self.logged_payload(view.as_deref(), arguments);
        let request = RelayedRequest { relay: &relay, withdrawn: withdrawn.fuse() };
        let reporter = CallReporter {
            runtime: self,
            id,
            view: view.clone(),
            tool: relay.tool.as_deref(),
            started,
            params,
            client: relay.client.as_deref(),
        };
        let answer = self.request(id, view.as_deref(), request, timeout, relay.repeatable).await;
        let answer = match answer {
            Ok(Some(list)) if relay.message.method() == Some(method::TOOLS_LIST) => {
                Ok(Some(selected_tools(list, view.as_deref())))
            }
            answer => answer,
        };
        let response = answer.as_ref().ok().and_then(|message| message.as_ref()?.outcome());
        let failure = match &answer {
            Ok(Some(message)) if message.kind() == MessageKind::Result => response.and_then(tool_error),
            Ok(Some(_)) => {
                let server_text = format!("server error: {}", response.unwrap_or_default());
                let text = "server error".to_owned();
                Some(CallFailure { fate: ToolCallFate::ServerError, text, server_text: Some(server_text) })
            }
            Ok(None) => Some(CallFailure::cancelled("cancelled by the client")),
            Err(error) => Some(CallFailure::from_error(error)),
        };
        reporter.report(response, failure);
        answer
    }

    /// Forwards a client's notification. It does not start a server that does not run.
    ///
    /// # Errors
    ///
    /// Returns `Busy` if too many calls are in flight.
    pub fn notify(&self, id: &InstanceId, message: RpcMessage) -> Result<(), CallError> {
        let port = self.status(id).and_then(|view| view.port.clone());
        let Some(port) = port else { return Ok(()) };
        match port.notify(message) {
            // The run falls asleep or was replaced; another run lacks the context of this notification.
            Ok(()) | Err(AdmissionError::Closed) => Ok(()),
            Err(AdmissionError::Full) => Err(port.busy_error()),
        }
    }

    /// Returns the server's description from its handshake, and starts the instance first if necessary.
    ///
    /// # Errors
    ///
    /// Returns the reason why the instance is not available within `timeout`.
    pub async fn server_info(&self, id: &InstanceId, timeout: Duration) -> Result<Arc<ServerInfo>, CallError> {
        let known = |view: &InstanceView| view.server.clone();
        if let Some(server) = self.status(id).as_deref().and_then(known) {
            return Ok(server);
        }
        let deadline = Instant::now() + timeout.min(TIMEOUT_MAX);
        self.ensure(id, deadline, timeout).await?;
        let late = || CallError::TimedOut { after: timeout, fate: CallFate::NotSent };
        let view = tokio::time::timeout_at(deadline, self.wait_for(id, |view| view.server.is_some())).await;
        view.ok().flatten().as_deref().and_then(known).ok_or_else(late)
    }

    /// Returns the server's description in the stateless era, and starts the instance first if necessary. `None` if it
    /// does not support that era with us: over a pipe a server uses one era, over HTTP it may support both.
    ///
    /// A server with sessions is asked once in a run, and only on demand: some servers create a session for every
    /// request.
    ///
    /// # Errors
    ///
    /// Returns the reason why the server did not answer within `timeout`.
    pub async fn discover(&self, id: &InstanceId, timeout: Duration) -> Result<Option<Arc<ServerInfo>>, CallError> {
        let view = self.status(id);
        self.request(id, view.as_deref(), DiscoverAttempt, Some(timeout), true).await
    }

    fn logged_payload(&self, view: Option<&InstanceView>, json: Option<&str>) -> Option<LoggedPayload> {
        let spec = &view.filter(|view| view.spec.request_logging)?.spec;
        Some(LoggedPayload::from_json(json?, self.request_payload_max, &spec.mask))
    }

    fn report_call(&self, id: &InstanceId, view: Option<Arc<InstanceView>>, called: EndedToolCall<'_>) {
        // Uses the current state: credentials may have changed, and an unknown instance may exist by now.
        let Some(view) = self.status(id).or(view) else { return };
        let EndedToolCall { tool, started, params, response, failure, client } = called;
        let (of, mask, duration) = (&view.subject, &view.spec.mask, started.elapsed());
        // Clients invent names of any length, also such with a secret.
        let tool = request_log::logged_name(tool, mask);
        let fate = failure.as_ref().map(|failure| failure.fate);
        self.observer.tool_called(of, &tool, fate.unwrap_or(ToolCallFate::Ok));
        let error = failure.map(|failure| failure.into_text(view.spec.request_logging, mask, self.request_payload_max));
        if view.spec.request_logging {
            let at = self.events.wall();
            self.events.log_call(request_log::LoggedCall {
                subject: of.clone(),
                mask: mask.clone(),
                tool: tool.clone(),
                params,
                response: self.logged_payload(Some(&*view), response),
                duration,
                error: error.clone(),
                fate: fate.map(ToolCallFate::as_str),
                client: client.and_then(ClientFacts::name),
                at: at.checked_sub(duration).unwrap_or(at),
            });
        }
        self.events.emit(Event::ToolExecuted {
            of: of.clone(),
            tool_name: tool,
            duration_ms: u64::try_from(duration.as_millis()).unwrap_or(u64::MAX),
            success: error.is_none(),
            error_message: error,
        });
    }

    async fn request<W: RepeatableRequest>(
        &self,
        id: &InstanceId,
        view: Option<&InstanceView>,
        mut request: W,
        timeout: Option<Duration>,
        repeatable: bool,
    ) -> Result<W::Answer, CallError> {
        let default =
            || view.map_or(SessionPolicy::default().request_timeout, |view| view.spec.policy.session.request_timeout);
        let may_repeat = |fate| fate == CallFate::NotSent || (fate == CallFate::MaybeExecuted && repeatable);
        let timeout = timeout.unwrap_or_else(default).min(TIMEOUT_MAX);
        let deadline = Instant::now() + timeout;
        let mut port = view.and_then(|view| view.port.clone()).filter(|port| !port.is_over());
        let mut first = None;
        loop {
            let open = if let Some(port) = port.take() {
                port
            } else {
                tokio::select! {
                    biased;
                    answer = request.wait_for_withdrawal() => return Ok(answer),
                    port = self.ensure(id, deadline, timeout) => port.map_err(|error| more_severe_error(first.as_ref(), error))?,
                }
            };
            let permit = match open.try_acquire() {
                Ok(permit) => permit,
                Err(AdmissionError::Full) => return Err(more_severe_error(first.as_ref(), open.busy_error())),
                // The run fell asleep or was replaced. No request was sent, so this does not count as an attempt.
                Err(AdmissionError::Closed) => continue,
            };
            let left = deadline.saturating_duration_since(Instant::now());
            let attempt = if first.is_none() { 1 } else { 2 };
            let answer = request.attempt(&open, permit, left, attempt).await;
            match answer {
                Err(error @ CallError::Terminated { fate, .. }) if may_repeat(fate) && first.is_none() => {
                    first = Some(error);
                }
                // Reports the caller's whole timeout, not the rest of it.
                Err(CallError::TimedOut { after, fate }) => {
                    return Err(more_severe_error(
                        first.as_ref(),
                        CallError::TimedOut { after: timeout.max(after), fate },
                    ));
                }
                Err(error) => return Err(more_severe_error(first.as_ref(), error)),
                Ok(result) => return Ok(result),
            }
        }
    }

    async fn ensure(&self, id: &InstanceId, deadline: Instant, timeout: Duration) -> Result<CallPort, CallError> {
        let ask = || async {
            let (reply, answer) = oneshot::channel();
            // If Root is gone, the cast fails and so does the reply.
            let _ = cast!(self.root, root::Msg::Ensure(id.clone(), reply));
            answer.await
        };
        let patient = async {
            if let Ok(answer) = ask().await {
                return answer;
            }
            // The team's supervisor died before it answered; another one exists or will.
            loop {
                tokio::time::sleep(TEAM_RETRY_PAUSE).await;
                if let Ok(answer) = ask().await {
                    return answer;
                }
                if self.root.get_status() >= ractor::ActorStatus::Stopping {
                    let reason = "the satellite has ended".to_owned();
                    return Err(CallError::Terminated { fate: CallFate::NotSent, reason });
                }
            }
        };
        let late = CallError::TimedOut { after: timeout, fate: CallFate::NotSent };
        tokio::time::timeout_at(deadline, patient).await.unwrap_or(Err(late))
    }

    async fn request_root<T>(&self, message: impl Fn(ControlReply<T>) -> root::Msg) -> Result<T, ControlError> {
        // Repeats the request if there is no reply: a team's supervisor may have died with it.
        let mut until = None;
        loop {
            let (reply, answer) = oneshot::channel();
            // If Root is gone, the cast fails and so does the reply.
            let _ = cast!(self.root, message(reply));
            if let Ok(answer) = answer.await {
                return answer;
            }
            if self.root.get_status() >= ractor::ActorStatus::Stopping {
                return Err(ControlError::Closing);
            }
            let now = Instant::now();
            if now >= *until.get_or_insert(now + TEAM_RETRY_TIMEOUT) {
                let why = "the team supervisor keeps failing; the log of the satellite contains the reason";
                return Err(ControlError::Refused { message: why.to_owned(), remedy: None });
            }
            tokio::time::sleep(TEAM_RETRY_PAUSE).await;
        }
    }

    /// Ends every worker gracefully and at once, flushes the events, and ends the runtime. If the runtime has already
    /// ended, it returns the report of that end.
    pub async fn shutdown(&self) -> ShutdownReport {
        let (reply, report) = oneshot::channel();
        let _ = cast!(self.root, root::Msg::Shutdown(reply));
        if let Ok(report) = report.await {
            return report;
        }
        // The runtime has already ended.
        match self.wait_for_end().await {
            RuntimeEnd::ShutDown { events_lost, in_time } => ShutdownReport { events_lost, in_time },
            RuntimeEnd::Killed | RuntimeEnd::Failed(_) => {
                ShutdownReport { events_lost: self.event_statistics().unsent(), in_time: false }
            }
        }
    }

    /// Ends everything at once, without grace: kills every process and drops unsent events.
    pub fn kill(&self) {
        self.root.kill();
    }

    /// Makes a part of the runtime panic, for the load harness and the tests.
    pub fn panic(&self, part: RuntimePart) {
        let _ = cast!(self.root, root::Msg::Panic(part));
    }
}

fn validate(spec: InstanceSpec) -> Result<Arc<InstanceSpec>, ControlError> {
    match spec.policy.check() {
        Ok(()) => Ok(Arc::new(spec)),
        Err(error) => {
            let message = format!("the policy of `{}` is invalid: {error}", spec.name);
            Err(ControlError::Refused { message, remedy: None })
        }
    }
}

/// A request to a server that may be attempted more than once.
trait RepeatableRequest: Send {
    type Answer: Send;

    /// Sends the request. `attempt` counts from 1.
    fn attempt(
        &mut self,
        port: &CallPort,
        permit: CallPermit,
        timeout: Duration,
        attempt: u32,
    ) -> impl Future<Output = Result<Self::Answer, CallError>> + Send;

    /// Resolves when the request is withdrawn; never, if it cannot be.
    fn wait_for_withdrawal(&mut self) -> impl Future<Output = Self::Answer> + Send {
        std::future::pending()
    }
}

struct ToolCallRequest<'a> {
    tool: &'a str,
    arguments: Option<Box<RawValue>>,
    repeatable: bool,
}

impl RepeatableRequest for ToolCallRequest<'_> {
    type Answer = Box<RawValue>;

    async fn attempt(
        &mut self,
        port: &CallPort,
        permit: CallPermit,
        timeout: Duration,
        attempt: u32,
    ) -> Result<Self::Answer, CallError> {
        let (name, arguments) = (self.tool.to_owned(), self.arguments.clone());
        let request = CallerRequest::Tool { name, arguments, repeatable: self.repeatable, trace: None };
        port.request_with_permit(permit, request, timeout, attempt).await
    }
}

struct RelayedRequest<'a> {
    relay: &'a ClientRelay,
    withdrawn: Fuse<oneshot::Receiver<RpcMessage>>,
}

impl RepeatableRequest for RelayedRequest<'_> {
    type Answer = Option<RpcMessage>;

    async fn attempt(
        &mut self,
        port: &CallPort,
        permit: CallPermit,
        timeout: Duration,
        attempt: u32,
    ) -> Result<Self::Answer, CallError> {
        port.relay_with_permit(permit, self.relay.clone(), timeout, attempt, &mut self.withdrawn).await
    }

    async fn wait_for_withdrawal(&mut self) -> Self::Answer {
        // The receive fails if the client can no longer withdraw the request.
        if (&mut self.withdrawn).await.is_err() {
            std::future::pending::<()>().await;
        }
        None
    }
}

struct DiscoverAttempt;

impl RepeatableRequest for DiscoverAttempt {
    type Answer = Option<Arc<ServerInfo>>;

    async fn attempt(
        &mut self,
        port: &CallPort,
        permit: CallPermit,
        timeout: Duration,
        _attempt: u32,
    ) -> Result<Self::Answer, CallError> {
        port.discover(permit, timeout).await
    }
}

/// Returns the error of two attempts: if only the first may have been executed, its error.
fn more_severe_error(first: Option<&CallError>, second: CallError) -> CallError {
    match first {
        Some(first) if first.fate() == Some(CallFate::MaybeExecuted) && second.fate() == Some(CallFate::NotSent) => {
            first.clone()
        }
        Some(_) | None => second,
    }
}

struct EndedToolCall<'a> {
    tool: &'a str,
    started: Instant,
    params: Option<LoggedPayload>,
    response: Option<&'a str>,
    failure: Option<CallFailure>,
    client: Option<&'a ClientFacts>,
}

fn check_tool(view: Option<&InstanceView>, tool: &str) -> Result<(), CallError> {
    let is_permitted = view.is_none_or(|view| view.spec.policy.session.tools.permits(tool));
    if is_permitted { Ok(()) } else { Err(CallError::NotFound { what: format!("tool `{tool}`") }) }
}

/// Returns a list of tools without those that the configuration denies.
fn selected_tools(list: RpcMessage, view: Option<&InstanceView>) -> RpcMessage {
    #[derive(Deserialize)]
    struct NamedTool<'a> {
        #[serde(borrow)]
        name: Cow<'a, str>,
    }
    let Some(filter) = view.map(|view| &view.spec.policy.session.tools).filter(|filter| !filter.permits_all()) else {
        return list;
    };
    let selected = |result: &str| {
        let tools: Vec<&RawValue> = serde_json::from_str(member(result, "tools")?).ok()?;
        let is_permitted = |tool: &&RawValue| {
            serde_json::from_str::<NamedTool<'_>>(tool.get()).is_ok_and(|tool| filter.permits(&tool.name))
        };
        let tools: Vec<&str> = tools.into_iter().filter(is_permitted).map(RawValue::get).collect();
        let result = with_members(result, &[("tools", &format!("[{}]", tools.join(",")))]);
        let id = list.id()?;
        RpcMessage::parse(join_parts(&["{\"jsonrpc\":\"2.0\",\"id\":", id, ",\"result\":", &result, "}"])).ok()
    };
    // An error, or a list that clients cannot read either.
    list.outcome().filter(|_| list.kind() == MessageKind::Result).and_then(selected).unwrap_or(list)
}

/// Tool call in progress. It is reported exactly once; if dropped before, as abandoned by its caller.
struct CallReporter<'a> {
    runtime: &'a RuntimeHandle,
    id: &'a InstanceId,
    view: Option<Arc<InstanceView>>,
    // `None` if the request calls no tool, or was reported.
    tool: Option<&'a str>,
    started: Instant,
    params: Option<LoggedPayload>,
    client: Option<&'a ClientFacts>,
}

impl CallReporter<'_> {
    fn report(mut self, response: Option<&str>, failure: Option<CallFailure>) {
        self.report_once(response, failure);
    }

    fn report_once(&mut self, response: Option<&str>, failure: Option<CallFailure>) {
        let Some(tool) = self.tool.take() else { return };
        let (started, params, client) = (self.started, self.params.take(), self.client);
        let ended = EndedToolCall { tool, started, params, response, failure, client };
        self.runtime.report_call(self.id, self.view.take(), ended);
    }
}

impl Drop for CallReporter<'_> {
    fn drop(&mut self) {
        self.report_once(None, Some(CallFailure::cancelled("the caller went away")));
    }
}

/// Error of a call in our own words, and with the server's, which may contain anything.
struct CallFailure {
    fate: ToolCallFate,
    text: String,
    server_text: Option<String>,
}

impl CallFailure {
    fn cancelled(why: &str) -> Self {
        Self { fate: ToolCallFate::Cancelled, text: why.to_owned(), server_text: None }
    }

    fn from_error(error: &CallError) -> Self {
        let fate = error.fate().into();
        match error {
            CallError::Server { code, .. } => {
                Self { fate, text: format!("server error {code}"), server_text: Some(error.to_string()) }
            }
            error => Self { fate, text: error.to_string(), server_text: None },
        }
    }

    fn into_text(self, with_theirs: bool, mask: &SecretMask, max: usize) -> String {
        // Private calls omit the server's own words.
        let text = mask.apply(&self.server_text.filter(|_| with_theirs).unwrap_or(self.text));
        if text.len() <= max {
            return text;
        }
        format!("{}…", &text[..text.floor_char_boundary(max)])
    }
}

fn tool_error(result: &str) -> Option<CallFailure> {
    #[derive(Deserialize)]
    struct TextContent {
        text: String,
    }
    is_tool_error(result).then_some(())?;
    let content: Option<Vec<&RawValue>> =
        member(result, "content").and_then(|content| serde_json::from_str(content).ok());
    let text = |part: &&RawValue| serde_json::from_str::<TextContent>(part.get()).ok();
    let server_text = content.unwrap_or_default().iter().find_map(text).map(|content| content.text);
    Some(CallFailure { fate: ToolCallFate::ToolError, text: "the tool reports an error".to_owned(), server_text })
}
