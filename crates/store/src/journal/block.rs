//! Blocks: consecutive events in one row of the database, compressed. Events resemble each other, so a block takes about
//! a tenth of the space of its events.
//!
//! A block is LZ4 (`lz4_flex`, with the length in front) of the JSON of its events, each followed by a line feed. Their
//! numbers are consecutive.

/// Maximum size of the events in a block, in bytes before compression.
pub(super) const RAW_MAX: usize = 1 << 20;

/// Block under construction.
#[derive(Debug, Default)]
pub(super) struct BlockBuilder {
    /// First and last number; `None` if the block is empty.
    numbers: Option<(u64, u64)>,
    /// Time of the last event, in milliseconds since 1970.
    at: i64,
    raw: Vec<u8>,
}

/// Block to be stored.
#[derive(Debug, PartialEq)]
pub(super) struct Block {
    pub(super) first: u64,
    pub(super) last: u64,
    pub(super) at: i64,
    pub(super) bytes: Vec<u8>,
}

impl BlockBuilder {
    /// Adds an event. Returns false, and adds nothing, if the block is full or the number does not follow the last one.
    pub(super) fn push(&mut self, seq: u64, at: i64, json: &str) -> bool {
        let first = match self.numbers {
            Some((first, last)) if last + 1 == seq => first,
            None => seq,
            Some(_) => return false,
        };
        if self.raw.len() + json.len() >= RAW_MAX {
            return false;
        }
        self.numbers = Some((first, seq));
        self.at = at;
        self.raw.extend_from_slice(json.as_bytes());
        self.raw.push(b'\n');
        true
    }

    /// Returns the block and starts an empty one. Returns `None` if the block is empty.
    pub(super) fn take(&mut self) -> Option<Block> {
        let (first, last) = self.numbers.take()?;
        let bytes = lz4_flex::compress_prepend_size(&self.raw);
        self.raw.clear();
        Some(Block { first, last, at: self.at, bytes })
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
    let count = u64::try_from(text.bytes().filter(|byte| *byte == b'\n').count()).ok()?;
    (text.ends_with('\n') && last.checked_sub(first)?.checked_add(1)? == count).then_some(text)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_block_returns_its_events(first in 1u64..1 << 60, events in prop::collection::vec("[ -~]{0,300}", 1..200)) {
            let mut builder = BlockBuilder::default();
            for (seq, event) in (first..).zip(&events) {
                prop_assert!(builder.push(seq, 7, event));
            }
            let block = builder.take().unwrap();
            prop_assert_eq!(builder.take(), None);
            prop_assert_eq!((block.first, block.last, block.at), (first, first + events.len() as u64 - 1, 7));
            let text = decompress(block.first, block.last, &block.bytes).unwrap();
            prop_assert_eq!(text.lines().collect::<Vec<_>>(), events);
        }

        #[test]
        fn damage_is_reported_and_does_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            decompress(1, 3, &bytes);
        }
    }

    #[test]
    fn a_block_has_consecutive_numbers_and_a_maximum_size() {
        let mut builder = BlockBuilder::default();
        assert!(builder.push(1, 0, "{}"));
        assert!(!builder.push(3, 0, "{}"), "a gap");
        assert!(!builder.push(2, 0, &"x".repeat(RAW_MAX)), "too large");
        assert!(builder.push(2, 0, "{}"));
        let block = builder.take().unwrap();
        assert_eq!(decompress(1, 2, &block.bytes).unwrap(), "{}\n{}\n");
        assert_eq!(decompress(1, 3, &block.bytes), None, "another number of events");
    }

    #[test]
    fn a_block_with_a_damaged_length_is_rejected_without_allocating_it() {
        let mut builder = BlockBuilder::default();
        builder.push(1, 0, "{}");
        let mut block = builder.take().unwrap();
        block.bytes[3] = 0xff;
        assert_eq!(decompress(1, 1, &block.bytes), None);
    }

    #[test]
    fn similar_events_take_a_tenth_of_their_space() {
        let mut builder = BlockBuilder::default();
        let event = |seq| {
            format!(
                r#"{{"seq":{seq},"timestamp":"2026-05-28T20:27:21.{:03}Z","type":"mcp.tool.executed","data":{{"installation_id":"abc123","team_id":"acme","user_id":"alice","process_id":"filesystem-acme-alice-abc123","server_slug":"filesystem","tool_name":"echo","duration_ms":{},"success":true,"error_message":null}}}}"#,
                seq % 1000,
                seq % 7
            )
        };
        let raw: usize = (1..=1000).map(|seq| event(seq).len()).sum();
        for seq in 1..=1000 {
            assert!(builder.push(seq, 0, &event(seq)));
        }
        let size = builder.take().unwrap().bytes.len();
        assert!(size * 10 <= raw, "{size} of {raw}");
    }
}
