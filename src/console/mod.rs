//! The control socket: HTTP over a Unix socket in the data directory, for the command line of the same machine.

pub mod api;
mod auth;
pub mod client;
pub(crate) mod find;
pub(crate) mod server;

use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

/// The socket's name in the data directory.
pub const SOCKET: &str = "control.sock";

/// Socket addresses are short (108 bytes on Linux): a long path is reached through the directory's descriptor.
const SOCKET_PATH_MAX: usize = 100;

/// The socket of a data directory, and the descriptor that a long path hangs on.
pub(crate) fn socket_path(data_dir: &Path) -> std::io::Result<(PathBuf, Option<std::fs::File>)> {
    let path = data_dir.join(SOCKET);
    if path.as_os_str().len() < SOCKET_PATH_MAX {
        return Ok((path, None));
    }
    let directory = std::fs::File::open(data_dir)?;
    Ok((PathBuf::from(format!("/proc/self/fd/{}/{SOCKET}", directory.as_raw_fd())), Some(directory)))
}
