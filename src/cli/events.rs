//! `satellite events`, `satellite logs`

use std::io;
use std::path::Path;
use std::time::Duration;

use clap::Args;
use mcp_satellite_actors::model::event::{Envelope, Event, EventSubject, LogLine, RequestLine};
use mcp_satellite_actors::model::status::Status;
use serde::Serialize;

use super::control::status_sentence as in_words_of;
use super::{
    BAD_INPUT, CommandFailure, DONE, DataDirArg, FAILED, InstanceArg, NO_SATELLITE, print_error, print_json,
    print_text, printable,
};
use crate::console::api::{ConsoleFilter, EventQuery, InstanceSelector, InstanceStatus, StatusReply};
use crate::console::client::{ClientError, ConsoleClient};
use crate::console::find::{hint, is_of_team, stored_team};
use crate::journal::{self, StoredLines as Stored};

const LOOK_INTERVAL: Duration = Duration::from_millis(250);

#[derive(Debug, Args)]
pub(super) struct EventsCommand {
    #[command(flatten)]
    data_dir: DataDirArg,
    /// Only events after this number
    #[arg(long, value_name = "SEQ")]
    since: Option<u64>,
    /// Continue with new events until interrupted, also over restarts of the satellite
    #[arg(long)]
    follow: bool,
    /// Only this type, such as mcp.server.crashed; may be repeated
    #[arg(long = "type", value_name = "TYPE")]
    types: Vec<String>,
    /// Only this team (slug or id)
    #[arg(long, value_name = "TEAM")]
    team: Option<String>,
    /// Print a JSON object per line
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(super) struct LogsCommand {
    #[command(flatten)]
    target: InstanceArg,
    /// Continue with new lines until interrupted, also over restarts of the satellite
    #[arg(long)]
    follow: bool,
    /// Show the calls of its tools instead of its stderr
    #[arg(long)]
    requests: bool,
    /// Print a JSON object per line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    data_dir: DataDirArg,
}

impl EventsCommand {
    pub(super) async fn run(self) -> Result<u8, CommandFailure> {
        if let Some(unknown) = self.types.iter().find(|kind| !Event::KINDS.contains(&kind.as_str())) {
            let hint = hint("event", unknown, Event::KINDS, Event::KINDS);
            return Err(CommandFailure::new(BAD_INPUT, format!("unknown event type `{unknown}`{hint}")));
        }
        let team = match &self.team {
            Some(team) => Some(self.team_id(team).await?),
            None => None,
        };
        let types = (!self.types.is_empty()).then(|| self.types.join(","));
        let query = EventQuery { since: self.since, follow: self.follow, types, team: team.clone(), instance: None };
        let wanted = journal::StoredEventQuery { types: self.types, team, ..journal::StoredEventQuery::default() };
        let json = self.json;
        read_events(
            &self.data_dir.find()?,
            query,
            |envelope| wanted.matches(envelope),
            |envelope| {
                if json {
                    // An envelope always serializes.
                    print_json(&serde_json::to_string(envelope).unwrap_or_default());
                } else {
                    print_text(&format_event(envelope));
                }
            },
        )
        .await
    }

    /// Returns the id of the team with this id or slug: from the stored events, which also contain removed teams, or
    /// else from the satellite. An unknown team is an error, unless `--follow` waits for its first event.
    async fn team_id(&self, team: &str) -> Result<String, CommandFailure> {
        let directory = &self.data_dir.find()?;
        // A missing directory has no events and no teams; the reader reports it.
        let ids = match directory.is_dir().then(|| stored_team(directory, team)).transpose() {
            Ok(Some(Ok(id))) => return Ok(id),
            Ok(Some(Err(ids))) => ids,
            Ok(None) => return Ok(team.to_owned()),
            Err(error) => return Err(read_failure(directory, &error)),
        };
        let filter = ConsoleFilter { team: Some(team.to_owned()), user: None };
        match self.data_dir.client()?.get::<StatusReply>("/v1/status", &filter).await {
            Err(ClientError::NotRunning { .. }) if !self.follow => {
                let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
                let message = format!("no stored event belongs to a team `{team}`{}", hint("team", team, &ids, &ids));
                Err(CommandFailure::new(BAD_INPUT, message))
            }
            Ok(_) | Err(ClientError::NotRunning { .. }) => Ok(team.to_owned()),
            Err(error) => Err(error.into()),
        }
    }
}

impl LogsCommand {
    pub(super) async fn run(self) -> Result<u8, CommandFailure> {
        let data_dir = self.data_dir.find()?;
        let client = ConsoleClient::new(&data_dir)?;
        let selector = InstanceSelector::from(self.target);
        let mut row = None;
        let (instance, server, team, user) = match client.post::<InstanceStatus>("/v1/resolve", &selector).await {
            Ok(found) => (Some(row.insert(found).instance.clone()), None, None, None),
            // Stored logs can be read without a satellite, and those of a removed server too; the name is then used as
            // it is.
            Err(error) if is_unknown(&error) => (None, Some(selector.server), selector.team, selector.user),
            Err(error) => return Err(error.into()),
        };
        let named = server.clone();
        let wanted = |of: &EventSubject| {
            let name = &*of.process_id;
            instance.as_ref().is_none_or(|instance| instance == name)
                && server.as_ref().is_none_or(|server| server == of.server_slug.as_str() || server == name)
                && team.as_ref().is_none_or(|team| is_of_team(of, team))
                && user.as_ref().is_none_or(|user| is_of_user(of, user))
        };
        // Make the satellite store all pending lines first. Without a satellite all are stored.
        match client.post::<()>("/v1/flush", &()).await {
            Ok(()) | Err(ClientError::NotRunning { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        let show = LinePrinter { json: self.json };
        let directory = data_directory(&data_dir)?;
        let (kind, through) = if self.requests {
            let stored = journal::request_logs(directory, wanted).map_err(|error| read_failure(&data_dir, &error))?;
            check_found(&stored, named.as_deref())?;
            ("mcp.request.logs", show.print_stored(&stored, format_request_line))
        } else {
            let stored = journal::server_logs(directory, wanted).map_err(|error| read_failure(&data_dir, &error))?;
            check_found(&stored, named.as_deref())?;
            if let Some(row) = row.filter(|row| stored.lines.is_empty() && row.status != Status::Online) {
                print_error(&format!("nothing is logged: {}", in_words_of(&row)));
            }
            ("mcp.server.logs", show.print_stored(&stored, format_log_line))
        };
        if !self.follow {
            return Ok(DONE);
        }
        let types = Some(kind.to_owned());
        let query = EventQuery { since: Some(through), follow: true, types, team: None, instance: instance.clone() };
        let wanted =
            |envelope: &Envelope| envelope.event.kind() == kind && envelope.event.subject().is_some_and(&wanted);
        // A satellite that did not resolve the name returns lines of other instances, too.
        read_events(&data_dir, query, wanted, |envelope| match &envelope.event {
            _ if !wanted(envelope) => {}
            Event::ServerLogs { logs, .. } => logs.iter().for_each(|line| show.print_line(line, format_log_line)),
            Event::RequestLogs { requests, .. } => {
                for line in requests {
                    show.print_line(line, format_request_line);
                }
            }
            _ => {}
        })
        .await
    }
}

/// Returns true if the answer can only come from stored logs.
fn is_unknown(error: &ClientError) -> bool {
    match error {
        ClientError::NotRunning { .. } => true,
        ClientError::Refused(failure) => failure.kind == "not_found",
        ClientError::Unsafe(_) | ClientError::ConnectionLost(_) => false,
    }
}

/// Returns an error if no line is stored for an unknown name, which is most likely mistyped.
fn check_found<T>(stored: &Stored<T>, name: Option<&str>) -> Result<(), CommandFailure> {
    match name {
        Some(name) if stored.lines.is_empty() => {
            let hint = "`satellite status` lists all servers";
            Err(CommandFailure::new(BAD_INPUT, format!("no server `{name}`, and no stored lines of one; {hint}")))
        }
        Some(_) | None => Ok(()),
    }
}

#[derive(Clone, Copy)]
struct LinePrinter {
    json: bool,
}

impl LinePrinter {
    fn print_line<T: Serialize>(self, line: &T, format_text: fn(&T) -> String) {
        // A stored line was read from JSON, so it serializes.
        if self.json {
            print_json(&serde_json::to_string(line).unwrap_or_default());
        } else {
            print_text(&format_text(line));
        }
    }

    /// Prints stored lines and returns the number of the last event read.
    fn print_stored<T: Serialize>(self, stored: &Stored<T>, format_text: fn(&T) -> String) -> u64 {
        for logged in &stored.lines {
            self.print_line(&logged.line, format_text);
        }
        if stored.skipped > 0 {
            print_error(&format!("{} stored lines could not be read and were left out", stored.skipped));
        }
        stored.through
    }
}

/// Returns true if an event is about an instance of the user with this id or slug; see [`is_of_team`].
fn is_of_user(of: &EventSubject, user: &str) -> bool {
    of.user_id.as_str() == user || of.process_id.ends_with(&format!("-{user}-{}", of.installation_id))
}

/// Reads events from the running satellite, which applies `query`, or else the stored ones for which `wanted` returns
/// true. With `follow`, continues with the stored events when the satellite ends, and then with the next satellite.
async fn read_events(
    data_dir: &Path,
    mut query: EventQuery,
    wanted: impl Fn(&Envelope) -> bool,
    mut show: impl FnMut(&Envelope),
) -> Result<u8, CommandFailure> {
    let mut is_reported = false;
    loop {
        // Checked each time: the directory may have been replaced.
        match ConsoleClient::new(data_dir)?.stream("/v1/events", &query).await {
            Ok(mut lines) => {
                is_reported = false;
                if lines.is_incomplete() {
                    print_error("the disk does not store new events: the list is incomplete; see `satellite status`");
                }
                loop {
                    match lines.next().await {
                        Ok(Some(line)) => match serde_json::from_slice::<Envelope>(&line) {
                            Ok(envelope) => {
                                query.since = Some(envelope.seq);
                                show(&envelope);
                            }
                            Err(error) => print_error(&format!("an event could not be read: {error}")),
                        },
                        Ok(None) if !query.follow => return Ok(DONE),
                        Err(error) if !query.follow => return Err(error.into()),
                        // An event stream ends only with the satellite; its last events may be in the journal only.
                        Ok(None) | Err(_) => break,
                    }
                }
            }
            Err(ClientError::NotRunning { .. }) => {}
            // A satellite that is starting or ending.
            Err(_) if is_reported => {}
            Err(error) => return Err(error.into()),
        }
        match read_stored(data_dir, query.since, &wanted, &mut show) {
            Ok(passed) => query.since = passed,
            Err(failed) if !query.follow || failed.code == NO_SATELLITE => return Err(failed),
            // The next satellite repairs the file; try again until then.
            Err(failed) if !is_reported => print_error(&failed.message),
            Err(_) => {}
        }
        if !query.follow {
            return Ok(DONE);
        }
        if !is_reported {
            is_reported = true;
            let shown = data_dir.display();
            print_error(&format!("no satellite is running on `{shown}`; waiting for one"));
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

fn read_stored(
    data_dir: &Path,
    since: Option<u64>,
    wanted: impl Fn(&Envelope) -> bool,
    mut show: impl FnMut(&Envelope),
) -> Result<Option<u64>, CommandFailure> {
    let query = journal::StoredEventQuery { since, ..journal::StoredEventQuery::default() };
    let mut events = journal::read(data_directory(data_dir)?, query).map_err(|error| read_failure(data_dir, &error))?;
    for envelope in events.by_ref().filter(wanted) {
        show(&envelope);
    }
    if let Some(error) = events.take_error() {
        return Err(read_failure(data_dir, &error));
    }
    match events.skipped() {
        0 => {}
        count => print_error(&format!("{count} stored events could not be read and were left out")),
    }
    Ok(events.last_read())
}

fn data_directory(directory: &Path) -> Result<&Path, CommandFailure> {
    if !directory.is_dir() {
        let message = format!("there is no data directory `{}`; name it with --data-dir", directory.display());
        return Err(CommandFailure::new(NO_SATELLITE, message));
    }
    Ok(directory)
}

fn read_failure(data_dir: &Path, error: &io::Error) -> CommandFailure {
    CommandFailure::new(FAILED, format!("cannot read the events in `{}`: {error}", data_dir.display()))
}

/// Formats an event in one line: `   118  06:33:01.204Z  mcp.server.crashed  memory-acme-alice-m1  exit_code=null
/// reason="killed by SIGKILL" …`.
fn format_event(envelope: &Envelope) -> String {
    let subject = envelope.event.subject().map(|of| of.process_id.to_string()).unwrap_or_default();
    let value = serde_json::to_value(&envelope.event).unwrap_or_default();
    let known = ["installation_id", "team_id", "user_id", "process_id", "server_slug"];
    let fields = value.get("data").and_then(serde_json::Value::as_object).into_iter().flatten();
    let fields: Vec<String> = fields
        .filter(|(key, value)| !(value.is_null() || !subject.is_empty() && known.contains(&key.as_str())))
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    let at = envelope.timestamp;
    printable(&format!("{:>6}  {at:.3}  {:<28} {subject}  {}", envelope.seq, envelope.event.kind(), fields.join(" ")))
}

fn format_log_line(line: &LogLine) -> String {
    let level = format!("{:?}", line.level).to_uppercase();
    format!("{:.3} {level:<5} {}", line.timestamp, printable(&line.message))
}

/// Formats a call in one line: `2026-11-21T06:33:01.204Z ok     12 ms  read_file {"path":"/etc/hosts"} →
/// {"content":[…]}`.
fn format_request_line(line: &RequestLine) -> String {
    let RequestLine {
        tool_name, tool_params, tool_response, response_time_ms, success, error_message, timestamp, ..
    } = line;
    let outcome = if *success { "ok" } else { "failed" };
    let answer = error_message.clone().unwrap_or_else(|| tool_response.to_string());
    printable(&format!("{timestamp:.3} {outcome:<6} {response_time_ms:>6} ms  {tool_name} {tool_params} → {answer}"))
}
