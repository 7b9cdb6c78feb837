//! What holds the trees of servers together, and the tests run with each that works here.

use std::ffi::OsString;
use std::fmt;
use std::io::Write;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::support::Home;

/// How many cases of one test run at once: they mostly wait.
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

    /// How many processes of its own it puts around a server.
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
    /// As `status` calls it.
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

/// `PATH`, and behind it where `.ci/install-sandboxes` puts what the distribution does not have.
pub(crate) fn path() -> OsString {
    let installed = std::env::var_os("MCP_SANDBOX_DIR")
        .map_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/target/sandboxes")), PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::join_paths(std::env::split_paths(&path).chain([installed.join("bin")])).unwrap()
}

/// What works here: `satellite check` tells, from a trial of each.
static WORKING: LazyLock<Vec<Mechanism>> = LazyLock::new(|| {
    let mut home = Home::new();
    home.env.push(("PATH".into(), path().into_string().unwrap()));
    let config = home.write("satellite.toml", "");
    let said = home.bare(&["check", "--config", config.to_str().unwrap()]).exits(0).stdout;
    let skipped = |what: &str| {
        // Not by `eprintln`: what a passing test prints that way is not shown.
        let text = format!("\n!!! SKIPPED, tests of what is left behind with {what}:\n{said}\n");
        let _ = std::io::stderr().write_all(text.as_bytes());
    };
    let has_cgroups = said.contains("held by a cgroup for each run");
    if !has_cgroups {
        skipped("cgroups");
    }
    let works = |sandbox: &Sandbox| *sandbox == Sandbox::None || said.contains(&format!("{}: works", sandbox.name()));
    let sandboxes = [Sandbox::None, Sandbox::Nsjail, Sandbox::Bubblewrap].into_iter().filter(works);
    let ways = [true, false].into_iter().filter(|cgroups| !cgroups || has_cgroups);
    sandboxes.flat_map(|sandbox| ways.clone().map(move |cgroups| Mechanism { sandbox, cgroups })).collect()
});

#[test]
#[cfg_attr(no_sandboxes, ignore = "needs nsjail and bubblewrap; install them with .ci/install-sandboxes")]
fn both_sandboxes_are_among_the_mechanisms() {
    for sandbox in [Sandbox::Nsjail, Sandbox::Bubblewrap] {
        assert!(WORKING.iter().any(|mechanism| mechanism.sandbox == sandbox), "{} does not work", sandbox.name());
    }
}

/// Runs `case` with every mechanism that works here, as often as it is asked for.
#[track_caller]
pub(crate) fn everywhere(case: impl Fn(Mechanism) + Sync) {
    run(case, std::env::var("LEFT_BEHIND_RUNS").map_or(1, |runs| runs.parse().unwrap()), AT_ONCE_MAX);
}

/// Runs what is too heavy to be repeated with every mechanism that works here, one after the other.
#[track_caller]
pub(crate) fn everywhere_once(case: impl Fn(Mechanism) + Sync) {
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
            // On a thread of its own, so that a panic says by the thread's name which case it was.
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
