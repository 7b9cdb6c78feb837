//! Periodic heartbeats to the backend.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use mcp_satellite_actors::model::snapshot::{InstanceView, Snapshot};
use tokio::time::Instant;

use super::contact::RequestPurpose;
use super::{LinkHost, LinkShared};
use crate::wire::{Heartbeat, HeartbeatInstance};
use mcp_satellite_files::disk::run_with_timeout;

// The last heartbeat must not delay the end of the satellite for longer.
const FINAL_HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(2);

pub(super) async fn run(link: &LinkShared, fleet: &dyn LinkHost) {
    loop {
        let key = link.wait_for_key().await;
        // Measured from the start of the request, so that slow responses do not reduce the rate.
        let next = Instant::now() + link.plan.heartbeat_interval;
        let body = build_heartbeat(link, fleet, "active").await;
        let answer = link.backend.send_heartbeat(&key, &body).await;
        link.record_response(RequestPurpose::Heartbeat, &key, &answer);
        tokio::select! {
            () = link.pause_until(next) => {}
            () = link.wait_for_new_key(&key) => {}
        }
    }
}

pub(super) async fn send_last(link: &LinkShared, fleet: &dyn LinkHost) {
    let Some(key) = link.key.borrow().clone().filter(|_| link.reachability.snapshot().connected) else { return };
    let send = async {
        let mut body = build_heartbeat(link, fleet, "stopping").await;
        // The processes have ended, but their supervisors can no longer report that.
        body.processes_by_team.values_mut().flatten().for_each(|process| process.pid = None);
        link.backend.send_heartbeat(&key, &body).await.map_err(|error| error.to_string())
    };
    let send = tokio::time::timeout(FINAL_HEARTBEAT_TIMEOUT, send).await;
    if let Err(why) = send.unwrap_or_else(|_| Err(format!("no answer within {FINAL_HEARTBEAT_TIMEOUT:?}"))) {
        tracing::warn!(why, "cannot report to the backend that the satellite is stopping");
    }
}

async fn build_heartbeat(link: &LinkShared, fleet: &dyn LinkHost, status: &str) -> Heartbeat {
    let metrics = link.metrics.clone();
    // The file system may hang; a heartbeat without metrics is better than none.
    let system = run_with_timeout(move || metrics.measure()).await.unwrap_or_default();
    let snapshot = fleet.runtime().snapshot();
    Heartbeat {
        status: status.to_owned(),
        timestamp: Timestamp::now(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        uptime_seconds: link.started.elapsed().as_secs(),
        system,
        counts: counts(&snapshot),
        processes_by_team: processes(&snapshot),
        tools: tools(&snapshot),
        events: fleet.event_progress(),
        config_hash: link.reachability.snapshot().config_hash,
    }
}

fn counts(snapshot: &Snapshot) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for view in snapshot.iter() {
        *counts.entry(view.status.to_string()).or_default() += 1;
    }
    counts
}

// Complete: the backend removes instances that are not listed.
fn processes(snapshot: &Snapshot) -> BTreeMap<String, Vec<HeartbeatInstance>> {
    let mut teams: BTreeMap<String, Vec<HeartbeatInstance>> = BTreeMap::new();
    for view in snapshot.iter() {
        let id = &view.spec.id;
        teams.entry(id.team.to_string()).or_default().push(HeartbeatInstance {
            instance: view.spec.name.to_string(),
            installation_id: id.installation.to_string(),
            user_id: id.user.to_string(),
            status: view.status.to_string(),
            pid: view.pid,
        });
    }
    teams
}

fn tools(snapshot: &Snapshot) -> BTreeMap<String, Vec<String>> {
    let named = |view: &InstanceView| {
        let catalogue = view.offered_catalogue()?;
        Some((view.spec.name.to_string(), catalogue.tools.iter().map(|tool| tool.name.to_string()).collect()))
    };
    snapshot.iter().filter_map(|view| named(view)).collect()
}
