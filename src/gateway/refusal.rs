//! Why a call has no result, in words that a model can act on: what happened, and the next step.

use mcp_satellite_actors::model::exit::{CallError, Fate};
use mcp_satellite_actors::model::status::Status;
use serde::Serialize;

use super::face::RpcError;

/// Code of an error of ours that JSON-RPC has no code for.
pub const SERVER_ERROR: i64 = -32000;

/// A failed call. On `/i/` it is the data of a JSON-RPC error, on `/mcp` the `_meta` of a tool's error.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Refusal {
    /// A stable word.
    pub kind: &'static str,
    /// What happened.
    pub message: String,
    /// What to do about it.
    pub next_step: String,
    /// The status of the instance, where that is the reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<&'static str>,
    /// What became of the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fate: Option<Fate>,
    /// Why the last attempt to connect failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// When that was, RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_attempt: Option<String>,
    /// Until the next one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_retry_ms: Option<u64>,
}

impl From<&CallError> for Refusal {
    fn from(error: &CallError) -> Self {
        let mut refusal = Self {
            kind: error.kind(),
            message: error.to_string(),
            next_step: next_step(error),
            status: None,
            fate: error.fate(),
            last_error: None,
            last_attempt: None,
            next_retry_ms: None,
        };
        match error {
            CallError::Refused { status, .. } => refusal.status = Some(status.as_str()),
            CallError::Reconnecting { last_attempt, next_retry_ms, last_error } => {
                refusal.status = Some("reconnecting");
                refusal.last_attempt = Some(format!("{last_attempt:.3}"));
                refusal.next_retry_ms = *next_retry_ms;
                refusal.last_error = Some(last_error.clone());
            }
            CallError::NotFound { .. }
            | CallError::Terminated { .. }
            | CallError::TimedOut { .. }
            | CallError::Remote { .. }
            | CallError::Busy { .. }
            | CallError::Server { .. }
            | CallError::BadInput(_) => {}
        }
        refusal
    }
}

impl Refusal {
    /// As the error that answers a request. A server's own error keeps its code.
    pub fn rpc(&self, error: &CallError) -> RpcError {
        match error {
            CallError::Server { code, message, data } => {
                RpcError { code: *code, message: message.clone(), data: data.clone() }
            }
            _ => RpcError {
                code: if matches!(error, CallError::BadInput(_)) { -32602 } else { SERVER_ERROR },
                message: format!("{}; {}", self.message, self.next_step),
                data: serde_json::to_string(self).ok(),
            },
        }
    }
}

fn next_step(error: &CallError) -> String {
    let repeat = |fate| match fate {
        Fate::NotSent => "it did not reach the server: call it again",
        Fate::MaybeExecuted => "it may have been carried out: look before you call it again",
        Fate::TimedOut => "it may be carried out still: look before you call it again, or ask for less at once",
    };
    match error {
        CallError::NotFound { .. } => "list what there is, and use a name from that list".to_owned(),
        CallError::Refused { status, .. } => match status {
            Status::AwaitingUserConfig => "ask the user to give what is missing with `satellite configure`",
            Status::RequiresReauth => {
                "ask the user to renew the server's credentials, for instance with `satellite auth`"
            }
            Status::PermanentlyFailed => "ask the user to look at `satellite logs` and to run `satellite restart`",
            Status::Offline => "ask the user whether it should run; `satellite start` starts it",
            Status::Provisioning
            | Status::CommandReceived
            | Status::Connecting
            | Status::DiscoveringTools
            | Status::SyncingTools
            | Status::Restarting => "it is on its way: call it again in a few seconds",
            Status::Online | Status::Error => "call it again later, or ask the user to look at `satellite status`",
        }
        .to_owned(),
        CallError::Terminated { fate, .. } | CallError::TimedOut { fate, .. } | CallError::Remote { fate, .. } => {
            repeat(*fate).to_owned()
        }
        CallError::Reconnecting { next_retry_ms: Some(ms), .. } => {
            format!("it is tried again by itself in {} s; a call tries at once", ms.div_ceil(1000))
        }
        CallError::Reconnecting { next_retry_ms: None, .. } => "a call tries again at once".to_owned(),
        CallError::Busy { .. } => "wait for the answers to other calls".to_owned(),
        CallError::Server { .. } => "the message is the server's own: correct the request by it".to_owned(),
        CallError::BadInput(_) => "correct the arguments".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_says_what_to_do_next() {
        for status in Status::ALL {
            let error = CallError::Refused { status, message: format!("it is {status}") };
            let refusal = Refusal::from(&error);
            assert_eq!(refusal.status, Some(status.as_str()));
            let rpc = refusal.rpc(&error);
            assert_eq!(rpc.code, SERVER_ERROR);
            assert!(rpc.message.contains(status.as_str()) && rpc.message.contains(&refusal.next_step), "{rpc:?}");
        }
    }

    #[test]
    fn an_error_of_the_server_stays_its_own() {
        let error = CallError::Server { code: -7, message: "m".into(), data: Some("[1]".into()) };
        let expected = RpcError { code: -7, message: "m".into(), data: Some("[1]".into()) };
        assert_eq!(Refusal::from(&error).rpc(&error), expected);
    }
}
