//! Input requests in the stateless era. A result may ask for input: each of its requests goes to the client of the
//! call, and then the call is sent again with the answers. The call stays open meanwhile, under the id of its last
//! attempt.

use bytes::Bytes;
use mcp_satellite_model::exit::CallError;
use mcp_satellite_protocol::error_code::INTERNAL_ERROR;
use mcp_satellite_protocol::method;
use mcp_satellite_protocol::rpc::{RpcMessage, member, members};
use serde_json::value::RawValue;

use crate::era::INPUT_ROUNDS_MAX;
use crate::interface::{Outlet, SessionHost};
use crate::origin::MessageCause;
use crate::pending::{PendingPurpose, PendingRequest};
use crate::session::SessionCore;
use crate::state::{AnswerRoute, InputQuestion, QUESTIONS_MAX};

// Methods that a server may use in an input request.
const INPUTS: [&str; 3] = [method::CREATE_MESSAGE, method::ELICIT, method::ROOTS_LIST];

fn invalid_input_error(why: &str) -> CallError {
    CallError::Server { code: INTERNAL_ERROR, message: why.to_owned(), data: None }
}

impl<O: Outlet, H: SessionHost> SessionCore<O, H> {
    pub(crate) fn on_input_required(&mut self, id: u64, mut pending: PendingRequest, result: &RawValue) {
        pending.may_have_reached = true;
        pending.output_offset = None;
        // The next attempt is another request.
        pending.attempts = 0;
        let requests = match self.begin_round(&mut pending, result) {
            Ok(requests) => requests,
            Err(why) => return pending.fail(invalid_input_error(&why)),
        };
        let cause = match &pending.purpose {
            PendingPurpose::Caller { client_call: Some(client_call), .. } => MessageCause::Call(client_call.origin),
            _ => MessageCause::NoClient,
        };
        self.calls.insert(id, pending);
        if requests.is_empty() {
            return self.resend(id);
        }
        for (name, message) in requests {
            let number = self.questions.open(AnswerRoute::Input(InputQuestion { call: id, name }), cause);
            let text = format!(r#"{{"jsonrpc":"2.0","id":{number},{message}}}"#);
            let Ok(message) = RpcMessage::parse(Bytes::from(text)) else { continue };
            self.host.on_request(cause, number, message);
        }
    }

    fn begin_round(&self, pending: &mut PendingRequest, result: &RawValue) -> Result<Vec<(String, String)>, String> {
        // Returns for each request its name and the text after its id.
        let state = member(result.get(), "requestState");
        let requests = member(result.get(), "inputRequests");
        if state.is_none() && requests.is_none() {
            return Err("the server requests input and names neither `inputRequests` nor `requestState`".to_owned());
        }
        let malformed = || "the server requests input in an unknown form".to_owned();
        let requests = requests.map_or(Some(Vec::new()), members).ok_or_else(malformed)?;
        let mut questions = Vec::with_capacity(requests.len());
        for (name, request) in requests {
            let method = member(request, "method").and_then(|method| serde_json::from_str::<String>(method).ok());
            let method = method.filter(|method| INPUTS.contains(&&**method)).ok_or_else(malformed)?;
            let params = member(request, "params").filter(|params| params.starts_with('{'));
            let params = params.map(|params| format!(r#","params":{params}"#)).unwrap_or_default();
            let request = format!(r#""method":"{method}"{params}"#);
            // The client receives it as a request, so it must be valid as one.
            RpcMessage::parse(Bytes::from(format!(r#"{{"jsonrpc":"2.0","id":0,{request}}}"#)))
                .map_err(|_| malformed())?;
            questions.push((name, request));
        }
        if self.questions.count() + questions.len() > QUESTIONS_MAX {
            return Err("too many requests of the server are not answered yet".to_owned());
        }
        let rounds = pending.rounds.get_or_insert_default();
        if rounds.count >= INPUT_ROUNDS_MAX {
            return Err(format!("the server has asked for input more than {INPUT_ROUNDS_MAX} times"));
        }
        rounds.count += 1;
        rounds.state = state.map(str::to_owned);
        rounds.answers.clear();
        rounds.unanswered = questions.len();
        Ok(questions)
    }

    pub(crate) fn on_input(&mut self, InputQuestion { call, name }: InputQuestion, answer: Result<&str, CallError>) {
        // If the client fails to answer, the call fails too.
        let Some(rounds) = self.calls.pending.get_mut(&call).and_then(|pending| pending.rounds.as_mut()) else {
            return;
        };
        match answer {
            Ok(result) => {
                rounds.answers.insert(name, result.to_owned());
                rounds.unanswered -= 1;
                if rounds.unanswered == 0 {
                    self.resend(call);
                }
            }
            Err(error) => {
                let Some(pending) = self.calls.remove(call) else { return };
                self.withdraw_inputs(call);
                pending.fail(error);
            }
        }
    }

    pub(crate) fn withdraw_inputs(&mut self, call: u64) {
        for number in self.questions.numbers_of_call(call) {
            self.questions.close(number);
            let words =
                format!(r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{number}}}}}"#);
            if let Ok(words) = RpcMessage::parse(Bytes::from(words)) {
                self.host.on_request_withdrawn(number, words);
            }
        }
    }
}
