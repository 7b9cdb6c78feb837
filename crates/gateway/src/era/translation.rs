//! Translates messages between the eras. Only parts with an equivalent are changed; the rest stays as it was sent.

use mcp_satellite_actors::model::remote::ServerInfo;
use mcp_satellite_protocol::era::Era;
use mcp_satellite_protocol::error_code::{
    INTERNAL_ERROR, INVALID_PARAMS, RESOURCE_NOT_FOUND, SERVER_ERROR, URL_ELICITATION_REQUIRED,
};
use mcp_satellite_protocol::meta::{self, SERVER_INFO, SUBSCRIPTION_ID};
use mcp_satellite_protocol::method;
use mcp_satellite_protocol::rpc::{MalformedMessage, RpcMessage, member};

use super::super::tools::raw::{JsonMembers, json_string, map_string, replace_part, to_json};
use super::SERVED;

/// Error: a request cannot be sent to a server of the session era.
#[derive(Debug)]
pub(crate) enum UntranslatableRequest {
    /// The request refers to a state, which such a server does not have.
    HasRequestState,
    Malformed(MalformedMessage),
}

pub(crate) fn to_session_request(message: &RpcMessage) -> Result<RpcMessage, UntranslatableRequest> {
    let Some((params, mut pairs)) = message.params().and_then(|params| Some((params, JsonMembers::read(params)?)))
    else {
        return Ok(message.clone());
    };
    if pairs.get("requestState").is_some() {
        return Err(UntranslatableRequest::HasRequestState);
    }
    pairs.remove(&["inputResponses"]);
    let meta = pairs.get("_meta").and_then(JsonMembers::read).map(|mut meta| {
        meta.remove(&[meta::VERSION, meta::CLIENT_INFO, meta::CAPABILITIES, meta::LOG_LEVEL]);
        meta.to_json()
    });
    if let Some(meta) = meta {
        pairs.set("_meta", meta);
    }
    RpcMessage::parse(replace_part(message.text(), params, &pairs.to_json()).into())
        .map_err(UntranslatableRequest::Malformed)
}

/// Builds the result of `server/discover` from a server's description in either era. The versions are those that the
/// satellite supports, because clients talk to the satellite.
pub(crate) fn discovery_result(server: &ServerInfo) -> String {
    let handshake = JsonMembers::read(server.handshake_result.get()).unwrap_or_default();
    let mut result = match server.era {
        Era::Stateless => handshake,
        Era::Sessions => {
            let mut result = handshake;
            let info = result.get("serverInfo").map(str::to_owned);
            let capabilities = result.get("capabilities").and_then(JsonMembers::read).map(|mut capabilities| {
                // The stateless era has an extension of the same name with another meaning.
                capabilities.remove(&["tasks"]);
                capabilities.to_json()
            });
            result.set("capabilities", capabilities.unwrap_or_else(|| "{}".to_owned()));
            result.remove(&["protocolVersion", "serverInfo"]);
            if let Some(info) = info {
                result.set("_meta", with_meta(result.get("_meta"), SERVER_INFO, info));
            }
            result
        }
    };
    result.set("supportedVersions", to_json(&SERVED));
    complete_result(&result.to_json(), method::DISCOVER, None)
}

pub(crate) fn initialize_result(server: &ServerInfo, version: &str) -> String {
    if server.era == Era::Sessions {
        return map_string(server.handshake_result.get(), &["protocolVersion"], |_| version.to_owned());
    }
    let mut result = JsonMembers::read(server.handshake_result.get()).unwrap_or_default();
    let named = result.get("_meta").and_then(|meta| member(meta, SERVER_INFO)).map(str::to_owned);
    // The name is optional in the stateless era and required in the other.
    let nobody = || format!(r#"{{"name":{},"version":{}}}"#, json_string(&server.name), json_string(&server.version));
    result.set("protocolVersion", json_string(version));
    result.set("serverInfo", named.unwrap_or_else(nobody));
    result.remove(&["resultType", "supportedVersions", "ttlMs", "cacheScope"]);
    result.to_json()
}

pub(crate) fn own_discovery_result(capabilities: &str, instructions: &str) -> String {
    let result = format!(
        r#"{{"supportedVersions":{},"capabilities":{capabilities},"instructions":{}}}"#,
        to_json(&SERVED),
        json_string(instructions),
    );
    complete_result(&result, method::DISCOVER, Some(&own_server_info()))
}

pub(crate) fn own_server_info() -> String {
    format!(r#"{{"name":"mcp-satellite","version":{}}}"#, json_string(env!("CARGO_PKG_VERSION")))
}

pub(crate) fn info_of(server: &ServerInfo) -> Option<&str> {
    member(server.handshake_result.get(), "serverInfo")
}

fn with_meta(meta: Option<&str>, name: &str, value: String) -> String {
    let mut meta = meta.and_then(JsonMembers::read).unwrap_or_default();
    meta.set(name, value);
    meta.to_json()
}

fn is_cacheable(method: &str) -> bool {
    matches!(
        method,
        method::TOOLS_LIST
            | method::PROMPTS_LIST
            | method::RESOURCES_LIST
            | method::RESOURCE_TEMPLATES_LIST
            | method::RESOURCES_READ
            | method::DISCOVER
    )
}

/// Adds the members that every stateless result must have; existing ones are kept. `server` is added as server info if
/// the result has none.
pub(crate) fn complete_result(result: &str, method: &str, server: Option<&str>) -> String {
    let Some(mut pairs) = JsonMembers::read(result) else { return result.to_owned() };
    let mut more = Vec::new();
    if pairs.get("resultType").is_none() {
        more.push(("resultType", r#""complete""#.to_owned()));
    }
    if is_cacheable(method) && is_complete(&pairs) {
        for (name, value) in [("ttlMs", "0"), ("cacheScope", r#""private""#)] {
            if pairs.get(name).is_none() {
                more.push((name, value.to_owned()));
            }
        }
    }
    let meta = pairs.get("_meta");
    if let Some(server) = server
        && meta.and_then(|meta| member(meta, SERVER_INFO)).is_none()
    {
        more.push(("_meta", with_meta(meta, SERVER_INFO, server.to_owned())));
    }
    if more.is_empty() {
        return result.to_owned();
    }
    for (name, value) in more {
        pairs.set(name, value);
    }
    pairs.to_json()
}

fn is_complete(result: &JsonMembers<'_>) -> bool {
    result.get("resultType").is_none_or(|kind| kind == r#""complete""#)
}

/// Translates an error code to the stateless era. `of_ours` means that the satellite created the error.
pub(crate) fn stateless_error_code(code: i64, of_ours: bool) -> i64 {
    match code {
        RESOURCE_NOT_FOUND => INVALID_PARAMS,
        URL_ELICITATION_REQUIRED => INTERNAL_ERROR,
        SERVER_ERROR if of_ours => INTERNAL_ERROR,
        code => code,
    }
}

pub(crate) fn tag_with_subscription(message: &RpcMessage, id: &str) -> Option<String> {
    let params = message.params();
    let mut pairs = match params {
        Some(params) => JsonMembers::read(params)?,
        None => JsonMembers::default(),
    };
    pairs.set("_meta", with_meta(params.and_then(|params| member(params, "_meta")), SUBSCRIPTION_ID, id.to_owned()));
    let tagged = pairs.to_json();
    if let Some(params) = params {
        return Some(replace_part(message.text(), params, &tagged));
    }
    let mut members = JsonMembers::read(message.text())?;
    members.set("params", tagged);
    Some(members.to_json())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn read(text: &str) -> RpcMessage {
        RpcMessage::parse(text.to_owned().into()).unwrap()
    }

    fn server(era: Era, handshake: &str) -> ServerInfo {
        let part = |name| member(handshake, name).unwrap_or("{}").to_owned();
        ServerInfo {
            name: "n".to_owned(),
            version: "1".to_owned(),
            era,
            protocol: String::new(),
            capabilities: serde_json::value::RawValue::from_string(part("capabilities")).unwrap(),
            instructions: None,
            handshake_result: serde_json::value::RawValue::from_string(handshake.to_owned()).unwrap(),
        }
    }

    fn value(text: &str) -> Value {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn a_session_request_omits_the_members_of_the_stateless_era() {
        let request = r#"{"x":1e400,"params":{"\ud800":[ 1.50 ],"name":"n","_meta":{"progressToken":7,"io.modelcontextprotocol/clientInfo":{},"a/b":1e400,"io.modelcontextprotocol/related-task":{},"io.modelcontextprotocol/logLevel":"info","io.modelcontextprotocol/protocolVersion":"v","io.modelcontextprotocol/clientCapabilities":{}},"inputResponses":{}},"jsonrpc":"2.0","id":"i","method":"tools/call"}"#;
        let changed = to_session_request(&read(request)).unwrap();
        let expected = r#"{"x":1e400,"params":{"\ud800":[ 1.50 ],"name":"n","_meta":{"progressToken":7,"a/b":1e400,"io.modelcontextprotocol/related-task":{}}},"jsonrpc":"2.0","id":"i","method":"tools/call"}"#;
        assert_eq!(changed.text(), expected);
        assert_eq!((changed.id(), changed.token()), (Some("\"i\""), Some("7")));
        let bare = read(r#"{"jsonrpc":"2.0","id":1,"method":"x"}"#);
        assert_eq!(to_session_request(&bare).unwrap().text(), bare.text());
        let continued = read(r#"{"jsonrpc":"2.0","id":1,"method":"x","params":{"requestState":"s"}}"#);
        assert!(matches!(to_session_request(&continued), Err(UntranslatableRequest::HasRequestState)));
    }

    #[test]
    fn a_handshake_result_is_converted_between_the_eras() {
        let old = r#"{"protocolVersion":"2025-11-25","capabilities":{"tools":{},"tasks":{}},"serverInfo":{"name":"o","x":1.50},"instructions":"i","x":[ 1.50 ],"_meta":{"y":1}}"#;
        let converted = discovery_result(&server(Era::Sessions, old));
        assert!(converted.contains(r#""x":[ 1.50 ]"#) && converted.contains(r#"{"name":"o","x":1.50}"#), "{converted}");
        assert_eq!(
            value(&converted),
            json!({
                "resultType": "complete", "supportedVersions": SERVED, "capabilities": {"tools": {}}, "instructions": "i",
                "ttlMs": 0, "cacheScope": "private", "x": [1.5], "_meta": {"y": 1, SERVER_INFO: {"name": "o", "x": 1.5}},
            })
        );
        assert_eq!(
            value(&initialize_result(&server(Era::Sessions, old), "2025-03-26"))["protocolVersion"],
            "2025-03-26"
        );

        let new = r#"{"resultType":"complete","supportedVersions":["2026-07-28"],"capabilities":{"tools":{}},"ttlMs":9,"cacheScope":"public","x":1.50,"_meta":{"io.modelcontextprotocol/serverInfo":{"name":"w"},"y":1}}"#;
        let converted = discovery_result(&server(Era::Stateless, new));
        assert_eq!(converted, new.replace(r#"["2026-07-28"]"#, &to_json(&SERVED)));
        let converted = value(&initialize_result(&server(Era::Stateless, new), "2025-11-25"));
        let (name, meta) = (json!({"name": "w"}), json!({SERVER_INFO: {"name": "w"}, "y": 1}));
        let all = json!({"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": name, "x": 1.5, "_meta": meta});
        assert_eq!(converted, all);
        // A server without a name.
        let converted = value(&initialize_result(&server(Era::Stateless, r#"{"capabilities":{}}"#), "2025-11-25"));
        assert_eq!(converted["serverInfo"], json!({"name": "n", "version": "1"}));
    }

    #[test]
    fn a_result_gets_missing_members_and_keeps_existing_ones() {
        let listed = complete_result(r#"{"tools":[1.50],"ttlMs":5}"#, "tools/list", None);
        assert_eq!(listed, r#"{"tools":[1.50],"ttlMs":5,"resultType":"complete","cacheScope":"private"}"#);
        assert_eq!(complete_result("{}", "tools/call", None), r#"{"resultType":"complete"}"#);
        let asks = r#"{"resultType":"input_required","requestState":"s"}"#;
        assert_eq!(complete_result(asks, "resources/read", None), asks);
        let signed = complete_result(r#"{"resultType":"complete","_meta":{"a":1}}"#, "x", Some(r#"{"name":"n"}"#));
        assert_eq!(value(&signed)["_meta"], json!({"a": 1, SERVER_INFO: {"name": "n"}}));
        assert_eq!(complete_result(&signed, "x", Some("{}")), signed);
        assert_eq!(complete_result("[1]", "tools/list", None), "[1]");
        for (code, of_ours, expected) in [
            (-32002, false, INVALID_PARAMS),
            (-32042, false, INTERNAL_ERROR),
            (-32000, false, -32000),
            (-32000, true, INTERNAL_ERROR),
            (-7, true, -7),
        ] {
            assert_eq!(stateless_error_code(code, of_ours), expected);
        }
    }

    #[test]
    fn a_notification_is_tagged_with_the_subscription_id() {
        let tag = |text: &str| tag_with_subscription(&read(text), "\"i\"").unwrap();
        let meta = r#""_meta":{"io.modelcontextprotocol/subscriptionId":"i"}"#;
        assert_eq!(
            tag(r#"{"method":"a","jsonrpc":"2.0"}"#),
            format!(r#"{{"method":"a","jsonrpc":"2.0","params":{{{meta}}}}}"#)
        );
        let other = r#"{"jsonrpc":"2.0","method":"a","params":{"uri":"u","_meta":{"io.modelcontextprotocol/subscriptionId":7}}}"#;
        assert_eq!(tag(other), format!(r#"{{"jsonrpc":"2.0","method":"a","params":{{"uri":"u",{meta}}}}}"#));
    }

    proptest! {
        #[test]
        fn removing_members_keeps_all_others(
            names in prop::collection::vec("[a-z]{1,3}|inputResponses|_meta|\\PC{0,3}", 0..6),
            values in prop::collection::vec("-?[1-9][0-9]{0,30}|\"[a-z]{0,3}\"|\\[\\]|\\{\\}", 6),
        ) {
            let members: Vec<String> =
                names.iter().zip(&values).map(|(name, value)| format!("{}:{value}", json_string(name))).collect();
            let request = format!(r#"{{"jsonrpc":"2.0","id":1,"method":"m","params":{{{}}}}}"#, members.join(","));
            let changed = to_session_request(&read(&request)).unwrap();
            let kept: Vec<&String> =
                members.iter().filter(|member| !member.starts_with("\"inputResponses\"")).collect();
            for member in kept {
                let is_there = changed.text().contains(member.as_str());
                prop_assert!(is_there || member.starts_with("\"_meta\""), "{} in {}", member, changed.text());
            }
            prop_assert!(!changed.text().contains("\"inputResponses\":"));
        }
    }
}
