//! Behaviour of the program as a process: how it ends, and how it exceeds limits.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::hint::black_box;
use std::io::{self, Write};
use std::os::fd::IntoRawFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use nix::libc;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::sys::time::TimeValLike;
use nix::unistd::pause;

use crate::{facts, server};

/// Bounds of a crash where no limit applies, so that the machine is not harmed.
const CPU_MAX: Duration = Duration::from_secs(600);
const MEMORY_MAX: usize = 4 << 30;
const FILE_MAX: usize = 1 << 30;
const CHUNK: usize = 1 << 20;

/// Exit code of a crash that met no limit.
const NO_LIMIT: i32 = 3;

#[derive(Clone, Copy)]
pub(crate) enum CrashKind {
    Cpu,
    Memory,
    FileSize,
}

#[derive(Default)]
pub(crate) struct EscapeFlags {
    on_term: Option<PathBuf>,
    /// True if the end of stdin does not end the program.
    stays: bool,
    crash: Option<CrashKind>,
    identity: bool,
}

impl EscapeFlags {
    pub(crate) fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut flags = Self::default();
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value"));
            match arg.as_str() {
                "--on-term" => {
                    flags.on_term = Some(home().join(value()?));
                    flags.stays = true;
                }
                "--no-term-handler" => flags.stays = true,
                "--crash" => {
                    flags.crash = Some(match value()?.as_str() {
                        "cpu" => CrashKind::Cpu,
                        "memory" => CrashKind::Memory,
                        "file-size" => CrashKind::FileSize,
                        other => return Err(format!("--crash takes cpu, memory or file-size, not {other}")),
                    });
                }
                "--identity" => flags.identity = true,
                _ => return Err(format!("unknown argument: {arg}")),
            }
        }
        Ok(flags)
    }

    pub(crate) fn run(self) -> io::Result<()> {
        if self.identity {
            return writeln!(io::stdout(), "{}", facts::identity());
        }
        if let Some(file) = &self.on_term {
            write_on_term(File::create(file)?)?;
        }
        server::serve(io::stdin().lock(), io::stdout().lock(), self.crash)?;
        if !self.stays {
            return Ok(());
        }
        loop {
            pause();
        }
    }
}

pub(crate) fn home() -> PathBuf {
    std::env::var_os("HOME").unwrap_or_else(|| OsString::from("/")).into()
}

static ON_TERM: AtomicI32 = AtomicI32::new(-1);

extern "C" fn on_term(_: libc::c_int) {
    const LINE: &[u8] = b"handled\n";
    #[expect(unsafe_code, reason = "a signal handler may only make plain system calls")]
    // SAFETY: write and _exit are async-signal-safe; the descriptor was opened before the handler was set and is never
    // closed; the buffer is static.
    unsafe {
        libc::write(ON_TERM.load(Ordering::Relaxed), LINE.as_ptr().cast(), LINE.len());
        libc::_exit(0);
    }
}

fn write_on_term(file: File) -> io::Result<()> {
    ON_TERM.store(file.into_raw_fd(), Ordering::Relaxed);
    handle(Signal::SIGTERM, SigHandler::Handler(on_term))
}

pub(crate) fn handle(signal: Signal, handler: SigHandler) -> io::Result<()> {
    let action = SigAction::new(handler, SaFlags::empty(), SigSet::empty());
    #[expect(unsafe_code, reason = "there is no safe way to set a disposition")]
    // SAFETY: the only handler of this program makes async-signal-safe calls only.
    unsafe {
        sigaction(signal, &action)?;
    }
    Ok(())
}

impl CrashKind {
    /// Uses a resource without bound until a limit ends this process.
    pub(crate) fn crash(self) -> ! {
        match self {
            Self::Cpu => burn(),
            Self::Memory => allocate_memory(),
            Self::FileSize => {
                // An ignored signal is inherited from the parent process.
                let _ = handle(Signal::SIGXFSZ, SigHandler::SigDfl);
                let path = home().join(format!(".escape-{}", std::process::id()));
                let written = fill(&path);
                let _ = fs::remove_file(&path);
                if let Err(error) = written {
                    crate::complain(&error.to_string());
                    std::process::exit(1);
                }
            }
        }
        std::process::exit(NO_LIMIT)
    }
}

fn burn() {
    let used = || getrusage(UsageWho::RUSAGE_SELF).map_or(0, |usage| usage.user_time().num_seconds());
    let mut number: u64 = 0;
    while used().unsigned_abs() < CPU_MAX.as_secs() {
        for _ in 0..10_000_000_u64 {
            number = black_box(number.wrapping_mul(31).wrapping_add(7));
        }
    }
}

fn allocate_memory() {
    let mut chunks: Vec<Vec<u8>> = Vec::new();
    for _ in 0..MEMORY_MAX / CHUNK {
        let mut chunk = Vec::new();
        if chunk.try_reserve_exact(CHUNK).is_err() {
            std::process::abort();
        }
        chunk.resize(CHUNK, 1);
        chunks.push(black_box(chunk));
    }
}

fn fill(path: &std::path::Path) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
    let chunk = vec![b'x'; CHUNK];
    for _ in 0..FILE_MAX / CHUNK {
        file.write_all(&chunk)?;
    }
    Ok(())
}
