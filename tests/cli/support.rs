//! What every test of the command line stands on: a home of its own with a data directory and files, the built binary
//! run in it, and a satellite that leaves no process behind.

use std::fmt::Write;
use std::fs::{self, File};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

#[path = "signals.rs"]
mod signals;

/// The binary under test.
pub(crate) const SATELLITE: &str = env!("CARGO_BIN_EXE_satellite");

/// When a state that was waited for is given up. Far beyond what a loaded machine needs.
pub(crate) const GIVE_UP: Duration = Duration::from_secs(60);

const POLL: Duration = Duration::from_millis(20);

pub(crate) const MARK: &str = "SATELLITE_TEST_MARK";

/// Waits until there is something. `seen` says, when it is given up, what was there instead.
#[track_caller]
pub(crate) fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>, seen: impl FnOnce() -> String) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(started.elapsed() < GIVE_UP, "gave up waiting for {what}; instead there is:\n{}", seen());
        std::thread::sleep(POLL);
    }
}

/// What a finished verb has done.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) code: Option<i32>,
    pub(crate) signal: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Outcome {
    /// Asserts the exit code.
    #[track_caller]
    pub(crate) fn exits(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{self:#?}");
        self
    }

    /// Its stdout as one JSON value.
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:#?}"))
    }

    /// Its stdout as a JSON value a line.
    #[track_caller]
    pub(crate) fn json_lines(&self) -> Vec<Value> {
        json_lines(&self.stdout)
    }
}

/// Each line of `text` that is JSON; anything else is a failure.
#[track_caller]
pub(crate) fn json_lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
}

/// A directory of one test. Its processes are known by a mark in their arguments.
pub(crate) struct Home {
    dir: TempDir,
    mark: String,
    data: PathBuf,
    serial: AtomicU64,
    /// What its processes get in their environment beside our own.
    pub(crate) env: Vec<(String, String)>,
    /// The binary that is run.
    pub(crate) binary: PathBuf,
    /// What every program is started by, such as one that makes it another user's.
    pub(crate) started_by: Vec<String>,
}

impl Home {
    pub(crate) fn new() -> Self {
        static HOMES: AtomicU64 = AtomicU64::new(0);
        let dir = TempDir::with_prefix("satellite-").unwrap();
        let nanoseconds = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos();
        let mark = format!("mark-{}-{}-{nanoseconds:x}", std::process::id(), HOMES.fetch_add(1, Ordering::Relaxed));
        let data = dir.path().join("data");
        let (serial, env, started_by) = (AtomicU64::new(0), Vec::new(), Vec::new());
        Self { dir, mark, data, serial, env, binary: SATELLITE.into(), started_by }
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn data_dir(&self) -> &Path {
        &self.data
    }

    /// Makes the data directory as the satellite would.
    pub(crate) fn make_data_dir(&self) {
        fs::DirBuilder::new().mode(0o700).create(&self.data).unwrap();
    }

    /// Has the verbs use another data directory below the home.
    pub(crate) fn use_data_dir(&mut self, name: &str) {
        self.data = self.path().join(name);
    }

    /// What the simulated servers of this home are called, so that they can be found.
    pub(crate) fn mark(&self) -> &str {
        &self.mark
    }

    /// Writes a file in which a line `SIM "--flag", "value"` stands for a simulated server's command and args, `"SIM"` for
    /// the first of its args, and `SATELLITE` for the binary.
    pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
        let args = format!("\"sim-server\", \"--name\", \"{}\"", self.mark);
        let binary = self.binary.to_str().unwrap();
        let mut whole = String::new();
        for line in text.lines() {
            match line.strip_prefix("SIM") {
                Some(flags) => {
                    let comma = if flags.is_empty() { "" } else { "," };
                    write!(whole, "command = \"{binary}\"\nargs = [{args}{comma}{flags}]").unwrap();
                }
                None => whole.push_str(&line.replace("\"SIM\"", &args).replace("SATELLITE", binary)),
            }
            whole.push('\n');
        }
        let path = self.path().join(name);
        fs::write(&path, whole).unwrap();
        path
    }

    /// One team `acme` with one user `alice` and these servers: slug, which is the installation's id too, and flags.
    pub(crate) fn servers(&self, name: &str, servers: &[(&str, &[&str])]) -> PathBuf {
        let mut text = ONE_USER.to_owned();
        for (slug, flags) in servers {
            let flags = flags.iter().map(|flag| format!(" {flag:?}")).collect::<Vec<_>>().join(",");
            write!(text, "\n[[teams.installations]]\nid = \"{slug}\"\nserver = \"{slug}\"\nSIM{flags}\n").unwrap();
        }
        self.write(name, &text)
    }

    /// A verb, to be started.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        self.program(self.binary.to_str().unwrap(), args)
    }

    /// A program in this home, with no setting of ours that the satellite would read.
    fn program(&self, program: &str, args: &[&str]) -> Command {
        let mut words = self.started_by.iter().map(String::as_str).chain([program]);
        let mut command = Command::new(words.next().unwrap());
        command.args(words).args(args).current_dir(self.path()).stdin(Stdio::null());
        for name in ["RUST_LOG", "SATELLITE_DATA_DIR", "NO_COLOR", "CLICOLOR_FORCE", "FORCE_COLOR"] {
            command.env_remove(name);
        }
        command.env("XDG_STATE_HOME", self.path().join("state"));
        command.env(MARK, &self.mark).envs(self.env.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Runs a verb on this home's data directory to its end.
    #[track_caller]
    pub(crate) fn satellite(&self, args: &[&str]) -> Outcome {
        let data_dir = self.data.display().to_string();
        self.bare(&[args, &["--data-dir", &data_dir]].concat())
    }

    /// Runs a verb as it is to its end.
    #[track_caller]
    pub(crate) fn bare(&self, args: &[&str]) -> Outcome {
        self.start(self.command(args)).finish()
    }

    /// Starts a verb that does not end by itself on this home's data directory.
    pub(crate) fn background(&self, args: &[&str]) -> Running {
        let mut command = self.command(args);
        command.arg("--data-dir").arg(&self.data);
        self.start(command)
    }

    /// Starts a line as a person would type it in this home.
    pub(crate) fn shell(&self, line: &str) -> Running {
        // The shell's place is taken, so that the process is the one that was meant.
        self.start(self.program("bash", &["-c", &format!("exec {line}")]))
    }

    /// Starts `satellite run` and waits until its servers are installed.
    #[track_caller]
    pub(crate) fn run(&self, args: &[&str]) -> Satellite<'_> {
        let satellite = self.run_at_once(args);
        satellite.greeted();
        satellite
    }

    /// Starts `satellite run`.
    pub(crate) fn run_at_once(&self, args: &[&str]) -> Satellite<'_> {
        Satellite { home: self, process: self.background(&[&["run"], args].concat()) }
    }

    /// Starts `satellite run` without naming a data directory.
    #[track_caller]
    pub(crate) fn run_bare(&self, args: &[&str]) -> Satellite<'_> {
        let satellite = Satellite { home: self, process: self.start(self.command(&[&["run"], args].concat())) };
        satellite.greeted();
        satellite
    }

    /// Starts `satellite demo`.
    pub(crate) fn demo(&self, args: &[&str]) -> Satellite<'_> {
        let satellite = Satellite { home: self, process: self.start(self.command(&[&["demo"], args].concat())) };
        satellite.greeted();
        satellite
    }

    pub(crate) fn start(&self, mut command: Command) -> Running {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        let file = |what: &str| self.path().join(format!("{serial}.{what}"));
        let (stdout, stderr) = (file("stdout"), file("stderr"));
        command.stdout(File::create(&stdout).unwrap()).stderr(File::create(&stderr).unwrap());
        Running { child: signals::heard_by(&mut command).spawn().unwrap(), ended: None, stdout, stderr }
    }

    /// The rows of `status --json`; none while there is no satellite.
    pub(crate) fn rows(&self) -> Vec<Value> {
        let outcome = self.satellite(&["status", "--json"]);
        if outcome.code == Some(0) { outcome.json().as_array().unwrap().clone() } else { Vec::new() }
    }

    /// The row of one server.
    pub(crate) fn row(&self, server: &str) -> Option<Value> {
        self.rows().into_iter().find(|row| row["server"] == server)
    }

    /// Waits until a server's row is as wanted.
    #[track_caller]
    pub(crate) fn wait_row(&self, server: &str, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let what = format!("`{server}` to be {what}");
        wait_for(&what, || self.row(server).filter(&wanted), || format!("{:#?}", self.row(server)))
    }

    #[track_caller]
    pub(crate) fn wait_status(&self, server: &str, status: &str) -> Value {
        self.wait_row(server, status, |row| row["status"] == status)
    }

    #[track_caller]
    pub(crate) fn wait_online(&self, server: &str) -> Value {
        self.wait_status(server, "online")
    }

    /// Waits until every server is online.
    #[track_caller]
    pub(crate) fn wait_all_online(&self) -> Vec<Value> {
        let all_online = || Some(self.rows()).filter(|rows| rows.iter().all(|row| row["status"] == "online"));
        wait_for("all to be online", all_online, || format!("{:#?}", self.rows()))
    }

    /// Every event so far, in order.
    #[track_caller]
    pub(crate) fn events(&self) -> Vec<Value> {
        self.satellite(&["events", "--json"]).exits(0).json_lines()
    }

    /// Waits for an event after `since`.
    #[track_caller]
    pub(crate) fn wait_event(&self, since: u64, kind: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let found =
            || self.events().into_iter().find(|event| seq(event) > since && event["type"] == kind && wanted(event));
        wait_for(kind, found, || format!("{:#?}", self.events()))
    }

    /// Every process that has to do with this home, satellites included: by the mark in its arguments or environment, or
    /// by the home's path in its arguments, where we may not read its environment.
    pub(crate) fn traces(&self) -> Vec<i32> {
        let path = self.path().to_str().unwrap();
        let marked = |pid: i32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            text(&environment).contains(&self.mark)
        };
        let ours =
            |(pid, cmdline): &(i32, String)| cmdline.contains(&self.mark) || cmdline.contains(path) || marked(*pid);
        processes().into_iter().filter(ours).map(|(pid, _)| pid).collect()
    }

    /// The servers of this home: by the mark in their arguments, or in their environment where the arguments are not
    /// ours to choose.
    pub(crate) fn processes(&self) -> Vec<i32> {
        let inherited = |pid: i32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            text(&environment).contains(&self.mark)
        };
        let ours = |(pid, cmdline): &(i32, String)| {
            cmdline.contains(&self.mark) || cmdline.contains("sim-server") && inherited(*pid)
        };
        processes().into_iter().filter(ours).map(|(pid, _)| pid).collect()
    }
}

/// Every process with its arguments, each behind a NUL. A zombie has none.
pub(crate) fn processes() -> Vec<(i32, String)> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    // A process may end between the two looks.
    pids.filter_map(|pid: i32| Some((pid, text(&fs::read(format!("/proc/{pid}/cmdline")).ok()?)))).collect()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// An event's number.
#[track_caller]
pub(crate) fn seq(event: &Value) -> u64 {
    event["seq"].as_u64().unwrap()
}

/// A row's pid.
#[track_caller]
pub(crate) fn pid(row: &Value) -> i32 {
    i32::try_from(row["pid"].as_i64().unwrap_or_else(|| panic!("no pid: {row:#?}"))).unwrap()
}

/// Has a file belong to its owner alone.
pub(crate) fn make_private(file: &Path) {
    fs::set_permissions(file, fs::Permissions::from_mode(0o600)).unwrap();
}

pub(crate) fn send(pid: i32, signal: Signal) {
    // An error says that it has ended by itself, which is as good.
    let _ = kill(Pid::from_raw(pid), signal);
}

const ONE_USER: &str = r#"
[[teams]]
id = "team_acme"
slug = "acme"
users = [{ id = "user_alice", slug = "alice" }]
"#;

/// A process of ours that may still run.
pub(crate) struct Running {
    child: Child,
    ended: Option<ExitStatus>,
    stdout: PathBuf,
    stderr: PathBuf,
}

impl Running {
    pub(crate) fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    pub(crate) fn stdout(&self) -> String {
        text(&fs::read(&self.stdout).unwrap())
    }

    pub(crate) fn stderr(&self) -> String {
        text(&fs::read(&self.stderr).unwrap())
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.status().is_none()
    }

    fn status(&mut self) -> Option<ExitStatus> {
        self.ended = self.ended.or(self.child.try_wait().unwrap());
        self.ended
    }

    pub(crate) fn signal(&mut self, signal: Signal) {
        // Not reaped yet, so the number is still its own.
        if self.is_running() {
            send(self.pid(), signal);
        }
    }

    /// Waits until it has written this to stdout.
    #[track_caller]
    pub(crate) fn wait_stdout(&self, wanted: impl Fn(&str) -> bool) -> String {
        let seen = || format!("stdout:\n{}\nstderr:\n{}", self.stdout(), self.stderr());
        wait_for("its output", || Some(self.stdout()).filter(|text| wanted(text)), seen)
    }

    /// Waits until it has written this to stderr.
    #[track_caller]
    pub(crate) fn wait_stderr(&self, wanted: impl Fn(&str) -> bool) -> String {
        wait_for("its stderr", || Some(self.stderr()).filter(|text| wanted(text)), || self.stderr())
    }

    /// Waits for its end.
    #[track_caller]
    pub(crate) fn finish(mut self) -> Outcome {
        self.wait()
    }

    #[track_caller]
    fn wait(&mut self) -> Outcome {
        let started = Instant::now();
        while self.status().is_none() {
            let seen = || format!("stdout:\n{}\nstderr:\n{}", self.stdout(), self.stderr());
            assert!(started.elapsed() < GIVE_UP, "gave up waiting for its end; so far it said:\n{}", seen());
            // Most verbs take 10 ms.
            std::thread::sleep(Duration::from_millis(2));
        }
        let (code, signal) = self.ended.map_or((None, None), |ended| (ended.code(), ended.signal()));
        Outcome { code, signal, stdout: self.stdout(), stderr: self.stderr() }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.is_running() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// A satellite in the foreground. Dropping it ends it, and fails if it leaves a process.
pub(crate) struct Satellite<'a> {
    home: &'a Home,
    pub(crate) process: Running,
}

impl Satellite<'_> {
    /// Waits until it has said that its servers are installed.
    #[track_caller]
    pub(crate) fn greeted(&self) -> String {
        self.process.wait_stdout(|text| text.contains("satellite is running") || text.contains("The demo runs"))
    }

    /// The satellite itself: what was started is its reaper.
    #[track_caller]
    pub(crate) fn pid(&self) -> i32 {
        let reaper = self.process.pid();
        let children = || fs::read_to_string(format!("/proc/{reaper}/task/{reaper}/children")).ok();
        // What was orphaned is the reaper's child, too, but never older.
        let eldest = || children()?.split_whitespace().next()?.parse().ok();
        wait_for("the satellite below its reaper", eldest, || self.process.stderr())
    }

    pub(crate) fn signal(&mut self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Its log as one object a line.
    #[track_caller]
    pub(crate) fn log(&self) -> Vec<Value> {
        json_lines(&self.process.stderr())
    }

    /// Waits for its end, and that nothing of it is left.
    #[track_caller]
    pub(crate) fn ended(mut self) -> Outcome {
        let outcome = self.process.wait();
        assert_eq!(self.left(), Vec::<i32>::new(), "processes are left: {outcome:#?}");
        outcome
    }

    /// Ends it as a service manager would.
    #[track_caller]
    pub(crate) fn terminate(mut self) -> Outcome {
        self.signal(Signal::SIGTERM);
        self.ended()
    }

    /// Kills it without a chance to tidy up.
    #[track_caller]
    pub(crate) fn kill(mut self) {
        send(self.pid(), Signal::SIGKILL);
        let outcome = self.process.wait();
        assert_eq!(outcome.code, Some(128 + 9), "{outcome:#?}");
        // The reaper has waited for the end of all.
        assert_eq!(self.left(), Vec::<i32>::new(), "processes are left: {outcome:#?}");
    }

    fn left(&self) -> Vec<i32> {
        self.home.processes()
    }
}

impl Drop for Satellite<'_> {
    fn drop(&mut self) {
        self.signal(Signal::SIGTERM);
        let started = Instant::now();
        while self.process.is_running() && started.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(POLL);
        }
        self.signal(Signal::SIGKILL);
        let outcome = (!std::thread::panicking()).then(|| self.process.wait());
        let mut left = self.left();
        if outcome.as_ref().is_some_and(|outcome| outcome.code.is_none()) {
            // It was killed: its servers end with it, in their own time.
            while !left.is_empty() && started.elapsed() < GIVE_UP {
                std::thread::sleep(POLL);
                left = self.left();
            }
        }
        for pid in &left {
            send(*pid, Signal::SIGKILL);
        }
        if !std::thread::panicking() {
            assert!(left.is_empty(), "processes are left: {left:?} {outcome:#?}");
        }
    }
}
