//! Start of a satellite.

use std::io;
use std::net::TcpListener;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use jiff::Timestamp;
use mcp_satellite_actors::byte_budget::{ByteBudget, ServerMemory};
use mcp_satellite_actors::model::event::Event;
use mcp_satellite_actors::model::policy::BatchPolicy;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::seam::{Connectors, EventSink, RuntimeObserver};
use mcp_satellite_actors::{RuntimeHandle, RuntimeOptions};
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::apply::ChangeOrigin;
use super::credentials::token_mask_listener;
use super::link::{create_link, load_stored_document};
use super::lock::{DataDirLock, DataDirLockError, ORPHAN_PATIENCE, unusable};
use super::recovery::reclaim_processes;
use super::settings::StartupSettings;
use super::{ControlSocket, RunningSatellite, SatelliteStorage, UserData};
use crate::active_configuration::{ActiveConfiguration, ReloadRequest};
use crate::backend::link::{BackendLink, SystemMonitor};
use crate::config::{Plan, Profile, SinkPlan};
use crate::connect::isolation::OperatingMode;
use crate::connect::process::raise_descriptor_limit;
use crate::connect::remote::RemoteConnector;
use crate::connect::stdio::{ConfigFingerprint, StdioConnector, StdioOptions};
use crate::connect::{memory, suspend};
use crate::console::listener::ConsoleListener;
use crate::console::mcp_server::ControlPlane;
use crate::console::refusals::RefusalCounts;
use crate::console::state::ConsoleState;
use crate::console::{http_api, server};
use crate::data_dir::DataDir;
use crate::delivery::Delivery;
use crate::endpoint::{EndpointError, ReservedEndpoint, SatelliteEndpoint};
use crate::erasures::DataEraser;
use crate::grants;
use crate::journal::{Journal, JournalLimits, JournalSink};
use crate::sink::file::FileSink;
use crate::sink::http::HttpSink;
use crate::sink::stdout::StdoutSink;
use crate::state::StateDb;
use crate::telemetry::{ActorProbes, FactsOrigin, SatelliteTelemetry};
use crate::values::ValueConfigurer;
use mcp_satellite_console::feed::StreamLimits;
use mcp_satellite_files::known_dirs::DataDirLocation;
use mcp_satellite_process::keeper::{KeeperClient, SatelliteGeneration};
use mcp_satellite_process::memory_limit;
use mcp_satellite_process::usage::UsageSampler;
use mcp_satellite_remote::oauth::Grants;
use mcp_satellite_store::catalogue_cache::CatalogueCache;
use mcp_satellite_store::memos::MemoStore;
use mcp_satellite_store::values::UserValues;

/// Number of events that the journal stores in one transaction: few transactions during a burst, and none of them long.
const JOURNAL_BATCH_MAX: usize = 2_000;

const RELOADS_MAX: usize = 4;

#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    #[error(transparent)]
    DataDir(#[from] DataDirLockError),
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    #[error("cannot {step}: {why}")]
    Step { step: &'static str, why: Box<dyn std::error::Error + Send + Sync> },
}

/// Descriptors and facts that the processes above the satellite have passed to it.
pub(crate) struct InheritedState {
    /// Socket for the endpoint that the service manager has opened.
    pub(crate) listener: Option<TcpListener>,
    pub(crate) keeper: KeeperClient,
    pub(crate) generation: SatelliteGeneration,
}

fn failed<E: Into<Box<dyn std::error::Error + Send + Sync>>>(step: &'static str) -> impl FnOnce(E) -> StartError {
    move |why| StartError::Step { step, why: why.into() }
}

/// Runs `work`, which waits for the disk or for processes, on a blocking thread.
pub(super) async fn run_blocking<T: Send + 'static>(
    step: &'static str,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, StartError> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other).flatten().map_err(failed(step))
}

fn watch(task: impl Future<Output = ()> + Send + 'static) -> AbortOnDropHandle<()> {
    AbortOnDropHandle::new(tokio::spawn(task))
}

impl RunningSatellite {
    /// Starts the runtime and the control socket in `location`, and installs the instances of `plan`.
    pub(crate) async fn start(
        plan: Plan,
        location: &DataDirLocation,
        inherited: InheritedState,
    ) -> Result<Self, StartError> {
        let InheritedState { listener, keeper, generation } = inherited;
        let directory = DataDirLock::acquire(location, Some(&keeper)).await?;
        raise_open_file_limit();
        let journal = open_journal(directory.data_dir(), plan.journal.clone()).await?;
        let database = open_state_database(directory.data_dir()).await?;
        let link = create_link(&plan, directory.data_dir(), &database, &journal)
            .map_err(failed("prepare the connection to the backend"))?;
        let outlet = EventOutlet::open(&plan.sink, directory.data_dir(), link.as_ref())?;
        let next_seq = journal.next_seq().max(outlet.next_seq);
        let (files, document) = (plan.clone(), load_stored_document(&plan, &database).await);
        let (plan, document) = document.map_or((plan, None), |(plan, document)| (plan, Some(document)));
        if let (Some(link), Some(document)) = (&link, &document) {
            link.set_applied_config(document.hash.clone()).await;
        }
        let storage = SatelliteStorage::open(directory, journal, &database, outlet, &plan.batch).await?;
        let data_dir = storage.directory.data_dir().clone();
        let memory = memory_limit::budget();
        let endpoint =
            Arc::new(SatelliteEndpoint::new(&plan.name, data_dir.clone(), memory.clone(), listener, keeper.clone()));
        if generation.previous.is_some() {
            endpoint.note_crash(generation.number);
        }
        let http =
            Arc::new(ConsoleListener::new(data_dir.clone(), keeper.clone()).map_err(failed("prepare the console"))?);
        let reserved_endpoint = reserve_endpoint(&endpoint, &plan).await?;
        reserve_console(&http, &plan).await?;
        reclaim_processes(&data_dir).await?;
        let connector = create_stdio_connector(&plan, &data_dir, storage.catalogues.clone())?;
        let server_memory = ServerMemory::from_budget(&memory);
        let (remote, grants) = create_remote_connector(&database, &server_memory).await?;
        let connectors = Connectors::default().with_process(connector.clone()).with_line(remote);
        let telemetry = SatelliteTelemetry::start(&plan, data_dir.path(), keeper.clone());
        let telemetry = telemetry.map_err(failed("start the telemetry"))?;
        let observer = telemetry.observer();
        let runtime = start_runtime(&plan, next_seq, connectors, server_memory, &storage, &endpoint, observer).await?;
        let mut watchers = watch_machine(&runtime, link.as_ref());
        let applied = Arc::default();
        let users = UserData::open(&database, grants, &connector, &runtime, &applied).await?;
        let usage = UsageSampler::new(runtime.clone(), connector.clone());
        watchers.extend([
            watch(users.eraser.clone().watch()),
            watch(users.grants.clone().run()),
            watch(usage.clone().run()),
        ]);
        let settings = StartupSettings::from_plan(&plan);
        let (installed, (console, reload), streams) = (Mutex::default(), ControlSocket::new(), StreamLimits::default());
        let satellite = Self {
            runtime,
            connector,
            settings,
            applied,
            installed,
            users,
            endpoint,
            http,
            link,
            console,
            telemetry,
            _watchers: watchers,
            storage,
            keeper,
        };
        let name = plan.name.clone();
        let control =
            satellite.open_control_socket(&name, reload, usage.clone(), streams.clone(), generation.clone())?;
        // After a crash commands wait until the servers are installed: to them the servers were never gone.
        let mut control = Some(control);
        if generation.previous.is_none() {
            satellite.serve_control_socket(control.take());
        }
        satellite.open_telemetry(&name, memory, usage, streams)?;
        let mut applied = satellite.applied.clone().lock_owned().await;
        (applied.files, applied.document) = (files, document);
        let (console, gateway) = (plan.console.clone(), plan.gateway.clone());
        satellite.install(plan, applied, ChangeOrigin { since: Instant::now(), hash: None }).await;
        satellite.serve_control_socket(control);
        // All instances are installed now; clients that connected earlier have waited.
        let left = satellite.connector.drop_unclaimed();
        if let Some(reserved) = reserved_endpoint {
            satellite.endpoint.open(reserved, &satellite.runtime)?;
        }
        satellite.http.apply(&name, &console, &gateway, &satellite.endpoint).await;
        // Sockets of addresses that are not configured any more.
        satellite.keeper.forget_left();
        satellite.report_recovery(&generation, left);
        Ok(satellite)
    }

    fn open_telemetry(
        &self,
        name: &str,
        memory: Arc<ByteBudget>,
        usage: UsageSampler,
        streams: StreamLimits,
    ) -> Result<(), StartError> {
        let origin = FactsOrigin {
            name: name.to_owned(),
            runtime: self.runtime.clone(),
            usage,
            journal: self.storage.journal.clone(),
            delivery: self.storage.delivery.clone(),
            link: self.link.clone(),
            endpoint: self.endpoint.clone(),
            memory,
            http: self.http.clone(),
            streams,
            probes: ActorProbes::default(),
        };
        self.telemetry.open(origin).map_err(failed("serve the metrics; check `listen` of [telemetry]"))
    }

    fn open_control_socket(
        &self,
        name: &str,
        reload: mpsc::Sender<ReloadRequest>,
        usage: UsageSampler,
        streams: StreamLimits,
        generation: SatelliteGeneration,
    ) -> Result<(UnixListener, Arc<ConsoleState>), StartError> {
        let data_dir = self.storage.directory.data_dir();
        let listener = server::bind(data_dir, &self.keeper).map_err(unusable(data_dir))?;
        let state = ConsoleState {
            runtime: self.runtime.clone(),
            name: name.to_owned(),
            connector: self.connector.clone(),
            endpoint: self.endpoint.clone(),
            http: self.http.clone(),
            applied: self.applied.clone(),
            link: self.link.clone(),
            journal: self.storage.journal.clone(),
            delivery: self.storage.delivery.clone(),
            configurer: ValueConfigurer {
                runtime: self.runtime.clone(),
                values: self.users.values.clone(),
                catalogues: self.storage.catalogues.clone(),
                applied: self.applied.clone(),
            },
            grants: self.users.grants.clone(),
            eraser: self.users.eraser.clone(),
            reload,
            data_dir: data_dir.clone(),
            started: Instant::now(),
            generation,
            members: self.console.members.clone(),
            rejected: self.console.rejected.clone(),
            usage,
            metrics: self.telemetry.metrics(),
            machine: SystemMonitor::new(data_dir.path()),
            refusals: RefusalCounts::default(),
            streams,
            reads: Mutex::default(),
            shutdown: self.console.shutdown.clone(),
            ending: self.console.ending.clone(),
        };
        let state = Arc::new(state);
        let pages = http_api::endpoint_pages(&state);
        self.endpoint.set_control(pages.clone(), Arc::new(ControlPlane::new(state.clone())));
        self.http.set_pages(pages);
        Ok((listener, state))
    }

    /// Answers on the control socket, unless it does already.
    fn serve_control_socket(&self, socket: Option<(UnixListener, Arc<ConsoleState>)>) {
        if let Some((listener, state)) = socket {
            let task = tokio::spawn(server::serve(listener, state));
            *self.console.task.lock().unwrap_or_else(PoisonError::into_inner) = Some(task);
        }
    }
}

fn raise_open_file_limit() {
    match raise_descriptor_limit() {
        Ok(limit) => tracing::debug!(limit, "open files"),
        Err(error) => tracing::warn!(%error, "cannot raise the limit of open files; many servers may not fit"),
    }
}

/// Opens the journal. Every event is stored whatever the sink is, so that sequence numbers continue and `satellite
/// events` can read them.
async fn open_journal(data_dir: &DataDir, limits: JournalLimits) -> Result<Journal, StartError> {
    let data_dir = data_dir.clone();
    run_blocking("open the journal", move || Journal::open_in(data_dir, limits)).await
}

/// Receiver of the events outside the journal.
struct EventOutlet {
    /// Name for messages and the sink; `None` if events stay in the journal.
    sink: Option<(String, Arc<dyn EventSink>)>,
    /// Sequence number after the last one that the sink has stored.
    next_seq: u64,
}

impl EventOutlet {
    fn open(plan: &SinkPlan, data_dir: &DataDir, link: Option<&BackendLink>) -> Result<Self, StartError> {
        let mut next_seq = 0;
        let sink: Option<(String, Arc<dyn EventSink>)> = match (link, plan) {
            (Some(link), _) => Some(("backend".to_owned(), link.event_sink())),
            (None, SinkPlan::Journal) => None,
            (None, SinkPlan::File { rotate_bytes, keep }) => {
                let opened = FileSink::open_in(data_dir.clone(), *rotate_bytes, *keep);
                let (sink, next) = opened.map_err(unusable(data_dir))?;
                next_seq = next;
                Some(("file".to_owned(), Arc::new(sink)))
            }
            (None, SinkPlan::Stdout) => {
                let sink = StdoutSink::new().map_err(failed("write events to stdout"))?;
                Some(("stdout".to_owned(), Arc::new(sink)))
            }
            (None, SinkPlan::Http { url, token }) => {
                let sink = HttpSink::new(url, token.as_ref()).map_err(failed("send events over HTTP"))?;
                Some((sink.redacted_url(), Arc::new(sink)))
            }
        };
        Ok(Self { sink, next_seq })
    }
}

impl SatelliteStorage {
    async fn open(
        directory: DataDirLock,
        journal: Journal,
        database: &StateDb,
        outlet: EventOutlet,
        batch: &BatchPolicy,
    ) -> Result<Self, StartError> {
        let start = |(name, sink): (String, _)| Arc::new(Delivery::start(journal.clone(), &name, sink, batch));
        let delivery = outlet.sink.map(start);
        if delivery.is_none() {
            journal.expect_no_delivery();
        }
        // Without the cache dormant servers are started to discover their catalogues; the satellite can run.
        let database = database.clone();
        let opened = run_blocking("open the cached tools", move || Ok(CatalogueCache::open(&database))).await?;
        let catalogues = opened.map(Arc::new).inspect_err(|error| {
            tracing::warn!(error, "cannot cache the tools of sleeping servers; they are started for discovery");
        });
        let catalogues = catalogues.ok();
        let memos = Arc::new(MemoStore::new(journal.clone(), catalogues.clone()));
        Ok(Self { journal, delivery, memos, catalogues, directory })
    }
}

async fn open_state_database(data_dir: &DataDir) -> Result<StateDb, StartError> {
    let data_dir = data_dir.clone();
    run_blocking("open the state database", move || StateDb::open(&data_dir)).await
}

/// Reserves the address of the endpoint on a blocking thread, so that signals are handled while the disk with the token
/// does not respond.
async fn reserve_endpoint(
    endpoint: &Arc<SatelliteEndpoint>,
    plan: &Plan,
) -> Result<Option<ReservedEndpoint>, StartError> {
    let (endpoint, gateway) = (endpoint.clone(), plan.gateway.clone());
    let reserved = tokio::task::spawn_blocking(move || endpoint.reserve(gateway)).await;
    Ok(reserved.map_err(failed("reserve the MCP endpoint"))??)
}

async fn reserve_console(http: &Arc<ConsoleListener>, plan: &Plan) -> Result<(), StartError> {
    let (http, name, console, gateway) = (http.clone(), plan.name.clone(), plan.console.clone(), plan.gateway.clone());
    run_blocking("open the console", move || http.reserve(&name, &console, &gateway)).await
}

/// Without `catalogues`, which hash configurations, no server of a crashed satellite is adopted.
fn create_stdio_connector(
    plan: &Plan,
    data_dir: &DataDir,
    catalogues: Option<Arc<CatalogueCache>>,
) -> Result<StdioConnector, StartError> {
    let catalogues = catalogues.filter(|_| plan.keep_servers);
    let fingerprint = move |spec: &InstanceSpec| catalogues.as_ref().map(|catalogues| catalogues.name(spec));
    let connector = StdioConnector::with_options(StdioOptions {
        withheld: Vec::new(),
        data_dir: Some(data_dir.clone()),
        isolation: plan.isolation,
        strictness: match plan.profile {
            Profile::Development => OperatingMode::Development,
            Profile::Production => OperatingMode::Production,
        },
        cgroups: plan.cgroups,
        uid_range: plan.uid_range,
        fingerprint: Some(ConfigFingerprint::new(fingerprint)),
    });
    let connector = connector.map_err(failed("prepare the start of servers"))?;
    let orphaned = connector.clone();
    KeeperClient::on_orphaned(move || orphaned.kill_all(ORPHAN_PATIENCE));
    Ok(connector)
}

async fn create_remote_connector(
    database: &StateDb,
    memory: &ServerMemory,
) -> Result<(RemoteConnector, Grants), StartError> {
    let remote = RemoteConnector::new().map_err(failed("prepare connections to remote servers"))?;
    let (database, clients) = (database.clone(), remote.clients());
    let grants = run_blocking("read authorizations", move || Ok(grants::open(&database, clients))).await?;
    Ok((remote.with_tokens(Arc::new(grants.clone())).with_memory(memory.messages.clone()), grants))
}

async fn start_runtime(
    plan: &Plan,
    next_seq: u64,
    connectors: Connectors,
    server_memory: ServerMemory,
    storage: &SatelliteStorage,
    endpoint: &SatelliteEndpoint,
    observer: Arc<dyn RuntimeObserver>,
) -> Result<RuntimeHandle, StartError> {
    let direct_sink = storage.delivery.as_ref().map(|delivery| delivery.direct_sink());
    let sink = Arc::new(JournalSink::new(storage.journal.clone(), direct_sink));
    let mut options = RuntimeOptions::new(connectors, sink, Arc::new(Timestamp::now));
    options.next_seq = next_seq;
    options.state_store = storage.memos.clone();
    options.audience = endpoint.audience();
    options.observer = observer;
    options.server_memory = server_memory;
    options.batch = BatchPolicy { batch_max: JOURNAL_BATCH_MAX, ..plan.batch.clone() };
    options.team_budget = plan.team_budget.clone();
    options.memory_policy = plan.memory.clone();
    options.start_permits = plan.start_permits.unwrap_or(options.start_permits);
    options.connect_permits = plan.connect_permits.unwrap_or(options.connect_permits);
    let started = mcp_satellite_actors::start(options).await;
    let (runtime, _) = started.map_err(|why| failed("start the runtime")(why.to_string()))?;
    let emitter = runtime.emitter().clone();
    storage.journal.on_dropped(move |from_seq, to_seq| emitter.emit(Event::EventsDropped { from_seq, to_seq }));
    if let Some(catalogues) = storage.catalogues.clone() {
        // The task ends with the runtime.
        drop(tokio::spawn(catalogues.watch(runtime.clone())));
    }
    Ok(runtime)
}

/// Watches suspends and the free memory of the machine.
fn watch_machine(runtime: &RuntimeHandle, link: Option<&BackendLink>) -> Vec<AbortOnDropHandle<()>> {
    let (resumed, link) = (runtime.clone(), link.cloned());
    let suspends = suspend::watch(move |asleep| {
        tracing::info!(seconds = asleep.as_secs(), "the machine was suspended; overdue work is done now");
        resumed.resumed_after_suspend(asleep);
        link.iter().for_each(BackendLink::resumed_after_suspend);
    });
    let observed = runtime.clone();
    let readings = memory::watch(move |reading| observed.observe_memory(reading));
    vec![watch(suspends), watch(readings)]
}

impl UserData {
    async fn open(
        database: &StateDb,
        grants: Grants,
        connector: &StdioConnector,
        runtime: &RuntimeHandle,
        applied: &Arc<tokio::sync::Mutex<ActiveConfiguration>>,
    ) -> Result<Self, StartError> {
        let stored = database.clone();
        let values = run_blocking("read the values of users", move || Ok(Arc::new(UserValues::open(&stored)))).await?;
        grants.set_token_listener(token_mask_listener(runtime, applied));
        let eraser = {
            let (database, values, grants) = (database.clone(), values.clone(), grants.clone());
            let (connector, runtime, applied) = (connector.clone(), runtime.clone(), applied.clone());
            let open = move || Ok(DataEraser::open(&database, values, grants, connector, runtime, applied));
            run_blocking("read the list of data to erase", open).await?
        };
        Ok(Self { values, grants, eraser: Arc::new(eraser) })
    }
}

impl ControlSocket {
    /// Returns the control socket, which is not open yet, and the sender for its requests for reloads.
    fn new() -> (Self, mpsc::Sender<ReloadRequest>) {
        let (reload, reloads) = mpsc::channel(RELOADS_MAX);
        let console = Self {
            task: Mutex::default(),
            members: Arc::default(),
            rejected: Arc::default(),
            reloads: tokio::sync::Mutex::new(reloads),
            shutdown: CancellationToken::new(),
            ending: CancellationToken::new(),
        };
        (console, reload)
    }
}
