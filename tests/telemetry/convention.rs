//! The MCP semantic conventions as a table of our own, written after `docs/gen-ai/mcp.md` (0393513c, 1e01e830),
//! `model/mcp/common.yaml` (997a19cc), `metrics.yaml` (14567fad) and `spans.yaml` (5c50d346) of
//! `open-telemetry/semantic-conventions-genai`.

use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;

use crate::receiver::attribute;

/// Where an attribute may stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    ServerSpan,
    ClientSpan,
    ServerOperation,
    ClientOperation,
    ServerSession,
    ClientSession,
}

use Place::{ClientOperation, ClientSession, ClientSpan, ServerOperation, ServerSession, ServerSpan};

/// Name, true if the value is a number, and the places.
const ATTRIBUTES: [(&str, bool, &[Place]); 19] = [
    ("client.address", false, &[ServerSpan]),
    ("client.port", true, &[ServerSpan]),
    ("error.type", false, &[ServerSpan, ClientSpan, ServerOperation, ClientOperation, ServerSession, ClientSession]),
    ("gen_ai.operation.name", false, &[ServerSpan, ClientSpan, ServerOperation, ClientOperation]),
    ("gen_ai.prompt.name", false, &[ServerSpan, ClientSpan, ServerOperation, ClientOperation]),
    ("gen_ai.tool.call.arguments", false, &[ServerSpan, ClientSpan]),
    ("gen_ai.tool.call.result", false, &[ServerSpan, ClientSpan]),
    ("gen_ai.tool.name", false, &[ServerSpan, ClientSpan, ServerOperation, ClientOperation]),
    ("jsonrpc.request.id", false, &[ServerSpan, ClientSpan]),
    ("mcp.method.name", false, &[ServerSpan, ClientSpan, ServerOperation, ClientOperation]),
    (
        "mcp.protocol.version",
        false,
        &[ServerSpan, ClientSpan, ServerOperation, ClientOperation, ServerSession, ClientSession],
    ),
    ("mcp.resource.uri", false, &[ServerSpan, ClientSpan]),
    ("mcp.session.id", false, &[ServerSpan, ClientSpan]),
    (
        "network.protocol.name",
        false,
        &[ServerSpan, ClientSpan, ServerOperation, ClientOperation, ServerSession, ClientSession],
    ),
    (
        "network.protocol.version",
        false,
        &[ServerSpan, ClientSpan, ServerOperation, ClientOperation, ServerSession, ClientSession],
    ),
    (
        "network.transport",
        false,
        &[ServerSpan, ClientSpan, ServerOperation, ClientOperation, ServerSession, ClientSession],
    ),
    ("rpc.response.status_code", false, &[ServerSpan, ClientSpan, ServerOperation, ClientOperation]),
    ("server.address", false, &[ClientSpan, ClientOperation, ClientSession]),
    ("server.port", true, &[ClientSpan, ClientOperation, ClientSession]),
];

/// Attributes of the satellite itself.
const OWN: [&str; 5] =
    ["satellite.attempt", "satellite.fate", "satellite.instance", "satellite.team", "satellite.user"];

/// Upper bounds of all histograms, in seconds.
pub(crate) const BOUNDS: [f64; 14] = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0];

/// Checks names and types of attributes, and that the required ones are present.
#[track_caller]
pub(crate) fn check(place: Place, attributes: &[KeyValue]) {
    for KeyValue { key, value, .. } in attributes {
        let value = value.as_ref().and_then(|value| value.value.as_ref());
        if let Some((_, is_number, places)) = ATTRIBUTES.iter().find(|(name, ..)| name == key) {
            assert!(places.contains(&place), "{key} does not belong to {place:?}");
            let has_type =
                matches!((is_number, value), (true, Some(Value::IntValue(_))) | (false, Some(Value::StringValue(_))));
            assert!(has_type, "{key} has the wrong type: {value:?}");
        } else {
            let is_own = OWN.contains(&&**key) && matches!(place, ServerSpan | ClientSpan);
            assert!(is_own, "{key} is not an attribute of the convention in {place:?}");
        }
    }
    let mut names: Vec<_> = attributes.iter().map(|attribute| &attribute.key).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), attributes.len(), "an attribute occurs twice: {attributes:?}");
    let has = |name: &str| attribute(attributes, name);
    if !matches!(place, ServerSession | ClientSession) {
        assert!(has("mcp.method.name").is_some(), "{attributes:?}");
    }
    if has("mcp.method.name").as_deref() == Some("tools/call") {
        assert_eq!(has("gen_ai.operation.name").as_deref(), Some("execute_tool"));
        assert!(has("gen_ai.tool.name").is_some(), "{attributes:?}");
    }
    assert!(matches!(has("network.transport").as_deref(), Some("pipe" | "tcp")), "{attributes:?}");
}

#[test]
#[expect(deprecated, reason = "the conventions of MCP have moved to another repository")]
fn the_names_of_the_crate_are_those_of_the_table() {
    use mcp_satellite_telemetry::names;
    use opentelemetry_semantic_conventions::attribute as published;
    let ours = [
        names::CLIENT_ADDRESS,
        names::CLIENT_PORT,
        names::ERROR_TYPE,
        names::OPERATION_NAME,
        names::PROMPT_NAME,
        names::TOOL_ARGUMENTS,
        names::TOOL_RESULT,
        names::TOOL_NAME,
        names::REQUEST_ID,
        names::METHOD_NAME,
        names::PROTOCOL_VERSION,
        names::RESOURCE_URI,
        names::SESSION_ID,
        names::NETWORK_PROTOCOL_NAME,
        names::NETWORK_PROTOCOL_VERSION,
        names::NETWORK_TRANSPORT,
        names::RESPONSE_STATUS_CODE,
        names::SERVER_ADDRESS,
        names::SERVER_PORT,
    ];
    assert_eq!(ours.to_vec(), ATTRIBUTES.map(|(name, ..)| name).to_vec());
    assert_eq!(names::DURATION_BOUNDS.map(f64::to_bits), BOUNDS.map(f64::to_bits));
    // The published crate marks the names of MCP as moved to another repository, and still contains them.
    let theirs = [
        published::CLIENT_ADDRESS,
        published::CLIENT_PORT,
        published::ERROR_TYPE,
        published::GEN_AI_OPERATION_NAME,
        published::GEN_AI_PROMPT_NAME,
        published::GEN_AI_TOOL_CALL_ARGUMENTS,
        published::GEN_AI_TOOL_CALL_RESULT,
        published::GEN_AI_TOOL_NAME,
        published::JSONRPC_REQUEST_ID,
        published::MCP_METHOD_NAME,
        published::MCP_PROTOCOL_VERSION,
        published::MCP_RESOURCE_URI,
        published::MCP_SESSION_ID,
        published::NETWORK_PROTOCOL_NAME,
        published::NETWORK_PROTOCOL_VERSION,
        published::NETWORK_TRANSPORT,
        published::RPC_RESPONSE_STATUS_CODE,
        published::SERVER_ADDRESS,
        published::SERVER_PORT,
    ];
    assert_eq!(ours, theirs);
}
