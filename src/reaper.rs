//! The process above the satellite. It is there so that nothing outlives the satellite, however that ends: it adopts
//! what is orphaned below it, and once the satellite is gone it kills all of that, waits until there is none, and ends
//! with the satellite's code. It is forked before any thread exists and has only one.
//!
//! ```text
//!  shell ──► reaper ──► satellite ──► servers ──► whatever they start
//!              ▲            ▲            │            │
//!              │            └─ orphans ◀─┴────────────┘
//!              └──────────────┘ when the satellite has ended
//! ```
//!
//! The satellite adopts orphans, too, from when it can start servers: so the end of either process leaves the other one
//! with all of them.
//!
//! Signals that ask for something come down a pipe. Who signals the whole group, as a terminal and systemd do, reaches
//! both processes, and means it once: the satellite acts on the larger of the two counts. The end of the pipe is how the
//! satellite learns that the reaper was killed; then it ends every tree at once, without grace, and itself.
//!
//! A second pipe leads up: the satellite writes its exit code into it when all is done. A thread that waits in the kernel
//! for a disk that hangs can keep the satellite's process from ending; the reaper then ends without it.

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
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::{ForkResult, Pid, fork, getpid, getppid};
use tokio::sync::mpsc;

use crate::connect::process::{Census, LeftBy, Stat, children_of, set_reaper, signals};
use crate::disk::WAIT_MAX;

/// What does not die of SIGKILL within this is left to the kernel, and named.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(2);
/// Added to the number of a signal it is an exit code.
const SIGNAL_BASE: u8 = 128;
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
/// `satellite` returns its exit code.
pub(crate) fn above(satellite: impl FnOnce(Below) -> u8) -> io::Result<ExitCode> {
    let (below, pipe) = io::pipe()?;
    let (last_word, mut done) = io::pipe()?;
    let mut waited_for = SigSet::empty();
    waited_for.add(Signal::SIGCHLD);
    // What `nohup` and the like have switched off stays so.
    for signal in ASKING.into_iter().chain(PLAIN).filter(|signal| !signals::are_ignored(*signal)) {
        waited_for.add(signal);
    }
    #[expect(unsafe_code, reason = "there is no safe way to set a signal's action")]
    // SAFETY: it is the default action, not a handler. Who has started us may ignore this one, and then the kernel would
    // tell neither of us how anything ended.
    unsafe { signal(Signal::SIGCHLD, SigHandler::SigDfl) }?;
    let before = waited_for.thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_BLOCK)?;
    // Servers that run as the same user must not read our environment in /proc.
    if let Err(error) = set_dumpable(false) {
        // Nobody has opened a log yet.
        let _ = writeln!(io::stderr(), "satellite: cannot keep this process's environment from the servers: {error}");
    }
    let signals = SignalFd::with_flags(&waited_for, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
    let reaper = getpid();
    #[expect(unsafe_code, reason = "there is no safe fork")]
    // SAFETY: this process has one thread, so the child may do whatever a process may.
    match unsafe { fork() }? {
        ForkResult::Child => {
            drop((pipe, last_word, signals));
            before.thread_set_mask()?;
            // Killed before it could do anything: the pipe will say so.
            if getppid() == reaper {
                set_reaper(reaper.as_raw().unsigned_abs());
            }
            let (ask, asked) = mpsc::unbounded_channel();
            thread::Builder::new().name("satellite-below".into()).spawn(move || listen(below, &ask))?;
            let code = satellite(Below { asked });
            // An error means that the reaper was killed.
            let _ = done.write_all(&[code]);
            Ok(ExitCode::from(code))
        }
        ForkResult::Parent { child } => {
            drop((below, done));
            let _ = set_name(NAME);
            // Inherited by nobody; a kernel without it leaves orphans to the process above us.
            let _ = set_child_subreaper(true);
            Ok(watch(child, pipe, last_word, &signals))
        }
    }
}

/// Whether the satellite `pid` has lost its reaper.
pub(crate) fn is_orphan(pid: u32) -> bool {
    let name = Stat::read(pid).and_then(|stat| fs::read_to_string(format!("/proc/{}/comm", stat.parent)).ok());
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
fn watch(satellite: Pid, mut pipe: PipeWriter, last_word: PipeReader, signals: &SignalFd) -> ExitCode {
    // Dropped when it has nothing more to tell.
    let mut last_word = Some(last_word);
    // The satellite's exit code, and the end of the time that it has for its exit.
    let mut done: Option<(u8, Instant)> = None;
    let (code, stuck) = 'watching: loop {
        if let Some((code, until)) = done
            && Instant::now() >= until
        {
            break (code, Some(satellite));
        }
        let timeout = done.map_or(PollTimeout::NONE, |(_, until)| {
            let left = until.saturating_duration_since(Instant::now()) + PAUSE;
            PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
        });
        let mut awaited = vec![PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
        awaited.extend(last_word.as_ref().map(|last_word| PollFd::new(last_word.as_fd(), PollFlags::POLLIN)));
        // An error means that it was interrupted: both are looked at all the same.
        let _ = poll(&mut awaited, timeout);
        let has_last_word = awaited.get(1).is_some_and(|awaited| awaited.any() == Some(true));
        while let Ok(Some(about)) = signals.read_signal() {
            match i32::try_from(about.ssi_signo).ok().and_then(|signal| Signal::try_from(signal).ok()) {
                Some(Signal::SIGCHLD) => {
                    if let Some(code) = reap(satellite) {
                        break 'watching (code, None);
                    }
                }
                // A satellite that has just ended is reaped next.
                Some(signal) if ASKING.contains(&signal) => {
                    let _ = pipe.write_all(&[signal as u8]);
                }
                // The process is not reaped yet, so its id is not reused.
                Some(signal) => drop(kill(satellite, signal)),
                None => {}
            }
        }
        if has_last_word && let Some(mut last_word) = last_word.take() {
            let mut code = [0];
            // Without one it has crashed, and is reaped next.
            if last_word.read_exact(&mut code).is_ok() {
                done = Some((code[0], Instant::now() + WAIT_MAX));
            }
        }
    };
    let ended = end_orphans(&LeftBy::satellite(satellite.as_raw().unsigned_abs()), stuck);
    if let Some(signal) = code.checked_sub(SIGNAL_BASE).and_then(|signal| Signal::try_from(i32::from(signal)).ok()) {
        let _ = writeln!(
            io::stderr(),
            "satellite: the satellite was ended by {signal}; its reaper ended {ended} processes that it left"
        );
    }
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
                WaitStatus::Signaled(_, signal, _) => Some(SIGNAL_BASE + signal as u8),
                _ => code,
            };
        }
    }
}

/// Kills what was adopted until there is nobody left, and says how many they were. Each is a child of ours that was not
/// waited for, so its number is its own. A satellite that is `stuck` in the kernel is not waited for.
fn end_orphans(cgroups: &LeftBy, stuck: Option<Pid>) -> usize {
    let until = Instant::now() + PATIENCE;
    let mut ended = 0;
    loop {
        // In one act, where it can be: what forks faster than it is looked for cannot get away.
        let cgroups_are_empty = cgroups.end();
        for child in children() {
            let _ = kill(child, Signal::SIGKILL);
        }
        let childless = loop {
            match waitid(Id::All, WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG) {
                // What it has left in turn is ours now.
                Ok(WaitStatus::StillAlive) => break false,
                Ok(_) => ended += 1,
                Err(_) => break true,
            }
        };
        let childless = childless || children().iter().all(|child| Some(*child) == stuck);
        if childless && cgroups_are_empty {
            return ended;
        }
        if Instant::now() >= until {
            let left: Vec<String> = children().iter().map(Pid::to_string).collect();
            let _ = writeln!(io::stderr(), "satellite: these processes do not die: {}", left.join(", "));
            return ended;
        }
        thread::sleep(PAUSE);
    }
}

/// The children of this process, which has one thread.
fn children() -> Vec<Pid> {
    let own = getpid().as_raw().unsigned_abs();
    let pids = children_of(own).unwrap_or_else(|_| {
        // A kernel without that file.
        let Ok(census) = Census::take() else { return Vec::new() };
        census.all().filter(|stat| stat.parent == own).map(|stat| stat.pid).collect()
    });
    pids.into_iter().map(|pid| Pid::from_raw(pid.cast_signed())).collect()
}
