//! Real servers that die and return: how it is noticed, what is told, and that nobody has to help.

use std::time::Duration;

use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::remote::ConnectionState;
use mcp_satellite_actors::model::status::Status;

use crate::servers::{Kind, Server, Stream};
use crate::support::{Instance, satellite};

/// No attempt is made for its time's sake: only a call or a person brings one.
fn only_when_asked(policy: &mut Policy) {
    policy.reconnect.backoff_min = Duration::from_secs(3600);
    policy.reconnect.backoff_max = Duration::from_secs(3600);
}

/// What was told, without attempts, of which there may be any number.
async fn told(instance: &Instance, mark: usize) -> Vec<String> {
    let told = instance.all_told(mark).await;
    told.into_iter().filter(|told| !told.starts_with("attempt ")).collect()
}

/// From a loss whose reasons are these to the end of the discovery, in order.
fn lost_and_back(why: &[&str], attempts: &str) -> Vec<String> {
    let back = ["connecting: Server recovered, re-discovering tools", "discovering_tools", "syncing_tools"];
    let end = ["tools discovered", "online", attempts];
    [&["disconnected, not intended"], why, &back, &end].concat().into_iter().map(ToOwned::to_owned).collect()
}

async fn comes_back_by_itself(instance: &Instance, server: &mut Server) {
    instance.assert_callable(server).await;
    let mark = instance.mark().await;
    server.kill();
    let view = instance.offline().await;
    assert_eq!(view.connection, Some(ConnectionState::Reconnecting), "{view:#?}");
    assert!(view.offered_catalogue().is_none() && view.catalogue.is_some(), "what it had is kept, and not offered");
    // More than one, so that at least one has failed.
    instance.hears(mark, "attempt 2 is scheduled").await;
    server.start_again();
    let view = instance.online().await;
    assert_eq!((view.connection, view.attempt, view.next_retry_at), (Some(ConnectionState::Connected), None, None));
    instance.assert_callable(server).await;

    let told = told(instance, mark).await;
    // How a connection ends whose other end was killed depends on which of its packets was first.
    let broke = told[1].starts_with("offline: Server unreachable: ") && !told[1].ends_with("connection refused");
    let refused = "offline: Server unreachable: connection refused";
    let why = if broke { vec![told[1].as_str(), refused] } else { vec![refused] };
    let last = told.last().unwrap();
    assert_eq!(told, lost_and_back(&why, last));
    let attempts: u32 = last.strip_prefix("reconnected at attempt ").unwrap().parse().unwrap();
    assert!(attempts >= 2, "{last}");
    let scheduled = instance.all_told(mark).await;
    let scheduled: Vec<_> = scheduled.iter().filter(|told| told.starts_with("attempt ")).take(2).collect();
    assert_eq!(scheduled, ["attempt 1 is scheduled", "attempt 2 is scheduled"]);
}

fn background(kind: Kind) {
    let mut server = Server::start(kind);
    satellite(async |satellite| {
        let instance = satellite.online(&server, |_| {}).await;
        comes_back_by_itself(&instance, &mut server).await;
    });
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn server_everything_over_streamable_http_is_killed_and_back_by_itself() {
    background(Kind::everything_http(Stream::There));
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn server_everything_over_http_and_sse_is_killed_and_back_by_itself() {
    background(Kind::everything_sse());
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_server_of_the_python_sdk_is_killed_and_back_by_itself() {
    background(Kind::python_sdk(Stream::There, &[]));
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_server_of_fastmcp_is_killed_and_back_by_itself() {
    background(Kind::fastmcp(Stream::There, &[]));
}

/// It is away, and nobody tries it: a call makes an attempt and says when the next one is due, another call brings it back.
fn called_while_away(kind: Kind) {
    let mut server = Server::start(kind);
    satellite(async |satellite| {
        let instance = satellite.online(&server, only_when_asked).await;
        server.kill();
        let due = instance.offline().await.next_retry_at;
        let (tool, arguments, _) = &server.kind.unrepeatable;
        for _ in 0..2 {
            let refused = instance.call(tool, arguments).await.unwrap_err();
            let CallError::Reconnecting { next_retry_ms: Some(next), last_error, .. } = refused else {
                panic!("{refused:?}")
            };
            assert_eq!(last_error, "connection refused");
            assert!(next > 3_000_000, "the schedule goes on where it was, not in {next} ms");
            instance.until("on its schedule again", |view| view.next_retry_at == due).await;
        }
        let mark = instance.mark().await;
        server.start_again();
        instance.assert_callable(&server).await;
        instance.online().await;
        let told = told(&instance, mark).await;
        assert_eq!(told, lost_and_back(&[], "reconnected at attempt 3")[1..]);
    });
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_call_brings_server_everything_over_streamable_http_back() {
    called_while_away(Kind::everything_http(Stream::There));
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_call_brings_server_everything_over_http_and_sse_back() {
    called_while_away(Kind::everything_sse());
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_call_brings_a_server_of_the_python_sdk_back() {
    called_while_away(Kind::python_sdk(Stream::There, &[]));
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_call_brings_a_server_of_fastmcp_back() {
    called_while_away(Kind::fastmcp(Stream::There, &[]));
}

/// It has no stream by which its end could be seen, and forgets its sessions while nobody looks: the next call finds out.
fn forgets_its_sessions(kind: Kind) {
    let mut server = Server::start(kind);
    satellite(async |satellite| {
        let instance = satellite.online(&server, only_when_asked).await;
        let mark = instance.mark().await;
        server.kill();
        server.start_again();
        assert_eq!(told(&instance, mark).await, [""; 0]);
        let view = instance.view();
        assert_eq!((view.status, view.connection), (Status::Online, Some(ConnectionState::Connected)));

        // What may be repeated is, in the new session, for which nobody has to wait.
        instance.assert_callable(&server).await;
        instance.online().await;
        let expired = format!("the session has expired {}", server.kind.stranger);
        let offline = format!("offline: Server disconnected: {expired}");
        assert_eq!(told(&instance, mark).await, lost_and_back(&[&offline], "reconnected at attempt 1"));

        // And so is what may not be carried out twice: a session that is not known has carried out nothing.
        server.kill();
        server.start_again();
        let (tool, arguments, answer) = &server.kind.unrepeatable;
        let text = instance.call(tool, arguments).await.unwrap();
        assert!(text.starts_with(answer), "{text}");
    });
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn server_everything_that_forgot_its_sessions_is_found_out_by_a_call() {
    forgets_its_sessions(Kind::everything_http(Stream::Missing));
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_server_of_the_python_sdk_that_forgot_its_sessions_is_found_out_by_a_call() {
    forgets_its_sessions(Kind::python_sdk(Stream::Missing, &[]));
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_server_of_fastmcp_that_forgot_its_sessions_is_found_out_by_a_call() {
    forgets_its_sessions(Kind::fastmcp(Stream::Missing, &["--json"]));
}

/// It has no stream by which its end could be seen, and is not there any more: the next call is the loss.
fn is_missed_by_a_call(kind: Kind) {
    let mut server = Server::start(kind);
    satellite(async |satellite| {
        let instance = satellite.online(&server, |_| {}).await;
        let mark = instance.mark().await;
        server.kill();
        let (tool, arguments, _) = &server.kind.unrepeatable;
        // Nothing of it was sent, so it is tried again, in the session, and then in a new one.
        let failed = instance.call(tool, arguments).await.unwrap_err();
        let CallError::Reconnecting { last_error, .. } = failed else { panic!("{failed:?}") };
        assert_eq!(last_error, "connection refused");
        instance.hears(mark, "attempt 2 is scheduled").await;
        server.start_again();
        instance.online().await;
        instance.assert_callable(&server).await;
        let told = told(&instance, mark).await;
        let offline = "offline: Server unreachable: connection refused";
        assert_eq!(told, lost_and_back(&[offline], told.last().unwrap()));
    });
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn server_everything_that_is_gone_is_missed_by_a_call_and_back_by_itself() {
    is_missed_by_a_call(Kind::everything_http(Stream::Missing));
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_server_of_the_python_sdk_that_is_gone_is_missed_by_a_call_and_back_by_itself() {
    is_missed_by_a_call(Kind::python_sdk(Stream::Missing, &["--json"]));
}
