//! The thread that writes the log to stderr. stderr can be a file on a disk that hangs, or a pipe that no process
//! reads; the threads that log do not wait for it. Lines that do not fit into the queue are dropped and counted.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, SyncSender, TrySendError};
use std::thread;

use crate::disk::WAIT_MAX;

/// Lines that wait to be written.
const QUEUE_MAX: usize = 10_000;

enum Order {
    Line(Vec<u8>),
    /// Answer when all lines before are written.
    Finish(mpsc::Sender<()>),
}

static WRITER: OnceLock<SyncSender<Order>> = OnceLock::new();
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// Starts the thread, which writes each line by `print`.
pub(super) fn start(print: impl Fn(&[u8]) + Send + 'static) -> io::Result<()> {
    let (orders, inbox) = mpsc::sync_channel(QUEUE_MAX);
    thread::Builder::new().name("satellite-log".into()).spawn(move || {
        for order in inbox {
            match order {
                Order::Line(line) => print(&line),
                // An error means that it took too long.
                Order::Finish(done) => drop(done.send(())),
            }
            let dropped = DROPPED.swap(0, Ordering::AcqRel);
            if dropped > 0 {
                // Queued like any other line: this thread does not wait for itself.
                tracing::warn!(dropped, "log lines were dropped: stderr was blocked");
            }
        }
    })?;
    // There is one log, begun once.
    let _ = WRITER.set(orders);
    Ok(())
}

/// Queues a line for the thread. Returns false if the thread does not run; a line that finds the queue full is dropped.
pub(super) fn write(line: &[u8]) -> bool {
    let Some(orders) = WRITER.get() else { return false };
    match orders.try_send(Order::Line(line.to_vec())) {
        Ok(()) => true,
        Err(TrySendError::Full(_)) => {
            DROPPED.fetch_add(1, Ordering::AcqRel);
            true
        }
        Err(TrySendError::Disconnected(_)) => false,
    }
}

/// Waits until all lines are written, or stderr does not take them.
pub(super) fn finish() {
    let Some(orders) = WRITER.get() else { return };
    let (done, written) = mpsc::channel();
    if orders.try_send(Order::Finish(done)).is_ok() {
        // An error means that stderr hangs: it is not waited for.
        let _ = written.recv_timeout(WAIT_MAX);
    }
}
