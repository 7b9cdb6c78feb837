//! The journal as the sink of the event batcher.

use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use mcp_satellite_actors::seam::{EventSink, NumberStore, SinkAnswer, SinkBatch};

use super::Journal;

/// Event sink that stores each batch. While that is impossible, it delivers batches directly and stores them later.
pub struct JournalSink {
    journal: Journal,
    fallback: Option<Arc<dyn EventSink>>,
}

impl JournalSink {
    /// Creates a sink for `journal`. `fallback` receives events while the disk accepts none. It accepts them only after
    /// the older, stored events were delivered.
    pub fn new(journal: Journal, fallback: Option<Arc<dyn EventSink>>) -> Self {
        Self { journal, fallback }
    }
}

impl EventSink for JournalSink {
    fn send(&self, batch: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
        let (journal, fallback) = (self.journal.clone(), self.fallback.clone());
        async move {
            let answer = journal.append(Arc::clone(&batch)).await;
            match (answer, fallback) {
                (SinkAnswer::Unavailable(reason), Some(fallback)) => {
                    // Events that a receiver sees must keep their numbers, although they are not stored.
                    let last = batch.events.last().map_or(0, |envelope| envelope.seq);
                    if journal.reserve(last).await.is_err() {
                        return SinkAnswer::Unavailable(reason);
                    }
                    let answer = fallback.send(Arc::clone(&batch)).await;
                    if matches!(answer, SinkAnswer::Accepted | SinkAnswer::Partial(_)) {
                        journal.queue_delivered(batch);
                    }
                    answer
                }
                (answer, _) => answer,
            }
        }
        .boxed()
    }

    fn is_prompt(&self) -> bool {
        true
    }

    fn number_store(&self) -> Option<Arc<dyn NumberStore>> {
        Some(Arc::new(self.journal.clone()))
    }
}
