//! The endpoint `/i/satellite/mcp`: the control plane of the satellite as an MCP server.

use std::fmt;
use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use mcp_satellite_protocol::error_code::INVALID_PARAMS;
use mcp_satellite_protocol::method;
use serde::Deserialize;
use serde_json::{Value, json};

use super::access::User;
use super::answer::{CallAnswer, InitializeAnswer, RpcError};
use super::client_description::ClientDescription;
use super::era::translation;
use super::request::EndpointRequest;
use super::tools::endpoint::{initialize_answer, single_page, unknown_method};

const CAPABILITIES: &str = r#"{"tools":{}}"#;
const INSTRUCTIONS: &str = "This server controls the satellite that runs the other MCP servers of your team. \
list_instances returns their status, get_status one of them with its next step, read_logs and read_events tell why it \
failed. restart_instance and configure_instance change it.";

/// The tools of the control plane.
pub trait ControlTools: Send + Sync + 'static {
    /// Returns true if the user may use the control plane. For other users it does not exist.
    fn admits(&self, user: &User) -> bool;

    /// Returns the result of `tools/list`, as JSON text.
    fn definitions(&self) -> String;

    /// Calls a tool; `None` if there is no such tool. An error is the text of the result.
    fn call(&self, user: Arc<User>, tool: &str, arguments: Value) -> Option<BoxFuture<'static, Result<Value, String>>>;
}

#[derive(Clone)]
pub(crate) struct ControlServer(pub(crate) Arc<dyn ControlTools>);

impl fmt::Debug for ControlServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ControlServer")
    }
}

impl ControlServer {
    pub(crate) fn initialize(client: &ClientDescription) -> InitializeAnswer {
        initialize_answer(client, CAPABILITIES, INSTRUCTIONS)
    }

    pub(crate) fn discover() -> String {
        translation::own_discovery_result(CAPABILITIES, INSTRUCTIONS)
    }

    pub(crate) fn handle_request(&self, request: EndpointRequest) -> BoxFuture<'static, CallAnswer> {
        let tools = self.0.clone();
        async move {
            match request.message.method() {
                Some(method::TOOLS_CALL) => call(&*tools, &request).await,
                Some(method::TOOLS_LIST) => single_page(request.message.params(), || tools.definitions()),
                Some(method::PING) => CallAnswer::Result("{}".to_owned()),
                method => unknown_method(method),
            }
        }
        .boxed()
    }
}

async fn call(tools: &dyn ControlTools, request: &EndpointRequest) -> CallAnswer {
    #[derive(Deserialize)]
    struct ControlCallParams {
        name: String,
        #[serde(default)]
        arguments: Value,
    }
    let invalid = |message: String| CallAnswer::Error(RpcError::new(INVALID_PARAMS, message));
    let params = serde_json::from_str(request.message.params().unwrap_or("{}"));
    let ControlCallParams { name, arguments } = match params {
        Ok(params) => params,
        Err(error) => return invalid(format!("the parameters are not valid: {error}")),
    };
    let arguments = if arguments.is_null() { json!({}) } else { arguments };
    let Some(called) = tools.call(request.session.user().clone(), &name, arguments) else {
        return invalid(format!("unknown tool `{}`", name.escape_debug()));
    };
    let result = match called.await {
        Ok(data) => json!({ "content": [{ "type": "text", "text": data.to_string() }], "structuredContent": data }),
        Err(text) => json!({ "content": [{ "type": "text", "text": text }], "isError": true }),
    };
    CallAnswer::Result(result.to_string())
}
