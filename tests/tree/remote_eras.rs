//! Remote servers of either era or of both, and their replacement by another server behind the same address.

use std::sync::Arc;

use mcp_satellite::connect::sim::{SimRemote, SimScript, SpokenEras};
use mcp_satellite_actors::ClientRelay;
use mcp_satellite_actors::audience::CallOrigin;
use mcp_satellite_actors::model::era::Era;
use mcp_satellite_actors::model::exit::{CallError, CallFate};
use mcp_satellite_actors::model::failure::FailureKind;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::remote::ServerHealth;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rpc::RpcMessage;
use serde_json::{Value, json};
use testkit::fleet::{Fleet, Server, seconds};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

use crate::remote_support::{
    INTERNAL_ERROR, REFUSED, UNAUTHORIZED, event_lines_after_start, until_reconnected, until_seen,
};

const METHODS: [&str; 5] =
    ["initialize", "notifications/initialized", "server/discover", "tools/list", "subscriptions/listen"];

fn script(speaks: SpokenEras) -> SimScript {
    SimScript { speaks, ..SimScript::default() }
}

/// Returns how often each of `METHODS` was sent.
fn opening_counts(remote: &SimRemote) -> [usize; 5] {
    METHODS.map(|method| remote.tried_at(method).len())
}

fn era(fleet: &Fleet, id: &InstanceId) -> Era {
    fleet.view(id).server.as_ref().unwrap().era
}

/// Replaces the server by another one, which does not know the old sessions.
fn replace_server(remote: &SimRemote, script: SimScript) {
    remote.change(|behavior| behavior.script = Some(Arc::new(script)));
    remote.expire(404);
    remote.cut();
}

/// Sends a call as a client of the stateless era.
async fn relay_stateless(fleet: &Fleet, id: &InstanceId, tool: &str) -> Result<Value, CallError> {
    let meta = json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {"elicitation": {}},
    });
    let params = json!({"name": tool, "arguments": {"text": "hi"}, "_meta": meta});
    let message = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).to_string();
    let message = RpcMessage::parse(message.into()).unwrap();
    let origin = CallOrigin { client: 1, call: 1 };
    let relay = ClientRelay {
        message,
        origin,
        repeatable: false,
        tool: Some(tool.into()),
        era: Era::Stateless,
        client: None,
        trace: None,
    };
    let (_withdraw, withdrawn) = oneshot::channel();
    let answer = fleet.runtime.relay(id, relay, None, withdrawn).await?.unwrap();
    Ok(serde_json::from_str(answer.text()).unwrap())
}

#[tokio::test(start_paused = true)]
async fn each_server_is_opened_in_its_era_with_the_fewest_messages() {
    let fleet = Fleet::start().await;
    for (speaks, expected, messages) in [
        (SpokenEras::Sessions, Era::Sessions, [1, 1, 0, 1, 0]),
        (SpokenEras::Both, Era::Sessions, [1, 1, 0, 1, 0]),
        (SpokenEras::Stateless, Era::Stateless, [1, 0, 1, 1, 1]),
    ] {
        let id = fleet.online(Server::remote(&format!("{speaks:?}").to_lowercase()).script(script(speaks))).await;
        assert_eq!(era(&fleet, &id), expected, "{speaks:?}");
        assert_eq!(opening_counts(&fleet.remote(&id)), messages, "{speaks:?}");
        let answer = fleet.call(&id, "echo", json!({"text": "hi"})).await.unwrap();
        assert_eq!(answer["content"][0]["text"], "\"hi\"");
        assert_eq!(fleet.view(&id).health, ServerHealth::Healthy);
    }
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_upgraded_to_the_stateless_era_is_detected_by_a_repeatable_call() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a").script(script(SpokenEras::Sessions))).await;
    let remote = fleet.remote(&id);
    replace_server(&remote, script(SpokenEras::Stateless));
    // `add` is idempotent: a call that may have been executed is repeated.
    assert_eq!(fleet.call(&id, "add", json!({"a": 1, "b": 2})).await.unwrap()["structuredContent"]["result"], 3);
    until_reconnected(&fleet, &id).await;
    assert_eq!(era(&fleet, &id), Era::Stateless);
    assert_eq!(opening_counts(&remote), [2, 1, 1, 2, 1]);
    let event_lines = event_lines_after_start(&fleet, &id).await;
    assert!(!event_lines.iter().any(|line| line.starts_with("error")), "{event_lines:?}");

    // Back to sessions.
    replace_server(&remote, script(SpokenEras::Sessions));
    assert!(fleet.call(&id, "add", json!({"a": 1, "b": 2})).await.is_err(), "the caller gets the error");
    fleet.until_view(&id, |view| view.server.as_ref().is_some_and(|server| server.era == Era::Sessions)).await;
    until_reconnected(&fleet, &id).await;
    assert_eq!(fleet.call(&id, "add", json!({"a": 1, "b": 2})).await.unwrap()["structuredContent"]["result"], 3);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn the_next_connection_begins_in_the_known_era() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a").script(script(SpokenEras::Stateless))).await;
    let remote = fleet.remote(&id);
    fleet.runtime.reconnect(&id).await.unwrap();
    until_reconnected(&fleet, &id).await;
    assert_eq!(opening_counts(&remote), [1, 0, 2, 2, 2]);
    // There is no session to close or to ping.
    assert_eq!(remote.received_at("DELETE").len() + remote.received_at("ping").len(), 0);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn an_unanswered_server_discover_is_followed_by_initialize() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a").script(script(SpokenEras::Stateless))).await;
    let remote = fleet.remote(&id);
    remote.change(|behavior| {
        behavior.script = Some(Arc::new(script(SpokenEras::Both)));
        behavior.silent_on = ["server/discover"].into();
    });
    let began = Instant::now();
    fleet.runtime.reconnect(&id).await.unwrap();
    until_reconnected(&fleet, &id).await;
    assert_eq!((began.elapsed(), era(&fleet, &id)), (seconds(15.0), Era::Sessions));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_failure_without_a_session_sets_the_status_by_its_kind() {
    let fleet = Fleet::start().await;
    let table = [
        (REFUSED, Status::Offline),
        (FailureKind::Dns, Status::Offline),
        (UNAUTHORIZED, Status::RequiresReauth),
        (FailureKind::Redirected { status: 307, to: None }, Status::Error),
        (FailureKind::from_status(418), Status::Error),
        // A check follows and finds the server.
        (FailureKind::Cut, Status::Online),
        (FailureKind::from_status(404), Status::Online),
        (FailureKind::from_status(400), Status::Online),
        (FailureKind::Throttled { retry_after: None }, Status::Online),
        (INTERNAL_ERROR, Status::Online),
    ];
    for (nth, (kind, status)) in table.into_iter().enumerate() {
        let id = fleet.online(Server::remote(&format!("a{nth}")).script(script(SpokenEras::Stateless))).await;
        let remote = fleet.remote(&id);
        if status == Status::Offline {
            remote.take_down(kind.clone());
        } else {
            remote.fail_next([kind.clone()]);
        }
        let called = fleet.call(&id, "echo", json!({"text": 1})).await;
        assert!(called.is_err(), "{kind}");
        sleep(seconds(0.1)).await;
        assert_eq!(fleet.view(&id).status, status, "{kind}");
        fleet.runtime.uninstall(&id).await.unwrap();
    }
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn health_checks_of_a_stateless_server_use_server_discover() {
    let fleet = Fleet::start().await;
    let server = Server::remote("a").script(script(SpokenEras::Stateless));
    let id = fleet.online(server.policy(|policy| policy.health.interval = seconds(100.0))).await;
    let remote = fleet.remote(&id);
    until_seen(&remote, |remote| remote.served_at("server/discover").len() == 4).await;
    remote.change(|behavior| behavior.silent_on = ["server/discover"].into());
    fleet.until_view(&id, |view| view.health == ServerHealth::Degraded).await;
    remote.change(|behavior| behavior.silent_on.clear());
    fleet.until_view(&id, |view| view.health == ServerHealth::Healthy).await;
    assert_eq!(fleet.view(&id).status, Status::Online);
    // A server that does not know `server/discover` any more has changed its era.
    remote.change(|behavior| {
        behavior.script = Some(Arc::new(script(SpokenEras::Sessions)));
        behavior.unknown_methods = ["server/discover"].into();
    });
    fleet.until_view(&id, |view| view.server.as_ref().is_some_and(|server| server.era == Era::Sessions)).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_lost_subscription_stream_does_not_take_the_server_offline() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a").script(script(SpokenEras::Stateless))).await;
    let remote = fleet.remote(&id);
    until_seen(&remote, |remote| remote.served_at("subscriptions/listen").len() == 1).await;
    let checks = remote.served_at("server/discover").len();
    remote.cut();
    until_seen(&remote, |remote| remote.served_at("subscriptions/listen").len() == 2).await;
    assert_eq!(fleet.view(&id).status, Status::Online);
    assert_eq!(remote.served_at("server/discover").len(), checks + 1, "a check followed the loss of the stream");
    until_seen(&remote, |remote| remote.served_at("tools/list").len() == 2).await;
    // The same check detects a server that is down.
    remote.kill(REFUSED);
    fleet.until_view(&id, |view| view.health == ServerHealth::Degraded || view.status == Status::Offline).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_change_on_the_subscription_stream_updates_the_catalogue() {
    let fleet = Fleet::start().await;
    let changing = SimScript { list_changed_after: Some(seconds(50.0)), ..script(SpokenEras::Stateless) };
    let id = fleet.online(Server::remote("a").script(changing)).await;
    let view = fleet.until_view(&id, |view| view.catalogue.as_ref().is_some_and(|all| all.tools.len() == 4)).await;
    assert_eq!(view.status, Status::Online);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_of_both_eras_serves_clients_of_both_over_one_connection() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a").script(script(SpokenEras::Both))).await;
    let remote = fleet.remote(&id);
    let limit = seconds(5.0);
    let (one, other) = tokio::join!(fleet.runtime.discover(&id, limit), fleet.runtime.discover(&id, limit));
    let info = one.unwrap().unwrap();
    assert_eq!(info.era, Era::Stateless);
    assert!(Arc::ptr_eq(&info, &other.unwrap().unwrap()));
    fleet.runtime.discover(&id, limit).await.unwrap().unwrap();
    assert_eq!(remote.received_at("server/discover").len(), 1, "one request for both callers");

    assert_eq!(relay_stateless(&fleet, &id, "echo").await.unwrap()["result"]["content"][0]["text"], "\"hi\"");
    let asked = relay_stateless(&fleet, &id, "ask").await.unwrap();
    assert_eq!(asked["result"]["resultType"], "input_required", "the client handles the input request");
    assert_eq!(fleet.call(&id, "echo", json!({"text": "ho"})).await.unwrap()["content"][0]["text"], "\"ho\"");
    // Failures of stateless requests do not affect the session.
    for kind in
        [FailureKind::from_status(404), FailureKind::from_status(418), FailureKind::NotMcp { content_type: None }]
    {
        remote.fail_next([kind]);
        assert!(relay_stateless(&fleet, &id, "echo").await.is_err());
        assert_eq!(fleet.view(&id).status, Status::Online);
    }
    assert_eq!(remote.sessions().opened, 1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_without_the_stateless_era_gets_one_server_discover() {
    let fleet = Fleet::start().await;
    let limit = seconds(5.0);
    let id = fleet.online(Server::remote("a").script(script(SpokenEras::Sessions))).await;
    for _ in 0..3 {
        assert!(fleet.runtime.discover(&id, limit).await.unwrap().is_none());
    }
    assert_eq!(fleet.remote(&id).received_at("server/discover").len(), 1);
    // After two seconds without a response the server counts as one that does not know the method.
    let id = fleet.online(Server::remote("b").script(script(SpokenEras::Both))).await;
    fleet.remote(&id).change(|behavior| behavior.silent_on = ["server/discover"].into());
    let began = Instant::now();
    assert!(fleet.runtime.discover(&id, limit).await.unwrap().is_none());
    assert_eq!(began.elapsed(), seconds(2.0));
    assert!(fleet.runtime.discover(&id, limit).await.unwrap().is_none());
    sleep(seconds(60.0)).await;
    fleet.remote(&id).change(|behavior| behavior.silent_on.clear());
    assert!(fleet.runtime.discover(&id, limit).await.unwrap().is_some(), "a timeout is forgotten after a minute");
    // Failures are forgotten, too; a throttled request returns an error instead.
    let id = fleet.online(Server::remote("c").script(script(SpokenEras::Both))).await;
    fleet.remote(&id).fail_next([FailureKind::Throttled { retry_after: None }, INTERNAL_ERROR]);
    assert!(fleet.runtime.discover(&id, limit).await.is_err());
    assert!(fleet.runtime.discover(&id, limit).await.unwrap().is_none());
    sleep(seconds(60.0)).await;
    assert!(fleet.runtime.discover(&id, limit).await.unwrap().is_some());
    assert_eq!(fleet.view(&id).status, Status::Online);
    // The SSE transport has only sessions.
    let id = fleet.online(Server::remote("d").sse().script(script(SpokenEras::Both))).await;
    assert!(fleet.runtime.discover(&id, limit).await.unwrap().is_none());
    assert_eq!(fleet.remote(&id).received_at("server/discover").len(), 0);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_configured_for_sessions_gets_no_server_discover() {
    let fleet = Fleet::start().await;
    let server = Server::remote("a").script(script(SpokenEras::Both));
    let id = fleet.online(server.policy(|policy| policy.session.protocol = Some(Era::Sessions))).await;
    assert!(fleet.runtime.discover(&id, seconds(5.0)).await.unwrap().is_none());
    assert_eq!(fleet.remote(&id).tried_at("server/discover").len(), 0);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_stateless_client_adds_a_subscription_stream_beside_the_session() {
    let fleet = Fleet::start().await;
    let changing = SimScript { list_changed_after: Some(seconds(50.0)), ..script(SpokenEras::Both) };
    let id = fleet.online(Server::remote("a").script(changing)).await;
    let remote = fleet.remote(&id);
    sleep(seconds(20.0)).await;
    assert_eq!(remote.served_at("subscriptions/listen").len(), 0, "no stateless client needs the stream");
    fleet.runtime.discover(&id, seconds(5.0)).await.unwrap().unwrap();
    until_seen(&remote, |remote| remote.served_at("subscriptions/listen").len() == 1).await;
    let lists = remote.served_at("tools/list").len();
    // The session announces the change at 50 s; the stream, which was opened 20 s later, at 70 s.
    until_seen(&remote, |remote| remote.served_at("tools/list").len() == lists + 2).await;
    remote.cut();
    until_seen(&remote, |remote| remote.served_at("subscriptions/listen").len() == 2).await;
    assert_eq!((remote.sessions().opened, fleet.view(&id).status), (1, Status::Online));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_truncated_response_fails_only_its_own_call() {
    let fleet = Fleet::start().await;
    for speaks in [SpokenEras::Stateless, SpokenEras::Both] {
        let id = fleet.online(Server::remote(&format!("{speaks:?}").to_lowercase()).script(script(speaks))).await;
        let remote = fleet.remote(&id);
        fleet.runtime.discover(&id, seconds(5.0)).await.unwrap().unwrap();
        let slow = fleet.call(&id, "echo", json!({"text": "slow", "after_ms": 3000}));
        let cut = async {
            until_seen(&remote, |remote| remote.served_at("tools/call echo").len() == 1).await;
            remote.fail_next([FailureKind::Cut]);
            let error = relay_stateless(&fleet, &id, "echo").await.unwrap_err();
            assert_eq!(error.fate(), Some(CallFate::MaybeExecuted), "{error}");
            for _ in 0..3 {
                remote.fail_next([INTERNAL_ERROR]);
                assert!(relay_stateless(&fleet, &id, "echo").await.is_err());
                if speaks == SpokenEras::Stateless {
                    break;
                }
            }
        };
        let (answer, ()) = tokio::join!(slow, cut);
        assert_eq!(answer.unwrap()["content"][0]["text"], "\"slow\"");
        assert_eq!(fleet.view(&id).status, Status::Online, "{speaks:?}");
    }
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn error_codes_of_the_other_era_reach_the_caller_as_server_errors() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a").script(script(SpokenEras::Sessions))).await;
    for code in [-32020, -32021, -32022] {
        let error = fleet.call(&id, "fail", json!({"code": code, "message": "done"})).await.unwrap_err();
        assert!(matches!(error, CallError::Server { code: received, .. } if received == code), "{error}");
    }
    sleep(seconds(1.0)).await;
    let remote = fleet.remote(&id);
    assert_eq!(remote.served_at("tools/call fail").len(), 3, "each call was sent once");
    assert_eq!((remote.sessions().opened, fleet.view(&id).status), (1, Status::Online));
    assert!(!remote.served_at("ping").is_empty(), "a ping checked that the session still exists");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn the_end_of_stateless_support_is_detected_by_the_next_stateless_call() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a").script(script(SpokenEras::Both))).await;
    let remote = fleet.remote(&id);
    fleet.runtime.discover(&id, seconds(5.0)).await.unwrap().unwrap();
    remote.change(|behavior| behavior.script = Some(Arc::new(script(SpokenEras::Sessions))));
    assert!(relay_stateless(&fleet, &id, "echo").await.is_err());
    assert!(fleet.runtime.discover(&id, seconds(5.0)).await.unwrap().is_none());
    assert_eq!((remote.sessions().opened, fleet.view(&id).status), (1, Status::Online));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn child_processes_are_opened_in_their_era() {
    let fleet = Fleet::start().await;
    for (speaks, expected) in [
        (SpokenEras::Sessions, Era::Sessions),
        (SpokenEras::Both, Era::Sessions),
        (SpokenEras::Stateless, Era::Stateless),
    ] {
        let name = format!("{speaks:?}").to_lowercase();
        let id = fleet.online(Server::new(&name).script(script(speaks)).always_on()).await;
        assert_eq!(era(&fleet, &id), expected);
        let sum = fleet.call(&id, "add", json!({"a": 1, "b": 2})).await.unwrap();
        assert_eq!(sum["structuredContent"]["result"], 3);
        let known = fleet.runtime.discover(&id, seconds(5.0)).await.unwrap();
        assert_eq!(known.is_some(), expected == Era::Stateless);
    }
    // A server that exits after a message of the wrong era is started again and opened in its own era.
    let ending = SimScript { exit_on_refusal: true, exit_code: 1, ..script(SpokenEras::Stateless) };
    let id = fleet.online(Server::new("ending").script(ending).always_on()).await;
    assert_eq!((fleet.world.openings(&id).len(), fleet.view(&id).restarts), (2, 1));
    fleet.runtime.restart(&id).await.unwrap();
    fleet.world.until_openings(&id, 3).await;
    fleet.until(&id, Status::Online).await;
    assert_eq!(fleet.world.openings(&id).len(), 3, "the era is remembered");
    fleet.finish().await;
}
