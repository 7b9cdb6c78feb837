//! Outcome of an attempt. Most attempts try several ways: each is a step, and one successful step is an escape.

use std::fs::File;
use std::io::{self, Read, Write};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::libc;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, pipe2};
use serde::{Deserialize, Serialize};

pub(crate) struct AttemptOutcome {
    pub(crate) escaped: bool,
    pub(crate) detail: String,
}

impl AttemptOutcome {
    pub(crate) fn new(escaped: bool, detail: impl Into<String>) -> Self {
        Self { escaped, detail: detail.into() }
    }
}

#[derive(Serialize, Deserialize)]
struct AttemptStep {
    what: String,
    result: Result<String, String>,
}

#[derive(Default, Serialize, Deserialize)]
pub(crate) struct AttemptSteps(Vec<AttemptStep>);

impl AttemptSteps {
    pub(crate) fn done<T>(&mut self, what: impl Into<String>, result: Result<T, impl Into<io::Error>>) {
        self.saw(what, result.map(|_| "done".to_owned()));
    }

    pub(crate) fn saw(&mut self, what: impl Into<String>, result: Result<String, impl Into<io::Error>>) {
        self.0.push(AttemptStep { what: what.into(), result: result.map_err(|error| name(&error.into())) });
    }

    /// Adds a step with an observation for success or failure.
    pub(crate) fn record(&mut self, what: impl Into<String>, escaped: bool, seen: impl Into<String>) {
        let result = if escaped { Ok(seen.into()) } else { Err(seen.into()) };
        self.0.push(AttemptStep { what: what.into(), result });
    }

    pub(crate) fn append(&mut self, mut other: Self) {
        self.0.append(&mut other.0);
    }
}

impl From<AttemptSteps> for AttemptOutcome {
    /// Successful steps come first, because a failed test shows them.
    fn from(steps: AttemptSteps) -> Self {
        let (succeeded, failed): (Vec<AttemptStep>, Vec<AttemptStep>) =
            steps.0.into_iter().partition(|step| step.result.is_ok());
        let escaped = !succeeded.is_empty();
        let all: Vec<String> = succeeded.into_iter().chain(failed).map(|step| step.to_string()).collect();
        Self { escaped, detail: if all.is_empty() { "nothing to try".to_owned() } else { all.join("; ") } }
    }
}

impl std::fmt::Display for AttemptStep {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.result {
            Ok(seen) => write!(formatter, "{}: SUCCEEDED, {seen}", self.what),
            Err(seen) => write!(formatter, "{}: {seen}", self.what),
        }
    }
}

pub(crate) fn name(error: &io::Error) -> String {
    error.raw_os_error().map_or_else(|| error.to_string(), |number| format!("{:?}", Errno::from_raw(number)))
}

/// Runs an attempt in a child, so that its effects end with the child. If a limit prevents the fork, this process runs
/// the attempt itself.
pub(crate) fn in_child(attempt: impl FnOnce(&mut AttemptSteps)) -> AttemptSteps {
    let mut steps = AttemptSteps::default();
    match try_in_child(attempt) {
        Ok(outcome) => steps.append(outcome),
        Err((Errno::EAGAIN, attempt)) => attempt(&mut steps),
        Err((error, _)) => steps.saw("a child that tries", Err(error)),
    }
    steps
}

fn try_in_child<F: FnOnce(&mut AttemptSteps)>(attempt: F) -> Result<AttemptSteps, (Errno, F)> {
    let (from, into) = match pipe2(OFlag::O_CLOEXEC) {
        Ok(pipe) => pipe,
        Err(error) => return Err((error, attempt)),
    };
    match fork() {
        Ok(ForkResult::Child) => {
            drop(from);
            let mut steps = AttemptSteps::default();
            attempt(&mut steps);
            let _ = File::from(into).write_all(&serde_json::to_vec(&steps).unwrap_or_default());
            end_child()
        }
        Ok(ForkResult::Parent { child }) => {
            drop(into);
            let mut output = Vec::new();
            let read = File::from(from).read_to_end(&mut output);
            let status = waitpid(child, None);
            let steps = read.ok().and_then(|_| serde_json::from_slice(&output).ok());
            Ok(steps.unwrap_or_else(|| {
                let mut steps = AttemptSteps::default();
                steps.record("a child that tries", false, format!("{status:?}"));
                steps
            }))
        }
        Err(error) => Err((error, attempt)),
    }
}

/// Forks a child that is killed when this process ends.
pub(crate) fn fork() -> nix::Result<ForkResult> {
    #[expect(unsafe_code, reason = "fork is how a child comes to be")]
    // SAFETY: this process has one thread, so the child may call any function.
    let forked = unsafe { nix::unistd::fork() }?;
    if matches!(forked, ForkResult::Child) {
        let _ = set_pdeathsig(Signal::SIGKILL);
    }
    Ok(forked)
}

/// Ends a forked child without flushing buffers or running exit handlers that it shares with its parent.
pub(crate) fn end_child() -> ! {
    #[expect(unsafe_code, reason = "there is no safe way to leave out the handlers of exit")]
    // SAFETY: the call does not return and runs no handlers.
    unsafe {
        libc::_exit(0)
    }
}
