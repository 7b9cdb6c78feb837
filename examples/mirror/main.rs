//! MCP server over stdio that returns every message it receives, byte for byte, and sends messages on request. Tests
//! use it to see both ends of an endpoint. It parses a message only as far as the response requires.
//!
//! - A request is answered with `{"reflected": THE WHOLE REQUEST}`.
//! - A notification or response is returned as `notifications/mirrored` with `{"reflected": THE WHOLE MESSAGE}`; a line
//!   that is no message with `{"malformed": "THE LINE"}`.
//! - `mirror/say` with `{"messages": […]}` writes each message unchanged, except for the strings `"$id"` and
//!   `"$token"`, which become the id of this request and its progress token. The request has no response of its own.
//! - `mirror/told` is answered with `{"told": […]}`: the requests about resources and logging since the last
//!   `mirror/told`.
//! - `initialize` and `ping` are answered as usual, so that the server can be supervised. `tools/list` returns no tools
//!   and also the request.

use std::io::{self, BufRead, Write};

use mcp_satellite::actors::rpc::{MessageKind, MessageView};
use serde::Deserialize;
use serde_json::value::RawValue;

/// Result of `initialize`, with unknown members at two levels.
const GREETING: &str = concat!(
    r#"{"protocolVersion":"2025-11-25","capabilities":{"experimental":{"mirror":{}},"x-unknown":[1.0,null]},"#,
    r#""serverInfo":{"name":"mirror","version":"1.0.0","x-big":123456789012345678901234567890},"x-unknown":"\ud800"}"#,
);

#[derive(Deserialize)]
struct SayParams<'a> {
    #[serde(borrow)]
    messages: Vec<&'a RawValue>,
}

fn main() -> io::Result<()> {
    let (mut input, mut output) = (io::stdin().lock(), io::stdout().lock());
    let (mut line, mut told) = (Vec::new(), Vec::new());
    while input.read_until(b'\n', &mut line)? > 0 {
        let answers = answers(line.trim_ascii_end(), &mut told);
        for answer in answers {
            writeln!(output, "{answer}")?;
        }
        output.flush()?;
        line.clear();
    }
    Ok(())
}

fn answers(line: &[u8], told: &mut Vec<String>) -> Vec<String> {
    let message = std::str::from_utf8(line).ok().and_then(|text| Some((text, MessageView::parse(text).ok()?)));
    let Some((text, message)) = message else {
        let line = serde_json::Value::from(String::from_utf8_lossy(line));
        return vec![mirrored(&format!(r#"{{"malformed":{line}}}"#))];
    };
    let Some(id) = message.id.filter(|_| message.kind == MessageKind::Request).map(RawValue::get) else {
        let quiet = message.method.as_deref() == Some("notifications/initialized");
        return if quiet { Vec::new() } else { vec![mirrored(&format!(r#"{{"reflected":{text}}}"#))] };
    };
    let result = |result: &str| format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{result}}}"#);
    match message.method.as_deref() {
        Some("initialize") => vec![result(GREETING)],
        Some("ping") => vec![result("{}")],
        // Without a list of tools the server would never count as ready.
        Some("tools/list") => vec![result(&format!(r#"{{"tools":[],"reflected":{text}}}"#))],
        Some("mirror/say") => {
            let params = message.params.map_or("{}", RawValue::get);
            let token = message.token.map_or("null", RawValue::get);
            match serde_json::from_str::<SayParams<'_>>(params) {
                Ok(say) => say.messages.iter().map(|message| filled(message.get(), id, token)).collect(),
                Err(error) => {
                    let why = serde_json::Value::from(error.to_string());
                    vec![format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":-32602,"message":{why}}}}}"#)]
                }
            }
        }
        Some("mirror/told") => {
            let told = std::mem::take(told).join(",");
            vec![result(&format!(r#"{{"told":[{told}]}}"#))]
        }
        method => {
            if method.is_some_and(|method| method.starts_with("resources/") || method.starts_with("logging/")) {
                told.push(text.to_owned());
            }
            vec![result(&format!(r#"{{"reflected":{text}}}"#))]
        }
    }
}

fn mirrored(params: &str) -> String {
    format!(r#"{{"jsonrpc":"2.0","method":"notifications/mirrored","params":{params}}}"#)
}

fn filled(message: &str, id: &str, token: &str) -> String {
    message.replace(r#""$id""#, id).replace(r#""$token""#, token)
}
