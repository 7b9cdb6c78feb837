//! What went wrong, for a model: in words with what it can do next, and the same as data.

use jiff::Timestamp;
use mcp_satellite_actors::ControlError;
use mcp_satellite_actors::model::exit::{CallError, Fate};
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::slot::Want;
use serde::Serialize;

use super::raw::written;

/// A call of a meta-tool that has no result of its own.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Trouble {
    /// A stable word, as in the answers of the control socket.
    pub kind: &'static str,
    /// What happened.
    pub message: String,
    /// What can be done about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_step: Option<String>,
    /// What is known beside.
    #[serde(flatten)]
    pub state: Box<State>,
}

/// What is known of the call and of its server, as far as it applies.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct State {
    /// The instance's status, where that is the reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<String>,
    /// What became of a call that was not answered.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fate: Option<Fate>,
    /// Why the last attempt to reach the server failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// When there will be another one by itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_retry_ms: Option<u64>,
    /// When that attempt was over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_attempt: Option<Timestamp>,
}

impl Trouble {
    /// Of this kind, and no more to tell.
    pub fn new(kind: &'static str, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), next_step: None, state: Box::default() }
    }

    fn then(mut self, next_step: impl Into<String>) -> Self {
        self.next_step = Some(next_step.into());
        self
    }

    pub(super) fn bad_input(message: impl Into<String>) -> Self {
        Self::new("bad_input", message).then("Call the tool again with arguments as its input schema says.")
    }

    pub(super) fn no_server(name: &str) -> Self {
        Self::new("not_found", format!("there is no server `{name}`")).then("list_servers names those that there are.")
    }

    pub(super) fn ambiguous(name: &str, labels: &[&str]) -> Self {
        let labels: Vec<String> = labels.iter().map(|label| format!("`{label}`")).collect();
        Self::new("ambiguous", format!("`{name}` names {} servers", labels.len()))
            .then(format!("Use one of {}.", labels.join(", ")))
    }

    /// A call or a request to this server came to nothing.
    pub(super) fn of_call(error: &CallError, label: &str, view: &InstanceView) -> Self {
        let mut trouble = Self::new(error.kind(), error.to_string());
        trouble.state.fate = error.fate();
        let next_step = match error {
            CallError::NotFound { .. } => "list_servers names the servers that there are.".to_owned(),
            CallError::Refused { status, .. } => {
                trouble.state.status = Some(status.to_string());
                after_status(*status, label, view)
            }
            CallError::Reconnecting { last_attempt, next_retry_ms, last_error } => {
                trouble.state.status = Some("reconnecting".to_owned());
                trouble.state.last_attempt = Some(*last_attempt);
                trouble.state.next_retry_ms = *next_retry_ms;
                trouble.state.last_error = Some(last_error.clone());
                format!(
                    "Call again later: every call tries to connect. If it lasts, call reconnect_server with name `{label}`."
                )
            }
            CallError::Busy { .. } => "Wait for an answer to one of the calls under way, then call again.".to_owned(),
            CallError::BadInput(_) => "Call the tool again with arguments as its input schema says.".to_owned(),
            CallError::Server { .. } => "This is the server's own answer.".to_owned(),
            CallError::Terminated { fate, .. } | CallError::TimedOut { fate, .. } | CallError::Remote { fate, .. } => {
                match fate {
                    Fate::NotSent => format!(
                        "It did not reach the server, so it can be repeated. list_servers tells how `{label}` is."
                    ),
                    Fate::MaybeExecuted | Fate::TimedOut => {
                        "It may have been carried out: find out before you repeat it.".to_owned()
                    }
                }
            }
        };
        trouble.then(next_step)
    }

    /// A connection could not be made anew.
    pub(super) fn of_control(error: &ControlError, label: &str) -> Self {
        let kind = match error {
            ControlError::NotFound => return Self::no_server(label),
            ControlError::Refused(_) => "refused",
            ControlError::Superseded => "superseded",
            ControlError::Closing => "closing",
        };
        Self::new(kind, error.to_string()).then("list_servers tells how it is now.")
    }

    /// As the result of a tool that is an error. The data is in `_meta`: clients hold the structured content of an error,
    /// too, against the tool's output schema.
    pub fn result(&self) -> String {
        #[derive(Serialize)]
        struct Content<'a> {
            r#type: &'a str,
            text: String,
        }
        #[derive(Serialize)]
        struct Meta<'a> {
            #[serde(rename = "mcp-satellite/error")]
            error: &'a Trouble,
        }
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Failed<'a> {
            content: [Content<'a>; 1],
            is_error: bool,
            #[serde(rename = "_meta")]
            meta: Meta<'a>,
        }
        let text = match &self.next_step {
            Some(next_step) => format!("{}. {next_step}", self.message.trim_end_matches('.')),
            None => self.message.clone(),
        };
        written(&Failed { content: [Content { r#type: "text", text }], is_error: true, meta: Meta { error: self } })
    }
}

/// What there is to be done about a server that takes no calls.
fn after_status(status: Status, label: &str, view: &InstanceView) -> String {
    match status {
        Status::AwaitingUserConfig => {
            format!("Ask the user to give {} in the configuration of `{label}`.", view.spec.missing.join(", "))
        }
        Status::RequiresReauth => {
            format!("Ask the user for new credentials of `{label}`, then call reconnect_server with that name.")
        }
        Status::PermanentlyFailed => {
            format!("Call reconnect_server with name `{label}` to start it again, best when the cause is mended.")
        }
        Status::Offline if view.want == Want::Stopped => {
            format!("A person has stopped it; `satellite start {}` starts it.", view.spec.name)
        }
        Status::Offline | Status::Error => {
            format!("Call again later, or call reconnect_server with name `{label}`.")
        }
        Status::Provisioning
        | Status::CommandReceived
        | Status::Connecting
        | Status::DiscoveringTools
        | Status::SyncingTools
        | Status::Restarting
        | Status::Online => "Call again in a few seconds.".to_owned(),
    }
}
