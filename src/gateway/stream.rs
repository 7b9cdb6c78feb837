//! One event stream towards a client: what was said on it, how much of that its listener has, and what one that comes
//! back can still have. Pure: no clock and no socket.
//!
//! Events are numbered from 1; an event's id is `{stream}-{number}`. A stream has one listener, the newest.

use std::collections::VecDeque;
use std::fmt::Write as _;

use bytes::{BufMut, Bytes, BytesMut};

/// How much may wait, or is kept.
#[derive(Debug, Clone, Copy)]
pub struct Room {
    /// Events.
    pub events: usize,
    /// Their bytes.
    pub bytes: usize,
}

/// Kept for a listener to come, or for one that comes back.
pub const KEPT: Room = Room { events: 256, bytes: 1024 * 1024 };
/// How far behind a listener may be.
pub const BEHIND: Room = Room { events: 1024, bytes: 4 * 1024 * 1024 };
/// After how long a client comes back, in ms.
const RETRY_MS: u32 = 1000;

/// The listener reads too slowly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slow;

/// Which listener it is: a number of its stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listener(u64);

/// What a listener gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// An event, as it is written.
    Event(Bytes),
    /// There is nothing yet.
    Nothing,
    /// Nothing comes any more.
    Over,
    /// Another listener has its place.
    Replaced,
}

/// See the module.
#[derive(Debug)]
pub struct Stream {
    number: u64,
    kept: VecDeque<Bytes>,
    /// The number of the first that is kept.
    first: u64,
    /// The number of the first that the listener does not have.
    unread: u64,
    /// Of all that is kept.
    bytes: usize,
    /// Of what the listener does not have.
    bytes_unread: usize,
    listener: Option<Listener>,
    listeners: u64,
    /// Whether the listener was given anything that it could come back with.
    resumable: bool,
    over: bool,
    lost: u64,
}

impl Stream {
    /// An empty one.
    pub fn new(number: u64) -> Self {
        Self {
            number,
            kept: VecDeque::new(),
            first: 1,
            unread: 1,
            bytes: 0,
            bytes_unread: 0,
            listener: None,
            listeners: 0,
            resumable: false,
            over: false,
            lost: 0,
        }
    }

    /// Says a message, given in parts.
    pub fn say(&mut self, parts: &[&str]) -> Result<(), Slow> {
        if self.over {
            return Ok(());
        }
        let behind = self.next() - self.unread;
        if self.listener.is_some() && (behind >= BEHIND.events as u64 || self.bytes_unread >= BEHIND.bytes) {
            return Err(Slow);
        }
        let event = event(self.number, self.next(), parts);
        self.bytes += event.len();
        self.bytes_unread += event.len();
        self.kept.push_back(event);
        self.trim();
        Ok(())
    }

    /// Nothing comes any more.
    pub fn end(&mut self) {
        self.over = true;
    }

    /// Whether all was said, and read.
    pub fn is_done(&self) -> bool {
        self.over && self.unread == self.next()
    }

    /// Whether there is anything to read.
    pub fn has_news(&self) -> bool {
        self.unread < self.next()
    }

    /// Whether somebody listens.
    pub fn is_heard(&self) -> bool {
        self.listener.is_some()
    }

    /// Whether a listener that is gone has an id with which it could come back.
    pub fn is_resumable(&self) -> bool {
        self.resumable
    }

    /// How many events were dropped because nobody listened.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// A listener comes: the one that was there is replaced. `after` is the last event that it has, if it comes back.
    pub fn attach(&mut self, after: Option<u64>) -> Listener {
        if let Some(after) = after {
            self.unread = after.saturating_add(1).clamp(self.first, self.next());
            self.bytes_unread = self.kept.range(self.at(self.unread)..).map(Bytes::len).sum();
        }
        self.listeners += 1;
        let listener = Listener(self.listeners);
        self.listener = Some(listener);
        listener
    }

    /// An event without a message: from here on the listener can come back, and knows after how long.
    pub fn priming(&mut self) -> Bytes {
        self.resumable = true;
        format!("id: {}-{}\nretry: {RETRY_MS}\ndata: \n\n", self.number, self.unread - 1).into()
    }

    /// What the listener has not got yet.
    pub fn take(&mut self, listener: Listener) -> Next {
        if self.listener != Some(listener) {
            return Next::Replaced;
        }
        if !self.has_news() {
            return if self.over { Next::Over } else { Next::Nothing };
        }
        let event = self.kept[self.at(self.unread)].clone();
        self.unread += 1;
        self.bytes_unread -= event.len();
        self.resumable = true;
        self.trim();
        Next::Event(event)
    }

    /// The listener is gone. Says whether it was the one that counts.
    pub fn detach(&mut self, listener: Listener) -> bool {
        let current = self.listener == Some(listener);
        if current {
            self.listener = None;
            self.trim();
        }
        current
    }

    /// The number of the next event.
    fn next(&self) -> u64 {
        self.first + self.kept.len() as u64
    }

    fn at(&self, number: u64) -> usize {
        usize::try_from(number - self.first).unwrap_or(usize::MAX)
    }

    /// Forgets the oldest: what a listener has not got only if there is no listener, and never the newest.
    fn trim(&mut self) {
        while self.kept.len() > 1
            && (self.kept.len() > KEPT.events || self.bytes > KEPT.bytes)
            && (self.first < self.unread || self.listener.is_none())
        {
            let Some(oldest) = self.kept.pop_front() else { return };
            self.bytes -= oldest.len();
            if self.first == self.unread {
                self.lost += 1;
                self.unread += 1;
                self.bytes_unread -= oldest.len();
            }
            self.first += 1;
        }
    }
}

/// An event as it is written. A line break in a message is white space of JSON, and would end the line of the event.
fn event(stream: u64, number: u64, parts: &[&str]) -> Bytes {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    let mut event = BytesMut::with_capacity(length + 56);
    // Writing to memory does not fail.
    let _ = write!(event, "id: {stream}-{number}\ndata: ");
    for part in parts {
        let at = event.len();
        event.put_slice(part.as_bytes());
        for byte in &mut event[at..] {
            if matches!(byte, b'\n' | b'\r') {
                *byte = b' ';
            }
        }
    }
    event.put_slice(b"\n\n");
    event.freeze()
}

/// The stream and the number in an event's id.
pub fn parse_id(id: &str) -> Option<(u64, u64)> {
    let (stream, number) = id.split_once('-')?;
    Some((stream.parse().ok()?, number.parse().ok()?))
}

/// Where a message goes that a server sends on behalf of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// The stream of one of its calls.
    Call(u64),
    /// The stream that is no call's.
    Unasked,
}

/// Chooses it: the call's own stream; else, if the client has one call that can stream, that one's; else the client's
/// open ear, and without one any call that can stream. `streaming` are the calls that can, the oldest first.
pub fn way(call: Option<u64>, streaming: &[u64], unasked_is_heard: bool) -> Way {
    match (call, streaming) {
        (Some(call), _) if streaming.contains(&call) => Way::Call(call),
        (None, [only]) => Way::Call(*only),
        (_, [first, ..]) if !unasked_is_heard => Way::Call(*first),
        (_, _) => Way::Unasked,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(stream: &mut Stream, listener: Listener) -> Vec<String> {
        let mut texts = Vec::new();
        while let Next::Event(event) = stream.take(listener) {
            texts.push(String::from_utf8_lossy(&event).into_owned());
        }
        texts
    }

    #[test]
    fn an_event_is_one_message_with_an_id_and_no_line_break_ends_it() {
        let mut stream = Stream::new(5);
        let listener = stream.attach(None);
        assert_eq!(stream.priming(), "id: 5-0\nretry: 1000\ndata: \n\n");
        assert_eq!(stream.say(&["{\"a\":", "\r\n1", "}\n"]), Ok(()));
        assert_eq!(texts(&mut stream, listener), ["id: 5-1\ndata: {\"a\":  1} \n\n"]);
        assert_eq!(stream.take(listener), Next::Nothing);
        stream.end();
        assert_eq!(stream.take(listener), Next::Over);
        assert!(stream.is_done());
    }

    #[test]
    fn who_comes_back_gets_what_it_does_not_have() {
        let mut stream = Stream::new(0);
        let listener = stream.attach(None);
        for text in ["a", "b", "c"] {
            assert_eq!(stream.say(&[text]), Ok(()));
        }
        assert_eq!(texts(&mut stream, listener).len(), 3);
        assert!(stream.detach(listener));
        assert_eq!(stream.say(&["d"]), Ok(()));
        let back = stream.attach(Some(1));
        assert_eq!(texts(&mut stream, back), ["id: 0-2\ndata: b\n\n", "id: 0-3\ndata: c\n\n", "id: 0-4\ndata: d\n\n"]);
        // One that says that it has more than there is gets what comes.
        let liar = stream.attach(Some(u64::MAX));
        assert_eq!(stream.take(back), Next::Replaced);
        assert!(!stream.detach(back));
        assert_eq!(stream.say(&["e"]), Ok(()));
        assert_eq!(texts(&mut stream, liar), ["id: 0-5\ndata: e\n\n"]);
    }

    #[test]
    fn without_a_listener_the_oldest_goes_and_is_counted() {
        let mut stream = Stream::new(0);
        for _ in 0..KEPT.events + 10 {
            assert_eq!(stream.say(&["x"]), Ok(()));
        }
        assert_eq!(stream.lost(), 10);
        let listener = stream.attach(None);
        let texts = texts(&mut stream, listener);
        assert_eq!((texts.len(), texts[0].as_str()), (KEPT.events, "id: 0-11\ndata: x\n\n"));
        // The newest stays, however large it is.
        stream.detach(listener);
        assert_eq!(stream.say(&[&"y".repeat(2 * KEPT.bytes)]), Ok(()));
        assert!(stream.has_news());
        assert_eq!(stream.kept.len(), 1);
    }

    #[test]
    fn a_listener_that_does_not_read_is_slow_and_what_it_has_not_read_is_not_dropped() {
        let mut stream = Stream::new(0);
        let listener = stream.attach(None);
        for _ in 0..BEHIND.events {
            assert_eq!(stream.say(&["x"]), Ok(()));
        }
        assert_eq!(stream.say(&["x"]), Err(Slow));
        assert_eq!(texts(&mut stream, listener).len(), BEHIND.events);
        assert_eq!(stream.lost(), 0);
        assert_eq!(stream.say(&[&"x".repeat(2 * BEHIND.bytes)]), Ok(()));
        assert_eq!(stream.say(&["x"]), Err(Slow));
    }

    #[test]
    fn a_message_finds_its_way() {
        let table = [
            (Some(1), &[1, 2][..], true, Way::Call(1)),
            (Some(3), &[1, 2], true, Way::Unasked),
            (Some(3), &[1, 2], false, Way::Call(1)),
            (Some(3), &[], false, Way::Unasked),
            (None, &[1], true, Way::Call(1)),
            (None, &[1, 2], true, Way::Unasked),
            (None, &[1, 2], false, Way::Call(1)),
            (None, &[], true, Way::Unasked),
            (None, &[], false, Way::Unasked),
        ];
        for (call, streaming, heard, expected) in table {
            assert_eq!(way(call, streaming, heard), expected, "{call:?} {streaming:?} {heard}");
        }
    }

    #[test]
    fn an_id_is_two_numbers() {
        assert_eq!(parse_id("5-12"), Some((5, 12)));
        for id in ["", "5", "5-", "-1", "a-b", "1-2-3", "1--2", "99999999999999999999-1"] {
            assert_eq!(parse_id(id), None, "{id}");
        }
    }
}
