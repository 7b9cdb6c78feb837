//! Command line of the satellite: one module for each subcommand. Exit codes: 0 success, 1 a tool or a server failed, 2
//! bad input, 3 no satellite is running.

#![expect(clippy::doc_markdown, reason = "these comments are the text of --help")]

mod args;
mod auth;
mod backend;
mod background;
mod check;
mod clients;
mod completions;
mod configure;
mod confirm;
mod connect;
mod console;
mod control;
mod demo;
mod doctor;
mod down;
mod events;
mod exit;
mod file_diff;
mod import;
mod installed_binary;
mod load;
mod log_writer;
mod man_pages;
mod open_browser;
mod print;
mod run;
mod service;
mod service_notifications;
mod sim_server;
mod status;
mod stdio;
mod table;
mod token;
mod tools;
mod top;
mod up;
mod worker_threads;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use args::{DEMO_DATA_DIR, DataDirArg, InstanceArg, ListFilterArgs, flag, location, shell_word};
use exit::{BAD_INPUT, CommandFailure, DONE, FAILED, LAST_TASKS, NO_SATELLITE};
use mcp_satellite_process::huge_pages;
use mcp_satellite_process::keeper::{self, KeeperLink};
use mcp_satellite_process::program_pages::ProgramPages;
use print::{print_error, print_json, print_styled, print_styled_error, print_text, printable, to_json, try_print};
use worker_threads::WorkerObserver;

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
  satellite up                            the servers of your own configuration, in the background
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
    /// Start the user's satellite in the background, and wait until its endpoint is open
    Up(up::UpCommand),
    /// Stop the running satellite and wait until it has ended
    Down(down::DownCommand),
    /// Install, remove or show the systemd unit that runs the user's satellite
    Service(service::ServiceCommand),
    /// Run an example: two teams, five users, real child processes
    Demo(demo::DemoCommand),
    /// Report every error of a configuration at once
    Check(check::CheckCommand),
    /// Add the servers of MCP clients to your configuration
    Import(import::ImportCommand),
    /// Show every server: status, process, tools, restarts
    Status(status::StatusCommand),
    /// Watch the instances in the terminal: table, filter, output, tree of actors, restart
    Top(top::TopCommand),
    /// List the clients: those with a session, and those that had a request or stream open within the last minute
    Clients(clients::ClientsCommand),
    /// Connect an MCP client: add one entry `satellite` to its configuration
    Connect(Box<connect::ConnectCommand>),
    /// Disconnect an MCP client: remove the entry `satellite` from its configuration
    Disconnect(connect::DisconnectCommand),
    /// Open the console in a browser, with a link that logs in once
    Console(console::ConsoleCommand),
    /// Find out what is wrong: satellite, configuration, machine, clients, each server, with the next step
    Doctor(doctor::DoctorCommand),
    /// Call one tool and print its result as JSON
    Call(control::CallCommand),
    /// List the tools of all servers
    Tools(tools::ToolsCommand),
    /// Print events of a satellite
    Events(events::EventsCommand),
    /// Print what a server wrote to stderr
    Logs(events::LogsCommand),
    /// Restart a server, and clear its crash history and permanent failure
    Restart(control::ControlCommand),
    /// Stop a server; only `start` starts it again
    Stop(control::StopCommand),
    /// Start a server that was stopped
    Start(control::ControlCommand),
    /// Reconnect a remote server, or restart a server that is a process
    Reconnect(control::ReconnectCommand),
    /// Read the configuration again and apply it
    Reload(control::ReloadCommand),
    /// Erase the data of servers that are not configured any more, without waiting for the retention
    Prune(control::PruneCommand),
    /// Set values that a server's configuration requires from its user
    Configure(configure::ConfigureCommand),
    /// Authorize a remote server by OAuth, or revoke the authorization
    Auth(auth::AuthCommand),
    /// Generate a token for a client of the MCP endpoint, with the line for the configuration
    Token(token::TokenCommand),
    /// Connect an MCP client that starts a command: messages on stdin and stdout, the running satellite behind them
    Stdio(stdio::StdioCommand),
    /// Run a control plane that sends configurations and commands to satellites and stores their reports
    Backend(backend::BackendCliCommand),
    /// Send calls and faults to a fleet of simulated or real servers, and check the guarantees
    Load(Box<load::LoadCommand>),
    /// Print a completion script for a shell
    Completions(completions::CompletionsCommand),
    /// Write a man page for each command into a directory
    ManPages(man_pages::ManPagesCommand),
    /// Run a scripted MCP server over stdio or HTTP, for tests, the demo and the load harness
    #[command(hide = true)]
    SimServer(Box<sim_server::SimServerCommand>),
}

/// Runs the subcommand in the arguments of this process.
pub fn main() -> ExitCode {
    huge_pages::turn_off();
    let cli = Cli::parse();
    let outcome = match cli.verb {
        CliCommand::SimServer(verb) => std::process::exit(verb.run()),
        // A subcommand that starts servers runs below the keeper, which ends leftover processes. No thread exists yet.
        CliCommand::Run(verb) => {
            verb.detach();
            return run_below_keeper(|below| report_outcome(run_satellite(verb.clone().run(below))));
        }
        CliCommand::Demo(verb) => {
            return run_below_keeper(|below| report_outcome(run_satellite(verb.clone().run(below))));
        }
        CliCommand::Load(verb) if verb.is_real() => {
            return run_below_keeper(|below| report_outcome(verb.clone().run(Some(below))));
        }
        CliCommand::Load(verb) => verb.run(None),
        CliCommand::Up(verb) => run_async(verb.run()),
        CliCommand::Service(verb) => verb.run(),
        CliCommand::Down(verb) => run_async(verb.run()),
        CliCommand::Status(verb) => run_async(verb.run()),
        CliCommand::Top(verb) => run_async(verb.run()),
        CliCommand::Clients(verb) => run_async(verb.run()),
        CliCommand::Connect(verb) => run_async(verb.run()),
        CliCommand::Disconnect(verb) => verb.run(),
        CliCommand::Doctor(verb) => run_async(verb.run()),
        CliCommand::Console(verb) => run_async(verb.run()),
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
        CliCommand::Import(verb) => verb.run(),
        CliCommand::Token(verb) => verb.run(),
        CliCommand::Stdio(verb) => verb.run(),
        CliCommand::Completions(verb) => Ok(verb.run(&mut Cli::command())),
        CliCommand::ManPages(verb) => verb.run(Cli::command()),
    };
    report_outcome(outcome).into()
}

fn run_below_keeper(satellite: impl Fn(KeeperLink) -> u8) -> ExitCode {
    match keeper::run_with_keeper(satellite) {
        Ok(code) => code,
        Err(error) => {
            report_outcome(Err(CommandFailure::new(FAILED, format!("cannot start the keeper: {error}")))).into()
        }
    }
}

fn run_async(verb: impl Future<Output = Result<u8, CommandFailure>>) -> Result<u8, CommandFailure> {
    let runtime = async_runtime()?;
    let outcome = runtime.block_on(verb);
    // A pending DNS lookup must not delay the exit of the process.
    runtime.shutdown_timeout(LAST_TASKS);
    outcome
}

const LARGE_BLOCK: usize = 1 << 20;

/// Runs a satellite. Its worker threads follow the load.
fn run_satellite(verb: impl Future<Output = Result<u8, CommandFailure>>) -> Result<u8, CommandFailure> {
    let runtime = async_runtime()?;
    let at_rest = || {
        // The allocator returns memory that was freed a second ago when it frees a large block.
        drop(std::hint::black_box(Vec::<u8>::with_capacity(LARGE_BLOCK)));
        if let Err(error) = ProgramPages::find().and_then(|pages| pages.release()) {
            tracing::debug!(%error, "cannot release pages of the program");
        }
    };
    let observer = WorkerObserver::start(runtime.handle(), at_rest)
        .map_err(|error| CommandFailure::new(FAILED, format!("cannot observe the worker threads: {error}")))?;
    let outcome = runtime.block_on(verb);
    drop(observer);
    runtime.shutdown_timeout(LAST_TASKS);
    outcome
}

fn async_runtime() -> Result<tokio::runtime::Runtime, CommandFailure> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| CommandFailure::new(FAILED, format!("cannot start the async runtime: {error}")))
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
