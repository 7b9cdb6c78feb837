//! Reaper process above the satellite, which makes sure that no server outlives the satellite. It adopts orphaned
//! processes below it. After the satellite has ended for whatever reason, it kills all of them, waits until none is
//! left, and exits with the satellite's code. It is forked before any thread exists and has a single thread.
//!
//! ```text
//!  shell ──► reaper ──► satellite ──► servers ──► their children
//!              ▲            ▲            │            │
//!              │            └─ orphans ◀─┴────────────┘
//!              └──────────────┘ when the satellite has ended
//! ```
//!
//! The satellite also starts the spawn helper, which forks the servers; see `process/spawn_helper.rs`.
//!
//! The satellite adopts orphans, too, from when it can start servers: if either process ends, the other one has all of
//! them.
//!
//! The reaper forwards signals such as SIGTERM through a pipe. A signal to the whole process group, as sent by a
//! terminal or systemd, reaches both processes but is one request, so the satellite acts on the larger of the two
//! counts. When the pipe closes, the reaper was killed; the satellite then ends every process tree at once, without
//! grace, and itself.
//!
//! Through a second pipe the satellite sends its exit code when it is finished. A thread that waits in the kernel for a
//! hanging disk can keep the satellite's process from ending; the reaper then ends without it.

use std::ffi::CStr;
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl::{set_child_subreaper, set_dumpable, set_name};
use nix::sys::signal::{SigHandler, SigSet, Signal, kill, signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::{ForkResult, Pid, fork, getpid, getppid};
use rustix::io::Errno;
use rustix::process::{WaitOptions, wait};
use tokio::sync::mpsc;

use crate::process::{
    LeftoverCgroups, ProcessCensus, ProcessStat, SPAWN_HELPER_NAME, children_of, set_reaper, signals,
    start_spawn_helper,
};
use crate::program_pages::ProgramPages;
use crate::service_manager::{self, NotificationRelay, ServiceManager};
use mcp_satellite_files::disk::WAIT_MAX;

/// Time to wait for killed processes. Those still alive after it are reported and left to the kernel.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(2);
/// Time within which a second signal of the same process belongs to the same request to end.
const REPEATED: Duration = Duration::from_millis(5);
/// Exit code for a death by signal, minus the signal's number.
const SIGNAL_BASE: u8 = 128;
/// Process name, shown to people and checked by the next satellite on the same data directory.
const NAME: &CStr = c"satellite-reaper";

/// Maximum number of bytes of a process name. The kernel cuts a longer one.
const NAME_MAX: usize = 15;

// Forwarded through the pipe; the others with `kill`.
const PIPED_SIGNALS: [Signal; 3] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP];
const KILL_FORWARDED_SIGNALS: [Signal; 3] = [Signal::SIGQUIT, Signal::SIGUSR1, Signal::SIGUSR2];

type OrphanCleanup = Box<dyn FnOnce() + Send>;

pub struct ReaperLink {
    pub signals: mpsc::UnboundedReceiver<Signal>,
    pub service_manager: ServiceManager,
}

static ORPHAN_CLEANUP: Mutex<Option<OrphanCleanup>> = Mutex::new(None);

impl ReaperLink {
    /// Sets the cleanup that runs on its own thread if the reaper is killed. The process exits afterwards.
    pub fn on_orphaned(act: impl FnOnce() + Send + 'static) {
        *ORPHAN_CLEANUP.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(act));
    }
}

/// Runs `satellite` in a child process and becomes its reaper. `satellite` returns its exit code. Must be called while
/// the process has one thread.
pub fn run_with_reaper(satellite: impl FnOnce(ReaperLink) -> u8) -> io::Result<ExitCode> {
    let (below, pipe) = io::pipe()?;
    let (exit_code_pipe, mut done) = io::pipe()?;
    let (service_manager, relay) = service_manager::from_environment()?;
    let mut waited_for = SigSet::empty();
    waited_for.add(Signal::SIGCHLD);
    // Signals that `nohup` or a similar command ignores remain ignored.
    for signal in PIPED_SIGNALS.into_iter().chain(KILL_FORWARDED_SIGNALS).filter(|signal| !signals::is_ignored(*signal))
    {
        waited_for.add(signal);
    }
    #[expect(unsafe_code, reason = "there is no safe way to set a signal's action")]
    // SAFETY: this sets the default action, not a handler. The parent process may have ignored SIGCHLD, and then the
    // kernel would report no exit status to the reaper or the satellite.
    unsafe { signal(Signal::SIGCHLD, SigHandler::SigDfl) }?;
    let before = waited_for.thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_BLOCK)?;
    // Servers that run as the same user must not read this environment in `/proc`.
    if let Err(error) = set_dumpable(false) {
        // No log is open yet.
        let _ =
            writeln!(io::stderr(), "satellite: cannot hide the environment of this process from the servers: {error}");
    }
    let signals = SignalFd::with_flags(&waited_for, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
    let reaper = getpid();
    #[expect(unsafe_code, reason = "there is no safe fork")]
    // SAFETY: this process has one thread, so the child may call any function.
    match unsafe { fork() }? {
        ForkResult::Child => {
            drop((pipe, exit_code_pipe, signals, relay));
            if let Err(error) = start_spawn_helper() {
                // No log is open yet. The satellite forks the servers itself.
                let _ = writeln!(io::stderr(), "satellite: cannot start the process that forks servers: {error}");
            }
            before.thread_set_mask()?;
            // If the reaper was killed before this, the closed pipe reports it.
            if getppid() == reaper {
                set_reaper(reaper.as_raw().unsigned_abs());
            }
            let (sender, signals) = mpsc::unbounded_channel();
            thread::Builder::new().name("satellite-below".into()).spawn(move || receive_signals(below, &sender))?;
            let code = satellite(ReaperLink { signals, service_manager });
            // An error means that the reaper was killed.
            let _ = done.write_all(&[code]);
            Ok(ExitCode::from(code))
        }
        ForkResult::Parent { child } => {
            drop((below, done, service_manager));
            let _ = set_name(NAME);
            // Children do not inherit the setting. Without it orphans go to the process above the reaper.
            let _ = set_child_subreaper(true);
            Ok(supervise_satellite(child, pipe, exit_code_pipe, &signals, relay.as_ref()))
        }
    }
}

pub fn is_orphan(pid: u32) -> bool {
    let parent = ProcessStat::read(pid).map(|stat| Pid::from_raw(stat.parent.cast_signed()));
    parent.and_then(|parent| is_named(parent, NAME)).is_some_and(|is_reaper| !is_reaper)
}

/// Returns `None` if the process does not exist.
fn is_named(pid: Pid, name: &CStr) -> Option<bool> {
    let found = fs::read(format!("/proc/{pid}/comm")).ok()?;
    let name = name.to_bytes();
    Some(found.trim_ascii_end() == &name[..name.len().min(NAME_MAX)])
}

/// Signal that asks the satellite for something.
#[derive(Clone, Copy)]
struct Request {
    signal: Signal,
    sender: u32,
    at: Instant,
}

impl Request {
    /// Returns true if both signals are one request to end: `timeout` signals its child, and then its process group.
    fn repeats(&self, last: &Self) -> bool {
        self.signal != Signal::SIGHUP
            && (self.signal, self.sender) == (last.signal, last.sender)
            && self.at.duration_since(last.at) < REPEATED
    }
}

fn receive_signals(mut pipe: PipeReader, sender: &mpsc::UnboundedSender<Signal>) {
    let mut byte = [0];
    loop {
        match pipe.read(&mut byte) {
            Ok(1..) => {
                let signal = PIPED_SIGNALS.iter().find(|signal| **signal as i32 == i32::from(byte[0]));
                if let Some(signal) = signal {
                    // The receiver is gone once the satellite is ending.
                    let _ = sender.send(*signal);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(0) | Err(_) => break,
        }
    }
    tracing::error!("the reaper was killed: ending every server at once");
    if let Some(act) = ORPHAN_CLEANUP.lock().unwrap_or_else(PoisonError::into_inner).take() {
        act();
    }
    std::process::exit(1);
}

fn supervise_satellite(
    satellite: Pid,
    mut pipe: PipeWriter,
    exit_code_pipe: PipeReader,
    signals: &SignalFd,
    relay: Option<&NotificationRelay>,
) -> ExitCode {
    // Dropped after the exit code was read.
    let mut exit_code_pipe = Some(exit_code_pipe);
    let mut last_request: Option<Request> = None;
    // An error costs some memory and nothing else.
    let pages = ProgramPages::find();
    // Exit code of the satellite, and the deadline for its exit.
    let mut done: Option<(u8, Instant)> = None;
    let (code, stuck) = 'watching: loop {
        if let Some((code, until)) = done
            && Instant::now() >= until
        {
            break (code, Some(satellite));
        }
        let timeout = done.map_or(PollTimeout::NONE, |(_, until)| {
            let remaining = until.saturating_duration_since(Instant::now()) + PAUSE;
            PollTimeout::try_from(remaining).unwrap_or(PollTimeout::MAX)
        });
        let mut awaited = vec![PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
        awaited.extend(relay.map(|relay| PollFd::new(relay.descriptor().as_fd(), PollFlags::POLLIN)));
        awaited.extend(
            exit_code_pipe.as_ref().map(|exit_code_pipe| PollFd::new(exit_code_pipe.as_fd(), PollFlags::POLLIN)),
        );
        let _ = pages.as_ref().map(ProgramPages::release);
        // An error means that the poll was interrupted; all descriptors are read anyway.
        let _ = poll(&mut awaited, timeout);
        let has_exit_code =
            exit_code_pipe.is_some() && awaited.last().is_some_and(|awaited| awaited.any() == Some(true));
        if let Some(relay) = relay {
            relay.relay();
        }
        while let Ok(Some(about)) = signals.read_signal() {
            match i32::try_from(about.ssi_signo).ok().and_then(|signal| Signal::try_from(signal).ok()) {
                Some(Signal::SIGCHLD) => {
                    if let Some(code) = reap(satellite) {
                        break 'watching (code, None);
                    }
                }
                Some(signal) if PIPED_SIGNALS.contains(&signal) => {
                    let request = Request { signal, sender: about.ssi_pid, at: Instant::now() };
                    if last_request.replace(request).is_none_or(|last| !request.repeats(&last)) {
                        // A satellite that has just ended is reaped next.
                        let _ = pipe.write_all(&[signal as u8]);
                    }
                }
                // The process is not reaped yet, so its id is not reused.
                Some(signal) => drop(kill(satellite, signal)),
                None => {}
            }
        }
        if has_exit_code && let Some(mut exit_code_pipe) = exit_code_pipe.take() {
            let mut code = [0];
            // Without an exit code the satellite has crashed and is reaped next.
            if exit_code_pipe.read_exact(&mut code).is_ok() {
                done = Some((code[0], Instant::now() + WAIT_MAX));
            }
        }
    };
    let ended = end_orphans(&LeftoverCgroups::for_satellite(satellite.as_raw().unsigned_abs()), stuck);
    if let Some(signal) = code.checked_sub(SIGNAL_BASE).filter(|signal| *signal > 0) {
        let signal =
            Signal::try_from(i32::from(signal)).map_or_else(|_| format!("signal {signal}"), |known| known.to_string());
        let _ = writeln!(
            io::stderr(),
            "satellite: the satellite was ended by {signal}; the reaper ended {ended} remaining processes"
        );
    }
    ExitCode::from(code)
}

/// Reaps all processes that have ended. Returns the satellite's exit code if it is among them.
fn reap(satellite: Pid) -> Option<u8> {
    let mut code = None;
    while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
        if pid.as_raw_nonzero().get() == satellite.as_raw() {
            let signal = || Some(SIGNAL_BASE.saturating_add(u8::try_from(status.terminating_signal()?).ok()?));
            code = status.exit_status().map(|code| u8::try_from(code).unwrap_or(u8::MAX)).or_else(signal).or(code);
        }
    }
    code
}

/// Kills the adopted processes until none is left and returns their number. Each one is an unreaped child of the
/// reaper, so its process id is not reused. A satellite that is `stuck` in the kernel is not waited for.
fn end_orphans(cgroups: &LeftoverCgroups, stuck: Option<Pid>) -> usize {
    let until = Instant::now() + PATIENCE;
    let (mut ended, mut helper) = (0, None);
    loop {
        // Killing the whole cgroup at once catches a process that forks faster than it can be found.
        let cgroups_are_empty = cgroups.kill_and_remove();
        for child in children() {
            // The spawn helper ends with the satellite and is not counted.
            if is_named(child, SPAWN_HELPER_NAME) == Some(true) {
                helper = Some(child.as_raw());
            }
            let _ = kill(child, Signal::SIGKILL);
        }
        // The children of a reaped process are now children of the reaper.
        let childless = loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, _))) => ended += usize::from(Some(pid.as_raw_nonzero().get()) != helper),
                Ok(None) => break false,
                Err(error) => break error == Errno::CHILD,
            }
        };
        let childless = childless || children().iter().all(|child| Some(*child) == stuck);
        if childless && cgroups_are_empty {
            return ended;
        }
        if Instant::now() >= until {
            let remaining: Vec<String> = children().iter().map(Pid::to_string).collect();
            let _ = writeln!(io::stderr(), "satellite: cannot end these processes: {}", remaining.join(", "));
            return ended;
        }
        thread::sleep(PAUSE);
    }
}

fn children() -> Vec<Pid> {
    let own = getpid().as_raw().unsigned_abs();
    let pids = children_of(own).unwrap_or_else(|_| {
        // Kernels without `/proc/PID/task/TID/children`.
        let Ok(census) = ProcessCensus::take() else { return Vec::new() };
        census.all().filter(|stat| stat.parent == own).map(|stat| stat.pid).collect()
    });
    pids.into_iter().map(|pid| Pid::from_raw(pid.cast_signed())).collect()
}
