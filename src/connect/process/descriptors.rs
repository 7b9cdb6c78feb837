//! The limit of open files: ours is raised, for every server costs four descriptors; a server starts with the one that
//! we were started with.

use std::io;
use std::sync::OnceLock;

use nix::libc::rlim_t;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// The soft limit before it was raised.
static AT_START: OnceLock<rlim_t> = OnceLock::new();

/// Raises this process's soft limit of open files to the hard one, and answers the limit in force. Children started
/// later get the soft limit back that was there before. Call it once, early.
pub fn raise_descriptor_limit() -> io::Result<u64> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    AT_START.get_or_init(|| soft);
    if soft < hard {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    }
    Ok(hard)
}

/// The limits to restore in a child, soft and hard, if ours were raised.
pub(super) fn of_child() -> io::Result<Option<(rlim_t, rlim_t)>> {
    let Some(soft) = AT_START.get() else { return Ok(None) };
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    Ok(Some((hard.min(*soft), hard)))
}
