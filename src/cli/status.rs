//! `satellite status`

use std::io::IsTerminal;
use std::time::Duration;

use clap::Args;
use humantime::format_duration;
use mcp_satellite_actors::model::remote::{Connection, Health};

use super::table::{rendered, status_cell, table};
use super::{DONE, DataDirArg, Failed, Only, printable, say, to_json};
use crate::console::api::{Filter, InstanceStatus, StatusReply};
use crate::delivery::DeliveryStatus;
use crate::journal::{JournalState, JournalStatus};

const REFRESH: Duration = Duration::from_secs(1);
const CLEAR_SCREEN: &str = "\x1b[2J\x1b[H";
/// Behind the status.
const CONNECTION_COLUMN: usize = 4;

#[derive(Debug, Args)]
pub(super) struct Status {
    #[command(flatten)]
    data_dir: DataDirArg,
    #[command(flatten)]
    only: Only,
    /// An array of objects, for scripts
    #[arg(long)]
    json: bool,
    /// The satellite itself and not its servers: its journal, delivery of events, backend; with --json an object
    #[arg(long, conflicts_with_all = ["team", "user"])]
    satellite: bool,
    /// Again every second, until interrupted
    #[arg(long)]
    watch: bool,
}

impl Status {
    pub(super) async fn run(self) -> Result<u8, Failed> {
        let client = self.data_dir.client()?;
        let filter = Filter::from(self.only);
        loop {
            let reply: StatusReply = client.get("/v1/status", &filter).await?;
            let text = match (self.json, self.satellite) {
                (true, true) => to_json(&reply.satellite)?,
                (true, false) => to_json(&reply.instances)?,
                (false, true) => about(&reply),
                (false, false) => picture(&reply),
            };
            if self.watch && std::io::stdout().is_terminal() && !self.json {
                say(&format!("{CLEAR_SCREEN}{text}"));
            } else {
                say(&text);
            }
            if !self.watch {
                return Ok(DONE);
            }
            tokio::time::sleep(REFRESH).await;
        }
    }
}

/// The table, and what there is to say of the satellite.
pub(super) fn picture(reply: &StatusReply) -> String {
    let servers = if reply.instances.is_empty() {
        "no servers are installed, or none of that team and user".to_owned()
    } else {
        rendered(&instances(&reply.instances))
    };
    format!("{servers}\n\n{}", about(reply))
}

/// What there is to say of the satellite.
fn about(reply: &StatusReply) -> String {
    let satellite = &reply.satellite;
    let events = &satellite.events;
    let online = reply.instances.iter().filter(|row| row.status.as_str() == "online").count();
    let lost = match events.dropped + events.failed {
        0 => String::new(),
        _ => format!(", {} dropped, {} refused", events.dropped, events.failed),
    };
    let sandboxed =
        reply.instances.iter().filter(|row| row.isolation.as_ref().is_some_and(|one| one != "none")).count();
    let endpoint = satellite.endpoint.as_ref().map(|endpoint| {
        let clients = if endpoint.sessions == 1 { "client" } else { "clients" };
        format!("\n{endpoint} · {} {clients}", endpoint.sessions)
    });
    let backend = satellite
        .backend
        .as_ref()
        .map(|backend| format!("\n{}", backend.to_string().lines().map(printable).collect::<Vec<_>>().join("\n")));
    let complaint = events.last_error.as_ref().map(|error| format!("\nevents are not taken: {error}"));
    let journal = satellite.journal.as_ref().map(journal).unwrap_or_default();
    let delivery = satellite.delivery.as_ref().map(delivery).unwrap_or_default();
    format!(
        "{online} of {} online · satellite `{}` {}, pid {}, up {} · events: {} sent, {} waiting{lost}\n\
         {sandboxed} in a sandbox · process trees are held by {}{}{}{}{journal}{delivery}",
        reply.instances.len(),
        satellite.name,
        satellite.version,
        satellite.pid,
        format_duration(Duration::from_secs(satellite.uptime_seconds)),
        events.sent,
        events.queue_size,
        satellite.held_by,
        endpoint.unwrap_or_default(),
        backend.unwrap_or_default(),
        complaint.unwrap_or_default(),
    )
}

/// What is wrong with the journal, if anything is.
fn journal(journal: &JournalStatus) -> String {
    let memory = match (&journal.state, &journal.reason) {
        (JournalState::Memory, Some(reason)) => format!("\nevents are not stored, and kept in memory: {reason}"),
        (JournalState::Memory, None) => "\nevents are not stored, and kept in memory".to_owned(),
        (JournalState::Ok, _) => String::new(),
    };
    let pruned = match journal.pruned_unsent {
        0 => String::new(),
        count => format!("\n{count} events made room before they were sent"),
    };
    let missed = match journal.memos_missed {
        0 => String::new(),
        count => {
            format!("\nwhat {count} servers had come to before the start could not be read in time: they began anew")
        }
    };
    let damaged =
        journal.damaged.as_ref().map(|aside| format!("\na damaged journal was put aside: {}", aside.display()));
    format!("{memory}{pruned}{missed}{}", damaged.unwrap_or_default())
}

/// What waits, and why.
fn delivery(delivery: &DeliveryStatus) -> String {
    let DeliveryStatus { to, backlog, last_error, .. } = delivery;
    match last_error {
        Some(reason) => {
            format!("\n{backlog} events wait for {to}, which does not take them now: {}", printable(reason))
        }
        None if *backlog > 0 => format!("\n{backlog} events are on their way to {to}"),
        None => String::new(),
    }
}

fn instances(rows: &[InstanceStatus]) -> comfy_table::Table {
    let mut head =
        vec!["SERVER", "TEAM", "USER", "STATUS", "PID", "UPTIME", "TOOLS", "CALLS", "RESTARTS", "MEMORY", "MESSAGE"];
    // Who has processes only is not bothered with it.
    let remotes = rows.iter().any(|row| row.connection.is_some());
    if remotes {
        head.insert(CONNECTION_COLUMN, "CONNECTION");
    }
    let mut table = table(&head);
    for row in rows {
        let beside = match (row.dormant, row.health) {
            (true, _) => " (dormant)",
            (false, Health::Degraded) => " (degraded)",
            (false, Health::Unknown | Health::Healthy) => "",
        };
        let status = format!("{}{beside}", row.status);
        let or_dash = |text: Option<String>| comfy_table::Cell::new(text.unwrap_or_else(|| "-".to_owned()));
        let uptime = row.uptime_seconds.map(|seconds| format_duration(Duration::from_secs(seconds)).to_string());
        let mut cells = vec![
            comfy_table::Cell::new(&row.server),
            comfy_table::Cell::new(&row.team),
            comfy_table::Cell::new(&row.user),
            status_cell(row.status, status),
            or_dash(row.pid.map(|pid| pid.to_string())),
            or_dash(uptime),
            comfy_table::Cell::new(row.tools),
            comfy_table::Cell::new(row.calls),
            comfy_table::Cell::new(row.restarts),
            or_dash(row.rss_bytes.map(|bytes| format!("{:.1} MB", bytes as f64 / 1e6))),
            comfy_table::Cell::new(message(row)),
        ];
        if remotes {
            cells.insert(CONNECTION_COLUMN, or_dash(connection(row)));
        }
        table.add_row(cells);
    }
    table
}

/// `reconnecting, attempt 3 in 4 s`
fn connection(row: &InstanceStatus) -> Option<String> {
    let attempt = row.attempt.map(|attempt| format!(", attempt {attempt}")).unwrap_or_default();
    let left = row.next_retry_ms.map(|left| format!(" in {:.0} s", (left as f64 / 1000.0).ceil())).unwrap_or_default();
    match row.connection? {
        now @ Connection::Reconnecting => Some(format!("{now}{attempt}{left}")),
        now @ (Connection::Connecting | Connection::Connected | Connection::Disconnected | Connection::Error) => {
            Some(now.to_string())
        }
    }
}

/// Why it is as it is; the delay counts down.
fn message(row: &InstanceStatus) -> String {
    let message = printable(row.status_message.as_deref().unwrap_or_default());
    match (row.connection, row.next_retry_ms) {
        // The connection says it.
        (Some(Connection::Reconnecting), _) | (_, None) => message,
        (_, Some(left)) => format!("{message} ({:.1} s left)", left as f64 / 1000.0),
    }
}
