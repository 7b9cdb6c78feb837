//! `satellite call`, `restart`, `stop`, `start`, `reconnect`, `reload`, `prune`

use std::time::Duration;

use clap::Args;
use mcp_satellite_actors::model::remote::ConnectionState;
use mcp_satellite_actors::model::status::Status;
use serde_json::value::RawValue;

use super::status::with_next_step;
use super::{
    BAD_INPUT, CommandFailure, DONE, DataDirArg, FAILED, InstanceArg, print_error, print_json, print_text, printable,
    to_json,
};
use crate::console::api::{
    CallRequest, ControlResult, InstanceSelector, InstanceStatus, PruneResult, ReconnectResult, ReloadQuery,
    ReloadResult,
};
use crate::console::client::{ClientError, ConsoleClient};

const POLL: Duration = Duration::from_millis(100);

impl From<InstanceArg> for InstanceSelector {
    fn from(target: InstanceArg) -> Self {
        Self { server: target.server, team: target.team, user: target.user }
    }
}

#[derive(Debug, Args)]
pub(super) struct CallCommand {
    #[command(flatten)]
    target: InstanceArg,
    /// Name of the tool, as the server defines it
    tool: String,
    /// Arguments of the tool, a JSON object
    #[arg(value_name = "JSON")]
    arguments: Option<String>,
    /// Maximum total time, such as 10s or 2m [default: the server's request_timeout]
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration)]
    timeout: Option<Duration>,
    /// Print a failure as JSON, too: {"error": {kind, message, fate, status, …}}
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    data_dir: DataDirArg,
}

impl CallCommand {
    pub(super) async fn run(self) -> Result<u8, CommandFailure> {
        let bad = |why: String| CommandFailure::new(BAD_INPUT, why);
        let arguments = match self.arguments {
            None => None,
            Some(text) => {
                let arguments = RawValue::from_string(text).map_err(|error| {
                    bad(format!("the arguments are not JSON: {error}; a tool takes an object such as '{{\"a\": 1}}'"))
                })?;
                if !arguments.get().trim_start().starts_with('{') {
                    return Err(bad("the arguments of a tool must be a JSON object, such as '{\"a\": 1}'".to_owned()));
                }
                Some(arguments)
            }
        };
        let timeout_ms = self.timeout.map(|timeout| u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX));
        let request = CallRequest { selector: self.target.into(), tool: self.tool, arguments, timeout_ms };
        let result = match self.data_dir.client()?.post_text("/v1/call", &request).await {
            Ok(result) => result,
            Err(ClientError::Refused(failure)) if self.json => {
                let failed = CommandFailure::from(ClientError::Refused(failure.clone()));
                print_json(&to_json(&serde_json::json!({ "error": failure }))?);
                return Ok(failed.code);
            }
            Err(error) => return Err(error.into()),
        };
        print_json(&result);
        let is_error = serde_json::from_str::<serde_json::Value>(&result)
            .ok()
            .and_then(|result| result.get("isError")?.as_bool())
            .unwrap_or(false);
        Ok(if is_error { FAILED } else { DONE })
    }
}

#[derive(Debug, Args)]
pub(super) struct StopCommand {
    #[command(flatten)]
    target: InstanceArg,
    #[command(flatten)]
    data_dir: DataDirArg,
}

impl StopCommand {
    pub(super) async fn run(self) -> Result<u8, CommandFailure> {
        let stopped: ControlResult =
            self.data_dir.client()?.post("/v1/stop", &InstanceSelector::from(self.target)).await?;
        print_text(&status_sentence(&stopped.instance));
        warn_not_durable(stopped.not_durable.as_deref());
        Ok(DONE)
    }
}

#[derive(Debug, Args)]
pub(super) struct ControlCommand {
    #[command(flatten)]
    target: InstanceArg,
    /// Do not wait until it is online
    #[arg(long)]
    no_wait: bool,
    #[command(flatten)]
    data_dir: DataDirArg,
}

impl ControlCommand {
    pub(super) async fn run(self, verb: &str) -> Result<u8, CommandFailure> {
        let client = self.data_dir.client()?;
        let controlled: ControlResult =
            client.post(&format!("/v1/{verb}"), &InstanceSelector::from(self.target)).await?;
        warn_not_durable(controlled.not_durable.as_deref());
        let row = controlled.instance;
        let row = if self.no_wait { row } else { wait_settled(&client, row).await? };
        if self.no_wait || row.status == Status::Online {
            print_text(&status_sentence(&row));
            return Ok(DONE);
        }
        print_error(&status_sentence(&row));
        Ok(FAILED)
    }
}

#[derive(Debug, Args)]
pub(super) struct ReconnectCommand {
    #[command(flatten)]
    target: InstanceArg,
    /// Print {"instance", "success", "status", "status_message", "not_durable"}
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    data_dir: DataDirArg,
}

impl ReconnectCommand {
    pub(super) async fn run(self) -> Result<u8, CommandFailure> {
        let selector = InstanceSelector::from(self.target);
        let outcome: ReconnectResult = self.data_dir.client()?.post("/v1/reconnect", &selector).await?;
        let ReconnectResult { instance, success, status, status_message, next_step, not_durable } = &outcome;
        warn_not_durable(not_durable.as_deref());
        let words = with_next_step(&sentence(instance, *status, "", status_message.as_deref()), next_step.as_deref());
        match (self.json, success) {
            (true, _) => print_json(&to_json(&outcome)?),
            (false, true) => print_text(&words),
            (false, false) => print_error(&words),
        }
        Ok(if *success { DONE } else { FAILED })
    }
}

#[derive(Debug, Args)]
pub(super) struct ReloadCommand {
    /// Apply the configuration even if it removes more than half of the servers
    #[arg(long)]
    accept: bool,
    #[command(flatten)]
    data_dir: DataDirArg,
}

impl ReloadCommand {
    pub(super) async fn run(self) -> Result<u8, CommandFailure> {
        let request = ReloadQuery { accept: self.accept };
        let ReloadResult { servers, teams, endpoint_problem, console_problem } =
            self.data_dir.client()?.post("/v1/reload", &request).await?;
        print_text(&format!("configuration applied; servers: {servers}, teams: {teams}"));
        for problem in [endpoint_problem, console_problem].into_iter().flatten() {
            print_error(&format!("warning: {problem}"));
        }
        Ok(DONE)
    }
}

#[derive(Debug, Args)]
pub(super) struct PruneCommand {
    /// Print {"instances": ["TEAM/USER/INSTALLATION", …]}
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    data_dir: DataDirArg,
}

impl PruneCommand {
    pub(super) async fn run(self) -> Result<u8, CommandFailure> {
        let pruned: PruneResult = self.data_dir.client()?.post("/v1/prune", &()).await?;
        if self.json {
            print_text(&to_json(&pruned)?);
        } else if pruned.instances.is_empty() {
            print_text("nothing to erase");
        } else {
            for instance in &pruned.instances {
                print_text(&format!("erased the data of {}", printable(instance)));
            }
        }
        Ok(DONE)
    }
}

pub(super) fn warn_not_durable(reason: Option<&str>) {
    if let Some(reason) = reason {
        print_error(&format!(
            "warning: not durable: {}; the command is lost if the satellite is killed before the disk stores it",
            printable(reason)
        ));
    }
}

/// Formats a status as a sentence: `files-acme-alice-f1 is online (pid 4711)`.
pub(super) fn status_sentence(row: &InstanceStatus) -> String {
    let pid = row.pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default();
    with_next_step(&sentence(&row.instance, row.status, &pid, row.status_message.as_deref()), row.next_step.as_deref())
}

fn sentence(instance: &str, status: Status, more: &str, why: Option<&str>) -> String {
    let why = why.map(|message| format!(": {}", printable(message))).unwrap_or_default();
    format!("{instance} is {status}{more}{why}")
}

/// Waits until the instance has left all transitional states. Every transition has a time limit.
pub(super) async fn wait_settled(
    client: &ConsoleClient,
    mut row: InstanceStatus,
) -> Result<InstanceStatus, CommandFailure> {
    let selector = InstanceSelector { server: row.instance.clone(), team: None, user: None };
    // A lost remote server keeps its status while it is reconnecting.
    let connecting = |row: &InstanceStatus| {
        row.connection.is_some_and(|now| matches!(now, ConnectionState::Connecting | ConnectionState::Reconnecting))
    };
    while (row.status.is_transitional() || connecting(&row)) && row.next_retry_ms.is_none() {
        tokio::time::sleep(POLL).await;
        row = client.post("/v1/resolve", &selector).await?;
    }
    Ok(row)
}
