//! Server-sent events.

use std::io;
use std::pin::pin;
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use futures::{Stream, StreamExt as _};

pub const MEDIA_TYPE: &str = "text/event-stream";

const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// First bytes of the data of a frame with an event or an id.
const DATA: &[u8] = b"\ndata: ";

/// Returns the frame of an event. `data` is JSON text, which contains no line breaks.
pub fn frame(event: Option<&str>, id: Option<&str>, data: &[u8]) -> Bytes {
    let mut frame = BytesMut::with_capacity(data.len() + 96);
    for (field, value) in [("event", event), ("id", id)] {
        if let Some(value) = value {
            frame.put_slice(field.as_bytes());
            frame.put_slice(b": ");
            frame.put_slice(value.as_bytes());
            frame.put_slice(b"\n");
        }
    }
    frame.put_slice(b"data: ");
    frame.put_slice(data);
    frame.put_slice(b"\n\n");
    frame.freeze()
}

/// Returns the frame with another id, which depends on the present one. A frame without an id is returned unchanged.
pub fn with_id(frame: &Bytes, id: impl FnOnce(&str) -> String) -> Bytes {
    let head = frame.windows(DATA.len()).position(|bytes| bytes == DATA).and_then(|end| frame.get(..end));
    let head = head.and_then(|head| std::str::from_utf8(head).ok());
    let Some((event, present)) = head.and_then(|head| head.split_once("\nid: ")) else { return frame.clone() };
    let data = &frame[event.len() + "\nid: ".len() + present.len()..];
    [event.as_bytes(), b"\nid: ", id(present).as_bytes(), data].concat().into()
}

/// Adds a comment at the begin, which opens the stream in the browser, and one after each silence: proxies close silent
/// connections.
pub fn keep_alive(
    events: impl Stream<Item = io::Result<Bytes>> + Send + 'static,
) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    let opened = futures::stream::once(async { Ok(Bytes::from_static(b"retry: 1000\n\n")) });
    let events = Box::pin(events);
    opened.chain(futures::stream::unfold(events, |mut events| async move {
        let next = tokio::time::timeout(KEEP_ALIVE, pin!(events.next())).await;
        match next {
            Ok(Some(event)) => Some((event, events)),
            Ok(None) => None,
            Err(_) => Some((Ok(Bytes::from_static(b": keep-alive\n\n")), events)),
        }
    }))
}
