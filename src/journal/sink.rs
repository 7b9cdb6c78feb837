//! The journal as the batcher's sink.

use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use mcp_satellite_actors::seam::{Answer, Batch, EventSink, Numbers};

use super::Journal;

/// Stores each batch. Where that cannot be done, a batch goes its way from memory, and is stored when it can be.
pub struct JournalSink {
    journal: Journal,
    way: Option<Arc<dyn EventSink>>,
}

impl JournalSink {
    /// Stores in `journal`. `way` is where events go while the disk takes none: it takes them when what is stored, which
    /// is older, has gone before.
    pub fn new(journal: Journal, way: Option<Arc<dyn EventSink>>) -> Self {
        Self { journal, way }
    }
}

impl EventSink for JournalSink {
    fn send(&self, batch: Arc<Batch>) -> BoxFuture<'static, Answer> {
        let (journal, way) = (self.journal.clone(), self.way.clone());
        async move {
            let answer = journal.append(Arc::clone(&batch)).await;
            match (answer, way) {
                (Answer::Unavailable(_), Some(way)) => {
                    let answer = way.send(Arc::clone(&batch)).await;
                    if matches!(answer, Answer::Accepted | Answer::Partial(_)) {
                        journal.went_directly(batch);
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

    fn numbers(&self) -> Option<Arc<dyn Numbers>> {
        Some(Arc::new(self.journal.clone()))
    }
}
