//! Answers one request in a session: with JSON if the answer is the first message, else with a stream of all messages
//! up to the answer. If the client disconnects, the call is cancelled: at once, or after the grace period if the stream
//! can be resumed.

use mcp_satellite_protocol::error_code::{INVALID_REQUEST, SERVER_ERROR};
use mcp_satellite_protocol::method;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::http::StatusCode;
use axum::response::Response;
use futures::future::BoxFuture;
use mcp_satellite_protocol::era::Era;
use mcp_satellite_protocol::rpc::RpcMessage;
use tokio::time::{Duration, sleep};

use super::answer::CallAnswer;
use super::handler::EndpointHandler;
use super::reply;
use super::request::EndpointRequest;
use super::session::{CallEvent, ClientSession, SESSION_ENDED};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ResponseFormat {
    // JSON only: other messages wait for the session's GET stream.
    Json,
    // JSON if the answer is the first message, else a stream.
    Either,
    Stream,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct ResponseSettings {
    pub format: ResponseFormat,
    // Time without an answer after which the response becomes a stream.
    pub sse_after: Duration,
    pub keep_alive: Duration,
    // Time for a disconnected client to resume its stream.
    pub grace: Duration,
    pub timeout: Option<Duration>,
}

pub(crate) struct OpenCallGuard {
    pub session: Arc<ClientSession>,
    pub call: u64,
}

impl Drop for OpenCallGuard {
    fn drop(&mut self) {
        self.session.close_call(self.call);
    }
}

struct StartedCall {
    open: OpenCallGuard,
    id: Arc<str>,
    answer: BoxFuture<'static, CallAnswer>,
}

fn start_call(
    handler: &dyn EndpointHandler,
    session: &Arc<ClientSession>,
    (message, peer): (RpcMessage, Option<SocketAddr>),
    timeout: Option<Duration>,
    streams: bool,
) -> Result<StartedCall, Arc<str>> {
    let id: Arc<str> = message.id().unwrap_or("null").into();
    let Ok((call, cancellation)) = session.open_call(&id, streams) else { return Err(id) };
    if message.method() == Some(method::TOOLS_CALL) {
        session.count_tool_call();
    }
    let open = OpenCallGuard { session: session.clone(), call };
    let session = session.clone();
    let (era, trace) = (Era::Sessions, None);
    let request = EndpointRequest { message, session, call, cancellation, timeout, era, trace, peer };
    let answer = handler.handle_request(request);
    Ok(StartedCall { open, id, answer })
}

fn id_in_use_response(id: &str) -> Response {
    let message = "a request with this id has not been answered yet; use another id";
    reply::error_response(StatusCode::BAD_REQUEST, Some(id), INVALID_REQUEST, message)
}

fn session_ended_response(id: &str) -> Response {
    reply::error_response(StatusCode::NOT_FOUND, Some(id), SERVER_ERROR, SESSION_ENDED)
}

/// Resources of a call: the user's permit and the memory of the message are held until the answer, the tracker of open
/// work until the client has read it.
pub(crate) type CallResources<A, W, M> = (A, W, M);

/// Answers a message, which came from the address.
pub(crate) async fn answer(
    handler: &dyn EndpointHandler,
    session: &Arc<ClientSession>,
    message: (RpcMessage, Option<SocketAddr>),
    settings: ResponseSettings,
    resources: CallResources<impl Send + 'static, impl Send + 'static, impl Send + 'static>,
) -> Response {
    let streams = settings.format != ResponseFormat::Json;
    let StartedCall { open, id, answer: mut pending } =
        match start_call(handler, session, message, settings.timeout, streams) {
            Ok(started) => started,
            Err(id) => return id_in_use_response(&id),
        };
    let call = open.call;
    if settings.format != ResponseFormat::Stream {
        tokio::select! {
            biased;
            answer = &mut pending => {
                if session.try_finish_without_stream(call) {
                    return reply::answer_within(session.budget(), StatusCode::OK, &answer, &id);
                }
                pending = Box::pin(std::future::ready(answer));
            }
            event = session.wait_for_event(call) => if event == CallEvent::Ended { return session_ended_response(&id) },
            // The timer is registered with tokio only if the answer is not ready at the first poll.
            () = sleep(settings.sse_after), if streams => {}
        }
    }
    let Some(events) = session.listen(call, None, settings.keep_alive) else { return session_ended_response(&id) };
    tokio::spawn(stream_answer(open, id, pending, settings.grace, resources));
    reply::stream(events)
}

async fn stream_answer(
    open: OpenCallGuard,
    id: Arc<str>,
    pending: BoxFuture<'static, CallAnswer>,
    grace: Duration,
    (admission, work, memory): CallResources<impl Send + 'static, impl Send + 'static, impl Send + 'static>,
) {
    let OpenCallGuard { session, call } = &open;
    tokio::select! {
        biased;
        answer = pending => answer.with_parts(&id, |parts| session.finish_call(*call, parts)),
        () = session.end_token().cancelled() => return,
        () = session.wait_until_abandoned(*call, grace) => return,
    }
    // The call is finished; only the client has to read.
    drop((admission, memory));
    let read = async {
        session.wait_until_abandoned(*call, Duration::ZERO).await;
        // The endpoint does not wait for a client that may return.
        drop(work);
        session.wait_until_abandoned(*call, grace).await;
    };
    tokio::select! {
        () = session.end_token().cancelled() => {}
        () = read => {}
    }
}

pub(crate) async fn answer_batch(
    handler: &dyn EndpointHandler,
    session: &Arc<ClientSession>,
    (requests, peer): (Vec<RpcMessage>, Option<SocketAddr>),
    timeout: Option<Duration>,
    _resources: impl Send + 'static,
) -> Response {
    let mut pending = Vec::with_capacity(requests.len());
    for message in requests {
        let started = match start_call(handler, session, (message, peer), timeout, false) {
            Ok(started) => started,
            Err(id) => return id_in_use_response(&id),
        };
        pending.push(async move {
            let StartedCall { open: _open, id, answer } = started;
            (id, answer.await)
        });
    }
    tokio::select! {
        answers = futures::future::join_all(pending) => reply::batch(session.budget(), &answers),
        () = session.end_token().cancelled() => session_ended_response("null"),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use std::sync::Mutex;

    use bytes::Bytes;
    use futures::StreamExt as _;
    use mcp_satellite_actors::model::ids::InstanceId;
    use tokio::sync::oneshot;
    use tokio::task::yield_now;

    use super::super::access::User;
    use super::super::answer::{InitializeAnswer, RpcError};
    use super::super::endpoint_id::EndpointId;
    use super::super::request::OpeningRequest;
    use super::super::sessions::Sessions;
    use super::super::sessions::tests::{session_facts, user};
    use super::super::subscription::SubscriptionFilter;
    use super::*;
    use mcp_satellite_config::GatewayLimits;

    /// A handler whose single request is answered when a message arrives.
    struct SingleResponseHandler(Mutex<Option<oneshot::Receiver<String>>>);

    impl EndpointHandler for SingleResponseHandler {
        fn instance(&self, _: &User, _: &str) -> Option<InstanceId> {
            None
        }

        fn initialize(&self, _: OpeningRequest) -> BoxFuture<'static, Result<InitializeAnswer, RpcError>> {
            Box::pin(std::future::pending())
        }

        fn discover(&self, _: OpeningRequest) -> BoxFuture<'static, Result<String, RpcError>> {
            Box::pin(std::future::pending())
        }

        fn definition(&self, _: Arc<User>, _: &EndpointId, _: &str) -> BoxFuture<'static, Option<Box<str>>> {
            Box::pin(std::future::pending())
        }

        fn listen(
            &self,
            _: &Arc<ClientSession>,
            _: SubscriptionFilter,
        ) -> BoxFuture<'static, Result<SubscriptionFilter, RpcError>> {
            Box::pin(std::future::pending())
        }

        fn handle_session_start(&self, _: &Arc<ClientSession>) {}

        fn handle_request(&self, _: EndpointRequest) -> BoxFuture<'static, CallAnswer> {
            let answer = self.0.lock().unwrap().take().unwrap();
            Box::pin(async move { CallAnswer::Result(answer.await.unwrap()) })
        }

        fn handle_notification(&self, _: &Arc<ClientSession>, _: RpcMessage) {}

        fn handle_session_end(&self, _: &Arc<ClientSession>) {}
    }

    #[tokio::test]
    async fn a_stream_frees_its_permit_on_response_and_its_work_guard_when_read() {
        let (sessions, alice) = (Sessions::new(), user("alice"));
        let now = tokio::time::Instant::now();
        let opened = sessions.open(session_facts(&alice, EndpointId::Tools), &GatewayLimits::default(), now);
        let (session, _) = opened.unwrap();
        let (release, answer) = oneshot::channel();
        let handler = SingleResponseHandler(Mutex::new(Some(answer)));
        let request = br#"{"jsonrpc":"2.0","id":5,"method":"x"}"#;
        let message = RpcMessage::parse(Bytes::from_static(request)).unwrap();
        let long = Duration::from_secs(3600);
        let settings = ResponseSettings {
            format: ResponseFormat::Stream,
            sse_after: long,
            keep_alive: long,
            grace: long,
            timeout: None,
        };
        let (admission, work, memory) = (Arc::new(()), Arc::new(()), Arc::new(()));
        let resources = (admission.clone(), work.clone(), memory.clone());
        let response = super::answer(&handler, &session, (message, None), settings, resources).await;
        let mut body = response.into_body().into_data_stream();
        assert!(body.next().await.unwrap().unwrap().starts_with(b"id: 1-0"));
        release.send("1".to_owned()).unwrap();
        while Arc::strong_count(&admission) + Arc::strong_count(&memory) > 2 {
            yield_now().await;
        }
        assert_eq!(Arc::strong_count(&work), 2, "the client has not read the response yet");
        assert!(body.next().await.unwrap().unwrap().ends_with(b"\"result\":1}\n\n"));
        assert!(body.next().await.is_none());
        while Arc::strong_count(&work) > 1 {
            yield_now().await;
        }
    }
}
