//! Runs a simulated server on its pipes: one task, one timer, and no buffer while there is no data.

use std::mem::MaybeUninit;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use mcp_satellite_actors::seam::ProcessEnd;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

use super::control::SimProcessState;
use super::server::{SimPhase, SimResponder};

// Size of queued answers in bytes above which nothing more is read.
const QUEUE_MAX: usize = 1024 * 1024;

// Maximum length of a line on stdin in bytes; a longer one ends the server.
const LINE_MAX: usize = 64 * 1024 * 1024;

// Size of one read in bytes. The buffer is on the stack, and only while bytes are there.
const CHUNK: usize = 4096;

pub(super) struct SimPipes<R, W, E> {
    /// Absent once it has ended or broken.
    pub(super) stdin: Option<R>,
    pub(super) stdout: W,
    pub(super) stderr: Option<E>,
}

pub(super) async fn run<R, W, E>(
    pipes: &mut SimPipes<R, W, E>,
    server: SimResponder,
    control: &SimProcessState,
) -> ProcessEnd
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
    E: AsyncWrite + Unpin,
{
    let mut engine = SimEngine { pipes, server, control, partial: Vec::new() };
    let mut timer = pin!(sleep_until(Instant::now()));
    std::future::poll_fn(|cx| engine.poll(cx, timer.as_mut())).await
}

struct SimEngine<'a, R, W, E> {
    pipes: &'a mut SimPipes<R, W, E>,
    server: SimResponder,
    control: &'a SimProcessState,
    partial: Vec<u8>,
}

impl<R, W, E> SimEngine<'_, R, W, E>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
    E: AsyncWrite + Unpin,
{
    fn poll(&mut self, cx: &mut Context<'_>, mut timer: Pin<&mut Sleep>) -> Poll<ProcessEnd> {
        self.control.register(cx.waker());
        loop {
            if let Some(end) = self.control.end() {
                return Poll::Ready(end);
            }
            if self.control.is_frozen() {
                return Poll::Pending;
            }
            // Like a program that blocks in a write to stderr: it does nothing else until the output is read.
            if let Some(stderr) = &mut self.pipes.stderr {
                ready!(write(stderr, &mut self.server.err, cx));
            }
            let now = Instant::now();
            if self.control.take_sigterm() {
                self.server.terminate(now);
            }
            self.server.run_due_timers(now);
            if !self.server.err.is_empty() && self.pipes.stderr.is_some() {
                continue;
            }
            let written = write(&mut self.pipes.stdout, &mut self.server.out, cx);
            match self.server.phase {
                // Output from before the end is still delivered.
                SimPhase::Ended(end) => return written.map(|()| end),
                SimPhase::Hung => return Poll::Pending,
                SimPhase::Starting => {}
                SimPhase::Serving => {
                    if self.server.out.len() < QUEUE_MAX && self.read(cx, now).is_ready() {
                        continue;
                    }
                }
            }
            let Some(next) = self.server.next_timer() else { return Poll::Pending };
            if timer.deadline() != next {
                timer.as_mut().reset(next);
            }
            ready!(timer.as_mut().poll(cx));
        }
    }

    fn read(&mut self, cx: &mut Context<'_>, now: Instant) -> Poll<()> {
        let Some(stdin) = &mut self.pipes.stdin else { return Poll::Pending };
        let mut chunk = [MaybeUninit::uninit(); CHUNK];
        let mut chunk = ReadBuf::uninit(&mut chunk);
        let read = ready!(Pin::new(stdin).poll_read(cx, &mut chunk));
        let mut rest = chunk.filled();
        if read.is_err() || rest.is_empty() {
            self.pipes.stdin = None;
            self.server.handle_eof(now);
            return Poll::Ready(());
        }
        while let Some(newline) = memchr::memchr(b'\n', rest) {
            let line = &rest[..newline];
            rest = &rest[newline + 1..];
            if self.partial.is_empty() {
                self.server.handle_line(now, line);
            } else {
                let mut whole = std::mem::take(&mut self.partial);
                whole.extend_from_slice(line);
                self.server.handle_line(now, &whole);
            }
            if self.server.phase != SimPhase::Serving {
                return Poll::Ready(());
            }
        }
        self.partial.extend_from_slice(rest);
        if self.partial.len() > LINE_MAX {
            self.server.phase = SimPhase::Ended(ProcessEnd { code: Some(1), signal: None });
        }
        Poll::Ready(())
    }
}

/// Writes the queue. Ready once all of it is written, or the reader is gone.
fn write(pipe: &mut (impl AsyncWrite + Unpin), queue: &mut BytesMut, cx: &mut Context<'_>) -> Poll<()> {
    let mut pipe = Pin::new(pipe);
    while !queue.is_empty() {
        match ready!(pipe.as_mut().poll_write(cx, queue)) {
            Ok(written) if written > 0 => queue.advance(written),
            // The reader is gone.
            _ => queue.clear(),
        }
    }
    if queue.capacity() > 0 {
        *queue = BytesMut::new();
    }
    pipe.poll_flush(cx).map(|_| ())
}
