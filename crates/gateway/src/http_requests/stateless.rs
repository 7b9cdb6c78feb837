//! Stateless requests: the part of [request handling](super) that answers requests without a session.

use mcp_satellite_protocol::error_code::{
    HEADER_MISMATCH, INTERNAL_ERROR, INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND,
};
use mcp_satellite_protocol::method;
use std::sync::Arc;

use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use mcp_satellite_protocol::rpc::{MessageKind, RpcMessage};
use tokio::time::{Duration, Instant};

use super::super::answer::{CallAnswer, RpcError};
use super::super::endpoint_id::EndpointPath;
use super::super::era::request_meta::StatelessRequestMeta;
use super::super::era::{self, StatelessErrorResponse, headers, translation};
use super::super::parked_calls::ParkedRequestIdentity;
use super::super::reply::{self, SESSION_ID};
use super::super::request::OpeningRequest;
use super::super::session::{ClientLifetime, ClientSession, SESSION_ENDED, SessionEnd, SessionFacts};
use super::super::session_call::{OpenCallGuard, ResponseFormat, ResponseSettings};
use super::super::stateless_call::{self, StatelessCall, StatelessSessionGuard};
use super::super::subscription::SubscriptionFilter;
use super::{
    BodyMemory, CROWDED_PAUSE, Checked, EndpointService, ErrorResponse, HttpRequest, error_response, method_not_allowed,
};

struct SubscriptionGuard {
    endpoint: Arc<EndpointService>,
    session: Arc<ClientSession>,
}

impl Drop for SubscriptionGuard {
    fn drop(&mut self) {
        if let Some(session) = self.endpoint.sessions.close(&self.session, SessionEnd::Closed) {
            self.endpoint.handle_session_end(&session);
        }
    }
}

impl EndpointService {
    pub(super) async fn handle_stateless(
        self: &Arc<Self>,
        request: HttpRequest<'_>,
        path: EndpointPath<'_>,
        (message, memory): (RpcMessage, BodyMemory),
        response_settings: ResponseSettings,
    ) -> Checked<Response> {
        let (user, headers) = (request.user(), &request.parts.headers);
        let Some(id) = message.id().filter(|_| message.kind() == MessageKind::Request) else {
            // No client notification of this era has a meaning over HTTP.
            return Ok(reply::empty(StatusCode::ACCEPTED));
        };
        let id: Arc<str> = id.into();
        let rejected =
            |StatelessErrorResponse { status, error }| ErrorResponse::new(reply::rpc_error(status, &id, error));
        let StatelessRequestMeta { client, level, name: tool, state } =
            StatelessRequestMeta::read(&message, headers).map_err(rejected)?;
        let method = message.method().unwrap_or_default();
        if era::is_removed(method) {
            let why = format!("there is no method `{method}` in this version of the protocol");
            return Err(error_response(StatusCode::NOT_FOUND, Some(&id), METHOD_NOT_FOUND, &why));
        }
        let (endpoint, name) = self.resolve_endpoint(user, path, &id, INTERNAL_ERROR)?;
        if method == method::TOOLS_CALL
            && let Some(tool) = tool
            && let Some(definition) = self.handler.definition(user.clone(), &endpoint, &tool).await
        {
            headers::check_arguments(&definition, message.params(), headers)
                .map_err(|why| error_response(StatusCode::BAD_REQUEST, Some(&id), HEADER_MISMATCH, &why))?;
        }
        let parked = state.and_then(|state| {
            let identity = ParkedRequestIdentity::new(user, &endpoint, &message);
            self.parked.take(&state, &identity, Instant::now()).filter(|call| !call.is_over())
        });
        if let Some(call) = parked {
            call.resume(&message);
            // The parked call has kept its own share of the user's budget.
            drop(memory);
            return Ok(stateless_call::run_round(call, id, response_settings, self.work.token()).await);
        }
        let admission = user
            .acquire_call_permit()
            .map_err(|limited| ErrorResponse::new(reply::limit_exceeded(Some(&id), &limited)))?;
        if method == method::DISCOVER {
            let _work = self.work.token();
            self.sessions.record_request(user, &client, Instant::now());
            let (user, peer) = (user.clone(), request.peer);
            let opening = OpeningRequest { user, endpoint, client, message, peer };
            let answer = match self.handler.discover(opening).await {
                Ok(result) => CallAnswer::Result(result),
                Err(error) => CallAnswer::Error(error),
            };
            let (status, answer) = stateless_call::to_stateless_answer(answer, method::DISCOVER);
            return Ok(reply::answer_with_status(status, &answer, &id));
        }
        let is_subscription = method == method::LISTEN;
        let lifetime = if is_subscription {
            ClientLifetime::Listening { level }
        } else {
            ClientLifetime::Request { method: method.into(), level }
        };
        let facts = SessionFacts {
            permission: request.permission.clone(),
            endpoint,
            name: name.into(),
            version: client.version.clone(),
            client,
            user_agent: request.user_agent(),
            lifetime,
        };
        if is_subscription {
            return self.handle_listen(request, facts, &message, &id, response_settings).await;
        }
        let session = self.sessions.open_stateless(facts, Instant::now());
        let session_guard = StatelessSessionGuard::new(self.clone(), session);
        // The token may have been revoked between the check and the insertion into the table.
        self.check_permission(request)?;
        let call =
            StatelessCall::begin(session_guard, (message, request.peer), response_settings.timeout, admission, memory);
        Ok(stateless_call::run_round(call, id, response_settings, self.work.token()).await)
    }

    /// Answers `subscriptions/listen`. The subscription counts as a session of its user.
    async fn handle_listen(
        self: &Arc<Self>,
        request: HttpRequest<'_>,
        facts: SessionFacts,
        message: &RpcMessage,
        id: &Arc<str>,
        response_settings: ResponseSettings,
    ) -> Checked<Response> {
        if response_settings.format == ResponseFormat::Json {
            let why = "the response is text/event-stream; send an Accept header that includes it";
            return Err(error_response(StatusCode::NOT_ACCEPTABLE, Some(id), INVALID_REQUEST, why));
        }
        let filter = SubscriptionFilter::read(message.params());
        let filter = filter.map_err(|why| error_response(StatusCode::BAD_REQUEST, Some(id), INVALID_PARAMS, &why))?;
        let session = self.open_session(request, facts, id)?;
        let guard = SubscriptionGuard { endpoint: self.clone(), session: session.clone() };
        let Ok((call, _withdrawn)) = session.open_call(id, true) else {
            return Err(error_response(
                StatusCode::BAD_REQUEST,
                Some(id),
                INVALID_REQUEST,
                "a request with this id is open already; use another id",
            ));
        };
        let open = OpenCallGuard { session: session.clone(), call };
        let accepted_filter = match self.handler.listen(&session, filter).await {
            Ok(accepted_filter) => accepted_filter,
            Err(error) => {
                let RpcError { code, message, data } = error;
                let error = RpcError { code: translation::stateless_error_code(code, true), message, data };
                return Ok(reply::rpc_error(era::status_of(error.code), id, error));
            }
        };
        if !session.acknowledge_subscription(id, accepted_filter) {
            return Err(ErrorResponse::new(reply::overloaded(CROWDED_PAUSE)));
        }
        let Some(events) = session.listen(call, None, response_settings.keep_alive) else {
            return Err(error_response(StatusCode::SERVICE_UNAVAILABLE, Some(id), INTERNAL_ERROR, SESSION_ENDED));
        };
        tokio::spawn(async move {
            // The last event is read by the listener that is still attached.
            session.wait_until_abandoned(call, Duration::ZERO).await;
            drop((open, guard));
        });
        Ok(reply::stream(events))
    }
}

pub(super) fn reject_stateless(headers: &HeaderMap) -> Checked<()> {
    let is_stateless = !headers.contains_key(SESSION_ID) && era::is_stateless_header(headers);
    if is_stateless { Err(method_not_allowed("POST")) } else { Ok(()) }
}
