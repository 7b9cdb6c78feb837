//! Log of tool calls. The calls of an instance are collected and emitted as one event, shortly after the first call or
//! when enough are collected. Payloads are masked, and long ones are cut.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use mcp_satellite_protocol::rpc::{ESCAPE_MAX, normalize_escapes};
use serde_json::Value;

use crate::model::event::{Event, EventSubject, RequestLine};
use crate::model::json_text::JsonText;
use crate::model::policy::BatchPolicy;
use crate::model::secret::SecretMask;

const ELLIPSIS: char = '…';

/// A completed call, not yet masked.
#[derive(Clone)]
pub struct LoggedCall {
    /// Instance that executed the call.
    pub subject: Arc<EventSubject>,
    /// Mask for the secrets of the instance.
    pub mask: SecretMask,
    /// Name of the tool.
    pub tool: String,
    /// Arguments of the call.
    pub params: Option<LoggedPayload>,
    /// Result, or error of the server.
    pub response: Option<LoggedPayload>,
    /// Time from the request to the answer.
    pub duration: Duration,
    /// Error of the call, already masked.
    pub error: Option<String>,
    /// Reason for a failure.
    pub fate: Option<&'static str>,
    /// Name that the client gave itself.
    pub client: Option<String>,
    /// Time of the request.
    pub at: Timestamp,
}

/// Maximum nesting of a payload that is logged as JSON; a deeper one is logged as a string. `serde_json` reads 127
/// levels, and an event adds some of its own.
const NESTING_MAX: usize = 100;

/// Payload of a call: JSON, or the beginning of it.
#[derive(Clone)]
pub enum LoggedPayload {
    /// Complete JSON text, as sent.
    Whole(Box<str>),
    /// Beginning of the JSON text, masked.
    Cut(Box<str>),
}

impl LoggedPayload {
    /// Copies at most `max` bytes of `json`. A payload is masked before it is cut: a secret across the cut must not
    /// leave its beginning.
    pub fn from_json(json: &str, max: usize, mask: &SecretMask) -> Self {
        if json.len() <= max {
            return Self::Whole(json.into());
        }
        let enough = max.saturating_add(ESCAPE_MAX * (mask.max_len() + 1));
        let end = json.floor_char_boundary(enough);
        let mut text = mask.apply(&normalize_escapes(&json[..end]));
        if end < json.len() {
            let whole = text.floor_char_boundary(text.len().saturating_sub(mask.max_len()));
            text.truncate(whole);
        }
        text.truncate(text.floor_char_boundary(max));
        text.push(ELLIPSIS);
        Self::Cut(text.into())
    }

    /// Returns the payload with the secrets masked; a payload that was cut is a string.
    pub fn into_json(self, mask: &SecretMask) -> JsonText {
        let text = match self {
            Self::Cut(text) => return Value::String(text.into()).into(),
            Self::Whole(text) => text,
        };
        if nesting(&text) > NESTING_MAX {
            return Value::String(mask.apply(&normalize_escapes(&text))).into();
        }
        // Without escapes every string appears literally. A text that contains no secret then needs no mask, and most
        // payloads are not rebuilt.
        let has_secret = mask.has_match_in(&text);
        if !has_secret
            && memchr::memchr(b'\\', text.as_bytes()).is_none()
            && let Ok(json) = JsonText::parse(&text)
        {
            return json;
        }
        let Ok(value) = serde_json::from_str::<Value>(&text) else {
            // `serde_json` rejects some JSON texts: a number of five hundred digits, an unpaired surrogate.
            return Value::String(mask.apply(&normalize_escapes(&text))).into();
        };
        let masked = mask.apply_json(value);
        if !has_secret {
            return masked.into();
        }
        // A secret that is a number is not part of any string.
        let text = masked.to_string();
        if mask.has_match_in(&text) { Value::String(mask.apply(&text)).into() } else { masked.into() }
    }
}

/// Maximum size of the name of a tool or method in events and lists, in bytes.
const NAME_MAX: usize = 256;

/// Returns the name of a tool or method as events and lists contain it: masked, and cut at 256 bytes.
pub fn logged_name(name: &str, mask: &SecretMask) -> String {
    // A secret across the cut must not leave its beginning.
    let end = name.floor_char_boundary(NAME_MAX.saturating_add(mask.max_len()));
    let mut shown = mask.apply(&name[..end]);
    if end < name.len() {
        shown.truncate(shown.floor_char_boundary(shown.len().saturating_sub(mask.max_len())));
    }
    if end < name.len() || shown.len() > NAME_MAX {
        shown.truncate(shown.floor_char_boundary(NAME_MAX));
        shown.push(ELLIPSIS);
    }
    shown
}

/// Returns the number of objects and arrays that contain each other in the JSON text. Brackets in strings do not count.
fn nesting(json: &str) -> usize {
    let (mut depth, mut deepest, mut in_string, mut escaped) = (0_usize, 0, false, false);
    for byte in json.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = in_string,
            b'"' => in_string = !in_string,
            b'{' | b'[' if !in_string => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b'}' | b']' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

/// Calls that are not yet part of an event. Survives a panic of the batcher, as the queue does.
#[derive(Debug)]
pub struct RequestLog {
    delay: Duration,
    lines_max: usize,
    // Key: name of the instance.
    open: HashMap<Arc<str>, CallGroup>,
    due: BTreeSet<(Instant, Arc<str>)>,
}

#[derive(Debug)]
struct CallGroup {
    subject: Arc<EventSubject>,
    lines: Vec<RequestLine>,
    due: Instant,
}

impl RequestLog {
    /// Creates an empty log.
    pub fn new(policy: &BatchPolicy) -> Self {
        let (delay, lines_max) = (policy.request_delay, policy.request_lines_max.max(1));
        Self { delay, lines_max, open: HashMap::new(), due: BTreeSet::new() }
    }

    /// Adds a call. Returns the event of its instance if the maximum number of calls is reached.
    pub fn add(&mut self, now: Instant, request: LoggedCall) -> Option<Event> {
        let LoggedCall { subject: of, mask, tool, params, response, duration: took, error, fate, client, at } = request;
        let shown =
            |payload: Option<LoggedPayload>| payload.map(|payload| payload.into_json(&mask)).unwrap_or_default();
        let line = RequestLine {
            tool_name: tool,
            tool_params: shown(params),
            tool_response: shown(response),
            response_time_ms: u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
            success: error.is_none(),
            error_message: error,
            fate: fate.map(ToOwned::to_owned),
            client,
            timestamp: at,
        };
        let name = Arc::clone(&of.process_id);
        let group = self.open.entry(Arc::clone(&name)).or_insert_with(|| {
            let due = now + self.delay;
            self.due.insert((due, Arc::clone(&name)));
            CallGroup { subject: of, lines: Vec::new(), due }
        });
        group.lines.push(line);
        (group.lines.len() >= self.lines_max).then(|| self.close_group(&name)).flatten()
    }

    /// Returns the time at which the next event is due.
    pub fn due_at(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Removes and returns the events due at `now`.
    pub fn take_due(&mut self, now: Instant) -> Vec<Event> {
        self.take_while(|due| due <= now)
    }

    /// Removes and returns the remaining events.
    pub fn take_all(&mut self) -> Vec<Event> {
        self.take_while(|_| true)
    }

    fn take_while(&mut self, is_due: impl Fn(Instant) -> bool) -> Vec<Event> {
        let mut events = Vec::new();
        while let Some((at, name)) = self.due.first().cloned()
            && is_due(at)
        {
            events.extend(self.close_group(&name));
        }
        events
    }

    fn close_group(&mut self, name: &Arc<str>) -> Option<Event> {
        let CallGroup { subject: of, lines, due } = self.open.remove(name)?;
        self.due.remove(&(due, Arc::clone(name)));
        Some(Event::RequestLogs { of, requests: lines })
    }
}
