//! Sessions with stateless servers. The satellite itself answers session requests of clients (`ping`, log level,
//! subscriptions), and it keeps a stream open for the server's notifications. For a server with sessions, it asks on
//! demand whether the server supports the stateless era too.
//!
//! Over HTTP a stateless request to a server with sessions uses the same line but belongs to no session, so its failure
//! says nothing about the session.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use bytestring::ByteString;
use mcp_satellite_model::catalogue::Catalogue;
use mcp_satellite_model::exit::CallError;
use mcp_satellite_model::remote::ServerInfo;
use mcp_satellite_protocol::era::Era;
use mcp_satellite_protocol::error_code::{INTERNAL_ERROR, INVALID_PARAMS, METHOD_NOT_FOUND};
use mcp_satellite_protocol::header_params::{HeaderParam, header_params};
use mcp_satellite_protocol::meta::SUBSCRIPTION_ID;
use mcp_satellite_protocol::method;
use mcp_satellite_protocol::rpc::{MessageView, RpcMessage, member, with_members, without_member};
use serde_json::json;
use serde_json::value::RawValue;

use crate::call::{CallTicket, CallerRequest, ClientRelay, DiscoverRequest, OutboundRequest, TIMEOUT_MAX};
use crate::era;
use crate::handshake::discovered_server;
use crate::interface::{Outlet, SessionHost};
use crate::origin::MessageCause;
use crate::pending::PendingPurpose;
use crate::session::SessionCore;
use crate::state::{EraSupport, NotifiedChanges, StatelessState};

const LEVELS: [&str; 8] = ["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"];

impl<O: Outlet, H: SessionHost> SessionCore<O, H> {
    fn stateless_state(&mut self) -> &mut StatelessState {
        self.stateless.get_or_insert_default()
    }

    pub(crate) fn log_level(&self) -> Option<&str> {
        self.stateless.as_ref()?.log_level.as_deref()
    }

    pub(crate) fn next_listen_at(&self) -> Option<Instant> {
        self.stateless.as_ref()?.stream.retry_at
    }

    // ---- support of the stateless era ----

    pub(crate) fn record_server(&mut self, server: &Arc<ServerInfo>, now: Instant) {
        if server.era == Era::Stateless {
            let offers = serde_json::from_str(server.capabilities.get()).unwrap_or_default();
            let stateless = self.stateless_state();
            (stateless.support, stateless.offers) = (EraSupport::Supported(server.clone()), offers);
        }
        if self.stateless.is_some() {
            for discover in std::mem::take(&mut self.stateless_state().waiting) {
                self.on_discover(discover, now);
            }
        }
    }

    pub(crate) fn on_discover(&mut self, discover: DiscoverRequest, now: Instant) {
        // A pipe has one era, and HTTP+SSE supports only sessions.
        if self.initialized_at.is_some() && self.era == Era::Sessions && !(O::REPEATS && self.may_be_stateless()) {
            self.gate.set_stateless_support(Some(None));
            return discover.answer(Ok(None));
        }
        let is_met = self.initialized_at.is_some();
        let stateless = self.stateless_state();
        match &stateless.support {
            EraSupport::Supported(server) => {
                let server = Some(server.clone());
                self.gate.set_stateless_support(Some(server.clone()));
                return discover.answer(Ok(server));
            }
            EraSupport::Unsupported(until) if until.is_none_or(|until| now < until) => {
                if until.is_none() {
                    self.gate.set_stateless_support(Some(None));
                }
                return discover.answer(Ok(None));
            }
            EraSupport::Unsupported(_) => stateless.support = EraSupport::Unknown,
            EraSupport::Unknown | EraSupport::Pending => {}
        }
        stateless.waiting.push(discover);
        if is_met && matches!(stateless.support, EraSupport::Unknown) {
            stateless.support = EraSupport::Pending;
            let deadline = now + era::DISCOVER_WAIT_MAX;
            self.send_own_request(Era::Stateless.opening_method(), None, PendingPurpose::Discover, deadline);
        }
    }

    /// Handles the answer to the question whether a server with sessions supports the stateless era too.
    pub fn on_discovered(&mut self, answer: Result<&RawValue, CallError>, now: Instant) {
        // An error of the server counts as an answer.
        let later = now + era::DISCOVER_PAUSE;
        let (known, answer) = match answer {
            Ok(result) => match discovered_server(result) {
                Some(server) => (EraSupport::Supported(server.clone()), Ok(Some(server))),
                None => (EraSupport::Unsupported(None), Ok(None)),
            },
            // Some servers fail on unknown methods or do not respond. It may be chance, so the session asks again
            // later.
            Err(CallError::Server { code: INTERNAL_ERROR, .. } | CallError::TimedOut { .. }) => {
                (EraSupport::Unsupported(Some(later)), Ok(None))
            }
            Err(CallError::Server { .. }) => (EraSupport::Unsupported(None), Ok(None)),
            Err(error) => (EraSupport::Unknown, Err(error)),
        };
        let stateless = self.stateless_state();
        if let EraSupport::Supported(server) = &known {
            stateless.offers = serde_json::from_str(server.capabilities.get()).unwrap_or_default();
        }
        stateless.support = known;
        for discover in std::mem::take(&mut stateless.waiting) {
            discover.answer(answer.clone());
        }
        // Changes made by clients of the stateless era are announced on a stream only, not in the session.
        self.listen(now);
    }

    /// Forgets that a server with sessions supports the stateless era too.
    pub fn forget_era_support(&mut self) {
        // A server with sessions refused a stateless request although it had declared support: it is asked again.
        if let Some(stateless) =
            self.stateless.as_mut().filter(|stateless| matches!(stateless.support, EraSupport::Supported(_)))
        {
            stateless.support = EraSupport::Unknown;
            self.gate.set_stateless_support(None);
        }
    }

    pub(crate) fn on_stateless_refused(&mut self, error: &CallError) {
        if self.era == Era::Sessions && era::is_era_refused(Era::Stateless, error) {
            self.forget_era_support();
        }
    }

    fn is_stateless_supported(&self) -> bool {
        self.stateless.as_ref().is_some_and(|stateless| matches!(stateless.support, EraSupport::Supported(_)))
    }

    // ---- headers ----

    pub(crate) fn update_marked_params(&mut self, catalogue: &Catalogue) {
        if !O::REPEATS {
            return;
        }
        let marked = catalogue.tools.iter().filter_map(|tool| {
            let marked = header_params(tool.raw.get()).ok().filter(|marked| !marked.is_empty())?;
            Some((tool.name.clone(), marked))
        });
        let marked: HashMap<_, _> = marked.collect();
        if !marked.is_empty() || self.stateless.is_some() {
            self.stateless_state().marked_params = marked;
        }
    }

    pub(crate) fn marked_params(&self, tool: &str) -> Vec<HeaderParam> {
        self.stateless.as_ref().and_then(|stateless| stateless.marked_params.get(tool)).cloned().unwrap_or_default()
    }

    // ---- session requests of clients ----

    pub(crate) fn answer_locally(
        &mut self,
        id: u64,
        wanted: &OutboundRequest,
        ticket: CallTicket,
        now: Instant,
    ) -> Option<CallTicket> {
        // These requests concern the session and not the server's work. Any other ticket is returned.
        if self.era == Era::Sessions && !O::REPEATS {
            return Some(ticket);
        }
        let (method, params) = match wanted {
            OutboundRequest::Relay(ClientRelay { message, era: Era::Sessions, .. }) => {
                (message.method().unwrap_or_default(), message.params())
            }
            OutboundRequest::Request(CallerRequest::Method { method, params }) => {
                (&**method, params.as_deref().map(RawValue::get))
            }
            OutboundRequest::Relay(_) | OutboundRequest::Request(CallerRequest::Tool { .. }) => return Some(ticket),
        };
        let param = |name: &str| {
            let value = member(params?, name)?;
            serde_json::from_str::<String>(value).ok()
        };
        if self.era == Era::Sessions {
            // The request goes to the session, and the stream beside it gets the new filter.
            if matches!(method, method::RESOURCES_SUBSCRIBE | method::RESOURCES_UNSUBSCRIBE)
                && let Some(uri) = param("uri")
            {
                self.set_subscription(uri, method == method::RESOURCES_SUBSCRIBE, now);
            }
            return Some(ticket);
        }
        let done = match method {
            method::PING => Ok(()),
            method::SET_LOG_LEVEL => match param("level").filter(|level| LEVELS.contains(&&**level)) {
                Some(level) => {
                    self.stateless_state().log_level = Some(format!("\"{level}\""));
                    Ok(())
                }
                None => Err((INVALID_PARAMS, "`level` is missing or unknown")),
            },
            method::RESOURCES_SUBSCRIBE | method::RESOURCES_UNSUBSCRIBE => match param("uri") {
                None => Err((INVALID_PARAMS, "`uri` is missing")),
                Some(_) if !self.stateless_state().offers.resources.subscribe => {
                    Err((METHOD_NOT_FOUND, "the server does not support subscriptions"))
                }
                Some(uri) => {
                    self.set_subscription(uri, method == method::RESOURCES_SUBSCRIBE, now);
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
        if let Ok(view) = MessageView::parse(&text) {
            ticket.answer(&view, &text, &self.spec.mask);
        }
        None
    }

    fn set_subscription(&mut self, uri: String, wants: bool, now: Instant) {
        let uris = &mut self.stateless_state().subscribed_uris;
        let changed = if wants { uris.insert(uri) } else { uris.remove(&uri) };
        if changed {
            self.listen(now);
        }
    }

    // ---- the stream ----

    pub(crate) fn listen(&mut self, now: Instant) {
        // The new stream replaces the previous one.
        if let Some(stateless) = &mut self.stateless {
            stateless.stream.retry_at = None;
        }
        if !self.is_stateless_supported() || self.initialized_at.is_none() {
            return;
        }
        let stateless = self.stateless_state();
        if stateless.stream.is_unsupported {
            return;
        }
        let NotifiedChanges { tools, resources, prompts } = stateless.offers;
        let mut filter = serde_json::Map::new();
        let lists = [("toolsListChanged", tools), ("resourcesListChanged", resources), ("promptsListChanged", prompts)];
        for (name, _) in lists.iter().filter(|(_, of)| of.list_changed) {
            filter.insert((*name).to_owned(), true.into());
        }
        if stateless.offers.resources.subscribe && !stateless.subscribed_uris.is_empty() {
            filter.insert("resourceSubscriptions".to_owned(), stateless.subscribed_uris.iter().cloned().collect());
        }
        let before = stateless.stream.current.take();
        if filter.is_empty() {
            return self.close_stream(before);
        }
        let earlier = std::mem::replace(&mut stateless.stream.previous, before);
        self.close_stream(earlier);
        let params = json!({ "notifications": filter }).to_string();
        let id = self.send_own_request(method::LISTEN, Some(&params), PendingPurpose::Listen, now + TIMEOUT_MAX);
        self.stateless_state().stream.current = Some(id);
    }

    fn close_stream(&mut self, stream: Option<u64>) {
        if let Some(id) = stream
            && let Some(pending) = self.calls.remove(id)
        {
            self.cancel(id, &pending, "replaced by another stream");
        }
    }

    /// Handles the end of a stream. Returns true if the current one ended or was not opened; another one is scheduled with
    /// backoff unless the server does not know streams (`is_unknown`).
    pub fn on_stream_ended(&mut self, id: u64, is_unknown: bool, now: Instant) -> bool {
        let policy = &self.spec.policy.reconnect;
        let Some(stateless) = &mut self.stateless else { return false };
        let listening = &mut stateless.stream;
        if listening.current != Some(id) {
            listening.previous = listening.previous.filter(|leaving| *leaving != id);
            return false;
        }
        listening.current = None;
        (listening.had_gap, listening.is_unsupported) = (true, is_unknown);
        listening.failures = listening.failures.saturating_add(1);
        if !is_unknown {
            listening.retry_at = Some(now + self.host.reconnect_delay(policy, listening.failures));
        }
        true
    }

    fn is_stream(&self, id: u64) -> bool {
        let Some(stateless) = &self.stateless else { return false };
        [stateless.stream.current, stateless.stream.previous].contains(&Some(id))
    }

    pub(crate) fn on_stream_cancelled(&mut self, view: &MessageView<'_>, now: Instant) -> bool {
        // Over a pipe the server ends a stream with `notifications/cancelled`.
        let id = view.cancelled_id.and_then(|of| of.get().parse().ok());
        let Some(id) = id.filter(|id| self.is_stream(*id)) else { return false };
        self.calls.remove(id);
        self.on_stream_ended(id, false, now);
        true
    }

    pub(crate) fn on_stream_notification(
        &mut self,
        view: &MessageView<'_>,
        text: &ByteString,
        of: Option<u64>,
        now: Instant,
    ) -> bool {
        // Returns false if the message belongs to none of the streams.
        if self.stateless.is_none() {
            return false;
        }
        let meta = view.params.and_then(|params| member(params.get(), "_meta"));
        let named = meta.and_then(|meta| member(meta, SUBSCRIPTION_ID)?.parse().ok());
        let Some(id) = named.or(of).filter(|id| self.is_stream(*id)) else {
            // A stream that an earlier satellite opened may still exist; the present one announces the same changes.
            return named.is_some();
        };
        match view.method.as_deref() {
            Some(method::ACKNOWLEDGED) => self.on_acknowledged(id, now),
            method => {
                if self.is_list_changed(method) {
                    self.lists.schedule_read(now + self.spec.policy.session.list_changed_debounce);
                }
                // The subscription id is ours and means nothing to clients.
                let message = view.to_message(text);
                let stripped = meta.zip(view.params).and_then(|(meta, params)| {
                    let meta = without_member(meta, SUBSCRIPTION_ID);
                    let params = match &*meta {
                        "{}" => without_member(params.get(), "_meta"),
                        meta => with_members(params.get(), &[("_meta", meta)]),
                    };
                    RpcMessage::parse(message.with_params(&params).into()).ok()
                });
                self.host.on_notification(MessageCause::NoCall, stripped.unwrap_or(message));
            }
        }
        true
    }

    fn on_acknowledged(&mut self, id: u64, now: Instant) {
        // Changes between the read of the lists and this confirmation were not announced.
        let is_read = self.lists.reads_by_itself && self.lists.known;
        let listening = &mut self.stateless_state().stream;
        if listening.current != Some(id) {
            return;
        }
        listening.failures = 0;
        let is_first = !std::mem::replace(&mut listening.was_confirmed, true);
        let missed = std::mem::take(&mut listening.had_gap) || (is_first && is_read);
        let leaving = listening.previous.take();
        self.close_stream(leaving);
        if missed {
            self.lists.schedule_read(now);
        }
    }
}
