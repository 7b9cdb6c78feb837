//! A satellite process, which owns its data directory exclusively and runs the runtime, the control socket, the MCP
//! endpoint and the link to the backend, with the instances of the current configuration.
//!
//! Every plan, from files or from the backend, goes through `Satellite::install`, and only `UserValues::merge` turns
//! configurations into specifications. The applied configuration is locked while a plan is installed and while a user's
//! value is stored and applied, so that neither overtakes the other.

use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{ErrorKind, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::BoxFuture;
use jiff::Timestamp;
use mcp_satellite_actors::byte_budget::ServerMemory;
use mcp_satellite_actors::model::event::Event;
use mcp_satellite_actors::model::exit::RuntimeEnd;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::policy::{BatchPolicy, MemoryPolicy, TeamBudgetPolicy};
use mcp_satellite_actors::model::secret::Secret;
use mcp_satellite_actors::model::spec::{InstanceConfig, InstanceSpec, ServerTarget};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::seam::EventSink;
use mcp_satellite_actors::{EarlierState, InstallOutcome, RuntimeHandle, RuntimeOptions, ShutdownReport};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use tokio::sync::{OwnedMutexGuard, mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::backend::link::rules::InstanceScope;
use crate::backend::link::{self, BackendLink, LinkHost, SpecsById};
use crate::backend::wire::EventProgress;
use crate::catalogue_cache::CatalogueCache;
use crate::config::{BackendDocument, BackendPlan, ConfigErrors, ConfigOrigin, Plan, Profile, SinkPlan};
use crate::connect::Connectors;
use crate::connect::isolation::{Isolation, OperatingMode, UidRange};
use crate::connect::memory;
use crate::connect::process::{CgroupMode, ReclaimedProcesses, raise_descriptor_limit};
use crate::connect::remote::RemoteConnector;
use crate::connect::stdio::{StdioConnector, StdioOptions};
use crate::connect::suspend;
use crate::console::SOCKET;
use crate::console::api::{EndpointStatus, RejectedConfiguration, rfc3339};
use crate::console::find::TeamMembers;
use crate::console::server::{self, ConsoleState};
use crate::data_dir::{DataDir, OpenMode};
use crate::delivery::Delivery;
use crate::endpoint::{EndpointError, SatelliteEndpoint};
use crate::erasures::DataEraser;
use crate::grants;
use crate::identity;
use crate::journal::{Journal, JournalLimits, JournalSink};
use crate::known_dirs::DataDirLocation;
use crate::memories::MemoStore;
use crate::sink::file::FileSink;
use crate::sink::http::HttpSink;
use crate::sink::stdout::StdoutSink;
use crate::state::StateDb;
use crate::values::{RequiringInstances, UserValues, ValueConfigurer};
use mcp_satellite_files::disk::{WAIT_MAX, run_with_timeout};
use mcp_satellite_process::memory_limit;
use mcp_satellite_process::reaper::ReaperLink;
use mcp_satellite_remote::oauth::{Grants, TokenListener};

/// Upper limit for the time to finish responses on the control socket at shutdown, and to end leftover processes.
const LAST_ANSWERS: Duration = Duration::from_secs(1);

/// Number of events that the journal stores in one transaction: few transactions during a burst, and none of them long.
const JOURNAL_BATCH_MAX: usize = 2_000;

const LOCK: &str = "lock";

const LOCK_INTERVAL: Duration = Duration::from_secs(1);

const ORPHAN_PATIENCE: Duration = Duration::from_secs(10);

const DIRECTORY_LOCK_WAIT: Duration = Duration::from_millis(500);

/// Interval between checks of the files with credentials. A change is read at the check after the one that sees it.
const CREDENTIALS_INTERVAL: Duration = Duration::from_secs(1);

/// Number of instances from which on a configuration that removes more than half of them is rejected as a likely
/// mistake.
const REMOVAL_GUARD_MIN: usize = 4;

const ACCEPT_HINT: &str = "if this is intended, run `satellite reload --accept`";

const RELOADS_MAX: usize = 4;

#[derive(Debug, Clone)]
pub(crate) struct RejectedReload {
    pub(crate) error_type: &'static str,
    pub(crate) message: String,
}

impl From<String> for RejectedReload {
    fn from(message: String) -> Self {
        Self { error_type: "invalid", message }
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct AcceptedReload {
    pub(crate) servers: usize,
    pub(crate) teams: usize,
}

pub(crate) struct ReloadRequest {
    /// True if the person confirms that most instances are to be removed.
    pub(crate) accept: bool,
    pub(crate) reply: oneshot::Sender<Result<AcceptedReload, RejectedReload>>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    #[error(
        "a satellite is already running on `{data_dir}`{holder}; end it with `satellite down --data-dir {data_dir}`, or \
         give this one another --data-dir"
    )]
    InUse { data_dir: String, holder: String },
    #[error("cannot use the data directory `{data_dir}`: {why}")]
    DataDir { data_dir: String, why: std::io::Error },
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    #[error("cannot {what}: {why}")]
    Machine { what: &'static str, why: Box<dyn std::error::Error + Send + Sync> },
}

pub(crate) struct RunningSatellite {
    runtime: RuntimeHandle,
    connector: StdioConnector,
    endpoint: Arc<SatelliteEndpoint>,
    journal: Journal,
    /// `None` if events stay in the journal.
    delivery: Option<Arc<Delivery>>,
    memo_store: Arc<MemoStore>,
    console: Mutex<Option<JoinHandle<()>>>,
    ending: CancellationToken,
    shutdown: CancellationToken,
    members: Arc<TeamMembers>,
    rejected: Arc<Mutex<Option<RejectedConfiguration>>>,
    data_dir: DataDir,
    settings: StartupSettings,
    link: Option<BackendLink>,
    catalogues: Option<Arc<CatalogueCache>>,
    /// Instances that were installed last. The snapshot may lag behind.
    installed: Mutex<HashSet<InstanceId>>,
    _renewals: AbortOnDropHandle<()>,
    _suspends: AbortOnDropHandle<()>,
    _memory: AbortOnDropHandle<()>,
    values: Arc<UserValues>,
    grants: Grants,
    eraser: Arc<DataEraser>,
    _erasing: AbortOnDropHandle<()>,
    reloads: tokio::sync::Mutex<mpsc::Receiver<ReloadRequest>>,
    /// The applied configuration. Locked during a change, so that no older configuration is applied after it.
    applied: Arc<tokio::sync::Mutex<ActiveConfiguration>>,
    lock: Flock<File>,
}

#[derive(Default)]
pub(crate) struct ActiveConfiguration {
    generation: u64,
    origin: ConfigOrigin,
    pub(crate) config_hash: ConfigHash,
    pub(crate) server_count: usize,
    pub(crate) teams_count: usize,
    pub(crate) requiring: RequiringInstances,
    /// Plans from the configuration files and the document from the backend.
    files: Plan,
    document: Option<BackendDocument>,
    /// Plan from the current files if it waits because only `document` conflicts with it.
    waiting: Option<Plan>,
    /// Hash of the backend's document that was rejected because it removes most instances.
    rejected: Option<String>,
    /// Hash of a rejected document that a person has accepted.
    accepted: Option<String>,
}

struct ChangeOrigin {
    since: Instant,
    hash: Option<String>,
}

/// Settings of a plan that take effect at the start only; a reload cannot change them.
#[derive(PartialEq)]
struct StartupSettings {
    name: String,
    backend: Option<BackendPlan>,
    journal: JournalLimits,
    sink: SinkPlan,
    batch: BatchPolicy,
    team_budget: TeamBudgetPolicy,
    memory: MemoryPolicy,
    start_permits: Option<usize>,
    connect_permits: Option<usize>,
    profile: Profile,
    isolation: Isolation,
    cgroups: CgroupMode,
    uid_range: Option<UidRange>,
}

impl StartupSettings {
    fn from_plan(plan: &Plan) -> Self {
        Self {
            name: plan.name.clone(),
            // A changed token is applied by a reload.
            backend: plan.backend.clone().map(|backend| BackendPlan { token: None, ..backend }),
            journal: plan.journal.clone(),
            sink: plan.sink.clone(),
            batch: plan.batch.clone(),
            team_budget: plan.team_budget.clone(),
            memory: plan.memory.clone(),
            start_permits: plan.start_permits,
            connect_permits: plan.connect_permits,
            profile: plan.profile,
            isolation: plan.isolation,
            cgroups: plan.cgroups,
            uid_range: plan.uid_range,
        }
    }
}

impl RunningSatellite {
    /// Starts the runtime and the control socket in `location`, and installs the instances of `plan`.
    pub(crate) async fn start(plan: Plan, location: &DataDirLocation) -> Result<Self, StartError> {
        let (data_dir, lock) = lock_data_dir(location).await?;
        let in_data_dir = |why| StartError::DataDir { data_dir: data_dir.path().display().to_string(), why };
        match raise_descriptor_limit() {
            Ok(limit) => tracing::debug!(limit, "open files"),
            Err(error) => tracing::warn!(%error, "cannot raise the limit of open files; many servers may not fit"),
        }

        let machine = |what: &'static str| move |why: std::io::Error| StartError::Machine { what, why: why.into() };
        // Every event is stored whatever the sink is, so that sequence numbers continue and `satellite events` can read
        // them.
        let (place, limits) = (data_dir.clone(), plan.journal.clone());
        let journal = tokio::task::spawn_blocking(move || Journal::open_in(place, limits)).await;
        let journal = journal.map_err(std::io::Error::other).flatten().map_err(machine("open the journal"))?;
        let mut next_seq = journal.next_seq();
        let home = data_dir.clone();
        let database = tokio::task::spawn_blocking(move || StateDb::open(&home)).await;
        let database = database.map_err(std::io::Error::other).flatten().map_err(machine("open the state database"))?;
        let link = create_link(&plan, &data_dir, &database, &journal)?;
        let way: Option<(String, Arc<dyn EventSink>)> = match (&link, &plan.sink) {
            (Some(link), _) => Some(("backend".to_owned(), link.event_sink())),
            (None, SinkPlan::Journal) => None,
            (None, SinkPlan::File { rotate_bytes, keep }) => {
                let (way, next) = FileSink::open_in(data_dir.clone(), *rotate_bytes, *keep).map_err(in_data_dir)?;
                next_seq = next_seq.max(next);
                Some(("file".to_owned(), Arc::new(way)))
            }
            (None, SinkPlan::Stdout) => {
                let way = StdoutSink::new().map_err(machine("write events to stdout"))?;
                Some(("stdout".to_owned(), Arc::new(way)))
            }
            (None, SinkPlan::Http { url, token }) => {
                let way = HttpSink::new(url, token.as_ref())
                    .map_err(|why| StartError::Machine { what: "send events over HTTP", why: why.into() })?;
                Some((way.redacted_url(), Arc::new(way)))
            }
        };
        let (files, document) = (plan.clone(), load_stored_document(&plan, &database).await);
        let (plan, document) = document.map_or((plan, None), |(whole, document)| (whole, Some(document)));
        if let (Some(link), Some(document)) = (&link, &document) {
            link.set_applied_config(document.hash.clone()).await;
        }
        let delivery = way.map(|(to, way)| Arc::new(Delivery::start(journal.clone(), &to, way, &plan.batch)));
        if delivery.is_none() {
            journal.expect_no_delivery();
        }
        let sink =
            Arc::new(JournalSink::new(journal.clone(), delivery.as_ref().map(|delivery| delivery.direct_sink())));
        let memory = memory_limit::budget();
        let endpoint = Arc::new(SatelliteEndpoint::new(&plan.name, data_dir.clone(), memory.clone()));
        // On a blocking thread, so that signals are handled while the disk with the token does not respond.
        let (reserving, gateway) = (endpoint.clone(), plan.gateway.clone());
        let place = tokio::task::spawn_blocking(move || reserving.reserve(gateway)).await;
        let place = place.map_err(|error| machine("reserve the MCP endpoint")(std::io::Error::other(error)))??;
        // The lock is held, so the previous satellite is dead.
        if let Some(reclaimed) =
            reclaim(&data_dir).await.map_err(machine("end the processes that the last satellite left"))?
        {
            let ReclaimedProcesses { processes, instances, satellite_pid, left } = reclaimed;
            tracing::warn!(
                processes,
                left,
                satellite_pid,
                instances = instances.join(", "),
                "ended the processes that a killed satellite left"
            );
        }
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
        });
        let connector = connector.map_err(machine("prepare the start of servers"))?;
        let last_act = connector.clone();
        ReaperLink::on_orphaned(move || last_act.kill_all(ORPHAN_PATIENCE));
        let remote = RemoteConnector::new().map_err(machine("prepare connections to remote servers"))?;
        let (stored, clients) = (database.clone(), remote.clients());
        let grants = tokio::task::spawn_blocking(move || grants::open(&stored, clients)).await;
        let grants = grants.map_err(std::io::Error::other).map_err(machine("read authorizations"))?;
        let server_memory = ServerMemory::from_budget(&memory);
        let remote = remote.with_tokens(Arc::new(grants.clone())).with_memory(server_memory.messages.clone());
        // Without the cache dormant servers are started to discover their catalogues; the satellite can run.
        let catalogues = CatalogueCache::open(&database).map(Arc::new).inspect_err(|error| {
            tracing::warn!(error, "cannot cache the tools of sleeping servers; they are started for discovery");
        });
        let catalogues = catalogues.ok();
        let memories = Arc::new(MemoStore::new(journal.clone(), catalogues.clone()));
        let connectors = Connectors { stdio: connector.clone(), remote };
        let mut options = RuntimeOptions::new(Arc::new(connectors), sink, Arc::new(Timestamp::now));
        options.next_seq = next_seq;
        options.state_store = memories.clone();
        options.audience = endpoint.audience();
        options.server_memory = server_memory;
        options.batch = BatchPolicy { batch_max: JOURNAL_BATCH_MAX, ..plan.batch.clone() };
        options.team_budget = plan.team_budget.clone();
        options.memory_policy = plan.memory.clone();
        options.start_permits = plan.start_permits.unwrap_or(options.start_permits);
        options.connect_permits = plan.connect_permits.unwrap_or(options.connect_permits);
        let (runtime, _) = mcp_satellite_actors::start(options)
            .await
            .map_err(|why| StartError::Machine { what: "start the runtime", why: why.to_string().into() })?;
        let teller = runtime.emitter().clone();
        journal.on_dropped(move |from_seq, to_seq| teller.emit(Event::EventsDropped { from_seq, to_seq }));

        if let Some(catalogues) = catalogues.clone() {
            // The task ends with the runtime.
            drop(tokio::spawn(catalogues.watch(runtime.clone())));
        }
        let (sleeper, linked) = (runtime.clone(), link.clone());
        let suspends = AbortOnDropHandle::new(tokio::spawn(suspend::watch(move |asleep| {
            tracing::info!(seconds = asleep.as_secs(), "the machine was suspended; overdue work is done now");
            sleeper.resumed_after_suspend(asleep);
            linked.iter().for_each(BackendLink::resumed_after_suspend);
        })));
        let observer = runtime.clone();
        let readings = memory::watch(move |reading| observer.observe_memory(reading));
        let readings = AbortOnDropHandle::new(tokio::spawn(readings));
        let values = Arc::new(UserValues::open(&database));
        let applied: Arc<tokio::sync::Mutex<ActiveConfiguration>> = Arc::default();
        grants.set_token_listener(token_mask_listener(&runtime, &applied));
        let parts = (values.clone(), grants.clone(), connector.clone(), runtime.clone());
        let held = applied.clone();
        let eraser = tokio::task::spawn_blocking(move || {
            let (values, grants, connector, runtime) = parts;
            Arc::new(DataEraser::open(&database, values, grants, connector, runtime, held))
        });
        let eraser = eraser.await.map_err(std::io::Error::other).map_err(machine("read the list of data to erase"))?;
        let erasing = AbortOnDropHandle::new(tokio::spawn(eraser.clone().watch()));
        let (reload, reloads) = mpsc::channel(RELOADS_MAX);
        let renewals = AbortOnDropHandle::new(tokio::spawn(grants.clone().run()));
        let listener = server::bind(&data_dir).map_err(in_data_dir)?;
        let (ending, down) = (CancellationToken::new(), CancellationToken::new());
        let (members, rejected) = (Arc::<TeamMembers>::default(), Arc::default());
        let console = tokio::spawn(server::serve(
            listener,
            ConsoleState {
                runtime: runtime.clone(),
                name: plan.name.clone(),
                connector: connector.clone(),
                endpoint: endpoint.clone(),
                link: link.clone(),
                journal: journal.clone(),
                delivery: delivery.clone(),
                configurer: ValueConfigurer {
                    runtime: runtime.clone(),
                    values: values.clone(),
                    catalogues: catalogues.clone(),
                    applied: applied.clone(),
                },
                grants: grants.clone(),
                eraser: eraser.clone(),
                reload,
                data_dir: data_dir.path().to_owned(),
                started: Instant::now(),
                members: members.clone(),
                rejected: Arc::clone(&rejected),
                shutdown: down.clone(),
                ending: ending.clone(),
            },
        ));
        let (settings, known) = (StartupSettings::from_plan(&plan), Mutex::default());
        let satellite = Self {
            runtime,
            connector,
            endpoint,
            journal,
            delivery,
            memo_store: memories,
            console: Mutex::new(Some(console)),
            ending,
            shutdown: down,
            members,
            rejected,
            data_dir,
            settings,
            link,
            catalogues,
            installed: known,
            values,
            grants,
            eraser,
            _erasing: erasing,
            reloads: tokio::sync::Mutex::new(reloads),
            applied,
            _renewals: renewals,
            _suspends: suspends,
            _memory: readings,
            lock,
        };
        let mut applied = satellite.applied.clone().lock_owned().await;
        (applied.files, applied.document) = (files, document);
        satellite.install(plan, applied, ChangeOrigin { since: Instant::now(), hash: None }).await;
        // All instances are installed now; clients that connected earlier have waited.
        if let Some(place) = place {
            satellite.endpoint.open(place, &satellite.runtime)?;
        }
        Ok(satellite)
    }

    pub(crate) fn runtime(&self) -> &RuntimeHandle {
        &self.runtime
    }

    pub(crate) fn data_dir(&self) -> &Path {
        self.data_dir.path()
    }

    /// Resolves when the path of the data directory leads to another lock than the held one or to none: another
    /// satellite may then use that path.
    pub(crate) async fn wait_data_dir_lost(&self) {
        let Ok(held) = self.lock.metadata().map(|held| (held.dev(), held.ino())) else {
            return std::future::pending().await;
        };
        loop {
            tokio::time::sleep(LOCK_INTERVAL).await;
            let path = self.data_dir.path().join(LOCK);
            let found = tokio::task::spawn_blocking(move || std::fs::symlink_metadata(path)).await;
            match found {
                Ok(Ok(found)) if (found.dev(), found.ino()) == held => {}
                Ok(Err(error)) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {}
                // The task panicked; the next check tries again.
                Err(_) => {}
                Ok(_) => return,
            }
        }
    }

    pub(crate) fn endpoint(&self) -> Option<EndpointStatus> {
        self.endpoint.status()
    }

    /// Applies another configuration. Access is changed first, so that no client that loses access sees new instances.
    /// An error means that nothing changed and contains the reason, also that of `files`. If the files conflict with
    /// the backend's document, they wait for another document. A configuration that removes most instances is rejected
    /// unless `accept` is true.
    pub(crate) async fn apply(
        &self,
        files: Result<Plan, String>,
        accept: bool,
    ) -> Result<AcceptedReload, RejectedReload> {
        let outcome = self.try_apply(files, accept).await;
        let mut rejected = self.rejected.lock().unwrap_or_else(PoisonError::into_inner);
        *rejected = outcome.as_ref().err().map(|RejectedReload { message, .. }| {
            let same = rejected.take().filter(|before| before.errors == *message);
            same.unwrap_or_else(|| RejectedConfiguration { since: rfc3339(Timestamp::now()), errors: message.clone() })
        });
        drop(rejected);
        outcome
    }

    async fn try_apply(&self, files: Result<Plan, String>, accept: bool) -> Result<AcceptedReload, RejectedReload> {
        let since = Instant::now();
        let mut applied = self.applied.clone().lock_owned().await;
        applied.waiting = None;
        let files = files?;
        let there = |plan: &Plan| plan.backend.as_ref().map(|backend| backend.url.clone());
        if there(&files) != there(&applied.files) {
            return Err("[backend] has changed; restart the satellite to apply it".to_owned().into());
        }
        let (whole, document) = (files.clone(), applied.document.clone());
        let joining = tokio::task::spawn_blocking(move || match &document {
            Some(document) => whole.with_document(document),
            None => Ok(whole),
        });
        let plan = match joining.await.unwrap_or_else(|error| Err(ConfigErrors::internal_error(&error))) {
            Ok(plan) => plan,
            Err(errors) => {
                applied.waiting = Some(files);
                return Err(format!(
                    "the files conflict with the backend's configuration: {}",
                    errors.to_single_line()
                )
                .into());
            }
        };
        if accept {
            applied.accepted = applied.rejected.take();
        } else if let Some(message) = self.check_removals(&plan, None) {
            return Err(RejectedReload { error_type: "removes_most", message: format!("{message}; {ACCEPT_HINT}") });
        }
        self.commit_files(files, &mut applied);
        let accepted = AcceptedReload { servers: plan.instances.len(), teams: plan.teams };
        self.apply_plan(plan, applied, ChangeOrigin { since, hash: None }).await;
        // A document that conflicted with the previous files may fit these.
        self.link.iter().for_each(BackendLink::refetch_config);
        Ok(accepted)
    }

    /// Returns an error message if the plan removes more than half of at least [`REMOVAL_GUARD_MIN`] instances. Those
    /// that `expected` admits are not counted, because their removal was requested by name.
    fn check_removals(&self, plan: &Plan, expected: Option<&InstanceScope>) -> Option<String> {
        let wanted = plan.ids();
        let known = self.installed.lock().unwrap_or_else(PoisonError::into_inner);
        let is_expected = |id: &InstanceId| {
            expected.is_some_and(|scope| scope.matches(id.installation.as_str(), id.team.as_str(), id.user.as_str()))
        };
        let all = known.len();
        let removed = known.iter().filter(|id| !wanted.contains(*id) && !is_expected(id)).count();
        let most = all >= REMOVAL_GUARD_MIN && removed * 2 > all;
        most.then(|| format!("the configuration removes {removed} of {all} servers, so nothing was changed"))
    }

    /// Returns the next request of a person for a reload. Never resolves after the control socket is closed.
    pub(crate) async fn next_reload_request(&self) -> ReloadRequest {
        match self.reloads.lock().await.recv().await {
            Some(request) => request,
            None => std::future::pending().await,
        }
    }

    fn commit_files(&self, files: Plan, applied: &mut ActiveConfiguration) {
        if let (Some(link), Some(backend)) = (&self.link, &files.backend) {
            link.set_registration_token(backend);
        }
        applied.files = files;
    }

    async fn apply_plan(
        &self,
        plan: Plan,
        mut applied: OwnedMutexGuard<ActiveConfiguration>,
        came: ChangeOrigin,
    ) -> SpecsById {
        // The new generation makes a check of credentials that began earlier discard its result: it may contain revoked
        // tokens.
        applied.generation += 1;
        self.endpoint.apply(plan.gateway.clone(), &self.runtime).await;
        self.install(plan, applied, came).await
    }

    /// Changes the instances to those of `plan`; unchanged ones are not touched. `applied` is locked until all
    /// instances are installed, but not while removed ones shut down.
    async fn install(
        &self,
        plan: Plan,
        applied: OwnedMutexGuard<ActiveConfiguration>,
        came: ChangeOrigin,
    ) -> SpecsById {
        for warning in &plan.warnings {
            tracing::warn!(%warning, "the configuration has a warning");
        }
        if StartupSettings::from_plan(&plan) != self.settings {
            tracing::warn!(
                "[satellite], [backend], [journal], [events], [policy.team], [policy.memory] or \
                 [policy.start] has changed; restart the satellite to apply it"
            );
        }
        self.members.set(&plan.gateway.users);
        self.connector.withhold(plan.secret_variables);
        let (asked, mut specs) = self.values.merge(plan.instances);
        let config_hash = ConfigHash::from_specs(&specs);
        let whole: SpecsById = specs.iter().map(|spec| (spec.id.clone(), spec.clone())).collect();
        let wanted: HashSet<InstanceId> = specs.iter().map(|spec| spec.id.clone()).collect();
        // Before the backend has sent a document, the known instances are incomplete.
        let complete = applied.files.backend.is_none() || applied.document.is_some();
        // At the start a plan without any instance is more likely a mistake.
        let forgets = complete && !(applied.generation == 0 && wanted.is_empty());
        if forgets {
            let (eraser, wanted, retention) = (self.eraser.clone(), wanted.clone(), plan.retention);
            // After a timeout the data is listed later.
            let _ = run_with_timeout(move || eraser.set_configured(&wanted, retention)).await;
        }
        let other_plans = self.grants.set_instances(&specs, plan.oauth, forgets);
        self.grants.mask(&mut specs);
        let servers: HashSet<_> = specs.iter().map(|spec| (&spec.id.team, &spec.id.installation)).collect();
        let (server_count, teams_count) = (servers.len(), plan.teams);
        let known = {
            let mut known = self.installed.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *known, wanted.clone())
        };

        // New instances do not wait for the grace period of removed ones, nor do removed ones wait for each other.
        let removals = known.difference(&wanted).map(|id| async move {
            let removed = self.runtime.uninstall(id).await;
            match &removed {
                Ok(_) => self.endpoint.remove_instance(id),
                Err(error) => tracing::error!(instance = %id, %error, "cannot uninstall an instance"),
            }
            removed.is_ok()
        });
        let catalogues = self.catalogues.clone().filter(|_| complete);
        let (memories, all) = (self.memo_store.clone(), Arc::new(specs.clone()));
        let of = all.clone();
        // An error means that the task panicked; then no memo is recalled.
        let mut memos = tokio::task::spawn_blocking(move || memories.take_memos(&of)).await.unwrap_or_default();
        let keep = move || catalogues.map(|catalogues| catalogues.track_all(&all)).unwrap_or_default();
        // Without cached catalogues servers are started to be discovered. A start waits for the cache; a reload does
        // not wait for a hanging disk.
        let tools = match applied.generation {
            0 => tokio::task::spawn_blocking(keep).await.ok(),
            _ => run_with_timeout(keep).await,
        };
        let mut tools = tools.unwrap_or_default();
        let installs = async {
            let mut applied = applied;
            (applied.origin, applied.config_hash, applied.requiring) = (plan.origin, config_hash, asked);
            (applied.server_count, applied.teams_count) = (server_count, teams_count);
            let mut changed = false;
            for spec in specs {
                let name = spec.name.clone();
                let known = EarlierState { memo: memos.remove(&spec.id), catalogue: tools.remove(&spec.id) };
                let installed = self.runtime.install_with_state(spec, known).await;
                match installed {
                    Ok(installed) => changed |= installed != InstallOutcome::Unchanged,
                    Err(error) => tracing::error!(instance = %name, %error, "cannot install an instance"),
                }
            }
            changed
        };
        let (removed, changed) = futures::join!(futures::future::join_all(removals), installs);
        // Without retention the data is erased before the change is reported.
        self.eraser.erase_due().await;
        let change_detected = changed || removed.contains(&true);
        // Wait until all instances can be found by name before the change is reported.
        for id in &wanted {
            self.runtime.wait_for(id, |_| true).await;
        }
        // Also wait for the changed instances.
        self.runtime.sync_snapshot().await;
        self.retry_authorization(other_plans);
        let fetch_duration_ms = u64::try_from(came.since.elapsed().as_millis()).unwrap_or(u64::MAX);
        let config_hash = came.hash.unwrap_or_else(|| config_hash.to_string());
        tracing::info!(config_hash, server_count, teams_count, change_detected, "configuration applied");
        self.runtime.emitter().emit(Event::ConfigRefreshed {
            config_hash,
            server_count,
            teams_count,
            change_detected,
            fetch_duration_ms,
        });
        whole
    }

    /// Reconnects those instances that wait for authorization: the way to obtain it has changed.
    fn retry_authorization(&self, ids: Vec<InstanceId>) {
        for id in ids {
            if self.runtime.status(&id).is_none_or(|view| view.status != Status::RequiresReauth) {
                continue;
            }
            let runtime = self.runtime.clone();
            // Not awaited: the status of the instance shows the outcome.
            drop(tokio::spawn(async move { runtime.reconnect(&id).await }));
        }
    }

    /// Watches the files that contain credentials and applies changed ones to remote servers and client tokens. Never
    /// returns.
    pub(crate) async fn watch_credentials(&self) {
        loop {
            tokio::time::sleep(CREDENTIALS_INTERVAL).await;
            let (generation, mut origin) = {
                let applied = self.applied.lock().await;
                if !applied.origin.has_secret_files() {
                    continue;
                }
                (applied.generation, applied.origin.clone())
            };
            let looking = tokio::task::spawn_blocking(move || {
                let look = origin.poll_files();
                (origin, look)
            });
            // An error means that the task panicked; the next check tries again.
            let Ok((origin, look)) = looking.await else { continue };
            let mut applied = self.applied.lock().await;
            if applied.generation != generation {
                continue; // A reload has read the files meanwhile.
            }
            applied.origin = origin;
            for (file, why) in look.unusable {
                let file = file.display();
                tracing::warn!(%file, why, "cannot read a credential again; the previous content stays in use");
            }
            if let Some(plan) = look.plan {
                self.renew_credentials(plan, &look.changed, &mut applied).await;
            }
        }
    }

    /// Applies the headers and query parameters of `plan` to remote servers. Changed credentials alone restart no
    /// process; that requires a reload.
    async fn renew_credentials(&self, plan: Plan, files: &[PathBuf], applied: &mut ActiveConfiguration) {
        let started = Instant::now();
        let files: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
        let files = files.join(", ");
        if let (Some(link), Some(backend)) = (&self.link, &plan.backend) {
            link.set_registration_token(backend);
        }
        let mut servers = 0_usize;
        let is_remote = |config: &InstanceConfig| matches!(config.target, ServerTarget::Remote { .. });
        let (asked, mut specs) = self.values.merge(plan.instances.into_iter().filter(is_remote));
        applied.requiring.extend(asked);
        let other_plans = self.grants.set_instances(&specs, plan.oauth, false);
        servers += other_plans.len();
        self.grants.mask(&mut specs);
        self.retry_authorization(other_plans);
        for spec in specs {
            let Some(view) = self.runtime.status(&spec.id) else { continue };
            let InstanceSpec { headers, query, mask, .. } = spec;
            let renewed = InstanceSpec { headers, query, mask, ..(*view.spec).clone() };
            if renewed == *view.spec {
                continue;
            }
            match self.runtime.update(renewed).await {
                Ok(_) => servers += 1,
                Err(error) => tracing::error!(instance = %view.spec.name, %error, "cannot renew credentials"),
            }
        }
        if self.endpoint.apply_users(plan.gateway).await {
            tracing::info!(files, "tokens of clients renewed");
        } else if servers == 0 {
            tracing::info!(files, "no remote server uses the changed file; a reload (SIGHUP) applies it");
        }
        if servers == 0 {
            return;
        }
        tracing::info!(files, servers, "credentials of remote servers renewed");
        self.runtime.emitter().emit(Event::ConfigRefreshed {
            config_hash: applied.config_hash.to_string(),
            server_count: applied.server_count,
            teams_count: applied.teams_count,
            change_detected: true,
            fetch_duration_ms: u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
        });
    }

    /// Reports a configuration that cannot be used. The current one stays in effect, and a rejected document of the
    /// backend is tried again.
    pub(crate) async fn report_rejection(&self, rejected: RejectedReload) {
        let RejectedReload { error_type, message: errors } = rejected;
        self.link.iter().for_each(BackendLink::refetch_config);
        let config_hash = self.applied.lock().await.config_hash;
        tracing::error!(
            errors,
            %config_hash,
            "configuration rejected; the previous one stays in use"
        );
        self.runtime.emitter().emit(Event::ConfigError {
            error_type: error_type.to_owned(),
            error_message: errors,
            status_code: None,
            retry_in: None,
        });
    }

    /// Serves the link to the backend: carries out its commands and reports the state of the satellite. Never returns.
    pub(crate) async fn run_link(&self) {
        match &self.link {
            Some(link) => link.run(self).await,
            None => std::future::pending().await,
        }
    }

    pub(crate) async fn wait_shutdown_request(&self) {
        self.shutdown.cancelled().await;
    }

    pub(crate) async fn wait_ended(&self) -> RuntimeEnd {
        self.runtime.wait_for_end().await
    }

    pub(crate) async fn shut_down(&self) -> ShutdownReport {
        // Clients first: their pending requests get real responses, not errors about the shutdown.
        self.endpoint.close().await;
        // Store catalogues that were discovered a moment ago.
        let (catalogues, snapshot) = (self.catalogues.clone(), self.runtime.snapshot());
        let storing = tokio::task::spawn_blocking(move || catalogues.inspect(|catalogues| catalogues.store(&snapshot)));
        let stored_by = tokio::time::Instant::now() + WAIT_MAX;
        if let Some(delivery) = &self.delivery {
            delivery.hurry().await;
        }
        let farewell = self.runtime.shutdown().await;
        // Stored while the servers end, so that a hanging disk is waited for only once.
        let _ = tokio::time::timeout_at(stored_by, storing).await;
        self.grants.shut_down().await;
        if let Some(delivery) = &self.delivery {
            let kept = delivery.finish(self.settings.batch.flush_timeout).await;
            if kept > 0 {
                tracing::info!(kept, "some events were not delivered in time; the next start sends them");
            }
        }
        // Last message on the link: the backend takes any later one as a sign that the satellite lives.
        if let Some(link) = &self.link {
            link.send_last_heartbeat(self).await;
        }
        self.ending.cancel();
        let console = self.console.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(console) = console {
            // Subscribers receive the last events; one that does not read is not waited for.
            let _ = tokio::time::timeout(LAST_ANSWERS, console).await;
        }
        // A hanging disk keeps what was committed and is not waited for.
        self.journal.close().await;
        // No process should be left; this ends those that a bug has left.
        self.end_all().await;
        if !self.journal.is_hanging() {
            let (data_dir, held) = (self.data_dir.clone(), self.lock.metadata().ok());
            let held = held.map(|held| (held.dev(), held.ino()));
            // If the socket cannot be removed, the next start removes it. With another lock the socket belongs to
            // another satellite.
            let _ = run_with_timeout(move || {
                if data_dir.stat(LOCK).map(|found| found.identity) == held {
                    let _ = data_dir.remove(SOCKET);
                }
            })
            .await;
        }
        farewell
    }

    pub(crate) async fn kill(&self) {
        self.runtime.kill();
        self.wait_ended().await;
        self.end_all().await;
    }

    /// Runs on a blocking thread, because it waits for processes to die.
    async fn end_all(&self) {
        let connector = self.connector.clone();
        // An error means that the task panicked; the reaper ends the rest.
        let _ = tokio::task::spawn_blocking(move || connector.kill_all(LAST_ANSWERS)).await;
    }
}

impl LinkHost for RunningSatellite {
    fn runtime(&self) -> &RuntimeHandle {
        &self.runtime
    }

    fn apply_config<'a>(
        &'a self,
        document: BackendDocument,
        since: Instant,
        expected: Option<&'a InstanceScope>,
    ) -> BoxFuture<'a, Result<Arc<SpecsById>, ConfigErrors>> {
        async move {
            let mut applied = self.applied.clone().lock_owned().await;
            let (files, waiting, hash) = (applied.files.clone(), applied.waiting.clone(), document.hash.clone());
            // Runs on a blocking thread, because thousands of servers take a while.
            let reading = tokio::task::spawn_blocking(move || {
                // Changed files and a changed document that belong together may arrive one after the other. Each
                // conflicts with the old version of the other, so waiting files are tried with the new document first.
                let both =
                    waiting.and_then(|waiting| Some((waiting.clone().with_document(&document).ok()?, Some(waiting))));
                (both.map_or_else(|| Ok((files.with_document(&document)?, None)), Ok), document)
            });
            let (read, document) = reading.await.map_err(|error| ConfigErrors::internal_error(&error))?;
            let (plan, waiting) = read?;
            if applied.accepted.as_ref() != Some(&document.hash)
                && let Some(message) = self.check_removals(&plan, expected)
            {
                applied.rejected = Some(document.hash);
                return Err(ConfigErrors::without_place("", vec![(message, ACCEPT_HINT.to_owned())]));
            }
            (applied.rejected, applied.accepted) = (None, None);
            applied.document = Some(document);
            if let Some(waiting) = waiting {
                applied.waiting = None;
                self.commit_files(waiting, &mut applied);
            }
            Ok(Arc::new(self.apply_plan(plan, applied, ChangeOrigin { since, hash: Some(hash) }).await))
        }
        .boxed()
    }

    fn erase<'a>(&'a self, removed: &'a InstanceScope) -> BoxFuture<'a, ()> {
        let admits =
            move |id: &InstanceId| removed.matches(id.installation.as_str(), id.team.as_str(), id.user.as_str());
        async move { drop(self.eraser.erase_now(admits).await) }.boxed()
    }

    fn event_progress(&self) -> EventProgress {
        let backlog = self.delivery.as_ref().map_or(0, |delivery| delivery.status().backlog);
        EventProgress { journalled_through: self.journal.status().journalled_through, backlog }
    }
}

/// Returns a callback that makes the runtime mask each new token of an instance in its server's output.
fn token_mask_listener(
    runtime: &RuntimeHandle,
    applied: &Arc<tokio::sync::Mutex<ActiveConfiguration>>,
) -> TokenListener {
    let (runtime, applied) = (runtime.clone(), applied.clone());
    Box::new(move |id, before, after| {
        let (runtime, applied) = (runtime.clone(), applied.clone());
        async move {
            let (after, updated) = {
                // Locked, so that an older specification does not follow a configuration change.
                let _applied = applied.lock().await;
                let Some(view) = runtime.status(&id) else { return };
                let mask = view.spec.mask.with_exchanged(before.as_ref().map(Secret::expose), after.expose());
                let after = InstanceSpec { mask, ..(*view.spec).clone() };
                (after.clone(), runtime.update(after).await)
            };
            match updated {
                // Wait until the team has it: until then the server's output is masked with the old token.
                Ok(_) => drop(runtime.wait_for(&id, |view| *view.spec == after).await),
                Err(error) => tracing::error!(instance = %id, %error, "cannot mask a new token in the server's output"),
            }
        }
        .boxed()
    })
}

fn create_link(
    plan: &Plan,
    data_dir: &DataDir,
    database: &StateDb,
    journal: &Journal,
) -> Result<Option<BackendLink>, StartError> {
    let Some(backend) = &plan.backend else { return Ok(None) };
    let options = link::LinkOptions {
        name: plan.name.clone(),
        plan: backend.clone(),
        data_dir: data_dir.path().to_owned(),
        database: database.clone(),
        command_log: Arc::new(journal.clone()),
        // `RandomState` seeds each instance randomly.
        seed: RandomState::new().build_hasher().finish(),
        suspended: Arc::new(suspend::total_suspended),
    };
    let machine =
        |why: link::LinkError| StartError::Machine { what: "prepare the connection to the backend", why: why.into() };
    BackendLink::new(options).map(Some).map_err(machine)
}

/// Returns the last document of the backend and the complete plan with it, so that a start does not wait for the
/// backend.
async fn load_stored_document(plan: &Plan, database: &StateDb) -> Option<(Plan, BackendDocument)> {
    let (plan, url, database) = (plan.clone(), plan.backend.as_ref()?.url.clone(), database.clone());
    let reading = tokio::task::spawn_blocking(move || {
        let document = BackendLink::load_stored_config(&database, &url)?;
        match plan.with_document(&document) {
            Ok(whole) => Some((whole, document)),
            Err(errors) => {
                let errors = errors.to_single_line();
                tracing::error!(
                    errors,
                    "the stored configuration of the backend is not valid any more; requesting it again"
                );
                None
            }
        }
    });
    // An error means that the task panicked; then the satellite starts without a document.
    reading.await.ok().flatten()
}

/// Calls [`StdioConnector::reclaim`] on a blocking thread, because it waits for processes to die.
async fn reclaim(data_dir: &DataDir) -> std::io::Result<Option<ReclaimedProcesses>> {
    let data_dir = data_dir.clone();
    tokio::task::spawn_blocking(move || StdioConnector::reclaim(&data_dir)).await.map_err(std::io::Error::other)?
}

/// Opens a data directory and locks it. The directory belongs to this process as long as both returned values are kept.
pub(crate) async fn lock_data_dir(location: &DataDirLocation) -> Result<(DataDir, Flock<File>), StartError> {
    let taking = location.clone();
    let data_dir =
        tokio::task::spawn_blocking(move || taking.create_or_open()).await.map_err(std::io::Error::other).flatten();
    let data_dir =
        data_dir.map_err(|why| StartError::DataDir { data_dir: location.path.display().to_string(), why })?;
    let lock = acquire_lock(&data_dir).await?;
    Ok((data_dir, lock))
}

async fn acquire_lock(data_dir: &DataDir) -> Result<Flock<File>, StartError> {
    let shown = || data_dir.path().display().to_string();
    let file = data_dir.open_file(LOCK, OpenMode::Write);
    let mut file = file.map_err(|why| StartError::DataDir { data_dir: shown(), why })?;
    let mut holder = String::new();
    // Only a hint for the error message: the lock itself decides.
    let _ = file.read_to_string(&mut holder);
    let orphan = || holder.trim().parse().is_ok_and(mcp_satellite_process::reaper::is_orphan);
    let until = Instant::now() + ORPHAN_PATIENCE;
    let locked = loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            // The reaper of that satellite was killed. The satellite is ending its servers, which takes a moment only.
            Err((unlocked, Errno::EWOULDBLOCK)) if orphan() && Instant::now() < until => file = unlocked,
            locked => break locked,
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    match locked {
        Ok(mut lock) => {
            // A running satellite holds a lock on the directory even if its file `lock` was deleted. One that has just
            // ended may hold it a moment longer than the file.
            let until = Instant::now() + DIRECTORY_LOCK_WAIT;
            while !data_dir.try_lock() {
                if Instant::now() >= until {
                    return Err(StartError::InUse { data_dir: shown(), holder: String::new() });
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            let written =
                lock.set_len(0).and_then(|()| lock.rewind()).and_then(|()| write!(lock, "{}", std::process::id()));
            if let Err(error) = written {
                // The lock is held without the id; only the error message of another satellite lacks it.
                tracing::warn!(%error, "cannot write the process id into the file `lock` of the data directory");
            }
            Ok(lock)
        }
        Err((_, Errno::EWOULDBLOCK)) => {
            let holder = holder.trim();
            let holder = if holder.is_empty() { String::new() } else { format!(" (pid {holder})") };
            Err(StartError::InUse { data_dir: shown(), holder })
        }
        Err((_, errno)) => Err(StartError::DataDir { data_dir: shown(), why: errno.into() }),
    }
}

/// Hash that tells two configurations apart in events and logs. The same configuration has the same hash in every
/// release. It is the sum of the hashes of the instances, so that one of them can be replaced.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ConfigHash(u64);

impl ConfigHash {
    fn from_specs(specs: &[InstanceSpec]) -> Self {
        Self(specs.iter().fold(0, |sum, spec| sum.wrapping_add(identity::public_hash(spec))))
    }

    pub(crate) fn exchange(self, before: &InstanceSpec, after: &InstanceSpec) -> Self {
        let (before, after) = (identity::public_hash(before), identity::public_hash(after));
        Self(self.0.wrapping_sub(before).wrapping_add(after))
    }
}

impl fmt::Display for ConfigHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}
