//! Streams of responses: instances and events in one stream, and the end of a stream whose client was logged out.
//!
//! The id of a frame in a stream of instances and events contains both positions, so that `Last-Event-ID` continues
//! both: `BOOT-REVISION-SEQ`, with the number of the last event before the frame.

use std::io;
use std::sync::Arc;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;
use futures::stream::{PollNext, select_with_strategy};
use futures::{Stream, StreamExt as _};

use crate::feed::{FeedPosition, OpenStream};
use crate::problem::Problem;
use crate::routes::{ApiServer, RequestContext};
use crate::sse;

/// Position from which a stream of instances continues.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PagePosition {
    /// `None` for a stream that begins with all rows.
    pub rows: Option<FeedPosition>,
    /// Number of the last event that the client has; `None` in a position without events.
    pub seq: Option<u64>,
}

impl PagePosition {
    /// Reads the position from the header `Last-Event-ID`, or else from the parameter `position`.
    ///
    /// # Errors
    /// The text is not the id of a frame.
    pub fn from_request(last_event_id: Option<&str>, parameter: Option<&str>) -> Result<Self, Problem> {
        let Some(id) = last_event_id.or(parameter).filter(|id| !id.is_empty()) else { return Ok(Self::default()) };
        Self::parse(id)
            .ok_or_else(|| Problem::new("bad_input", "the position is not the id of an event of this stream"))
    }

    fn parse(id: &str) -> Option<Self> {
        if let Some((rows, seq)) = id.rsplit_once('-')
            && let (Some(rows), Ok(seq)) = (FeedPosition::parse(rows), seq.parse())
        {
            return Some(Self { rows: Some(rows), seq: Some(seq) });
        }
        Some(Self { rows: Some(FeedPosition::parse(id)?), seq: None })
    }
}

/// Adds events, whose frames have their numbers as ids, to the frames of instances. `position` is the position of the
/// client.
pub fn with_events(
    rows: impl Stream<Item = io::Result<Bytes>> + Send + 'static,
    events: impl Stream<Item = io::Result<Bytes>> + Send + 'static,
    position: PagePosition,
) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    let mut rows_id = position.rows.map(|rows| rows.id()).unwrap_or_default();
    let mut seq = position.seq.unwrap_or(0).to_string();
    let rows = rows.map(|frame| (true, frame));
    let events = events.map(|frame| (false, frame));
    // The rows come first: an event before the first of them would have no position of rows.
    let frames = select_with_strategy(rows.boxed(), events.boxed(), |(): &mut ()| PollNext::Left);
    frames.map(move |(is_rows, frame)| {
        let with_both = |id: &str| {
            id.clone_into(if is_rows { &mut rows_id } else { &mut seq });
            format!("{rows_id}-{seq}")
        };
        frame.map(|frame| sse::with_id(&frame, with_both))
    })
}

/// Ends a stream when its client would not be admitted any more with the same permissions. `open` is its place among the
/// open streams.
pub fn while_admitted<S: ApiServer, T: 'static>(
    server: Arc<S>,
    context: RequestContext,
    open: Option<OpenStream>,
    frames: impl Stream<Item = T> + Send + 'static,
) -> impl Stream<Item = T> + Send + 'static {
    let RequestContext { principal, connection, headers, .. } = context;
    let revoked = async move {
        match connection {
            Some(connection) => server.access().wait_revoked(&principal, &headers, &connection).await,
            // A request over MCP has no stream of its own.
            None => std::future::pending().await,
        }
    };
    frames.take_until(Box::pin(revoked)).inspect(move |_| {
        // The stream keeps its place until it is dropped.
        let _ = &open;
    })
}

/// Applies [`while_admitted`] to a response if it is a stream.
pub fn response_while_admitted<S: ApiServer>(server: &Arc<S>, context: RequestContext, response: Response) -> Response {
    let is_stream = |kind: &HeaderValue| kind.as_bytes().starts_with(sse::MEDIA_TYPE.as_bytes());
    if !response.headers().get(header::CONTENT_TYPE).is_some_and(is_stream) {
        return response;
    }
    let server = Arc::clone(server);
    response.map(|body| Body::from_stream(while_admitted(server, context, None, body.into_data_stream())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(event: &str, id: &str) -> Bytes {
        sse::frame(Some(event), Some(id), b"{\"a\":\"\\nid: 1\"}")
    }

    #[tokio::test]
    async fn each_id_contains_the_positions_of_rows_and_events() {
        let rows = futures::stream::iter([frame("reset", "17-3"), frame("tick", "17-4")].map(Ok));
        let events = futures::stream::iter([frame("a", "8"), frame("b", "11")].map(Ok));
        let position = PagePosition { rows: None, seq: Some(7) };
        let frames: Vec<_> = with_events(rows, events, position).map(Result::unwrap).collect().await;
        let ids = frames.iter().map(|frame| {
            let text = std::str::from_utf8(frame).unwrap();
            assert!(text.ends_with("\ndata: {\"a\":\"\\nid: 1\"}\n\n"), "{text}");
            text.lines().find_map(|line| line.strip_prefix("id: ")).unwrap()
        });
        assert_eq!(ids.collect::<Vec<_>>(), ["17-3-7", "17-4-7", "17-4-8", "17-4-11"]);
    }

    #[test]
    fn positions_are_those_of_frames() {
        let rows = FeedPosition { boot: "17".into(), revision: 4 };
        let position = |seq| Some(PagePosition { rows: Some(rows.clone()), seq });
        assert_eq!(PagePosition::parse("17-4"), position(None));
        assert_eq!(PagePosition::parse("17-4-11"), position(Some(11)));
        for garbage in ["17", "17-", "17-x", "17-4-x", "x-y"] {
            assert_eq!(PagePosition::parse(garbage), None, "{garbage}");
        }
        assert_eq!(PagePosition::from_request(None, Some("")).unwrap(), PagePosition::default());
        assert_eq!(PagePosition::from_request(Some("x"), Some("17-4")).unwrap_err().status, 400);
    }
}
