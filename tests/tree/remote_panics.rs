//! Panics with remote servers: other instances are not affected, and retry schedules continue.

use mcp_satellite_actors::RuntimePart;
use mcp_satellite_actors::model::exit::{CallError, CallFate};
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::policy::ReconnectPolicy;
use mcp_satellite_actors::model::remote::ConnectionState;
use mcp_satellite_actors::model::status::Status;
use serde_json::json;
use testkit::fleet::{Fleet, Server, seconds, tenths};
use tokio::time::{Instant, sleep};

use crate::remote_support::{
    UNAUTHORIZED, event_lines_after_start, lose_connection, until_attempting, until_attempts, until_reconnected, waits,
};

fn team(name: &str) -> RuntimePart {
    RuntimePart::Team(name.into())
}

/// Waits until the given attempt of the schedule is next. Returns its time.
async fn until_next(fleet: &Fleet, id: &InstanceId, attempt: usize) -> std::time::Instant {
    until_attempts(&fleet.remote(id), attempt).await;
    fleet.until_view(id, |view| view.attempt == Some(attempt)).await.next_retry_at.unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_a_worker_loses_only_its_own_connection() {
    let fleet = Fleet::start().await;
    let (hurt, other) = (fleet.online(Server::remote("a")).await, fleet.online(Server::remote("b")).await);
    let (lost, ()) = futures::join!(fleet.call(&hurt, "sleep", json!({"ms": 5000})), async {
        sleep(seconds(1.0)).await;
        fleet.runtime.panic(RuntimePart::Worker(hurt.clone()));
    });
    assert!(matches!(lost, Err(CallError::Terminated { fate: CallFate::MaybeExecuted, .. })), "{lost:?}");
    let view = fleet.until(&hurt, Status::Error).await;
    let message = view.message.as_deref().unwrap();
    assert!(message.starts_with("worker panicked") && message.contains("asked to panic"), "{message}");
    until_reconnected(&fleet, &hurt).await;
    assert_eq!(fleet.remote(&hurt).sessions().opened, 2);
    assert_eq!((fleet.remote(&other).sessions().opened, fleet.view(&other).status), (1, Status::Online));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_reconnect_schedule_continues_after_a_panic_of_the_team() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    lose_connection(&fleet, &id).await;
    let next = until_next(&fleet, &id, 7).await;
    let message = fleet.view(&id).message.clone();
    fleet.runtime.panic(team("acme"));
    sleep(seconds(1.0)).await;
    let view = fleet.view(&id);
    assert_eq!((view.next_retry_at, view.attempt), (Some(next), Some(7)));
    assert_eq!((view.status, view.message.clone()), (Status::Offline, message));
    assert_eq!((view.connection, remote.attempts().len()), (Some(ConnectionState::Reconnecting), 7));
    until_attempts(&remote, 10).await;
    assert_eq!(waits(&remote)[6..], [64.0, 128.0, 180.0]);
    remote.bring_up();
    until_reconnected(&fleet, &id).await;
    assert!(fleet.view(&id).catalogue.is_some());
    assert_eq!(fleet.event_data(&id, "mcp.server.reconnected").await.len(), 1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn an_attempt_interrupted_by_a_panic_is_repeated_and_the_delays_continue() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    lose_connection(&fleet, &id).await;
    until_next(&fleet, &id, 6).await;
    remote.change(|behavior| behavior.connect_delay = seconds(5.0));
    until_attempting(&remote).await;
    fleet.runtime.panic(team("acme"));
    sleep(seconds(0.1)).await;
    assert_eq!(remote.overlaps(), 0);
    until_attempts(&remote, 8).await;
    let view = fleet.until_view(&id, |view| view.next_retry_at.is_some()).await;
    assert!(view.attempt.is_some_and(|attempt| attempt >= 6), "{:?}", view.attempt);
    remote.bring_up();
    until_reconnected(&fleet, &id).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_succeeds_although_a_panic_interrupts_its_connection_attempt() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    lose_connection(&fleet, &id).await;
    until_next(&fleet, &id, 8).await;
    remote.change(|behavior| (behavior.down, behavior.connect_delay) = (None, seconds(5.0)));
    let (answer, ()) = futures::join!(fleet.call(&id, "echo", json!({"text": "patient"})), async {
        until_attempting(&remote).await;
        fleet.runtime.panic(team("acme"));
    });
    assert_eq!(answer.unwrap()["structuredContent"]["text"], "patient");
    assert_eq!(remote.overlaps(), 0);
    until_reconnected(&fleet, &id).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_a_team_restores_its_servers_and_leaves_others_alone() {
    let fleet = Fleet::start().await;
    let other = fleet.online(Server::remote_of("other", "a")).await;
    let connected = fleet.online(Server::remote("connected")).await;
    let refused = fleet.online(Server::remote("refused")).await;
    fleet.remote(&refused).take_down(UNAUTHORIZED);
    assert!(fleet.call(&refused, "echo", json!({})).await.is_err());
    let blocked = fleet.until(&refused, Status::RequiresReauth).await.message.clone();
    let bounded = ReconnectPolicy { jitter_percent: 0, ..ReconnectPolicy::bounded() };
    let given_up = fleet.online(Server::remote("given-up").policy(|policy| policy.reconnect = bounded)).await;
    lose_connection(&fleet, &given_up).await;
    fleet.until(&given_up, Status::Error).await;
    let stopped = fleet.online(Server::remote("stopped")).await;
    fleet.runtime.stop(&stopped).await.unwrap();
    let counts = |id: &InstanceId| fleet.remote(id).attempts().len();
    let before = [&refused, &given_up, &stopped, &other].map(counts);

    fleet.runtime.panic(team("acme"));
    until_attempts(&fleet.remote(&connected), 2).await;
    until_reconnected(&fleet, &connected).await;
    sleep(seconds(3600.0)).await;
    assert_eq!([&refused, &given_up, &stopped, &other].map(counts), before, "no attempt was made for them");
    let view = fleet.view(&refused);
    assert_eq!((view.status, view.message.clone()), (Status::RequiresReauth, blocked));
    let view = fleet.view(&given_up);
    assert_eq!((view.status, view.connection), (Status::Error, Some(ConnectionState::Error)));
    assert_eq!(view.message.as_deref(), Some("Connection failed after max retries"));
    assert_eq!(fleet.view(&stopped).status, Status::Offline);
    assert_eq!(event_lines_after_start(&fleet, &other).await, Vec::<String>::new());
    for id in [&given_up, &refused] {
        fleet.remote(id).bring_up();
        assert!(fleet.runtime.reconnect(id).await.unwrap().success, "{id}");
    }
    let blocked = fleet.call(&stopped, "echo", json!({})).await;
    assert!(matches!(blocked, Err(CallError::Refused { .. })), "{blocked:?}");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn no_connect_permit_is_lost_when_a_supervisor_dies() {
    let fleet = Fleet::with(|options| options.connect_permits = 2).await;
    for name in ["a", "b", "c", "d"] {
        let server = Server::remote(name);
        fleet.remote(&server.spec.id).change(|behavior| behavior.silent_on = ["initialize"].into());
        fleet.add(server).await;
    }
    sleep(seconds(1.0)).await;
    fleet.runtime.panic(team("acme"));
    let began = Instant::now();
    let slow = Server::remote_of("other", "a");
    fleet.remote(&slow.spec.id).change(|behavior| behavior.connect_delay = seconds(0.5));
    let other = fleet.online(slow).await;
    assert!(tenths(began.elapsed()) <= 5.0, "{:?}", began.elapsed());
    assert!(fleet.call(&other, "echo", json!({})).await.is_ok());
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_the_registry_loses_no_connection_and_no_retry_schedule() {
    let fleet = Fleet::start().await;
    let there = fleet.online(Server::remote("a")).await;
    let away = fleet.online(Server::remote("b")).await;
    lose_connection(&fleet, &away).await;
    let next = until_next(&fleet, &away, 6).await;
    fleet.runtime.panic(RuntimePart::Registry);
    sleep(seconds(1.0)).await;
    let view = fleet.view(&away);
    assert_eq!((view.status, view.next_retry_at, view.attempt), (Status::Offline, Some(next), Some(6)));
    assert!(fleet.call(&there, "echo", json!({})).await.is_ok());
    fleet.remote(&away).bring_up();
    until_reconnected(&fleet, &away).await;
    assert_eq!((fleet.remote(&there).attempts().len(), fleet.remote(&away).overlaps()), (1, 0));
    fleet.finish().await;
}
