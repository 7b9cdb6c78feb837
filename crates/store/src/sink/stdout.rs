//! Event sink that writes JSON lines to standard output.

use std::io::{self, Write};
use std::sync::Arc;

use futures::future::BoxFuture;
use mcp_satellite_actors::seam::{EventSink, SinkAnswer, SinkBatch};

use super::writer::WriterThread;

/// Event sink that writes one line per event. A slow or closed reader delays only the events.
#[derive(Debug)]
pub struct StdoutSink {
    writer: WriterThread,
}

impl StdoutSink {
    pub fn new() -> io::Result<Self> {
        let mut last = None;
        Ok(Self { writer: WriterThread::start(move |batch| write(batch, &mut last))? })
    }
}

impl EventSink for StdoutSink {
    fn send(&self, batch: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
        self.writer.send(batch)
    }
}

// `last` is the `seq` of the last complete event, so that a repeated batch continues after it.
fn write(batch: &SinkBatch, last: &mut Option<u64>) -> SinkAnswer {
    let mut stdout = io::stdout().lock();
    for (index, event) in batch.events.iter().enumerate() {
        if Some(event.seq) <= *last {
            continue;
        }
        let mut line = match serde_json::to_vec(event) {
            Ok(line) => line,
            Err(error) => return SinkAnswer::Invalid(Some(index), format!("cannot write the event as JSON: {error}")),
        };
        line.push(b'\n');
        if let Err(error) = stdout.write_all(&line).and_then(|()| stdout.flush()) {
            return SinkAnswer::Unavailable(format!("cannot write events to standard output: {error}"));
        }
        *last = Some(event.seq);
    }
    SinkAnswer::Accepted
}
