//! Thread that writes the log to stderr. stderr can be a file on a hanging disk or a pipe without a reader; the threads
//! that log do not wait for it. Lines that do not fit into the queue are dropped and counted.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, SyncSender, TrySendError};
use std::thread;

use mcp_satellite_files::disk::WAIT_MAX;

const QUEUE_MAX: usize = 10_000;

enum LogOrder {
    Line(Vec<u8>),
    Finish(mpsc::Sender<()>),
}

static WRITER: OnceLock<SyncSender<LogOrder>> = OnceLock::new();
static DROPPED: AtomicU64 = AtomicU64::new(0);

pub(super) fn start(print: impl Fn(&[u8]) + Send + 'static) -> io::Result<()> {
    let (orders, inbox) = mpsc::sync_channel(QUEUE_MAX);
    thread::Builder::new().name("satellite-log".into()).spawn(move || {
        for order in inbox {
            match order {
                LogOrder::Line(line) => print(&line),
                // An error means that the caller has stopped waiting.
                LogOrder::Finish(done) => drop(done.send(())),
            }
            let dropped = DROPPED.swap(0, Ordering::AcqRel);
            if dropped > 0 {
                // Queued like any other line, so this thread does not wait for itself.
                tracing::warn!(dropped, "log lines were dropped: stderr was blocked");
            }
        }
    })?;
    // There is only one log; a second writer is ignored.
    let _ = WRITER.set(orders);
    Ok(())
}

/// Queues a line for the thread and drops it if the queue is full. Returns false if the thread is not running.
pub(super) fn write(line: &[u8]) -> bool {
    let Some(orders) = WRITER.get() else { return false };
    match orders.try_send(LogOrder::Line(line.to_vec())) {
        Ok(()) => true,
        Err(TrySendError::Full(_)) => {
            DROPPED.fetch_add(1, Ordering::AcqRel);
            true
        }
        Err(TrySendError::Disconnected(_)) => false,
    }
}

/// Waits until all lines are written, or until stderr has blocked for too long.
pub(super) fn finish() {
    let Some(orders) = WRITER.get() else { return };
    let (done, written) = mpsc::channel();
    if orders.try_send(LogOrder::Finish(done)).is_ok() {
        // An error means that stderr hangs; do not wait any longer.
        let _ = written.recv_timeout(WAIT_MAX);
    }
}
