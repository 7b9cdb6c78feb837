//! Messages in the body of an HTTP response: splits a batch, and detects which message answers a request.

use std::borrow::Cow;

use bytes::Bytes;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use crate::error_code::METHOD_NOT_FOUND;

#[derive(Deserialize)]
struct MessageEnvelope<'a> {
    #[serde(borrow)]
    jsonrpc: Cow<'a, str>,
    #[serde(borrow, default)]
    id: Option<&'a RawValue>,
    #[serde(default)]
    method: Option<IgnoredAny>,
    #[serde(default)]
    error: Option<IgnoredAny>,
}

impl<'a> MessageEnvelope<'a> {
    /// Parses the envelope. The first byte is checked because serde would also read the struct from an array.
    fn parse(message: &'a [u8]) -> Option<Self> {
        let message = message.trim_ascii_start();
        (message.first() == Some(&b'{')).then(|| serde_json::from_slice(message).ok()).flatten()
    }

    fn is_error(&self) -> bool {
        self.jsonrpc == "2.0" && self.error.is_some()
    }
}

/// Returns the id of the request that the message answers; `None` if it is not a response to a request of ours.
pub fn answered_id(message: &[u8]) -> Option<u64> {
    MessageEnvelope::parse(message).filter(|outside| outside.method.is_none())?.id?.get().parse().ok()
}

/// Returns true if the message is the response to request `id`.
pub fn is_answer_to(message: &[u8], id: u64) -> bool {
    answered_id(message) == Some(id)
}

/// Returns true if the message is an error response.
pub fn is_error(message: &[u8]) -> bool {
    MessageEnvelope::parse(message).is_some_and(|outside| outside.is_error())
}

/// Returns true if the message is an error response without an id.
pub fn is_error_without_id(message: &[u8]) -> bool {
    MessageEnvelope::parse(message).is_some_and(|outside| outside.is_error() && outside.id.is_none())
}

/// Returns the text of an error response, unless it is blank.
pub fn error_message(message: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct ErrorEnvelope {
        error: Complaint,
    }
    #[derive(Deserialize)]
    struct Complaint {
        message: String,
    }
    let refusal: ErrorEnvelope = serde_json::from_slice(message).ok()?;
    Some(refusal.error.message).filter(|message| !message.trim().is_empty())
}

/// Returns true if the text of an error says that the session does not exist.
pub fn is_session_not_found(text: &str) -> bool {
    text.to_ascii_lowercase().contains("session not found")
}

/// Converts a method-not-found error to an answer to request `id`.
pub fn method_not_found_answer(message: &[u8], id: u64) -> Option<Bytes> {
    #[derive(Deserialize)]
    struct RefusalBody<'a> {
        #[serde(borrow)]
        error: &'a RawValue,
    }
    #[derive(Deserialize)]
    struct Coded {
        code: i64,
    }
    MessageEnvelope::parse(message).filter(MessageEnvelope::is_error)?;
    let RefusalBody { error } = serde_json::from_slice(message).ok()?;
    let Coded { code } = serde_json::from_str(error.get()).ok()?;
    (code == METHOD_NOT_FOUND).then(|| format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{error}}}"#).into())
}

/// Splits a text into messages: one object, or the members of a batch. Returns `None` if it is not JSON.
pub fn split_messages(text: &Bytes) -> Option<Vec<Bytes>> {
    let trimmed = text.trim_ascii();
    match trimmed.first() {
        Some(b'{') => {
            serde_json::from_slice::<&RawValue>(trimmed).ok()?;
            Some(vec![text.slice_ref(trimmed)])
        }
        Some(b'[') => {
            let batch: Vec<&RawValue> = serde_json::from_slice(trimmed).ok()?;
            Some(batch.into_iter().map(|message| text.slice_ref(message.get().as_bytes())).collect())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_has_the_id_of_the_request_and_no_method() {
        assert!(is_answer_to(br#" {"jsonrpc":"2.0","id":7,"result":{}}"#, 7));
        assert!(is_answer_to(br#"{"id":7,"jsonrpc":"2.0","error":{"code":1,"message":"no"}}"#, 7));
        for other in [
            r#"{"jsonrpc":"2.0","id":8,"result":{}}"#,
            r#"{"jsonrpc":"2.0","id":"7","result":{}}"#,
            r#"{"jsonrpc":"2.0","id":7,"method":"ping"}"#,
            r#"{"jsonrpc":"2.0","result":{}}"#,
            r#"["2.0",7]"#,
            "7",
            "",
        ] {
            assert!(!is_answer_to(other.as_bytes(), 7), "{other}");
        }
    }

    #[test]
    fn an_error_without_an_id_is_recognized() {
        assert!(is_error_without_id(br#"{"jsonrpc":"2.0","error":{"code":-32000,"message":"no"},"id":null}"#));
        assert!(is_error_without_id(br#"{"jsonrpc":"2.0","error":{"code":-32000,"message":"no"}}"#));
        assert!(!is_error_without_id(br#"{"jsonrpc":"2.0","error":{},"id":1}"#));
        assert!(is_error(br#"{"jsonrpc":"2.0","error":{},"id":"server-error"}"#));
        assert!(!is_error(br#"{"error":{},"id":1}"#));
        assert!(!is_error_without_id(br#"{"error":{},"id":null}"#));
        assert!(!is_error_without_id(br#"{"jsonrpc":"2.0","result":{},"id":null}"#));
    }

    #[test]
    fn method_not_found_becomes_the_response_to_the_rejected_request() {
        let error = br#"{"jsonrpc":"2.0","id":null,"error":{"code":-32601,"message":"Method not found"}}"#;
        let answer = method_not_found_answer(error, 7).unwrap();
        assert_eq!(&answer[..], br#"{"jsonrpc":"2.0","id":7,"error":{"code":-32601,"message":"Method not found"}}"#);
        assert!(
            method_not_found_answer(br#"{"jsonrpc":"2.0","id":null,"error":{"code":-32001,"message":"no"}}"#, 7)
                .is_none()
        );
        assert!(method_not_found_answer(br#"{"jsonrpc":"2.0","id":null,"result":{}}"#, 7).is_none());
    }

    #[test]
    fn a_batch_is_split_and_a_single_message_stays_unchanged() {
        let split = |text: &'static str| split_messages(&Bytes::from_static(text.as_bytes()));
        assert_eq!(split(" {\"a\": 1}\n").unwrap(), ["{\"a\": 1}"]);
        assert_eq!(split("[{\"a\":1}, {\"b\" :2}]").unwrap(), ["{\"a\":1}", "{\"b\" :2}"]);
        assert_eq!(split("[]").unwrap(), Vec::<Bytes>::new());
        for other in ["", "<html>", "{\"a\":", "[1,", "null", "{} {}"] {
            assert!(split(other).is_none(), "{other}");
        }
    }
}
