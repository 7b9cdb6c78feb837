//! Sessions over the pipes of a process: line framing, broken pipes, the watchdog for silent servers, and the end of
//! the process.

use std::time::{Duration, Instant};

use bytes::{Buf, Bytes, BytesMut};
use futures::FutureExt;
use mcp_satellite_protocol::header::RequestHeaders;
use mcp_satellite_protocol::rpc::put_json;
use mcp_satellite_session::{
    HandshakeRefusal, MessageOutcome, Outlet, PassedDeadline, PendingPurpose, RESUME_TIMEOUT, RequestPhase,
    SessionCore, SessionEvent, SessionHost,
};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};

use super::{SessionArgs, SessionControl, SessionPorts, SessionTimer, SessionWork, WorkerHost, next_work, now};
use crate::model::exit::{ExitCause, WorkerExit};
use crate::model::session_description::SessionDescription;
use crate::rules::watchdog::{Watchdog, WatchdogVerdict};
use crate::seam::{ProcessEnd, ServerProcess};
use crate::tasks::catch_panic;
use crate::wire::{LineReader, ReadOutcome};

// A server that sends requests while more bytes are unwritten does not read the responses, and its run ends.
const UNREAD_ANSWERS_MAX: usize = 16 * 1024 * 1024;
// Commands and lines that are handled before the output is written. More of them wait for the next turn.
const BATCH_MAX: usize = 64;
// Further requests wait while this many bytes are unwritten.
const OUTGOING_MAX: usize = 1024 * 1024;
// After closing stdout or stdin the process has this time to exit by itself; then the pipe counts as broken.
const BROKEN_PATIENCE: Duration = Duration::from_secs(1);
// Maximum wait after SIGKILL.
const KILL_PATIENCE: Duration = Duration::from_secs(5);
// Remaining grace of a terminating process once a caller waits for its end.
const HURRY_GRACE: Duration = Duration::from_secs(1);

pub(crate) struct Args {
    pub(crate) common: SessionArgs,
    pub(crate) reader: Box<dyn AsyncRead + Send + Unpin>,
    pub(crate) writer: Box<dyn AsyncWrite + Send + Unpin>,
    pub(crate) process: Box<dyn ServerProcess>,
}

enum StdioSessionEnd {
    Process(ProcessEnd),
    Requested,
    Failed(ExitCause),
}

#[derive(Default)]
struct StdinOutlet {
    out: BytesMut,
    queued: u64,
}

impl StdinOutlet {
    fn put(&mut self, parts: &[&str]) {
        let before = self.out.len();
        for part in parts {
            put_json(&mut self.out, part);
        }
        self.out.extend_from_slice(b"\n");
        self.queued += (self.out.len() - before) as u64;
    }
}

impl Outlet for StdinOutlet {
    // Output in a pipe is lost with the process.
    const REPEATS: bool = false;

    fn request(&mut self, _id: u64, _of: RequestPhase, _routing: Option<Box<RequestHeaders>>, parts: &[&str]) {
        self.put(parts);
    }

    fn notify(&mut self, parts: &[&str]) {
        self.put(parts);
    }

    fn respond(&mut self, parts: &[&str]) {
        self.put(parts);
    }

    fn send_initialized(&mut self, _version: &str, parts: &[&str]) {
        self.put(parts);
    }

    // A notification cancels the request instead.
    fn abandon(&mut self, _id: u64) {}

    fn has_room(&self) -> bool {
        self.out.len() < OUTGOING_MAX
    }

    fn is_flooded(&self) -> bool {
        self.out.len() > UNREAD_ANSWERS_MAX
    }

    fn position(&self) -> u64 {
        self.queued
    }
}

struct StdioSession {
    ports: SessionPorts,
    core: SessionCore<StdinOutlet, WorkerHost>,
    lines: LineReader<Box<dyn AsyncRead + Send + Unpin>>,
    writer: Option<Box<dyn AsyncWrite + Send + Unpin>>,
    process: Box<dyn ServerProcess>,
    watchdog: Watchdog,
    timer: SessionTimer,
    stdout_closed: bool,
    reads_first: bool,
    broken: Option<(String, Instant)>,
}

/// Runs a session and its process to the end. On return, nothing of the run is left.
pub(crate) fn run(args: Args) -> impl Future<Output = WorkerExit> + Send {
    let Args { common, reader, writer, process } = args;
    let (pid, line_max) = (process.pid(), common.spec.policy.session.line_max);
    let messages = common.memory.messages.clone();
    let lines = match &common.resumed {
        Some(_) => LineReader::resumed(reader, line_max, messages),
        None => LineReader::new(reader, line_max, messages),
    };
    let (core, ports) = common.open(StdinOutlet::default());
    // Boxed: a future stores its arguments and the values made of them side by side, and so does each future around it.
    let mut this = Box::new(StdioSession {
        ports,
        core,
        lines,
        writer: Some(writer),
        process,
        watchdog: Watchdog::new(now()),
        timer: SessionTimer::default(),
        stdout_closed: false,
        reads_first: false,
        broken: None,
    });
    async move {
        let end = this.serve().await;
        let exit = this.finish(end).await;
        WorkerExit { pid, ..exit }
    }
}

impl StdioSession {
    async fn serve(&mut self) -> StdioSessionEnd {
        loop {
            if self.ports.has_drained() {
                return StdioSessionEnd::Requested;
            }
            let wake_at = self.wake_at();
            self.timer.arm(wake_at);
            let reading = !self.stdout_closed;
            let writing = !self.core.outlet.out.is_empty();
            let draining = self.ports.draining;
            // This order keeps the other work going if a server floods its stdout or clients flood it with
            // notifications. Commands and reading alternate.
            tokio::select! {
                biased;
                control = self.ports.control.recv() => match control {
                    Some(SessionControl::Discover) => self.core.read_lists(now()),
                    Some(SessionControl::Drain) => self.ports.draining = true,
                    Some(SessionControl::ApplySpec(spec)) => {
                        self.lines.line_max = spec.policy.session.line_max;
                        self.core.apply_spec(spec);
                    }
                    // These concern an end in progress or a remote server.
                    Some(SessionControl::ShortenGrace | SessionControl::Check) => {}
                    // A worker that is gone means the same as a stop.
                    Some(SessionControl::Stop) | None => return StdioSessionEnd::Requested,
                },
                () = self.timer.wait() => {
                    if let Some(end) = self.on_time() {
                        return end;
                    }
                }
                end = self.process.wait() => return StdioSessionEnd::Process(end),
                written = write(&mut self.writer, &self.core.outlet.out), if writing => self.on_written(written),
                () = self.core.gate.emptied.notified(), if draining => {}
                work = next_work(&mut self.ports.commands, next_line(&mut self.lines, reading), self.reads_first) => {
                    self.reads_first = matches!(work, SessionWork::Command(_));
                    if let Some(end) = self.on_batch(work).await {
                        return end;
                    }
                }
            }
        }
    }

    /// Handles `first` and the further commands and lines that are ready, so that one write and one look at the deadlines
    /// serve all of them.
    async fn on_batch(&mut self, first: SessionWork<ReadOutcome>) -> Option<StdioSessionEnd> {
        let is_command = matches!(first, SessionWork::Command(_));
        match first {
            SessionWork::Command(command) => self.core.on_command(*command, now()),
            SessionWork::Read(received) => {
                if let Some(end) = self.on_received(received) {
                    return Some(end);
                }
            }
        }
        // Other callers are active: their tasks that are ready now may have further requests for the same write.
        if is_command && self.core.gate.in_flight() > 1 {
            tokio::task::yield_now().await;
        }
        // The pipe is read once in each batch, so a flood of commands does not delay the messages of the server.
        let mut may_read = is_command && !self.stdout_closed;
        for _ in 0..BATCH_MAX {
            let command = self.ports.commands.try_recv().ok();
            let line = match self.lines.next_buffered() {
                None if std::mem::take(&mut may_read) => self.lines.next().now_or_never(),
                line => line,
            };
            if command.is_none() && line.is_none() {
                break;
            }
            if let Some(command) = command {
                self.core.on_command(*command, now());
            }
            if let Some(end) = line.and_then(|line| self.on_received(line)) {
                return Some(end);
            }
        }
        None
    }

    fn wake_at(&mut self) -> Option<Instant> {
        let broken = self.broken.as_ref().map(|(_, at)| *at);
        let watchdog = match self.watchdog_verdict() {
            WatchdogVerdict::Wait(at) => at,
            WatchdogVerdict::Ping | WatchdogVerdict::Unresponsive => Some(now()),
        };
        [self.core.next_deadline(), broken, watchdog].into_iter().flatten().min()
    }

    fn watchdog_verdict(&mut self) -> WatchdogVerdict {
        // Works on a copy: `on_time` takes the decision.
        self.watchdog.record_activity(self.lines.last_read.into_std());
        Self::decide(&mut self.watchdog.clone(), &self.core, now())
    }

    fn decide(watchdog: &mut Watchdog, core: &SessionCore<StdinOutlet, WorkerHost>, now: Instant) -> WatchdogVerdict {
        let next = core.gate.next_id();
        watchdog.check(&core.spec.policy.watchdog, now, next, |end| core.calls.callers_below(end))
    }

    fn on_received(&mut self, received: ReadOutcome) -> Option<StdioSessionEnd> {
        match received {
            ReadOutcome::FirstByte => {
                self.core.host.report(SessionEvent::FirstByte);
                None
            }
            ReadOutcome::Line(line) => match self.on_line(&line) {
                MessageOutcome::HandshakeRefused(how) => Some(StdioSessionEnd::Failed(handshake_exit_cause(how))),
                MessageOutcome::Flooded => {
                    let why = "the server sends requests and does not read the responses".to_owned();
                    Some(StdioSessionEnd::Failed(ExitCause::Wire(why)))
                }
                MessageOutcome::Initialized => {
                    self.describe_session();
                    None
                }
                // Any byte read has already reset the watchdog.
                MessageOutcome::Nothing
                | MessageOutcome::ResultResponse
                | MessageOutcome::ErrorResponse
                | MessageOutcome::SessionDoubted
                | MessageOutcome::Checked
                | MessageOutcome::CheckRefused { .. }
                | MessageOutcome::OtherEra(..) => None,
            },
            ReadOutcome::Dropped(bytes) => {
                self.core.host.count_received(bytes);
                self.core.host.on_dropped(&self.core.spec, bytes);
                None
            }
            ReadOutcome::End => {
                self.stdout_closed = true;
                self.mark_broken("the server closed its stdout".to_owned());
                None
            }
            ReadOutcome::TooLong => {
                let limit = self.core.spec.policy.session.line_max;
                Some(StdioSessionEnd::Failed(ExitCause::Wire(format!(
                    "a line from the server is longer than {limit} bytes"
                ))))
            }
            ReadOutcome::Failed(error) => {
                self.stdout_closed = true;
                self.mark_broken(format!("cannot read the server's stdout: {error}"));
                None
            }
        }
    }

    fn on_line(&mut self, line: &Bytes) -> MessageOutcome {
        // The newline was read, too.
        self.core.host.count_received(line.len() + 1);
        self.core.on_message(line, None, now())
    }

    /// Describes the session for a later satellite, which may adopt the process.
    fn describe_session(&mut self) {
        let core = &self.core;
        let (Some(server), Some(initialized_at)) = (&core.server, core.initialized_at) else { return };
        let (age, wall) = (now().saturating_duration_since(initialized_at), (core.host.wall)());
        // If the subtraction fails, the wall clock is wrong anyway.
        let initialized_at = wall.checked_sub(age).unwrap_or(wall);
        let session = SessionDescription::new(&core.spec.id, server, initialized_at);
        catch_panic("ServerProcess::describe_session", || self.process.describe_session(session));
    }

    fn mark_broken(&mut self, why: String) {
        self.broken.get_or_insert((why, now() + BROKEN_PATIENCE));
    }

    fn on_written(&mut self, written: std::io::Result<usize>) {
        match written {
            Ok(count) => {
                self.core.host.count_sent(count);
                self.core.outlet.out.advance(count);
                self.core.calls.written += count as u64;
                self.core.send_queued();
                if self.core.outlet.out.is_empty() {
                    // An idle instance must not keep the memory of its largest request.
                    self.core.outlet.out = BytesMut::new();
                }
            }
            Err(error) => {
                self.core.outlet.out = BytesMut::new();
                self.writer = None;
                self.mark_broken(format!("cannot write to the server's stdin: {error}"));
            }
        }
    }

    fn on_time(&mut self) -> Option<StdioSessionEnd> {
        let now = now();
        if let Some((why, at)) = &self.broken
            && now >= *at
        {
            return Some(StdioSessionEnd::Failed(ExitCause::Wire(why.clone())));
        }
        while let Some(late) = self.core.expire_next(now) {
            match late {
                PassedDeadline::Call | PassedDeadline::List => self.watchdog.record_call_timeout(),
                PassedDeadline::Handshake => {
                    let limit = self.core.spec.policy.session.handshake_timeout;
                    let why =
                        format!("no answer to {} within {} s", self.core.era.opening_method(), limit.as_secs_f64());
                    return Some(StdioSessionEnd::Failed(ExitCause::Handshake(why)));
                }
                PassedDeadline::HandshakeRefused(how) => {
                    return Some(StdioSessionEnd::Failed(handshake_exit_cause(how)));
                }
                PassedDeadline::Resume => {
                    let (check, limit) = (self.core.era.check_method(), RESUME_TIMEOUT.as_secs());
                    let why = format!("no answer to {check} within {limit} s");
                    return Some(StdioSessionEnd::Failed(ExitCause::NotAdopted(why)));
                }
                // The watchdog has its own deadlines.
                PassedDeadline::Check => {}
            }
        }
        self.core.on_due(now);
        // Unread output proves that the server is alive, so it is read before the verdict.
        if !matches!(self.watchdog_verdict(), WatchdogVerdict::Wait(_))
            && !self.stdout_closed
            && let Some(received) = tokio::task::unconstrained(self.lines.next()).now_or_never()
        {
            return self.on_received(received);
        }
        self.watchdog.record_activity(self.lines.last_read.into_std());
        match Self::decide(&mut self.watchdog, &self.core, now) {
            WatchdogVerdict::Wait(_) => None,
            WatchdogVerdict::Ping => {
                let deadline = now + self.core.spec.policy.watchdog.ping_timeout;
                self.core.send_own_request(self.core.era.check_method(), None, PendingPurpose::Check, deadline);
                None
            }
            WatchdogVerdict::Unresponsive => Some(StdioSessionEnd::Failed(ExitCause::Unresponsive)),
        }
    }

    // ---- the end ----

    async fn finish(&mut self, end: StdioSessionEnd) -> WorkerExit {
        // On return the whole process group is gone, or the error log says that it could not be killed.
        let ran = self.core.initialized_at.map(|at| now().saturating_duration_since(at));
        let mut exit = match end {
            StdioSessionEnd::Process(end) => {
                self.drain().await;
                WorkerExit { code: end.code, signal: end.signal, ..WorkerExit::from_cause(ExitCause::Exited) }
            }
            StdioSessionEnd::Requested => WorkerExit::from_cause(ExitCause::Requested),
            StdioSessionEnd::Failed(cause) => WorkerExit::from_cause(cause),
        };
        exit.uptime = ran;
        let reason = exit.reason();
        self.ports.close(&mut self.core, &reason);
        if exit.cause == ExitCause::Requested {
            self.writer = None;
            self.process.terminate();
            exit.forced = !self.wait_until_gone(self.core.spec.policy.session.terminate_grace, HURRY_GRACE).await;
        }
        // Killed before it can see the end of its stdin, so that the exit status shows the real cause.
        self.process.kill();
        self.writer = None;
        if !self.wait_until_gone(KILL_PATIENCE, KILL_PATIENCE).await {
            tracing::error!(
                instance = %self.core.spec.name, pid = self.process.pid(),
                "the process did not end after SIGKILL; the satellite no longer waits for it"
            );
            return exit;
        }
        let end = self.process.wait().await;
        WorkerExit { code: end.code, signal: end.signal, ..exit }
    }

    async fn drain(&mut self) {
        // Reads what the process wrote before it ended. A grandchild may keep the pipe open, so the time is limited.
        let until = now() + self.core.spec.policy.session.exit_drain;
        // A grandchild may also write forever: the clock is checked before each read.
        while !self.stdout_closed && now() < until {
            let Ok(received) = tokio::time::timeout_at(until.into(), self.lines.next()).await else { return };
            if self.on_received(received).is_some() {
                return;
            }
        }
    }

    async fn wait_until_gone(&mut self, grace: Duration, shortened_grace: Duration) -> bool {
        // Discards the output, so that the process does not block. `shortened_grace` limits the remaining time as soon
        // as a caller waits for the end.
        let mut until = now() + grace;
        let (mut reading, mut listening) = (!self.stdout_closed, true);
        loop {
            tokio::select! {
                biased;
                () = self.process.wait_all() => return true,
                () = tokio::time::sleep_until(until.into()) => return false,
                control = self.ports.control.recv(), if listening => match control {
                    Some(SessionControl::ShortenGrace) => until = until.min(now() + shortened_grace),
                    Some(
                        SessionControl::Stop
                        | SessionControl::Drain
                        | SessionControl::Discover
                        | SessionControl::ApplySpec(_)
                        | SessionControl::Check,
                    ) => {}
                    None => listening = false,
                },
                received = self.lines.next(), if reading => {
                    reading = matches!(received, ReadOutcome::Line(_) | ReadOutcome::FirstByte | ReadOutcome::Dropped(_));
                }
            }
        }
    }
}

async fn next_line(lines: &mut LineReader<Box<dyn AsyncRead + Send + Unpin>>, reading: bool) -> ReadOutcome {
    if reading { lines.next().await } else { std::future::pending().await }
}

fn handshake_exit_cause(refused: HandshakeRefusal) -> ExitCause {
    ExitCause::Handshake(match refused {
        HandshakeRefusal::Rejected(why) => why,
        HandshakeRefusal::Failed(failure) => failure.to_string(),
    })
}

async fn write(writer: &mut Option<Box<dyn AsyncWrite + Send + Unpin>>, out: &[u8]) -> std::io::Result<usize> {
    match writer {
        Some(writer) => match writer.write(out).await {
            Ok(0) => Err(std::io::ErrorKind::WriteZero.into()),
            written => written,
        },
        // Nothing is written to a closed stdin; the pipe already counts as broken.
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures::future::BoxFuture;
    use mcp_satellite_session::FIRST_REQUEST_ID;
    use tokio::sync::{mpsc, watch};

    use super::*;
    use crate::audience::{AudienceHandle, NoAudience, SessionSource};
    use crate::calls::{CallPort, InstanceCounters};
    use crate::model::ids::RunNumber;
    use crate::rules::jitter::JitterRng;
    use crate::seam::NoObserver;
    use crate::session::remote::tests::spec;

    struct ObedientProcess(watch::Sender<bool>);

    impl ServerProcess for ObedientProcess {
        fn pid(&self) -> Option<u32> {
            None
        }

        fn wait(&mut self) -> BoxFuture<'_, ProcessEnd> {
            let mut is_ended = self.0.subscribe();
            async move { is_ended.wait_for(|is_ended| *is_ended).await.map(|_| ProcessEnd::default()).unwrap_or_default() }.boxed()
        }

        fn wait_all(&mut self) -> BoxFuture<'_, ()> {
            self.wait().map(|_| ()).boxed()
        }

        fn terminate(&mut self) {
            self.0.send_replace(true);
        }

        fn kill(&mut self) {
            self.0.send_replace(true);
        }
    }

    #[test]
    fn a_session_that_drains_ends_when_a_caller_leaves_without_a_request() {
        // A caller that leaves between admission and its request sends no message to the session.
        let counters = Arc::new(InstanceCounters::default());
        let (port, end) = CallPort::new(RunNumber(1), FIRST_REQUEST_ID, spec(), counters.clone(), Arc::new(NoObserver));
        let (control, controlled) = mpsc::unbounded_channel();
        let permit = port.try_acquire().ok().unwrap();
        let session = async {
            let common = SessionArgs {
                spec: spec(),
                port: end,
                control: controlled,
                counters,
                wall: Arc::new(|| jiff::Timestamp::UNIX_EPOCH),
                since: tokio::time::Instant::now(),
                discover: false,
                era: None,
                resumed: None,
                rng: JitterRng::new(1, "a"),
                report_event: Box::new(|_| {}),
                stdout_lines: None,
                observer: Arc::new(NoObserver),
                memory: crate::byte_budget::ServerMemory::default(),
                audience: AudienceHandle::new(
                    Arc::new(NoAudience),
                    SessionSource { id: spec().id.clone(), run: RunNumber(1) },
                ),
            };
            let (client, _theirs) = tokio::io::duplex(4096);
            let (reader, writer) = tokio::io::split(client);
            let process = Box::new(ObedientProcess(watch::Sender::new(false)));
            let running = run(Args { common, reader: Box::new(reader), writer: Box::new(writer), process });
            tokio::time::timeout(Duration::from_secs(20), running).await
        };
        let leave = async {
            port.close();
            control.send(SessionControl::Drain).unwrap();
            // By then the session drains and waits.
            for _ in 0..3 {
                tokio::task::yield_now().await;
            }
            drop(permit);
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let (ended, ()) = runtime.block_on(async { futures::join!(session, leave) });
        assert_eq!(ended.unwrap().cause, ExitCause::Requested);
    }
}
