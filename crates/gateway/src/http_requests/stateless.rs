//! Stateless requests: the part of [request handling](super) that answers requests without a session.

use std::sync::Arc;

use axum::http::{HeaderMap, StatusCode, header, request};
use axum::response::Response;
use mcp_satellite_actors::rpc::{MessageKind, RpcMessage};
use tokio::time::{Duration, Instant};

use super::super::access::Permission;
use super::super::answer::{CallAnswer, RpcError};
use super::super::endpoint_id::EndpointPath;
use super::super::era::request_meta::StatelessRequestMeta;
use super::super::era::{self, HEADER_MISMATCH, StatelessErrorResponse, headers, translation};
use super::super::parked_calls::ParkedRequestIdentity;
use super::super::refusal::INVALID_PARAMS;
use super::super::reply::{self, INVALID_REQUEST, METHOD_NOT_FOUND, SESSION_ID};
use super::super::session::{ClientLifetime, ClientSession, ENDED, SessionEnd, SessionFacts};
use super::super::session_call::{OpenCallGuard, ResponseFormat, ResponseSettings};
use super::super::settings::GatewaySettings;
use super::super::stateless_call::{self, StatelessCall, StatelessSession};
use super::super::subscription::SubscriptionFilter;
use super::super::tools::raw;
use super::{
    BodyMemory, CROWDED_PAUSE, Checked, ErrorResponse, HttpEndpoint, TEXT_MAX, error_response, first_value,
    method_not_allowed, sanitize,
};

struct SubscriptionGuard {
    front: Arc<HttpEndpoint>,
    session: Arc<ClientSession>,
}

impl Drop for SubscriptionGuard {
    fn drop(&mut self) {
        if let Some(session) = self.front.sessions.close(&self.session, SessionEnd::Closed) {
            self.front.handle_session_end(&session);
        }
    }
}

impl HttpEndpoint {
    pub(super) async fn handle_stateless(
        self: &Arc<Self>,
        settings: &GatewaySettings,
        pass: &Permission,
        place: EndpointPath<'_>,
        parts: &request::Parts,
        (message, memory): (RpcMessage, BodyMemory),
        manner: ResponseSettings,
    ) -> Checked<Response> {
        let Some(id) = message.id().filter(|_| message.kind() == MessageKind::Request) else {
            // No client notification of this era has a meaning over HTTP.
            return Ok(reply::empty(StatusCode::ACCEPTED));
        };
        let id: Arc<str> = id.into();
        let wrong = |StatelessErrorResponse { status, error }| ErrorResponse::new(reply::rpc_error(status, &id, error));
        let StatelessRequestMeta { client, level } =
            StatelessRequestMeta::read(&message, &parts.headers).map_err(wrong)?;
        let method = message.method().unwrap_or_default();
        if era::is_removed(method) {
            let why = format!("there is no method `{method}` in this version of the protocol");
            return Err(error_response(StatusCode::NOT_FOUND, Some(&id), METHOD_NOT_FOUND, &why));
        }
        let (endpoint, name) = self.resolve_endpoint(&pass.user, place, &id, translation::INTERNAL_ERROR)?;
        if method == "tools/call"
            && let Some((_, tool)) = message.params().and_then(|params| raw::find_string(params, &["name"]))
            && let Some(definition) = self.handler.definition(pass.user.clone(), &endpoint, &tool).await
        {
            headers::check_arguments(&definition, message.params(), &parts.headers)
                .map_err(|why| error_response(StatusCode::BAD_REQUEST, Some(&id), HEADER_MISMATCH, &why))?;
        }
        let state = message.params().and_then(|params| raw::find_string(params, &["requestState"]));
        let waits = state.and_then(|(_, state)| {
            let bound = ParkedRequestIdentity::new(&pass.user, &endpoint, &message);
            self.parked.take(&state, &bound, Instant::now()).filter(|visit| !visit.is_over())
        });
        if let Some(visit) = waits {
            visit.resume(&message);
            // The parked call has kept its own share of the user's budget.
            drop(memory);
            return Ok(stateless_call::run_round(visit, id, manner, self.work.token()).await);
        }
        let admission = pass
            .user
            .acquire_call_permit()
            .map_err(|limited| ErrorResponse::new(reply::limit_exceeded(Some(&id), &limited)))?;
        if method == "server/discover" {
            let _work = self.work.token();
            self.sessions.record_request(&pass.user, &client, Instant::now());
            let told = match self.handler.discover(pass.user.clone(), endpoint).await {
                Ok(told) => CallAnswer::Result(told),
                Err(error) => CallAnswer::Error(error),
            };
            let (status, told) = stateless_call::to_stateless_answer(told, method);
            return Ok(reply::answer_with_status(status, &told, &id));
        }
        let listens = method == "subscriptions/listen";
        let presence = if listens {
            ClientLifetime::Listening { level }
        } else {
            ClientLifetime::Request { method: method.into(), level }
        };
        let user_agent = first_value(&parts.headers, &header::USER_AGENT).0.map(|text| sanitize(text, TEXT_MAX));
        let (pass, version) = (pass.clone(), client.version.clone());
        let opening = SessionFacts {
            permission: pass,
            endpoint,
            name: name.into(),
            client,
            version,
            user_agent,
            lifetime: presence,
        };
        if listens {
            return self.handle_listen(settings, opening, parts, &message, &id, manner).await;
        }
        let full = |_| {
            error_response(
                StatusCode::SERVICE_UNAVAILABLE,
                Some(&id),
                translation::INTERNAL_ERROR,
                "the system provides no random numbers",
            )
        };
        let guest =
            StatelessSession::new(self.clone(), self.sessions.open_guest(opening, Instant::now()).map_err(full)?);
        // The token may have been revoked between the check and the insertion into the table.
        self.check_permission(settings, &guest.session.facts.permission, parts)?;
        let visit = StatelessCall::begin(guest, message, manner.timeout, admission, memory);
        Ok(stateless_call::run_round(visit, id, manner, self.work.token()).await)
    }

    /// Answers `subscriptions/listen`. The subscription counts as a session of its user.
    async fn handle_listen(
        self: &Arc<Self>,
        settings: &GatewaySettings,
        opening: SessionFacts,
        parts: &request::Parts,
        message: &RpcMessage,
        id: &Arc<str>,
        manner: ResponseSettings,
    ) -> Checked<Response> {
        if manner.format == ResponseFormat::Json {
            let why = "the response is text/event-stream; send an Accept header that includes it";
            return Err(error_response(StatusCode::NOT_ACCEPTABLE, Some(id), INVALID_REQUEST, why));
        }
        let wanted = SubscriptionFilter::read(message.params());
        let wanted = wanted.map_err(|why| error_response(StatusCode::BAD_REQUEST, Some(id), INVALID_PARAMS, &why))?;
        let session = self.open_session(settings, opening, parts, id)?;
        let present = SubscriptionGuard { front: self.clone(), session: session.clone() };
        let Ok((call, _withdrawn)) = session.open_call(id, true) else {
            return Err(error_response(
                StatusCode::BAD_REQUEST,
                Some(id),
                INVALID_REQUEST,
                "a request with this id is open already; use another id",
            ));
        };
        let open = OpenCallGuard { session: session.clone(), call };
        let agreed = match self.handler.listen(&session, wanted).await {
            Ok(agreed) => agreed,
            Err(error) => {
                let RpcError { code, message, data } = error;
                let error = RpcError { code: translation::stateless_error_code(code, true), message, data };
                return Ok(reply::rpc_error(era::status_of(error.code), id, error));
            }
        };
        if !session.acknowledge_subscription(id, agreed) {
            return Err(ErrorResponse::new(reply::overloaded(CROWDED_PAUSE)));
        }
        let Some(listening) = session.listen(call, None, manner.keep_alive) else {
            return Err(error_response(StatusCode::SERVICE_UNAVAILABLE, Some(id), translation::INTERNAL_ERROR, ENDED));
        };
        tokio::spawn(async move {
            // The last event is read by the listener that is still attached.
            session.wait_until_abandoned(call, Duration::ZERO).await;
            drop((open, present));
        });
        Ok(reply::stream(listening))
    }
}

pub(super) fn reject_stateless(headers: &HeaderMap) -> Checked<()> {
    let is_elsewhere = !headers.contains_key(SESSION_ID) && era::is_stateless_header(headers);
    if is_elsewhere { Err(method_not_allowed("POST")) } else { Ok(()) }
}
