//! What a client without a token is told: where it learns who gives tokens (RFC 9728), and nothing of what there is.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use serde::Serialize;

use super::access::Denied;
use super::reply;

/// Where the metadata are; the path of the resource follows.
pub(crate) const PATH: &str = "/.well-known/oauth-protected-resource";

/// The answer to a request without a valid token. `base` is the endpoint's own address.
pub(crate) fn challenge(base: &str, path: &str, denied: &Denied) -> Response {
    let why = denied.to_string();
    let mut response = reply::refused(StatusCode::UNAUTHORIZED, None, super::refusal::SERVER_ERROR, &why);
    let error = if matches!(denied, Denied::WrongToken) { r#", error="invalid_token""# } else { "" };
    let challenge = format!(r#"Bearer resource_metadata="{base}{PATH}{path}"{error}"#);
    // The path came in a request line and the base in a Host header that was checked: both are visible ASCII.
    if let Ok(challenge) = HeaderValue::try_from(challenge) {
        response.headers_mut().insert(header::WWW_AUTHENTICATE, challenge);
    }
    response
}

/// The metadata of the resource at `path`, whether there is one or not.
pub(crate) fn document(base: &str, path: &str, name: &str, authorization_servers: &[String]) -> Response {
    #[derive(Serialize)]
    struct Document<'a> {
        resource: String,
        bearer_methods_supported: [&'static str; 1],
        resource_name: &'a str,
        #[serde(skip_serializing_if = "<[String]>::is_empty")]
        authorization_servers: &'a [String],
    }
    let document = Document {
        resource: format!("{base}{path}"),
        bearer_methods_supported: ["header"],
        resource_name: name,
        authorization_servers,
    };
    reply::document(serde_json::to_string(&document).unwrap_or_default())
}
