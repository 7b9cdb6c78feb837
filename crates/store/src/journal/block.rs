//! Blocks: consecutive events in one row of the database, compressed. Events resemble each other, so a block takes about
//! a tenth of the space of its events.
//!
//! A block is LZ4 (`lz4_flex`, with the length in front) of the JSON of its events, each followed by a line feed. Their
//! numbers are consecutive.

use lz4_flex::block::{compress_into, get_maximum_output_size};
use mcp_satellite_actors::model::event::Envelope;

/// Maximum size of the events in a block, in bytes before compression. A damaged page loses a whole block, and LZ4 finds
/// no repetition beyond 64 KiB.
pub(super) const RAW_MAX: usize = 256 << 10;

/// Block under construction.
#[derive(Debug, Default)]
pub(super) struct BlockBuilder {
    /// First and last number; `None` if the block is empty.
    numbers: Option<(u64, u64)>,
    /// Time of the last event, in milliseconds since 1970.
    at: i64,
    raw: Vec<u8>,
    compressed: Vec<u8>,
}

/// Block to be stored.
#[derive(Debug, PartialEq)]
pub(super) struct EventBlock<'a> {
    pub(super) first: u64,
    pub(super) last: u64,
    pub(super) at: i64,
    pub(super) bytes: &'a [u8],
}

impl BlockBuilder {
    /// Adds an event. Returns false, and adds nothing, if the block is full or the number does not follow the last one.
    pub(super) fn push(&mut self, envelope: &Envelope) -> serde_json::Result<bool> {
        let first = match self.numbers {
            Some((first, last)) if last + 1 == envelope.seq => first,
            None => envelope.seq,
            Some(_) => return Ok(false),
        };
        let before = self.raw.len();
        let written = serde_json::to_writer(&mut self.raw, envelope);
        if written.is_err() || self.raw.len() >= RAW_MAX {
            self.raw.truncate(before);
            return written.map(|()| false);
        }
        self.raw.push(b'\n');
        self.numbers = Some((first, envelope.seq));
        self.at = envelope.timestamp.as_millisecond();
        Ok(true)
    }

    /// Returns the block. The next event begins another one. Returns `None` if the block is empty.
    pub(super) fn take(&mut self) -> Option<EventBlock<'_>> {
        let (first, last) = self.numbers.take()?;
        let length = u32::try_from(self.raw.len()).unwrap_or(u32::MAX).to_le_bytes();
        self.compressed.resize(length.len() + get_maximum_output_size(self.raw.len()), 0);
        let (head, body) = self.compressed.split_at_mut(length.len());
        head.copy_from_slice(&length);
        // The output has the maximum size, so it is never too small.
        let size = compress_into(&self.raw, body).unwrap_or_default();
        self.raw.clear();
        Some(EventBlock { first, last, at: self.at, bytes: &self.compressed[..length.len() + size] })
    }

    /// Discards the block.
    pub(super) fn clear(&mut self) {
        self.numbers = None;
        self.raw.clear();
    }
}

/// Returns the JSON of the events `first` to `last`, each followed by a line feed. Returns `None` if the block is damaged.
pub(super) fn decompress(first: u64, last: u64, bytes: &[u8]) -> Option<String> {
    // The length decides how much memory is allocated, so a damaged one is rejected first.
    let length = u32::from_le_bytes(bytes.first_chunk().copied()?);
    if usize::try_from(length).ok()? > RAW_MAX {
        return None;
    }
    let text = String::from_utf8(lz4_flex::decompress_size_prepended(bytes).ok()?).ok()?;
    let count = u64::try_from(text.split_terminator('\n').count()).ok()?;
    (text.ends_with('\n') && last.checked_sub(first)?.checked_add(1)? == count).then_some(text)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use jiff::Timestamp;
    use mcp_satellite_actors::model::event::{Event, EventSubject};
    use proptest::prelude::*;

    use super::*;

    fn event(seq: u64, tool: &str) -> Envelope {
        let of = Arc::new(EventSubject {
            installation_id: "abc123".into(),
            team_id: "acme".into(),
            user_id: "alice".into(),
            process_id: "filesystem-acme-alice-abc123".into(),
            server_slug: "filesystem".into(),
        });
        let (tool_name, duration_ms) = (tool.to_owned(), seq % 7);
        let event = Event::ToolExecuted { of, tool_name, duration_ms, success: true, error_message: None };
        let milliseconds = 1_780_000_000_000 + i64::try_from(seq % 1_000_000).unwrap();
        Envelope { seq, timestamp: Timestamp::from_millisecond(milliseconds).unwrap(), event }
    }

    fn push(builder: &mut BlockBuilder, envelope: &Envelope) -> bool {
        builder.push(envelope).unwrap()
    }

    proptest! {
        #[test]
        fn a_block_returns_its_events(first in 1u64..1 << 60, tools in prop::collection::vec(".{0,300}", 1..100)) {
            let events: Vec<_> = (first..).zip(&tools).map(|(seq, tool)| event(seq, tool)).collect();
            let mut builder = BlockBuilder::default();
            for envelope in &events {
                prop_assert!(push(&mut builder, envelope));
            }
            let block = builder.take().unwrap();
            let last = events.last().unwrap();
            prop_assert_eq!((block.first, block.last, block.at), (first, last.seq, last.timestamp.as_millisecond()));
            let text = decompress(block.first, block.last, block.bytes).unwrap();
            let read: Vec<Envelope> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            prop_assert_eq!(read, events);
            prop_assert_eq!(builder.take(), None);
        }

        #[test]
        fn damage_does_not_panic(flips in prop::collection::vec((any::<prop::sample::Index>(), 1u8..), 1..4), cut in any::<prop::sample::Index>()) {
            let mut builder = BlockBuilder::default();
            for seq in 1..=3 {
                prop_assert!(push(&mut builder, &event(seq, "echo")));
            }
            let mut bytes = builder.take().unwrap().bytes.to_vec();
            // The length stays, or almost no case would reach the decompression.
            for (at, flip) in flips {
                let at = 4 + at.index(bytes.len() - 4);
                bytes[at] ^= flip;
            }
            decompress(1, 3, &bytes);
            decompress(1, 3, &bytes[..cut.index(bytes.len())]);
        }
    }

    #[test]
    fn a_block_has_consecutive_numbers_and_a_maximum_size() {
        let mut builder = BlockBuilder::default();
        assert!(push(&mut builder, &event(1, "a")));
        assert!(!push(&mut builder, &event(3, "a")), "a gap");
        assert!(!push(&mut builder, &event(2, &"x".repeat(RAW_MAX))), "too large");
        assert!(push(&mut builder, &event(2, "a")));
        let bytes = builder.take().unwrap().bytes.to_vec();
        assert_eq!(decompress(1, 2, &bytes).unwrap().lines().count(), 2);
        assert_eq!(decompress(1, 3, &bytes), None, "another number of events");
    }

    #[test]
    fn a_block_with_a_damaged_length_is_rejected_without_allocating_it() {
        let mut builder = BlockBuilder::default();
        assert!(push(&mut builder, &event(1, "a")));
        let mut bytes = builder.take().unwrap().bytes.to_vec();
        bytes[3] = 0xff;
        assert_eq!(decompress(1, 1, &bytes), None);
    }

    #[test]
    fn similar_events_take_a_sixth_of_their_space() {
        let mut builder = BlockBuilder::default();
        let mut raw = 0;
        for seq in 1..=500 {
            let envelope = event(seq, "echo");
            raw += serde_json::to_string(&envelope).unwrap().len();
            assert!(push(&mut builder, &envelope));
        }
        let size = builder.take().unwrap().bytes.len();
        assert!(size * 6 <= raw, "{size} of {raw}");
    }
}
