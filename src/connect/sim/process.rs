//! The simulated server as a real process, where the faults are real: exit codes, signals, a grandchild left behind.

use std::io;
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::sync::Arc;

use mcp_satellite_actors::model::ids::Run;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{Signal, raise};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Instant;

use super::control::{Control, OnSigterm};
use super::engine::{self, Pipes};
use super::script::{Grandchild, Script};
use super::server::{Env, Server};

/// Where the process could not be made what its script says.
const EX_OSERR: i32 = 71;

/// A grandchild that nobody finds ends by itself after this many seconds.
const GRANDCHILD_SECONDS: &str = "3600";

/// Serves the script over stdin and stdout, and returns the code to exit with. Where the script ends the server by a
/// signal it does not return: the signal has ended this process.
///
/// Exit with [`std::process::exit`]: a read of stdin or a write to stderr that blocks in another thread must not keep
/// the process. Chance is drawn as for run 0: give each process a seed of its own.
pub async fn serve_stdio(script: Script) -> i32 {
    let script = Arc::new(script);
    match serve(script).await {
        Ok(code) => code,
        Err(error) => {
            let _ = tokio::io::stderr().write_all(format!("cannot play the script: {error}\n").as_bytes()).await;
            EX_OSERR
        }
    }
}

async fn serve(script: Arc<Script>) -> io::Result<i32> {
    let control = Arc::new(Control::of_process(&script));
    if OnSigterm::of(&script) != OnSigterm::Default {
        let mut sigterm = signal(SignalKind::terminate())?;
        let control = Arc::clone(&control);
        tokio::spawn(async move {
            while sigterm.recv().await.is_some() {
                control.terminate();
            }
        });
    }
    let mut pipes = Pipes { stdin: Some(stdin()), stdout: stdout(), stderr: Some(tokio::io::stderr()) };
    let server = Server::new(Arc::clone(&script), Env::Process, Run(0), Instant::now());
    if let Some(grandchild) = script.grandchild {
        spawn(grandchild)?;
    }
    let end = engine::run(&mut pipes, server, &control).await;
    Ok(match (end.signal, end.code) {
        (Some(signal), _) => die_by(signal),
        (None, code) => code.unwrap_or_default(),
    })
}

/// A pipe is read without a thread. Only a pipe: it is between us and whoever started us, while a terminal or a file may
/// be shared with others who would not like it to be non-blocking.
fn stdin() -> Box<dyn AsyncRead + Send + Unpin> {
    let pipe = io::stdin().as_fd().try_clone_to_owned().and_then(pipe::Receiver::from_owned_fd);
    pipe.map_or_else(|_| Box::new(tokio::io::stdin()) as _, |pipe| Box::new(pipe) as _)
}

fn stdout() -> Box<dyn AsyncWrite + Send + Unpin> {
    let pipe = io::stdout().as_fd().try_clone_to_owned().and_then(pipe::Sender::from_owned_fd);
    pipe.map_or_else(|_| Box::new(tokio::io::stdout()) as _, |pipe| Box::new(pipe) as _)
}

/// Starts a process that nobody waits for. It keeps stdout and stderr open, as what package runners leave behind does.
fn spawn(grandchild: Grandchild) -> io::Result<()> {
    // What is ignored stays ignored in the program that takes the shell's place, and in what the shell forks.
    const STUBBORN: &str = "trap '' TERM; exec sleep \"$0\"";
    const ORPHANED: &str = "trap '' TERM; sleep \"$0\" &";
    let (line, between): (&[&str], bool) = match grandchild {
        Grandchild::Plain => (&["sleep"], false),
        Grandchild::IgnoreTerm => (&["sh", "-c", STUBBORN], false),
        Grandchild::Setsid => (&["setsid", "sleep"], false),
        Grandchild::DoubleFork => (&["sh", "-c", ORPHANED], true),
        // The shell is no leader of a group, so `setsid` takes its place and does not fork.
        Grandchild::Daemon => (&["setsid", "sh", "-c", ORPHANED], true),
    };
    let mut child = Command::new(line[0]).args(&line[1..]).arg(GRANDCHILD_SECONDS).stdin(Stdio::null()).spawn()?;
    // The one that forks and ends leaves no zombie.
    if between { child.wait().map(drop) } else { Ok(()) }
}

/// Ends this process by a signal. Where that is not to be had (it is ignored, as SIGPIPE is, or handled), gives the code
/// that a shell would.
pub(super) fn die_by(number: i32) -> i32 {
    // A segmentation fault on purpose should leave no core file in somebody's directory.
    let _ = setrlimit(Resource::RLIMIT_CORE, 0, 0);
    if let Ok(signal) = Signal::try_from(number) {
        // Twice: the first SIGSEGV only meets Rust's handler for stack overflows, which then takes itself away.
        let _ = raise(signal).and_then(|()| raise(signal));
    }
    128 + number
}
