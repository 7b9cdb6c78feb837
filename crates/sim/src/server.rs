//! Behaviour of a simulated server: executes a script, reads lines and writes lines. It does no I/O and takes the time
//! as an argument, so the same server runs in ten thousand copies in paused time and as a real process. It handles one
//! line at a time, without allocation unless the answer is delayed.
//!
//! ```text
//! Starting ──start_delay──> Serving ──hang_after──> Hung
//!     └─────────────────────────┴──exit, crash, EOF, SIGTERM──> Ended
//! ```

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut, BytesMut};
use mcp_satellite_actors::model::ids::RunNumber;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::seam::ProcessEnd;
use mcp_satellite_protocol::era::{NEWEST_SESSION_VERSION, SESSION_VERSIONS};
use mcp_satellite_protocol::error_code::{
    INTERNAL_ERROR, INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND, PARSE_ERROR,
};
use mcp_satellite_protocol::method;
use serde_json::value::RawValue;
use tokio::time::Instant;

use super::script::{RunRng, SimScript};
use super::stateless::SimStatelessState;
use super::tools::{self, SimListKind};
use super::wire::{
    AddArguments, BigArguments, CallParams, CancelledParams, CrashArguments, EchoArguments, EnvArguments,
    FailureArguments, InitializeParams, ListParams, SleepArguments, WireMessage, parse, put_answer, put_error,
    put_filled, put_result, put_text,
};

// Maximum size of the text of `big` in bytes.
const BIG_RESULT_MAX: usize = 256 * 1024 * 1024;

// Maximum number of cancelled ids that `received` reports.
const CANCELLED_MAX: usize = 1024;

// Minimum interval between outputs on stderr; at a higher rate several lines are written at once.
const CHATTER_TICK: Duration = Duration::from_millis(10);

// Interval of outputs measured in bytes. At most the amount of two intervals is written at once.
const FLOOD_TICK: Duration = Duration::from_millis(10);
const FLOOD_LINE: [u8; 1024] = {
    let mut line = [b'#'; 1024];
    line[1023] = b'\n';
    line
};

// A request id that no client uses.
const UNUSED_ID: &str = "4611686018427387904";

const SIGKILL: i32 = 9;

// Lines that are not JSON, and JSON that is not JSON-RPC.
const GARBAGE: [&str; 5] = ["npm warn deprecated", r#"{"level":"info"}"#, r#"{"jsonrpc":"2.0","#, "[1,2]", "42"];

pub(super) enum EnvSource {
    Spec(Arc<InstanceSpec>),
    Process,
}

impl EnvSource {
    pub(super) fn get(&self, name: &str) -> Option<String> {
        match self {
            Self::Spec(spec) => spec.env.get(name).map(|value| value.expose().to_owned()),
            Self::Process => std::env::var(name).ok(),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SimPhase {
    Starting,
    Serving,
    /// Alive, but never reads or answers again.
    Hung,
    /// Ends this way once its output is read.
    Ended(ProcessEnd),
}

pub(super) struct SimResponder {
    pub(super) out: BytesMut,
    pub(super) err: BytesMut,
    pub(super) phase: SimPhase,
    pub(super) script: Arc<SimScript>,
    env: EnvSource,
    rng: RunRng,
    timers: BinaryHeap<ServerTimer>,
    timers_set: u64,
    started_at: Instant,
    stopping: bool,
    more_tools: usize,
    garbage_written: usize,
    stderr_lines: u64,
    lists: u64,
    calls: u64,
    pings: u64,
    initialized: u64,
    cancelled: Vec<Box<str>>,
    // Id of the last answer, if the script uses it.
    last_answered: Option<Box<str>>,
    pub(super) stateless: SimStatelessState,
    // Memory that calls have allocated for good (`grow_per_call`).
    retained_memory: Vec<Vec<u8>>,
}

struct ServerTimer {
    at: Instant,
    // Order of creation, for timers of the same time.
    order: u64,
    event: TimerEvent,
}

enum TimerEvent {
    Started,
    StderrLines,
    /// Contains the time of the previous output.
    StderrBytes(Instant),
    MoreTools,
    End(ProcessEnd),
    Answer(Box<LateAnswer>),
    Progress(Box<ProgressSeries>),
}

struct LateAnswer {
    id: Box<str>,
    ignore_cancel: bool,
    line: BytesMut,
}

struct ProgressSeries {
    id: Box<str>,
    ignore_cancel: bool,
    token: Box<str>,
    every: Duration,
    done: Duration,
    total: Duration,
}

impl SimResponder {
    pub(super) fn new(script: Arc<SimScript>, env: EnvSource, run: RunNumber, now: Instant) -> Self {
        let mut server = Self {
            out: BytesMut::new(),
            err: BytesMut::new(),
            phase: SimPhase::Starting,
            rng: RunRng::new(script.seed, run),
            script,
            env,
            timers: BinaryHeap::new(),
            timers_set: 0,
            started_at: now,
            stopping: false,
            more_tools: 0,
            garbage_written: 0,
            stderr_lines: 0,
            lists: 0,
            calls: 0,
            pings: 0,
            initialized: 0,
            cancelled: Vec::new(),
            last_answered: None,
            stateless: SimStatelessState::default(),
            retained_memory: Vec::new(),
        };
        server.begin(now);
        server
    }

    fn begin(&mut self, now: Instant) {
        let script = Arc::clone(&self.script);
        for _ in 0..script.stderr_burst_bytes {
            let column = self.err.len() % 80;
            self.err.put_u8(if column == 79 { b'\n' } else { b'#' });
        }
        if script.stderr_burst_bytes > 0 {
            self.err.put_u8(b'\n');
        }
        if script.stderr_lines_per_second > 0 {
            self.set_timer(now + self.stderr_line_interval(), TimerEvent::StderrLines);
        } else if script.stderr_text.is_some() {
            self.write_stderr_line();
        }
        if script.stderr_bytes_per_second > 0 {
            self.set_timer(now + FLOOD_TICK, TimerEvent::StderrBytes(now));
        }
        self.write_garbage(script.stdout_garbage_at_start);
        match self.apply_jitter(script.start_delay) {
            Duration::ZERO => self.complete_start(),
            delay => self.set_timer(now + delay, TimerEvent::Started),
        }
    }

    fn complete_start(&mut self) {
        self.phase =
            if self.script.exit_before_handshake { SimPhase::Ended(self.script.end()) } else { SimPhase::Serving };
    }

    pub(super) fn next_timer(&self) -> Option<Instant> {
        self.timers.peek().map(|timer| timer.at)
    }

    pub(super) fn run_due_timers(&mut self, now: Instant) {
        while matches!(self.phase, SimPhase::Starting | SimPhase::Serving)
            && self.next_timer().is_some_and(|at| at <= now)
        {
            let Some(timer) = self.timers.pop() else { return };
            match timer.event {
                TimerEvent::Started => self.complete_start(),
                TimerEvent::StderrLines => {
                    let due = now.duration_since(self.started_at).as_millis()
                        * u128::from(self.script.stderr_lines_per_second)
                        / 1000;
                    while u128::from(self.stderr_lines) < due {
                        self.stderr_lines += 1;
                        self.write_stderr_line();
                    }
                    self.set_timer(now + self.stderr_line_interval(), TimerEvent::StderrLines);
                }
                TimerEvent::StderrBytes(since) => {
                    let bytes = self.script.stderr_bytes_per_second as f64
                        * now.duration_since(since).min(2 * FLOOD_TICK).as_secs_f64();
                    while (self.err.len() as f64) < bytes {
                        self.err.put_slice(&FLOOD_LINE);
                    }
                    self.set_timer(now + FLOOD_TICK, TimerEvent::StderrBytes(now));
                }
                TimerEvent::MoreTools => {
                    self.more_tools += 1;
                    self.notify_tools_changed();
                }
                TimerEvent::End(end) => self.phase = SimPhase::Ended(end),
                TimerEvent::Answer(answer) => {
                    self.write_before_answer(&answer.id);
                    self.out.put_slice(&answer.line);
                }
                TimerEvent::Progress(progress) => self.send_progress(timer.at, progress),
            }
        }
    }

    pub(super) fn terminate(&mut self, now: Instant) {
        if !self.stopping {
            self.stopping = true;
            let delay = self.apply_jitter(self.script.sigterm_delay.unwrap_or_default());
            let end = ProcessEnd { code: Some(self.script.exit_code), signal: None };
            self.set_timer(now + delay, TimerEvent::End(end));
        }
    }

    pub(super) fn handle_eof(&mut self, now: Instant) {
        match (self.script.ignore_eof, self.script.sigterm_delay) {
            (true, _) => {}
            (false, Some(_)) => self.terminate(now),
            (false, None) => self.phase = SimPhase::Ended(ProcessEnd { code: Some(0), signal: None }),
        }
    }

    fn write_stderr_line(&mut self) {
        let script = Arc::clone(&self.script);
        let template = script.stderr_text.as_deref().unwrap_or("still here");
        let mut parts = template.split("{env:");
        self.err.put_slice(parts.next().unwrap_or_default().as_bytes());
        for part in parts {
            let (name, rest) = part.split_once('}').unwrap_or((part, ""));
            self.err.put_slice(self.env.get(name).unwrap_or_default().as_bytes());
            self.err.put_slice(rest.as_bytes());
        }
        self.err.put_u8(b'\n');
    }

    fn stderr_line_interval(&self) -> Duration {
        (Duration::from_secs(1) / self.script.stderr_lines_per_second.max(1)).max(CHATTER_TICK)
    }

    pub(super) fn apply_jitter(&mut self, duration: Duration) -> Duration {
        self.rng.apply_jitter(duration, self.script.jitter)
    }

    fn set_timer(&mut self, at: Instant, event: TimerEvent) {
        self.timers_set += 1;
        self.timers.push(ServerTimer { at, order: self.timers_set, event });
    }

    fn write_garbage(&mut self, lines: usize) {
        for _ in 0..lines {
            self.out.put_slice(GARBAGE[self.garbage_written % GARBAGE.len()].as_bytes());
            self.out.put_u8(b'\n');
            self.garbage_written += 1;
        }
    }

    /// Writes the garbage lines and stray answers that the script puts before an answer.
    fn write_before_answer(&mut self, id: &str) {
        self.write_garbage(self.script.garbage_lines);
        for _ in 0..self.script.stray_answers {
            let answered = self.last_answered.as_deref().unwrap_or("null");
            for stray in [answered, UNUSED_ID] {
                let line = format!("{{\"jsonrpc\":\"2.0\",\"id\":{stray},\"result\":{{}}}}\n");
                self.out.put_slice(line.as_bytes());
            }
        }
        if self.script.stray_answers > 0 {
            self.last_answered = Some(id.into());
        }
    }

    pub(super) fn handle_line(&mut self, now: Instant, line: &[u8]) {
        let line = line.trim_ascii();
        if line.is_empty() {
            return;
        }
        if !line.starts_with(b"{") {
            return self.refuse(RawValue::NULL, PARSE_ERROR, "not a JSON object");
        }
        let Ok(message) = serde_json::from_slice::<WireMessage<'_>>(line) else {
            return self.refuse(RawValue::NULL, PARSE_ERROR, "not JSON-RPC");
        };
        let method = message.method.as_ref().map(|method| &*method.0);
        if let (Some(method), Some(id)) = (method, message.id)
            && self.try_handle(now, method, id, message.params)
        {
            return;
        }
        let list = method.and_then(|method| SimListKind::from_method(method, &self.script));
        if let (Some(of), Some(id)) = (list, message.id) {
            return self.list(of, id, message.params);
        }
        match (method, message.id) {
            (Some(method::INITIALIZE), Some(id)) => self.initialize(now, id, message.params),
            (Some(method::PING), Some(id)) => {
                self.pings += 1;
                self.answer(id, |line| line.put_slice(b"\"result\":{}"));
            }
            (Some(method::TOOLS_CALL), Some(id)) if !self.script.no_tools_capability => {
                self.call(now, id, message.params);
            }
            (Some(method), Some(id)) => self.refuse(id, METHOD_NOT_FOUND, &format!("method not found: {method}")),
            (Some(method::INITIALIZED), None) => self.handle_initialized(now),
            (Some(method::CANCELLED), None) => self.cancel(message.params),
            // Other notifications, and responses: this server sends no requests.
            (Some(_), None) | (None, Some(_)) => {}
            (None, None) => self.refuse(RawValue::NULL, INVALID_REQUEST, "neither a request nor a response"),
        }
    }

    fn initialize(&mut self, now: Instant, id: &RawValue, params: Option<&RawValue>) {
        let script = Arc::clone(&self.script);
        if script.handshake_never {
            return;
        }
        if let Some(message) = &script.handshake_error {
            return self.refuse(id, script.handshake_code.unwrap_or(INTERNAL_ERROR), message);
        }
        let offered = parse::<InitializeParams<'_>>(params).unwrap_or_default().protocol_version;
        let offered = offered.as_ref().map_or("", |version| &*version.0);
        let known = if SESSION_VERSIONS.contains(&offered) { offered } else { NEWEST_SESSION_VERSION };
        let version = script.protocol_version.as_deref().unwrap_or(known);
        let body = |line: &mut BytesMut| {
            line.put_slice(b"\"result\":{\"protocolVersion\":");
            put_text(line, version);
            line.put_slice(b",\"capabilities\":");
            tools::put_capabilities(line, &script);
            line.put_slice(b",\"serverInfo\":{\"name\":");
            put_text(line, &script.name);
            line.put_slice(b",\"version\":");
            put_text(line, &script.version);
            line.put_slice(b"}}");
        };
        let delay = self.apply_jitter(script.handshake_delay);
        self.answer_in(now, delay, id, body);
    }

    pub(super) fn handle_initialized(&mut self, now: Instant) {
        self.initialized += 1;
        if self.initialized > 1 {
            return;
        }
        if let Some(lifetime) = self.script.exit_after {
            let lifetime = self.apply_jitter(lifetime);
            self.set_timer(now + lifetime, TimerEvent::End(self.script.end()));
        }
        if let Some(delay) = self.script.list_changed_after {
            let delay = self.apply_jitter(delay);
            self.set_timer(now + delay, TimerEvent::MoreTools);
        }
    }

    fn cancel(&mut self, params: Option<&RawValue>) {
        let Ok(cancelled) = parse::<CancelledParams<'_>>(params) else { return };
        let id = cancelled.request_id.get();
        self.stateless.remove_stream(id);
        self.timers.retain(|timer| match &timer.event {
            TimerEvent::Answer(answer) => answer.ignore_cancel || *answer.id != *id,
            TimerEvent::Progress(progress) => progress.ignore_cancel || *progress.id != *id,
            TimerEvent::Started
            | TimerEvent::StderrLines
            | TimerEvent::StderrBytes(_)
            | TimerEvent::MoreTools
            | TimerEvent::End(_) => true,
        });
        if self.cancelled.len() < CANCELLED_MAX {
            self.cancelled.push(id.into());
        }
    }

    fn list(&mut self, of: SimListKind, id: &RawValue, params: Option<&RawValue>) {
        let script = Arc::clone(&self.script);
        if of == SimListKind::Tools {
            self.lists += 1;
            if self.lists <= script.list_error_times || (script.list_error && script.list_error_times == 0) {
                return self.refuse(id, INTERNAL_ERROR, "cannot list the tools");
            }
        }
        if of == SimListKind::Resources && script.resources_error {
            return self.refuse(id, INTERNAL_ERROR, "cannot list the resources");
        }
        let more = self.more_tools;
        let count = of.count(&script, more);
        let cursor = parse::<ListParams<'_>>(params).unwrap_or_default().cursor;
        let Ok(first) = cursor.as_ref().map_or("0", |cursor| &*cursor.0).parse::<usize>() else {
            return self.refuse(id, INVALID_PARAMS, "unknown cursor");
        };
        let page = if script.page_size == 0 { count } else { script.page_size };
        let last = first.saturating_add(page).min(count);
        self.answer(id, |line| {
            line.put_slice(b"\"result\":{\"");
            line.put_slice(of.name().as_bytes());
            line.put_slice(b"\":[");
            for index in first..last {
                if index > first {
                    line.put_u8(b',');
                }
                line.put_slice(of.entry(&script, more, index).as_bytes());
            }
            line.put_u8(b']');
            if last < count {
                line.put_slice(b",\"nextCursor\":");
                put_text(line, &last.to_string());
            }
            line.put_u8(b'}');
        });
    }

    fn call(&mut self, now: Instant, id: &RawValue, params: Option<&RawValue>) {
        let Ok(call) = parse::<CallParams<'_>>(params) else {
            return self.refuse(id, INVALID_PARAMS, "tools/call needs a name");
        };
        // `received` changes nothing, and works whatever the script does to calls.
        if call.name == "received" {
            return self.report_received(id);
        }
        let script = Arc::clone(&self.script);
        if script.hang_after == Some(self.calls) {
            self.phase = SimPhase::Hung;
            return;
        }
        self.calls += 1;
        if script.exit_on_call == Some(self.calls) {
            self.phase = SimPhase::Ended(script.end());
            return;
        }
        if script.hang_calls {
            return;
        }
        if script.grow_per_call > 0 {
            self.retained_memory.push(vec![1; script.grow_per_call]);
            if script.memory_max > 0 && self.retained_memory.len() * script.grow_per_call > script.memory_max {
                self.phase = SimPhase::Ended(ProcessEnd { code: None, signal: Some(SIGKILL) });
                return;
            }
        }
        if let Err(error) = self.call_tool(now, id, &call) {
            self.refuse(id, INVALID_PARAMS, &format!("invalid arguments for {}: {error}", call.name));
        }
    }

    fn call_tool(&mut self, now: Instant, id: &RawValue, call: &CallParams<'_>) -> Result<(), serde_json::Error> {
        let script = Arc::clone(&self.script);
        let delay = self.apply_jitter(script.call_delay);
        let arguments = call.arguments.map_or("{}", RawValue::get);
        match &*call.name {
            "echo" => {
                let echo: EchoArguments<'_> = serde_json::from_str(arguments)?;
                let text = echo.text.map_or("null", RawValue::get);
                let delay = delay + Duration::from_millis(echo.after_ms);
                self.answer_in(now, delay, id, |line| put_result(line, text, Some(arguments), false));
            }
            "add" => {
                let sum = serde_json::from_str::<AddArguments>(arguments)?.sum();
                let structured = format!(r#"{{"result":{sum}}}"#);
                self.answer_in(now, delay, id, |line| put_result(line, &sum, Some(&structured), false));
            }
            "sleep" => {
                let sleep: SleepArguments = serde_json::from_str(arguments)?;
                let total = Duration::from_millis(sleep.ms) + delay;
                let ignore_cancel = sleep.ignore_cancel;
                let token = call.meta.as_ref().and_then(|meta| meta.progress_token);
                if let (Some(every), Some(token)) = (sleep.progress_every_ms, token) {
                    let (id, token) = (id.get().into(), token.get().into());
                    let every = Duration::from_millis(every.max(1));
                    let progress = ProgressSeries { id, ignore_cancel, token, every, done: every, total };
                    if every < total {
                        self.set_timer(now + every, TimerEvent::Progress(Box::new(progress)));
                    }
                }
                let text = format!("slept {} ms", sleep.ms);
                self.answer_at(now + total, id, ignore_cancel, |line| put_result(line, &text, None, false));
            }
            "big" => {
                let big: BigArguments = serde_json::from_str(arguments)?;
                let bytes = big.bytes.min(BIG_RESULT_MAX);
                self.answer_in(now, delay, id, |line| put_filled(line, |_| bytes));
            }
            "huge" => {
                let length = script.huge_line_bytes;
                self.answer_in(now, delay, id, |line| put_filled(line, |rest| length.saturating_sub(rest)));
            }
            "fail" => {
                let failure: FailureArguments = serde_json::from_str(arguments)?;
                let message = format!("failed as asked: {}", failure.message);
                let code = failure.code.unwrap_or(INTERNAL_ERROR);
                self.answer_in(now, delay, id, |line| put_error(line, code, &message));
            }
            "tool_error" => {
                let failure: FailureArguments = serde_json::from_str(arguments)?;
                let text = format!("failed as asked: {}", failure.message);
                self.answer_in(now, delay, id, |line| put_result(line, &text, None, true));
            }
            "crash" => {
                let crash: CrashArguments = serde_json::from_str(arguments)?;
                let code = if crash.signal.is_none() { Some(crash.code.unwrap_or(1)) } else { None };
                self.phase = SimPhase::Ended(ProcessEnd { code, signal: crash.signal });
            }
            "env" => {
                let variable: EnvArguments = serde_json::from_str(arguments)?;
                let value = self.env.get(&variable.name);
                let text = value.as_deref().unwrap_or("not set");
                self.answer_in(now, delay, id, |line| put_result(line, text, None, value.is_none()));
            }
            name if tools::is_numbered(&script, self.more_tools, name) => {
                self.answer_in(now, delay, id, |line| put_result(line, name, None, false));
            }
            name => self.refuse(id, INVALID_PARAMS, &format!("unknown tool: {name}")),
        }
        Ok(())
    }

    fn report_received(&mut self, id: &RawValue) {
        let received = format!(
            r#"{{"calls":{},"cancelled":[{}],"pings":{},"initialized":{}}}"#,
            self.calls,
            self.cancelled.join(","),
            self.pings,
            self.initialized
        );
        self.answer(id, |line| put_result(line, &received, Some(&received), false));
    }

    fn send_progress(&mut self, at: Instant, mut progress: Box<ProgressSeries>) {
        self.out
            .put_slice(b"{\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\",\"params\":{\"progressToken\":");
        self.out.put_slice(progress.token.as_bytes());
        let (done, total) = (progress.done.as_millis(), progress.total.as_millis());
        self.out.put_slice(format!(",\"progress\":{done},\"total\":{total}}}}}\n").as_bytes());
        progress.done += progress.every;
        if progress.done < progress.total {
            self.set_timer(at + progress.every, TimerEvent::Progress(progress));
        }
    }

    pub(super) fn refuse(&mut self, id: &RawValue, code: i64, message: &str) {
        self.answer(id, |line| put_error(line, code, message));
    }

    pub(super) fn answer(&mut self, id: &RawValue, body: impl FnOnce(&mut BytesMut)) {
        self.write_before_answer(id.get());
        put_answer(&mut self.out, id, body);
    }

    pub(super) fn answer_in(&mut self, now: Instant, delay: Duration, id: &RawValue, body: impl FnOnce(&mut BytesMut)) {
        if delay.is_zero() {
            self.answer(id, body);
        } else {
            self.answer_at(now + delay, id, false, body);
        }
    }

    fn answer_at(&mut self, at: Instant, id: &RawValue, ignore_cancel: bool, body: impl FnOnce(&mut BytesMut)) {
        let mut line = BytesMut::new();
        put_answer(&mut line, id, body);
        self.set_timer(at, TimerEvent::Answer(Box::new(LateAnswer { id: id.get().into(), ignore_cancel, line })));
    }
}

impl PartialEq for ServerTimer {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for ServerTimer {}

impl PartialOrd for ServerTimer {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Reverse order: the heap returns the greatest timer first.
impl Ord for ServerTimer {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.order).cmp(&(self.at, self.order))
    }
}
