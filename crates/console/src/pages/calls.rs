//! Recorded calls, which a satellite stores in its journal and delivers to its backend.

use maud::{Markup, html};
use mcp_satellite_actors::model::event::rfc3339;
use mcp_satellite_actors::model::secret::MASKED;
use mcp_satellite_actors::seam::ToolCallFate;
use serde_json::Value;

use super::layout::{ConsoleSite, NavigationEntry, PageFrame, instance_link, page, satellite_choice};
use super::{may_operate, segment, shown, shown_lines};
use crate::v1::{CallEntry, CallPage, FleetCallQuery};

/// Bytes of arguments up to which a call can be repeated from the page, and of a result with which it is compared.
const REPEATABLE_MAX: usize = 64 * 1024;

/// Contents of the page of calls.
#[derive(Debug, Clone)]
pub struct CallsShape {
    pub found: CallPage,
    /// The filter.
    pub query: FleetCallQuery,
    /// Number of the last event that the page can contain.
    pub through: u64,
    /// Names of the satellites to choose from; empty at a satellite.
    pub satellites: Vec<String>,
}

/// Returns the page.
pub fn calls_page(shape: &CallsShape, frame: &PageFrame) -> Markup {
    let CallsShape { found, query: FleetCallQuery { satellite, subject, conditions }, through, satellites } = shape;
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    let is_backend = frame.site == ConsoleSite::Backend;
    let content = html! {
        h1 { "Calls" }
        form.filters method="get" action={ (frame.root) "calls" } {
            (satellite_choice(satellites, satellite.as_deref()))
            label { "Instance " input name="instance" value=(text(&subject.instance)) placeholder="full name"; }
            label { "Server " input name="server" value=(text(&subject.server)); }
            label { "Tool " input name="tool" value=(text(&conditions.tool)); }
            label { "Team " input name="team" value=(text(&subject.team)) placeholder=[is_backend.then_some("id")]; }
            label { "User " input name="user" value=(text(&subject.user)) placeholder=[is_backend.then_some("id")]; }
            label { "Client " input name="client" value=(text(&conditions.client)); }
            label { "Fate "
                select name="fate" {
                    option value="" { "all" }
                    @for fate in ToolCallFate::ALL.into_iter().skip(1).map(ToolCallFate::as_str) {
                        option value=(fate) selected[conditions.fate.as_deref() == Some(fate)] { (fate) }
                    }
                }
            }
            label { "From " input name="since" value=(text(&conditions.since)) placeholder="2026-01-31T12:00:00Z"; }
            label { "Before " input name="until" value=(text(&conditions.until)) placeholder="2026-01-31T13:00:00Z"; }
            label { "Result "
                select name="success" {
                    option value="" { "all" }
                    option value="true" selected[conditions.success == Some(true)] { "answered" }
                    option value="false" selected[conditions.success == Some(false)] { "failed" }
                }
            }
            button type="submit" { "Show" }
        }
        @if is_backend {
            p.help { "Satellites deliver the calls of servers with request logging, with a delay of some seconds. A call is repeated at the console of its satellite." }
        } @else {
            p.help { "Each instance keeps its last calls, and only those of servers with request logging; " code { "[journal]" } " sets how many." }
        }
        p #new-calls hidden data-through=(through) role="status" { a.button href="calls" {} }
        @if found.calls.is_empty() { p { "No stored call matches." } }
        ol.events.calls aria-label="Calls, newest first" { @for call in &found.calls { (item(call, frame)) } }
        @if let Some(next) = &found.next { p { a.button href={ (frame.root) "calls?" (next_query(&shape.query, next)) } { "Older calls" } } }
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
                @if may_operate(frame) && frame.site == ConsoleSite::Satellite {
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

fn next_query(query: &FleetCallQuery, cursor: &str) -> String {
    let FleetCallQuery { satellite, subject, conditions } = query;
    let success = conditions.success.map(|success| success.to_string());
    let given = [
        ("satellite", satellite),
        ("instance", &subject.instance),
        ("server", &subject.server),
        ("tool", &conditions.tool),
        ("user", &subject.user),
        ("client", &conditions.client),
        ("fate", &conditions.fate),
        ("team", &subject.team),
        ("since", &conditions.since),
        ("until", &conditions.until),
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
