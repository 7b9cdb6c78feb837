//! The frame of all pages.

use axum::http::Uri;
use maud::{DOCTYPE, Markup, html};
use mcp_satellite_config::Role;

use super::assets::{icon_name, script_name, style_name};
use super::{login_link, segment, shown};

/// Kinds of servers that serve pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConsoleSite {
    Satellite,
    Backend,
}

/// Facts that every page shows or needs.
#[derive(Debug, Clone)]
pub struct PageFrame {
    /// Relative path to `/console/`.
    pub root: &'static str,
    /// Path and query of the page, to which a login returns.
    pub uri: Uri,
    pub site: ConsoleSite,
    /// Name of the satellite or backend.
    pub satellite: String,
    /// Whoever is logged in.
    pub principal: String,
    pub role: Role,
    /// Token for changes; `None` without a login: then the page offers none.
    pub csrf_token: Option<String>,
    /// Process of the satellite.
    pub boot: String,
    /// Revision of the instances on the page.
    pub revision: u64,
    /// Time of the page, in RFC 3339.
    pub at: String,
}

/// Entries of the navigation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NavigationEntry {
    Overview,
    Instances,
    Calls,
    Events,
    Clients,
    Tree,
    Fleet,
    /// A page that the navigation does not contain.
    Other,
}

const SECTIONS: [(NavigationEntry, &str, &str); 7] = [
    (NavigationEntry::Overview, "./", "Overview"),
    (NavigationEntry::Instances, "instances", "Instances"),
    (NavigationEntry::Calls, "calls", "Calls"),
    (NavigationEntry::Events, "events", "Events"),
    (NavigationEntry::Clients, "clients", "Clients"),
    (NavigationEntry::Tree, "tree", "Tree"),
    (NavigationEntry::Fleet, "fleet", "Fleet"),
];

/// Returns true if the site has a page of this section. A backend knows only what satellites report.
fn has_section(site: ConsoleSite, section: NavigationEntry) -> bool {
    let at_satellites_only = matches!(section, NavigationEntry::Clients | NavigationEntry::Tree);
    site == ConsoleSite::Satellite || !at_satellites_only
}

pub(super) fn page(frame: &PageFrame, section: NavigationEntry, name: &str, title: &str, content: &Markup) -> Markup {
    let root = frame.root;
    html! {
        (DOCTYPE)
        html lang="en" {
            (head(root, &format!("{} · {}", shown(title), shown(&frame.satellite)), frame.csrf_token.as_deref()))
            body data-page=(name) data-root=(root) data-boot=(frame.boot) data-revision=(frame.revision) data-at=(frame.at) data-role=(frame.role) {
                a.skip href="#main" { "Skip to the content" }
                header {
                    a.brand href={ (root) "./" } { img src={ (root) "assets/" (icon_name()) } alt="" width="20" height="20"; (shown(&frame.satellite)) }
                    nav aria-label="Pages" {
                        @for (its, path, label) in SECTIONS.into_iter().filter(|(its, ..)| has_section(frame.site, *its)) {
                            a href={ (root) (path) } aria-current=[(its == section).then_some("page")] { (label) }
                        }
                    }
                    p.fresh {
                        span #link role="status" { "loaded" }
                        " "
                        span #revision title="Revision of the instances on this page" { "revision " (frame.revision) }
                        " "
                        time #age datetime=(frame.at) { (frame.at) }
                    }
                    p.who {
                        span title="Role of this login" { (frame.principal) " · " (frame.role) }
                        button #theme type="button" { "Theme" }
                        @if frame.csrf_token.is_some() { button #logout type="button" { "Log out" } }
                        @else { a.button href=(login_link(&frame.uri)) { "Log in" } }
                    }
                }
                p #stale role="status" hidden {}
                main #main tabindex="-1" { (content) }
                div #notice role="status" {}
            }
        }
    }
}

/// A page of somebody who is not logged in.
pub(super) fn bare_page(root: &str, name: &str, title: &str, content: &Markup) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            (head(root, title, None))
            body.bare data-page=(name) data-root=(root) {
                main #main { (content) }
                div #notice role="status" {}
            }
        }
    }
}

fn head(root: &str, title: &str, csrf_token: Option<&str>) -> Markup {
    html! {
        head {
            meta charset="utf-8";
            meta name="viewport" content="width=device-width, initial-scale=1";
            title { (title) }
            link rel="stylesheet" href={ (root) "assets/" (style_name()) };
            link rel="icon" type="image/svg+xml" href={ (root) "assets/" (icon_name()) };
            @if let Some(token) = csrf_token { meta name="csrf" content=(token); }
            script type="module" src={ (root) "assets/" (script_name()) } {}
        }
    }
}

/// A link to the page of an instance.
pub(super) fn instance_link(frame: &PageFrame, name: &str, text: &str) -> Markup {
    html! { a href={ (frame.root) "instances/" (segment(name)) } { (shown(text)) } }
}

/// A choice of a satellite in a form; nothing at a satellite.
pub(super) fn satellite_choice(satellites: &[String], chosen: Option<&str>) -> Markup {
    html! {
        @if !satellites.is_empty() {
            label { "Satellite "
                select name="satellite" {
                    option value="" { "all" }
                    @for name in satellites { option value=(name) selected[chosen == Some(name.as_str())] { (shown(name)) } }
                }
            }
        }
    }
}

/// Text with commands in backquotes.
pub(super) fn with_commands(text: &str) -> Markup {
    let text = shown(text);
    html! {
        @for (nth, part) in text.split('`').enumerate() { @if nth % 2 == 1 { code { (part) } } @else { (part) } }
    }
}

/// A status as a coloured label.
pub(super) fn status_label(status: &str, is_dormant: bool, is_stopped: bool) -> Markup {
    let text = status_text(status, is_dormant, is_stopped);
    html! { span.status.(class_of(status, is_dormant, is_stopped)) { (text) } }
}

pub(super) fn status_text(status: &str, is_dormant: bool, is_stopped: bool) -> String {
    match status {
        "online" if is_dormant => "asleep".to_owned(),
        "offline" if is_stopped => "stopped".to_owned(),
        _ => status.replace('_', " "),
    }
}

pub(super) fn class_of(status: &str, is_dormant: bool, is_stopped: bool) -> &str {
    match status {
        "online" if is_dormant => "asleep",
        "offline" if is_stopped => "stopped",
        _ => status,
    }
}
