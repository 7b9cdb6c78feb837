//! A user's servers, each of which lists what a test says and reflects what it is asked.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, pending};
use jiff::Timestamp;
use mcp_satellite::gateway::face::{self, ClientDescription, EndpointCall};
use mcp_satellite::gateway::flat::MergedLists;
use mcp_satellite::gateway::tools::{CallerSnapshot, MetaTools};
use mcp_satellite_actors::audience::{Audience, CallOrigin, NoAudience};
use mcp_satellite_actors::model::era::Era;
use mcp_satellite_actors::model::exit::RuntimeEnd;
use mcp_satellite_actors::model::ids::{InstanceId, RunNumber};
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::secret::SecretMask;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::spec::{InstanceSpec, ProcessLifetime, ServerTarget, UpdateMethod};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rpc::{RpcMessage, join_parts, member};
use mcp_satellite_actors::seam::{
    Connector, EventSink, OpenError, ProcessEnd, ProcessLink, ServerLine, ServerProcess, SinkAnswer, SinkBatch,
    UnsupportedLine,
};
use mcp_satellite_actors::{RuntimeHandle, RuntimeOptions, start};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream, duplex, split};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// Longer than it takes a server to fall asleep; in paused time it costs nothing.
pub(crate) const GIVE_UP: Duration = Duration::from_secs(300);

struct Nothing;

impl EventSink for Nothing {
    fn send(&self, _batch: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
        async { SinkAnswer::Accepted }.boxed()
    }
}

/// It ends when it is told to.
struct Played {
    told_to_end: bool,
}

impl ServerProcess for Played {
    fn pid(&self) -> Option<u32> {
        None
    }

    fn wait(&mut self) -> BoxFuture<'_, ProcessEnd> {
        if self.told_to_end { async { ProcessEnd { code: Some(0), signal: None } }.boxed() } else { pending().boxed() }
    }

    fn wait_all(&mut self) -> BoxFuture<'_, ()> {
        self.wait().map(|_| ()).boxed()
    }

    fn terminate(&mut self) {
        self.told_to_end = true;
    }

    fn kill(&mut self) {
        self.told_to_end = true;
    }
}

/// What one server lists, as JSON texts of arrays. One that lists nothing cannot be started.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Lists {
    pub(crate) tools: &'static str,
    pub(crate) resources: &'static str,
    pub(crate) templates: &'static str,
    pub(crate) prompts: &'static str,
}

/// What the servers list, by installation; and where it is told what they hear that wants no answer.
#[derive(Clone)]
struct Stage {
    lists: Arc<Mutex<HashMap<String, Lists>>>,
    heard: mpsc::UnboundedSender<String>,
}

impl Connector for Stage {
    fn open(&self, spec: Arc<InstanceSpec>, _run: RunNumber) -> BoxFuture<'static, Result<ProcessLink, OpenError>> {
        let lists = self.lists.lock().unwrap().get(spec.id.installation.as_str()).copied();
        let Some(lists) = lists.filter(|lists| !lists.tools.is_empty()) else {
            return async { Err(OpenError::Server("cannot start `played`: not found".to_owned())) }.boxed();
        };
        let (ours, theirs) = duplex(1024 * 1024);
        if spec.server.as_str().starts_with("new") {
            tokio::spawn(serve_stateless(theirs, lists, self.heard.clone()));
        } else {
            let subscribe = spec.server.as_str().starts_with("sub");
            tokio::spawn(serve(theirs, lists, subscribe, self.heard.clone()));
        }
        let (reader, writer) = split(ours);
        let process = Box::new(Played { told_to_end: false });
        let link = ProcessLink {
            reader: Box::new(reader),
            writer: Box::new(writer),
            stderr: None,
            process,
            guard: Box::new(()),
        };
        async { Ok(link) }.boxed()
    }

    fn dial(&self, _spec: &Arc<InstanceSpec>, _run: RunNumber) -> Box<dyn ServerLine> {
        Box::new(UnsupportedLine::default())
    }
}

/// One of sessions. It goes on with what it is told until it is told to hang.
async fn serve(pipe: DuplexStream, lists: Lists, subscribe: bool, heard: mpsc::UnboundedSender<String>) {
    let (reader, mut writer) = split(pipe);
    let mut lines = BufReader::new(reader).lines();
    let mut asked_for_progress: Option<String> = None;
    while let Ok(Some(line)) = lines.next_line().await {
        let message = RpcMessage::parse(line.clone().into()).unwrap();
        let (id, method) = match (message.id(), message.method()) {
            (Some(id), Some(method)) => (id, method),
            // The answer to what was asked on behalf of a call, which answers that: its id is the number of the call.
            (Some(id), None) => {
                let (id, outcome) = (id.trim_matches('"'), message.outcome().unwrap());
                if outcome.contains(r#""hang""#) {
                    let _ = heard.send(line);
                    continue;
                }
                if let Some(token) = asked_for_progress.take() {
                    let told = format!(
                        "{{\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\",\"params\":{{\"progressToken\":{token},\"progress\":1}}}}\n"
                    );
                    writer.write_all(told.as_bytes()).await.unwrap();
                }
                let answer = format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"result\":{{\"x-told\":{outcome}}}}}\n");
                writer.write_all(answer.as_bytes()).await.unwrap();
                continue;
            }
            (None, _) => {
                let _ = heard.send(line);
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
                let _ = heard.send(line);
                continue;
            }
            "tools/call" if params.contains(r#""name":"ask""#) => {
                asked_for_progress = message.token().map(str::to_owned);
                let asked = format!("{{\"jsonrpc\":\"2.0\",\"id\":\"{id}\",\"method\":\"sampling/createMessage\",\"params\":{{\"x\":1e400,\"_meta\":{{\"progressToken\":\"its own\"}}}}}}\n");
                writer.write_all(asked.as_bytes()).await.unwrap();
                continue;
            }
            "tools/call" if params.contains(r#""name":"doubt""#) => {
                // It asks, takes that back, and asks again, each time at length.
                let ask = |number: &str| {
                    let long = "x".repeat(3000);
                    format!("{{\"jsonrpc\":\"2.0\",\"id\":\"{number}\",\"method\":\"sampling/createMessage\",\"params\":{{\"x\":\"{long}\"}}}}\n")
                };
                let back = "{\"jsonrpc\":\"2.0\",\"method\":\"notifications/cancelled\",\"params\":{\"requestId\":\"first\"}}\n";
                let told = [&ask("first"), back, &ask(id)].concat();
                writer.write_all(told.as_bytes()).await.unwrap();
                continue;
            }
            "tools/call" if params.contains(r#""name":"slow""#) => {
                let told = format!("{{\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\",\"params\":{{\"progressToken\":{},\"progress\":1}}}}\n", message.token().unwrap());
                writer.write_all(told.as_bytes()).await.unwrap();
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

/// One of the era without sessions. Whoever hears of its requests is told all of those that are about a tool.
async fn serve_stateless(pipe: DuplexStream, lists: Lists, heard: mpsc::UnboundedSender<String>) {
    let (reader, mut writer) = split(pipe);
    let mut lines = BufReader::new(reader).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let message = RpcMessage::parse(line.clone().into()).unwrap();
        let (Some(id), Some(method)) = (message.id(), message.method()) else {
            let _ = heard.send(line);
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
                let told = format!(
                    "{{\"jsonrpc\":\"2.0\",\"method\":\"notifications/subscriptions/acknowledged\",\"params\":{{\"_meta\":{meta},\"notifications\":{wanted}}}}}\n"
                );
                writer.write_all(told.as_bytes()).await.unwrap();
                let _ = heard.send(line);
                continue;
            }
            "tools/list" => format!(r#""result":{{{hints},"tools":{}}}"#, lists.tools),
            "resources/list" => format!(r#""result":{{{hints},"resources":{}}}"#, or_none(lists.resources)),
            "resources/templates/list" => {
                format!(r#""result":{{{hints},"resourceTemplates":{}}}"#, or_none(lists.templates))
            }
            "prompts/list" => format!(r#""result":{{{hints},"prompts":{}}}"#, or_none(lists.prompts)),
            "tools/call" if params.contains(r#""name":"change""#) => {
                let told = "{\"jsonrpc\":\"2.0\",\"method\":\"notifications/tools/list_changed\"}\n";
                writer.write_all(told.as_bytes()).await.unwrap();
                r#""result":{"resultType":"complete","content":[]}"#.to_owned()
            }
            "tools/call" if params.contains(r#""name":"ask""#) => match member(params, "inputResponses") {
                None => r#""result":{"resultType":"input_required","inputRequests":{"q":{"method":"sampling/createMessage","params":{"x":1e400}}},"requestState":"its own"}"#.to_owned(),
                Some(told) => {
                    let state = member(params, "requestState").unwrap_or("null");
                    format!(r#""result":{{"resultType":"complete","content":[],"x-told":{told},"x-state":{state}}}"#)
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

/// A satellite in which alice of acme has some servers, and bob one called `secret`.
pub(crate) struct House {
    pub(crate) runtime: RuntimeHandle,
    tools: MetaTools,
    stage: Stage,
    heard: mpsc::UnboundedReceiver<String>,
    join: JoinHandle<RuntimeEnd>,
}

pub(crate) fn id(installation: &str) -> InstanceId {
    InstanceId::new("acme".into(), "alice".into(), installation.into())
}

pub(crate) fn spec(server: &str, installation: &str, user: &str) -> InstanceSpec {
    InstanceSpec {
        id: InstanceId::new("acme".into(), user.into(), installation.into()),
        name: format!("{server}-acme-{user}-{installation}").into(),
        server: server.into(),
        team_slug: "acme".into(),
        user_slug: user.into(),
        target: ServerTarget::Stdio { command: "played".to_owned(), cwd: None },
        args: Vec::new(),
        env: BTreeMap::new(),
        headers: BTreeMap::new(),
        query: BTreeMap::new(),
        missing: Vec::new(),
        lifetime: ProcessLifetime::Listed,
        update_method: UpdateMethod::default(),
        request_logging: true,
        mask: SecretMask::default(),
        policy: Arc::new(Policy::default()),
    }
}

impl House {
    /// Each server with its installation's id and what it lists.
    pub(crate) async fn with(servers: &[(&str, &str, Lists)]) -> Self {
        Self::before(Arc::new(NoAudience), servers).await
    }

    /// The same, before an audience.
    pub(crate) async fn before(audience: Arc<dyn Audience>, servers: &[(&str, &str, Lists)]) -> Self {
        let secret = ("secret", "s", Lists { tools: r#"[{"name":"hush"}]"#, ..Lists::default() });
        let all = || servers.iter().chain([&secret]);
        let lists = all().map(|(_, installation, lists)| ((*installation).to_owned(), *lists)).collect();
        let (told, heard) = mpsc::unbounded_channel();
        let stage = Stage { lists: Arc::new(Mutex::new(lists)), heard: told };
        let wall = Arc::new(|| Timestamp::UNIX_EPOCH);
        let mut options = RuntimeOptions::new(Arc::new(stage.clone()), Arc::new(Nothing), wall);
        options.audience = audience;
        let (runtime, join) = start(options).await.unwrap();
        for (server, installation, _) in all() {
            let user = if *server == "secret" { "bob" } else { "alice" };
            runtime.install(spec(server, installation, user)).await.unwrap();
        }
        let tools = MetaTools::new(runtime.clone(), Arc::default());
        let house = Self { runtime, tools, stage, heard, join };
        for (_, installation, lists) in servers {
            let wanted = if lists.tools.is_empty() { Status::PermanentlyFailed } else { Status::Online };
            house.sees(installation, move |view| view.status == wanted).await;
        }
        house
    }

    pub(crate) async fn sees(&self, installation: &str, wanted: impl FnMut(&InstanceView) -> bool) {
        let id = id(installation);
        timeout(GIVE_UP, self.runtime.wait_for(&id, wanted)).await.unwrap().unwrap();
    }

    /// Another server of alice's.
    pub(crate) async fn add(&self, server: &str, installation: &str, lists: Lists) {
        self.relist(installation, lists);
        self.runtime.install(spec(server, installation, "alice")).await.unwrap();
        self.sees(installation, |view| view.status == Status::Online).await;
    }

    /// From its next start on a server lists this.
    pub(crate) fn relist(&self, installation: &str, lists: Lists) {
        self.stage.lists.lock().unwrap().insert(installation.to_owned(), lists);
    }

    /// Waits until a server hears this, and wants to answer nothing; the whole of it.
    pub(crate) async fn hears(&mut self, part: &str) -> String {
        loop {
            let heard = timeout(GIVE_UP, self.heard.recv()).await.unwrap().unwrap();
            if heard.contains(part) {
                return heard;
            }
        }
    }

    /// What a call of this meta-tool by alice comes to, with these params as they are.
    pub(crate) async fn outcome(&self, params: &str, withdrawn: oneshot::Receiver<RpcMessage>) -> face::CallAnswer {
        let text = format!(r#"{{"jsonrpc":"2.0","id":"c","method":"tools/call","params":{params}}}"#);
        let message = RpcMessage::parse(text.into()).unwrap();
        let (origin, client) = (CallOrigin { client: 1, call: 1 }, ClientDescription::default().facts);
        let call = EndpointCall { message, origin, cancellation: withdrawn, timeout: None, era: Era::Sessions, client };
        let (team, user) = ("acme".into(), "alice".into());
        timeout(GIVE_UP, self.tools.call((&team, &user), call)).await.unwrap()
    }

    /// The outcome of a message to the client, as text: `"result":…` or `"error":…`.
    pub(crate) async fn asks(&self, tool: &str, arguments: &str) -> String {
        let (_withdraw, withdrawn) = oneshot::channel();
        match self.outcome(&format!(r#"{{"name":"{tool}","arguments":{arguments}}}"#), withdrawn).await {
            face::CallAnswer::Result(text) => text,
            face::CallAnswer::Message(message) => {
                String::from_utf8(join_parts(&message.with_id("\"c\"")).to_vec()).unwrap()
            }
            other => panic!("{other:?}"),
        }
    }

    /// What alice sees in flat mode.
    pub(crate) fn flat(&self) -> MergedLists {
        let caller = CallerSnapshot::new(self.runtime.snapshot(), &"acme".into(), &"alice".into());
        MergedLists::new(caller.offered_catalogues(), None)
    }

    /// The structured content of an answer, which is also its text.
    pub(crate) async fn finds(&self, tool: &str, arguments: &str) -> Value {
        let answer: Value = serde_json::from_str(&self.asks(tool, arguments).await).unwrap();
        let structured = &answer["structuredContent"];
        assert!(structured.is_object(), "{answer}");
        assert!(answer.get("isError").is_none(), "{answer}");
        structured.clone()
    }

    /// The error of an answer, with the text that a model reads.
    pub(crate) async fn fails(&self, tool: &str, arguments: &str) -> (Value, String) {
        let answer: Value = serde_json::from_str(&self.asks(tool, arguments).await).unwrap();
        assert_eq!(answer["isError"], true, "{answer}");
        assert!(answer.get("structuredContent").is_none(), "{answer}");
        let text = answer["content"][0]["text"].as_str().unwrap().to_owned();
        (answer["_meta"]["mcp-satellite/error"].clone(), text)
    }

    pub(crate) async fn end(self) {
        self.runtime.shutdown().await;
        self.join.await.unwrap();
    }
}
