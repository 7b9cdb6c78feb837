//! The tool `execute_mcp_tool`: calls a tool of a server by its path. The server's result or error is returned
//! unchanged; progress, questions and cancellations are passed on as in a direct call.

use std::sync::Arc;

use bytes::Bytes;
use mcp_satellite_actors::audience::CallOrigin;
use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::{ClientFacts, RuntimeHandle};
use mcp_satellite_protocol::era::Era;
use mcp_satellite_protocol::rpc::RpcMessage;
use tokio::sync::oneshot;
use tokio::time::Duration;

use super::arguments::MetaToolArguments;
use super::caller::CallerSnapshot;
use super::raw::json_string;
use crate::face::{CallAnswer, EndpointCall};
use crate::forward::forward;
use crate::refusal::CallRefusal;

#[derive(Debug)]
pub(super) struct MetaToolCall<'a> {
    // Arguments of the outer tool.
    pub arguments: Option<&'a str>,
    // Other members of the params as JSON text, for example `_meta` with the progress token.
    pub other_members: Vec<(&'static str, &'a str)>,
    pub origin: CallOrigin,
    // Receiver of the client's own cancellation.
    pub cancellation: oneshot::Receiver<RpcMessage>,
    // Time limit; `None` leaves it to the instance.
    pub timeout: Option<Duration>,
    // Era of the members in `other_members`.
    pub era: Era,
    pub client: Arc<ClientFacts>,
}

pub(super) async fn execute(
    runtime: &RuntimeHandle,
    caller: &CallerSnapshot,
    asked: MetaToolCall<'_>,
) -> Result<CallAnswer, CallRefusal> {
    let arguments = MetaToolArguments::read(asked.arguments, &["tool_path", "arguments"])?;
    let path = arguments.text("tool_path")?;
    let (view, label, tool) = caller.split_server(&path, ':', "server:tool")?;
    let given = arguments.raw("arguments");
    if given.is_some_and(|given| !given.get().starts_with('{')) {
        return Err(CallRefusal::bad_input("`arguments` must be an object"));
    }
    let name = [("name", json_string(tool))];
    let params = name.into_iter().chain(given.map(|given| ("arguments", given.get().to_owned())));
    let params: Vec<(&str, String)> = params.collect();
    match forward_request(runtime, view, "tools/call", &params, asked, RelayedOperation::Tool(tool)).await {
        Ok(answer) => Ok(answer),
        Err(error) => Err(CallRefusal::from_instance_error(&error, runtime, &view.spec.id, Some(label))),
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) enum RelayedOperation<'a> {
    Tool(&'a str),
    Resource,
}

/// Sends a request of the satellite to a server on behalf of the client. Returns the server's answer, or
/// `CallAnswer::Cancelled` if the client cancels its own request.
pub(super) async fn forward_request(
    runtime: &RuntimeHandle,
    view: &Arc<InstanceView>,
    method: &str,
    params: &[(&str, String)],
    asked: MetaToolCall<'_>,
    passed: RelayedOperation<'_>,
) -> Result<CallAnswer, CallError> {
    let MetaToolCall { arguments: _, other_members: beside, origin, cancellation: withdrawn, timeout, era, client } =
        asked;
    let params = params.iter().map(|(name, value)| (*name, &**value)).chain(beside);
    let params: Vec<String> = params.map(|(name, value)| format!("\"{name}\":{value}")).collect();
    // `relay` replaces the id.
    let text = format!(r#"{{"jsonrpc":"2.0","id":0,"method":"{method}","params":{{{}}}}}"#, params.join(","));
    let message = RpcMessage::parse(Bytes::from(text)).map_err(|why| CallError::BadInput(why.to_string()))?;
    let (repeatable, tool) = match passed {
        RelayedOperation::Tool(name) => {
            let known = view.catalogue.as_deref().and_then(|catalogue| catalogue.tool(name));
            (known.is_some_and(|tool| tool.repeatable), Some(name.to_owned()))
        }
        RelayedOperation::Resource => (true, None),
    };
    let call = EndpointCall { message, origin, cancellation: withdrawn, timeout, era, client };
    forward(runtime, &view.spec.id, call, repeatable, tool).await
}
