//! One MCP session over one link: handshake, requests with their deadlines, lists, liveness, and the end. A task of
//! the worker; it owns the wire, so that whatever a server sends is read at the pace at which it is handled.
//!
//! The wire is read and written here, not by rmcp's engine: a supervisor must know which call reached the server, why
//! a link ended and what was malformed, must keep every field it does not know, and must let nothing be cached. rmcp
//! gives the types of the handshake.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::{Buf, BytesMut};
use rmcp::model::{
    ClientCapabilities, Implementation, InitializeRequestParams, InitializeResult, ProtocolVersion, RootsCapabilities,
    SamplingCapability,
};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio::time::{Duration, Instant};

use crate::batcher::WallClock;
use crate::calls::{Asked, Command, Counters, PortEnd, Request, Ticket};
use crate::model::catalogue::{Catalogue, Tool};
use crate::model::exit::{CallError, ExitCause, Fate, WorkerExit};
use crate::model::secret::Mask;
use crate::model::spec::InstanceSpec;
use crate::rules::watchdog::{Verdict, Watchdog};
use crate::seam::{Process, ProcessEnd};
use crate::wire::{Frame, Lines, Received, put_json};

/// The client offers the newest version that has `initialize`, and accepts what the server answers if it is one of these.
const VERSIONS: [ProtocolVersion; 4] = [
    ProtocolVersion::V_2024_11_05,
    ProtocolVersion::V_2025_03_26,
    ProtocolVersion::V_2025_06_18,
    ProtocolVersion::V_2025_11_25,
];

const METHOD_NOT_FOUND: i64 = -32601;
const INTERNAL_ERROR: i64 = -32603;

/// Answers to a server's own requests pile up if it does not read them: more unwritten bytes than this end it.
const UNREAD_ANSWERS_MAX: usize = 16 * 1024 * 1024;
/// Tables that grew in a burst are given back above this many places.
const IDLE_CAPACITY_MAX: usize = 64;
/// No further request is queued for writing while this much is.
const OUTGOING_MAX: usize = 1024 * 1024;
/// After this long without the process ending by itself, a closed stdout or stdin is a broken wire.
const BROKEN_PATIENCE: Duration = Duration::from_secs(1);
/// After SIGKILL nobody waits longer for a process that will not die.
const KILL_PATIENCE: Duration = Duration::from_secs(5);
/// Of its grace this much is left to a process that is ending when a caller waits for that.
const HURRY_GRACE: Duration = Duration::from_secs(1);
/// Malformed lines logged one by one; then each doubling.
const MALFORMED_LOGGED: u64 = 5;
/// Of what a server sent, this much is quoted in a log or a message.
const QUOTED_MAX: usize = 200;

/// News of a session, told to the team as they happen.
#[derive(Debug)]
pub(crate) enum News {
    FirstByte,
    Initialized,
    Discovered(Arc<Catalogue>),
    DiscoveryFailed(String),
}

/// What the worker tells its session.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Control {
    /// End with grace.
    Stop,
    /// Take no longer over the end than a caller who waits for it can bear.
    Hurry,
    /// End with grace when the calls inside are answered. The door is closed: none comes in any more.
    Drain,
    /// Read the lists again.
    Discover,
}

pub(crate) struct Args {
    pub(crate) spec: Arc<InstanceSpec>,
    pub(crate) reader: Box<dyn AsyncRead + Send + Unpin>,
    pub(crate) writer: Box<dyn AsyncWrite + Send + Unpin>,
    pub(crate) process: Box<dyn Process>,
    pub(crate) port: PortEnd,
    pub(crate) control: mpsc::UnboundedReceiver<Control>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) wall: WallClock,
    /// When the start began: the handshake's time counts from here.
    pub(crate) since: Instant,
    /// Whether the lists are read by itself after the handshake.
    pub(crate) discover: bool,
    pub(crate) news: Box<dyn Fn(News) + Send>,
}

/// Why serving ended.
enum Over {
    Process(ProcessEnd),
    Asked,
    Failed(ExitCause),
}

/// What a response is for.
enum Purpose {
    Caller { ticket: Ticket, started: Instant, timeout: Duration },
    Handshake,
    List,
    Ping,
}

struct Pending {
    purpose: Purpose,
    deadline: Instant,
    /// Where its first byte is in all that was ever queued for writing; `None` while the request waits for its turn.
    starts_at: Option<u64>,
}

/// The requests that are not answered. Dropped with the session, whoever ends it: each caller then learns its fate.
#[derive(Default)]
struct Calls {
    pending: HashMap<u64, Pending>,
    deadlines: BTreeSet<(Instant, u64)>,
    written: u64,
}

impl Calls {
    fn insert(&mut self, id: u64, pending: Pending) {
        self.deadlines.insert((pending.deadline, id));
        self.pending.insert(id, pending);
    }

    fn remove(&mut self, id: u64) -> Option<Pending> {
        let pending = self.pending.remove(&id)?;
        self.deadlines.remove(&(pending.deadline, id));
        if self.pending.is_empty() && self.pending.capacity() > IDLE_CAPACITY_MAX {
            self.pending = HashMap::new();
        }
        Some(pending)
    }

    /// Progress: later, but never beyond the hard cap.
    fn extend(&mut self, id: u64, now: Instant, cap: Duration) {
        let Some(pending) = self.pending.get_mut(&id) else { return };
        let Purpose::Caller { started, timeout, .. } = &pending.purpose else { return };
        let deadline = (now + *timeout).min(*started + cap.max(*timeout));
        self.deadlines.remove(&(pending.deadline, id));
        pending.deadline = deadline;
        self.deadlines.insert((deadline, id));
    }

    fn callers(&self) -> usize {
        self.pending.values().filter(|pending| matches!(pending.purpose, Purpose::Caller { .. })).count()
    }

    fn settle(&mut self, reason: &str) {
        self.deadlines.clear();
        for (_, pending) in self.pending.drain() {
            if let Purpose::Caller { mut ticket, .. } = pending.purpose {
                let sent = pending.starts_at.is_some_and(|at| at < self.written);
                let fate = if sent { Fate::MaybeExecuted } else { Fate::NotSent };
                ticket.fate = fate;
                ticket.answer(Err(CallError::Terminated { fate, reason: reason.to_owned() }));
            }
        }
    }
}

impl Drop for Calls {
    fn drop(&mut self) {
        self.settle("the run ended");
    }
}

/// The lists being read.
#[derive(Default)]
struct Listing {
    tools: Vec<Tool>,
    names: HashSet<Box<str>>,
    pages: usize,
    cursor: Option<String>,
}

struct Session {
    spec: Arc<InstanceSpec>,
    lines: Lines<Box<dyn AsyncRead + Send + Unpin>>,
    /// None once stdin was closed.
    writer: Option<Box<dyn AsyncWrite + Send + Unpin>>,
    process: Box<dyn Process>,
    port: PortEnd,
    control: mpsc::UnboundedReceiver<Control>,
    counters: Arc<Counters>,
    wall: WallClock,
    news: Box<dyn Fn(News) + Send>,
    discover: bool,
    out: BytesMut,
    queued: u64,
    /// Requests that wait for room in `out`, in order: some may have been given up meanwhile.
    unsent: VecDeque<(u64, Request)>,
    calls: Calls,
    watchdog: Watchdog,
    /// Stdout has ended or broke: there is nothing more to read.
    stdout_over: bool,
    initialized: Option<Instant>,
    /// Whether the server said that it has tools.
    has_tools: bool,
    listing: Option<Listing>,
    list_again_at: Option<Instant>,
    broken: Option<(String, Instant)>,
    draining: bool,
}

/// Runs a session to its end, and the process with it: when this returns nothing of the run is left.
pub(crate) fn run(args: Args) -> impl Future<Output = WorkerExit> + Send {
    let now = Instant::now();
    let (since, pid) = (args.since, args.process.pid());
    // Boxed: a future keeps what it was given and what it has made of it side by side, and each one around it does so
    // again.
    let mut this = Box::new(Session {
        lines: Lines::new(args.reader, args.spec.policy.session.line_max),
        writer: Some(args.writer),
        process: args.process,
        port: args.port,
        control: args.control,
        counters: args.counters,
        wall: args.wall,
        news: args.news,
        discover: args.discover,
        out: BytesMut::new(),
        queued: 0,
        unsent: VecDeque::new(),
        calls: Calls::default(),
        watchdog: Watchdog::new(now.into_std()),
        stdout_over: false,
        initialized: None,
        has_tools: false,
        listing: None,
        list_again_at: None,
        broken: None,
        draining: false,
        spec: args.spec,
    });
    async move {
        this.greet(since);
        let over = this.serve().await;
        let exit = this.finish(over).await;
        WorkerExit { pid, ..exit }
    }
}

impl Session {
    async fn serve(&mut self) -> Over {
        loop {
            if self.draining && self.port.gate.inside() == 0 {
                return Over::Asked;
            }
            let wake_at = self.wake_at();
            let reading = !self.stdout_over;
            let writing = !self.out.is_empty();
            // In this order because a server may flood its stdout: reading is never short of work, and must not keep
            // the others from theirs. Commands are bounded by their permits.
            tokio::select! {
                biased;
                control = self.control.recv() => match control {
                    Some(Control::Discover) => self.list(),
                    Some(Control::Drain) => self.draining = true,
                    // It is said of an end that is under way.
                    Some(Control::Hurry) => {}
                    // A worker that is gone wants what a stop wants.
                    Some(Control::Stop) | None => return Over::Asked,
                },
                () = sleep_until(wake_at), if wake_at.is_some() => {
                    if let Some(over) = self.on_time() {
                        return over;
                    }
                }
                end = self.process.ended() => return Over::Process(end),
                written = write(&mut self.writer, &self.out), if writing => self.on_written(written),
                Some(command) = self.port.commands.recv() => self.on_command(command),
                received = self.lines.next(), if reading => {
                    if let Some(over) = self.on_received(received) {
                        return over;
                    }
                }
            }
        }
    }

    fn wake_at(&mut self) -> Option<Instant> {
        let first_deadline = self.calls.deadlines.first().map(|(at, _)| *at);
        let broken = self.broken.as_ref().map(|(_, at)| *at);
        let watchdog = match self.watchdog_verdict() {
            Verdict::Wait(at) => at.map(Instant::from_std),
            Verdict::Ping | Verdict::Unresponsive => Some(Instant::now()),
        };
        [first_deadline, broken, self.list_again_at, watchdog].into_iter().flatten().min()
    }

    /// A look that changes nothing: the decision itself is taken in `on_time`.
    fn watchdog_verdict(&mut self) -> Verdict {
        self.watchdog.heard(self.lines.last_read.into_std());
        let open = if self.watchdog.is_suspicious() { self.calls.callers() } else { 0 };
        self.watchdog.clone().check(&self.spec.policy.watchdog, Instant::now().into_std(), open)
    }

    // ---- the handshake ----

    fn greet(&mut self, since: Instant) {
        let mut roots = RootsCapabilities::default();
        roots.list_changed = Some(false);
        let mut capabilities = ClientCapabilities::default();
        capabilities.roots = Some(roots);
        capabilities.sampling = Some(SamplingCapability::default());
        let client = Implementation::new("mcp-satellite", env!("CARGO_PKG_VERSION"));
        let params =
            InitializeRequestParams::new(capabilities, client).with_protocol_version(ProtocolVersion::V_2025_11_25);
        let params = serde_json::to_string(&params).unwrap_or_default();
        let deadline = since + self.spec.policy.session.handshake_timeout;
        self.ask("initialize", Some(&params), Purpose::Handshake, deadline);
    }

    fn on_initialize(&mut self, answer: Result<&RawValue, CallError>) -> Option<Over> {
        let spec = self.spec.clone();
        let failed = |why: String| Some(Over::Failed(ExitCause::Handshake(quoted(&spec.mask, &why))));
        let result = match answer {
            Ok(result) => result,
            Err(error) => return failed(error.to_string()),
        };
        let server: InitializeResult = match serde_json::from_str(result.get()) {
            Ok(server) => server,
            Err(error) => return failed(format!("the answer to initialize is not one: {error}")),
        };
        if !VERSIONS.contains(&server.protocol_version) {
            return failed(format!(
                "the server speaks protocol version {}, which is not known",
                server.protocol_version
            ));
        }
        tracing::debug!(
            installation_name = %self.spec.name, server = quoted(&self.spec.mask, &server.server_info.name),
            version = quoted(&self.spec.mask, &server.server_info.version), protocol = %server.protocol_version,
            "initialized"
        );
        self.notify("notifications/initialized", None);
        self.initialized = Some(Instant::now());
        self.has_tools = server.capabilities.tools.is_some();
        (self.news)(News::Initialized);
        if self.discover {
            self.list();
        }
        None
    }

    // ---- the lists ----

    fn list(&mut self) {
        self.list_again_at = None;
        if self.listing.is_some() {
            // One reading at a time; what changed meanwhile is read after it.
            self.list_again_at = Some(Instant::now() + self.spec.policy.session.list_changed_debounce);
            return;
        }
        self.listing = Some(Listing::default());
        self.list_page(None);
    }

    fn list_page(&mut self, cursor: Option<&str>) {
        let params = cursor.map(|cursor| format!(r#"{{"cursor":{cursor}}}"#));
        let deadline = Instant::now() + self.spec.policy.session.request_timeout;
        self.ask("tools/list", params.as_deref(), Purpose::List, deadline);
    }

    fn on_list(&mut self, answer: Result<&RawValue, CallError>) {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Page<'a> {
            tools: Vec<Box<RawValue>>,
            #[serde(borrow, default)]
            next_cursor: Option<&'a RawValue>,
        }
        let Some(mut listing) = self.listing.take() else { return };
        let page = match answer {
            // A server without tools is a server, in whatever words it says so.
            Err(CallError::Server { code, .. }) if code == METHOD_NOT_FOUND || !self.has_tools => {
                Page { tools: Vec::new(), next_cursor: None }
            }
            Err(error) => return (self.news)(News::DiscoveryFailed(error.to_string())),
            Ok(result) => match serde_json::from_str::<Page<'_>>(result.get()) {
                Ok(page) => page,
                Err(error) => {
                    let why = format!("the answer to tools/list is not one: {error}");
                    return (self.news)(News::DiscoveryFailed(quoted(&self.spec.mask, &why)));
                }
            },
        };
        for raw in page.tools {
            match Tool::parse(raw) {
                // The first of a name is the one that is called.
                Ok(tool) if !listing.names.insert(tool.name.clone()) => {}
                Ok(tool) => listing.tools.push(tool),
                Err(error) => {
                    let error = quoted(&self.spec.mask, &error.to_string());
                    tracing::warn!(installation_name = %self.spec.name, error, "a tool without a usable definition is left out");
                }
            }
        }
        listing.pages += 1;
        // A cursor that is empty or the same again would go on for ever.
        let cursor = page.next_cursor.map(RawValue::get).filter(|cursor| *cursor != "\"\"");
        if let Some(cursor) = cursor.filter(|cursor| listing.cursor.as_deref() != Some(*cursor)) {
            if listing.pages < self.spec.policy.session.list_pages_max {
                listing.cursor = Some(cursor.to_owned());
                self.listing = Some(listing);
                return self.list_page(Some(cursor));
            }
            tracing::warn!(installation_name = %self.spec.name, pages = listing.pages, "tools/list has too many pages; the rest is left out");
        }
        (self.news)(News::Discovered(Arc::new(Catalogue { tools: listing.tools, ..Catalogue::default() })));
    }

    // ---- what the server sends ----

    fn on_received(&mut self, received: Received) -> Option<Over> {
        match received {
            Received::FirstByte => {
                (self.news)(News::FirstByte);
                None
            }
            Received::Line(line) => {
                let now = Instant::now();
                if line.trim_ascii().is_empty() {
                    return None;
                }
                match Frame::parse(&line) {
                    Ok(frame) => {
                        self.counters.message((self.wall)());
                        self.port.gate.active(now);
                        self.on_frame(&frame, now)
                    }
                    Err(why) => {
                        self.on_malformed(&line, &why);
                        None
                    }
                }
            }
            Received::End => {
                self.stdout_over = true;
                self.breaks("the server closed its stdout".to_owned());
                None
            }
            Received::TooLong => {
                let limit = self.spec.policy.session.line_max;
                Some(Over::Failed(ExitCause::Wire(format!("a line from the server is longer than {limit} bytes"))))
            }
            Received::Failed(error) => {
                self.stdout_over = true;
                self.breaks(format!("cannot read the server's stdout: {error}"));
                None
            }
        }
    }

    fn on_frame(&mut self, frame: &Frame<'_>, now: Instant) -> Option<Over> {
        match (&frame.method, frame.id) {
            (Some(method), Some(id)) => return self.on_server_request(method, id),
            (Some(method), None) => self.on_notification(method, frame.params, now),
            (None, Some(id)) => return self.on_response(id, frame),
            (None, None) => {
                self.on_malformed(frame.error.map_or("", RawValue::get).as_bytes(), "an error for no request");
            }
        }
        None
    }

    fn on_response(&mut self, id: &RawValue, frame: &Frame<'_>) -> Option<Over> {
        // An id that is not ours is dropped, and so is a late answer to one that timed out.
        let pending = id.get().parse().ok().and_then(|id| self.calls.remove(id))?;
        let answer = match (frame.result, frame.error) {
            (Some(result), None) => Ok(result),
            (_, error) => Err(server_error(error, &self.spec.mask)),
        };
        match pending.purpose {
            Purpose::Caller { ticket, .. } => {
                ticket.answer(answer.map(ToOwned::to_owned));
                None
            }
            Purpose::Handshake => self.on_initialize(answer),
            Purpose::List => {
                self.on_list(answer);
                None
            }
            // Any byte has cleared it already.
            Purpose::Ping => None,
        }
    }

    fn on_server_request(&mut self, method: &str, id: &RawValue) -> Option<Over> {
        if self.out.len() > UNREAD_ANSWERS_MAX {
            let why = "the server asks and does not read the answers".to_owned();
            return Some(Over::Failed(ExitCause::Wire(why)));
        }
        let answer = match method {
            "ping" => r#""result":{}"#.to_owned(),
            "roots/list" => r#""result":{"roots":[]}"#.to_owned(),
            "sampling/createMessage" => {
                format!(r#""error":{{"code":{INTERNAL_ERROR},"message":"no client is attached that could answer"}}"#)
            }
            _ => format!(r#""error":{{"code":{METHOD_NOT_FOUND},"message":"method not found"}}"#),
        };
        self.put(&[r#"{"jsonrpc":"2.0","id":"#, id.get(), ",", &answer, "}"]);
        None
    }

    fn on_notification(&mut self, method: &str, params: Option<&RawValue>, now: Instant) {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Progress {
            progress_token: u64,
        }
        match method {
            "notifications/progress" => {
                // A token that is no number of ours belongs to no call of ours.
                if let Some(Ok(progress)) = params.map(|params| serde_json::from_str::<Progress>(params.get())) {
                    self.calls.extend(progress.progress_token, now, self.spec.policy.session.request_timeout_max);
                }
            }
            // Before the handshake is done there is nothing that could have changed, and nobody to ask.
            "notifications/tools/list_changed" if self.initialized.is_some() => {
                self.list_again_at.get_or_insert(now + self.spec.policy.session.list_changed_debounce);
            }
            other => {
                let method = quoted(&self.spec.mask, other);
                tracing::trace!(installation_name = %self.spec.name, method, "notification");
            }
        }
    }

    fn on_malformed(&self, line: &[u8], why: &str) {
        let before = self.counters.malformed_line();
        if before < MALFORMED_LOGGED || before.is_power_of_two() {
            let text = quoted(&self.spec.mask, &String::from_utf8_lossy(&line[..line.len().min(64 * 1024)]));
            let why = quoted(&self.spec.mask, why);
            tracing::warn!(installation_name = %self.spec.name, why, line = text, count = before + 1, "a line on stdout is skipped");
        }
    }

    fn breaks(&mut self, why: String) {
        self.broken.get_or_insert((why, Instant::now() + BROKEN_PATIENCE));
    }

    // ---- what callers want ----

    fn on_command(&mut self, command: Command) {
        match command {
            Command::Request(asked) => {
                let Asked { id, request, started, timeout, ticket } = *asked;
                self.port.gate.active(started);
                let purpose = Purpose::Caller { ticket, started, timeout };
                self.calls.insert(id, Pending { purpose, deadline: started + timeout, starts_at: None });
                self.unsent.push_back((id, request));
                self.send();
            }
            Command::Cancel { id } => {
                if let Some(pending) = self.calls.remove(id) {
                    self.port.gate.active(Instant::now());
                    self.cancel(id, pending.starts_at, "the caller went away");
                }
            }
        }
    }

    /// Queues requests for writing while there is room. The deadline of one that waits runs all the same: a server that
    /// does not read must not hold its callers.
    fn send(&mut self) {
        while self.out.len() < OUTGOING_MAX
            && let Some((id, request)) = self.unsent.pop_front()
        {
            let Some(pending) = self.calls.pending.get_mut(&id) else { continue };
            pending.starts_at = Some(self.queued);
            match request {
                Request::Tool { name, arguments } => {
                    let name = serde_json::Value::from(name).to_string();
                    let id = id.to_string();
                    let arguments = arguments.as_deref().map_or("{}", RawValue::get);
                    self.put(&[
                        r#"{"jsonrpc":"2.0","id":"#,
                        &id,
                        r#","method":"tools/call","params":{"name":"#,
                        &name,
                        r#","arguments":"#,
                        arguments,
                        r#","_meta":{"progressToken":"#,
                        &id,
                        "}}}",
                    ]);
                }
                Request::Method { method, params } => {
                    self.put_request(id, &method, params.as_deref().map(RawValue::get));
                }
            }
        }
    }

    fn ask(&mut self, method: &str, params: Option<&str>, purpose: Purpose, deadline: Instant) {
        let id = self.next_id().fetch_add(1, Ordering::Relaxed);
        let starts_at = Some(self.queued);
        self.put_request(id, method, params);
        self.calls.insert(id, Pending { purpose, deadline, starts_at });
    }

    fn next_id(&self) -> &AtomicU64 {
        &self.port.gate.next_id
    }

    /// Tells the server that nobody waits any more, if it has been asked at all.
    fn cancel(&mut self, id: u64, starts_at: Option<u64>, reason: &str) {
        if starts_at.is_none() {
            return self.unsent.retain(|(waiting, _)| *waiting != id);
        }
        self.notify("notifications/cancelled", Some(&format!(r#"{{"requestId":{id},"reason":"{reason}"}}"#)));
    }

    // ---- writing ----

    fn put_request(&mut self, id: u64, method: &str, params: Option<&str>) {
        let method = serde_json::Value::from(method).to_string();
        let id = id.to_string();
        let (before, params) = params.map_or(("", ""), |params| (r#","params":"#, params));
        self.put(&[r#"{"jsonrpc":"2.0","id":"#, &id, r#","method":"#, &method, before, params, "}"]);
    }

    fn notify(&mut self, method: &str, params: Option<&str>) {
        let (before, params) = params.map_or(("", ""), |params| (r#","params":"#, params));
        self.put(&[r#"{"jsonrpc":"2.0","method":""#, method, "\"", before, params, "}"]);
    }

    fn put(&mut self, parts: &[&str]) {
        let before = self.out.len();
        for part in parts {
            put_json(&mut self.out, part);
        }
        self.out.extend_from_slice(b"\n");
        self.queued += (self.out.len() - before) as u64;
    }

    fn on_written(&mut self, written: std::io::Result<usize>) {
        match written {
            Ok(count) => {
                self.out.advance(count);
                self.calls.written += count as u64;
                self.send();
                if self.out.is_empty() {
                    // An idle instance must not keep the memory of its largest request.
                    self.out = BytesMut::new();
                }
            }
            Err(error) => {
                self.out = BytesMut::new();
                self.writer = None;
                self.breaks(format!("cannot write to the server's stdin: {error}"));
            }
        }
    }

    // ---- time ----

    fn on_time(&mut self) -> Option<Over> {
        let now = Instant::now();
        if let Some((why, at)) = &self.broken
            && now >= *at
        {
            return Some(Over::Failed(ExitCause::Wire(why.clone())));
        }
        while let Some((at, id)) = self.calls.deadlines.first().copied()
            && now >= at
        {
            let Some(pending) = self.calls.remove(id) else { break };
            match pending.purpose {
                Purpose::Caller { ticket, started, .. } => {
                    self.cancel(id, pending.starts_at, "timed out");
                    self.watchdog.call_timed_out();
                    self.port.gate.active(now);
                    ticket.answer(Err(CallError::TimedOut { after: now - started }));
                }
                Purpose::Handshake => {
                    let limit = self.spec.policy.session.handshake_timeout;
                    let why = format!("no answer to initialize within {} s", limit.as_secs_f64());
                    return Some(Over::Failed(ExitCause::Handshake(why)));
                }
                Purpose::List => {
                    self.cancel(id, pending.starts_at, "timed out");
                    self.watchdog.call_timed_out();
                    self.on_list(Err(CallError::TimedOut { after: self.spec.policy.session.request_timeout }));
                }
                // The watchdog has its own clock.
                Purpose::Ping => {}
            }
        }
        if self.list_again_at.is_some_and(|at| now >= at) {
            self.list();
        }
        self.watchdog.heard(self.lines.last_read.into_std());
        let open = if self.watchdog.is_suspicious() { self.calls.callers() } else { 0 };
        match self.watchdog.check(&self.spec.policy.watchdog, now.into_std(), open) {
            Verdict::Wait(_) => None,
            Verdict::Ping => {
                let deadline = now + self.spec.policy.watchdog.ping_timeout;
                self.ask("ping", None, Purpose::Ping, deadline);
                None
            }
            Verdict::Unresponsive => Some(Over::Failed(ExitCause::Unresponsive)),
        }
    }

    // ---- the end ----

    /// Sees the process out. Whatever the way, its whole group is gone afterwards, or was told to be.
    async fn finish(&mut self, over: Over) -> WorkerExit {
        let ran = self.initialized.map(|at| at.elapsed());
        let mut exit = match over {
            Over::Process(end) => {
                self.drain().await;
                WorkerExit { code: end.code, signal: end.signal, ..WorkerExit::because(ExitCause::Exited) }
            }
            Over::Asked => WorkerExit::because(ExitCause::Asked),
            Over::Failed(cause) => WorkerExit::because(cause),
        };
        exit.ran = ran;
        self.port.commands.close();
        let reason = exit.reason();
        self.calls.settle(&reason);
        while let Ok(command) = self.port.commands.try_recv() {
            if let Command::Request(asked) = command {
                asked.ticket.answer(Err(CallError::Terminated { fate: Fate::NotSent, reason: reason.clone() }));
            }
        }
        if exit.cause == ExitCause::Asked {
            self.writer = None;
            self.process.terminate();
            exit.forced = !self.is_gone_within(self.spec.policy.session.terminate_grace, HURRY_GRACE).await;
        }
        // Killed before it can see the end of its stdin: what ended it is then what is told.
        self.process.kill();
        self.writer = None;
        if !self.is_gone_within(KILL_PATIENCE, KILL_PATIENCE).await {
            tracing::error!(installation_name = %self.spec.name, pid = self.process.pid(), "the process does not die; it is left to the kernel");
            return exit;
        }
        let end = self.process.ended().await;
        WorkerExit { code: end.code, signal: end.signal, ..exit }
    }

    /// What the process wrote before it ended is still in the pipe. A grandchild may hold the other end for ever.
    async fn drain(&mut self) {
        let until = Instant::now() + self.spec.policy.session.exit_drain;
        // A grandchild may also write for ever: the clock is looked at before each read.
        while !self.stdout_over && Instant::now() < until {
            let Ok(received) = tokio::time::timeout_at(until, self.lines.next()).await else { return };
            if self.on_received(received).is_some() {
                return;
            }
        }
    }

    /// Waits for the whole group to be gone, reading and dropping what it still prints, so that it does not block. Once
    /// somebody else waits for it, too, it has `hurried` left at most.
    async fn is_gone_within(&mut self, patience: Duration, hurried: Duration) -> bool {
        let mut until = Instant::now() + patience;
        let (mut reading, mut listening) = (!self.stdout_over, true);
        loop {
            tokio::select! {
                biased;
                () = self.process.gone() => return true,
                () = tokio::time::sleep_until(until) => return false,
                control = self.control.recv(), if listening => match control {
                    Some(Control::Hurry) => until = until.min(Instant::now() + hurried),
                    Some(Control::Stop | Control::Drain | Control::Discover) => {}
                    None => listening = false,
                },
                received = self.lines.next(), if reading => {
                    reading = matches!(received, Received::Line(_) | Received::FirstByte);
                }
            }
        }
    }
}

async fn write(writer: &mut Option<Box<dyn AsyncWrite + Send + Unpin>>, out: &[u8]) -> std::io::Result<usize> {
    match writer {
        Some(writer) => match writer.write(out).await {
            Ok(0) => Err(std::io::ErrorKind::WriteZero.into()),
            written => written,
        },
        // Nothing is written to a closed stdin; the wire is broken already.
        None => std::future::pending().await,
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

fn server_error(error: Option<&RawValue>, mask: &Mask) -> CallError {
    #[derive(Deserialize)]
    struct ServerError {
        code: i64,
        #[serde(default)]
        message: String,
        #[serde(default)]
        data: Option<serde_json::Value>,
    }
    match error.map(|error| serde_json::from_str::<ServerError>(error.get())) {
        Some(Ok(error)) => CallError::Server {
            code: error.code,
            message: mask.apply(&error.message),
            data: error.data.map(|data| mask.apply_json(data).to_string()),
        },
        Some(Err(_)) | None => CallError::Server {
            code: INTERNAL_ERROR,
            message: "the server answered with neither a result nor an error".to_owned(),
            data: None,
        },
    }
}

/// What a server said, as it may be quoted: it may say its secrets, and it may say much. Masked before it is cut, so that
/// no part of a secret is left at the cut.
fn quoted(mask: &Mask, text: &str) -> String {
    let mut text = mask.apply(text);
    if text.len() > QUOTED_MAX {
        text.truncate(text.floor_char_boundary(QUOTED_MAX));
        text.push('…');
    }
    text
}
