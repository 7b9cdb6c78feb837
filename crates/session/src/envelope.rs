//! Metadata of requests in the stateless era. `_meta` contains the protocol version, the client's identity and its
//! capabilities; over HTTP, headers repeat parts of the request.

use std::sync::LazyLock;

use mcp_satellite_protocol::era::STATELESS_VERSION;
use mcp_satellite_protocol::header::{RequestHeaders, name_member};
use mcp_satellite_protocol::header_params::HeaderParam;
use mcp_satellite_protocol::meta::{CAPABILITIES, CLIENT_INFO, LOG_LEVEL, TRACEPARENT, VERSION};
use mcp_satellite_protocol::method;
use mcp_satellite_protocol::rpc::{member, with_members};
use mcp_satellite_protocol::trace::TraceParent;

use crate::call::{CallerRequest, ClientFacts};
use crate::handshake::{satellite_capabilities, satellite_info};

static SATELLITE_FACTS: LazyLock<ClientFacts> = LazyLock::new(|| ClientFacts {
    capabilities: serde_json::to_string(&satellite_capabilities()).unwrap_or_default(),
    info: serde_json::to_string(&satellite_info()).unwrap_or_default(),
});

/// Client that a request names: the satellite itself (on behalf of all clients, so it offers all that it can pass on),
/// a caller that cannot answer requests of a server, or a client of a session (`None`: capabilities unknown).
#[derive(Clone, Copy)]
pub(crate) enum RequestIdentity<'a> {
    Satellite,
    Caller,
    Client(Option<&'a ClientFacts>),
}

/// Additions to the params of a request: the client, the progress token and the minimum log level as JSON text,
/// `inputResponses` and `requestState` of a request that is sent again, and the span of a recorded call.
pub(crate) struct RequestMeta<'a> {
    pub(crate) identity: RequestIdentity<'a>,
    pub(crate) token: Option<&'a str>,
    pub(crate) level: Option<&'a str>,
    pub(crate) input: &'a [(&'a str, &'a str)],
    pub(crate) trace: Option<TraceParent>,
}

impl<'a> RequestMeta<'a> {
    pub(crate) fn new(identity: RequestIdentity<'a>) -> Self {
        Self { identity, token: None, level: None, input: &[], trace: None }
    }

    pub(crate) fn wrap_params(&self, params: Option<&str>) -> String {
        let params = params.filter(|params| params.starts_with('{')).unwrap_or("{}");
        let (capabilities, info) = match self.identity {
            RequestIdentity::Satellite | RequestIdentity::Client(None) => {
                (&*SATELLITE_FACTS.capabilities, &*SATELLITE_FACTS.info)
            }
            RequestIdentity::Caller => ("{}", &*SATELLITE_FACTS.info),
            RequestIdentity::Client(Some(client)) => (&*client.capabilities, &*client.info),
        };
        let version = format!("\"{STATELESS_VERSION}\"");
        let mut meta_members = vec![(VERSION, &*version), (CAPABILITIES, capabilities), (CLIENT_INFO, info)];
        meta_members.extend(self.token.map(|token| ("progressToken", token)));
        meta_members.extend(self.level.map(|level| (LOG_LEVEL, level)));
        let trace = self.trace.map(|trace| format!("\"{trace}\""));
        meta_members.extend(trace.as_deref().map(|trace| (TRACEPARENT, trace)));
        let meta = with_members(member(params, "_meta").unwrap_or("{}"), &meta_members);
        let mut members = vec![("_meta", &*meta)];
        members.extend(self.input);
        with_members(params, &members)
    }
}

/// Returns the params of a request of the satellite, which have no metadata, with the span of the request.
pub(crate) fn params_with_trace(params: Option<&str>, trace: &TraceParent) -> String {
    with_members(params.unwrap_or("{}"), &[("_meta", &format!(r#"{{"{TRACEPARENT}":"{trace}"}}"#))])
}

pub(crate) fn method_and_params(request: &CallerRequest) -> (&str, Option<String>) {
    match request {
        CallerRequest::Tool { name, arguments, repeatable: _, trace: _ } => {
            let name = serde_json::Value::from(name.as_str()).to_string();
            let arguments = arguments.as_deref().map_or("{}", serde_json::value::RawValue::get);
            (method::TOOLS_CALL, Some(with_members("{}", &[("name", &name), ("arguments", arguments)])))
        }
        CallerRequest::Method { method, params } => (method, params.as_deref().map(|params| params.get().to_owned())),
    }
}

pub(crate) fn routing_headers(
    method: &str,
    params: Option<&str>,
    marked: impl FnOnce(&str) -> Vec<HeaderParam>,
) -> RequestHeaders {
    let params = params.unwrap_or("{}");
    let text = |name: &str| serde_json::from_str::<String>(member(params, name)?).ok();
    let name = name_member(method).and_then(text);
    let tool = name.as_deref().filter(|_| method == method::TOOLS_CALL);
    let arguments = member(params, "arguments").unwrap_or("{}");
    let marked = tool.map(marked).unwrap_or_default().into_iter();
    let params = marked.filter_map(|mirror| Some((mirror.header.clone(), mirror.value(arguments)?))).collect();
    RequestHeaders { version: STATELESS_VERSION, method: method.to_owned(), name, params }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_envelope_is_added_to_the_parameters_without_losing_members() {
        let envelope =
            RequestMeta { token: Some("7"), level: Some("\"info\""), ..RequestMeta::new(RequestIdentity::Caller) };
        let params = r#"{"name":"x","_meta":{"progressToken":"theirs","a/b":1e400,"io.modelcontextprotocol/protocolVersion":"1"},"big":98765432109876543210}"#;
        let wrapped = envelope.wrap_params(Some(params));
        assert!(wrapped.contains("1e400") && wrapped.contains("98765432109876543210"), "{wrapped}");
        assert_eq!(wrapped.matches("protocolVersion").count(), 1, "{wrapped}");
        let meta: serde_json::Value =
            serde_json::from_str(&member(&wrapped, "_meta").unwrap().replace("1e400", "1")).unwrap();
        assert_eq!(
            meta,
            json!({
                "a/b": 1, "progressToken": 7, LOG_LEVEL: "info", VERSION: "2026-07-28", CAPABILITIES: {},
                CLIENT_INFO: {"name": "mcp-satellite", "version": env!("CARGO_PKG_VERSION")},
            })
        );
        let bare = RequestMeta::new(RequestIdentity::Satellite).wrap_params(None);
        assert_eq!(member(&bare, "_meta").and_then(|meta| member(meta, VERSION)), Some("\"2026-07-28\""));
        let client = ClientFacts { capabilities: r#"{"roots":{}}"#.to_owned(), info: r#"{"name":"c"}"#.to_owned() };
        let wrapped = RequestMeta::new(RequestIdentity::Client(Some(&client))).wrap_params(Some("[1]"));
        assert!(wrapped.contains(r#"clientCapabilities":{"roots":{}}"#) && wrapped.contains(r#"{"name":"c"}"#));
    }

    #[test]
    fn routing_headers_contain_method_name_and_marked_parameters() {
        let marked = r#"{"inputSchema":{"properties":{"region":{"type":"string","x-mcp-header":"Region"}}}}"#;
        let marked = |_: &str| mcp_satellite_protocol::header_params::header_params(marked).unwrap();
        let of = |method: &str, params: &str| routing_headers(method, Some(params), marked);
        let call = of("tools/call", r#"{"name":"sql","arguments":{"region":"eu"}}"#);
        assert_eq!((&*call.method, call.name.as_deref()), ("tools/call", Some("sql")));
        assert_eq!(call.params, [("Region".into(), "eu".to_owned())]);
        assert_eq!(of("resources/read", r#"{"uri":"file:///a"}"#).name.as_deref(), Some("file:///a"));
        assert_eq!(of("prompts/get", r#"{"name":"p","arguments":{"region":"eu"}}"#).params, []);
        assert_eq!(of("tools/list", r#"{"name":"p"}"#).name, None);
    }
}
