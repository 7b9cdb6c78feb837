//! A server in the hands of the test, line by line, and an audience that writes down what it hears.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, pending};
use jiff::Timestamp;
use mcp_satellite_actors::audience::{Audience, CallOrigin, ClientQuestion, MessageCause, SessionSource};
use mcp_satellite_actors::model::era::Era;
use mcp_satellite_actors::model::exit::{CallError, RuntimeEnd};
use mcp_satellite_actors::model::ids::{InstanceId, RunNumber};
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::secret::SecretMask;
use mcp_satellite_actors::model::spec::{InstanceSpec, ProcessLifetime, ServerTarget, UpdateMethod};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rpc::RpcMessage;
use mcp_satellite_actors::seam::{
    Connector, EventSink, OpenError, ProcessEnd, ProcessLink, ServerLine, ServerProcess, SinkAnswer, SinkBatch,
    UnsupportedLine,
};
use mcp_satellite_actors::{ClientRelay, RuntimeHandle, RuntimeOptions, start};
use serde_json::Value;
use tokio::io::{
    AsyncBufReadExt, AsyncRead, AsyncWriteExt, BufReader, DuplexStream, Lines, ReadBuf, ReadHalf, WriteHalf, duplex,
    split,
};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

/// In paused time it costs nothing.
const GIVE_UP: Duration = Duration::from_secs(3600);

/// What the audience has been told.
#[derive(Debug)]
pub(crate) enum Told {
    Heard(MessageCause, String),
    Progress(CallOrigin, String),
    Asked(MessageCause, ClientQuestion),
    Withdrawn(u64, String),
    Began,
    Ended,
}

struct Listener(mpsc::UnboundedSender<Told>);

impl Listener {
    fn write(&self, told: Told) {
        // The test is over.
        let _ = self.0.send(told);
    }
}

impl Audience for Listener {
    fn on_notification(&self, _of: &SessionSource, cause: MessageCause, message: RpcMessage) {
        self.write(Told::Heard(cause, message.text().to_string()));
    }

    fn on_progress(&self, origin: CallOrigin, message: RpcMessage) {
        self.write(Told::Progress(origin, message.text().to_string()));
    }

    fn on_request(&self, _of: &SessionSource, cause: MessageCause, question: ClientQuestion) {
        self.write(Told::Asked(cause, question));
    }

    fn on_request_withdrawn(&self, _of: &SessionSource, question: u64, message: RpcMessage) {
        self.write(Told::Withdrawn(question, message.text().to_string()));
    }

    fn on_session_started(&self, _of: &SessionSource) {
        self.write(Told::Began);
    }

    fn on_session_ended(&self, _of: &SessionSource) {
        self.write(Told::Ended);
    }
}

struct Nothing;

impl EventSink for Nothing {
    fn send(&self, _batch: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
        async { SinkAnswer::Accepted }.boxed()
    }
}

/// The process of a server that a test plays: it ends when it is told to.
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

/// The server's stdout. Before the time that the test sets nothing can be read, and at that time nobody is woken.
struct Stdout {
    reader: ReadHalf<DuplexStream>,
    withheld_until: WithheldUntil,
}

type WithheldUntil = Arc<Mutex<Option<Instant>>>;

impl AsyncRead for Stdout {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        if self.withheld_until.lock().unwrap().is_some_and(|until| Instant::now() < until) {
            return Poll::Pending;
        }
        Pin::new(&mut self.reader).poll_read(cx, buffer)
    }
}

struct Stage {
    opened: mpsc::UnboundedSender<DuplexStream>,
    withheld_until: WithheldUntil,
}

impl Connector for Stage {
    fn open(&self, _spec: Arc<InstanceSpec>, _run: RunNumber) -> BoxFuture<'static, Result<ProcessLink, OpenError>> {
        let (ours, theirs) = duplex(1024 * 1024);
        // The test is over.
        let _ = self.opened.send(theirs);
        let (reader, writer) = split(ours);
        let reader = Stdout { reader, withheld_until: self.withheld_until.clone() };
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

/// One instance, its server, and who listens.
pub(crate) struct Play {
    pub(crate) runtime: RuntimeHandle,
    pub(crate) id: InstanceId,
    lines: Lines<BufReader<ReadHalf<DuplexStream>>>,
    writer: WriteHalf<DuplexStream>,
    told: mpsc::UnboundedReceiver<Told>,
    opened: mpsc::UnboundedReceiver<DuplexStream>,
    withheld_until: WithheldUntil,
    join: JoinHandle<RuntimeEnd>,
}

impl Play {
    /// With a server that is online, and stays it.
    pub(crate) async fn begin(change: impl FnOnce(&mut Policy)) -> Self {
        Self::begin_as(ProcessLifetime::AlwaysOn, change).await
    }

    /// With a server that is online.
    pub(crate) async fn begin_as(keep: ProcessLifetime, change: impl FnOnce(&mut Policy)) -> Self {
        let mut play = Self::open(keep, change).await;
        play.greets().await;
        let list = play.hears().await;
        play.lists(&list).await;
        play.is_online().await;
        play
    }

    /// With a server that was started and was told nothing yet.
    pub(crate) async fn open(keep: ProcessLifetime, change: impl FnOnce(&mut Policy)) -> Self {
        let (opens, mut opened) = mpsc::unbounded_channel();
        let withheld_until = WithheldUntil::default();
        let stage = Stage { opened: opens, withheld_until: withheld_until.clone() };
        let (listener, told) = mpsc::unbounded_channel();
        let wall = Arc::new(|| Timestamp::UNIX_EPOCH);
        let mut options = RuntimeOptions::new(Arc::new(stage), Arc::new(Nothing), wall);
        options.audience = Arc::new(Listener(listener));
        let (runtime, join) = start(options).await.unwrap();
        let mut policy = Policy::default();
        change(&mut policy);
        let id = InstanceId::new("acme".into(), "alice".into(), "files".into());
        let spec = InstanceSpec {
            id: id.clone(),
            name: "files-acme-alice-files".into(),
            server: "files".into(),
            team_slug: "acme".into(),
            user_slug: "alice".into(),
            target: ServerTarget::Stdio { command: "files".to_owned(), cwd: None },
            args: Vec::new(),
            env: BTreeMap::new(),
            headers: BTreeMap::new(),
            query: BTreeMap::new(),
            missing: Vec::new(),
            lifetime: keep,
            update_method: UpdateMethod::default(),
            request_logging: true,
            mask: SecretMask::new(["hush-hush"]),
            policy: Arc::new(policy),
        };
        runtime.install(spec).await.unwrap();
        let (reader, writer) = split(opened.recv().await.unwrap());
        Self { runtime, id, lines: BufReader::new(reader).lines(), writer, told, opened, withheld_until, join }
    }

    /// The server opens a session.
    pub(crate) async fn greets(&mut self) {
        let initialize = self.hears().await;
        assert_eq!(initialize["method"], "initialize");
        assert_eq!(initialize["params"]["capabilities"]["elicitation"], serde_json::json!({"form": {}, "url": {}}));
        let offers = r#"{"tools":{},"logging":{},"x-unknown":{"y":1e400}}"#;
        let info = r#""serverInfo":{"name":"played","version":"1","title":"Played"}"#;
        self.answers(&initialize, &format!(r#"{{"protocolVersion":"2025-11-25","capabilities":{offers},{info}}}"#))
            .await;
        assert_eq!(self.hears().await["method"], "notifications/initialized");
        self.begins().await;
    }

    /// The audience is told that the server is there, perhaps after the end of a run that never was.
    pub(crate) async fn begins(&mut self) {
        loop {
            match self.told().await {
                Told::Began => return,
                Told::Ended => {}
                told => panic!("{told:?}"),
            }
        }
    }

    /// It says what it offers.
    pub(crate) async fn lists(&mut self, list: &Value) {
        assert_eq!(list["method"], "tools/list");
        self.answers(list, r#"{"tools":[{"name":"work","inputSchema":{"type":"object"}}]}"#).await;
    }

    pub(crate) async fn is_online(&self) {
        self.runtime.wait_for(&self.id, |view| view.status == Status::Online).await.unwrap();
    }

    /// The server's process was started once more; it is told nothing yet.
    pub(crate) async fn opens_again(&mut self) {
        let opened = timeout(GIVE_UP, self.opened.recv()).await.expect("it does not start").unwrap();
        let (reader, writer) = split(opened);
        (self.lines, self.writer) = (BufReader::new(reader).lines(), writer);
    }

    /// The server refuses a request with this code.
    pub(crate) async fn refuses(&mut self, request: &Value, code: i64) {
        let id = &request["id"];
        self.says(&format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":{code},"message":"refused"}}}}"#)).await;
    }

    /// The server ends, and starts again; it says nothing yet.
    pub(crate) async fn restarts(&mut self) {
        let (runtime, id) = (self.runtime.clone(), self.id.clone());
        drop(tokio::spawn(async move { runtime.restart(&id).await }));
        assert!(matches!(self.told().await, Told::Ended));
        self.opens_again().await;
    }

    /// The next line that the server reads, as it came.
    pub(crate) async fn reads(&mut self) -> String {
        timeout(GIVE_UP, self.lines.next_line()).await.expect("the server is told nothing").unwrap().unwrap()
    }

    /// The next message to the server.
    pub(crate) async fn hears(&mut self) -> Value {
        serde_json::from_str(&self.reads().await).unwrap()
    }

    /// The same, of one that holds a number which few can read.
    pub(crate) async fn hears_loosely(&mut self) -> Value {
        serde_json::from_str(&self.reads().await.replace("1e400", "1")).unwrap()
    }

    /// What the server says from now on cannot be read before this time.
    pub(crate) fn withholds_until(&self, until: Instant) {
        *self.withheld_until.lock().unwrap() = Some(until);
    }

    /// The server closes its stdout.
    pub(crate) async fn hangs_up(&mut self) {
        self.writer.shutdown().await.unwrap();
    }

    /// The server says this.
    pub(crate) async fn says(&mut self, line: &str) {
        self.writer.write_all(format!("{line}\n").as_bytes()).await.unwrap();
    }

    /// The server answers a request with this result.
    pub(crate) async fn answers(&mut self, request: &Value, result: &str) {
        self.says(&format!(r#"{{"jsonrpc":"2.0","id":{},"result":{result}}}"#, request["id"])).await;
    }

    /// What the audience is told next.
    pub(crate) async fn told(&mut self) -> Told {
        timeout(GIVE_UP, self.told.recv()).await.expect("the audience is told nothing").unwrap()
    }

    /// A client's request is on its way.
    pub(crate) fn relays(&self, client: u64, call: u64, request: &str) -> Relayed {
        self.relays_within(client, call, request, None)
    }

    pub(crate) fn relays_within(&self, client: u64, call: u64, request: &str, limit: Option<Duration>) -> Relayed {
        self.relays_as(Era::Sessions, client, call, request, limit)
    }

    /// The request of a client of this era is on its way.
    pub(crate) fn relays_as(
        &self,
        era: Era,
        client: u64,
        call: u64,
        request: &str,
        limit: Option<Duration>,
    ) -> Relayed {
        let message = RpcMessage::parse(request.to_owned().into()).unwrap();
        let tool = (message.method() == Some("tools/call")).then(|| "work".to_owned());
        let origin = CallOrigin { client, call };
        let relay = ClientRelay { message, origin, repeatable: false, tool, era, client: None };
        let (withdraw, withdrawn) = oneshot::channel();
        let (runtime, id) = (self.runtime.clone(), self.id.clone());
        let answer = tokio::spawn(async move { runtime.relay(&id, relay, limit, withdrawn).await });
        Relayed { withdraw: Mutex::new(Some(withdraw)), answer }
    }

    pub(crate) async fn end(self) {
        self.runtime.shutdown().await;
        self.join.await.unwrap();
    }
}

/// A request on its way, and the client's right to withdraw it.
pub(crate) struct Relayed {
    withdraw: Mutex<Option<oneshot::Sender<RpcMessage>>>,
    pub(crate) answer: JoinHandle<Result<Option<RpcMessage>, CallError>>,
}

impl Relayed {
    pub(crate) async fn answered(self) -> Result<Option<String>, CallError> {
        let answer = timeout(GIVE_UP, self.answer).await.expect("no answer").unwrap()?;
        Ok(answer.map(|message| message.text().to_string()))
    }

    pub(crate) fn withdraw(&self, words: &str) {
        let words = RpcMessage::parse(words.to_owned().into()).unwrap();
        self.withdraw.lock().unwrap().take().unwrap().send(words).unwrap();
    }

    /// The client is gone.
    pub(crate) fn drop(self) {
        self.answer.abort();
    }
}
