//! Where events go: a file, standard output, or a server that takes them over HTTP. What each answer means is decided
//! by the batcher; a sink only says what happened.

pub mod file;
#[cfg(feature = "cli")]
pub mod http;
pub mod stdout;
mod writer;
