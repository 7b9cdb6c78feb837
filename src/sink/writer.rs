//! Writer thread of a sink. A hanging disk or pipe must block neither the async threads nor the end of the process.
//! Tokio's blocking pool would do the latter, because a runtime waits for it when it is dropped.

use std::io;
use std::sync::{Arc, mpsc};
use std::thread;

use futures::future::BoxFuture;
use mcp_satellite_actors::seam::{Answer, Batch};
use tokio::sync::oneshot;

struct Job {
    batch: Arc<Batch>,
    reply: oneshot::Sender<Answer>,
}

// On drop, the thread ends after the queued batches.
#[derive(Debug)]
pub(super) struct Writer {
    jobs: mpsc::Sender<Job>,
}

impl Writer {
    pub(super) fn start(mut write: impl FnMut(&Batch) -> Answer + Send + 'static) -> io::Result<Self> {
        let (jobs, inbox) = mpsc::channel::<Job>();
        thread::Builder::new().name("event-writer".into()).spawn(move || {
            for Job { batch, reply } in inbox {
                // The sender has gone and will send the batch again.
                if !reply.is_closed() {
                    // The sender may have gone meanwhile; the sink recognizes the repeated batch.
                    let _ = reply.send(write(&batch));
                }
            }
        })?;
        Ok(Self { jobs })
    }

    pub(super) fn send(&self, batch: Arc<Batch>) -> BoxFuture<'static, Answer> {
        let (reply, answer) = oneshot::channel();
        // If the thread has ended, `reply` is dropped with the job, and the response below reports that.
        let _ = self.jobs.send(Job { batch, reply });
        Box::pin(async move {
            answer.await.unwrap_or_else(|_| Answer::Unavailable("the thread that writes events has ended".into()))
        })
    }
}
