//! A satellite with five servers, each of which tries to leave a process behind in its own way.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde_json::Value;
use testkit::home::{Home, MARK, Outcome, Running, json_lines};
use testkit::process::{send, wait_stopped};
use testkit::wait::wait_for;

use super::mechanism::{Mechanism, Sandbox, path};
use super::process::{ProcessInfo, alive};
use crate::SATELLITE;

/// A grace that ends soon.
pub(crate) const SHORT: &str = "300ms";
/// A grace that no test waits for.
pub(crate) const LONG: &str = "1h";

/// The servers with their flags: a wrapper, as package runners are, around a server that ignores SIGTERM and the end of
/// its input; and servers whose processes leave their parent, group or session.
pub(crate) const SERVERS: [(&str, &[&str]); 5] = [
    ("wrapped", STUBBORN),
    ("forking", &["--grandchild", "double-fork"]),
    ("leaving", &["--grandchild", "setsid"]),
    ("daemon", &["--grandchild", "daemon", "--ignore-sigterm", "--ignore-eof"]),
    (HIDDEN, &[]),
];
/// Setting of every configuration: the end of the satellite is the end of its keeper.
pub(crate) const NOT_RESTARTED: &str = "keep_servers = false\n";
/// A server that starts a process with its own session, an empty environment and no parent.
const HIDDEN: &str = "hidden";
const HIDE: &str = "env -i setsid /bin/sh -c 'trap \"\" TERM; tail -f /dev/null \"$0\" </dev/null >/dev/null 2>&1 &' \
                    \"$0\"; exec \"$@\"";
const WRAPPED: &str = "wrapped";
/// The flags of a server that ends only by SIGKILL.
pub(crate) const STUBBORN: &[&str] = &["--ignore-sigterm", "--ignore-eof"];

pub(crate) struct Fixture {
    pub(crate) home: Home,
    pub(crate) mechanism: Mechanism,
}

impl Fixture {
    pub(crate) fn new(mechanism: Mechanism) -> Self {
        let mut home = Home::new(SATELLITE);
        home.env.push(("PATH".into(), path().into_string().unwrap()));
        Self { home, mechanism }
    }

    /// Starts a satellite with all five servers and waits until they and their processes run.
    #[track_caller]
    pub(crate) fn start(&self, grace: &str) -> RunningSatellite<'_> {
        let servers: String = SERVERS.iter().map(|(slug, flags)| self.server(slug, flags)).collect();
        let running = self.run(&self.config("five.toml", grace, &servers));
        self.home.wait_all_online();
        // Each server has one more process, and those of its sandbox.
        let there = SERVERS.len() * (2 + self.mechanism.sandbox.processes());
        let members = || Some(running.members()).filter(|members| members.len() == there);
        wait_for(&format!("{there} processes"), members, || format!("{:#?}", running.members()));
        for row in self.home.rows() {
            let expected = (self.mechanism.held_by().into(), self.mechanism.sandbox.name().into());
            assert_eq!((&row["held_by"], &row["isolation"]), (&expected.0, &expected.1), "{row:#}");
        }
        running
    }

    /// Returns the configuration of a simulated server.
    pub(crate) fn server(&self, slug: &str, flags: &[&str]) -> String {
        let mark = self.home.mark();
        // The file need not exist: its name is an argument by which the process is found.
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

    /// Starts a satellite without servers on the same data directory.
    #[track_caller]
    pub(crate) fn start_without_servers(&self) -> RunningSatellite<'_> {
        self.run(&self.config("none.toml", SHORT, ""))
    }

    pub(crate) fn config(&self, name: &str, grace: &str, servers: &str) -> PathBuf {
        let Mechanism { sandbox, cgroups } = self.mechanism;
        let cgroups = if cgroups { "required" } else { "off" };
        let mut text = format!(
            "[satellite]\nisolation = \"{}\"\ncgroups = \"{cgroups}\"\n{NOT_RESTARTED}\n[policy.session]\nterminate_grace = \"{grace}\"\n\n\
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

    /// Starts a satellite in its own process group, without waiting for anything.
    pub(crate) fn launch(&self, config: &Path) -> Running {
        let data_dir = self.home.data_dir().to_str().unwrap();
        let mut command = self.home.command(&["run", "--config", config.to_str().unwrap(), "--data-dir", data_dir]);
        command.process_group(0);
        self.home.start(command)
    }

    /// Starts a satellite and waits until its servers are installed.
    #[track_caller]
    pub(crate) fn run(&self, config: &Path) -> RunningSatellite<'_> {
        let process = self.launch(config);
        process.wait_stdout(|text| text.contains("satellite is running"));
        let (satellite, cgroup) = self.satellite_below(process.pid());
        RunningSatellite { fixture: self, process, satellite, cgroup }
    }

    /// Returns the satellite that has locked the data directory, and its cgroup.
    #[track_caller]
    fn satellite_below(&self, keeper: i32) -> (ProcessInfo, Option<PathBuf>) {
        let satellite = fs::read_to_string(self.home.data_dir().join("lock")).unwrap().parse().unwrap();
        let satellite = ProcessInfo::read(satellite).unwrap();
        assert_eq!(satellite.parent, keeper, "the keeper is not the parent of the satellite");
        let cgroup = self.ledger()[0]["satellite"]["cgroup"].as_str().map(PathBuf::from);
        assert_eq!(cgroup.is_some(), self.mechanism.cgroups);
        (satellite, cgroup)
    }

    /// Returns the lines of the ledger.
    pub(crate) fn ledger(&self) -> Vec<Value> {
        json_lines(&fs::read_to_string(self.home.data_dir().join("ledger")).unwrap())
    }
}

/// Ends the processes that a failed test has left.
impl Drop for Fixture {
    fn drop(&mut self) {
        for pid in self.home.traces() {
            send(pid, Signal::SIGKILL);
        }
    }
}

/// A running satellite. Dropping it ends the satellite.
pub(crate) struct RunningSatellite<'a> {
    fixture: &'a Fixture,
    pub(crate) process: Running,
    pub(crate) satellite: ProcessInfo,
    cgroup: Option<PathBuf>,
}

impl RunningSatellite<'_> {
    pub(crate) fn keeper(&self) -> i32 {
        self.process.pid()
    }

    /// Returns the spawn helper while it runs.
    pub(crate) fn helper(&self) -> Option<ProcessInfo> {
        let name = |process: &ProcessInfo| fs::read_to_string(format!("/proc/{}/comm", process.pid));
        let traces = self.fixture.home.traces().into_iter().filter_map(ProcessInfo::read);
        let mut own = traces.filter(|process| process.parent == self.keeper());
        own.find(|process| name(process).is_ok_and(|name| name == "satellite-spawn\n"))
    }

    /// Returns all processes except satellite, keeper and spawn helper: the servers, their processes and their
    /// sandboxes.
    pub(crate) fn members(&self) -> Vec<ProcessInfo> {
        let own = [self.keeper(), self.satellite.pid, self.helper().map_or(0, |helper| helper.pid)];
        let traces = self.fixture.home.traces().into_iter().filter(|pid| !own.contains(pid));
        traces.filter_map(ProcessInfo::read).collect()
    }

    /// Sends a signal to keeper and satellite at once, as a terminal and systemd do.
    pub(crate) fn signal_group(&mut self, signal: Signal) {
        // The process is not reaped yet, so the pid is still its own.
        if self.process.is_running() {
            killpg(Pid::from_raw(self.keeper()), signal).unwrap();
        }
    }

    /// Waits for the end of the keeper and asserts that no process is left then.
    #[track_caller]
    pub(crate) fn ended(self) -> Outcome {
        let Self { fixture, process, .. } = self;
        let outcome = process.finish();
        let left: Vec<ProcessInfo> = fixture.home.traces().into_iter().filter_map(ProcessInfo::read).collect();
        assert!(left.is_empty(), "left behind: {left:#?}\n{outcome:#?}");
        outcome
    }

    /// Waits for a clean end and asserts that no process and no cgroup is left.
    #[track_caller]
    pub(crate) fn ended_cleanly(self) -> Outcome {
        let cgroup = self.cgroup.clone();
        let outcome = self.ended();
        assert!(cgroup.as_ref().is_none_or(|cgroup| !cgroup.exists()), "the cgroup is left: {cgroup:?}\n{outcome:#?}");
        outcome
    }

    /// Kills the satellite while the keeper is stopped.
    #[track_caller]
    pub(crate) fn kill_below_stopped_keeper(&mut self) {
        self.process.signal(Signal::SIGSTOP);
        wait_stopped(self.keeper());
        send(self.satellite.pid, Signal::SIGKILL);
        let satellite = &self.satellite;
        wait_for("the satellite to end", || (!satellite.is_alive()).then_some(()), || format!("{satellite:?}"));
    }

    /// Waits until the keeper has started another satellite, with all its servers. `starts` is the number of satellites
    /// that were ready.
    #[track_caller]
    pub(crate) fn wait_restarted(&mut self, starts: usize) {
        self.process.wait_stdout(|text| text.matches("satellite is running").count() == starts);
        let before = self.satellite.clone();
        (self.satellite, self.cgroup) = self.fixture.satellite_below(self.keeper());
        assert_ne!(self.satellite, before);
        self.fixture.home.wait_all_online();
    }

    /// Ends the satellite as a service manager does.
    #[track_caller]
    pub(crate) fn terminate(mut self) -> Outcome {
        self.process.signal(Signal::SIGTERM);
        self.ended_cleanly().exits(0)
    }

    /// Kills satellite and keeper so that neither can clean up after the other. Returns the processes that are left.
    #[track_caller]
    pub(crate) fn kill_both(mut self) -> KilledSatellite {
        let members = self.members();
        // The satellite is not stopped: the kernel continues a stopped process when the keeper above it ends.
        self.kill_below_stopped_keeper();
        let Self { fixture, mut process, cgroup, .. } = self;
        process.signal(Signal::SIGKILL);
        assert_eq!(process.finish().signal, Some(9));
        // Zombies do not count. The kernel has sent the leaders, which die with the keeper, their signal.
        let left = || fixture.home.traces().into_iter().filter_map(ProcessInfo::read).collect::<Vec<_>>();
        KilledSatellite { members, left: left(), cgroup }
    }
}

/// A satellite that was killed together with its keeper.
pub(crate) struct KilledSatellite {
    pub(crate) members: Vec<ProcessInfo>,
    pub(crate) left: Vec<ProcessInfo>,
    pub(crate) cgroup: Option<PathBuf>,
}

impl KilledSatellite {
    /// Asserts that the next satellite on the data directory has ended all processes and removed the cgroup.
    #[track_caller]
    pub(crate) fn is_reclaimed(&self) {
        assert!(alive(&self.members).is_empty(), "left behind: {:#?}", alive(&self.members));
        assert!(self.cgroup.as_ref().is_none_or(|cgroup| !cgroup.exists()), "the cgroup is left: {:?}", self.cgroup);
    }
}
