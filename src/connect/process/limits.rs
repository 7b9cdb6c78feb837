//! Limits of a process that it takes from its parent and hands down to what it starts, and what its end says about them.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use mcp_satellite_actors::model::exit::{Limit, Resource as Limited};
use mcp_satellite_actors::seam::ProcessEnd;
use nix::libc;
use nix::sys::resource::{Resource, setrlimit};
use tokio::io::{AsyncRead, ReadBuf};

/// Per process, but for the number of processes, which is one of the user namespace.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::connect) struct Limits {
    /// Bytes.
    pub(in crate::connect) address_space: Option<u64>,
    /// Seconds of processor time, for the process's whole life.
    pub(in crate::connect) cpu_seconds: Option<u64>,
    /// Processes and threads.
    pub(in crate::connect) processes: Option<u64>,
    /// Descriptors.
    pub(in crate::connect) open_files: Option<u64>,
    /// Bytes.
    pub(in crate::connect) file_size: Option<u64>,
}

impl Limits {
    /// Of the calling process. Async-signal-safe.
    pub(super) fn set(self) -> io::Result<()> {
        let set = |what, limit: Option<u64>, more: u64| match limit {
            Some(limit) => setrlimit(what, limit, limit.saturating_add(more)),
            None => Ok(()),
        };
        set(Resource::RLIMIT_AS, self.address_space, 0)?;
        // SIGXCPU first, which says why; SIGKILL a second later for who does not listen.
        set(Resource::RLIMIT_CPU, self.cpu_seconds, 1)?;
        set(Resource::RLIMIT_NPROC, self.processes, 0)?;
        set(Resource::RLIMIT_NOFILE, self.open_files, 0)?;
        set(Resource::RLIMIT_FSIZE, self.file_size, 0)?;
        // What a server had in memory is not written to a disk.
        Ok(setrlimit(Resource::RLIMIT_CORE, 0, 0)?)
    }

    /// Which of them ended a process, if one did. `cpu_seconds` is what it and its children used; `complained` says that
    /// it spoke of a want of memory.
    pub(super) fn blamed(self, end: ProcessEnd, cpu_seconds: u64, complained: bool) -> Option<Limit> {
        let sure = |of| Some(Limit { of, suspected: false });
        let cpu = self.cpu_seconds.is_some_and(|limit| cpu_seconds >= limit);
        match end.signal {
            Some(libc::SIGXCPU) if self.cpu_seconds.is_some() => sure(Limited::Cpu),
            Some(libc::SIGXFSZ) if self.file_size.is_some() => sure(Limited::FileSize),
            Some(libc::SIGKILL) if cpu => sure(Limited::Cpu),
            // How a program ends that gets no memory is its own affair, and these are the ways in which they do.
            Some(libc::SIGABRT | libc::SIGSEGV | libc::SIGBUS | libc::SIGTRAP | libc::SIGILL)
                if self.address_space.is_some() =>
            {
                Some(Limit { of: Limited::Memory, suspected: true })
            }
            None | Some(_) if complained && self.address_space.is_some() && end.code != Some(0) => {
                Some(Limit { of: Limited::Memory, suspected: true })
            }
            None | Some(_) => None,
        }
    }
}

/// How runtimes say that they got no memory.
const COMPLAINTS: [&[u8]; 6] = [
    b"out of memory",
    b"Cannot allocate memory",
    b"MemoryError",
    b"bad_alloc",
    b"memory allocation of",
    b"Out of memory",
];

/// Listens to a server's stderr on its way, for a complaint about a want of memory.
pub(super) struct Overhearing<R> {
    reader: R,
    heard: Arc<AtomicBool>,
    /// The end of what came before: a complaint may be cut in two.
    tail: Vec<u8>,
}

impl<R> Overhearing<R> {
    pub(super) fn new(reader: R, heard: Arc<AtomicBool>) -> Self {
        Self { reader, heard, tail: Vec::new() }
    }

    fn listen(&mut self, bytes: &[u8]) {
        const LONGEST: usize = 32;
        self.tail.extend_from_slice(bytes);
        if COMPLAINTS.iter().any(|complaint| memchr::memmem::find(&self.tail, complaint).is_some()) {
            self.heard.store(true, Ordering::Relaxed);
        }
        let cut = self.tail.len().saturating_sub(LONGEST);
        self.tail.drain(..cut);
    }
}

impl<R: AsyncRead + Unpin> AsyncRead for Overhearing<R> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.reader).poll_read(cx, buf);
        if polled.is_ready() && !self.heard.load(Ordering::Relaxed) {
            self.listen(&buf.filled()[before..]);
        }
        polled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Limits = Limits {
        address_space: Some(1),
        cpu_seconds: Some(60),
        processes: Some(1),
        open_files: Some(1),
        file_size: Some(1),
    };

    fn blamed(limits: Limits, code: Option<i32>, signal: Option<i32>, cpu: u64, complained: bool) -> Option<String> {
        limits.blamed(ProcessEnd { code, signal }, cpu, complained).map(|limit| limit.to_string())
    }

    #[test]
    fn a_signal_of_a_limit_names_it() {
        assert_eq!(blamed(ALL, None, Some(libc::SIGXCPU), 60, false).as_deref(), Some("limit: cpu"));
        assert_eq!(blamed(ALL, None, Some(libc::SIGKILL), 61, false).as_deref(), Some("limit: cpu"));
        assert_eq!(blamed(ALL, None, Some(libc::SIGXFSZ), 0, false).as_deref(), Some("limit: file size"));
        assert_eq!(blamed(ALL, None, Some(libc::SIGABRT), 0, false).as_deref(), Some("limit: memory, suspected"));
        assert_eq!(blamed(ALL, Some(1), None, 0, true).as_deref(), Some("limit: memory, suspected"));
    }

    #[test]
    fn without_a_limit_or_a_sign_none_is_blamed() {
        for signal in [libc::SIGXCPU, libc::SIGKILL, libc::SIGXFSZ, libc::SIGABRT] {
            assert_eq!(blamed(Limits::default(), None, Some(signal), 99, true), None);
        }
        assert_eq!(blamed(ALL, None, Some(libc::SIGKILL), 1, false), None);
        assert_eq!(blamed(ALL, Some(1), None, 0, false), None);
        assert_eq!(blamed(ALL, Some(0), None, 0, true), None);
    }

    #[tokio::test]
    async fn a_complaint_is_heard_though_it_comes_in_pieces() {
        use tokio::io::AsyncReadExt;
        let heard = Arc::new(AtomicBool::new(false));
        let pieces = (&b"Traceback: Mem"[..]).chain(&b"oryError"[..]);
        let mut text = String::new();
        Overhearing::new(pieces, Arc::clone(&heard)).read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "Traceback: MemoryError");
        assert!(heard.load(Ordering::Relaxed));
    }
}
