//! Floods, stalls and panics must not harm the session of a healthy server.

use std::time::Duration;

use mcp_satellite_actors::RuntimePart;
use mcp_satellite_actors::rpc::RpcMessage;
use tokio::time::{Instant, sleep};

use super::support::{AudienceEvent, ScriptedServer};
use super::{PLAIN, minutes};

const ELICITATION: &str = r#"{"jsonrpc":"2.0","id":1,"method":"elicitation/create"}"#;

fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

#[tokio::test(start_paused = true)]
async fn a_flood_of_notifications_does_not_keep_the_server_from_being_read() {
    let mut server = ScriptedServer::online(|_| {}).await;
    // The ping and the notifications are both queued when the session runs.
    server.send(r#"{"jsonrpc":"2.0","id":"its-own","method":"ping"}"#).await;
    let flood = RpcMessage::parse(r#"{"jsonrpc":"2.0","method":"notifications/x"}"#.to_owned().into()).unwrap();
    for _ in 0..500 {
        server.runtime.notify(&server.id, flood.clone()).unwrap();
    }
    let mut before = 0;
    while server.receive().await["method"] == "notifications/x" {
        before += 1;
    }
    assert!(before < 10, "the ping was answered only after {before} notifications");
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_with_unread_output_is_not_unresponsive() {
    let mut server = ScriptedServer::online(|_| {}).await;
    let began = Instant::now();
    let call = server.relay_within(1, 1, PLAIN, Some(seconds(5)));
    assert_eq!(server.receive().await["method"], "tools/call");
    assert!(call.response().await.is_err());
    assert_eq!(server.receive().await["method"], "notifications/cancelled");
    server.hold_output_until(began + seconds(65));
    assert_eq!(server.receive().await["method"], "ping");
    assert_eq!(began.elapsed().as_secs(), 60);
    server.send(r#"{"jsonrpc":"2.0","method":"notifications/message","params":{}}"#).await;
    let event = server.audience_event().await;
    assert!(matches!(event, AudienceEvent::Notification(..)), "{event:?}");
    assert_eq!(began.elapsed().as_secs(), 70, "the output is read before the watchdog decides");
    sleep(minutes(10)).await;
    assert_eq!(server.runtime.status(&server.id).unwrap().restarts, 0);
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn the_audience_is_notified_when_a_run_panics_or_is_killed() {
    let mut server = ScriptedServer::online(|_| {}).await;
    server.send(ELICITATION).await;
    let AudienceEvent::Request(_, question) = server.audience_event().await else {
        panic!("the audience got no request")
    };
    server.runtime.panic(RuntimePart::Worker(server.id.clone()));
    let event = server.audience_event().await;
    assert!(matches!(event, AudienceEvent::SessionEnded), "{event:?}");
    drop(question);

    server.until_started_again().await;
    server.accept_session().await;
    let list = server.receive().await;
    server.respond_with_tools(&list).await;
    server.until_online().await;
    server.runtime.kill();
    let event = server.audience_event().await;
    assert!(matches!(event, AudienceEvent::SessionEnded), "{event:?}");
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn thousands_of_calls_waiting_for_user_input_do_not_exhaust_the_stack() {
    let calls = 20_000;
    let mut server = ScriptedServer::online(|policy| {
        policy.session.calls_in_flight_max = calls;
        policy.session.request_timeout_max = minutes(5);
    })
    .await;
    let call = |call| server.relay_within(1, call, PLAIN, Some(minutes(1)));
    let waiting: Vec<_> = (0..calls as u64).map(call).collect();
    assert_eq!(server.receive().await["method"], "tools/call");
    server.send(ELICITATION).await;
    let AudienceEvent::Request(_, question) = server.audience_event().await else {
        panic!("the audience got no request")
    };
    sleep(minutes(2)).await;
    assert!(waiting.iter().all(|call| !call.answer.is_finished()), "the wait for user input extends each deadline");
    server.runtime.kill();
    drop(question);
    server.shut_down().await;
}
