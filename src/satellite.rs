//! One satellite process: a data directory that is ours alone, the runtime on it, the control socket, and the
//! instances that the configuration asks for.

use std::collections::HashSet;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use jiff::Timestamp;
use mcp_satellite_actors::model::event::Event;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::seam::EventSink;
use mcp_satellite_actors::{Farewell, Options, RuntimeHandle};
use nix::fcntl::{Flock, FlockArg};
use tokio::task::JoinHandle;

use crate::config::{Plan, SinkPlan};
use crate::connect::process::raise_descriptor_limit;
use crate::connect::stdio::StdioConnector;
use crate::console::server::{self, Console};
use crate::sink::file::FileSink;
use crate::sink::http::HttpSink;
use crate::sink::stdout::StdoutSink;

/// Why a satellite does not start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    /// Another one has the data directory.
    #[error(
        "a satellite is already running on `{data_dir}`{holder}; stop it first, or give this one another --data-dir"
    )]
    InUse { data_dir: String, holder: String },
    /// The data directory cannot be used.
    #[error("cannot use the data directory `{data_dir}`: {why}")]
    DataDir { data_dir: String, why: std::io::Error },
    /// The machine refuses something else.
    #[error("cannot {what}: {why}")]
    Machine { what: &'static str, why: Box<dyn std::error::Error + Send + Sync> },
}

/// A satellite that runs.
pub(crate) struct Satellite {
    runtime: RuntimeHandle,
    root: Shared<BoxFuture<'static, ()>>,
    console: JoinHandle<()>,
    data_dir: PathBuf,
    /// Held as long as the satellite lives.
    _lock: Flock<File>,
}

impl Satellite {
    /// Starts the runtime and the control socket on `data_dir`, and installs what `plan` asks for.
    pub(crate) async fn start(plan: Plan, data_dir: &Path) -> Result<Self, StartError> {
        let in_data_dir = |why| StartError::DataDir { data_dir: data_dir.display().to_string(), why };
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(data_dir).map_err(in_data_dir)?;
        let data_dir = data_dir.canonicalize().map_err(in_data_dir)?;
        let lock = lock(&data_dir)?;
        let in_data_dir = |why| StartError::DataDir { data_dir: data_dir.display().to_string(), why };
        match raise_descriptor_limit() {
            Ok(limit) => tracing::debug!(limit, "open files"),
            Err(error) => tracing::warn!(%error, "cannot raise the limit of open files; many servers may not fit"),
        }

        let machine = |what: &'static str| move |why: std::io::Error| StartError::Machine { what, why: why.into() };
        let (sink, next_seq): (Arc<dyn EventSink>, u64) = match &plan.sink {
            SinkPlan::File { rotate_bytes, keep } => {
                let (sink, next_seq) = FileSink::open(&data_dir, *rotate_bytes, *keep).map_err(in_data_dir)?;
                (Arc::new(sink), next_seq)
            }
            SinkPlan::Stdout => (Arc::new(StdoutSink::new().map_err(machine("write events to stdout"))?), 1),
            SinkPlan::Http { url, token } => {
                let sink = HttpSink::new(url, token.as_ref())
                    .map_err(|why| StartError::Machine { what: "send events over HTTP", why: why.into() })?;
                (Arc::new(sink), 1)
            }
        };
        let withheld = plan.secret_variables.iter().cloned().collect();
        let connector = StdioConnector::new(withheld).map_err(machine("start the thread that forks servers"))?;
        let mut options = Options::new(Arc::new(connector), sink, Arc::new(Timestamp::now));
        options.next_seq = next_seq;
        options.batch = plan.batch.clone();
        options.team_budget = plan.team_budget.clone();
        options.start_permits = plan.start_permits.unwrap_or(options.start_permits);
        let (runtime, root) = mcp_satellite_actors::start(options)
            .await
            .map_err(|why| StartError::Machine { what: "start the runtime", why: why.to_string().into() })?;

        let listener = server::bind(&data_dir).map_err(in_data_dir)?;
        let console = tokio::spawn(server::serve(
            listener,
            Console {
                runtime: runtime.clone(),
                name: plan.name.clone(),
                data_dir: data_dir.clone(),
                journal: matches!(plan.sink, SinkPlan::File { .. }),
                started: Instant::now(),
            },
        ));
        // An error says that it was aborted or panicked: ended all the same.
        let root = root.map(drop).boxed().shared();
        let satellite = Self { runtime, root, console, data_dir, _lock: lock };
        satellite.apply(plan).await;
        Ok(satellite)
    }

    /// The runtime.
    pub(crate) fn runtime(&self) -> &RuntimeHandle {
        &self.runtime
    }

    /// Where its data is.
    pub(crate) fn data_dir(&self) -> &Path {
        &self.data_dir
    }

    /// Brings the fleet to what `plan` asks for, by difference: what is the same is not touched.
    pub(crate) async fn apply(&self, plan: Plan) {
        let started = Instant::now();
        let specs: Vec<InstanceSpec> = plan.instances.into_iter().map(|instance| instance.merge()).collect();
        let hash = hash(&specs);
        let wanted: HashSet<InstanceId> = specs.iter().map(|spec| spec.id.clone()).collect();
        let servers: HashSet<_> = specs.iter().map(|spec| (&spec.id.team, &spec.id.installation)).collect();
        let (server_count, teams_count) = (servers.len(), plan.teams);
        let snapshot = self.runtime.snapshot();
        let known: Vec<InstanceId> = snapshot.iter().map(|view| view.spec.id.clone()).collect();
        let mut change_detected = false;

        // Removals do not wait for each other's grace.
        let removals = known.iter().filter(|id| !wanted.contains(*id)).map(|id| self.runtime.uninstall(id));
        let removed = futures::future::join_all(removals).await;
        change_detected |= removed.iter().any(Result::is_ok);
        for spec in specs {
            let name = spec.name.clone();
            match self.runtime.install(spec).await {
                Ok(installed) => change_detected |= installed != mcp_satellite_actors::Installed::Unchanged,
                Err(error) => tracing::error!(installation_name = %name, %error, "cannot install"),
            }
        }
        let fetch_duration_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        tracing::info!(config_hash = hash, server_count, teams_count, change_detected, "configuration applied");
        self.runtime.emitter().emit(Event::ConfigRefreshed {
            config_hash: hash,
            server_count,
            teams_count,
            change_detected,
            fetch_duration_ms,
        });
    }

    /// A configuration that cannot be used changes nothing, and says so.
    pub(crate) fn refuse(&self, error_message: String) {
        self.runtime.emitter().emit(Event::ConfigError {
            error_type: "invalid".to_owned(),
            error_message,
            status_code: None,
            retry_in: None,
        });
    }

    /// Resolves when the runtime has ended, whoever ended it.
    pub(crate) async fn ended(&self) {
        self.root.clone().await;
    }

    /// Ends everything with grace.
    pub(crate) async fn shut_down(&self) -> Farewell {
        let farewell = self.runtime.shutdown().await;
        self.console.abort();
        if let Ok((socket, _directory)) = crate::console::socket_path(&self.data_dir) {
            // What is left there is removed by the next start.
            let _ = std::fs::remove_file(socket);
        }
        farewell
    }
}

fn lock(data_dir: &Path) -> Result<Flock<File>, StartError> {
    let shown = || data_dir.display().to_string();
    let path = data_dir.join("lock");
    let file = File::options().read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
    let mut file = file.map_err(|why| StartError::DataDir { data_dir: shown(), why })?;
    let mut holder = String::new();
    // Only a hint for the message: the lock itself decides.
    let _ = file.read_to_string(&mut holder);
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(mut lock) => {
            let written =
                lock.set_len(0).and_then(|()| lock.rewind()).and_then(|()| write!(lock, "{}", std::process::id()));
            written.map_err(|why| StartError::DataDir { data_dir: shown(), why })?;
            Ok(lock)
        }
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => {
            let holder = holder.trim();
            let holder = if holder.is_empty() { String::new() } else { format!(" (pid {holder})") };
            Err(StartError::InUse { data_dir: shown(), holder })
        }
        Err((_, errno)) => Err(StartError::DataDir { data_dir: shown(), why: errno.into() }),
    }
}

/// Tells two configurations apart in events and logs. Secrets go in, and cannot be read out of it.
fn hash(specs: &[InstanceSpec]) -> String {
    let mut hasher = DefaultHasher::new();
    for spec in specs {
        spec.name.hash(&mut hasher);
        format!("{:?}{:?}{:?}", spec.target, spec.policy, spec.missing).hash(&mut hasher);
        let pairs = spec.env.iter().chain(&spec.headers).chain(&spec.query);
        pairs.for_each(|(key, value)| (key, value.expose()).hash(&mut hasher));
        spec.args.iter().for_each(|arg| arg.expose().hash(&mut hasher));
    }
    format!("{:016x}", hasher.finish())
}
