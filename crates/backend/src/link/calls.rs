//! Requests to a backend, with timeouts and limits on the size of responses. Errors contain no credentials and fit in
//! one line of a log.

use std::time::Duration;

use jiff::Timestamp;
use mcp_satellite_actors::model::secret::{Secret, SecretMask};
use reqwest::header::{ETAG, HeaderValue, IF_NONE_MATCH, RETRY_AFTER};
use reqwest::{Client, Method, RequestBuilder, Response, StatusCode, Url};
use serde::de::DeserializeOwned;

use super::key::SatelliteKey;
use super::poll_response::PollResponse;
use crate::wire::{
    CommandResult, EmptyResponse, ErrorBody, FleetList, Heartbeat, Registration, RegistrationResponse, SatelliteConfig,
};
use mcp_satellite_http::client::{client, parse_retry_after, root_cause};

// Enough for thousands of servers.
const CONFIG_MAX: usize = 16 << 20;
// Enough for ten thousand satellites.
const FLEET_MAX: usize = 8 << 20;
// Limit of all other responses.
const ANSWER_MAX: usize = 1 << 20;
// Characters of an error text from the backend.
const REASON_MAX: usize = 300;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub(super) enum BackendCallError {
    #[error("cannot reach {to}: {reason}")]
    Unreachable { to: String, reason: String },
    #[error("{to} did not answer within {after:?}")]
    TimedOut { to: String, after: Duration },
    #[error("{to} answered {status}{}", said.as_ref().map(|said| format!(": {said}")).unwrap_or_default())]
    Refused { to: String, status: StatusCode, said: Option<String>, retry_after: Option<Duration> },
    #[error("invalid response from {to}: {reason}")]
    Malformed { to: String, reason: String },
}

impl BackendCallError {
    // Stable identifier for events.
    pub(super) fn kind(&self) -> &'static str {
        self.into()
    }

    pub(super) fn status(&self) -> Option<StatusCode> {
        match self {
            Self::Refused { status, .. } => Some(*status),
            Self::Unreachable { .. } | Self::TimedOut { .. } | Self::Malformed { .. } => None,
        }
    }

    pub(super) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused { retry_after, .. } => *retry_after,
            Self::Unreachable { .. } | Self::TimedOut { .. } | Self::Malformed { .. } => None,
        }
    }

    pub(super) fn is_unauthorized(&self) -> bool {
        self.status() == Some(StatusCode::UNAUTHORIZED)
    }
}

#[derive(Debug)]
pub(super) enum ConfigFetch {
    Unchanged,
    New(Box<SatelliteConfig>, Option<HeaderValue>),
}

#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    #[error("cannot use the URL of the backend: {0}")]
    Url(String),
    /// The HTTP client could not be created, for example because the machine has no CA certificates.
    #[error("cannot prepare the HTTP client for the backend")]
    Client(#[source] reqwest::Error),
}

#[derive(Debug, Clone)]
pub(super) struct BackendClient {
    client: Client,
    base: Url,
    timeout: Duration,
}

impl BackendClient {
    // `url` was validated with the configuration.
    pub(super) fn new(url: &str, timeout: Duration) -> Result<Self, LinkError> {
        let base = Url::parse(url).map_err(|error| LinkError::Url(error.to_string()))?;
        let client = client(&base).map_err(LinkError::Client)?;
        Ok(Self { client, base, timeout })
    }

    pub(super) async fn register(
        &self,
        token: &Secret,
        body: &Registration,
    ) -> Result<RegistrationResponse, BackendCallError> {
        let call = self.request(Method::POST, &["register"], token).json(body);
        self.request_json(call, ANSWER_MAX).await
    }

    pub(super) async fn poll_commands(
        &self,
        key: &SatelliteKey,
        last_poll: Option<Timestamp>,
        limit: usize,
        hold: Duration,
    ) -> Result<PollResponse, BackendCallError> {
        let mut query = vec![("limit", limit.to_string())];
        if hold >= Duration::from_secs(1) {
            query.push(("wait", hold.as_secs().to_string()));
        }
        query.extend(last_poll.map(|last_poll| ("last_poll", format!("{last_poll:.3}"))));
        let call = self.request_with_query(Method::GET, &[&key.satellite_id, "commands"], &query, &key.secret);
        self.request_json(call.with_hold(hold), ANSWER_MAX).await
    }

    pub(super) async fn send_result(
        &self,
        key: &SatelliteKey,
        command: &str,
        result: &CommandResult,
    ) -> Result<(), BackendCallError> {
        let call = self.satellite_request(key, Method::POST, &["commands", command, "result"]).json(result);
        self.request_empty(call).await
    }

    pub(super) async fn fetch_config(
        &self,
        key: &SatelliteKey,
        known: Option<&HeaderValue>,
    ) -> Result<ConfigFetch, BackendCallError> {
        let mut call = self.satellite_request(key, Method::GET, &["config"]);
        if let Some(known) = known {
            call = call.header(IF_NONE_MATCH, known);
        }
        let call = call.send().await?;
        if call.response.status() == StatusCode::NOT_MODIFIED && known.is_some() {
            return Ok(ConfigFetch::Unchanged);
        }
        let tag = call.response.headers().get(ETAG).cloned();
        let config: SatelliteConfig = call.read_json(CONFIG_MAX).await?;
        Ok(ConfigFetch::New(Box::new(config), tag))
    }

    pub(super) async fn send_heartbeat(&self, key: &SatelliteKey, body: &Heartbeat) -> Result<(), BackendCallError> {
        self.request_empty(self.satellite_request(key, Method::POST, &["heartbeat"]).json(body)).await
    }

    pub(super) async fn fetch_fleet(&self, key: &SatelliteKey) -> Result<FleetList, BackendCallError> {
        self.request_json(self.satellite_request(key, Method::GET, &["fleet"]), FLEET_MAX).await
    }

    pub(super) fn events_url(&self, key: &SatelliteKey) -> String {
        self.url(&[&key.satellite_id, "events"]).into()
    }

    async fn request_empty(&self, call: BackendRequest) -> Result<(), BackendCallError> {
        let to = call.to.clone();
        let received: EmptyResponse = self.request_json(call, ANSWER_MAX).await?;
        if received.success {
            return Ok(());
        }
        Err(BackendCallError::Malformed {
            to,
            reason: "the HTTP status means success, but `success` is false".to_owned(),
        })
    }

    async fn request_json<T: DeserializeOwned + Send + 'static>(
        &self,
        call: BackendRequest,
        max: usize,
    ) -> Result<T, BackendCallError> {
        call.send().await?.read_json(max).await
    }

    fn satellite_request(&self, key: &SatelliteKey, method: Method, path: &[&str]) -> BackendRequest {
        let path: Vec<&str> = std::iter::once(&*key.satellite_id).chain(path.iter().copied()).collect();
        self.request(method, &path, &key.secret)
    }

    fn request(&self, method: Method, path: &[&str], bearer: &Secret) -> BackendRequest {
        self.request_with_query(method, path, &[], bearer)
    }

    fn request_with_query(
        &self,
        method: Method,
        path: &[&str],
        query: &[(&str, String)],
        bearer: &Secret,
    ) -> BackendRequest {
        let mut url = self.url(path);
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        let to = format!("{}{}", url.origin().ascii_serialization(), url.path());
        let request = self.client.request(method, url).timeout(self.timeout).bearer_auth(bearer.expose());
        BackendRequest { request, to, mask: SecretMask::new([bearer.expose()]), timeout: self.timeout }
    }

    fn url(&self, path: &[&str]) -> Url {
        let mut url = self.base.clone();
        // Fails only for URLs that cannot be a base, which excludes `http` and `https`.
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(["api", "satellites"]).extend(path);
        }
        url
    }
}

// `to` is the URL for messages; `mask` hides credentials in them.
struct BackendRequest {
    request: RequestBuilder,
    to: String,
    mask: SecretMask,
    timeout: Duration,
}

impl BackendRequest {
    // The backend may hold the request back for this additional time.
    fn with_hold(mut self, hold: Duration) -> Self {
        self.timeout += hold;
        self.request = self.request.timeout(self.timeout);
        self
    }

    fn json(mut self, body: &impl serde::Serialize) -> Self {
        self.request = self.request.json(body);
        self
    }

    fn header(mut self, name: reqwest::header::HeaderName, value: &HeaderValue) -> Self {
        self.request = self.request.header(name, value);
        self
    }

    async fn send(self) -> Result<BackendResponse, BackendCallError> {
        let Self { request, to, mask, timeout } = self;
        let about = BackendRequestInfo { to, mask, timeout };
        match request.send().await {
            Ok(response) => Ok(BackendResponse { response, about }),
            Err(error) => Err(about.failure(&error)),
        }
    }
}

struct BackendRequestInfo {
    to: String,
    mask: SecretMask,
    timeout: Duration,
}

impl BackendRequestInfo {
    fn failure(&self, error: &reqwest::Error) -> BackendCallError {
        let to = self.to.clone();
        if error.is_timeout() {
            return BackendCallError::TimedOut { to, after: self.timeout };
        }
        let reason = root_cause(error).map_or_else(|| "the exchange failed".to_owned(), |root| self.sanitize(&root));
        BackendCallError::Unreachable { to, reason }
    }

    // For log lines: foreign text without credentials and control characters.
    fn sanitize(&self, text: &str) -> String {
        let clean = |character: char| if character.is_control() { ' ' } else { character };
        self.mask.apply(text).chars().take(REASON_MAX).map(clean).collect()
    }
}

struct BackendResponse {
    response: Response,
    about: BackendRequestInfo,
}

impl BackendResponse {
    async fn read_json<T: DeserializeOwned + Send + 'static>(self, max: usize) -> Result<T, BackendCallError> {
        let Self { mut response, about } = self;
        let status = response.status();
        let retry_after = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok());
        let retry_after = retry_after.and_then(|value| parse_retry_after(value, Timestamp::now()));
        let to = about.to.clone();
        let malformed = |reason: String| BackendCallError::Malformed { to, reason };
        let max = if status.is_success() { max } else { ANSWER_MAX };
        let body = match read_body(&mut response, max).await {
            Ok(Some(body)) => body,
            Ok(None) if status.is_success() => return Err(malformed(format!("the body is larger than {max} bytes"))),
            Err(error) if status.is_success() => return Err(about.failure(&error)),
            Ok(None) | Err(_) => Vec::new(),
        };
        if !status.is_success() {
            let said = serde_json::from_slice(&body).ok().map(|ErrorBody { error, .. }| about.sanitize(&error));
            let said = said.or_else(|| {
                status
                    .is_redirection()
                    .then(|| "redirects are not followed; configure the URL of the backend itself".to_owned())
            });
            return Err(BackendCallError::Refused { to: about.to, status, said, retry_after });
        }
        if body.len() < ANSWER_MAX {
            return serde_json::from_slice(&body)
                .map_err(|error| malformed(about.sanitize(&describe_json_error(&error))));
        }
        // Parsing a large body would block the async thread.
        let parsed = tokio::task::spawn_blocking(move || {
            serde_json::from_slice(&body).map_err(|error| describe_json_error(&error))
        });
        let parsed = parsed.await.unwrap_or_else(|error| Err(error.to_string()));
        parsed.map_err(|error| malformed(about.sanitize(&error)))
    }
}

// Serde's own text may contain a value, which may be a secret.
fn describe_json_error(error: &serde_json::Error) -> String {
    let what = match error.classify() {
        serde_json::error::Category::Io => "the body cannot be read",
        serde_json::error::Category::Syntax => "the body is not JSON",
        serde_json::error::Category::Data => "a member is missing, of the wrong type, or has an invalid value",
        serde_json::error::Category::Eof => "the body is incomplete",
    };
    format!("{what} (line {}, column {})", error.line(), error.column())
}

// `None` if the body is longer than `max` bytes.
async fn read_body(response: &mut Response, max: usize) -> reqwest::Result<Option<Vec<u8>>> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        if body.len() + chunk.len() > max {
            return Ok(None);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(Some(body))
}
