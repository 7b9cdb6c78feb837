//! Error responses of the bridge itself, in the form of the endpoint's errors.

use mcp_satellite_model::exit::{CallError, CallFate};
use mcp_satellite_protocol::era::Era;
use mcp_satellite_protocol::error_code::{INTERNAL_ERROR, SERVER_ERROR};
use serde::Serialize;

const CHECK_FIRST: &str = "The server may have executed the call: check before you call again.";
const CALL_AGAIN: &str = "The call did not reach the server: call again; if that does not help, ask the user to run \
                          `satellite status`.";
const WAIT: &str = "Wait until one of the calls in progress has been answered, then call again.";

/// Returns the error response to a request that has no answer.
pub(crate) fn error_response(id: &str, era: Era, error: &CallError) -> String {
    #[derive(Serialize)]
    struct ErrorData<'a> {
        kind: &'static str,
        message: &'a str,
        next_step: &'static str,
        fate: CallFate,
    }
    let fate = error.fate().unwrap_or(CallFate::NotSent);
    let next_step = match (error, fate) {
        (CallError::Busy { .. }, _) => WAIT,
        (_, CallFate::NotSent) => CALL_AGAIN,
        (_, CallFate::MaybeExecuted | CallFate::TimedOut) => CHECK_FIRST,
    };
    let code = if era == Era::Sessions { SERVER_ERROR } else { INTERNAL_ERROR };
    let message = error.to_string();
    let text = format!("{}. {next_step}", message.trim_end_matches('.'));
    let data = ErrorData { kind: error.kind(), message: &message, next_step, fate };
    let error = serde_json::json!({ "code": code, "message": text, "data": data });
    with_error(id, &error.to_string())
}

/// Returns an error response. `error` is the JSON text of its error object.
pub(crate) fn with_error(id: &str, error: &str) -> String {
    format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{error}}}"#)
}

/// Returns the response to a line that is not a valid message.
pub(crate) fn malformed_response(code: i64, message: &str) -> String {
    with_error("null", &serde_json::json!({ "code": code, "message": message }).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_states_the_fate_in_words_and_in_data() {
        let reason = || "the satellite ended".to_owned();
        let lost = CallError::Terminated { fate: CallFate::MaybeExecuted, reason: reason() };
        assert_eq!(
            error_response("\"a\"", Era::Sessions, &lost),
            r#"{"jsonrpc":"2.0","id":"a","error":{"code":-32000,"data":{"fate":"maybe_executed","kind":"terminated","message":"terminated: the satellite ended","next_step":"The server may have executed the call: check before you call again."},"message":"terminated: the satellite ended. The server may have executed the call: check before you call again."}}"#
        );
        let unsent = CallError::Terminated { fate: CallFate::NotSent, reason: reason() };
        let text = error_response("7", Era::Stateless, &unsent);
        assert!(text.contains(r#""code":-32603"#) && text.contains(r#""fate":"not_sent""#), "{text}");
        assert!(error_response("7", Era::Sessions, &CallError::Busy { what: "calls", limit: 1 }).contains("not_sent"));
    }
}
