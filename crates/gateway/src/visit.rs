//! Stateless requests: each is answered with JSON or with a stream that cannot be resumed. Closing the connection
//! cancels the call at once. If a server sends the client a request meanwhile, the response contains that request, and
//! the call is parked until the client repeats its own request with the answer.
//!
//! ```text
//! request ──► round ──► answer
//!               │ a server asks
//!               └──► `input_required` ┄┄ parked ┄┄ the request again ──► round ──► …
//! ```

use std::sync::Arc;

use axum::http::StatusCode;
use axum::response::Response;
use futures::future::{BoxFuture, ready};
use mcp_satellite_actors::audience::CallOrigin;
use mcp_satellite_actors::model::era::Era;
use mcp_satellite_actors::rpc::{MessageKind, RpcMessage, member};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

use super::call::{OpenCallGuard, ResponseFormat, ResponseSettings};
use super::era::{change, status_of};
use super::face::{CallAnswer, EndpointCall, RpcError};
use super::front::HttpFront;
use super::parked::ParkedRequestIdentity;
use super::reply;
use super::session::{CallEvent, ClientSession, ENDED};
use super::tools::raw::{JsonMembers, quoted, spliced};

// Reason for declining a server's request when the call cannot be parked.
const NO_ROOM: &str = "too many or too large calls wait for a response of their client";

pub(super) struct GuestSession {
    front: Arc<HttpFront>,
    pub(super) session: Arc<ClientSession>,
}

impl GuestSession {
    pub(super) fn new(front: Arc<HttpFront>, session: Arc<ClientSession>) -> Self {
        Self { front, session }
    }
}

impl Drop for GuestSession {
    fn drop(&mut self) {
        self.front.sessions.goes(&self.session);
        self.front.faces.ended(&self.session);
    }
}

pub(super) struct StatelessRequest {
    // Declared before the guest, so that the call is dropped (cancelled) while the guest still exists.
    coming: BoxFuture<'static, CallAnswer>,
    guest: GuestSession,
    // The request of the first round.
    message: RpcMessage,
    // Keeps the channel open: a stateless client cancels by closing the connection, not with a notification.
    _withdraw: oneshot::Sender<RpcMessage>,
    // The permit for the call and the bytes of its message.
    _holds: Box<dyn Send>,
}

impl StatelessRequest {
    pub(super) fn begin(
        guest: GuestSession,
        message: RpcMessage,
        timeout: Option<std::time::Duration>,
        admission: impl Send + 'static,
        memory: impl Send + 'static,
    ) -> Self {
        let session = &guest.session;
        session.asks_with(message.token());
        let client = session.opening.greeting.facts.clone();
        let origin = CallOrigin { client: session.number(), call: FIRST };
        let (withdraw, withdrawn) = oneshot::channel();
        let call = EndpointCall { message: message.clone(), origin, withdrawn, timeout, era: Era::Stateless, client };
        let coming = guest.front.faces.request(session.clone(), call);
        Self { coming, guest, message, _withdraw: withdraw, _holds: Box::new((admission, memory)) }
    }

    pub(super) fn is_over(&self) -> bool {
        self.guest.session.ended().is_some()
    }

    fn method(&self) -> &str {
        self.message.method().unwrap_or_default()
    }

    pub(super) fn resumed(&self, message: &RpcMessage) {
        self.guest.session.asks_with(message.token());
        let responses =
            message.params().and_then(|params| member(params, "inputResponses")).and_then(JsonMembers::read);
        self.guest.session.answered_with(&responses.unwrap_or_default());
    }
}

// Messages from servers go to the open round, whichever it is, so every round uses the same call number.
const FIRST: u64 = 1;

pub(super) async fn round(
    mut visit: StatelessRequest,
    id: Arc<str>,
    manner: ResponseSettings,
    work: impl Send + 'static,
) -> Response {
    let streams = manner.form != ResponseFormat::Json;
    let session = visit.guest.session.clone();
    // `begin` fails only if the id is in use. A guest has one open round at a time, and each has its own stream.
    let Ok((call, _withdrawn)) = session.begin(&id, streams) else { return over(&id) };
    let open = OpenCallGuard { session: session.clone(), call };
    loop {
        tokio::select! {
            biased;
            answer = &mut visit.coming => {
                let (status, answer) = finished(answer, visit.method());
                let is_first = session.is_answered_first(call);
                if is_first && (status != StatusCode::OK || manner.form != ResponseFormat::Stream) {
                    return reply::answer_within(session.budget(), status, &answer, &id);
                }
                visit.coming = Box::pin(ready(answer));
                break;
            }
            // Messages that were sent before the question are delivered first.
            news = session.news(call) => {
                if news == CallEvent::Over {
                    return over(&id);
                }
                break;
            }
            () = session.asked() => {
                match park(visit) {
                    Ok(question) => {
                        if manner.form == ResponseFormat::Stream {
                            return whole(open, &id, &question, manner);
                        }
                        return reply::answer_within(session.budget(), StatusCode::OK, &question, &id);
                    }
                    Err(refused) => visit = *refused,
                }
            }
            () = sleep(manner.sse_after), if streams => break,
        }
    }
    let Some(listening) = session.listen(call, None, manner.keep_alive) else { return over(&id) };
    tokio::spawn(stream(visit, open, id, work));
    reply::stream(listening)
}

fn whole(open: OpenCallGuard, id: &Arc<str>, answer: &CallAnswer, manner: ResponseSettings) -> Response {
    let Some(listening) = open.session.listen(open.call, None, manner.keep_alive) else { return over(id) };
    reply::parts(answer, id, |parts| open.session.finish(open.call, parts));
    tokio::spawn(async move { read(&open).await });
    reply::stream(listening)
}

async fn stream(mut visit: StatelessRequest, open: OpenCallGuard, id: Arc<str>, work: impl Send + 'static) {
    let session = open.session.clone();
    let answer = loop {
        tokio::select! {
            biased;
            answer = &mut visit.coming => {
                let (_, answer) = finished(answer, visit.method());
                break (answer, Some(visit));
            }
            () = session.asked() => {
                match park(visit) {
                    Ok(question) => break (question, None),
                    Err(refused) => visit = *refused,
                }
            }
            () = session.over().cancelled() => return,
            () = session.abandoned(open.call, std::time::Duration::ZERO) => return,
        }
    };
    let (answer, visit) = answer;
    reply::parts(&answer, &id, |parts| session.finish(open.call, parts));
    let rest = visit.map(|StatelessRequest { guest, .. }| guest);
    read(&open).await;
    drop((work, rest));
}

async fn read(open: &OpenCallGuard) {
    tokio::select! {
        () = open.session.over().cancelled() => {}
        () = open.session.abandoned(open.call, std::time::Duration::ZERO) => {}
    }
}

/// Parks a call whose client has to answer a question. Returns the response with the questions, or the call if there is
/// no capacity.
fn park(visit: StatelessRequest) -> Result<CallAnswer, Box<StatelessRequest>> {
    let (front, session) = (visit.guest.front.clone(), visit.guest.session.clone());
    let requests = session.input_requests();
    let bound = ParkedRequestIdentity::of(session.user(), &session.opening.endpoint, &visit.message);
    let (bytes, room) = (visit.message.text().len(), front.room(session.user()));
    match front.parked.put(bound, bytes, room, Instant::now(), visit) {
        Ok(state) => Ok(CallAnswer::Result(format!(
            r#"{{"resultType":"input_required","inputRequests":{requests},"requestState":{}}}"#,
            quoted(&state)
        ))),
        Err(visit) => {
            session.decline_all(NO_ROOM);
            Err(Box::new(visit))
        }
    }
}

fn over(id: &str) -> Response {
    reply::wrong(StatusCode::SERVICE_UNAVAILABLE, id, RpcError::new(change::INTERNAL_ERROR, ENDED))
}

/// Converts an answer to the stateless era. Returns it with its HTTP status.
pub(super) fn finished(answer: CallAnswer, method: &str) -> (StatusCode, CallAnswer) {
    match answer {
        CallAnswer::Message(message) => {
            let outcome = message.outcome().unwrap_or_default();
            if message.kind() == MessageKind::Result {
                let completed = change::completed(outcome, method, None);
                let same = completed == outcome;
                return (StatusCode::OK, CallAnswer::Message(if same { message } else { again(message, &completed) }));
            }
            let code = member(outcome, "code").and_then(|code| code.parse().ok()).unwrap_or(change::INTERNAL_ERROR);
            let coded = change::code(code, false);
            let message = match JsonMembers::read(outcome) {
                Some(mut error) if coded != code => {
                    error.set("code", coded.to_string());
                    let text = error.written();
                    again(message, &text)
                }
                _ => message,
            };
            (status_of(coded), CallAnswer::Message(message))
        }
        CallAnswer::Result(result) => {
            let result = change::completed(&result, method, Some(&change::own_info()));
            (StatusCode::OK, CallAnswer::Result(result))
        }
        CallAnswer::Error(error) => {
            let code = change::code(error.code, true);
            (status_of(code), CallAnswer::Error(RpcError { code, ..error }))
        }
        CallAnswer::Withdrawn => (StatusCode::OK, CallAnswer::Withdrawn),
    }
}

fn again(message: RpcMessage, outcome: &str) -> RpcMessage {
    let text = spliced(message.text(), message.outcome().unwrap_or_default(), outcome);
    // The text is derived from a valid message and stays valid.
    RpcMessage::read(text.into()).unwrap_or(message)
}
