//! A sink with the journal in front: whatever the events' way is, they are stored first, so that `satellite events`
//! can read them and their numbers go on where the last satellite ended.

use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use mcp_satellite_actors::seam::{Answer, Batch, EventSink};

use super::file::FileSink;

/// Stores, then sends. A journal that cannot be written is reported and does not keep the events from their way.
pub struct StoredSink {
    file: Arc<FileSink>,
    way: Arc<dyn EventSink>,
}

impl StoredSink {
    /// `file` in front of `way`.
    pub fn new(file: FileSink, way: Arc<dyn EventSink>) -> Self {
        Self { file: Arc::new(file), way }
    }
}

impl EventSink for StoredSink {
    fn send(&self, batch: Arc<Batch>) -> BoxFuture<'static, Answer> {
        let (file, way) = (Arc::clone(&self.file), Arc::clone(&self.way));
        async move {
            // A batch that comes again is already stored: the file knows the last number it has.
            if let Answer::Unavailable(reason) = file.send(Arc::clone(&batch)).await {
                tracing::error!(reason, "events are not stored; they are sent all the same");
            }
            way.send(batch).await
        }
        .boxed()
    }
}
