//! Trace contexts in the form of W3C Trace Context (`traceparent`), as messages carry them in `_meta`.

use std::fmt;

/// Identity of a span: the value of `_meta.traceparent`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TraceParent {
    /// Id of the trace; not zero.
    pub trace_id: [u8; 16],
    /// Id of the span; not zero.
    pub span_id: [u8; 8],
    /// Flags, see [`TraceParent::is_sampled`].
    pub flags: u8,
}

/// Flag of a span that its creator has recorded.
pub const SAMPLED: u8 = 1;

/// Length of a `traceparent` of version 00, in bytes.
const LENGTH: usize = 55;

impl TraceParent {
    /// Parses a `traceparent`. A version after 00 may append further parts, which are ignored.
    ///
    /// Returns `None` if the text is not valid: a receiver then ignores it.
    pub fn parse(text: &str) -> Option<Self> {
        let (known, more) = text.split_at_checked(LENGTH)?;
        let [version, trace_id, span_id, flags] = *known.split('-').collect::<Vec<_>>() else { return None };
        let mut version_byte = [0];
        decode_hex(version, &mut version_byte)?;
        let may_have_more = match version_byte {
            [0] => more.is_empty(),
            [0xff] => false,
            [_] => more.is_empty() || more.starts_with('-'),
        };
        let mut parsed = Self { trace_id: [0; 16], span_id: [0; 8], flags: 0 };
        let mut flag_byte = [0];
        decode_hex(trace_id, &mut parsed.trace_id)?;
        decode_hex(span_id, &mut parsed.span_id)?;
        decode_hex(flags, &mut flag_byte)?;
        parsed.flags = flag_byte[0];
        (may_have_more && parsed.trace_id != [0; 16] && parsed.span_id != [0; 8]).then_some(parsed)
    }

    /// Returns true if the creator of the span has recorded it.
    pub fn is_sampled(&self) -> bool {
        self.flags & SAMPLED != 0
    }
}

impl fmt::Display for TraceParent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (trace, span) = (u128::from_be_bytes(self.trace_id), u64::from_be_bytes(self.span_id));
        write!(f, "00-{trace:032x}-{span:016x}-{:02x}", self.flags)
    }
}

// Capital letters are not valid.
fn decode_hex(text: &str, bytes: &mut [u8]) -> Option<()> {
    let digit = |letter: u8| match letter {
        b'0'..=b'9' => Some(letter - b'0'),
        b'a'..=b'f' => Some(letter - b'a' + 10),
        _ => None,
    };
    if text.len() != 2 * bytes.len() {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALID: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_traceparent_is_written_as_it_was_parsed() {
        let parsed = TraceParent::parse(VALID);
        assert_eq!(parsed.map(|parsed| parsed.to_string()).as_deref(), Some(VALID));
        assert!(parsed.is_some_and(|parsed| parsed.is_sampled()));
        let not_sampled = VALID.replace("-01", "-00");
        assert!(TraceParent::parse(&not_sampled).is_some_and(|parsed| !parsed.is_sampled()));
        let later = format!("{}-more", VALID.replacen("00", "cc", 1));
        assert_eq!(TraceParent::parse(&later).map(|later| later.trace_id), parsed.map(|parsed| parsed.trace_id));
    }

    #[test]
    fn an_invalid_traceparent_is_ignored() {
        for text in [
            "",
            "00",
            &VALID[..54],
            &format!("{VALID}0"),
            &format!("{VALID}-more"),
            &VALID.replacen("00", "ff", 1),
            &VALID.to_uppercase(),
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0é",
        ] {
            assert_eq!(TraceParent::parse(text), None, "{text}");
        }
    }
}
