//! Commands of the control socket, the HTTP API and the control plane's MCP server. Each becomes a call of the runtime.

use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use mcp_satellite_actors::ControlError;
use mcp_satellite_actors::model::event::{EventSubject, rfc3339};
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_console::changes::{OpenChange, run_to_end};
use mcp_satellite_console::principal::{Entrance, Principal};
use mcp_satellite_console::problem::Problem;
use mcp_satellite_console::routes::ApiServer as _;
use mcp_satellite_store::values::{ValueChange, ValueError};
use mcp_satellite_telemetry::{ExportState, ExportStates};
use serde_json::value::RawValue;
use tokio::sync::oneshot;

use super::api::{
    ConfigureResult, ControlResult, ExportStatus, InstanceSelector, InstanceStatus, MemoryReport, ReconnectResult,
    ReloadResult, RequestFailure, SatelliteStatus, TelemetryStatus, timestamp_of,
};
use super::find::find;
use super::state::ConsoleState;
use crate::active_configuration::{AcceptedReload, ReloadRequest};
use crate::remedy::next_step;
use crate::values::ConfigureError;

pub(super) type ActionResult<T> = Result<T, Box<RequestFailure>>;

/// Commands for one instance.
#[derive(Debug, Clone, Copy)]
pub(super) enum InstanceAction {
    Start,
    Stop,
    Restart,
}

impl ConsoleState {
    pub(super) fn satellite_status(&self) -> SatelliteStatus {
        let backlog = || self.delivery.as_ref().map_or(0, |delivery| delivery.status().backlog);
        SatelliteStatus {
            name: self.name.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_seconds: self.started.elapsed().as_secs(),
            started_at: rfc3339(timestamp_of(self.started)),
            generation: self.generation.number,
            last_crash: self.generation.previous.as_ref().map(|previous| previous.reason.clone()),
            data_dir: self.data_dir.path().display().to_string(),
            held_by: self.connector.describe_containment(),
            memory: MemoryReport::from_status(self.runtime.memory()),
            events: self.runtime.event_statistics().into(),
            endpoint_opening: self.endpoint.is_opening(),
            endpoint_problem: self.endpoint.problem(),
            endpoint: self.endpoint.status(),
            console_url: self.http.url(),
            console_problem: self.http.problem(),
            backend: self.link.as_ref().map(|link| link.status(backlog())),
            journal: Some(self.journal.status()),
            delivery: self.delivery.as_ref().map(|delivery| delivery.status()),
            telemetry: telemetry_status(self.metrics.exports()),
            rejected_configuration: self.rejected_configuration(),
        }
    }

    pub(super) fn resolve(&self, selector: &InstanceSelector) -> ActionResult<Arc<InstanceView>> {
        let snapshot = self.runtime.snapshot();
        let views: Vec<&Arc<InstanceView>> = snapshot.iter().collect();
        find(&views, |view| &view.spec, selector).map(|found| Arc::clone(found))
    }

    pub(super) fn current_status(&self, view: &InstanceView) -> ActionResult<InstanceStatus> {
        let snapshot = self.runtime.snapshot();
        let view = snapshot.get(&view.spec.id).ok_or_else(|| RequestFailure::from(ControlError::NotFound))?;
        Ok(InstanceStatus::from_view(view, None, Instant::now()))
    }

    pub(super) async fn control(&self, view: &InstanceView, command: InstanceAction) -> ActionResult<ControlResult> {
        let id = &view.spec.id;
        let done = match command {
            InstanceAction::Start => self.runtime.start(id).await,
            InstanceAction::Stop => self.runtime.stop(id).await,
            InstanceAction::Restart => self.runtime.restart(id).await,
        };
        done.map_err(|error| failure_of(error, view))?;
        let not_durable = self.durability_error().await;
        Ok(ControlResult { instance: self.current_status(view)?, not_durable })
    }

    pub(super) async fn reconnect(&self, view: &InstanceView) -> ActionResult<ReconnectResult> {
        let outcome = self.runtime.reconnect(&view.spec.id).await.map_err(|error| failure_of(error, view))?;
        let instance = view.spec.name.to_string();
        let mcp_satellite_actors::ReconnectOutcome { success, status, status_message } = outcome;
        let view = self.runtime.status(&view.spec.id);
        let next_step = view.and_then(|view| Some(next_step(view.remedy?, &view.spec)));
        let not_durable = self.durability_error().await;
        Ok(ReconnectResult { instance, success, status, status_message, next_step, not_durable })
    }

    pub(super) async fn configure(&self, view: &InstanceView, change: ValueChange) -> ActionResult<ConfigureResult> {
        let configured = self.configurer.configure(view.spec.id.clone(), change).await;
        let (required, not_durable) = configured.map_err(|refused| match refused {
            ConfigureError::Value(ValueError::BadInput(why)) => {
                Box::new(RequestFailure::new("bad_input", format!("`{}`: {why}", view.spec.name)))
            }
            ConfigureError::Value(ValueError::Storage(_)) => {
                Box::new(RequestFailure::new("storage", refused.to_string()))
            }
            ConfigureError::Control(error) => failure_of(error, view),
        })?;
        Ok(ConfigureResult { instance: self.current_status(view)?, required, not_durable })
    }

    pub(super) async fn call(
        &self,
        view: &InstanceView,
        tool: &str,
        arguments: Option<Box<RawValue>>,
        timeout: Option<Duration>,
    ) -> ActionResult<Box<RawValue>> {
        if arguments.as_ref().is_some_and(|arguments| !arguments.get().trim_start().starts_with('{')) {
            return Err(RequestFailure::new("bad_input", "the arguments of a tool must be a JSON object").into());
        }
        let result = self.runtime.call(&view.spec.id, tool, arguments, timeout).await;
        let result = result.map_err(|error| RequestFailure::from(error).with_next_step(&view.spec))?;
        RawValue::from_string(result.get().to_owned())
            .map_err(|error| RequestFailure::new("server_error", error.to_string()).into())
    }

    pub(super) async fn reload(&self, accept: bool) -> ActionResult<ReloadResult> {
        let (reply, answer) = oneshot::channel();
        let closing = || Box::new(RequestFailure::from(ControlError::Closing));
        self.reload.send(ReloadRequest { accept, reply }).await.map_err(|_| closing())?;
        let AcceptedReload { servers, teams, endpoint_problem, console_problem } =
            answer.await.map_err(|_| closing())?.map_err(|rejected| {
                let kind = if rejected.error_type == "invalid" { "bad_input" } else { "refused" };
                RequestFailure::new(kind, rejected.message)
            })?;
        Ok(ReloadResult { servers, teams, endpoint_problem, console_problem })
    }

    /// Returns the reason why the runtime's state is not stored. The runtime passes its state to the journal before it
    /// answers a command.
    async fn durability_error(&self) -> Option<String> {
        self.journal.flush_memos().await.err().map(|error| error.to_string())
    }

    /// Runs a command of the control socket and emits an event about it, also if the client disconnects.
    pub(super) async fn record_action<T>(
        &self,
        action: &str,
        view: Option<&InstanceView>,
        command: impl Future<Output = ActionResult<T>>,
    ) -> ActionResult<T> {
        let actor = Principal::owner(Entrance::Socket).as_actor();
        let target = view.map(|view| Arc::new(EventSubject::from(&*view.spec)));
        let record = |keys, problem: Option<&Problem>| {
            self.record_change(action, actor.clone(), target.clone(), keys, problem);
        };
        let open = OpenChange::new(record);
        let done = command.await;
        open.finish(Vec::new(), done.as_ref().err().map(|failure| Problem::from((**failure).clone())));
        done
    }

    /// Runs a command for an instance whole and emits an event about it.
    pub(super) async fn run_action<T, F>(
        self: Arc<Self>,
        action: &'static str,
        selector: &InstanceSelector,
        command: impl FnOnce(Arc<Self>, Arc<InstanceView>) -> F + Send + 'static,
    ) -> ActionResult<T>
    where
        T: Send + 'static,
        F: Future<Output = ActionResult<T>> + Send,
    {
        let resolved = self.resolve(selector);
        run_to_end(async move {
            let view = resolved.as_deref().ok();
            let command = async { command(Arc::clone(&self), resolved.clone()?).await };
            self.record_action(action, view, command).await
        })
        .await
    }
}

/// Returns the state of the exports; `None` if nothing is exported.
fn telemetry_status(exports: ExportStates) -> Option<TelemetryStatus> {
    let status = |state: ExportState| {
        let (since, last_error) = state.problem.map(|problem| (problem.since, problem.reason)).unzip();
        // A time that cannot be shown is before 1970 or far in the future.
        let since = since.and_then(|since| Timestamp::try_from(since).ok());
        ExportStatus { endpoint: state.endpoint, failing_since: since.map(rfc3339), last_error }
    };
    let ExportStates { traces, metrics, spans_exported, spans_dropped } = exports;
    let (traces, metrics) = (traces.map(status), metrics.map(status));
    let is_exported = traces.is_some() || metrics.is_some();
    is_exported.then_some(TelemetryStatus { traces, metrics, spans_exported, spans_dropped })
}

fn failure_of(error: ControlError, view: &InstanceView) -> Box<RequestFailure> {
    Box::new(RequestFailure::from(error).with_next_step(&view.spec))
}
