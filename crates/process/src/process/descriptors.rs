//! Numbers of descriptors, and the limit of open files. Satellite and keeper raise theirs, because every server uses four
//! descriptors; servers start with the original limit.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;

use nix::libc::rlim_t;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Number of the descriptor in a child from which a sandbox reads its options.
pub(crate) const OPTIONS_FILE_FD: RawFd = 3;

static AT_START: OnceLock<rlim_t> = OnceLock::new();

/// Raises this process's soft limit of open files to the hard one and returns the limit in force. Children started
/// later get the original soft limit. Call it once, early.
pub fn raise_descriptor_limit() -> io::Result<u64> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    AT_START.get_or_init(|| soft);
    if soft < hard {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    }
    Ok(hard)
}

/// Returns the soft and hard limit to restore in a child, if the limit was raised.
pub(super) fn child_limits() -> io::Result<Option<(rlim_t, rlim_t)>> {
    let Some(soft) = AT_START.get() else { return Ok(None) };
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    Ok(Some((hard.min(*soft), hard)))
}

/// Moves a descriptor above the numbers that a child replaces: the three standard ones and [`OPTIONS_FILE_FD`]. A host may
/// have closed its own, so that a pipe got their numbers.
pub(super) fn move_above_reserved(descriptor: OwnedFd) -> io::Result<OwnedFd> {
    if descriptor.as_raw_fd() > OPTIONS_FILE_FD {
        return Ok(descriptor);
    }
    Ok(rustix::io::fcntl_dupfd_cloexec(&descriptor, OPTIONS_FILE_FD + 1)?)
}

/// Descriptors that client connections must leave to the satellite itself: to start servers, to answer on the control
/// socket, to write the journal. The kernel gives each new descriptor the lowest free number, so the number of a
/// connection's descriptor shows how many are left.
#[derive(Debug, Clone, Copy)]
pub struct DescriptorReserve {
    reserved: rlim_t,
    // The lowest number at which no connection is admitted, not even in exchange for another one.
    last: rlim_t,
}

impl DescriptorReserve {
    const MAX: rlim_t = 1024;

    pub fn from_process_limit() -> Self {
        Self::from_limit(getrlimit(Resource::RLIMIT_NOFILE).map_or(rlim_t::MAX, |(soft, _)| soft))
    }

    /// Returns the reserve under a limit of open files: a quarter of it, at most 1,024.
    pub fn from_limit(limit: rlim_t) -> Self {
        let reserve = (limit / 4).min(Self::MAX);
        Self { reserved: limit - reserve, last: limit - reserve / 2 }
    }

    pub fn is_reserved(self, descriptor: RawFd) -> bool {
        number(descriptor) >= self.reserved
    }

    pub fn is_last(self, descriptor: RawFd) -> bool {
        number(descriptor) >= self.last
    }
}

fn number(descriptor: RawFd) -> rlim_t {
    rlim_t::try_from(descriptor).unwrap_or_default()
}
