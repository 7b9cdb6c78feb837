//! Where the clients are: who hears what a server says by itself, and who answers what it asks. The session of a run
//! knows which client has which call in flight; who that client is, and whether it can answer, only its host knows.

use std::sync::Arc;

use tokio::sync::mpsc;

use crate::calls::Command;
use crate::model::ids::{InstanceId, Run};
use crate::rpc::Message;
use crate::tasks::guarded;

/// Who has made a call: numbers of the host, neither of them ever used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Origin {
    /// The client.
    pub client: u64,
    /// The call.
    pub call: u64,
}

/// On whose behalf a server speaks, as far as can be known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// It belongs to this call.
    Call(Origin),
    /// To one of several calls of this client.
    Client(u64),
    /// No call is in flight.
    Nobody,
    /// Calls are in flight that no client of the host has made.
    Stranger,
    /// Calls of so many clients are in flight, and the server does not say which it means.
    Several(usize),
}

/// The host's side. All of it is called from the task of a session: it takes what it is given and never waits. `ended` is
/// called exactly once for each session, also where the session panicked or was aborted, and also where it never began.
pub trait Audience: Send + Sync + 'static {
    /// The server says something; progress comes by [`Audience::progress`].
    fn heard(&self, of: &Source, cause: Cause, message: Message);
    /// Progress of a call whose client has asked for it, under the client's own token.
    fn progress(&self, origin: Origin, message: Message);
    /// The server asks. A question that is dropped is declined.
    fn asked(&self, of: &Source, cause: Cause, question: Question);
    /// The server does not want an answer any more; the message is its own.
    fn withdrawn(&self, of: &Source, question: u64, message: Message);
    /// A session begins: what the last one was told, of levels and subscriptions, this one does not know.
    fn began(&self, of: &Source);
    /// It is over, and its questions with it.
    fn ended(&self, of: &Source);
}

/// One run of one instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// The instance.
    pub id: InstanceId,
    /// The run.
    pub run: Run,
}

/// No client is attached: servers are told so.
#[derive(Debug, Default)]
pub struct Unattended;

impl Audience for Unattended {
    fn heard(&self, _of: &Source, _cause: Cause, _message: Message) {}

    fn progress(&self, _origin: Origin, _message: Message) {}

    fn asked(&self, _of: &Source, _cause: Cause, question: Question) {
        question.nobody();
    }

    fn withdrawn(&self, _of: &Source, _question: u64, _message: Message) {}

    fn began(&self, _of: &Source) {}

    fn ended(&self, _of: &Source) {}
}

const METHOD_NOT_FOUND: i64 = -32601;
const INTERNAL_ERROR: i64 = -32603;

/// What a server asks. It is answered exactly once, by construction: dropped unanswered it is declined.
#[derive(Debug)]
pub struct Question {
    number: u64,
    message: Message,
    /// None once it was answered.
    answers: Option<mpsc::UnboundedSender<Box<Command>>>,
}

impl Question {
    pub(crate) fn new(number: u64, message: Message, answers: mpsc::UnboundedSender<Box<Command>>) -> Self {
        Self { number, message, answers: Some(answers) }
    }

    /// Its number in its session.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The whole request, under the server's own id.
    pub fn message(&self) -> &Message {
        &self.message
    }

    /// Passes a result or an error on to the server, under the id that it knows.
    pub fn answer(mut self, message: Message) {
        self.say(Command::Answer { question: self.number, message });
    }

    /// Answers with an error.
    pub fn decline(mut self, code: i64, why: &str) {
        self.say(Command::Decline { question: self.number, code, why: why.to_owned() });
    }

    /// There is nobody who could answer.
    pub fn nobody(mut self) {
        self.say_nobody();
    }

    fn say_nobody(&mut self) {
        let question = self.number;
        match self.message.method() {
            Some("roots/list") => self.say(Command::NoRoots { question }),
            Some("sampling/createMessage" | "elicitation/create") => {
                let why = "no client is attached that could answer".to_owned();
                self.say(Command::Decline { question, code: INTERNAL_ERROR, why });
            }
            _ => self.say(Command::Decline { question, code: METHOD_NOT_FOUND, why: "method not found".to_owned() }),
        }
    }

    fn say(&mut self, command: Command) {
        if let Some(answers) = self.answers.take() {
            // An error says that the session is over, and the server does not wait any more.
            let _ = answers.send(Box::new(command));
        }
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        self.say_nobody();
    }
}

/// The audience of one session. Dropping it reports the end of the session, so that a session that panics or is aborted
/// ends for its audience, too. A panic of the audience does not end the session.
pub(crate) struct Stage {
    audience: Arc<dyn Audience>,
    source: Source,
    has_ended: bool,
}

impl Stage {
    pub(crate) fn new(audience: Arc<dyn Audience>, source: Source) -> Self {
        Self { audience, source, has_ended: false }
    }

    /// See [`Audience::heard`].
    pub(crate) fn heard(&self, cause: Cause, message: Message) {
        guarded("Audience::heard", || self.audience.heard(&self.source, cause, message));
    }

    /// See [`Audience::progress`].
    pub(crate) fn progress(&self, origin: Origin, message: Message) {
        guarded("Audience::progress", || self.audience.progress(origin, message));
    }

    /// See [`Audience::asked`].
    pub(crate) fn asked(&self, cause: Cause, question: Question) {
        guarded("Audience::asked", || self.audience.asked(&self.source, cause, question));
    }

    /// See [`Audience::withdrawn`].
    pub(crate) fn withdrawn(&self, question: u64, message: Message) {
        guarded("Audience::withdrawn", || self.audience.withdrawn(&self.source, question, message));
    }

    /// See [`Audience::began`].
    pub(crate) fn began(&self) {
        guarded("Audience::began", || self.audience.began(&self.source));
    }

    /// Reports the end of the session, once.
    pub(crate) fn end(&mut self) {
        if !std::mem::replace(&mut self.has_ended, true) {
            guarded("Audience::ended", || self.audience.ended(&self.source));
        }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.end();
    }
}
