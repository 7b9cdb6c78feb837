//! The state of instances outlives the satellite: one ends, and the next one continues.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use jiff::{SignedDuration, Timestamp};
use mcp_satellite::connect::sim::SimScript;
use mcp_satellite_actors::model::catalogue::Catalogue;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::memo::StoredMemo;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::slot::RequestedState;
use mcp_satellite_actors::seam::StateStore;
use mcp_satellite_actors::{EarlierState, InstallOutcome, RuntimePart};
use serde_json::json;
use testkit::fleet::{Fleet, Server, exits, seconds, tenths};
use tokio::time::{Instant, sleep};

/// A state store and a wall clock that several satellites share.
#[derive(Clone)]
pub(crate) struct SharedStore {
    memos: Arc<Mutex<HashMap<InstanceId, StoredMemo>>>,
    tools: Arc<Mutex<HashMap<InstanceId, Arc<Catalogue>>>>,
    saved: Arc<Mutex<Vec<InstanceId>>>,
    began: Instant,
    /// The sum of all changes of the wall clock.
    clock_offset: Arc<Mutex<SignedDuration>>,
}

impl StateStore for SharedStore {
    fn save(&self, spec: &Arc<InstanceSpec>, memo: StoredMemo) {
        self.saved.lock().unwrap().push(spec.id.clone());
        // Through JSON, as in the journal.
        let memo = serde_json::from_str(&serde_json::to_string(&memo).unwrap()).unwrap();
        self.memos.lock().unwrap().insert(spec.id.clone(), memo);
    }

    fn delete(&self, id: &InstanceId) {
        self.memos.lock().unwrap().remove(id);
    }
}

impl SharedStore {
    pub(crate) fn new() -> Self {
        Self {
            memos: Arc::default(),
            tools: Arc::default(),
            saved: Arc::default(),
            began: Instant::now(),
            clock_offset: Arc::default(),
        }
    }

    pub(crate) fn memo(&self, id: &InstanceId) -> Option<StoredMemo> {
        self.memos.lock().unwrap().get(id).cloned()
    }

    fn save_count(&self) -> usize {
        self.saved.lock().unwrap().len()
    }

    fn shift_clock(&self, by: SignedDuration) {
        *self.clock_offset.lock().unwrap() += by;
    }

    async fn satellite(&self) -> Fleet {
        Fleet::with(|options| {
            options.state_store = Arc::new(self.clone());
            let store = self.clone();
            options.wall = Arc::new(move || {
                let epoch: Timestamp = "2026-11-21T06:33:00Z".parse().unwrap();
                epoch + SignedDuration::try_from(store.began.elapsed()).unwrap() + *store.clock_offset.lock().unwrap()
            });
        })
        .await
    }

    /// Shuts a satellite down and keeps the tools of dormant instances, as a host does.
    async fn end(&self, fleet: Fleet) {
        for view in fleet.runtime.snapshot().iter().filter(|view| view.dormant) {
            let tools = view.catalogue.clone().unwrap();
            self.tools.lock().unwrap().insert(view.spec.id.clone(), tools);
        }
        fleet.finish().await;
    }

    /// Installs an instance with its stored state.
    async fn install(&self, fleet: &Fleet, server: Server) -> InstanceId {
        let id = server.spec.id.clone();
        fleet.world.plan(&server);
        let known = EarlierState { memo: self.memo(&id), catalogue: self.tools.lock().unwrap().get(&id).cloned() };
        assert_eq!(fleet.runtime.install_with_state(server.spec, known).await, Ok(InstallOutcome::New));
        id
    }
}

fn crashing() -> Server {
    Server::new("a").script(exits(1.0, 1))
}

#[tokio::test(start_paused = true)]
async fn a_permanent_failure_outlasts_the_satellite_until_a_restart_command() {
    let store = SharedStore::new();
    let first = store.satellite().await;
    let id = store.install(&first, crashing()).await;
    let message = first.until(&id, Status::PermanentlyFailed).await.message.clone();
    store.end(first).await;

    let second = store.satellite().await;
    store.install(&second, Server::new("a")).await;
    sleep(seconds(3600.0)).await;
    let view = second.view(&id);
    assert_eq!((view.status, &view.message), (Status::PermanentlyFailed, &message));
    assert_eq!(second.world.openings(&id).len(), 0);
    let refused = second.call(&id, "echo", json!({})).await.unwrap_err().to_string();
    assert!(refused.contains("permanently_failed"), "{refused}");
    second.runtime.restart(&id).await.unwrap();
    second.until(&id, Status::Online).await;
    store.end(second).await;

    let third = store.satellite().await;
    store.install(&third, Server::new("a")).await;
    third.until(&id, Status::Online).await;
    store.end(third).await;
}

#[tokio::test(start_paused = true)]
async fn a_stopped_instance_stays_stopped_in_the_next_satellite_until_started() {
    let store = SharedStore::new();
    let first = store.satellite().await;
    let id = store.install(&first, Server::new("a")).await;
    first.until(&id, Status::Online).await;
    first.runtime.stop(&id).await.unwrap();
    store.end(first).await;

    let second = store.satellite().await;
    store.install(&second, Server::new("a")).await;
    sleep(seconds(60.0)).await;
    let view = second.view(&id);
    assert_eq!((view.status, view.requested_state), (Status::Offline, RequestedState::Stopped));
    assert!(second.call(&id, "echo", json!({})).await.is_err());
    assert_eq!(second.world.openings(&id).len(), 0);
    second.runtime.start(&id).await.unwrap();
    second.until(&id, Status::Online).await;
    store.end(second).await;
    assert!(!store.memo(&id).unwrap().stopped);
}

#[tokio::test(start_paused = true)]
async fn a_dormant_instance_stays_dormant_in_the_next_satellite_until_called() {
    let store = SharedStore::new();
    let first = store.satellite().await;
    let id = store.install(&first, Server::new("a")).await;
    first.until_view(&id, |view| view.dormant).await;
    sleep(seconds(40.0)).await;
    store.end(first).await;

    sleep(seconds(60.0)).await;
    let second = store.satellite().await;
    store.install(&second, Server::new("a")).await;
    let view = second.until_view(&id, |view| view.dormant).await;
    assert_eq!((view.status, view.offered_catalogue().unwrap().tools.len()), (Status::Online, 3));
    sleep(seconds(1000.0)).await;
    assert_eq!(second.world.openings(&id).len(), 0);
    assert!(second.call(&id, "echo", json!({"text": "hello"})).await.is_ok());
    let respawned = second.event_data(&id, "mcp.server.respawned").await;
    assert_eq!(respawned[0]["dormant_duration_seconds"], 1100, "the dormancy under both satellites");
    sleep(seconds(1.0)).await;
    assert_eq!(second.event_data(&id, "mcp.tools.discovered").await.len(), 1, "its tools are read again");
    store.end(second).await;
}

#[tokio::test(start_paused = true)]
async fn exits_under_an_earlier_satellite_count_within_their_window() {
    let store = SharedStore::new();
    let first = store.satellite().await;
    let id = store.install(&first, crashing()).await;
    first.world.until_openings(&id, 2).await;
    store.end(first).await;
    assert_eq!(store.memo(&id).unwrap().exits.len(), 1);

    // The instance fails permanently at its second exit here: the first of three was under the other satellite.
    let second = store.satellite().await;
    store.install(&second, crashing()).await;
    second.until(&id, Status::PermanentlyFailed).await;
    assert_eq!(second.world.openings(&id).len(), 2);
    assert_eq!(second.world.gaps(&id), [6.0], "the delays continue");
    store.end(second).await;
}

#[tokio::test(start_paused = true)]
async fn the_next_satellite_waits_for_the_rest_of_a_restart_delay() {
    let store = SharedStore::new();
    let first = store.satellite().await;
    let id = store.install(&first, crashing()).await;
    first.world.until_openings(&id, 2).await;
    first.until_view(&id, |view| view.next_retry_at.is_some()).await;
    store.end(first).await;

    sleep(seconds(2.0)).await;
    let second = store.satellite().await;
    let began = Instant::now();
    store.install(&second, Server::new("a")).await;
    let view = second.until_view(&id, |view| view.next_retry_at.is_some()).await;
    assert_eq!(view.attempt, Some(2), "{view:?}");
    second.until(&id, Status::Online).await;
    assert_eq!(tenths(began.elapsed()), 3.0, "the rest of five seconds");
    assert_eq!(second.event_data(&id, "mcp.server.started").await.len(), 1);
    store.end(second).await;
}

#[tokio::test(start_paused = true)]
async fn a_wall_clock_change_affects_only_the_counted_exits() {
    let decade = SignedDuration::from_hours(10 * 365 * 24);
    for by in [decade, -decade] {
        let store = SharedStore::new();
        let first = store.satellite().await;
        let mut ids = Vec::new();
        for (name, server) in [("failed", 1), ("stopped", 2), ("asleep", 3), ("crashed", 4)] {
            let script = match server {
                1 => exits(1.0, 1),
                4 => exits(100.0, 1),
                _ => SimScript::default(),
            };
            ids.push(store.install(&first, Server::new(name).script(script)).await);
        }
        let [failed, stopped, asleep, crashed] = ids.try_into().unwrap();
        first.runtime.stop(&stopped).await.unwrap();
        first.until(&failed, Status::PermanentlyFailed).await;
        first.until_view(&asleep, |view| view.dormant).await;
        first.world.until_openings(&crashed, 2).await;
        store.end(first).await;

        store.shift_clock(by);
        let second = store.satellite().await;
        for name in ["failed", "stopped", "asleep", "crashed"] {
            store.install(&second, Server::new(name)).await;
        }
        second.until(&failed, Status::PermanentlyFailed).await;
        second.until_view(&stopped, |view| view.requested_state == RequestedState::Stopped).await;
        second.until_view(&asleep, |view| view.dormant).await;
        let view = second.until(&crashed, Status::Online).await;
        let counted = view.exits_in_window(Instant::now().into_std());
        assert_eq!(
            counted,
            usize::from(by.is_negative()),
            "a clock set forward ages the exit, one set back counts it as now"
        );
        assert!(second.call(&asleep, "echo", json!({"text": 1})).await.is_ok());
        store.shift_clock(-by);
        second.runtime.restart(&failed).await.unwrap();
        second.until(&failed, Status::Online).await;
        store.end(second).await;
    }
}

#[tokio::test(start_paused = true)]
async fn only_changes_of_the_memo_are_saved() {
    let store = SharedStore::new();
    let fleet = store.satellite().await;
    let id = store.install(&fleet, Server::new("a").always_on()).await;
    fleet.until(&id, Status::Online).await;
    for _ in 0..100 {
        assert!(fleet.call(&id, "echo", json!({"text": 1})).await.is_ok());
    }
    sleep(seconds(3600.0)).await;
    assert_eq!(store.save_count(), 0, "a run without a failure saves nothing");
    fleet.server(&id).exit(1);
    fleet.until_view(&id, |view| view.restarts == 1 && view.port.is_some()).await;
    let save_count = store.save_count();
    assert!((1..=3).contains(&save_count), "the exit, the delay and its end: {save_count}");
    sleep(seconds(3600.0)).await;
    assert_eq!(store.save_count(), save_count);
    fleet.runtime.panic(RuntimePart::Team(id.team.clone()));
    sleep(seconds(60.0)).await;
    store.end(fleet).await;
    assert_eq!(store.memo(&id).unwrap().exits.len(), 1, "the end of the satellite does not count as an exit");
}

#[tokio::test(start_paused = true)]
async fn an_uninstall_deletes_the_memo() {
    let store = SharedStore::new();
    let fleet = store.satellite().await;
    let id = store.install(&fleet, Server::new("a")).await;
    fleet.runtime.stop(&id).await.unwrap();
    assert!(store.memo(&id).unwrap().stopped);
    fleet.runtime.uninstall(&id).await.unwrap();
    assert_eq!(store.memo(&id), None);
    store.end(fleet).await;
}
