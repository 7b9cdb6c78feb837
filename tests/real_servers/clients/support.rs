//! Programs that run during a test, and their output.

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
use testkit::wait::GIVE_UP;

pub(crate) const SATELLITE: &str = env!("CARGO_BIN_EXE_satellite");

/// A running server or satellite.
pub(crate) struct Running {
    process: Child,
    /// The signal that ends it. A satellite gets one that lets it end its servers.
    end_signal: Signal,
    home: TempDir,
}

impl Running {
    /// Starts a program. Its stderr goes to a log that is printed if the test fails.
    fn start(command: &mut Command, end_signal: Signal, home: TempDir) -> Self {
        let log = File::options().create(true).append(true).open(home.path().join("log")).unwrap();
        let process = command.stdin(Stdio::null()).stderr(log).spawn().unwrap();
        Self { process, end_signal, home }
    }

    /// Starts a server and waits until it listens on its port.
    pub(crate) fn server(command: &mut Command, port: u16) -> Self {
        let home = TempDir::new().unwrap();
        let stdout = File::options().create(true).append(true).open(home.path().join("log")).unwrap();
        let server = Self::start(command.stdout(stdout), Signal::SIGKILL, home);
        let began = Instant::now();
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            assert!(began.elapsed() < GIVE_UP, "{command:?} does not listen: {}", server.log());
            std::thread::sleep(Duration::from_millis(20));
        }
        server
    }

    /// Starts a satellite with this configuration and returns the URL of its endpoint.
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
        panic!("the satellite printed no URL: {}", satellite.log())
    }

    /// Calls a tool with `satellite call` and returns the output.
    #[track_caller]
    pub(crate) fn call(&self, server: &str, tool: &str, arguments: &Value) -> String {
        let mut command = Command::new(SATELLITE);
        command
            .args(["call", server, tool, &arguments.to_string()])
            .arg("--data-dir")
            .arg(self.home.path().join("data"));
        run_to_end(&mut command)
    }

    /// The content of its log.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.home.path().join("log")).unwrap()
    }
}

impl Drop for Running {
    #[expect(clippy::print_stdout, reason = "printed if a test fails")]
    fn drop(&mut self) {
        // It may have ended already.
        let _ = kill(Pid::from_raw(self.process.id().cast_signed()), self.end_signal);
        let _ = self.process.wait();
        if std::thread::panicking() {
            println!("log of the server:\n{}", self.log());
        }
    }
}

/// The lines of an output. A thread reads all of them, so that the program never blocks.
pub(crate) fn lines_of(out: impl std::io::Read + Send + 'static) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(out).lines().map_while(Result::ok) {
            // The send fails after the end of the test.
            let _ = sender.send(line);
        }
    });
    receiver
}

/// The path of a script below `tests`.
pub(crate) fn script(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(path)
}

/// Runs a program, which must succeed, and returns its output.
#[track_caller]
pub(crate) fn run_to_end(command: &mut Command) -> String {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = Pid::from_raw(child.id().cast_signed());
    let (done, ended) = mpsc::channel::<()>();
    let watch = std::thread::spawn(move || {
        if ended.recv_timeout(GIVE_UP) == Err(mpsc::RecvTimeoutError::Timeout) {
            kill(pid, Signal::SIGKILL).unwrap();
        }
    });
    let out = child.wait_with_output().unwrap();
    drop(done);
    watch.join().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{command:?}: {}\n{stdout}\n{stderr}", out.status);
    stdout.into_owned()
}

/// The steps of a client, by name.
pub(crate) struct Steps(pub(crate) Vec<Value>);

impl Steps {
    #[track_caller]
    pub(crate) fn run(command: &mut Command) -> Self {
        Self(run_to_end(command).lines().map(|line| serde_json::from_str(line).unwrap()).collect())
    }

    #[track_caller]
    pub(crate) fn of(&self, step: &str) -> &Value {
        let found = self.0.iter().find(|seen| seen["step"] == *step);
        found.unwrap_or_else(|| panic!("no step `{step}` in {:#?}", self.0))
    }

    #[track_caller]
    pub(crate) fn assert_text(&self, step: &str, words: &str) {
        let text = self.of(step)["text"].as_str().unwrap();
        assert!(text.contains(words), "{step}: {text}");
    }
}
