//! The terms of a stateless request: version, client and log level from its `_meta`.

use axum::http::HeaderMap;
use mcp_satellite_protocol::era::STATELESS_VERSION;
use mcp_satellite_protocol::error_code::{HEADER_MISMATCH, INVALID_PARAMS, UNSUPPORTED_VERSION};
use mcp_satellite_protocol::meta::{CAPABILITIES, CLIENT_INFO, LOG_LEVEL, VERSION};
use mcp_satellite_protocol::method;
use mcp_satellite_protocol::rpc::{RpcMessage, member};

use super::super::answer::RpcError;
use super::super::client_description::ClientDescription;
use super::super::shared_session::McpLogLevel;
use super::super::tools::raw::{JsonMembers, to_json};
use super::{PROTOCOL_VERSION, SERVED, StatelessErrorResponse, headers};

#[derive(Debug)]
pub(crate) struct StatelessRequestMeta {
    pub client: ClientDescription,
    // Minimum level of log messages on behalf of the request; without one the client receives none.
    pub level: Option<McpLogLevel>,
    /// `name` in the parameters: the called tool or the prompt.
    pub name: Option<String>,
    /// `requestState` in the parameters: the call that the request continues.
    pub state: Option<String>,
}

impl StatelessRequestMeta {
    pub(crate) fn read(message: &RpcMessage, headers: &HeaderMap) -> Result<Self, StatelessErrorResponse> {
        let twice = |_| {
            StatelessErrorResponse::bad_request(
                INVALID_PARAMS,
                "a member of `_meta` or of `params` occurs more than once",
            )
        };
        let params = message.params().and_then(JsonMembers::read).unwrap_or_default();
        let meta = params.get_unique("_meta").map_err(twice)?.and_then(JsonMembers::read).unwrap_or_default();
        let text = |name| {
            meta.get_unique(name).map(|value| value.and_then(|value| serde_json::from_str::<String>(value).ok()))
        };
        let object = |name| meta.get_unique(name).map(|value| value.filter(|value| value.starts_with('{')));
        let version = text(VERSION).map_err(twice)?;
        let capabilities = object(CAPABILITIES).map_err(twice)?;
        let header = headers::single_value(headers, &PROTOCOL_VERSION)
            .map_err(|why| StatelessErrorResponse::bad_request(HEADER_MISMATCH, why))?;
        if let Some(version) = version.as_deref()
            && header != Some(version)
        {
            let why = match header {
                Some(header) => {
                    format!("the header MCP-Protocol-Version is `{header}`, but `_meta` contains `{version}`")
                }
                None => "the header MCP-Protocol-Version is missing".to_owned(),
            };
            return Err(StatelessErrorResponse::bad_request(HEADER_MISMATCH, why));
        }
        let missing: Vec<&str> = [(VERSION, version.is_none()), (CAPABILITIES, capabilities.is_none())]
            .into_iter()
            .filter_map(|(name, is_missing)| is_missing.then_some(name))
            .collect();
        let (Some(version), Some(capabilities)) = (version, capabilities) else {
            let why =
                format!("a required member of `_meta` is missing or has the wrong type: `{}`", missing.join("`, `"));
            return Err(StatelessErrorResponse::bad_request(INVALID_PARAMS, why));
        };
        if version != STATELESS_VERSION {
            return Err(unsupported_version_error(&version));
        }
        let level = match meta.get_unique(LOG_LEVEL).map_err(twice)?.map(serde_json::from_str) {
            None => None,
            Some(Ok(level)) => Some(level),
            Some(Err(_)) => {
                return Err(StatelessErrorResponse::bad_request(
                    INVALID_PARAMS,
                    format!("`{LOG_LEVEL}` is not a log level"),
                ));
            }
        };
        headers::check(message.method().unwrap_or_default(), &params, headers)
            .map_err(|why| StatelessErrorResponse::bad_request(HEADER_MISMATCH, why))?;
        let info = object(CLIENT_INFO).map_err(twice)?;
        let client = ClientDescription::new(STATELESS_VERSION.to_owned(), Some(capabilities), info);
        let string = |name| params.get(name).and_then(|value| serde_json::from_str(value).ok());
        Ok(Self { client, level, name: string("name"), state: string("requestState") })
    }
}

fn unsupported_version_error(version: &str) -> StatelessErrorResponse {
    let data = format!(r#"{{"supported":{},"requested":{}}}"#, to_json(&SERVED), to_json(&version));
    let mut response =
        StatelessErrorResponse::bad_request(UNSUPPORTED_VERSION, "this protocol version is not supported");
    response.error = RpcError { data: Some(data), ..response.error };
    response
}

pub(crate) fn missing_capability(client: &ClientDescription, question: &RpcMessage) -> Option<&'static str> {
    let capabilities = &*client.facts.capabilities;
    let has = |path: &[&str]| path.iter().try_fold(capabilities, |json, name| member(json, name)).is_some();
    let param = |name: &str| question.params().and_then(|params| member(params, name));
    let needed: &[(bool, &'static str, &[&str])] = match question.method().unwrap_or_default() {
        method::CREATE_MESSAGE => &[
            (true, "sampling", &["sampling"]),
            (param("tools").is_some(), "sampling with tools", &["sampling", "tools"]),
        ],
        method::ELICIT => {
            let by_url = param("mode") == Some("\"url\"");
            // A client without modes supports forms.
            let only_url = has(&["elicitation", "url"]) && !has(&["elicitation", "form"]);
            return match (has(&["elicitation"]), by_url) {
                (false, _) => Some("elicitation"),
                (true, true) => (!has(&["elicitation", "url"])).then_some("elicitation by URL"),
                (true, false) => only_url.then_some("elicitation by forms"),
            };
        }
        method::ROOTS_LIST => &[(true, "roots", &["roots"])],
        // The stateless era has no other questions.
        _ => return Some("this method"),
    };
    needed.iter().find(|(is_needed, _, path)| *is_needed && !has(path)).map(|(_, what, _)| *what)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use axum::http::{HeaderName, HeaderValue};
    use serde_json::{Value, json};

    use super::*;

    fn read(version: Option<&'static str>, meta: &Value) -> Result<StatelessRequestMeta, StatelessErrorResponse> {
        let request = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"_meta": meta}});
        let method = (HeaderName::from_static("mcp-method"), HeaderValue::from_static("tools/list"));
        let version = version.map(|version| (PROTOCOL_VERSION, HeaderValue::from_static(version)));
        let headers = version.into_iter().chain([method]).collect();
        StatelessRequestMeta::read(&RpcMessage::parse(request.to_string().into()).unwrap(), &headers)
    }

    #[test]
    fn invalid_terms_are_rejected_with_codes_in_this_order() {
        let code = |version, meta: Value| read(version, &meta).err().map(|refusal| refusal.error.code);
        let new = Some("2026-07-28");
        let complete = json!({VERSION: "2026-07-28", CAPABILITIES: {}});
        assert_eq!(code(new, complete.clone()), None);
        assert_eq!(code(None, complete.clone()), Some(HEADER_MISMATCH));
        assert_eq!(code(Some("v999"), complete), Some(HEADER_MISMATCH));
        assert_eq!(code(new, json!({VERSION: "v999", CAPABILITIES: {}})), Some(HEADER_MISMATCH));
        assert_eq!(code(Some("v999"), json!({VERSION: "v999", CAPABILITIES: {}})), Some(UNSUPPORTED_VERSION));
        assert_eq!(code(new, json!({CAPABILITIES: {}})), Some(INVALID_PARAMS));
        assert_eq!(code(new, json!({VERSION: "2026-07-28"})), Some(INVALID_PARAMS));
        assert_eq!(code(new, json!({VERSION: "2026-07-28", CAPABILITIES: []})), Some(INVALID_PARAMS));
        assert_eq!(code(new, json!(1)), Some(INVALID_PARAMS));
        assert_eq!(
            code(new, json!({VERSION: "2026-07-28", CAPABILITIES: {}, LOG_LEVEL: "loud"})),
            Some(INVALID_PARAMS)
        );
    }

    #[test]
    fn an_unsupported_version_error_lists_the_supported_ones() {
        let refusal = read(Some("v999"), &json!({VERSION: "v999", CAPABILITIES: {}})).unwrap_err();
        let data: Value = serde_json::from_str(&refusal.error.data.unwrap()).unwrap();
        assert_eq!(data, json!({"supported": SERVED, "requested": "v999"}));
    }

    #[test]
    fn the_client_description_comes_from_the_request_metadata() {
        let meta = json!({VERSION: "2026-07-28", CAPABILITIES: {"sampling": {}}, CLIENT_INFO: {"name": "n", "version": "1"}, LOG_LEVEL: "info"});
        let StatelessRequestMeta { client, level, .. } = read(Some("2026-07-28"), &meta).unwrap();
        assert_eq!((&*client.name, &*client.client_version, level), ("n", "1", Some(McpLogLevel::Info)));
        assert!(client.sampling && !client.elicitation && !client.roots);
        let twice = r#"{"jsonrpc":"2.0","id":1,"method":"a","params":{"_meta":{},"_meta":{}}}"#;
        let refusal =
            StatelessRequestMeta::read(&RpcMessage::parse(twice.into()).unwrap(), &HeaderMap::new()).unwrap_err();
        assert_eq!(refusal.error.code, INVALID_PARAMS);
    }

    #[test]
    fn missing_client_capabilities_are_detected_for_each_server_request() {
        let missing = |capabilities: Value, method: &str, params: Value| {
            let client = ClientDescription::new(String::new(), Some(&capabilities.to_string()), None);
            let request = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).to_string();
            missing_capability(&client, &RpcMessage::parse(request.into()).unwrap())
        };
        for (capabilities, method, params, lacking) in [
            (json!({"elicitation": {}}), "elicitation/create", json!({}), None),
            (json!({"elicitation": {}}), "elicitation/create", json!({"mode": "url"}), Some("elicitation by URL")),
            (json!({"elicitation": {"url": {}}}), "elicitation/create", json!({"mode": "url"}), None),
            (json!({"elicitation": {"url": {}}}), "elicitation/create", json!({}), Some("elicitation by forms")),
            (json!({"sampling": {}}), "elicitation/create", json!({}), Some("elicitation")),
            (json!({"sampling": {}}), "sampling/createMessage", json!({}), None),
            (json!({"sampling": {}}), "sampling/createMessage", json!({"tools": []}), Some("sampling with tools")),
            (json!({"roots": {}}), "roots/list", json!({}), None),
            (json!({}), "roots/list", json!({}), Some("roots")),
            (json!({"x": {}}), "x/unknown", json!({}), Some("this method")),
        ] {
            assert_eq!(missing(capabilities, method, params), lacking, "{method}");
        }
    }
}
