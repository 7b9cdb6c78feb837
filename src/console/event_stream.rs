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
use mcp_satellite_console::page_stream::while_admitted;
use mcp_satellite_console::principal::{Principal, PrincipalKind};
use mcp_satellite_console::problem::Problem;
use mcp_satellite_console::routes::RequestContext;
use mcp_satellite_console::sse;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, broadcast, mpsc};
use tokio_util::sync::CancellationToken;

use super::api::{EventQuery, NOT_ALL_STORED};
use super::find::hint;
use super::line_filter::LineFilter;
use super::state::ConsoleState;
use crate::data_dir::DataDir;
use crate::journal::{self, JournalError, JournalEvents, JournalState, StoredEventQuery};

/// Maximum number of events buffered for a slow reader, and of their bytes; one event may be larger. Then the stream
/// waits and reads the missed events again from the journal. The listener closes a connection that nobody reads.
const BACKLOG: usize = 256;
const BACKLOG_BYTES: usize = 256 * 1024;
/// Bytes of events after which one read of the journal ends.
const READ_BYTES: usize = 128 * 1024;
/// Streams that read the journal at the same time. Each needs a thread meanwhile.
static READERS: Semaphore = Semaphore::const_new(16);

impl ConsoleState {
    /// Waits until all earlier events are stored or cannot be stored. Does not wait for a disk that hangs.
    pub(super) async fn flush_events(&self) -> Result<(), JournalError> {
        let flushed = self.journal.with_disk_timeout(self.runtime.flush()).await;
        flushed.inspect_err(|error| tracing::error!(%error, "cannot flush events; readers may miss the last ones"))
    }

    /// Waits as [`flush_events`](Self::flush_events) does. Returns true if all earlier events are stored.
    pub(super) async fn store_events(&self) -> bool {
        self.flush_events().await.is_ok() && self.journal.status().state == JournalState::Ok
    }

    /// Returns the number of the last event; `None` if the disk does not accept events.
    pub(super) async fn last_event(&self) -> Option<u64> {
        let last = || (*self.journal.watch_appended().borrow()).max(self.journal.next_seq().saturating_sub(1));
        self.store_events().await.then(last)
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

/// Events of a stream.
#[derive(Debug, Default)]
pub(super) struct EventSelection {
    pub(super) query: EventQuery,
    /// True for a stream without stored events, unless the query has a number to begin after.
    pub(super) is_new_only: bool,
    /// Lines to select from events about logs; `None` for whole events.
    pub(super) lines: Option<LineFilter>,
}

impl From<EventQuery> for EventSelection {
    fn from(query: EventQuery) -> Self {
        Self { query, ..Self::default() }
    }
}

/// Reads a list of event types, separated by commas.
///
/// # Errors
/// There is no such type.
pub(super) fn event_types(types: Option<&str>) -> Result<Vec<String>, Problem> {
    let types = types.unwrap_or_default().split(',').map(str::trim).filter(|kind| !kind.is_empty());
    let known = |kind: &str| {
        let why = || {
            let hint = hint("event", kind, Event::KINDS, Event::KINDS);
            Problem::new("bad_input", format!("unknown event type `{}`{hint}", kind.escape_debug()))
        };
        Event::KINDS.contains(&kind).then(|| kind.to_owned()).ok_or_else(why)
    };
    types.map(known).collect()
}

/// Streams those events that a principal may read: stored ones from the journal, new ones from the batcher. The
/// subscription starts before the flush, so that no event is lost between the two. `admitted` is the request over HTTP:
/// the stream ends when its client loses its permissions.
pub(super) async fn stream_response(
    console: Arc<ConsoleState>,
    who: Principal,
    selection: impl Into<EventSelection>,
    format: EventFormat,
    ending: CancellationToken,
    admitted: Option<(RequestContext, OpenStream)>,
) -> Response {
    let selection = selection.into();
    // A header tells a reader without `follow` whether events are missing; a following reader gets them later.
    let is_whole = selection.query.follow || console.store_events().await;
    let events = event_frames(console.clone(), who, selection, format, ending);
    let events = match admitted {
        Some((context, open)) => while_admitted(console, context, Some(open), events).boxed(),
        None => events.boxed(),
    };
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
    selection: EventSelection,
    format: EventFormat,
    ending: CancellationToken,
) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    let (frames, stream) = mpsc::channel(BACKLOG);
    let EventSelection { query, is_new_only, lines } = selection;
    let output = EventOutput {
        frames,
        bytes: Arc::new(Semaphore::new(BACKLOG_BYTES)),
        encoder: Arc::new(EventEncoder { format, who, lines }),
        ending,
    };
    tokio::spawn(async move {
        let result = stream_events(&console, query, is_new_only, &output).await;
        if let Err(EventStreamEnd::Unreadable(error)) = result {
            // The reader must see a broken stream instead of a regular end.
            let _ = output.frames.send(Err(error)).await;
        }
    });
    futures::stream::unfold(stream, |mut stream| async move {
        // The frame leaves its place in the backlog.
        let frame = stream.recv().await?.map(|(frame, _)| frame);
        Some((frame, stream))
    })
}

enum EventStreamEnd {
    Disconnected,
    Unreadable(io::Error),
}

/// A frame with its place in the backlog.
type QueuedFrame = (Bytes, OwnedSemaphorePermit);

struct EventOutput {
    frames: mpsc::Sender<io::Result<QueuedFrame>>,
    /// Bytes that the backlog accepts at present.
    bytes: Arc<Semaphore>,
    encoder: Arc<EventEncoder>,
    /// Cancelled when the stream must end, after the events that are already in the channel.
    ending: CancellationToken,
}

impl EventOutput {
    async fn send(&self, frame: Bytes) -> Result<(), EventStreamEnd> {
        let size = u32::try_from(frame.len().clamp(1, BACKLOG_BYTES)).unwrap_or(u32::MAX);
        let place = tokio::select! {
            place = self.bytes.clone().acquire_many_owned(size) => place.map_err(|_| EventStreamEnd::Disconnected)?,
            () = self.frames.closed() => return Err(EventStreamEnd::Disconnected),
        };
        self.frames.send(Ok((frame, place))).await.map_err(|_| EventStreamEnd::Disconnected)
    }
}

struct EventEncoder {
    format: EventFormat,
    who: Principal,
    lines: Option<LineFilter>,
}

impl EventEncoder {
    /// Returns the frame of an event; `None` if the reader may not read it, or has selected none of its lines.
    fn frame(&self, envelope: &Envelope) -> Option<io::Result<Bytes>> {
        if !may_read(&self.who, envelope) {
            return None;
        }
        match &self.lines {
            Some(lines) => Some(self.format.frame(&lines.select(envelope)?)),
            None => Some(self.format.frame(envelope)),
        }
    }
}

async fn stream_events(
    console: &ConsoleState,
    query: EventQuery,
    is_new_only: bool,
    output: &EventOutput,
) -> Result<(), EventStreamEnd> {
    let snapshot = console.runtime.snapshot();
    let team = query.team.map(|team| console.members.team_id(&team, &snapshot).unwrap_or(team));
    let types = query.types.iter().flat_map(|types| types.split(',')).map(ToOwned::to_owned).collect();
    let mut filter = StoredEventQuery { types, team, instance: query.instance, ..StoredEventQuery::default() };
    let mut events = console.runtime.subscribe();
    if query.follow {
        // The error is logged; the stored events remain readable.
        let _ = console.flush_events().await;
    }
    let begin = if is_new_only { *console.journal.watch_appended().borrow() } else { 0 };
    let mut last = query.since.unwrap_or(begin);
    // A reader that gives `since` expects every event after it. Other readers get new events even if the disk accepts
    // nothing.
    let whole = query.since.is_some();
    loop {
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
                () = output.frames.closed() => return Err(EventStreamEnd::Disconnected),
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
                        () = output.frames.closed() => return Err(EventStreamEnd::Disconnected),
                    }
                    break;
                }
                Ok(envelope) => {
                    last = envelope.seq;
                    if filter.matches(&envelope)
                        && let Some(frame) = output.encoder.frame(&envelope)
                    {
                        // An event that a reader has received must keep its number after a restart.
                        console.journal.wait_stored(envelope.seq).await;
                        output.send(frame.map_err(EventStreamEnd::Unreadable)?).await?;
                    }
                }
                // The reader was too slow; the journal has the missed events.
                Err(broadcast::error::RecvError::Lagged(_)) => break,
                Err(broadcast::error::RecvError::Closed) => return Ok(()),
            }
        }
        // The error is logged; the stored events remain readable.
        let _ = console.flush_events().await;
    }
}

/// Sends the stored events. Returns the number of the last one, or `last` if there was none. No thread waits for the
/// reader.
async fn send_stored(
    data_dir: &DataDir,
    filter: StoredEventQuery,
    last: u64,
    output: &EventOutput,
) -> Result<u64, EventStreamEnd> {
    let directory = data_dir.path().to_owned();
    let mut stored = read_blocking(move || journal::read(directory, filter)).await?;
    loop {
        let encoder = output.encoder.clone();
        let (frames, is_end);
        (stored, frames, is_end) = read_blocking(move || {
            let (frames, is_end) = read_frames(&mut stored, &encoder)?;
            Ok((stored, frames, is_end))
        })
        .await?;
        for frame in frames {
            output.send(frame).await?;
        }
        if is_end {
            return match stored.take_error() {
                Some(error) => Err(EventStreamEnd::Unreadable(error)),
                None => Ok(stored.last_read().unwrap_or(last)),
            };
        }
    }
}

/// Returns the next frames, and true if they are the last ones.
fn read_frames(stored: &mut JournalEvents, encoder: &EventEncoder) -> io::Result<(Vec<Bytes>, bool)> {
    let (mut frames, mut bytes) = (Vec::new(), 0);
    while bytes < READ_BYTES {
        let Some(envelope) = stored.next() else { return Ok((frames, true)) };
        if let Some(frame) = encoder.frame(&envelope).transpose()? {
            bytes += frame.len();
            frames.push(frame);
        }
    }
    Ok((frames, false))
}

/// Runs a read of the journal on a thread that may block.
async fn read_blocking<T: Send + 'static>(
    read: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, EventStreamEnd> {
    let permit = READERS.acquire().await.map_err(|error| EventStreamEnd::Unreadable(io::Error::other(error)))?;
    let reading = tokio::task::spawn_blocking(move || {
        // Held until the thread is free, even if the reader has disconnected.
        let _permit = permit;
        read()
    });
    reading.await.unwrap_or_else(|error| Err(io::Error::other(error))).map_err(EventStreamEnd::Unreadable)
}

#[cfg(test)]
mod tests {
    use mcp_satellite_console::principal::Entrance;

    use super::*;

    #[tokio::test]
    async fn the_backlog_of_a_reader_is_limited_in_bytes() {
        let (frames, mut reader) = mpsc::channel(BACKLOG);
        let encoder =
            EventEncoder { format: EventFormat::JsonLines, who: Principal::owner(Entrance::Http), lines: None };
        let output = EventOutput {
            frames,
            bytes: Arc::new(Semaphore::new(BACKLOG_BYTES)),
            encoder: Arc::new(encoder),
            ending: CancellationToken::new(),
        };
        let half = Bytes::from(vec![0; BACKLOG_BYTES / 2]);
        for _ in 0..2 {
            assert!(output.send(half.clone()).await.is_ok());
        }
        let mut third = Box::pin(output.send(half.clone()));
        assert!(futures::poll!(&mut third).is_pending());
        drop(reader.recv().await);
        assert!(third.await.is_ok());
        // A frame that is larger than the whole backlog waits until it is empty.
        let mut large = Box::pin(output.send(Bytes::from(vec![0; 2 * BACKLOG_BYTES])));
        assert!(futures::poll!(&mut large).is_pending());
        for _ in 0..2 {
            drop(reader.recv().await);
        }
        assert!(large.await.is_ok());
        drop(reader);
        assert!(matches!(output.send(half).await, Err(EventStreamEnd::Disconnected)));
    }
}
