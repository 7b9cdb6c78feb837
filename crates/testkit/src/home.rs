//! A temporary home with a data directory and files, the built binary that runs in it, and a satellite whose leftover
//! processes fail the test.

use std::ffi::OsStr;
use std::fmt::Write;
use std::fs::{self, File};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use nix::sys::signal::Signal;
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use rusqlite::types::ValueRef;
use rusqlite::{Connection, OpenFlags, Row};
use serde_json::Value;
use tempfile::TempDir;

use crate::process::{has_in_environment, processes, send, text, wait_stopped};
use crate::signals::reset_signal_actions;
use crate::wait::{GIVE_UP, wait_for};

const POLL: Duration = Duration::from_millis(20);
/// Words of a command that name its process.
const NAMED_WORDS: usize = 4;

/// Environment variable with the mark of a home.
pub const MARK: &str = "SATELLITE_TEST_MARK";

/// Exit status and output of a finished command.
#[derive(Debug)]
pub struct Outcome {
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Outcome {
    #[track_caller]
    pub fn exits(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{self:#?}");
        self
    }

    /// Parses stdout as one JSON value.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:#?}"))
    }

    /// Parses each line of stdout as JSON.
    #[track_caller]
    pub fn json_lines(&self) -> Vec<Value> {
        json_lines(&self.stdout)
    }
}

/// Parses each line of `text` as JSON. Panics at a line that is not JSON.
#[track_caller]
pub fn json_lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
}

/// A temporary directory of one test. A mark in their arguments identifies its processes.
pub struct Home {
    dir: TempDir,
    mark: String,
    data: PathBuf,
    serial: AtomicU64,
    /// Environment variables added to those of the test process.
    pub env: Vec<(String, String)>,
    pub binary: PathBuf,
    /// Wrapper command for every program, such as one that changes the user.
    pub started_by: Vec<String>,
}

impl Home {
    /// Creates a home for this binary: `env!("CARGO_BIN_EXE_satellite")` of the test program.
    pub fn new(binary: &str) -> Self {
        static HOMES: AtomicU64 = AtomicU64::new(0);
        let dir = TempDir::with_prefix("satellite-").unwrap();
        let nanoseconds = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos();
        let mark = format!("mark-{}-{}-{nanoseconds:x}", std::process::id(), HOMES.fetch_add(1, Ordering::Relaxed));
        let data = dir.path().join("data");
        let (serial, env, started_by) = (AtomicU64::new(0), Vec::new(), Vec::new());
        Self { dir, mark, data, serial, env, binary: binary.into(), started_by }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn data_dir(&self) -> &Path {
        &self.data
    }

    pub fn state_database(&self) -> PathBuf {
        self.data.join("state.db")
    }

    /// Returns the rows of a table of the state database, each with its columns; none if there is no such table yet.
    pub fn stored(&self, table: &str) -> Vec<Vec<String>> {
        let database = Connection::open_with_flags(self.state_database(), OpenFlags::SQLITE_OPEN_READ_ONLY).unwrap();
        let Ok(mut select) = database.prepare(&format!("SELECT * FROM {table}")) else { return Vec::new() };
        let columns = select.column_count();
        let text = |row: &Row<'_>, at| match row.get_ref(at)? {
            ValueRef::Text(bytes) | ValueRef::Blob(bytes) => Ok(String::from_utf8_lossy(bytes).into_owned()),
            other => Ok(format!("{other:?}")),
        };
        let rows = select.query_map([], |row| (0..columns).map(|at| text(row, at)).collect()).unwrap();
        rows.collect::<rusqlite::Result<_>>().unwrap()
    }

    /// Creates the data directory with the satellite's mode.
    pub fn make_data_dir(&self) {
        fs::DirBuilder::new().mode(0o700).create(&self.data).unwrap();
    }

    /// Selects another data directory below the home.
    pub fn use_data_dir(&mut self, name: &str) {
        self.data = self.path().join(name);
    }

    /// The name of this home's simulated servers, which identifies their processes.
    pub fn mark(&self) -> &str {
        &self.mark
    }

    /// Writes a file. A line `SIM "--flag", "value"` becomes the command and args of a simulated server, `"SIM"` its
    /// first args, and `SATELLITE` the path of the binary.
    pub fn write(&self, name: &str, text: &str) -> PathBuf {
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

    /// Writes a configuration with one team `acme`, one user `alice` and `servers` (slug and flags); the slug is also
    /// the installation's id.
    pub fn servers(&self, name: &str, servers: &[(&str, &[&str])]) -> PathBuf {
        let mut text = ONE_USER.to_owned();
        for (slug, flags) in servers {
            let flags = flags.iter().map(|flag| format!(" {flag:?}")).collect::<Vec<_>>().join(",");
            write!(text, "\n[[teams.installations]]\nid = \"{slug}\"\nserver = \"{slug}\"\nSIM{flags}\n").unwrap();
        }
        self.write(name, &text)
    }

    pub fn command(&self, args: &[&str]) -> Command {
        self.program(self.binary.to_str().unwrap(), args)
    }

    /// A program in this home, without the test's own variables that the satellite would read.
    fn program(&self, program: &str, args: &[&str]) -> Command {
        let mut words = self.started_by.iter().map(String::as_str).chain([program]);
        let mut command = Command::new(words.next().unwrap());
        command.args(words).args(args).current_dir(self.path()).stdin(Stdio::null());
        for name in ["RUST_LOG", "SATELLITE_DATA_DIR", "NO_COLOR", "CLICOLOR_FORCE", "FORCE_COLOR"] {
            command.env_remove(name);
        }
        for (name, directory) in
            [("XDG_STATE_HOME", "state"), ("XDG_DATA_HOME", "share"), ("XDG_CONFIG_HOME", "config")]
        {
            command.env(name, self.path().join(directory));
        }
        command.env(MARK, &self.mark).envs(self.env.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Runs a command on this home's data directory and waits until it exits.
    #[track_caller]
    pub fn satellite(&self, args: &[&str]) -> Outcome {
        let data_dir = self.data.display().to_string();
        self.bare(&[args, &["--data-dir", &data_dir]].concat())
    }

    /// Runs a command without `--data-dir` and waits until it exits.
    #[track_caller]
    pub fn bare(&self, args: &[&str]) -> Outcome {
        self.start(self.command(args)).finish()
    }

    /// Starts a long-running command on this home's data directory.
    pub fn background(&self, args: &[&str]) -> Running {
        let mut command = self.command(args);
        command.arg("--data-dir").arg(&self.data);
        self.start(command)
    }

    /// Starts a shell command line in this home.
    pub fn shell(&self, line: &str) -> Running {
        // `exec`: the process is then the program and not the shell.
        self.start(self.program("bash", &["-c", &format!("exec {line}")]))
    }

    /// Starts `satellite run` and waits until its servers are installed.
    #[track_caller]
    pub fn run(&self, args: &[&str]) -> Satellite<'_> {
        let satellite = self.run_at_once(args);
        satellite.wait_start_message();
        satellite
    }

    /// Starts `satellite run`.
    pub fn run_at_once(&self, args: &[&str]) -> Satellite<'_> {
        Satellite { home: self, process: self.background(&[&["run"], args].concat()) }
    }

    /// Starts `satellite run` without `--data-dir` and waits until its servers are installed.
    #[track_caller]
    pub fn run_bare(&self, args: &[&str]) -> Satellite<'_> {
        let satellite = Satellite { home: self, process: self.start(self.command(&[&["run"], args].concat())) };
        satellite.wait_start_message();
        satellite
    }

    /// Starts `satellite demo` and waits until its servers are installed.
    pub fn demo(&self, args: &[&str]) -> Satellite<'_> {
        let satellite = Satellite { home: self, process: self.start(self.command(&[&["demo"], args].concat())) };
        satellite.wait_start_message();
        satellite
    }

    pub fn start(&self, mut command: Command) -> Running {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        let file = |what: &str| self.path().join(format!("{serial}.{what}"));
        let (stdout, stderr) = (file("stdout"), file("stderr"));
        command.stdout(File::create(&stdout).unwrap()).stderr(File::create(&stderr).unwrap());
        let words = std::iter::once(command.get_program()).chain(command.get_args()).take(NAMED_WORDS);
        let name = words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ");
        Running { name, child: reset_signal_actions(&mut command).spawn().unwrap(), ended: None, stdout, stderr }
    }

    /// The rows of `status --json`; empty if no satellite runs.
    pub fn rows(&self) -> Vec<Value> {
        let outcome = self.satellite(&["status", "--json"]);
        if outcome.code == Some(0) { outcome.json().as_array().unwrap().clone() } else { Vec::new() }
    }

    pub fn row(&self, server: &str) -> Option<Value> {
        self.rows().into_iter().find(|row| row["server"] == server)
    }

    /// Waits until `wanted` accepts the server's row.
    #[track_caller]
    pub fn wait_row(&self, server: &str, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let what = format!("`{server}` to be {what}");
        wait_for(&what, || self.row(server).filter(&wanted), || format!("{:#?}", self.row(server)))
    }

    #[track_caller]
    pub fn wait_status(&self, server: &str, status: &str) -> Value {
        self.wait_row(server, status, |row| row["status"] == status)
    }

    #[track_caller]
    pub fn wait_online(&self, server: &str) -> Value {
        self.wait_status(server, "online")
    }

    /// Waits until every server is online.
    #[track_caller]
    pub fn wait_all_online(&self) -> Vec<Value> {
        let all_online = || Some(self.rows()).filter(|rows| rows.iter().all(|row| row["status"] == "online"));
        wait_for("all servers to be online", all_online, || format!("{:#?}", self.rows()))
    }

    #[track_caller]
    pub fn events(&self) -> Vec<Value> {
        self.satellite(&["events", "--json"]).exits(0).json_lines()
    }

    /// Waits for an event of type `kind` with a seq greater than `since`.
    #[track_caller]
    pub fn wait_event(&self, since: u64, kind: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let found =
            || self.events().into_iter().find(|event| seq(event) > since && event["type"] == kind && wanted(event));
        wait_for(kind, found, || format!("{:#?}", self.events()))
    }

    /// Every process of this home, satellites included: those with the mark in their arguments or environment, or with
    /// the home's path in their arguments, because the environment of another user's process is not readable.
    pub fn traces(&self) -> Vec<i32> {
        let path = self.path().to_str().unwrap();
        let ours = |(pid, cmdline): &(i32, String)| {
            cmdline.contains(&self.mark) || cmdline.contains(path) || has_in_environment(*pid, &self.mark)
        };
        processes().into_iter().filter(ours).map(|(pid, _)| pid).collect()
    }

    /// The server processes of this home: those with the mark in their arguments or, for servers whose arguments the
    /// test does not choose, in their environment.
    pub fn processes(&self) -> Vec<i32> {
        let ours = |(pid, cmdline): &(i32, String)| {
            cmdline.contains(&self.mark) || cmdline.contains("sim-server") && has_in_environment(*pid, &self.mark)
        };
        processes().into_iter().filter(ours).map(|(pid, _)| pid).collect()
    }
}

#[track_caller]
pub fn seq(event: &Value) -> u64 {
    event["seq"].as_u64().unwrap()
}

#[track_caller]
pub fn pid(row: &Value) -> i32 {
    i32::try_from(row["pid"].as_i64().unwrap_or_else(|| panic!("no pid: {row:#?}"))).unwrap()
}

/// Sets the mode of a file to 0600.
pub fn make_private(file: &Path) {
    fs::set_permissions(file, fs::Permissions::from_mode(0o600)).unwrap();
}

const ONE_USER: &str = r#"
[[teams]]
id = "team_acme"
slug = "acme"
users = [{ id = "user_alice", slug = "alice" }]
"#;

/// A started process with its output files. Dropping it kills it.
pub struct Running {
    /// Program and first arguments, for messages.
    name: String,
    child: Child,
    ended: Option<ExitStatus>,
    stdout: PathBuf,
    stderr: PathBuf,
}

impl Running {
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    pub fn stdout(&self) -> String {
        text(&fs::read(&self.stdout).unwrap())
    }

    pub fn stderr(&self) -> String {
        text(&fs::read(&self.stderr).unwrap())
    }

    pub fn is_running(&mut self) -> bool {
        self.status().is_none()
    }

    fn status(&mut self) -> Option<ExitStatus> {
        self.ended = self.ended.or(self.child.try_wait().unwrap());
        self.ended
    }

    pub fn signal(&mut self, signal: Signal) {
        // The process is not reaped yet, so the pid is not reused.
        if self.is_running() {
            send(self.pid(), signal);
        }
    }

    /// Waits until `wanted` accepts the text on stdout.
    #[track_caller]
    pub fn wait_stdout(&self, wanted: impl Fn(&str) -> bool) -> String {
        let seen = || format!("stdout:\n{}\nstderr:\n{}", self.stdout(), self.stderr());
        let look = || {
            // Read before the text: a process that has ended prints nothing more.
            let has_ended = self.has_ended();
            let text = Some(self.stdout()).filter(|text| wanted(text));
            assert!(text.is_some() || !has_ended, "`{}` has ended without this output; {}", self.name, seen());
            text
        };
        wait_for(&format!("output of `{}`", self.name), look, seen)
    }

    /// Returns true if the process has ended. Does not reap it.
    fn has_ended(&self) -> bool {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        self.ended.is_some() || waitid(Id::Pid(Pid::from_raw(self.pid())), flags) != Ok(WaitStatus::StillAlive)
    }

    /// Waits until `wanted` accepts the text on stderr.
    #[track_caller]
    pub fn wait_stderr(&self, wanted: impl Fn(&str) -> bool) -> String {
        wait_for("output on stderr", || Some(self.stderr()).filter(|text| wanted(text)), || self.stderr())
    }

    /// Waits until the process exits.
    #[track_caller]
    pub fn finish(mut self) -> Outcome {
        self.wait()
    }

    #[track_caller]
    fn wait(&mut self) -> Outcome {
        let started = Instant::now();
        while self.status().is_none() {
            let seen = || format!("stdout:\n{}\nstderr:\n{}", self.stdout(), self.stderr());
            assert!(started.elapsed() < GIVE_UP, "the process did not exit; its output:\n{}", seen());
            // Most commands take 10 ms.
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

/// A running satellite. Dropping it terminates it and fails the test if processes are left.
pub struct Satellite<'a> {
    home: &'a Home,
    pub process: Running,
}

impl Satellite<'_> {
    /// Waits for the greeting, which is printed once the servers are installed.
    #[track_caller]
    pub fn wait_start_message(&self) -> String {
        self.process.wait_stdout(|text| text.contains("satellite is running") || text.contains("The demo runs"))
    }

    /// The pid of the satellite itself, which is the child of the started keeper.
    #[track_caller]
    pub fn pid(&self) -> i32 {
        let keeper = self.process.pid();
        let is_helper =
            |pid: i32| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "satellite-spawn\n");
        // Servers and their orphans are also children of the keeper, but started later. The helper has its name only after
        // its start, so it must be there.
        let first_child = || {
            let children = fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children")).ok()?;
            let children: Vec<i32> = children.split_whitespace().filter_map(|pid| pid.parse().ok()).collect();
            children.iter().any(|pid| is_helper(*pid)).then(|| children.iter().copied().find(|pid| !is_helper(*pid)))?
        };
        wait_for("the satellite below its keeper", first_child, || self.process.stderr())
    }

    pub fn signal(&mut self, signal: Signal) {
        self.process.signal(signal);
    }

    /// The log, one JSON object per line.
    #[track_caller]
    pub fn log(&self) -> Vec<Value> {
        json_lines(&self.process.stderr())
    }

    /// Waits until the satellite has exited and asserts that no server process is left.
    #[track_caller]
    pub fn ended(mut self) -> Outcome {
        let outcome = self.process.wait();
        assert_eq!(self.left(), Vec::<i32>::new(), "processes are left: {outcome:#?}");
        outcome
    }

    /// Sends SIGTERM, as a service manager does, and waits for the end.
    #[track_caller]
    pub fn terminate(mut self) -> Outcome {
        self.signal(Signal::SIGTERM);
        self.ended()
    }

    /// Sends SIGKILL to the satellite, after which no other one follows, and waits for the keeper to exit.
    #[track_caller]
    pub fn kill(mut self) {
        let satellite = self.pid();
        // The keeper starts no satellite after a request to end. The stopped satellite does not carry out the request.
        send(satellite, Signal::SIGSTOP);
        wait_stopped(satellite);
        self.signal(Signal::SIGTERM);
        send(satellite, Signal::SIGKILL);
        let outcome = self.process.wait();
        assert_eq!(outcome.code, Some(128 + 9), "{outcome:#?}");
        // The keeper exits after all server processes.
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
            // After a kill, the keeper ends the servers asynchronously.
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
