//! Decoder for server-sent events (HTML standard) with a size limit.
//!
//! The limit is the reason for an own decoder: an endless line must not grow in memory, and a stream that is idle for
//! days must hold none. `sse-stream`, which rmcp uses, has neither property.

use std::time::Duration;

use bytes::Bytes;
use memchr::memchr2;

/// A complete event.
#[derive(Debug, PartialEq, Eq)]
pub struct SseEvent {
    /// Event type; absent means `message`.
    pub kind: Option<String>,
    /// Data lines, joined by newlines.
    pub data: Bytes,
}

/// Error: a line or an event exceeds the size limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SseTooLong;

/// Decoder of one stream. It is fed with chunks of any size and yields complete events.
#[derive(Debug)]
pub struct SseDecoder {
    limit: usize,
    chunk: Bytes,
    line: Vec<u8>,
    data: Option<Vec<u8>>,
    kind: Option<String>,
    next_id: Option<Vec<u8>>,
    last_id: Option<Vec<u8>>,
    retry: Option<Duration>,
    // True if the last line ended with CR: an LF now belongs to the same line end.
    after_cr: bool,
    // True before the first line, where a byte order mark may occur.
    at_start: bool,
}

impl SseDecoder {
    /// Creates a decoder for lines and events of at most `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            chunk: Bytes::new(),
            line: Vec::new(),
            data: None,
            kind: None,
            next_id: None,
            last_id: None,
            retry: None,
            after_cr: false,
            at_start: true,
        }
    }

    /// Adds the next chunk of the stream. All events of the previous one must have been read.
    pub fn push(&mut self, chunk: Bytes) {
        debug_assert!(self.chunk.is_empty(), "read with `next_event` until there is no more");
        self.chunk = chunk;
    }

    /// Returns the next complete event; `None` if the decoder needs another chunk.
    ///
    /// # Errors
    ///
    /// Returns an error if a line or an event exceeds the limit.
    pub fn next_event(&mut self) -> Result<Option<SseEvent>, SseTooLong> {
        while !self.chunk.is_empty() {
            if std::mem::take(&mut self.after_cr) && self.chunk[0] == b'\n' {
                drop(self.chunk.split_to(1));
                continue;
            }
            let Some(end) = memchr2(b'\n', b'\r', &self.chunk) else {
                let rest = std::mem::take(&mut self.chunk);
                if self.line.len() + rest.len() > self.limit {
                    return Err(SseTooLong);
                }
                self.line.extend_from_slice(&rest);
                break;
            };
            let part = self.chunk.split_to(end);
            self.after_cr = self.chunk.split_to(1)[0] == b'\r';
            if self.line.len() + part.len() > self.limit {
                return Err(SseTooLong);
            }
            let event = if self.line.is_empty() {
                self.process_line(&part)?
            } else {
                let mut line = std::mem::take(&mut self.line);
                line.extend_from_slice(&part);
                self.process_line(&line)?
            };
            if event.is_some() {
                return Ok(event);
            }
        }
        // An empty remainder would keep the buffer of the whole chunk.
        self.chunk = Bytes::new();
        Ok(None)
    }

    /// Returns the id of the last event that had one.
    pub fn last_id(&self) -> Option<&[u8]> {
        self.last_id.as_deref().filter(|id| !id.is_empty())
    }

    /// Returns the size in bytes of the unfinished line and event.
    pub fn buffered(&self) -> usize {
        self.line.len() + self.data.as_ref().map_or(0, Vec::len)
    }

    /// Returns the pause before a reconnection that the server has requested.
    pub fn retry(&self) -> Option<Duration> {
        self.retry
    }

    fn process_line(&mut self, line: &[u8]) -> Result<Option<SseEvent>, SseTooLong> {
        let line = match line.strip_prefix(b"\xEF\xBB\xBF") {
            Some(rest) if self.at_start => rest,
            _ => line,
        };
        self.at_start = false;
        if line.is_empty() {
            return Ok(self.finish());
        }
        let colon = memchr::memchr(b':', line);
        let (field, value) = colon.map_or((line, &b""[..]), |at| (&line[..at], &line[at + 1..]));
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match field {
            b"data" => {
                let before = self.data.as_ref().map_or(0, |data| data.len() + 1);
                if before + value.len() > self.limit {
                    return Err(SseTooLong);
                }
                match &mut self.data {
                    Some(data) => {
                        data.push(b'\n');
                        data.extend_from_slice(value);
                    }
                    None => self.data = Some(value.to_vec()),
                }
            }
            b"event" => self.kind = Some(String::from_utf8_lossy(value).into_owned()),
            b"id" if !value.contains(&0) => self.next_id = Some(value.to_vec()),
            b"retry" if !value.is_empty() && value.iter().all(u8::is_ascii_digit) => {
                let milliseconds = std::str::from_utf8(value).ok().and_then(|digits| digits.parse().ok());
                self.retry = milliseconds.map(Duration::from_millis).or(self.retry);
            }
            // Comments, which keep a connection alive, and unknown fields.
            _ => {}
        }
        Ok(None)
    }

    /// Ends an event at an empty line. Returns `None` if it has no data; it may still have set the id.
    fn finish(&mut self) -> Option<SseEvent> {
        if let Some(id) = self.next_id.take() {
            self.last_id = Some(id);
        }
        let kind = self.kind.take().filter(|kind| !kind.is_empty());
        let data = Bytes::from(self.data.take().filter(|data| !data.is_empty())?);
        Some(SseEvent { kind, data })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(text: &[u8], size: usize, limit: usize) -> Result<(Vec<(String, String)>, SseDecoder), SseTooLong> {
        let mut events = SseDecoder::new(limit);
        let mut decoded = Vec::new();
        for chunk in text.chunks(size) {
            events.push(Bytes::copy_from_slice(chunk));
            while let Some(SseEvent { kind, data }) = events.next_event()? {
                decoded.push((kind.unwrap_or_default(), String::from_utf8_lossy(&data).into_owned()));
            }
        }
        Ok((decoded, events))
    }

    fn pair(kind: &str, data: &str) -> (String, String) {
        (kind.to_owned(), data.to_owned())
    }

    #[test]
    fn every_form_of_a_stream_is_decoded_alike_with_any_chunk_size() {
        let text = "\u{feff}event: message\ndata: {\"a\":\ndata:1}\n\n: ping\r\n\r\nid: 7\rdata:  two\r\rdata\n\nretry: 250\n\
                    event:x\nnonsense\nfoo: bar\ndata: z\r\n\r\ndata: unfinished\n";
        for ends in ["\n", "\r", "\r\n"] {
            let text = text.replace("\r\n", "\n").replace('\r', "\n").replace('\n', ends);
            for size in 1..=text.len() {
                let (decoded, events) = decode(text.as_bytes(), size, 1000).expect("the text is within the limit");
                assert_eq!(
                    decoded,
                    [pair("message", "{\"a\":\n1}"), pair("", " two"), pair("x", "z")],
                    "{size} {ends:?}"
                );
                assert_eq!(events.last_id(), Some(&b"7"[..]));
                assert_eq!(events.retry(), Some(Duration::from_millis(250)));
            }
        }
    }

    #[test]
    fn mixed_line_ends_are_decoded() {
        let (decoded, _) =
            decode(b"data: a\r\n\rdata: b\n\r\ndata: c\r\r", 3, 100).expect("the text is within the limit");
        assert_eq!(decoded, [pair("", "a"), pair("", "b"), pair("", "c")]);
    }

    #[test]
    fn an_id_counts_after_its_complete_event_and_an_empty_id_clears_it() {
        let (decoded, events) =
            decode(b"id: 1\ndata\n\nid: 2\ndata: cut", 5, 100).expect("the text is within the limit");
        assert!(decoded.is_empty(), "an event without data was returned");
        assert_eq!(events.last_id(), Some(&b"1"[..]));
        let (_, events) = decode(b"id: 1\n\nid\n\n", 5, 100).expect("the text is within the limit");
        assert_eq!(events.last_id(), None);
        let (_, events) = decode(b"id: a\0b\n\nretry: soon\n\n", 5, 100).expect("the text is within the limit");
        assert_eq!((events.last_id(), events.retry()), (None, None));
    }

    #[test]
    fn a_line_or_an_event_over_the_limit_is_an_error() {
        let endless = [b'x'; 101];
        assert_eq!(decode(&endless, 10, 100).err(), Some(SseTooLong));
        assert_eq!(decode(&endless, 200, 100).err(), Some(SseTooLong));
        assert_eq!(decode(&[&endless[..], b"\n\n"].concat(), 200, 100).err(), Some(SseTooLong));
        let lines = "data: 0123456789\n".repeat(10);
        assert_eq!(decode(lines.as_bytes(), 7, 100).err(), Some(SseTooLong));
        assert!(decode(lines.as_bytes(), 7, 109).is_ok());
    }

    #[test]
    fn an_idle_stream_holds_no_memory() {
        let text = [b"data: ", "y".repeat(5000).as_bytes(), b"\n\n"].concat();
        let (decoded, events) = decode(&text, 999, 10_000).expect("the text is within the limit");
        assert_eq!(decoded.len(), 1);
        assert_eq!((events.line.capacity(), events.chunk.len(), events.data.is_some()), (0, 0, false));
    }
}
