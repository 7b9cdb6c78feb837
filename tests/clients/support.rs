//! Programs that are started for a test and ended with it, and what they tell.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

/// When a server is given up that does not listen, or a client that does not end. Far beyond what a loaded machine needs.
pub(crate) const GIVE_UP: Duration = Duration::from_secs(120);

pub(crate) const SATELLITE: &str = env!("CARGO_BIN_EXE_satellite");

/// A server, or a satellite.
pub(crate) struct Running {
    process: Child,
    /// How it is ended: a satellite by what lets it take its own servers along.
    by: Signal,
    /// Its files.
    home: TempDir,
}

impl Running {
    /// Its complaints are kept for when the test fails.
    fn start(command: &mut Command, by: Signal, home: TempDir) -> Self {
        let log = File::options().create(true).append(true).open(home.path().join("log")).unwrap();
        let process = command.stdin(Stdio::null()).stderr(log).spawn().unwrap();
        Self { process, by, home }
    }

    /// A server, once it listens on its port.
    pub(crate) fn server(command: &mut Command, port: u16) -> Self {
        let home = TempDir::new().unwrap();
        let said = File::options().create(true).append(true).open(home.path().join("log")).unwrap();
        let server = Self::start(command.stdout(said), Signal::SIGKILL, home);
        let began = Instant::now();
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            assert!(began.elapsed() < GIVE_UP, "{command:?} does not listen: {}", server.log());
            std::thread::sleep(Duration::from_millis(20));
        }
        server
    }

    /// A satellite with a configuration, and the URL of its endpoint.
    pub(crate) fn satellite(config: &str) -> (Self, String) {
        let home = TempDir::new().unwrap();
        let file = home.path().join("satellite.toml");
        std::fs::write(&file, config).unwrap();
        let mut command = Command::new(SATELLITE);
        command.arg("run").arg("--config").arg(file).arg("--data-dir").arg(home.path().join("data"));
        let mut satellite = Self::start(command.stdout(Stdio::piped()), Signal::SIGTERM, home);
        let lines = lines_of(satellite.process.stdout.take().unwrap());
        let began = Instant::now();
        while let Ok(line) = lines.recv_timeout(GIVE_UP.saturating_sub(began.elapsed())) {
            if let Some(url) = line.split_once("MCP: ").and_then(|(_, rest)| rest.split_whitespace().next()) {
                return (satellite, url.to_owned());
            }
        }
        panic!("the satellite does not say where it listens: {}", satellite.log())
    }

    /// What a satellite answers to a call, made as by its user.
    #[track_caller]
    pub(crate) fn call(&self, server: &str, tool: &str, arguments: &Value) -> String {
        let mut command = Command::new(SATELLITE);
        command
            .args(["call", server, tool, &arguments.to_string()])
            .arg("--data-dir")
            .arg(self.home.path().join("data"));
        finished(&mut command)
    }

    /// What it has said of itself.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.home.path().join("log")).unwrap()
    }
}

impl Drop for Running {
    #[expect(clippy::print_stdout, reason = "shown with a test that has failed")]
    fn drop(&mut self) {
        // Errors say that it is gone already.
        let _ = kill(Pid::from_raw(self.process.id().cast_signed()), self.by);
        let _ = self.process.wait();
        if std::thread::panicking() {
            println!("the log of what was connected to:\n{}", self.log());
        }
    }
}

/// The lines that somebody writes: all of them are read, so that they can go on.
pub(crate) fn lines_of(out: impl std::io::Read + Send + 'static) -> mpsc::Receiver<String> {
    let (said, hears) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(out).lines().map_while(Result::ok) {
            // An error says that the test is over.
            let _ = said.send(line);
        }
    });
    hears
}

/// A script of the tests.
pub(crate) fn script(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(path)
}

/// What it has written, once it has ended well.
#[track_caller]
pub(crate) fn finished(command: &mut Command) -> String {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = Pid::from_raw(child.id().cast_signed());
    let (done, waits) = mpsc::channel::<()>();
    let watch = std::thread::spawn(move || {
        if waits.recv_timeout(GIVE_UP) == Err(mpsc::RecvTimeoutError::Timeout) {
            kill(pid, Signal::SIGKILL).unwrap();
        }
    });
    let out = child.wait_with_output().unwrap();
    drop(done);
    watch.join().unwrap();
    let (told, complaint) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{command:?}: {}\n{told}\n{complaint}", out.status);
    told.into_owned()
}

/// The steps of a client, by name.
pub(crate) struct Steps(pub(crate) Vec<Value>);

impl Steps {
    #[track_caller]
    pub(crate) fn taken(command: &mut Command) -> Self {
        Self(finished(command).lines().map(|line| serde_json::from_str(line).unwrap()).collect())
    }

    #[track_caller]
    pub(crate) fn of(&self, step: &str) -> &Value {
        let found = self.0.iter().find(|seen| seen["step"] == *step);
        found.unwrap_or_else(|| panic!("no step `{step}` in {:#?}", self.0))
    }

    #[track_caller]
    pub(crate) fn says(&self, step: &str, words: &str) {
        let text = self.of(step)["text"].as_str().unwrap();
        assert!(text.contains(words), "{step}: {text}");
    }
}
