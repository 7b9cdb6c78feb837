//! Headers of a request without a session.

use mcp_satellite_actors::seam::RequestHeaders;
use mcp_satellite_protocol::header::{self, PARAM_PREFIX};
use reqwest::header::{HeaderName, HeaderValue};

use super::access::PROTOCOL_VERSION;

const METHOD: HeaderName = HeaderName::from_static(header::METHOD);
const NAME: HeaderName = HeaderName::from_static(header::NAME);

/// Returns the headers of a request. A value that cannot be a header is left out, and the server reports it as missing.
pub(super) fn headers(routing: &RequestHeaders) -> impl Iterator<Item = (HeaderName, HeaderValue)> {
    let RequestHeaders { version, method, name, params } = routing;
    let headers = [(PROTOCOL_VERSION, Some(&**version)), (METHOD, Some(&**method)), (NAME, name.as_deref())];
    let headers = headers.into_iter().filter_map(|(name, value)| {
        let mut value = encode_value(value?)?;
        // The name may be an address that contains a secret.
        value.set_sensitive(name == NAME);
        Some((name, value))
    });
    let params = params.iter().filter_map(|(name, value)| {
        let name = HeaderName::from_bytes(format!("{PARAM_PREFIX}{name}").as_bytes()).ok()?;
        let mut value = encode_value(value)?;
        // The value is an argument of a tool call and may be secret.
        value.set_sensitive(true);
        Some((name, value))
    });
    headers.chain(params)
}

fn encode_value(value: &str) -> Option<HeaderValue> {
    HeaderValue::from_str(&header::encode_value(value)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_headers_contain_version_method_name_and_parameters() {
        let routing = RequestHeaders {
            version: "2026-07-28",
            method: "tools/call".to_owned(),
            name: Some("sql".to_owned()),
            params: vec![("Region".into(), "eu".to_owned()), ("no header".into(), "x".to_owned())],
        };
        let written: Vec<_> = headers(&routing).map(|(name, value)| format!("{name}: {value:?}")).collect();
        let expected = [
            "mcp-protocol-version: \"2026-07-28\"",
            "mcp-method: \"tools/call\"",
            "mcp-name: Sensitive",
            "mcp-param-region: Sensitive",
        ];
        assert_eq!(written, expected);
    }
}
