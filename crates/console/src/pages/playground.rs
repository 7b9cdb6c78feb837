//! Playground: calls a tool as an MCP client in the name of the instance's user.

use maud::{Markup, html};
use mcp_satellite_actors::rules::slot::RequestedState;
use serde_json::value::RawValue;

use super::layout::{NavigationEntry, PageFrame, instance_link, page, status_label};
use super::{script_json, shown};
use crate::api::InstanceStatus;

/// Contents of the playground.
#[derive(Debug, Clone)]
pub struct PlaygroundShape {
    pub status: InstanceStatus,
    /// Definitions of the tools, as the server sent them.
    pub tools: Vec<Box<RawValue>>,
    /// Name of the tool to select.
    pub selected: Option<String>,
}

/// Returns the page.
pub fn playground_page(shape: &PlaygroundShape, frame: &PageFrame) -> Markup {
    let PlaygroundShape { status, tools, selected } = shape;
    let content = html! {
        h1 { "Playground" }
        p #state data-live {
            (instance_link(frame, &status.instance, &status.instance)) " "
            (status_label(status.status.as_str(), status.dormant, status.want == RequestedState::Stopped))
        }
        p { "Calls are made in the name of " b { (shown(&status.team)) "/" (shown(&status.user)) } " and recorded with your login." }
        @if tools.is_empty() { p.error { "The instance offers no tools now." } }
        noscript { p.error { "The playground needs the script of the console. " code { "satellite call" } " calls tools on the command line." } }
        div.columns #playground data-instance=(status.instance) data-selected=(selected.as_deref().unwrap_or_default()) {
            section aria-labelledby="call-title" {
                h2 #call-title { "Call" }
                label for="tool" { "Tool" }
                select #tool {}
                p #tool-description {}
                form #arguments {}
                p.actions {
                    button #call type="submit" form="arguments" disabled { "Call" } " "
                    button #cancel type="button" disabled { "Cancel" }
                }
            }
            section aria-labelledby="result-title" {
                h2 #result-title { "Result" }
                p #progress role="status" { "No call was made." }
                progress #bar hidden aria-label="Progress of the call" {}
                div #question {}
                div #result {}
                details { summary { "Messages" } ol #messages.output tabindex="0" aria-label="Messages between the console and the server" {} }
            }
        }
        script #tools type="application/json" { (script_json(tools)) }
    };
    page(frame, NavigationEntry::Other, "playground", "Playground", &content)
}
