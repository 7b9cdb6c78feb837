//! Clients: who is connected, which tokens exist, and how a client is connected.

use maud::{Markup, html};
use mcp_satellite_gateway::clients::ClientStatus;

use super::layout::{NavigationEntry, PageFrame, page};
use super::{shown, shown_lines};

/// Contents of the page of clients.
#[derive(Debug, Clone)]
pub struct ClientsShape {
    pub clients: Vec<ClientStatus>,
    /// Name and role of each console token; `None` if the principal may not see them.
    pub tokens: Option<Vec<(String, String)>>,
    /// URL of the MCP endpoint, if it is open.
    pub url: Option<String>,
    pub connectable: Vec<ConnectableClient>,
    /// Entry of the bridge that most clients read.
    pub bridge_entry: String,
}

/// A client that `satellite connect` can connect.
#[derive(Debug, Clone)]
pub struct ConnectableClient {
    /// Command that connects the client.
    pub command: String,
    /// Configuration file of the client that contains only the entry.
    pub file: String,
}

/// Returns the page.
pub fn clients_page(shape: &ClientsShape, frame: &PageFrame) -> Markup {
    let content = html! {
        h1 { "Clients" }
        section #sessions data-live aria-labelledby="sessions-title" {
            h2 #sessions-title { "Connected " span.count { (shape.clients.len()) } }
            @if shape.clients.is_empty() { p { "No MCP client is connected." } }
            @else {
                div.scroll tabindex="0" role="region" aria-label="Table of clients" { table {
                    thead { tr {
                        th scope="col" { "Client" } th scope="col" { "User" } th scope="col" { "Protocol" } th scope="col" { "Endpoint" }
                        th scope="col" { "Session" } th.number scope="col" { "Open" } th.number scope="col" { "Calls" }
                        th.number scope="col" { "Connected" } th.number scope="col" { "Idle" }
                    } }
                    tbody {
                        @for client in &shape.clients {
                            tr {
                                th scope="row" { (shown(&client.client)) " " (shown(&client.client_version)) }
                                td { (shown(&client.team)) "/" (shown(&client.user)) }
                                td { (shown(&client.protocol)) } td { (shown(&client.endpoint)) }
                                td { code { (shown(client.session_id.as_deref().unwrap_or("none"))) } }
                                td.number { (client.open) } td.number { (client.tool_calls) }
                                td.number { (client.connected_seconds) " s" } td.number { (client.idle_seconds) " s" }
                            }
                        }
                    }
                } }
            }
        }
        section aria-labelledby="connect-title" {
            h2 #connect-title { "Connect a client" }
            @if let Some(url) = &shape.url {
                p { "The MCP endpoint is " code { (shown(url)) } ". These commands write the entry into the client's own configuration, on the satellite's machine:" }
                ul.commands {
                    @for client in &shape.connectable {
                        li {
                            (command(&client.command))
                            details { summary { "Entry to paste" } (pasted(&client.file)) }
                        }
                    }
                }
                p { "For any other client, paste this entry. The client starts the bridge, which needs no token in a file:" }
                (command(&shape.bridge_entry))
                p { "A client on another machine needs the URL and the token of a user:" }
                (command(&format!(r#"{{"mcpServers": {{"satellite": {{"type": "http", "url": "{url}", "headers": {{"Authorization": "Bearer TOKEN"}}}}}}}}"#)))
            } @else { p { "The MCP endpoint is off. Add a table " code { "[gateway]" } " to the configuration and run " code { "satellite reload" } "." } }
        }
        @if let Some(tokens) = &shape.tokens {
            section aria-labelledby="tokens-title" {
                h2 #tokens-title { "Tokens of the console" }
                p { "A token's value is never shown. " code { "[[console.tokens]]" } " in the configuration adds and removes tokens." }
                ul { @for (name, role) in tokens { li { (shown(name)) " · " (role) } } }
            }
        }
    };
    page(frame, NavigationEntry::Clients, "clients", "Clients", &content)
}

fn pasted(text: &str) -> Markup {
    html! { pre tabindex="0" { (shown_lines(text)) } button type="button" data-copy=(text) { "Copy" } }
}

fn command(text: &str) -> Markup {
    html! { span.command { code { (text) } button type="button" data-copy=(text) { "Copy" } } }
}
