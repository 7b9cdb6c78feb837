//! Streams of events for the control socket and the HTTP API.

use std::io;
use std::sync::Arc;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use mcp_satellite_actors::model::event::{Envelope, Event};
use mcp_satellite_console::feed::OpenStream;
use mcp_satellite_console::principal::{Principal, PrincipalKind};
use mcp_satellite_console::sse;
use tokio::sync::{broadcast, mpsc};
use tokio_util::sync::CancellationToken;

use super::api::{EventQuery, NOT_ALL_STORED};
use super::state::ConsoleState;
use crate::data_dir::DataDir;
use crate::journal::{self, JournalError, JournalState};

/// Maximum number of events buffered for a slow reader. Then the stream waits and reads the missed events again from
/// the journal.
const STREAM_BACKLOG: usize = 256;

impl ConsoleState {
    /// Waits until all earlier events are stored or cannot be stored. Does not wait for a disk that hangs.
    pub(super) async fn flush_events(&self) -> Result<(), JournalError> {
        let flushed = self.journal.with_disk_timeout(self.runtime.flush()).await;
        flushed.inspect_err(|error| tracing::error!(%error, "cannot flush events; readers may miss the last ones"))
    }
}

/// Framing of a stream of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EventFormat {
    JsonLines,
    /// Server-sent events, whose id is the number of the event.
    ServerSent,
}

impl EventFormat {
    fn frame(self, envelope: &Envelope) -> io::Result<Bytes> {
        let json = serde_json::to_vec(envelope)?;
        Ok(match self {
            Self::JsonLines => [&json[..], b"\n"].concat().into(),
            Self::ServerSent => sse::frame(Some(envelope.event.kind()), Some(&envelope.seq.to_string()), &json),
        })
    }

    fn media_type(self) -> &'static str {
        match self {
            Self::JsonLines => "application/x-ndjson",
            Self::ServerSent => sse::MEDIA_TYPE,
        }
    }
}

/// Streams those events that a principal may read: stored ones from the journal, new ones from the batcher. The
/// subscription starts before the flush, so that no event is lost between the two.
pub(super) async fn stream_response(
    console: Arc<ConsoleState>,
    who: Principal,
    query: EventQuery,
    format: EventFormat,
    ending: CancellationToken,
    open: Option<OpenStream>,
) -> Response {
    // A header tells a reader without `follow` whether events are missing; a following reader gets them later.
    let is_whole =
        query.follow || console.flush_events().await.is_ok() && console.journal.status().state == JournalState::Ok;
    let events = event_frames(console, who, query, format, ending).inspect(move |_| {
        // The stream counts as open until it is dropped.
        let _ = &open;
    });
    let body = match format {
        EventFormat::JsonLines => Body::from_stream(events),
        EventFormat::ServerSent => Body::from_stream(sse::keep_alive(events)),
    };
    let mut response = ([(header::CONTENT_TYPE, format.media_type())], body).into_response();
    if !is_whole {
        response.headers_mut().insert(NOT_ALL_STORED, HeaderValue::from_static("true"));
    }
    response
}

/// Returns true if the principal may read the event, which is of a team that it sees.
pub(super) fn may_read(who: &Principal, envelope: &Envelope) -> bool {
    let is_private = matches!(envelope.event, Event::ServerLogs { .. } | Event::RequestLogs { .. });
    !is_private
        || who.access.reads_calls
        || matches!((&who.kind, envelope.event.subject()), (PrincipalKind::User { team, user }, Some(of))
            if of.team_id == *team && of.user_id == *user)
}

/// Returns the frames of those events that a principal may read.
pub(super) fn event_frames(
    console: Arc<ConsoleState>,
    who: Principal,
    query: EventQuery,
    format: EventFormat,
    ending: CancellationToken,
) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    let (lines, stream) = mpsc::channel(STREAM_BACKLOG);
    let output = EventOutput { lines: lines.clone(), format, who, ending };
    tokio::spawn(async move {
        let result = stream_events(&console, query, &output).await;
        if let Err(EventStreamEnd::Unreadable(error)) = result {
            // The reader must see a broken stream instead of a regular end.
            let _ = lines.send(Err(error)).await;
        }
    });
    futures::stream::unfold(stream, |mut stream| async move { Some((stream.recv().await?, stream)) })
}

enum EventStreamEnd {
    Disconnected,
    Unreadable(io::Error),
}

#[derive(Clone)]
struct EventOutput {
    lines: mpsc::Sender<io::Result<Bytes>>,
    format: EventFormat,
    who: Principal,
    /// Cancelled when the stream must end, after the events that are already in the channel.
    ending: CancellationToken,
}

async fn stream_events(console: &ConsoleState, query: EventQuery, output: &EventOutput) -> Result<(), EventStreamEnd> {
    let snapshot = console.runtime.snapshot();
    let team = query.team.map(|team| console.members.team_id(&team, &snapshot).unwrap_or(team));
    let types = query.types.iter().flat_map(|types| types.split(',')).map(ToOwned::to_owned).collect();
    let mut filter =
        journal::StoredEventQuery { types, team, instance: query.instance, ..journal::StoredEventQuery::default() };
    let mut events = console.runtime.subscribe();
    let mut last = query.since.unwrap_or(0);
    // A reader that gives `since` expects every event after it. Other readers get new events even if the disk accepts
    // nothing.
    let whole = query.since.is_some();
    loop {
        if query.follow {
            // The error is logged; the stored events remain readable.
            let _ = console.flush_events().await;
        }
        filter.since = Some(last);
        last = tokio::select! {
            biased;
            passed = send_stored(&console.data_dir, filter.clone(), last, output) => passed?,
            () = console.journal.wait_given_up() => {
                return Err(EventStreamEnd::Unreadable(io::Error::new(io::ErrorKind::TimedOut, "the disk does not answer")));
            }
        };
        if !query.follow {
            return Ok(());
        }
        loop {
            let envelope = tokio::select! {
                envelope = events.recv() => envelope,
                // Events that were emitted before the end are still in the channel.
                () = output.ending.cancelled() => match events.try_recv() {
                    Ok(envelope) => Ok(envelope),
                    Err(_) => return Ok(()),
                },
            };
            match envelope {
                Ok(envelope) if envelope.seq <= last => {}
                // The events in between wait for the disk or are lost. Once this event is stored, the journal has the
                // answer.
                Ok(envelope) if whole && envelope.seq > last + 1 => {
                    let mut appended = console.journal.watch_appended();
                    tokio::select! {
                        // An error means that the journal is closed.
                        _ = appended.wait_for(|through| *through >= envelope.seq) => {}
                        () = output.ending.cancelled() => {}
                        () = output.lines.closed() => return Err(EventStreamEnd::Disconnected),
                    }
                    break;
                }
                Ok(envelope) => {
                    last = envelope.seq;
                    if filter.matches(&envelope) && may_read(&output.who, &envelope) {
                        // An event that a reader has received must keep its number after a restart.
                        console.journal.wait_stored(envelope.seq).await;
                        output
                            .lines
                            .send(output.format.frame(&envelope))
                            .await
                            .map_err(|_| EventStreamEnd::Disconnected)?;
                    }
                }
                // The reader was too slow; the journal has the missed events.
                Err(broadcast::error::RecvError::Lagged(_)) => break,
                Err(broadcast::error::RecvError::Closed) => return Ok(()),
            }
        }
    }
}

/// Sends the stored events. Returns the number of the last one, or `last` if there was none.
async fn send_stored(
    data_dir: &DataDir,
    filter: journal::StoredEventQuery,
    last: u64,
    output: &EventOutput,
) -> Result<u64, EventStreamEnd> {
    let (directory, output) = (data_dir.path().to_owned(), output.clone());
    let reading = tokio::task::spawn_blocking(move || {
        let mut events = journal::read(directory, filter).map_err(EventStreamEnd::Unreadable)?;
        for envelope in events.by_ref().filter(|envelope| may_read(&output.who, envelope)) {
            output.lines.blocking_send(output.format.frame(&envelope)).map_err(|_| EventStreamEnd::Disconnected)?;
        }
        match events.take_error() {
            Some(error) => Err(EventStreamEnd::Unreadable(error)),
            None => Ok(events.last_read().unwrap_or(last)),
        }
    });
    reading.await.unwrap_or_else(|error| Err(EventStreamEnd::Unreadable(io::Error::other(error))))
}
