//! Lines of a byte stream, read without parsing them.

use std::future::poll_fn;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use mcp_satellite_protocol::rpc::{MessageView, utf8_text};
use tokio::io::{AsyncRead, AsyncReadExt, ReadBuf};
use tokio::time::Instant;

use crate::byte_budget::{ByteBudget, ByteShare};

// Size of a read into an empty buffer. The chunk is on the stack, and only during the read.
const CHUNK: usize = 4096;
// Initial buffer of a line that arrives in parts; it grows by doubling.
const READ_CAPACITY: usize = 4096;
// Shorter lines do not count against the budget: there are few of them at a time.
const COUNTED_FROM: usize = 64 * 1024;

/// Lines of a byte stream, with a limit of `line_max` bytes per line. `scanned` is the number of buffered bytes without
/// a newline, and `dropped` the size so far of a line that is dropped because memory is short. `first_may_be_partial` is
/// true until the first line of a stream that another reader has begun. `last_read` is the time of the last read, or of
/// the creation before any.
pub(crate) struct LineReader<R> {
    reader: R,
    buffer: BytesMut,
    scanned: usize,
    pub(crate) line_max: usize,
    memory: Arc<ByteBudget>,
    share: ByteShare,
    dropped: usize,
    started: bool,
    first_may_be_partial: bool,
    pub(crate) last_read: Instant,
}

/// Result of a read. `FirstByte` is returned once. `Line` does not contain the newline. `Dropped` contains the size of
/// a line that did not fit into the memory budget.
#[derive(Debug)]
pub(crate) enum ReadOutcome {
    FirstByte,
    Line(Bytes),
    End,
    Dropped(usize),
    TooLong,
    Failed(std::io::Error),
}

impl<R: AsyncRead + Unpin> LineReader<R> {
    pub(crate) fn new(reader: R, line_max: usize, memory: Arc<ByteBudget>) -> Self {
        let (share, last_read) = (memory.share(), Instant::now());
        let buffer = BytesMut::new();
        let (started, first_may_be_partial) = (false, false);
        Self {
            reader,
            buffer,
            scanned: 0,
            line_max,
            memory,
            share,
            dropped: 0,
            started,
            first_may_be_partial,
            last_read,
        }
    }

    /// Creates a reader for a stream of messages from which an earlier satellite may have read the beginning of a line.
    /// The rest of a message is never a message: the first line is returned only if it is one.
    pub(crate) fn resumed(reader: R, line_max: usize, memory: Arc<ByteBudget>) -> Self {
        Self { first_may_be_partial: true, ..Self::new(reader, line_max, memory) }
    }

    fn try_reserve_memory(&mut self) -> bool {
        let uncounted = self.buffer.capacity().saturating_sub(COUNTED_FROM + self.share.bytes());
        uncounted == 0 || self.share.try_take(uncounted)
    }

    /// Returns the next line if it is buffered, without a read.
    pub(crate) fn next_buffered(&mut self) -> Option<ReadOutcome> {
        let at = memchr::memchr(b'\n', &self.buffer[self.scanned..])?;
        let end = self.scanned + at;
        if self.dropped + end > self.line_max {
            return Some(ReadOutcome::TooLong);
        }
        let line = self.buffer.split_to(end).freeze();
        self.buffer.advance(1);
        self.scanned = 0;
        let may_be_partial = std::mem::take(&mut self.first_may_be_partial);
        if self.dropped > 0 {
            return Some(ReadOutcome::Dropped(std::mem::take(&mut self.dropped) + end));
        }
        if may_be_partial && !is_message(&line) {
            self.share.release(self.share.bytes());
            return self.next_buffered();
        }
        if self.share.bytes() == 0 {
            return Some(ReadOutcome::Line(line));
        }
        let share = std::mem::replace(&mut self.share, self.memory.share());
        Some(ReadOutcome::Line(share.attach_to(line)))
    }

    /// Returns the next line. Cancel-safe: a partial line stays in the buffer.
    pub(crate) async fn next(&mut self) -> ReadOutcome {
        loop {
            if let Some(line) = self.next_buffered() {
                return line;
            }
            self.scanned = self.buffer.len();
            if self.dropped + self.scanned > self.line_max {
                return ReadOutcome::TooLong;
            }
            if self.dropped > 0 || !self.try_reserve_memory() {
                self.dropped += self.scanned;
                self.share.release(self.share.bytes());
                (self.buffer, self.scanned) = (BytesMut::new(), 0);
            }
            let read = if self.buffer.is_empty() {
                // An idle instance must not keep the memory of its largest message, nor reserve any for the next.
                self.buffer = BytesMut::new();
                poll_fn(|cx| poll_chunk(&mut self.reader, &mut self.buffer, cx)).await
            } else {
                if self.buffer.capacity() == self.buffer.len() {
                    self.buffer.reserve(READ_CAPACITY.max(self.buffer.len()));
                    // Counts the memory before filling it.
                    continue;
                }
                self.reader.read_buf(&mut self.buffer).await
            };
            match read {
                Ok(0) => return ReadOutcome::End,
                Ok(_) => {
                    self.last_read = Instant::now();
                    if !std::mem::replace(&mut self.started, true) {
                        return ReadOutcome::FirstByte;
                    }
                }
                Err(error) => return ReadOutcome::Failed(error),
            }
        }
    }
}

fn is_message(line: &Bytes) -> bool {
    utf8_text(line.clone()).is_ok_and(|text| MessageView::parse(&text).is_ok())
}

fn poll_chunk(
    reader: &mut (impl AsyncRead + Unpin),
    buffer: &mut BytesMut,
    cx: &mut Context<'_>,
) -> Poll<std::io::Result<usize>> {
    let mut chunk = [const { MaybeUninit::uninit() }; CHUNK];
    let mut chunk = ReadBuf::uninit(&mut chunk);
    ready!(Pin::new(reader).poll_read(cx, &mut chunk))?;
    buffer.extend_from_slice(chunk.filled());
    Poll::Ready(Ok(chunk.filled().len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lines_are_assembled_across_reads_and_too_long_ones_are_reported() {
        let text: &[u8] = b"one\n\ntwo-is-long\nrest";
        let mut lines = LineReader::new(tokio::io::BufReader::with_capacity(3, text), 11, ByteBudget::unlimited());
        let mut seen = Vec::new();
        loop {
            match lines.next().await {
                ReadOutcome::FirstByte => assert!(seen.is_empty()),
                ReadOutcome::Line(line) => seen.push(String::from_utf8_lossy(&line).into_owned()),
                ReadOutcome::End => break,
                ReadOutcome::Dropped(_) | ReadOutcome::TooLong | ReadOutcome::Failed(_) => {
                    panic!("a line was not read")
                }
            }
        }
        assert_eq!(seen, ["one", "", "two-is-long"]);
        let mut long = LineReader::new(b"twelve bytes\n".as_slice(), 11, ByteBudget::unlimited());
        assert!(matches!(long.next().await, ReadOutcome::FirstByte));
        assert!(matches!(long.next().await, ReadOutcome::TooLong));
    }

    #[tokio::test]
    async fn a_line_without_free_memory_is_dropped_and_the_next_is_read() {
        let budget = ByteBudget::new(300_000);
        let text = [&vec![b'a'; 400_000][..], b"\nshort\n", &vec![b'b'; 200_000], b"\n"].concat();
        let mut lines =
            LineReader::new(tokio::io::BufReader::with_capacity(1000, &text[..]), 1_000_000, budget.clone());
        assert!(matches!(lines.next().await, ReadOutcome::FirstByte));
        assert!(matches!(lines.next().await, ReadOutcome::Dropped(400_000)));
        assert_eq!(budget.used(), 0);
        assert!(matches!(lines.next().await, ReadOutcome::Line(line) if line == "short"));
        let ReadOutcome::Line(line) = lines.next().await else { panic!("the line was not read") };
        assert_eq!(line.len(), 200_000);
        assert!((136_000..300_000).contains(&budget.used()), "{}", budget.used());
        drop(line);
        assert_eq!(budget.used(), 0);
        // A line over the limit is too long, with or without memory for it.
        let mut long = LineReader::new(&text[..], 350_000, ByteBudget::new(1000));
        assert!(matches!(long.next().await, ReadOutcome::FirstByte));
        assert!(matches!(long.next().await, ReadOutcome::TooLong));
    }

    #[tokio::test]
    async fn the_first_line_of_a_resumed_stream_is_returned_only_if_it_is_a_message() {
        const MESSAGE: &str =
            r#"{"jsonrpc":"2.0","id":7,"result":{"text":"{\"jsonrpc\":\"2.0\",\"id\":7,\"result\":{}}"}}"#;
        let read = async |text: &str| {
            let mut lines = LineReader::resumed(text.as_bytes(), 1000, ByteBudget::unlimited());
            assert!(matches!(lines.next().await, ReadOutcome::FirstByte));
            let mut seen = Vec::new();
            while let ReadOutcome::Line(line) = lines.next().await {
                seen.push(String::from_utf8_lossy(&line).into_owned());
            }
            seen
        };
        assert_eq!(read(&format!("{MESSAGE}\nsecond\n")).await, [MESSAGE, "second"]);
        // The earlier satellite has read any number of its bytes.
        for begin in 1..=MESSAGE.len() {
            let rest = &MESSAGE[begin..];
            assert_eq!(read(&format!("{rest}\nsecond\n\n")).await, ["second", ""], "{rest}");
        }
        assert!(read("a log line\n").await.is_empty());
    }
}
