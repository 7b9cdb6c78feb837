//! The mechanisms that contain the processes of a server. Each test runs with every mechanism that works here.

use std::ffi::OsString;
use std::fmt;
use std::io::Write;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use testkit::home::Home;

use crate::SATELLITE;

/// The number of cases of one test that run at once: they mostly wait.
const AT_ONCE_MAX: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sandbox {
    None,
    Nsjail,
    Bubblewrap,
}

impl Sandbox {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Nsjail => "nsjail",
            Self::Bubblewrap => "bubblewrap",
        }
    }

    /// Returns the number of processes that the sandbox itself adds to a server.
    pub(crate) fn processes(self) -> usize {
        match self {
            Self::None => 0,
            Self::Nsjail => 1,
            Self::Bubblewrap => 2,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mechanism {
    pub(crate) sandbox: Sandbox,
    pub(crate) cgroups: bool,
}

impl Mechanism {
    /// Returns the name in `status`.
    pub(crate) fn held_by(self) -> &'static str {
        match self {
            Self { cgroups: true, .. } => "cgroup",
            Self { sandbox: Sandbox::None, .. } => "group",
            Self { .. } => "pid_namespace",
        }
    }
}

impl fmt::Display for Mechanism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sandbox {}, cgroups {}", self.sandbox.name(), if self.cgroups { "used" } else { "off" })
    }
}

/// Returns `PATH`, followed by the directory of `.ci/install-sandboxes`.
pub(crate) fn path() -> OsString {
    let installed = std::env::var_os("MCP_SANDBOX_DIR")
        .map_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/target/sandboxes")), PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::join_paths(std::env::split_paths(&path).chain([installed.join("bin")])).unwrap()
}

/// The mechanisms that work here, according to `satellite check`, which tries each of them.
static WORKING: LazyLock<Vec<Mechanism>> = LazyLock::new(|| {
    let mut home = Home::new(SATELLITE);
    home.env.push(("PATH".into(), path().into_string().unwrap()));
    let config = home.write("satellite.toml", "");
    let output = home.bare(&["check", "--config", config.to_str().unwrap()]).exits(0).stdout;
    let skipped = |what: &str| {
        // Not by `eprintln`: the test harness hides its output if the test passes.
        let text = format!("\n!!! SKIPPED, tests of left-behind processes with {what}:\n{output}\n");
        let _ = std::io::stderr().write_all(text.as_bytes());
    };
    let has_cgroups = output.contains("held by a cgroup for each run");
    if !has_cgroups {
        skipped("cgroups");
    }
    let works = |sandbox: &Sandbox| *sandbox == Sandbox::None || output.contains(&format!("{}: works", sandbox.name()));
    let sandboxes = [Sandbox::None, Sandbox::Nsjail, Sandbox::Bubblewrap].into_iter().filter(works);
    let cgroups = [true, false].into_iter().filter(|cgroups| !cgroups || has_cgroups);
    sandboxes.flat_map(|sandbox| cgroups.clone().map(move |cgroups| Mechanism { sandbox, cgroups })).collect()
});

#[test]
#[cfg_attr(no_sandboxes, ignore = "needs nsjail and bubblewrap; install them with .ci/install-sandboxes")]
fn both_sandboxes_work_on_this_machine() {
    for sandbox in [Sandbox::Nsjail, Sandbox::Bubblewrap] {
        assert!(WORKING.iter().any(|mechanism| mechanism.sandbox == sandbox), "{} does not work", sandbox.name());
    }
}

/// Runs `case` with every mechanism that works here, `LEFT_BEHIND_RUNS` times.
#[track_caller]
pub(crate) fn for_each_mechanism(case: impl Fn(Mechanism) + Sync) {
    run(case, std::env::var("LEFT_BEHIND_RUNS").map_or(1, |runs| runs.parse().unwrap()), AT_ONCE_MAX);
}

/// Runs a heavy `case` with every mechanism that works here once, one after the other.
#[track_caller]
pub(crate) fn for_each_mechanism_once(case: impl Fn(Mechanism) + Sync) {
    run(case, 1, 1);
}

#[track_caller]
fn run(case: impl Fn(Mechanism) + Sync, runs: usize, at_once: usize) {
    let all = WORKING.len() * runs;
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(number) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|number| *number < all) {
            let mechanism = WORKING[number % WORKING.len()];
            let name = format!("{mechanism}, run {}", number / WORKING.len() + 1);
            // On its own thread: a panic message contains the thread's name, and so the case.
            let ended = thread::scope(|scope| {
                thread::Builder::new().name(name).spawn_scoped(scope, || case(mechanism)).unwrap().join()
            });
            if let Err(panic) = ended {
                next.store(all, Ordering::Relaxed);
                resume_unwind(panic);
            }
        }
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..at_once).map(|_| scope.spawn(work)).collect();
        let ends: Vec<_> = workers.into_iter().map(thread::ScopedJoinHandle::join).collect();
        if let Some(panic) = ends.into_iter().find_map(Result::err) {
            resume_unwind(panic);
        }
    });
}
