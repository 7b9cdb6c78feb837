//! Credentials that a server does not accept, and others in their place.

use mcp_satellite::connect::sim::SimScript;
use mcp_satellite_actors::InstallOutcome;
use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::remedy::Remedy;
use mcp_satellite_actors::model::remote::ConnectionState;
use mcp_satellite_actors::model::secret::SecretMask;
use mcp_satellite_actors::model::spec::ServerTarget;
use mcp_satellite_actors::model::status::Status;
use serde_json::json;
use tokio::time::sleep;

use crate::remote_support::{
    DAY, FORBIDDEN, REFUSED, UNAUTHORIZED, lose, story_after_start, until_attempting, until_attempts, until_back,
};
use crate::support::{Fleet, Server, seconds};

const HEADER: &str = "Authorization";
const OLD: &str = "Bearer old-key";
const NEW: &str = "Bearer new-key";

fn server(key: &str) -> Server {
    Server::remote("a").header(HEADER, key)
}

/// The server wants these from now on.
fn wants(fleet: &Fleet, id: &InstanceId, key: &str) {
    fleet.remote(id).change(|manner| manner.required_header = Some((HEADER.to_owned(), key.into())));
}

async fn gives(fleet: &Fleet, key: &str) {
    assert_eq!(fleet.runtime.install(server(key).spec).await, Ok(InstallOutcome::Updated));
}

#[tokio::test(start_paused = true)]
async fn calls_are_refused_with_what_to_do_until_there_are_other_credentials_and_then_it_moves_on_by_itself() {
    for (kind, why) in [(UNAUTHORIZED, "Authentication failed (HTTP 401)"), (FORBIDDEN, "Access forbidden (HTTP 403)")]
    {
        let fleet = Fleet::start().await;
        let id = fleet.online(server(OLD)).await;
        let remote = fleet.remote(&id);
        wants(&fleet, &id, NEW);
        remote.change(|manner| manner.refusal = Some(kind));
        let found_out = fleet.call(&id, "echo", json!({})).await;
        let view = fleet.until(&id, Status::RequiresReauth).await;
        assert_eq!((view.message.as_deref(), view.connection), (Some(why), Some(ConnectionState::Error)));
        assert!(fleet.runtime.tools(&id).is_none());
        let blocked = fleet.call(&id, "echo", json!({})).await;
        for answer in [&found_out, &blocked] {
            let Err(CallError::Refused { status: Status::RequiresReauth, message, remedy: Some(Remedy::Authorize) }) =
                answer
            else {
                panic!("{answer:?}")
            };
            for part in ["files-acme-alice-a", why] {
                assert!(message.contains(part), "{message}");
            }
        }
        sleep(DAY).await;
        assert_eq!((remote.attempts().len(), remote.tried_at("tools/call").len()), (1, 1), "nothing is retried");
        assert_eq!(fleet.view(&id).next_retry_at, None);

        gives(&fleet, NEW).await;
        until_back(&fleet, &id).await;
        assert!(fleet.call(&id, "echo", json!({})).await.is_ok());
        let expected = [
            "disconnected",
            &format!("requires_reauth: {why}"),
            "connecting: the credentials have changed",
            "discovering_tools",
            "syncing_tools",
            "discovered 3 tools",
            "online",
            "reconnected at attempt 1",
        ];
        assert_eq!(story_after_start(&fleet, &id).await, expected);
        fleet.finish().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_healthy_connection_goes_on_with_the_new_credentials() {
    let fleet = Fleet::start().await;
    let id = fleet.online(server(OLD)).await;
    let remote = fleet.remote(&id);
    let (answer, ()) = futures::join!(fleet.call(&id, "sleep", json!({"ms": 2000})), async {
        sleep(seconds(1.0)).await;
        gives(&fleet, NEW).await;
        wants(&fleet, &id, NEW);
    });
    assert!(answer.is_ok(), "{answer:?}");
    assert!(fleet.call(&id, "echo", json!({})).await.is_ok(), "in the same session");
    assert_eq!((remote.attempts().len(), remote.sessions().opened), (1, 1));
    assert_eq!(story_after_start(&fleet, &id).await, Vec::<String>::new());
    // And so does the next one.
    lose(&fleet, &id).await;
    remote.bring_up();
    until_back(&fleet, &id).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn what_a_server_echoes_of_old_and_new_credentials_is_hidden_on_a_connection_that_has_seen_both() {
    let fleet = Fleet::start().await;
    let slow = |key: &str| {
        let mut server =
            server(key).script(SimScript { all_tools: true, call_delay: seconds(2.0), ..SimScript::default() });
        server.spec.mask = SecretMask::new([key]);
        server
    };
    let id = fleet.online(slow(OLD)).await;
    let echo = json!({"message": format!("{OLD} and {NEW}")});
    let (failed, error, ()) =
        futures::join!(fleet.call(&id, "fail", echo.clone()), fleet.call(&id, "tool_error", echo.clone()), async {
            sleep(seconds(1.0)).await;
            assert_eq!(fleet.runtime.install(slow(NEW).spec).await, Ok(InstallOutcome::Updated));
        });
    let Err(CallError::Server { message, .. }) = failed else { panic!("{failed:?}") };
    assert_eq!(message, "failed as asked: [secret] and [secret]");
    assert!(error.is_ok());
    let told = fleet.told(&id, "mcp.tool.executed").await;
    let hidden = told.iter().filter(|event| event["error_message"].to_string().contains("[secret] and [secret]"));
    assert_eq!(hidden.count(), 2, "{told:?}");
    assert_eq!(fleet.remote(&id).attempts().len(), 1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn new_credentials_that_are_refused_as_well_leave_it_where_it_was() {
    let fleet = Fleet::start().await;
    let remote = fleet.remote(&server(OLD).spec.id);
    remote.change(|manner| manner.required_header = Some((HEADER.to_owned(), NEW.into())));
    let id = fleet.add(server(OLD)).await;
    fleet.until(&id, Status::RequiresReauth).await;
    gives(&fleet, "Bearer other").await;
    until_attempts(&remote, 2).await;
    fleet.until(&id, Status::RequiresReauth).await;
    gives(&fleet, NEW).await;
    until_back(&fleet, &id).await;
    assert_eq!(remote.attempts().len(), 3);
    assert_eq!(fleet.told(&id, "mcp.server.started").await.len(), 1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn credentials_that_come_while_the_old_ones_are_being_refused_are_tried_at_once() {
    let fleet = Fleet::start().await;
    let remote = fleet.remote(&server(OLD).spec.id);
    remote.change(|manner| {
        (manner.required_header, manner.connect_delay) = (Some((HEADER.to_owned(), NEW.into())), seconds(5.0));
    });
    let id = fleet.add(server(OLD)).await;
    until_attempting(&remote).await;
    gives(&fleet, NEW).await;
    until_back(&fleet, &id).await;
    assert!(remote.attempts().len() <= 2);
    let statuses = fleet.statuses(&id).await;
    assert!(statuses.iter().all(|(status, _)| status != "requires_reauth"), "{statuses:?}");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn while_it_is_away_new_credentials_change_no_schedule_and_are_used_by_the_next_attempt() {
    let fleet = Fleet::start().await;
    let id = fleet.online(server(OLD)).await;
    let remote = fleet.remote(&id);
    lose(&fleet, &id).await;
    until_attempts(&remote, 6).await;
    let next = fleet.until_view(&id, |view| view.attempt == Some(6)).await.next_retry_at;
    gives(&fleet, NEW).await;
    wants(&fleet, &id, NEW);
    remote.bring_up();
    assert_eq!(fleet.view(&id).next_retry_at, next);
    assert_eq!(remote.attempts().len(), 6);
    until_back(&fleet, &id).await;
    assert_eq!(remote.attempts().len(), 7);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_change_of_more_than_credentials_makes_another_connection() {
    let fleet = Fleet::start().await;
    let id = fleet.online(server(OLD)).await;
    let remote = fleet.remote(&id);
    let mut changed = server(NEW);
    if let ServerTarget::Remote { url, .. } = &mut changed.spec.target {
        url.push_str("/elsewhere");
    }
    assert_eq!(fleet.runtime.install(changed.spec).await, Ok(InstallOutcome::Updated));
    until_attempts(&remote, 2).await;
    until_back(&fleet, &id).await;
    assert_eq!(remote.sessions().closed, 1);
    let expected = [
        "restarting: the configuration changed",
        "disconnected as intended",
        "connecting: connecting",
        "discovering_tools",
        "syncing_tools",
        "discovered 3 tools",
        "online",
        "started with 3 tools",
    ];
    assert_eq!(story_after_start(&fleet, &id).await, expected);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_check_that_is_refused_and_a_reconnect_that_is_refused_require_other_credentials() {
    let fleet = Fleet::start().await;
    let checked = fleet.online(server(OLD)).await;
    wants(&fleet, &checked, NEW);
    let view = fleet.until(&checked, Status::RequiresReauth).await;
    assert_eq!(view.message.as_deref(), Some("Authentication failed (HTTP 401)"), "nobody has called");

    let mut other = Server::remote("b").header(HEADER, OLD);
    other.spec.name = "files-acme-alice-b".into();
    let other = fleet.online(other).await;
    let remote = fleet.remote(&other);
    remote.kill(REFUSED);
    remote.report_session_lost(REFUSED);
    fleet.until(&other, Status::Offline).await;
    wants(&fleet, &other, NEW);
    remote.bring_up();
    fleet.until(&other, Status::RequiresReauth).await;
    let attempts = remote.attempts().len();
    sleep(seconds(3600.0)).await;
    assert_eq!(remote.attempts().len(), attempts, "the schedule has ended");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_refused_for_the_credentials_of_before_is_sent_again_with_the_new_ones_once() {
    for (given, refused) in [(NEW, false), ("Bearer wrong", true)] {
        let fleet = Fleet::start().await;
        let id = fleet.online(server(OLD)).await;
        let remote = fleet.remote(&id);
        remote.change(|manner| manner.delay = seconds(2.0));
        wants(&fleet, &id, NEW);
        // The refusal is for the credentials that the line had when the call was sent.
        remote.fail_next([UNAUTHORIZED]);
        let (answer, ()) = futures::join!(fleet.call(&id, "echo", json!({})), async {
            sleep(seconds(1.0)).await;
            gives(&fleet, given).await;
        });
        assert_eq!(remote.tried_at("tools/call").len(), 2);
        if refused {
            assert!(matches!(answer, Err(CallError::Refused { status: Status::RequiresReauth, .. })), "{answer:?}");
            fleet.until(&id, Status::RequiresReauth).await;
        } else {
            assert!(answer.is_ok(), "{answer:?}");
            assert_eq!(remote.attempts().len(), 1, "in the same session");
            assert_eq!(story_after_start(&fleet, &id).await, Vec::<String>::new());
        }
        fleet.finish().await;
    }
}

#[tokio::test(start_paused = true)]
async fn credentials_that_were_changed_long_ago_and_are_refused_now_are_not_tried_once_more() {
    let fleet = Fleet::start().await;
    let id = fleet.online(server(OLD)).await;
    gives(&fleet, NEW).await;
    sleep(DAY).await;
    wants(&fleet, &id, "Bearer the next");
    let refused = fleet.call(&id, "echo", json!({})).await;
    assert!(matches!(refused, Err(CallError::Refused { status: Status::RequiresReauth, .. })), "{refused:?}");
    fleet.until(&id, Status::RequiresReauth).await;
    let remote = fleet.remote(&id);
    assert_eq!((remote.attempts().len(), remote.tried_at("tools/call").len()), (1, 1));
    fleet.finish().await;
}
