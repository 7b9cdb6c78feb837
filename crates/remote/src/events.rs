//! Reader of a server's event stream, whose buffers count in the memory budget.

use std::sync::Arc;

use bytes::Bytes;
use mcp_satellite_actors::byte_budget::{ByteBudget, ByteShare};
use mcp_satellite_protocol::sse::{SseDecoder, SseEvent, SseTooLong};

/// Minimum size in bytes of an event that counts in the memory budget; shorter ones are few at a time.
pub(super) const COUNTED_FROM: usize = 64 * 1024;

#[derive(Debug, PartialEq, Eq)]
pub(super) enum SseError {
    TooLong,
    NoMemory,
}

pub(super) struct SseReader {
    pub(super) decoder: SseDecoder,
    memory: Arc<ByteBudget>,
    share: ByteShare,
}

impl SseReader {
    /// Creates a reader for lines and events of at most `limit` bytes.
    pub(super) fn new(limit: usize, memory: &Arc<ByteBudget>) -> Self {
        Self { decoder: SseDecoder::new(limit), memory: Arc::clone(memory), share: memory.share() }
    }

    pub(super) fn next(&mut self) -> Result<Option<SseEvent>, SseError> {
        let event = self.decoder.next_event().map_err(|SseTooLong| SseError::TooLong)?;
        let bytes = event.as_ref().map_or_else(|| self.decoder.buffered(), |event| event.data.len());
        let counted = bytes.saturating_sub(COUNTED_FROM);
        if counted > self.share.bytes() && !self.share.try_take(counted - self.share.bytes()) {
            return Err(SseError::NoMemory);
        }
        let Some(SseEvent { kind, data }) = event else {
            self.share.release(self.share.bytes() - counted);
            return Ok(None);
        };
        let data = if self.share.bytes() == 0 {
            data
        } else {
            std::mem::replace(&mut self.share, self.memory.share()).attach_to(data)
        };
        Ok(Some(SseEvent { kind, data }))
    }

    pub(super) fn push(&mut self, chunk: Bytes) {
        self.decoder.push(chunk);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_over_the_memory_budget_is_an_error() {
        let budget = ByteBudget::new(100_000);
        let event = [b"data: ", &vec![b'z'; 150_000][..], b"\n\n"].concat();
        let read = |chunk: usize| {
            let mut events = SseReader::new(1_000_000, &budget);
            for chunk in event.chunks(chunk) {
                events.push(Bytes::copy_from_slice(chunk));
                if let Some(event) = events.next()? {
                    return Ok(event);
                }
            }
            Err(SseError::TooLong)
        };
        for chunk in [1000, 1_000_000] {
            let event = read(chunk).expect("the budget has room for one event");
            assert_eq!(event.data.len(), 150_000);
            assert!((84_000..=100_000).contains(&budget.used()), "{}", budget.used());
            assert_eq!(read(chunk), Err(SseError::NoMemory), "the budget has room for two events");
            drop(event);
            assert_eq!(budget.used(), 0);
        }
    }
}
