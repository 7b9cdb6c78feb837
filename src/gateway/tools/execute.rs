//! `execute_mcp_tool`: a tool of a server, by its path. The server's result is the answer, unchanged; so are its
//! errors, and progress, questions and cancellations go both ways as if the tool had been called directly.

use std::sync::Arc;

use bytes::Bytes;
use mcp_satellite_actors::audience::Origin;
use mcp_satellite_actors::model::era::Era;
use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::rpc::Message;
use mcp_satellite_actors::{ClientFacts, RuntimeHandle};
use tokio::sync::oneshot;
use tokio::time::Duration;

use super::arguments::Arguments;
use super::caller::Caller;
use super::raw::quoted;
use crate::gateway::face::{Answer, Call};
use crate::gateway::forward::forward;
use crate::gateway::refusal::Refusal;

/// A call of a meta-tool that goes on to a server.
#[derive(Debug)]
pub(super) struct Asked<'a> {
    /// What the meta-tool is given.
    pub arguments: Option<&'a str>,
    /// What the client says beside it, its progress token too: members of the params, and their JSON text.
    pub beside: Vec<(&'static str, &'a str)>,
    /// Who asks.
    pub origin: Origin,
    /// The client's own cancellation, if it comes.
    pub withdrawn: oneshot::Receiver<Message>,
    /// How long it may take, if that is not left to the instance.
    pub timeout: Option<Duration>,
    /// The era of what stands beside.
    pub era: Era,
    /// What the client says of itself.
    pub client: Arc<ClientFacts>,
}

/// Answers `execute_mcp_tool`.
pub(super) async fn execute(runtime: &RuntimeHandle, caller: &Caller, asked: Asked<'_>) -> Result<Answer, Refusal> {
    let arguments = Arguments::read(asked.arguments, &["tool_path", "arguments"])?;
    let path = arguments.text("tool_path")?;
    let (view, label, tool) = caller.part(&path, ':', "server:tool")?;
    let given = arguments.raw("arguments");
    if given.is_some_and(|given| !given.get().starts_with('{')) {
        return Err(Refusal::bad_input("`arguments` must be an object"));
    }
    let name = [("name", quoted(tool))];
    let params = name.into_iter().chain(given.map(|given| ("arguments", given.get().to_owned())));
    let params: Vec<(&str, String)> = params.collect();
    match pass_on(runtime, view, "tools/call", &params, asked, Passed::Tool(tool)).await {
        Ok(answer) => Ok(answer),
        Err(error) => Err(Refusal::of_instance(&error, runtime, &view.spec.id, Some(label))),
    }
}

/// What is passed on.
#[derive(Debug, Clone, Copy)]
pub(super) enum Passed<'a> {
    /// A call of this tool.
    Tool(&'a str),
    /// Reading, which may be repeated.
    Resource,
}

/// Sends a request of ours to a server for the client, whose progress token it carries; the server's answer, or none if
/// the client takes its own request back.
pub(super) async fn pass_on(
    runtime: &RuntimeHandle,
    view: &Arc<InstanceView>,
    method: &str,
    params: &[(&str, String)],
    asked: Asked<'_>,
    passed: Passed<'_>,
) -> Result<Answer, CallError> {
    let Asked { arguments: _, beside, origin, withdrawn, timeout, era, client } = asked;
    let params = params.iter().map(|(name, value)| (*name, &**value)).chain(beside);
    let params: Vec<String> = params.map(|(name, value)| format!("\"{name}\":{value}")).collect();
    // Its id is replaced on the way.
    let text = format!(r#"{{"jsonrpc":"2.0","id":0,"method":"{method}","params":{{{}}}}}"#, params.join(","));
    let message = Message::read(Bytes::from(text)).map_err(|why| CallError::BadInput(why.to_string()))?;
    let (repeatable, tool) = match passed {
        Passed::Tool(name) => {
            let known = view.catalogue.as_deref().and_then(|catalogue| catalogue.tool(name));
            (known.is_some_and(|tool| tool.repeatable), Some(name.to_owned()))
        }
        Passed::Resource => (true, None),
    };
    let call = Call { message, origin, withdrawn, timeout, era, client };
    forward(runtime, &view.spec.id, call, repeatable, tool).await
}
