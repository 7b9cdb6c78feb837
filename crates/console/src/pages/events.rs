//! Events: the newest first, followed by the script.

use maud::{Markup, html};
use mcp_satellite_actors::model::event::Event;

use super::layout::{PageFrame, Section, page};
use super::segment;
use crate::api::EventQuery;

/// Contents of the page of events.
#[derive(Debug, Clone)]
pub struct EventsShape {
    /// The filter, with the number after which the list begins.
    pub query: EventQuery,
    /// Number of the last stored event.
    pub last: u64,
}

/// Returns the page.
pub fn events_page(shape: &EventsShape, frame: &PageFrame) -> Markup {
    let EventsShape { query, last } = shape;
    let (since, types) = (query.since.unwrap_or(0), query.types.as_deref().unwrap_or_default());
    let filter: String = [("types", &query.types), ("team", &query.team), ("instance", &query.instance)]
        .iter()
        .filter_map(|(key, value)| {
            Some(format!("&{key}={}", segment(value.as_deref().filter(|value| !value.is_empty())?)))
        })
        .collect();
    let content = html! {
        h1 { "Events" }
        form.filters method="get" action={ (frame.root) "events" } {
            label { "After number " input name="since" type="number" min="0" value=(since); }
            label { "Type "
                select name="types" {
                    option value="" { "all" }
                    @for kind in Event::KINDS { option value=(kind) selected[*kind == types] { (kind) } }
                }
            }
            label { "Instance " input name="instance" value=(query.instance.as_deref().unwrap_or_default()) placeholder="full name"; }
            button type="submit" { "Show" }
            button #follow type="button" aria-pressed="true" { "Follow" }
            a.button href={ (frame.root) "../v1/events/stream?since=" (since) (filter) } download="events.ndjson" { "Download" }
        }
        p #events-note { "The last event has the number " (last) ". The list begins after " (since) "; the newest is first." }
        noscript { p.error { "Following needs the script of the console. The download contains the same events." } }
        ol #events.events data-since=(since) data-filter=(filter) aria-label="Events, newest first" {}
    };
    page(frame, Section::Events, "events", "Events", &content)
}
