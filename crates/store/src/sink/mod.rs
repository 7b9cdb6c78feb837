//! Event sinks: a file, standard output or an HTTP server. A sink only reports the result of a batch; the batcher
//! decides about retries.

pub mod file;
#[cfg(feature = "http")]
pub mod http;
pub mod stdout;
mod writer;
