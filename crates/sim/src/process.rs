//! The simulated server as a real process, with real faults: exit codes, signals, an orphaned grandchild.

use std::io;
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::sync::Arc;

use mcp_satellite_actors::model::ids::RunNumber;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{Signal, raise};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Instant;

use super::control::{OnSigterm, SimProcessState};
use super::engine::{self, SimPipes};
use super::script::{Grandchild, SimScript};
use super::server::{EnvSource, SimResponder};

// Exit code if the process could not be set up for its script.
const EX_OSERR: i32 = 71;

// Lifetime in seconds of a grandchild that is not killed.
const GRANDCHILD_SECONDS: &str = "3600";

/// Serves the script over stdin and stdout, and returns the exit code. If the script ends the server by a signal, the
/// signal ends this process and the function does not return.
///
/// Exit with [`std::process::exit`]: a blocking read of stdin or write to stderr in another thread must not keep the
/// process alive. Random numbers are drawn as for run 0: give each process its own seed.
pub async fn serve_stdio(script: SimScript) -> i32 {
    let script = Arc::new(script);
    match serve(script).await {
        Ok(code) => code,
        Err(error) => {
            let _ = tokio::io::stderr().write_all(format!("cannot run the script: {error}\n").as_bytes()).await;
            EX_OSERR
        }
    }
}

async fn serve(script: Arc<SimScript>) -> io::Result<i32> {
    let control = Arc::new(SimProcessState::for_process(&script));
    if OnSigterm::from_script(&script) != OnSigterm::Default {
        let mut sigterm = signal(SignalKind::terminate())?;
        let control = Arc::clone(&control);
        tokio::spawn(async move {
            while sigterm.recv().await.is_some() {
                control.terminate();
            }
        });
    }
    let mut pipes = SimPipes { stdin: Some(stdin()), stdout: stdout(), stderr: Some(tokio::io::stderr()) };
    let server = SimResponder::new(Arc::clone(&script), EnvSource::Process, RunNumber(0), Instant::now());
    if let Some(grandchild) = script.grandchild {
        spawn(grandchild)?;
    }
    let end = engine::run(&mut pipes, server, &control).await;
    Ok(match (end.signal, end.code) {
        (Some(signal), _) => exit_by_signal(signal),
        (None, code) => code.unwrap_or_default(),
    })
}

/// Opens stdin; a pipe is read without a thread. A terminal or a file may be shared with other processes and must not
/// become non-blocking.
fn stdin() -> Box<dyn AsyncRead + Send + Unpin> {
    let pipe = io::stdin().as_fd().try_clone_to_owned().and_then(pipe::Receiver::from_owned_fd);
    pipe.map_or_else(|_| Box::new(tokio::io::stdin()) as _, |pipe| Box::new(pipe) as _)
}

fn stdout() -> Box<dyn AsyncWrite + Send + Unpin> {
    let pipe = io::stdout().as_fd().try_clone_to_owned().and_then(pipe::Sender::from_owned_fd);
    pipe.map_or_else(|_| Box::new(tokio::io::stdout()) as _, |pipe| Box::new(pipe) as _)
}

/// Starts a process that is not waited for. It keeps stdout and stderr open, as processes that package runners leave
/// behind do.
fn spawn(grandchild: Grandchild) -> io::Result<()> {
    // An ignored signal stays ignored in the program that replaces the shell, and in processes that the shell forks.
    const STUBBORN: &str = "trap '' TERM; exec sleep \"$0\"";
    const ORPHANED: &str = "trap '' TERM; sleep \"$0\" &";
    let (line, between): (&[&str], bool) = match grandchild {
        Grandchild::Plain => (&["sleep"], false),
        Grandchild::IgnoreTerm => (&["sh", "-c", STUBBORN], false),
        Grandchild::Setsid => (&["setsid", "sleep"], false),
        Grandchild::DoubleFork => (&["sh", "-c", ORPHANED], true),
        // The shell is no leader of a group, so `setsid` replaces it without a fork.
        Grandchild::Daemon => (&["setsid", "sh", "-c", ORPHANED], true),
    };
    let mut child = Command::new(line[0]).args(&line[1..]).arg(GRANDCHILD_SECONDS).stdin(Stdio::null()).spawn()?;
    // The process that forks and ends is reaped here.
    if between { child.wait().map(drop) } else { Ok(()) }
}

/// Ends this process by a signal. If that has no effect because the signal is ignored (as SIGPIPE is) or handled,
/// returns the exit code of a shell, 128 + `number`.
pub(super) fn exit_by_signal(number: i32) -> i32 {
    // An intended segmentation fault should leave no core file in the working directory.
    let _ = setrlimit(Resource::RLIMIT_CORE, 0, 0);
    if let Ok(signal) = Signal::try_from(number) {
        // Twice: the first SIGSEGV only reaches Rust's handler for stack overflows, which then removes itself.
        let _ = raise(signal).and_then(|()| raise(signal));
    }
    128 + number
}
