//! `satellite events`, `satellite logs`

use clap::Args;
use mcp_satellite_actors::model::event::{Envelope, Event, LogLine, Subject};

use super::{DONE, DataDir, FAILED, Failed, NO_SATELLITE, Target, complain, printable, say};
use crate::console::api::{EventQuery, InstanceStatus, Selector};
use crate::console::client::{Client, ClientError};
use crate::journal;

#[derive(Debug, Args)]
pub(super) struct Events {
    #[command(flatten)]
    data_dir: DataDir,
    /// Only events after this number
    #[arg(long, value_name = "SEQ")]
    since: Option<u64>,
    /// Go on with what happens, until interrupted
    #[arg(long)]
    follow: bool,
    /// Only this type, such as mcp.server.crashed; may be repeated
    #[arg(long = "type", value_name = "TYPE")]
    types: Vec<String>,
    /// Only this team (id)
    #[arg(long, value_name = "TEAM")]
    team: Option<String>,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(super) struct Logs {
    #[command(flatten)]
    target: Target,
    /// Go on with what it writes, until interrupted
    #[arg(long)]
    follow: bool,
    #[command(flatten)]
    data_dir: DataDir,
}

impl Events {
    pub(super) async fn run(self) -> Result<u8, Failed> {
        let types = (!self.types.is_empty()).then(|| self.types.join(","));
        let query =
            EventQuery { since: self.since, follow: self.follow, types, team: self.team.clone(), instance: None };
        let (of_type, team) = (journal::Query { types: self.types, ..journal::Query::default() }, self.team);
        let of_team = |envelope: &Envelope| match (&team, envelope.event.subject()) {
            (None, _) => true,
            (Some(team), Some(of)) => is_of_team(of, team),
            (Some(team), None) => {
                journal::Query { team: Some(team.clone()), ..journal::Query::default() }.matches(envelope)
            }
        };
        let json = self.json;
        read(
            &self.data_dir,
            query,
            |envelope| of_type.matches(envelope) && of_team(envelope),
            |envelope| {
                if json {
                    // An envelope is made of what JSON is made of.
                    say(&serde_json::to_string(envelope).unwrap_or_default());
                } else {
                    say(&in_words(envelope));
                }
            },
        )
        .await
    }
}

impl Logs {
    pub(super) async fn run(self) -> Result<u8, Failed> {
        let client = self.data_dir.client()?;
        let selector = Selector::from(self.target);
        let (instance, server, team, user) = match client.post::<InstanceStatus>("/v1/resolve", &selector).await {
            Ok(row) => (Some(row.instance), None, None, None),
            // What is stored can be read without a satellite; the name is then taken as it is.
            Err(ClientError::NotRunning { .. }) => (None, Some(selector.server), selector.team, selector.user),
            Err(error) => return Err(error.into()),
        };
        let types = Some("mcp.server.logs".to_owned());
        let query = EventQuery { since: None, follow: self.follow, types, team: None, instance: instance.clone() };
        let wanted = |envelope: &Envelope| {
            envelope.event.subject().is_some_and(|of| {
                let name = &*of.process_id;
                instance.as_ref().is_none_or(|instance| instance == name)
                    && server.as_ref().is_none_or(|server| server == of.server_slug.as_str() || server == name)
                    && team.as_ref().is_none_or(|team| is_of_team(of, team))
                    && user.as_ref().is_none_or(|user| is_of_user(of, user))
            })
        };
        read(&self.data_dir, query, wanted, |envelope| {
            if let Event::ServerLogs { logs, .. } = &envelope.event {
                for line in logs {
                    say(&log_line(line));
                }
            }
        })
        .await
    }
}

/// By id or by slug. An event has the ids; the slugs are only in the instance's name, SERVER-TEAM-USER-INSTALLATION.
fn is_of_team(of: &Subject, team: &str) -> bool {
    of.team_id.as_str() == team || of.process_id.starts_with(&format!("{}-{team}-", of.server_slug))
}

/// See [`is_of_team`].
fn is_of_user(of: &Subject, user: &str) -> bool {
    of.user_id.as_str() == user || of.process_id.ends_with(&format!("-{user}-{}", of.installation_id))
}

/// Reads events from the satellite if one runs, which knows what `query` wants, else those that are `wanted` from what it
/// stored.
async fn read(
    data_dir: &DataDir,
    query: EventQuery,
    wanted: impl Fn(&Envelope) -> bool,
    mut show: impl FnMut(&Envelope),
) -> Result<u8, Failed> {
    let client = Client::new(&data_dir.data_dir)?;
    let mut lines = match client.stream("/v1/events", &query).await {
        Ok(lines) => lines,
        Err(ClientError::NotRunning { .. }) if query.follow => {
            let message = format!(
                "no satellite is running on `{}`; without --follow the stored events are shown",
                data_dir.data_dir.display()
            );
            return Err(Failed::new(NO_SATELLITE, message));
        }
        Err(ClientError::NotRunning { .. }) => return stored(data_dir, query.since, wanted, show),
        Err(error) => return Err(error.into()),
    };
    let mut last = query.since;
    loop {
        match lines.next().await {
            Ok(Some(line)) => match serde_json::from_slice::<Envelope>(&line) {
                Ok(envelope) => {
                    last = Some(envelope.seq);
                    show(&envelope);
                }
                Err(error) => complain(&format!("an event could not be read: {error}")),
            },
            Ok(None) if !query.follow => return Ok(DONE),
            Err(error) if !query.follow => return Err(error.into()),
            // What happens does not end by itself: the satellite did, and its last events may be stored only.
            Ok(None) | Err(_) => {
                stored(data_dir, last, wanted, show)?;
                return Err(Failed::new(FAILED, "the satellite has ended"));
            }
        }
    }
}

fn stored(
    data_dir: &DataDir,
    since: Option<u64>,
    wanted: impl Fn(&Envelope) -> bool,
    mut show: impl FnMut(&Envelope),
) -> Result<u8, Failed> {
    let query = journal::Query { since, ..journal::Query::default() };
    let unreadable =
        |error| Failed::new(FAILED, format!("cannot read the events in `{}`: {error}", data_dir.data_dir.display()));
    if !data_dir.data_dir.is_dir() {
        let message = format!("there is no data directory `{}`; name it with --data-dir", data_dir.data_dir.display());
        return Err(Failed::new(NO_SATELLITE, message));
    }
    let mut events = journal::read(&data_dir.data_dir, query).map_err(unreadable)?;
    for envelope in events.by_ref().filter(wanted) {
        show(&envelope);
    }
    if let Some(error) = events.take_error() {
        return Err(unreadable(error));
    }
    match events.skipped() {
        0 => {}
        count => complain(&format!("{count} stored lines could not be read and were left out")),
    }
    Ok(DONE)
}

/// `   118  06:33:01.204Z  mcp.server.crashed  memory-acme-alice-m1  exit_code=null reason="killed by SIGKILL" …`
fn in_words(envelope: &Envelope) -> String {
    let subject = envelope.event.subject().map(|of| of.process_id.to_string()).unwrap_or_default();
    let value = serde_json::to_value(&envelope.event).unwrap_or_default();
    let known = ["installation_id", "team_id", "user_id", "process_id", "server_slug"];
    let fields = value.get("data").and_then(serde_json::Value::as_object).into_iter().flatten();
    let fields: Vec<String> = fields
        .filter(|(key, value)| !(value.is_null() || !subject.is_empty() && known.contains(&key.as_str())))
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    let at = envelope.timestamp;
    format!("{:>6}  {at:.3}  {:<28} {subject}  {}", envelope.seq, envelope.event.kind(), fields.join(" "))
}

fn log_line(line: &LogLine) -> String {
    let level = format!("{:?}", line.level).to_uppercase();
    format!("{:.3} {level:<5} {}", line.timestamp, printable(&line.message))
}
