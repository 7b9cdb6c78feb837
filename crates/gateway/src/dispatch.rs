//! The implementation behind the endpoint: dispatches each request to one instance, to the tools that find tools, or to
//! the tools of all instances.

use std::borrow::Cow;
use std::net::SocketAddr;
use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::{BoxFuture, ready};
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::seam::{CallEnd, CallSpan, ObservedCall, ObservedSide, TraceOrigin, TraceParent};
use mcp_satellite_actors::{RuntimeHandle, response_end};
use mcp_satellite_protocol::method;
use mcp_satellite_protocol::rpc::{RpcMessage, member};
use tracing::Instrument as _;

use super::access::User;
use super::answer::{CallAnswer, InitializeAnswer, RpcError};
use super::audience::GatewayAudience;
use super::control_server::{ControlServer, ControlTools};
use super::endpoint_id::EndpointId;
use super::flat::FlatEndpoint;
use super::handler::EndpointHandler;
use super::instance::Instances;
use super::request::{EndpointRequest, OpeningRequest};
use super::session::{ClientLifetime, ClientSession};
use super::subscription::SubscriptionFilter;
use super::tools::endpoint::{handle_notification, unknown_method};
use super::tools::{CallerCache, MetaTools};

#[derive(Debug)]
pub struct EndpointDispatcher {
    runtime: RuntimeHandle,
    instances: Instances,
    tools: Arc<MetaTools>,
    flat: Arc<FlatEndpoint>,
    control: Option<ControlServer>,
}

impl EndpointDispatcher {
    pub fn new(runtime: &RuntimeHandle, audience: Arc<GatewayAudience>) -> Self {
        let callers = Arc::<CallerCache>::default();
        Self {
            runtime: runtime.clone(),
            instances: Instances::new(runtime.clone(), audience, callers.clone()),
            tools: Arc::new(MetaTools::new(runtime.clone(), callers.clone())),
            flat: Arc::new(FlatEndpoint::new(runtime.clone(), callers)),
            control: None,
        }
    }

    /// Adds the control plane as an MCP server.
    #[must_use]
    pub fn with_control(self, tools: Option<Arc<dyn ControlTools>>) -> Self {
        Self { control: tools.map(ControlServer), ..self }
    }
}

/// Request of a client that is observed.
struct ObservedClientRequest<'a> {
    message: &'a RpcMessage,
    user: &'a User,
    endpoint: &'a EndpointId,
    session: Option<&'a str>,
    version: &'a str,
    peer: Option<SocketAddr>,
}

impl EndpointDispatcher {
    /// Returns the span of a request; `None` if nothing observes it.
    fn begin_span(&self, request: &EndpointRequest) -> Option<Box<dyn CallSpan>> {
        if !self.runtime.observer().observes_calls() {
            return None;
        }
        let EndpointRequest { message, session, peer, .. } = request;
        let is_session = session.facts.lifetime == ClientLifetime::Session;
        let session_id = is_session.then(|| session.public_id());
        self.begin_span_of(&ObservedClientRequest {
            message,
            user: session.user(),
            endpoint: &session.facts.endpoint,
            session: session_id.as_deref(),
            version: &session.facts.version,
            peer: *peer,
        })
    }

    /// Returns the span of a request that opens a session or describes an endpoint.
    fn begin_opening_span(&self, request: &OpeningRequest) -> Option<Box<dyn CallSpan>> {
        if !self.runtime.observer().observes_calls() {
            return None;
        }
        let OpeningRequest { user, endpoint, client, message, peer } = request;
        let (version, session) = (&*client.version, None);
        self.begin_span_of(&ObservedClientRequest { message, user, endpoint, session, version, peer: *peer })
    }

    fn begin_span_of(&self, request: &ObservedClientRequest<'_>) -> Option<Box<dyn CallSpan>> {
        let ObservedClientRequest { message, user, endpoint, session, version, peer } = *request;
        let method = message.method().unwrap_or_default();
        let params = message.params();
        let target =
            matches!(method, method::TOOLS_CALL | method::PROMPTS_GET).then(|| member(params?, "name")).flatten();
        let target = target.and_then(|name| serde_json::from_str::<Cow<'_, str>>(name).ok());
        let view = match endpoint {
            EndpointId::Instance(id) => self.runtime.status(id),
            EndpointId::Tools | EndpointId::Flat | EndpointId::Control => None,
        };
        self.runtime.observer().begin_call(&ObservedCall {
            side: ObservedSide::Server { team: &user.team, user: &user.user, session, peer },
            trace: TraceOrigin::Entry(message.trace_parent()),
            method,
            target: target.as_deref(),
            params,
            request_id: &message.id().unwrap_or("null"),
            version: Some(version).filter(|version| !version.is_empty()),
            spec: view.as_ref().map(|view| &*view.spec),
        })
    }
}

fn end_of_answer(answer: &CallAnswer) -> CallEnd<'_> {
    match answer {
        CallAnswer::Message(message) => response_end(message),
        CallAnswer::Result(result) | CallAnswer::CompletedResult(result) => CallEnd::Result(result),
        CallAnswer::Error(error) => end_of_error(error),
        CallAnswer::Cancelled => CallEnd::Cancelled,
    }
}

fn end_of_error(error: &RpcError) -> CallEnd<'_> {
    CallEnd::Error { code: error.code, message: (&error.message).into() }
}

/// Ends the span with the answer. Log lines until then contain the ids of a recorded request.
fn observe<T: Send + 'static>(
    span: Option<Box<dyn CallSpan>>,
    answer: BoxFuture<'static, T>,
    to_end: impl FnOnce(&T) -> CallEnd<'_> + Send + 'static,
) -> BoxFuture<'static, T> {
    let Some(span) = span else { return answer };
    let trace = span.trace();
    let answer = async move {
        let answer = answer.await;
        span.end(to_end(&answer));
        answer
    };
    let Some(TraceParent { trace_id, span_id, .. }) = trace else { return answer.boxed() };
    let (trace_id, span_id) = (u128::from_be_bytes(trace_id), u64::from_be_bytes(span_id));
    let fields = tracing::info_span!(
        "call",
        trace_id = %format_args!("{trace_id:032x}"),
        span_id = %format_args!("{span_id:016x}")
    );
    answer.instrument(fields).boxed()
}

impl EndpointHandler for EndpointDispatcher {
    fn instance(&self, user: &User, name: &str) -> Option<InstanceId> {
        self.instances.find(user, name)
    }

    fn admits_to_control(&self, user: &User) -> bool {
        self.control.as_ref().is_some_and(|control| control.0.admits(user))
    }

    fn initialize(&self, request: OpeningRequest) -> BoxFuture<'static, Result<InitializeAnswer, RpcError>> {
        let span = self.begin_opening_span(&request);
        let OpeningRequest { user, endpoint, client, .. } = request;
        let answer = match endpoint {
            EndpointId::Instance(id) => self.instances.initialize(id, client),
            EndpointId::Tools => self.tools.initialize(&user, &client),
            EndpointId::Flat => self.flat.initialize(&user, &client),
            EndpointId::Control => ready(Ok(ControlServer::initialize(&client))).boxed(),
        };
        observe(span, answer, |answer| match answer {
            Ok(answer) => CallEnd::Result(&answer.result),
            Err(error) => end_of_error(error),
        })
    }

    fn discover(&self, request: OpeningRequest) -> BoxFuture<'static, Result<String, RpcError>> {
        let span = self.begin_opening_span(&request);
        let OpeningRequest { user, endpoint, .. } = request;
        let answer = match endpoint {
            EndpointId::Instance(id) => self.instances.discover(id),
            EndpointId::Tools => ready(Ok(self.tools.discover(&user))).boxed(),
            EndpointId::Flat => ready(Ok(self.flat.discover(&user))).boxed(),
            EndpointId::Control => ready(Ok(ControlServer::discover())).boxed(),
        };
        observe(span, answer, |answer| match answer {
            Ok(result) => CallEnd::Result(result),
            Err(error) => end_of_error(error),
        })
    }

    fn definition(&self, user: Arc<User>, endpoint: &EndpointId, tool: &str) -> BoxFuture<'static, Option<Box<str>>> {
        match endpoint {
            EndpointId::Instance(id) => ready(self.instances.definition(id, tool)).boxed(),
            // No argument of these tools is repeated in a header.
            EndpointId::Tools | EndpointId::Control => ready(None).boxed(),
            EndpointId::Flat => self.flat.definition(user, tool),
        }
    }

    fn listen(
        &self,
        session: &Arc<ClientSession>,
        filter: SubscriptionFilter,
    ) -> BoxFuture<'static, Result<SubscriptionFilter, RpcError>> {
        match &session.facts.endpoint {
            EndpointId::Instance(id) => self.instances.listen(session, id.clone(), filter),
            // The list of these tools never changes; lost and returned servers are reported as log notifications.
            EndpointId::Tools => {
                self.tools.listen(session);
                ready(Ok(SubscriptionFilter::default())).boxed()
            }
            EndpointId::Flat => self.flat.listen(session, filter),
            EndpointId::Control => ready(Ok(SubscriptionFilter::default())).boxed(),
        }
    }

    fn handle_session_start(&self, session: &Arc<ClientSession>) {
        match &session.facts.endpoint {
            EndpointId::Instance(id) => self.instances.handle_session_start(session, id),
            EndpointId::Tools => self.tools.handle_session_start(session),
            EndpointId::Flat => self.flat.handle_session_start(session),
            EndpointId::Control => {}
        }
        // The session may have ended before this call (evicted or its user removed), and `handle_session_end` is not called again.
        if session.end_reason().is_some() {
            self.handle_session_end(session);
        }
    }

    fn handle_request(&self, mut request: EndpointRequest) -> BoxFuture<'static, CallAnswer> {
        let span = self.begin_span(&request);
        request.trace = span.as_ref().and_then(|span| span.trace());
        let answer = match &request.session.facts.endpoint {
            EndpointId::Instance(id) => self.instances.handle_request(id.clone(), request),
            EndpointId::Tools => self.tools.handle_request(request),
            EndpointId::Flat => self.flat.handle_request(request),
            EndpointId::Control => match &self.control {
                Some(control) => control.handle_request(request),
                None => ready(unknown_method(request.message.method())).boxed(),
            },
        };
        observe(span, answer, end_of_answer)
    }

    fn handle_notification(&self, session: &Arc<ClientSession>, message: RpcMessage) {
        match &session.facts.endpoint {
            EndpointId::Instance(id) => self.instances.handle_notification(session, id, message),
            EndpointId::Tools | EndpointId::Flat if message.method() == Some(method::INITIALIZED) => {
                self.instances.announce_roots(session);
            }
            EndpointId::Tools | EndpointId::Flat => handle_notification(&self.runtime, session, &message),
            EndpointId::Control => {}
        }
    }

    fn handle_session_end(&self, session: &Arc<ClientSession>) {
        if session.facts.lifetime == ClientLifetime::Session {
            let took = session.started_at().elapsed();
            self.runtime.observer().client_session_ended(&session.facts.version, took);
        }
        match &session.facts.endpoint {
            EndpointId::Instance(id) => self.instances.handle_session_end(session, id),
            EndpointId::Tools => self.tools.handle_session_end(session),
            EndpointId::Flat => self.flat.handle_session_end(session),
            EndpointId::Control => {}
        }
    }
}
