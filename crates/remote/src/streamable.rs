//! Streamable HTTP: every message is a POST, answered with JSON or an event stream. Versions 2025-03-26 to 2025-11-25
//! have sessions, and one GET stream for messages that the server sends on its own. In version 2026-07-28 every request
//! is stateless: headers describe it, a broken stream is not resumed, and the end of the stream ends the request.
//!
//! The GET stream also detects that an idle server has died: it ends, is reopened at once, and the connection fails.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mcp_satellite_actors::model::backoff::Backoff;
use mcp_satellite_actors::model::failure::{ExchangeFailure, FailureKind};
use mcp_satellite_actors::seam::{LineEvent, RequestHeaders};
use mcp_satellite_protocol::body;
use mcp_satellite_protocol::method;
use reqwest::header::{CONTENT_TYPE, HeaderValue};
use reqwest::{Response, StatusCode};
use tokio::time::{Instant, sleep, timeout_at};

use super::access::{EVENT_STREAM, JSON, LAST_EVENT_ID};
use super::events::SseReader;
use super::exchange::{
    ExchangeContext, ExchangeMessage, ExchangeSender, LineSession, content_type, drop_headers, next_event,
};
use super::failures::unexpected_content_type;
use super::routing;

/// Time that a connection is kept after its answer. If the exchange ends in this time, the connection can be reused.
pub(super) const LINGER_TIME: Duration = Duration::from_secs(1);

// Minimum duration of a stream that is reopened without backoff.
const QUICK_END_MAX: Duration = Duration::from_secs(10);
const BACKOFF: Backoff = Backoff::doubling(Duration::from_secs(1), Duration::from_secs(180));

pub(super) async fn request(
    session: Arc<LineSession>,
    id: u64,
    body: Bytes,
    header_timeout: Option<Duration>,
    routing: Option<Box<RequestHeaders>>,
    mut out: ExchangeSender,
) -> ExchangeMessage {
    match try_request(&session, id, body, header_timeout, routing.as_deref(), &mut out).await {
        Ok(()) => ExchangeMessage::Done,
        Err(failure) => ExchangeMessage::Event(LineEvent::Failed { id, failure }),
    }
}

async fn try_request(
    session: &LineSession,
    id: u64,
    body: Bytes,
    header_timeout: Option<Duration>,
    routing: Option<&RequestHeaders>,
    out: &mut ExchangeSender,
) -> Result<(), ExchangeFailure> {
    let terms = match routing {
        Some(routing) => {
            session.context()?.into_stateless(matches!(&*routing.method, method::INITIALIZE | method::DISCOVER))
        }
        None => session.context()?,
    };
    let post = terms.post(body);
    let post =
        routing.into_iter().flat_map(routing::headers).fold(post, |post, (name, value)| post.header(name, value));
    let response = terms.send_in_session(post, header_timeout).await?;
    if !response.status().is_success() {
        let is_known = routing.is_some() || terms.is_negotiated();
        let refused = |kind| ExchangeFailure::sent(if is_known { kind } else { hint_at_older_transport(kind) });
        let answer = terms.interpret_error(response, Some(id)).await.map_err(refused)?;
        for message in answer {
            out.send(ExchangeMessage::Event(LineEvent::Message { message, request: Some(id) })).await;
        }
        return Ok(());
    }
    if routing.is_none() {
        session.store_session_id(response.headers());
    }
    let content_type = content_type(&response);
    let accepted = response.status() == StatusCode::ACCEPTED;
    match content_type.as_deref() {
        Some(EVENT_STREAM) => follow(session, terms, id, response, out).await,
        Some(JSON) | None if !accepted => {
            let named = response.headers().get(CONTENT_TYPE).cloned();
            let body = terms.read_body(response).await?;
            let messages = body::split_messages(&body).unwrap_or_default();
            let answered = messages.iter().any(|message| body::is_answer_to(message, id));
            for message in messages {
                out.send(ExchangeMessage::Event(LineEvent::Message { message, request: Some(id) })).await;
            }
            if answered {
                Ok(())
            } else {
                Err(ExchangeFailure::sent(unexpected_content_type(named.as_ref(), &terms.access)))
            }
        }
        _ => {
            let named = response.headers().get(CONTENT_TYPE).filter(|_| !accepted);
            Err(ExchangeFailure::sent(unexpected_content_type(named, &terms.access)))
        }
    }
}

/// Adds a hint if the server may speak the older transport: such servers reject a POST to the address of their stream
/// with one of these statuses.
fn hint_at_older_transport(kind: FailureKind) -> FailureKind {
    match kind {
        // A server that gives a reason speaks JSON-RPC and not the older transport.
        FailureKind::Status { status: 400 | 404 | 405, message: None } => {
            FailureKind::Handshake(format!("{kind}; if the server supports only HTTP+SSE, set transport = \"sse\""))
        }
        kind => kind,
    }
}

/// Reads the stream that answers a POST until it contains the answer. A stream that breaks off is resumed.
async fn follow(
    session: &LineSession,
    mut terms: ExchangeContext,
    id: u64,
    mut response: Response,
    out: &mut ExchangeSender,
) -> Result<(), ExchangeFailure> {
    let mut pace = ReopenBackoff::default();
    let mut last_id = None;
    loop {
        let began = Instant::now();
        let mut events = terms.sse_reader();
        while let Some(event) =
            next_event(&mut response, &mut events).await.map_err(|error| terms.sse_failure(&error))?
        {
            if event.kind.is_some_and(|kind| kind != "message") {
                continue;
            }
            let answered = match body::split_messages(&event.data) {
                Some(messages) => messages.iter().any(|message| body::is_answer_to(message, id)),
                None => false,
            };
            if answered {
                out.send_answer(event.data).await;
                forward_remaining(&mut response, &mut events, out).await;
                return Ok(());
            }
            out.send_unsolicited(event.data).await;
        }
        let cut = || ExchangeFailure::sent(FailureKind::Cut);
        if terms.is_stateless() {
            return Err(cut());
        }
        last_id = last_event_id(&events).or(last_id);
        let last_id = last_id.as_ref().ok_or_else(cut)?;
        sleep(pace.delay_after_end(began.elapsed(), events.decoder.retry())).await;

        // The server has accepted the request: a refused resumption does not mean that it was not executed.
        terms = session.context().map_err(|failure| ExchangeFailure::answering(failure.kind))?;
        let request = terms.access.listen().header(LAST_EVENT_ID, last_id);
        let resumed = terms.send_in_session(request, Some(terms.header_timeout())).await;
        response = match resumed {
            Ok(response) if is_stream(&response) => response,
            Ok(response) if response.status().is_success() => return Err(cut()),
            Ok(response) => match terms.interpret_error(response, None).await {
                Err(
                    kind @ (FailureKind::Unauthorized { .. }
                    | FailureKind::Forbidden { .. }
                    | FailureKind::SessionExpired { .. }),
                ) => return Err(ExchangeFailure::answering(kind)),
                Ok(_) | Err(_) => return Err(cut()),
            },
            Err(failure) => match failure.kind {
                FailureKind::HeaderTimeout(_) => return Err(cut()),
                kind => return Err(ExchangeFailure::answering(kind)),
            },
        };
    }
}

async fn forward_remaining(response: &mut Response, events: &mut SseReader, out: &mut ExchangeSender) {
    let until = Instant::now() + LINGER_TIME;
    while let Ok(Ok(Some(event))) = timeout_at(until, next_event(response, events)).await {
        if event.kind.is_none_or(|kind| kind == "message") {
            out.send_unsolicited(event.data).await;
        }
    }
}

/// Listens on the GET stream until the session ends or the server turns out to have no such stream.
pub(super) async fn listen(session: Arc<LineSession>, mut out: ExchangeSender) -> ExchangeMessage {
    let lost = |failure| ExchangeMessage::Event(LineEvent::Lost(failure));
    let mut pace = ReopenBackoff::default();
    let mut last_id: Option<HeaderValue> = None;
    // Until a stream was opened, an error response is about GET and not about the session.
    let mut opened = false;
    let mut broken = false;
    loop {
        let terms = match session.context() {
            Ok(terms) => terms,
            Err(failure) => return lost(failure),
        };
        let mut request = terms.access.listen();
        if let Some(last_id) = &last_id {
            request = request.header(LAST_EVENT_ID, last_id);
        }
        // No header timeout: a server may send the head of its response only with its first message.
        let pause = match terms.send_in_session(request, None).await {
            Ok(response) if response.status().is_success() && !is_stream(&response) => return ExchangeMessage::Done,
            Ok(mut response) if response.status().is_success() => {
                (opened, broken) = (true, false);
                drop_headers(&mut response);
                let began = Instant::now();
                let mut events = terms.sse_reader();
                loop {
                    match next_event(&mut response, &mut events).await {
                        Ok(Some(event)) if event.kind.as_ref().is_none_or(|kind| kind == "message") => {
                            out.send_unsolicited(event.data).await;
                        }
                        Ok(Some(_)) => {}
                        Ok(None) => break,
                        Err(error) => return lost(terms.sse_failure(&error)),
                    }
                }
                last_id = last_event_id(&events).or(last_id);
                pace.delay_after_end(began.elapsed(), events.decoder.retry())
            }
            Ok(response) => match terms.interpret_error(response, None).await {
                Err(FailureKind::Status { status: 405, .. }) => return ExchangeMessage::Done,
                Err(
                    kind @ (FailureKind::Unauthorized { .. }
                    | FailureKind::Forbidden { .. }
                    | FailureKind::SessionExpired { .. }),
                ) if opened => return lost(ExchangeFailure::sent(kind)),
                Err(FailureKind::Throttled { retry_after } | FailureKind::ServerError { retry_after, .. }) => {
                    pace.delay_after_refusal(retry_after)
                }
                Err(FailureKind::Status { status: 409, .. }) => pace.delay_after_refusal(None),
                Ok(_) | Err(_) if !opened => return ExchangeMessage::Done,
                Ok(_) | Err(_) => {
                    // The server may not know the last event id.
                    last_id = None;
                    pace.delay_after_refusal(None)
                }
            },
            // The server may have closed a pooled connection at that moment: try once more, on another connection.
            Err(failure) if failure.sent && opened && !std::mem::replace(&mut broken, true) => Duration::ZERO,
            Err(failure) if failure.sent && !opened => pace.delay_after_refusal(None),
            Err(failure) => return lost(failure),
        };
        if !pause.is_zero() {
            sleep(pause).await;
        }
    }
}

/// Ends the session with DELETE, if the server has an id for it.
pub(super) async fn close(session: Arc<LineSession>) -> ExchangeMessage {
    if let Ok(terms) = session.context()
        && terms.has_session()
    {
        // The session is over on this side, whatever the result.
        let _ = terms.send_in_session(terms.access.delete(), Some(terms.access.policy.remote.close_timeout)).await;
    }
    ExchangeMessage::Event(LineEvent::Closed)
}

fn is_stream(response: &Response) -> bool {
    response.status().is_success() && content_type(response).as_deref() == Some(EVENT_STREAM)
}

fn last_event_id(events: &SseReader) -> Option<HeaderValue> {
    HeaderValue::from_bytes(events.decoder.last_id()?).ok()
}

/// Backoff for reopening a stream: at once first, then with growing pauses.
#[derive(Default)]
struct ReopenBackoff {
    quick_ends: u32,
}

impl ReopenBackoff {
    /// Returns the pause after a stream that lasted this long. `retry` is the pause requested by the server.
    fn delay_after_end(&mut self, lasted: Duration, retry: Option<Duration>) -> Duration {
        self.quick_ends = if lasted < QUICK_END_MAX { self.quick_ends.saturating_add(1) } else { 0 };
        self.delay().max(retry.unwrap_or_default()).min(BACKOFF.maximum)
    }

    fn delay_after_refusal(&mut self, retry_after: Option<Duration>) -> Duration {
        self.quick_ends = self.quick_ends.max(1).saturating_add(1);
        self.delay().max(retry_after.unwrap_or_default())
    }

    fn delay(&self) -> Duration {
        match self.quick_ends {
            0 | 1 => Duration::ZERO,
            times => BACKOFF.delay(times - 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_reopened_at_once_and_with_backoff_while_it_ends_quickly() {
        let (quick, long) = (Duration::from_secs(1), Duration::from_secs(60));
        let mut backoff = ReopenBackoff::default();
        let pauses: Vec<_> = (0..10).map(|_| backoff.delay_after_end(quick, None).as_secs()).collect();
        assert_eq!(pauses, [0, 1, 2, 4, 8, 16, 32, 64, 128, 180]);
        assert_eq!(backoff.delay_after_end(long, None), Duration::ZERO);
        assert_eq!(backoff.delay_after_end(long, Some(Duration::from_secs(3))), Duration::from_secs(3));
        assert_eq!(backoff.delay_after_end(long, Some(Duration::from_secs(9999))), BACKOFF.maximum);
        let refusals: Vec<_> = (0..3).map(|_| backoff.delay_after_refusal(None).as_secs()).collect();
        assert_eq!(refusals, [1, 2, 4]);
        assert_eq!(backoff.delay_after_refusal(Some(Duration::from_secs(600))), Duration::from_secs(600));
    }
}
