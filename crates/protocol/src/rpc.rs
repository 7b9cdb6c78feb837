//! JSON-RPC messages as sent, with access to the parts that a relay needs. Everything else passes unchanged: unknown
//! members, large numbers, and the order and spelling of members.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use bytes::{Bytes, BytesMut};
use bytestring::ByteString;
use serde::Deserializer as _;
use serde::de::{MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::trace::TraceParent;
use crate::{meta, method};

/// Kind of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MessageKind {
    /// A request, which requires a response.
    Request,
    /// A notification, which has no response.
    Notification,
    /// A response with a result.
    Result,
    /// An error response; without an id it refers to a message that could not be read.
    Error,
}

/// Reason why a text is not a valid message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MalformedMessage {
    /// The text is not JSON.
    #[error("not JSON: {0}")]
    NotJson(String),
    /// The text is JSON, but not a JSON-RPC 2.0 message.
    #[error("not JSON-RPC 2.0: {0}")]
    NotRpc(&'static str),
    /// A member that must be unique occurs twice: two readers could use different values.
    #[error("member `{0}` occurs twice")]
    Twice(&'static str),
}

/// Borrowed message; its parts are slices of the text.
#[derive(Debug, Clone)]
pub struct MessageView<'a> {
    text: &'a str,
    /// Kind of the message.
    pub kind: MessageKind,
    /// Id: a number or a string.
    pub id: Option<&'a RawValue>,
    /// Method of a request or notification.
    pub method: Option<Cow<'a, str>>,
    /// Params, as sent.
    pub params: Option<&'a RawValue>,
    /// Progress token of a request or progress notification.
    pub token: Option<&'a RawValue>,
    /// Id of the request that a cancellation refers to.
    pub cancelled_id: Option<&'a RawValue>,
    /// Value of `result` or `error`.
    pub outcome: Option<&'a RawValue>,
}

impl<'a> MessageView<'a> {
    /// Parses a text that contains one message and nothing else.
    ///
    /// # Errors
    ///
    /// Returns the reason why the text is not a valid message.
    pub fn parse(text: &'a str) -> Result<Self, MalformedMessage> {
        let mut parts = RawMembers::default();
        for_each_member(text, &mut |name, value| parts.add_member(name, value))?;
        parts.into_view(text)
    }

    /// Converts the view into an owned message. `text` must be the text that the view was read from.
    pub fn to_message(&self, text: &ByteString) -> RpcMessage {
        let range = |value: &RawValue| span(self.text, value.get());
        RpcMessage {
            text: text.clone(),
            kind: self.kind,
            id: self.id.map(range),
            method: self.method.as_ref().map(|method| match method {
                Cow::Borrowed(method) => text.slice_ref(method),
                Cow::Owned(method) => ByteString::from(method.clone()),
            }),
            params: self.params.map(range),
            token: self.token.map(range),
            cancelled_id: self.cancelled_id.map(range),
            outcome: self.outcome.map(range),
        }
    }
}

/// Owned message. The ranges are byte ranges of its text; each spans one JSON value.
#[derive(Clone)]
pub struct RpcMessage {
    text: ByteString,
    kind: MessageKind,
    id: Option<Range<usize>>,
    method: Option<ByteString>,
    params: Option<Range<usize>>,
    token: Option<Range<usize>>,
    cancelled_id: Option<Range<usize>>,
    outcome: Option<Range<usize>>,
}

impl fmt::Debug for RpcMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Params and outcome may contain secrets.
        let (id, method) = (self.id(), self.method());
        f.debug_struct("Message")
            .field("kind", &self.kind)
            .field("id", &id)
            .field("method", &method)
            .finish_non_exhaustive()
    }
}

impl RpcMessage {
    /// Parses a text that contains one message and nothing else.
    ///
    /// # Errors
    ///
    /// Returns the reason why the text is not a valid message.
    pub fn parse(text: Bytes) -> Result<Self, MalformedMessage> {
        let text = utf8_text(text)?;
        Ok(MessageView::parse(&text)?.to_message(&text))
    }

    /// Returns the text, as sent.
    pub fn text(&self) -> &ByteString {
        &self.text
    }

    /// Returns the kind of the message.
    pub fn kind(&self) -> MessageKind {
        self.kind
    }

    /// Returns the id, a number or a string, as JSON text.
    pub fn id(&self) -> Option<&str> {
        self.slice(self.id.as_ref())
    }

    /// Returns the method of a request or notification.
    pub fn method(&self) -> Option<&str> {
        self.method.as_deref()
    }

    /// Returns the method of a request or notification, in a form that is cheap to clone.
    pub fn method_text(&self) -> Option<&ByteString> {
        self.method.as_ref()
    }

    /// Returns the params as JSON text.
    pub fn params(&self) -> Option<&str> {
        self.slice(self.params.as_ref())
    }

    /// Returns the progress token of a request or progress notification as JSON text.
    pub fn token(&self) -> Option<&str> {
        self.slice(self.token.as_ref())
    }

    /// Returns the id of the request that a cancellation refers to, as JSON text.
    pub fn cancelled_id(&self) -> Option<&str> {
        self.slice(self.cancelled_id.as_ref())
    }

    /// Returns the value of `result` or `error` as JSON text.
    pub fn outcome(&self) -> Option<&str> {
        self.slice(self.outcome.as_ref())
    }

    /// Returns the request with another id and, if it has one, another progress token. The concatenated parts are the
    /// text.
    pub fn with_id_and_token<'a>(&'a self, id: &'a str, token: &'a str) -> [&'a str; 5] {
        self.with_replaced([(self.id.as_ref(), id), (self.token.as_ref(), token)])
    }

    /// Returns the request like [`with_id_and_token`](Self::with_id_and_token), with the trace context of a span.
    pub fn with_id_token_and_trace<'a>(&'a self, id: &'a str, token: &'a str, trace: &'a PlacedTrace) -> [&'a str; 7] {
        self.with_replaced([(self.id.as_ref(), id), (self.token.as_ref(), token), (Some(&trace.place), &trace.text)])
    }

    /// Returns the trace context that the request carries in `_meta.traceparent`; `None` if there is none or it is not
    /// valid.
    pub fn trace_parent(&self) -> Option<TraceParent> {
        let params = self.params().filter(|params| may_have_member(params, meta::TRACEPARENT))?;
        TraceParent::parse(&serde_json::from_str::<String>(member(member(params, "_meta")?, meta::TRACEPARENT)?).ok()?)
    }

    /// Returns the place of a trace context in the request and the text that belongs there. `None` if the request has
    /// two of them, or a member that should contain it is of another type: two readers would not agree on the result.
    pub fn place_trace(&self, trace: &TraceParent) -> Option<PlacedTrace> {
        let (place, text) = match &self.params {
            None => {
                let end = self.text.rfind('}')?;
                (end..end, format!(r#","params":{{"_meta":{{"traceparent":"{trace}"}}}}"#))
            }
            Some(params) => {
                let meta = unique_member(&self.text[params.clone()], "_meta").ok()?;
                match meta {
                    None => insertion(&self.text, params, &format!(r#""_meta":{{"traceparent":"{trace}"}}"#)),
                    Some(meta) => {
                        let range = span(&self.text, meta);
                        match unique_member(meta, meta::TRACEPARENT).ok()? {
                            None => insertion(&self.text, &range, &format!(r#""traceparent":"{trace}""#)),
                            Some(value) if value.starts_with('"') => (span(&self.text, value), format!("\"{trace}\"")),
                            Some(_) => return None,
                        }
                    }
                }
            }
        };
        Some(PlacedTrace { place, text })
    }

    /// Returns the request with another id and other params, which must be a JSON object.
    pub fn with_id_and_params(&self, id: &str, params: &str) -> String {
        let (added, at);
        let (place, params) = if let Some(place) = &self.params {
            (place, params)
        } else {
            // Inserts the params before the brace that ends the message.
            let end = self.text.rfind('}').unwrap_or_default();
            (added, at) = (format!(r#","params":{params}"#), end..end);
            (&at, &*added)
        };
        let parts: [&str; 5] = self.with_replaced([(self.id.as_ref(), id), (Some(place), params)]);
        parts.concat()
    }

    /// Returns the response with another id. The concatenated parts are the text.
    pub fn with_id<'a>(&'a self, id: &'a str) -> [&'a str; 5] {
        self.with_replaced([(self.id.as_ref(), id), (None, "")])
    }

    /// Returns the notification with other params, which must be a JSON object.
    pub fn with_params(&self, params: &str) -> String {
        let parts: [&str; 5] = self.with_replaced([(self.params.as_ref(), params), (None, "")]);
        parts.concat()
    }

    /// Returns the progress notification with another token. The concatenated parts are the text.
    pub fn with_token<'a>(&'a self, token: &'a str) -> [&'a str; 5] {
        self.with_replaced([(self.token.as_ref(), token), (None, "")])
    }

    /// Returns the cancellation for another request. The concatenated parts are the text.
    pub fn with_cancelled_id<'a>(&'a self, of: &'a str) -> [&'a str; 5] {
        self.with_replaced([(self.cancelled_id.as_ref(), of), (None, "")])
    }

    fn slice(&self, range: Option<&Range<usize>>) -> Option<&str> {
        range.map(|range| &self.text[range.clone()])
    }

    // `PARTS` is `2 * PLACES + 1`.
    fn with_replaced<'a, const PLACES: usize, const PARTS: usize>(
        &'a self,
        mut places: [(Option<&Range<usize>>, &'a str); PLACES],
    ) -> [&'a str; PARTS] {
        places.sort_unstable_by_key(|(range, _)| range.map(|range| range.start));
        let (mut parts, mut from) = ([""; PARTS], 0);
        for (at, (range, instead)) in places.into_iter().enumerate() {
            let Some(range) = range else { continue };
            (parts[2 * at], parts[2 * at + 1]) = (&self.text[from..range.start], instead);
            from = range.end;
        }
        parts[PARTS - 1] = &self.text[from..];
        parts
    }
}

/// Trace context of a span with its place in a request, see [`RpcMessage::place_trace`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacedTrace {
    place: Range<usize>,
    text: String,
}

/// Returns the place after the opening brace of an object, and the text of a member that is inserted there.
fn insertion(text: &str, object: &Range<usize>, member: &str) -> (Range<usize>, String) {
    let at = object.start + 1;
    let is_empty = text[at..object.end].trim_start().starts_with('}');
    (at..at, if is_empty { member.to_owned() } else { format!("{member},") })
}

/// Returns the value of a member; an error if it occurs twice, or `json` is no object.
fn unique_member<'a>(json: &'a str, wanted: &'static str) -> Result<Option<&'a str>, MalformedMessage> {
    let mut found = None;
    let mut look = |name: &str, value: &'a RawValue| {
        if name == wanted { set_once(&mut found, value, wanted) } else { Ok(()) }
    };
    for_each_member(json, &mut look)?;
    Ok(found.map(RawValue::get))
}

/// Returns false if an object certainly has no member of this name. Names may be spelled with escapes, so a text that
/// contains an escape may have it.
fn may_have_member(json: &str, name: &str) -> bool {
    let holds = |part: &str| memchr::memmem::find(json.as_bytes(), part.as_bytes()).is_some();
    json.starts_with('{') && (holds(name) || holds("\\u"))
}

/// Converts bytes into text.
///
/// # Errors
///
/// Returns `Malformed::NotJson` if the bytes are not UTF-8.
pub fn utf8_text(bytes: Bytes) -> Result<ByteString, MalformedMessage> {
    ByteString::try_from(bytes).map_err(|error| MalformedMessage::NotJson(error.to_string()))
}

/// Concatenates the parts of a text.
pub fn join_parts(parts: &[&str]) -> Bytes {
    let mut text = BytesMut::with_capacity(parts.iter().map(|part| part.len()).sum());
    for part in parts {
        text.extend_from_slice(part.as_bytes());
    }
    text.freeze()
}

/// Maximum length of an escaped character in JSON, in bytes.
pub const ESCAPE_MAX: usize = 6;

/// Returns a JSON text, or its beginning, with the escapes that `serde_json` writes, so that a mask finds secrets in
/// it.
pub fn normalize_escapes(json: &str) -> String {
    let mut written = String::with_capacity(json.len());
    let mut rest = json;
    while let Some(at) = memchr::memchr(b'\\', rest.as_bytes()) {
        written.push_str(&rest[..at]);
        rest = &rest[at..];
        match rest.as_bytes().get(1) {
            Some(b'/') => {
                written.push('/');
                rest = &rest[2..];
            }
            Some(b'u') => {
                let Some((letter, length)) = decode_unicode_escape(rest) else {
                    written.push_str("\\u");
                    rest = &rest[2..];
                    continue;
                };
                let quoted = serde_json::Value::from(letter.to_string()).to_string();
                written.push_str(&quoted[1..quoted.len() - 1]);
                rest = &rest[length..];
            }
            Some(other) if other.is_ascii() => {
                written.push_str(&rest[..2]);
                rest = &rest[2..];
            }
            Some(_) | None => {
                written.push('\\');
                rest = &rest[1..];
            }
        }
    }
    written.push_str(rest);
    written
}

/// Decodes the escape `\uXXXX`, or a pair of them, at the beginning of `text`. Returns the character and the length of
/// the escape in bytes.
fn decode_unicode_escape(text: &str) -> Option<(char, usize)> {
    let unit = |at: usize| {
        let digits = text.get(at..at + ESCAPE_MAX)?.strip_prefix("\\u")?;
        u16::from_str_radix(digits, 16).ok()
    };
    let first = unit(0)?;
    if let Ok(letter) = char::try_from(u32::from(first)) {
        return Some((letter, ESCAPE_MAX));
    }
    let both = unit(ESCAPE_MAX).and_then(|second| char::decode_utf16([first, second]).next()?.ok());
    Some(both.map_or((char::REPLACEMENT_CHARACTER, ESCAPE_MAX), |letter| (letter, 2 * ESCAPE_MAX)))
}

/// Appends JSON text on one line.
pub fn put_json(out: &mut BytesMut, json: &str) {
    // In JSON a newline is whitespace, because strings cannot contain one unescaped.
    if memchr::memchr2(b'\n', b'\r', json.as_bytes()).is_none() {
        out.extend_from_slice(json.as_bytes());
    } else {
        out.extend(json.bytes().map(|byte| if matches!(byte, b'\n' | b'\r') { b' ' } else { byte }));
    }
}

/// Returns the value of an object's member, as written. The last of several members with the same name counts, as in
/// most parsers. `None` if there is none, or `json` is no object.
pub fn member<'a>(json: &'a str, wanted: &str) -> Option<&'a str> {
    let mut found = None;
    let mut look = |name: &str, value: &'a RawValue| {
        if name == wanted {
            found = Some(value.get());
        }
        Ok(())
    };
    for_each_member(json, &mut look).ok()?;
    found
}

/// Returns true if the result of `tools/call` reports an error of the tool.
pub fn is_tool_error(result: &str) -> bool {
    // Most results are no errors, and some are large, so they are not parsed.
    memchr::memmem::find(result.as_bytes(), b"\"isError\"").is_some() && member(result, "isError") == Some("true")
}

/// Returns the members of an object in order, as written; `None` if `json` is no object.
pub fn members<'a>(json: &'a str) -> Option<Vec<(String, &'a str)>> {
    let mut found = Vec::new();
    let mut look = |name: &str, value: &'a RawValue| {
        found.push((name.to_owned(), value.get()));
        Ok(())
    };
    for_each_member(json, &mut look).ok()?;
    Some(found)
}

/// Returns the object with `replacements` in place of its members of the same names; the others stay as written.
/// Anything but an object counts as an empty one.
pub fn with_members(json: &str, replacements: &[(&str, &str)]) -> String {
    let rest = members(json).unwrap_or_default();
    let rest = rest.iter().filter(|(name, _)| !replacements.iter().any(|(replaced, _)| replaced == name));
    let all = rest.map(|(name, value)| (&**name, *value)).chain(replacements.iter().copied());
    write_object(all)
}

/// Returns the object without its members of this name.
pub fn without_member(json: &str, unwanted: &str) -> String {
    let all = members(json).unwrap_or_default();
    write_object(all.iter().filter(|(name, _)| name != unwanted).map(|(name, value)| (&**name, *value)))
}

fn write_object<'a>(members: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let mut text = String::from("{");
    for (name, value) in members {
        if text.len() > 1 {
            text.push(',');
        }
        text.push_str(&serde_json::Value::from(name).to_string());
        text.push(':');
        text.push_str(value);
    }
    text.push('}');
    text
}

#[derive(Default)]
struct RawMembers<'a> {
    version: Option<&'a RawValue>,
    id: Option<&'a RawValue>,
    method: Option<&'a RawValue>,
    params: Option<&'a RawValue>,
    result: Option<&'a RawValue>,
    error: Option<&'a RawValue>,
}

impl<'a> RawMembers<'a> {
    fn add_member(&mut self, name: &str, value: &'a RawValue) -> Result<(), MalformedMessage> {
        let (place, name) = match name {
            "jsonrpc" => (&mut self.version, "jsonrpc"),
            "id" => (&mut self.id, "id"),
            "method" => (&mut self.method, "method"),
            "params" => (&mut self.params, "params"),
            "result" => (&mut self.result, "result"),
            "error" => (&mut self.error, "error"),
            _ => return Ok(()),
        };
        set_once(place, value, name)
    }

    fn into_view(self, text: &'a str) -> Result<MessageView<'a>, MalformedMessage> {
        if self.version.and_then(decode_string).as_deref() != Some("2.0") {
            return Err(MalformedMessage::NotRpc("`jsonrpc` is not \"2.0\""));
        }
        let id = self.id.filter(|id| id.get() != "null");
        if id.is_some_and(|id| {
            !id.get().starts_with(|first: char| first == '"' || first == '-' || first.is_ascii_digit())
        }) {
            return Err(MalformedMessage::NotRpc("`id` is neither a string nor a number"));
        }
        let method = match self.method {
            Some(method) => Some(decode_string(method).ok_or(MalformedMessage::NotRpc("`method` is not a string"))?),
            None => None,
        };
        // Some servers send a null for an absent member.
        let error = self.error.filter(|error| error.get() != "null");
        let kind = match (&method, id, self.result, error) {
            (Some(_), Some(_), _, _) => MessageKind::Request,
            (Some(_), None, _, _) if self.id.is_some() => {
                return Err(MalformedMessage::NotRpc("the id of a request is null"));
            }
            (Some(_), None, _, _) => MessageKind::Notification,
            (None, _, _, Some(_)) => MessageKind::Error,
            (None, Some(_), Some(_), None) => MessageKind::Result,
            (None, None, Some(_), None) => return Err(MalformedMessage::NotRpc("a result without an id")),
            (None, _, None, None) => return Err(MalformedMessage::NotRpc("neither a request nor a response")),
        };
        let (mut token, mut of) = (None, None);
        if let (Some(method), Some(params)) = (&method, self.params) {
            (token, of) = token_and_cancelled_id(method, kind, params.get())?;
        }
        Ok(MessageView {
            text,
            kind,
            id,
            method,
            params: self.params,
            token,
            cancelled_id: of,
            outcome: error.or(self.result),
        })
    }
}

fn token_and_cancelled_id<'a>(
    method: &str,
    kind: MessageKind,
    params: &'a str,
) -> Result<(Option<&'a RawValue>, Option<&'a RawValue>), MalformedMessage> {
    let (mut token, mut of, mut meta) = (None, None, None);
    let may_have = |name: &str| may_have_member(params, name);
    match (method, kind) {
        (method::PROGRESS, MessageKind::Notification) if may_have("progressToken") => {
            for_each_member(params, &mut |name, value| match name {
                "progressToken" => set_once(&mut token, value, "progressToken"),
                _ => Ok(()),
            })?;
        }
        (method::CANCELLED, MessageKind::Notification) if may_have("requestId") => {
            for_each_member(params, &mut |name, value| match name {
                "requestId" => set_once(&mut of, value, "requestId"),
                _ => Ok(()),
            })?;
        }
        (_, MessageKind::Request) if may_have("progressToken") => {
            for_each_member(params, &mut |name, value| match name {
                "_meta" => set_once(&mut meta, value, "_meta"),
                _ => Ok(()),
            })?;
            if let Some(meta) = meta.filter(|meta| meta.get().starts_with('{')) {
                for_each_member(meta.get(), &mut |name, value| match name {
                    "progressToken" => set_once(&mut token, value, "progressToken"),
                    _ => Ok(()),
                })?;
            }
        }
        _ => {}
    }
    Ok((token, of))
}

fn set_once<'a>(
    place: &mut Option<&'a RawValue>,
    value: &'a RawValue,
    name: &'static str,
) -> Result<(), MalformedMessage> {
    if place.replace(value).is_some() { Err(MalformedMessage::Twice(name)) } else { Ok(()) }
}

fn span(text: &str, part: &str) -> Range<usize> {
    let start = part.as_ptr() as usize - text.as_ptr() as usize;
    start..start + part.len()
}

fn decode_string(value: &RawValue) -> Option<Cow<'_, str>> {
    // `None` if the string contains an unpaired surrogate.
    match unescaped_string(value.get()) {
        Some(plain) => Some(Cow::Borrowed(plain)),
        None => serde_json::from_str(value.get()).ok().map(Cow::Owned),
    }
}

fn unescaped_string(json: &str) -> Option<&str> {
    let inner = json.strip_prefix('"')?.strip_suffix('"')?;
    memchr::memchr(b'\\', inner.as_bytes()).is_none().then_some(inner)
}

/// Calls `member` for each member of an object. Names without escapes and values are not decoded: an unpaired surrogate
/// in an unknown member must not fail the message.
fn for_each_member<'a>(
    json: &'a str,
    member: &mut dyn FnMut(&str, &'a RawValue) -> Result<(), MalformedMessage>,
) -> Result<(), MalformedMessage> {
    struct MemberVisitor<'m, 'a> {
        member: &'m mut dyn FnMut(&str, &'a RawValue) -> Result<(), MalformedMessage>,
    }
    impl<'a> Visitor<'a> for MemberVisitor<'_, 'a> {
        type Value = Result<(), MalformedMessage>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut result = Ok(());
            // Reads the whole text even after an error, so that invalid JSON is always reported as such.
            while let Some((name, value)) = map.next_entry::<&RawValue, &RawValue>()? {
                if result.is_ok()
                    && let Some(name) = decode_string(name)
                {
                    result = (self.member)(&name, value);
                }
            }
            Ok(result)
        }
    }
    if !json.trim_ascii_start().starts_with('{') {
        // Serde would accept an array as an object.
        return match serde_json::from_str::<&RawValue>(json) {
            Ok(_) => Err(MalformedMessage::NotRpc("not an object")),
            Err(error) => Err(MalformedMessage::NotJson(error.to_string())),
        };
    }
    let not_json = |error: serde_json::Error| MalformedMessage::NotJson(error.to_string());
    let mut reader = serde_json::Deserializer::from_str(json);
    let result = reader.deserialize_map(MemberVisitor { member }).map_err(not_json)?;
    reader.end().map_err(not_json)?;
    result
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(text: &str) -> Result<RpcMessage, MalformedMessage> {
        RpcMessage::parse(Bytes::copy_from_slice(text.as_bytes()))
    }

    #[test]
    fn messages_are_classified_and_rewritten_by_their_members() {
        let request = read(
            r#" {"params":{"name":"x","_meta":{"progressToken":"t","y":1e400}},"id":1,"method":"tools/call","jsonrpc":"2.0"} "#,
        )
        .unwrap();
        assert_eq!(
            (request.kind(), request.id(), request.method()),
            (MessageKind::Request, Some("1"), Some("tools/call"))
        );
        assert_eq!((request.token(), request.cancelled_id(), request.outcome()), (Some("\"t\""), None, None));
        assert_eq!(
            join_parts(&request.with_id_and_token("70", "71")),
            r#" {"params":{"name":"x","_meta":{"progressToken":71,"y":1e400}},"id":70,"method":"tools/call","jsonrpc":"2.0"} "#
        );

        let answer = read(r#"{"jsonrpc":"2.0","id":"a","result":null}"#).unwrap();
        assert_eq!((answer.kind(), answer.id(), answer.outcome()), (MessageKind::Result, Some("\"a\""), Some("null")));
        assert_eq!(join_parts(&answer.with_id("5")), r#"{"jsonrpc":"2.0","id":5,"result":null}"#);

        let odd = read(r#"{"jsonrpc":"2.0","id":1,"result":{},"error":null}"#).unwrap();
        assert_eq!((odd.kind(), odd.outcome()), (MessageKind::Result, Some("{}")));
        let both = read(r#"{"jsonrpc":"2.0","id":1,"result":null,"error":{}}"#).unwrap();
        assert_eq!((both.kind(), both.outcome()), (MessageKind::Error, Some("{}")));

        let nothing = read(r#"{"jsonrpc":"2.0","id":null,"error":{"code":1,"message":"m"}}"#).unwrap();
        assert_eq!((nothing.kind(), nothing.id()), (MessageKind::Error, None));

        let progress =
            read(r#"{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":7,"progress":1}}"#)
                .unwrap();
        assert_eq!((progress.kind(), progress.token()), (MessageKind::Notification, Some("7")));
        assert!(join_parts(&progress.with_token("\"x\"")).ends_with(b"{\"progressToken\":\"x\",\"progress\":1}}"));
        let cancelled =
            read(r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"r"}}"#).unwrap();
        assert_eq!(cancelled.cancelled_id(), Some("\"r\""));
        assert_eq!(
            join_parts(&cancelled.with_cancelled_id("9")),
            r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":9}}"#
        );
    }

    #[test]
    fn a_progress_token_is_found_in_meta_in_any_escaped_form() {
        let with = |params: &str| {
            let text = format!(r#"{{"jsonrpc":"2.0","id":1,"method":"m","params":{params}}}"#);
            read(&text).map(|message| message.token().map(str::to_owned))
        };
        assert_eq!(with(r#"{"_meta":{"progressToken":1}}"#), Ok(Some("1".into())));
        assert_eq!(with(r#"{"\u005fmeta":{"progress\u0054oken":1}}"#), Ok(Some("1".into())));
        assert_eq!(with(r#"{"arguments":{"_meta":{"progressToken":1}}}"#), Ok(None));
        assert_eq!(with(r#"{"progressToken":1}"#), Ok(None));
        assert_eq!(with(r#"["progressToken"]"#), Ok(None));
        assert_eq!(with(r#"{"_meta":"progressToken"}"#), Ok(None));
        let twice = r#"{"_meta":{"progressToken":1,"progress\u0054oken":2}}"#;
        assert_eq!(with(twice), Err(MalformedMessage::Twice("progressToken")));
    }

    #[test]
    fn malformed_messages_are_rejected_with_a_reason() {
        for text in ["", "hello", "{", r#"{"a":}"#, r#"{"jsonrpc":"2.0","method":"a"} x"#, "{\"a\":\"\u{1}\"}"] {
            assert!(matches!(read(text), Err(MalformedMessage::NotJson(_))), "{text}: {:?}", read(text));
        }
        for text in [
            "[1,2]",
            "7",
            "{}",
            r#"{"jsonrpc":"1.0","id":1,"result":{}}"#,
            r#"{"jsonrpc":"2.0","id":1}"#,
            r#"{"jsonrpc":"2.0","id":null,"method":"m"}"#,
            r#"{"jsonrpc":"2.0","id":{},"method":"m"}"#,
            r#"{"jsonrpc":"2.0","id":true,"result":1}"#,
            r#"{"jsonrpc":"2.0","result":1}"#,
            r#"{"jsonrpc":"2.0","id":1,"method":7}"#,
        ] {
            assert!(matches!(read(text), Err(MalformedMessage::NotRpc(_))), "{text}: {:?}", read(text));
        }
        assert!(matches!(RpcMessage::parse(Bytes::from_static(b"\xff{}")), Err(MalformedMessage::NotJson(_))));
        let twice = r#"{"jsonrpc":"2.0","id":1,"i\u0064":2,"method":"m"}"#;
        assert_eq!(read(twice).err(), Some(MalformedMessage::Twice("id")));
    }

    #[test]
    fn unknown_members_are_passed_on_without_parsing() {
        let nested = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
        let text = format!(
            r#"{{"jsonrpc":"2.0","\ud800":1e999999,"id":1,"method":"m","x":"\udc00","params":{{"a":{nested},"b":123456789012345678901234567890}}}}"#
        );
        let message = read(&text).unwrap();
        assert_eq!(join_parts(&message.with_id("2")), text.replacen("\"id\":1", "\"id\":2", 1));
    }

    #[test]
    fn pretty_json_is_written_on_one_line() {
        let mut out = BytesMut::new();
        put_json(&mut out, "{\n \"a\": \"x\\ny\"\r\n}");
        assert_eq!(&out[..], b"{  \"a\": \"x\\ny\"  }");
    }

    const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn traced(text: &str) -> Option<String> {
        let message = read(text).unwrap();
        let placed = message.place_trace(&TraceParent::parse(TRACE).unwrap())?;
        Some(message.with_id_token_and_trace("7", "8", &placed).concat())
    }

    #[test]
    fn a_trace_context_replaces_the_value_or_is_inserted() {
        let cases = [
            (
                r#"{"jsonrpc":"2.0","id":1,"method":"m"}"#,
                r#"{"jsonrpc":"2.0","id":7,"method":"m","params":{"_meta":{"traceparent":"T"}}}"#,
            ),
            (
                r#"{"jsonrpc":"2.0","id":1,"method":"m","params":{}}"#,
                r#"{"jsonrpc":"2.0","id":7,"method":"m","params":{"_meta":{"traceparent":"T"}}}"#,
            ),
            (
                r#"{"jsonrpc":"2.0","params":{ "a":1e999},"id":1,"method":"m"}"#,
                r#"{"jsonrpc":"2.0","params":{"_meta":{"traceparent":"T"}, "a":1e999},"id":7,"method":"m"}"#,
            ),
            (
                r#"{"jsonrpc":"2.0","id":1,"method":"m","params":{"_meta":{ }}}"#,
                r#"{"jsonrpc":"2.0","id":7,"method":"m","params":{"_meta":{"traceparent":"T" }}}"#,
            ),
            (
                r#"{"jsonrpc":"2.0","id":1,"method":"m","params":{"_meta":{"progressToken":5,"tracestate":"x"}}}"#,
                r#"{"jsonrpc":"2.0","id":7,"method":"m","params":{"_meta":{"traceparent":"T","progressToken":8,"tracestate":"x"}}}"#,
            ),
            (
                r#"{"jsonrpc":"2.0","id":1,"method":"m","params":{"\u005fmeta":{"trace\u0070arent":"invalid","progressToken":5}}}"#,
                r#"{"jsonrpc":"2.0","id":7,"method":"m","params":{"\u005fmeta":{"trace\u0070arent":"T","progressToken":8}}}"#,
            ),
        ];
        for (before, after) in cases {
            assert_eq!(traced(before).as_deref(), Some(&*after.replace("\"T\"", &format!("\"{TRACE}\""))), "{before}");
        }
    }

    #[test]
    fn an_ambiguous_place_for_a_trace_context_is_left_alone() {
        for params in [
            "[1]",
            r#"{"_meta":1}"#,
            r#"{"_meta":{},"_meta":{}}"#,
            r#"{"_meta":{"traceparent":1}}"#,
            r#"{"_meta":{"traceparent":"a","traceparent":"b"}}"#,
        ] {
            assert_eq!(
                traced(&format!(r#"{{"jsonrpc":"2.0","id":1,"method":"m","params":{params}}}"#)),
                None,
                "{params}"
            );
        }
    }

    #[test]
    fn a_trace_context_is_read_from_meta_only() {
        let of = |params: &str| {
            read(&format!(r#"{{"jsonrpc":"2.0","id":1,"method":"m","params":{params}}}"#)).unwrap().trace_parent()
        };
        assert_eq!(of(&format!(r#"{{"_meta":{{"traceparent":"{TRACE}"}}}}"#)), TraceParent::parse(TRACE));
        assert_eq!(of(&format!(r#"{{"traceparent":"{TRACE}"}}"#)), None);
        assert_eq!(of(r#"{"_meta":{"traceparent":"x"}}"#), None);
        assert_eq!(of("[]"), None);
    }

    fn json_value() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i64>().prop_map(Into::into),
            ".{0,8}".prop_map(Into::into),
        ];
        let name = prop_oneof![
            Just("_meta".to_owned()),
            Just("traceparent".to_owned()),
            Just("progressToken".to_owned()),
            ".{0,4}"
        ];
        leaf.prop_recursive(4, 24, 4, move |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Into::into),
                proptest::collection::btree_map(name.clone(), inner, 0..4)
                    .prop_map(|members| serde_json::Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn a_trace_context_changes_nothing_else(params in json_value(), spaces in "[ \n]{0,2}") {
            let text = format!(r#"{{"jsonrpc":"2.0","id":1,"params":{spaces}{params},"method":"m"{spaces}}}"#);
            let message = read(&text).unwrap();
            let trace = TraceParent::parse(TRACE).unwrap();
            if let Some(placed) = message.place_trace(&trace) {
                // All bytes around the place are those of the message.
                let id = message.id().unwrap();
                let token = message.token().unwrap_or_default();
                let changed = message.with_id_token_and_trace(id, token, &placed).concat();
                prop_assert_eq!(&text[..placed.place.start], &changed[..placed.place.start]);
                prop_assert!(changed.ends_with(&text[placed.place.end..]));
                prop_assert_eq!(changed.len(), text.len() - placed.place.len() + placed.text.len());
                prop_assert_eq!(read(&changed).unwrap().trace_parent(), Some(trace));
                // All members but this one have the same values.
                let mut expected = params.clone();
                expected["_meta"]["traceparent"] = TRACE.into();
                prop_assert_eq!(serde_json::from_str::<serde_json::Value>(read(&changed).unwrap().params().unwrap()).unwrap(), expected);
            } else {
                let meta = params.get("_meta");
                prop_assert!(!params.is_object() || meta.is_some_and(|meta| meta.get("traceparent").map_or(!meta.is_object(), |value| !value.is_string())));
            }
        }

        #[test]
        fn arbitrary_bytes_are_parsed_or_rejected(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = RpcMessage::parse(Bytes::from(bytes));
        }

        #[test]
        fn only_the_id_and_the_token_are_replaced(
            before in "[a-z{}\\[\\]\"\\\\ :,0-9]{0,12}", id in "[1-9][0-9]{0,24}", token in "[1-9][0-9]{0,24}", other in "[1-9][0-9]{0,24}",
            id_last in any::<bool>(),
        ) {
            let junk = serde_json::to_string(&before).unwrap();
            let params = |token: &str| format!(r#""params":{{{junk}:{junk},"_meta":{{"progressToken":{token},{junk}:1}}}}"#);
            let text = |id: &str, token: &str| {
                let (id, params) = (format!(r#""id":{id}"#), params(token));
                let (first, last) = if id_last { (params, id) } else { (id, params) };
                format!(r#"{{"jsonrpc":"2.0",{first},"method":"m",{last}}}"#)
            };
            let message = read(&text(&id, &token)).unwrap();
            prop_assert_eq!(join_parts(&message.with_id_and_token(&other, &id)), text(&other, &id));
        }
    }
}
