//! Command line of the satellite: one module for each subcommand. Exit codes: 0 success, 1 a tool or a server failed, 2
//! bad input, 3 no satellite is running.

#![expect(clippy::doc_markdown, reason = "these comments are the text of --help")]

mod auth;
mod backend;
mod check;
mod clients;
mod completions;
mod configure;
mod control;
mod demo;
mod down;
mod events;
mod load;
mod log_writer;
mod print;
mod run;
mod sim_server;
mod status;
mod table;
mod token;
mod tools;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

use crate::console::api::ConsoleFilter;
use crate::console::client::{ClientError, ConsoleClient};
use crate::known_dirs::{self, DataDirLocation};
use mcp_satellite_process::huge_pages;
use mcp_satellite_process::reaper::{self, ReaperLink};
use print::{print_error, print_json, print_styled, print_styled_error, print_text, printable, to_json, try_print};

/// Upper limit for the time to wait at exit for tasks on blocking threads.
const LAST_TASKS: Duration = Duration::from_millis(500);

const DONE: u8 = 0;
const FAILED: u8 = 1;
const BAD_INPUT: u8 = 2;
const NO_SATELLITE: u8 = 3;

/// Supervises MCP servers: starts them, keeps them callable, and reports the status of each.
#[derive(Parser)]
#[command(
    name = "satellite",
    version,
    max_term_width = 110,
    after_help = "\
Getting started:
  satellite demo                          two teams of example servers, and commands to try
  satellite run --mcp-json mcp.json       the servers of a Claude, Cursor or VS Code configuration
  satellite status --watch                the status of all servers
  satellite call SERVER TOOL '{\"a\": 1}'   one tool call

Exit codes: 0 done, 1 a tool or a server failed, 2 bad input, 3 no satellite is running."
)]
struct Cli {
    #[command(subcommand)]
    verb: CliCommand,
}

#[derive(Subcommand)]
enum CliCommand {
    /// Run the servers of a configuration, in the foreground, until SIGTERM or SIGINT
    Run(run::RunCommand),
    /// Stop the running satellite and wait until it has ended
    Down(down::DownCommand),
    /// Run an example: two teams, five users, real child processes
    Demo(demo::DemoCommand),
    /// Report every error of a configuration at once
    Check(check::CheckCommand),
    /// Show every server: status, process, tools, restarts
    Status(status::StatusCommand),
    /// List the connected clients: sessions, and clients without a session that have an open request or stream or had
    /// one within the last minute
    Clients(clients::ClientsCommand),
    /// Call one tool and print its result as JSON
    Call(control::CallCommand),
    /// List the tools that are offered
    Tools(tools::ToolsCommand),
    /// Print events of a satellite
    Events(events::EventsCommand),
    /// Print what a server wrote to stderr
    Logs(events::LogsCommand),
    /// Restart a server and clear its crash history; also leaves permanently_failed
    Restart(control::ControlCommand),
    /// Stop a server; only `start` starts it again
    Stop(control::StopCommand),
    /// Start a server that was stopped
    Start(control::ControlCommand),
    /// Reconnect a remote server now; restart a server that is a process
    Reconnect(control::ReconnectCommand),
    /// Read the configuration again, now
    Reload(control::ReloadCommand),
    /// Erase the data of servers that are not configured any more, without waiting for the retention
    Prune(control::PruneCommand),
    /// Set values that a server's configuration requires from its user
    Configure(configure::ConfigureCommand),
    /// Authorize a remote server by OAuth, or revoke the authorization
    Auth(auth::AuthCommand),
    /// Generate a token for a client of the MCP endpoint, and the line to write into the configuration for it
    Token(token::TokenCommand),
    /// Run a control plane for satellites: gives them their configuration and commands, and stores what they report
    Backend(backend::BackendCliCommand),
    /// Run load and faults against a fleet of simulated or real servers and check the guarantees
    Load(Box<load::LoadCommand>),
    /// Print a completion script for a shell
    Completions(completions::CompletionsCommand),
    /// Run a scripted MCP server over stdio or HTTP, for tests, the demo and the load harness
    #[command(hide = true)]
    SimServer(Box<sim_server::SimServerCommand>),
}

/// Location of a satellite's data and its control socket.
#[derive(Debug, Clone, Args)]
struct DataDirArg {
    /// Directory of the satellite's data and control socket [default: .satellite]
    #[arg(long, value_name = "DIR", env = "SATELLITE_DATA_DIR")]
    data_dir: Option<PathBuf>,
}

const DATA_DIR: &str = ".satellite";
const DEMO_DATA_DIR: &str = ".satellite-demo";

impl DataDirArg {
    fn location(&self) -> DataDirLocation {
        location(self.data_dir.as_deref(), DATA_DIR)
    }

    fn client(&self) -> Result<ConsoleClient, CommandFailure> {
        Ok(ConsoleClient::new(&self.find()?)?)
    }

    /// Returns the data directory of the running satellite, and prints a note if it is not the default one.
    fn find(&self) -> Result<PathBuf, CommandFailure> {
        let found = self.resolve()?;
        if self.data_dir.is_none() && found != Path::new(DATA_DIR) {
            let found = found.display();
            print_error(&format!("no satellite is running on `{DATA_DIR}`; using the one on `{found}`"));
        }
        Ok(found)
    }

    /// Returns the named data directory, or else the default one if a satellite is running on it, or else that of the
    /// only running satellite of this user.
    fn resolve(&self) -> Result<PathBuf, CommandFailure> {
        let here = self.location();
        if here.is_named {
            return Ok(here.path);
        }
        match here.open_existing() {
            Ok(directory) if known_dirs::is_running(&directory) => return Ok(here.path),
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(ClientError::Unsafe(error).into());
            }
            Ok(_) | Err(_) => {}
        }
        let mut running = known_dirs::running_dirs();
        // The demo in this directory is found even if the record of data directories cannot be written.
        if let Ok(demo) = location(None, DEMO_DATA_DIR).open_existing()
            && known_dirs::is_running(&demo)
            && !running.iter().any(|path| path == demo.path())
        {
            running.push(demo.path().to_owned());
        }
        match running.as_slice() {
            [] => Ok(here.path),
            [only] => Ok(only.clone()),
            several => {
                let several: Vec<String> = several.iter().map(|path| format!("`{}`", path.display())).collect();
                let message = format!(
                    "no satellite is running on `{DATA_DIR}`, and several are running elsewhere: {}; name one with --data-dir",
                    several.join(", ")
                );
                Err(CommandFailure::new(NO_SATELLITE, message))
            }
        }
    }

    /// Returns the flag that commands in another terminal need to find this directory.
    fn flag(&self) -> String {
        match &self.data_dir {
            Some(dir) if dir != Path::new(DATA_DIR) => flag(dir),
            Some(_) | None => String::new(),
        }
    }
}

fn location(named: Option<&Path>, default: &str) -> DataDirLocation {
    DataDirLocation { path: named.unwrap_or(Path::new(default)).to_owned(), is_named: named.is_some() }
}

fn flag(data_dir: &Path) -> String {
    format!(" --data-dir {}", shell_word(&data_dir.to_string_lossy()))
}

/// Selection of one instance.
#[derive(Debug, Clone, Args)]
struct InstanceArg {
    /// A server's slug where it is unique, else its full name: SERVER-TEAM-USER-INSTALLATION (in `status --json`)
    server: String,
    /// Only servers of this team (slug or id)
    #[arg(long, value_name = "TEAM")]
    team: Option<String>,
    /// Only servers of this user (slug or id)
    #[arg(long, value_name = "USER")]
    user: Option<String>,
}

/// Filter for lists of instances.
#[derive(Debug, Clone, Args)]
struct ListFilterArgs {
    /// Only this team (slug or id)
    #[arg(long, value_name = "TEAM")]
    team: Option<String>,
    /// Only this user (slug or id)
    #[arg(long, value_name = "USER")]
    user: Option<String>,
}

impl From<ListFilterArgs> for ConsoleFilter {
    fn from(only: ListFilterArgs) -> Self {
        Self { team: only.team, user: only.user }
    }
}

struct CommandFailure {
    code: u8,
    message: String,
}

impl CommandFailure {
    fn new(code: u8, message: impl Into<String>) -> Self {
        let message: String = message.into();
        Self { code, message: mcp_satellite_actors::model::printable::lines(&message) }
    }

    fn from_styled(code: u8, message: String) -> Self {
        Self { code, message }
    }
}

impl From<ClientError> for CommandFailure {
    fn from(error: ClientError) -> Self {
        let code = match &error {
            ClientError::NotRunning { .. } => NO_SATELLITE,
            ClientError::Refused(failure) => match failure.kind.as_str() {
                "bad_input" | "ambiguous" | "not_found" => BAD_INPUT,
                _ => FAILED,
            },
            ClientError::Unsafe(_) | ClientError::ConnectionLost(_) => FAILED,
        };
        let (next, step) = match &error {
            ClientError::Refused(failure) => (failure.next_retry_ms, failure.next_step.as_ref()),
            ClientError::NotRunning { .. } | ClientError::Unsafe(_) | ClientError::ConnectionLost(_) => (None, None),
        };
        let next = next.map(|left| format!("; next attempt in {:.1} s", left as f64 / 1000.0)).unwrap_or_default();
        let step = step.map(|step| format!(" (next: {step})")).unwrap_or_default();
        Self::new(code, format!("{error}{next}{step}"))
    }
}

impl From<std::io::Error> for CommandFailure {
    fn from(error: std::io::Error) -> Self {
        Self::new(FAILED, error.to_string())
    }
}

/// Runs the subcommand in the arguments of this process.
pub fn main() -> ExitCode {
    huge_pages::turn_off();
    let cli = Cli::parse();
    let outcome = match cli.verb {
        CliCommand::SimServer(verb) => std::process::exit(verb.run()),
        // A subcommand that starts servers runs below the reaper, which ends leftover processes. No thread exists yet.
        CliCommand::Run(verb) => {
            return run_below_reaper(|below| report_outcome(run_async(verb.run(below))));
        }
        CliCommand::Demo(verb) => {
            return run_below_reaper(|below| report_outcome(run_async(verb.run(below))));
        }
        CliCommand::Load(verb) if verb.is_real() => {
            return run_below_reaper(|below| report_outcome(verb.run(Some(below))));
        }
        CliCommand::Load(verb) => verb.run(None),
        CliCommand::Down(verb) => run_async(verb.run()),
        CliCommand::Status(verb) => run_async(verb.run()),
        CliCommand::Clients(verb) => run_async(verb.run()),
        CliCommand::Call(verb) => run_async(verb.run()),
        CliCommand::Tools(verb) => run_async(verb.run()),
        CliCommand::Events(verb) => run_async(verb.run()),
        CliCommand::Logs(verb) => run_async(verb.run()),
        CliCommand::Restart(verb) => run_async(verb.run("restart")),
        CliCommand::Stop(verb) => run_async(verb.run()),
        CliCommand::Start(verb) => run_async(verb.run("start")),
        CliCommand::Reconnect(verb) => run_async(verb.run()),
        CliCommand::Reload(verb) => run_async(verb.run()),
        CliCommand::Prune(verb) => run_async(verb.run()),
        CliCommand::Configure(verb) => run_async(verb.run()),
        CliCommand::Auth(verb) => run_async(verb.run()),
        CliCommand::Check(verb) => run_async(verb.run()),
        CliCommand::Backend(verb) => run_async(verb.run()),
        CliCommand::Token(verb) => verb.run(),
        CliCommand::Completions(verb) => Ok(verb.run()),
    };
    report_outcome(outcome).into()
}

fn run_below_reaper(satellite: impl FnOnce(ReaperLink) -> u8) -> ExitCode {
    match reaper::run_with_reaper(satellite) {
        Ok(code) => code,
        Err(error) => {
            report_outcome(Err(CommandFailure::new(FAILED, format!("cannot start the reaper: {error}")))).into()
        }
    }
}

fn run_async(verb: impl Future<Output = Result<u8, CommandFailure>>) -> Result<u8, CommandFailure> {
    match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => {
            let outcome = runtime.block_on(verb);
            // A pending DNS lookup must not delay the exit of the process.
            runtime.shutdown_timeout(LAST_TASKS);
            outcome
        }
        Err(error) => Err(CommandFailure::new(FAILED, format!("cannot start the async runtime: {error}"))),
    }
}

fn report_outcome(outcome: Result<u8, CommandFailure>) -> u8 {
    log_writer::finish();
    match outcome {
        Ok(code) => code,
        Err(CommandFailure { code, message }) => {
            // Printed on another thread: stderr may be a file on a hanging disk.
            let (done, written) = std::sync::mpsc::channel();
            let print = move || {
                print_styled_error(&message);
                // An error means that the time has passed.
                let _ = done.send(());
            };
            if std::thread::Builder::new().spawn(print).is_ok() {
                // An error means that the message was not printed in time.
                let _ = written.recv_timeout(mcp_satellite_files::disk::WAIT_MAX);
            }
            code
        }
    }
}

fn shell_word(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-+".contains(&byte);
    if text.bytes().all(plain) { text.to_owned() } else { format!("'{}'", text.replace('\'', r"'\''")) }
}
