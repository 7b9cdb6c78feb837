//! What became of a call is told as it was, however its session came to its end.

use mcp_satellite_actors::model::exit::{CallError, Fate};
use mcp_satellite_actors::model::failure::FailureKind;
use serde_json::json;

use crate::remote_support::REFUSED;
use crate::support::{Fleet, Server};

#[tokio::test(start_paused = true)]
async fn what_was_answered_before_a_loss_is_answered_and_what_was_never_sent_is_repeated() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    remote.fail_next([FailureKind::Cut, REFUSED]);
    let (lost, unsent, answered) = futures::join!(
        fleet.call(&id, "echo", json!({"text": 1})),
        fleet.call(&id, "sleep", json!({"ms": 1})),
        fleet.call(&id, "echo", json!({"text": 3})),
    );
    assert!(matches!(lost, Err(CallError::Terminated { fate: Fate::MaybeExecuted, .. })), "{lost:?}");
    assert!(answered.is_ok(), "{answered:?}");
    assert_eq!(remote.served("tools/call echo").len(), 1, "its answer was there already");
    assert!(unsent.is_ok(), "it harms nobody to send it on the next connection: {unsent:?}");
    assert_eq!((remote.tried("tools/call sleep").len(), remote.attempts().len()), (2, 2));
    fleet.finish().await;
}
