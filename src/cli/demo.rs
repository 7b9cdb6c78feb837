//! `satellite demo`: two teams, five users, real child processes of this binary's own `sim-server`.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use mcp_satellite_actors::model::snapshot::{InstanceView, Snapshot};

use super::run::{LogArgs, supervise, suspend_progress_bar};
use super::{BAD_INPUT, CommandFailure, DEMO_DATA_DIR, DataDirArg, FAILED, flag, location, shell_word, try_print};
use crate::config::{self, ConfigErrors, Plan};
use crate::console::api::EndpointStatus;
use mcp_satellite_process::keeper::KeeperLink;

const CLIENT: (&str, &str) = ("team_acme", "user_alice");

const PATIENCE: Duration = Duration::from_secs(5);

/// Configuration of the demo. The server `flaky` crashes on purpose, so that restarts are visible at once.
const EXAMPLE: &str = r#"
[satellite]
name = "satellite-demo"
keep_servers = false

[policy.idle]
idle = "off"

[servers.notes]
command = "SELF"
args = ["sim-server", "--name", "notes", "--tools", "4"]

[servers.search]
command = "SELF"
args = ["sim-server", "--name", "search", "--tools", "3", "--call-delay", "50ms"]

[servers.flaky]
command = "SELF"
args = ["sim-server", "--name", "flaky", "--exit-after", "20s", "--exit-code", "1", "--stderr-text", "error: this server crashes on purpose after 20 s"]

[[teams]]
id = "team_acme"
slug = "acme"
users = [{ id = "user_alice", slug = "alice" }, { id = "user_bob", slug = "bob" }, { id = "user_carol", slug = "carol" }]

[[teams.installations]]
id = "n1"
server = "notes"

[[teams.installations]]
id = "f1"
server = "flaky"
users = ["user_alice"]

[[teams]]
id = "team_globex"
slug = "globex"
users = [{ id = "user_dave", slug = "dave" }, { id = "user_erin", slug = "erin" }]

[[teams.installations]]
id = "s1"
server = "search"
"#;

#[derive(Debug, Clone, Args)]
pub(super) struct DemoCommand {
    /// Address of the MCP endpoint, such as 127.0.0.1:7300 or localhost:7300; :7300 means this machine only
    #[arg(long, value_name = "ADDR", value_parser = config::listen_address)]
    listen: Option<SocketAddr>,
    /// Directory of the demo's data and control socket [default: .satellite-demo]
    #[arg(long, value_name = "DIR", env = "SATELLITE_DATA_DIR")]
    data_dir: Option<PathBuf>,
    #[command(flatten)]
    log: LogArgs,
}

impl DemoCommand {
    pub(super) async fn run(self, below: KeeperLink) -> Result<u8, CommandFailure> {
        self.log.init();
        let program = std::env::current_exe()
            .map_err(|error| CommandFailure::new(FAILED, format!("cannot find this program's own file: {error}")))?;
        let program = program.display().to_string();
        let plan = example_plan(&program, self.listen)?;
        let servers = plan.instances.len();
        let command = shell_word(&program);
        let location = location(self.data_dir.as_deref(), DEMO_DATA_DIR);
        supervise(plan, &location, None, below, |satellite| {
            let named = DataDirArg { data_dir: self.data_dir.clone() };
            // Commands omit --data-dir if they find the demo anyway, as the only running satellite.
            let is_found =
                named.resolve().is_ok_and(|found| found.canonicalize().is_ok_and(|it| it == satellite.data_dir()));
            let data_dir = if is_found { named.flag() } else { flag(&location.path) };
            let (runtime, home) = (satellite.runtime().clone(), satellite.data_dir().to_owned());
            let (endpoint, console) = (satellite.endpoint(), satellite.console_url());
            tokio::spawn(async move {
                let up = |snapshot: &Arc<Snapshot>| {
                    snapshot.len() == servers && snapshot.iter().all(|view| !view.status.is_transitional())
                };
                // The instructions are printed last, even if a server does not start.
                let _ = tokio::time::timeout(PATIENCE, runtime.watch().wait_for(up)).await;
                let snapshot = runtime.snapshot();
                let victim = snapshot.iter().find(|view| view.spec.server.as_str() == "notes");
                let typed = |verb: &str| format!("{command} {verb}{data_dir}");
                suspend_progress_bar(|| {
                    print_introduction(&home, servers, typed, victim.map(|view| &**view), endpoint.as_ref(), console);
                });
            });
        })
        .await
    }
}

fn example_plan(program: &str, listen: Option<SocketAddr>) -> Result<Plan, CommandFailure> {
    let text = EXAMPLE.replace("\"SELF\"", &serde_json::Value::from(program).to_string());
    let refused = |errors: ConfigErrors| CommandFailure::new(FAILED, errors.to_string());
    let mut plan = config::parse("demo.toml", &text, &|_| None).map_err(refused)?;
    plan.gateway.enable_stored_token(CLIENT.0, CLIENT.1);
    match listen {
        Some(address) => {
            plan.with_listen_address(address).map_err(|errors| CommandFailure::new(BAD_INPUT, join_errors(&errors)))
        }
        None => Ok(plan),
    }
}

fn join_errors(errors: &ConfigErrors) -> String {
    let lines = errors.items().into_iter().map(|item| format!("{} ({})", item.message, item.hint));
    lines.collect::<Vec<_>>().join("; ")
}

/// Prints what to try. `typed` turns a subcommand into a command line for another terminal.
fn print_introduction(
    data_dir: &Path,
    servers: usize,
    typed: impl Fn(&str) -> String,
    victim: Option<&InstanceView>,
    endpoint: Option<&EndpointStatus>,
    console: Option<String>,
) {
    let data_dir = data_dir.display();
    let pid = victim.and_then(|view| view.pid).map_or_else(|| "PID".to_owned(), |pid| pid.to_string());
    let name = victim.map_or("one by the pid that status shows", |view| &view.spec.name);
    let kill = format!("kill {name}, and see it come back as another process");
    try_print(&format!(
        "\nThe demo runs {servers} servers of 5 users in 2 teams. In another terminal, in this directory, try:\n"
    ));
    if let Some(url) = console {
        let command = typed("console");
        try_print(&format!("  {command}\n      open the console in a browser: {url}/console/"));
    }
    for (what, command) in [
        ("show the status of all servers", typed("status --watch")),
        ("call a tool", typed("call notes echo '{\"text\": \"hello\"}' --user alice")),
        (&kill, format!("kill -9 {pid}")),
        ("show all events", typed("events --follow")),
        ("stop a server; only `start` starts it again", typed("stop search --user dave")),
        ("read the stderr of a server", typed("logs flaky")),
    ] {
        try_print(&format!("  {command}\n      {what}"));
    }
    if endpoint.is_some() {
        try_print(&format!(
            "  {}\n      connect Claude Code as alice, or another client by its name",
            typed("connect claude-code")
        ));
    }
    try_print(&format!(
        "\n`flaky` crashes every 20 seconds on purpose: watch its delays grow until it is permanently_failed, then\n  {}\n\nData is in {data_dir}. Ctrl-C ends the demo and every process of it.\n",
        typed("restart flaky")
    ));
}
