//! What goes through a session between a server and the clients of its host: what the server says by itself, what it asks,
//! and what clients say to it.

use std::collections::BTreeMap;

use bytestring::ByteString;
use serde_json::value::RawValue;
use tokio::time::Instant;

use super::pending::{Pending, Purpose};
use super::{Conversation, Heard, INTERNAL_ERROR, Outlet};
use crate::audience::{Cause, Origin, Question};
use crate::calls::Command;
use crate::rpc::{Message, View, joined};
use crate::rules::origin;

/// A server that asks more than this at once is told that nobody answers.
const QUESTIONS_MAX: usize = 64;

/// What the server has asked and has no answer to.
#[derive(Default)]
pub(super) struct Questions {
    open: BTreeMap<u64, Open>,
    last: u64,
}

struct Open {
    /// The server's own id, as sent.
    id: Box<str>,
    cause: Cause,
}

impl Questions {
    /// Whether somebody may be thinking about an answer on behalf of this call.
    fn are_asked_of(&self, origin: Origin) -> bool {
        self.open.values().any(|open| match open.cause {
            Cause::Call(of) => of == origin,
            Cause::Client(of) => of == origin.client,
            Cause::Nobody | Cause::Stranger | Cause::Several(_) => false,
        })
    }
}

impl<O: Outlet> Conversation<O> {
    /// On whose behalf the server speaks. `of` is our request on whose stream it does, if it says so.
    fn cause(&self, of: Option<u64>) -> Cause {
        let origin = |pending: &Pending| match &pending.purpose {
            Purpose::Caller { behalf, .. } => Some(behalf.as_ref().map(|behalf| behalf.origin)),
            Purpose::Handshake | Purpose::List | Purpose::Check => None,
        };
        let of = match of.map(|id| self.calls.pending.get(&id).map(|pending| &pending.purpose)) {
            None => None,
            Some(Some(Purpose::Caller { behalf, .. })) => Some(behalf.as_ref().map(|behalf| behalf.origin)),
            // It is said on the stream of something that we have asked by ourselves.
            Some(Some(Purpose::Handshake | Purpose::List | Purpose::Check)) => return Cause::Nobody,
            // Of a call that is over. It is no other's.
            Some(None) => Some(None),
        };
        origin::cause(of, self.calls.pending.values().filter_map(origin))
    }

    /// The server says something that is no answer and no progress.
    pub(super) fn hear(&self, said: &View<'_>, text: &ByteString, of: Option<u64>) {
        self.stage.audience.heard(&self.stage.source, self.cause(of), said.keep(text));
    }

    pub(super) fn on_server_request(&mut self, asked: &View<'_>, text: &ByteString, of: Option<u64>) -> Heard {
        if self.outlet.is_flooded() {
            return Heard::Flooded;
        }
        let Some(id) = asked.id else { return Heard::Nothing };
        if asked.method.as_deref() == Some("ping") {
            self.outlet.respond(&[r#"{"jsonrpc":"2.0","id":"#, id.get(), r#","result":{}}"#]);
        } else if self.questions.open.len() >= QUESTIONS_MAX {
            self.refuse(id.get(), INTERNAL_ERROR, "too many requests of the server are not answered yet");
        } else {
            self.questions.last += 1;
            let (number, cause) = (self.questions.last, self.cause(of));
            self.questions.open.insert(number, Open { id: id.get().into(), cause });
            let question = Question::new(number, asked.keep(text), self.port.answers.clone());
            self.stage.audience.asked(&self.stage.source, cause, question);
        }
        Heard::Nothing
    }

    /// The server does not want an answer any more.
    pub(super) fn on_cancelled(&mut self, said: &View<'_>, text: &ByteString) {
        let Some(id) = said.of.map(RawValue::get) else { return };
        let Some(number) = self.questions.open.iter().find_map(|(number, open)| (*open.id == *id).then_some(*number))
        else {
            return;
        };
        self.questions.open.remove(&number);
        self.stage.audience.withdrawn(&self.stage.source, number, said.keep(text));
    }

    /// Progress of a call of ours, under the number that it was sent with.
    pub(super) fn on_progress(&mut self, said: &View<'_>, text: &ByteString, now: Instant) {
        // A token that is no number of ours belongs to no call of ours.
        let Some(id) = said.token.and_then(|token| token.get().parse().ok()) else { return };
        self.calls.extend(id, now, self.spec.policy.session.request_timeout_max);
        let Some(Pending { purpose: Purpose::Caller { behalf: Some(behalf), .. }, .. }) = self.calls.pending.get(&id)
        else {
            return;
        };
        if let Some(token) = &behalf.token
            && let Ok(message) = Message::read(joined(&said.keep(text).told_as(token)))
        {
            self.stage.audience.progress(behalf.origin, message);
        }
    }

    /// A call whose time is over while somebody thinks about what its server has asked on its behalf: it gets as much again, up
    /// to the cap. Whether it did.
    pub(super) fn waits_for_a_person(&mut self, id: u64, now: Instant) -> bool {
        let Some(Pending { purpose: Purpose::Caller { behalf: Some(behalf), .. }, .. }) = self.calls.pending.get(&id)
        else {
            return false;
        };
        if !self.questions.are_asked_of(behalf.origin) {
            return false;
        }
        self.calls.extend(id, now, self.spec.policy.session.request_timeout_max);
        self.calls.pending.get(&id).is_some_and(|pending| pending.deadline > now)
    }

    /// What clients say: answers, and what wants none.
    pub(super) fn on_client(&mut self, command: Command) {
        match command {
            Command::Tell { message, place } => {
                self.port.gate.active(Instant::now());
                if self.outlet.has_room() {
                    self.outlet.tell(&[message.text()]);
                } else {
                    // Nobody waits for it, and what a server does not read must not fill our memory.
                    tracing::debug!(installation_name = %self.spec.name, "the server reads nothing; a notification is dropped");
                }
                drop(place);
            }
            Command::Answer { question, message } => {
                if let Some(open) = self.questions.open.remove(&question) {
                    self.outlet.respond(&message.answering(&open.id));
                }
            }
            Command::Decline { question, code, why } => {
                if let Some(open) = self.questions.open.remove(&question) {
                    self.refuse(&open.id, code, &why);
                }
            }
            Command::NoRoots { question } => {
                if let Some(open) = self.questions.open.remove(&question) {
                    self.outlet.respond(&[r#"{"jsonrpc":"2.0","id":"#, &open.id, r#","result":{"roots":[]}}"#]);
                }
            }
            Command::Request(_) | Command::Cancel { .. } => self.on_command(command),
        }
    }

    fn refuse(&mut self, id: &str, code: i64, why: &str) {
        let (code, why) = (code.to_string(), serde_json::Value::from(why).to_string());
        let parts = [r#"{"jsonrpc":"2.0","id":"#, id, r#","error":{"code":"#, &code, r#","message":"#, &why, "}}"];
        self.outlet.respond(&parts);
    }

    /// The session is over, and all that was asked in it.
    pub(super) fn leaves_the_stage(&mut self) {
        self.questions = Questions::default();
        self.stage.audience.ended(&self.stage.source);
    }
}
