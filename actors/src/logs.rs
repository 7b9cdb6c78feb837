//! Output of a server: stderr, which is always drained so that a server cannot block on it, and lines of stdout that
//! are not JSON-RPC. Lines are limited, masked, and sent as events in batches. The last line is published to explain
//! the end of the server.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures::FutureExt;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::{mpsc, watch};
use tokio::time::{Duration, Instant};

use crate::batcher::EventSender;
use crate::model::event::{Event, EventSubject, LogLevel, LogLine};
use crate::model::policy::LogPolicy;
use crate::model::secret::SecretMask;
use crate::model::spec::InstanceSpec;
use crate::rules::output::excerpt;
use crate::tasks::{catch_panic, panic_text};

// Small, because the stderr of an idle server holds the buffer; it grows while reads fill it.
const READ_SIZE: usize = 1024;
const READ_SIZE_MAX: usize = 64 * 1024;
const LIMIT_WINDOW: Duration = Duration::from_secs(1);
const SUMMARY_EVERY: Duration = Duration::from_secs(60);

/// Maximum number of stdout lines waiting to be logged; more are dropped.
pub(crate) const PRINTED_MAX: usize = 16;

/// Output streams of a run, and the channel for its last line; its sender is dropped at the end of the output.
pub(crate) struct ServerOutput<R> {
    pub(crate) stderr: Option<R>,
    pub(crate) stdout_lines: mpsc::Receiver<String>,
    pub(crate) last_line: watch::Sender<Option<String>>,
}

/// Reads the output until stderr is closed and the session has dropped its sender of stdout lines. The last
/// specification in `spec` determines the policy and the mask. After a panic the rest of stderr is read and discarded:
/// the server must not block because of our fault.
pub(crate) async fn drain(
    output: ServerOutput<impl AsyncRead + Unpin>,
    mut spec: watch::Receiver<Arc<InstanceSpec>>,
    of: Arc<EventSubject>,
    events: EventSender,
) {
    let ServerOutput { mut stderr, stdout_lines: mut printed, last_line } = output;
    let (policy, mask) = log_settings(&mut spec);
    let name = of.process_id.clone();
    let logger = OutputLogger::new(policy, mask, of, events, last_line);
    let keeping = log_output(&mut stderr, &mut printed, &mut spec, logger);
    let Err(panic) = AssertUnwindSafe(keeping).catch_unwind().await else { return };
    let panic = panic_text(panic.as_ref());
    tracing::error!(instance = %name, panic, "reading stderr panicked; the rest of stderr is dropped");
    let Some(stderr) = &mut stderr else { return };
    let mut nowhere = tokio::io::sink();
    let dropping = AssertUnwindSafe(tokio::io::copy(stderr, &mut nowhere)).catch_unwind();
    if dropping.await.is_err() {
        tracing::error!(instance = %name, "cannot read stderr; the server may block while it writes there");
    }
}

async fn log_output(
    stderr: &mut Option<impl AsyncRead + Unpin>,
    printed: &mut mpsc::Receiver<String>,
    spec: &mut watch::Receiver<Arc<InstanceSpec>>,
    mut logger: OutputLogger,
) {
    let mut chunk = Vec::with_capacity(READ_SIZE);
    let mut printing = true;
    while stderr.is_some() || printing {
        let flush_at = logger.flush_at;
        tokio::select! {
            // In this order, so that a server that floods its stdout does not block on a full stderr.
            biased;
            () = tokio::time::sleep_until(flush_at.unwrap_or_else(Instant::now)), if flush_at.is_some() => {
                logger.tick();
                continue;
            }
            read = read_chunk(stderr, &mut chunk), if stderr.is_some() => match read {
                Ok(0) | Err(_) => {
                    *stderr = None;
                    logger.finish_stderr();
                    continue;
                }
                Ok(_) => {
                    // The check fails if the worker has ended; the rest is then logged with the old policy and mask.
                    if let Ok(true) = spec.has_changed() {
                        (logger.policy, logger.mask) = log_settings(spec);
                    }
                    logger.push_chunk(&chunk);
                }
            },
            line = printed.recv(), if printing => {
                match line {
                    Some(line) => logger.log_stdout_line(line),
                    None => printing = false,
                }
                continue;
            }
        }
        let filled = chunk.len() == chunk.capacity();
        match chunk.capacity() {
            size if filled && size < READ_SIZE_MAX => chunk = Vec::with_capacity(size * 2),
            size if !filled && size > READ_SIZE => chunk = Vec::with_capacity(READ_SIZE),
            _ => chunk.clear(),
        }
    }
}

fn log_settings(spec: &mut watch::Receiver<Arc<InstanceSpec>>) -> (LogPolicy, SecretMask) {
    let spec = spec.borrow_and_update();
    (spec.policy.logs.clone(), spec.mask.clone())
}

async fn read_chunk(stderr: &mut Option<impl AsyncRead + Unpin>, chunk: &mut Vec<u8>) -> std::io::Result<usize> {
    match stderr {
        Some(stderr) => stderr.read_buf(chunk).await,
        None => Ok(0),
    }
}

/// Unsent lines and their limits. Dropping it sends the rest, even if its task is aborted.
struct OutputLogger {
    policy: LogPolicy,
    mask: SecretMask,
    subject: Arc<EventSubject>,
    events: EventSender,
    line: Vec<u8>,
    batch: Vec<LogLine>,
    flush_at: Option<Instant>,
    window_start: Instant,
    in_window: u32,
    dropped: u64,
    // Last line over the limit: it may explain the end of the server.
    last_dropped: Vec<u8>,
    summary_at: Option<Instant>,
    last_line: watch::Sender<Option<String>>,
    // True if stderr had a line; lines of stdout then no longer replace the last one.
    has_stderr_line: bool,
}

impl OutputLogger {
    fn new(
        policy: LogPolicy,
        mask: SecretMask,
        subject: Arc<EventSubject>,
        events: EventSender,
        last_line: watch::Sender<Option<String>>,
    ) -> Self {
        Self {
            policy,
            mask,
            subject,
            events,
            line: Vec::new(),
            batch: Vec::new(),
            flush_at: None,
            window_start: Instant::now(),
            in_window: 0,
            dropped: 0,
            last_dropped: Vec::new(),
            summary_at: None,
            last_line,
            has_stderr_line: false,
        }
    }

    fn push_chunk(&mut self, chunk: &[u8]) {
        let now = Instant::now();
        let mut rest = chunk;
        while let Some(end) = memchr::memchr(b'\n', rest) {
            self.append(&rest[..end]);
            self.finish_line(now);
            rest = &rest[end + 1..];
        }
        self.append(rest);
        self.tick();
    }

    fn append(&mut self, part: &[u8]) {
        let room = self.line_capacity().saturating_sub(self.line.len());
        self.line.extend_from_slice(&part[..part.len().min(room)]);
    }

    fn line_capacity(&self) -> usize {
        // One byte above the limit, to detect a cut, plus the longest secret, so that the cut does not split one.
        self.policy.line_max + 1 + self.mask.max_len()
    }

    fn admit_line(&mut self, now: Instant) -> bool {
        if now.duration_since(self.window_start) >= LIMIT_WINDOW {
            self.window_start = now;
            self.in_window = 0;
        }
        if self.in_window >= self.policy.lines_per_second_max {
            self.dropped += 1;
            self.summary_at.get_or_insert(now + SUMMARY_EVERY);
            self.flush_at = self.flush_at.or(self.summary_at);
            return false;
        }
        self.in_window += 1;
        true
    }

    fn finish_line(&mut self, now: Instant) {
        if !self.admit_line(now) {
            std::mem::swap(&mut self.line, &mut self.last_dropped);
            self.line.clear();
            return;
        }
        self.last_dropped.clear();
        if let Some((text, cut)) = self.take_line() {
            self.publish_last_line(&text);
            self.has_stderr_line = true;
            self.push_truncated(LogLevel::infer(&text), text, cut, "stderr");
        }
    }

    fn take_line(&mut self) -> Option<(String, bool)> {
        let cut = self.line.len() > self.policy.line_max;
        // Masked before the cut: a secret across the cut must not leave its beginning, neither there nor at the last
        // buffered byte.
        let mut text = self.mask.apply(String::from_utf8_lossy(&self.line).trim_end());
        if self.line.len() == self.line_capacity() {
            let end = text.floor_char_boundary(text.len().saturating_sub(self.mask.max_len()));
            text.truncate(end);
        }
        self.line.clear();
        (!text.is_empty()).then_some((text, cut))
    }

    /// Logs a line of stdout that is not JSON-RPC.
    fn log_stdout_line(&mut self, line: String) {
        let now = Instant::now();
        let is_new_window = now.duration_since(self.window_start) >= LIMIT_WINDOW;
        // Half of the limit is reserved for stderr, which explains the end of a server.
        if !is_new_window && self.in_window >= (self.policy.lines_per_second_max / 2).max(1) {
            self.dropped += 1;
            self.summary_at.get_or_insert(now + SUMMARY_EVERY);
            self.flush_at = self.flush_at.or(self.summary_at);
            return;
        }
        if self.admit_line(now) {
            if !self.has_stderr_line {
                self.publish_last_line(&line);
            }
            self.push_line(LogLevel::Warn, line, "stdout");
        }
    }

    fn publish_last_line(&self, line: &str) {
        if let Some(line) = excerpt(line, &self.mask) {
            self.last_line.send_replace(Some(line));
        }
    }

    fn finish_stderr(&mut self) {
        // The last line is published even if it exceeded the limit.
        if !self.line.is_empty() {
            self.finish_line(Instant::now());
        }
        if !self.last_dropped.is_empty() {
            self.line = std::mem::take(&mut self.last_dropped);
            if let Some((text, _)) = self.take_line() {
                self.publish_last_line(&text);
            }
        }
    }

    fn push_truncated(&mut self, level: LogLevel, mut text: String, cut: bool, source: &str) {
        if cut {
            let end = text.floor_char_boundary(self.policy.line_max);
            text.truncate(end);
            text.push('…');
        }
        self.push_line(level, text, source);
    }

    fn push_line(&mut self, level: LogLevel, message: String, source: &str) {
        tracing::debug!(target: "mcp_satellite::server", instance = %self.subject.process_id, "{message}");
        let timestamp = self.events.wall();
        self.batch.push(LogLine { level, message, metadata: json!({ "source": source }), timestamp });
        if self.batch.len() >= self.policy.batch_lines_max {
            self.flush();
        } else {
            let at = Instant::now() + self.policy.batch_delay;
            self.flush_at = Some(self.flush_at.map_or(at, |known| known.min(at)));
        }
    }

    fn tick(&mut self) {
        let now = Instant::now();
        if self.summary_at.is_some_and(|at| now >= at) {
            self.summarize();
        }
        if self.flush_at.is_some_and(|at| now >= at) {
            self.flush();
        }
    }

    fn summarize(&mut self) {
        self.summary_at = None;
        let count = std::mem::take(&mut self.dropped);
        if count > 0 {
            let limit = self.policy.lines_per_second_max;
            let message = format!("{count} lines of output dropped: more than {limit} per second");
            self.push_line(LogLevel::Warn, message, "satellite");
        }
    }

    fn flush(&mut self) {
        self.flush_at = self.summary_at;
        if !self.batch.is_empty() {
            let logs = std::mem::take(&mut self.batch);
            self.events.emit(Event::ServerLogs { of: self.subject.clone(), logs });
        }
    }
}

impl Drop for OutputLogger {
    fn drop(&mut self) {
        // The code may panic again, and a second panic during unwinding would abort the process.
        catch_panic("the end of stderr", || {
            self.finish_stderr();
            self.summarize();
            self.flush();
        });
    }
}

pub(crate) fn emit_error_line(why: String, of: &Arc<EventSubject>, events: &EventSender) {
    let metadata = json!({"source": "satellite"});
    let line = LogLine { level: LogLevel::Error, message: why, metadata, timestamp: events.wall() };
    events.emit(Event::ServerLogs { of: of.clone(), logs: vec![line] });
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use tokio::io::ReadBuf;

    use super::*;
    use crate::model::policy::BatchPolicy;
    use crate::session::remote::tests::spec;

    // Panics at the first read and then returns `left` bytes.
    struct PanickingReader {
        panics: bool,
        left: usize,
    }

    impl AsyncRead for PanickingReader {
        fn poll_read(
            mut self: Pin<&mut Self>,
            _cx: &mut Context<'_>,
            buffer: &mut ReadBuf<'_>,
        ) -> Poll<std::io::Result<()>> {
            assert!(!std::mem::take(&mut self.panics), "asked to panic");
            let count = self.left.min(buffer.remaining());
            buffer.put_slice(&vec![b'x'; count]);
            self.left -= count;
            Poll::Ready(Ok(()))
        }
    }

    #[test]
    fn stderr_is_read_to_its_end_after_a_panic() {
        let mut stderr = PanickingReader { panics: true, left: 1_000_000 };
        let events = EventSender::new(&BatchPolicy::default(), Arc::new(|| jiff::Timestamp::UNIX_EPOCH));
        let of = Arc::new(EventSubject::from(&*spec()));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        let Ok(runtime) = runtime else { panic!("cannot build the runtime") };
        let output = ServerOutput {
            stderr: Some(&mut stderr),
            stdout_lines: mpsc::channel(PRINTED_MAX).1,
            last_line: watch::Sender::new(None),
        };
        runtime.block_on(drain(output, watch::Sender::new(spec()).subscribe(), of, events));
        assert_eq!((stderr.panics, stderr.left), (false, 0));
    }
}
