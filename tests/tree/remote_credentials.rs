//! Credentials that a server rejects, and their replacement.

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
use testkit::fleet::{Fleet, Server, seconds};
use tokio::time::sleep;

use crate::remote_support::{
    DAY, FORBIDDEN, REFUSED, UNAUTHORIZED, event_lines_after_start, lose_connection, until_attempting, until_attempts,
    until_reconnected,
};

const HEADER: &str = "Authorization";
const OLD: &str = "Bearer old-key";
const NEW: &str = "Bearer new-key";

fn server(key: &str) -> Server {
    Server::remote("a").header(HEADER, key)
}

/// Makes the server accept only this value of the header.
fn require_key(fleet: &Fleet, id: &InstanceId, key: &str) {
    fleet.remote(id).change(|behavior| behavior.required_header = Some((HEADER.to_owned(), key.into())));
}

async fn configure_key(fleet: &Fleet, key: &str) {
    assert_eq!(fleet.runtime.install(server(key).spec).await, Ok(InstallOutcome::Updated));
}

#[tokio::test(start_paused = true)]
async fn rejected_credentials_refuse_calls_until_new_ones_are_configured() {
    for (kind, why) in [(UNAUTHORIZED, "Authentication failed (HTTP 401)"), (FORBIDDEN, "Access forbidden (HTTP 403)")]
    {
        let fleet = Fleet::start().await;
        let id = fleet.online(server(OLD)).await;
        let remote = fleet.remote(&id);
        require_key(&fleet, &id, NEW);
        remote.change(|behavior| behavior.refusal = Some(kind));
        let first_answer = fleet.call(&id, "echo", json!({})).await;
        let view = fleet.until(&id, Status::RequiresReauth).await;
        assert_eq!((view.message.as_deref(), view.connection), (Some(why), Some(ConnectionState::Error)));
        assert!(fleet.runtime.tools(&id).is_none());
        let blocked = fleet.call(&id, "echo", json!({})).await;
        for answer in [&first_answer, &blocked] {
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

        configure_key(&fleet, NEW).await;
        until_reconnected(&fleet, &id).await;
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
        assert_eq!(event_lines_after_start(&fleet, &id).await, expected);
        fleet.finish().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_healthy_connection_continues_with_new_credentials() {
    let fleet = Fleet::start().await;
    let id = fleet.online(server(OLD)).await;
    let remote = fleet.remote(&id);
    let (answer, ()) = futures::join!(fleet.call(&id, "sleep", json!({"ms": 2000})), async {
        sleep(seconds(1.0)).await;
        configure_key(&fleet, NEW).await;
        require_key(&fleet, &id, NEW);
    });
    assert!(answer.is_ok(), "{answer:?}");
    assert!(fleet.call(&id, "echo", json!({})).await.is_ok(), "the session continues");
    assert_eq!((remote.attempts().len(), remote.sessions().opened), (1, 1));
    assert_eq!(event_lines_after_start(&fleet, &id).await, Vec::<String>::new());
    // The next connection uses the new credentials, too.
    lose_connection(&fleet, &id).await;
    remote.bring_up();
    until_reconnected(&fleet, &id).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn old_and_new_credentials_are_masked_on_a_connection_that_used_both() {
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
    let events = fleet.event_data(&id, "mcp.tool.executed").await;
    let hidden = events.iter().filter(|event| event["error_message"].to_string().contains("[secret] and [secret]"));
    assert_eq!(hidden.count(), 2, "{events:?}");
    assert_eq!(fleet.remote(&id).attempts().len(), 1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn new_credentials_that_are_rejected_too_leave_requires_reauth() {
    let fleet = Fleet::start().await;
    let remote = fleet.remote(&server(OLD).spec.id);
    remote.change(|behavior| behavior.required_header = Some((HEADER.to_owned(), NEW.into())));
    let id = fleet.add(server(OLD)).await;
    fleet.until(&id, Status::RequiresReauth).await;
    configure_key(&fleet, "Bearer other").await;
    until_attempts(&remote, 2).await;
    fleet.until(&id, Status::RequiresReauth).await;
    configure_key(&fleet, NEW).await;
    until_reconnected(&fleet, &id).await;
    assert_eq!(remote.attempts().len(), 3);
    assert_eq!(fleet.event_data(&id, "mcp.server.started").await.len(), 1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn credentials_configured_during_a_rejected_attempt_are_tried_at_once() {
    let fleet = Fleet::start().await;
    let remote = fleet.remote(&server(OLD).spec.id);
    remote.change(|behavior| {
        (behavior.required_header, behavior.connect_delay) = (Some((HEADER.to_owned(), NEW.into())), seconds(5.0));
    });
    let id = fleet.add(server(OLD)).await;
    until_attempting(&remote).await;
    configure_key(&fleet, NEW).await;
    until_reconnected(&fleet, &id).await;
    assert!(remote.attempts().len() <= 2);
    let statuses = fleet.statuses(&id).await;
    assert!(statuses.iter().all(|(status, _)| status != "requires_reauth"), "{statuses:?}");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn new_credentials_during_a_reconnect_are_used_by_the_next_scheduled_attempt() {
    let fleet = Fleet::start().await;
    let id = fleet.online(server(OLD)).await;
    let remote = fleet.remote(&id);
    lose_connection(&fleet, &id).await;
    until_attempts(&remote, 6).await;
    let next = fleet.until_view(&id, |view| view.attempt == Some(6)).await.next_retry_at;
    configure_key(&fleet, NEW).await;
    require_key(&fleet, &id, NEW);
    remote.bring_up();
    assert_eq!(fleet.view(&id).next_retry_at, next);
    assert_eq!(remote.attempts().len(), 6);
    until_reconnected(&fleet, &id).await;
    assert_eq!(remote.attempts().len(), 7);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_changed_url_opens_a_new_connection() {
    let fleet = Fleet::start().await;
    let id = fleet.online(server(OLD)).await;
    let remote = fleet.remote(&id);
    let mut changed = server(NEW);
    if let ServerTarget::Remote { url, .. } = &mut changed.spec.target {
        url.push_str("/elsewhere");
    }
    assert_eq!(fleet.runtime.install(changed.spec).await, Ok(InstallOutcome::Updated));
    until_attempts(&remote, 2).await;
    until_reconnected(&fleet, &id).await;
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
    assert_eq!(event_lines_after_start(&fleet, &id).await, expected);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_rejected_health_check_or_reconnect_requires_new_credentials() {
    let fleet = Fleet::start().await;
    let checked = fleet.online(server(OLD)).await;
    require_key(&fleet, &checked, NEW);
    let view = fleet.until(&checked, Status::RequiresReauth).await;
    assert_eq!(
        view.message.as_deref(),
        Some("Authentication failed (HTTP 401)"),
        "the health check found it, without a call"
    );

    let mut other = Server::remote("b").header(HEADER, OLD);
    other.spec.name = "files-acme-alice-b".into();
    let other = fleet.online(other).await;
    let remote = fleet.remote(&other);
    remote.kill(REFUSED);
    remote.report_session_lost(REFUSED);
    fleet.until(&other, Status::Offline).await;
    require_key(&fleet, &other, NEW);
    remote.bring_up();
    fleet.until(&other, Status::RequiresReauth).await;
    let attempts = remote.attempts().len();
    sleep(seconds(3600.0)).await;
    assert_eq!(remote.attempts().len(), attempts, "no attempt is scheduled");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_rejected_for_replaced_credentials_is_repeated_once_with_new_ones() {
    for (given, refused) in [(NEW, false), ("Bearer wrong", true)] {
        let fleet = Fleet::start().await;
        let id = fleet.online(server(OLD)).await;
        let remote = fleet.remote(&id);
        remote.change(|behavior| behavior.delay = seconds(2.0));
        require_key(&fleet, &id, NEW);
        // The server rejects the credentials with which the call was sent.
        remote.fail_next([UNAUTHORIZED]);
        let (answer, ()) = futures::join!(fleet.call(&id, "echo", json!({})), async {
            sleep(seconds(1.0)).await;
            configure_key(&fleet, given).await;
        });
        assert_eq!(remote.tried_at("tools/call").len(), 2);
        if refused {
            assert!(matches!(answer, Err(CallError::Refused { status: Status::RequiresReauth, .. })), "{answer:?}");
            fleet.until(&id, Status::RequiresReauth).await;
        } else {
            assert!(answer.is_ok(), "{answer:?}");
            assert_eq!(remote.attempts().len(), 1, "the session continues");
            assert_eq!(event_lines_after_start(&fleet, &id).await, Vec::<String>::new());
        }
        fleet.finish().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_rejected_long_after_a_credential_change_is_not_repeated() {
    let fleet = Fleet::start().await;
    let id = fleet.online(server(OLD)).await;
    configure_key(&fleet, NEW).await;
    sleep(DAY).await;
    require_key(&fleet, &id, "Bearer the next");
    let refused = fleet.call(&id, "echo", json!({})).await;
    assert!(matches!(refused, Err(CallError::Refused { status: Status::RequiresReauth, .. })), "{refused:?}");
    fleet.until(&id, Status::RequiresReauth).await;
    let remote = fleet.remote(&id);
    assert_eq!((remote.attempts().len(), remote.tried_at("tools/call").len()), (1, 1));
    fleet.finish().await;
}
