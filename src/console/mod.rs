//! The control socket: HTTP over a Unix socket in the data directory, for the command line of the same machine.

pub mod api;
mod auth;
pub mod client;
pub(crate) mod find;
pub(crate) mod server;

/// The socket's name in the data directory.
pub const SOCKET: &str = "control.sock";
