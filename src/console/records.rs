//! Stored events, log lines and calls, for the HTTP API.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::response::Response;
use mcp_satellite_actors::model::event::{Envelope, EventSubject};
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_console::principal::{Principal, PrincipalKind};
use mcp_satellite_console::problem::Problem;
use mcp_satellite_console::routes::{ApiServer as _, RequestContext};
use mcp_satellite_console::sse;
use mcp_satellite_console::v1::{
    CallConditions, CallPage, CallQuery, CallSubject, EventPage, EventPageQuery, LogEntry, LogPage, LogQuery,
    LogStreamQuery,
};
use mcp_satellite_protocol::header::LAST_EVENT_ID;
use mcp_satellite_store::journal::{StoredCallQuery, StoredLineQuery, read, recent, recent_calls, recent_logs};

use super::api::EventQuery;
use super::call_search::{SEARCH_TIMEOUT, call_entry, position_text, read_position, stored_calls, time};
use super::event_stream::{EventFormat, EventSelection, event_types, may_read, stream_response};
use super::line_filter::LineFilter;
use super::requests::{Api, find, header_text, page_size};
use super::state::ConsoleState;
use crate::journal::StoredEventQuery;

/// Interval in which a principal's reads of one instance's data are one event.
const READ_EVENT_INTERVAL: Duration = Duration::from_secs(60);

pub(super) async fn events(console: Api, context: RequestContext, query: EventPageQuery) -> Result<EventPage, Problem> {
    let limit = page_size(query.limit)?;
    let who = context.principal;
    let stored = stored_query(&console, &who, &query)?;
    // Events that were emitted before the request are part of the page.
    let (complete, before) = (console.store_events().await, query.before);
    let found = search(&console, move |data_dir| recent(data_dir, &stored, limit, before, SEARCH_TIMEOUT)).await?;
    let events = found.events.into_iter().filter(|envelope| may_read(&who, envelope)).collect();
    Ok(EventPage { events, next: found.searched_to, skipped: found.skipped, complete })
}

/// Returns events after a number, the newest first, and the number after which to continue; `None` if no stored event
/// follows.
pub(super) async fn events_after(
    console: &Api,
    context: &RequestContext,
    query: EventPageQuery,
) -> Result<(Vec<Envelope>, Option<u64>), Problem> {
    let limit = page_size(query.limit)?;
    let who = context.principal.clone();
    let stored = stored_query(console, &who, &query)?;
    // The page follows new events: they bring those that are not stored yet.
    console.store_events().await;
    search(console, move |data_dir| {
        let mut stored = read(data_dir, stored)?.until(Instant::now() + SEARCH_TIMEOUT);
        let mut events = Vec::new();
        for envelope in stored.by_ref() {
            if events.len() == limit {
                events.reverse();
                return Ok((events, envelope.seq.checked_sub(1)));
            }
            if may_read(&who, &envelope) {
                events.push(envelope);
            }
        }
        stored.take_error().map_or(Ok(()), Err)?;
        events.reverse();
        let searched = stored.last_read().filter(|_| stored.is_cut());
        Ok((events, searched))
    })
    .await
}

fn stored_query(console: &ConsoleState, who: &Principal, query: &EventPageQuery) -> Result<StoredEventQuery, Problem> {
    Ok(StoredEventQuery {
        since: query.since,
        types: event_types(query.types.as_deref())?,
        team: team_of(console, who, query.team.clone())?,
        user: query.user.clone(),
        instance: query.instance.clone(),
        ..StoredEventQuery::default()
    })
}

pub(super) async fn event_stream(
    console: Api,
    context: RequestContext,
    query: EventQuery,
) -> Result<Response, Problem> {
    let team = team_of(&console, &context.principal, query.team.clone())?;
    event_types(query.types.as_deref())?;
    respond(console, context, EventQuery { team, ..query }.into()).await
}

pub(super) async fn logs(console: Api, context: RequestContext, query: LogQuery) -> Result<LogPage, Problem> {
    let view = find(&console, &context)?;
    check_reader(&console, &context.principal, &view, "read_logs")?;
    let limit = page_size(query.limit)?;
    let stored = StoredLineQuery {
        instance: Some(view.spec.name.to_string()),
        since: time("since", query.since.as_deref())?,
        until: time("until", query.until.as_deref())?,
        ..StoredLineQuery::default()
    };
    let before = query.cursor.as_deref().map(read_position).transpose()?;
    let filter = LineFilter::new(query.level.as_deref(), query.q)?;
    let complete = console.store_events().await;
    let found = search(&console, move |data_dir| recent_logs(data_dir, &stored, limit, before, SEARCH_TIMEOUT)).await?;
    let lines = found.lines.into_iter().filter(|stored| filter.matches(&stored.line));
    let lines = lines.map(|stored| LogEntry { seq: stored.seq, line: stored.line }).collect();
    Ok(LogPage { lines, next: found.next.map(position_text), through: found.through, complete })
}

pub(super) async fn log_stream(
    console: Api,
    context: RequestContext,
    query: LogStreamQuery,
) -> Result<Response, Problem> {
    let view = find(&console, &context)?;
    let lines = Some(LineFilter::new(query.level.as_deref(), query.q)?);
    check_reader(&console, &context.principal, &view, "read_logs")?;
    let query = EventQuery {
        since: query.since,
        types: Some("mcp.server.logs".to_owned()),
        instance: Some(view.spec.name.to_string()),
        follow: true,
        ..EventQuery::default()
    };
    respond(console, context, EventSelection { query, is_new_only: true, lines }).await
}

pub(super) async fn calls(console: Api, context: RequestContext, query: CallQuery) -> Result<CallPage, Problem> {
    let who = &context.principal;
    let CallQuery { subject: CallSubject { team, user, server, instance }, conditions } = query;
    let team = team_of(&console, who, team)?;
    let user = user.map(|user| user_of(&console, team.as_deref(), user)).transpose()?;
    let own = match &who.kind {
        PrincipalKind::User { user, .. } => Some(user.to_string()),
        PrincipalKind::Owner | PrincipalKind::Token | PrincipalKind::Anonymous => None,
    };
    if !who.access.reads_calls && (own.is_none() || user.as_ref().is_some_and(|user| own.as_ref() != Some(user))) {
        return Err(Problem::new("forbidden", "reading calls of other users needs the grant `calls:read`"));
    }
    let user = if who.access.reads_calls { user } else { own };
    let lines = StoredLineQuery { instance, server, team, user, ..StoredLineQuery::default() };
    let stored = stored_calls(lines, &conditions)?;
    record_read(&console, who, "read_calls", None);
    find_calls(&console, stored, &conditions).await
}

pub(super) async fn calls_of(
    console: Api,
    context: RequestContext,
    conditions: CallConditions,
) -> Result<CallPage, Problem> {
    let view = find(&console, &context)?;
    check_reader(&console, &context.principal, &view, "read_calls")?;
    let lines = StoredLineQuery { instance: Some(view.spec.name.to_string()), ..StoredLineQuery::default() };
    find_calls(&console, stored_calls(lines, &conditions)?, &conditions).await
}

async fn find_calls(
    console: &ConsoleState,
    query: StoredCallQuery,
    conditions: &CallConditions,
) -> Result<CallPage, Problem> {
    let limit = page_size(conditions.limit)?;
    let before = conditions.cursor.as_deref().map(read_position).transpose()?;
    let complete = console.store_events().await;
    let found = search(console, move |data_dir| recent_calls(data_dir, &query, limit, before, SEARCH_TIMEOUT)).await?;
    let calls = found.lines.into_iter().map(|stored| call_entry(stored.seq, &stored.subject, stored.line));
    Ok(CallPage { calls: calls.collect(), next: found.next.map(position_text), complete })
}

/// Streams events as the request accepts them.
async fn respond(console: Api, context: RequestContext, mut selection: EventSelection) -> Result<Response, Problem> {
    let query = &mut selection.query;
    let is_sse = header_text(&context, "accept").is_some_and(|accepted| accepted.contains(sse::MEDIA_TYPE));
    // A browser that reconnects repeats the number of the last event.
    if let Some(last) = header_text(&context, LAST_EVENT_ID) {
        let why = "Last-Event-ID is not the number of an event";
        query.since = Some(last.parse().map_err(|_| Problem::new("bad_input", why))?);
    }
    query.follow |= is_sse;
    let format = if is_sse { EventFormat::ServerSent } else { EventFormat::JsonLines };
    let ending = console.http.ending.clone();
    let open = console.streams.open(&context.principal)?;
    if let (Some(since), Some(last)) = (query.since, console.last_event().await)
        && since > last
    {
        let why = format!(
            "the last event has the number {last}, but the request continues after {since}: the journal was replaced, or \
             the number is of another satellite; continue with `since={last}`, or with `since=0` for all stored events"
        );
        return Err(Problem::new("refused", why));
    }
    let who = context.principal.clone();
    Ok(stream_response(console, who, selection, format, ending, Some((context, open))).await)
}

/// Returns the id of the team that a query names, or that of the principal's team.
pub(super) fn team_of(
    console: &ConsoleState,
    who: &Principal,
    named: Option<String>,
) -> Result<Option<String>, Problem> {
    let snapshot = console.runtime.snapshot();
    let id = |team: String| console.members.team_id(&team, &snapshot).unwrap_or(team);
    let (own, named) = (who.team.clone().map(id), named.map(|team| (id(team.clone()), team)));
    match (own, named) {
        (Some(own), Some((id, typed))) if own != id => Err(Problem::not_found("team", &typed)),
        (own, named) => Ok(named.map(|(id, _)| id).or(own)),
    }
}

/// Returns the id of the user that a query names. An unknown name may be the id of a removed user.
fn user_of(console: &ConsoleState, team: Option<&str>, named: String) -> Result<String, Problem> {
    let mut ids = console.members.user_ids(team, &named, &console.runtime.snapshot());
    match (ids.len(), ids.pop_first()) {
        (1, Some(id)) => Ok(id),
        (0, _) => Ok(named),
        _ => Err(Problem::new("bad_input", format!("several teams have a user `{named}`; add `team` to the query"))),
    }
}

/// Checks that the principal may read logs and calls of an instance, and records that it did if they are another user's.
fn check_reader(console: &ConsoleState, who: &Principal, view: &InstanceView, action: &str) -> Result<(), Problem> {
    if !who.reads_calls_of(&view.spec) {
        let why = format!(
            "`{}` is a server of {}/{}; reading its logs and calls needs the grant `calls:read`",
            view.spec.name, view.spec.team_slug, view.spec.user_slug
        );
        return Err(Problem::new("forbidden", why));
    }
    record_read(console, who, action, Some(view));
    Ok(())
}

/// Emits an event about a read of other users' data, at most one per minute for each principal and instance.
pub(super) fn record_read(console: &ConsoleState, who: &Principal, action: &str, view: Option<&InstanceView>) {
    if view.is_some_and(|view| who.is_user_of(&view.spec)) || (view.is_none() && !who.access.reads_calls) {
        return;
    }
    let target = view.map(|view| Arc::new(EventSubject::from(&*view.spec)));
    let place = target.as_ref().map(|target| target.process_id.to_string()).unwrap_or_default();
    let key = format!("{action} {:?} {:?} {place}", who.kind, who.name);
    let now = Instant::now();
    let mut reads = console.reads.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    reads.retain(|_, at| now.duration_since(*at) < READ_EVENT_INTERVAL);
    if reads.contains_key(&key) {
        return;
    }
    reads.insert(key, now);
    drop(reads);
    console.record_change(action, who.as_actor(), target, Vec::new(), None);
}

async fn search<T: Send + 'static>(
    console: &ConsoleState,
    read: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
) -> Result<T, Problem> {
    let data_dir = console.data_dir.path().to_owned();
    let reading = tokio::task::spawn_blocking(move || read(&data_dir));
    let failed = |error: &dyn std::fmt::Display| Problem::new("storage", format!("cannot read the journal: {error}"));
    tokio::select! {
        read = reading => read.map_err(|error| failed(&error))?.map_err(|error| failed(&error)),
        () = console.journal.wait_given_up() => Err(failed(&"the disk does not answer")),
    }
}
