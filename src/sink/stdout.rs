//! Events as JSON lines on standard output, for a pipe into something else.

use std::io::{self, Write};
use std::sync::Arc;

use futures::future::BoxFuture;
use mcp_satellite_actors::seam::{Answer, Batch, EventSink};

use super::writer::Writer;

/// Writes one line for each event. A reader that is slow or gone holds up the events and nothing else.
#[derive(Debug)]
pub struct StdoutSink {
    writer: Writer,
}

impl StdoutSink {
    /// Starts the thread that writes.
    pub fn new() -> io::Result<Self> {
        let mut last = None;
        Ok(Self { writer: Writer::start(move |batch| write(batch, &mut last))? })
    }
}

impl EventSink for StdoutSink {
    fn send(&self, batch: Arc<Batch>) -> BoxFuture<'static, Answer> {
        self.writer.send(batch)
    }
}

/// `last` is the seq of the last event that was written whole, so that a repeated batch goes on behind it.
fn write(batch: &Batch, last: &mut Option<u64>) -> Answer {
    let mut stdout = io::stdout().lock();
    for (index, event) in batch.events.iter().enumerate() {
        if Some(event.seq) <= *last {
            continue;
        }
        let mut line = match serde_json::to_vec(event) {
            Ok(line) => line,
            Err(error) => return Answer::Invalid(Some(index), format!("cannot be written as JSON: {error}")),
        };
        line.push(b'\n');
        if let Err(error) = stdout.write_all(&line).and_then(|()| stdout.flush()) {
            return Answer::Unavailable(format!("cannot write events to standard output: {error}"));
        }
        *last = Some(event.seq);
    }
    Answer::Accepted
}
