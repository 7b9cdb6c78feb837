//! Headers of a request without a session. A value that is not plain ASCII is encoded in Base64 between markers.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use mcp_satellite_actors::seam::RequestHeaders;
use reqwest::header::{HeaderName, HeaderValue};

use super::access::PROTOCOL_VERSION;

const METHOD: HeaderName = HeaderName::from_static("mcp-method");
const NAME: HeaderName = HeaderName::from_static("mcp-name");
const PARAM: &str = "mcp-param-";
const MARKS: (&str, &str) = ("=?base64?", "?=");

/// Returns the headers of a request. A value that cannot be a header is left out, and the server reports it as missing.
pub(super) fn headers(routing: &RequestHeaders) -> impl Iterator<Item = (HeaderName, HeaderValue)> {
    let RequestHeaders { version, method, name, params } = routing;
    let ours = [(PROTOCOL_VERSION, Some(&**version)), (METHOD, Some(&**method)), (NAME, name.as_deref())];
    let ours = ours.into_iter().filter_map(|(name, value)| {
        let mut value = encode_value(value?)?;
        // The name may be an address that contains a secret.
        value.set_sensitive(name == NAME);
        Some((name, value))
    });
    let params = params.iter().filter_map(|(name, value)| {
        let name = HeaderName::from_bytes(format!("{PARAM}{name}").as_bytes()).ok()?;
        let mut value = encode_value(value)?;
        // The value is an argument of a tool call and may be secret.
        value.set_sensitive(true);
        Some((name, value))
    });
    ours.chain(params)
}

fn encode_value(value: &str) -> Option<HeaderValue> {
    let is_blank = |byte: Option<&u8>| matches!(byte, Some(b' ' | b'\t'));
    let bytes = value.as_bytes();
    let is_text = bytes.iter().all(|byte| (b' '..=b'~').contains(byte));
    let is_marked = value.starts_with(MARKS.0) && value.ends_with(MARKS.1);
    if !is_text || is_marked || is_blank(bytes.first()) || is_blank(bytes.last()) {
        return HeaderValue::from_str(&format!("{}{}{}", MARKS.0, BASE64_STANDARD.encode(value), MARKS.1)).ok();
    }
    HeaderValue::from_str(value).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_that_is_not_plain_ascii_is_encoded_in_base64() {
        for (value, encoded) in [
            ("us-west1", "us-west1"),
            ("", ""),
            ("two words", "two words"),
            ("Hello, 世界", "=?base64?SGVsbG8sIOS4lueVjA==?="),
            (" padded ", "=?base64?IHBhZGRlZCA=?="),
            ("line1\nline2", "=?base64?bGluZTEKbGluZTI=?="),
            ("=?base64?literal?=", "=?base64?PT9iYXNlNjQ/bGl0ZXJhbD89?="),
        ] {
            assert_eq!(encode_value(value).unwrap(), encoded, "{value}");
        }
    }

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
