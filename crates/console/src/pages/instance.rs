//! One instance: its state, restarts, process, calls in flight, catalogue, output and events.

use std::sync::Arc;
use std::time::Duration;

use maud::{Markup, html};
use mcp_satellite_actors::model::catalogue::{Catalogue, CatalogueEntry};
use mcp_satellite_actors::model::event::{LogLevel, rfc3339};
use mcp_satellite_actors::model::remedy::Remedy;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::slot::RequestedState;
use mcp_satellite_config::Role;
use serde::Deserialize;

use super::chart::usage_chart;
use super::events::{EventEntry, event_items};
use super::layout::{NavigationEntry, PageFrame, page, status_label, with_commands};
use super::unanswered_calls::unanswered_calls;
use super::{may_operate, segment, shown, shown_lines};
use crate::api::InstanceStatus;
use crate::v1::{BudgetReport, InstanceDetails, LogPage, ProcessEntry, ProcessReport, UsageReport};

/// Contents of the page of an instance.
#[derive(Debug, Clone)]
pub struct InstanceShape {
    pub details: InstanceDetails,
    pub usage: UsageReport,
    /// Processes of the current run.
    pub processes: Option<ProcessReport>,
    /// The catalogue as last read, in any status.
    pub catalogue: Option<Arc<Catalogue>>,
    /// Keys of values that the user must set.
    pub missing: Vec<String>,
    /// Lines of the server's output, the newest first; `None` if the principal may not read them.
    pub output: Option<LogPage>,
    /// True if the principal may call tools in the user's name.
    pub calls_tools: bool,
    /// Events of the instance, the newest first.
    pub events: Vec<EventEntry>,
    /// Number of the last event that `events` can contain.
    pub through: u64,
}

/// Entries of a list of the catalogue that the page shows.
const ENTRIES_MAX: usize = 200;
/// Depth of the process tree up to which names are indented.
const DEPTH_MAX: usize = 10;

/// Returns the page.
pub fn instance_page(shape: &InstanceShape, frame: &PageFrame) -> Markup {
    let status = &shape.details.instance;
    let name = &status.instance;
    let content = html! {
        h1 { (shown(&status.server)) small { " " (shown(&status.team)) "/" (shown(&status.user)) } }
        p.full-name { code { (shown(name)) } }
        div #state data-live { (state(shape)) }
        div #configure data-live { (configure_form(shape, frame)) }
        (actions(shape, frame))
        div.columns {
            section #restarts data-live aria-labelledby="restarts-title" { (restarts(shape)) }
            section #facts data-live aria-labelledby="facts-title" { (facts(status)) }
            section #usage data-live aria-labelledby="usage-title" {
                h2 #usage-title { "Memory and CPU" }
                (usage_chart(&shape.usage, status.pid.is_some()))
            }
            section #unanswered data-live aria-labelledby="unanswered-title" { (unanswered_calls(shape.details.unanswered_calls.as_ref())) }
            section #processes data-live aria-labelledby="processes-title" { (processes(shape.processes.as_ref())) }
        }
        section #catalogue data-live aria-labelledby="catalogue-title" { (catalogue(shape, frame)) }
        section aria-labelledby="output-title" {
            h2 #output-title { "Output" }
            @if let Some(output) = &shape.output {
                div #output.output tabindex="0" role="log" aria-label="Output of the server" data-through=(output.through) {
                    @for entry in output.lines.iter().rev() {
                        div.(level_of(entry.line.level)) title=(rfc3339(entry.line.timestamp)) { (shown(&entry.line.message)) }
                    }
                }
                p #output-none hidden[!output.lines.is_empty()] { "No output is stored." }
            } @else {
                p { "Reading the output of another user's server needs the grant " code { "calls:read" } "." }
            }
        }
        section aria-labelledby="timeline-title" {
            h2 #timeline-title { "Events" }
            p { a href={ (frame.root) "events?instance=" (segment(name)) } { "All events of this instance" } " · " a href={ (frame.root) "calls?instance=" (segment(name)) } { "Its calls" } }
            ol #events.events data-since=(shape.through) data-instance=(name) aria-label="Events, newest first" { (event_items(frame, &shape.events, false)) }
        }
    };
    page(frame, NavigationEntry::Other, "instance", name, &content)
}

fn state(shape: &InstanceShape) -> Markup {
    let status = &shape.details.instance;
    html! {
        p.state {
            (status_label(status.status.as_str(), status.dormant, status.want == RequestedState::Stopped))
            " since " time.since datetime=(status.since) { (status.since) }
            @if let Some(pause) = status.next_retry_ms {
                " · next attempt in " b.countdown data-ms=(pause) { (pause / 1000) " s" }
                @if let Some(attempt) = status.attempt { " (attempt " (attempt) ")" }
            }
        }
        @if let Some(message) = &status.status_message { p.why { (shown(message)) } }
        @if let Some(step) = &status.next_step { p.step { "Next: " (with_commands(step)) } }
    }
}

fn configure_form(shape: &InstanceShape, frame: &PageFrame) -> Markup {
    html! {
        @if !shape.missing.is_empty() && frame.csrf_token.is_some() && frame.role >= Role::Admin {
            form.configure data-instance=(shape.details.instance.instance) {
                @for key in &shape.missing { label { (shown(key)) " " input type="password" name=(key) autocomplete="off" required; } }
                button type="submit" { "Set values" }
            }
        }
    }
}

fn actions(shape: &InstanceShape, frame: &PageFrame) -> Markup {
    let status = &shape.details.instance;
    let (name, is_remote) = (&status.instance, status.transport != "stdio");
    html! {
        p #actions.actions data-live {
            @if may_operate(frame) {
                // A stopped instance refuses a restart.
                button type="button" data-action="restart" data-instance=(name) disabled[status.want == RequestedState::Stopped] { "restart" } " "
                @for action in ["stop", "start"] {
                    button type="button" data-action=(action) data-instance=(name) { (action) } " "
                }
                @if is_remote { button type="button" data-action="reconnect" data-instance=(name) { "reconnect" } " " }
                @if frame.role >= Role::Admin { button type="button" data-action="remove" data-instance=(name) { "remove" } " " }
            } @else {
                span { "Changes need a login with the role operator. " }
            }
            @if shape.calls_tools && may_operate(frame) { a.button href={ (frame.root) "playground/" (segment(name)) } { "Call a tool" } }
            @if status.remedy == Some(Remedy::Authorize) { " " code { "satellite auth " (shown(name)) } }
        }
        p #response role="status" {}
    }
}

fn restarts(shape: &InstanceShape) -> Markup {
    let (budget, status) = (&shape.details.budget, &shape.details.instance);
    let summary = format!(
        "{} of {} unwanted exits in {}; {}",
        budget.exits_ms_ago.len(),
        budget.exits_max,
        length(Duration::from_millis(budget.window_ms)),
        match budget.remaining {
            0 => "the restarts have ended".to_owned(),
            1 => "the next one ends the restarts".to_owned(),
            more => format!("{more} more end the restarts"),
        }
    );
    html! {
        h2 #restarts-title { "Restarts" }
        (budget_picture(budget, &summary))
        p { (summary) ". Restarts in total: " (status.restarts) "." }
        @if let Some(exit) = &status.last_exit { p { "Last exit: " (shown(exit)) } }
        @if let Some(error) = &status.last_error { p.why { "Last failure: " (shown(error)) } }
    }
}

/// Draws the window of the budget: now is on the right, each unwanted exit that counts is a bar, and each further exit
/// that is allowed is a green box.
fn budget_picture(budget: &BudgetReport, summary: &str) -> Markup {
    let window = budget.window_ms.max(1);
    let place = |age: u64| format!("{:.1}", 300.0 - 300.0 * (age.min(window) as f64 / window as f64));
    let boxes = budget.exits_max.min(12);
    let used = boxes.saturating_sub(budget.remaining);
    html! {
        svg.budget viewBox="0 0 320 64" role="img" aria-label=(summary) {
            line.axis x1="0" y1="40" x2="300" y2="40" {}
            text x="0" y="58" { "−" (length(Duration::from_millis(budget.window_ms))) }
            text x="300" y="58" text-anchor="end" { "now" }
            @for age in &budget.exits_ms_ago {
                line.exit x1=(place(*age)) y1="24" x2=(place(*age)) y2="40" {}
            }
            @for nth in 0..boxes {
                rect.(if nth < used { "used" } else { "left" }) x=(nth * 20) y="2" width="14" height="14" rx="2" {}
            }
        }
    }
}

fn processes(report: Option<&ProcessReport>) -> Markup {
    html! {
        h2 #processes-title { "Processes" }
        @if let Some(report) = report {
            p { "Contained by " (shown(&report.contained_by)) @if let Some(container) = &report.container { ", " code { (shown(container)) } } }
            div.scroll tabindex="0" role="region" aria-label="Table of processes" { table {
                thead { tr {
                    th.number scope="col" { "PID" } th.number scope="col" { "Parent" } th scope="col" { "Name" } th scope="col" { "State" }
                    th.number scope="col" { "Memory" } th.number scope="col" { "CPU time" }
                } }
                tbody { @for (depth, process) in in_tree_order(&report.processes) { tr {
                    td.number { (process.pid) } td.number { (process.parent_pid) }
                    td { @if depth > 0 { ("\u{2003}".repeat(depth.min(DEPTH_MAX) - 1)) "└ " } (shown(&process.name)) } td { (process.state) }
                    td.number { (format!("{:.1} MB", process.rss_bytes as f64 / 1e6)) } td.number { (format!("{:.1} s", process.cpu_seconds)) }
                } } }
            } }
        } @else { p { "The instance has no process on this machine now." } }
    }
}

/// Returns the processes with their depths: children after their parents.
fn in_tree_order(processes: &[ProcessEntry]) -> Vec<(usize, &ProcessEntry)> {
    let is_root = |process: &&ProcessEntry| !processes.iter().any(|other| other.pid == process.parent_pid);
    let mut waiting: Vec<_> = processes.iter().rev().filter(is_root).map(|process| (0, process)).collect();
    let mut ordered = Vec::new();
    // The tree was read while it changed: a process that became its own ancestor is not reached.
    while let Some((depth, process)) = waiting.pop() {
        ordered.push((depth, process));
        let children = processes.iter().rev().filter(|child| child.parent_pid == process.pid);
        waiting.extend(children.map(|child| (depth + 1, child)));
    }
    ordered
}

fn level_of(level: LogLevel) -> &'static str {
    match level {
        LogLevel::Debug => "debug",
        LogLevel::Info => "info",
        LogLevel::Warn => "warn",
        LogLevel::Error => "error",
    }
}

fn length(duration: Duration) -> String {
    match duration.as_secs() {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds @ 120..7200 => format!("{} min", seconds / 60),
        seconds => format!("{} h", seconds / 3600),
    }
}

fn facts(status: &InstanceStatus) -> Markup {
    let number = |value: Option<u32>| value.map(|value| value.to_string());
    let rows: [(&str, Option<String>); 17] = [
        ("Transport", Some(status.transport.clone())),
        ("Process", number(status.pid)),
        ("Sandbox process", number(status.wrapper_pid)),
        ("Isolation", status.isolation.clone()),
        ("Contained by", status.held_by.clone()),
        ("Identity", status.identity.clone()),
        ("Memory", status.rss_bytes.map(|bytes| format!("{:.1} MB", bytes as f64 / 1e6))),
        ("CPU time", status.cpu_seconds.map(|seconds| format!("{seconds:.1} s"))),
        ("Connection", status.connection.map(|state| state.to_string())),
        ("Health", Some(status.health.to_string())),
        ("Last check", status.last_check_at.clone()),
        ("Running for", status.uptime_seconds.map(|seconds| length(Duration::from_secs(seconds)))),
        ("Calls", Some(status.calls.to_string())),
        ("Calls in flight", Some(status.calls_in_flight.to_string())),
        ("Failed calls", Some(status.errors.to_string())),
        ("Messages received", Some(status.messages.to_string())),
        ("Last message", status.last_activity_at.clone()),
    ];
    html! {
        h2 #facts-title { "Process and calls" }
        dl {
            @for (name, value) in &rows {
                @if let Some(value) = value { div { dt { (name) } dd { (shown(value)) } } }
            }
        }
    }
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct EntryText {
    title: Option<String>,
    name: Option<String>,
    description: Option<String>,
}

fn catalogue(shape: &InstanceShape, frame: &PageFrame) -> Markup {
    let empty = Arc::default();
    let catalogue = shape.catalogue.as_ref().unwrap_or(&empty);
    let is_offered = shape.details.instance.status == Status::Online;
    let calls = shape.calls_tools && may_operate(frame) && is_offered;
    html! {
        h2 #catalogue-title { "Tools, resources, prompts" }
        @if !is_offered && shape.catalogue.is_some() {
            p { "Clients are not offered these now, because the instance is not online. The lists are those that were last read." }
        }
        @for list in &catalogue.unreadable { p.error { "The server did not answer " (list.method()) "; its list may be incomplete." } }
        details open[catalogue.tools.len() <= 20] {
            summary { "Tools " span.count { (catalogue.tools.len()) } }
            dl.entries {
                @for tool in catalogue.tools.iter().take(ENTRIES_MAX) {
                    @let text: EntryText = serde_json::from_str(tool.raw.get()).unwrap_or_default();
                    div {
                        dt {
                            @if calls {
                                a href={ (frame.root) "playground/" (segment(&shape.details.instance.instance)) "?tool=" (segment(&tool.name)) } { (shown(&tool.name)) }
                            } @else { (shown(&tool.name)) }
                            small { " about " (tool.tokens) " tokens" }
                        }
                        dd { (shown_lines(text.description.or(text.title).as_deref().unwrap_or_default())) }
                    }
                }
            }
            (cut_note(catalogue.tools.len()))
        }
        (entries("Resources", &catalogue.resources))
        (entries("Resource templates", &catalogue.resource_templates))
        (entries("Prompts", &catalogue.prompts))
    }
}

fn entries(title: &str, entries: &[CatalogueEntry]) -> Markup {
    html! {
        @if !entries.is_empty() {
            details {
                summary { (title) " " span.count { (entries.len()) } }
                dl.entries {
                    @for entry in entries.iter().take(ENTRIES_MAX) {
                        @let text: EntryText = serde_json::from_str(entry.raw.get()).unwrap_or_default();
                        div {
                            dt { (shown(&entry.key)) }
                            dd { (shown_lines(text.description.or(text.title).or(text.name).as_deref().unwrap_or_default())) }
                        }
                    }
                }
                (cut_note(entries.len()))
            }
        }
    }
}

fn cut_note(count: usize) -> Markup {
    html! { @if count > ENTRIES_MAX { p { "Only the first " (ENTRIES_MAX) " of " (count) " are shown." } } }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_follow_their_parents() {
        let process = |pid, parent_pid| ProcessEntry {
            pid,
            parent_pid,
            name: format!("p{pid}"),
            state: "S".to_owned(),
            rss_bytes: 0,
            cpu_seconds: 0.0,
        };
        let processes = [process(9, 8), process(3, 2), process(2, 1), process(8, 1), process(4, 2)];
        let order: Vec<_> = in_tree_order(&processes).iter().map(|(depth, process)| (*depth, process.pid)).collect();
        assert_eq!(order, [(0, 2), (1, 3), (1, 4), (0, 8), (1, 9)]);
        assert!(in_tree_order(&[process(1, 2), process(2, 1)]).is_empty());
    }

    #[test]
    fn a_cut_list_says_so() {
        assert_eq!(cut_note(ENTRIES_MAX).into_string(), "");
        assert_eq!(cut_note(250).into_string(), "<p>Only the first 200 of 250 are shown.</p>");
    }
}
