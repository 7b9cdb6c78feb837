//! The process above the satellite. It is there so that nothing outlives the satellite, however that ends: it adopts
//! what is orphaned below it, and once the satellite is gone it kills all of that, waits until there is none, and ends
//! with the satellite's code. It is forked before any thread exists and has only one.
//!
//! ```text
//!  shell ──► reaper ──► satellite ──► servers ──► whatever they start
//!              ▲                         │            │
//!              └──── what is orphaned ◀──┴────────────┘
//! ```
//!
//! Signals that ask for something come down a pipe. Who signals the whole group, as a terminal and systemd do, reaches
//! both processes, and means it once: the satellite acts on the larger of the two counts. The end of the pipe is how the
//! satellite learns that the reaper was killed; then it ends every tree at once, without grace, and itself.

use std::ffi::CStr;
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use nix::sys::prctl::{set_child_subreaper, set_dumpable, set_name};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::{ForkResult, Pid, fork, getpid, getppid};
use tokio::sync::mpsc;

use crate::connect::process::has_reaper;

/// What does not die of SIGKILL within this is left to the kernel, and named.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(2);
/// For people, and for the next satellite on the same data directory.
const NAME: &CStr = c"satellite-reaper";

/// Passed on through the pipe: they ask the satellite for something.
const ASKING: [Signal; 3] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP];
/// Passed on as they are.
const PLAIN: [Signal; 3] = [Signal::SIGQUIT, Signal::SIGUSR1, Signal::SIGUSR2];

/// Ends everything; see [`Below::when_orphaned`].
type LastAct = Box<dyn FnOnce() + Send>;

/// The satellite's side of the pipe.
pub(crate) struct Below {
    /// What the reaper was asked by signals.
    pub(crate) asked: mpsc::UnboundedReceiver<Signal>,
}

static LAST_ACT: Mutex<Option<LastAct>> = Mutex::new(None);

impl Below {
    /// What is done, on a thread of its own, if the reaper is killed; the process ends afterwards.
    pub(crate) fn when_orphaned(act: impl FnOnce() + Send + 'static) {
        *LAST_ACT.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(act));
    }
}

/// Runs `satellite` in a child of this process, which stays above it. To be called while there is one thread.
pub(crate) fn above(satellite: impl FnOnce(Below) -> ExitCode) -> io::Result<ExitCode> {
    let (below, pipe) = io::pipe()?;
    let mut signals = SigSet::empty();
    for signal in ASKING.into_iter().chain(PLAIN).chain([Signal::SIGCHLD]) {
        signals.add(signal);
    }
    let before = signals.thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_BLOCK)?;
    // Servers that run as the same user must not read our environment in /proc.
    if let Err(error) = set_dumpable(false) {
        tracing::warn!(%error, "cannot keep this process's environment from the servers");
    }
    let reaper = getpid();
    #[expect(unsafe_code, reason = "there is no safe fork")]
    // SAFETY: this process has one thread, so the child may do whatever a process may.
    match unsafe { fork() }? {
        ForkResult::Child => {
            drop(pipe);
            before.thread_set_mask()?;
            // Killed before it could do anything: the pipe will say so.
            if getppid() == reaper {
                has_reaper(reaper.as_raw().unsigned_abs());
            }
            let (ask, asked) = mpsc::unbounded_channel();
            thread::Builder::new().name("satellite-below".into()).spawn(move || listen(below, &ask))?;
            Ok(satellite(Below { asked }))
        }
        ForkResult::Parent { child } => {
            drop(below);
            let _ = set_name(NAME);
            // Inherited by nobody; a kernel without it leaves orphans to the process above us.
            let _ = set_child_subreaper(true);
            Ok(watch(child, pipe, &signals))
        }
    }
}

/// Whether the satellite `pid` has lost its reaper.
pub(crate) fn is_orphan(pid: u32) -> bool {
    let parent = fs::read_to_string(format!("/proc/{pid}/stat")).ok().as_deref().and_then(parent_of);
    let name = parent.and_then(|parent| fs::read_to_string(format!("/proc/{parent}/comm")).ok());
    // The kernel cuts names.
    name.is_some_and(|name| !NAME.to_string_lossy().starts_with(name.trim()))
}

/// The satellite's thread on the pipe.
fn listen(mut pipe: PipeReader, ask: &mpsc::UnboundedSender<Signal>) {
    let mut byte = [0];
    loop {
        match pipe.read(&mut byte) {
            Ok(1..) => {
                let signal = ASKING.iter().find(|signal| **signal as i32 == i32::from(byte[0]));
                if let Some(signal) = signal {
                    // Nobody listens once the satellite is ending.
                    let _ = ask.send(*signal);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(0) | Err(_) => break,
        }
    }
    tracing::error!("the reaper was killed: ending every server at once");
    if let Some(act) = LAST_ACT.lock().unwrap_or_else(PoisonError::into_inner).take() {
        act();
    }
    std::process::exit(1);
}

/// The reaper's life.
fn watch(satellite: Pid, mut pipe: PipeWriter, signals: &SigSet) -> ExitCode {
    let code = loop {
        match signals.wait() {
            Ok(Signal::SIGCHLD) => {
                if let Some(code) = reap(satellite) {
                    break code;
                }
            }
            // A satellite that has just ended is reaped next.
            Ok(signal) if ASKING.contains(&signal) => {
                let _ = pipe.write_all(&[signal as u8]);
            }
            // It is not reaped yet, so the number is its own.
            Ok(signal) => drop(kill(satellite, signal)),
            Err(_) => {}
        }
    };
    end_orphans();
    ExitCode::from(code)
}

/// Takes note of all that has ended; the satellite's exit code, if it has.
fn reap(satellite: Pid) -> Option<u8> {
    let mut code = None;
    loop {
        let status = match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::StillAlive) | Err(_) => return code,
            Ok(status) => status,
        };
        if status.pid() == Some(satellite) {
            code = match status {
                WaitStatus::Exited(_, code) => Some(u8::try_from(code).unwrap_or(u8::MAX)),
                WaitStatus::Signaled(_, signal, _) => Some(128 + signal as u8),
                _ => code,
            };
        }
    }
}

/// Kills what was adopted until there is nobody left. Each is a child of ours that was not waited for, so its number is
/// its own.
fn end_orphans() {
    let until = Instant::now() + PATIENCE;
    loop {
        for child in children() {
            let _ = kill(child, Signal::SIGKILL);
        }
        loop {
            match waitid(Id::All, WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG) {
                // What it has left in turn is ours now.
                Ok(WaitStatus::StillAlive) => break,
                Ok(_) => {}
                Err(_) => return,
            }
        }
        if Instant::now() >= until {
            let left: Vec<String> = children().iter().map(Pid::to_string).collect();
            let _ = writeln!(io::stderr(), "satellite: these processes do not die: {}", left.join(", "));
            return;
        }
        thread::sleep(PAUSE);
    }
}

/// The children of this process, which has one thread.
fn children() -> Vec<Pid> {
    let own = getpid();
    let pid = |text: &str| text.parse().ok().map(Pid::from_raw);
    if let Ok(children) = fs::read_to_string(format!("/proc/{own}/task/{own}/children")) {
        return children.split_ascii_whitespace().filter_map(pid).collect();
    }
    // A kernel without that file.
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.filter_map(|entry| pid(entry.ok()?.file_name().to_str()?));
    let is_ours = |pid: &Pid| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        parent_of(&stat) == Some(own.as_raw())
    };
    pids.filter(is_ours).collect()
}

/// From `/proc/PID/stat`.
fn parent_of(stat: &str) -> Option<i32> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(1)?.parse().ok()
}
