//! Fleet: the satellites of a backend. A satellite shows what its backend reveals; the backend shows more.

use std::collections::BTreeMap;

use maud::{Markup, html};
use mcp_satellite_actors::model::event::rfc3339;
use mcp_satellite_backend::server::api::{CommandRecordView, CommandStage, SatelliteView};
use mcp_satellite_backend::wire::{Heartbeat, SystemInfo};

use super::layout::{ConsoleSite, NavigationEntry, PageFrame, page, with_commands};
use super::{segment, shown};
use crate::problem::Problem;
use crate::v1::{FleetMember, FleetMemberDetails, FleetReport};

/// Chapter of the manual about backends.
const MANUAL: &str = concat!(env!("CARGO_PKG_REPOSITORY"), "/blob/main/docs/fleet.md");

const EXAMPLE: &str = "\
[satellite]
name = \"satellite-berlin-1\"

[backend]
url = \"https://backend.example.com\"
token = \"file:registration-token\"
";

/// Contents of the page.
#[derive(Debug, Clone)]
pub struct FleetPageShape {
    /// The satellites, or the reason why they are not known.
    pub report: Result<FleetReport, Problem>,
}

/// Returns the page.
pub fn fleet_page(shape: &FleetPageShape, frame: &PageFrame) -> Markup {
    let content = html! {
        h1 { "Fleet" }
        div #fleet data-live { (fleet(shape, frame)) }
    };
    page(frame, NavigationEntry::Fleet, "fleet", "Fleet", &content)
}

fn fleet(shape: &FleetPageShape, frame: &PageFrame) -> Markup {
    let report = match &shape.report {
        Ok(report) => report,
        Err(problem) => {
            return html! {
                p.error { "The satellites of the backend are not known: " (with_commands(&problem.detail)) "." }
                p { "Running servers continue. The page asks the backend again every few seconds." }
            };
        }
    };
    let Some(backend) = &report.backend else { return without_backend() };
    let connected = report.satellites.iter().filter(|member| member.satellite.connected).count();
    html! {
        p {
            (report.satellites.len()) " satellites, " (connected) " connected"
            @if frame.site == ConsoleSite::Satellite {
                ", at the backend " code { (shown(backend)) }
                @if let Some(at) = &report.at { ", as of " time.since datetime=(at) { (at) } }
            }
            "."
        }
        @if report.satellites.is_empty() {
            p { "No satellite is registered. The backend prints the lines for the configuration of a satellite when it starts; " a href=(MANUAL) { "the manual" } " explains them." }
        } @else { (table(report, frame)) }
    }
}

fn without_backend() -> Markup {
    html! {
        p { "This satellite has no backend. A backend sends configurations and commands to several satellites, and collects their events: one place for a whole team." }
        p { code { "satellite backend" } " starts one. A satellite registers with a single-use token:" }
        pre { (EXAMPLE) }
        p { "Teams and servers then come from the backend. " a href=(MANUAL) { "Fleet, in the manual" } " describes both sides." }
    }
}

fn table(report: &FleetReport, frame: &PageFrame) -> Markup {
    let has_details = report.satellites.iter().any(|member| member.details.is_some());
    html! {
        div.scroll tabindex="0" role="region" aria-label="Table of satellites" { table {
            thead { tr {
                th scope="col" { "Satellite" } th scope="col" { "Connection" } th scope="col" { "Last contact" }
                th scope="col" { "Instances" }
                @if has_details {
                    th scope="col" { "Configuration" } th.number scope="col" { "Commands waiting" } th.number scope="col" { "Stored events" }
                    th scope="col" { "Machine" }
                }
                th scope="col" { "Version" }
            } }
            tbody { @for FleetMember { satellite, details } in &report.satellites { tr {
                th scope="row" {
                    @if has_details { a href={ (frame.root) "fleet/" (segment(&satellite.name)) } { (shown(&satellite.name)) } }
                    @else { (shown(&satellite.name)) }
                    @if report.name.as_ref() == Some(&satellite.name) { small { " this satellite" } }
                }
                td { (connection(satellite.connected)) }
                td { @if let Some(at) = satellite.last_contact { time.since datetime=(rfc3339(at)) { (rfc3339(at)) } } @else { "never" } }
                td { (instance_counts(&satellite.instances)) }
                @if let Some(details) = details { (detail_cells(details)) }
                td { (shown(&satellite.version)) }
            } } }
        } }
    }
}

fn connection(connected: bool) -> Markup {
    html! { @if connected { span.status.online { "connected" } } @else { span.status.offline { "not connected" } } }
}

fn instance_counts(counts: &BTreeMap<String, usize>) -> Markup {
    html! {
        @if counts.is_empty() { "none" }
        @for (nth, (status, count)) in counts.iter().enumerate() {
            @if nth > 0 { ", " }
            span.dot.(class_of_status(status)) {} (count) " " (shown(&status.replace('_', " ")))
        }
    }
}

/// Returns the class of a status. Text of an unknown one is not used as a class.
fn class_of_status(status: &str) -> &'static str {
    use mcp_satellite_actors::model::status::Status;
    Status::ALL.iter().map(|known| known.as_str()).find(|known| *known == status).unwrap_or("offline")
}

fn detail_cells(details: &FleetMemberDetails) -> Markup {
    html! {
        td { (configuration(details.config_is_current)) }
        td.number { (details.commands_waiting) }
        td.number { (details.events) }
        td { (machine(&details.machine)) }
    }
}

fn configuration(is_current: Option<bool>) -> Markup {
    html! {
        @match is_current {
            Some(true) => "current",
            Some(false) => b { "not current" },
            None => "none",
        }
    }
}

fn machine(machine: &SystemInfo) -> String {
    let memory = machine.memory_bytes as f64 / 1e9;
    shown(&format!("{} {}, {} CPUs, {memory:.1} GB", machine.os, machine.arch, machine.cpus))
}

/// Contents of the page of a satellite at its backend.
#[derive(Debug, Clone)]
pub struct SatellitePageShape {
    pub satellite: SatelliteView,
    /// The last commands, latest first.
    pub commands: Vec<CommandRecordView>,
}

/// Returns the page.
pub fn satellite_page(shape: &SatellitePageShape, frame: &PageFrame) -> Markup {
    let satellite = &shape.satellite;
    let name = segment(&satellite.name);
    let content = html! {
        h1 { (shown(&satellite.name)) }
        div #satellite data-live {
            p.state {
                (connection(satellite.connected))
                @if let Some(at) = satellite.last_contact { " last contact " time.since datetime=(rfc3339(at)) { (rfc3339(at)) } }
            }
            @if !satellite.connected {
                p.why { "The satellite has sent nothing for 90 s, or has announced that it stops. Start it on its machine, or check its network; commands wait for it." }
            }
            div.columns {
                section aria-labelledby="facts-title" { (facts(satellite)) }
                section aria-labelledby="heartbeat-title" {
                    h2 #heartbeat-title { "Last heartbeat" }
                    @if let Some(heartbeat) = &satellite.heartbeat { (heartbeat_facts(heartbeat, satellite)) }
                    @else { p { "The satellite has sent no heartbeat." } }
                }
            }
            section aria-labelledby="commands-title" {
                h2 #commands-title { "Commands" }
                (command_table(&shape.commands))
            }
        }
        p { a href={ (frame.root) "instances?q=" (name) "%3A" } { "Its instances" } " · " a href={ (frame.root) "events?satellite=" (name) } { "Its events" } }
    };
    page(frame, NavigationEntry::Fleet, "fleet", &satellite.name, &content)
}

fn list(rows: &[(&str, Option<String>)]) -> Markup {
    html! {
        dl { @for (name, value) in rows {
            @if let Some(value) = value { div { dt { (name) } dd { (shown(value)) } } }
        } }
    }
}

fn facts(satellite: &SatelliteView) -> Markup {
    let is_current = config_is_current(satellite);
    html! {
        h2 #facts-title { "Satellite" }
        (list(&[
            ("Id", Some(satellite.satellite_id.clone())),
            ("Version", Some(satellite.version.clone())),
            ("Machine", Some(machine(&satellite.system))),
            ("Transports", Some(satellite.capabilities.join(", "))),
            ("Registered", Some(rfc3339(satellite.registered_at))),
            ("Configuration to run", satellite.config_hash.clone()),
            ("Configuration applied", satellite.applied_config_hash.clone()),
            ("Commands waiting", Some(satellite.commands_waiting.to_string())),
            ("Stored events", Some(satellite.events.to_string())),
        ]))
        p { "Configuration: " (configuration(is_current)) "." }
        p { "Instances: " (instance_counts(&satellite.instances)) }
    }
}

/// Returns true if the satellite runs the configuration that it is to run; `None` if there is none.
pub fn config_is_current(satellite: &SatelliteView) -> Option<bool> {
    satellite.config_hash.as_ref().map(|hash| satellite.applied_config_hash.as_ref() == Some(hash))
}

fn heartbeat_facts(heartbeat: &Heartbeat, satellite: &SatelliteView) -> Markup {
    let system = &heartbeat.system;
    let gigabytes = |bytes: u64| format!("{:.1} GB", bytes as f64 / 1e9);
    let disk = system.disk_used_bytes.zip(system.disk_total_bytes);
    list(&[
        ("Received", satellite.last_heartbeat.map(rfc3339)),
        ("State", Some(heartbeat.status.clone())),
        ("Running for", Some(format!("{} s", heartbeat.uptime_seconds))),
        ("CPU of the machine", Some(format!("{:.0} %", system.cpu_percent))),
        (
            "Memory of the machine",
            Some(format!("{} of {}", gigabytes(system.memory_used_bytes), gigabytes(system.memory_total_bytes))),
        ),
        ("Disk", disk.map(|(used, total)| format!("{} of {}", gigabytes(used), gigabytes(total)))),
        ("Memory of the satellite", system.satellite_rss_bytes.map(|bytes| format!("{:.1} MB", bytes as f64 / 1e6))),
        ("Events to send", Some(heartbeat.events.backlog.to_string())),
    ])
}

/// Returns the table of commands with their results.
pub(super) fn command_table(commands: &[CommandRecordView]) -> Markup {
    html! {
        @if commands.is_empty() { p { "No command was queued." } }
        @else { div.scroll tabindex="0" role="region" aria-label="Table of commands" { table {
            thead { tr { th scope="col" { "Command" } th scope="col" { "State" } th scope="col" { "Queued" } th scope="col" { "Result" } } }
            tbody { @for one in commands { tr {
                th scope="row" { (shown(&one.command.command_type)) " " small { (shown(&one.command.id)) } }
                td { (stage_text(one.state)) }
                td { time.since datetime=(rfc3339(one.created_at)) { (rfc3339(one.created_at)) } }
                td.why { (result_text(one)) }
            } } }
        } } }
    }
}

fn stage_text(stage: CommandStage) -> &'static str {
    match stage {
        CommandStage::Queued => "waits for the satellite",
        CommandStage::Sent => "sent to the satellite",
        CommandStage::Completed => "completed",
        CommandStage::Failed => "failed",
        CommandStage::Expired => "expired",
    }
}

fn result_text(command: &CommandRecordView) -> String {
    let Some(result) = &command.result else { return String::new() };
    let outcome = result.error.clone().unwrap_or_else(|| {
        let instances = result.result.get("instances").and_then(|instances| instances.as_array());
        let statuses = instances.into_iter().flatten().filter_map(|instance| instance["status"].as_str());
        let mut statuses: Vec<String> = statuses.map(|status| status.replace('_', " ")).collect();
        statuses.dedup();
        statuses.join(", ")
    });
    shown(&format!("{outcome} after {} ms", result.duration_ms))
}
