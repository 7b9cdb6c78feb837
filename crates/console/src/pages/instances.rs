//! Instances as a table, which works without a script.

use maud::{Markup, html};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::slot::RequestedState;

use super::layout::{NavigationEntry, PageFrame, instance_link, page, status_label};
use super::{segment, shown};
use crate::v1::{InstanceOrder, InstancePage, InstanceQuery};

/// Returns the page.
pub fn instances_page(found: &InstancePage, query: &InstanceQuery, frame: &PageFrame) -> Markup {
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    let orders = [
        (InstanceOrder::Name, "name"),
        (InstanceOrder::Status, "status"),
        (InstanceOrder::Since, "since"),
        (InstanceOrder::Restarts, "restarts"),
        (InstanceOrder::Calls, "calls"),
    ];
    let order = orders.iter().find(|(order, _)| *order == query.sort).map_or("name", |(_, name)| name);
    let content = html! {
        h1 { "Instances " span.count { (found.total) } }
        form.filters method="get" action={ (frame.root) "instances" } {
            label { "Name contains " input name="q" type="search" value=(text(&query.q)); }
            label { "Team " input name="team" value=(text(&query.team)); }
            label { "User " input name="user" value=(text(&query.user)); }
            label { "Server " input name="server" value=(text(&query.server)); }
            label { "Status "
                select name="status" {
                    option value="" { "all" }
                    @for status in Status::ALL {
                        option value=(status) selected[query.status.as_deref() == Some(status.as_str())] { (status.as_str().replace('_', " ")) }
                    }
                }
            }
            label { "Order "
                select name="sort" {
                    @for (_, name) in orders { option value=(name) selected[*name == *order] { (name) } }
                }
            }
            button type="submit" { "Show" }
        }
        div.scroll tabindex="0" role="region" aria-label="Table of instances" {
            table {
                thead { tr {
                    th scope="col" { "Instance" } th scope="col" { "Status" } th scope="col" { "Since" }
                    th.number scope="col" { "Restarts" } th.number scope="col" { "Calls" } th.number scope="col" { "Errors" }
                    th.number scope="col" { "Tools" } th scope="col" { "Reason" }
                } }
                tbody #instances data-live {
                    @for one in &found.items {
                        tr {
                            th scope="row" { (instance_link(frame, &one.instance, &one.instance)) }
                            td { (status_label(one.status.as_str(), one.dormant, one.want == RequestedState::Stopped)) }
                            td { time.since datetime=(one.since) { (one.since) } }
                            td.number { (one.restarts) } td.number { (one.calls) } td.number { (one.errors) } td.number { (one.tools) }
                            td.why { (shown(one.status_message.as_deref().unwrap_or_default())) }
                        }
                    }
                }
            }
        }
        @if found.items.is_empty() { p { "No instance matches. " a href={ (frame.root) "instances" } { "Show all" } } }
        @if let Some(next) = &found.next {
            p { a.button href={ (frame.root) "instances?" (next_query(query, order, next)) } { "Next page" } }
        }
    };
    page(frame, NavigationEntry::Instances, "instances", "Instances", &content)
}

fn next_query(query: &InstanceQuery, order: &str, cursor: &str) -> String {
    let given = [
        ("q", &query.q),
        ("team", &query.team),
        ("user", &query.user),
        ("server", &query.server),
        ("status", &query.status),
    ];
    let mut parts: Vec<String> =
        given.iter().filter_map(|(key, value)| Some(format!("{key}={}", segment(value.as_ref()?)))).collect();
    parts.push(format!("sort={order}&descending={}&cursor={}", query.descending, segment(cursor)));
    parts.join("&")
}
