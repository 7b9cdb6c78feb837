//! A fake endpoint handler: the method of a request selects what it does, and it reports what it receives.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use mcp_satellite::actors::model::event::Event;
use mcp_satellite::actors::model::ids::{InstallationId, InstanceId};
use mcp_satellite::actors::rpc::RpcMessage;
use mcp_satellite::config::{GatewayPlan, GatewayUser, ListenSetting, TokenHash};
use mcp_satellite::gateway::access::{Access, User};
use mcp_satellite::gateway::answer::{CallAnswer, InitializeAnswer, RpcError};
use mcp_satellite::gateway::endpoint_id::EndpointId;
use mcp_satellite::gateway::handler::EndpointHandler;
use mcp_satellite::gateway::request::{EndpointRequest, OpeningRequest};
use mcp_satellite::gateway::session::ClientSession;
use mcp_satellite::gateway::sessions::Sessions;
use mcp_satellite::gateway::subscription::SubscriptionFilter;
use mcp_satellite::gateway::{self, Gateway, GatewaySettings};
use serde_json::json;
use tokio::sync::{Semaphore, mpsc};

/// Everything that the fake handler received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum HandlerEvent {
    SessionStarted,
    /// A request, with its method.
    Request(String),
    /// The future of a request was dropped before it was answered; with its method.
    RequestDropped(String),
    /// The client cancelled a request; with its id.
    RequestCancelled(String),
    /// A notification, with its method.
    Notification(String),
    SessionEnded(&'static str),
}

pub(crate) struct FakeHandler {
    seen: mpsc::UnboundedSender<HandlerEvent>,
    /// `hold` and `talk` answer when they get a permit.
    pub release: Arc<Semaphore>,
}

/// Reports a request that is dropped before it is answered.
struct DropGuard {
    seen: mpsc::UnboundedSender<HandlerEvent>,
    method: String,
    answered: bool,
}

impl Drop for DropGuard {
    fn drop(&mut self) {
        if !self.answered {
            let _ = self.seen.send(HandlerEvent::RequestDropped(self.method.clone()));
        }
    }
}

impl EndpointHandler for FakeHandler {
    fn instance(&self, user: &User, name: &str) -> Option<InstanceId> {
        let own = format!("{}s", user.slug.as_str());
        (name == own || name == "shared")
            .then(|| InstanceId::new(user.team.clone(), user.user.clone(), InstallationId::from(name)))
    }

    fn initialize(&self, request: OpeningRequest) -> BoxFuture<'static, Result<InitializeAnswer, RpcError>> {
        let version = request.client.version;
        let answer = if version == "away" {
            Err(RpcError::new(-32000, "the server is away"))
        } else {
            Ok(InitializeAnswer { result: json!({"protocolVersion": version}).to_string(), version })
        };
        let (seen, release) = (self.seen.clone(), self.release.clone());
        async move {
            if answer.as_ref().is_ok_and(|initialized| initialized.version == "hold") {
                let _ = seen.send(HandlerEvent::Request("initialize".to_owned()));
                release.acquire().await.unwrap().forget();
            }
            answer
        }
        .boxed()
    }

    fn discover(&self, _request: OpeningRequest) -> BoxFuture<'static, Result<String, RpcError>> {
        async { Ok(json!({"capabilities": {}}).to_string()) }.boxed()
    }

    fn definition(&self, _user: Arc<User>, _endpoint: &EndpointId, tool: &str) -> BoxFuture<'static, Option<Box<str>>> {
        let schema = json!({"properties": {"region": {"type": "string", "x-mcp-header": "Region"}}});
        let definition = (tool == "marked").then(|| json!({"name": tool, "inputSchema": schema}).to_string().into());
        async { definition }.boxed()
    }

    fn listen(
        &self,
        session: &Arc<ClientSession>,
        wanted: SubscriptionFilter,
    ) -> BoxFuture<'static, Result<SubscriptionFilter, RpcError>> {
        let _ = self.seen.send(HandlerEvent::SessionStarted);
        // With `prompts` the acknowledgement waits for a permit.
        let (session, release) = (session.clone(), self.release.clone());
        async move {
            if wanted.prompts {
                release.acquire().await.unwrap().forget();
            }
            drop(session);
            Ok(SubscriptionFilter { prompts: false, ..wanted })
        }
        .boxed()
    }

    fn handle_session_start(&self, _session: &Arc<ClientSession>) {
        let _ = self.seen.send(HandlerEvent::SessionStarted);
    }

    fn handle_request(&self, request: EndpointRequest) -> BoxFuture<'static, CallAnswer> {
        let (seen, release) = (self.seen.clone(), self.release.clone());
        async move {
            let EndpointRequest { message, session, call, cancellation: cancelled, .. } = request;
            let method = message.method().unwrap_or_default().to_owned();
            let _ = seen.send(HandlerEvent::Request(method.clone()));
            let mut watch = DropGuard { seen: seen.clone(), method: method.clone(), answered: false };
            let note = |text: &str| {
                let parts = [r#"{"jsonrpc":"2.0","method":"note","params":""#, text, r#""}"#];
                session.send(Some(call), &parts);
            };
            if method == "talk" || method == "chat" {
                note("first");
            }
            if method == "burst" {
                let often: usize = message.params().and_then(|params| params.parse().ok()).unwrap_or_default();
                (0..often).for_each(|_| note(""));
            }
            let held = async {
                if method == "talk" || method == "hold" {
                    release.acquire().await.unwrap().forget();
                }
            };
            let answer = tokio::select! {
                biased;
                words = cancelled => match words {
                    Ok(words) => {
                        let id = words.cancelled_id().unwrap_or_default().to_owned();
                        let _ = seen.send(HandlerEvent::RequestCancelled(id));
                        CallAnswer::Cancelled
                    }
                    Err(_) => futures::future::pending().await,
                },
                () = held => CallAnswer::Result(message.params().unwrap_or("null").to_owned()),
            };
            watch.answered = true;
            answer
        }
        .boxed()
    }

    fn handle_notification(&self, session: &Arc<ClientSession>, message: RpcMessage) {
        let _ = self.seen.send(HandlerEvent::Notification(message.method().unwrap_or_default().to_owned()));
        // Number and length of the messages.
        let often: Option<[usize; 2]> = message.params().and_then(|params| serde_json::from_str(params).ok());
        if message.method() == Some("shout") {
            let [often, letters] = often.unwrap_or([1, 0]);
            let text = "a".repeat(letters);
            for _ in 0..often {
                session.send(None, &[r#"{"jsonrpc":"2.0","method":"shouted","params":""#, &text, r#""}"#]);
            }
        }
    }

    fn handle_session_end(&self, session: &Arc<ClientSession>) {
        let _ = self.seen.send(HandlerEvent::SessionEnded(session.end_reason().map_or("not", |end| end.as_str())));
    }
}

/// An endpoint with the fake handler behind it.
pub(crate) struct FakeEndpoint {
    pub gateway: Gateway,
    pub address: SocketAddr,
    pub access: Arc<Access>,
    pub seen: mpsc::UnboundedReceiver<HandlerEvent>,
    pub release: Arc<Semaphore>,
    pub events: mpsc::UnboundedReceiver<Event>,
}

fn user(name: &str, tokens: &[&str]) -> GatewayUser {
    let tokens = tokens.iter().copied().map(TokenHash::from_token).collect();
    let (team, team_slug, user, slug) = ("team".into(), "acme".into(), name.into(), name.into());
    GatewayUser { team, team_slug, user, slug, tokens, has_stored_token: false, access: None, flat: false }
}

/// Two users: Alice with two tokens, and Bob with one.
pub(crate) fn plan() -> GatewayPlan {
    let users = vec![user("alice", &["alice-token", "alice-other-token"]), user("bob", &["bob-token"])];
    GatewayPlan { users, ..GatewayPlan::default() }
}

impl FakeEndpoint {
    pub(crate) fn new(set: impl FnOnce(&mut GatewaySettings)) -> Self {
        Self::with(plan(), set)
    }

    pub(crate) fn with(plan: GatewayPlan, set: impl FnOnce(&mut GatewaySettings)) -> Self {
        let listener = gateway::bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = listener.local_addr().unwrap();
        let mut settings = GatewaySettings::new("test", &plan, address);
        set(&mut settings);
        let (access, release) = (Arc::new(Access::new(&plan).unwrap()), Arc::new(Semaphore::new(0)));
        let (seen_sender, seen) = mpsc::unbounded_channel();
        let (event_sender, events) = mpsc::unbounded_channel();
        let handler = Arc::new(FakeHandler { seen: seen_sender, release: release.clone() });
        let event_sender = Box::new(move |event| drop(event_sender.send(event)));
        let sessions = Arc::new(Sessions::new());
        let gateway = Gateway::start(listener, settings, access.clone(), handler, sessions, event_sender).unwrap();
        Self { gateway, address, access, seen, release, events }
    }

    /// Applies other settings, and a new listener if given.
    pub(crate) fn reload(
        &self,
        set: impl FnOnce(&mut GatewaySettings),
        new_listener: Option<TcpListener>,
    ) -> io::Result<()> {
        let mut settings = GatewaySettings::new("test", &plan(), self.address);
        set(&mut settings);
        self.gateway.apply(settings, new_listener)
    }

    /// Binds a listener at another loopback address.
    pub(crate) fn bind_other_address(&self) -> TcpListener {
        let other = SocketAddr::from(([127, 0, 0, 2], 0));
        self.gateway.bind_new_address(ListenSetting::Address(other)).unwrap().unwrap()
    }

    /// The next `ClientDisconnected` event: public session id, number of tool calls, reason.
    pub(crate) async fn next_disconnect(&mut self) -> (String, u64, String) {
        loop {
            let event = self.events.recv().await.unwrap();
            if let Event::ClientDisconnected { session_id, tool_execution_count, reason, .. } = event {
                return (session_id, tool_execution_count, reason);
            }
        }
    }

    /// Waits until the handler has received it.
    pub(crate) async fn wait_for(&mut self, wanted: HandlerEvent) {
        while let Some(seen) = self.seen.recv().await {
            if seen == wanted {
                return;
            }
        }
        panic!("the handler ended without {wanted:?}");
    }
}
