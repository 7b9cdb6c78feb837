//! Keeper process above the satellite, which makes sure that no server outlives the satellite. It adopts orphaned
//! processes below it. After the satellite has ended for whatever reason, it kills all of them, waits until none is
//! left, and exits with the satellite's code. It is forked before any thread exists and has a single thread.
//!
//! ```text
//!  shell ──► keeper ──► satellite ──► servers ──► their children
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
//! Keeper and satellite are connected by a socket; see `messages.rs`. The keeper passes signals such as SIGTERM on. A signal
//! to the whole process group, as sent by a terminal or systemd, reaches both processes but is one request, so the
//! satellite acts on the larger of the two counts. When the socket closes, the keeper was killed; the satellite then ends
//! every process tree at once, without grace, and itself.
//!
//! The satellite reports that its actors answer. If it does not for the hang timeout, the keeper kills it: a satellite that
//! hangs, or was stopped, must not keep servers running that nobody supervises.
//!
//! The satellite reports its exit code when it is finished. A thread that waits in the kernel for a hanging disk can keep
//! the satellite's process from ending; the keeper then ends without it.

mod link;
mod messages;
mod rules;

use std::ffi::CStr;
use std::io::Write;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::sync::Arc;
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

pub use self::link::{KeeperClient, KeeperLink};
use self::messages::{KeeperEvent, KeeperRequest, KeeperSocket};
use self::rules::{KeeperEffect, KeeperRules, SatellitePhase};
use crate::process::{
    LeftoverCgroups, ProcessCensus, ProcessStat, SPAWN_HELPER_NAME, children_of, set_keeper, signals,
    start_spawn_helper,
};
use crate::program_pages::ProgramPages;
use crate::service_manager::{self, NotificationRelay};

/// Time to wait for killed processes. Those still alive after it are reported and left to the kernel.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(2);
/// Time within which a second signal of the same process belongs to the same request to end.
const REPEATED: Duration = Duration::from_millis(5);
/// Exit code for a death by signal, minus the signal's number.
const SIGNAL_BASE: u8 = 128;
/// Exit code after SIGKILL.
const KILLED: u8 = SIGNAL_BASE + 9;
/// Process name, shown to people and checked by the next satellite on the same data directory.
const NAME: &CStr = c"satellite-keeper";

/// Maximum number of bytes of a process name. The kernel cuts a longer one.
const NAME_MAX: usize = 15;

// Passed on through the socket; the others with `kill`.
const PIPED_SIGNALS: [Signal; 3] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP];
const KILL_FORWARDED_SIGNALS: [Signal; 3] = [Signal::SIGQUIT, Signal::SIGUSR1, Signal::SIGUSR2];

/// Runs `satellite` in a child process and becomes its keeper. `satellite` returns its exit code. Must be called while
/// the process has one thread.
pub fn run_with_keeper(satellite: impl FnOnce(KeeperLink) -> u8) -> io::Result<ExitCode> {
    let (socket, below) = KeeperSocket::pair()?;
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
    // kernel would report no exit status to the keeper or the satellite.
    unsafe { signal(Signal::SIGCHLD, SigHandler::SigDfl) }?;
    let before = waited_for.thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_BLOCK)?;
    // Servers that run as the same user must not read this environment in `/proc`.
    if let Err(error) = set_dumpable(false) {
        // No log is open yet.
        let _ =
            writeln!(io::stderr(), "satellite: cannot hide the environment of this process from the servers: {error}");
    }
    let signals = SignalFd::with_flags(&waited_for, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
    let keeper = getpid();
    #[expect(unsafe_code, reason = "there is no safe fork")]
    // SAFETY: this process has one thread, so the child may call any function.
    match unsafe { fork() }? {
        ForkResult::Child => {
            drop((socket, signals, relay));
            if let Err(error) = start_spawn_helper() {
                // No log is open yet. The satellite forks the servers itself.
                let _ = writeln!(io::stderr(), "satellite: cannot start the process that forks servers: {error}");
            }
            before.thread_set_mask()?;
            // If the keeper was killed before this, the closed socket reports it.
            if getppid() == keeper {
                set_keeper(keeper.as_raw().unsigned_abs());
            }
            let (sender, signals) = mpsc::unbounded_channel();
            let client = KeeperClient(Arc::new(below));
            let keeper = client.clone();
            thread::Builder::new().name("satellite-below".into()).spawn(move || client.receive_signals(&sender))?;
            let code = satellite(KeeperLink { signals, service_manager, keeper: keeper.clone() });
            keeper.report_done(code);
            Ok(ExitCode::from(code))
        }
        ForkResult::Parent { child } => {
            drop((below, service_manager));
            let _ = set_name(NAME);
            // Children do not inherit the setting. Without it orphans go to the process above the keeper.
            let _ = set_child_subreaper(true);
            Ok(supervise_satellite(child, socket, &signals, relay.as_ref()))
        }
    }
}

pub fn is_orphan(pid: u32) -> bool {
    let parent = ProcessStat::read(pid).map(|stat| Pid::from_raw(stat.parent.cast_signed()));
    parent.and_then(|parent| is_named(parent, NAME)).is_some_and(|is_keeper| !is_keeper)
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

fn supervise_satellite(
    satellite: Pid,
    socket: KeeperSocket,
    signals: &SignalFd,
    relay: Option<&NotificationRelay>,
) -> ExitCode {
    // Dropped when the satellite has closed its end.
    let mut socket = Some(socket);
    let mut rules = KeeperRules::new();
    let mut last_request: Option<Request> = None;
    // An error costs some memory and nothing else.
    let pages = ProgramPages::find();
    let exit_code = 'watching: loop {
        match rules.expire(Instant::now()) {
            // The process is not reaped yet, so its id is not reused. Its end is reported by SIGCHLD.
            Some(KeeperEffect::KillSatellite) => drop(kill(satellite, Signal::SIGKILL)),
            Some(KeeperEffect::EndWithoutSatellite) => break None,
            None => {}
        }
        let timeout = rules.deadline().map_or(PollTimeout::NONE, |until| {
            let remaining = until.saturating_duration_since(Instant::now()) + PAUSE;
            PollTimeout::try_from(remaining).unwrap_or(PollTimeout::MAX)
        });
        let mut awaited = vec![PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
        awaited.extend(relay.map(|relay| PollFd::new(relay.descriptor().as_fd(), PollFlags::POLLIN)));
        awaited.extend(socket.as_ref().map(|socket| PollFd::new(socket.as_fd(), PollFlags::POLLIN)));
        let _ = pages.as_ref().map(ProgramPages::release);
        // An error means that the poll was interrupted; all descriptors are read anyway.
        let _ = poll(&mut awaited, timeout);
        if let Some(relay) = relay {
            relay.relay();
        }
        if socket.as_ref().is_some_and(|socket| !receive_requests(socket, &mut rules)) {
            socket = None;
        }
        while let Ok(Some(about)) = signals.read_signal() {
            match i32::try_from(about.ssi_signo).ok().and_then(|signal| Signal::try_from(signal).ok()) {
                Some(Signal::SIGCHLD) => {
                    if let Some(code) = reap(satellite) {
                        break 'watching Some(code);
                    }
                }
                Some(signal) if PIPED_SIGNALS.contains(&signal) => {
                    let request = Request { signal, sender: about.ssi_pid, at: Instant::now() };
                    if last_request.replace(request).is_none_or(|last| !request.repeats(&last))
                        && let Some(socket) = &socket
                    {
                        // An error means that the satellite has just ended and is reaped next, or that it is stopped and
                        // hundreds of signals wait for it.
                        let _ = socket.send(&KeeperEvent::Signal { number: signal as i32 });
                    }
                }
                Some(signal) => drop(kill(satellite, signal)),
                None => {}
            }
        }
    };
    // A satellite that does not end is not waited for.
    let stuck = exit_code.is_none().then_some(satellite);
    let ended = end_orphans(&LeftoverCgroups::for_satellite(satellite.as_raw().unsigned_abs()), stuck);
    let remaining = format!("the keeper ended {ended} remaining processes");
    let (code, message) = match (rules.phase(), exit_code) {
        (SatellitePhase::Hung { timeout, .. }, code) => {
            let why = format!("the actors of the satellite did not answer for {timeout:?}, so the keeper killed it");
            (code.unwrap_or(KILLED), Some(why))
        }
        (SatellitePhase::Done { code, .. }, None) => (code, None),
        (_, code) => {
            let code = code.unwrap_or(KILLED);
            let signal = code.checked_sub(SIGNAL_BASE).filter(|signal| *signal > 0).map(|signal| {
                let known = Signal::try_from(i32::from(signal));
                known.map_or_else(|_| format!("signal {signal}"), |known| known.to_string())
            });
            (code, signal.map(|signal| format!("the satellite was ended by {signal}")))
        }
    };
    if let Some(message) = message {
        let _ = writeln!(io::stderr(), "satellite: {message}; {remaining}");
    }
    ExitCode::from(code)
}

/// Reads all messages of the satellite. Returns false if it has closed its end.
fn receive_requests(socket: &KeeperSocket, rules: &mut KeeperRules) -> bool {
    loop {
        match socket.try_receive::<KeeperRequest>() {
            Ok(Some((request, _))) => rules.receive(Instant::now(), &request),
            Ok(None) => return false,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
            // A message that the keeper does not understand changes nothing.
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {}
            Err(_) => return false,
        }
    }
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
/// keeper, so its process id is not reused. A satellite that is `stuck` in the kernel is not waited for.
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
        // The children of a reaped process are now children of the keeper.
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
