//! A simulated server without sessions: answers `server/discover`, requests input through results, and reports changes
//! on subscription streams.

use std::sync::Arc;

use bytes::{BufMut, BytesMut};
use mcp_satellite_protocol::era::{Era, SESSION_VERSIONS, STATELESS_VERSION};
use mcp_satellite_protocol::error_code::{
    INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND, MISSING_CAPABILITY, UNSUPPORTED_VERSION,
};
use mcp_satellite_protocol::meta::{SERVER_INFO, SUBSCRIPTION_ID};
use mcp_satellite_protocol::method;
use serde_json::json;
use serde_json::value::RawValue;
use tokio::time::Instant;

use super::script::SpokenEras;
use super::server::{SimPhase, SimResponder};
use super::tools;
use super::wire::{self, AskArguments, CallParams, parse, put_result};

#[derive(Default)]
pub(super) struct SimStatelessState {
    // Era of the first request.
    era: Option<Era>,
    // Request ids of the open subscription streams, as sent.
    streams: Vec<Box<str>>,
}

impl SimStatelessState {
    pub(super) fn remove_stream(&mut self, stream: &str) {
        self.streams.retain(|open| **open != *stream);
    }
}

impl SimResponder {
    /// Handles a request if it belongs to this era or to the wrong one. Returns false if the request is left to the
    /// common code.
    pub(super) fn try_handle(&mut self, now: Instant, method: &str, id: &RawValue, params: Option<&RawValue>) -> bool {
        let speaks = self.script.speaks;
        if speaks == SpokenEras::Sessions {
            return false;
        }
        let alone = parse::<wire::StatelessParams<'_>>(params).unwrap_or_default();
        let envelope = alone.meta.as_ref().filter(|meta| meta.version.is_some());
        let requested = if envelope.is_some() && method != method::INITIALIZE { Era::Stateless } else { Era::Sessions };
        // As in the libraries, the first request decides the era of a connection.
        let era = match speaks {
            SpokenEras::Both => *self.stateless.era.get_or_insert(requested),
            SpokenEras::Stateless | SpokenEras::Sessions => Era::Stateless,
        };
        match (era, requested) {
            (Era::Sessions, Era::Sessions) => false,
            (Era::Sessions, Era::Stateless) => {
                self.refuse(id, INVALID_REQUEST, "this connection uses a session");
                true
            }
            (Era::Stateless, Era::Sessions) => {
                self.refuse_session(method, id);
                true
            }
            (Era::Stateless, Era::Stateless) => {
                let version = envelope.and_then(|meta| meta.version.as_ref()).map_or("", |version| &*version.0);
                let capabilities = envelope.and_then(|meta| meta.capabilities);
                let Some(capabilities) = capabilities else {
                    self.refuse(id, INVALID_PARAMS, "_meta lacks the client's capabilities");
                    return true;
                };
                if version != STATELESS_VERSION {
                    self.refuse(id, UNSUPPORTED_VERSION, "unsupported protocol version");
                    return true;
                }
                self.serve_stateless(now, method, id, params, &alone, capabilities)
            }
        }
    }

    fn refuse_session(&mut self, method: &str, id: &RawValue) {
        let script = Arc::clone(&self.script);
        if method == method::INITIALIZE {
            self.refuse(id, script.handshake_code.unwrap_or(UNSUPPORTED_VERSION), "this server has no sessions");
            if script.exit_on_refusal {
                self.phase = SimPhase::Ended(script.end());
            }
        } else {
            self.refuse(id, INVALID_PARAMS, "_meta lacks the protocol version");
        }
    }

    fn serve_stateless(
        &mut self,
        now: Instant,
        method: &str,
        id: &RawValue,
        params: Option<&RawValue>,
        alone: &wire::StatelessParams<'_>,
        capabilities: &RawValue,
    ) -> bool {
        match method {
            method::DISCOVER => self.answer_discover(now, id),
            method::LISTEN => self.listen(id, alone.notifications),
            // These methods exist only with sessions.
            method::PING | method::SET_LOG_LEVEL | method::RESOURCES_SUBSCRIBE | method::RESOURCES_UNSUBSCRIBE => {
                self.refuse(id, METHOD_NOT_FOUND, &format!("method not found: {method}"));
            }
            method::TOOLS_CALL => {
                let Ok(call) = parse::<CallParams<'_>>(params) else { return false };
                if call.name != "ask" {
                    return false;
                }
                self.ask(id, &call, alone, capabilities);
            }
            _ => return false,
        }
        true
    }

    fn answer_discover(&mut self, now: Instant, id: &RawValue) {
        let script = Arc::clone(&self.script);
        if script.discover_never {
            return;
        }
        let mut versions = vec![STATELESS_VERSION];
        if script.speaks == SpokenEras::Both {
            versions.extend(SESSION_VERSIONS);
        }
        let mut capabilities = BytesMut::new();
        tools::put_capabilities(&mut capabilities, &script);
        let info = json!({SERVER_INFO: {"name": script.name, "version": script.version}});
        let capabilities = serde_json::from_slice::<serde_json::Value>(&capabilities).unwrap_or_default();
        let result = json!({
            "resultType": "complete", "supportedVersions": versions, "capabilities": capabilities, "_meta": info,
            "ttlMs": 1000, "cacheScope": "private",
        });
        let delay = self.apply_jitter(script.handshake_delay);
        self.answer_in(now, delay, id, |line| line.put_slice(format!("\"result\":{result}").as_bytes()));
        // Without sessions, discovery takes the place of `notifications/initialized`.
        self.handle_initialized(now);
    }

    fn listen(&mut self, id: &RawValue, wanted: Option<&RawValue>) {
        let wanted = wanted.map_or("{}", RawValue::get);
        let message = format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/subscriptions/acknowledged","params":{{"notifications":{wanted},"_meta":{{"{SUBSCRIPTION_ID}":{id}}}}}}}"#,
        );
        self.out.put_slice(message.as_bytes());
        self.out.put_u8(b'\n');
        self.stateless.streams.push(id.get().into());
    }

    pub(super) fn notify_tools_changed(&mut self) {
        if self.script.speaks == SpokenEras::Sessions || self.stateless.era == Some(Era::Sessions) {
            self.out.put_slice(b"{\"jsonrpc\":\"2.0\",\"method\":\"notifications/tools/list_changed\"}\n");
        }
        for id in &self.stateless.streams {
            let message = format!(
                r#"{{"jsonrpc":"2.0","method":"notifications/tools/list_changed","params":{{"_meta":{{"{SUBSCRIPTION_ID}":{id}}}}}}}"#,
            );
            self.out.put_slice(message.as_bytes());
            self.out.put_u8(b'\n');
        }
    }

    /// Requests input `rounds` times, each time with another state, and then answers with the last input.
    fn ask(
        &mut self,
        id: &RawValue,
        call: &CallParams<'_>,
        alone: &wire::StatelessParams<'_>,
        capabilities: &RawValue,
    ) {
        let arguments = call.arguments.map_or("{}", RawValue::get);
        let Ok(AskArguments { rounds, method }) = serde_json::from_str::<AskArguments<'_>>(arguments) else {
            return self.refuse(id, INVALID_PARAMS, "invalid arguments for ask");
        };
        let method = method.as_ref().map_or(method::ELICIT, |method| &*method.0);
        let capability = method.split('/').next().unwrap_or_default();
        let can = serde_json::from_str::<serde_json::Value>(capabilities.get()).unwrap_or_default();
        if can.get(capability).is_none() {
            return self.refuse(id, MISSING_CAPABILITY, &format!("the client lacks the capability {capability}"));
        }
        let done =
            alone.request_state.as_ref().map_or(0, |state| state.0.trim_start_matches("round ").parse().unwrap_or(0));
        if done >= rounds {
            let responses = alone.input_responses.map_or("{}", RawValue::get);
            return self.answer(id, |line| put_result(line, responses, Some(responses), false));
        }
        let params = json!({"message": format!("round {}", done + 1), "mode": "form", "requestedSchema": {"type": "object", "properties": {}}});
        let result = json!({
            "resultType": "input_required", "requestState": format!("round {}", done + 1),
            "inputRequests": {"first": {"method": method, "params": params}},
        });
        self.answer(id, |line| line.put_slice(format!("\"result\":{result}").as_bytes()));
    }
}
