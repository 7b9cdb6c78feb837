//! The watchdog: a live server that does not respond is restarted, a busy one is not.

use mcp_satellite::connect::sim::SimScript;
use mcp_satellite_actors::model::exit::{CallError, CallFate};
use mcp_satellite_actors::model::status::Status;
use serde_json::json;
use testkit::fleet::{Fleet, Server, seconds};
use tokio::time::sleep;

#[tokio::test(start_paused = true)]
async fn a_frozen_server_is_ended_as_unresponsive_and_restarted() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    let old = fleet.pid(&id);
    fleet.server(&id).freeze();
    let error = fleet.call(&id, "echo", json!({"text": 1})).await.unwrap_err();
    assert!(matches!(error, CallError::TimedOut { .. }));
    assert_eq!(fleet.view(&id).status, Status::Online, "one timeout is not enough");
    fleet.until_replaced(&id, old).await;
    assert_eq!(
        fleet.world.gaps(&id),
        [70.0],
        "60 s of silence and 10 s for the ping; no delay after a run longer than 60 s"
    );
    let crashed = fleet.event_data(&id, "mcp.server.crashed").await;
    assert_eq!((&crashed[0]["reason"], &crashed[0]["crash_count"]), (&json!("unresponsive"), &json!(1)));
    assert_eq!(fleet.event_data(&id, "mcp.server.restarted").await[0]["restart_reason"], "unresponsive");
    assert!(fleet.call(&id, "echo", json!({"text": 1})).await.is_ok());
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_hangs_in_a_call_is_restarted_after_the_last_deadline() {
    let fleet = Fleet::start().await;
    let script = SimScript { hang_after: Some(1), ..SimScript::default() };
    let id = fleet.online(Server::new("a").plans([script.into(), SimScript::default().into()])).await;
    assert!(fleet.call(&id, "echo", json!({"text": 1})).await.is_ok());
    assert!(fleet.call(&id, "echo", json!({"text": 2})).await.is_err());
    // The calls keep a deadline open until 90 s.
    sleep(seconds(5.0)).await;
    let patient = fleet.call_within(&id, "sleep", json!({"ms": 1}), Some(seconds(55.0)));
    assert_eq!(patient.await.unwrap_err().fate(), Some(CallFate::TimedOut));
    fleet.until_view(&id, |view| view.restarts == 1 && view.status == Status::Online).await;
    assert_eq!(fleet.world.gaps(&id), [100.0], "30 + 5 + 55 s, then the ping");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_frozen_server_with_constant_callers_is_detected() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    let old = fleet.pid(&id);
    fleet.server(&id).freeze();
    let callers = async {
        // A call is within its deadline at any time.
        loop {
            let call = fleet.call_within(&id, "echo", json!({"text": 1}), Some(seconds(20.0)));
            let _ = futures::join!(call, sleep(seconds(1.0)));
        }
    };
    let other_callers = async {
        sleep(seconds(7.0)).await;
        loop {
            let _ = fleet.call_within(&id, "echo", json!({"text": 2}), Some(seconds(30.0))).await;
        }
    };
    tokio::select! {
        biased;
        _ = fleet.until_replaced(&id, old) => {}
        () = callers => {}
        () = other_callers => {}
        () = sleep(seconds(600.0)) => panic!("the frozen server was not detected within 600 s"),
    }
    assert_eq!(fleet.event_data(&id, "mcp.server.crashed").await[0]["reason"], "unresponsive");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_busy_server_is_not_ended_as_unresponsive() {
    let fleet = Fleet::start().await;
    let script = SimScript { hang_calls: true, ..SimScript::default() };
    let id = fleet.online(Server::new("a").script(script).always_on()).await;
    let pid = fleet.pid(&id);
    let long = fleet.call_within(&id, "echo", json!({"text": "long"}), Some(seconds(600.0)));
    let short = async {
        sleep(seconds(1.0)).await;
        assert!(fleet.call_within(&id, "echo", json!({"text": "short"}), Some(seconds(5.0))).await.is_err());
        sleep(seconds(590.0)).await;
        assert_eq!(fleet.received(&id).await["pings"], 0, "a call inside its own deadline keeps it busy");
    };
    let (long, ()) = futures::join!(long, short);
    assert!(matches!(long, Err(CallError::TimedOut { .. })));
    sleep(seconds(3600.0)).await;
    assert_eq!(fleet.received(&id).await["pings"], 1, "pinged after all deadlines");
    assert_eq!((fleet.pid(&id), fleet.view(&id).restarts), (pid, 0), "the server answered the ping");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_late_response_clears_the_suspicion() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    let late = json!({"ms": 50_000, "ignore_cancel": true});
    assert!(fleet.call(&id, "sleep", late).await.is_err());
    sleep(seconds(3600.0)).await;
    let received = fleet.received(&id).await;
    assert_eq!(received["pings"], 0, "the late response shows that the server is alive");
    assert_eq!(fleet.view(&id).restarts, 0);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn an_idle_server_is_never_pinged() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    sleep(seconds(3600.0)).await;
    assert_eq!(fleet.received(&id).await["pings"], 0);
    fleet.finish().await;
}
