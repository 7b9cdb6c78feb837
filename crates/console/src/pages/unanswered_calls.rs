//! The unanswered calls of an instance, without arguments.

use maud::{Markup, html};

use super::shown;
use crate::v1::{UnansweredCallEntry, UnansweredCallList};

/// Returns the section; `calls` is `None` if the principal may not read them.
pub(super) fn unanswered_calls(calls: Option<&UnansweredCallList>) -> Markup {
    html! {
        h2 #unanswered-title { "Calls in flight" }
        @if let Some(UnansweredCallList { total, newest }) = calls {
            @if *total == 0 { p { "No call waits for a response." } }
            @else if newest.is_empty() { p { "The session does not answer, so its calls (" (total) ") are not listed." } }
            @else { (table(newest)) }
            @if !newest.is_empty() && *total > newest.len() {
                p { "Only the last " (newest.len()) " of " (total) " calls are shown." }
            }
        } @else {
            p { "Reading the calls of another user's server needs the grant " code { "calls:read" } "." }
        }
    }
}

fn table(calls: &[UnansweredCallEntry]) -> Markup {
    html! {
        div.scroll tabindex="0" role="region" aria-label="Table of calls in flight" { table {
            thead { tr {
                th scope="col" { "Tool or method" } th scope="col" { "User" } th scope="col" { "Client" } th scope="col" { "Since" }
                th.number scope="col" { "Request" }
            } }
            tbody { @for call in calls { tr {
                td { (shown(call.tool.as_deref().unwrap_or(&call.method))) }
                td { (shown(&call.user)) }
                td { (shown(call.client.as_deref().unwrap_or("API"))) }
                td { time.since datetime=(call.since) { (call.since) } }
                td.number { (call.request_id) }
            } } }
        } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(client: Option<&str>) -> UnansweredCallEntry {
        UnansweredCallEntry {
            request_id: 7,
            method: "tools/call".to_owned(),
            tool: Some("<b>sleep</b>".to_owned()),
            user: "alice".to_owned(),
            client: client.map(str::to_owned),
            since: "2026-01-31T12:00:00Z".to_owned(),
            duration_ms: 1,
        }
    }

    #[test]
    fn the_section_names_each_call_or_the_reason_why_it_does_not() {
        let section = |total, newest| unanswered_calls(Some(&UnansweredCallList { total, newest })).into_string();
        let both = section(2, vec![call(None), call(Some("ide\u{1b}[31m"))]);
        for text in ["&lt;b&gt;sleep&lt;/b&gt;", "alice", ">API<", "ide\u{fffd}[31m", "2026-01-31T12:00:00Z", ">7<"] {
            assert!(both.contains(text), "{text}: {both}");
        }
        assert!(!both.contains("Only the last"), "{both}");
        assert!(section(60, vec![call(None)]).contains("Only the last 1 of 60 calls are shown."));
        assert!(section(3, Vec::new()).contains("its calls (3) are not listed"));
        assert!(section(0, Vec::new()).contains("No call waits"));
        assert!(unanswered_calls(None).into_string().contains("calls:read"));
    }
}
