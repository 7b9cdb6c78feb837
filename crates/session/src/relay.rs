//! Messages between a server and the clients of its host: notifications and requests of the server, and notifications
//! and responses of clients.
//!
//! Messages that a server sends before a response reach the audience before the caller gets that response. Progress is
//! attributed by its token, other messages by their stream or by `origin`.

use std::time::Instant;

use bytestring::ByteString;
use mcp_satellite_model::exit::CallError;
use mcp_satellite_protocol::era::Era;
use mcp_satellite_protocol::error_code::INTERNAL_ERROR;
use mcp_satellite_protocol::method;
use mcp_satellite_protocol::rpc::{MessageKind, MessageView, RpcMessage, join_parts, member};
use serde_json::value::RawValue;

use crate::call::SessionCommand;
use crate::interface::{MessageOutcome, Outlet, SessionHost};
use crate::origin::{self, MessageCause};
use crate::pending::{PendingPurpose, PendingRequest};
use crate::session::SessionCore;
use crate::state::{AnswerRoute, OpenQuestions, QUESTIONS_MAX};

impl<O: Outlet, H: SessionHost> SessionCore<O, H> {
    /// Returns the call or client on whose behalf the server sends a message. `of` is the request on whose stream it
    /// arrived, if known.
    fn message_cause(&self, of: Option<u64>) -> MessageCause {
        let origin = |pending: &PendingRequest| match &pending.purpose {
            PendingPurpose::Caller { client_call, .. } => {
                Some(client_call.as_ref().map(|client_call| client_call.origin))
            }
            PendingPurpose::Handshake
            | PendingPurpose::List
            | PendingPurpose::Check
            | PendingPurpose::Resume
            | PendingPurpose::Listen
            | PendingPurpose::Discover => None,
        };
        let of = match of.map(|id| self.calls.pending.get(&id).map(|pending| &pending.purpose)) {
            None => None,
            Some(Some(PendingPurpose::Caller { client_call, .. })) => {
                Some(client_call.as_ref().map(|client_call| client_call.origin))
            }
            // The stream belongs to one of the satellite's own requests.
            Some(Some(
                PendingPurpose::Handshake
                | PendingPurpose::List
                | PendingPurpose::Check
                | PendingPurpose::Resume
                | PendingPurpose::Listen
                | PendingPurpose::Discover,
            )) => {
                return MessageCause::NoCall;
            }
            // The call is over, so the message belongs to no call in flight.
            Some(None) => Some(None),
        };
        origin::message_cause(of, self.calls.pending.values().filter_map(origin))
    }

    pub(crate) fn forward_notification(&self, view: &MessageView<'_>, text: &ByteString, of: Option<u64>) {
        self.host.on_notification(self.message_cause(of), view.to_message(text));
    }

    pub(crate) fn on_server_request(
        &mut self,
        view: &MessageView<'_>,
        text: &ByteString,
        of: Option<u64>,
    ) -> MessageOutcome {
        if self.outlet.is_flooded() {
            return MessageOutcome::Flooded;
        }
        let Some(id) = view.id else { return MessageOutcome::Nothing };
        if view.method.as_deref() == Some(method::PING) {
            self.outlet.respond(&[r#"{"jsonrpc":"2.0","id":"#, id.get(), r#","result":{}}"#]);
        } else if self.questions.count() >= QUESTIONS_MAX {
            self.send_error(id.get(), INTERNAL_ERROR, "too many requests of the server are not answered yet");
        } else {
            let cause = self.message_cause(of);
            let number = self.questions.open(AnswerRoute::Request(id.get().into()), cause);
            self.host.on_request(cause, number, view.to_message(text));
        }
        MessageOutcome::Nothing
    }

    pub(crate) fn on_cancelled(&mut self, view: &MessageView<'_>, text: &ByteString, now: Instant) {
        if self.on_stream_cancelled(view, now) {
            return;
        }
        let Some(id) = view.cancelled_id.map(RawValue::get) else { return };
        let is_it = |open: &AnswerRoute| matches!(open, AnswerRoute::Request(its) if **its == *id);
        let found = self.questions.open.iter().find_map(|(number, (open, _))| is_it(open).then_some(*number));
        let Some(number) = found else { return };
        self.questions.close(number);
        self.host.on_request_withdrawn(number, view.to_message(text));
    }

    /// Forwards progress under the client's own token, and extends the deadline of the call.
    pub(crate) fn on_progress(&mut self, view: &MessageView<'_>, text: &ByteString, now: Instant) {
        // A token that is not one of our ids belongs to none of our calls.
        let Some(id) = view.token.and_then(|token| token.get().parse().ok()) else { return };
        self.calls.extend(id, now, self.spec.policy.session.request_timeout_max);
        let Some(PendingRequest { purpose: PendingPurpose::Caller { client_call: Some(client_call), .. }, .. }) =
            self.calls.pending.get(&id)
        else {
            return;
        };
        if let Some(token) = &client_call.token
            && let Ok(message) = RpcMessage::parse(join_parts(&view.to_message(text).with_token(token)))
        {
            self.host.on_progress(client_call.origin, message);
        }
    }

    pub(crate) fn extend_for_open_question(&mut self, id: u64, now: Instant) -> bool {
        // While a client works on a request that the server made for this call, the call gets more time, up to the cap.
        let Some(PendingRequest { purpose: PendingPurpose::Caller { client_call: Some(client_call), .. }, .. }) =
            self.calls.pending.get(&id)
        else {
            return false;
        };
        if !self.questions.has_question_for(client_call.origin) {
            return false;
        }
        self.calls.extend(id, now, self.spec.policy.session.request_timeout_max);
        self.calls.pending.get(&id).is_some_and(|pending| pending.deadline > now)
    }

    pub(crate) fn on_client_command(&mut self, command: SessionCommand, now: Instant) {
        match command {
            SessionCommand::Notify { message, permit: place } => {
                self.gate.record_activity(now);
                // Clients' notifications are meaningful only to a server with sessions.
                if self.era == Era::Stateless {
                    return drop(place);
                }
                if self.outlet.has_room() {
                    self.outlet.notify(&[message.text()]);
                } else {
                    // No response is awaited, and unread notifications must not fill our memory.
                    let instance = &self.spec.name;
                    tracing::debug!(%instance, "dropped a notification: the server does not read its input");
                }
                drop(place);
            }
            SessionCommand::Answer { question, message } => match self.questions.close(question) {
                Some(AnswerRoute::Request(id)) => self.outlet.respond(&message.with_id(&id)),
                Some(AnswerRoute::Input(input)) => {
                    let answer = match (message.kind(), message.outcome()) {
                        (MessageKind::Result, Some(result)) => Ok(result),
                        (_, error) => Err(input_error(error)),
                    };
                    self.on_input(input, answer);
                }
                None => {}
            },
            SessionCommand::Decline { question, code, why } => match self.questions.close(question) {
                Some(AnswerRoute::Request(id)) => self.send_error(&id, code, &why),
                Some(AnswerRoute::Input(input)) => {
                    let message = format!("the server's request for input failed: {why}");
                    self.on_input(input, Err(CallError::Server { code, message, data: None }));
                }
                None => {}
            },
            SessionCommand::NoRoots { question } => match self.questions.close(question) {
                Some(AnswerRoute::Request(id)) => {
                    self.outlet.respond(&[r#"{"jsonrpc":"2.0","id":"#, &id, r#","result":{"roots":[]}}"#]);
                }
                Some(AnswerRoute::Input(input)) => self.on_input(input, Ok(r#"{"roots":[]}"#)),
                None => {}
            },
            SessionCommand::Request(_)
            | SessionCommand::Cancel { .. }
            | SessionCommand::Discover(_)
            | SessionCommand::ListCalls { .. } => {
                self.on_command(command, now);
            }
        }
    }

    fn send_error(&mut self, id: &str, code: i64, why: &str) {
        let (code, why) = (code.to_string(), serde_json::Value::from(why).to_string());
        let parts = [r#"{"jsonrpc":"2.0","id":"#, id, r#","error":{"code":"#, &code, r#","message":"#, &why, "}}"];
        self.outlet.respond(&parts);
    }

    pub(crate) fn end_audience(&mut self) {
        self.questions = OpenQuestions::default();
        self.host.on_session_ended();
    }
}

fn input_error(error: Option<&str>) -> CallError {
    let field = |name| member(error?, name);
    let code = field("code").and_then(|code| code.parse().ok()).unwrap_or(INTERNAL_ERROR);
    let why = field("message").and_then(|message| serde_json::from_str::<String>(message).ok());
    let why = why.unwrap_or_else(|| "the client answered with an error".to_owned());
    let message = format!("the server's request for input failed: {why}");
    CallError::Server { code, message, data: field("data").map(str::to_owned) }
}
