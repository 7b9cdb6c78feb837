//! What answers in these tests: it does what a request's method says, and tells what it has seen.

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
use mcp_satellite::gateway::face::{
    CallAnswer, ClientDescription, EndpointCall, EndpointHandler, EndpointId, InitializeAnswer, RpcError,
};
use mcp_satellite::gateway::session::ClientSession;
use mcp_satellite::gateway::sessions::Sessions;
use mcp_satellite::gateway::subscription::SubscriptionFilter;
use mcp_satellite::gateway::{self, Gateway, GatewaySettings};
use serde_json::json;
use tokio::sync::{Semaphore, mpsc};

/// What the fake has seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Seen {
    Began,
    Asked(String),
    Cancelled(String),
    Withdrawn(String),
    Told(String),
    Ended(&'static str),
}

pub(crate) struct Fake {
    seen: mpsc::UnboundedSender<Seen>,
    /// `hold` and `talk` answer when there is a permit.
    pub release: Arc<Semaphore>,
}

/// Tells that a call was dropped before it was answered.
struct Watch {
    seen: mpsc::UnboundedSender<Seen>,
    method: String,
    answered: bool,
}

impl Drop for Watch {
    fn drop(&mut self) {
        if !self.answered {
            let _ = self.seen.send(Seen::Cancelled(self.method.clone()));
        }
    }
}

impl EndpointHandler for Fake {
    fn instance(&self, user: &User, name: &str) -> Option<InstanceId> {
        let own = format!("{}s", user.slug.as_str());
        (name == own || name == "shared")
            .then(|| InstanceId::new(user.team.clone(), user.user.clone(), InstallationId::from(name)))
    }

    fn initialize(
        &self,
        _user: Arc<User>,
        _endpoint: EndpointId,
        greeting: ClientDescription,
    ) -> BoxFuture<'static, Result<InitializeAnswer, RpcError>> {
        let version = greeting.version;
        let answer = if version == "away" {
            Err(RpcError::new(-32000, "the server is away"))
        } else {
            Ok(InitializeAnswer { result: json!({"protocolVersion": version}).to_string(), version })
        };
        let (seen, release) = (self.seen.clone(), self.release.clone());
        async move {
            if answer.as_ref().is_ok_and(|welcome| welcome.version == "hold") {
                let _ = seen.send(Seen::Asked("initialize".to_owned()));
                release.acquire().await.unwrap().forget();
            }
            answer
        }
        .boxed()
    }

    fn discover(&self, _user: Arc<User>, _endpoint: EndpointId) -> BoxFuture<'static, Result<String, RpcError>> {
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
        let _ = self.seen.send(Seen::Began);
        // It hears nothing before it is told that it does.
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
        let _ = self.seen.send(Seen::Began);
    }

    fn handle_request(&self, session: Arc<ClientSession>, call: EndpointCall) -> BoxFuture<'static, CallAnswer> {
        let (seen, release) = (self.seen.clone(), self.release.clone());
        async move {
            let EndpointCall { message, origin, cancellation: withdrawn, .. } = call;
            let method = message.method().unwrap_or_default().to_owned();
            let _ = seen.send(Seen::Asked(method.clone()));
            let mut watch = Watch { seen: seen.clone(), method: method.clone(), answered: false };
            let note = |text: &str| {
                let parts = [r#"{"jsonrpc":"2.0","method":"note","params":""#, text, r#""}"#];
                session.send(Some(origin.call), &parts);
            };
            if method == "talk" || method == "chat" {
                note("first");
            }
            if method == "burst" {
                // Before its stream has a listener.
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
                words = withdrawn => match words {
                    Ok(words) => {
                        let _ = seen.send(Seen::Withdrawn(words.cancelled_id().unwrap_or_default().to_owned()));
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
        let _ = self.seen.send(Seen::Told(message.method().unwrap_or_default().to_owned()));
        // How often, and how much at once.
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
        let _ = self.seen.send(Seen::Ended(session.end_reason().map_or("not", |end| end.as_str())));
    }
}

/// The endpoint in front of the fake.
pub(crate) struct Stage {
    pub gateway: Gateway,
    pub address: SocketAddr,
    pub access: Arc<Access>,
    pub seen: mpsc::UnboundedReceiver<Seen>,
    pub release: Arc<Semaphore>,
    pub events: mpsc::UnboundedReceiver<Event>,
}

fn user(name: &str, tokens: &[&str]) -> GatewayUser {
    let tokens = tokens.iter().copied().map(TokenHash::from_token).collect();
    let (team, team_slug, user, slug) = ("team".into(), "acme".into(), name.into(), name.into());
    GatewayUser { team, team_slug, user, slug, tokens, has_stored_token: false, flat: false }
}

/// Alice, who has two tokens, and Bob.
pub(crate) fn plan() -> GatewayPlan {
    let users = vec![user("alice", &["alice-token", "alice-other-token"]), user("bob", &["bob-token"])];
    GatewayPlan { users, ..GatewayPlan::default() }
}

impl Stage {
    pub(crate) fn new(set: impl FnOnce(&mut GatewaySettings)) -> Self {
        Self::with(plan(), set)
    }

    pub(crate) fn with(plan: GatewayPlan, set: impl FnOnce(&mut GatewaySettings)) -> Self {
        let listener = gateway::bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = listener.local_addr().unwrap();
        let mut settings = GatewaySettings::new("test", &plan, address);
        set(&mut settings);
        let (access, release) = (Arc::new(Access::new(&plan).unwrap()), Arc::new(Semaphore::new(0)));
        let (see, seen) = mpsc::unbounded_channel();
        let (tell, events) = mpsc::unbounded_channel();
        let faces = Arc::new(Fake { seen: see, release: release.clone() });
        let tell = Box::new(move |event| drop(tell.send(event)));
        let sessions = Arc::new(Sessions::new());
        let gateway = Gateway::start(listener, settings, access.clone(), faces, sessions, tell).unwrap();
        Self { gateway, address, access, seen, release, events }
    }

    /// Goes on with other settings, perhaps elsewhere.
    pub(crate) fn reload(
        &self,
        set: impl FnOnce(&mut GatewaySettings),
        elsewhere: Option<TcpListener>,
    ) -> io::Result<()> {
        let mut settings = GatewaySettings::new("test", &plan(), self.address);
        set(&mut settings);
        self.gateway.apply(settings, elsewhere)
    }

    /// Another place.
    pub(crate) fn elsewhere(&self) -> TcpListener {
        let other = SocketAddr::from(([127, 0, 0, 2], 0));
        self.gateway.bind_new_address(ListenSetting::Address(other)).unwrap().unwrap()
    }

    /// The next end of a session that is told: its public id, how many tools were called, and why it ended.
    pub(crate) async fn disconnected(&mut self) -> (String, u64, String) {
        loop {
            let event = self.events.recv().await.unwrap();
            if let Event::ClientDisconnected { session_id, tool_execution_count, reason, .. } = event {
                return (session_id, tool_execution_count, reason);
            }
        }
    }

    /// Waits until the fake has seen it.
    pub(crate) async fn saw(&mut self, wanted: Seen) {
        while let Some(seen) = self.seen.recv().await {
            if seen == wanted {
                return;
            }
        }
        panic!("the fake has gone and has not seen {wanted:?}");
    }
}
