//! Everybody who is connected to an instance, and what of what its server says each of them hears.

use std::sync::Arc;

use mcp_satellite_actors::audience::{Audience, Cause, Origin, Question, Source};
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::rpc::Message;

use super::session::Session;
use super::sessions::Sessions;

/// See the module. Made before the runtime, whose audience it is.
#[derive(Debug)]
pub struct Rooms {
    sessions: Arc<Sessions>,
}

impl Rooms {
    /// Empty ones. Clients are found in `sessions`.
    pub fn new(sessions: Arc<Sessions>) -> Self {
        Self { sessions }
    }

    /// A client is connected to an instance.
    pub(super) fn enter(&self, session: &Arc<Session>, id: &InstanceId) {
        tracing::trace!(session_id = session.public_id(), instance = %id, "a client came in");
    }

    /// It is not any more.
    pub(super) fn leave(&self, session: &Arc<Session>, id: &InstanceId) {
        tracing::trace!(session_id = session.public_id(), instance = %id, "a client left");
    }

    fn of(&self, cause: Cause) -> Option<(Arc<Session>, Option<u64>)> {
        match cause {
            Cause::Call(origin) => Some((self.sessions.get(origin.client)?, Some(origin.call))),
            Cause::Client(client) => Some((self.sessions.get(client)?, None)),
            Cause::Nobody | Cause::Stranger | Cause::Several(_) => None,
        }
    }
}

impl Audience for Rooms {
    fn heard(&self, _of: &Source, cause: Cause, message: Message) {
        if let Some((session, call)) = self.of(cause) {
            session.say(call, &[message.text()]);
        }
    }

    fn progress(&self, origin: Origin, message: Message) {
        if let Some(session) = self.sessions.get(origin.client) {
            session.say(Some(origin.call), &[message.text()]);
        }
    }

    fn asked(&self, of: &Source, cause: Cause, question: Question) {
        let able =
            |session: &Session| session.opening.greeting.answers(question.message().method().unwrap_or_default());
        if let Some((session, call)) = self.of(cause).filter(|(session, _)| able(session)) {
            session.ask(of.clone(), call, question);
        }
    }

    fn withdrawn(&self, of: &Source, question: u64, message: Message) {
        for session in self.sessions.all() {
            session.withdraw(of, question, &message);
        }
    }

    fn began(&self, _of: &Source) {}

    fn ended(&self, of: &Source) {
        for session in self.sessions.all() {
            session.withdraw_all(of);
        }
    }
}
