//! Request bodies: read with a limit and a timeout, and validated against their schema before use.

use std::sync::Arc;

use axum::body::{Body, BodyDataStream};
use axum::http::StatusCode;
use bytes::{Bytes, BytesMut};
use futures::StreamExt as _;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::{Duration, timeout};

use super::refusal::Refusal;
use super::schema::{Form, Schemas};

const BODY_TIMEOUT: Duration = Duration::from_secs(30);
// Bytes that are read of a too large body: a client that is still writing would not read the error response.
const UNREAD_MAX: usize = 64 * 1024 * 1024;

// Bytes of a registration, a command or its result.
pub(super) const SMALL_MAX: usize = 256 * 1024;
// Bytes of a heartbeat or a configuration.
pub(super) const LARGE_MAX: usize = 8 * 1024 * 1024;

pub(super) async fn read(body: Body, max: usize) -> Result<Bytes, Refusal> {
    let late = |_| Refusal::new(StatusCode::REQUEST_TIMEOUT, "the request's body took too long");
    timeout(BODY_TIMEOUT, gather(body.into_data_stream(), max)).await.map_err(late)?
}

async fn gather(mut stream: BodyDataStream, max: usize) -> Result<Bytes, Refusal> {
    let (mut whole, mut seen) = (BytesMut::new(), 0);
    while let Some(chunk) = stream.next().await {
        let chunk = chunk.map_err(|_| Refusal::bad("the request's body broke off"))?;
        seen += chunk.len();
        if seen <= max {
            whole.extend_from_slice(&chunk);
        } else if seen > UNREAD_MAX {
            break;
        }
    }
    if seen > max {
        let why = format!("the request's body is larger than {max} bytes; send less at once");
        return Err(Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, why));
    }
    Ok(whole.freeze())
}

pub(super) async fn take<T: DeserializeOwned + Send + 'static>(
    body: Body,
    max: usize,
    form: Form,
    schemas: &Arc<Schemas>,
) -> Result<T, Refusal> {
    let bytes = read(body, max).await?;
    let schemas = schemas.clone();
    apart(move || understand(&bytes, form, &schemas)).await
}

// Large bodies would stall the async threads.
pub(super) async fn apart<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|_| Err(Refusal::unavailable("the backend is ending; try again")))
}

pub(super) fn understand<T: DeserializeOwned>(bytes: &[u8], form: Form, schemas: &Schemas) -> Result<T, Refusal> {
    // The text of the serde error repeats the input; the position is enough.
    let value: Value = serde_json::from_slice(bytes).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        Refusal::bad(format!("the request's body is no JSON that can be read: line {line}, column {column}"))
    })?;
    schemas.check(form, &value).map_err(|invalid| {
        let index = (form == Form::Events).then(|| invalid.index("events")).flatten();
        Refusal::bad(format!("{invalid} (schemas/{})", form.file())).at(index)
    })?;
    serde_json::from_value(value).map_err(|error| {
        tracing::debug!(%error, form = form.file(), "a request has the form of its schema and cannot be read");
        Refusal::bad(format!("this is not what schemas/{} means", form.file()))
    })
}
