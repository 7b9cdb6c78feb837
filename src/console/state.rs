//! State of the handlers of the control socket and of the HTTP API.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::event::{ActionOutcome, Event, EventSubject};
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_backend::link::SystemMonitor;
use mcp_satellite_console::access::ConsoleAccess;
use mcp_satellite_console::feed::StreamLimits;
use mcp_satellite_console::principal::Principal;
use mcp_satellite_console::routes::ApiServer;
use mcp_satellite_process::process::TreeUsage;
use mcp_satellite_process::usage::UsageSampler;
use mcp_satellite_remote::oauth::Grants;
use mcp_satellite_telemetry::Telemetry;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::api::{InstanceSelector, InstanceStatus, RejectedConfiguration};
use super::find::TeamMembers;
use super::listener::ConsoleListener;
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

/// Counts refused actions, so that a script that repeats one does not fill the journal.
#[derive(Default)]
pub(crate) struct RefusalCounts(Mutex<HashMap<String, RepeatedRefusal>>);

struct RepeatedRefusal {
    since: Instant,
    repeated: u64,
}

const REFUSAL_INTERVAL: Duration = Duration::from_secs(1);
/// Number of refusals from which on those without a repetition are forgotten.
const REFUSALS_MAX: usize = 1024;

impl RefusalCounts {
    /// Returns the event to emit; `None` if it equals a refusal within the last second.
    pub(crate) fn count(&self, event: Event) -> Option<Event> {
        let Event::ControlAction { action, outcome: ActionOutcome::Refused, actor, target, reason, keys, .. } = event
        else {
            return Some(event);
        };
        let now = Instant::now();
        let key = format!("{action} {} {:?} {:?} {reason:?}", actor.kind, actor.name, actor.address);
        let mut refusals = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if refusals.len() >= REFUSALS_MAX {
            refusals.retain(|_, last| now.duration_since(last.since) < REFUSAL_INTERVAL);
        }
        if let Some(last) = refusals.get_mut(&key)
            && now.duration_since(last.since) < REFUSAL_INTERVAL
        {
            last.repeated += 1;
            return None;
        }
        let before = refusals.insert(key, RepeatedRefusal { since: now, repeated: 0 });
        let repeated = before.map_or(0, |before| before.repeated);
        Some(Event::ControlAction { action, outcome: ActionOutcome::Refused, actor, target, reason, keys, repeated })
    }
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
        if let Some(event) = self.refusals.count(event) {
            self.runtime.emitter().emit(event);
        }
    }

    fn target(&self, principal: &Principal, name: &str) -> Option<Arc<EventSubject>> {
        let view = self.resolve(&InstanceSelector::of_team(name, principal.team.clone())).ok()?;
        Some(Arc::new(EventSubject::from(&*view.spec)))
    }
}
