//! Receives heartbeats of satellites.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use rusqlite::params;

use super::BackendState;
use super::access::AuthenticatedSatellite;
use super::body::{self, LARGE_MAX};
use super::clock::timestamp_to_millis;
use super::instances;
use super::refusal::ApiError;
use super::schema::MessageSchema;
use crate::wire::{EmptyResponse, Heartbeat};

// Status of the last heartbeat before a satellite ends.
pub(super) const STOPPING: &str = "stopping";

pub(super) async fn receive(
    State(app): State<Arc<BackendState>>,
    AuthenticatedSatellite { id }: AuthenticatedSatellite,
    body: Body,
) -> Result<Json<EmptyResponse>, ApiError> {
    let heartbeat: Heartbeat = body::read_validated(body, LARGE_MAX, MessageSchema::Heartbeat).await?;
    let now = app.now();
    let changed = app.database.run(move |db| {
        db.execute(
            "UPDATE satellites SET heartbeat = ?2, heartbeat_at = ?3 WHERE id = ?1",
            params![id, serde_json::to_string(&heartbeat)?, timestamp_to_millis(now)],
        )?;
        let Some(names) = complete_instance_names(&heartbeat) else { return Ok(false) };
        instances::retain_listed(db, &id, &names, heartbeat.timestamp, now)
    });
    if changed.await? {
        app.notify_instances_changed();
    }
    Ok(Json(EmptyResponse { success: true }))
}

/// Returns the names of all instances, or `None` if the list may be incomplete: counts differ, events are pending, or
/// the satellite is stopping.
fn complete_instance_names(heartbeat: &Heartbeat) -> Option<BTreeSet<String>> {
    let names: BTreeSet<String> =
        heartbeat.processes_by_team.values().flatten().map(|process| process.instance.clone()).collect();
    let counted: usize = heartbeat.counts.values().fold(0, |sum, count| sum.saturating_add(*count));
    (counted == names.len() && heartbeat.events.backlog == 0 && heartbeat.status != STOPPING).then_some(names)
}
