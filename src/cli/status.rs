//! `satellite status`

use std::io::{IsTerminal, Write};
use std::time::Duration;

use clap::Args;
use comfy_table::ContentArrangement;
use jiff::Timestamp;
use mcp_satellite_actors::model::remote::{ConnectionState, ServerHealth};
use tokio::signal::unix::{SignalKind, signal};

use super::table::{new_table, render_table, status_cell, terminal_size, wrap};
use super::{
    CommandFailure, DONE, DataDirArg, ListFilterArgs, print_json, print_styled, print_text, printable, to_json,
};
use crate::console::api::{ConsoleFilter, ExportStatus, InstanceStatus, StatusReply, TelemetryStatus};
use crate::console::client::ConsoleClient;
use crate::delivery::DeliveryStatus;
use crate::journal::{JournalState, JournalStatus};

const REFRESH: Duration = Duration::from_secs(1);
/// Enters the alternate screen and hides the cursor. `LEAVE_SCREEN` reverts both.
const ENTER_SCREEN: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE_SCREEN: &str = "\x1b[?25h\x1b[?1049l";
const TOP_LEFT: &str = "\x1b[H";
const CLEAR_LINE: &str = "\x1b[K";
const CLEAR_BELOW: &str = "\x1b[J";
const INDENT: &str = "    ";

struct StatusColumn {
    title: &'static str,
    /// Order in which columns are omitted in a narrow window: highest rank first, rank 0 never.
    rank: u8,
    cell: fn(&InstanceStatus, Timestamp) -> String,
}

static COLUMNS: [StatusColumn; 12] = [
    StatusColumn { title: "SERVER", rank: 0, cell: |row, _| row.server.clone() },
    StatusColumn { title: "TEAM", rank: 2, cell: |row, _| row.team.clone() },
    StatusColumn { title: "USER", rank: 3, cell: |row, _| row.user.clone() },
    StatusColumn { title: STATUS, rank: 0, cell: |row, _| status(row) },
    StatusColumn { title: CONNECTION, rank: 4, cell: |row, _| or_dash(connection(row)) },
    StatusColumn { title: "SINCE", rank: 5, cell: |row, now| or_dash(time_in_status(row, now)) },
    StatusColumn { title: "PID", rank: 6, cell: |row, _| or_dash(row.pid) },
    StatusColumn { title: "UPTIME", rank: 11, cell: |row, _| or_dash(row.uptime_seconds.map(format_seconds)) },
    StatusColumn { title: "TOOLS", rank: 7, cell: |row, _| row.tools.to_string() },
    StatusColumn { title: "CALLS", rank: 9, cell: |row, _| row.calls.to_string() },
    StatusColumn { title: "RESTARTS", rank: 8, cell: |row, _| row.restarts.to_string() },
    StatusColumn { title: "MEMORY", rank: 10, cell: |row, _| or_dash(row.rss_bytes.map(megabytes)) },
];
const STATUS: &str = "STATUS";
const CONNECTION: &str = "CONNECTION";

#[derive(Debug, Args)]
pub(super) struct StatusCommand {
    #[command(flatten)]
    data_dir: DataDirArg,
    #[command(flatten)]
    only: ListFilterArgs,
    /// An array of objects, for scripts
    #[arg(long)]
    json: bool,
    /// The satellite itself and not its servers: its journal, delivery of events, backend; with --json an object
    #[arg(long, conflicts_with_all = ["team", "user"])]
    satellite: bool,
    /// Also show the cgroup of the satellite
    #[arg(long)]
    verbose: bool,
    /// Repeat every second until interrupted
    #[arg(long)]
    watch: bool,
    /// Print nothing: the exit code is 0 if the satellite answers, and 3 if none is running. For health checks
    #[arg(long, conflicts_with_all = ["team", "user", "json", "satellite", "verbose", "watch"])]
    quiet: bool,
}

impl StatusCommand {
    pub(super) async fn run(self) -> Result<u8, CommandFailure> {
        if self.quiet {
            return Ok(self.answers().await.map_or_else(|failure| failure.code, |()| DONE));
        }
        let client = self.data_dir.client()?;
        let filter = ConsoleFilter::from(self.only.clone());
        if self.watch && std::io::stdout().is_terminal() && !self.json {
            return self.watch(&client, &filter).await;
        }
        loop {
            let reply: StatusReply = client.get("/v1/status", &filter).await?;
            match (self.json, self.satellite) {
                (true, true) => print_json(&to_json(&reply.satellite)?),
                (true, false) => print_json(&to_json(&reply.instances)?),
                (false, true) => print_text(&satellite_summary(&reply, self.verbose)),
                (false, false) => {
                    let servers =
                        server_lines(&reply.instances, terminal_size().map(|(width, _)| width), Timestamp::now());
                    let about = mcp_satellite_actors::model::printable::lines(&satellite_summary(&reply, self.verbose));
                    print_styled(&format!("{}\n\n{about}", servers.join("\n")));
                }
            }
            if !self.watch {
                return Ok(DONE);
            }
            tokio::time::sleep(REFRESH).await;
        }
    }

    async fn answers(&self) -> Result<(), CommandFailure> {
        let client = ConsoleClient::new(&self.data_dir.resolve()?)?;
        let _: StatusReply = client.get("/v1/status", &ConsoleFilter::from(self.only.clone())).await?;
        Ok(())
    }

    async fn watch(&self, client: &ConsoleClient, filter: &ConsoleFilter) -> Result<u8, CommandFailure> {
        let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        // Dropped also after an error, before it is printed.
        let screen = AlternateScreen::enter()?;
        tokio::select! {
            ended = self.draw(client, filter, &screen) => ended,
            _ = interrupt.recv() => Ok(DONE),
            _ = terminate.recv() => Ok(DONE),
        }
    }

    async fn draw(
        &self,
        client: &ConsoleClient,
        filter: &ConsoleFilter,
        screen: &AlternateScreen,
    ) -> Result<u8, CommandFailure> {
        loop {
            let reply: StatusReply = client.get("/v1/status", filter).await?;
            let (width, height) = terminal_size().unwrap_or((80, 24));
            let about = mcp_satellite_actors::model::printable::lines(&satellite_summary(&reply, self.verbose));
            let about: Vec<String> = about.lines().flat_map(|line| wrap(line, width)).collect();
            let servers =
                if self.satellite { Vec::new() } else { server_lines(&reply.instances, Some(width), Timestamp::now()) };
            screen.draw(&fit_to_height(servers, about, height))?;
            tokio::time::sleep(REFRESH).await;
        }
    }
}

struct AlternateScreen;

impl AlternateScreen {
    fn enter() -> std::io::Result<Self> {
        print(ENTER_SCREEN)?;
        Ok(Self)
    }

    fn draw(&self, lines: &[String]) -> std::io::Result<()> {
        let Self = self;
        let lines: Vec<String> = lines.iter().map(|line| format!("{line}{CLEAR_LINE}")).collect();
        print(&format!("{TOP_LEFT}{}{CLEAR_BELOW}", lines.join("\r\n")))
    }
}

impl Drop for AlternateScreen {
    fn drop(&mut self) {
        // A terminal that is gone needs no restoring.
        let _ = print(LEAVE_SCREEN);
    }
}

fn print(text: &str) -> std::io::Result<()> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

/// Returns lines for a window of this height: servers that do not fit are left out, lines about the satellite remain.
fn fit_to_height(mut servers: Vec<String>, about: Vec<String>, height: usize) -> Vec<String> {
    let lines = height.saturating_sub(about.len() + 1);
    if servers.len() > lines {
        servers.truncate(lines.saturating_sub(1));
        servers.push("… more than the window shows: enlarge it, or use --team or --user".to_owned());
    }
    if !servers.is_empty() {
        servers.push(String::new());
    }
    servers.extend(about);
    servers.truncate(height);
    servers
}

fn satellite_summary(reply: &StatusReply, verbose: bool) -> String {
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
        let clients = if endpoint.clients == 1 { "client" } else { "clients" };
        format!("\n{endpoint} · {} {clients}", endpoint.clients)
    });
    let backend = satellite
        .backend
        .as_ref()
        .map(|backend| format!("\n{}", backend.to_string().lines().map(printable).collect::<Vec<_>>().join("\n")));
    let memory = satellite.memory.as_ref().filter(|memory| memory.short);
    let memory = memory.map(|memory| format!("\n{memory}")).unwrap_or_default();
    let complaint = events.last_error.as_ref().map(|error| format!("\nevents are not accepted: {error}"));
    let problems = [&satellite.endpoint_problem, &satellite.console_problem].into_iter().flatten();
    let problems = problems.map(|problem| format!("\n{}", printable(problem))).collect::<Vec<_>>().concat();
    let rejected =
        satellite.rejected_configuration.as_ref().map(|rejected| format!("\n{}", printable(&rejected.to_string())));
    let restarted = satellite.last_crash.as_ref().map(|reason| {
        let (generation, since) = (satellite.generation, &satellite.started_at);
        format!("\nrestarted after a crash: {} (generation {generation}, since {since})", printable(reason))
    });
    // The path of the cgroup is shown with --verbose only.
    let held_by = satellite.held_by.split(", under `").next().filter(|_| !verbose).unwrap_or(&satellite.held_by);
    let journal = satellite.journal.as_ref().map(journal).unwrap_or_default();
    let delivery = satellite.delivery.as_ref().map(delivery).unwrap_or_default();
    let exports = satellite.telemetry.as_ref().map(failed_exports).unwrap_or_default();
    format!(
        "{online} of {} online · satellite `{}` {}, pid {}, up {} · events: {} sent, {} waiting{lost}{}\n\
         {sandboxed} in a sandbox · process trees are held by {held_by}{memory}{}{}{}{journal}{delivery}{exports}{}",
        reply.instances.len(),
        satellite.name,
        satellite.version,
        satellite.pid,
        format_seconds(satellite.uptime_seconds),
        events.sent,
        events.queue_size,
        restarted.unwrap_or_default(),
        endpoint.unwrap_or_default(),
        backend.unwrap_or_default(),
        complaint.unwrap_or_default(),
        rejected.unwrap_or_default() + &problems,
    )
}

fn journal(journal: &JournalStatus) -> String {
    let memory = match (&journal.state, &journal.reason) {
        (JournalState::Memory, Some(reason)) => format!("\nevents are not stored, and kept in memory: {reason}"),
        (JournalState::Memory, None) => "\nevents are not stored, and kept in memory".to_owned(),
        (JournalState::Ok, _) => String::new(),
    };
    let pruned = match journal.pruned_unsent {
        0 => String::new(),
        count => format!("\n{count} unsent events were removed to make room"),
    };
    let missed = match journal.memos_missed {
        0 => String::new(),
        count => {
            format!("\nthe stored states of {count} servers could not be read in time: they started anew")
        }
    };
    let damaged =
        journal.damaged.as_ref().map(|aside| format!("\na damaged journal was put aside: {}", aside.display()));
    format!("{memory}{pruned}{missed}{}", damaged.unwrap_or_default())
}

fn delivery(delivery: &DeliveryStatus) -> String {
    let DeliveryStatus { to, backlog, last_error, .. } = delivery;
    match last_error {
        Some(reason) => {
            format!("\n{backlog} events wait for {to}, which does not accept them: {}", printable(reason))
        }
        None if *backlog > 0 => format!("\n{backlog} events are being sent to {to}"),
        None => String::new(),
    }
}

/// Returns a line for each export that fails.
fn failed_exports(telemetry: &TelemetryStatus) -> String {
    let line = |what: &str, export: &Option<ExportStatus>| {
        let ExportStatus { endpoint, failing_since, last_error } = export.as_ref()?;
        let (reason, endpoint) = (printable(last_error.as_deref()?), printable(endpoint));
        let since = failing_since.as_ref().map(|since| format!(" since {since}")).unwrap_or_default();
        Some(format!("\n{what} are not exported to {endpoint}{since}: {reason}; check the receiver"))
    };
    [line("traces", &telemetry.traces), line("metrics", &telemetry.metrics)].into_iter().flatten().collect()
}

/// Returns the lines of the server table. Columns that do not fit into `width` are left out; each message is below its
/// server.
fn server_lines(rows: &[InstanceStatus], width: Option<usize>, now: Timestamp) -> Vec<String> {
    if rows.is_empty() {
        return vec!["no servers are installed, or none of this team and user".to_owned()];
    }
    let has_remote = rows.iter().any(|row| row.connection.is_some());
    let mut columns: Vec<&StatusColumn> =
        COLUMNS.iter().filter(|column| has_remote || column.title != CONNECTION).collect();
    let cells = |column: &StatusColumn| rows.iter().map(|row| (column.cell)(row, now)).collect::<Vec<_>>();
    let mut content: Vec<Vec<String>> = columns.iter().map(|column| cells(column)).collect();
    // Cells have a space on both sides. Slugs and numbers are ASCII, so bytes are columns.
    let wide = |(column, cells): (&&StatusColumn, &Vec<String>)| {
        cells.iter().map(String::len).max().unwrap_or_default().max(column.title.len()) + 2
    };
    while width.is_some_and(|width| columns.iter().zip(&content).map(wide).sum::<usize>() > width) {
        let last =
            columns.iter().enumerate().filter(|(_, column)| column.rank > 0).max_by_key(|(_, column)| column.rank);
        let Some((at, _)) = last else { break };
        columns.remove(at);
        content.remove(at);
    }
    let mut table = new_table(&columns.iter().map(|column| column.title).collect::<Vec<_>>());
    table.set_content_arrangement(ContentArrangement::Disabled);
    for (at, row) in rows.iter().enumerate() {
        table.add_row(columns.iter().zip(&content).map(|(column, cells)| match column.title {
            STATUS => status_cell(row.status, cells[at].clone()),
            _ => comfy_table::Cell::new(&cells[at]),
        }));
    }
    let table = render_table(&table);
    let mut drawn = table.lines().map(ToOwned::to_owned);
    let mut lines: Vec<String> = drawn.next().into_iter().collect();
    for (line, row) in drawn.zip(rows) {
        lines.push(line);
        let message = message(row);
        if message.is_empty() {
            continue;
        }
        match width {
            Some(width) => {
                let wrapped = wrap(&message, width.saturating_sub(INDENT.len()).max(1));
                lines.extend(wrapped.into_iter().map(|part| format!("{INDENT}{part}")));
            }
            None => lines.push(format!("{INDENT}{message}")),
        }
    }
    lines
}

fn status(row: &InstanceStatus) -> String {
    let suffix = match (row.dormant, row.health) {
        (true, _) => " (dormant)",
        (false, ServerHealth::Degraded) => " (degraded)",
        (false, ServerHealth::Unknown | ServerHealth::Healthy) => "",
    };
    format!("{}{suffix}", row.status)
}

fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

fn time_in_status(row: &InstanceStatus, now: Timestamp) -> Option<String> {
    let since: Timestamp = row.since.parse().ok()?;
    Some(format_seconds(u64::try_from(now.duration_since(since).as_secs()).unwrap_or_default()))
}

/// Formats a duration in its two largest units: `2d 3h`, `12m 5s`.
fn format_seconds(seconds: u64) -> String {
    let units = [(seconds / 86_400, "d"), (seconds / 3_600 % 24, "h"), (seconds / 60 % 60, "m"), (seconds % 60, "s")];
    let first = units.iter().position(|(count, _)| *count > 0).unwrap_or(units.len() - 1);
    let shown: Vec<String> = units[first..].iter().take(2).map(|(count, unit)| format!("{count}{unit}")).collect();
    shown.join(" ")
}

fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}

/// Formats the connection state: `reconnecting, attempt 3 in 4 s`.
fn connection(row: &InstanceStatus) -> Option<String> {
    let attempt = row.attempt.map(|attempt| format!(", attempt {attempt}")).unwrap_or_default();
    let left = row.next_retry_ms.map(|left| format!(" in {:.0} s", (left as f64 / 1000.0).ceil())).unwrap_or_default();
    match row.connection? {
        now @ ConnectionState::Reconnecting => Some(format!("{now}{attempt}{left}")),
        now @ (ConnectionState::Connecting
        | ConnectionState::Connected
        | ConnectionState::Disconnected
        | ConnectionState::Error) => Some(now.to_string()),
    }
}

pub(super) fn with_next_step(message: &str, next_step: Option<&str>) -> String {
    match next_step {
        Some(step) => format!("{message} (next: {step})"),
        None => message.to_owned(),
    }
}

/// Returns the reason for the status in one line, with the time left until the next attempt.
fn message(row: &InstanceStatus) -> String {
    let mut message = printable(row.status_message.as_deref().unwrap_or_default());
    if row.unrecorded {
        message = [&*message, "not in the ledger: the disk has not stored its entry"]
            .into_iter()
            .filter(|part| !part.is_empty())
            .collect::<Vec<_>>()
            .join("; ");
    }
    let message = with_next_step(&message, row.next_step.as_deref());
    match (row.connection, row.next_retry_ms) {
        // The column CONNECTION already shows the delay.
        (Some(ConnectionState::Reconnecting), _) | (_, None) => message,
        (_, Some(left)) => format!("{message} ({:.1} s left)", left as f64 / 1000.0),
    }
}
