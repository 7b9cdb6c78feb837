//! Answers to a client without a token: where it finds the authorization servers (RFC 9728), if there are any, and nothing
//! about the servers behind the endpoint.

use std::fmt::Write as _;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use serde::Serialize;

use super::access::Denied;
use super::reply;

/// Where the metadata are; the path of the resource follows. It stands between a host and a path (RFC 9728, 3.1): whoever
/// gives the endpoint a path of its own by `public_url` sends what begins with this to it as well.
pub(crate) const PATH: &str = "/.well-known/oauth-protected-resource";

/// The answer to a request without a valid token. `resource` is the endpoint's own address and the path of the request,
/// where an authorization server gives tokens for it: a client that is told of metadata begins to authorize itself.
pub(crate) fn challenge(resource: Option<(&str, &str)>, denied: &Denied) -> Response {
    let why = denied.to_string();
    let mut response = reply::refused(StatusCode::UNAUTHORIZED, None, super::refusal::SERVER_ERROR, &why);
    let metadata = resource.map(|(base, path)| {
        let (host, prefix) = split(base);
        format!(r#"resource_metadata="{host}{PATH}{prefix}{}""#, escaped(path))
    });
    let error = matches!(denied, Denied::WrongToken).then(|| r#"error="invalid_token""#.to_owned());
    let parameters: Vec<String> = metadata.into_iter().chain(error).collect();
    let challenge = format!("Bearer {}", parameters.join(", "));
    // All of it is visible ASCII: the base came in a Host header that was checked, or in the configuration.
    if let Ok(challenge) = HeaderValue::try_from(challenge.trim_end()) {
        response.headers_mut().insert(header::WWW_AUTHENTICATE, challenge);
    }
    response
}

/// A path in which nothing can end a quoted string: what RFC 3986 does not allow in a path is percent-encoded.
fn escaped(path: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=:@/%".contains(&byte);
    let mut escaped = String::with_capacity(path.len());
    for byte in path.bytes() {
        if is_plain(byte) {
            escaped.push(char::from(byte));
        } else {
            // Writing to memory does not fail.
            let _ = write!(escaped, "%{byte:02X}");
        }
    }
    escaped
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

#[cfg(test)]
mod tests {
    use super::*;

    fn challenged(resource: Option<(&str, &str)>, denied: &Denied) -> String {
        let response = challenge(resource, denied);
        let value = response.headers().get(header::WWW_AUTHENTICATE).and_then(|value| value.to_str().ok());
        value.unwrap_or_default().to_owned()
    }

    #[test]
    fn a_path_cannot_add_a_parameter_to_the_challenge() {
        let path = "/i/a\"b\\%22é/mcp";
        assert_eq!(
            challenged(Some(("http://h/base", path)), &Denied::WrongToken),
            format!(r#"Bearer resource_metadata="http://h{PATH}/base/i/a%22b%5C%22%C3%A9/mcp", error="invalid_token""#)
        );
        assert_eq!(challenged(None, &Denied::NoToken), "Bearer");
    }
}
