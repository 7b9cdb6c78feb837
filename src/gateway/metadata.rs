//! What a client without a token is told: where it learns who gives tokens (RFC 9728), and nothing of what there is.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use serde::Serialize;

use super::access::Denied;
use super::reply;

/// Where the metadata are; the path of the resource follows. It stands between a host and a path (RFC 9728, 3.1): whoever
/// gives the endpoint a path of its own by `public_url` sends what begins with this to it as well.
pub(crate) const PATH: &str = "/.well-known/oauth-protected-resource";

/// The answer to a request without a valid token. `base` is the endpoint's own address.
pub(crate) fn challenge(base: &str, path: &str, denied: &Denied) -> Response {
    let why = denied.to_string();
    let mut response = reply::refused(StatusCode::UNAUTHORIZED, None, super::refusal::SERVER_ERROR, &why);
    let error = if matches!(denied, Denied::WrongToken) { r#", error="invalid_token""# } else { "" };
    let (host, prefix) = split(base);
    let challenge = format!(r#"Bearer resource_metadata="{host}{PATH}{prefix}{path}"{error}"#);
    // The path came in a request line and the base in a Host header that was checked: both are visible ASCII.
    if let Ok(challenge) = HeaderValue::try_from(challenge) {
        response.headers_mut().insert(header::WWW_AUTHENTICATE, challenge);
    }
    response
}

/// What of an address comes before its path, and its path.
fn split(base: &str) -> (&str, &str) {
    let host = base.find("://").map_or(0, |at| at + "://".len());
    base.split_at(base[host..].find('/').map_or(base.len(), |at| host + at))
}

/// The metadata of the resource at `path`, whether there is one or not. A path that does not begin as `base` ends was asked for
/// through a proxy that has cut that.
pub(crate) fn document(base: &str, path: &str, name: &str, authorization_servers: &[String]) -> Response {
    #[derive(Serialize)]
    struct Document<'a> {
        resource: String,
        bearer_methods_supported: [&'static str; 1],
        resource_name: &'a str,
        #[serde(skip_serializing_if = "<[String]>::is_empty")]
        authorization_servers: &'a [String],
    }
    let (_, prefix) = split(base);
    let path = path.strip_prefix(prefix).filter(|rest| rest.is_empty() || rest.starts_with('/')).unwrap_or(path);
    let document = Document {
        resource: format!("{base}{path}"),
        bearer_methods_supported: ["header"],
        resource_name: name,
        authorization_servers,
    };
    reply::document(serde_json::to_string(&document).unwrap_or_default())
}
