//! A satellite with five servers, each of which leaves something behind in its own way.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde_json::Value;

use super::mechanism::{Mechanism, Sandbox, path};
use super::process::{Seen, alive};
use super::support::{Home, MARK, Outcome, Running, SATELLITE, json_lines, send, wait_for};

/// A grace that is soon over.
pub(crate) const SHORT: &str = "300ms";
/// One that no test waits out.
pub(crate) const LONG: &str = "1h";

/// By slug, what each server is told: a wrapper around one that ignores SIGTERM and the end of its input, as a package
/// runner is; and those whose processes do not stay where they were forked.
pub(crate) const SERVERS: [(&str, &[&str]); 5] = [
    ("wrapped", STUBBORN),
    ("forking", &["--grandchild", "double-fork"]),
    ("leaving", &["--grandchild", "setsid"]),
    ("daemon", &["--grandchild", "daemon", "--ignore-sigterm", "--ignore-eof"]),
    (HIDDEN, &[]),
];
/// A server that starts a process with a session of its own, an empty environment and no parent.
const HIDDEN: &str = "hidden";
const HIDE: &str = "env -i setsid /bin/sh -c 'trap \"\" TERM; tail -f /dev/null \"$0\" </dev/null >/dev/null 2>&1 &' \
                    \"$0\"; exec \"$@\"";
const WRAPPED: &str = "wrapped";
/// What ignores whatever is polite.
pub(crate) const STUBBORN: &[&str] = &["--ignore-sigterm", "--ignore-eof"];

pub(crate) struct Scene {
    pub(crate) home: Home,
    pub(crate) mechanism: Mechanism,
}

impl Scene {
    pub(crate) fn new(mechanism: Mechanism) -> Self {
        let mut home = Home::new();
        home.env.push(("PATH".into(), path().into_string().unwrap()));
        Self { home, mechanism }
    }

    /// The satellite of this scene with all five servers, once they are there with all that they start.
    #[track_caller]
    pub(crate) fn play(&self, grace: &str) -> Playing<'_> {
        let servers: String = SERVERS.iter().map(|(slug, flags)| self.server(slug, flags)).collect();
        let playing = self.run(&self.config("five.toml", grace, &servers));
        self.home.wait_all_online();
        // A server, and beside it one process of its own; what is around it in a sandbox.
        let there = SERVERS.len() * (2 + self.mechanism.sandbox.processes());
        let members = || Some(playing.members()).filter(|members| members.len() == there);
        wait_for(&format!("{there} processes"), members, || format!("{:#?}", playing.members()));
        for row in self.home.rows() {
            let expected = (self.mechanism.held_by().into(), self.mechanism.sandbox.name().into());
            assert_eq!((&row["held_by"], &row["isolation"]), (&expected.0, &expected.1), "{row:#}");
        }
        playing
    }

    /// A simulated server, to be written into a configuration.
    pub(crate) fn server(&self, slug: &str, flags: &[&str]) -> String {
        let mark = self.home.mark();
        // The name of a file that need not exist: an argument by which the process is found.
        let trace = self.home.path().join("hidden");
        let wrapper = match slug {
            WRAPPED => &["/bin/sh", "-c", "\"$@\"; exit $?", "sh"][..],
            HIDDEN => &["/bin/sh", "-c", HIDE, trace.to_str().unwrap()],
            _ => &[],
        };
        let line = [wrapper, &[SATELLITE, "sim-server", "--name", mark], flags].concat();
        format!(
            "[[teams.installations]]\nid = \"{slug}\"\nserver = \"{slug}\"\ncommand = {:?}\nargs = {:?}\n\
             env = {{ {MARK} = \"{mark}\" }}\n",
            line[0],
            &line[1..]
        )
    }

    /// The next satellite of this scene, without a server.
    #[track_caller]
    pub(crate) fn play_on(&self) -> Playing<'_> {
        self.run(&self.config("none.toml", SHORT, ""))
    }

    pub(crate) fn config(&self, name: &str, grace: &str, servers: &str) -> PathBuf {
        let Mechanism { sandbox, cgroups } = self.mechanism;
        let cgroups = if cgroups { "required" } else { "off" };
        let mut text = format!(
            "[satellite]\nisolation = \"{}\"\ncgroups = \"{cgroups}\"\n\n[policy.session]\nterminate_grace = \"{grace}\"\n\n\
             [policy.restart]\ndelays = [\"0s\"]\n",
            sandbox.name()
        );
        if sandbox != Sandbox::None {
            text.push_str("\n[policy.isolation]\n");
            writeln!(text, "binds = [\"{SATELLITE}\"]").unwrap();
        }
        text +=
            "\n[[teams]]\nid = \"team_acme\"\nslug = \"acme\"\nusers = [{ id = \"user_alice\", slug = \"alice\" }]\n";
        let file = self.home.path().join(name);
        fs::write(&file, text + servers).unwrap();
        file
    }

    /// Starts a satellite in a process group of its own, and waits until its servers are installed.
    #[track_caller]
    pub(crate) fn run(&self, config: &Path) -> Playing<'_> {
        let data_dir = self.home.data_dir().to_str().unwrap();
        let mut command = self.home.command(&["run", "--config", config.to_str().unwrap(), "--data-dir", data_dir]);
        command.process_group(0);
        let process = self.home.start(command);
        process.wait_stdout(|text| text.contains("satellite is running"));
        let satellite = fs::read_to_string(self.home.data_dir().join("lock")).unwrap().parse().unwrap();
        let satellite = Seen::now(satellite).unwrap();
        assert_eq!(satellite.parent, process.pid(), "the reaper is above the satellite");
        let cgroup = self.ledger()[0]["satellite"]["cgroup"].as_str().map(PathBuf::from);
        assert_eq!(cgroup.is_some(), self.mechanism.cgroups);
        Playing { scene: self, process, satellite, cgroup }
    }

    /// What is written down about the processes that run.
    pub(crate) fn ledger(&self) -> Vec<Value> {
        json_lines(&fs::read_to_string(self.home.data_dir().join("ledger")).unwrap())
    }
}

/// What a test that failed has left goes with it.
impl Drop for Scene {
    fn drop(&mut self) {
        for pid in self.home.traces() {
            send(pid, Signal::SIGKILL);
        }
    }
}

/// A satellite that runs; dropped, it is ended without a word.
pub(crate) struct Playing<'a> {
    scene: &'a Scene,
    pub(crate) process: Running,
    pub(crate) satellite: Seen,
    cgroup: Option<PathBuf>,
}

impl Playing<'_> {
    pub(crate) fn reaper(&self) -> i32 {
        self.process.pid()
    }

    /// All that the servers have started, and what is around them.
    pub(crate) fn members(&self) -> Vec<Seen> {
        let own = [self.reaper(), self.satellite.pid];
        let traces = self.scene.home.traces().into_iter().filter(|pid| !own.contains(pid));
        traces.filter_map(Seen::now).collect()
    }

    /// SIGTERM to reaper and satellite at once, as a terminal and systemd do it.
    pub(crate) fn signal_group(&mut self, signal: Signal) {
        // Not reaped yet, so the number is its own.
        if self.process.is_running() {
            killpg(Pid::from_raw(self.reaper()), signal).unwrap();
        }
    }

    /// Waits for the end of the reaper. Nothing may be there any more: that is what the reaper's end means.
    #[track_caller]
    pub(crate) fn ended(self) -> Outcome {
        let Self { scene, process, .. } = self;
        let outcome = process.finish();
        let left: Vec<Seen> = scene.home.traces().into_iter().filter_map(Seen::now).collect();
        assert!(left.is_empty(), "left behind: {left:#?}\n{outcome:#?}");
        outcome
    }

    /// The same after a clean end: no cgroup is left, either.
    #[track_caller]
    pub(crate) fn ended_cleanly(self) -> Outcome {
        let cgroup = self.cgroup.clone();
        let outcome = self.ended();
        assert!(cgroup.as_ref().is_none_or(|cgroup| !cgroup.exists()), "the cgroup is left: {cgroup:?}\n{outcome:#?}");
        outcome
    }

    /// Ends it as a service manager would.
    #[track_caller]
    pub(crate) fn terminate(mut self) -> Outcome {
        self.process.signal(Signal::SIGTERM);
        self.ended_cleanly().exits(0)
    }

    /// Kills satellite and reaper so that neither can do anything about the other's end. What they left, as of then.
    #[track_caller]
    pub(crate) fn kill_both(self) -> Killed {
        let members = self.members();
        let Self { scene, mut process, satellite, cgroup } = self;
        // Not the satellite: the kernel lets a stopped one go on when the reaper above it ends.
        process.signal(Signal::SIGSTOP);
        let stat = format!("/proc/{}/stat", process.pid());
        let stopped = || fs::read_to_string(&stat).unwrap().contains(") T ").then_some(());
        wait_for("the reaper to stop", stopped, || fs::read_to_string(&stat).unwrap());
        send(satellite.pid, Signal::SIGKILL);
        wait_for("the satellite to end", || (!satellite.is_alive()).then_some(()), || format!("{satellite:?}"));
        process.signal(Signal::SIGKILL);
        assert_eq!(process.finish().signal, Some(9));
        // Whoever dies of that dies now: a zombie that nobody reaps yet is none of those.
        let left = || scene.home.traces().into_iter().filter_map(Seen::now).collect::<Vec<_>>();
        Killed { members, left: left(), cgroup }
    }
}

/// A satellite that was killed together with its reaper.
pub(crate) struct Killed {
    pub(crate) members: Vec<Seen>,
    pub(crate) left: Vec<Seen>,
    pub(crate) cgroup: Option<PathBuf>,
}

impl Killed {
    /// Asserts that the next satellite on its data directory has cleared away what it left.
    #[track_caller]
    pub(crate) fn is_reclaimed(&self) {
        assert!(alive(&self.members).is_empty(), "left behind: {:#?}", alive(&self.members));
        assert!(self.cgroup.as_ref().is_none_or(|cgroup| !cgroup.exists()), "the cgroup is left: {:?}", self.cgroup);
    }
}
