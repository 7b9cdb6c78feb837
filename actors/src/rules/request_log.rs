//! Calls of tools as they are logged: gathered for each instance, and told together, a moment after the first or when
//! there are enough. What a call carried is masked, and what is long is cut.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use serde_json::Value;

use crate::model::event::{Event, RequestLine, Subject};
use crate::model::policy::BatchPolicy;
use crate::model::secret::Mask;

/// Behind what was cut.
const ELLIPSIS: char = '…';

/// An escaped character of JSON is at most so many bytes.
const ESCAPE_MAX: usize = 6;

/// One call that is over. Not masked yet.
#[derive(Clone)]
pub struct Request {
    /// Of which instance.
    pub of: Arc<Subject>,
    /// What must not be seen of it.
    pub mask: Mask,
    /// The tool.
    pub tool: String,
    /// Its arguments.
    pub params: Option<Payload>,
    /// Its result, or the server's error.
    pub response: Option<Payload>,
    /// From the request to the answer.
    pub took: Duration,
    /// What went wrong, masked.
    pub error: Option<String>,
    /// When it was asked.
    pub at: Timestamp,
}

/// What a call carried: JSON, or the beginning of some.
#[derive(Clone)]
pub enum Payload {
    /// All of it, as sent.
    Whole(Box<str>),
    /// So much of it, masked.
    Cut(Box<str>),
}

impl Payload {
    /// A copy of at most `max` bytes of `json`. What is cut is masked before: a secret that straddles the cut must not
    /// leave its head.
    pub fn of(json: &str, max: usize, mask: &Mask) -> Self {
        if json.len() <= max {
            return Self::Whole(json.into());
        }
        let enough = max.saturating_add(ESCAPE_MAX * (mask.longest() + 1));
        let end = json.floor_char_boundary(enough);
        let mut text = mask.apply(&plain(&json[..end]));
        if end < json.len() {
            let whole = text.floor_char_boundary(text.len().saturating_sub(mask.longest()));
            text.truncate(whole);
        }
        text.truncate(text.floor_char_boundary(max));
        text.push(ELLIPSIS);
        Self::Cut(text.into())
    }

    fn shown(self, mask: &Mask) -> Value {
        let text = match self {
            Self::Cut(text) => return Value::String(text.into()),
            Self::Whole(text) => text,
        };
        let Ok(value) = serde_json::from_str(&text) else {
            // Not everything that JSON can write is a value here: a number of five hundred digits, half a character.
            return Value::String(mask.apply(&plain(&text)));
        };
        // Without an escape each text in it stands as it is: what the whole does not hold is in none of them, and most
        // payloads need not be built anew.
        if !mask.hides(&text) && memchr::memchr(b'\\', text.as_bytes()).is_none() {
            return value;
        }
        let masked = mask.apply_json(value);
        if !mask.hides(&text) {
            return masked;
        }
        // A secret that is a number is no text of it.
        let text = masked.to_string();
        if mask.hides(&text) { Value::String(mask.apply(&text)) } else { masked }
    }
}

/// A JSON text, or its beginning, with every character written as we write it, so that a mask finds what it knows.
pub(crate) fn plain(json: &str) -> String {
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
                let Some((letter, length)) = unicode(rest) else {
                    written.push_str("\\u");
                    rest = &rest[2..];
                    continue;
                };
                let quoted = Value::from(letter.to_string()).to_string();
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

/// The character that begins `text` as `\uXXXX`, or as two of those, and how long that is.
fn unicode(text: &str) -> Option<(char, usize)> {
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

/// What was called and not yet told. Survives a panic of the batcher, as the queue does.
#[derive(Debug)]
pub struct RequestLog {
    delay: Duration,
    lines_max: usize,
    /// By the instance's name.
    open: HashMap<Arc<str>, Group>,
    due: BTreeSet<(Instant, Arc<str>)>,
}

#[derive(Debug)]
struct Group {
    of: Arc<Subject>,
    lines: Vec<RequestLine>,
    due: Instant,
}

impl RequestLog {
    /// Nothing yet.
    pub fn new(policy: &BatchPolicy) -> Self {
        let (delay, lines_max) = (policy.request_delay, policy.request_lines_max.max(1));
        Self { delay, lines_max, open: HashMap::new(), due: BTreeSet::new() }
    }

    /// Notes a call; the event, if there are enough of its instance now.
    pub fn take(&mut self, now: Instant, request: Request) -> Option<Event> {
        let Request { of, mask, tool, params, response, took, error, at } = request;
        let shown = |payload: Option<Payload>| payload.map_or(Value::Null, |payload| payload.shown(&mask));
        let line = RequestLine {
            tool_name: tool,
            tool_params: shown(params),
            tool_response: shown(response),
            response_time_ms: u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
            success: error.is_none(),
            error_message: error,
            timestamp: at,
        };
        let name = Arc::clone(&of.process_id);
        let group = self.open.entry(Arc::clone(&name)).or_insert_with(|| {
            let due = now + self.delay;
            self.due.insert((due, Arc::clone(&name)));
            Group { of, lines: Vec::new(), due }
        });
        group.lines.push(line);
        (group.lines.len() >= self.lines_max).then(|| self.close(&name)).flatten()
    }

    /// When something is to be told.
    pub fn due(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    /// What is to be told by now.
    pub fn take_due(&mut self, now: Instant) -> Vec<Event> {
        self.take_while(|due| due <= now)
    }

    /// What is left.
    pub fn take_all(&mut self) -> Vec<Event> {
        self.take_while(|_| true)
    }

    fn take_while(&mut self, is_due: impl Fn(Instant) -> bool) -> Vec<Event> {
        let mut told = Vec::new();
        while let Some((at, name)) = self.due.first().cloned()
            && is_due(at)
        {
            told.extend(self.close(&name));
        }
        told
    }

    fn close(&mut self, name: &Arc<str>) -> Option<Event> {
        let Group { of, lines, due } = self.open.remove(name)?;
        self.due.remove(&(due, Arc::clone(name)));
        Some(Event::RequestLogs { of, requests: lines })
    }
}
