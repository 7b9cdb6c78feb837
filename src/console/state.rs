//! State of the handlers of the control socket and of the HTTP API.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::byte_budget::ByteBudget;
use mcp_satellite_actors::model::event::{Event, EventSubject};
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_backend::link::SystemMonitor;
use mcp_satellite_console::access::ConsoleAccess;
use mcp_satellite_console::feed::StreamLimits;
use mcp_satellite_console::principal::Principal;
use mcp_satellite_console::routes::ApiServer;
use mcp_satellite_process::keeper::SatelliteGeneration;
use mcp_satellite_process::process::TreeUsage;
use mcp_satellite_process::usage::UsageSampler;
use mcp_satellite_remote::oauth::Grants;
use mcp_satellite_telemetry::Telemetry;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::api::{InstanceSelector, InstanceStatus, RejectedConfiguration};
use super::find::TeamMembers;
use super::listener::ConsoleListener;
use super::refusals::RefusalCounts;
use crate::active_configuration::{ActiveConfiguration, ReloadRequest};
use crate::backend::link::BackendLink;
use crate::connect::stdio::StdioConnector;
use crate::data_dir::DataDir;
use crate::delivery::Delivery;
use crate::endpoint::SatelliteEndpoint;
use crate::erasures::DataEraser;
use crate::journal::Journal;
use crate::values::ValueConfigurer;

pub(crate) struct ConsoleState {
    pub(crate) runtime: RuntimeHandle,
    pub(crate) connector: StdioConnector,
    pub(crate) endpoint: Arc<SatelliteEndpoint>,
    pub(crate) http: Arc<ConsoleListener>,
    pub(crate) applied: Arc<tokio::sync::Mutex<ActiveConfiguration>>,
    pub(crate) link: Option<BackendLink>,
    pub(crate) journal: Journal,
    pub(crate) delivery: Option<Arc<Delivery>>,
    pub(crate) configurer: ValueConfigurer,
    pub(crate) grants: Grants,
    pub(crate) eraser: Arc<DataEraser>,
    pub(crate) reload: mpsc::Sender<ReloadRequest>,
    pub(crate) name: String,
    pub(crate) data_dir: DataDir,
    pub(crate) started: Instant,
    pub(crate) generation: SatelliteGeneration,
    pub(crate) members: Arc<TeamMembers>,
    pub(crate) rejected: Arc<Mutex<Option<RejectedConfiguration>>>,
    pub(crate) shutdown: CancellationToken,
    pub(crate) usage: UsageSampler,
    pub(crate) metrics: Telemetry,
    pub(crate) machine: Arc<SystemMonitor>,
    pub(crate) refusals: RefusalCounts,
    pub(crate) streams: StreamLimits,
    /// Times of the last events about reads of other users' data.
    pub(crate) reads: Mutex<HashMap<String, Instant>>,
    /// Cancelled after the runtime has ended: event streams send the remaining events and end.
    pub(crate) ending: CancellationToken,
}

impl ConsoleState {
    /// Returns the status of an instance with the last sample of its memory and processor time.
    pub(super) fn instance_status(&self, view: &InstanceView, now: Instant) -> InstanceStatus {
        let sample = self.usage.latest(&view.spec.id).filter(|_| view.pid.is_some());
        let usage = sample.map(|sample| TreeUsage { rss_bytes: sample.rss_bytes, cpu_seconds: sample.cpu_seconds });
        InstanceStatus::from_view(view, usage, now)
    }

    pub(super) fn rejected_configuration(&self) -> Option<RejectedConfiguration> {
        self.rejected.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl ApiServer for ConsoleState {
    fn access(&self) -> &ConsoleAccess {
        &self.http.access
    }

    fn record(&self, event: Event) {
        if let Event::ControlAction { action, outcome, .. } = &event {
            self.metrics.count_action(action, *outcome);
        }
        let emitter = self.runtime.emitter().clone();
        self.refusals.count(event, move |event| emitter.emit(event));
    }

    fn body_budget(&self) -> &Arc<ByteBudget> {
        self.endpoint.page_bodies()
    }

    fn target(&self, principal: &Principal, name: &str) -> Option<Arc<EventSubject>> {
        let view = self.resolve(&InstanceSelector::of_team(name, principal.team.clone())).ok()?;
        Some(Arc::new(EventSubject::from(&*view.spec)))
    }
}
