//! A whole satellite in one process: the endpoint, a runtime and real servers behind the real connectors.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use jiff::Timestamp;
use mcp_satellite::actors::model::event::Event as SatelliteEvent;
use mcp_satellite::actors::model::ids::InstanceId;
use mcp_satellite::actors::model::policy::Policy;
use mcp_satellite::actors::model::snapshot::InstanceView;
use mcp_satellite::actors::model::spec::{
    ConfigTier, ConfigValue, InstanceConfig, ProcessLifetime, RemoteTransport, ServerTarget,
};
use mcp_satellite::actors::model::status::Status;
use mcp_satellite::actors::seam::{Connectors, EventSink, SinkAnswer, SinkBatch};
use mcp_satellite::actors::{self, RuntimeHandle, RuntimeOptions};
use mcp_satellite::connect::remote::RemoteConnector;
use mcp_satellite::connect::stdio::StdioConnector;
use mcp_satellite::gateway::access::Access;
use mcp_satellite::gateway::audience::GatewayAudience;
use mcp_satellite::gateway::dispatch::EndpointDispatcher;
use mcp_satellite::gateway::endpoint_id::EndpointId;
use mcp_satellite::gateway::sessions::Sessions;
use mcp_satellite::gateway::{self, Gateway, GatewaySettings};
use serde_json::{Value, json};
use testkit::spec::{remote, stdio};
use testkit::wait::GIVE_UP;
use tokio::time::timeout;

use super::client::{Answer, Client, Event, notification, request};
use super::fake;

/// The names of the called tools, complete after the last flush of the shutdown.
pub(crate) type CalledTools = Arc<Mutex<Vec<String>>>;

/// Records the tools of `ToolExecuted` events.
struct ToolRecorder(CalledTools);

impl EventSink for ToolRecorder {
    fn send(&self, batch: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
        for envelope in &batch.events {
            if let SatelliteEvent::ToolExecuted { tool_name, .. } = &envelope.event {
                self.0.lock().unwrap().push(tool_name.clone());
            }
        }
        async { SinkAnswer::Accepted }.boxed()
    }
}

/// A server to install. The default user is Alice.
pub(crate) struct Server {
    name: &'static str,
    user: &'static str,
    target: ServerTarget,
    args: Vec<String>,
    user_required: Vec<String>,
    lifetime: ProcessLifetime,
    pub policy: Policy,
}

/// The path of one of this package's examples.
pub(crate) fn example(name: &str) -> String {
    let path = Path::new(env!("CARGO_BIN_EXE_satellite")).with_file_name("examples").join(name);
    assert!(path.exists(), "{} does not exist: run `cargo build --example {name}`", path.display());
    path.to_str().unwrap().to_owned()
}

impl Server {
    pub(crate) fn command(name: &'static str, command: &str, args: &[&str]) -> Self {
        let mut policy = Policy::default();
        policy.restart.delays = vec![Duration::from_millis(10)];
        policy.session.request_timeout = GIVE_UP;
        let target = stdio(command);
        let args = args.iter().map(ToString::to_string).collect();
        Self {
            name,
            user: "alice",
            target,
            args,
            user_required: Vec::new(),
            lifetime: ProcessLifetime::default(),
            policy,
        }
    }

    pub(crate) fn mirror(name: &'static str) -> Self {
        Self::command(name, &example("mirror"), &[])
    }

    pub(crate) fn sim(name: &'static str, flags: &[&str]) -> Self {
        Self::command(name, env!("CARGO_BIN_EXE_satellite"), &[&["sim-server"], flags].concat())
    }

    pub(crate) fn remote(name: &'static str, url: &str) -> Self {
        let target = remote(RemoteTransport::Http, url);
        Self { target, ..Self::command(name, "", &[]) }
    }

    pub(crate) fn for_user(mut self, user: &'static str) -> Self {
        self.user = user;
        self
    }

    pub(crate) fn lifetime(mut self, lifetime: ProcessLifetime) -> Self {
        self.lifetime = lifetime;
        self
    }

    pub(crate) fn requires(mut self, name: &str) -> Self {
        self.user_required.push(name.to_owned());
        self
    }

    pub(crate) fn policy(mut self, change: impl FnOnce(&mut Policy)) -> Self {
        change(&mut self.policy);
        self
    }

    fn config(self) -> InstanceConfig {
        let args = self.args.into_iter().map(Into::into).collect();
        let env = BTreeMap::from([("MCP_SATELLITE_TEST".to_owned(), ConfigValue::plain("gateway"))]);
        InstanceConfig {
            team: "team".into(),
            user: self.user.into(),
            user_slug: self.user.into(),
            installation: self.name.into(),
            server: self.name.into(),
            server_tier: ConfigTier { args, env, ..ConfigTier::default() },
            user_required: self.user_required,
            lifetime: self.lifetime,
            ..testkit::spec::config(self.target, self.policy)
        }
    }
}

/// A satellite with an endpoint for Alice and Bob, whose tokens are `alice-token` and `bob-token`.
pub(crate) struct TestSatellite {
    pub runtime: RuntimeHandle,
    pub gateway: Gateway,
    pub address: SocketAddr,
    pub tools: CalledTools,
}

impl TestSatellite {
    pub(crate) async fn start() -> Self {
        Self::start_with(|_| {}).await
    }

    pub(crate) async fn start_with(set: impl FnOnce(&mut GatewaySettings)) -> Self {
        let stdio = StdioConnector::new(Vec::new()).unwrap();
        let connectors = Connectors::default().with_process(stdio).with_line(RemoteConnector::new().unwrap());
        let sessions = Arc::new(Sessions::new());
        let audience = Arc::new(GatewayAudience::new(sessions.clone()));
        let tools = CalledTools::default();
        let mut options =
            RuntimeOptions::new(connectors, Arc::new(ToolRecorder(tools.clone())), Arc::new(Timestamp::now));
        options.audience = audience.clone();
        let (runtime, _) = actors::start(options).await.unwrap();

        let listener = gateway::bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = listener.local_addr().unwrap();
        let mut plan = fake::plan();
        (plan.limits.requests_per_second, plan.limits.calls_per_user_max) = (0, 0);
        let mut settings = GatewaySettings::new("test", &plan, address);
        set(&mut settings);
        let access = Arc::new(Access::new(&plan).unwrap());
        let dispatcher = Arc::new(EndpointDispatcher::new(&runtime, audience));
        let gateway = Gateway::start(listener, settings, access, dispatcher, sessions, Box::new(drop)).unwrap();
        Self { runtime, gateway, address, tools }
    }

    /// Installs a server without waiting for it.
    pub(crate) async fn install(&self, server: Server) -> InstanceId {
        let spec = server.config().merge();
        let id = spec.id.clone();
        self.runtime.install(spec).await.unwrap();
        id
    }

    /// Replaces the configuration of a server.
    pub(crate) async fn update(&self, server: Server) {
        self.runtime.update(server.config().merge()).await.unwrap();
    }

    /// Installs a server and waits until it is online.
    pub(crate) async fn online(&self, server: Server) -> InstanceId {
        let id = self.install(server).await;
        self.wait_until(&id, |view| view.status == Status::Online).await;
        id
    }

    /// Waits until the view of an instance fulfils the condition.
    pub(crate) async fn wait_until(
        &self,
        id: &InstanceId,
        wanted: impl FnMut(&InstanceView) -> bool,
    ) -> Arc<InstanceView> {
        let waiting = timeout(GIVE_UP, self.runtime.wait_for(id, wanted));
        waiting.await.unwrap_or_else(|_| panic!("gave up waiting: {:#?}", self.runtime.status(id))).unwrap()
    }

    /// Kills the process of an instance and waits until a new one is online.
    pub(crate) async fn kill(&self, id: &InstanceId) {
        let old = self.runtime.status(id).unwrap().pid.unwrap();
        let pid = nix::unistd::Pid::from_raw(old.cast_signed());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
        let is_new = |view: &InstanceView| view.pid.is_some_and(|pid| pid != old) && view.port.is_some();
        self.wait_until(id, |view| view.status == Status::Online && is_new(view)).await;
    }

    /// Connects as Alice to `/i/{name}/mcp`, without a session.
    pub(crate) async fn connect(&self, name: &str) -> Client {
        let mut client = Client::connect(self.address).await;
        client.path = format!("/i/{name}/mcp");
        client
    }

    /// A client of Alice in a session, with these capabilities.
    pub(crate) async fn client(&self, name: &str, capabilities: Value) -> SessionClient {
        SessionClient::connect(self.connect(name).await, capabilities).await
    }

    pub(crate) async fn end(self) {
        self.gateway.drain().await;
        self.runtime.shutdown().await;
    }

    /// Uninstalls an instance and ends its sessions, as a satellite does.
    pub(crate) async fn uninstall(&self, id: &InstanceId) {
        self.runtime.uninstall(id).await.unwrap();
        self.gateway.end_endpoint_sessions(&EndpointId::Instance(id.clone()));
    }
}

/// A client in a session, with one connection for requests and one for the GET stream.
pub(crate) struct SessionClient {
    pub posts: Client,
    pub listens: Client,
}

/// An `initialize` request.
pub(crate) fn initialize_request(capabilities: Value) -> Value {
    let info = json!({"name": "raw", "version": "1"});
    let params = json!({"protocolVersion": "2025-11-25", "capabilities": capabilities, "clientInfo": info});
    request(0, "initialize", params)
}

impl SessionClient {
    /// Opens a session and its GET stream, and sends `notifications/initialized`.
    pub(crate) async fn connect(mut posts: Client, capabilities: Value) -> Self {
        let answer = posts.post(&initialize_request(capabilities)).await;
        assert_eq!(answer.head.status, 200, "{answer:?}");
        posts.session = answer.head.header("mcp-session-id").map(str::to_owned);
        assert!(posts.session.is_some(), "{answer:?}");
        let mut listens = posts.second_connection().await;
        listens.open("GET", &[], "").await;
        // The first event is the priming event.
        assert_eq!(listens.event().await.unwrap().data, "");
        let mut attached = Self { posts, listens };
        attached.send(&notification("notifications/initialized", json!({})).to_string()).await;
        attached
    }

    /// Sends a request whose response must be JSON.
    pub(crate) async fn ask(&mut self, request: &str) -> Answer {
        timeout(GIVE_UP, self.posts.ask("POST", &[], request)).await.expect("no answer")
    }

    pub(crate) async fn call(&mut self, id: u64, method: &str, params: Value) -> Value {
        self.ask(&request(id, method, params).to_string()).await.json()
    }

    /// Sends a notification or a response.
    pub(crate) async fn send(&mut self, message: &str) {
        let answer = self.ask(message).await;
        assert_eq!(answer.head.status, 202, "{answer:?}");
    }

    /// Sends a request and returns all messages up to its response.
    pub(crate) async fn stream(&mut self, request: &str) -> Vec<String> {
        let all = async {
            self.posts.send("POST", &[], request).await;
            let head = self.posts.head().await;
            if !head.is_stream() {
                return vec![String::new(), self.posts.body(&head).await];
            }
            let mut all = Vec::new();
            while let Some(event) = self.posts.event().await {
                all.push(event.data);
            }
            all
        };
        let mut all = timeout(GIVE_UP, all).await.expect("the stream did not end");
        assert_eq!(all.remove(0), "");
        all
    }

    /// Makes the mirror send these messages literally.
    pub(crate) async fn say(&mut self, id: u64, messages: &[&str]) -> Vec<String> {
        self.stream(&say(id, messages)).await
    }

    /// Makes the mirror send these messages after the response, when no call is in progress.
    pub(crate) async fn say_without_call(&mut self, messages: &[&str]) {
        self.stream(&say(1, &[&[DONE], messages].concat())).await;
    }

    /// The next message on the GET stream.
    pub(crate) async fn next_message(&mut self) -> String {
        let event: Option<Event> = timeout(GIVE_UP, self.listens.event()).await.expect("no message in time");
        event.expect("the stream ended").data
    }

    /// The next message on the GET stream, as JSON.
    pub(crate) async fn next_json(&mut self) -> Value {
        serde_json::from_str(&self.next_message().await).unwrap()
    }

    pub(crate) async fn end_session(mut self) {
        assert_eq!(self.posts.ask("DELETE", &[], "").await.head.status, 204);
    }
}

/// The request that makes the mirror send these messages.
pub(crate) fn say(id: u64, messages: &[&str]) -> String {
    let messages = messages.join(",");
    format!(
        r#"{{"jsonrpc":"2.0","id":{id},"method":"mirror/say","params":{{"_meta":{{"progressToken":{id}}},"messages":[{messages}]}}}}"#
    )
}

/// The message with which the mirror answers the `mirror/say` request itself.
pub(crate) const DONE: &str = r#"{"jsonrpc":"2.0","id":"$id","result":{}}"#;
