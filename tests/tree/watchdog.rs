//! Alive and answering nothing is as good as dead; busy is not.

use mcp_satellite::connect::sim::SimScript;
use mcp_satellite_actors::model::exit::{CallError, CallFate};
use mcp_satellite_actors::model::status::Status;
use serde_json::json;
use tokio::time::sleep;

use crate::support::{Fleet, Server, seconds};

#[tokio::test(start_paused = true)]
async fn a_frozen_server_is_ended_as_unresponsive_and_restarted() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    let old = fleet.pid(&id);
    fleet.server(&id).freeze();
    let error = fleet.call(&id, "echo", json!({"text": 1})).await.unwrap_err();
    assert!(matches!(error, CallError::TimedOut { .. }));
    assert_eq!(fleet.view(&id).status, Status::Online, "one timeout is no proof");
    fleet.until_replaced(&id, old).await;
    assert_eq!(fleet.world.gaps(&id), [70.0], "60 s of silence, 10 s for the ping, and it had run for more than 60 s");
    let crashed = fleet.told(&id, "mcp.server.crashed").await;
    assert_eq!((&crashed[0]["reason"], &crashed[0]["crash_count"]), (&json!("unresponsive"), &json!(1)));
    assert_eq!(fleet.told(&id, "mcp.server.restarted").await[0]["restart_reason"], "unresponsive");
    assert!(fleet.call(&id, "echo", json!({"text": 1})).await.is_ok());
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_hangs_in_a_call_fails_its_other_callers_when_it_is_ended() {
    let fleet = Fleet::start().await;
    let script = SimScript { hang_after: Some(1), ..SimScript::default() };
    let id = fleet.online(Server::new("a").plans([script.into(), SimScript::default().into()])).await;
    assert!(fleet.call(&id, "echo", json!({"text": 1})).await.is_ok());
    assert!(fleet.call(&id, "echo", json!({"text": 2})).await.is_err());
    // One call after the other keeps a deadline open until 90 s; then nobody is inside his own any more.
    sleep(seconds(5.0)).await;
    let patient = fleet.call_within(&id, "sleep", json!({"ms": 1}), Some(seconds(55.0)));
    assert_eq!(patient.await.unwrap_err().fate(), Some(CallFate::TimedOut));
    fleet.until_view(&id, |view| view.restarts == 1 && view.status == Status::Online).await;
    assert_eq!(fleet.world.gaps(&id), [100.0], "30 + 5 + 55 s, then the ping");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_frozen_server_that_is_called_all_the_time_is_found() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    let old = fleet.pid(&id);
    fleet.server(&id).freeze();
    let callers = async {
        // There is always one inside its deadline, until the server is another one.
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
        () = sleep(seconds(600.0)) => panic!("it is not found"),
    }
    assert_eq!(fleet.told(&id, "mcp.server.crashed").await[0]["reason"], "unresponsive");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_busy_server_is_left_alone() {
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
    assert_eq!(fleet.received(&id).await["pings"], 1, "asked once all callers were gone");
    assert_eq!((fleet.pid(&id), fleet.view(&id).restarts), (pid, 0), "and it did answer");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn one_byte_clears_a_suspect() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    let late = json!({"ms": 50_000, "ignore_cancel": true});
    assert!(fleet.call(&id, "sleep", late).await.is_err());
    sleep(seconds(3600.0)).await;
    let received = fleet.received(&id).await;
    assert_eq!(received["pings"], 0, "its late answer spoke for it");
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
