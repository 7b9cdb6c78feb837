//! What real servers offer arrives as they offer it.

use mcp_satellite_actors::model::remote::ConnectionState;
use mcp_satellite_actors::model::status::Status;

use crate::servers::{Kind, Server, Stream};
use crate::support::satellite;

fn is_listed_called_and_reconnected(kind: Kind) {
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

        // A person wants another connection: the old one is ended tidily, so that the server need not keep it.
        let mark = instance.mark().await;
        assert_eq!(instance.reconnect().await, Status::Online);
        let wanted = [
            "connecting: reconnecting on request",
            "disconnected, intended",
            // Nothing has recovered: it was never away.
            "discovering_tools",
            "syncing_tools",
            "tools discovered",
            "online",
            "reconnected at attempt 1",
        ];
        assert_eq!(instance.all_told(mark).await, wanted);
        server.logs(server.kind.farewell);
        instance.assert_callable(&server).await;
    });
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn server_everything_over_streamable_http_is_listed_called_and_reconnected() {
    is_listed_called_and_reconnected(Kind::everything_http(Stream::There));
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn server_everything_over_http_and_sse_is_listed_called_and_reconnected() {
    is_listed_called_and_reconnected(Kind::everything_sse());
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_server_of_the_python_sdk_is_listed_called_and_reconnected() {
    is_listed_called_and_reconnected(Kind::python_sdk(Stream::There, &[]));
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_server_of_the_python_sdk_that_answers_with_json_is_listed_called_and_reconnected() {
    is_listed_called_and_reconnected(Kind::python_sdk(Stream::Missing, &["--json"]));
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_server_of_fastmcp_is_listed_called_and_reconnected() {
    is_listed_called_and_reconnected(Kind::fastmcp(Stream::There, &[]));
}
