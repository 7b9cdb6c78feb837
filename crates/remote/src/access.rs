//! Access to an instance's server: addresses, credentials and the headers of every request.

use std::sync::Arc;

use bytes::Bytes;
use mcp_satellite_actors::model::failure::FailureKind;
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::secret::{Secret, SecretMask};
use mcp_satellite_actors::model::spec::{InstanceSpec, ServerTarget, is_reserved_header};
use mcp_satellite_protocol::header;
use reqwest::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Client, RequestBuilder, Url};

use super::clients::HttpClients;
use super::tokens::{InstanceTokens, TokenSource};

const ANY_ANSWER: HeaderValue = HeaderValue::from_static("application/json, text/event-stream");
pub(super) const EVENT_STREAM: &str = "text/event-stream";
pub(super) const JSON: &str = "application/json";
pub(super) const TEXT: &str = "text/plain";

pub(super) const SESSION_ID: HeaderName = HeaderName::from_static(header::SESSION_ID);
pub(super) const PROTOCOL_VERSION: HeaderName = HeaderName::from_static(header::PROTOCOL_VERSION);
pub(super) const LAST_EVENT_ID: HeaderName = HeaderName::from_static(header::LAST_EVENT_ID);

/// Addresses of a server and credentials for it, from one spec. New credentials make a new `Access`.
pub(super) struct ServerAccess {
    client: Client,
    // Includes the instance's query parameters.
    url: Url,
    health: Option<(Client, Url)>,
    // Headers of the instance, all marked as sensitive.
    headers: HeaderMap,
    query: Vec<(String, Secret)>,
    // Absent if the instance's headers contain a credential.
    tokens: Option<InstanceTokens>,
    pub(super) mask: SecretMask,
    pub(super) policy: Arc<Policy>,
}

impl ServerAccess {
    /// Fails if the spec is not usable. The error contains no secret value.
    pub(super) fn new(
        spec: &InstanceSpec,
        clients: &HttpClients,
        tokens: &Arc<dyn TokenSource>,
    ) -> Result<Self, FailureKind> {
        let bad = |why: String| FailureKind::BadAddress(spec.mask.apply(&why));
        let ServerTarget::Remote { url, health_url, .. } = &spec.target else {
            return Err(FailureKind::UnsupportedTransport);
        };
        let query: Vec<_> = spec.query.iter().map(|(name, value)| (name.clone(), value.clone())).collect();
        let parse = |part: &str, text: &str| {
            let mut url = Url::parse(text).map_err(|error| bad(format!("`{part}` is not a valid URL: {error}")))?;
            if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
                return Err(bad(format!("`{part}` must begin with http:// or https://")));
            }
            if url.scheme() == "https" && !clients.has_roots() {
                let why = "this machine has no CA certificates; install them, or set SSL_CERT_FILE";
                return Err(FailureKind::Tls(why.to_owned()));
            }
            extend_query(&mut url, &query);
            Ok(url)
        };
        let url = parse("url", url)?;
        let health_url = health_url.as_deref().map(|url| parse("health_url", url)).transpose()?;
        let mut headers = HeaderMap::new();
        for (name, value) in spec.headers.iter().filter(|(name, _)| !is_reserved_header(name)) {
            let shown = name.escape_debug();
            let name = HeaderName::from_bytes(name.as_bytes())
                .map_err(|_| bad(format!("`{shown}` is not a valid header name")))?;
            let mut value = HeaderValue::from_str(value.expose())
                .map_err(|_| bad(format!("the value of the header `{shown}` is not valid in HTTP")))?;
            value.set_sensitive(true);
            headers.insert(name, value);
        }
        let client = |url: &Url| {
            clients.client_for_url(url, &spec.policy.remote).map_err(|error| {
                FailureKind::BadAddress(format!("cannot prepare the HTTP client: {}", error.without_url()))
            })
        };
        let health = health_url.map(|url| Ok((client(&url)?, url))).transpose()?;
        let client = client(&url)?;
        let (mask, policy) = (spec.mask.clone(), Arc::clone(&spec.policy));
        Ok(Self { client, url, health, headers, query, tokens: InstanceTokens::from_spec(spec, tokens), mask, policy })
    }

    /// Returns the source of tokens for a request to `url`: only for the origin of this server, for which tokens are
    /// issued.
    pub(super) fn tokens_for(&self, url: &Url) -> Option<&InstanceTokens> {
        self.tokens.as_ref().filter(|_| url.origin() == self.url.origin())
    }

    /// Returns the configured address. It contains the query and must not be shown.
    pub(super) fn url(&self) -> &Url {
        &self.url
    }

    pub(super) fn with_query(&self, endpoint: &Url) -> Url {
        let mut url = endpoint.clone();
        extend_query(&mut url, &self.query);
        url
    }

    pub(super) fn post(&self, url: Url, body: Bytes) -> RequestBuilder {
        let request = self.client.post(url).headers(self.headers.clone());
        request.header(ACCEPT, ANY_ANSWER).header(CONTENT_TYPE, JSON).body(body)
    }

    pub(super) fn listen(&self) -> RequestBuilder {
        let request = self.client.get(self.url.clone()).headers(self.headers.clone());
        request.header(ACCEPT, EVENT_STREAM).header(CACHE_CONTROL, "no-store")
    }

    pub(super) fn delete(&self) -> RequestBuilder {
        self.client.delete(self.url.clone()).headers(self.headers.clone())
    }

    pub(super) fn probe(&self) -> Option<RequestBuilder> {
        let (client, url) = self.health.as_ref()?;
        let request = client.get(url.clone()).headers(self.headers.clone());
        Some(request.header(CACHE_CONTROL, "no-cache"))
    }
}

fn extend_query(url: &mut Url, query: &[(String, Secret)]) {
    if query.is_empty() {
        return;
    }
    let others =
        url.query_pairs().into_owned().filter(|(name, _)| !query.iter().any(|(own_query, _)| own_query == name));
    let others: Vec<_> = others.collect();
    let own_query = query.iter().map(|(name, value)| (name.as_str(), value.expose()));
    url.query_pairs_mut().clear().extend_pairs(others).extend_pairs(own_query);
}
