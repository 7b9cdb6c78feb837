//! Event stream to a client: buffers the events, tracks the position of its listener, and keeps events for a
//! listener that returns. Pure: no clock and no socket.
//!
//! Events are numbered from 1; an event's id is `{stream}-{number}`. A stream has at most one listener, the newest. The
//! first listener of a call's stream is expected from the beginning, so no event is dropped before it attaches. All
//! streams of all clients share one budget: half of it may be used for listeners that may return, the rest is for
//! listeners that read slowly.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::ops::Range;
use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use mcp_satellite_actors::byte_budget::{ByteBudget, ByteShare};

#[derive(Debug, Clone, Copy)]
pub struct BufferLimits {
    pub events: usize,
    pub bytes: usize,
}

/// Limits of what is buffered for a listener that is expected or may return.
pub const KEPT: BufferLimits = BufferLimits { events: 256, bytes: 1024 * 1024 };
/// Unread bytes after which a listener counts as too slow. There is no limit on unread events: a server may send
/// thousands of small ones at once, before a listener that does read is scheduled.
pub const BEHIND: usize = 4 * 1024 * 1024;
// Cost of an event in addition to its bytes: the queue entry and the allocator.
const OVERHEAD: usize = 100;
/// Bytes that each listener and each call may always use, even if the shared budget is exhausted.
pub const GUARANTEED_BYTES: usize = 64 * 1024;
/// Number of the session's own stream, which belongs to no call. Calls count from 1.
pub const SESSION_STREAM: u64 = 0;
// Reconnection time for clients, in ms.
const RETRY_MS: u32 = 1000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlowListener;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListenerId(u64);

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StreamItem {
    /// The next event in wire format.
    Event(Bytes),
    Pending,
    Ended,
    Replaced,
}

#[derive(Debug)]
pub struct EventStream {
    number: u64,
    events: VecDeque<Bytes>,
    // Number of the first buffered event.
    first: u64,
    // Number of the first event that the listener has not read.
    unread: u64,
    share: ByteShare,
    bytes_unread: usize,
    listener: Option<ListenerId>,
    // True until the first listener of a call's stream attaches.
    listener_expected: bool,
    listeners: u64,
    // True if events have ids, so that a listener can return.
    has_ids: bool,
    // True if the listener has received an id with which it can return.
    resumable: bool,
    ended: bool,
    lost: u64,
    // Numbers of the events dropped since the last `take_dropped`.
    dropped: Range<u64>,
}

impl EventStream {
    pub fn new(number: u64, budget: &Arc<ByteBudget>) -> Self {
        Self {
            number,
            events: VecDeque::new(),
            first: 1,
            unread: 1,
            share: budget.share(),
            bytes_unread: 0,
            listener: None,
            listener_expected: number != SESSION_STREAM,
            listeners: 0,
            has_ids: true,
            resumable: false,
            ended: false,
            lost: 0,
            dropped: 0..0,
        }
    }

    /// Creates a stream without event ids, for a client that has no session to return to.
    pub fn without_ids(number: u64, budget: &Arc<ByteBudget>) -> Self {
        Self { has_ids: false, ..Self::new(number, budget) }
    }

    /// Appends a message, given in parts. Does nothing after the end.
    ///
    /// # Errors
    /// The listener reads too slowly; the message is not appended.
    pub fn append(&mut self, parts: &[&str]) -> Result<(), SlowListener> {
        if self.ended {
            return Ok(());
        }
        if self.has_or_expects_listener() && self.is_far_behind() {
            return Err(SlowListener);
        }
        let id = self.has_ids.then(|| (self.number, self.next_number()));
        let event = format_event(id, parts);
        self.share.take(weight(&event));
        self.bytes_unread += weight(&event);
        self.events.push_back(event);
        self.trim();
        Ok(())
    }

    pub fn end(&mut self) {
        self.ended = true;
    }

    /// Returns true if the stream has ended and was read completely.
    pub fn is_done(&self) -> bool {
        self.ended && self.unread == self.next_number()
    }

    pub fn has_unread(&self) -> bool {
        self.unread < self.next_number()
    }

    pub fn has_listener(&self) -> bool {
        self.listener.is_some()
    }

    pub fn has_or_expects_listener(&self) -> bool {
        self.listener.is_some() || self.listener_expected
    }

    /// Returns true if a listener that has left knows an id with which it can return.
    pub fn is_resumable(&self) -> bool {
        self.resumable
    }

    pub fn lost_count(&self) -> u64 {
        self.lost
    }

    /// Returns the numbers of the events dropped since the last call. Must be called after every operation that may
    /// drop events.
    pub fn take_dropped(&mut self) -> Range<u64> {
        std::mem::take(&mut self.dropped)
    }

    /// Attaches a listener and replaces the previous one. `after` is the last event that a returning listener has.
    pub fn attach(&mut self, after: Option<u64>) -> ListenerId {
        if let Some(after) = after {
            self.unread = after.saturating_add(1).clamp(self.first, self.next_number());
            self.bytes_unread = self.events.range(self.index_of(self.unread)..).map(weight).sum();
        }
        self.listener_expected = false;
        self.listeners += 1;
        let listener = ListenerId(self.listeners);
        self.listener = Some(listener);
        listener
    }

    /// Returns an event without a message. It gives the listener an id to return with and the reconnection time.
    pub fn priming_event(&mut self) -> Bytes {
        self.resumable = true;
        format!("id: {}-{}\nretry: {RETRY_MS}\ndata: \n\n", self.number, self.unread - 1).into()
    }

    pub fn take(&mut self, listener: ListenerId) -> StreamItem {
        if self.listener != Some(listener) {
            return StreamItem::Replaced;
        }
        if !self.has_unread() {
            return if self.ended { StreamItem::Ended } else { StreamItem::Pending };
        }
        let event = self.events[self.index_of(self.unread)].clone();
        self.unread += 1;
        self.bytes_unread -= weight(&event);
        self.resumable = self.has_ids;
        self.trim();
        StreamItem::Event(event)
    }

    /// Detaches a listener. Returns false if another one had already replaced it.
    pub fn detach(&mut self, listener: ListenerId) -> bool {
        let current = self.listener == Some(listener);
        if current {
            self.listener = None;
            self.trim();
        }
        current
    }

    /// Drops the events that were read and, if there is no listener, the unread ones too.
    pub fn drop_buffered_events(&mut self) {
        while self.can_drop_oldest() && self.drop_oldest() {}
    }

    fn is_far_behind(&self) -> bool {
        let is_over_budget = self.share.budget().is_overdrawn();
        self.bytes_unread >= if is_over_budget { GUARANTEED_BYTES } else { BEHIND }
    }

    pub fn next_number(&self) -> u64 {
        self.first + self.events.len() as u64
    }

    fn index_of(&self, number: u64) -> usize {
        usize::try_from(number - self.first).unwrap_or(usize::MAX)
    }

    /// Drops the oldest events while there are too many. Unread events are dropped only without a listener. The newest
    /// one is dropped only if the shared budget is exhausted and it is not a call's.
    fn trim(&mut self) {
        let (of_calls, assured) =
            (self.number != SESSION_STREAM, if self.number == SESSION_STREAM { 0 } else { GUARANTEED_BYTES });
        loop {
            let crowded = is_crowded(self.share.budget()) && self.share.bytes() > assured;
            let too_much = crowded || self.events.len() > KEPT.events || self.share.bytes() > KEPT.bytes;
            let newest = self.events.len() <= 1 && (of_calls || !crowded);
            if !too_much || newest || !self.can_drop_oldest() || !self.drop_oldest() {
                return;
            }
        }
    }

    fn can_drop_oldest(&self) -> bool {
        self.first < self.unread || !self.has_or_expects_listener()
    }

    fn drop_oldest(&mut self) -> bool {
        let Some(oldest) = self.events.pop_front() else { return false };
        self.share.release(weight(&oldest));
        if self.first == self.unread {
            let start = if self.dropped.end == self.first { self.dropped.start } else { self.first };
            self.dropped = start..self.first + 1;
            self.lost += 1;
            self.unread += 1;
            self.bytes_unread -= weight(&oldest);
        }
        self.first += 1;
        true
    }
}

/// Returns true if all streams together exceed the half of the budget that is for listeners that may return.
pub fn is_crowded(budget: &ByteBudget) -> bool {
    budget.used() > budget.max() / 2 || budget.is_overdrawn()
}

fn weight(event: &Bytes) -> usize {
    event.len() + OVERHEAD
}

/// Writes an event. A line break in a message is JSON white space and is replaced, because it would end the `data`
/// line.
fn format_event(id: Option<(u64, u64)>, parts: &[&str]) -> Bytes {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    let mut event = BytesMut::with_capacity(length + 56);
    if let Some((stream, number)) = id {
        // Writing to memory does not fail.
        let _ = writeln!(event, "id: {stream}-{number}");
    }
    event.put_slice(b"data: ");
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

pub fn parse_id(id: &str) -> Option<(u64, u64)> {
    let (stream, number) = id.split_once('-')?;
    Some((stream.parse().ok()?, number.parse().ok()?))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamChoice {
    Call(u64),
    Session,
}

/// Chooses the stream for a message: the stream of `call` if it can stream, or the only streaming call if there is
/// exactly one and the message names none; else the session's stream if it is read, or the oldest call that can stream.
/// `read` contains the calls whose streams have a listener, oldest first; `unread` the other calls that can stream,
/// which are used only if no stream has a listener.
pub fn choose_stream(call: Option<u64>, read: &[u64], unread: &[u64], is_session_stream_read: bool) -> StreamChoice {
    let streaming = if read.is_empty() && !is_session_stream_read { unread } else { read };
    match (call, streaming) {
        (Some(call), _) if streaming.contains(&call) => StreamChoice::Call(call),
        (None, [only]) => StreamChoice::Call(*only),
        (_, [first, ..]) if !is_session_stream_read => StreamChoice::Call(*first),
        (_, _) => StreamChoice::Session,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(number: u64) -> EventStream {
        EventStream::new(number, &ByteBudget::new(usize::MAX))
    }

    fn texts(stream: &mut EventStream, listener: ListenerId) -> Vec<String> {
        let mut texts = Vec::new();
        while let StreamItem::Event(event) = stream.take(listener) {
            texts.push(String::from_utf8_lossy(&event).into_owned());
        }
        texts
    }

    #[test]
    fn an_event_is_one_message_with_an_id_and_without_line_breaks() {
        let mut stream = stream(5);
        let listener = stream.attach(None);
        assert_eq!(stream.priming_event(), "id: 5-0\nretry: 1000\ndata: \n\n");
        assert_eq!(stream.append(&["{\"a\":", "\r\n1", "}\n"]), Ok(()));
        assert_eq!(texts(&mut stream, listener), ["id: 5-1\ndata: {\"a\":  1} \n\n"]);
        assert_eq!(stream.take(listener), StreamItem::Pending);
        stream.end();
        assert_eq!(stream.take(listener), StreamItem::Ended);
        assert!(stream.is_done());
    }

    #[test]
    fn a_resumed_listener_gets_the_events_after_its_last_id() {
        let mut stream = stream(0);
        let listener = stream.attach(None);
        for text in ["a", "b", "c"] {
            assert_eq!(stream.append(&[text]), Ok(()));
        }
        assert_eq!(texts(&mut stream, listener).len(), 3);
        assert!(stream.detach(listener));
        assert_eq!(stream.append(&["d"]), Ok(()));
        let resumed = stream.attach(Some(1));
        assert_eq!(
            texts(&mut stream, resumed),
            ["id: 0-2\ndata: b\n\n", "id: 0-3\ndata: c\n\n", "id: 0-4\ndata: d\n\n"]
        );
        // A listener that claims an event beyond the end receives the next events.
        let liar = stream.attach(Some(u64::MAX));
        assert_eq!(stream.take(resumed), StreamItem::Replaced);
        assert!(!stream.detach(resumed));
        assert_eq!(stream.append(&["e"]), Ok(()));
        assert_eq!(texts(&mut stream, liar), ["id: 0-5\ndata: e\n\n"]);
    }

    #[test]
    fn without_a_listener_the_oldest_event_is_dropped_and_counted() {
        let mut stream = stream(0);
        for _ in 0..KEPT.events + 10 {
            assert_eq!(stream.append(&["x"]), Ok(()));
        }
        assert_eq!(stream.lost_count(), 10);
        let listener = stream.attach(None);
        let texts = texts(&mut stream, listener);
        assert_eq!((texts.len(), texts[0].as_str()), (KEPT.events, "id: 0-11\ndata: x\n\n"));
        // The newest stays, however large it is.
        stream.detach(listener);
        assert_eq!(stream.append(&[&"y".repeat(2 * KEPT.bytes)]), Ok(()));
        assert!(stream.has_unread());
        assert_eq!(stream.events.len(), 1);
    }

    #[test]
    fn unread_events_of_a_slow_listener_are_not_dropped() {
        let mut stream = stream(0);
        let listener = stream.attach(None);
        let mut appended = 0;
        while stream.append(&["x"]) == Ok(()) {
            appended += 1;
        }
        assert!((20_000..BEHIND / OVERHEAD).contains(&appended), "the number of small messages is limited: {appended}");
        assert_eq!(stream.append(&["x"]), Err(SlowListener));
        assert_eq!(texts(&mut stream, listener).len(), appended);
        assert_eq!(stream.lost_count(), 0);
        assert_eq!(stream.append(&[&"x".repeat(2 * BEHIND)]), Ok(()));
        assert_eq!(stream.append(&["x"]), Err(SlowListener));
    }

    #[test]
    fn a_call_stream_keeps_all_events_until_its_listener_leaves() {
        let mut call = stream(1);
        for _ in 0..3 * KEPT.events {
            assert_eq!(call.append(&["x"]), Ok(()));
        }
        assert_eq!((call.lost_count(), call.has_or_expects_listener()), (0, true));
        assert!(
            (0..BEHIND).any(|_| call.append(&["x"]) == Err(SlowListener)),
            "the backlog of a slow listener is limited"
        );
        let listener = call.attach(None);
        assert!(texts(&mut call, listener).len() > 3 * KEPT.events);
        assert!(call.detach(listener) && !call.has_or_expects_listener());
        for _ in 0..3 * KEPT.events {
            assert_eq!(call.append(&["x"]), Ok(()));
        }
        assert_eq!(call.lost_count(), 2 * KEPT.events as u64);
    }

    #[test]
    fn dropped_events_are_reported_once() {
        let mut stream = stream(0);
        let listener = stream.attach(None);
        assert_eq!(stream.append(&["read"]), Ok(()));
        assert_eq!(texts(&mut stream, listener).len(), 1);
        stream.detach(listener);
        for _ in 0..=KEPT.events {
            assert_eq!(stream.append(&["x"]), Ok(()));
        }
        assert_eq!((stream.take_dropped(), stream.take_dropped()), (2..3, 0..0));
        stream.drop_buffered_events();
        assert_eq!(stream.take_dropped(), 3..KEPT.events as u64 + 3);
    }

    #[test]
    fn streams_share_a_budget_and_drop_new_messages_over_it() {
        let budget = ByteBudget::new(8 * GUARANTEED_BYTES);
        let large = "x".repeat(GUARANTEED_BYTES);
        let mut first = EventStream::new(0, &budget);
        for _ in 0..8 {
            assert_eq!(first.append(&[&large]), Ok(()));
        }
        assert!((3..=4).contains(&first.events.len()), "half of the budget: {}", first.events.len());
        assert_eq!(first.lost_count(), 8 - first.events.len() as u64);
        let (mut late, mut call) = (EventStream::new(0, &budget), EventStream::new(1, &budget));
        assert_eq!((late.append(&[&large]), late.append(&["x"])), (Ok(()), Ok(())));
        // A small message may still fit; one that does not is lost, even if it is the newest.
        assert!(late.share.bytes() < GUARANTEED_BYTES && late.lost_count() > 0);
        // The answer of a call waits for a listener that returns.
        assert_eq!(call.append(&[&large]), Ok(()));
        assert_eq!((call.events.len(), call.lost_count()), (1, 0));
        first.drop_buffered_events();
        assert_eq!((first.events.len(), first.share.bytes()), (0, 0));
        assert_eq!((late.append(&[&large]), !late.events.is_empty()), (Ok(()), true));
        drop((first, late, call));
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn over_the_budget_only_a_listener_with_a_backlog_is_slow() {
        let budget = ByteBudget::new(2 * GUARANTEED_BYTES);
        let mut behind = EventStream::new(0, &budget);
        let listener = behind.attach(None);
        while budget.used() <= budget.max() {
            assert_eq!(behind.append(&[&"x".repeat(1000)]), Ok(()));
        }
        assert_eq!(behind.append(&["x"]), Err(SlowListener));
        let mut reads = EventStream::new(0, &budget);
        let reader = reads.attach(None);
        for _ in 0..1000 {
            assert_eq!(reads.append(&[&"x".repeat(1000)]), Ok(()));
            assert!(matches!(reads.take(reader), StreamItem::Event(_)));
        }
        assert_eq!((reads.lost_count(), reads.events.len()), (0, 0), "nothing is kept for a listener that returns");
        assert_eq!(behind.lost_count(), 0);
        assert!(matches!(behind.take(listener), StreamItem::Event(_)));
    }

    #[test]
    fn the_stream_choice_follows_this_table() {
        let none = &[][..];
        let table = [
            (Some(1), &[1, 2][..], none, true, StreamChoice::Call(1)),
            (Some(3), &[1, 2], none, true, StreamChoice::Session),
            (Some(3), &[1, 2], none, false, StreamChoice::Call(1)),
            (Some(3), none, none, false, StreamChoice::Session),
            (None, &[1], none, true, StreamChoice::Call(1)),
            (None, &[1, 2], none, true, StreamChoice::Session),
            (None, &[1, 2], none, false, StreamChoice::Call(1)),
            (None, none, none, true, StreamChoice::Session),
            (None, none, none, false, StreamChoice::Session),
            // A stream without a listener is chosen only if no stream has one.
            (Some(1), none, &[1], true, StreamChoice::Session),
            (Some(1), &[2], &[1], true, StreamChoice::Session),
            (Some(1), &[2], &[1], false, StreamChoice::Call(2)),
            (None, &[2], &[1], true, StreamChoice::Call(2)),
            (None, none, &[1], true, StreamChoice::Session),
            (Some(2), none, &[1, 2], false, StreamChoice::Call(2)),
            (None, none, &[1, 2], false, StreamChoice::Call(1)),
        ];
        for (call, read, unread, is_session_stream_read, expected) in table {
            assert_eq!(
                choose_stream(call, read, unread, is_session_stream_read),
                expected,
                "{call:?} {read:?} {unread:?} {is_session_stream_read}"
            );
        }
    }

    #[test]
    fn an_event_id_is_two_numbers() {
        assert_eq!(parse_id("5-12"), Some((5, 12)));
        for id in ["", "5", "5-", "-1", "a-b", "1-2-3", "1--2", "99999999999999999999-1"] {
            assert_eq!(parse_id(id), None, "{id}");
        }
    }
}
