//! Overview: all instances by team, counts, and what needs a person.

use std::collections::BTreeMap;

use maud::{Markup, PreEscaped, html};
use mcp_satellite_actors::model::remedy::Remedy;
use mcp_satellite_actors::model::status::Status;

use super::layout::{
    ConsoleSite, NavigationEntry, PageFrame, class_of, instance_link, page, status_label, status_text, with_commands,
};
use super::{escape_script, may_operate, segment, shown};
use crate::feed::{Attention, DORMANT, FeedRows, InstanceRow, RECOVERING, STOPPED};

/// Contents of the overview.
#[derive(Debug, Clone)]
pub struct OverviewShape {
    pub rows: FeedRows,
    /// Warnings about the satellite itself, each with its next step.
    pub warnings: Vec<String>,
}

/// Rows of the list of instances that need a person.
const ATTENTION_MAX: usize = 50;
/// Number of instances up to which a cell shows the name of its server.
const TILES_MAX: usize = 60;
/// Number of instances from which the cells are smallest.
const SMALL_FROM: usize = 2_000;

/// Returns the page.
pub fn overview_page(shape: &OverviewShape, frame: &PageFrame) -> Markup {
    let rows = &shape.rows.rows;
    let mut teams: BTreeMap<&str, Vec<&InstanceRow>> = BTreeMap::new();
    for row in rows.iter() {
        teams.entry(&row.team).or_default().push(row);
    }
    let mut urgent: Vec<(&InstanceRow, &Attention)> =
        rows.iter().filter_map(|row| Some((row, row.attention.as_ref()?))).collect();
    urgent.sort_unstable_by_key(|(row, _)| row.attention_order());
    let size = if rows.len() <= TILES_MAX {
        "tiles"
    } else if rows.len() < SMALL_FROM {
        "cells"
    } else {
        "cells small"
    };
    let content = html! {
        h1 { "Overview" }
        div #warnings data-live { @for warning in &shape.warnings { p.error { (shown(warning)) } } }
        ul #counts.counts aria-label="Instances by status" data-order=(order_of_counts()) { (counts(rows)) }
        section aria-labelledby="attention-title" {
            h2 #attention-title { "Needs attention " span #attention-count { (urgent.len()) } }
            p #attention-none hidden[!urgent.is_empty()] { "Nothing needs attention." }
            ul #attention.attention tabindex="0" aria-label="Instances that need attention, worst first" data-max=(ATTENTION_MAX) data-recovering=(RECOVERING) data-logs[frame.site == ConsoleSite::Satellite] data-operates[may_operate(frame)] {
                @for (row, attention) in urgent.iter().take(ATTENTION_MAX) { (attention_item(frame, row, attention)) }
            }
            p #attention-more hidden[urgent.len() <= ATTENTION_MAX] {
                "Only the " (ATTENTION_MAX) " worst are listed; the " a href={ (frame.root) "instances?sort=status" } { "table" } " has all."
            }
        }
        section aria-labelledby="grid-title" {
            h2 #grid-title { "Instances " span #total { (rows.len()) } }
            @if rows.is_empty() {
                p { @if frame.site == ConsoleSite::Backend { "No satellite has reported an instance. The page " a href={ (frame.root) "fleet" } { "Fleet" } " shows the satellites." } @else { "No instance is configured. " code { "satellite connect --list" } " shows the clients whose servers " code { "satellite import" } " takes over." } }
            }
            form.filter role="search" action={ (frame.root) "instances" } {
                label for="filter" { "Find" }
                input #filter name="q" type="search" placeholder="server, user, team or status" autocomplete="off" aria-describedby="filter-help";
                span #filter-help { "Arrow keys move through a grid, Enter opens the instance. " a href={ (frame.root) "instances" } { "The same as a table" } }
            }
            ul #found.found aria-label="Found instances" {}
            p #detail.detail aria-live="polite" { "\u{a0}" }
            div #teams.(size) {
                @for (team, rows) in &teams {
                    section.team data-team=(team) aria-label=(team) {
                        h3 { (shown(team)) " " span.count { (rows.len()) } }
                        div.grid role="listbox" tabindex="0" aria-label={ "Instances of " (shown(team)) } {
                            @for row in rows { (cell(row, size == "tiles")) }
                        }
                    }
                }
            }
        }
        script #rows type="application/json" { (PreEscaped(escape_script(&String::from_utf8_lossy(&shape.rows.json)))) }
    };
    page(frame, NavigationEntry::Overview, "overview", "Overview", &content)
}

fn cell(row: &InstanceRow, has_name: bool) -> Markup {
    let class = class_of(row.status.as_str(), row.flags & DORMANT != 0, row.flags & STOPPED != 0);
    html! {
        i.(class) role="option" {
            @if has_name {
                b { (row.server) } " " (row.user) " "
                small { (status_text(row.status.as_str(), row.flags & DORMANT != 0, row.flags & STOPPED != 0)) }
            }
        }
    }
}

/// Returns the labels of the counts in their order.
fn order_of_counts() -> String {
    let labels =
        |status: Status| [false, true].map(|is_special| class_of(status.as_str(), is_special, is_special).to_owned());
    let mut labels: Vec<String> = Status::ALL.iter().copied().flat_map(labels).collect();
    labels.dedup();
    labels.join(" ")
}

fn counts(rows: &[InstanceRow]) -> Markup {
    let mut counts: BTreeMap<Status, [usize; 2]> = BTreeMap::new();
    for row in rows {
        let is_special = match row.status {
            Status::Online => row.flags & DORMANT != 0,
            _ => row.status == Status::Offline && row.flags & STOPPED != 0,
        };
        counts.entry(row.status).or_default()[usize::from(is_special)] += 1;
    }
    html! {
        @for status in Status::ALL {
            @let [plain, special] = counts.get(status).copied().unwrap_or_default();
            @for (count, is_special) in [(plain, false), (special, true)] {
                @if count > 0 {
                    li { span.dot.(class_of(status.as_str(), is_special, is_special)) {} b { (count) } " " (status_text(status.as_str(), is_special, is_special)) }
                }
            }
        }
    }
}

fn attention_item(frame: &PageFrame, row: &InstanceRow, attention: &Attention) -> Markup {
    let status = row.status.as_str();
    html! {
        li data-name=(row.name) {
            (status_label(status, row.flags & DORMANT != 0, false))
            " " (instance_link(frame, &row.name, &format!("{} · {}/{}", row.server, row.team, row.user)))
            " " time.since data-since=(row.since) { }
            " " span.why {
                (shown(&attention.message)) " · "
                span.step { @if let Some(step) = &attention.step { "Next: " (with_commands(step)) } @else { (recovery(frame, row, attention)) } }
            }
            span.buttons {
                @if let (Some(action), true) = (attention.remedy.and_then(action_of), may_operate(frame)) {
                    button type="button" data-action=(action) data-instance=(row.name) {
                        (action) @if attention.urgency >= RECOVERING { " now" }
                    }
                }
                // A backend has no output.
                @if matches!(attention.remedy, Some(Remedy::Configure | Remedy::Authorize)) || frame.site == ConsoleSite::Backend {
                    " " a.button href={ (frame.root) "instances/" (segment(&row.name)) } { "open" }
                } @else {
                    " " a.button href={ (frame.root) "instances/" (segment(&row.name)) "#output-title" } { "logs" }
                }
            }
        }
    }
}

/// The next step of the satellite for an instance that recovers by itself.
fn recovery(frame: &PageFrame, row: &InstanceRow, attention: &Attention) -> Markup {
    let verb = if attention.remedy == Some(Remedy::Reconnect) { "Connects again" } else { "Restarts" };
    let at = frame.at.parse::<jiff::Timestamp>().map_or(0, jiff::Timestamp::as_millisecond);
    html! {
        @if let Some(retry) = row.retry {
            (verb) " in " b.countdown data-until=(retry) { (retry.saturating_sub(at).max(0) / 1000) " s" } "."
        } @else if attention.remedy.is_some() { (verb) " now." } @else { "It recovers by itself." }
    }
}

/// Returns the action that carries out a remedy; `None` if it needs input.
pub(super) fn action_of(remedy: Remedy) -> Option<&'static str> {
    match remedy {
        Remedy::Restart => Some("restart"),
        Remedy::Start => Some("start"),
        Remedy::Reconnect => Some("reconnect"),
        Remedy::Configure | Remedy::Authorize | Remedy::ReadLogs => None,
    }
}
