//! Repeated calls, repeated attempts, and how an instance reconnects.

use std::time::Duration;

use futures::future::join_all;
use mcp_satellite_actors::model::exit::{CallError, CallFate};
use mcp_satellite_actors::model::policy::ReconnectPolicy;
use mcp_satellite_actors::model::status::Status;

use super::peer::{Action, Peer, When};
use super::support::{Fleet, Remote};

#[tokio::test]
async fn a_read_only_call_is_sent_three_times_without_a_status_change() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = fleet.online(Remote::http(peer.url())).await;
    peer.on_next(2, When::tool("read"), Action::HangUp);
    assert_eq!(instance.call("read").await.unwrap()["content"][0]["text"], "hello");
    peer.log(|log| assert_eq!((log.calls("read"), log.rpc("initialize")), (3, 1)));
    assert_eq!(peer.executed("read"), 1);
    assert_eq!(instance.timeline().await.last().unwrap(), "started (http, 3 tools)", "the retries caused an event");
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_call_that_was_not_sent_is_retried_when_the_server_returns() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    peer.configure(|behavior| (behavior.streams, behavior.keeps_alive) = (false, false));
    let instance = fleet
        .online(Remote::http(peer.url()).policy(|policy| {
            policy.retry.delays = vec![Duration::from_millis(5)];
            policy.retry.attempts_max = u32::MAX;
        }))
        .await;
    peer.until("a stream is requested", |log| log.http("GET") == 1).await;
    peer.close().await;
    let (answer, ()) = tokio::join!(instance.call("echo"), async {
        // By then the first attempt has failed.
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
        peer.open().await;
    });
    assert_eq!(answer.unwrap()["content"][0]["text"], "hello");
    assert_eq!((peer.executed("echo"), peer.log(|log| log.rpc("initialize"))), (1, 1));
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn callers_of_a_lost_instance_share_one_attempt_and_its_outcome() {
    const CALLERS: usize = 5;
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = fleet.online(Remote::http(peer.url())).await;
    peer.close().await;
    let lost = instance.status(Status::Offline).await;
    peer.open().await;

    peer.on_next(1, When::rpc("initialize"), Action::Silence);
    let all_wait = async {
        peer.until("an attempt is received", |log| log.rpc("initialize") == 2).await;
        peer.close().await;
    };
    let (answers, ()) = tokio::join!(join_all((0..CALLERS).map(|_| instance.call("echo"))), all_wait);
    for answer in answers {
        let Err(error @ CallError::Reconnecting { next_retry_ms: Some(_), .. }) = answer else { panic!("{answer:?}") };
        assert_eq!(error.fate(), Some(CallFate::NotSent));
    }
    assert_eq!(peer.log(|log| log.rpc("initialize")), 2, "the callers made more than one attempt");
    let still = instance.until("waiting", |view| view.attempt.is_some()).await;
    assert_eq!(
        (still.next_retry_at, still.attempt),
        (lost.next_retry_at, lost.attempt),
        "the attempt changed the schedule"
    );

    peer.heal().await;
    let answers = join_all((0..CALLERS).map(|_| instance.call("echo"))).await;
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    assert_eq!(peer.log(|log| log.rpc("initialize")), 3, "the callers made more than one attempt");
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn an_instance_recovers_by_itself_from_every_failure() {
    let fleet = Fleet::start().await;
    let mut peers = Vec::new();
    for action in [Action::HangUp, Action::status(404), Action::status(503), Action::html(), Action::status(302)] {
        let peer = Peer::start().await;
        peer.on_next(3, When::rpc("initialize"), action);
        let instance = fleet.online(Remote::http(peer.url()).persistent()).await;
        assert_eq!(peer.log(|log| log.rpc("initialize")), 4);
        let timeline = instance.timeline().await;
        let delays: Vec<_> = timeline.iter().filter(|line| line.starts_with("reconnecting")).collect();
        assert_eq!(delays, ["reconnecting (1 in 50 ms)", "reconnecting (2 in 100 ms)", "reconnecting (3 in 200 ms)"]);
        assert_eq!(timeline.last().unwrap(), "started (http, 3 tools)");
        let reported = timeline.iter().filter(|line| matches!(line.as_str(), "offline" | "error")).count();
        assert_eq!(reported, 1, "an unchanged status was reported again: {timeline:?}");
        peers.push(peer);
    }
    fleet.finish(&peers.iter().collect::<Vec<_>>()).await;
}

#[tokio::test]
async fn a_lost_instance_reconnects_by_itself_and_lists_its_new_tools() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = fleet.online(Remote::http(peer.url()).persistent()).await;
    peer.close().await;
    instance.until("tried again", |view| view.attempt.is_some_and(|attempt| attempt >= 3)).await;
    assert!(instance.runtime.tools(&instance.id).is_none(), "an offline instance offers tools");
    peer.configure(|behavior| behavior.tools = vec![("echo", serde_json::json!({})), ("new", serde_json::json!({}))]);
    peer.forget_sessions();
    peer.open().await;
    instance.online().await;
    let timeline = instance.timeline().await;
    let back = timeline.iter().rposition(|line| line.starts_with("reconnecting")).unwrap();
    let events = timeline[back + 1..].join(", ");
    let expected = "connecting, discovering_tools, syncing_tools, discovered 2 tools, updated (+new -read -sleep), \
                    online, reconnected (";
    assert!(events.starts_with(expected), "{events}");
    instance.assert_callable().await;
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_bounded_instance_gives_up_after_five_attempts_and_a_call_reconnects_it() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let bounded = ReconnectPolicy {
        backoff_min: Duration::from_millis(5),
        backoff_max: Duration::from_millis(20),
        jitter_percent: 0,
        ..ReconnectPolicy::bounded()
    };
    let instance = fleet.online(Remote::http(peer.url()).policy(|policy| policy.reconnect = bounded)).await;
    peer.on(When::rpc("initialize"), Action::HangUp);
    peer.forget_sessions();
    peer.end_streams();
    let view = instance.status(Status::Error).await;
    assert_eq!(view.message.as_deref(), Some("Connection failed after max retries"));
    assert_eq!(peer.log(|log| log.rpc("initialize")), 6, "the first attempt and five more");

    let failed = instance.call("echo").await;
    let Err(CallError::Reconnecting { next_retry_ms: None, .. }) = failed else { panic!("{failed:?}") };
    assert_eq!(peer.log(|log| log.rpc("initialize")), 7, "the call did not make one attempt");
    peer.heal().await;
    instance.assert_callable().await;
    instance.online().await;
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_call_that_its_caller_abandons_is_cancelled_at_the_server() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = fleet.online(Remote::http(peer.url())).await;
    let late = instance.call_within(Some(Duration::from_millis(100)), "sleep").await;
    assert!(matches!(late, Err(CallError::TimedOut { .. })), "{late:?}");
    peer.until("the cancellation is received", |log| log.rpc("notifications/cancelled") == 1).await;
    tokio::select! {
        answer = instance.call("sleep") => panic!("{answer:?}"),
        () = peer.until("the call is in flight", |log| log.calls("sleep") == 2) => {}
    }
    peer.until("the cancellation is received", |log| log.rpc("notifications/cancelled") == 2).await;
    peer.log(|log| {
        let of = |rpc: &str, tool: Option<&str>| {
            let are = log.requests.iter().filter(move |record| record.rpc.as_deref() == Some(rpc));
            let are = are.filter(|record| record.tool.as_deref() == tool);
            are.map(|record| record.body.clone()).collect::<Vec<_>>()
        };
        let requested: Vec<_> = of("tools/call", Some("sleep")).iter().map(|body| body["id"].clone()).collect();
        let cancelled = of("notifications/cancelled", None);
        let cancelled: Vec<_> = cancelled.iter().map(|body| body["params"]["requestId"].clone()).collect();
        assert_eq!(requested, cancelled);
    });
    instance.assert_callable().await;
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn each_attempt_of_a_call_has_its_own_id_and_the_last_is_cancelled() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = fleet.online(Remote::http(peer.url())).await;
    peer.on_next(2, When::tool("read"), Action::HangUp);
    peer.on_next(1, When::tool("read"), Action::Silence);
    tokio::select! {
        answer = instance.call("read") => panic!("{answer:?}"),
        () = peer.until("the call is in flight", |log| log.calls("read") == 3) => {}
    }
    peer.until("the cancellation is received", |log| log.rpc("notifications/cancelled") == 1).await;
    peer.log(|log| {
        let bodies = || log.requests.iter().map(|record| &record.body);
        let calls: Vec<_> = bodies().filter(|body| body["method"] == "tools/call").collect();
        let mut ids: Vec<_> = calls.iter().map(|body| body["id"].as_u64().unwrap()).collect();
        let tokens = calls.iter().map(|body| body["params"]["_meta"]["progressToken"].as_u64().unwrap());
        assert!(tokens.eq(ids.iter().copied()), "{calls:?}");
        let cancelled = bodies().find(|body| body["method"] == "notifications/cancelled").unwrap();
        assert_eq!(cancelled["params"]["requestId"], ids[2]);
        ids.dedup();
        assert_eq!(ids.len(), 3, "{calls:?}");
    });
    instance.assert_callable().await;
    fleet.finish(&[&peer]).await;
}
