//! Passes a client's request on to a server. A stateless request is sent unchanged if the server supports that era;
//! else the request and its answer are translated.

use std::sync::Arc;

use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::{ClientRelay, RuntimeHandle};
use mcp_satellite_protocol::era::Era;
use mcp_satellite_protocol::error_code::{
    INVALID_PARAMS, METHOD_NOT_FOUND, MISSING_CAPABILITY, URL_ELICITATION_REQUIRED,
};
use mcp_satellite_protocol::meta::{self};
use mcp_satellite_protocol::rpc::{MessageKind, RpcMessage, member};
use serde::Deserialize;
use tokio::time::Duration;

use super::answer::{CallAnswer, RpcError};
use super::era::translation::{self, UntranslatableRequest};
use super::request::EndpointRequest;
use super::tools::raw::{JsonMembers, json_string};

// Maximum time to find out the era of a server, if neither the call nor the instance has a timeout.
const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(60);

pub(super) async fn forward(
    runtime: &RuntimeHandle,
    id: &InstanceId,
    request: EndpointRequest,
    repeatable: bool,
    tool: Option<Arc<str>>,
) -> Result<CallAnswer, CallError> {
    let (origin, client) = (request.origin(), request.client().clone());
    let EndpointRequest { message, cancellation, timeout, era, trace, .. } = request;
    let relay =
        |message, era| ClientRelay { message, origin, repeatable, tool, era, client: Some(client.clone()), trace };
    if era == Era::Sessions || is_stateless_supported(runtime, id, timeout).await? {
        let answer = runtime.relay(id, relay(message, era), timeout, cancellation).await?;
        return Ok(answer.map_or(CallAnswer::Cancelled, CallAnswer::Message));
    }
    let method = message.method().unwrap_or_default();
    if method.starts_with("tasks/") {
        let why = format!("this server does not support `{method}`: it uses an older version of the protocol");
        return Ok(CallAnswer::Error(RpcError::new(METHOD_NOT_FOUND, why)));
    }
    let translated = match translation::to_session_request(&message) {
        Ok(translated) => translated,
        // A state that leads to a parked call was handled before, so this one is invalid.
        Err(UntranslatableRequest::HasRequestState) => return Ok(CallAnswer::Error(unknown_state_error())),
        Err(UntranslatableRequest::Malformed(why)) => return Err(CallError::BadInput(why.to_string())),
    };
    let Some(answer) = runtime.relay(id, relay(translated, Era::Sessions), timeout, cancellation).await? else {
        return Ok(CallAnswer::Cancelled);
    };
    if let Some(question) = translate_url_elicitation(&answer, &message, &client.capabilities) {
        return Ok(question);
    }
    let server = runtime.status(id).and_then(|view| view.server.clone());
    let info = server.as_deref().and_then(translation::info_of);
    match answer.outcome().filter(|_| answer.kind() == MessageKind::Result) {
        Some(result) => Ok(CallAnswer::CompletedResult(translation::complete_result(result, method, info))),
        None => Ok(CallAnswer::Message(answer)),
    }
}

async fn is_stateless_supported(
    runtime: &RuntimeHandle,
    id: &InstanceId,
    timeout: Option<Duration>,
) -> Result<bool, CallError> {
    let own = || runtime.status(id).map(|view| view.spec.policy.session.request_timeout);
    let timeout = timeout.or_else(own).unwrap_or(DISCOVERY_TIMEOUT);
    Ok(runtime.discover(id, timeout).await?.is_some())
}

/// Returns the error for an invalid `requestState`. It does not reveal whether the state ever existed or for which
/// user.
pub(super) fn unknown_state_error() -> RpcError {
    let why = "`requestState` is not valid: it was used before, has expired, or belongs to another request; \
               send the request again without it";
    RpcError::new(INVALID_PARAMS, why)
}

/// Translates the error with which a server of 2025-11-25 asks its user to open a URL into a question of the stateless
/// era. A client that has declined the question receives the original error.
fn translate_url_elicitation(answer: &RpcMessage, request: &RpcMessage, capabilities: &str) -> Option<CallAnswer> {
    #[derive(Deserialize)]
    struct ErrorData {
        elicitations: Vec<Elicitation>,
    }
    #[derive(Deserialize)]
    struct Elicitation {
        message: String,
        url: String,
    }
    let error = answer.outcome().filter(|_| answer.kind() == MessageKind::Error)?;
    let code: i64 = member(error, "code")?.parse().ok()?;
    if code != URL_ELICITATION_REQUIRED || has_declined(request) {
        return None;
    }
    let data: ErrorData = serde_json::from_str(member(error, "data")?).ok()?;
    if data.elicitations.is_empty() {
        return None;
    }
    let can = member(capabilities, "elicitation").is_some_and(|elicitation| member(elicitation, "url").is_some());
    if !can {
        let data = Some(r#"{"requiredCapabilities":{"elicitation":{"url":{}}}}"#.to_owned());
        let why =
            format!("the server asks the user to open a URL, but `{}` has no `elicitation.url`", meta::CAPABILITIES);
        return Some(CallAnswer::Error(RpcError { code: MISSING_CAPABILITY, message: why, data }));
    }
    let input_request = |(at, Elicitation { message, url }): (usize, &Elicitation)| {
        let (message, url) = (json_string(message), json_string(url));
        format!(
            r#""url-{}":{{"method":"elicitation/create","params":{{"mode":"url","message":{message},"url":{url}}}}}"#,
            at + 1
        )
    };
    let requests: Vec<String> = data.elicitations.iter().enumerate().map(input_request).collect();
    Some(CallAnswer::Result(format!(r#"{{"resultType":"input_required","inputRequests":{{{}}}}}"#, requests.join(","))))
}

fn has_declined(request: &RpcMessage) -> bool {
    #[derive(Deserialize)]
    struct Response {
        action: String,
    }
    let responses = request.params().and_then(|params| member(params, "inputResponses"));
    responses.and_then(JsonMembers::read).unwrap_or_default().iter().any(|(_, response)| {
        serde_json::from_str::<Response>(response).is_ok_and(|response| response.action != "accept")
    })
}
