//! HTTP+SSE transport (2024-11-05): a GET opens the only stream of server messages, and its first event names the
//! endpoint for POSTs. The session lasts as long as the stream.

use std::sync::Arc;

use mcp_satellite_actors::model::failure::{ExchangeFailure, FailureKind};
use mcp_satellite_actors::seam::LineEvent;
use reqwest::header::CONTENT_TYPE;
use reqwest::{Response, Url};
use tokio::time::timeout_at;

use super::access::{EVENT_STREAM, ServerAccess};
use super::events::{SseDecoder, SseEvent};
use super::exchange::{
    ExchangeContext, ExchangeMessage, ExchangeSender, LineSession, content_type, forget_head, next_event,
};
use super::failures::{not_mcp, told};

pub(super) async fn listen(session: Arc<LineSession>, mut out: ExchangeSender) -> ExchangeMessage {
    let opening = async {
        let terms = session.terms()?;
        let header_timeout = terms.header_timeout();
        let until = tokio::time::Instant::now() + header_timeout;
        let late = |_| ExchangeFailure::sent(FailureKind::HeaderTimeout(header_timeout));
        let mut response = open(&terms).await?;
        forget_head(&mut response);
        let mut events = terms.events();
        let endpoint = timeout_at(until, endpoint(&terms, &mut response, &mut events)).await.map_err(late)??;
        session.directed(endpoint);
        Ok((terms, response, events))
    };
    let (terms, mut response, mut events) = match opening.await {
        Ok(opened) => opened,
        Err(failure) => return ExchangeMessage::Unopened(failure),
    };
    out.send(ExchangeMessage::Endpoint).await;
    loop {
        match next_event(&mut response, &mut events).await {
            Ok(Some(SseEvent { kind, data })) if kind.as_ref().is_none_or(|kind| kind == "message") => {
                out.aside(data).await;
            }
            Ok(Some(_)) => {}
            Ok(None) => return ExchangeMessage::Of(LineEvent::Lost(ExchangeFailure::sent(ended()))),
            Err(error) => return ExchangeMessage::Of(LineEvent::Lost(terms.unread(&error))),
        }
    }
}

async fn open(terms: &ExchangeContext) -> Result<Response, ExchangeFailure> {
    let response = terms.ask(terms.access.listen(), Some(terms.header_timeout())).await?;
    if !response.status().is_success() {
        // Without a request id no message of the response can be an answer.
        let kind = terms.refusal(response, None).await.err().unwrap_or(FailureKind::NotMcp { content_type: None });
        return Err(ExchangeFailure::sent(kind));
    }
    match content_type(&response).as_deref() {
        Some(EVENT_STREAM) => Ok(response),
        _ => Err(ExchangeFailure::sent(not_mcp(response.headers().get(CONTENT_TYPE), &terms.access))),
    }
}

async fn endpoint(
    terms: &ExchangeContext,
    response: &mut Response,
    events: &mut SseDecoder,
) -> Result<Url, ExchangeFailure> {
    loop {
        match next_event(response, events).await {
            Ok(Some(SseEvent { kind: Some(kind), data })) if kind == "endpoint" => {
                return resolve(&String::from_utf8_lossy(&data), &terms.access).map_err(ExchangeFailure::sent);
            }
            Ok(Some(_)) => {}
            Ok(None) => return Err(ExchangeFailure::sent(ended())),
            Err(error) => return Err(terms.unread(&error)),
        }
    }
}

/// Resolves the endpoint and requires the configured origin: credentials go to no other.
fn resolve(endpoint: &str, access: &ServerAccess) -> Result<Url, FailureKind> {
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
        Err(FailureKind::ForeignEndpoint { origin: told(&origin, access) })
    }
}

fn ended() -> FailureKind {
    FailureKind::Broken("the server has closed its stream".to_owned())
}
