//! What instances have come to outlives the satellite: one ends, and the next one goes on.

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
use tokio::time::{Instant, sleep};

use crate::support::{Fleet, Server, exits, seconds, tenths};

/// What is kept beside the satellites, and the wall clock that they share.
#[derive(Clone)]
struct Kept {
    memos: Arc<Mutex<HashMap<InstanceId, StoredMemo>>>,
    tools: Arc<Mutex<HashMap<InstanceId, Arc<Catalogue>>>>,
    written: Arc<Mutex<Vec<InstanceId>>>,
    began: Instant,
    /// By how much the wall clock was set.
    off: Arc<Mutex<SignedDuration>>,
}

impl StateStore for Kept {
    fn save(&self, spec: &Arc<InstanceSpec>, memo: StoredMemo) {
        self.written.lock().unwrap().push(spec.id.clone());
        // As JSON, as a journal has it.
        let memo = serde_json::from_str(&serde_json::to_string(&memo).unwrap()).unwrap();
        self.memos.lock().unwrap().insert(spec.id.clone(), memo);
    }

    fn delete(&self, id: &InstanceId) {
        self.memos.lock().unwrap().remove(id);
    }
}

impl Kept {
    fn new() -> Self {
        Self {
            memos: Arc::default(),
            tools: Arc::default(),
            written: Arc::default(),
            began: Instant::now(),
            off: Arc::default(),
        }
    }

    fn memo(&self, id: &InstanceId) -> Option<StoredMemo> {
        self.memos.lock().unwrap().get(id).cloned()
    }

    fn written(&self) -> usize {
        self.written.lock().unwrap().len()
    }

    fn set_the_clock(&self, by: SignedDuration) {
        *self.off.lock().unwrap() += by;
    }

    async fn satellite(&self) -> Fleet {
        Fleet::with(|options| {
            options.state_store = Arc::new(self.clone());
            let kept = self.clone();
            options.wall = Arc::new(move || {
                let epoch: Timestamp = "2026-11-21T06:33:00Z".parse().unwrap();
                epoch + SignedDuration::try_from(kept.began.elapsed()).unwrap() + *kept.off.lock().unwrap()
            });
        })
        .await
    }

    /// Ends a satellite tidily, keeping the tools of what sleeps, as a host does.
    async fn end(&self, fleet: Fleet) {
        for view in fleet.runtime.snapshot().iter().filter(|view| view.dormant) {
            let tools = view.catalogue.clone().unwrap();
            self.tools.lock().unwrap().insert(view.spec.id.clone(), tools);
        }
        fleet.finish().await;
    }

    /// Installs an instance with what is known of it.
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
async fn one_that_failed_for_good_is_not_started_by_the_next_satellite_and_a_restart_undoes_it() {
    let kept = Kept::new();
    let first = kept.satellite().await;
    let id = kept.install(&first, crashing()).await;
    let message = first.until(&id, Status::PermanentlyFailed).await.message.clone();
    kept.end(first).await;

    let second = kept.satellite().await;
    kept.install(&second, Server::new("a")).await;
    sleep(seconds(3600.0)).await;
    let view = second.view(&id);
    assert_eq!((view.status, &view.message), (Status::PermanentlyFailed, &message));
    assert_eq!(second.world.openings(&id).len(), 0);
    let refused = second.call(&id, "echo", json!({})).await.unwrap_err().to_string();
    assert!(refused.contains("permanently_failed"), "{refused}");
    second.runtime.restart(&id).await.unwrap();
    second.until(&id, Status::Online).await;
    kept.end(second).await;

    let third = kept.satellite().await;
    kept.install(&third, Server::new("a")).await;
    third.until(&id, Status::Online).await;
    kept.end(third).await;
}

#[tokio::test(start_paused = true)]
async fn one_that_was_stopped_stays_down_until_it_is_started() {
    let kept = Kept::new();
    let first = kept.satellite().await;
    let id = kept.install(&first, Server::new("a")).await;
    first.until(&id, Status::Online).await;
    first.runtime.stop(&id).await.unwrap();
    kept.end(first).await;

    let second = kept.satellite().await;
    kept.install(&second, Server::new("a")).await;
    sleep(seconds(60.0)).await;
    let view = second.view(&id);
    assert_eq!((view.status, view.requested_state), (Status::Offline, RequestedState::Stopped));
    assert!(second.call(&id, "echo", json!({})).await.is_err());
    assert_eq!(second.world.openings(&id).len(), 0);
    second.runtime.start(&id).await.unwrap();
    second.until(&id, Status::Online).await;
    kept.end(second).await;
    assert!(!kept.memo(&id).unwrap().stopped);
}

#[tokio::test(start_paused = true)]
async fn one_that_slept_sleeps_on_with_its_tools_listed_and_a_call_wakes_it() {
    let kept = Kept::new();
    let first = kept.satellite().await;
    let id = kept.install(&first, Server::new("a")).await;
    first.until_view(&id, |view| view.dormant).await;
    sleep(seconds(40.0)).await;
    kept.end(first).await;

    sleep(seconds(60.0)).await;
    let second = kept.satellite().await;
    kept.install(&second, Server::new("a")).await;
    let view = second.until_view(&id, |view| view.dormant).await;
    assert_eq!((view.status, view.offered_catalogue().unwrap().tools.len()), (Status::Online, 3));
    sleep(seconds(1000.0)).await;
    assert_eq!(second.world.openings(&id).len(), 0);
    assert!(second.call(&id, "echo", json!({"text": "hello"})).await.is_ok());
    let respawned = second.told(&id, "mcp.server.respawned").await;
    assert_eq!(respawned[0]["dormant_duration_seconds"], 1100, "all of its sleep");
    sleep(seconds(1.0)).await;
    assert_eq!(second.told(&id, "mcp.tools.discovered").await.len(), 1, "what it has by now is read again");
    kept.end(second).await;
}

#[tokio::test(start_paused = true)]
async fn exits_count_on_within_their_window() {
    let kept = Kept::new();
    let first = kept.satellite().await;
    let id = kept.install(&first, crashing()).await;
    first.world.until_openings(&id, 2).await;
    kept.end(first).await;
    assert_eq!(kept.memo(&id).unwrap().exits.len(), 1);

    // The second one, and it fails for good with its second exit: the first was with another satellite.
    let second = kept.satellite().await;
    kept.install(&second, crashing()).await;
    second.until(&id, Status::PermanentlyFailed).await;
    assert_eq!(second.world.openings(&id).len(), 2);
    assert_eq!(second.world.gaps(&id), [6.0], "and the delays went on");
    kept.end(second).await;
}

#[tokio::test(start_paused = true)]
async fn what_was_left_of_a_delay_is_waited_for() {
    let kept = Kept::new();
    let first = kept.satellite().await;
    let id = kept.install(&first, crashing()).await;
    first.world.until_openings(&id, 2).await;
    first.until_view(&id, |view| view.next_retry_at.is_some()).await;
    kept.end(first).await;

    sleep(seconds(2.0)).await;
    let second = kept.satellite().await;
    let began = Instant::now();
    kept.install(&second, Server::new("a")).await;
    let view = second.until_view(&id, |view| view.next_retry_at.is_some()).await;
    assert_eq!(view.attempt, Some(2), "{view:?}");
    second.until(&id, Status::Online).await;
    assert_eq!(tenths(began.elapsed()), 3.0, "of five seconds");
    assert_eq!(second.told(&id, "mcp.server.started").await.len(), 1);
    kept.end(second).await;
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_was_set_changes_no_more_than_what_is_counted_by_it() {
    let decade = SignedDuration::from_hours(10 * 365 * 24);
    for by in [decade, -decade] {
        let kept = Kept::new();
        let first = kept.satellite().await;
        let mut ids = Vec::new();
        for (name, server) in [("failed", 1), ("stopped", 2), ("asleep", 3), ("crashed", 4)] {
            let script = match server {
                1 => exits(1.0, 1),
                4 => exits(100.0, 1),
                _ => SimScript::default(),
            };
            ids.push(kept.install(&first, Server::new(name).script(script)).await);
        }
        let [failed, stopped, asleep, crashed] = ids.try_into().unwrap();
        first.runtime.stop(&stopped).await.unwrap();
        first.until(&failed, Status::PermanentlyFailed).await;
        first.until_view(&asleep, |view| view.dormant).await;
        first.world.until_openings(&crashed, 2).await;
        kept.end(first).await;

        kept.set_the_clock(by);
        let second = kept.satellite().await;
        for name in ["failed", "stopped", "asleep", "crashed"] {
            kept.install(&second, Server::new(name)).await;
        }
        second.until(&failed, Status::PermanentlyFailed).await;
        second.until_view(&stopped, |view| view.requested_state == RequestedState::Stopped).await;
        second.until_view(&asleep, |view| view.dormant).await;
        let view = second.until(&crashed, Status::Online).await;
        let counted = view.exits_in_window(Instant::now().into_std());
        assert_eq!(counted, usize::from(by.is_negative()), "long ago, or as if it were now");
        assert!(second.call(&asleep, "echo", json!({"text": 1})).await.is_ok());
        kept.set_the_clock(-by);
        second.runtime.restart(&failed).await.unwrap();
        second.until(&failed, Status::Online).await;
        kept.end(second).await;
    }
}

#[tokio::test(start_paused = true)]
async fn only_changes_of_what_is_kept_are_written() {
    let kept = Kept::new();
    let fleet = kept.satellite().await;
    let id = kept.install(&fleet, Server::new("a").always_on()).await;
    fleet.until(&id, Status::Online).await;
    for _ in 0..100 {
        assert!(fleet.call(&id, "echo", json!({"text": 1})).await.is_ok());
    }
    sleep(seconds(3600.0)).await;
    assert_eq!(kept.written(), 0, "it came up and worked: nothing to remember");
    fleet.server(&id).exit(1);
    fleet.until_view(&id, |view| view.restarts == 1 && view.port.is_some()).await;
    let written = kept.written();
    assert!((1..=3).contains(&written), "the exit, the delay and its end: {written}");
    sleep(seconds(3600.0)).await;
    assert_eq!(kept.written(), written);
    fleet.runtime.panic(RuntimePart::Team(id.team.clone()));
    sleep(seconds(60.0)).await;
    kept.end(fleet).await;
    assert_eq!(kept.memo(&id).unwrap().exits.len(), 1, "the end of the satellite is no exit");
}

#[tokio::test(start_paused = true)]
async fn what_is_uninstalled_is_forgotten() {
    let kept = Kept::new();
    let fleet = kept.satellite().await;
    let id = kept.install(&fleet, Server::new("a")).await;
    fleet.runtime.stop(&id).await.unwrap();
    assert!(kept.memo(&id).unwrap().stopped);
    fleet.runtime.uninstall(&id).await.unwrap();
    assert_eq!(kept.memo(&id), None);
    kept.end(fleet).await;
}
