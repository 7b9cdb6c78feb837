//! Error responses: a status and an [`ErrorBody`], which never repeats the request.

use std::io;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::wire::ErrorBody;

/// Error response of the backend.
#[derive(Debug)]
pub struct ApiError {
    status: StatusCode,
    body: ErrorBody,
}

impl ApiError {
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// Returns the reason of the error and the next step.
    pub fn message(&self) -> &str {
        &self.body.error
    }

    pub(super) fn new(status: StatusCode, why: impl Into<String>) -> Self {
        Self { status, body: ErrorBody { error: why.into(), index: None } }
    }

    pub(super) fn bad_request(why: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, why)
    }

    pub(super) fn with_index(mut self, index: Option<usize>) -> Self {
        self.body.index = index;
        self
    }

    pub(super) fn unauthorized(why: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, why)
    }

    pub(super) fn not_found(what: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, format!("there is no such {what}"))
    }

    pub(super) fn unavailable(why: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, why)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body)).into_response();
        let headers = response.headers_mut();
        match self.status {
            StatusCode::UNAUTHORIZED => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            StatusCode::SERVICE_UNAVAILABLE => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
            }
            _ => {}
        }
        response
    }
}

// The database error is only logged: it may name tables and paths, and the client cannot act on it.
impl From<rusqlite::Error> for ApiError {
    fn from(error: rusqlite::Error) -> Self {
        tracing::error!(%error, "the database failed; the request had no effect");
        Self::unavailable("the database of the backend failed; the request had no effect; try again")
    }
}

impl From<io::Error> for ApiError {
    fn from(error: io::Error) -> Self {
        tracing::error!(%error, "an operation of the system failed; the request had no effect");
        Self::unavailable("an operation of the system failed on the backend; the request had no effect; try again")
    }
}

impl From<serde_json::Error> for ApiError {
    fn from(error: serde_json::Error) -> Self {
        tracing::error!(%error, "stored data cannot be read or written as JSON");
        Self::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "stored data of the backend cannot be read; the log of the backend contains the reason",
        )
    }
}
