//! HTTP+SSE transport (2024-11-05): a GET opens the only stream of server messages, and its first event names the
//! endpoint for POSTs. The session lasts as long as the stream.

use std::sync::Arc;

use mcp_satellite_actors::model::failure::{Failure, FailureKind};
use mcp_satellite_actors::seam::Incoming;
use reqwest::header::CONTENT_TYPE;
use reqwest::{Response, Url};
use tokio::time::timeout_at;

use super::access::{Access, EVENT_STREAM};
use super::events::{Event, Events};
use super::exchange::{News, Out, Session, Terms, content_type, forget_head, next_event};
use super::failures::{not_mcp, told};

pub(super) async fn listen(session: Arc<Session>, mut out: Out) -> News {
    let opening = async {
        let terms = session.terms()?;
        let header_timeout = terms.header_timeout();
        let until = tokio::time::Instant::now() + header_timeout;
        let late = |_| Failure::sent(FailureKind::HeaderTimeout(header_timeout));
        let mut response = open(&terms).await?;
        forget_head(&mut response);
        let mut events = terms.events();
        let endpoint = timeout_at(until, endpoint(&terms, &mut response, &mut events)).await.map_err(late)??;
        session.directed(endpoint);
        Ok((terms, response, events))
    };
    let (terms, mut response, mut events) = match opening.await {
        Ok(opened) => opened,
        Err(failure) => return News::Unopened(failure),
    };
    out.send(News::Endpoint).await;
    loop {
        match next_event(&mut response, &mut events).await {
            Ok(Some(Event { kind, data })) if kind.as_ref().is_none_or(|kind| kind == "message") => {
                out.aside(data).await;
            }
            Ok(Some(_)) => {}
            Ok(None) => return News::Of(Incoming::Lost(Failure::sent(ended()))),
            Err(error) => return News::Of(Incoming::Lost(terms.unread(&error))),
        }
    }
}

async fn open(terms: &Terms) -> Result<Response, Failure> {
    let response = terms.ask(terms.access.listen(), Some(terms.header_timeout())).await?;
    if !response.status().is_success() {
        // Without a request id no message of the response can be an answer.
        let kind = terms.refusal(response, None).await.err().unwrap_or(FailureKind::NotMcp { content_type: None });
        return Err(Failure::sent(kind));
    }
    match content_type(&response).as_deref() {
        Some(EVENT_STREAM) => Ok(response),
        _ => Err(Failure::sent(not_mcp(response.headers().get(CONTENT_TYPE), &terms.access))),
    }
}

async fn endpoint(terms: &Terms, response: &mut Response, events: &mut Events) -> Result<Url, Failure> {
    loop {
        match next_event(response, events).await {
            Ok(Some(Event { kind: Some(kind), data })) if kind == "endpoint" => {
                return resolve(&String::from_utf8_lossy(&data), &terms.access).map_err(Failure::sent);
            }
            Ok(Some(_)) => {}
            Ok(None) => return Err(Failure::sent(ended())),
            Err(error) => return Err(terms.unread(&error)),
        }
    }
}

/// Resolves the endpoint and requires the configured origin: credentials go to no other.
fn resolve(endpoint: &str, access: &Access) -> Result<Url, FailureKind> {
    let home = access.url();
    let endpoint = home
        .join(endpoint.trim())
        .map_err(|error| FailureKind::BadAddress(format!("the endpoint that the server names is none: {error}")))?;
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
