//! The catalogues of real servers, calls of their tools, and reconnects on request.

use mcp_satellite_actors::model::remote::ConnectionState;
use mcp_satellite_actors::model::status::Status;

use super::servers::{Kind, Server, Stream};
use super::support::satellite;

fn assert_listed_called_and_reconnected(kind: Kind) {
    let server = Server::start(kind);
    satellite(async |satellite| {
        let instance = satellite.online(&server, |_| {}).await;
        let view = instance.view();
        assert_eq!(view.connection, Some(ConnectionState::Connected));
        let offers = server.kind.offers;
        assert_eq!(view.server.as_ref().unwrap().name, offers.server);
        let catalogue = view.offered_catalogue().unwrap();
        assert!(catalogue.tool(offers.tool).is_some(), "{catalogue:#?}");
        for (list, wanted) in [
            (&catalogue.resources, offers.resource),
            (&catalogue.resource_templates, offers.template),
            (&catalogue.prompts, offers.prompt),
        ] {
            assert!(list.iter().any(|entry| *entry.key == *wanted), "{wanted} is not in {list:#?}");
        }
        let may_be_repeated = |tool| catalogue.tool(tool).unwrap().repeatable;
        assert!(may_be_repeated(server.kind.repeatable.0) && !may_be_repeated(server.kind.unrepeatable.0));
        instance.assert_callable(&server).await;
        let (tool, arguments, answer) = &server.kind.unrepeatable;
        let text = instance.call(tool, arguments).await.unwrap();
        assert!(text.starts_with(answer), "{text}");

        // A reconnect on request ends the old session at the server.
        let mark = instance.mark().await;
        assert_eq!(instance.reconnect().await, Status::Online);
        let wanted = [
            "connecting: reconnecting on request",
            "disconnected, intended",
            // No "recovered" status: the server was never lost.
            "discovering_tools",
            "syncing_tools",
            "tools discovered",
            "online",
            "reconnected at attempt 1",
        ];
        assert_eq!(instance.all_events_since(mark).await, wanted);
        server.wait_log(server.kind.session_end_log);
        instance.assert_callable(&server).await;
    });
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn server_everything_over_streamable_http_is_listed_called_and_reconnected() {
    assert_listed_called_and_reconnected(Kind::everything_http(Stream::Present));
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn server_everything_over_http_and_sse_is_listed_called_and_reconnected() {
    assert_listed_called_and_reconnected(Kind::everything_sse());
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_server_of_the_python_sdk_is_listed_called_and_reconnected() {
    assert_listed_called_and_reconnected(Kind::python_sdk(Stream::Present, &[]));
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_server_of_the_python_sdk_that_answers_with_json_is_listed_called_and_reconnected() {
    assert_listed_called_and_reconnected(Kind::python_sdk(Stream::Missing, &["--json"]));
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_server_of_fastmcp_is_listed_called_and_reconnected() {
    assert_listed_called_and_reconnected(Kind::fastmcp(Stream::Present, &[]));
}
