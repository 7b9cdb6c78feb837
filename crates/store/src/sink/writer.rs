//! Writer thread of a sink. A hanging disk or pipe must block neither the async threads nor the end of the process.
//! Tokio's blocking pool would do the latter, because a runtime waits for it when it is dropped.

use std::io;
use std::sync::{Arc, mpsc};
use std::thread;

use futures::future::BoxFuture;
use mcp_satellite_actors::seam::{SinkAnswer, SinkBatch};
use tokio::sync::oneshot;

struct WriteJob {
    batch: Arc<SinkBatch>,
    reply: oneshot::Sender<SinkAnswer>,
}

// On drop, the thread ends after the queued batches.
#[derive(Debug)]
pub(super) struct WriterThread {
    jobs: mpsc::Sender<WriteJob>,
}

impl WriterThread {
    pub(super) fn start(mut write: impl FnMut(&SinkBatch) -> SinkAnswer + Send + 'static) -> io::Result<Self> {
        let (jobs, inbox) = mpsc::channel::<WriteJob>();
        thread::Builder::new().name("event-writer".into()).spawn(move || {
            for WriteJob { batch, reply } in inbox {
                // The sender has gone and will send the batch again.
                if !reply.is_closed() {
                    // The sender may have gone meanwhile; the sink recognizes the repeated batch.
                    let _ = reply.send(write(&batch));
                }
            }
        })?;
        Ok(Self { jobs })
    }

    pub(super) fn send(&self, batch: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
        let (reply, answer) = oneshot::channel();
        // If the thread has ended, `reply` is dropped with the job, and the response below reports that.
        let _ = self.jobs.send(WriteJob { batch, reply });
        Box::pin(async move {
            answer.await.unwrap_or_else(|_| SinkAnswer::Unavailable("the thread that writes events has ended".into()))
        })
    }
}
