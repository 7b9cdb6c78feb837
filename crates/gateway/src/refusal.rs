//! Errors for calls without a result, worded for a model: the cause and the next step. Each error has two forms: a tool
//! result with `isError` and a JSON-RPC error.

use mcp_satellite_actors::model::exit::{CallError, CallFate};
use mcp_satellite_actors::model::failure::FailureKind;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::remedy::Remedy;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::{ControlError, RuntimeHandle};
use mcp_satellite_protocol::error_code::{INVALID_PARAMS, SERVER_ERROR};
use mcp_satellite_protocol::method;
use serde::Serialize;

use super::answer::{CallAnswer, RpcError};
use super::tools::raw::to_json;
use crate::remedy::command;

/// An error that replaces the result of a request.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CallRefusal {
    /// Stable identifier, as in the answers of the control socket.
    pub kind: &'static str,
    pub message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_step: Option<String>,
    #[serde(flatten)]
    pub state: Box<RefusalFacts>,
    #[serde(skip)]
    code: i64,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct RefusalFacts {
    /// Status of the instance, if it prevented the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fate: Option<CallFate>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// End of the last attempt to reach the server, RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_attempt: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_retry_ms: Option<u64>,
}

/// The server of a call, under its names for the caller and for people.
#[derive(Debug, Clone, Copy)]
pub struct CallTarget<'a> {
    /// Server name within the six tools; `None` on other endpoints.
    pub label: Option<&'a str>,
    pub name: &'a str,
    /// Names of the configuration values that the user has not given yet.
    pub missing: &'a [String],
}

impl CallTarget<'_> {
    fn command(&self, remedy: Remedy) -> String {
        command(remedy, self.name, self.missing)
    }
}

impl CallRefusal {
    pub fn new(kind: &'static str, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), next_step: None, state: Box::default(), code: SERVER_ERROR }
    }

    #[must_use]
    pub fn with_next_step(mut self, next_step: impl Into<String>) -> Self {
        self.next_step = Some(next_step.into());
        self
    }

    #[must_use]
    pub(super) fn with_code(self, code: i64) -> Self {
        Self { code, ..self }
    }

    pub(super) fn closing() -> Self {
        Self::new("closing", "the satellite is stopping").with_next_step("Try again later.")
    }

    pub(super) fn bad_input(message: impl Into<String>) -> Self {
        Self {
            code: INVALID_PARAMS,
            ..Self::new("bad_input", message).with_next_step("Correct the input and call again.")
        }
    }

    /// Returns the error for an unknown name. Names of other users count as unknown.
    pub(super) fn not_found(what: &str, name: &str) -> Self {
        let refusal = Self::new("not_found", format!("there is no {what} `{name}`"));
        Self {
            code: INVALID_PARAMS,
            ..refusal.with_next_step(format!("List the {what}s again and use a name of that list."))
        }
    }

    pub(super) fn ambiguous(name: &str, labels: &[&str]) -> Self {
        let labels: Vec<String> = labels.iter().map(|label| format!("`{label}`")).collect();
        Self::new("ambiguous", format!("`{name}` names {} servers", labels.len()))
            .with_next_step(format!("Use one of {}.", labels.join(", ")))
    }

    /// Returns the error for a failed call. Reads the instance's current status, because the call may have waited long.
    pub(super) fn from_instance_error(
        error: &CallError,
        runtime: &RuntimeHandle,
        id: &InstanceId,
        label: Option<&str>,
    ) -> Self {
        let view = runtime.status(id);
        let name = view.as_ref().map_or("", |view| &*view.spec.name);
        let missing = view.as_ref().map_or(&[][..], |view| &view.spec.missing);
        let target = CallTarget { label, name, missing };
        Self::from_call_error(error, view.as_ref().map(|view| view.status), &target)
    }

    pub fn from_call_error(error: &CallError, status: Option<Status>, target: &CallTarget<'_>) -> Self {
        let status = status.filter(|_| error.fate() == Some(CallFate::NotSent));
        let mut refusal = Self::new(error.kind(), error.to_string()).with_next_step(next_step(error, status, target));
        let state = &mut *refusal.state;
        state.fate = error.fate();
        match error {
            CallError::Refused { status, .. } => state.status = Some(status.as_str()),
            CallError::Reconnecting { last_attempt, next_retry_ms, last_error } => {
                state.status = Some("reconnecting");
                state.last_attempt = Some(format!("{last_attempt:.3}"));
                state.next_retry_ms = *next_retry_ms;
                state.last_error = Some(last_error.clone());
            }
            CallError::Terminated { .. } | CallError::TimedOut { .. } | CallError::Remote { .. } => {
                state.status = status.map(Status::as_str);
            }
            CallError::NotFound { .. } | CallError::BadInput(_) => refusal.code = INVALID_PARAMS,
            CallError::Server { code, .. } => refusal.code = *code,
            CallError::Busy { .. } => {}
        }
        refusal
    }

    pub(super) fn from_control_error(error: &ControlError, target: &CallTarget<'_>) -> Self {
        let kind = match error {
            ControlError::NotFound => return Self::not_found("server", target.label.unwrap_or(target.name)),
            ControlError::Refused { remedy: Some(remedy), .. } => {
                return Self::new("refused", error.to_string()).with_next_step(remedy_step(*remedy, target));
            }
            ControlError::Refused { remedy: None, .. } => "refused",
            ControlError::Superseded => "superseded",
            ControlError::Closing => "closing",
        };
        Self::new(kind, error.to_string()).with_next_step("Call list_servers for the current status.")
    }

    fn text(&self) -> String {
        match &self.next_step {
            Some(next_step) => format!("{}. {next_step}", self.message.trim_end_matches('.')),
            None => self.message.clone(),
        }
    }

    /// Returns the answer to a request of this method: a tool result for `tools/call`, because models see no other
    /// errors.
    pub fn to_answer(&self, method: &str) -> CallAnswer {
        if method == method::TOOLS_CALL {
            CallAnswer::Result(self.to_tool_result())
        } else {
            CallAnswer::Error(self.to_rpc_error())
        }
    }

    pub fn to_rpc_error(&self) -> RpcError {
        RpcError { code: self.code, message: self.text(), data: Some(to_json(self)) }
    }

    /// Converts to a tool result with `isError`. The data is in `_meta`, because clients validate structured content
    /// against the tool's output schema even for errors.
    pub fn to_tool_result(&self) -> String {
        #[derive(Serialize)]
        struct Content {
            r#type: &'static str,
            text: String,
        }
        #[derive(Serialize)]
        struct RefusalMeta<'a> {
            #[serde(rename = "mcp-satellite/error")]
            error: &'a CallRefusal,
        }
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Failed<'a> {
            content: [Content; 1],
            is_error: bool,
            #[serde(rename = "_meta")]
            meta: RefusalMeta<'a>,
        }
        let content = [Content { r#type: "text", text: self.text() }];
        to_json(&Failed { content, is_error: true, meta: RefusalMeta { error: self } })
    }
}

fn reconnect_instruction(target: &CallTarget<'_>) -> String {
    match target.label {
        Some(label) => format!("call reconnect_server with name `{label}`"),
        None => format!("ask the user to run {}", target.command(Remedy::Reconnect)),
    }
}

fn remedy_step(remedy: Remedy, target: &CallTarget<'_>) -> String {
    let command = target.command(remedy);
    match remedy {
        Remedy::Configure if target.missing.is_empty() => {
            format!("Ask the user to provide what the status message names, and then to run {command}.")
        }
        // A model may repeat a secret that it has seen.
        Remedy::Configure => {
            format!(
                "Ask the user to run {command}. The command prompts for the value: the user must not send it to you."
            )
        }
        Remedy::Authorize => {
            let reconnect = reconnect_instruction(target);
            format!(
                "Ask the user to renew the server's credentials in the configuration, or to run {command} if the \
                 server uses OAuth; then {reconnect}."
            )
        }
        Remedy::Restart => match target.label {
            Some(label) => {
                format!(
                    "Call reconnect_server with name `{label}` to start the server again, best when the cause is fixed."
                )
            }
            None => {
                format!("Ask the user to look at {} and to run {command}.", target.command(Remedy::ReadLogs))
            }
        },
        Remedy::Start => {
            format!("A person stopped the server: ask the user whether it should run; {command} starts it.")
        }
        Remedy::Reconnect => format!("Call again later; if that does not help, {}.", reconnect_instruction(target)),
        Remedy::ReadLogs => format!("Call again later; if that does not help, ask the user to look at {command}."),
    }
}

fn next_step(error: &CallError, status: Option<Status>, target: &CallTarget<'_>) -> String {
    let reconnect = reconnect_instruction(target);
    match error {
        CallError::NotFound { .. } => "Request the list again and use a name of that list.".to_owned(),
        CallError::Refused { remedy: Some(remedy), .. } => remedy_step(*remedy, target),
        CallError::Refused { remedy: None, .. } => "Call again in a few seconds.".to_owned(),
        CallError::Remote { failure, .. } if matches!(failure.kind, FailureKind::InsufficientScope { .. }) => {
            remedy_step(Remedy::Authorize, target)
        }
        CallError::Terminated { fate, .. } | CallError::TimedOut { fate, .. } | CallError::Remote { fate, .. } => {
            match fate {
                CallFate::NotSent => {
                    let status = status.map_or(String::new(), |status| format!(", which is {status}"));
                    format!(
                        "The call did not reach the server{status}: call again; if that does not help, {reconnect}."
                    )
                }
                CallFate::MaybeExecuted => {
                    "The server may have executed the call: check before you call again.".to_owned()
                }
                CallFate::TimedOut => {
                    "The server may still execute the call: check before you call again, or request less at once."
                        .to_owned()
                }
            }
        }
        CallError::Reconnecting { next_retry_ms, .. } => {
            let tried = match next_retry_ms {
                Some(ms) => format!("The satellite tries again in {} s and with every call", ms.div_ceil(1000)),
                None => "The satellite tries again with every call".to_owned(),
            };
            format!("{tried}: call again later; if that does not help, {reconnect}.")
        }
        CallError::Busy { .. } => {
            "Wait until one of the calls in progress has been answered, then call again.".to_owned()
        }
        CallError::Server { .. } => "The message comes from the server: correct the request accordingly.".to_owned(),
        CallError::BadInput(_) => "Correct the arguments and call again.".to_owned(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use std::fmt::Write as _;
    use std::time::Duration;

    use jiff::Timestamp;
    use mcp_satellite_actors::model::failure::{ExchangeFailure, FailureKind};
    use serde_json::{Value, json};

    use super::*;

    fn errors() -> Vec<CallError> {
        let (after, reason) = (Duration::from_secs(30), "exited with code 1".to_owned());
        let refused = |status: Status| {
            let remedy = Remedy::for_status(status, status == Status::Offline, false);
            CallError::Refused { status, message: format!("`files-a` is {status}"), remedy }
        };
        let reconnecting = |next_retry_ms| CallError::Reconnecting {
            last_attempt: Timestamp::UNIX_EPOCH,
            next_retry_ms,
            last_error: "connection refused".to_owned(),
        };
        let mut errors: Vec<CallError> = Status::ALL.iter().copied().map(refused).collect();
        for fate in [CallFate::NotSent, CallFate::MaybeExecuted, CallFate::TimedOut] {
            errors.push(CallError::Terminated { fate, reason: reason.clone() });
            errors.push(CallError::TimedOut { after, fate });
            errors.push(CallError::Remote { fate, failure: ExchangeFailure::unsent(FailureKind::Refused) });
        }
        errors.extend([
            reconnecting(Some(4_200)),
            reconnecting(None),
            CallError::NotFound { what: "instance".to_owned() },
            CallError::Busy { what: "calls", limit: 4 },
            CallError::Server { code: -7, message: "no".to_owned(), data: None },
            CallError::BadInput("`n` is missing".to_owned()),
        ]);
        errors
    }

    #[test]
    fn every_refusal_has_a_next_step_in_both_formats() {
        let (mut table, missing) = (String::new(), ["API_KEY".to_owned()]);
        for error in errors() {
            for label in [Some("files"), None] {
                let target = CallTarget { label, name: "files-acme-alice-a", missing: &missing };
                let refusal = CallRefusal::from_call_error(&error, Some(Status::Connecting), &target);
                let step = refusal.next_step.as_deref().unwrap();
                assert!(step.ends_with('.'), "{step}");
                let (rpc, result): (_, Value) =
                    (refusal.to_rpc_error(), serde_json::from_str(&refusal.to_tool_result()).unwrap());
                let data: Value = serde_json::from_str(rpc.data.as_deref().unwrap()).unwrap();
                assert_eq!(data, result["_meta"]["mcp-satellite/error"]);
                assert_eq!(result["content"][0]["text"], json!(rpc.message));
                assert_eq!((&result["isError"], &data["next_step"]), (&json!(true), &json!(step)));
                // Writing to a string does not fail.
                let _ = writeln!(table, "{} {}", rpc.code, rpc.message);
            }
        }
        insta::assert_snapshot!(table);
    }

    #[test]
    fn a_refusal_names_the_status_that_stopped_the_call() {
        let target = CallTarget { label: Some("a"), name: "a-acme-alice-a", missing: &[] };
        let status_of =
            |error: &CallError| CallRefusal::from_call_error(error, Some(Status::Connecting), &target).state.status;
        let late = CallError::TimedOut { after: Duration::from_secs(1), fate: CallFate::NotSent };
        assert_eq!(status_of(&late), Some("connecting"));
        let stopped = CallError::Refused { status: Status::Offline, message: String::new(), remedy: None };
        assert_eq!(status_of(&stopped), Some("offline"));
        assert_eq!(status_of(&CallError::BadInput(String::new())), None);
    }

    #[test]
    fn only_tool_calls_get_refusals_as_tool_results() {
        let refusal = CallRefusal::not_found("tool", "x");
        assert!(matches!(refusal.to_answer("tools/call"), CallAnswer::Result(text) if text.contains("isError")));
        assert!(matches!(refusal.to_answer("prompts/get"), CallAnswer::Error(error) if error.code == INVALID_PARAMS));
    }
}
