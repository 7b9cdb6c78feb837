//! `satellite call`, `restart`, `stop`, `start`

use std::time::Duration;

use clap::Args;
use serde_json::value::RawValue;

use super::{BAD_INPUT, DONE, DataDir, FAILED, Failed, Target, complain, say};
use crate::console::api::{CallRequest, InstanceStatus, Selector};
use crate::console::client::Client;

const POLL: Duration = Duration::from_millis(100);

impl From<Target> for Selector {
    fn from(target: Target) -> Self {
        Self { server: target.server, team: target.team, user: target.user }
    }
}

#[derive(Debug, Args)]
pub(super) struct Call {
    #[command(flatten)]
    target: Target,
    /// The tool, by the name that its server gives it
    tool: String,
    /// Its arguments, a JSON object
    #[arg(value_name = "JSON")]
    arguments: Option<String>,
    /// How long to wait over all, such as 10s or 2m [default: the server's request_timeout]
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration)]
    timeout: Option<Duration>,
    #[command(flatten)]
    data_dir: DataDir,
}

impl Call {
    pub(super) async fn run(self) -> Result<u8, Failed> {
        let bad = |why: String| Failed::new(BAD_INPUT, why);
        let arguments = match self.arguments {
            None => None,
            Some(text) => {
                let arguments = RawValue::from_string(text).map_err(|error| {
                    bad(format!("the arguments are not JSON: {error}; a tool takes an object such as '{{\"a\": 1}}'"))
                })?;
                if !arguments.get().trim_start().starts_with('{') {
                    return Err(bad("the arguments of a tool are a JSON object, such as '{\"a\": 1}'".to_owned()));
                }
                Some(arguments)
            }
        };
        let timeout_ms = self.timeout.map(|timeout| u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX));
        let request = CallRequest { selector: self.target.into(), tool: self.tool, arguments, timeout_ms };
        let result = self.data_dir.client()?.post_text("/v1/call", &request).await?;
        say(&result);
        let is_error = serde_json::from_str::<serde_json::Value>(&result)
            .ok()
            .and_then(|result| result.get("isError")?.as_bool())
            .unwrap_or(false);
        Ok(if is_error { FAILED } else { DONE })
    }
}

#[derive(Debug, Args)]
pub(super) struct Control {
    #[command(flatten)]
    target: Target,
    /// Do not wait until it is online
    #[arg(long)]
    no_wait: bool,
    #[command(flatten)]
    data_dir: DataDir,
}

impl Control {
    pub(super) async fn run(self, verb: &str) -> Result<u8, Failed> {
        let client = self.data_dir.client()?;
        let selector = Selector::from(self.target);
        let path = format!("/v1/{verb}");
        let row: InstanceStatus = client.post(&path, &selector).await?;
        let row = if verb == "stop" || self.no_wait { row } else { settled(&client, row).await? };
        let why = row.status_message.as_deref().map(|message| format!(": {message}")).unwrap_or_default();
        let pid = row.pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default();
        let text = format!("{} is {}{pid}{why}", row.instance, row.status);
        let came_up = row.status.as_str() == "online";
        if verb == "stop" || self.no_wait || came_up {
            say(&text);
            return Ok(DONE);
        }
        complain(&text);
        Ok(FAILED)
    }
}

/// Waits until the instance is no longer on its way. It always arrives somewhere: every transition has its limit.
async fn settled(client: &Client, mut row: InstanceStatus) -> Result<InstanceStatus, Failed> {
    let selector = Selector { server: row.instance.clone(), team: None, user: None };
    while row.status.is_transitional() && row.next_retry_ms.is_none() {
        tokio::time::sleep(POLL).await;
        row = client.post("/v1/resolve", &selector).await?;
    }
    Ok(row)
}
