//! The thread on which a sink writes. A disk or a pipe that hangs must hang neither the async threads nor the end of
//! the process; tokio's blocking pool would do the latter, since a runtime waits for it when it is dropped.

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

/// Ends when it is dropped, after what it was given.
#[derive(Debug)]
pub(super) struct Writer {
    jobs: mpsc::Sender<Job>,
}

impl Writer {
    /// Starts a thread that answers each batch with `write`.
    pub(super) fn start(mut write: impl FnMut(&Batch) -> Answer + Send + 'static) -> io::Result<Self> {
        let (jobs, inbox) = mpsc::channel::<Job>();
        thread::Builder::new().name("event-writer".into()).spawn(move || {
            for Job { batch, reply } in inbox {
                // A batch that nobody waits for any more will come again.
                if !reply.is_closed() {
                    // If nobody waits by now it comes again as well, and the sink knows what it has written.
                    let _ = reply.send(write(&batch));
                }
            }
        })?;
        Ok(Self { jobs })
    }

    /// Has `batch` written.
    pub(super) fn send(&self, batch: Arc<Batch>) -> BoxFuture<'static, Answer> {
        let (reply, answer) = oneshot::channel();
        // If the thread has ended, `reply` is dropped with the job and the answer below says so.
        let _ = self.jobs.send(Job { batch, reply });
        Box::pin(async move {
            answer.await.unwrap_or_else(|_| Answer::Unavailable("the thread that writes events has ended".into()))
        })
    }
}
