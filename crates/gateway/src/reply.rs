//! HTTP responses. Every body is a JSON-RPC message or an event stream of them. An error contains the request's id if
//! it is known, because a client waits for that id whatever the HTTP status is.

use mcp_satellite_protocol::error_code::SERVER_ERROR;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::Response;
use bytes::Bytes;
use futures::Stream;
use mcp_satellite_actors::byte_budget::ByteBudget;
use mcp_satellite_protocol::rpc::join_parts;

use super::access::LimitExceeded;
use super::answer::{CallAnswer, RpcError};
use super::stream::GUARANTEED_BYTES;

pub(crate) const SESSION_ID: HeaderName = HeaderName::from_static(mcp_satellite_protocol::header::SESSION_ID);
const JSON: HeaderValue = HeaderValue::from_static("application/json");
const EVENTS: HeaderValue = HeaderValue::from_static("text/event-stream");

fn build_response(status: StatusCode, kind: Option<HeaderValue>, body: Body) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    if let Some(kind) = kind {
        response.headers_mut().insert(header::CONTENT_TYPE, kind);
    }
    response
}

pub(crate) fn empty(status: StatusCode) -> Response {
    build_response(status, None, Body::empty())
}

pub(crate) fn document(text: String) -> Response {
    build_response(StatusCode::OK, Some(JSON), Body::from(text))
}

pub(crate) fn error_response(status: StatusCode, id: Option<&str>, code: i64, message: &str) -> Response {
    let error = CallAnswer::Error(RpcError::new(code, message));
    build_response(status, Some(JSON), Body::from(to_bytes(&error, id.unwrap_or("null"))))
}

/// Returns a response to a request in a session that was lost with an earlier satellite. This request was not sent to a
/// server.
pub(crate) fn session_lost(id: Option<&str>, message: &str) -> Response {
    let data = r#"{"calls_in_flight":"maybe_executed","request":"not_sent"}"#.to_owned();
    let error = CallAnswer::Error(RpcError { code: SERVER_ERROR, message: message.to_owned(), data: Some(data) });
    build_response(StatusCode::NOT_FOUND, Some(JSON), Body::from(to_bytes(&error, id.unwrap_or("null"))))
}

pub(crate) fn limit_exceeded(id: Option<&str>, limited: &LimitExceeded) -> Response {
    let LimitExceeded { kind, limit, retry_after } = limited;
    let data = format!(r#"{{"kind":"{kind}","limit":{limit},"retry_after_ms":{}}}"#, retry_after.as_millis());
    let error = RpcError { code: SERVER_ERROR, message: limited.to_string(), data: Some(data) };
    too_many_requests(id, error, *retry_after)
}

pub(crate) fn too_many_requests(id: Option<&str>, error: RpcError, retry_after: Duration) -> Response {
    retry_later(StatusCode::TOO_MANY_REQUESTS, id, error, retry_after)
}

pub(crate) fn overloaded(retry_after: Duration) -> Response {
    let why = "requests in progress use all memory for messages; send this one again in a moment";
    unavailable(None, RpcError::new(SERVER_ERROR, why), retry_after)
}

/// Returns a response to a request that was not executed and may be sent again.
pub(crate) fn unavailable(id: Option<&str>, error: RpcError, retry_after: Duration) -> Response {
    retry_later(StatusCode::SERVICE_UNAVAILABLE, id, error, retry_after)
}

fn retry_later(status: StatusCode, id: Option<&str>, error: RpcError, retry_after: Duration) -> Response {
    let body = to_bytes(&CallAnswer::Error(error), id.unwrap_or("null"));
    let mut response = build_response(status, Some(JSON), Body::from(body));
    // In whole seconds, at least one: zero would mean no pause.
    let seconds = retry_after.as_millis().div_ceil(1000).max(1);
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(u64::try_from(seconds).unwrap_or(u64::MAX)));
    response
}

pub(crate) fn rpc_error(status: StatusCode, id: &str, error: RpcError) -> Response {
    build_response(status, Some(JSON), Body::from(to_bytes(&CallAnswer::Error(error), id)))
}

pub(crate) fn answer(answer: &CallAnswer, id: &str) -> Response {
    answer_with_status(StatusCode::OK, answer, id)
}

/// Returns a JSON-RPC response with this HTTP status. A long body counts in `unread` until it is written; if the budget
/// has no room for it, the client gets an error response instead.
pub(crate) fn answer_within(unread: &Arc<ByteBudget>, status: StatusCode, answer: &CallAnswer, id: &str) -> Response {
    if matches!(answer, CallAnswer::Cancelled) {
        return answer_with_status(status, answer, id);
    }
    match hold_until_written(unread, to_bytes(answer, id)) {
        Ok(body) => build_response(status, Some(JSON), Body::from(body)),
        Err(bytes) => answer_with_status(StatusCode::OK, &unread_limit_error(bytes), id),
    }
}

/// Counts a long body until it is written. The error is its length, if the budget is exhausted.
fn hold_until_written(unread: &Arc<ByteBudget>, body: Bytes) -> Result<Bytes, usize> {
    if body.len() <= GUARANTEED_BYTES {
        return Ok(body);
    }
    let mut share = unread.share();
    if share.try_take(body.len()) { Ok(share.attach_to(body)) } else { Err(body.len()) }
}

fn unread_limit_error(bytes: usize) -> CallAnswer {
    let why = "responses that clients have not read yet use all memory for responses";
    let message = format!("{why}; the request was executed, but its response ({bytes} bytes) is lost");
    CallAnswer::Error(RpcError::new(SERVER_ERROR, message))
}

pub(crate) fn answer_with_status(status: StatusCode, answer: &CallAnswer, id: &str) -> Response {
    match answer {
        // The client waits for no answer, so the response is an event stream without events. Some clients treat 202 as
        // an error.
        CallAnswer::Cancelled => build_response(StatusCode::OK, Some(EVENTS), Body::empty()),
        CallAnswer::Message(_) | CallAnswer::Result(_) | CallAnswer::CompletedResult(_) | CallAnswer::Error(_) => {
            build_response(status, Some(JSON), Body::from(to_bytes(answer, id)))
        }
    }
}

pub(crate) fn batch(unread: &Arc<ByteBudget>, answers: &[(Arc<str>, CallAnswer)]) -> Response {
    let answers: Vec<_> = answers.iter().filter(|(_, answer)| !matches!(answer, CallAnswer::Cancelled)).collect();
    if answers.is_empty() {
        // JSON-RPC has no empty batch.
        return answer_with_status(StatusCode::OK, &CallAnswer::Cancelled, "null");
    }
    let mut text = Vec::from(*b"[");
    for (at, (id, answer)) in answers.into_iter().enumerate() {
        if at > 0 {
            text.push(b',');
        }
        text.extend_from_slice(&to_bytes(answer, id));
    }
    text.push(b']');
    match hold_until_written(unread, text.into()) {
        Ok(body) => build_response(StatusCode::OK, Some(JSON), Body::from(body)),
        Err(bytes) => answer_with_status(StatusCode::OK, &unread_limit_error(bytes), "null"),
    }
}

pub(crate) fn stream(events: impl Stream<Item = Result<Bytes, Infallible>> + Send + 'static) -> Response {
    let mut response = build_response(StatusCode::OK, Some(EVENTS), Body::from_stream(events));
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache, no-transform"));
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response
}

fn to_bytes(answer: &CallAnswer, id: &str) -> Bytes {
    answer.with_parts(id, |parts| join_parts(parts.unwrap_or_default()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use mcp_satellite_protocol::rpc::RpcMessage;

    use super::*;

    #[test]
    fn a_response_is_sent_with_the_id_of_the_client() {
        let message =
            RpcMessage::parse(Bytes::from_static(b"{\"x\":1e400, \"id\":7,\"jsonrpc\":\"2.0\",\"result\":{}}"))
                .unwrap();
        let text = |answer: &CallAnswer| String::from_utf8(to_bytes(answer, "\"a\"").to_vec()).unwrap();
        assert_eq!(text(&CallAnswer::Message(message)), r#"{"x":1e400, "id":"a","jsonrpc":"2.0","result":{}}"#);
        assert_eq!(text(&CallAnswer::Result("[1]".into())), r#"{"jsonrpc":"2.0","id":"a","result":[1]}"#);
        let error = RpcError { code: -1, message: "\"quoted\"\n".into(), data: Some("{}".into()) };
        assert_eq!(
            text(&CallAnswer::Error(error)),
            r#"{"jsonrpc":"2.0","id":"a","error":{"code":-1,"message":"\"quoted\"\n","data":{}}}"#
        );
        let error = RpcError::new(-1, "m");
        assert_eq!(text(&CallAnswer::Error(error)), r#"{"jsonrpc":"2.0","id":"a","error":{"code":-1,"message":"m"}}"#);
    }
    #[tokio::test]
    async fn a_batch_whose_requests_were_all_cancelled_is_answered_without_an_empty_array() {
        let unread = ByteBudget::new(1 << 20);
        let answers = [(Arc::from("1"), CallAnswer::Cancelled), (Arc::from("2"), CallAnswer::Cancelled)];
        let response = batch(&unread, &answers);
        assert_eq!(response.headers()[header::CONTENT_TYPE], EVENTS);
        assert!(axum::body::to_bytes(response.into_body(), 100).await.unwrap_or_default().is_empty());
    }
}
