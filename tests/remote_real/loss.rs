//! Real servers that die and return: how it is noticed, what is told, and that nobody has to help.

use std::time::Duration;

use mcp_satellite_actors::model::exit::{CallError, Fate};
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::remote::Connection;
use mcp_satellite_actors::model::status::Status;

use crate::servers::{Kind, Server, Stream};
use crate::support::{Instance, satellite};

/// No attempt is made for its time's sake: only a call or a person brings one.
fn only_when_asked(policy: &mut Policy) {
    policy.reconnect.backoff_min = Duration::from_secs(3600);
    policy.reconnect.backoff_max = Duration::from_secs(3600);
}

/// What is told from a connection's beginning to `online`.
const DISCOVERED: [&str; 4] = ["discovering_tools", "tools discovered", "syncing_tools", "online"];

/// Without what there may be any number of.
fn without_attempts(told: Vec<String>) -> Vec<String> {
    told.into_iter().filter(|told| !told.starts_with("attempt ")).collect()
}

async fn comes_back_by_itself(instance: &Instance, server: &mut Server) {
    instance.assert_callable(server).await;
    let mark = instance.mark().await;
    server.kill();
    let view = instance.offline().await;
    assert_eq!(view.connection, Some(Connection::Reconnecting), "{view:#?}");
    assert!(view.offered().is_none() && view.catalogue.is_some(), "what it had is kept, and not offered");
    // More than one, so that at least one has failed.
    instance.hears(mark, "attempt 2 is scheduled").await;
    let offline = instance.all_told(mark).await;

    server.start_again();
    let view = instance.online().await;
    assert_eq!((view.connection, view.attempt, view.next_retry_at), (Some(Connection::Connected), None, None));
    instance.assert_callable(server).await;
    println!("{offline:#?} {:#?}", instance.all_told(mark).await);
}

fn background(kind: Option<Kind>) {
    let Some(kind) = kind else { return };
    let mut server = Server::start(kind);
    satellite(async |satellite| {
        let instance = satellite.online(&server, |_| {}).await;
        comes_back_by_itself(&instance, &mut server).await;
    });
}

#[test]
fn server_everything_over_streamable_http_is_killed_and_back_by_itself() {
    background(Kind::everything_http(Stream::There));
}

#[test]
fn server_everything_over_http_and_sse_is_killed_and_back_by_itself() {
    background(Kind::everything_sse());
}

#[test]
fn a_server_of_the_python_sdk_is_killed_and_back_by_itself() {
    background(Kind::python_sdk(Stream::There, &[]));
}

#[test]
fn a_server_of_fastmcp_is_killed_and_back_by_itself() {
    background(Kind::fastmcp(Stream::There, &[]));
}
