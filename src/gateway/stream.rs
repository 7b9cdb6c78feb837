//! One event stream towards a client: what was said on it, how much of that its listener has, and what one that comes
//! back can still have. Pure: no clock and no socket.
//!
//! Events are numbered from 1; an event's id is `{stream}-{number}`. A stream has one listener, the newest. A call's first
//! listener is on its way from the beginning, so nothing is dropped before it is there. All streams of all clients share
//! one budget: half of it may be kept for who might come back, the rest is for listeners that are behind.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::ops::Range;
use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use mcp_satellite_actors::byte_budget::{ByteBudget, ByteShare};

/// How much is kept.
#[derive(Debug, Clone, Copy)]
pub struct Room {
    /// Events.
    pub events: usize,
    /// Their bytes.
    pub bytes: usize,
}

/// Kept for a listener to come, or for one that comes back.
pub const KEPT: Room = Room { events: 256, bytes: 1024 * 1024 };
/// How many bytes behind a listener may be. There is no limit on events: a server says thousands of small ones in one go,
/// before a listener that does read has had its turn.
pub const BEHIND: usize = 4 * 1024 * 1024;
/// What an event costs beside its bytes: its place in the queue, and what the allocator needs.
const OVERHEAD: usize = 100;
/// What a listener, and a call, has whatever others use.
pub const ASSURED: usize = 64 * 1024;
/// The stream that is no call's. Calls count from 1.
pub const UNASKED: u64 = 0;
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
    share: ByteShare,
    /// Of what the listener does not have.
    bytes_unread: usize,
    listener: Option<Listener>,
    /// Whether the first listener is still to come: a call's does.
    awaited: bool,
    listeners: u64,
    /// Whether events have ids, so that a listener can come back.
    named: bool,
    /// Whether the listener was given anything that it could come back with.
    resumable: bool,
    over: bool,
    lost: u64,
    /// The numbers of those that were dropped since somebody asked.
    dropped: Range<u64>,
}

impl Stream {
    /// An empty one, which uses `budget` with others.
    pub fn new(number: u64, budget: &Arc<ByteBudget>) -> Self {
        Self {
            number,
            kept: VecDeque::new(),
            first: 1,
            unread: 1,
            share: budget.share(),
            bytes_unread: 0,
            listener: None,
            awaited: number != UNASKED,
            listeners: 0,
            named: true,
            resumable: false,
            over: false,
            lost: 0,
            dropped: 0..0,
        }
    }

    /// The same, of a client that has no session to come back to.
    pub fn nameless(number: u64, budget: &Arc<ByteBudget>) -> Self {
        Self { named: false, ..Self::new(number, budget) }
    }

    /// Says a message, given in parts.
    pub fn say(&mut self, parts: &[&str]) -> Result<(), Slow> {
        if self.over {
            return Ok(());
        }
        if self.is_read() && self.is_far_behind() {
            return Err(Slow);
        }
        let id = self.named.then(|| (self.number, self.next()));
        let event = event(id, parts);
        self.share.take(weight(&event));
        self.bytes_unread += weight(&event);
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

    /// Whether somebody listens, or is about to.
    pub fn is_read(&self) -> bool {
        self.listener.is_some() || self.awaited
    }

    /// Whether a listener that is gone has an id with which it could come back.
    pub fn is_resumable(&self) -> bool {
        self.resumable
    }

    /// How many events were dropped because nobody listened.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// The numbers of the events that were dropped since this was last asked. It is to be asked whenever some may have been.
    pub fn take_dropped(&mut self) -> Range<u64> {
        std::mem::take(&mut self.dropped)
    }

    /// A listener comes: the one that was there is replaced. `after` is the last event that it has, if it comes back.
    pub fn attach(&mut self, after: Option<u64>) -> Listener {
        if let Some(after) = after {
            self.unread = after.saturating_add(1).clamp(self.first, self.next());
            self.bytes_unread = self.kept.range(self.at(self.unread)..).map(weight).sum();
        }
        self.awaited = false;
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
        self.bytes_unread -= weight(&event);
        self.resumable = self.named;
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

    /// Forgets what was read and, if nobody listens, what was not.
    pub fn forget(&mut self) {
        while self.is_spare() && self.pop() {}
    }

    fn is_far_behind(&self) -> bool {
        let full = self.share.of().is_overdrawn();
        self.bytes_unread >= if full { ASSURED } else { BEHIND }
    }

    /// The number of the next event.
    pub fn next(&self) -> u64 {
        self.first + self.kept.len() as u64
    }

    fn at(&self, number: u64) -> usize {
        usize::try_from(number - self.first).unwrap_or(usize::MAX)
    }

    /// Forgets the oldest while there is too much: what a listener has not got only if there is no listener, and the newest
    /// only if all together have too much and no call waits for it.
    fn trim(&mut self) {
        let (of_calls, assured) = (self.number != UNASKED, if self.number == UNASKED { 0 } else { ASSURED });
        loop {
            let crowded = is_crowded(self.share.of()) && self.share.bytes() > assured;
            let too_much = crowded || self.kept.len() > KEPT.events || self.share.bytes() > KEPT.bytes;
            let newest = self.kept.len() <= 1 && (of_calls || !crowded);
            if !too_much || newest || !self.is_spare() || !self.pop() {
                return;
            }
        }
    }

    /// Whether the oldest may go: it was read, or nobody reads.
    fn is_spare(&self) -> bool {
        self.first < self.unread || !self.is_read()
    }

    fn pop(&mut self) -> bool {
        let Some(oldest) = self.kept.pop_front() else { return false };
        self.share.give(weight(&oldest));
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

/// Whether more is kept of all streams than may be kept for who might come back.
pub fn is_crowded(budget: &ByteBudget) -> bool {
    budget.used() > budget.max() / 2 || budget.is_overdrawn()
}

/// What an event takes of what there is room for.
fn weight(event: &Bytes) -> usize {
    event.len() + OVERHEAD
}

/// An event as it is written. A line break in a message is white space of JSON, and would end the line of the event.
fn event(id: Option<(u64, u64)>, parts: &[&str]) -> Bytes {
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
/// open ear, and without one any call that can stream. `read` are the calls that can and whose streams somebody reads, the
/// oldest first; `unread` those that nobody reads now: they are chosen only if nobody would hear it anywhere.
pub fn way(call: Option<u64>, read: &[u64], unread: &[u64], unasked_is_heard: bool) -> Way {
    let streaming = if read.is_empty() && !unasked_is_heard { unread } else { read };
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

    fn stream(number: u64) -> Stream {
        Stream::new(number, &ByteBudget::new(usize::MAX))
    }

    fn texts(stream: &mut Stream, listener: Listener) -> Vec<String> {
        let mut texts = Vec::new();
        while let Next::Event(event) = stream.take(listener) {
            texts.push(String::from_utf8_lossy(&event).into_owned());
        }
        texts
    }

    #[test]
    fn an_event_is_one_message_with_an_id_and_no_line_break_ends_it() {
        let mut stream = stream(5);
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
        let mut stream = stream(0);
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
        let mut stream = stream(0);
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
        let mut stream = stream(0);
        let listener = stream.attach(None);
        let mut said = 0;
        while stream.say(&["x"]) == Ok(()) {
            said += 1;
        }
        assert!((20_000..BEHIND / OVERHEAD).contains(&said), "many small ones, and not as many as one likes: {said}");
        assert_eq!(stream.say(&["x"]), Err(Slow));
        assert_eq!(texts(&mut stream, listener).len(), said);
        assert_eq!(stream.lost(), 0);
        assert_eq!(stream.say(&[&"x".repeat(2 * BEHIND)]), Ok(()));
        assert_eq!(stream.say(&["x"]), Err(Slow));
    }

    #[test]
    fn a_call_is_heard_from_its_beginning_until_its_listener_goes() {
        let mut call = stream(1);
        for _ in 0..3 * KEPT.events {
            assert_eq!(call.say(&["x"]), Ok(()));
        }
        assert_eq!((call.lost(), call.is_read()), (0, true));
        assert!((0..BEHIND).any(|_| call.say(&["x"]) == Err(Slow)), "it is not waited for without an end");
        let listener = call.attach(None);
        assert!(texts(&mut call, listener).len() > 3 * KEPT.events);
        assert!(call.detach(listener) && !call.is_read());
        for _ in 0..3 * KEPT.events {
            assert_eq!(call.say(&["x"]), Ok(()));
        }
        assert_eq!(call.lost(), 2 * KEPT.events as u64);
    }

    #[test]
    fn what_is_dropped_is_told_once() {
        let mut stream = stream(0);
        let listener = stream.attach(None);
        assert_eq!(stream.say(&["read"]), Ok(()));
        assert_eq!(texts(&mut stream, listener).len(), 1);
        stream.detach(listener);
        for _ in 0..=KEPT.events {
            assert_eq!(stream.say(&["x"]), Ok(()));
        }
        assert_eq!((stream.take_dropped(), stream.take_dropped()), (2..3, 0..0));
        stream.forget();
        assert_eq!(stream.take_dropped(), 3..KEPT.events as u64 + 3);
    }

    #[test]
    fn all_streams_together_keep_so_much_and_who_speaks_then_keeps_nothing() {
        let budget = ByteBudget::new(8 * ASSURED);
        let large = "x".repeat(ASSURED);
        let mut hoards = Stream::new(0, &budget);
        for _ in 0..8 {
            assert_eq!(hoards.say(&[&large]), Ok(()));
        }
        assert!((3..=4).contains(&hoards.kept.len()), "half of it: {}", hoards.kept.len());
        assert_eq!(hoards.lost(), 8 - hoards.kept.len() as u64);
        let (mut late, mut call) = (Stream::new(0, &budget), Stream::new(1, &budget));
        assert_eq!((late.say(&[&large]), late.say(&["x"])), (Ok(()), Ok(())));
        // A little may still fit; what does not is lost, even if it is the newest.
        assert!(late.share.bytes() < ASSURED && late.lost() > 0);
        // What a call was answered waits for whoever comes back to it.
        assert_eq!(call.say(&[&large]), Ok(()));
        assert_eq!((call.kept.len(), call.lost()), (1, 0));
        hoards.forget();
        assert_eq!((hoards.kept.len(), hoards.share.bytes()), (0, 0));
        assert_eq!((late.say(&[&large]), !late.kept.is_empty()), (Ok(()), true));
        drop((hoards, late, call));
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn when_all_have_too_much_who_is_behind_is_slow_and_who_is_not_hears_on() {
        let budget = ByteBudget::new(2 * ASSURED);
        let mut behind = Stream::new(0, &budget);
        let listener = behind.attach(None);
        while budget.used() <= budget.max() {
            assert_eq!(behind.say(&[&"x".repeat(1000)]), Ok(()));
        }
        assert_eq!(behind.say(&["x"]), Err(Slow));
        let mut reads = Stream::new(0, &budget);
        let reader = reads.attach(None);
        for _ in 0..1000 {
            assert_eq!(reads.say(&[&"x".repeat(1000)]), Ok(()));
            assert!(matches!(reads.take(reader), Next::Event(_)));
        }
        assert_eq!((reads.lost(), reads.kept.len()), (0, 0), "nothing is kept for it to come back to");
        assert_eq!(behind.lost(), 0);
        assert!(matches!(behind.take(listener), Next::Event(_)));
    }

    #[test]
    fn a_message_finds_its_way() {
        let none = &[][..];
        let table = [
            (Some(1), &[1, 2][..], none, true, Way::Call(1)),
            (Some(3), &[1, 2], none, true, Way::Unasked),
            (Some(3), &[1, 2], none, false, Way::Call(1)),
            (Some(3), none, none, false, Way::Unasked),
            (None, &[1], none, true, Way::Call(1)),
            (None, &[1, 2], none, true, Way::Unasked),
            (None, &[1, 2], none, false, Way::Call(1)),
            (None, none, none, true, Way::Unasked),
            (None, none, none, false, Way::Unasked),
            // What nobody reads is chosen only if nobody hears anything.
            (Some(1), none, &[1], true, Way::Unasked),
            (Some(1), &[2], &[1], true, Way::Unasked),
            (Some(1), &[2], &[1], false, Way::Call(2)),
            (None, &[2], &[1], true, Way::Call(2)),
            (None, none, &[1], true, Way::Unasked),
            (Some(2), none, &[1, 2], false, Way::Call(2)),
            (None, none, &[1, 2], false, Way::Call(1)),
        ];
        for (call, read, unread, heard, expected) in table {
            assert_eq!(way(call, read, unread, heard), expected, "{call:?} {read:?} {unread:?} {heard}");
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
