//! A server that the test scripts line by line, and an audience that records its events.

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use jiff::Timestamp;
use mcp_satellite_actors::audience::{Audience, CallOrigin, ClientQuestion, MessageCause, SessionSource};
use mcp_satellite_actors::model::era::Era;
use mcp_satellite_actors::model::exit::{CallError, RuntimeEnd};
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::secret::SecretMask;
use mcp_satellite_actors::model::spec::{InstanceSpec, ProcessLifetime};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rpc::RpcMessage;
use mcp_satellite_actors::seam::{Connectors, ProcessConnector};
use mcp_satellite_actors::{ClientRelay, RuntimeHandle, RuntimeOptions, start};
use serde_json::Value;
use testkit::pipe::{PipeConnector, ServerPipes};
use testkit::sink::DiscardingSink;
use testkit::spec::{spec_of, stdio};
use tokio::io::{
    AsyncBufReadExt, AsyncRead, AsyncWriteExt, BufReader, DuplexStream, Lines, ReadBuf, ReadHalf, WriteHalf, duplex,
    split,
};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

/// The limit of every wait. Paused time makes it cheap.
const GIVE_UP: Duration = Duration::from_secs(3600);

/// A call of the `Audience` trait.
#[derive(Debug)]
pub(crate) enum AudienceEvent {
    Notification(MessageCause, String),
    Progress(CallOrigin, String),
    Request(MessageCause, ClientQuestion),
    RequestWithdrawn(u64, String),
    SessionStarted,
    SessionEnded,
}

struct RecordingAudience(mpsc::UnboundedSender<AudienceEvent>);

impl RecordingAudience {
    fn record(&self, event: AudienceEvent) {
        // Fails after the end of the test.
        let _ = self.0.send(event);
    }
}

impl Audience for RecordingAudience {
    fn on_notification(&self, _of: &SessionSource, cause: MessageCause, message: RpcMessage) {
        self.record(AudienceEvent::Notification(cause, message.text().to_string()));
    }

    fn on_progress(&self, origin: CallOrigin, message: RpcMessage) {
        self.record(AudienceEvent::Progress(origin, message.text().to_string()));
    }

    fn on_request(&self, _of: &SessionSource, cause: MessageCause, question: ClientQuestion) {
        self.record(AudienceEvent::Request(cause, question));
    }

    fn on_request_withdrawn(&self, _of: &SessionSource, question: u64, message: RpcMessage) {
        self.record(AudienceEvent::RequestWithdrawn(question, message.text().to_string()));
    }

    fn on_session_started(&self, _of: &SessionSource) {
        self.record(AudienceEvent::SessionStarted);
    }

    fn on_session_ended(&self, _of: &SessionSource) {
        self.record(AudienceEvent::SessionEnded);
    }
}

/// The stdout of the server. Nothing can be read before `held_until`, and no task is woken at that time.
struct Stdout {
    reader: ReadHalf<DuplexStream>,
    held_until: HeldUntil,
}

type HeldUntil = Arc<Mutex<Option<Instant>>>;

impl AsyncRead for Stdout {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        if self.held_until.lock().unwrap().is_some_and(|until| Instant::now() < until) {
            return Poll::Pending;
        }
        Pin::new(&mut self.reader).poll_read(cx, buffer)
    }
}

/// Returns a connector that sends the server's end of each pipe to the test.
fn connector(opened: mpsc::UnboundedSender<DuplexStream>, held_until: HeldUntil) -> impl ProcessConnector {
    PipeConnector(move |_: &InstanceSpec| {
        let (server_end, client_end) = duplex(1024 * 1024);
        // Fails after the end of the test.
        let _ = opened.send(client_end);
        let (reader, writer) = split(server_end);
        Ok::<ServerPipes, _>((Box::new(Stdout { reader, held_until: held_until.clone() }), Box::new(writer)))
    })
}

/// A runtime with one instance, whose server the test scripts, and the events of its audience.
pub(crate) struct ScriptedServer {
    pub(crate) runtime: RuntimeHandle,
    pub(crate) id: InstanceId,
    lines: Lines<BufReader<ReadHalf<DuplexStream>>>,
    writer: WriteHalf<DuplexStream>,
    events: mpsc::UnboundedReceiver<AudienceEvent>,
    opened: mpsc::UnboundedReceiver<DuplexStream>,
    held_until: HeldUntil,
    join: JoinHandle<RuntimeEnd>,
}

impl ScriptedServer {
    /// Brings an always-on server online.
    pub(crate) async fn online(change: impl FnOnce(&mut Policy)) -> Self {
        Self::online_as(ProcessLifetime::AlwaysOn, change).await
    }

    /// Brings a server of this lifetime online.
    pub(crate) async fn online_as(keep: ProcessLifetime, change: impl FnOnce(&mut Policy)) -> Self {
        let mut server = Self::started(keep, change).await;
        server.accept_session().await;
        let list = server.receive().await;
        server.respond_with_tools(&list).await;
        server.until_online().await;
        server
    }

    /// Starts a server, which has received nothing yet.
    pub(crate) async fn started(keep: ProcessLifetime, change: impl FnOnce(&mut Policy)) -> Self {
        let (opens, mut opened) = mpsc::unbounded_channel();
        let held_until = HeldUntil::default();
        let connector = connector(opens, held_until.clone());
        let (listener, events) = mpsc::unbounded_channel();
        let wall = Arc::new(|| Timestamp::UNIX_EPOCH);
        let mut options =
            RuntimeOptions::new(Connectors::default().with_process(connector), Arc::new(DiscardingSink), wall);
        options.audience = Arc::new(RecordingAudience(listener));
        let (runtime, join) = start(options).await.unwrap();
        let mut policy = Policy::default();
        change(&mut policy);
        let spec = InstanceSpec {
            lifetime: keep,
            mask: SecretMask::new(["hush-hush"]),
            policy: Arc::new(policy),
            ..spec_of("acme", "files", stdio("files"))
        };
        let id = spec.id.clone();
        runtime.install(spec).await.unwrap();
        let (reader, writer) = split(opened.recv().await.unwrap());
        Self { runtime, id, lines: BufReader::new(reader).lines(), writer, events, opened, held_until, join }
    }

    /// Answers `initialize` and waits for the session.
    pub(crate) async fn accept_session(&mut self) {
        let initialize = self.receive().await;
        assert_eq!(initialize["method"], "initialize");
        assert_eq!(initialize["params"]["capabilities"]["elicitation"], serde_json::json!({"form": {}, "url": {}}));
        let offers = r#"{"tools":{},"logging":{},"x-unknown":{"y":1e400}}"#;
        let info = r#""serverInfo":{"name":"played","version":"1","title":"Played"}"#;
        self.respond(&initialize, &format!(r#"{{"protocolVersion":"2025-11-25","capabilities":{offers},{info}}}"#))
            .await;
        assert_eq!(self.receive().await["method"], "notifications/initialized");
        self.until_session_started().await;
    }

    /// Waits until the audience is notified of the session. The end of a run without session may precede it.
    pub(crate) async fn until_session_started(&mut self) {
        loop {
            match self.audience_event().await {
                AudienceEvent::SessionStarted => return,
                AudienceEvent::SessionEnded => {}
                event => panic!("{event:?}"),
            }
        }
    }

    /// Answers `tools/list`.
    pub(crate) async fn respond_with_tools(&mut self, list: &Value) {
        assert_eq!(list["method"], "tools/list");
        self.respond(list, r#"{"tools":[{"name":"work","inputSchema":{"type":"object"}}]}"#).await;
    }

    pub(crate) async fn until_online(&self) {
        self.runtime.wait_for(&self.id, |view| view.status == Status::Online).await.unwrap();
    }

    /// Waits until the server is started again. It has received nothing yet.
    pub(crate) async fn until_started_again(&mut self) {
        let opened =
            timeout(GIVE_UP, self.opened.recv()).await.expect("the server was not started within an hour").unwrap();
        let (reader, writer) = split(opened);
        (self.lines, self.writer) = (BufReader::new(reader).lines(), writer);
    }

    /// Answers a request with an error of this code.
    pub(crate) async fn reject(&mut self, request: &Value, code: i64) {
        let id = &request["id"];
        self.send(&format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":{code},"message":"refused"}}}}"#)).await;
    }

    /// Restarts the server. It has received nothing yet.
    pub(crate) async fn restart(&mut self) {
        let (runtime, id) = (self.runtime.clone(), self.id.clone());
        drop(tokio::spawn(async move { runtime.restart(&id).await }));
        assert!(matches!(self.audience_event().await, AudienceEvent::SessionEnded));
        self.until_started_again().await;
    }

    /// Returns the next line to the server, unchanged.
    pub(crate) async fn receive_line(&mut self) -> String {
        timeout(GIVE_UP, self.lines.next_line())
            .await
            .expect("no message to the server within an hour")
            .unwrap()
            .unwrap()
    }

    /// Returns the next message to the server.
    pub(crate) async fn receive(&mut self) -> Value {
        serde_json::from_str(&self.receive_line().await).unwrap()
    }

    /// Like `receive`, for a message with the number `1e400`, which `serde_json` cannot represent.
    pub(crate) async fn receive_lossy(&mut self) -> Value {
        serde_json::from_str(&self.receive_line().await.replace("1e400", "1")).unwrap()
    }

    /// Holds back the output of the server until this time.
    pub(crate) fn hold_output_until(&self, until: Instant) {
        *self.held_until.lock().unwrap() = Some(until);
    }

    /// Closes the stdout of the server.
    pub(crate) async fn close_stdout(&mut self) {
        self.writer.shutdown().await.unwrap();
    }

    pub(crate) async fn send(&mut self, line: &str) {
        self.writer.write_all(format!("{line}\n").as_bytes()).await.unwrap();
    }

    pub(crate) async fn respond(&mut self, request: &Value, result: &str) {
        self.send(&format!(r#"{{"jsonrpc":"2.0","id":{},"result":{result}}}"#, request["id"])).await;
    }

    pub(crate) async fn audience_event(&mut self) -> AudienceEvent {
        timeout(GIVE_UP, self.events.recv()).await.expect("no event of the audience within an hour").unwrap()
    }

    /// Sends a request of a session client.
    pub(crate) fn relay(&self, client: u64, call: u64, request: &str) -> PendingRelay {
        self.relay_within(client, call, request, None)
    }

    pub(crate) fn relay_within(&self, client: u64, call: u64, request: &str, limit: Option<Duration>) -> PendingRelay {
        self.relay_as(Era::Sessions, client, call, request, limit)
    }

    /// Sends a request of a client of this era.
    pub(crate) fn relay_as(
        &self,
        era: Era,
        client: u64,
        call: u64,
        request: &str,
        limit: Option<Duration>,
    ) -> PendingRelay {
        let message = RpcMessage::parse(request.to_owned().into()).unwrap();
        let tool = (message.method() == Some("tools/call")).then(|| "work".to_owned());
        let origin = CallOrigin { client, call };
        let relay = ClientRelay {
            message,
            origin,
            repeatable: false,
            tool: tool.map(Into::into),
            era,
            client: None,
            trace: None,
        };
        let (withdraw, withdrawn) = oneshot::channel();
        let (runtime, id) = (self.runtime.clone(), self.id.clone());
        let answer = tokio::spawn(async move { runtime.relay(&id, relay, limit, withdrawn).await });
        PendingRelay { withdraw: Mutex::new(Some(withdraw)), answer }
    }

    pub(crate) async fn shut_down(self) {
        self.runtime.shutdown().await;
        self.join.await.unwrap();
    }
}

/// A request of a client that is in progress and can be withdrawn.
pub(crate) struct PendingRelay {
    withdraw: Mutex<Option<oneshot::Sender<RpcMessage>>>,
    pub(crate) answer: JoinHandle<Result<Option<RpcMessage>, CallError>>,
}

impl PendingRelay {
    pub(crate) async fn response(self) -> Result<Option<String>, CallError> {
        let answer = timeout(GIVE_UP, self.answer).await.expect("no response within an hour").unwrap()?;
        Ok(answer.map(|message| message.text().to_string()))
    }

    pub(crate) fn withdraw(&self, words: &str) {
        let words = RpcMessage::parse(words.to_owned().into()).unwrap();
        self.withdraw.lock().unwrap().take().unwrap().send(words).unwrap();
    }

    /// Drops the request, as when the client disconnects.
    pub(crate) fn abandon(self) {
        self.answer.abort();
    }
}
