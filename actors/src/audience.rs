//! Interface to the clients of a host: they receive notifications of servers and answer their requests. The session of
//! a run knows which client has which call in flight; only the host knows its clients and their capabilities.

use std::sync::Arc;

use mcp_satellite_protocol::error_code::{INTERNAL_ERROR, METHOD_NOT_FOUND};
use mcp_satellite_protocol::method;
use mcp_satellite_protocol::rpc::RpcMessage;
use mcp_satellite_session::SessionCommand;
pub use mcp_satellite_session::{CallOrigin, MessageCause};
use tokio::sync::mpsc;

use crate::model::ids::{InstanceId, RunNumber};
use crate::tasks::catch_panic;

/// Receiver of server messages, implemented by the host. A session calls the methods from its task, so they must not
/// block. `ended` is called exactly once per session, even if the session panics, is aborted or never begins.
pub trait Audience: Send + Sync + 'static {
    /// Handles a notification of a server, except progress.
    fn on_notification(&self, of: &SessionSource, cause: MessageCause, message: RpcMessage);
    /// Handles progress of a call whose client asked for it; the message contains the client's own token.
    fn on_progress(&self, origin: CallOrigin, message: RpcMessage);
    /// Handles a request of a server. A dropped question is declined.
    fn on_request(&self, of: &SessionSource, cause: MessageCause, question: ClientQuestion);
    /// Handles the withdrawal of a question; `message` is the server's notification.
    fn on_request_withdrawn(&self, of: &SessionSource, question: u64, message: RpcMessage);
    /// Handles the start of a session. It has none of the previous session's log level and subscriptions.
    fn on_session_started(&self, of: &SessionSource);
    /// Handles the end of a session and its questions.
    fn on_session_ended(&self, of: &SessionSource);
}

/// Identity of a session: an instance and its run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionSource {
    /// The instance.
    pub id: InstanceId,
    /// Run of the instance.
    pub run: RunNumber,
}

/// Audience without clients: declines every request of a server.
#[derive(Debug, Default)]
pub struct NoAudience;

impl Audience for NoAudience {
    fn on_notification(&self, _of: &SessionSource, _cause: MessageCause, _message: RpcMessage) {}

    fn on_progress(&self, _origin: CallOrigin, _message: RpcMessage) {}

    fn on_request(&self, _of: &SessionSource, _cause: MessageCause, question: ClientQuestion) {
        question.answer_without_client();
    }

    fn on_request_withdrawn(&self, _of: &SessionSource, _question: u64, _message: RpcMessage) {}

    fn on_session_started(&self, _of: &SessionSource) {}

    fn on_session_ended(&self, _of: &SessionSource) {}
}

/// Request of a server to a client. It is answered exactly once: dropping it declines it.
#[derive(Debug)]
pub struct ClientQuestion {
    number: u64,
    message: RpcMessage,
    answers: Option<mpsc::UnboundedSender<Box<SessionCommand>>>,
}

impl ClientQuestion {
    pub(crate) fn new(number: u64, message: RpcMessage, answers: mpsc::UnboundedSender<Box<SessionCommand>>) -> Self {
        Self { number, message, answers: Some(answers) }
    }

    /// Returns the number of the question in its session.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns the whole request, with the server's own id.
    pub fn message(&self) -> &RpcMessage {
        &self.message
    }

    /// Sends a result or an error to the server, under the server's own id.
    pub fn answer(mut self, message: RpcMessage) {
        self.send_command(SessionCommand::Answer { question: self.number, message });
    }

    /// Sends an error to the server.
    pub fn decline(mut self, code: i64, why: &str) {
        self.send_command(SessionCommand::Decline { question: self.number, code, why: why.to_owned() });
    }

    /// Answers that no client is attached: an empty list for `roots/list`, an error for any other method.
    pub fn answer_without_client(mut self) {
        self.send_answer_without_client();
    }

    fn send_answer_without_client(&mut self) {
        let question = self.number;
        match self.message.method() {
            Some(method::ROOTS_LIST) => self.send_command(SessionCommand::NoRoots { question }),
            Some(method::CREATE_MESSAGE | method::ELICIT) => {
                let why = "no client is attached that could answer".to_owned();
                self.send_command(SessionCommand::Decline { question, code: INTERNAL_ERROR, why });
            }
            _ => self.send_command(SessionCommand::Decline {
                question,
                code: METHOD_NOT_FOUND,
                why: "method not found".to_owned(),
            }),
        }
    }

    fn send_command(&mut self, command: SessionCommand) {
        if let Some(answers) = self.answers.take() {
            // The send fails if the session is over; the server then awaits no response.
            let _ = answers.send(Box::new(command));
        }
    }
}

impl Drop for ClientQuestion {
    fn drop(&mut self) {
        self.send_answer_without_client();
    }
}

/// Audience of one session. Dropping it reports the end of the session, so that sessions that panic or are aborted
/// report it too. A panic of the audience does not end the session.
pub(crate) struct AudienceHandle {
    audience: Arc<dyn Audience>,
    source: SessionSource,
    has_ended: bool,
}

impl AudienceHandle {
    pub(crate) fn new(audience: Arc<dyn Audience>, source: SessionSource) -> Self {
        Self { audience, source, has_ended: false }
    }

    pub(crate) fn on_notification(&self, cause: MessageCause, message: RpcMessage) {
        catch_panic("Audience::heard", || self.audience.on_notification(&self.source, cause, message));
    }

    pub(crate) fn on_progress(&self, origin: CallOrigin, message: RpcMessage) {
        catch_panic("Audience::progress", || self.audience.on_progress(origin, message));
    }

    pub(crate) fn on_request(&self, cause: MessageCause, question: ClientQuestion) {
        catch_panic("Audience::asked", || self.audience.on_request(&self.source, cause, question));
    }

    pub(crate) fn on_request_withdrawn(&self, question: u64, message: RpcMessage) {
        catch_panic("Audience::withdrawn", || self.audience.on_request_withdrawn(&self.source, question, message));
    }

    pub(crate) fn on_session_started(&self) {
        catch_panic("Audience::began", || self.audience.on_session_started(&self.source));
    }

    pub(crate) fn end_session(&mut self) {
        if !std::mem::replace(&mut self.has_ended, true) {
            catch_panic("Audience::ended", || self.audience.on_session_ended(&self.source));
        }
    }
}

impl Drop for AudienceHandle {
    fn drop(&mut self) {
        self.end_session();
    }
}
