//! Request bodies: read with a limit and a timeout, and validated before use.

use axum::body::{Body, BodyDataStream};
use axum::http::StatusCode;
use bytes::{Bytes, BytesMut};
use futures::StreamExt as _;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::{Duration, timeout};

use super::decode::decode;
use super::refusal::ApiError;
use super::schema::MessageSchema;

const BODY_TIMEOUT: Duration = Duration::from_secs(30);
// Bytes that are read of a too large body: a client that is still writing would not read the error response.
const UNREAD_MAX: usize = 64 * 1024 * 1024;

// Bytes of a registration, a command or its result.
pub(super) const SMALL_MAX: usize = 256 * 1024;
// Bytes of a heartbeat or a configuration.
pub(super) const LARGE_MAX: usize = 8 * 1024 * 1024;

pub(super) async fn read(body: Body, max: usize) -> Result<Bytes, ApiError> {
    let timed_out = |_| ApiError::new(StatusCode::REQUEST_TIMEOUT, "the body of the request did not arrive in time");
    timeout(BODY_TIMEOUT, collect_body(body.into_data_stream(), max)).await.map_err(timed_out)?
}

async fn collect_body(mut stream: BodyDataStream, max: usize) -> Result<Bytes, ApiError> {
    let (mut bytes, mut seen) = (BytesMut::new(), 0);
    while let Some(chunk) = stream.next().await {
        let chunk = chunk.map_err(|_| ApiError::bad_request("the body of the request is incomplete"))?;
        seen += chunk.len();
        if seen <= max {
            bytes.extend_from_slice(&chunk);
        } else if seen > UNREAD_MAX {
            break;
        }
    }
    if seen > max {
        let why = format!("the body of the request is larger than {max} bytes; send less at once");
        return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, why));
    }
    Ok(bytes.freeze())
}

pub(super) async fn read_validated<T: DeserializeOwned + Serialize + Send + 'static>(
    body: Body,
    max: usize,
    form: MessageSchema,
) -> Result<T, ApiError> {
    let bytes = read(body, max).await?;
    run_blocking(move || parse_validated(&bytes, form)).await
}

// Large bodies would stall the async threads.
pub(super) async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|_| Err(ApiError::unavailable("the backend is stopping; try again")))
}

pub(super) fn parse_validated<T: DeserializeOwned + Serialize>(
    bytes: &[u8],
    form: MessageSchema,
) -> Result<T, ApiError> {
    // The text of the serde error repeats the input; the position is enough.
    let value: Value = serde_json::from_slice(bytes).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        ApiError::bad_request(format!("the body of the request is not valid JSON: line {line}, column {column}"))
    })?;
    decode(&value).map_err(|invalid| {
        let index = (form == MessageSchema::Events).then(|| invalid.index("events")).flatten();
        ApiError::bad_request(format!("{invalid} (schemas/{})", form.file())).with_index(index)
    })
}
