//! Floods, stalls and panics: what they must not do to the session of a healthy server.

use std::time::Duration;

use mcp_satellite_actors::RuntimePart;
use mcp_satellite_actors::rpc::RpcMessage;
use tokio::time::{Instant, sleep};

use crate::support::{Play, Told};
use crate::{PLAIN, minutes};

const ASKS: &str = r#"{"jsonrpc":"2.0","id":1,"method":"elicitation/create"}"#;

fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

#[tokio::test(start_paused = true)]
async fn a_flood_of_notifications_does_not_keep_the_server_from_being_read() {
    let mut play = Play::begin(|_| {}).await;
    // Both wait when the session looks at them.
    play.says(r#"{"jsonrpc":"2.0","id":"its-own","method":"ping"}"#).await;
    let flood = RpcMessage::parse(r#"{"jsonrpc":"2.0","method":"notifications/x"}"#.to_owned().into()).unwrap();
    for _ in 0..500 {
        play.runtime.notify(&play.id, flood.clone()).unwrap();
    }
    let mut before = 0;
    while play.hears().await["method"] == "notifications/x" {
        before += 1;
    }
    assert!(before < 10, "the ping is answered after {before} notifications");
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_whose_output_waits_unread_is_not_unresponsive() {
    let mut play = Play::begin(|_| {}).await;
    let began = Instant::now();
    let call = play.relays_within(1, 1, PLAIN, Some(seconds(5)));
    assert_eq!(play.hears().await["method"], "tools/call");
    assert!(call.answered().await.is_err());
    assert_eq!(play.hears().await["method"], "notifications/cancelled");
    play.withholds_until(began + seconds(65));
    assert_eq!(play.hears().await["method"], "ping");
    assert_eq!(began.elapsed().as_secs(), 60);
    play.says(r#"{"jsonrpc":"2.0","method":"notifications/message","params":{}}"#).await;
    let told = play.told().await;
    assert!(matches!(told, Told::Heard(..)), "{told:?}");
    assert_eq!(began.elapsed().as_secs(), 70, "read when it was to be judged");
    sleep(minutes(10)).await;
    assert_eq!(play.runtime.status(&play.id).unwrap().restarts, 0);
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_audience_learns_of_the_end_of_a_run_that_panics_or_is_killed() {
    let mut play = Play::begin(|_| {}).await;
    play.says(ASKS).await;
    let Told::Asked(_, question) = play.told().await else { panic!("nobody is asked") };
    play.runtime.panic(RuntimePart::Worker(play.id.clone()));
    let told = play.told().await;
    assert!(matches!(told, Told::Ended), "{told:?}");
    drop(question);

    play.opens_again().await;
    play.greets().await;
    let list = play.hears().await;
    play.lists(&list).await;
    play.is_online().await;
    play.runtime.kill();
    let told = play.told().await;
    assert!(matches!(told, Told::Ended), "{told:?}");
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn thousands_of_calls_that_wait_for_a_person_do_not_exhaust_the_stack() {
    let calls = 20_000;
    let mut play = Play::begin(|policy| {
        policy.session.calls_in_flight_max = calls;
        policy.session.request_timeout_max = minutes(5);
    })
    .await;
    let call = |call| play.relays_within(1, call, PLAIN, Some(minutes(1)));
    let waiting: Vec<_> = (0..calls as u64).map(call).collect();
    assert_eq!(play.hears().await["method"], "tools/call");
    play.says(ASKS).await;
    let Told::Asked(_, question) = play.told().await else { panic!("nobody is asked") };
    sleep(minutes(2)).await;
    assert!(waiting.iter().all(|call| !call.answer.is_finished()), "each has more time");
    play.runtime.kill();
    drop(question);
    play.end().await;
}
