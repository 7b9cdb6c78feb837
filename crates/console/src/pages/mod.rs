//! The pages of browsers. Each page is a function from the shape of a response to HTML, so that every server of the API
//! can serve it.
//!
//! All text passes through the escaping of maud. Text of servers and clients is also cut, and its control characters
//! are replaced, by `shown`. A page works without its script for reading; the script makes it live.

mod assets;
mod calls;
mod chart;
mod clients;
mod events;
mod fleet;
mod instance;
mod instances;
mod layout;
mod login;
mod overview;
mod playground;
mod problem;
mod reported_instance;
mod tree;
mod unanswered_calls;

use std::borrow::Cow;

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, StatusCode, Uri, header};
use axum::response::Response;
pub use maud::Markup;
use mcp_satellite_actors::model::printable;
use mcp_satellite_config::Role;
use serde::{Deserialize, Serialize};

pub use assets::{answer_asset, asset_bytes};
pub use calls::{CallsShape, calls_page};
pub use clients::{ClientsShape, ConnectableClient, clients_page};
pub use events::{EventEntry, EventsShape, events_page};
pub use fleet::{FleetPageShape, SatellitePageShape, config_is_current, fleet_page, satellite_page};
pub use instance::{InstanceShape, instance_page};
pub use instances::{InstanceListing, InstanceTableRow, RowCounters, instances_page};
pub use layout::{ConsoleSite, PageFrame};
pub use login::{login_page, page_after_login, read_login_form};
pub use overview::{OverviewShape, overview_page};
pub use playground::{PlaygroundShape, playground_page};
pub use problem::problem_response;
pub use reported_instance::{ReportedInstanceShape, reported_instance_page};
pub use tree::tree_page;

use crate::principal::Principal;

/// Query of pages that the script reads again.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub struct LiveQuery {
    /// True for those parts only that the script replaces, and not for those that a stream brings.
    pub live: bool,
}

/// Bytes of a text that a page shows; a longer one is cut.
const TEXT_MAX: usize = 4096;

/// Headers of all pages and assets. `same-origin` and not `no-referrer`: without a referrer a browser sends the login
/// form with `Origin: null`.
const HEADERS: [(HeaderName, &str); 5] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri \
         'none'; form-action 'self'; frame-ancestors 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "same-origin"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

/// Returns the response with a page.
pub fn html_response(status: StatusCode, page: Markup) -> Response {
    let mut response = Response::new(Body::from(page.into_string()));
    *response.status_mut() = status;
    secure(&mut response);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

fn secure(response: &mut Response) {
    for (name, value) in HEADERS {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
}

/// Returns the relative path from a page to `/console/`. Relative links work behind a proxy that adds a prefix.
pub fn root_of(path: &str) -> &'static str {
    let below = path.split_once("/console").map_or("", |(_, below)| below);
    match below.matches('/').count() {
        0 => "console/",
        1 => "",
        _ => "../",
    }
}

/// Returns the link to the login page, which leads back to the page of `uri`.
pub(crate) fn login_link(uri: &Uri) -> String {
    let root = root_of(uri.path());
    let page = uri.path_and_query().and_then(|path| path.as_str().split_once("/console/")).map_or("", |(_, page)| page);
    if page.is_empty() { format!("{root}login") } else { format!("{root}login?next={}", segment(page)) }
}

/// Returns text of a server or client as it is shown: on one line, and cut.
pub(crate) fn shown(text: &str) -> String {
    printable::line(&cut(text))
}

/// Returns text of several lines as it is shown.
pub(crate) fn shown_lines(text: &str) -> String {
    printable::lines(&cut(text))
}

fn cut(text: &str) -> Cow<'_, str> {
    if text.len() <= TEXT_MAX {
        return text.into();
    }
    let end = (0..=TEXT_MAX).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    format!("{}… ({} bytes)", &text[..end], text.len()).into()
}

/// Returns JSON for a `<script type="application/json">`, which ends at `</script>` also within a string.
pub(crate) fn script_json(value: &impl Serialize) -> maud::PreEscaped<String> {
    maud::PreEscaped(escape_script(&serde_json::to_string(value).unwrap_or_default()))
}

pub(crate) fn escape_script(json: &str) -> String {
    json.replace('<', "\\u003c").replace('\u{2028}', "\\u2028").replace('\u{2029}', "\\u2029")
}

/// Returns a name as one segment of a URL's path.
pub(crate) fn segment(name: &str) -> String {
    let mut segment = String::with_capacity(name.len());
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
            segment.push(char::from(byte));
        } else {
            use std::fmt::Write as _;
            // Writing to a String does not fail.
            let _ = write!(segment, "%{byte:02X}");
        }
    }
    segment
}

/// Returns the principal as the head of a page names it.
pub fn describe_principal(principal: &Principal) -> String {
    let kind: &str = (&principal.kind).into();
    principal.name.as_deref().map_or_else(|| kind.to_owned(), shown)
}

pub(crate) fn may_operate(frame: &PageFrame) -> bool {
    frame.csrf_token.is_some() && frame.role >= Role::Operator
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_cut_and_cannot_control_anything() {
        assert_eq!(shown("a\u{1b}[31m\nb\u{202e}"), "a\u{fffd}[31m\u{fffd}b\u{fffd}");
        assert_eq!(shown_lines("a\nb"), "a\nb");
        let long = shown(&"ü".repeat(1_000_000));
        assert!(long.len() < TEXT_MAX + 40 && long.ends_with("… (2000000 bytes)"), "{}", long.len());
        assert_eq!(escape_script(r#"{"a":"</script><!--"}"#), r#"{"a":"\u003c/script>\u003c!--"}"#);
        assert_eq!(segment("a b/ü<\"'"), "a%20b%2F%C3%BC%3C%22%27");
    }

    #[test]
    fn a_page_links_relatively() {
        assert_eq!(root_of("/console"), "console/");
        assert_eq!(root_of("/console/"), "");
        assert_eq!(root_of("/console/events"), "");
        assert_eq!(root_of("/console/instances/a"), "../");
    }
}
