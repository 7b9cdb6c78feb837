//! The tool `execute_mcp_tool`: calls a tool of a server by its path. The server's result or error is returned
//! unchanged; progress, questions and cancellations are passed on as in a direct call.

use std::sync::Arc;

use bytes::Bytes;
use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_protocol::method;
use mcp_satellite_protocol::rpc::RpcMessage;

use super::arguments::MetaToolArguments;
use super::caller::CallerSnapshot;
use super::raw::{Members, json_string};
use crate::answer::CallAnswer;
use crate::forward::forward;
use crate::refusal::CallRefusal;
use crate::request::EndpointRequest;

// Members of the params that belong to the call and not to the meta-tool, so they are passed on.
const CALL_MEMBERS: [&str; 3] = ["_meta", "inputResponses", "requestState"];

/// Server for which the request of a meta-tool is meant.
#[derive(Debug)]
pub(super) struct MetaToolTarget<'a> {
    view: &'a Arc<InstanceView>,
    // Name of the server in the arguments, for errors.
    label: String,
    // Name of the called tool, unless a resource is read.
    tool: Option<String>,
}

/// Returns the request of `execute_mcp_tool` to a server. `params` are those of the client's request.
pub(super) fn tool_request<'a>(
    runtime: &RuntimeHandle,
    caller: &'a CallerSnapshot,
    arguments: Option<&str>,
    params: &Members<'_>,
) -> Result<(MetaToolTarget<'a>, RpcMessage), CallRefusal> {
    let arguments = MetaToolArguments::read(arguments, &["tool_path", "arguments"])?;
    let path = arguments.text("tool_path")?;
    let (view, label, tool) = caller.split_server(&path, ':', "server:tool")?;
    let tool_arguments = arguments.raw("arguments");
    if tool_arguments.is_some_and(|value| !value.get().starts_with('{')) {
        return Err(CallRefusal::bad_input("`arguments` must be an object"));
    }
    let name = json_string(tool);
    let members = [("name", &*name)].into_iter().chain(tool_arguments.map(|value| ("arguments", value.get())));
    let target = MetaToolTarget { view, label: label.to_owned(), tool: Some(tool.to_owned()) };
    let message = target.message(runtime, method::TOOLS_CALL, members, params)?;
    Ok((target, message))
}

impl<'a> MetaToolTarget<'a> {
    pub(super) fn resource(view: &'a Arc<InstanceView>, label: &str) -> Self {
        Self { view, label: label.to_owned(), tool: None }
    }

    /// Returns a request with these members and those of the client's `params` that belong to the call.
    pub(super) fn message<'m>(
        &self,
        runtime: &RuntimeHandle,
        method: &str,
        members: impl Iterator<Item = (&'m str, &'m str)>,
        params: &'m Members<'_>,
    ) -> Result<RpcMessage, CallRefusal> {
        let passed_on = CALL_MEMBERS.into_iter().filter_map(|name| Some((name, params.get(name)?.get())));
        let members: Vec<String> =
            members.chain(passed_on).map(|(name, value)| format!("\"{name}\":{value}")).collect();
        // The runtime replaces the id.
        let text = format!(r#"{{"jsonrpc":"2.0","id":0,"method":"{method}","params":{{{}}}}}"#, members.join(","));
        let message = RpcMessage::parse(Bytes::from(text));
        message.map_err(|why| self.refusal(runtime, &CallError::BadInput(why.to_string())))
    }

    /// Sends a request to the server. Returns the server's answer, or `CallAnswer::Cancelled` if the client cancels its
    /// own request.
    pub(super) async fn forward(
        mut self,
        runtime: &RuntimeHandle,
        request: EndpointRequest,
    ) -> Result<CallAnswer, CallRefusal> {
        let tool = self.tool.take();
        let repeatable = match &tool {
            Some(name) => {
                let known = self.view.catalogue.as_deref().and_then(|catalogue| catalogue.tool(name));
                known.is_some_and(|tool| tool.repeatable)
            }
            // Reading a resource changes nothing.
            None => true,
        };
        let answer = forward(runtime, &self.view.spec.id, request, repeatable, tool.map(Into::into)).await;
        answer.map_err(|error| self.refusal(runtime, &error))
    }

    fn refusal(&self, runtime: &RuntimeHandle, error: &CallError) -> CallRefusal {
        CallRefusal::from_instance_error(error, runtime, &self.view.spec.id, Some(&self.label))
    }
}
