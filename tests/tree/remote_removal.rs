//! Removal, shutdown and stop in each state of a remote instance.

use mcp_satellite::connect::sim::SimScript;
use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::policy::ReconnectPolicy;
use mcp_satellite_actors::model::status::Status;
use serde_json::json;
use testkit::fleet::{Fleet, LONG, Server, seconds};
use tokio::time::{Instant, sleep, timeout};

use crate::remote_support::{REFUSED, UNAUTHORIZED, lose_connection, until_attempting, until_reconnected, until_seen};

/// The states of a remote instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    AwaitingConfig,
    WaitingForPermit,
    FirstAttempt,
    Discovering,
    Connected,
    CallInFlight,
    CallBetweenAttempts,
    CheckInFlight,
    Degraded,
    Undiscovered,
    Reconnecting,
    ScheduledAttempt,
    AttemptForCall,
    Rediscovering,
    Exhausted,
    Reauth,
    Closing,
    Stopped,
}

const ALL: [State; 18] = [
    State::AwaitingConfig,
    State::WaitingForPermit,
    State::FirstAttempt,
    State::Discovering,
    State::Connected,
    State::CallInFlight,
    State::CallBetweenAttempts,
    State::CheckInFlight,
    State::Degraded,
    State::Undiscovered,
    State::Reconnecting,
    State::ScheduledAttempt,
    State::AttemptForCall,
    State::Rediscovering,
    State::Exhausted,
    State::Reauth,
    State::Closing,
    State::Stopped,
];

async fn bring_to(fleet: &Fleet, state: State) -> InstanceId {
    let server = Server::remote("a");
    let remote = fleet.remote(&server.spec.id);
    let silent = |method: &'static str| remote.change(|behavior| behavior.silent_on = [method].into());
    let call = |tool: &'static str| {
        let (runtime, id) = (fleet.runtime.clone(), server.spec.id.clone());
        tokio::spawn(async move {
            let answer = timeout(LONG, runtime.call(&id, tool, None, None)).await.unwrap();
            assert!(answer.is_err(), "{answer:?}");
        })
    };
    match state {
        State::AwaitingConfig => {
            let id = fleet.add(server.clone().missing("KEY")).await;
            fleet.until(&id, Status::AwaitingUserConfig).await;
        }
        State::WaitingForPermit => {
            let first = Server::remote_of("other", "first");
            fleet.remote(&first.spec.id).change(|behavior| behavior.silent_on = ["initialize"].into());
            fleet.add(first).await;
            let id = fleet.add(server.clone()).await;
            fleet.until(&id, Status::CommandReceived).await;
        }
        State::FirstAttempt => {
            silent("initialize");
            fleet.add(server.clone()).await;
            until_attempting(&remote).await;
        }
        State::Discovering => {
            silent("tools/list");
            let id = fleet.add(server.clone()).await;
            fleet.until(&id, Status::DiscoveringTools).await;
        }
        State::Undiscovered => {
            let unreadable = SimScript { list_error: true, ..SimScript::default() };
            let id = fleet.add(server.clone().script(unreadable)).await;
            fleet.until(&id, Status::Error).await;
        }
        State::Exhausted => {
            let bounded = ReconnectPolicy { jitter_percent: 0, ..ReconnectPolicy::bounded() };
            let server = server.clone().policy(|policy| policy.reconnect = bounded);
            let id = fleet.online(server).await;
            lose_connection(fleet, &id).await;
            fleet.until(&id, Status::Error).await;
        }
        _ => {
            let id = fleet.online(server.clone()).await;
            bring_online_to(fleet, &id, state, silent, call).await;
        }
    }
    server.spec.id
}

async fn bring_online_to(
    fleet: &Fleet,
    id: &InstanceId,
    state: State,
    silent: impl Fn(&'static str),
    call: impl Fn(&'static str) -> tokio::task::JoinHandle<()>,
) {
    let remote = fleet.remote(id);
    let received = |method: &'static str| until_seen(&remote, move |remote| !remote.received_at(method).is_empty());
    match state {
        State::CallInFlight => {
            silent("tools/call");
            call("echo");
            received("tools/call").await;
        }
        State::CallBetweenAttempts => {
            remote.take_down(REFUSED);
            call("echo");
            until_seen(&remote, |remote| remote.tried_at("tools/call").len() == 2).await;
        }
        State::CheckInFlight => {
            silent("ping");
            received("ping").await;
        }
        State::Degraded => {
            silent("ping");
            until_seen(&remote, |remote| remote.received_at("ping").len() == 4).await;
        }
        State::Reconnecting => lose_connection(fleet, id).await,
        State::ScheduledAttempt => {
            lose_connection(fleet, id).await;
            remote.bring_up();
            silent("initialize");
            until_attempting(&remote).await;
        }
        State::AttemptForCall => {
            lose_connection(fleet, id).await;
            remote.bring_up();
            silent("initialize");
            call("echo");
            until_attempting(&remote).await;
        }
        State::Rediscovering => {
            lose_connection(fleet, id).await;
            remote.bring_up();
            silent("tools/list");
            fleet.until(id, Status::DiscoveringTools).await;
        }
        State::Reauth => {
            remote.take_down(UNAUTHORIZED);
            assert!(fleet.call(id, "echo", json!({})).await.is_err());
            fleet.until(id, Status::RequiresReauth).await;
        }
        State::Closing => {
            silent("DELETE");
            fleet.runtime.restart(id).await.unwrap();
            received("DELETE").await;
        }
        State::Stopped => fleet.runtime.stop(id).await.unwrap(),
        State::Connected => {}
        _ => unreachable!("{state:?} is not reached from online"),
    }
}

/// Returns true if the satellite closes the session of an instance in this state with a request.
fn closes_session(state: State) -> bool {
    use State::{CallInFlight, CheckInFlight, Connected, Degraded, Discovering, Rediscovering, Undiscovered};
    let connected = [CallInFlight, CheckInFlight, Connected, Degraded, Discovering, Rediscovering, Undiscovered];
    connected.contains(&state)
}

async fn in_state(state: State) -> (Fleet, InstanceId) {
    // One permit makes the second instance wait for it.
    let fleet = Fleet::with(|options| {
        options.connect_permits = if state == State::WaitingForPermit { 1 } else { 64 };
    })
    .await;
    let id = bring_to(&fleet, state).await;
    (fleet, id)
}

#[tokio::test(start_paused = true)]
async fn a_removal_in_any_state_leaves_no_connection_and_no_session() {
    for state in ALL {
        let (fleet, id) = in_state(state).await;
        let remote = fleet.remote(&id);
        let began = Instant::now();
        fleet.runtime.uninstall(&id).await.unwrap();
        assert!(began.elapsed() <= seconds(2.1), "{state:?}: {:?}", began.elapsed());
        assert!(fleet.runtime.snapshot().get(&id).is_none(), "{state:?}");
        let others = usize::from(state == State::WaitingForPermit);
        assert_eq!(fleet.world.sim.line_count(), others, "{state:?}");
        let attempts = remote.attempts();
        assert!(attempts.iter().all(|attempt| attempt.ended.is_some()), "{state:?}: {attempts:?}");
        let tried_calls = remote.tried_at("tools/call").len();
        sleep(seconds(600.0)).await;
        assert_eq!(
            (remote.attempts().len(), remote.tried_at("tools/call").len()),
            (attempts.len(), tried_calls),
            "{state:?}"
        );
        assert_eq!(remote.sessions().open_count(), 0, "{state:?}: {:?}", remote.sessions());
        if closes_session(state) {
            assert_eq!(remote.sessions().dropped, 0, "{state:?}: {:?}", remote.sessions());
        }
        let last = fleet.event_data(&id, "mcp.server.disconnected").await;
        assert!(last.last().is_some_and(|event| event["was_intentional"] == true), "{state:?}");
        let gone = fleet.call(&id, "echo", json!({})).await;
        assert!(matches!(gone, Err(CallError::NotFound { .. })), "{state:?}");
        fleet.finish().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_in_any_state_ends_quickly_and_leaves_no_session() {
    for state in ALL {
        let (fleet, id) = in_state(state).await;
        let remote = fleet.remote(&id);
        let began = Instant::now();
        fleet.finish().await;
        assert!(began.elapsed() <= seconds(2.1), "{state:?}: {:?}", began.elapsed());
        assert_eq!(remote.sessions().open_count(), 0, "{state:?}: {:?}", remote.sessions());
        if closes_session(state) {
            assert_eq!(remote.sessions().dropped, 0, "{state:?}: {:?}", remote.sessions());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_stop_in_any_state_lasts_until_a_start() {
    for state in ALL {
        let (fleet, id) = in_state(state).await;
        let remote = fleet.remote(&id);
        fleet.runtime.stop(&id).await.unwrap();
        let attempts = remote.attempts().len();
        sleep(seconds(600.0)).await;
        let view = fleet.view(&id);
        // Without a required value the status stays the same.
        let down = if state == State::AwaitingConfig { Status::AwaitingUserConfig } else { Status::Offline };
        assert_eq!((view.status, view.next_retry_at), (down, None), "{state:?}");
        assert_eq!(remote.attempts().len(), attempts, "{state:?}");
        assert_eq!(remote.sessions().open_count(), 0, "{state:?}");
        remote.change(|behavior| {
            (behavior.down, behavior.silent_on, behavior.script) = (None, [].into(), Some(SimScript::default().into()));
        });
        let started = fleet.runtime.start(&id).await;
        if state != State::AwaitingConfig {
            started.unwrap();
            until_reconnected(&fleet, &id).await;
        }
        fleet.finish().await;
    }
}

#[tokio::test(start_paused = true)]
async fn unresponsive_servers_delay_a_shutdown_by_at_most_the_close_timeout() {
    let fleet = Fleet::start().await;
    for nth in 0..50 {
        let id = fleet.online(Server::remote(&format!("s{nth}"))).await;
        fleet.remote(&id).change(|behavior| behavior.silent_on = ["*"].into());
    }
    let began = Instant::now();
    fleet.finish().await;
    assert!(began.elapsed() <= seconds(2.1), "the sessions were not closed in parallel: {:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_waits_for_sessions_up_to_their_close_timeout() {
    let fleet = Fleet::start().await;
    let patient = Server::remote("a").policy(|policy| {
        (policy.remote.close_timeout, policy.session.terminate_grace) = (seconds(60.0), seconds(1.0));
    });
    let id = fleet.online(patient).await;
    let remote = fleet.remote(&id);
    remote.change(|behavior| behavior.delay = seconds(30.0));
    let began = Instant::now();
    // `finish` also checks that the shutdown was in time.
    fleet.finish().await;
    assert_eq!((began.elapsed().as_secs(), remote.sessions().closed), (30, 1));
}
