//! Requests of a session: sent in order as the outlet has room, sent again, and cancelled.

use std::time::Instant;

use mcp_satellite_protocol::era::Era;
use mcp_satellite_protocol::header::RequestHeaders;
use mcp_satellite_protocol::rpc::RpcMessage;
use mcp_satellite_protocol::trace::TraceParent;
use serde_json::value::RawValue;

use crate::call::{CallerRequest, ClientRelay, OutboundRequest};
use crate::envelope::{self, RequestIdentity, RequestMeta};
use crate::interface::{Outlet, OwnRequest, RequestPhase, SessionHost};
use crate::pending::{PendingPurpose, PendingRequest, SentRequest};
use crate::session::SessionCore;

impl<O: Outlet, H: SessionHost> SessionCore<O, H> {
    /// Sends the waiting requests for which the outlet has room.
    pub fn send_queued(&mut self) {
        // A queued request's deadline keeps running: a server that does not read must not block its callers.
        while self.outlet.has_room()
            && let Some((id, wanted)) = self.calls.unsent.pop_front()
        {
            let position = self.outlet.position();
            let Some(pending) = self.calls.pending.get_mut(&id) else { continue };
            pending.output_offset = Some(position);
            pending.attempts += 1;
            let number = id.to_string();
            let is_of_it = matches!(wanted, OutboundRequest::Relay(ClientRelay { era: Era::Stateless, .. }));
            match &wanted {
                _ if self.era == Era::Stateless || is_of_it => {
                    let rounds = pending.rounds.as_ref().map(|rounds| rounds.input_members());
                    self.send_stateless(id, &wanted, &rounds.unwrap_or_default());
                }
                OutboundRequest::Relay(ClientRelay { message, trace, .. }) => {
                    relay_request(&mut self.outlet, id, None, message, trace.as_ref());
                }
                OutboundRequest::Request(CallerRequest::Tool { name, arguments, repeatable: _, trace }) => {
                    let name = serde_json::Value::from(name.as_str()).to_string();
                    let trace = trace.map(|trace| format!(r#","traceparent":"{trace}""#)).unwrap_or_default();
                    let arguments = arguments.as_deref().map_or("{}", RawValue::get);
                    let parts = [
                        r#"{"jsonrpc":"2.0","id":"#,
                        &number,
                        r#","method":"tools/call","params":{"name":"#,
                        &name,
                        r#","arguments":"#,
                        arguments,
                        r#","_meta":{"progressToken":"#,
                        &number,
                        &trace,
                        "}}}",
                    ];
                    self.outlet.request(id, RequestPhase::InSession, None, &parts);
                }
                OutboundRequest::Request(CallerRequest::Method { method, params }) => {
                    let params = params.as_deref().map(RawValue::get);
                    put_request(&mut self.outlet, id, RequestPhase::InSession, None, method, params);
                }
            }
            // Remote calls may be sent again for a retry, stateless calls with the requested input. The list of
            // unanswered calls names the others, too.
            let is_repeatable = O::REPEATS || self.era == Era::Stateless;
            if let Some(pending) = self.calls.pending.get_mut(&id) {
                pending.sent = Some(if is_repeatable {
                    SentRequest::Repeatable(wanted)
                } else {
                    SentRequest::Final(wanted.without_content())
                });
            }
        }
    }

    pub(crate) fn send_stateless(&mut self, id: u64, wanted: &OutboundRequest, input: &[(&'static str, String)]) {
        // The request contains all context. `input` contains the answers to the server's requests for input.
        let number = id.to_string();
        let input: Vec<(&str, &str)> = input.iter().map(|(name, value)| (*name, &**value)).collect();
        match wanted {
            OutboundRequest::Relay(ClientRelay { message, era: Era::Stateless, trace, .. }) => {
                let routing = self.routing_headers(message.method().unwrap_or_default(), message.params());
                relay_request(&mut self.outlet, id, routing, message, trace.as_ref());
            }
            OutboundRequest::Relay(ClientRelay { message, client, trace, .. }) => {
                let token = message.token().map(|_| &*number);
                let identity = RequestIdentity::Client(client.as_deref());
                let meta = RequestMeta { identity, token, level: self.log_level(), input: &input, trace: *trace };
                let params = meta.wrap_params(message.params());
                let routing = self.routing_headers(message.method().unwrap_or_default(), Some(&params));
                self.outlet.request(
                    id,
                    RequestPhase::InSession,
                    routing,
                    &[&message.with_id_and_params(&number, &params)],
                );
            }
            OutboundRequest::Request(request) => {
                let (method, params) = envelope::method_and_params(request);
                let (token, trace) = match request {
                    CallerRequest::Tool { trace, .. } => (Some(&*number), *trace),
                    CallerRequest::Method { .. } => (None, None),
                };
                let identity = RequestIdentity::Caller;
                let envelope = RequestMeta { identity, token, level: None, input: &input, trace };
                let params = envelope.wrap_params(params.as_deref());
                let routing = self.routing_headers(method, Some(&params));
                put_request(&mut self.outlet, id, RequestPhase::InSession, routing, method, Some(&params));
            }
        }
    }

    pub(crate) fn routing_headers(&self, method: &str, params: Option<&str>) -> Option<Box<RequestHeaders>> {
        O::REPEATS.then(|| Box::new(envelope::routing_headers(method, params, |tool| self.marked_params(tool))))
    }

    /// Sends a call again, unless it was cancelled meanwhile. The request gets a new id, so that a late response or late
    /// progress is not taken for one of this attempt.
    pub fn resend(&mut self, id: u64) {
        let sent = self.calls.pending.get_mut(&id).map(|pending| &mut pending.sent);
        let is_repeatable = |sent: &mut SentRequest| matches!(sent, SentRequest::Repeatable(_));
        let Some(SentRequest::Repeatable(request)) = sent.and_then(|sent| sent.take_if(is_repeatable)) else { return };
        let Some(pending) = self.calls.remove(id) else { return };
        let id = self.gate.draw_id();
        self.calls.insert(id, pending);
        self.calls.unsent.push_back((id, request));
        self.send_queued();
    }

    /// Sends a request of the satellite and returns its id.
    pub fn send_own_request(
        &mut self,
        method: &str,
        params: Option<&str>,
        purpose: PendingPurpose,
        deadline: Instant,
    ) -> u64 {
        let id = self.gate.draw_id();
        let starts_at = Some(self.outlet.position());
        // Health checks would hide the other requests of a quiet server, and a stream lasts as long as its session.
        let is_observed = !matches!(purpose, PendingPurpose::Check | PendingPurpose::Resume | PendingPurpose::Listen);
        let version = self.gate.version();
        let span =
            is_observed.then(|| self.host.observe(OwnRequest { id, method, spec: &self.spec, version })).flatten();
        let trace = span.as_ref().and_then(|span| span.trace());
        let pending =
            PendingRequest { output_offset: starts_at, attempts: 1, span, ..PendingRequest::new(purpose, deadline) };
        let of = if matches!(pending.purpose, PendingPurpose::Handshake) {
            RequestPhase::Handshake
        } else {
            RequestPhase::InSession
        };
        if self.era == Era::Stateless || pending.is_sessionless() {
            let params = RequestMeta { trace, ..RequestMeta::new(RequestIdentity::Satellite) }.wrap_params(params);
            let routing = self.routing_headers(method, Some(&params));
            put_request(&mut self.outlet, id, of, routing, method, Some(&params));
        } else {
            let traced = trace.map(|trace| envelope::params_with_trace(params, &trace));
            put_request(&mut self.outlet, id, of, None, method, traced.as_deref().or(params));
        }
        self.calls.insert(id, pending);
        id
    }

    pub(crate) fn cancel(&mut self, id: u64, pending: &PendingRequest, reason: &str) {
        let number = id.to_string();
        let words = [
            r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"#,
            &number,
            r#","reason":""#,
            reason,
            r#""}}"#,
        ];
        self.cancel_with(id, pending, &words);
    }

    pub(crate) fn cancel_with(&mut self, id: u64, pending: &PendingRequest, words: &[&str]) {
        if !pending.was_sent() {
            return self.calls.unsent.retain(|(waiting, _)| *waiting != id);
        }
        self.outlet.abandon(id);
        // Over HTTP the end of the exchange cancels a stateless request; no notification is needed.
        if !(O::REPEATS && (self.era == Era::Stateless || pending.is_sessionless())) {
            self.outlet.notify(words);
        }
    }
}

fn relay_request(
    outlet: &mut impl Outlet,
    id: u64,
    routing: Option<Box<RequestHeaders>>,
    message: &RpcMessage,
    trace: Option<&TraceParent>,
) {
    let number = id.to_string();
    match trace.and_then(|trace| message.place_trace(trace)) {
        Some(placed) => {
            let parts = message.with_id_token_and_trace(&number, &number, &placed);
            outlet.request(id, RequestPhase::InSession, routing, &parts);
        }
        None => {
            outlet.request(id, RequestPhase::InSession, routing, &message.with_id_and_token(&number, &number));
        }
    }
}

fn put_request(
    outlet: &mut impl Outlet,
    id: u64,
    of: RequestPhase,
    routing: Option<Box<RequestHeaders>>,
    method: &str,
    params: Option<&str>,
) {
    let method = serde_json::Value::from(method).to_string();
    let id_text = id.to_string();
    let (before, params) = params.map_or(("", ""), |params| (r#","params":"#, params));
    let parts = [r#"{"jsonrpc":"2.0","id":"#, &id_text, r#","method":"#, &method, before, params, "}"];
    outlet.request(id, of, routing, &parts);
}
