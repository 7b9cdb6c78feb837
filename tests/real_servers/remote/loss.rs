//! Real servers that die and return: detection, events, and the reconnect without help.

use std::time::Duration;

use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::remote::ConnectionState;
use mcp_satellite_actors::model::status::Status;

use super::servers::{Kind, Server, Stream};
use super::support::{Instance, satellite};

/// Makes the backoff so long that only a call or a person causes an attempt.
fn no_automatic_attempts(policy: &mut Policy) {
    policy.reconnect.backoff_min = Duration::from_secs(3600);
    policy.reconnect.backoff_max = Duration::from_secs(3600);
}

/// Returns the events since a mark, without scheduled attempts: their number varies.
async fn events_without_attempts(instance: &Instance, mark: usize) -> Vec<String> {
    let events = instance.all_events_since(mark).await;
    events.into_iter().filter(|event| !event.starts_with("attempt ")).collect()
}

/// Returns the expected events from a loss with these reasons to the end of the discovery, in order.
fn loss_and_recovery(why: &[&str], attempts: &str) -> Vec<String> {
    let back = ["connecting: Server recovered, re-discovering tools", "discovering_tools", "syncing_tools"];
    let end = ["tools discovered", "online", attempts];
    [&["disconnected, not intended"], why, &back, &end].concat().into_iter().map(ToOwned::to_owned).collect()
}

async fn assert_reconnects_by_itself(instance: &Instance, server: &mut Server) {
    instance.assert_callable(server).await;
    let mark = instance.mark().await;
    server.kill();
    let view = instance.offline().await;
    assert_eq!(view.connection, Some(ConnectionState::Reconnecting), "{view:#?}");
    assert!(view.offered_catalogue().is_none() && view.catalogue.is_some(), "the catalogue is offered or not kept");
    // If the second attempt is scheduled, the first one has failed.
    instance.wait_event(mark, "attempt 2 is scheduled").await;
    server.start_again();
    let view = instance.online().await;
    assert_eq!((view.connection, view.attempt, view.next_retry_at), (Some(ConnectionState::Connected), None, None));
    instance.assert_callable(server).await;

    let events = events_without_attempts(instance, mark).await;
    // The reason of a broken connection depends on the order of its last packets.
    let broke = events[1].starts_with("offline: Server unreachable: ") && !events[1].ends_with("connection refused");
    let refused = "offline: Server unreachable: connection refused";
    let why = if broke { vec![events[1].as_str(), refused] } else { vec![refused] };
    let last = events.last().unwrap();
    assert_eq!(events, loss_and_recovery(&why, last));
    let attempts: u32 = last.strip_prefix("reconnected at attempt ").unwrap().parse().unwrap();
    assert!(attempts >= 2, "{last}");
    let scheduled = instance.all_events_since(mark).await;
    let scheduled: Vec<_> = scheduled.iter().filter(|event| event.starts_with("attempt ")).take(2).collect();
    assert_eq!(scheduled, ["attempt 1 is scheduled", "attempt 2 is scheduled"]);
}

fn assert_reconnects_after_a_kill(kind: Kind) {
    let mut server = Server::start(kind);
    satellite(async |satellite| {
        let instance = satellite.online(&server, |_| {}).await;
        assert_reconnects_by_itself(&instance, &mut server).await;
    });
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn server_everything_over_streamable_http_reconnects_after_a_kill() {
    assert_reconnects_after_a_kill(Kind::everything_http(Stream::Present));
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn server_everything_over_http_and_sse_reconnects_after_a_kill() {
    assert_reconnects_after_a_kill(Kind::everything_sse());
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_server_of_the_python_sdk_reconnects_after_a_kill() {
    assert_reconnects_after_a_kill(Kind::python_sdk(Stream::Present, &[]));
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_server_of_fastmcp_reconnects_after_a_kill() {
    assert_reconnects_after_a_kill(Kind::fastmcp(Stream::Present, &[]));
}

/// Asserts that a call to a lost instance makes one attempt and returns the time of the next scheduled one, and that a
/// call after the return of the server reconnects the instance.
fn assert_call_reconnects(kind: Kind) {
    let mut server = Server::start(kind);
    satellite(async |satellite| {
        let instance = satellite.online(&server, no_automatic_attempts).await;
        server.kill();
        let due = instance.offline().await.next_retry_at;
        let (tool, arguments, _) = &server.kind.unrepeatable;
        for _ in 0..2 {
            let refused = instance.call(tool, arguments).await.unwrap_err();
            let CallError::Reconnecting { next_retry_ms: Some(next), last_error, .. } = refused else {
                panic!("{refused:?}")
            };
            assert_eq!(last_error, "connection refused");
            assert!(next > 3_000_000, "the call changed the schedule: next attempt in {next} ms");
            instance.until("on its schedule again", |view| view.next_retry_at == due).await;
        }
        let mark = instance.mark().await;
        server.start_again();
        instance.assert_callable(&server).await;
        instance.online().await;
        let events = events_without_attempts(&instance, mark).await;
        assert_eq!(events, loss_and_recovery(&[], "reconnected at attempt 3")[1..]);
    });
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_call_reconnects_server_everything_over_streamable_http() {
    assert_call_reconnects(Kind::everything_http(Stream::Present));
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_call_reconnects_server_everything_over_http_and_sse() {
    assert_call_reconnects(Kind::everything_sse());
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_call_reconnects_a_server_of_the_python_sdk() {
    assert_call_reconnects(Kind::python_sdk(Stream::Present, &[]));
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_call_reconnects_a_server_of_fastmcp() {
    assert_call_reconnects(Kind::fastmcp(Stream::Present, &[]));
}

/// Asserts that a call detects a restart of a server without a stream, and reconnects.
fn assert_call_detects_forgotten_sessions(kind: Kind) {
    let mut server = Server::start(kind);
    satellite(async |satellite| {
        let instance = satellite.online(&server, no_automatic_attempts).await;
        let mark = instance.mark().await;
        server.kill();
        server.start_again();
        assert_eq!(events_without_attempts(&instance, mark).await, [""; 0]);
        let view = instance.view();
        assert_eq!((view.status, view.connection), (Status::Online, Some(ConnectionState::Connected)));

        // A repeatable call is repeated in the new session at once.
        instance.assert_callable(&server).await;
        instance.online().await;
        let expired = format!("the session has expired {}", server.kind.unknown_session);
        let offline = format!("offline: Server disconnected: {expired}");
        assert_eq!(
            events_without_attempts(&instance, mark).await,
            loss_and_recovery(&[&offline], "reconnected at attempt 1")
        );

        // An unrepeatable call is repeated too: a request in an unknown session was not executed.
        server.kill();
        server.start_again();
        let (tool, arguments, answer) = &server.kind.unrepeatable;
        let text = instance.call(tool, arguments).await.unwrap();
        assert!(text.starts_with(answer), "{text}");
    });
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_call_detects_that_server_everything_forgot_its_sessions() {
    assert_call_detects_forgotten_sessions(Kind::everything_http(Stream::Missing));
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_call_detects_that_a_server_of_the_python_sdk_forgot_its_sessions() {
    assert_call_detects_forgotten_sessions(Kind::python_sdk(Stream::Missing, &[]));
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_call_detects_that_a_server_of_fastmcp_forgot_its_sessions() {
    assert_call_detects_forgotten_sessions(Kind::fastmcp(Stream::Missing, &["--json"]));
}

/// Asserts that a call detects the end of a server without a stream, and that the instance then reconnects by itself.
fn assert_call_detects_the_loss(kind: Kind) {
    let mut server = Server::start(kind);
    satellite(async |satellite| {
        let instance = satellite.online(&server, |_| {}).await;
        let mark = instance.mark().await;
        server.kill();
        let (tool, arguments, _) = &server.kind.unrepeatable;
        // The call was not sent, so it is tried again, first in the same session and then in a new one.
        let failed = instance.call(tool, arguments).await.unwrap_err();
        let CallError::Reconnecting { last_error, .. } = failed else { panic!("{failed:?}") };
        assert_eq!(last_error, "connection refused");
        instance.wait_event(mark, "attempt 2 is scheduled").await;
        server.start_again();
        instance.online().await;
        instance.assert_callable(&server).await;
        let events = events_without_attempts(&instance, mark).await;
        let offline = "offline: Server unreachable: connection refused";
        assert_eq!(events, loss_and_recovery(&[offline], events.last().unwrap()));
    });
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_call_detects_the_loss_of_server_everything_which_then_reconnects() {
    assert_call_detects_the_loss(Kind::everything_http(Stream::Missing));
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_call_detects_the_loss_of_a_python_sdk_server_which_then_reconnects() {
    assert_call_detects_the_loss(Kind::python_sdk(Stream::Missing, &["--json"]));
}
