//! Control of a running satellite: the control socket (HTTP over a Unix socket in the data directory, for the command
//! line of the same machine), and the HTTP API behind the console.

pub use mcp_satellite_console::api;
mod actions;
pub(crate) mod auth;
pub(crate) mod call_search;
pub mod client;
pub(crate) mod client_entries;
mod event_stream;
pub(crate) mod find;
mod health;
pub(crate) mod http_api;
mod line_filter;
pub(crate) mod listener;
pub(crate) mod login;
pub(crate) mod mcp_server;
pub(crate) mod page_frame;
mod pages;
mod records;
pub(crate) mod refusals;
pub(crate) mod requests;
mod rows;
pub(crate) mod server;
pub(crate) mod state;

use std::os::unix::net::UnixStream;

use crate::data_dir::DataDir;

/// The socket's name in the data directory.
pub const SOCKET: &str = "control.sock";

pub(crate) fn is_running(directory: &DataDir) -> bool {
    directory.check_socket(SOCKET).is_ok() && UnixStream::connect(directory.descriptor_path(SOCKET)).is_ok()
}
