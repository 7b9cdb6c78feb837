//! A sink with the journal in front: whatever the events' way is, they are stored first, so that `satellite events`
//! can read them and their numbers go on where the last satellite ended.

use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use mcp_satellite_actors::seam::{Answer, Batch, EventSink};

use crate::journal::Journal;

/// Stores, then sends. A journal that cannot be written is reported and does not keep the events from their way.
pub struct StoredSink {
    journal: Journal,
    way: Arc<dyn EventSink>,
}

impl StoredSink {
    /// `journal` in front of `way`.
    pub fn new(journal: Journal, way: Arc<dyn EventSink>) -> Self {
        Self { journal, way }
    }
}

impl EventSink for StoredSink {
    fn send(&self, batch: Arc<Batch>) -> BoxFuture<'static, Answer> {
        let (journal, way) = (self.journal.clone(), Arc::clone(&self.way));
        async move {
            // A batch that comes again is already stored: the journal knows the last number it has.
            journal.append(Arc::clone(&batch)).await;
            way.send(batch).await
        }
        .boxed()
    }
}
