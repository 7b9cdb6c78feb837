//! Attempts to see, signal or inspect other processes, and to start too many.

use std::fs::File;
use std::io::Read;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::ptrace as tracing;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, getppid, pipe2};

use crate::arguments::AttemptArguments;
use crate::outcome::{AttemptOutcome, AttemptSteps, end_child, fork as fork_child, in_child};
use crate::procfs;

const FORKS_MAX: usize = 10_000;

/// Returns true if the process has this start time. Process ids repeat in other namespaces.
fn is_meant(pid: Pid, start_time: Option<u64>) -> bool {
    match (start_time, procfs::process(pid.as_raw())) {
        (Some(start_time), Some(process)) => process.start_time == start_time,
        _ => true,
    }
}

pub(crate) fn see_processes(arguments: &AttemptArguments) -> Result<AttemptOutcome, String> {
    let mut steps = AttemptSteps::default();
    if let Some(pid) = arguments.pid()? {
        let meant = is_meant(pid, arguments.optional_number("start_time")?);
        let seen = procfs::process(pid.as_raw());
        let name = seen.as_ref().map_or("nothing", |process| &process.name);
        steps.record(format!("/proc/{pid}"), meant && seen.is_some(), name);
        // `EPERM` also shows that the process exists.
        let signal = kill(pid, None);
        steps.record(format!("kill({pid}, 0)"), meant && signal != Err(Errno::ESRCH), format!("{signal:?}"));
    } else {
        let strangers = procfs::strangers();
        let names: Vec<String> = strangers.iter().take(20).map(|one| format!("{} {}", one.pid, one.name)).collect();
        let seen = format!("{} of no relation: {}", strangers.len(), names.join(", "));
        steps.record("/proc", !strangers.is_empty(), seen);
    }
    // The /proc of an outer namespace lists one process id for each level.
    let numbers = procfs::status("self", "NSpid").unwrap_or_default();
    steps.record("/proc is of a namespace above", numbers.contains(' '), format!("NSpid {numbers}"));
    Ok(steps.into())
}

pub(crate) fn signal(arguments: &AttemptArguments) -> Result<AttemptOutcome, String> {
    let mut steps = AttemptSteps::default();
    if let Some(pid) = arguments.pid()? {
        if !is_meant(pid, arguments.optional_number("start_time")?) {
            return Ok(AttemptOutcome::new(false, format!("{pid} is another process here")));
        }
        steps.done(format!("kill({pid}, 0)"), kill(pid, None));
        // A stopped process is not continued.
        let stopped = procfs::process(pid.as_raw()).is_some_and(|process| process.state.eq_ignore_ascii_case("t"));
        if !stopped {
            steps.done(format!("kill({pid}, SIGCONT)"), kill(pid, Signal::SIGCONT));
        }
    } else {
        // Succeeds if the namespace contains any process besides its first and this one.
        steps.done("kill(-1, 0)", kill(Pid::from_raw(-1), None));
        let parent = getppid();
        if parent.as_raw() > 0 {
            steps.done(format!("kill({parent}, 0), the parent"), kill(parent, None));
        }
    }
    Ok(steps.into())
}

/// Attaches to one named process only: without a sandbox, this program could attach to any.
pub(crate) fn ptrace(arguments: &AttemptArguments) -> Result<AttemptOutcome, String> {
    let pid = arguments.pid()?.ok_or("`pid` is missing")?;
    if pid == Pid::this() {
        return Err("that is this process".to_owned());
    }
    if !is_meant(pid, arguments.optional_number("start_time")?) {
        return Ok(AttemptOutcome::new(false, format!("{pid} is another process here")));
    }
    let outcome = in_child(|steps| {
        // Seizing does not stop the process, and the end of this child detaches.
        steps.done(format!("seize {pid}"), tracing::seize(pid, tracing::Options::empty()));
        steps.done(format!("open /proc/{pid}/mem"), File::open(format!("/proc/{pid}/mem")));
    });
    Ok(outcome.into())
}

pub(crate) fn fork(arguments: &AttemptArguments) -> Result<AttemptOutcome, String> {
    let count = arguments.at_most("count", FORKS_MAX)?;
    let limit = arguments.optional_number("limit")?;
    let (wait, go) = pipe2(OFlag::O_CLOEXEC).map_err(|error| error.to_string())?;
    let mut wait = File::from(wait);
    let mut children = Vec::new();
    let mut stopped = None;
    while children.len() < count && stopped.is_none() {
        match fork_child() {
            Ok(ForkResult::Child) => {
                drop(go);
                let _ = wait.read(&mut [0]);
                end_child()
            }
            Ok(ForkResult::Parent { child }) => children.push(child),
            Err(error) => stopped = Some(error),
        }
    }
    drop(go);
    for child in &children {
        // The child is not reaped yet, so its id is not reused.
        let _ = kill(*child, Signal::SIGKILL);
        let _ = waitpid(*child, None);
    }
    let escaped = limit.map_or(children.len() == count, |limit| children.len() as u64 > limit);
    let why = stopped.map_or_else(String::new, |error| format!(", then {error:?}"));
    Ok(AttemptOutcome::new(escaped, format!("{} children{why}", children.len())))
}
