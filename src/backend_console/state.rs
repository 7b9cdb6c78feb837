//! State of the handlers.

use std::sync::Arc;

use axum::http::StatusCode;
use mcp_satellite_actors::byte_budget::ByteBudget;
use mcp_satellite_actors::model::event::{Event, EventSubject};
use mcp_satellite_backend::server::{ApiError, BackendHandle};
use mcp_satellite_console::access::ConsoleAccess;
use mcp_satellite_console::feed::{InstanceFeeds, StreamLimits};
use mcp_satellite_console::principal::Principal;
use mcp_satellite_console::problem::Problem;
use mcp_satellite_console::routes::{ApiServer, RequestContext};

use super::rows::{PublishedRows, ReportedRow, RowsReader};
use crate::console::refusals::RefusalCounts;

pub(super) struct BackendConsole {
    pub(super) access: ConsoleAccess,
    pub(super) backend: BackendHandle,
    pub(super) url: String,
    pub(super) rows: RowsReader,
    pub(super) feeds: InstanceFeeds<PublishedRows>,
    pub(super) streams: StreamLimits,
    pub(super) refusals: RefusalCounts,
    /// No change has a large body.
    pub(super) bodies: Arc<ByteBudget>,
}

pub(super) type Api = Arc<BackendConsole>;

impl ApiServer for BackendConsole {
    fn access(&self) -> &ConsoleAccess {
        &self.access
    }

    /// Logs a change: the events of a backend are those of its satellites.
    fn record(&self, event: Event) {
        self.refusals.count(event, log_action);
    }

    fn body_budget(&self) -> &Arc<ByteBudget> {
        &self.bodies
    }

    fn target(&self, _: &Principal, name: &str) -> Option<Arc<EventSubject>> {
        let found = self.rows.find(name)?;
        let state = &found.state;
        Some(Arc::new(EventSubject {
            installation_id: (&*state.installation_id).into(),
            team_id: (&*state.team_id).into(),
            user_id: (&*state.user_id).into(),
            process_id: found.row.name.clone(),
            server_slug: (&*state.server_slug).into(),
        }))
    }
}

fn log_action(event: Event) {
    if let Event::ControlAction { action, outcome, actor, target, reason, repeated, .. } = event {
        let (instance, address) = (target.as_ref().map(|target| &*target.process_id), actor.address);
        let (actor, via) = (actor.kind, actor.via);
        tracing::info!(action, ?outcome, actor, via, address, instance, reason, repeated, "control action");
    }
}

impl BackendConsole {
    pub(super) fn find(&self, context: &RequestContext) -> Result<Arc<ReportedRow>, Problem> {
        self.rows.check()?;
        let name = context.param("instance");
        self.rows.find(name).ok_or_else(|| Problem::not_found("instance", name))
    }
}

/// Returns the problem of a failed request to the backend's data.
pub(super) fn problem(error: &ApiError) -> Problem {
    let kind = match error.status() {
        StatusCode::NOT_FOUND => "not_found",
        StatusCode::BAD_REQUEST => "bad_input",
        StatusCode::TOO_MANY_REQUESTS => "busy",
        _ => "closing",
    };
    Problem::new(kind, error.message())
}
