//! Stateless requests: each is answered with JSON or with a stream that cannot be resumed. Closing the connection
//! cancels the call at once. If a server sends the client a request meanwhile, the response contains that request, and
//! the call is parked until the client repeats its own request with the answer.
//!
//! ```text
//! request ──► round ──► answer
//!               │ a server asks
//!               └──► `input_required` ┄┄ parked ┄┄ the request again ──► round ──► …
//! ```

use mcp_satellite_protocol::error_code::INTERNAL_ERROR;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::http::StatusCode;
use axum::response::Response;
use futures::future::{BoxFuture, ready};
use mcp_satellite_protocol::era::Era;
use mcp_satellite_protocol::rpc::{MessageKind, RpcMessage, member};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

use super::answer::{CallAnswer, RpcError};
use super::era::{status_of, translation};
use super::http_requests::EndpointService;
use super::parked_calls::ParkedRequestIdentity;
use super::reply;
use super::request::EndpointRequest;
use super::session::{CallEvent, ClientSession, SESSION_ENDED};
use super::session_call::{OpenCallGuard, ResponseFormat, ResponseSettings};
use super::tools::raw::{JsonMembers, json_string, replace_part};

// Reason for declining a server's request when the call cannot be parked.
const PARKING_LIMIT_REASON: &str = "too many or too large calls wait for a response of their client";

pub(super) struct StatelessSessionGuard {
    http: Arc<EndpointService>,
    pub(super) session: Arc<ClientSession>,
}

impl StatelessSessionGuard {
    pub(super) fn new(http: Arc<EndpointService>, session: Arc<ClientSession>) -> Self {
        Self { http, session }
    }
}

impl Drop for StatelessSessionGuard {
    fn drop(&mut self) {
        self.http.sessions.close_stateless(&self.session);
        self.http.handler.handle_session_end(&self.session);
    }
}

pub(super) struct StatelessCall {
    // Declared before the session, so that the call is dropped (cancelled) while the session still exists.
    answer: BoxFuture<'static, CallAnswer>,
    session_guard: StatelessSessionGuard,
    // The request of the first round.
    message: RpcMessage,
    // Keeps the channel open: a stateless client cancels by closing the connection, not with a notification.
    _cancel: oneshot::Sender<RpcMessage>,
    // The permit for the call and the bytes of its message.
    _resources: Box<dyn Send>,
}

impl StatelessCall {
    pub(super) fn begin(
        session_guard: StatelessSessionGuard,
        (message, peer): (RpcMessage, Option<SocketAddr>),
        timeout: Option<std::time::Duration>,
        admission: impl Send + 'static,
        memory: impl Send + 'static,
    ) -> Self {
        let session = &session_guard.session;
        session.set_progress_token(message.token());
        let (cancel, cancellation) = oneshot::channel();
        let request = EndpointRequest {
            message: message.clone(),
            session: session.clone(),
            call: CALL_NUMBER,
            cancellation,
            timeout,
            era: Era::Stateless,
            trace: None,
            peer,
        };
        let answer = session_guard.http.handler.handle_request(request);
        Self { answer, session_guard, message, _cancel: cancel, _resources: Box::new((admission, memory)) }
    }

    pub(super) fn is_over(&self) -> bool {
        self.session_guard.session.end_reason().is_some()
    }

    fn method(&self) -> &str {
        self.message.method().unwrap_or_default()
    }

    pub(super) fn resume(&self, message: &RpcMessage) {
        self.session_guard.session.set_progress_token(message.token());
        let responses =
            message.params().and_then(|params| member(params, "inputResponses")).and_then(JsonMembers::read);
        self.session_guard.session.accept_input_responses(&responses.unwrap_or_default());
    }
}

// Messages from servers go to the open round, whichever it is, so every round uses the same call number.
const CALL_NUMBER: u64 = 1;

pub(super) async fn run_round(
    mut call: StatelessCall,
    id: Arc<str>,
    settings: ResponseSettings,
    work_token: impl Send + 'static,
) -> Response {
    let streams = settings.format != ResponseFormat::Json;
    let session = call.session_guard.session.clone();
    // `begin` fails only if the id is in use. A stateless call has one open round at a time, and each has its own stream.
    let Ok((number, _withdrawn)) = session.open_call(&id, streams) else { return session_ended_response(&id) };
    let open = OpenCallGuard { session: session.clone(), call: number };
    loop {
        tokio::select! {
            biased;
            answer = &mut call.answer => {
                let (status, answer) = to_stateless_answer(answer, call.method());
                let is_first = session.try_finish_without_stream(number);
                if is_first && (status != StatusCode::OK || settings.format != ResponseFormat::Stream) {
                    return reply::answer_within(session.budget(), status, &answer, &id);
                }
                call.answer = Box::pin(ready(answer));
                break;
            }
            // Messages that were sent before the question are delivered first.
            event = session.wait_for_event(number) => {
                if event == CallEvent::Ended {
                    return session_ended_response(&id);
                }
                break;
            }
            () = session.wait_for_question() => {
                match park(call) {
                    Ok(question) => {
                        if settings.format == ResponseFormat::Stream {
                            return stream_single_answer(open, &id, &question, settings);
                        }
                        return reply::answer_within(session.budget(), StatusCode::OK, &question, &id);
                    }
                    Err(returned) => call = *returned,
                }
            }
            () = sleep(settings.sse_after), if streams => break,
        }
    }
    let Some(events) = session.listen(number, None, settings.keep_alive) else { return session_ended_response(&id) };
    tokio::spawn(stream_answer(call, open, id, work_token));
    reply::stream(events)
}

fn stream_single_answer(
    open: OpenCallGuard,
    id: &Arc<str>,
    answer: &CallAnswer,
    settings: ResponseSettings,
) -> Response {
    let Some(events) = open.session.listen(open.call, None, settings.keep_alive) else {
        return session_ended_response(id);
    };
    answer.with_parts(id, |parts| open.session.finish_call(open.call, parts));
    tokio::spawn(async move { wait_until_read(&open).await });
    reply::stream(events)
}

async fn stream_answer(mut call: StatelessCall, open: OpenCallGuard, id: Arc<str>, work_token: impl Send + 'static) {
    let session = open.session.clone();
    let answer = loop {
        tokio::select! {
            biased;
            answer = &mut call.answer => {
                let (_, answer) = to_stateless_answer(answer, call.method());
                break (answer, Some(call));
            }
            () = session.wait_for_question() => {
                match park(call) {
                    Ok(question) => break (question, None),
                    Err(returned) => call = *returned,
                }
            }
            () = session.end_token().cancelled() => return,
            () = session.wait_until_abandoned(open.call, std::time::Duration::ZERO) => return,
        }
    };
    let (answer, call) = answer;
    answer.with_parts(&id, |parts| session.finish_call(open.call, parts));
    let session_guard = call.map(|StatelessCall { session_guard, .. }| session_guard);
    wait_until_read(&open).await;
    drop((work_token, session_guard));
}

async fn wait_until_read(open: &OpenCallGuard) {
    tokio::select! {
        () = open.session.end_token().cancelled() => {}
        () = open.session.wait_until_abandoned(open.call, std::time::Duration::ZERO) => {}
    }
}

/// Parks a call whose client has to answer a question. Returns the response with the questions, or the call if there is
/// no capacity.
fn park(call: StatelessCall) -> Result<CallAnswer, Box<StatelessCall>> {
    let (http, session) = (call.session_guard.http.clone(), call.session_guard.session.clone());
    let requests = session.input_requests();
    let identity = ParkedRequestIdentity::new(session.user(), &session.facts.endpoint, &call.message);
    let (bytes, limits) = (call.message.text().len(), http.parked_limits(session.user()));
    match http.parked.put(identity, bytes, limits, Instant::now(), call) {
        Ok(state) => Ok(CallAnswer::Result(format!(
            r#"{{"resultType":"input_required","inputRequests":{requests},"requestState":{}}}"#,
            json_string(&state)
        ))),
        Err(call) => {
            session.decline_questions(PARKING_LIMIT_REASON);
            Err(Box::new(call))
        }
    }
}

fn session_ended_response(id: &str) -> Response {
    reply::rpc_error(StatusCode::SERVICE_UNAVAILABLE, id, RpcError::new(INTERNAL_ERROR, SESSION_ENDED))
}

pub(super) fn to_stateless_answer(answer: CallAnswer, method: &str) -> (StatusCode, CallAnswer) {
    match answer {
        CallAnswer::Message(message) => {
            let outcome = message.outcome().unwrap_or_default();
            if message.kind() == MessageKind::Result {
                let completed = translation::complete_result(outcome, method, None);
                let same = completed == outcome;
                return (
                    StatusCode::OK,
                    CallAnswer::Message(if same { message } else { replace_outcome(message, &completed) }),
                );
            }
            let code = member(outcome, "code").and_then(|code| code.parse().ok()).unwrap_or(INTERNAL_ERROR);
            let mapped_code = translation::stateless_error_code(code, false);
            let message = match JsonMembers::read(outcome) {
                Some(mut error) if mapped_code != code => {
                    error.set("code", mapped_code.to_string());
                    let text = error.to_json();
                    replace_outcome(message, &text)
                }
                _ => message,
            };
            (status_of(mapped_code), CallAnswer::Message(message))
        }
        CallAnswer::Result(result) => {
            let result = translation::complete_result(&result, method, Some(&translation::own_server_info()));
            (StatusCode::OK, CallAnswer::Result(result))
        }
        CallAnswer::CompletedResult(result) => (StatusCode::OK, CallAnswer::CompletedResult(result)),
        CallAnswer::Error(error) => {
            let code = translation::stateless_error_code(error.code, true);
            (status_of(code), CallAnswer::Error(RpcError { code, ..error }))
        }
        CallAnswer::Cancelled => (StatusCode::OK, CallAnswer::Cancelled),
    }
}

fn replace_outcome(message: RpcMessage, outcome: &str) -> RpcMessage {
    let text = replace_part(message.text(), message.outcome().unwrap_or_default(), outcome);
    // The text is derived from a valid message and stays valid.
    RpcMessage::parse(text.into()).unwrap_or(message)
}
