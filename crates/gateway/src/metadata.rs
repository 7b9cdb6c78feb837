//! Responses to clients without a token: the location of the authorization servers (RFC 9728), if there are any, and no
//! information about the servers behind the endpoint.

use mcp_satellite_protocol::error_code::SERVER_ERROR;
use std::fmt::Write as _;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use serde::Serialize;

use super::access::AccessDenied;
use super::reply;

// Path of the metadata; the path of the resource follows. It stands between host and path (RFC 9728, 3.1), so a proxy
// that adds a path through `public_url` must route this prefix to the endpoint, too.
pub(crate) const PATH: &str = "/.well-known/oauth-protected-resource";

/// Returns the response to a request without a valid token. `resource` contains the endpoint's base URL and the path of
/// the request; `None` without authorization servers, because a client that receives metadata starts an authorization.
pub(crate) fn challenge(resource: Option<(&str, &str)>, denied: &AccessDenied) -> Response {
    let why = denied.to_string();
    let mut response = reply::error_response(StatusCode::UNAUTHORIZED, None, SERVER_ERROR, &why);
    let metadata = resource.map(|(base, path)| {
        let (host, prefix) = split(base);
        format!(r#"resource_metadata="{host}{PATH}{prefix}{}""#, escape_path(path))
    });
    let error = matches!(denied, AccessDenied::WrongToken).then(|| r#"error="invalid_token""#.to_owned());
    let parameters: Vec<String> = metadata.into_iter().chain(error).collect();
    let challenge = format!("Bearer {}", parameters.join(", "));
    // Visible ASCII: the base comes from a validated Host header or from the configuration.
    if let Ok(challenge) = HeaderValue::try_from(challenge.trim_end()) {
        response.headers_mut().insert(header::WWW_AUTHENTICATE, challenge);
    }
    response
}

/// Percent-encodes the bytes that RFC 3986 does not allow in a path, so that the path cannot end a quoted string.
fn escape_path(path: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=:@/%".contains(&byte);
    let mut escaped = String::with_capacity(path.len());
    for byte in path.bytes() {
        if is_plain(byte) {
            escaped.push(char::from(byte));
        } else {
            let _ = write!(escaped, "%{byte:02X}");
        }
    }
    escaped
}

fn split(base: &str) -> (&str, &str) {
    let host = base.find("://").map_or(0, |at| at + "://".len());
    base.split_at(base[host..].find('/').map_or(base.len(), |at| host + at))
}

/// Returns the metadata of the resource at `path`, without checking that the resource exists. If `path` does not begin
/// with the path of `base`, a proxy has removed that prefix.
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

    fn challenge_header(resource: Option<(&str, &str)>, denied: &AccessDenied) -> String {
        let response = challenge(resource, denied);
        let value = response.headers().get(header::WWW_AUTHENTICATE).and_then(|value| value.to_str().ok());
        value.unwrap_or_default().to_owned()
    }

    #[test]
    fn a_path_cannot_add_a_parameter_to_the_challenge() {
        let path = "/i/a\"b\\%22é/mcp";
        assert_eq!(
            challenge_header(Some(("http://h/base", path)), &AccessDenied::WrongToken),
            format!(r#"Bearer resource_metadata="http://h{PATH}/base/i/a%22b%5C%22%C3%A9/mcp", error="invalid_token""#)
        );
        assert_eq!(challenge_header(None, &AccessDenied::NoToken), "Bearer");
    }
}
