//! The endpoint `/i/{instance}/mcp`: passes messages to one instance and back unchanged.

use mcp_satellite_protocol::error_code::{INVALID_PARAMS, SERVER_ERROR};
use mcp_satellite_protocol::{header_params, method};
use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{FutureExt as _, StreamExt as _, stream};
use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::remote::ServerInfo;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::spec::{RemoteTransport, ServerTarget};
use mcp_satellite_actors::{RuntimeHandle, is_repeatable};
use mcp_satellite_protocol::era::{Era, NEWEST_SESSION_VERSION};
use mcp_satellite_protocol::rpc::{MessageKind, RpcMessage, join_parts};
use tokio::sync::oneshot;
use tokio::time::{Duration, sleep, timeout};

use super::access::User;
use super::answer::{CallAnswer, InitializeAnswer, RpcError};
use super::audience::GatewayAudience;
use super::client_description::ClientDescription;
use super::era::{self, translation};
use super::forward::forward;
use super::refusal::CallRefusal;
use super::request::EndpointRequest;
use super::session::{ClientLifetime, ClientSession};
use super::shared_session::{SUBSCRIPTIONS_MAX, SharedSessionRequest, SubscriptionLimitError, URI_BYTES_MAX};
use super::subscription::SubscriptionFilter;
use super::tools::CallerCache;
use super::tools::raw::{find_string, json_string};

// Maximum time that a connecting client waits for a server that has to be started.
const GREETING_TIMEOUT: Duration = Duration::from_secs(60);
// Maximum number of subscriptions of one client that are sent to its server at once.
const SUBSCRIBING_MAX: usize = 8;

const ROOTS_CHANGED: &[u8] = br#"{"jsonrpc":"2.0","method":"notifications/roots/list_changed"}"#;

#[derive(Debug)]
pub(super) struct Instances {
    runtime: RuntimeHandle,
    audience: Arc<GatewayAudience>,
    callers: Arc<CallerCache>,
}

impl Instances {
    pub(super) fn new(runtime: RuntimeHandle, audience: Arc<GatewayAudience>, callers: Arc<CallerCache>) -> Self {
        audience.set_runtime(runtime.clone());
        Self { runtime, audience, callers }
    }

    pub(super) fn find(&self, user: &User, name: &str) -> Option<InstanceId> {
        let caller = self.callers.caller(self.runtime.snapshot(), &user.team, &user.user);
        caller.server(name).ok().map(|view| view.spec.id.clone())
    }

    pub(super) fn initialize(
        &self,
        id: InstanceId,
        client: ClientDescription,
    ) -> BoxFuture<'static, Result<InitializeAnswer, RpcError>> {
        let runtime = self.runtime.clone();
        async move {
            let server = runtime.server_info(&id, GREETING_TIMEOUT).await;
            let server =
                server.map_err(|error| CallRefusal::from_instance_error(&error, &runtime, &id, None).to_rpc_error())?;
            let server_version = if server.era == Era::Sessions { &server.protocol } else { NEWEST_SESSION_VERSION };
            let version = era::negotiate_version(&client.version, server_version);
            Ok(InitializeAnswer { result: translation::initialize_result(&server, &version), version })
        }
        .boxed()
    }

    pub(super) fn discover(&self, id: InstanceId) -> BoxFuture<'static, Result<String, RpcError>> {
        let runtime = self.runtime.clone();
        async move {
            let server = fetch_server_info(&runtime, &id).await;
            let server =
                server.map_err(|error| CallRefusal::from_instance_error(&error, &runtime, &id, None).to_rpc_error())?;
            Ok(translation::discovery_result(&server))
        }
        .boxed()
    }

    pub(super) fn definition(&self, id: &InstanceId, tool: &str) -> Option<Box<str>> {
        let view = self.runtime.status(id)?;
        let definition = view.catalogue.as_deref()?.tool(tool)?.raw.get();
        header_params::may_have_header_params(definition).then(|| definition.into())
    }

    pub(super) fn listen(
        &self,
        session: &Arc<ClientSession>,
        id: InstanceId,
        filter: SubscriptionFilter,
    ) -> BoxFuture<'static, Result<SubscriptionFilter, RpcError>> {
        let (runtime, audience, session) = (self.runtime.clone(), self.audience.clone(), session.clone());
        async move {
            let server = fetch_server_info(&runtime, &id).await;
            let server =
                server.map_err(|error| CallRefusal::from_instance_error(&error, &runtime, &id, None).to_rpc_error())?;
            let mut accepted = filter.restrict_to(server.capabilities.get());
            audience.add_client(&session, &id);
            // The session may have ended while the server was asked.
            if session.end_reason().is_some() {
                audience.remove_client(&session, &id);
                return Err(CallRefusal::closing().to_rpc_error());
            }
            let uris = std::mem::take(&mut accepted.uris);
            accepted.uris = subscribe_all(&runtime, &audience, &session, &id, uris).await?;
            Ok(accepted)
        }
        .boxed()
    }

    pub(super) fn handle_session_start(&self, session: &Arc<ClientSession>, id: &InstanceId) {
        self.audience.add_client(session, id);
    }

    pub(super) fn handle_request(&self, id: InstanceId, request: EndpointRequest) -> BoxFuture<'static, CallAnswer> {
        let (runtime, audience) = (self.runtime.clone(), self.audience.clone());
        async move {
            let view = runtime.status(&id);
            // A dormant server is healthy and is not woken by a ping.
            if request.method() == method::PING && view.as_ref().is_some_and(|view| view.dormant) {
                return CallAnswer::Result("{}".to_owned());
            }
            if request.era == Era::Stateless {
                let own = || view.as_ref().map(|view| view.spec.policy.session.request_timeout);
                let timeout = request.timeout.or_else(own).unwrap_or(GREETING_TIMEOUT);
                let prepared = prepare_log_level(&runtime, &audience, &request.session, &id, timeout);
                if let Err(error) = Box::pin(prepared).await {
                    return CallRefusal::from_instance_error(&error, &runtime, &id, None).to_answer(request.method());
                }
            } else if let Some(shared) = SharedSessionRequest::from_message(&request.message) {
                return Box::pin(forward_shared_request(&runtime, &audience, &id, &shared, request)).await;
            }
            let answer = forward_request(&runtime, &id, view, request).await;
            audience.retry_failed_sync(&id);
            answer
        }
        .boxed()
    }

    pub(super) fn handle_notification(&self, session: &Arc<ClientSession>, id: &InstanceId, message: RpcMessage) {
        let forwarded = match message.method() {
            // The server's own session was initialized long before.
            Some(method::INITIALIZED) => {
                if !self.audience.take_rootless(session, id) {
                    return;
                }
                RpcMessage::parse(Bytes::from_static(ROOTS_CHANGED)).ok()
            }
            // The request has been answered or never existed; the server may use this id for another request.
            Some(method::CANCELLED) => None,
            Some(method::PROGRESS) => translate_question_progress(session, &message),
            _ => Some(message),
        };
        let Some(message) = forwarded else { return };
        if let Err(error) = self.runtime.notify(id, message) {
            tracing::debug!(session_id = session.public_id(), %error, "a client's notification was not passed on");
        }
    }

    /// Sends `notifications/roots/list_changed` to the user's servers that requested roots before any client had some.
    /// Called when a client of several servers has initialized its session.
    pub(super) fn announce_roots(&self, session: &ClientSession) {
        for id in self.audience.take_all_rootless(session) {
            let sent =
                RpcMessage::parse(Bytes::from_static(ROOTS_CHANGED)).map(|message| self.runtime.notify(&id, message));
            if let Ok(Err(error)) = sent {
                tracing::debug!(session_id = session.public_id(), %error, "cannot notify a server of new roots");
            }
        }
    }

    pub(super) fn handle_session_end(&self, session: &Arc<ClientSession>, id: &InstanceId) {
        self.audience.remove_client(session, id);
    }
}

/// Returns the server's description, in the stateless form if it supports that era. A dormant server is not woken if
/// the description is known.
async fn fetch_server_info(runtime: &RuntimeHandle, id: &InstanceId) -> Result<Arc<ServerInfo>, CallError> {
    let view = runtime.status(id);
    if let Some(server) = view.as_ref().and_then(|view| view.server.as_ref().filter(|server| is_complete(view, server)))
    {
        return Ok(server.clone());
    }
    match runtime.discover(id, GREETING_TIMEOUT).await? {
        Some(server) => Ok(server),
        None => runtime.server_info(id, GREETING_TIMEOUT).await,
    }
}

/// Returns true if the known description is complete. A remote server that was connected with a session may support the
/// stateless era, too, and is asked first.
fn is_complete(view: &InstanceView, server: &ServerInfo) -> bool {
    let may_speak_both = matches!(view.spec.target, ServerTarget::Remote { transport: RemoteTransport::Http, .. });
    server.era == Era::Stateless || !may_speak_both
}

/// Prepares the log level of a stateless request. A stateless server reads it from the request; any other one must
/// receive it before the request.
async fn prepare_log_level(
    runtime: &RuntimeHandle,
    audience: &GatewayAudience,
    session: &Arc<ClientSession>,
    id: &InstanceId,
    timeout: Duration,
) -> Result<(), CallError> {
    if let ClientLifetime::Request { level: Some(level), .. } = &session.facts.lifetime
        // The call would wake the server anyway.
        && runtime.discover(id, timeout).await?.is_none()
    {
        audience.add_stateless_with_level(session, id, *level, timeout).await;
    }
    Ok(())
}

async fn forward_shared_request(
    runtime: &RuntimeHandle,
    audience: &GatewayAudience,
    id: &InstanceId,
    shared: &SharedSessionRequest,
    request: EndpointRequest,
) -> CallAnswer {
    let recorded = match audience.record_request(&request.session, id, shared) {
        Ok(recorded) => recorded,
        Err(exceeded) => return CallAnswer::Error(subscription_limit_error(exceeded)),
    };
    if recorded.is_granted() {
        return CallAnswer::Result("{}".to_owned());
    }
    let answer = forward_request(runtime, id, runtime.status(id), request).await;
    if let CallAnswer::Message(message) = &answer {
        recorded.report_answer(message.kind() == MessageKind::Result);
    }
    answer
}

/// Subscribes to resources and returns those that the server accepted. Each subscription counts as a request of the
/// user and waits for the rate limit. The whole operation ends after the request timeout.
async fn subscribe_all(
    runtime: &RuntimeHandle,
    audience: &GatewayAudience,
    session: &Arc<ClientSession>,
    id: &InstanceId,
    uris: BTreeSet<String>,
) -> Result<BTreeSet<String>, RpcError> {
    let Some(view) = runtime.status(id) else { return Ok(BTreeSet::new()) };
    let policy = &view.spec.policy.session;
    let at_once = SUBSCRIBING_MAX.min(policy.calls_in_flight_max / 2).max(1);
    let (mut accepted, mut rejected) = (BTreeSet::new(), None);
    let each = uris.into_iter().map(|uri| subscribe(runtime, audience, session, id, uri));
    let mut answers = pin!(stream::iter(each).buffer_unordered(at_once));
    let all = async {
        while let Some(answer) = answers.next().await {
            match answer {
                Ok(uri) => accepted.extend(uri),
                Err(error) => rejected = Some(error),
            }
        }
    };
    // Subscriptions without an answer by then are withdrawn.
    let _ = timeout(policy.request_timeout, all).await;
    match rejected {
        Some(error) if accepted.is_empty() => Err(error),
        _ => Ok(accepted),
    }
}

async fn subscribe(
    runtime: &RuntimeHandle,
    audience: &GatewayAudience,
    session: &Arc<ClientSession>,
    id: &InstanceId,
    uri: String,
) -> Result<Option<String>, RpcError> {
    while let Err(limited) = session.user().count_request() {
        sleep(limited.retry_after).await;
    }
    let shared = SharedSessionRequest::Subscribe(uri.clone());
    let text = format!(
        r#"{{"jsonrpc":"2.0","id":0,"method":"resources/subscribe","params":{{"uri":{}}}}}"#,
        json_string(&uri)
    );
    let message = RpcMessage::parse(text.into()).map_err(|why| RpcError::new(INVALID_PARAMS, why.to_string()))?;
    // Held until the answer, because no client cancels this request.
    let (_cancel, cancellation) = oneshot::channel();
    let session = session.clone();
    let (timeout, era, trace, peer) = (None, Era::Sessions, None, None);
    let request = EndpointRequest { message, session, call: 0, cancellation, timeout, era, trace, peer };
    let is_agreed = match forward_shared_request(runtime, audience, id, &shared, request).await {
        CallAnswer::Result(_) | CallAnswer::CompletedResult(_) => true,
        CallAnswer::Message(answer) => answer.kind() == MessageKind::Result,
        CallAnswer::Error(error) => return Err(error),
        CallAnswer::Cancelled => false,
    };
    Ok(is_agreed.then_some(uri))
}

async fn forward_request(
    runtime: &RuntimeHandle,
    id: &InstanceId,
    view: Option<Arc<InstanceView>>,
    request: EndpointRequest,
) -> CallAnswer {
    let method = request.message.method_text().cloned().unwrap_or_default();
    let tool = (method == method::TOOLS_CALL).then(|| name_of(&request.message)).flatten();
    let known_tool =
        tool.as_ref().and_then(|tool| view.as_ref()?.catalogue.as_deref()?.tool(tool).map(|tool| tool.repeatable));
    let repeatable = known_tool.unwrap_or_else(|| is_repeatable(&method));
    match forward(runtime, id, request, repeatable, tool.map(Into::into)).await {
        Ok(answer) => answer,
        Err(error) => CallRefusal::from_instance_error(&error, runtime, id, None).to_answer(&method),
    }
}

/// Translates the progress of an answer that a server waits for to the server's own token. Drops any other progress,
/// because its token could belong to another client.
fn translate_question_progress(session: &ClientSession, message: &RpcMessage) -> Option<RpcMessage> {
    let (_, token) = session.find_question(message.token()?)?;
    RpcMessage::parse(join_parts(&message.with_token(&token))).ok()
}

fn subscription_limit_error(error: SubscriptionLimitError) -> RpcError {
    let (code, kind, limit) = match error {
        SubscriptionLimitError::Subscriptions => (SERVER_ERROR, "subscriptions", SUBSCRIPTIONS_MAX),
        SubscriptionLimitError::Uri => (INVALID_PARAMS, "subscription_uri", URI_BYTES_MAX),
    };
    let data = Some(format!(r#"{{"kind":"{kind}","limit":{limit}}}"#));
    RpcError { code, message: error.to_string(), data }
}

fn name_of(message: &RpcMessage) -> Option<String> {
    find_string(message.params()?, &["name"]).map(|(_, name)| name)
}
