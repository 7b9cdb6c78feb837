//! Events: the newest first. The script adds new ones.

use std::time::Duration;

use maud::{Markup, html};
use mcp_satellite_actors::model::event::{Envelope, Event, rfc3339};
use serde_json::Value;

use super::layout::{ConsoleSite, NavigationEntry, PageFrame, instance_link, page, satellite_choice};
use super::{segment, shown};
use crate::api::EventQuery;

/// Contents of the page of events.
#[derive(Debug, Clone)]
pub struct EventsShape {
    /// The filter; `since` if the list begins after an event.
    pub query: EventQuery,
    /// Events to begin with, the newest first.
    pub events: Vec<EventEntry>,
    /// Number of the last event that the list can contain: new events follow it.
    pub through: u64,
    /// Number below which older events are; `None` if there are none.
    pub older: Option<u64>,
    /// Number after which later events are; `None` if there are none, or if the list ends below a number.
    pub later: Option<u64>,
    /// True if the list ends with an event that is not the last one.
    pub is_old: bool,
    /// Names of the satellites to choose from, and the chosen one; empty at a satellite.
    pub satellites: Vec<String>,
    pub satellite: Option<String>,
}

/// An event with the name of its satellite, if events of several ones are shown.
#[derive(Debug, Clone)]
pub struct EventEntry {
    pub envelope: Envelope,
    pub satellite: Option<String>,
}

impl From<Envelope> for EventEntry {
    fn from(envelope: Envelope) -> Self {
        Self { envelope, satellite: None }
    }
}

/// Returns the page.
pub fn events_page(shape: &EventsShape, frame: &PageFrame) -> Markup {
    let EventsShape { query, events, through, older, later, is_old, satellites, satellite } = shape;
    let types = query.types.as_deref().unwrap_or_default();
    let filter: String =
        [("types", &query.types), ("team", &query.team), ("instance", &query.instance), ("satellite", satellite)]
            .iter()
            .filter_map(|(key, value)| {
                Some(format!("&{key}={}", segment(value.as_deref().filter(|value| !value.is_empty())?)))
            })
            .collect();
    let content = html! {
        h1 { "Events" }
        form.filters method="get" action={ (frame.root) "events" } {
            label { "After number " input name="since" type="number" min="0" value=[query.since]; }
            label { "Type "
                select name="types" {
                    option value="" { "all" }
                    @for kind in Event::KINDS { option value=(kind) selected[*kind == types] { (kind) } }
                }
            }
            (satellite_choice(satellites, satellite.as_deref()))
            // A backend finds events by satellite and instance.
            @if frame.site == ConsoleSite::Satellite {
                label { "Team " input name="team" value=(query.team.as_deref().unwrap_or_default()); }
            }
            label { "Instance " input name="instance" value=(query.instance.as_deref().unwrap_or_default()) placeholder="full name"; }
            button type="submit" { "Show" }
            @if !is_old { button #follow type="button" aria-pressed="true" { "Follow" } }
            a.button href={ (frame.root) "../v1/events/stream?since=" (query.since.unwrap_or(0)) (filter) } download="events.ndjson" { "Download" }
        }
        @if let Some(later) = later { p { "These are not the last events. " a.button href={ (frame.root) "events?since=" (later) (filter) } { "Later events" } } }
        @if *is_old { p { a href={ (frame.root) "events?" (filter) } { "Newest events" } } }
        ol #events.events data-since=(through) data-filter=(filter) data-old[*is_old] aria-label="Events, newest first" { (event_items(frame, events, true)) }
        // The style hides it when the script adds an event.
        @if events.is_empty() { p.none { (why_none(shape)) } }
        p #older hidden[older.is_none()] { a.button href={ (frame.root) "events?before=" (older.unwrap_or(0)) (filter) } { "Older events" } }
    };
    page(frame, NavigationEntry::Events, "events", "Events", &content)
}

/// Returns the reason why the list has no event.
fn why_none(shape: &EventsShape) -> &'static str {
    let EventsShape { query, older, is_old, .. } = shape;
    match (older, is_old, &query.instance) {
        // The search is limited in time.
        (Some(_), _, _) => "No event was found yet; older ones may match.",
        (None, true, _) => "No older event matches.",
        (None, false, Some(_)) => "No event of this instance is stored.",
        (None, false, None) => "No stored event matches.",
    }
}

/// Returns items of a list of events, like those of the script.
pub(super) fn event_items(frame: &PageFrame, events: &[EventEntry], has_instance: bool) -> Markup {
    html! {
        @for EventEntry { envelope, satellite } in events {
            li data-seq=(envelope.seq) {
                @if let Event::EventsDropped { from_seq, to_seq } = &envelope.event {
                    span.lost { "Events " (from_seq) "–" (to_seq) " are lost: too many waited to be stored." @if let Some(name) = satellite { " Satellite " (shown(name)) "." } }
                } @else {
                    span.seq { (envelope.seq) }
                    time datetime=(rfc3339(envelope.timestamp)) { (rfc3339(envelope.timestamp)[..23].replace('T', " ")) }
                    span.kind { (envelope.event.kind().trim_start_matches("mcp.")) }
                    @if let (true, Some(subject)) = (has_instance, envelope.event.subject()) {
                        (instance_link(frame, &subject.process_id, &subject.process_id)) " "
                    }
                    span { (describe(&envelope.event, satellite.as_deref())) }
                }
            }
        }
    }
}

/// Members of all events about an instance.
const SUBJECT: [&str; 5] = ["installation_id", "team_id", "user_id", "process_id", "server_slug"];

/// Returns the content of an event as one line.
fn describe(event: &Event, satellite: Option<&str>) -> String {
    let value = serde_json::to_value(event).unwrap_or_default();
    let Some(Value::Object(data)) = value.get("data") else { return String::new() };
    let mut parts = Vec::new();
    for (name, value) in data.iter().filter(|(name, value)| !SUBJECT.contains(&name.as_str()) && !value.is_null()) {
        let text = |name: &str| value[name].as_str().unwrap_or_default();
        parts.push(match name.as_str() {
            "logs" => {
                let lines = value.as_array().into_iter().flatten().filter_map(|line| line["message"].as_str());
                lines.collect::<Vec<_>>().join(" ⏎ ")
            }
            "actor" => format!("by {} {} via {}", text("kind"), text("name"), text("via")).replace("  ", " "),
            "target" => text("process_id").to_owned(),
            _ => match (name.strip_suffix("_ms"), value.as_u64(), value.as_str()) {
                (Some(name), Some(time), _) => format!("{} {:?}", name.replace('_', " "), Duration::from_millis(time)),
                (_, _, Some(text)) => format!("{} {text}", name.replace('_', " ")),
                _ => format!("{} {value}", name.replace('_', " ")),
            },
        });
    }
    parts.extend(satellite.map(|name| format!("satellite {name}")));
    shown(&parts.join(" · "))
}
