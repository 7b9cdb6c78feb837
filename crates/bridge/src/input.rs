//! Reads the lines of the client, each at most [`LINE_MAX`] long.

use std::io;

use bytes::{Bytes, BytesMut};
use memchr::memchr;
use tokio::io::{AsyncBufRead, AsyncBufReadExt as _};

/// Maximum size of a message of the client.
pub(crate) const LINE_MAX: usize = 64 << 20;

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum InputLine {
    Text(Bytes),
    /// The line was longer than the maximum and was skipped.
    TooLong,
}

/// Returns the next line without its end; `None` at the end of the input. A last line without an end counts. Must not
/// be dropped before it returns.
pub(crate) async fn read_line(input: &mut (impl AsyncBufRead + Unpin), max: usize) -> io::Result<Option<InputLine>> {
    let (mut line, mut is_too_long, mut is_empty) = (BytesMut::new(), false, true);
    loop {
        let available = input.fill_buf().await?;
        if available.is_empty() {
            break;
        }
        is_empty = false;
        let end = memchr(b'\n', available);
        let (part, used) = end.map_or((available, available.len()), |end| (&available[..end], end + 1));
        is_too_long |= line.len() + part.len() > max;
        if is_too_long {
            line = BytesMut::new();
        } else {
            line.extend_from_slice(part);
        }
        input.consume(used);
        if end.is_some() {
            break;
        }
    }
    Ok(match (is_empty, is_too_long) {
        (true, _) => None,
        (false, true) => Some(InputLine::TooLong),
        (false, false) => Some(InputLine::Text(line.freeze())),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lines_are_read_and_too_long_ones_are_skipped() {
        let text = b"{\"a\":1}\n\n0123456789A\r\n0123456789\nlast";
        for size in 1..text.len() {
            let mut input = tokio::io::BufReader::with_capacity(size, &text[..]);
            let mut lines = Vec::new();
            while let Some(line) = read_line(&mut input, 10).await.unwrap() {
                lines.push(line);
            }
            let line = |text: &'static str| InputLine::Text(Bytes::from_static(text.as_bytes()));
            assert_eq!(
                lines,
                [line("{\"a\":1}"), line(""), InputLine::TooLong, line("0123456789"), line("last")],
                "{size}"
            );
        }
    }
}
