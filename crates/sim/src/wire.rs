//! Messages of a simulated server: read without copying, and written without intermediate values.

use std::borrow::Cow;

use bytes::{BufMut, BytesMut};
use serde::Deserialize;
use serde_json::value::RawValue;

// Initial capacity for an answer in bytes: enough for most, so that they need one allocation.
const ANSWER_SIZE: usize = 256;

/// A string that borrows from its line if possible: inside an `Option`, serde copies a bare `Cow`.
#[derive(Deserialize)]
#[serde(transparent)]
pub(super) struct WireText<'a>(#[serde(borrow)] pub(super) Cow<'a, str>);

#[derive(Deserialize)]
pub(super) struct WireMessage<'a> {
    #[serde(borrow)]
    pub(super) id: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) method: Option<WireText<'a>>,
    #[serde(borrow)]
    pub(super) params: Option<&'a RawValue>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct InitializeParams<'a> {
    #[serde(borrow)]
    pub(super) protocol_version: Option<WireText<'a>>,
}

#[derive(Default, Deserialize)]
pub(super) struct ListParams<'a> {
    #[serde(borrow)]
    pub(super) cursor: Option<WireText<'a>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CancelledParams<'a> {
    #[serde(borrow)]
    pub(super) request_id: &'a RawValue,
}

#[derive(Deserialize)]
pub(super) struct CallParams<'a> {
    #[serde(borrow)]
    pub(super) name: Cow<'a, str>,
    #[serde(borrow)]
    pub(super) arguments: Option<&'a RawValue>,
    #[serde(borrow, rename = "_meta")]
    pub(super) meta: Option<CallMeta<'a>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CallMeta<'a> {
    #[serde(borrow)]
    pub(super) progress_token: Option<&'a RawValue>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct StatelessParams<'a> {
    #[serde(borrow, rename = "_meta")]
    pub(super) meta: Option<StatelessMeta<'a>>,
    #[serde(borrow)]
    pub(super) notifications: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) input_responses: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) request_state: Option<WireText<'a>>,
}

#[derive(Default, Deserialize)]
pub(super) struct StatelessMeta<'a> {
    #[serde(borrow, rename = "io.modelcontextprotocol/protocolVersion")]
    pub(super) version: Option<WireText<'a>>,
    #[serde(borrow, rename = "io.modelcontextprotocol/clientCapabilities")]
    pub(super) capabilities: Option<&'a RawValue>,
}

#[derive(Deserialize)]
pub(super) struct AskArguments<'a> {
    #[serde(default = "default_rounds")]
    pub(super) rounds: u32,
    #[serde(borrow)]
    pub(super) method: Option<WireText<'a>>,
}

fn default_rounds() -> u32 {
    1
}

#[derive(Deserialize)]
pub(super) struct EchoArguments<'a> {
    #[serde(borrow)]
    pub(super) text: Option<&'a RawValue>,
    #[serde(default)]
    pub(super) after_ms: u64,
}

#[derive(Deserialize)]
pub(super) struct AddArguments {
    pub(super) a: serde_json::Number,
    pub(super) b: serde_json::Number,
}

#[derive(Deserialize)]
pub(super) struct SleepArguments {
    pub(super) ms: u64,
    pub(super) progress_every_ms: Option<u64>,
    #[serde(default)]
    pub(super) ignore_cancel: bool,
}

#[derive(Deserialize)]
pub(super) struct BigArguments {
    pub(super) bytes: usize,
}

#[derive(Deserialize)]
pub(super) struct FailureArguments {
    #[serde(default)]
    pub(super) message: String,
    pub(super) code: Option<i64>,
}

#[derive(Deserialize)]
pub(super) struct CrashArguments {
    pub(super) code: Option<i32>,
    pub(super) signal: Option<i32>,
}

#[derive(Deserialize)]
pub(super) struct EnvArguments {
    pub(super) name: String,
}

impl AddArguments {
    /// Returns the sum as JSON: an integer if both numbers are integers and it fits.
    pub(super) fn sum(&self) -> String {
        let whole = self.a.as_i64().zip(self.b.as_i64()).and_then(|(a, b)| a.checked_add(b));
        let real = || self.a.as_f64().zip(self.b.as_f64()).map(|(a, b)| serde_json::Value::from(a + b));
        whole.map(serde_json::Value::from).or_else(real).unwrap_or_default().to_string()
    }
}

pub(super) fn parse<'a, T: Deserialize<'a>>(params: Option<&'a RawValue>) -> Result<T, serde_json::Error> {
    serde_json::from_str(params.map_or("{}", RawValue::get))
}

pub(super) fn put_answer(line: &mut BytesMut, id: &RawValue, body: impl FnOnce(&mut BytesMut)) {
    line.reserve(ANSWER_SIZE);
    line.put_slice(b"{\"jsonrpc\":\"2.0\",\"id\":");
    line.put_slice(id.get().as_bytes());
    line.put_u8(b',');
    body(line);
    line.put_slice(b"}\n");
}

pub(super) fn put_text(line: &mut BytesMut, text: &str) {
    // Writing to memory cannot fail, and a string is always valid JSON.
    let _ = serde_json::to_writer(line.writer(), text);
}

pub(super) fn put_error(line: &mut BytesMut, code: i64, message: &str) {
    line.put_slice(format!("\"error\":{{\"code\":{code},\"message\":").as_bytes());
    put_text(line, message);
    line.put_u8(b'}');
}

pub(super) fn put_result(line: &mut BytesMut, text: &str, structured: Option<&str>, is_error: bool) {
    line.put_slice(b"\"result\":{\"content\":[{\"type\":\"text\",\"text\":");
    put_text(line, text);
    line.put_slice(b"}]");
    if let Some(structured) = structured {
        line.put_slice(b",\"structuredContent\":");
        line.put_slice(structured.as_bytes());
    }
    if is_error {
        line.put_slice(b",\"isError\":true");
    }
    line.put_u8(b'}');
}

/// Writes a result with a text of the length that `length` returns, given the length of the rest of the line.
pub(super) fn put_filled(line: &mut BytesMut, length: impl FnOnce(usize) -> usize) {
    const BEFORE: &[u8] = b"\"result\":{\"content\":[{\"type\":\"text\",\"text\":\"";
    const AFTER: &[u8] = b"\"}]}";
    let start = line.iter().rposition(|byte| *byte == b'\n').map_or(0, |newline| newline + 1);
    let closing_brace = 1;
    let rest = line.len() - start + BEFORE.len() + AFTER.len() + closing_brace;
    line.put_slice(BEFORE);
    line.put_bytes(b'x', length(rest));
    line.put_slice(AFTER);
}
