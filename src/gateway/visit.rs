//! One request of the era without sessions: answered with JSON, or with a stream that nobody can come back to. A client that
//! hangs up cancels it at once. If a server asks something meanwhile, that is the answer, and the call waits until the
//! client makes its request again.
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
use mcp_satellite_actors::audience::Origin;
use mcp_satellite_actors::model::era::Era;
use mcp_satellite_actors::rpc::{Kind, Message, member};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

use super::call::{Form, Manner, Open};
use super::era::{change, status_of};
use super::face::{Answer, Call, RpcError};
use super::front::Front;
use super::parked::Bound;
use super::reply;
use super::session::{ENDED, News, Session};
use super::tools::raw::{Pairs, quoted, spliced};

/// Why nobody is asked.
const NO_ROOM: &str = "too many calls, or too long ones, wait for what their clients have to answer";

/// A guest, until its request is over.
pub(super) struct Guest {
    front: Arc<Front>,
    pub(super) session: Arc<Session>,
}

impl Guest {
    pub(super) fn new(front: Arc<Front>, session: Arc<Session>) -> Self {
        Self { front, session }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.front.sessions.goes(&self.session);
        self.front.faces.ended(&self.session);
    }
}

/// A call of a guest, in whatever round: all that it takes to go on with it.
pub(super) struct Visit {
    /// Before the guest: what is cancelled is cancelled while the guest is still there.
    coming: BoxFuture<'static, Answer>,
    guest: Guest,
    /// Its request, as it came first.
    message: Message,
    /// It is withdrawn by hanging up, and never in words.
    _withdraw: oneshot::Sender<Message>,
    /// Of what its user may have under way, and what its message takes.
    _holds: Box<dyn Send>,
}

impl Visit {
    /// A call begins.
    pub(super) fn begin(
        guest: Guest,
        message: Message,
        timeout: Option<std::time::Duration>,
        admission: impl Send + 'static,
        memory: impl Send + 'static,
    ) -> Self {
        let session = &guest.session;
        session.asks_with(message.token());
        let client = session.opening.greeting.facts.clone();
        let origin = Origin { client: session.number(), call: FIRST };
        let (withdraw, withdrawn) = oneshot::channel();
        let call = Call { message: message.clone(), origin, withdrawn, timeout, era: Era::Stateless, client };
        let coming = guest.front.faces.request(session.clone(), call);
        Self { coming, guest, message, _withdraw: withdraw, _holds: Box::new((admission, memory)) }
    }

    /// Whether there is nobody any more for whom it would go on.
    pub(super) fn is_over(&self) -> bool {
        self.guest.session.ended().is_some()
    }

    fn method(&self) -> &str {
        self.message.method().unwrap_or_default()
    }

    /// Its request is made again, with what the client has to answer.
    pub(super) fn resumed(&self, message: &Message) {
        self.guest.session.asks_with(message.token());
        let responses = message.params().and_then(|params| member(params, "inputResponses")).and_then(Pairs::read);
        self.guest.session.answered_with(&responses.unwrap_or_default());
    }
}

/// What servers say goes to the round that is open, whichever it is.
const FIRST: u64 = 1;

/// One round, until it is answered.
pub(super) async fn round(mut visit: Visit, id: Arc<str>, manner: Manner, work: impl Send + 'static) -> Response {
    let streams = manner.form != Form::Json;
    let session = visit.guest.session.clone();
    // No other round is open under this id, and if one were: each has its own stream.
    let Ok((call, _withdrawn)) = session.begin(&id, streams) else { return over(&id) };
    let open = Open { session: session.clone(), call };
    loop {
        tokio::select! {
            biased;
            answer = &mut visit.coming => {
                let (status, answer) = finished(answer, visit.method());
                let is_first = session.is_answered_first(call);
                if is_first && (status != StatusCode::OK || manner.form != Form::Stream) {
                    return reply::answer_within(session.budget(), status, &answer, &id);
                }
                visit.coming = Box::pin(ready(answer));
                break;
            }
            // What was said before a question is heard before it.
            news = session.news(call) => {
                if news == News::Over {
                    return over(&id);
                }
                break;
            }
            () = session.asked() => {
                match park(visit) {
                    Ok(question) => {
                        if manner.form == Form::Stream {
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

/// A stream of one event.
fn whole(open: Open, id: &Arc<str>, answer: &Answer, manner: Manner) -> Response {
    let Some(listening) = open.session.listen(open.call, None, manner.keep_alive) else { return over(id) };
    reply::parts(answer, id, |parts| open.session.finish(open.call, parts));
    tokio::spawn(async move { read(&open).await });
    reply::stream(listening)
}

/// Goes on with a round whose client reads a stream.
async fn stream(mut visit: Visit, open: Open, id: Arc<str>, work: impl Send + 'static) {
    let session = open.session.clone();
    let answer = loop {
        tokio::select! {
            biased;
            answer = &mut visit.coming => {
                let (_, answer) = finished(answer, visit.method());
                // Nothing else of it is held while the client reads.
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
    let rest = visit.map(|Visit { guest, .. }| guest);
    read(&open).await;
    drop((work, rest));
}

/// Waits until the last words of a round are read, or nobody will.
async fn read(open: &Open) {
    tokio::select! {
        () = open.session.over().cancelled() => {}
        () = open.session.abandoned(open.call, std::time::Duration::ZERO) => {}
    }
}

/// Puts a call aside whose client is asked something: the answer that says what. The call, if there is no room.
fn park(visit: Visit) -> Result<Answer, Box<Visit>> {
    let (front, session) = (visit.guest.front.clone(), visit.guest.session.clone());
    let requests = session.input_requests();
    let bound = Bound::of(session.user(), &session.opening.endpoint, &visit.message);
    let (bytes, room) = (visit.message.text().len(), front.room(session.user()));
    match front.parked.put(bound, bytes, room, Instant::now(), visit) {
        Ok(state) => Ok(Answer::Result(format!(
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

/// An answer as this era has it, and the status that says as much.
pub(super) fn finished(answer: Answer, method: &str) -> (StatusCode, Answer) {
    match answer {
        Answer::Message(message) => {
            let outcome = message.outcome().unwrap_or_default();
            if message.kind() == Kind::Result {
                let completed = change::completed(outcome, method, None);
                let same = completed == outcome;
                return (StatusCode::OK, Answer::Message(if same { message } else { again(message, &completed) }));
            }
            let code = member(outcome, "code").and_then(|code| code.parse().ok()).unwrap_or(change::INTERNAL_ERROR);
            let coded = change::code(code, false);
            let message = match Pairs::read(outcome) {
                Some(mut error) if coded != code => {
                    error.set("code", coded.to_string());
                    let text = error.written();
                    again(message, &text)
                }
                _ => message,
            };
            (status_of(coded), Answer::Message(message))
        }
        Answer::Result(result) => {
            let result = change::completed(&result, method, Some(&change::own_info()));
            (StatusCode::OK, Answer::Result(result))
        }
        Answer::Error(error) => {
            let code = change::code(error.code, true);
            (status_of(code), Answer::Error(RpcError { code, ..error }))
        }
        Answer::Withdrawn => (StatusCode::OK, Answer::Withdrawn),
    }
}

/// The same message with another outcome.
fn again(message: Message, outcome: &str) -> Message {
    let text = spliced(message.text(), message.outcome().unwrap_or_default(), outcome);
    // What was read once can be read again.
    Message::read(text.into()).unwrap_or(message)
}
