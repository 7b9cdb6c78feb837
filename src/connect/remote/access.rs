//! How an instance's server is reached: where its requests go, and what each of them carries.

use std::sync::Arc;

use bytes::Bytes;
use mcp_satellite_actors::model::failure::FailureKind;
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::secret::{Mask, Secret};
use mcp_satellite_actors::model::spec::{InstanceSpec, Target};
use reqwest::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Client, RequestBuilder, Url};

use super::clients::Clients;
use super::tokens::{Purse, Tokens};

/// What a server's answers may be.
const ANY_ANSWER: HeaderValue = HeaderValue::from_static("application/json, text/event-stream");
/// The type of a stream of events.
pub(super) const EVENT_STREAM: &str = "text/event-stream";
/// The type of a message or a batch.
pub(super) const JSON: &str = "application/json";
/// The type of a text for people.
pub(super) const TEXT: &str = "text/plain";

pub(super) const SESSION_ID: HeaderName = HeaderName::from_static("mcp-session-id");
pub(super) const PROTOCOL_VERSION: HeaderName = HeaderName::from_static("mcp-protocol-version");
pub(super) const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// Headers that are the protocol's or the connection's, and not for an instance to set.
const RESERVED: [&str; 18] = [
    "accept",
    "accept-encoding",
    "connection",
    "content-length",
    "content-type",
    "expect",
    "host",
    "keep-alive",
    "last-event-id",
    "mcp-method",
    "mcp-name",
    "mcp-protocol-version",
    "mcp-session-id",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Whether an instance's header of this name is left out of its requests.
pub fn is_reserved(header: &str) -> bool {
    RESERVED.iter().any(|reserved| reserved.eq_ignore_ascii_case(header))
}

/// A server's address and our credentials for it. They are made of one spec; new credentials are another `Access`.
pub(super) struct Access {
    client: Client,
    /// With the instance's query parameters.
    url: Url,
    /// It may be on the other side of a proxy than the server is.
    health: Option<(Client, Url)>,
    /// The instance's, all of them sensitive.
    headers: HeaderMap,
    /// The instance's query parameters.
    query: Vec<(String, Secret)>,
    /// None if its headers say who it is.
    purse: Option<Purse>,
    pub(super) mask: Mask,
    pub(super) policy: Arc<Policy>,
}

impl Access {
    /// Fails where the spec cannot be used, and says why without showing a value.
    pub(super) fn new(spec: &InstanceSpec, clients: &Clients, tokens: &Arc<dyn Tokens>) -> Result<Self, FailureKind> {
        let bad = |why: String| FailureKind::BadAddress(spec.mask.apply(&why));
        let Target::Remote { url, health_url, .. } = &spec.target else {
            return Err(FailureKind::Unserved);
        };
        let query: Vec<_> = spec.query.iter().map(|(name, value)| (name.clone(), value.clone())).collect();
        let parse = |what: &str, text: &str| {
            let mut url = Url::parse(text).map_err(|error| bad(format!("{what} is none: {error}")))?;
            if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
                return Err(bad(format!("{what} is neither http:// nor https://")));
            }
            if url.scheme() == "https" && !clients.has_roots() {
                return Err(FailureKind::Tls("this machine has no CA certificates".to_owned()));
            }
            extend(&mut url, &query);
            Ok(url)
        };
        let url = parse("its url", url)?;
        let health_url = health_url.as_deref().map(|url| parse("its health_url", url)).transpose()?;
        let mut headers = HeaderMap::new();
        for (name, value) in spec.headers.iter().filter(|(name, _)| !is_reserved(name)) {
            let shown = name.escape_debug();
            let name = HeaderName::from_bytes(name.as_bytes())
                .map_err(|_| bad(format!("`{shown}` is no name for a header")))?;
            let mut value = HeaderValue::from_str(value.expose())
                .map_err(|_| bad(format!("the value of the header `{shown}` cannot be sent")))?;
            value.set_sensitive(true);
            headers.insert(name, value);
        }
        let client = |url: &Url| {
            clients.of(url, &spec.policy.remote).map_err(|error| {
                FailureKind::BadAddress(format!("cannot prepare the HTTP client: {}", error.without_url()))
            })
        };
        let health = health_url.map(|url| Ok((client(&url)?, url))).transpose()?;
        let client = client(&url)?;
        let (mask, policy) = (spec.mask.clone(), Arc::clone(&spec.policy));
        Ok(Self { client, url, health, headers, query, purse: Purse::of(spec, tokens), mask, policy })
    }

    /// Where the token for a request to `url` comes from. It was issued for this server, and goes nowhere else.
    pub(super) fn purse(&self, url: &Url) -> Option<&Purse> {
        self.purse.as_ref().filter(|_| url.origin() == self.url.origin())
    }

    /// The configured address. It has a query, so it is not to be shown.
    pub(super) fn url(&self) -> &Url {
        &self.url
    }

    /// An address that the server named, with our parameters beside its own.
    pub(super) fn endpoint(&self, endpoint: &Url) -> Url {
        let mut url = endpoint.clone();
        extend(&mut url, &self.query);
        url
    }

    /// A message for `url`.
    pub(super) fn post(&self, url: Url, body: Bytes) -> RequestBuilder {
        let request = self.client.post(url).headers(self.headers.clone());
        request.header(ACCEPT, ANY_ANSWER).header(CONTENT_TYPE, JSON).body(body)
    }

    /// A stream of events from the configured address.
    pub(super) fn listen(&self) -> RequestBuilder {
        let request = self.client.get(self.url.clone()).headers(self.headers.clone());
        request.header(ACCEPT, EVENT_STREAM).header(CACHE_CONTROL, "no-store")
    }

    /// The end of a session at the configured address.
    pub(super) fn delete(&self) -> RequestBuilder {
        self.client.delete(self.url.clone()).headers(self.headers.clone())
    }

    /// The question whether the server is healthy, if it was configured.
    pub(super) fn probe(&self) -> Option<RequestBuilder> {
        let (client, url) = self.health.as_ref()?;
        let request = client.get(url.clone()).headers(self.headers.clone());
        Some(request.header(CACHE_CONTROL, "no-cache"))
    }
}

/// `url` with these parameters, in the place of its own of the same names.
fn extend(url: &mut Url, query: &[(String, Secret)]) {
    if query.is_empty() {
        return;
    }
    let others = url.query_pairs().into_owned().filter(|(name, _)| !query.iter().any(|(ours, _)| ours == name));
    let others: Vec<_> = others.collect();
    let ours = query.iter().map(|(name, value)| (name.as_str(), value.expose()));
    url.query_pairs_mut().clear().extend_pairs(others).extend_pairs(ours);
}
