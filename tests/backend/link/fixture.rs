//! The fixture: a fleet of simulated servers that a backend controls, and the link to that backend.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::BoxFuture;
use jiff::Timestamp;
use mcp_satellite::backend::link::rules::InstanceScope;
use mcp_satellite::backend::link::{BackendLink, CommandLog, InMemoryCommandLog, LinkHost, LinkOptions, SpecsById};
use mcp_satellite::backend::wire::EventProgress;
use mcp_satellite::config::{BackendDocument, BackendPlan, ConfigErrors, PlanRestrictions, PollIntervals};
use mcp_satellite::connect::sim::{SimConnector, SimPlan, SimScript};
use mcp_satellite::console::api::BackendStatus;
use mcp_satellite::data_dir::DataDir;
use mcp_satellite::state::{StateDb, StateKey, StateTable};
use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::event::Event;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::secret::Secret;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::spec::InstanceConfig;
use mcp_satellite_actors::model::status::Status;
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::sink::RecordingSink;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::peer::{Peer, wait_for};

pub(crate) struct LinkFixture {
    pub(crate) fleet: Arc<SimulatedFleet>,
    pub(crate) command_log: Arc<dyn CommandLog>,
    pub(crate) home: TempDir,
    pub(crate) plan: BackendPlan,
    /// Total time for which the machine was suspended.
    pub(crate) suspended: Arc<Mutex<Duration>>,
}

/// A link whose task runs until it is dropped.
pub(crate) struct RunningLink {
    pub(crate) link: BackendLink,
    task: JoinHandle<()>,
}

impl Drop for RunningLink {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl RunningLink {
    pub(crate) fn status(&self) -> BackendStatus {
        self.link.status(0)
    }

    pub(crate) async fn wait_until(&self, what: &str, condition: impl Fn(&BackendStatus) -> bool) -> BackendStatus {
        wait_for(what, || Some(self.status()).filter(&condition)).await
    }

    /// Waits until the last error contains this text, and returns the error.
    pub(crate) async fn wait_for_error(&self, text: &str) -> String {
        let error_of = |status: BackendStatus| status.last_error.filter(|error| error.contains(text));
        wait_for(text, || error_of(self.status())).await
    }
}

pub(crate) struct SimulatedFleet {
    pub(crate) runtime: RuntimeHandle,
    pub(crate) sim: SimConnector,
    /// Installations whose next runs never answer.
    pub(crate) hanging: Arc<Mutex<BTreeSet<String>>>,
    pub(crate) applied_hashes: Mutex<Vec<String>>,
    /// Delays the installation of the next configuration until a message arrives.
    pub(crate) install_gate: Mutex<Option<oneshot::Receiver<()>>>,
    /// The removals that commands have announced.
    pub(crate) expected: Mutex<Vec<InstanceScope>>,
    /// The removals whose data was erased.
    pub(crate) erased: Mutex<Vec<InstanceScope>>,
    installed: Mutex<BTreeSet<InstanceId>>,
    events: RecordingSink,
}

impl LinkFixture {
    /// A fixture for this backend and registration token.
    pub(crate) async fn new(peer: &Peer, token: Option<&str>) -> Self {
        let hanging = Arc::new(Mutex::new(BTreeSet::<String>::new()));
        let hangs = hanging.clone();
        let sim = SimConnector::with_plan(move |spec, _| {
            let handshake_never = hangs.lock().unwrap().contains(spec.id.installation.as_str());
            SimPlan::new(SimScript { handshake_never, ..SimScript::default() })
        });
        let events = RecordingSink::new();
        let sink = Arc::new(events.clone());
        let options = mcp_satellite_actors::RuntimeOptions::new(sim.clone(), sink, Arc::new(Timestamp::now));
        let (runtime, _root) = mcp_satellite_actors::start(options).await.unwrap();
        let fleet = SimulatedFleet {
            runtime,
            sim,
            hanging,
            applied_hashes: Mutex::default(),
            install_gate: Mutex::default(),
            expected: Mutex::default(),
            erased: Mutex::default(),
            installed: Mutex::default(),
            events,
        };
        let fast = Duration::from_millis(20);
        let poll = PollIntervals { immediate: fast, high: fast, normal: fast, idle: fast };
        let plan = BackendPlan {
            token: token.map(Secret::from),
            heartbeat_interval: Duration::from_millis(50),
            config_interval: Duration::from_millis(50),
            backoff_max: Duration::from_millis(200),
            poll,
            ..BackendPlan::new(peer.url())
        };
        let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        let home = tempfile::Builder::new().permissions(permissions).tempdir().unwrap();
        Self {
            fleet: Arc::new(fleet),
            command_log: Arc::new(InMemoryCommandLog::default()),
            home,
            plan,
            suspended: Arc::default(),
        }
    }

    /// The stored key of the backend, as JSON.
    pub(crate) fn stored_key(data_dir: &Path) -> Option<String> {
        let database = StateDb::open(&DataDir::open(data_dir).unwrap()).unwrap();
        let key = database.load_row(StateTable::Keys, &StateKey::BACKEND.into()).unwrap();
        key.map(|key| String::from_utf8(key).unwrap())
    }

    pub(crate) fn link(&self) -> RunningLink {
        self.link_in(self.home.path())
    }

    pub(crate) fn link_in(&self, data_dir: &Path) -> RunningLink {
        let suspended = self.suspended.clone();
        let link = BackendLink::new(LinkOptions {
            name: "satellite-0001".to_owned(),
            plan: self.plan.clone(),
            data_dir: data_dir.to_owned(),
            database: StateDb::open(&DataDir::create(data_dir).unwrap()).unwrap(),
            command_log: self.command_log.clone(),
            seed: 1,
            suspended: Arc::new(move || *suspended.lock().unwrap()),
        });
        let link = link.unwrap();
        let (running, fleet) = (link.clone(), self.fleet.clone());
        let task = tokio::spawn(async move { running.run(&*fleet).await });
        RunningLink { link, task }
    }
}

impl SimulatedFleet {
    pub(crate) fn view(&self, installation: &str) -> Option<Arc<InstanceView>> {
        let snapshot = self.runtime.snapshot();
        snapshot.iter().find(|view| view.spec.id.installation.as_str() == installation).cloned()
    }

    pub(crate) async fn online(&self, installation: &str) -> Arc<InstanceView> {
        let is = || self.view(installation).filter(|view| view.status == Status::Online);
        wait_for(&format!("{installation} to be online"), is).await
    }

    /// The `config.*` events so far.
    pub(crate) async fn config_events(&self) -> Vec<Event> {
        self.runtime.flush().await;
        let events = self.events.events();
        let all = events.iter().map(|envelope| &envelope.event);
        all.filter(|event| matches!(event, Event::ConfigRefreshed { .. } | Event::ConfigError { .. }))
            .cloned()
            .collect()
    }
}

impl LinkHost for SimulatedFleet {
    fn runtime(&self) -> &RuntimeHandle {
        &self.runtime
    }

    fn apply_config<'a>(
        &'a self,
        document: BackendDocument,
        _: Instant,
        expected: Option<&'a InstanceScope>,
    ) -> BoxFuture<'a, Result<Arc<SpecsById>, ConfigErrors>> {
        self.expected.lock().unwrap().extend(expected.cloned());
        async move {
            let plan = document.plan(&PlanRestrictions::default())?;
            let specs: SpecsById =
                plan.instances.into_iter().map(InstanceConfig::merge).map(|spec| (spec.id.clone(), spec)).collect();
            let wanted: BTreeSet<_> = specs.keys().cloned().collect();
            let before = std::mem::replace(&mut *self.installed.lock().unwrap(), wanted.clone());
            for gone in before.difference(&wanted) {
                self.runtime.uninstall(gone).await.unwrap();
            }
            let (runtime, all) = (self.runtime.clone(), specs.clone());
            let gate = self.install_gate.lock().unwrap().take();
            let is_delayed = gate.is_some();
            let installing = tokio::spawn(async move {
                if let Some(gate) = gate {
                    gate.await.unwrap();
                }
                for spec in all.into_values() {
                    runtime.install(spec).await.unwrap();
                }
                runtime.sync_snapshot().await;
            });
            if !is_delayed {
                installing.await.unwrap();
            }
            self.applied_hashes.lock().unwrap().push(document.hash);
            Ok(Arc::new(specs))
        }
        .boxed()
    }

    fn erase<'a>(&'a self, removed: &'a InstanceScope) -> BoxFuture<'a, ()> {
        self.erased.lock().unwrap().push(removed.clone());
        futures::future::ready(()).boxed()
    }

    fn event_progress(&self) -> EventProgress {
        EventProgress { journalled_through: 7, backlog: 3 }
    }
}

/// A configuration of one team `acme` with these users and stdio installations.
pub(crate) fn config(hash: &str, users: &[&str], installations: &[&str]) -> Value {
    let users: Vec<_> = users.iter().map(|user| json!({"id": user, "slug": user})).collect();
    let installation = |id: &&str| json!({"id": id, "server": "files"});
    let installations: Vec<_> = installations.iter().map(installation).collect();
    json!({
        "hash": hash,
        "servers": {"files": {"command": "files", "env": {"FILES_KEY": "hunter2-of-the-backend"}}},
        "teams": [{"id": "team_acme", "slug": "acme", "users": users, "installations": installations}],
    })
}

pub(crate) fn command(id: &str, kind: &str, payload: &Value) -> Value {
    json!({"id": id, "command_type": kind, "payload": payload})
}
