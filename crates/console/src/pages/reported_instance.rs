//! One instance at a backend: its last reported state, commands for it, and its stored events.

use maud::{Markup, html};
use mcp_satellite_backend::server::api::{CommandRecordView, InstanceState};

use super::events::{EventEntry, event_items};
use super::fleet::command_table;
use super::layout::{NavigationEntry, PageFrame, page, status_label, with_commands};
use super::{may_operate, segment, shown};
use crate::feed::{InstanceRow, STOPPED};

/// Contents of the page.
#[derive(Debug, Clone)]
pub struct ReportedInstanceShape {
    /// Name of the satellite.
    pub satellite: String,
    /// True if the satellite is connected to the backend.
    pub is_connected: bool,
    /// State according to the last status event.
    pub state: InstanceState,
    /// Row of the instance on the overview.
    pub row: InstanceRow,
    /// The last commands for the instance, latest first.
    pub commands: Vec<CommandRecordView>,
    /// Stored events of the instance, the newest first.
    pub events: Vec<EventEntry>,
    /// Id of the last event that `events` can contain.
    pub through: u64,
}

/// Returns the page.
pub fn reported_instance_page(shape: &ReportedInstanceShape, frame: &PageFrame) -> Markup {
    let ReportedInstanceShape { state, row, satellite, .. } = shape;
    let name = &*row.name;
    let content = html! {
        h1 { (shown(&state.server_slug)) small { " " (shown(&state.team_id)) "/" (shown(&state.user_id)) } }
        p.full-name { code { (shown(name)) } }
        div #state data-live { (status(shape, frame)) }
        p #actions.actions data-live {
            @if may_operate(frame) {
                @for action in ["restart", "stop", "start"] {
                    button type="button" data-action=(action) data-instance=(name) { (action) } " "
                }
                span { "A button queues a command for the satellite. The result is listed below." }
            } @else {
                span { "Changes need a login with the role operator. " }
            }
        }
        p #response role="status" {}
        section #commands data-live aria-labelledby="commands-title" {
            h2 #commands-title { "Commands" }
            (command_table(&shape.commands))
        }
        section aria-labelledby="timeline-title" {
            h2 #timeline-title { "Events" }
            p {
                a href={ (frame.root) "events?instance=" (segment(name)) } { "All stored events of this instance" } " · "
                a href={ (frame.root) "calls?instance=" (segment(name)) } { "Its calls" } " · "
                a href={ (frame.root) "fleet/" (segment(satellite)) } { "Its satellite" }
            }
            ol #events.events data-since=(shape.through) data-instance=(name) aria-label="Events, newest first" { (event_items(frame, &shape.events, false)) }
        }
    };
    page(frame, NavigationEntry::Other, "instance", name, &content)
}

fn status(shape: &ReportedInstanceShape, frame: &PageFrame) -> Markup {
    let ReportedInstanceShape { state, row, satellite, is_connected, .. } = shape;
    html! {
        p.state {
            (status_label(row.status.as_str(), false, row.flags & STOPPED != 0))
            " since " time.since data-since=(row.since) { }
            ", at the satellite " a href={ (frame.root) "fleet/" (segment(satellite)) } { (shown(satellite)) }
            @if !is_connected { ", which is " b { "not connected" } }
        }
        @if let Some(message) = state.status_message.as_deref().filter(|_| *is_connected) { p.why { (shown(message)) } }
        @if let Some(attention) = &row.attention {
            @if !is_connected { p.why { (shown(&attention.message)) } }
            @if let Some(step) = &attention.step { p.step { "Next: " (with_commands(step)) } }
        }
    }
}
