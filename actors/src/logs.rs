//! A server's stderr: always drained, so that a chatty server cannot block itself; kept within limits, masked, and
//! told in batches.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures::FutureExt;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::time::{Duration, Instant};

use crate::batcher::Emitter;
use crate::model::event::{Event, LogLevel, LogLine, Subject};
use crate::model::policy::LogPolicy;
use crate::model::secret::Mask;
use crate::tasks::{guarded, panic_text};

/// Small, because an idle server's stderr holds it; grown while reads fill it.
const READ_SIZE: usize = 1024;
const READ_SIZE_MAX: usize = 64 * 1024;
const LIMIT_WINDOW: Duration = Duration::from_secs(1);
const SUMMARY_EVERY: Duration = Duration::from_secs(60);

/// Reads `stderr` to its end. After a panic the rest is read and dropped: a server must not block on its log because of a
/// fault of ours.
pub(crate) async fn drain(
    mut stderr: impl AsyncRead + Unpin,
    policy: LogPolicy,
    mask: Mask,
    of: Arc<Subject>,
    events: Emitter,
) {
    let name = of.process_id.clone();
    let keeper = Keeper::new(policy, mask, of, events);
    let Err(panic) = AssertUnwindSafe(keep(&mut stderr, keeper)).catch_unwind().await else { return };
    let panic = panic_text(panic.as_ref());
    tracing::error!(installation_name = %name, panic, "reading stderr panicked; the rest of it is dropped");
    let mut nowhere = tokio::io::sink();
    let dropping = AssertUnwindSafe(tokio::io::copy(&mut stderr, &mut nowhere)).catch_unwind();
    if dropping.await.is_err() {
        tracing::error!(installation_name = %name, "stderr cannot be read; the server may block on it");
    }
}

/// Reads `stderr` to its end into `keeper`.
async fn keep(stderr: &mut (impl AsyncRead + Unpin), mut keeper: Keeper) {
    let mut chunk = Vec::with_capacity(READ_SIZE);
    loop {
        let read = match keeper.flush_at {
            Some(at) => match tokio::time::timeout_at(at, stderr.read_buf(&mut chunk)).await {
                Ok(read) => read,
                Err(_elapsed) => {
                    keeper.tick();
                    continue;
                }
            },
            None => stderr.read_buf(&mut chunk).await,
        };
        match read {
            // The keeper tells what it still has when it is dropped, also if this task is cut short.
            Ok(0) | Err(_) => return,
            Ok(_) => keeper.take(&chunk),
        }
        let filled = chunk.len() == chunk.capacity();
        match chunk.capacity() {
            size if filled && size < READ_SIZE_MAX => chunk = Vec::with_capacity(size * 2),
            size if !filled && size > READ_SIZE => chunk = Vec::with_capacity(READ_SIZE),
            _ => chunk.clear(),
        }
    }
}

/// What is kept of the stream.
struct Keeper {
    policy: LogPolicy,
    mask: Mask,
    of: Arc<Subject>,
    events: Emitter,
    line: Vec<u8>,
    batch: Vec<LogLine>,
    flush_at: Option<Instant>,
    window: Instant,
    in_window: u32,
    dropped: u64,
    summary_at: Option<Instant>,
}

impl Keeper {
    fn new(policy: LogPolicy, mask: Mask, of: Arc<Subject>, events: Emitter) -> Self {
        Self {
            policy,
            mask,
            of,
            events,
            line: Vec::new(),
            batch: Vec::new(),
            flush_at: None,
            window: Instant::now(),
            in_window: 0,
            dropped: 0,
            summary_at: None,
        }
    }

    fn take(&mut self, chunk: &[u8]) {
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

    /// Beyond what is kept nothing is copied.
    fn append(&mut self, part: &[u8]) {
        let room = self.room().saturating_sub(self.line.len());
        self.line.extend_from_slice(&part[..part.len().min(room)]);
    }

    /// One byte more than is kept, so that a cut can be seen, and a secret more, so that none is cut in two there.
    fn room(&self) -> usize {
        self.policy.line_max + 1 + self.mask.longest()
    }

    fn finish_line(&mut self, now: Instant) {
        if now.duration_since(self.window) >= LIMIT_WINDOW {
            self.window = now;
            self.in_window = 0;
        }
        if self.in_window >= self.policy.lines_per_second_max {
            self.dropped += 1;
            self.summary_at.get_or_insert(now + SUMMARY_EVERY);
            self.flush_at = self.flush_at.or(self.summary_at);
            self.line.clear();
            return;
        }
        self.in_window += 1;
        let cut = self.line.len() > self.policy.line_max;
        // Masked before it is cut: a secret that straddles the cut must not leave its head, nor may the last bytes read.
        let mut text = self.mask.apply(String::from_utf8_lossy(&self.line).trim_end());
        if self.line.len() == self.room() {
            let end = text.floor_char_boundary(text.len().saturating_sub(self.mask.longest()));
            text.truncate(end);
        }
        self.line.clear();
        if text.is_empty() {
            return;
        }
        if cut {
            let end = text.floor_char_boundary(self.policy.line_max);
            text.truncate(end);
            text.push('…');
        }
        self.keep(LogLevel::infer(&text), text);
    }

    fn keep(&mut self, level: LogLevel, message: String) {
        tracing::debug!(target: "mcp_satellite::server", installation_name = %self.of.process_id, "{message}");
        let timestamp = self.events.wall();
        self.batch.push(LogLine { level, message, metadata: json!({"source": "stderr"}), timestamp });
        if self.batch.len() >= self.policy.batch_lines_max {
            self.flush();
        } else {
            let at = Instant::now() + self.policy.batch_delay;
            self.flush_at = Some(self.flush_at.map_or(at, |known| known.min(at)));
        }
    }

    /// What is due.
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
            self.keep(LogLevel::Warn, format!("{count} lines of stderr over {limit} a second were dropped"));
        }
    }

    fn flush(&mut self) {
        self.flush_at = self.summary_at;
        if !self.batch.is_empty() {
            let logs = std::mem::take(&mut self.batch);
            self.events.emit(Event::ServerLogs { of: self.of.clone(), logs });
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // What panicked before may panic again, and a second panic on the way out would end the process.
        guarded("the end of stderr", || {
            if !self.line.is_empty() {
                self.finish_line(Instant::now());
            }
            self.summarize();
            self.flush();
        });
    }
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use tokio::io::ReadBuf;

    use super::*;
    use crate::model::policy::BatchPolicy;
    use crate::session::remote::tests::spec;

    /// Panics at the first read, and has so many bytes after that.
    struct Panicking {
        panics: bool,
        left: usize,
    }

    impl AsyncRead for Panicking {
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
    fn stderr_is_read_to_its_end_also_after_a_panic() {
        let mut stderr = Panicking { panics: true, left: 1_000_000 };
        let events = Emitter::new(&BatchPolicy::default(), Arc::new(|| jiff::Timestamp::UNIX_EPOCH));
        let of = Arc::new(Subject::from(&*spec()));
        let clock = tokio::runtime::Builder::new_current_thread().enable_time().build();
        let Ok(clock) = clock else { panic!("there is no clock") };
        clock.block_on(drain(&mut stderr, LogPolicy::default(), Mask::default(), of, events));
        assert_eq!((stderr.panics, stderr.left), (false, 0));
    }
}
