//! Identity and capabilities of a client, as it sends them.

use std::sync::Arc;

use mcp_satellite_actors::ClientFacts;
use mcp_satellite_protocol::method;
use mcp_satellite_protocol::rpc::member;

const FACTS_MAX: usize = 16 * 1024;
const UNKNOWN_CLIENT: &str = r#"{"name":"","version":""}"#;

/// Description that a client gives of itself, in `initialize` or in each stateless request. A malformed member counts
/// as absent.
#[derive(Debug, Clone)]
pub struct ClientDescription {
    /// Protocol version that the client offers.
    pub version: String,
    pub name: String,
    pub client_version: String,
    pub sampling: bool,
    pub elicitation: bool,
    pub roots: bool,
    /// Capabilities and client info as sent.
    pub facts: Arc<ClientFacts>,
}

impl Default for ClientDescription {
    fn default() -> Self {
        Self::new(String::new(), None, None)
    }
}

impl ClientDescription {
    /// Reads the params of `initialize`.
    pub fn read(params: Option<&str>) -> Self {
        let part = |name| params.and_then(|params| member(params, name));
        let object = |name| part(name).filter(|part| part.starts_with('{'));
        let version = part("protocolVersion").and_then(|version| serde_json::from_str(version).ok());
        Self::new(version.unwrap_or_default(), object("capabilities"), object("clientInfo"))
    }

    pub fn new(version: String, capabilities: Option<&str>, info: Option<&str>) -> Self {
        let capabilities = capabilities.unwrap_or("{}");
        let info = info.unwrap_or(UNKNOWN_CLIENT);
        let text = |name| member(info, name).and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
        let has = |name| member(capabilities, name).is_some_and(|value| value != "null");
        let (sampling, elicitation, roots) = (has("sampling"), has("elicitation"), has("roots"));
        // Longer text contains no fact that a server needs, and would be kept with every session.
        let limited = |text: &str, short: &str| if text.len() <= FACTS_MAX { text } else { short }.to_owned();
        let facts = ClientFacts { capabilities: limited(capabilities, "{}"), info: limited(info, UNKNOWN_CLIENT) };
        let (name, client_version) = (text("name"), text("version"));
        Self { version, name, client_version, sampling, elicitation, roots, facts: Arc::new(facts) }
    }

    /// Returns true if the client can answer a request of this method. Unknown methods are assumed to be answered.
    pub fn can_answer(&self, method: &str) -> bool {
        match method {
            method::CREATE_MESSAGE => self.sampling,
            method::ELICIT => self.elicitation,
            method::ROOTS_LIST => self.roots,
            _ => true,
        }
    }
}
