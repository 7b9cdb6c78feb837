//! Keeper process above the satellite. The servers are its children, so they do not depend on the process of the
//! satellite; it also adopts the orphans of servers. After the satellite has ended for whatever reason, it kills all of
//! them, waits until none is left, and exits with the satellite's code. It has a single thread.
//!
//! ```text
//!  shell ──► keeper ─┬─► satellite
//!               ▲    ├─► spawn helper              forks the servers as children of the keeper
//!               │    └─► servers ──► their children
//!               └────────── orphans ◀──┘
//! ```
//!
//! The keeper forks the spawn helper (see `process/spawn_helper.rs`) and then the satellite, which inherits the stream to
//! the helper. If the helper ends, the satellite requests another one.
//!
//! The satellite supervises the servers and sends them signals; only the keeper can wait for them. It reports the end of
//! each leader and reaps it when the satellite has found its process tree empty; see `runs.rs`. If the keeper is killed,
//! the kernel kills all leaders.
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

mod children;
mod link;
mod messages;
mod rules;
pub(crate) mod run_client;
mod runs;

use std::ffi::CStr;
use std::io::Write;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{io, thread};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl::{set_child_subreaper, set_dumpable, set_name};
use nix::sys::signal::{SigHandler, SigSet, Signal, kill, signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::{ForkResult, Pid, fork};
use rustix::io::Errno;
use rustix::process::{WaitOptions, wait};
use tokio::sync::mpsc;

use self::children::{KeeperChildren, SIGNAL_BASE, is_named, own_children};
pub use self::link::{KeeperClient, KeeperLink};
use self::messages::{KeeperEvent, KeeperSocket, SatelliteMessage};
use self::rules::{KeeperEffect, KeeperRules, SatellitePhase};
use self::run_client::RunClient;
use crate::process::{LeftoverCgroups, ProcessStat, SPAWN_HELPER_NAME, signals, use_spawn_helper};
use crate::program_pages::ProgramPages;
use crate::service_manager::{self, NotificationRelay};

/// Time to wait for killed processes. Those still alive after it are reported and left to the kernel.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(2);
/// Time within which a second signal of the same process belongs to the same request to end.
const REPEATED: Duration = Duration::from_millis(5);
/// Exit code after SIGKILL.
const KILLED: u8 = SIGNAL_BASE + 9;
/// Process name, shown to people and checked by the next satellite on the same data directory.
const NAME: &CStr = c"satellite-keeper";

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
    // Before the first fork: a kernel before 4.11 finds the subreaper only for processes forked later. Children do not
    // inherit the setting. Without it orphans go to the process above the keeper.
    let _ = set_child_subreaper(true);
    let mut children = KeeperChildren::new()?;
    let helper = children.fork_helper();
    #[expect(unsafe_code, reason = "there is no safe fork")]
    // SAFETY: this process has one thread, so the child may call any function.
    match unsafe { fork() }? {
        ForkResult::Child => {
            drop((socket, signals, relay));
            match helper {
                Ok(helper) => use_spawn_helper(helper),
                Err(error) => {
                    // No log is open yet. The satellite requests another one when it starts a server.
                    let _ = writeln!(io::stderr(), "satellite: cannot start the process that forks servers: {error}");
                }
            }
            before.thread_set_mask()?;
            let (sender, signals) = mpsc::unbounded_channel();
            let below = Arc::new(below);
            // If the keeper was killed before this, the closed socket reports it.
            let runs = RunClient::start(Arc::clone(&below), children.identity())?;
            runs.install();
            let client = KeeperClient(below);
            let keeper = client.clone();
            let receive = move || client.receive_messages(&sender, &runs);
            thread::Builder::new().name("satellite-below".into()).spawn(receive)?;
            let code = satellite(KeeperLink { signals, service_manager, keeper: keeper.clone() });
            keeper.report_done(code);
            Ok(ExitCode::from(code))
        }
        ForkResult::Parent { child } => {
            // The satellite alone keeps the stream of the helper, which ends with it.
            drop((below, service_manager, helper));
            let _ = set_name(NAME);
            children.set_satellite(child);
            Ok(supervise_satellite(child, children, socket, &signals, relay.as_ref()))
        }
    }
}

pub fn is_orphan(pid: u32) -> bool {
    let parent = ProcessStat::read(pid).map(|stat| Pid::from_raw(stat.parent.cast_signed()));
    parent.and_then(|parent| is_named(parent, NAME)).is_some_and(|is_keeper| !is_keeper)
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
    mut children: KeeperChildren,
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
        children.expire(Instant::now());
        if let Some(socket) = &socket {
            children.send(socket);
        }
        let timeout =
            rules.deadline().into_iter().chain(children.deadline()).min().map_or(PollTimeout::NONE, |until| {
                let remaining = until.saturating_duration_since(Instant::now()) + PAUSE;
                PollTimeout::try_from(remaining).unwrap_or(PollTimeout::MAX)
            });
        let mut awaited = vec![PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
        awaited.extend(relay.map(|relay| PollFd::new(relay.descriptor().as_fd(), PollFlags::POLLIN)));
        let is_full = children.has_messages();
        let of_socket = if is_full { PollFlags::POLLIN | PollFlags::POLLOUT } else { PollFlags::POLLIN };
        awaited.extend(socket.as_ref().map(|socket| PollFd::new(socket.as_fd(), of_socket)));
        let _ = pages.as_ref().map(ProgramPages::release);
        // An error means that the poll was interrupted; all descriptors are read anyway.
        let _ = poll(&mut awaited, timeout);
        if let Some(relay) = relay {
            relay.relay();
        }
        if socket.as_ref().is_some_and(|socket| !receive_requests(socket, &mut rules, &mut children)) {
            socket = None;
        }
        while let Ok(Some(about)) = signals.read_signal() {
            match i32::try_from(about.ssi_signo).ok().and_then(|signal| Signal::try_from(signal).ok()) {
                Some(Signal::SIGCHLD) => {
                    if let Some(code) = children.collect() {
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
    let ended = end_orphans(&LeftoverCgroups::of_keeper(), stuck);
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
fn receive_requests(socket: &KeeperSocket, rules: &mut KeeperRules, children: &mut KeeperChildren) -> bool {
    loop {
        match socket.try_receive() {
            Ok(Some((SatelliteMessage::Lifecycle(request), _))) => rules.receive(Instant::now(), &request),
            Ok(Some((SatelliteMessage::Run(request), _))) => children.receive(&request),
            Ok(None) => return false,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
            // A message that the keeper does not understand changes nothing.
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {}
            Err(_) => return false,
        }
    }
}

/// Kills all children and adopted processes until none is left and returns their number. Each one is an unreaped child of the
/// keeper, so its process id is not reused. A satellite that is `stuck` in the kernel is not waited for.
fn end_orphans(cgroups: &LeftoverCgroups, stuck: Option<Pid>) -> usize {
    let until = Instant::now() + PATIENCE;
    let (mut ended, mut helper) = (0, None);
    loop {
        // Killing the whole cgroup at once catches a process that forks faster than it can be found.
        let cgroups_are_empty = cgroups.kill_and_remove();
        for child in own_children() {
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
        let childless = childless || own_children().iter().all(|child| Some(*child) == stuck);
        if childless && cgroups_are_empty {
            return ended;
        }
        if Instant::now() >= until {
            let remaining: Vec<String> = own_children().iter().map(Pid::to_string).collect();
            let _ = writeln!(io::stderr(), "satellite: cannot end these processes: {}", remaining.join(", "));
            return ended;
        }
        thread::sleep(PAUSE);
    }
}
