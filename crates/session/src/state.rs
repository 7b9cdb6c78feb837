//! State of the parts of a session.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use mcp_satellite_model::failure::ExchangeFailure;
use mcp_satellite_model::remote::ServerInfo;
use mcp_satellite_protocol::header_params::HeaderParam;
use mcp_satellite_protocol::rpc::member;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::call::DiscoverRequest;
use crate::lists::OfferedLists;
use crate::origin::{CallOrigin, MessageCause};

/// Progress of the handshake.
///
/// `first_refusal` is that of the era tried first. Over a pipe the first response counts, so a request of that era may
/// still be open: `late_request` is its id, and `second_refusal` that of the current era while it is open.
#[derive(Debug, Default)]
pub(crate) struct HandshakeProgress {
    pub(crate) deadline: Option<Instant>,
    pub(crate) first_refusal: Option<HandshakeRefusal>,
    pub(crate) late_request: Option<u64>,
    pub(crate) second_refusal: Option<HandshakeRefusal>,
}

/// Refusal of a handshake.
#[derive(Debug, Clone)]
pub enum HandshakeRefusal {
    /// Error or invalid answer of the server.
    Rejected(String),
    /// Failed exchange.
    Failed(ExchangeFailure),
}

/// Session of an earlier satellite, from its description.
pub struct ResumedSession {
    pub(crate) server: Arc<ServerInfo>,
    pub(crate) offers: OfferedLists,
    pub(crate) initialized_at: Instant,
}

/// Maximum number of unanswered requests of a server; the session rejects further ones.
pub(crate) const QUESTIONS_MAX: usize = 64;

/// Requests of the server without a response, with the call or client that caused them.
#[derive(Default)]
pub(crate) struct OpenQuestions {
    pub(crate) open: BTreeMap<u64, (AnswerRoute, MessageCause)>,
    last: u64,
}

/// Kind of response: `Request` contains the server's own JSON-RPC id as sent; `Input` is answered by sending the call
/// again.
pub(crate) enum AnswerRoute {
    Request(Box<str>),
    Input(InputQuestion),
}

/// Input request in a result: the id of the call's last attempt, and the server's name for the request.
pub(crate) struct InputQuestion {
    pub(crate) call: u64,
    pub(crate) name: String,
}

impl OpenQuestions {
    pub(crate) fn count(&self) -> usize {
        self.open.len()
    }

    pub(crate) fn open(&mut self, open: AnswerRoute, cause: MessageCause) -> u64 {
        self.last += 1;
        self.open.insert(self.last, (open, cause));
        self.last
    }

    pub(crate) fn close(&mut self, number: u64) -> Option<AnswerRoute> {
        self.open.remove(&number).map(|(open, _)| open)
    }

    pub(crate) fn numbers_of_call(&self, call: u64) -> Vec<u64> {
        let is_its = |open: &AnswerRoute| matches!(open, AnswerRoute::Input(input) if input.call == call);
        self.open.iter().filter(|(_, (open, _))| is_its(open)).map(|(number, _)| *number).collect()
    }

    pub(crate) fn has_question_for(&self, origin: CallOrigin) -> bool {
        self.open.values().any(|(_, cause)| match *cause {
            MessageCause::Call(of) => of == origin,
            MessageCause::Client(of) => of == origin.client,
            MessageCause::NoCall | MessageCause::NoClient | MessageCause::SeveralClients(_) => false,
        })
    }
}

/// Input rounds of one call: the server's `requestState` and the client's results, as sent, by the server's names for
/// its requests.
#[derive(Debug, Default)]
pub(crate) struct InputRounds {
    pub(crate) count: u32,
    pub(crate) state: Option<String>,
    pub(crate) answers: BTreeMap<String, String>,
    pub(crate) unanswered: usize,
}

impl InputRounds {
    pub(crate) fn input_members(&self) -> Vec<(&'static str, String)> {
        let mut input = Vec::new();
        if !self.answers.is_empty() {
            let pair = |(name, answer): (&String, &String)| format!("{}:{answer}", Value::from(name.as_str()));
            let answers: Vec<_> = self.answers.iter().map(pair).collect();
            input.push(("inputResponses", format!("{{{}}}", answers.join(","))));
        }
        input.extend(self.state.iter().map(|state| ("requestState", state.clone())));
        input
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ResultType {
    Complete,
    InputRequired,
    Unknown,
}

pub(crate) fn result_type(result: &RawValue) -> ResultType {
    // Servers of earlier versions send no `resultType`; their results are complete.
    match member(result.get(), "resultType").map(serde_json::from_str::<String>) {
        None => ResultType::Complete,
        Some(Ok(sort)) if sort == "complete" => ResultType::Complete,
        Some(Ok(sort)) if sort == "input_required" => ResultType::InputRequired,
        Some(_) => ResultType::Unknown,
    }
}

/// State kept on behalf of a stateless server; most sessions have none.
///
/// `log_level` is JSON text, and `marked_params` are the parameters that headers repeat, by tool. `support` records whether
/// a server with sessions supports the stateless era too; callers in `waiting` asked for it.
#[derive(Default)]
pub(crate) struct StatelessState {
    pub(crate) support: EraSupport,
    pub(crate) waiting: Vec<DiscoverRequest>,
    pub(crate) offers: NotifiedChanges,
    pub(crate) log_level: Option<String>,
    pub(crate) subscribed_uris: BTreeSet<String>,
    pub(crate) stream: NotificationStream,
    pub(crate) marked_params: HashMap<Box<str>, Vec<HeaderParam>>,
}

#[derive(Default)]
pub(crate) enum EraSupport {
    #[default]
    Unknown,
    Pending,
    // Not supported until this time; for the rest of the session if `None`.
    Unsupported(Option<Instant>),
    Supported(Arc<ServerInfo>),
}

/// Stream of the server's notifications.
///
/// `previous` is the stream with the previous filter, kept until the server confirms the `current` one. `failures` counts
/// ends without a confirmation between. `had_gap` means that there was a time without a stream.
#[derive(Default)]
pub(crate) struct NotificationStream {
    pub(crate) current: Option<u64>,
    pub(crate) previous: Option<u64>,
    pub(crate) retry_at: Option<Instant>,
    pub(crate) failures: u32,
    pub(crate) had_gap: bool,
    pub(crate) was_confirmed: bool,
    pub(crate) is_unsupported: bool,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub(crate) struct NotifiedChanges {
    pub(crate) tools: ChangeSupport,
    pub(crate) resources: ChangeSupport,
    pub(crate) prompts: ChangeSupport,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ChangeSupport {
    pub(crate) list_changed: bool,
    pub(crate) subscribe: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notified_changes_are_read_from_the_capabilities() {
        let read = |text: &str| serde_json::from_str::<NotifiedChanges>(text).unwrap();
        let all = read(r#"{"tools":{"listChanged":true},"resources":{"subscribe":true},"x":1}"#);
        assert!(all.tools.list_changed && !all.tools.subscribe);
        assert!(all.resources.subscribe && !all.resources.list_changed && !all.prompts.list_changed);
    }
}
