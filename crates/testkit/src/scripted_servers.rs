//! Scripted servers of a user: each lists the tools that a test defines and returns its requests.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::http::HeaderMap;
use jiff::Timestamp;
use mcp_satellite_actors::audience::{Audience, NoAudience};
use mcp_satellite_actors::byte_budget::ByteBudget;
use mcp_satellite_actors::model::era::Era;
use mcp_satellite_actors::model::exit::RuntimeEnd;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rpc::{RpcMessage, join_parts, member};
use mcp_satellite_actors::seam::{Connectors, OpenError, ProcessConnector};
use mcp_satellite_actors::{RuntimeHandle, RuntimeOptions, start};
use mcp_satellite_config::{EndpointAuth, GatewayPlan, GatewayUser};
use mcp_satellite_gateway::access::Access;
use mcp_satellite_gateway::answer::CallAnswer;
use mcp_satellite_gateway::client_description::ClientDescription;
use mcp_satellite_gateway::endpoint_id::EndpointId;
use mcp_satellite_gateway::flat::MergedLists;
use mcp_satellite_gateway::request::EndpointRequest;
use mcp_satellite_gateway::session::{ClientLifetime, ClientSession, SessionFacts};
use mcp_satellite_gateway::tools::{CallerSnapshot, MetaTools};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream, duplex, split};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use crate::pipe::{PipeConnector, ServerPipes};
use crate::sink::DiscardingSink;
use crate::spec::{spec_of, stdio};

/// Longer than a server needs to become dormant. In paused time the wait costs nothing.
pub const GIVE_UP: Duration = Duration::from_secs(300);

/// The lists of one server, as JSON texts of arrays. A server without tools cannot be started.
#[derive(Debug, Clone, Copy, Default)]
pub struct Lists {
    pub tools: &'static str,
    pub resources: &'static str,
    pub templates: &'static str,
    pub prompts: &'static str,
}

type ListsByInstallation = Arc<Mutex<HashMap<String, Lists>>>;

/// Returns a connector for servers with these lists. `unanswered` receives the messages that a server does not answer.
fn connector(lists: ListsByInstallation, unanswered: mpsc::UnboundedSender<String>) -> impl ProcessConnector {
    PipeConnector(move |spec: &InstanceSpec| {
        let lists = lists.lock().unwrap().get(spec.id.installation.as_str()).copied();
        let Some(lists) = lists.filter(|lists| !lists.tools.is_empty()) else {
            return Err(OpenError::Server("cannot start `played`: not found".to_owned()));
        };
        let (client_end, server_end) = duplex(1024 * 1024);
        if spec.server.as_str().starts_with("new") {
            tokio::spawn(serve_stateless(server_end, lists, unanswered.clone()));
        } else {
            let subscribe = spec.server.as_str().starts_with("sub");
            tokio::spawn(serve(server_end, lists, subscribe, unanswered.clone()));
        }
        let (reader, writer) = split(client_end);
        Ok::<ServerPipes, _>((Box::new(reader), Box::new(writer)))
    })
}

/// A server of the era with sessions.
async fn serve(pipe: DuplexStream, lists: Lists, subscribe: bool, unanswered: mpsc::UnboundedSender<String>) {
    let (reader, mut writer) = split(pipe);
    let mut lines = BufReader::new(reader).lines();
    let mut asked_for_progress: Option<String> = None;
    while let Ok(Some(line)) = lines.next_line().await {
        let message = RpcMessage::parse(line.clone().into()).unwrap();
        let (id, method) = match (message.id(), message.method()) {
            (Some(id), Some(method)) => (id, method),
            // The response to a request on behalf of a call. Its id is the id of the call, which is answered now.
            (Some(id), None) => {
                let (id, outcome) = (id.trim_matches('"'), message.outcome().unwrap());
                if outcome.contains(r#""hang""#) {
                    let _ = unanswered.send(line);
                    continue;
                }
                if let Some(token) = asked_for_progress.take() {
                    let message_text = format!(
                        "{{\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\",\"params\":{{\"progressToken\":{token},\"progress\":1}}}}\n"
                    );
                    writer.write_all(message_text.as_bytes()).await.unwrap();
                }
                let answer = format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"result\":{{\"x-told\":{outcome}}}}}\n");
                writer.write_all(answer.as_bytes()).await.unwrap();
                continue;
            }
            (None, _) => {
                let _ = unanswered.send(line);
                continue;
            }
        };
        let params = message.params().unwrap_or("null");
        let or_none = |list: &'static str| if list.is_empty() { "[]" } else { list };
        let outcome = match method {
            "initialize" if subscribe => r#""result":{"protocolVersion":"2025-11-25","capabilities":{"tools":{},"resources":{"subscribe":true}},"serverInfo":{"name":"played","version":"1"}}"#.to_owned(),
            "resources/subscribe" if params.contains("refuse") => r#""error":{"code":-32602,"message":"no"}"#.to_owned(),
            "initialize" => r#""result":{"protocolVersion":"2025-11-25","capabilities":{"tools":{},"resources":{},"prompts":{}},"serverInfo":{"name":"played","version":"1"}}"#.to_owned(),
            "tools/list" => format!(r#""result":{{"tools":{}}}"#, lists.tools),
            "resources/list" => format!(r#""result":{{"resources":{}}}"#, or_none(lists.resources)),
            "resources/templates/list" => format!(r#""result":{{"resourceTemplates":{}}}"#, or_none(lists.templates)),
            "prompts/list" => format!(r#""result":{{"prompts":{}}}"#, or_none(lists.prompts)),
            "tools/call" if params.contains(r#""name":"hang""#) => {
                let _ = unanswered.send(line);
                continue;
            }
            "tools/call" if params.contains(r#""name":"ask""#) => {
                asked_for_progress = message.token().map(str::to_owned);
                let request = format!("{{\"jsonrpc\":\"2.0\",\"id\":\"{id}\",\"method\":\"sampling/createMessage\",\"params\":{{\"x\":1e400,\"_meta\":{{\"progressToken\":\"its own\"}}}}}}\n");
                writer.write_all(request.as_bytes()).await.unwrap();
                continue;
            }
            "tools/call" if params.contains(r#""name":"doubt""#) => {
                // A long request, its cancellation, and another long request.
                let ask = |number: &str| {
                    let long = "x".repeat(3000);
                    format!("{{\"jsonrpc\":\"2.0\",\"id\":\"{number}\",\"method\":\"sampling/createMessage\",\"params\":{{\"x\":\"{long}\"}}}}\n")
                };
                let back = "{\"jsonrpc\":\"2.0\",\"method\":\"notifications/cancelled\",\"params\":{\"requestId\":\"first\"}}\n";
                let message_text = [&ask("first"), back, &ask(id)].concat();
                writer.write_all(message_text.as_bytes()).await.unwrap();
                continue;
            }
            "tools/call" if params.contains(r#""name":"slow""#) => {
                let message_text = format!(
                    "{{\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\",\"params\":{{\"progressToken\":{},\"progress\":1}}}}\n",
                    message.token().unwrap()
                );
                writer.write_all(message_text.as_bytes()).await.unwrap();
                r#""result":{"content":[]}"#.to_owned()
            }
            "tools/call" if params.contains(r#""name":"go""#) => {
                r#""error":{"code":-32042,"message":"go there first","data":{"elicitations":[{"mode":"url","elicitationId":"e","message":"m","url":"https://a.example"}]}}"#.to_owned()
            }
            "tools/call" if params.contains(r#""name":"refuse""#) => {
                r#""error":{"code":-32602,"message":"no","data":{"n":1e400}}"#.to_owned()
            }
            "tools/call" => format!(r#""result":{{"content":[],"x-reflected":{params}}}"#),
            "resources/read" if params.contains("nothing") => {
                r#""error":{"code":-32002,"message":"no such resource"}"#.to_owned()
            }
            "resources/read" if params.contains("odd") => r#""result":{"contents":7}"#.to_owned(),
            "resources/read" => format!(r#""result":{{"contents":[{{"uri":"a:b","text":"t","x":1e400,"params":{params}}}]}}"#),
            "prompts/get" | "completion/complete" => format!(r#""result":{{"x-reflected":{params}}}"#),
            _ => r#""result":{}"#.to_owned(),
        };
        let answer = format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},{outcome}}}\n");
        if writer.write_all(answer.as_bytes()).await.is_err() {
            return;
        }
    }
}

/// A server of the era without sessions.
async fn serve_stateless(pipe: DuplexStream, lists: Lists, unanswered: mpsc::UnboundedSender<String>) {
    let (reader, mut writer) = split(pipe);
    let mut lines = BufReader::new(reader).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let message = RpcMessage::parse(line.clone().into()).unwrap();
        let (Some(id), Some(method)) = (message.id(), message.method()) else {
            let _ = unanswered.send(line);
            continue;
        };
        let params = message.params().unwrap_or("null");
        let or_none = |list: &'static str| if list.is_empty() { "[]" } else { list };
        let hints = r#""resultType":"complete","ttlMs":7,"cacheScope":"public""#;
        let outcome = match method {
            "server/discover" => format!(
                r#""result":{{{hints},"supportedVersions":["2026-07-28"],"capabilities":{{"tools":{{"listChanged":true}},"resources":{{"subscribe":true}}}},"x-own":1.50,"_meta":{{"io.modelcontextprotocol/serverInfo":{{"name":"new","version":"2"}}}}}}"#
            ),
            "subscriptions/listen" => {
                let meta = format!(r#"{{"io.modelcontextprotocol/subscriptionId":{id}}}"#);
                let wanted = member(params, "notifications").unwrap_or("{}");
                let message_text = format!(
                    "{{\"jsonrpc\":\"2.0\",\"method\":\"notifications/subscriptions/acknowledged\",\"params\":{{\"_meta\":{meta},\"notifications\":{wanted}}}}}\n"
                );
                writer.write_all(message_text.as_bytes()).await.unwrap();
                let _ = unanswered.send(line);
                continue;
            }
            "tools/list" => format!(r#""result":{{{hints},"tools":{}}}"#, lists.tools),
            "resources/list" => format!(r#""result":{{{hints},"resources":{}}}"#, or_none(lists.resources)),
            "resources/templates/list" => {
                format!(r#""result":{{{hints},"resourceTemplates":{}}}"#, or_none(lists.templates))
            }
            "prompts/list" => format!(r#""result":{{{hints},"prompts":{}}}"#, or_none(lists.prompts)),
            "tools/call" if params.contains(r#""name":"change""#) => {
                let message_text = "{\"jsonrpc\":\"2.0\",\"method\":\"notifications/tools/list_changed\"}\n";
                writer.write_all(message_text.as_bytes()).await.unwrap();
                r#""result":{"resultType":"complete","content":[]}"#.to_owned()
            }
            "tools/call" if params.contains(r#""name":"ask""#) => match member(params, "inputResponses") {
                None => r#""result":{"resultType":"input_required","inputRequests":{"q":{"method":"sampling/createMessage","params":{"x":1e400}}},"requestState":"its own"}"#.to_owned(),
                Some(sent) => {
                    let state = member(params, "requestState").unwrap_or("null");
                    format!(r#""result":{{"resultType":"complete","content":[],"x-told":{sent},"x-state":{state}}}"#)
                }
            },
            "tools/call" | "resources/read" => {
                format!(r#""result":{{"resultType":"complete","content":[],"contents":[],"x-reflected":{params}}}"#)
            }
            _ => r#""error":{"code":-32601,"message":"Method not found"}"#.to_owned(),
        };
        let answer = format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},{outcome}}}\n");
        if writer.write_all(answer.as_bytes()).await.is_err() {
            return;
        }
    }
}

/// Returns a request in a new session of alice in the team acme.
pub fn request(
    message: RpcMessage,
    cancellation: oneshot::Receiver<RpcMessage>,
    timeout: Option<Duration>,
) -> EndpointRequest {
    let alice = GatewayUser {
        team: "acme".into(),
        team_slug: "acme".into(),
        user: "alice".into(),
        slug: "alice".into(),
        tokens: Vec::new(),
        has_stored_token: false,
        access: None,
        flat: false,
    };
    let plan = GatewayPlan { auth: EndpointAuth::None(None), users: vec![alice], ..GatewayPlan::default() };
    let permission = Access::new(&plan).unwrap().admit(&HeaderMap::new(), Ipv4Addr::LOCALHOST.into()).unwrap();
    let facts = SessionFacts {
        permission,
        endpoint: EndpointId::Tools,
        name: Box::default(),
        client: ClientDescription::default(),
        version: "2025-11-25".to_owned(),
        user_agent: None,
        lifetime: ClientLifetime::Session,
    };
    let session = Arc::new(ClientSession::new(1, [0; 16], facts, Instant::now(), ByteBudget::new(1 << 20)));
    EndpointRequest { message, session, call: 1, cancellation, timeout, era: Era::Sessions, trace: None, peer: None }
}

/// A runtime with servers of alice in the team acme, and a server `secret` of bob.
pub struct ScriptedServers {
    pub runtime: RuntimeHandle,
    tools: MetaTools,
    lists: ListsByInstallation,
    unanswered: mpsc::UnboundedReceiver<String>,
    join: JoinHandle<RuntimeEnd>,
}

pub fn id(installation: &str) -> InstanceId {
    InstanceId::new("acme".into(), "alice".into(), installation.into())
}

pub fn spec(server: &str, installation: &str, user: &str) -> InstanceSpec {
    InstanceSpec {
        id: InstanceId::new("acme".into(), user.into(), installation.into()),
        name: format!("{server}-acme-{user}-{installation}").into(),
        server: server.into(),
        ..spec_of("acme", installation, stdio("played"))
    }
}

impl ScriptedServers {
    /// Starts a runtime with these servers: slug, installation and lists.
    pub async fn with(servers: &[(&str, &str, Lists)]) -> Self {
        Self::before(Arc::new(NoAudience), servers).await
    }

    /// As `with`, with an audience.
    pub async fn before(audience: Arc<dyn Audience>, servers: &[(&str, &str, Lists)]) -> Self {
        let secret = ("secret", "s", Lists { tools: r#"[{"name":"hush"}]"#, ..Lists::default() });
        let all = || servers.iter().chain([&secret]);
        let lists = all().map(|(_, installation, lists)| ((*installation).to_owned(), *lists)).collect();
        let lists = ListsByInstallation::new(Mutex::new(lists));
        let (sender, unanswered) = mpsc::unbounded_channel();
        let connectors = Connectors::default().with_process(connector(lists.clone(), sender));
        let wall = Arc::new(|| Timestamp::UNIX_EPOCH);
        let mut options = RuntimeOptions::new(connectors, Arc::new(DiscardingSink), wall);
        options.audience = audience;
        let (runtime, join) = start(options).await.unwrap();
        for (server, installation, _) in all() {
            let user = if *server == "secret" { "bob" } else { "alice" };
            runtime.install(spec(server, installation, user)).await.unwrap();
        }
        let tools = MetaTools::new(runtime.clone(), Arc::default());
        let this = Self { runtime, tools, lists, unanswered, join };
        for (_, installation, lists) in servers {
            let wanted = if lists.tools.is_empty() { Status::PermanentlyFailed } else { Status::Online };
            this.wait_until(installation, move |view| view.status == wanted).await;
        }
        this
    }

    pub async fn wait_until(&self, installation: &str, wanted: impl FnMut(&InstanceView) -> bool) {
        let id = id(installation);
        timeout(GIVE_UP, self.runtime.wait_for(&id, wanted)).await.unwrap().unwrap();
    }

    /// Adds a server of alice and waits until it is online.
    pub async fn add(&self, server: &str, installation: &str, lists: Lists) {
        self.relist(installation, lists);
        self.runtime.install(spec(server, installation, "alice")).await.unwrap();
        self.wait_until(installation, |view| view.status == Status::Online).await;
    }

    /// Replaces the lists of a server from its next start on.
    pub fn relist(&self, installation: &str, lists: Lists) {
        self.lists.lock().unwrap().insert(installation.to_owned(), lists);
    }

    /// Waits for an unanswered message that contains this text, and returns it.
    pub async fn wait_for_message(&mut self, part: &str) -> String {
        loop {
            let message = timeout(GIVE_UP, self.unanswered.recv()).await.unwrap().unwrap();
            if message.contains(part) {
                return message;
            }
        }
    }

    /// Calls a meta-tool as alice with these literal params.
    pub async fn call_raw(&self, params: &str, cancellation: oneshot::Receiver<RpcMessage>) -> CallAnswer {
        let text = format!(r#"{{"jsonrpc":"2.0","id":"c","method":"tools/call","params":{params}}}"#);
        let request = request(RpcMessage::parse(text.into()).unwrap(), cancellation, None);
        timeout(GIVE_UP, self.tools.call(request)).await.unwrap()
    }

    /// Calls a meta-tool as alice and returns the result, or the message of the server, as text.
    pub async fn call_text(&self, tool: &str, arguments: &str) -> String {
        let (_cancel, cancellation) = oneshot::channel();
        match self.call_raw(&format!(r#"{{"name":"{tool}","arguments":{arguments}}}"#), cancellation).await {
            CallAnswer::Result(text) => text,
            CallAnswer::Message(message) => String::from_utf8(join_parts(&message.with_id("\"c\"")).to_vec()).unwrap(),
            other => panic!("{other:?}"),
        }
    }

    pub fn flat(&self) -> MergedLists {
        let caller = CallerSnapshot::new(self.runtime.snapshot(), &"acme".into(), &"alice".into());
        MergedLists::new(caller.offered_catalogues(), None)
    }

    /// Calls a meta-tool and returns the structured content of its result.
    pub async fn call_structured(&self, tool: &str, arguments: &str) -> Value {
        let answer: Value = serde_json::from_str(&self.call_text(tool, arguments).await).unwrap();
        let structured = &answer["structuredContent"];
        assert!(structured.is_object(), "{answer}");
        assert!(answer.get("isError").is_none(), "{answer}");
        structured.clone()
    }

    /// Calls a meta-tool that must fail: its data for a program and its text for a model.
    pub async fn call_failing(&self, tool: &str, arguments: &str) -> (Value, String) {
        let answer: Value = serde_json::from_str(&self.call_text(tool, arguments).await).unwrap();
        assert_eq!(answer["isError"], true, "{answer}");
        assert!(answer.get("structuredContent").is_none(), "{answer}");
        let text = answer["content"][0]["text"].as_str().unwrap().to_owned();
        (answer["_meta"]["mcp-satellite/error"].clone(), text)
    }

    pub async fn end(self) {
        self.runtime.shutdown().await;
        self.join.await.unwrap();
    }
}
