//! Event sink that posts to the backend with the current key of the satellite.

use std::sync::{Arc, Mutex, PoisonError};

use futures::FutureExt;
use futures::future::BoxFuture;
use mcp_satellite_actors::seam::{EventSink, SinkAnswer, SinkBatch};

use super::LinkShared;
use super::contact::RequestPurpose;
use super::key::SatelliteKey;
use mcp_satellite_store::sink::http::HttpSink;

pub(super) struct BackendEventSink {
    link: Arc<LinkShared>,
    // Sink for the key that was used last.
    sink: Mutex<Option<(Arc<SatelliteKey>, HttpSink)>>,
}

impl BackendEventSink {
    pub(super) fn new(link: Arc<LinkShared>) -> Arc<Self> {
        Arc::new(Self { link, sink: Mutex::default() })
    }

    fn sink(&self) -> Result<HttpSink, String> {
        let key = self.link.key.borrow().clone();
        let Some(key) = key else { return Err("the satellite is not registered with the backend".to_owned()) };
        let mut sink = self.sink.lock().unwrap_or_else(PoisonError::into_inner);
        match &*sink {
            Some((of, sink)) if Arc::ptr_eq(of, &key) => return Ok(sink.clone()),
            Some(_) | None => {}
        }
        let made = HttpSink::new(&self.link.backend.events_url(&key), Some(&key.secret));
        let made = made.map_err(|error| error.to_string())?.with_timeout(self.link.plan.request_timeout);
        *sink = Some((key, made.clone()));
        Ok(made)
    }
}

impl EventSink for BackendEventSink {
    fn send(&self, batch: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
        let (link, sink) = (self.link.clone(), self.sink());
        async move {
            let sink = match sink {
                Ok(sink) => sink,
                Err(why) => return SinkAnswer::Unavailable(why),
            };
            let answer = sink.send(batch).await;
            match &answer {
                SinkAnswer::Unauthorized => {
                    // The next poll or heartbeat shows whether the key itself is rejected.
                    link.reachability.record_failure(
                        RequestPurpose::Events,
                        true,
                        "the backend rejected the key of the satellite",
                    );
                }
                SinkAnswer::Unavailable(why) => link.reachability.record_failure(RequestPurpose::Events, false, why),
                SinkAnswer::Throttled(_) => {
                    link.reachability.record_failure(
                        RequestPurpose::Events,
                        true,
                        "too many requests for the backend (HTTP 429)",
                    );
                }
                SinkAnswer::Accepted | SinkAnswer::Partial(_) | SinkAnswer::Invalid(..) | SinkAnswer::TooLarge => {
                    link.mark_key_accepted();
                    link.reachability.record_success(RequestPurpose::Events);
                }
            }
            answer
        }
        .boxed()
    }
}
