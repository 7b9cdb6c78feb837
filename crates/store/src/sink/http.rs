//! Event sink that posts batches to a server: `{"events": […]}` with the id of the batch as `Idempotency-Key`.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use jiff::Timestamp;
use mcp_satellite_actors::model::event::Envelope;
use mcp_satellite_actors::model::secret::{Secret, SecretMask};
use mcp_satellite_actors::seam::{EventSink, SinkAnswer, SinkBatch};
use percent_encoding::percent_decode_str;
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use reqwest::{Client, Response, StatusCode, Url};
use serde::Serialize;
use serde_json::Value;

use mcp_satellite_http::client::{client, parse_retry_after, root_cause};

/// Default limit for one request including its response.
pub const TIMEOUT: Duration = Duration::from_secs(10);

// Enough for a report on 100 rejected events, a full batch.
const BODY_MAX: usize = 64 * 1024;

// Characters of an error text from the server.
const REASON_MAX: usize = 300;

const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// Event sink that posts batches to a URL. Redirects are not followed, because their target is not configured.
#[derive(Clone)]
pub struct HttpSink {
    client: Client,
    url: Url,
    headers: HeaderMap,
    timeout: Duration,
    // Hides our credentials where the server echoes them.
    mask: SecretMask,
}

/// Error that prevents the creation of a sink. Shows neither the token nor credentials in the URL.
#[derive(Debug, thiserror::Error)]
pub enum HttpSinkError {
    #[error("cannot send events to this URL: {0}; give an http:// or https:// URL")]
    Url(String),
    #[error("cannot send events with this token: it contains a character that is not allowed in a header")]
    Token,
    /// The HTTP client could not be created, for example because the machine has no CA certificates.
    #[error("cannot prepare the HTTP client for events")]
    Client(#[source] reqwest::Error),
}

impl HttpSink {
    /// Creates a sink for `url` with an optional bearer token. Without a token, credentials in the URL are sent as
    /// basic authentication.
    ///
    /// # Errors
    ///
    /// Returns an error if URL, token or HTTP client cannot be used.
    pub fn new(url: &str, token: Option<&Secret>) -> Result<Self, HttpSinkError> {
        let url = Url::parse(url).map_err(|error| HttpSinkError::Url(error.to_string()))?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(HttpSinkError::Url(format!("the scheme `{}` is not supported", url.scheme())));
        }
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(token) = token {
            let mut value =
                HeaderValue::from_str(&format!("Bearer {}", token.expose())).map_err(|_| HttpSinkError::Token)?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        let parameters: Vec<_> = url.query_pairs().map(|(_, value)| value).collect();
        let password = url.password().map(|password| percent_decode_str(password).decode_utf8_lossy());
        let secrets = token.map(Secret::expose).into_iter().chain(url.password()).chain(url.query());
        let secrets = secrets.chain(password.as_deref());
        let mask = SecretMask::new(secrets.chain(parameters.iter().map(|value| &**value)));
        Ok(Self { client: client(&url).map_err(HttpSinkError::Client)?, url, headers, timeout: TIMEOUT, mask })
    }

    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    async fn post(&self, batch: &SinkBatch) -> SinkAnswer {
        let body = match serde_json::to_vec(&EventsBody { events: &batch.events }) {
            Ok(body) => body,
            Err(error) => return SinkAnswer::Invalid(None, format!("cannot write the events as JSON: {error}")),
        };
        let request = self.client.post(self.url.clone()).timeout(self.timeout).body(body);
        let response = match request.headers(self.headers.clone()).header(IDEMPOTENCY_KEY, batch.id).send().await {
            Ok(response) => response,
            Err(error) => return SinkAnswer::Unavailable(self.describe_failure(&error)),
        };
        let status = response.status();
        let retry_after = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()).map(str::to_owned);
        let report = match read_report(response).await {
            Ok(report) => report,
            // Unknown whether some events were rejected. The idempotency key makes a retry safe.
            Err(error) if status.is_success() => return SinkAnswer::Unavailable(self.describe_failure(&error)),
            Err(_) => Value::Null,
        };
        let named = |index: &Value| {
            index.as_u64().and_then(|index| usize::try_from(index).ok()).filter(|index| *index < batch.events.len())
        };
        match status {
            status if status.is_success() => self.parse_report(&report, named),
            StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY => {
                let index = named(&report["failures"][0]["index"]).or_else(|| named(&report["index"]));
                let reason = [&report["failures"][0]["error"], &report["error"], &report["message"]];
                let reason = reason.into_iter().find_map(Value::as_str);
                SinkAnswer::Invalid(
                    index,
                    reason.map_or_else(|| format!("answered {status}"), |reason| self.sanitize(reason)),
                )
            }
            StatusCode::PAYLOAD_TOO_LARGE => SinkAnswer::TooLarge,
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => SinkAnswer::Unauthorized,
            StatusCode::TOO_MANY_REQUESTS => {
                SinkAnswer::Throttled(retry_after.and_then(|value| parse_retry_after(&value, Timestamp::now())))
            }
            status => SinkAnswer::Unavailable(format!("{} answered {status}", self.redacted_url())),
        }
    }

    // A 2xx response with an unknown body still means that the events were accepted.
    fn parse_report(&self, report: &Value, named: impl Fn(&Value) -> Option<usize>) -> SinkAnswer {
        let failures = report["failures"].as_array().map_or(&[][..], Vec::as_slice);
        if report["failed"].as_u64().unwrap_or(0) == 0 && failures.is_empty() {
            return SinkAnswer::Accepted;
        }
        let refused = failures.iter().filter_map(|failure| {
            let reason = failure["error"].as_str().unwrap_or("rejected without a reason");
            Some((named(&failure["index"])?, self.sanitize(reason)))
        });
        SinkAnswer::Partial(refused.collect())
    }

    // For log lines: foreign text without credentials and control characters.
    fn sanitize(&self, text: &str) -> String {
        let clean = |character: char| if character.is_control() { ' ' } else { character };
        self.mask.apply(text).chars().take(REASON_MAX).map(clean).collect()
    }

    // Only the root cause: the text of the error contains the whole URL.
    fn describe_failure(&self, error: &reqwest::Error) -> String {
        let to = self.redacted_url();
        if error.is_timeout() {
            return format!("{to} did not answer within {:?}", self.timeout);
        }
        let reason = root_cause(error).map_or_else(|| "the exchange failed".to_owned(), |root| self.sanitize(&root));
        format!("cannot {} {to}: {reason}", if error.is_connect() { "connect to" } else { "complete the request to" })
    }

    /// Returns the URL without credentials and parameters.
    pub fn redacted_url(&self) -> String {
        format!("{}{}", self.url.origin().ascii_serialization(), self.url.path())
    }
}

impl EventSink for HttpSink {
    fn send(&self, batch: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
        let sink = self.clone();
        async move { sink.post(&batch).await }.boxed()
    }
}

impl fmt::Debug for HttpSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpSink")
            .field("url", &self.redacted_url())
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

#[derive(Serialize)]
struct EventsBody<'a> {
    events: &'a [Envelope],
}

// Null if the body is invalid or too long.
async fn read_report(mut response: Response) -> reqwest::Result<Value> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        if body.len() + chunk.len() > BODY_MAX {
            return Ok(Value::Null);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(serde_json::from_slice(&body).unwrap_or_default())
}
