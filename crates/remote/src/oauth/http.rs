//! HTTP requests to authorization servers: with the clients of all remote servers, without redirects, with limits on
//! time and size, and only to addresses that may receive a token.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use mcp_satellite_actors::model::policy::RemotePolicy;
use reqwest::header::{CONTENT_TYPE, HeaderMap};
use reqwest::{Method, Request, RequestBuilder, StatusCode, Url};
use rmcp::transport::auth::{OAuthHttpClient, OAuthHttpClientError, OAuthHttpClientFuture, OAuthHttpRequest};
use serde::Deserialize;

use super::error::OAuthError;
use crate::HttpClients;
use mcp_satellite_http::client::{is_loopback, root_cause};

// From the connection to the last byte of the response.
const TIMEOUT: Duration = Duration::from_secs(15);
// Responses of authorization servers are shorter.
const BODY_MAX: usize = 256 << 10;

// HTTP access for one MCP server.
pub(super) struct OAuthHttp {
    clients: Arc<HttpClients>,
    // True if the server is on this machine. Only then may its authorization server be on this machine and without TLS:
    // a remote server must not direct requests to local services.
    is_server_local: bool,
    // Resource identifier from the protected-resource metadata, which the SDK does not expose.
    resource: Mutex<Option<String>>,
}

pub(super) struct OAuthResponse {
    pub(super) status: StatusCode,
    headers: HeaderMap,
    pub(super) body: Bytes,
}

#[cfg(test)]
impl OAuthResponse {
    pub(super) fn new(status: u16, body: &'static str) -> Self {
        let status = StatusCode::from_u16(status).unwrap_or_default();
        Self { status, headers: HeaderMap::new(), body: Bytes::from_static(body.as_bytes()) }
    }
}

impl OAuthHttp {
    pub(super) fn new(clients: Arc<HttpClients>, server: &Url) -> Self {
        Self { clients, is_server_local: is_loopback(server), resource: Mutex::default() }
    }

    pub(super) fn resource(&self) -> Option<String> {
        self.resource.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Checks that a token, a code or a person may be sent to `url`.
    pub(super) fn check_url(&self, what: &str, url: &Url) -> Result<(), OAuthError> {
        let host = url.host_str().unwrap_or_default();
        let local = is_loopback(url);
        let refused = if !matches!(url.scheme(), "http" | "https") || host.is_empty() {
            "is not an HTTP or HTTPS URL"
        } else if url.scheme() == "http" && !local {
            "must use https, not http"
        } else if local && !self.is_server_local {
            "is on this machine, but the server is not"
        } else {
            return Ok(());
        };
        Err(OAuthError::Unusable(format!("{what} `{}` {refused}", url.origin().ascii_serialization())))
    }

    pub(super) fn post(&self, what: &str, url: &str) -> Result<RequestBuilder, OAuthError> {
        let url =
            Url::parse(url).map_err(|error| OAuthError::Unusable(format!("{what} is not a valid URL: {error}")))?;
        self.check_url(what, &url)?;
        Ok(self.client(&url)?.request(Method::POST, url))
    }

    fn client(&self, url: &Url) -> Result<reqwest::Client, OAuthError> {
        if url.scheme() == "https" && !self.clients.has_roots() {
            return Err(OAuthError::Unusable(
                "this machine has no CA certificates; install them, or set SSL_CERT_FILE".to_owned(),
            ));
        }
        let client = self.clients.client_for_url(url, &RemotePolicy::default());
        client.map_err(|error| OAuthError::Unusable(format!("cannot prepare the HTTP client: {}", error.without_url())))
    }

    pub(super) async fn send(&self, request: RequestBuilder) -> Result<OAuthResponse, OAuthError> {
        let (client, request) = request.build_split();
        let request = request.map_err(|_| OAuthError::Unusable("cannot build the HTTP request".to_owned()))?;
        Self::exchange(&client, request).await
    }

    async fn exchange(client: &reqwest::Client, request: Request) -> Result<OAuthResponse, OAuthError> {
        let origin = request.url().origin().ascii_serialization();
        let unavailable = |why: String| OAuthError::Unavailable(format!("`{origin}` {why}"));
        let failed = |error: reqwest::Error| {
            let why = if error.is_timeout() { Some("no answer in time".to_owned()) } else { root_cause(&error) };
            unavailable(format!("cannot be reached: {}", why.unwrap_or_else(|| "the exchange failed".to_owned())))
        };
        let read = async {
            let mut response = client.execute(request).await.map_err(failed)?;
            let (status, headers) = (response.status(), response.headers().clone());
            let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
            let mut body = Vec::new();
            // A server that answers with an event stream would never end it.
            if !kind.starts_with("text/event-stream") {
                while let Some(chunk) = response.chunk().await.map_err(failed)? {
                    if body.len() + chunk.len() > BODY_MAX {
                        return Err(unavailable(format!("answers with more than {BODY_MAX} bytes")));
                    }
                    body.extend_from_slice(&chunk);
                }
            }
            Ok(OAuthResponse { status, headers, body: body.into() })
        };
        let timed_out = |_| unavailable(format!("cannot be reached: no answer within {} s", TIMEOUT.as_secs()));
        tokio::time::timeout(TIMEOUT, read).await.map_err(timed_out)?
    }

    fn record_resource(&self, answer: &OAuthResponse) {
        #[derive(Deserialize)]
        struct ProtectedResourceMetadata {
            resource: String,
        }
        if answer.status == StatusCode::OK
            && let Ok(ProtectedResourceMetadata { resource }) = serde_json::from_slice(&answer.body)
        {
            *self.resource.lock().unwrap_or_else(PoisonError::into_inner) = Some(resource);
        }
    }
}

// For the SDK: its requests have the same restrictions, and redirects are not followed.
impl OAuthHttpClient for OAuthHttp {
    fn execute(&self, request: OAuthHttpRequest) -> OAuthHttpClientFuture<'_> {
        Box::pin(async move {
            let request = Request::try_from(request.request).map_err(boxed)?;
            self.check_url("the URL from the metadata", request.url()).map_err(boxed)?;
            let is_look = request.method() == Method::GET;
            let answer = Self::exchange(&self.client(request.url()).map_err(boxed)?, request).await.map_err(boxed)?;
            if is_look {
                self.record_resource(&answer);
            }
            let mut response = http::Response::new(answer.body.to_vec());
            (*response.status_mut(), *response.headers_mut()) = (answer.status, answer.headers);
            Ok(response)
        })
    }
}

fn boxed(error: impl std::error::Error + Send + Sync + 'static) -> OAuthHttpClientError {
    Box::new(error)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;

    #[test]
    fn a_url_needs_tls_or_loopback_and_remote_servers_cannot_name_loopback() {
        mcp_satellite_http::client::install_tls_provider();
        let clients = Arc::new(HttpClients::new().unwrap());
        let url = |text: &str| Url::parse(text).unwrap();
        let check =
            |server: &str, target: &str| OAuthHttp::new(clients.clone(), &url(server)).check_url("it", &url(target));
        let (local, remote) = ("http://127.0.0.1:1/mcp", "https://mcp.example.com/mcp");
        assert!(check(local, "http://localhost:2/token").is_ok());
        assert!(check(local, "https://as.example.com/token").is_ok());
        assert!(check(remote, "https://as.example.com/token").is_ok());
        for (server, target) in [
            (local, "http://as.example.com/token"),
            (remote, "http://as.example.com/token"),
            (remote, "https://127.0.0.1/token"),
            (remote, "http://localhost:2/token"),
            (remote, "file:///etc/passwd"),
        ] {
            assert!(check(server, target).is_err(), "{server} {target}");
        }
    }
}
