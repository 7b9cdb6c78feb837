//! Instances and stored events as streams.
//!
//! An event in a stream has the id of the backend as `seq`. Its data names the instance as the pages do, and the
//! satellite.

use std::collections::VecDeque;
use std::io;

use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use mcp_satellite_actors::model::event::{Envelope, rfc3339};
use mcp_satellite_backend::server::api::StoredEvent;
use mcp_satellite_backend::server::decode::decode_event;
use mcp_satellite_backend::server::{EventRange, StoredEventFilter};
use mcp_satellite_console::feed::FeedScope;
use mcp_satellite_console::page_stream::{PagePosition, while_admitted, with_events};
use mcp_satellite_console::pages::EventEntry;
use mcp_satellite_console::problem::Problem;
use mcp_satellite_console::routes::{RequestContext, Routes};
use mcp_satellite_console::sse;
use mcp_satellite_console::v1::{FleetEventQuery, FleetStreamQuery};
use mcp_satellite_protocol::header::LAST_EVENT_ID;
use serde_json::{Map, Value, json};
use tokio::sync::watch;

use super::rows::instance_name;
use super::state::{Api, BackendConsole, problem};
use crate::config::Role;
use crate::console::requests::header_text;

/// Events in one query of a stream.
const BATCH: usize = 500;
const JSON_LINES: &str = "application/x-ndjson";

/// Adds the streams.
pub(super) fn add(routes: &mut Routes<BackendConsole>) {
    let summary = "Instances of all satellites as they change, and events: server-sent events";
    routes.respond("/v1/instances/stream", Role::Viewer, summary, &[sse::MEDIA_TYPE], instance_stream);
    let summary = "Stored events of all satellites: server-sent events, or JSON lines";
    routes.respond("/v1/events/stream", Role::Viewer, summary, &[sse::MEDIA_TYPE, JSON_LINES], event_stream);
}

async fn instance_stream(
    console: Api,
    context: RequestContext,
    FleetStreamQuery { satellite, stream: query }: FleetStreamQuery,
) -> Result<Response, Problem> {
    console.rows.check()?;
    let mut position = PagePosition::from_request(header_text(&context, LAST_EVENT_ID), query.position.as_deref())?;
    let open = console.streams.open(&context.principal)?;
    // An empty name selects no instance.
    let instance = if query.rows { query.instance.clone() } else { Some(String::new()) };
    let frames = console.feeds.watch(&FeedScope { team: None, instance }, position.rows.clone(), query.once).await?;
    let ending = console.backend.ending();
    let frames = if query.events {
        let filter = filter(&console, query.types.as_deref(), satellite, query.instance.as_deref())?;
        let of_header = header_text(&context, LAST_EVENT_ID).and(position.seq);
        position.seq = of_header.or(query.since).or(position.seq);
        let form = EventForm { is_sse: true, follows: !query.once };
        let events = event_frames(console.clone(), filter, position.seq, form);
        with_events(frames, events, position).boxed()
    } else {
        frames.boxed()
    };
    let frames = frames.take_until(ending.cancelled_owned());
    let frames = while_admitted(console, context, Some(open), frames);
    let body = Body::from_stream(sse::keep_alive(frames));
    Ok(([(header::CONTENT_TYPE, sse::MEDIA_TYPE)], body).into_response())
}

async fn event_stream(console: Api, context: RequestContext, query: FleetEventQuery) -> Result<Response, Problem> {
    let is_sse = header_text(&context, "accept").is_some_and(|accepted| accepted.contains(sse::MEDIA_TYPE));
    let mut since = query.since;
    if let Some(last) = header_text(&context, LAST_EVENT_ID) {
        let why = "Last-Event-ID is not the id of an event";
        since = Some(last.parse().map_err(|_| Problem::new("bad_input", why))?);
    }
    let open = console.streams.open(&context.principal)?;
    let form = EventForm { is_sse, follows: query.follow || is_sse };
    let ending = console.backend.ending();
    let filter = filter(&console, query.types.as_deref(), query.satellite, query.instance.as_deref())?;
    let frames = event_frames(console.clone(), filter, since, form).take_until(ending.cancelled_owned());
    let frames = while_admitted(console, context, Some(open), frames);
    let (body, media_type) = if is_sse {
        (Body::from_stream(sse::keep_alive(frames)), sse::MEDIA_TYPE)
    } else {
        (Body::from_stream(frames), JSON_LINES)
    };
    Ok(([(header::CONTENT_TYPE, media_type)], body).into_response())
}

/// Returns the selection of events of a request, whose fields may be empty.
///
/// # Errors
/// The name of the instance has another form.
pub(super) fn filter(
    console: &BackendConsole,
    types: Option<&str>,
    satellite: Option<String>,
    instance: Option<&str>,
) -> Result<StoredEventFilter, Problem> {
    let types = types.unwrap_or_default().split(',').map(str::trim).filter(|kind| !kind.is_empty());
    let mut filter = StoredEventFilter {
        satellite: satellite.filter(|name| !name.is_empty()),
        types: types.map(str::to_owned).collect(),
        instance: None,
    };
    if let Some(name) = instance.filter(|name| !name.is_empty()) {
        // The events of a removed instance are still stored.
        let (of, instance) = if let Some(found) = console.rows.find(name) {
            (found.satellite.clone(), found.state.instance.clone())
        } else {
            let why = || Problem::new("bad_input", "`instance` must have the form SATELLITE:INSTANCE");
            let (of, instance) = name.split_once(':').ok_or_else(why)?;
            (of.to_owned(), instance.to_owned())
        };
        filter.satellite = Some(of);
        filter.instance = Some(instance);
    }
    Ok(filter)
}

/// Form of a stream of events.
#[derive(Debug, Clone, Copy)]
struct EventForm {
    /// True for server-sent events, false for lines of JSON.
    is_sse: bool,
    /// True if new events follow the stored ones.
    follows: bool,
}

struct EventReader {
    console: Api,
    filter: StoredEventFilter,
    form: EventForm,
    /// Id up to which all events were read.
    last: i64,
    waiting: VecDeque<Bytes>,
    stored: watch::Receiver<()>,
    has_more: bool,
}

/// Returns the frames of the events after `since`; without it of all.
fn event_frames(
    console: Api,
    filter: StoredEventFilter,
    since: Option<u64>,
    form: EventForm,
) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    let last = i64::try_from(since.unwrap_or(0)).unwrap_or(i64::MAX);
    let stored = console.backend.watch_events();
    let reader = EventReader { console, filter, form, last, waiting: VecDeque::new(), stored, has_more: true };
    futures::stream::unfold(Some(reader), |reader| async move {
        let mut reader = reader?;
        match reader.next().await {
            Ok(Some(frame)) => Some((Ok(frame), Some(reader))),
            Ok(None) => None,
            // The reader must see a broken stream instead of a regular end.
            Err(problem) => Some((Err(io::Error::other(problem.detail)), None)),
        }
    })
}

impl EventReader {
    async fn next(&mut self) -> Result<Option<Bytes>, Problem> {
        loop {
            if let Some(frame) = self.waiting.pop_front() {
                return Ok(Some(frame));
            }
            if !self.has_more && (!self.form.follows || self.stored.changed().await.is_err()) {
                return Ok(None);
            }
            // Marked as seen before the query, so that an event after it wakes the stream again.
            self.stored.borrow_and_update();
            let read = self.console.backend.events(self.filter.clone(), EventRange::After(self.last), BATCH).await;
            let page = read.map_err(|error| problem(&error))?;
            self.last = page.through;
            self.has_more = page.has_more;
            for (event, satellite) in page.events {
                self.waiting.push_back(frame(event, &satellite, self.form));
            }
        }
    }
}

fn frame(event: StoredEvent, satellite: &str, form: EventForm) -> Bytes {
    let (id, type_name) = (event.id.clone(), event.kind.clone());
    let at = rfc3339(event.timestamp);
    let mut data = page_data(event.data, satellite);
    data.insert("satellite".to_owned(), satellite.into());
    let seq: u64 = id.parse().unwrap_or_default();
    let json = json!({"seq": seq, "type": type_name, "timestamp": at, "data": data}).to_string();
    if form.is_sse { sse::frame(Some(&type_name), Some(&id), json.as_bytes()) } else { format!("{json}\n").into() }
}

/// Returns the data of an event with the name that the instance has on the pages.
fn page_data(data: Value, satellite: &str) -> Map<String, Value> {
    let Value::Object(mut data) = data else { return Map::new() };
    let rename = |data: &mut Map<String, Value>| {
        if let Some(Value::String(name)) = data.get_mut("process_id") {
            *name = instance_name(satellite, name);
        }
    };
    rename(&mut data);
    if let Some(Value::Object(target)) = data.get_mut("target") {
        rename(target);
    }
    data
}

/// Returns a stored event as the pages show it; `None` if this version does not know its type.
pub(super) fn entry(event: StoredEvent, satellite: String) -> Option<EventEntry> {
    let seq = event.id.parse().ok()?;
    let data = page_data(event.data, &satellite);
    let decoded = decode_event(&event.kind, &data).ok()?;
    Some(EventEntry {
        envelope: Envelope { seq, timestamp: event.timestamp, event: decoded },
        satellite: Some(satellite),
    })
}
