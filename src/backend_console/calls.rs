//! Recorded calls of all satellites. Satellites deliver them as events, and the backend keeps them as long as other
//! events.

use std::time::Instant;

use mcp_satellite_actors::model::event::Event;
use mcp_satellite_backend::server::EventRange;
use mcp_satellite_console::problem::Problem;
use mcp_satellite_console::routes::RequestContext;
use mcp_satellite_console::v1::{CallPage, CallSubject, FleetCallQuery};
use mcp_satellite_store::journal::{LinePosition, StoredLineQuery};

use super::state::{Api, problem};
use super::streams::{entry, filter};
use crate::console::call_search::{SEARCH_TIMEOUT, call_entry, position_text, read_position, stored_calls};
use crate::console::requests::page_size;

/// Type of the events with calls.
const CALLS: &str = "mcp.request.logs";
/// Events in one query; each contains several calls with their arguments and results.
const BATCH: usize = 20;

pub(super) async fn calls(console: Api, _: RequestContext, query: FleetCallQuery) -> Result<CallPage, Problem> {
    let FleetCallQuery { satellite, subject: CallSubject { team, user, server, instance }, conditions } = query;
    let limit = page_size(conditions.limit)?;
    let position = conditions.cursor.as_deref().map(read_position).transpose()?;
    let wanted = stored_calls(StoredLineQuery { team, user, server, ..StoredLineQuery::default() }, &conditions)?;
    let filter = filter(&console, Some(CALLS), satellite, instance.as_deref())?;
    let started = Instant::now();
    let mut before = position.map_or(u64::MAX, |position| position.seq.saturating_add(1));
    let mut calls = Vec::new();
    let page = |calls, next: Option<LinePosition>| CallPage { calls, next: next.map(position_text), complete: true };
    loop {
        let range = EventRange::Before(i64::try_from(before).unwrap_or(i64::MAX));
        let read = console.backend.events(filter.clone(), range, BATCH).await.map_err(|error| problem(&error))?;
        for (event, satellite) in read.events {
            let Some(envelope) = entry(event, satellite).map(|entry| entry.envelope) else { continue };
            before = envelope.seq;
            let Event::RequestLogs { of, requests } = envelope.event else { continue };
            let returned = position.filter(|position| position.seq == before).map_or(0, |position| position.returned);
            let matching = requests.into_iter().rev().filter(|call| wanted.matches(&of, call));
            for (nth, call) in matching.enumerate().skip(returned) {
                if calls.len() == limit {
                    return Ok(page(calls, Some(LinePosition { seq: before, returned: nth })));
                }
                calls.push(call_entry(before, &of, call));
            }
        }
        if !read.has_more {
            return Ok(page(calls, None));
        }
        if started.elapsed() > SEARCH_TIMEOUT {
            return Ok(page(calls, Some(LinePosition { seq: before.saturating_sub(1), returned: 0 })));
        }
    }
}
