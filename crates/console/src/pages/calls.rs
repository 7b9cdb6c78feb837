//! Calls that are stored in the journal.

use maud::{Markup, html};
use mcp_satellite_actors::model::event::rfc3339;
use mcp_satellite_actors::model::secret::MASKED;
use mcp_satellite_actors::seam::ToolCallFate;
use serde_json::Value;

use super::layout::{NavigationEntry, PageFrame, instance_link, page};
use super::{may_operate, segment, shown, shown_lines};
use crate::v1::{CallEntry, CallPage, CallQuery};

/// Bytes of arguments up to which a call can be repeated from the page, and of a result with which it is compared.
const REPEATABLE_MAX: usize = 64 * 1024;

/// Returns the page.
///
/// `through` is the number of the last event that the page can contain.
pub fn calls_page(found: &CallPage, query: &CallQuery, through: u64, frame: &PageFrame) -> Markup {
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    let content = html! {
        h1 { "Calls" }
        form.filters method="get" action={ (frame.root) "calls" } {
            label { "Instance " input name="instance" value=(text(&query.instance)) placeholder="full name"; }
            label { "Server " input name="server" value=(text(&query.server)); }
            label { "Tool " input name="tool" value=(text(&query.tool)); }
            label { "Team " input name="team" value=(text(&query.team)); }
            label { "User " input name="user" value=(text(&query.user)); }
            label { "Client " input name="client" value=(text(&query.client)); }
            label { "Fate "
                select name="fate" {
                    option value="" { "all" }
                    @for fate in ToolCallFate::ALL.into_iter().skip(1).map(ToolCallFate::as_str) {
                        option value=(fate) selected[query.fate.as_deref() == Some(fate)] { (fate) }
                    }
                }
            }
            label { "From " input name="since" value=(text(&query.since)) placeholder="2026-01-31T12:00:00Z"; }
            label { "Before " input name="until" value=(text(&query.until)) placeholder="2026-01-31T13:00:00Z"; }
            label { "Result "
                select name="success" {
                    option value="" { "all" }
                    option value="true" selected[query.success == Some(true)] { "answered" }
                    option value="false" selected[query.success == Some(false)] { "failed" }
                }
            }
            button type="submit" { "Show" }
        }
        p.help { "Each instance keeps its last calls, and only those of servers with request logging; " code { "[journal]" } " sets how many." }
        p #new-calls hidden data-through=(through) role="status" { a.button href="calls" {} }
        @if found.calls.is_empty() { p { "No stored call matches." } }
        ol.events.calls aria-label="Calls, newest first" { @for call in &found.calls { (item(call, frame)) } }
        @if let Some(next) = &found.next { p { a.button href={ (frame.root) "calls?" (next_query(query, next)) } { "Older calls" } } }
    };
    page(frame, NavigationEntry::Calls, "calls", "Calls", &content)
}

fn item(entry: &CallEntry, frame: &PageFrame) -> Markup {
    let call = &entry.call;
    let (arguments, response) = (call.tool_params.as_str(), call.tool_response.as_str());
    html! {
        li {
            time datetime=(rfc3339(call.timestamp)) { (rfc3339(call.timestamp)[..23].replace('T', " ")) }
            span.kind { (shown(&call.tool_name)) }
            (instance_link(frame, &entry.instance, &entry.instance))
            " · " (shown(&entry.user_id)) " · "
            @if let Some(client) = &call.client { (shown(client)) " · " }
             (call.response_time_ms) " ms · "
            @if let Some(fate) = &call.fate { code { (shown(fate)) } " · " }
            @if call.success { "answered" } @else { span.error { "failed: " (shown(call.error_message.as_deref().unwrap_or("the tool reported an error"))) } }
            details {
                summary { "Arguments and result" }
                div.columns {
                    div { h3 { "Arguments" } pre tabindex="0" { (shown_lines(arguments)) } }
                    div { h3 { "Result" } pre.before tabindex="0" { (shown_lines(response)) } }
                }
                @if may_operate(frame) {
                    @if let Some(why) = why_not_repeatable(arguments) { p.help { "This call cannot be repeated: " (why) "." } }
                    @else {
                        button type="button" data-repeat=(call.tool_name) data-instance=(entry.instance) data-arguments=(arguments)
                            data-result=[(response.len() <= REPEATABLE_MAX).then_some(response)] data-fate=[&call.fate] { "Repeat and compare" }
                        div.after {}
                    }
                }
            }
        }
    }
}

/// Returns the reason why the stored arguments are not those of the call.
fn why_not_repeatable(arguments: &str) -> Option<&'static str> {
    if arguments.contains(MASKED) {
        return Some("secrets in its arguments are masked");
    }
    if arguments.len() > REPEATABLE_MAX {
        return Some("its arguments are too long");
    }
    // Arguments that were cut are stored as a string.
    let is_complete = matches!(serde_json::from_str(arguments), Ok(Value::Object(_) | Value::Null));
    (!is_complete).then_some("its arguments were cut when they were stored")
}

fn next_query(query: &CallQuery, cursor: &str) -> String {
    let success = query.success.map(|success| success.to_string());
    let given = [
        ("instance", &query.instance),
        ("server", &query.server),
        ("tool", &query.tool),
        ("user", &query.user),
        ("client", &query.client),
        ("fate", &query.fate),
        ("team", &query.team),
        ("since", &query.since),
        ("until", &query.until),
        ("success", &success),
    ];
    let mut parts: Vec<String> =
        given.iter().filter_map(|(key, value)| Some(format!("{key}={}", segment(value.as_ref()?)))).collect();
    parts.push(format!("cursor={}", segment(cursor)));
    parts.join("&")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_repeated_with_its_own_arguments_only() {
        for arguments in ["{}", "null", r#"{"text": "hi"}"#] {
            assert_eq!(why_not_repeatable(arguments), None, "{arguments}");
        }
        let masked = format!(r#"{{"text": "{MASKED}"}}"#);
        assert!(why_not_repeatable(&masked).is_some_and(|why| why.contains("masked")));
        assert!(why_not_repeatable(r#""{\"text\": \"hi…""#).is_some_and(|why| why.contains("cut")));
        let long = format!(r#"{{"text": "{}"}}"#, "x".repeat(REPEATABLE_MAX));
        assert!(why_not_repeatable(&long).is_some_and(|why| why.contains("too long")));
    }
}
