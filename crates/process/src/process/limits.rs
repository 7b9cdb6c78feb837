//! Resource limits of a process, inherited by its descendants, and the diagnosis which limit ended it.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use mcp_satellite_actors::model::exit::{ExceededLimit, LimitedResource as Limited};
use mcp_satellite_actors::seam::ProcessEnd;
use nix::libc;
use nix::sys::resource::{Resource, setrlimit};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, ReadBuf};

/// Resource limits; sizes are in bytes. They apply per process, except `processes` (processes and threads), which the
/// kernel counts per user namespace.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ResourceLimits {
    pub address_space: Option<u64>,
    /// Seconds of processor time over the whole life of the process.
    pub cpu_seconds: Option<u64>,
    pub processes: Option<u64>,
    pub open_files: Option<u64>,
    pub file_size: Option<u64>,
}

impl ResourceLimits {
    /// Sets the limits of the calling process. Async-signal-safe.
    pub(super) fn set(self) -> io::Result<()> {
        let set = |what, limit: Option<u64>, more: u64| match limit {
            Some(limit) => setrlimit(what, limit, limit.saturating_add(more)),
            None => Ok(()),
        };
        set(Resource::RLIMIT_AS, self.address_space, 0)?;
        // SIGXCPU first, which names the cause; a second later SIGKILL for a process that handles SIGXCPU.
        set(Resource::RLIMIT_CPU, self.cpu_seconds, 1)?;
        set(Resource::RLIMIT_NPROC, self.processes, 0)?;
        set(Resource::RLIMIT_NOFILE, self.open_files, 0)?;
        set(Resource::RLIMIT_FSIZE, self.file_size, 0)?;
        // No core dump: the server's memory may contain secrets and is not written to a disk.
        Ok(setrlimit(Resource::RLIMIT_CORE, 0, 0)?)
    }

    /// Returns the limit that ended a process, if one did. `cpu_seconds` is the processor time of the process and its
    /// children; `complained` means that its stderr contained an out-of-memory message.
    pub(super) fn exceeded_limit(self, end: ProcessEnd, cpu_seconds: u64, complained: bool) -> Option<ExceededLimit> {
        let sure = |of| Some(ExceededLimit { resource: of, suspected: false });
        let cpu = self.cpu_seconds.is_some_and(|limit| cpu_seconds >= limit);
        match end.signal {
            Some(libc::SIGXCPU) if self.cpu_seconds.is_some() => sure(Limited::Cpu),
            Some(libc::SIGXFSZ) if self.file_size.is_some() => sure(Limited::FileSize),
            Some(libc::SIGKILL) if cpu => sure(Limited::Cpu),
            // Programs that cannot allocate memory end in different ways; these signals are the usual ones.
            Some(libc::SIGABRT | libc::SIGSEGV | libc::SIGBUS | libc::SIGTRAP | libc::SIGILL)
                if self.address_space.is_some() =>
            {
                Some(ExceededLimit { resource: Limited::Memory, suspected: true })
            }
            None | Some(_) if complained && self.address_space.is_some() && end.code != Some(0) => {
                Some(ExceededLimit { resource: Limited::Memory, suspected: true })
            }
            None | Some(_) => None,
        }
    }
}

// Out-of-memory messages of common runtimes.
const OUT_OF_MEMORY_MESSAGES: [&[u8]; 6] = [
    b"out of memory",
    b"Cannot allocate memory",
    b"MemoryError",
    b"bad_alloc",
    b"memory allocation of",
    b"Out of memory",
];

/// Reader of a server's stderr that searches the passing bytes for an out-of-memory message.
pub(super) struct StderrMonitor<R> {
    reader: R,
    oom_reported: Arc<AtomicBool>,
    // Last bytes of the previous read: a message may be split between two reads.
    tail: Vec<u8>,
}

impl<R> StderrMonitor<R> {
    pub(super) fn new(reader: R, oom_reported: Arc<AtomicBool>) -> Self {
        Self { reader, oom_reported, tail: Vec::new() }
    }

    fn scan(&mut self, bytes: &[u8]) {
        const LONGEST: usize = 32;
        self.tail.extend_from_slice(bytes);
        if OUT_OF_MEMORY_MESSAGES.iter().any(|complaint| memchr::memmem::find(&self.tail, complaint).is_some()) {
            self.oom_reported.store(true, Ordering::Relaxed);
        }
        let cut = self.tail.len().saturating_sub(LONGEST);
        self.tail.drain(..cut);
    }
}

impl<R: AsyncRead + Unpin> AsyncRead for StderrMonitor<R> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.reader).poll_read(cx, buf);
        if polled.is_ready() && !self.oom_reported.load(Ordering::Relaxed) {
            self.scan(&buf.filled()[before..]);
        }
        polled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: ResourceLimits = ResourceLimits {
        address_space: Some(1),
        cpu_seconds: Some(60),
        processes: Some(1),
        open_files: Some(1),
        file_size: Some(1),
    };

    fn exceeded_limit(
        limits: ResourceLimits,
        code: Option<i32>,
        signal: Option<i32>,
        cpu: u64,
        memory_error: bool,
    ) -> Option<String> {
        limits.exceeded_limit(ProcessEnd { code, signal }, cpu, memory_error).map(|limit| limit.to_string())
    }

    #[test]
    fn the_end_of_a_process_names_the_exceeded_limit() {
        assert_eq!(exceeded_limit(ALL, None, Some(libc::SIGXCPU), 60, false).as_deref(), Some("limit: cpu"));
        assert_eq!(exceeded_limit(ALL, None, Some(libc::SIGKILL), 61, false).as_deref(), Some("limit: cpu"));
        assert_eq!(exceeded_limit(ALL, None, Some(libc::SIGXFSZ), 0, false).as_deref(), Some("limit: file size"));
        assert_eq!(
            exceeded_limit(ALL, None, Some(libc::SIGABRT), 0, false).as_deref(),
            Some("limit: memory, suspected")
        );
        assert_eq!(exceeded_limit(ALL, Some(1), None, 0, true).as_deref(), Some("limit: memory, suspected"));
    }

    #[test]
    fn without_a_limit_or_a_sign_of_it_no_limit_is_named() {
        for signal in [libc::SIGXCPU, libc::SIGKILL, libc::SIGXFSZ, libc::SIGABRT] {
            assert_eq!(exceeded_limit(ResourceLimits::default(), None, Some(signal), 99, true), None);
        }
        assert_eq!(exceeded_limit(ALL, None, Some(libc::SIGKILL), 1, false), None);
        assert_eq!(exceeded_limit(ALL, Some(1), None, 0, false), None);
        assert_eq!(exceeded_limit(ALL, Some(0), None, 0, true), None);
    }

    #[tokio::test]
    async fn a_memory_error_in_stderr_is_detected_across_chunks() {
        use tokio::io::AsyncReadExt;
        let detected = Arc::new(AtomicBool::new(false));
        let pieces = (&b"Traceback: Mem"[..]).chain(&b"oryError"[..]);
        let mut text = String::new();
        StderrMonitor::new(pieces, Arc::clone(&detected)).read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "Traceback: MemoryError");
        assert!(detected.load(Ordering::Relaxed));
    }
}
