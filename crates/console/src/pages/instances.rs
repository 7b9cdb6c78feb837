//! Instances as a table, which works without a script.

use maud::{Markup, html};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::slot::RequestedState;

use super::layout::{ConsoleSite, NavigationEntry, PageFrame, instance_link, page, status_label};
use super::{segment, shown};
use crate::api::InstanceStatus;
use crate::v1::{InstanceOrder, InstancePage, InstanceQuery};

/// A page of the table.
#[derive(Debug, Clone)]
pub struct InstanceListing {
    /// Number of instances that match the query, on all pages.
    pub total: usize,
    pub rows: Vec<InstanceTableRow>,
    /// Value of `cursor` for the next page.
    pub next: Option<String>,
}

/// A row of the table.
#[derive(Debug, Clone)]
pub struct InstanceTableRow {
    /// Full name.
    pub name: String,
    pub status: Status,
    pub is_dormant: bool,
    pub is_stopped: bool,
    /// Time at which the instance entered the status, in RFC 3339.
    pub since: String,
    pub message: Option<String>,
    /// `None` at a backend, which does not know them.
    pub counters: Option<RowCounters>,
}

/// Counters of an instance.
#[derive(Debug, Clone, Copy)]
pub struct RowCounters {
    pub restarts: u64,
    pub calls: u64,
    pub errors: u64,
    pub tools: usize,
}

impl From<InstancePage> for InstanceListing {
    fn from(page: InstancePage) -> Self {
        Self { total: page.total, rows: page.items.into_iter().map(InstanceTableRow::from).collect(), next: page.next }
    }
}

impl From<InstanceStatus> for InstanceTableRow {
    fn from(status: InstanceStatus) -> Self {
        let InstanceStatus { restarts, calls, errors, tools, .. } = status;
        Self {
            name: status.instance,
            status: status.status,
            is_dormant: status.dormant,
            is_stopped: status.want == RequestedState::Stopped,
            since: status.since,
            message: status.status_message,
            counters: Some(RowCounters { restarts, calls, errors, tools }),
        }
    }
}

/// Returns the page.
pub fn instances_page(found: &InstanceListing, query: &InstanceQuery, frame: &PageFrame) -> Markup {
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    let orders = [
        (InstanceOrder::Name, "name"),
        (InstanceOrder::Status, "status"),
        (InstanceOrder::Since, "since"),
        (InstanceOrder::Restarts, "restarts"),
        (InstanceOrder::Calls, "calls"),
    ];
    let has_counters = frame.site == ConsoleSite::Satellite;
    let orders = if has_counters { &orders[..] } else { &orders[..3] };
    let order = orders.iter().find(|(order, _)| *order == query.sort).map_or("name", |(_, name)| *name);
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
                    @for (_, name) in orders { option value=(name) selected[*name == order] { (name) } }
                }
            }
            button type="submit" { "Show" }
        }
        div.scroll tabindex="0" role="region" aria-label="Table of instances" {
            table {
                thead { tr {
                    th scope="col" { "Instance" } th scope="col" { "Status" } th scope="col" { "Since" }
                    @if has_counters {
                        th.number scope="col" { "Restarts" } th.number scope="col" { "Calls" } th.number scope="col" { "Errors" }
                        th.number scope="col" { "Tools" }
                    }
                    th scope="col" { "Reason" }
                } }
                tbody #instances data-live {
                    @for one in &found.rows {
                        tr {
                            th scope="row" { (instance_link(frame, &one.name, &one.name)) }
                            td { (status_label(one.status.as_str(), one.is_dormant, one.is_stopped)) }
                            td { time.since datetime=(one.since) { (one.since) } }
                            @if let Some(counters) = &one.counters {
                                td.number { (counters.restarts) } td.number { (counters.calls) } td.number { (counters.errors) } td.number { (counters.tools) }
                            }
                            td.why { (shown(one.message.as_deref().unwrap_or_default())) }
                        }
                    }
                }
            }
        }
        @if found.rows.is_empty() { p { "No instance matches. " a href={ (frame.root) "instances" } { "Show all" } } }
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
