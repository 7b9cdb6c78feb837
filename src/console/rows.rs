//! Instances and events as one stream for a page.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse as _, Response};
use futures::StreamExt as _;
use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::snapshot::{InstanceView, Snapshot};
use mcp_satellite_console::feed::{FeedScope, InstanceFeeds, InstanceRow, RowChanges, RowSource};
use mcp_satellite_console::page_stream::{PagePosition, while_admitted, with_events};
use mcp_satellite_console::problem::Problem;
use mcp_satellite_console::routes::RequestContext;
use mcp_satellite_console::sse;
use mcp_satellite_console::v1::InstanceStreamQuery;
use mcp_satellite_protocol::header::LAST_EVENT_ID;
use tokio::sync::watch;

use super::api::{ConsoleFilter, EventQuery};
use super::event_stream::{EventFormat, event_frames, event_types};
use super::health::ActorHealth;
use super::records::team_of;
use super::requests::header_text;
use super::state::ConsoleState;

/// The published instances of a scope.
pub(super) struct SnapshotRows {
    published: watch::Receiver<Arc<Snapshot>>,
    position: Arc<Snapshot>,
    scope: FeedScope,
    health: Arc<ActorHealth>,
}

impl SnapshotRows {
    fn new(runtime: &RuntimeHandle, health: Arc<ActorHealth>, scope: &FeedScope) -> Self {
        let mut published = runtime.watch();
        let position = published.borrow_and_update().clone();
        Self { published, position, scope: scope.clone(), health }
    }

    fn contains(&self, view: &InstanceView) -> bool {
        self.scope.instance.as_deref().is_none_or(|name| name == &*view.spec.name)
            && ConsoleFilter { team: self.scope.team.clone(), user: None }.matches(&view.spec)
    }

    fn views(&self) -> impl Iterator<Item = &Arc<InstanceView>> {
        self.position.iter().filter(|view| self.contains(view))
    }
}

impl RowSource for SnapshotRows {
    fn revision(&self) -> u64 {
        self.position.revision()
    }

    fn rows(&self) -> Vec<InstanceRow> {
        let now = Instant::now();
        self.views().map(|view| InstanceRow::from_view(view, now)).collect()
    }

    fn take_changes(&mut self) -> RowChanges {
        let earlier = std::mem::replace(&mut self.position, self.published.borrow_and_update().clone());
        let (changes, now) = (self.position.changes_since(&earlier), Instant::now());
        let is_visible = |view: &&Arc<InstanceView>| self.contains(view);
        let removed = changes.removed.iter().filter_map(|id| earlier.get(id)).filter(is_visible);
        RowChanges {
            gone: removed.map(|view| view.spec.name.clone()).collect(),
            set: changes.changed.iter().filter(is_visible).map(|view| InstanceRow::from_view(view, now)).collect(),
        }
    }

    async fn changed(&mut self) -> bool {
        self.published.changed().await.is_ok()
    }

    fn calls_in_flight(&self) -> usize {
        self.views().map(|view| view.calls_in_flight()).sum()
    }

    async fn answers(&self) -> bool {
        self.health.answers().await
    }
}

/// Streams of the satellite.
pub(super) struct PageStreams {
    pub(super) feeds: InstanceFeeds<SnapshotRows>,
}

impl PageStreams {
    pub(super) fn new(runtime: &RuntimeHandle, health: &Arc<ActorHealth>, started: Instant) -> Self {
        let age = i64::try_from(started.elapsed().as_millis()).unwrap_or(0);
        let boot = jiff::Timestamp::now().as_millisecond().saturating_sub(age);
        let (runtime, health) = (runtime.clone(), health.clone());
        let open = move |scope: &FeedScope| SnapshotRows::new(&runtime, health.clone(), scope);
        Self { feeds: InstanceFeeds::new(&boot.to_string(), open) }
    }

    /// Streams the instances that a principal sees, as [`feed`](mcp_satellite_console::feed) describes, and events.
    pub(super) async fn answer(
        &self,
        console: Arc<ConsoleState>,
        context: RequestContext,
        InstanceStreamQuery { team, stream: query }: InstanceStreamQuery,
    ) -> Result<Response, Problem> {
        let principal = context.principal.clone();
        let mut position = PagePosition::from_request(header_text(&context, LAST_EVENT_ID), query.position.as_deref())?;
        let types = event_types(query.types.as_deref())?;
        let team = team.filter(|team| !team.is_empty());
        if let Some(name) = &team
            && console.members.team_id(name, &console.runtime.snapshot()).is_none()
        {
            return Err(Problem::not_found("team", name));
        }
        let team = team_of(&console, &principal, team)?;
        let open = console.streams.open(&principal)?;
        // An empty name selects no instance.
        let instance = if query.rows { query.instance.clone() } else { Some(String::new()) };
        let scope = FeedScope { team: principal.team.clone(), instance };
        let frames = self.feeds.watch(&scope, position.rows.clone(), query.once).await?;
        let ending = console.http.ending.clone();
        let frames = if query.events {
            let of_header = header_text(&context, LAST_EVENT_ID).and(position.seq);
            position.seq = of_header.or(query.since).or(position.seq);
            // A number that no event has is of a journal that was replaced. The rows of the new process tell the page.
            if let (Some(since), Some(last)) = (position.seq, console.last_event().await) {
                position.seq = Some(since.min(last));
            }
            let events = EventQuery {
                since: position.seq,
                follow: !query.once,
                types: (!types.is_empty()).then(|| types.join(",")),
                team,
                instance: query.instance.filter(|name| !name.is_empty()),
            };
            let format = EventFormat::ServerSent;
            let events = event_frames(console.clone(), principal, events.into(), format, ending.clone());
            // The page notices a missing tick; events alone do not keep a stream open.
            with_events(frames, events, position).boxed()
        } else {
            frames.boxed()
        };
        let frames = frames.take_until(ending.cancelled_owned());
        let frames = while_admitted(console, context, Some(open), frames);
        let body = Body::from_stream(sse::keep_alive(frames));
        Ok(([(header::CONTENT_TYPE, sse::MEDIA_TYPE)], body).into_response())
    }
}
