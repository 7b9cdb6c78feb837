//! The stream of a session for messages of the satellite that belong to no request. It also detects that the satellite
//! has ended while no request is in flight.

use std::time::Duration;

use http::{HeaderValue, StatusCode};
use mcp_satellite_protocol::rpc::RpcMessage;
use mcp_satellite_protocol::sse::SseDecoder;
use tokio::time::{Instant, sleep};

use super::bridge::BridgeState;
use super::headers::LAST_EVENT_ID;
use super::http::SatelliteResponse;
use super::input::LINE_MAX;
use super::link::Link;
use super::output::BufferPermit;

const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// A stream that lasted this long is opened again without a longer pause.
const LONG: Duration = Duration::from_secs(10);

/// Passes the messages of the stream to the client until the session has ended.
pub(crate) async fn listen(bridge: &BridgeState, link: &Link) {
    tokio::select! {
        () = bridge.control.wait_replaced(link.generation) => {}
        why = read_stream(bridge, link) => {
            if let Some(why) = why {
                bridge.control.report_lost(link.generation, &why);
            }
        }
    }
}

/// Returns the reason why the session is lost; `None` if it has no stream.
async fn read_stream(bridge: &BridgeState, link: &Link) -> Option<String> {
    let mut last_id: Option<HeaderValue> = None;
    let mut pause = PAUSE_MIN;
    loop {
        let mut headers = link.headers();
        headers.extend(last_id.clone().map(|id| (LAST_EVENT_ID, id)));
        let started = Instant::now();
        match link.http.get(bridge.control.path(), headers).await {
            Ok(response) if response.status.is_success() && response.is_stream() => {
                last_id = forward_events(bridge, link, response).await.or(last_id);
            }
            Ok(response) => match response.status {
                StatusCode::UNAUTHORIZED | StatusCode::NOT_FOUND => {
                    return Some("the session has ended".to_owned());
                }
                StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {}
                // The satellite may not know the last event any more.
                _ if last_id.take().is_some() => {}
                _ => return None,
            },
            Err(error) if error.sent => {}
            Err(error) => return Some(error.why),
        }
        if started.elapsed() > LONG {
            pause = PAUSE_MIN;
        }
        sleep(pause).await;
        pause = (2 * pause).min(PAUSE_MAX);
    }
}

/// Passes on all messages and returns the id of the last event.
async fn forward_events(bridge: &BridgeState, link: &Link, mut response: SatelliteResponse) -> Option<HeaderValue> {
    let mut events = SseDecoder::new(LINE_MAX);
    let mut permit = BufferPermit::default();
    while let Ok(Some(chunk)) = response.chunk().await {
        events.push(chunk);
        loop {
            match events.next_event() {
                Ok(Some(event)) => match RpcMessage::parse(event.data) {
                    Ok(message) => bridge.forward(link.session_number(), &message).await,
                    Err(_) => bridge.report("a message of the satellite was not valid and is ignored"),
                },
                Ok(None) => break,
                Err(_) => {
                    bridge.report("a message of the satellite was too large and is ignored");
                    return HeaderValue::from_bytes(events.last_id()?).ok();
                }
            }
            permit.release();
        }
        permit.reserve(&bridge.output, events.buffered()).await;
    }
    HeaderValue::from_bytes(events.last_id()?).ok()
}
