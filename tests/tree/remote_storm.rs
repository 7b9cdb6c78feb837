//! A thousand remote instances of one server that dies and returns.

use std::collections::BTreeMap;

use futures::future::join_all;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::policy::ReconnectPolicy;
use mcp_satellite_actors::model::status::Status;
use serde_json::json;
use testkit::fleet::{Fleet, LONG, Server, seconds};
use tokio::time::{Instant, sleep};

use crate::remote_support::REFUSED;

const INSTANCES: usize = 1000;
const PERMITS: usize = 64;

/// Starts a fleet whose queue holds all events of a storm.
async fn fleet() -> Fleet {
    Fleet::with(|options| options.batch.queue_max = 1_000_000).await
}

/// Installs a thousand instances in ten teams and waits until they are online.
async fn thousand_online(fleet: &Fleet) -> Vec<InstanceId> {
    let adding = (0..INSTANCES).map(|nth| {
        let server = Server::remote_of(&format!("team{}", nth % 10), &format!("s{nth}"))
            .policy(|policy| policy.reconnect = ReconnectPolicy::persistent());
        fleet.remote(&server.spec.id).change(|behavior| {
            (behavior.connect_delay, behavior.jitter, behavior.seed) = (seconds(0.1), 0.5, nth as u64);
        });
        fleet.add(server)
    });
    let ids = join_all(adding).await;
    until_all_online(fleet).await;
    ids
}

async fn until_all_online(fleet: &Fleet) {
    let mut watch = fleet.runtime.watch();
    let all = watch.wait_for(|snapshot| snapshot.iter().all(|view| view.status == Status::Online));
    assert!(tokio::time::timeout(LONG, all).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_thousand_instances_reconnect_with_one_attempt_each_spread_over_time() {
    let fleet = fleet().await;
    let ids = thousand_online(&fleet).await;
    assert_eq!(fleet.world.sim.handshakes_max(), PERMITS, "as many handshakes at once as permits");
    for id in &ids {
        fleet.remote(id).kill(REFUSED);
        fleet.remote(id).report_session_lost(REFUSED);
    }
    let died = Instant::now();
    sleep(seconds(600.0)).await;
    for id in &ids {
        fleet.remote(id).bring_up();
    }
    let returned = Instant::now();
    until_all_online(&fleet).await;
    let took = returned.elapsed();
    assert!(took <= seconds(200.0), "longer than the longest delay and the wait for a permit: {took:?}");

    let mut by_second = BTreeMap::<u64, usize>::new();
    let (mut attempts_of_each, mut overlaps) = (Vec::new(), 0);
    for id in &ids {
        let remote = fleet.remote(id);
        overlaps += remote.overlaps();
        let attempts = remote.attempts();
        attempts_of_each.push(attempts.len());
        for attempt in attempts.iter().filter(|attempt| attempt.began >= returned) {
            *by_second.entry((attempt.began - returned).as_secs()).or_default() += 1;
        }
        assert_eq!(remote.sessions().open_count(), 1, "{id}");
        assert!(attempts[1].began - died >= seconds(0.9), "the first attempt came too early");
    }
    assert_eq!(overlaps, 0);
    assert_eq!(by_second.values().sum::<usize>(), INSTANCES, "one attempt each");
    // Jitter spreads the tenth attempt over 36 s; without it, all instances would come in the same second.
    let busiest = by_second.values().max().copied().unwrap_or_default();
    assert!(busiest < INSTANCES / 8 && by_second.len() >= 20, "{by_second:?}");
    assert!(attempts_of_each.iter().all(|attempts| (10..=13).contains(attempts)), "{attempts_of_each:?}");
    assert_eq!(fleet.world.sim.handshakes_max(), PERMITS);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn calls_of_a_thousand_disconnected_instances_succeed_as_permits_allow() {
    let fleet = fleet().await;
    let ids = thousand_online(&fleet).await;
    for id in &ids {
        fleet.remote(id).kill(REFUSED);
        fleet.remote(id).report_session_lost(REFUSED);
    }
    sleep(seconds(600.0)).await;
    let waiting: Vec<usize> = ids.iter().map(|id| fleet.remote(id).attempts().len()).collect();
    for id in &ids {
        fleet.remote(id).bring_up();
    }
    let began = Instant::now();
    let calls = ids.iter().flat_map(|id| (0..2).map(|_| fleet.call(id, "echo", json!({"text": 1}))));
    let answers = join_all(calls).await;
    assert!(answers.iter().all(Result::is_ok));
    // A thousand handshakes of 0.1 s, 64 at a time, take about 1.6 s.
    assert!(began.elapsed() < seconds(5.0), "{:?}", began.elapsed());
    until_all_online(&fleet).await;
    for (id, before) in ids.iter().zip(waiting) {
        let remote = fleet.remote(id);
        let made = remote.attempts().len() - before;
        assert_eq!((made, remote.overlaps()), (1, 0), "{id}");
    }
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_thousand_instances_reconnected_and_removed_at_once_leave_nothing() {
    let fleet = fleet().await;
    let ids = thousand_online(&fleet).await;
    for (nth, id) in ids.iter().enumerate() {
        if nth % 2 == 0 {
            fleet.remote(id).kill(REFUSED);
            fleet.remote(id).report_session_lost(REFUSED);
        }
    }
    let outcomes = join_all(ids.iter().map(|id| fleet.runtime.reconnect(id)));
    let removed = join_all(ids.iter().map(|id| fleet.runtime.uninstall(id)));
    let (outcomes, removed) = futures::join!(outcomes, removed);
    assert!(removed.iter().all(Result::is_ok));
    assert_eq!(outcomes.len(), INSTANCES, "every reconnect request returns");
    assert_eq!((fleet.runtime.snapshot().len(), fleet.world.sim.line_count()), (0, 0));
    fleet.finish().await;
}
