//! The live tree of actors.

use maud::{Markup, html};
use mcp_satellite_actors::model::actor_tree::{ActorKind, ActorReport};

use super::layout::{NavigationEntry, PageFrame, instance_link, page};
use super::shown;

/// Workers of a team that the page lists.
const WORKERS_MAX: usize = 200;

/// Returns the page.
pub fn tree_page(root: &ActorReport, frame: &PageFrame) -> Markup {
    let content = html! {
        h1 { "Tree of actors" }
        p { "An actor that answers late has much to do: the time contains its mailbox. The runtime does not report the lengths of mailboxes." }
        div #tree data-live { ul.tree { (actor(root, frame)) } }
    };
    page(frame, NavigationEntry::Tree, "tree", "Tree", &content)
}

fn actor(report: &ActorReport, frame: &PageFrame) -> Markup {
    let kind = match report.kind {
        ActorKind::Root => "root supervisor",
        ActorKind::Registry => "registry",
        ActorKind::Batcher => "batcher",
        ActorKind::Team => "team",
        ActorKind::Worker => "worker",
    };
    let workers = report.children.len();
    html! {
        li {
            span.actor {
                b { (kind) } " "
                @match report.kind {
                    ActorKind::Worker => { (instance_link(frame, &report.name, &report.name)) " " }
                    ActorKind::Team => { (shown(&report.name)) " " }
                    ActorKind::Root | ActorKind::Registry | ActorKind::Batcher => {}
                }
                @if let Some(milliseconds) = report.answered_ms { span.answer { "answered in " (format!("{milliseconds:.1}")) " ms" } }
                @else { span.error { "did not answer" } }
                @if report.restarts > 0 { " · restarts " (report.restarts) }
                @if let Some(backlog) = report.backlog { " · waiting " (backlog) }
                @for permit in &report.permits { " · " (permit) }
            }
            @if report.kind == ActorKind::Team && workers > 0 {
                details open[workers <= 20] {
                    summary { "Workers " span.count { (workers) } }
                    ul { @for worker in report.children.iter().take(WORKERS_MAX) { (actor(worker, frame)) } }
                    @if workers > WORKERS_MAX { p { "Only the first " (WORKERS_MAX) " are listed." } }
                }
            } @else if workers > 0 {
                ul { @for child in &report.children { (actor(child, frame)) } }
            }
        }
    }
}
