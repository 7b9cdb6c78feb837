//! `satellite demo`: two teams, five users, real child processes of this binary's own `sim-server`.

use clap::Args;

use super::run::{Log, supervise};
use super::{DataDir, FAILED, Failed, say, shell_word};
use crate::config::{self, Plan};
use crate::satellite::Satellite;

/// One server that flaps on purpose, so that there is something to see before anything is killed.
const EXAMPLE: &str = r#"
[satellite]
name = "satellite-demo"

[servers.notes]
command = "SELF"
args = ["sim-server", "--name", "notes", "--tools", "4"]

[servers.search]
command = "SELF"
args = ["sim-server", "--name", "search", "--tools", "3", "--call-delay", "50ms"]

[servers.flaky]
command = "SELF"
args = ["sim-server", "--name", "flaky", "--exit-after", "20s", "--exit-code", "1"]

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

#[derive(Debug, Args)]
pub(super) struct Demo {
    #[command(flatten)]
    data_dir: DataDir,
    #[command(flatten)]
    log: Log,
}

impl Demo {
    pub(super) async fn run(self) -> Result<u8, Failed> {
        self.log.init();
        let program = std::env::current_exe()
            .map_err(|error| Failed::new(FAILED, format!("cannot find this program's own file: {error}")))?;
        let program = program.display().to_string();
        let plan = || example(&program);
        let first = plan()?;
        let servers = first.instances.len();
        let (command, data_dir) = (shell_word(&program), self.data_dir.flag());
        let typed = |verb: &str| format!("{command} {verb}{data_dir}");
        supervise(first, &self.data_dir.data_dir, plan, |satellite| introduce(satellite, servers, typed)).await
    }
}

fn example(program: &str) -> Result<Plan, Failed> {
    let text = EXAMPLE.replace("\"SELF\"", &serde_json::Value::from(program).to_string());
    config::parse("demo.toml", &text, &|_| None).map_err(|errors| Failed::new(FAILED, errors.to_string()))
}

/// `typed` makes of a verb a command that works in another terminal.
fn introduce(satellite: &Satellite, servers: usize, typed: impl Fn(&str) -> String) {
    let data_dir = satellite.data_dir().display();
    say(&format!(
        "\nThe demo runs {servers} servers of 5 users in 2 teams. In another terminal, in this directory, try:\n"
    ));
    for (what, command) in [
        ("see them", typed("status --watch")),
        ("call one", typed("call notes echo '{\"text\": \"hello\"}' --user alice")),
        ("kill one, by the PID that status shows, and see it come back", "kill -9 PID".to_owned()),
        ("see what happened", typed("events --follow")),
        ("stop one; only `start` brings it back", typed("stop search --user dave")),
        ("read what one wrote to stderr", typed("logs flaky")),
    ] {
        say(&format!("  {command}\n      {what}"));
    }
    say(&format!(
        "\n`flaky` crashes every 20 seconds on purpose: watch its delays grow until it is permanently_failed, then\n  {}\n\nData is in {data_dir}. Ctrl-C ends the demo and every process of it.\n",
        typed("restart flaky")
    ));
}
