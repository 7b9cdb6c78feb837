//! Errors of the HTTP API: problem documents (RFC 9457).

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use mcp_satellite_gateway::access::AccessDenied;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::api::{FailureDetails, RequestFailure};

const MEDIA_TYPE: &str = "application/problem+json";
const TYPE_PREFIX: &str = "urn:mcp-satellite:problem:";
/// Characters of a detail: all errors of a configuration, but not a whole request.
const DETAIL_MAX: usize = 4000;
/// Seconds after which a client may repeat a request that came too early.
const RETRY_AFTER: u64 = 1;

/// Reason why a request failed.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct Problem {
    /// `urn:mcp-satellite:problem:` and the kind.
    #[serde(rename = "type")]
    pub problem_type: String,
    /// Short description of the kind.
    pub title: String,
    /// HTTP status code.
    pub status: u16,
    /// Description of this failure and its cause.
    pub detail: String,
    /// Path of the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
    /// Stable error code, as on the control socket, and `unauthorized`, `forbidden`, `host_not_allowed`,
    /// `method_not_allowed`, `body_too_large`, `body_timed_out`, `unsupported_media_type`.
    pub kind: String,
    /// Status of the server instance, if it is the reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance_status: Option<String>,
    #[serde(flatten)]
    pub details: FailureDetails,
    /// Reason in the event, if the detail may contain values of the request.
    #[serde(skip)]
    event_reason: Option<String>,
}

/// Returns the HTTP status and the title of a kind.
fn describe(kind: &str) -> (StatusCode, &'static str) {
    match kind {
        "unauthorized" => (StatusCode::UNAUTHORIZED, "A valid token or login is required"),
        "forbidden" => (StatusCode::FORBIDDEN, "This client is not permitted to do this"),
        "host_not_allowed" => (StatusCode::FORBIDDEN, "The host or the origin is not allowed"),
        "not_found" => (StatusCode::NOT_FOUND, "There is nothing with this name"),
        "method_not_allowed" => (StatusCode::METHOD_NOT_ALLOWED, "The path has no such method"),
        "ambiguous" => (StatusCode::BAD_REQUEST, "The name is ambiguous"),
        "bad_input" => (StatusCode::BAD_REQUEST, "The request is not valid"),
        "body_too_large" => (StatusCode::PAYLOAD_TOO_LARGE, "The request body is too large"),
        "body_timed_out" => (StatusCode::REQUEST_TIMEOUT, "The request body did not arrive in time"),
        "unsupported_media_type" => (StatusCode::UNSUPPORTED_MEDIA_TYPE, "The media type is not accepted"),
        "refused" => (StatusCode::CONFLICT, "The state does not permit this"),
        "superseded" => (StatusCode::CONFLICT, "A later command replaced this one"),
        "busy" => (StatusCode::TOO_MANY_REQUESTS, "There are too many requests"),
        "timed_out" => (StatusCode::GATEWAY_TIMEOUT, "The server did not answer in time"),
        "reconnecting" => (StatusCode::SERVICE_UNAVAILABLE, "The server is not reachable at the moment"),
        "closing" => (StatusCode::SERVICE_UNAVAILABLE, "The satellite is not ready or is ending"),
        "storage" => (StatusCode::SERVICE_UNAVAILABLE, "The change cannot be stored"),
        "terminated" => (StatusCode::BAD_GATEWAY, "The server ended during the call"),
        "remote" => (StatusCode::BAD_GATEWAY, "The remote server failed"),
        "backend" => (StatusCode::BAD_GATEWAY, "The backend did not answer as expected"),
        "authorization" => (StatusCode::BAD_GATEWAY, "The authorization failed"),
        _ => (StatusCode::BAD_GATEWAY, "The server answered with an error"),
    }
}

/// Cuts a text after `max` characters.
pub(crate) fn shorten(mut text: String, max: usize) -> String {
    if let Some((end, _)) = text.char_indices().nth(max) {
        text.truncate(end);
        text.push('…');
    }
    text
}

impl Problem {
    pub fn new(kind: &str, detail: impl Into<String>) -> Self {
        RequestFailure::new(kind, detail).into()
    }

    pub fn not_found(what: &str, name: &str) -> Self {
        Self::new("not_found", format!("there is no {what} `{}`", name.escape_debug()))
    }

    /// Returns true if the request was not carried out because it is not permitted or not valid.
    pub fn is_refusal(&self) -> bool {
        self.status < 500
    }

    /// Sets the reason in the event of a change.
    #[must_use]
    pub fn recorded_as(self, reason: String) -> Self {
        Self { event_reason: Some(reason), ..self }
    }

    pub(crate) fn event_reason(&self) -> &str {
        self.event_reason.as_deref().unwrap_or(&self.detail)
    }

    #[must_use]
    pub fn at(mut self, path: &str) -> Self {
        self.instance = Some(path.to_owned());
        self
    }
}

impl From<RequestFailure> for Problem {
    fn from(failure: RequestFailure) -> Self {
        let RequestFailure { kind, message, status: instance_status, details } = failure;
        let (status, title) = describe(&kind);
        Self {
            problem_type: format!("{TYPE_PREFIX}{kind}"),
            title: title.to_owned(),
            status: status.as_u16(),
            detail: shorten(message, DETAIL_MAX),
            instance: None,
            kind,
            instance_status,
            details,
            event_reason: None,
        }
    }
}

impl From<AccessDenied> for Problem {
    fn from(denied: AccessDenied) -> Self {
        let kind = match denied {
            AccessDenied::NoToken | AccessDenied::WrongToken => "unauthorized",
            AccessDenied::TooManyAttempts(_) => "busy",
            AccessDenied::NotLocal => "forbidden",
        };
        let retry_after_ms = match denied {
            AccessDenied::TooManyAttempts(pause) => Some(u64::try_from(pause.as_millis()).unwrap_or(u64::MAX)),
            AccessDenied::NoToken | AccessDenied::WrongToken | AccessDenied::NotLocal => None,
        };
        let mut problem = Self::new(kind, denied.to_string());
        problem.details.retry_after_ms = retry_after_ms;
        problem
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let retry_after = self.details.retry_after_ms.map(|pause| pause.div_ceil(1000));
        let mut response = (status, Json(self)).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(MEDIA_TYPE));
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(seconds) = retry_after.or((status == StatusCode::TOO_MANY_REQUESTS).then_some(RETRY_AFTER)) {
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        response
    }
}
