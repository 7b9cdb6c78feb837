//! Runs a simulated server on its pipes: one task, one timer, no buffer while there is nothing to keep in it.

use std::mem::MaybeUninit;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use mcp_satellite_actors::seam::ProcessEnd;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

use super::control::Control;
use super::server::{Phase, Server};

/// Answers queued for a slow reader; over it nothing more is read, in bytes.
const QUEUE_MAX: usize = 1024 * 1024;

/// A longer line on stdin ends the server, in bytes.
const LINE_MAX: usize = 64 * 1024 * 1024;

/// What is read at once. It lives on the stack, and only while bytes are there.
const CHUNK: usize = 4096;

/// The three pipes of a process, from the inside.
pub(super) struct Pipes<R, W, E> {
    /// Closed once it has ended or broken.
    pub(super) stdin: Option<R>,
    pub(super) stdout: W,
    pub(super) stderr: Option<E>,
}

/// Serves until the server ends, or is ended from outside.
pub(super) async fn run<R, W, E>(pipes: &mut Pipes<R, W, E>, server: Server, control: &Control) -> ProcessEnd
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
    E: AsyncWrite + Unpin,
{
    let mut engine = Engine { pipes, server, control, partial: Vec::new() };
    let mut timer = pin!(sleep_until(Instant::now()));
    std::future::poll_fn(|cx| engine.poll(cx, timer.as_mut())).await
}

struct Engine<'a, R, W, E> {
    pipes: &'a mut Pipes<R, W, E>,
    server: Server,
    control: &'a Control,
    /// The beginning of a line whose end has not come.
    partial: Vec<u8>,
}

impl<R, W, E> Engine<'_, R, W, E>
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
            if self.control.frozen() {
                return Poll::Pending;
            }
            // Like a program that blocks in a write to stderr: it does nothing else until somebody has read it.
            if let Some(stderr) = &mut self.pipes.stderr {
                ready!(write(stderr, &mut self.server.err, cx));
            }
            let now = Instant::now();
            if self.control.take_sigterm() {
                self.server.terminate(now);
            }
            self.server.due(now);
            if !self.server.err.is_empty() && self.pipes.stderr.is_some() {
                continue;
            }
            let written = write(&mut self.pipes.stdout, &mut self.server.out, cx);
            match self.server.phase {
                // What it had written before it ended is still read.
                Phase::Ended(end) => return written.map(|()| end),
                Phase::Hung => return Poll::Pending,
                Phase::Starting => {}
                Phase::Serving => {
                    if self.server.out.len() < QUEUE_MAX && self.read(cx, now).is_ready() {
                        continue;
                    }
                }
            }
            let Some(next) = self.server.next() else { return Poll::Pending };
            if timer.deadline() != next {
                timer.as_mut().reset(next);
            }
            ready!(timer.as_mut().poll(cx));
        }
    }

    /// Ready if something was read: a line, a part of one, or the end.
    fn read(&mut self, cx: &mut Context<'_>, now: Instant) -> Poll<()> {
        let Some(stdin) = &mut self.pipes.stdin else { return Poll::Pending };
        let mut chunk = [MaybeUninit::uninit(); CHUNK];
        let mut chunk = ReadBuf::uninit(&mut chunk);
        let read = ready!(Pin::new(stdin).poll_read(cx, &mut chunk));
        let mut rest = chunk.filled();
        if read.is_err() || rest.is_empty() {
            self.pipes.stdin = None;
            self.server.eof(now);
            return Poll::Ready(());
        }
        while let Some(newline) = memchr::memchr(b'\n', rest) {
            let line = &rest[..newline];
            rest = &rest[newline + 1..];
            if self.partial.is_empty() {
                self.server.line(now, line);
            } else {
                let mut whole = std::mem::take(&mut self.partial);
                whole.extend_from_slice(line);
                self.server.line(now, &whole);
            }
            if self.server.phase != Phase::Serving {
                return Poll::Ready(());
            }
        }
        self.partial.extend_from_slice(rest);
        if self.partial.len() > LINE_MAX {
            self.server.phase = Phase::Ended(ProcessEnd { code: Some(1), signal: None });
        }
        Poll::Ready(())
    }
}

/// Writes what is queued. Ready once the other side has all of it, or has gone away.
fn write(pipe: &mut (impl AsyncWrite + Unpin), queue: &mut BytesMut, cx: &mut Context<'_>) -> Poll<()> {
    let mut pipe = Pin::new(pipe);
    while !queue.is_empty() {
        match ready!(pipe.as_mut().poll_write(cx, queue)) {
            Ok(written) if written > 0 => queue.advance(written),
            // Nobody will ever read it.
            _ => queue.clear(),
        }
    }
    if queue.capacity() > 0 {
        *queue = BytesMut::new();
    }
    pipe.poll_flush(cx).map(|_| ())
}
