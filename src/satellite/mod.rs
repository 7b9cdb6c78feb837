//! A satellite process, which owns its data directory exclusively and runs the runtime, the control socket, the MCP
//! endpoint and the link to the backend, with the instances of the current configuration.
//!
//! Every plan, from files or from the backend, goes through `RunningSatellite::install`, and only `UserValues::merge`
//! turns configurations into specifications. The applied configuration is locked while a plan is installed and while a
//! user's value is stored and applied, so that neither overtakes the other.

mod apply;
mod credentials;
mod link;
pub(crate) mod lock;
mod recovery;
mod settings;
mod shutdown;
pub(crate) mod start;

use std::collections::HashSet;
use std::path::Path;
use std::sync::{Arc, Mutex};

use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::exit::RuntimeEnd;
use mcp_satellite_actors::model::ids::InstanceId;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use self::lock::DataDirLock;
use self::settings::StartupSettings;
use crate::active_configuration::{ActiveConfiguration, ReloadRequest};
use crate::backend::link::BackendLink;
use crate::connect::stdio::StdioConnector;
use crate::console::api::{EndpointStatus, RejectedConfiguration};
use crate::console::find::TeamMembers;
use crate::console::listener::ConsoleListener;
use crate::delivery::Delivery;
use crate::endpoint::SatelliteEndpoint;
use crate::erasures::DataEraser;
use crate::journal::Journal;
use crate::telemetry::SatelliteTelemetry;
use mcp_satellite_process::keeper::KeeperClient;
use mcp_satellite_remote::oauth::Grants;
use mcp_satellite_store::catalogue_cache::CatalogueCache;
use mcp_satellite_store::memos::MemoStore;
use mcp_satellite_store::values::UserValues;

pub(crate) struct RunningSatellite {
    runtime: RuntimeHandle,
    connector: StdioConnector,
    settings: StartupSettings,
    /// The applied configuration. Locked during a change, so that no older configuration is applied after it.
    applied: Arc<tokio::sync::Mutex<ActiveConfiguration>>,
    /// Instances that were installed last. The snapshot may lag behind.
    installed: Mutex<HashSet<InstanceId>>,
    users: UserData,
    endpoint: Arc<SatelliteEndpoint>,
    http: Arc<ConsoleListener>,
    link: Option<BackendLink>,
    console: ControlSocket,
    telemetry: SatelliteTelemetry,
    _watchers: Vec<AbortOnDropHandle<()>>,
    storage: SatelliteStorage,
    keeper: KeeperClient,
}

struct SatelliteStorage {
    journal: Journal,
    /// `None` if events stay in the journal.
    delivery: Option<Arc<Delivery>>,
    memos: Arc<MemoStore>,
    catalogues: Option<Arc<CatalogueCache>>,
    directory: DataDirLock,
}

/// Data of users that outlives the configuration of their instances.
struct UserData {
    values: Arc<UserValues>,
    grants: Grants,
    eraser: Arc<DataEraser>,
}

struct ControlSocket {
    task: Mutex<Option<JoinHandle<()>>>,
    members: Arc<TeamMembers>,
    rejected: Arc<Mutex<Option<RejectedConfiguration>>>,
    reloads: tokio::sync::Mutex<mpsc::Receiver<ReloadRequest>>,
    shutdown: CancellationToken,
    /// Cancelled after the runtime has ended.
    ending: CancellationToken,
}

impl RunningSatellite {
    pub(crate) fn runtime(&self) -> &RuntimeHandle {
        &self.runtime
    }

    pub(crate) fn data_dir(&self) -> &Path {
        self.storage.directory.data_dir().path()
    }

    pub(crate) fn endpoint(&self) -> Option<EndpointStatus> {
        self.endpoint.status()
    }

    /// Returns the URL of the console without a path; `None` if it is off.
    pub(crate) fn console_url(&self) -> Option<String> {
        self.http.url()
    }

    pub(crate) async fn wait_data_dir_lost(&self) {
        self.storage.directory.wait_lost().await;
    }

    pub(crate) async fn wait_shutdown_request(&self) {
        self.console.shutdown.cancelled().await;
    }

    pub(crate) async fn wait_ended(&self) -> RuntimeEnd {
        self.runtime.wait_for_end().await
    }

    /// Returns the next request of a person for a reload. Never resolves after the control socket is closed.
    pub(crate) async fn next_reload_request(&self) -> ReloadRequest {
        match self.console.reloads.lock().await.recv().await {
            Some(request) => request,
            None => std::future::pending().await,
        }
    }
}
