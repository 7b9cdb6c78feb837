//! Headers that repeat parts of the body, so that proxies can route without reading it. A request is rejected if they
//! differ from the body, because a proxy and a server could interpret it differently.

use axum::http::{HeaderMap, HeaderName};
use mcp_satellite_protocol::header::{self, decode_value, name_member};
use mcp_satellite_protocol::header_params::{HeaderParam, header_params};
use mcp_satellite_protocol::rpc::member;

use super::super::tools::raw::JsonMembers;

const METHOD: HeaderName = HeaderName::from_static(header::METHOD);
const NAME: HeaderName = HeaderName::from_static(header::NAME);

pub(super) fn single_value<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a str>, String> {
    let mut values = headers.get_all(name).iter();
    let Some(first) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(format!("the header `{name}` occurs more than once"));
    }
    first
        .to_str()
        .map(Some)
        .map_err(|_| format!("the header `{name}` contains characters that are not allowed in a header"))
}

pub(super) fn check(method: &str, params: &JsonMembers<'_>, headers: &HeaderMap) -> Result<(), String> {
    match single_value(headers, &METHOD)? {
        None => return Err("the header Mcp-Method is missing".to_owned()),
        Some(value) if value != method => {
            return Err(format!("the header Mcp-Method is `{value}`, but the method of the request is `{method}`"));
        }
        Some(_) => {}
    }
    let Some(member) = name_member(method) else { return Ok(()) };
    let body = params.get_unique(member).map_err(|_| format!("`{member}` occurs more than once"))?;
    // The server rejects a name that is not a string.
    let Some(body) = body.and_then(|body| serde_json::from_str::<String>(body).ok()) else { return Ok(()) };
    let header = single_value(headers, &NAME)?
        .ok_or_else(|| format!("the header Mcp-Name is missing; set it to the value of `{member}`"))?;
    let header = decode_value(header).ok_or("the header Mcp-Name is not valid base64")?;
    if header == body { Ok(()) } else { Err(format!("the header Mcp-Name is `{header}`, but `{member}` is `{body}`")) }
}

/// Compares the headers that repeat a tool's arguments with the arguments. `definition` is the tool's JSON text.
pub(crate) fn check_arguments(definition: &str, params: Option<&str>, headers: &HeaderMap) -> Result<(), String> {
    // Clients do not use a tool with an invalid definition.
    let Ok(mirrors) = header_params(definition) else { return Ok(()) };
    let arguments = params.and_then(|params| member(params, "arguments")).unwrap_or("{}");
    mirrors.iter().try_for_each(|mirror| check_argument(mirror, arguments, headers))
}

fn check_argument(mirror: &HeaderParam, arguments: &str, headers: &HeaderMap) -> Result<(), String> {
    let header = &mirror.header;
    // A client cannot send an invalid header name.
    let Ok(full) = HeaderName::try_from(format!("{}{header}", header::PARAM_PREFIX)) else { return Ok(()) };
    match (single_value(headers, &full)?, mirror.value(arguments)) {
        (None, None) => Ok(()),
        (None, Some(_)) => Err(format!("the header Mcp-Param-{header} is missing, but the call has the argument")),
        (Some(_), None) => {
            Err(format!("the header Mcp-Param-{header} is present, but the call does not have the argument"))
        }
        (Some(header_value), Some(body)) => {
            let header_value = decode_value(header_value)
                .ok_or_else(|| format!("the header Mcp-Param-{header} is not valid base64"))?;
            let is_same = header_value == body || mirror.is_number(arguments) && is_same_number(&header_value, &body);
            if is_same { Ok(()) } else { Err(format!("the header Mcp-Param-{header} differs from the argument")) }
        }
    }
}

fn is_same_number(one: &str, other: &str) -> bool {
    let read = |text: &str| text.parse::<f64>().ok();
    read(one).is_some() && read(one) == read(other)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value))).collect()
    }

    #[test]
    fn the_method_and_name_headers_must_match_the_body() {
        let is_valid = |method: &str, params: &'static str, pairs: &[(&'static str, &'static str)]| {
            check(method, &JsonMembers::read(params).unwrap(), &headers(pairs)).is_ok()
        };
        let (list, call) = (("mcp-method", "tools/list"), ("mcp-method", "tools/call"));
        let named = |name| ("mcp-name", name);
        assert!(is_valid("tools/list", "{}", &[list]));
        assert!(!is_valid("tools/list", "{}", &[]));
        assert!(!is_valid("tools/list", "{}", &[("mcp-method", "TOOLS/LIST")]));
        assert!(is_valid("tools/call", r#"{"name":"a"}"#, &[call, named("a")]));
        assert!(!is_valid("tools/call", r#"{"name":"a"}"#, &[call, named("b")]));
        assert!(!is_valid("tools/call", r#"{"name":"a"}"#, &[call]));
        assert!(!is_valid("tools/call", r#"{"name":"a","name":"a"}"#, &[call, named("a")]));
        assert!(is_valid("tools/call", r#"{"name":"\u00e4"}"#, &[call, named("=?base64?w6Q=?=")]));
        assert!(!is_valid("tools/call", r#"{"name":"\u00e4"}"#, &[call, named("=?base64?w6Q?=")]));
        assert!(is_valid("tools/call", r#"{"name":1}"#, &[call]));
        assert!(is_valid("resources/read", r#"{"uri":"a:b"}"#, &[("mcp-method", "resources/read"), named("a:b")]));
        let mut twice = headers(&[list]);
        twice.append(METHOD, HeaderValue::from_static("tools/list"));
        assert!(check("tools/list", &JsonMembers::default(), &twice).is_err());
    }

    #[test]
    fn argument_headers_must_match_the_arguments_that_the_schema_names() {
        let definition = r#"{"name":"t","inputSchema":{"properties":{"a":{"type":"string","x-mcp-header":"A"},"deep":{"properties":{"n":{"type":"integer","x-mcp-header":"Number"}}},"plain":{}}}}"#;
        let is_valid = |arguments: &str, pairs: &[(&'static str, &'static str)]| {
            let params = format!(r#"{{"arguments":{arguments}}}"#);
            check_arguments(definition, Some(&params), &headers(pairs)).is_ok()
        };
        let text = |value| ("mcp-param-a", value);
        assert!(is_valid(r#"{"a":"Hello"}"#, &[text("Hello")]));
        assert!(is_valid(r#"{"a":"Hello"}"#, &[text("=?base64?SGVsbG8=?=")]));
        for wrong in ["=?base64?SGVsbG8?=", "=?base64?SGVs!!!bG8=?=", "hello", "SGVsbG8="] {
            assert!(!is_valid(r#"{"a":"Hello"}"#, &[text(wrong)]), "{wrong}");
        }
        assert!(is_valid(r#"{"a":"=?base64?SGVsbG8="}"#, &[text("=?base64?SGVsbG8=")]));
        assert!(
            !is_valid(r#"{"a":"Hello"}"#, &[])
                && !is_valid("{}", &[text("x")])
                && !is_valid(r#"{"a":null}"#, &[text("x")])
        );
        assert!(is_valid(r#"{"a":null,"plain":"x"}"#, &[]) && is_valid("{}", &[]));
        let number = |value| ("mcp-param-number", value);
        assert!(
            is_valid(r#"{"deep":{"n":42}}"#, &[number("42.0")]) && is_valid(r#"{"deep":{"n":-7}}"#, &[number("-7")])
        );
        assert!(!is_valid(r#"{"deep":{"n":42}}"#, &[number("43")]));
        assert!(check_arguments(r#"{"name":"t","inputSchema":{}}"#, None, &headers(&[text("x")])).is_ok());
    }
}
