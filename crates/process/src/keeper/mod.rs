//! Keeper process above the satellite. The servers are its children, so they do not depend on the process of the
//! satellite; it also adopts the orphans of servers. After the satellite has ended by itself, it kills all of them, waits
//! until none is left and exits with the satellite's code. After a crash it forks another satellite, the next generation,
//! which adopts the servers. It has a single thread.
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
//! A satellite that crashes or hangs is started again if its settings say so, within the budget of `rules.rs`. The servers
//! run on meanwhile: the keeper holds the ends of their pipes and, in a sealed file for each, what the next satellite must
//! know to continue the session. It reads none of it; the next satellite inherits it by its fork, so that no buffer limits
//! the number of servers. Only servers whose start was in progress are ended.
//!
//! The keeper also holds duplicates of the lock of the data directory, which no other satellite can take, and of the
//! listening sockets: clients that connect wait for the next satellite. A lock and a socket belong to all their duplicates.
//! So the satellite never unlocks its data directory, the keeper does it at the end; and the satellite makes the keeper
//! forget a socket before it stops to serve it, because the system would accept connections that no process serves.
//!
//! The satellite reports its exit code when it is finished. A thread that waits in the kernel for a hanging disk can keep
//! the satellite's process from ending; the keeper then ends without it.

mod children;
mod generations;
pub(crate) mod inherited;
mod link;
mod messages;
mod orphans;
mod rules;
pub(crate) mod run_client;
mod runs;

use std::ffi::CStr;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::{io, thread};

use nix::sys::prctl::{get_name, set_child_subreaper, set_dumpable, set_name};
use nix::sys::signal::{SigHandler, SigSet, Signal, signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::{ForkResult, Pid, fork};
use tokio::sync::mpsc;

use self::children::is_named;
use self::generations::GenerationLoop;
use self::inherited::{InheritedRuns, KeeperIdentity};
pub use self::link::{KeeperClient, KeeperLink, LostSatellite, SatelliteGeneration};
pub use self::messages::DescriptorName;
use self::messages::{KeeperSocket, PIPED_SIGNALS};
use self::run_client::RunClient;
use crate::process::{ForkedHelper, ProcessStat, raise_descriptor_limit, signals, use_spawn_helper};
use crate::service_manager::{self, ServiceManager};

/// Process name, shown to people and checked by the next satellite on the same data directory.
const NAME: &CStr = c"satellite-keeper";

/// Signals that are passed on with `kill`; the others through the socket.
const KILL_FORWARDED_SIGNALS: [Signal; 3] = [Signal::SIGQUIT, Signal::SIGUSR1, Signal::SIGUSR2];

/// Runs `satellite` in a child process and becomes its keeper. `satellite` returns its exit code. Must be called while
/// the process has one thread.
pub fn run_with_keeper(satellite: impl Fn(KeeperLink) -> u8) -> io::Result<ExitCode> {
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
    let mask = waited_for.thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_BLOCK)?;
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
    // It holds three or four descriptors of each server. The satellite and the spawn helper inherit the limit.
    let _ = raise_descriptor_limit();
    let name = get_name()?;
    let mut generations = GenerationLoop::new(signals, relay, service_manager.watchdog)?;
    loop {
        let prepared = generations.open_connection().map(|sockets| (sockets, generations.fork_helper()));
        let forked = prepared.and_then(|prepared| Ok((prepared, fork_process()?)));
        let ended = match forked {
            Ok((((socket, below), helper), ForkResult::Child)) => {
                let identity = generations.identity();
                // The satellite gets duplicates of the other descriptors that the keeper holds by messages.
                let inherited = generations.into_inherited();
                drop(socket);
                // The name of an earlier keeper was inherited.
                let _ = set_name(&name);
                return run_satellite(satellite, (identity, inherited), helper, below, service_manager, &mask);
            }
            Ok((((socket, below), helper), ForkResult::Parent { child })) => {
                // The satellite alone keeps the stream of the helper, which ends with it.
                drop((below, helper));
                let _ = set_name(NAME);
                generations.supervise(child, socket)
            }
            Err(error) => generations.handle_failed_fork(error)?,
        };
        if let Some(code) = ended {
            return Ok(code);
        }
    }
}

fn fork_process() -> io::Result<ForkResult> {
    #[expect(unsafe_code, reason = "there is no safe fork")]
    // SAFETY: this process has one thread, so the child may call any function.
    let forked = unsafe { fork() }?;
    Ok(forked)
}

/// Runs `satellite` in this process, which the keeper has just forked. `mask` contains the signals to block.
fn run_satellite(
    satellite: impl FnOnce(KeeperLink) -> u8,
    (identity, inherited): (KeeperIdentity, InheritedRuns),
    helper: io::Result<ForkedHelper>,
    below: KeeperSocket,
    service_manager: ServiceManager,
    mask: &SigSet,
) -> io::Result<ExitCode> {
    match helper {
        Ok(helper) => use_spawn_helper(helper),
        Err(error) => {
            // No log is open yet. The satellite requests another one when it starts a server.
            let _ = writeln!(io::stderr(), "satellite: cannot start the process that forks servers: {error}");
        }
    }
    mask.thread_set_mask()?;
    // If the keeper was killed before this, the closed socket reports it.
    let below = Arc::new(below);
    let (keeper, generation) = KeeperClient::open(Arc::clone(&below))?;
    let runs = RunClient::start(below, identity, inherited)?;
    runs.install();
    let (sender, signals) = mpsc::unbounded_channel();
    let client = keeper.clone();
    let receive = move || client.receive_messages(&sender, &runs);
    thread::Builder::new().name("satellite-below".into()).spawn(receive)?;
    let code = satellite(KeeperLink { signals, service_manager, keeper: keeper.clone(), generation });
    keeper.report_done(code);
    Ok(ExitCode::from(code))
}

pub fn is_orphan(pid: u32) -> bool {
    let parent = ProcessStat::read(pid).map(|stat| Pid::from_raw(stat.parent.cast_signed()));
    parent.and_then(|parent| is_named(parent, NAME)).is_some_and(|is_keeper| !is_keeper)
}
