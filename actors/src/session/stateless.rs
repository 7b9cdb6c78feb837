//! A session with a server that has none: what clients of sessions ask of one is done here, what the server says by itself
//! comes on a stream that is asked for again when it ends, and whether a server with sessions speaks this era as well is
//! asked when somebody wants to know.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use bytestring::ByteString;
use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;
use tokio::time::Instant;

use super::envelope::SUBSCRIPTION;
use super::handshake::introduction;
use super::pending::Purpose;
use super::{Conversation, INTERNAL_ERROR, METHOD_NOT_FOUND, Outlet};
use crate::audience::Cause;
use crate::calls::{Discover, Relay, Request, TIMEOUT_MAX, Ticket, Wanted};
use crate::model::catalogue::Catalogue;
use crate::model::era::Era;
use crate::model::exit::CallError;
use crate::model::remote::ServerInfo;
use crate::rpc::{Message, View, member, with_members, without_member};
use crate::rules::mirror::{self, Mirror};
use crate::rules::{era, restart};

const INVALID_PARAMS: i64 = -32602;
const LEVELS: [&str; 8] = ["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"];

/// What is kept for a server that keeps nothing. Most sessions have none of it.
#[derive(Default)]
pub(super) struct Stateless {
    /// Of a server with sessions: whether it speaks this era, too.
    known: Known,
    waiting: Vec<Discover>,
    offers: Changes,
    /// The level from which on its logs are wanted, as JSON text.
    level: Option<String>,
    /// The resources whose changes are wanted.
    uris: BTreeSet<String>,
    listening: Listening,
    /// Parameters that are repeated in headers, by tool.
    marked: HashMap<Box<str>, Vec<Mirror>>,
}

#[derive(Default)]
enum Known {
    #[default]
    Unasked,
    Asking,
    /// Until then; for as long as the session lasts if that is not said.
    No(Option<Instant>),
    Yes(Arc<ServerInfo>),
}

/// The stream of what the server says by itself.
#[derive(Default)]
struct Listening {
    /// The request that opened it.
    current: Option<u64>,
    /// The one before, with another filter, until the new one is confirmed.
    leaving: Option<u64>,
    again_at: Option<Instant>,
    /// It has ended so often without a confirmation between.
    failures: u32,
    /// What was said while there was none is not known.
    missed: bool,
    /// There was one that was confirmed.
    was_there: bool,
    /// The server has no such thing.
    is_unknown: bool,
}

/// What the server says that it tells.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
struct Changes {
    tools: Change,
    resources: Change,
    prompts: Change,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Change {
    list_changed: bool,
    subscribe: bool,
}

impl<O: Outlet> Conversation<O> {
    fn kept(&mut self) -> &mut Stateless {
        self.stateless.get_or_insert_default()
    }

    pub(super) fn level(&self) -> Option<&str> {
        self.stateless.as_ref()?.level.as_deref()
    }

    pub(super) fn listens_again_at(&self) -> Option<Instant> {
        self.stateless.as_ref()?.listening.again_at
    }

    // ---- whether a server speaks this era ----

    /// The handshake is done.
    pub(super) fn met(&mut self, server: &Arc<ServerInfo>) {
        if server.era == Era::Stateless {
            let offers = serde_json::from_str(server.capabilities.get()).unwrap_or_default();
            let kept = self.kept();
            (kept.known, kept.offers) = (Known::Yes(server.clone()), offers);
        }
        if self.stateless.is_some() {
            for discover in std::mem::take(&mut self.kept().waiting) {
                self.on_discover(discover);
            }
        }
    }

    pub(super) fn on_discover(&mut self, discover: Discover) {
        // A pipe has one era, and the older HTTP+SSE has none but sessions.
        if self.initialized.is_some() && self.era == Era::Sessions && !(O::REPEATS && self.may_be_stateless()) {
            return discover.answer(Ok(None));
        }
        let (is_met, now) = (self.initialized.is_some(), Instant::now());
        let kept = self.kept();
        match &kept.known {
            Known::Yes(server) => return discover.answer(Ok(Some(server.clone()))),
            Known::No(until) if until.is_none_or(|until| now < until) => return discover.answer(Ok(None)),
            Known::No(_) => kept.known = Known::Unasked,
            Known::Unasked | Known::Asking => {}
        }
        kept.waiting.push(discover);
        if is_met && matches!(kept.known, Known::Unasked) {
            kept.known = Known::Asking;
            let deadline = now + era::DISCOVER_WAIT_MAX;
            self.ask(Era::Stateless.opening(), None, Purpose::Discover, deadline);
        }
    }

    /// What came of the question. An error of the server is an answer, too.
    pub(super) fn on_discovered(&mut self, answer: Result<&RawValue, CallError>) {
        let later = Instant::now() + era::DISCOVER_PAUSE;
        let (known, answer) = match answer {
            Ok(result) => match introduction(result) {
                Some(server) => (Known::Yes(server.clone()), Ok(Some(server))),
                None => (Known::No(None), Ok(None)),
            },
            // Some fail at what they do not know, and some leave it unanswered. It may also be chance.
            Err(CallError::Server { code: INTERNAL_ERROR, .. } | CallError::TimedOut { .. }) => {
                (Known::No(Some(later)), Ok(None))
            }
            Err(CallError::Server { .. }) => (Known::No(None), Ok(None)),
            Err(error) => (Known::Unasked, Err(error)),
        };
        let kept = self.kept();
        if let Known::Yes(server) = &known {
            kept.offers = serde_json::from_str(server.capabilities.get()).unwrap_or_default();
        }
        kept.known = known;
        for discover in std::mem::take(&mut kept.waiting) {
            discover.answer(answer.clone());
        }
        // What clients of this era change is told on a stream, and to no session.
        self.listen();
    }

    /// A server with sessions refuses what belongs to none, though it said that it would not: it is asked again.
    pub(super) fn forget_introduction(&mut self) {
        if let Some(kept) = self.stateless.as_mut().filter(|kept| matches!(kept.known, Known::Yes(_))) {
            kept.known = Known::Unasked;
        }
    }

    /// An error of the server to a request of this era that is beside its session.
    pub(super) fn on_refused_alone(&mut self, error: &CallError) {
        if self.era == Era::Sessions && era::refuses_check(Era::Stateless, error) {
            self.forget_introduction();
        }
    }

    /// Whether requests may go to the server without a session.
    fn speaks_this(&self) -> bool {
        self.stateless.as_ref().is_some_and(|kept| matches!(kept.known, Known::Yes(_)))
    }

    // ---- headers ----

    /// The lists have been read: which parameters headers repeat.
    pub(super) fn mark(&mut self, catalogue: &Catalogue) {
        if !O::REPEATS {
            return;
        }
        let marked = catalogue.tools.iter().filter_map(|tool| {
            let marked = mirror::of_tool(tool.raw.get()).ok().filter(|marked| !marked.is_empty())?;
            Some((tool.name.clone(), marked))
        });
        let marked: HashMap<_, _> = marked.collect();
        if !marked.is_empty() || self.stateless.is_some() {
            self.kept().marked = marked;
        }
    }

    pub(super) fn marked(&self, tool: &str) -> Vec<Mirror> {
        self.stateless.as_ref().and_then(|kept| kept.marked.get(tool)).cloned().unwrap_or_default()
    }

    // ---- what clients of sessions ask of one ----

    /// Answers what is asked of a session, and not of what the server does. Gives the ticket back for all else.
    pub(super) fn answer_for_it(&mut self, id: u64, wanted: &Wanted, ticket: Ticket) -> Option<Ticket> {
        if self.era == Era::Sessions && !O::REPEATS {
            return Some(ticket);
        }
        let (method, params) = match wanted {
            Wanted::Relay(Relay { message, era: Era::Sessions, .. }) => {
                (message.method().unwrap_or_default(), message.params())
            }
            Wanted::Request(Request::Method { method, params }) => (&**method, params.as_deref().map(RawValue::get)),
            Wanted::Relay(_) | Wanted::Request(Request::Tool { .. }) => return Some(ticket),
        };
        let param = |name: &str| {
            let value = member(params?, name)?;
            serde_json::from_str::<String>(value).ok()
        };
        if self.era == Era::Sessions {
            // It is asked of the session, and of the stream beside it if there is one.
            if matches!(method, "resources/subscribe" | "resources/unsubscribe")
                && let Some(uri) = param("uri")
            {
                self.wants_news_of(uri, method == "resources/subscribe");
            }
            return Some(ticket);
        }
        let done = match method {
            "ping" => Ok(()),
            "logging/setLevel" => match param("level").filter(|level| LEVELS.contains(&&**level)) {
                Some(level) => {
                    self.kept().level = Some(format!("\"{level}\""));
                    Ok(())
                }
                None => Err((INVALID_PARAMS, "it has no `level` that is known")),
            },
            "resources/subscribe" | "resources/unsubscribe" => match param("uri") {
                None => Err((INVALID_PARAMS, "it has no `uri`")),
                Some(_) if !self.kept().offers.resources.subscribe => {
                    Err((METHOD_NOT_FOUND, "the server has no subscriptions"))
                }
                Some(uri) => {
                    self.wants_news_of(uri, method == "resources/subscribe");
                    Ok(())
                }
            },
            _ => return Some(ticket),
        };
        let text = match done {
            Ok(()) => format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{{}}}}"#),
            Err((code, message)) => {
                json!({"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": message}}).to_string()
            }
        };
        let text = ByteString::from(text);
        if let Ok(view) = View::read(&text) {
            ticket.answer(&view, &text, &self.spec.mask);
        }
        None
    }

    fn wants_news_of(&mut self, uri: String, wants: bool) {
        let uris = &mut self.kept().uris;
        let changed = if wants { uris.insert(uri) } else { uris.remove(&uri) };
        if changed {
            self.listen();
        }
    }

    // ---- the stream ----

    /// Asks for all that the server tells by itself and somebody wants to hear, in the place of what was asked for before.
    pub(super) fn listen(&mut self) {
        if let Some(kept) = &mut self.stateless {
            kept.listening.again_at = None;
        }
        if !self.speaks_this() || self.initialized.is_none() {
            return;
        }
        let kept = self.kept();
        if kept.listening.is_unknown {
            return;
        }
        let Changes { tools, resources, prompts } = kept.offers;
        let mut filter = serde_json::Map::new();
        let lists = [("toolsListChanged", tools), ("resourcesListChanged", resources), ("promptsListChanged", prompts)];
        for (name, _) in lists.iter().filter(|(_, of)| of.list_changed) {
            filter.insert((*name).to_owned(), true.into());
        }
        if kept.offers.resources.subscribe && !kept.uris.is_empty() {
            filter.insert("resourceSubscriptions".to_owned(), kept.uris.iter().cloned().collect());
        }
        let before = kept.listening.current.take();
        if filter.is_empty() {
            return self.leave(before);
        }
        let earlier = std::mem::replace(&mut kept.listening.leaving, before);
        self.leave(earlier);
        let params = json!({ "notifications": filter }).to_string();
        let id = self.ask("subscriptions/listen", Some(&params), Purpose::Listen, Instant::now() + TIMEOUT_MAX);
        self.kept().listening.current = Some(id);
    }

    fn leave(&mut self, stream: Option<u64>) {
        if let Some(id) = stream
            && let Some(pending) = self.calls.remove(id)
        {
            self.cancel(id, &pending, "another stream has its place");
        }
    }

    /// A stream has ended, or was not opened: whether it was the one that is wanted. It is asked for again by and by.
    pub(super) fn on_stream_over(&mut self, id: u64, is_unknown: bool) -> bool {
        let policy = &self.spec.policy.reconnect;
        let Some(kept) = &mut self.stateless else { return false };
        let listening = &mut kept.listening;
        if listening.current != Some(id) {
            listening.leaving = listening.leaving.filter(|leaving| *leaving != id);
            return false;
        }
        listening.current = None;
        (listening.missed, listening.is_unknown) = (true, is_unknown);
        listening.failures = listening.failures.saturating_add(1);
        if !is_unknown {
            let delay = restart::reconnect_delay(policy, listening.failures);
            listening.again_at = Some(Instant::now() + self.dice.spread(delay, policy.jitter_percent));
        }
        true
    }

    fn is_stream(&self, id: u64) -> bool {
        let Some(kept) = &self.stateless else { return false };
        [kept.listening.current, kept.listening.leaving].contains(&Some(id))
    }

    /// The server ends a stream over a pipe: whether it is that what it says.
    pub(super) fn is_end_of_stream(&mut self, said: &View<'_>) -> bool {
        let id = said.of.and_then(|of| of.get().parse().ok());
        let Some(id) = id.filter(|id| self.is_stream(*id)) else { return false };
        self.calls.remove(id);
        self.on_stream_over(id, false);
        true
    }

    /// What the server says on a stream of ours: whether it was that.
    pub(super) fn on_stream(&mut self, said: &View<'_>, text: &ByteString, of: Option<u64>, now: Instant) -> bool {
        if self.stateless.is_none() {
            return false;
        }
        let meta = said.params.and_then(|params| member(params.get(), "_meta"));
        let named = meta.and_then(|meta| member(meta, SUBSCRIPTION)?.parse().ok());
        let Some(id) = named.or(of).filter(|id| self.is_stream(*id)) else { return false };
        match said.method.as_deref() {
            Some("notifications/subscriptions/acknowledged") => self.on_acknowledged(id, now),
            method => {
                if self.is_of_a_list(method) {
                    self.lists.again_by(now + self.spec.policy.session.list_changed_debounce);
                }
                // The number is ours, and says nothing to anybody else.
                let kept = said.keep(text);
                let told = meta.zip(said.params).and_then(|(meta, params)| {
                    let meta = without_member(meta, SUBSCRIPTION);
                    let params = match &*meta {
                        "{}" => without_member(params.get(), "_meta"),
                        meta => with_members(params.get(), &[("_meta", meta)]),
                    };
                    Message::read(kept.told_with(&params).into()).ok()
                });
                self.stage.heard(Cause::Nobody, told.unwrap_or(kept));
            }
        }
        true
    }

    fn on_acknowledged(&mut self, id: u64, now: Instant) {
        // What changed between the reading of the lists and this was told to nobody.
        let is_read = self.discover && self.lists.known;
        let listening = &mut self.kept().listening;
        if listening.current != Some(id) {
            return;
        }
        listening.failures = 0;
        let is_first = !std::mem::replace(&mut listening.was_there, true);
        let missed = std::mem::take(&mut listening.missed) || (is_first && is_read);
        let leaving = listening.leaving.take();
        self.leave(leaving);
        if missed {
            self.lists.again_by(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_server_tells_by_itself_is_read_from_its_capabilities() {
        let read = |text: &str| serde_json::from_str::<Changes>(text).unwrap();
        let all = read(r#"{"tools":{"listChanged":true},"resources":{"subscribe":true},"x":1}"#);
        assert!(all.tools.list_changed && !all.tools.subscribe);
        assert!(all.resources.subscribe && !all.resources.list_changed && !all.prompts.list_changed);
    }
}
