//! What is sent how often, and how an instance comes back.

use std::time::Duration;

use futures::future::join_all;
use mcp_satellite_actors::model::exit::{CallError, CallFate};
use mcp_satellite_actors::model::policy::ReconnectPolicy;
use mcp_satellite_actors::model::status::Status;

use super::peer::{Deed, Peer, When};
use super::support::{Fleet, Remote};

#[tokio::test]
async fn a_call_that_only_reads_is_sent_three_times_and_its_instance_stays_as_it_was() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = fleet.online(Remote::http(peer.url())).await;
    peer.on_next(2, When::tool("read"), Deed::HangUp);
    assert_eq!(instance.call("read").await.unwrap()["content"][0]["text"], "hello");
    peer.seen(|seen| assert_eq!((seen.calls("read"), seen.rpc("initialize")), (3, 1)));
    assert_eq!(peer.executed("read"), 1);
    assert_eq!(instance.story().await.last().unwrap(), "started (http, 3 tools)", "nothing more is told");
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_call_that_reached_nobody_is_made_when_somebody_is_there_again() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    peer.manners(|manners| (manners.streams, manners.keeps_alive) = (false, false));
    let instance = fleet
        .online(Remote::http(peer.url()).policy(|policy| {
            policy.retry.delays = vec![Duration::from_millis(5)];
            policy.retry.attempts_max = u32::MAX;
        }))
        .await;
    peer.until("it was asked for a stream", |seen| seen.http("GET") == 1).await;
    peer.close().await;
    let (answer, ()) = tokio::join!(instance.call("echo"), async {
        // Until the first attempt has come to nothing, whichever way.
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
        peer.open().await;
    });
    assert_eq!(answer.unwrap()["content"][0]["text"], "hello");
    assert_eq!((peer.executed("echo"), peer.seen(|seen| seen.rpc("initialize"))), (1, 1));
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn callers_of_a_lost_instance_share_one_attempt_and_what_comes_of_it() {
    const CALLERS: usize = 5;
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = fleet.online(Remote::http(peer.url())).await;
    peer.close().await;
    let lost = instance.status(Status::Offline).await;
    peer.open().await;

    peer.on_next(1, When::rpc("initialize"), Deed::Silence);
    let all_wait = async {
        peer.until("an attempt is made", |seen| seen.rpc("initialize") == 2).await;
        peer.close().await;
    };
    let (answers, ()) = tokio::join!(join_all((0..CALLERS).map(|_| instance.call("echo"))), all_wait);
    for answer in answers {
        let Err(error @ CallError::Reconnecting { next_retry_ms: Some(_), .. }) = answer else { panic!("{answer:?}") };
        assert_eq!(error.fate(), Some(CallFate::NotSent));
    }
    assert_eq!(peer.seen(|seen| seen.rpc("initialize")), 2, "one attempt for all of them");
    let still = instance.until("waiting", |view| view.attempt.is_some()).await;
    assert_eq!((still.next_retry_at, still.attempt), (lost.next_retry_at, lost.attempt), "the schedule goes on");

    peer.heal().await;
    let answers = join_all((0..CALLERS).map(|_| instance.call("echo"))).await;
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    assert_eq!(peer.seen(|seen| seen.rpc("initialize")), 3, "one attempt for all of them");
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn whatever_was_wrong_an_instance_comes_back_by_itself() {
    let fleet = Fleet::start().await;
    let mut peers = Vec::new();
    for deed in [Deed::HangUp, Deed::status(404), Deed::status(503), Deed::html(), Deed::status(302)] {
        let peer = Peer::start().await;
        peer.on_next(3, When::rpc("initialize"), deed);
        let instance = fleet.online(Remote::http(peer.url()).persistent()).await;
        assert_eq!(peer.seen(|seen| seen.rpc("initialize")), 4);
        let story = instance.story().await;
        let delays: Vec<_> = story.iter().filter(|line| line.starts_with("reconnecting")).collect();
        assert_eq!(delays, ["reconnecting (1 in 50 ms)", "reconnecting (2 in 100 ms)", "reconnecting (3 in 200 ms)"]);
        assert_eq!(story.last().unwrap(), "started (http, 3 tools)");
        let told = story.iter().filter(|line| matches!(line.as_str(), "offline" | "error")).count();
        assert_eq!(told, 1, "a status that stays is told once: {story:?}");
        peers.push(peer);
    }
    fleet.finish(&peers.iter().collect::<Vec<_>>()).await;
}

#[tokio::test]
async fn a_lost_instance_comes_back_by_itself_with_what_it_offers_now() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = fleet.online(Remote::http(peer.url()).persistent()).await;
    peer.close().await;
    instance.until("tried again", |view| view.attempt.is_some_and(|attempt| attempt >= 3)).await;
    assert!(instance.runtime.tools(&instance.id).is_none(), "what is not there offers nothing");
    peer.manners(|manners| manners.tools = vec![("echo", serde_json::json!({})), ("new", serde_json::json!({}))]);
    peer.forget_sessions();
    peer.open().await;
    instance.online().await;
    let story = instance.story().await;
    let back = story.iter().rposition(|line| line.starts_with("reconnecting")).unwrap();
    let told = story[back + 1..].join(", ");
    let expected = "connecting, discovering_tools, syncing_tools, discovered 2 tools, updated (+new -read -sleep), \
                    online, reconnected (";
    assert!(told.starts_with(expected), "{told}");
    instance.assert_callable().await;
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_bounded_instance_gives_up_after_five_attempts_and_a_call_brings_it_back() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let bounded = ReconnectPolicy {
        backoff_min: Duration::from_millis(5),
        backoff_max: Duration::from_millis(20),
        jitter_percent: 0,
        ..ReconnectPolicy::bounded()
    };
    let instance = fleet.online(Remote::http(peer.url()).policy(|policy| policy.reconnect = bounded)).await;
    peer.on(When::rpc("initialize"), Deed::HangUp);
    peer.forget_sessions();
    peer.end_streams();
    let view = instance.status(Status::Error).await;
    assert_eq!(view.message.as_deref(), Some("Connection failed after max retries"));
    assert_eq!(peer.seen(|seen| seen.rpc("initialize")), 6, "once, and five times more");

    let failed = instance.call("echo").await;
    let Err(CallError::Reconnecting { next_retry_ms: None, .. }) = failed else { panic!("{failed:?}") };
    assert_eq!(peer.seen(|seen| seen.rpc("initialize")), 7, "only a call tries again");
    peer.heal().await;
    instance.assert_callable().await;
    instance.online().await;
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_call_that_its_caller_gives_up_is_cancelled_at_the_server() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = fleet.online(Remote::http(peer.url())).await;
    let late = instance.call_within(Some(Duration::from_millis(100)), "sleep").await;
    assert!(matches!(late, Err(CallError::TimedOut { .. })), "{late:?}");
    peer.until("it is cancelled", |seen| seen.rpc("notifications/cancelled") == 1).await;
    tokio::select! {
        answer = instance.call("sleep") => panic!("{answer:?}"),
        () = peer.until("it is in flight", |seen| seen.calls("sleep") == 2) => {}
    }
    peer.until("it is cancelled", |seen| seen.rpc("notifications/cancelled") == 2).await;
    peer.seen(|seen| {
        let of = |rpc: &str, tool: Option<&str>| {
            let are = seen.requests.iter().filter(move |record| record.rpc.as_deref() == Some(rpc));
            let are = are.filter(|record| record.tool.as_deref() == tool);
            are.map(|record| record.body.clone()).collect::<Vec<_>>()
        };
        let asked: Vec<_> = of("tools/call", Some("sleep")).iter().map(|body| body["id"].clone()).collect();
        let given_up = of("notifications/cancelled", None);
        let given_up: Vec<_> = given_up.iter().map(|body| body["params"]["requestId"].clone()).collect();
        assert_eq!(asked, given_up);
    });
    instance.assert_callable().await;
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn each_attempt_of_a_call_has_a_number_of_its_own_and_the_last_one_is_cancelled() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = fleet.online(Remote::http(peer.url())).await;
    peer.on_next(2, When::tool("read"), Deed::HangUp);
    peer.on_next(1, When::tool("read"), Deed::Silence);
    tokio::select! {
        answer = instance.call("read") => panic!("{answer:?}"),
        () = peer.until("it is in flight", |seen| seen.calls("read") == 3) => {}
    }
    peer.until("it is cancelled", |seen| seen.rpc("notifications/cancelled") == 1).await;
    peer.seen(|seen| {
        let bodies = || seen.requests.iter().map(|record| &record.body);
        let calls: Vec<_> = bodies().filter(|body| body["method"] == "tools/call").collect();
        let mut numbers: Vec<_> = calls.iter().map(|body| body["id"].as_u64().unwrap()).collect();
        let tokens = calls.iter().map(|body| body["params"]["_meta"]["progressToken"].as_u64().unwrap());
        assert!(tokens.eq(numbers.iter().copied()), "{calls:?}");
        let cancelled = bodies().find(|body| body["method"] == "notifications/cancelled").unwrap();
        assert_eq!(cancelled["params"]["requestId"], numbers[2]);
        numbers.dedup();
        assert_eq!(numbers.len(), 3, "{calls:?}");
    });
    instance.assert_callable().await;
    fleet.finish(&[&peer]).await;
}
