//! Health of the satellite: whether its actors answer, and the probes of service managers and load balancers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Extension;
use axum::http::{StatusCode, Uri, header};
use axum::response::IntoResponse as _;
use axum::routing::{MethodRouter, get};
use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_console::problem::Problem;
use mcp_satellite_console::routes::ApiServer as _;
use mcp_satellite_gateway::pages::PageConnection;

use super::requests::Api;
use super::state::ConsoleState;
use crate::journal::JournalState;

/// Time within which all actors must answer, and for which their answer is valid.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
const ANSWER_AGE_MAX: Duration = Duration::from_millis(250);

/// Asks the actors whether they answer. Several requests share one answer, so that they cost the actors nothing.
pub(super) struct ActorHealth {
    runtime: RuntimeHandle,
    last: tokio::sync::Mutex<Option<(Instant, bool)>>,
}

impl ActorHealth {
    pub(super) fn new(runtime: RuntimeHandle) -> Self {
        Self { runtime, last: tokio::sync::Mutex::default() }
    }

    /// Returns true if root, registry, batcher and all teams answer in time.
    pub(super) async fn answers(&self) -> bool {
        let mut last = self.last.lock().await;
        match *last {
            Some((at, answered)) if at.elapsed() < ANSWER_AGE_MAX => answered,
            _ => {
                let answered = self.runtime.answers(ANSWER_TIMEOUT).await;
                *last = Some((Instant::now(), answered));
                answered
            }
        }
    }
}

/// Probes without a token, which reveal no details.
#[derive(Debug, Clone, Copy)]
pub(super) enum Probe {
    Health,
    Readiness,
}

impl Probe {
    pub(super) fn route(self, console: &Api, health: &Arc<ActorHealth>) -> MethodRouter {
        let (console, health) = (console.clone(), health.clone());
        get(move |connection: Extension<PageConnection>, uri: Uri| {
            let (console, health) = (console.clone(), health.clone());
            async move {
                if !console.access().is_served(&connection) {
                    return Problem::not_found("path", uri.path()).into_response();
                }
                let holds = match self {
                    Self::Health => health.answers().await,
                    Self::Readiness => is_ready(&console, &health).await,
                };
                let (status, text) =
                    if holds { (StatusCode::OK, "ok\n") } else { (StatusCode::SERVICE_UNAVAILABLE, "unavailable\n") };
                (status, [(header::CACHE_CONTROL, "no-store")], text).into_response()
            }
        })
    }
}

/// Returns true if the actors answer, a configuration is applied, the endpoint is open, and events can be stored.
async fn is_ready(console: &ConsoleState, health: &ActorHealth) -> bool {
    let is_stored = console.journal.status().state == JournalState::Ok && !console.journal.is_hanging();
    let is_open = !console.endpoint.is_opening() && !console.http.ending.is_cancelled();
    is_stored && is_open && is_configured(console).await && health.answers().await
}

/// Returns false if the backend has not yet sent a configuration, or a change takes long.
async fn is_configured(console: &ConsoleState) -> bool {
    let applied = tokio::time::timeout(ANSWER_TIMEOUT, console.applied.lock()).await;
    applied.is_ok_and(|applied| applied.files.backend.is_none() || applied.document.is_some())
}
