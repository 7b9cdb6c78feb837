//! Remote servers of either era of the protocol and of both, exchanged for another behind the same address, in paused time.

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
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

use crate::remote_support::{BROKEN_INSIDE, REFUSED, UNAUTHORIZED, story_after_start, until_back, until_seen};
use crate::support::{Fleet, Server, seconds};

const METHODS: [&str; 5] =
    ["initialize", "notifications/initialized", "server/discover", "tools/list", "subscriptions/listen"];

fn script(speaks: SpokenEras) -> SimScript {
    SimScript { speaks, ..SimScript::default() }
}

/// How often each opening message was sent.
fn opening(remote: &SimRemote) -> [usize; 5] {
    METHODS.map(|method| remote.tried_at(method).len())
}

fn era(fleet: &Fleet, id: &InstanceId) -> Era {
    fleet.view(id).server.as_ref().unwrap().era
}

/// Another server from now on. What it was told in sessions is gone.
fn becomes(remote: &SimRemote, script: SimScript) {
    remote.change(|manner| manner.script = Some(Arc::new(script)));
    remote.expire(404);
    remote.cut();
}

/// What a client of the stateless era gets.
async fn relayed(fleet: &Fleet, id: &InstanceId, tool: &str) -> Result<Value, CallError> {
    let meta = json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {"elicitation": {}},
    });
    let params = json!({"name": tool, "arguments": {"text": "hi"}, "_meta": meta});
    let message = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).to_string();
    let message = RpcMessage::parse(message.into()).unwrap();
    let origin = CallOrigin { client: 1, call: 1 };
    let relay =
        ClientRelay { message, origin, repeatable: false, tool: Some(tool.into()), era: Era::Stateless, client: None };
    let (_withdraw, withdrawn) = oneshot::channel();
    let answer = fleet.runtime.relay(id, relay, None, withdrawn).await?.unwrap();
    Ok(serde_json::from_str(answer.text()).unwrap())
}

#[tokio::test(start_paused = true)]
async fn each_server_is_opened_in_its_era_with_as_few_messages_as_that_takes() {
    let fleet = Fleet::start().await;
    for (speaks, expected, messages) in [
        (SpokenEras::Sessions, Era::Sessions, [1, 1, 0, 1, 0]),
        (SpokenEras::Both, Era::Sessions, [1, 1, 0, 1, 0]),
        (SpokenEras::Stateless, Era::Stateless, [1, 0, 1, 1, 1]),
    ] {
        let id = fleet.online(Server::remote(&format!("{speaks:?}").to_lowercase()).script(script(speaks))).await;
        assert_eq!(era(&fleet, &id), expected, "{speaks:?}");
        assert_eq!(opening(&fleet.remote(&id)), messages, "{speaks:?}");
        let answer = fleet.call(&id, "echo", json!({"text": "hi"})).await.unwrap();
        assert_eq!(answer["content"][0]["text"], "\"hi\"");
        assert_eq!(fleet.view(&id).health, ServerHealth::Healthy);
    }
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_upgraded_behind_its_address_is_found_out_without_a_lost_call() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a").script(script(SpokenEras::Sessions))).await;
    let remote = fleet.remote(&id);
    becomes(&remote, script(SpokenEras::Stateless));
    // `add` is idempotent: what may have been carried out is asked again.
    assert_eq!(fleet.call(&id, "add", json!({"a": 1, "b": 2})).await.unwrap()["structuredContent"]["result"], 3);
    until_back(&fleet, &id).await;
    assert_eq!(era(&fleet, &id), Era::Stateless);
    assert_eq!(opening(&remote), [2, 1, 1, 2, 1]);
    let story = story_after_start(&fleet, &id).await;
    assert!(!story.iter().any(|line| line.starts_with("error")), "{story:?}");

    // And back again.
    becomes(&remote, script(SpokenEras::Sessions));
    assert!(fleet.call(&id, "add", json!({"a": 1, "b": 2})).await.is_err(), "it is told what is wrong");
    fleet.until_view(&id, |view| view.server.as_ref().is_some_and(|server| server.era == Era::Sessions)).await;
    until_back(&fleet, &id).await;
    assert_eq!(fleet.call(&id, "add", json!({"a": 1, "b": 2})).await.unwrap()["structuredContent"]["result"], 3);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn what_was_found_out_is_where_the_next_connection_begins() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a").script(script(SpokenEras::Stateless))).await;
    let remote = fleet.remote(&id);
    fleet.runtime.reconnect(&id).await.unwrap();
    until_back(&fleet, &id).await;
    assert_eq!(opening(&remote), [1, 0, 2, 2, 2]);
    // It does not end anything that it has not: there are no sessions.
    assert_eq!(remote.received_at("DELETE").len() + remote.received_at("ping").len(), 0);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_was_stateless_and_answers_nothing_is_asked_for_a_session_in_time() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a").script(script(SpokenEras::Stateless))).await;
    let remote = fleet.remote(&id);
    remote.change(|manner| {
        manner.script = Some(Arc::new(script(SpokenEras::Both)));
        manner.silent_on = ["server/discover"].into();
    });
    let began = Instant::now();
    fleet.runtime.reconnect(&id).await.unwrap();
    until_back(&fleet, &id).await;
    assert_eq!((began.elapsed(), era(&fleet, &id)), (seconds(15.0), Era::Sessions));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn what_is_lost_without_a_session_is_the_server() {
    let fleet = Fleet::start().await;
    let table = [
        (REFUSED, Status::Offline),
        (FailureKind::Dns, Status::Offline),
        (UNAUTHORIZED, Status::RequiresReauth),
        (FailureKind::Redirected { status: 307, to: None }, Status::Error),
        (FailureKind::from_status(418), Status::Error),
        // It is asked whether it is there at all, and is.
        (FailureKind::Cut, Status::Online),
        (FailureKind::from_status(404), Status::Online),
        (FailureKind::from_status(400), Status::Online),
        (FailureKind::Throttled { retry_after: None }, Status::Online),
        (BROKEN_INSIDE, Status::Online),
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
async fn a_server_without_sessions_is_asked_what_it_is_to_see_whether_it_is_there() {
    let fleet = Fleet::start().await;
    let server = Server::remote("a").script(script(SpokenEras::Stateless));
    let id = fleet.online(server.policy(|policy| policy.health.interval = seconds(100.0))).await;
    let remote = fleet.remote(&id);
    until_seen(&remote, |remote| remote.served_at("server/discover").len() == 4).await;
    remote.change(|manner| manner.silent_on = ["server/discover"].into());
    fleet.until_view(&id, |view| view.health == ServerHealth::Degraded).await;
    remote.change(|manner| manner.silent_on.clear());
    fleet.until_view(&id, |view| view.health == ServerHealth::Healthy).await;
    assert_eq!(fleet.view(&id).status, Status::Online);
    // One that does not know the question any more is not what it was.
    remote.change(|manner| {
        manner.script = Some(Arc::new(script(SpokenEras::Sessions)));
        manner.unknown_methods = ["server/discover"].into();
    });
    fleet.until_view(&id, |view| view.server.as_ref().is_some_and(|server| server.era == Era::Sessions)).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn the_loss_of_the_stream_is_not_the_loss_of_the_server() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a").script(script(SpokenEras::Stateless))).await;
    let remote = fleet.remote(&id);
    until_seen(&remote, |remote| remote.served_at("subscriptions/listen").len() == 1).await;
    let checks = remote.served_at("server/discover").len();
    remote.cut();
    until_seen(&remote, |remote| remote.served_at("subscriptions/listen").len() == 2).await;
    assert_eq!(fleet.view(&id).status, Status::Online);
    assert_eq!(remote.served_at("server/discover").len(), checks + 1, "it was looked whether it is there");
    until_seen(&remote, |remote| remote.served_at("tools/list").len() == 2).await;
    // Where nobody is there that is found out by the same look.
    remote.kill(REFUSED);
    fleet.until_view(&id, |view| view.health == ServerHealth::Degraded || view.status == Status::Offline).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_change_is_told_on_the_stream() {
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
    assert_eq!(remote.received_at("server/discover").len(), 1, "it is asked once");

    assert_eq!(relayed(&fleet, &id, "echo").await.unwrap()["result"]["content"][0]["text"], "\"hi\"");
    let asked = relayed(&fleet, &id, "ask").await.unwrap();
    assert_eq!(asked["result"]["resultType"], "input_required", "for its client to see to");
    assert_eq!(fleet.call(&id, "echo", json!({"text": "ho"})).await.unwrap()["content"][0]["text"], "\"ho\"");
    // What fails beside the session says nothing of it.
    for kind in
        [FailureKind::from_status(404), FailureKind::from_status(418), FailureKind::NotMcp { content_type: None }]
    {
        remote.fail_next([kind]);
        assert!(relayed(&fleet, &id, "echo").await.is_err());
        assert_eq!(fleet.view(&id).status, Status::Online);
    }
    assert_eq!(remote.sessions().opened, 1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_with_sessions_only_is_asked_once_whether_it_can_do_without() {
    let fleet = Fleet::start().await;
    let limit = seconds(5.0);
    let id = fleet.online(Server::remote("a").script(script(SpokenEras::Sessions))).await;
    for _ in 0..3 {
        assert!(fleet.runtime.discover(&id, limit).await.unwrap().is_none());
    }
    assert_eq!(fleet.remote(&id).received_at("server/discover").len(), 1);
    // One that leaves it unanswered counts as one that does not know it, after a short while.
    let id = fleet.online(Server::remote("b").script(script(SpokenEras::Both))).await;
    fleet.remote(&id).change(|manner| manner.silent_on = ["server/discover"].into());
    let began = Instant::now();
    assert!(fleet.runtime.discover(&id, limit).await.unwrap().is_none());
    assert_eq!(began.elapsed(), seconds(2.0));
    assert!(fleet.runtime.discover(&id, limit).await.unwrap().is_none());
    sleep(seconds(60.0)).await;
    fleet.remote(&id).change(|manner| manner.silent_on.clear());
    assert!(fleet.runtime.discover(&id, limit).await.unwrap().is_some(), "it may have been chance");
    // So may a failure; and what is not to be had at all is not known.
    let id = fleet.online(Server::remote("c").script(script(SpokenEras::Both))).await;
    fleet.remote(&id).fail_next([FailureKind::Throttled { retry_after: None }, BROKEN_INSIDE]);
    assert!(fleet.runtime.discover(&id, limit).await.is_err());
    assert!(fleet.runtime.discover(&id, limit).await.unwrap().is_none());
    sleep(seconds(60.0)).await;
    assert!(fleet.runtime.discover(&id, limit).await.unwrap().is_some());
    assert_eq!(fleet.view(&id).status, Status::Online);
    // The older transport has sessions and nothing else.
    let id = fleet.online(Server::remote("d").sse().script(script(SpokenEras::Both))).await;
    assert!(fleet.runtime.discover(&id, limit).await.unwrap().is_none());
    assert_eq!(fleet.remote(&id).received_at("server/discover").len(), 0);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_configured_to_have_sessions_is_asked_for_nothing_else() {
    let fleet = Fleet::start().await;
    let server = Server::remote("a").script(script(SpokenEras::Both));
    let id = fleet.online(server.policy(|policy| policy.session.protocol = Some(Era::Sessions))).await;
    assert!(fleet.runtime.discover(&id, seconds(5.0)).await.unwrap().is_none());
    assert_eq!(fleet.remote(&id).tried_at("server/discover").len(), 0);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn what_changes_beside_a_session_is_told_on_a_stream_beside_it() {
    let fleet = Fleet::start().await;
    let changing = SimScript { list_changed_after: Some(seconds(50.0)), ..script(SpokenEras::Both) };
    let id = fleet.online(Server::remote("a").script(changing)).await;
    let remote = fleet.remote(&id);
    sleep(seconds(20.0)).await;
    assert_eq!(remote.served_at("subscriptions/listen").len(), 0, "nobody needs it");
    fleet.runtime.discover(&id, seconds(5.0)).await.unwrap().unwrap();
    until_seen(&remote, |remote| remote.served_at("subscriptions/listen").len() == 1).await;
    let lists = remote.served_at("tools/list").len();
    // The session says so at 50 s, and the stream, which was asked for 20 s later, at 70 s.
    until_seen(&remote, |remote| remote.served_at("tools/list").len() == lists + 2).await;
    remote.cut();
    until_seen(&remote, |remote| remote.served_at("subscriptions/listen").len() == 2).await;
    assert_eq!((remote.sessions().opened, fleet.view(&id).status), (1, Status::Online));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_breaks_off_is_the_loss_of_that_answer_and_of_no_other() {
    let fleet = Fleet::start().await;
    for speaks in [SpokenEras::Stateless, SpokenEras::Both] {
        let id = fleet.online(Server::remote(&format!("{speaks:?}").to_lowercase()).script(script(speaks))).await;
        let remote = fleet.remote(&id);
        fleet.runtime.discover(&id, seconds(5.0)).await.unwrap().unwrap();
        let slow = fleet.call(&id, "echo", json!({"text": "slow", "after_ms": 3000}));
        let cut = async {
            until_seen(&remote, |remote| remote.served_at("tools/call echo").len() == 1).await;
            remote.fail_next([FailureKind::Cut]);
            let error = relayed(&fleet, &id, "echo").await.unwrap_err();
            assert_eq!(error.fate(), Some(CallFate::MaybeExecuted), "{error}");
            for _ in 0..3 {
                remote.fail_next([BROKEN_INSIDE]);
                assert!(relayed(&fleet, &id, "echo").await.is_err());
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
async fn an_error_with_a_number_of_the_other_era_is_the_servers_own() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a").script(script(SpokenEras::Sessions))).await;
    for code in [-32020, -32021, -32022] {
        let error = fleet.call(&id, "fail", json!({"code": code, "message": "done"})).await.unwrap_err();
        assert!(matches!(error, CallError::Server { code: told, .. } if told == code), "{error}");
    }
    sleep(seconds(1.0)).await;
    let remote = fleet.remote(&id);
    assert_eq!(remote.served_at("tools/call fail").len(), 3, "each was made once");
    assert_eq!((remote.sessions().opened, fleet.view(&id).status), (1, Status::Online));
    assert!(!remote.served_at("ping").is_empty(), "whether it still has sessions was found out");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_does_without_sessions_no_more_is_found_out_by_who_needs_that() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a").script(script(SpokenEras::Both))).await;
    let remote = fleet.remote(&id);
    fleet.runtime.discover(&id, seconds(5.0)).await.unwrap().unwrap();
    remote.change(|manner| manner.script = Some(Arc::new(script(SpokenEras::Sessions))));
    assert!(relayed(&fleet, &id, "echo").await.is_err());
    assert!(fleet.runtime.discover(&id, seconds(5.0)).await.unwrap().is_none());
    assert_eq!((remote.sessions().opened, fleet.view(&id).status), (1, Status::Online));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn processes_are_opened_in_their_era_too() {
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
    // One that ends when it was spoken to in the wrong one is started once more, and spoken to in the right one.
    let ending = SimScript { exit_on_refusal: true, exit_code: 1, ..script(SpokenEras::Stateless) };
    let id = fleet.online(Server::new("ending").script(ending).always_on()).await;
    assert_eq!((fleet.world.openings(&id).len(), fleet.view(&id).restarts), (2, 1));
    fleet.runtime.restart(&id).await.unwrap();
    fleet.world.until_openings(&id, 3).await;
    fleet.until(&id, Status::Online).await;
    assert_eq!(fleet.world.openings(&id).len(), 3, "it is remembered");
    fleet.finish().await;
}
