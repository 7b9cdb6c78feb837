//! Stdin of a server. The keeper holds the pipe as well, so it must close it together with the satellite. A flag shows the
//! next satellite whether a line may be incomplete, which it then terminates.
//!
//! A write of at most [`PIPE_BUF`] bytes is atomic: a kill leaves all of it or nothing. The flag is set before any other
//! write and cleared once a line is complete. A kill between the two leaves the flag of a complete line; the server then
//! reads an empty line, which changes nothing.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use nix::libc::PIPE_BUF;
use tokio::io::AsyncWrite;
use tokio::net::unix::pipe;

use super::tree::ProcessTree;
use crate::keeper::run_client::HeldRun;

pub(super) struct StdinWriter {
    pipe: pipe::Sender,
    tree: Arc<ProcessTree>,
    is_line_open: bool,
    // True until the line of an earlier satellite is terminated.
    terminates_line: bool,
}

impl StdinWriter {
    pub(super) fn new(pipe: pipe::Sender, tree: Arc<ProcessTree>) -> Self {
        let is_line_open = tree.group.held_run().is_some_and(HeldRun::is_line_open);
        Self { pipe, tree, is_line_open, terminates_line: is_line_open }
    }

    fn set_line_open(&mut self, is_open: bool) {
        if self.is_line_open != is_open
            && let Some(held) = self.tree.group.held_run()
        {
            held.set_line_open(is_open);
            self.is_line_open = is_open;
        }
    }
}

impl AsyncWrite for StdinWriter {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        if this.terminates_line {
            ready!(Pin::new(&mut this.pipe).poll_write(cx, b"\n"))?;
            this.terminates_line = false;
            this.set_line_open(false);
        }
        let was_open = this.is_line_open;
        let is_atomic = bytes.len() <= PIPE_BUF && bytes.ends_with(b"\n");
        if !is_atomic {
            this.set_line_open(true);
        }
        let written = Pin::new(&mut this.pipe).poll_write(cx, bytes);
        match &written {
            Poll::Ready(Ok(count)) if *count > 0 => this.set_line_open(!bytes[..*count].ends_with(b"\n")),
            // Nothing was written.
            Poll::Ready(_) | Poll::Pending => this.set_line_open(was_open),
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.pipe).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.pipe).poll_shutdown(cx)
    }
}

impl Drop for StdinWriter {
    fn drop(&mut self) {
        if let Some(held) = self.tree.group.held_run() {
            held.close_stdin();
        }
    }
}
