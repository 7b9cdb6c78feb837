//! HTTP+SSE transport (2024-11-05): a GET opens the only stream of server messages, and its first event names the
//! endpoint for POSTs. The session lasts as long as the stream.

use std::sync::Arc;

use mcp_satellite_actors::model::failure::{ExchangeFailure, FailureKind};
use mcp_satellite_actors::seam::LineEvent;
use mcp_satellite_protocol::sse::SseEvent;
use reqwest::header::CONTENT_TYPE;
use reqwest::{Response, Url};
use tokio::time::timeout_at;

use super::access::{EVENT_STREAM, ServerAccess};
use super::events::SseReader;
use super::exchange::{
    ExchangeContext, ExchangeMessage, ExchangeSender, LineSession, content_type, drop_headers, next_event,
};
use super::failures::{mask_line, unexpected_content_type};

pub(super) async fn listen(session: Arc<LineSession>, mut out: ExchangeSender) -> ExchangeMessage {
    let opening = async {
        let terms = session.context()?;
        let header_timeout = terms.header_timeout();
        let deadline = tokio::time::Instant::now() + header_timeout;
        let timed_out = |_| ExchangeFailure::sent(FailureKind::HeaderTimeout(header_timeout));
        let mut response = open(&terms).await?;
        drop_headers(&mut response);
        let mut events = terms.sse_reader();
        let endpoint =
            timeout_at(deadline, read_endpoint(&terms, &mut response, &mut events)).await.map_err(timed_out)??;
        session.set_endpoint(endpoint);
        Ok((terms, response, events))
    };
    let (terms, mut response, mut events) = match opening.await {
        Ok(opened) => opened,
        Err(failure) => return ExchangeMessage::OpenFailed(failure),
    };
    out.send(ExchangeMessage::Endpoint).await;
    loop {
        match next_event(&mut response, &mut events).await {
            Ok(Some(SseEvent { kind, data })) if kind.as_ref().is_none_or(|kind| kind == "message") => {
                out.send_unsolicited(data).await;
            }
            Ok(Some(_)) => {}
            Ok(None) => return ExchangeMessage::Event(LineEvent::Lost(ExchangeFailure::sent(stream_closed()))),
            Err(error) => return ExchangeMessage::Event(LineEvent::Lost(terms.sse_failure(&error))),
        }
    }
}

async fn open(terms: &ExchangeContext) -> Result<Response, ExchangeFailure> {
    let response = terms.send_in_session(terms.access.listen(), Some(terms.header_timeout())).await?;
    if !response.status().is_success() {
        // Without a request id no message of the response can be an answer.
        let kind =
            terms.interpret_error(response, None).await.err().unwrap_or(FailureKind::NotMcp { content_type: None });
        return Err(ExchangeFailure::sent(kind));
    }
    match content_type(&response).as_deref() {
        Some(EVENT_STREAM) => Ok(response),
        _ => Err(ExchangeFailure::sent(unexpected_content_type(response.headers().get(CONTENT_TYPE), &terms.access))),
    }
}

async fn read_endpoint(
    terms: &ExchangeContext,
    response: &mut Response,
    events: &mut SseReader,
) -> Result<Url, ExchangeFailure> {
    loop {
        match next_event(response, events).await {
            Ok(Some(SseEvent { kind: Some(kind), data })) if kind == "endpoint" => {
                return resolve_endpoint(&String::from_utf8_lossy(&data), &terms.access).map_err(ExchangeFailure::sent);
            }
            Ok(Some(_)) => {}
            Ok(None) => return Err(ExchangeFailure::sent(stream_closed())),
            Err(error) => return Err(terms.sse_failure(&error)),
        }
    }
}

/// Resolves the endpoint and requires the configured origin: credentials go to no other.
fn resolve_endpoint(endpoint: &str, access: &ServerAccess) -> Result<Url, FailureKind> {
    let home = access.url();
    let endpoint = home
        .join(endpoint.trim())
        .map_err(|error| FailureKind::BadAddress(format!("the server names an invalid endpoint: {error}")))?;
    if endpoint.origin() == home.origin() && endpoint.origin().is_tuple() {
        Ok(endpoint)
    } else {
        let origin = if endpoint.origin().is_tuple() {
            endpoint.origin().ascii_serialization()
        } else {
            format!("{}:", endpoint.scheme())
        };
        Err(FailureKind::ForeignEndpoint { origin: mask_line(&origin, access) })
    }
}

fn stream_closed() -> FailureKind {
    FailureKind::Broken("the server has closed its stream".to_owned())
}
