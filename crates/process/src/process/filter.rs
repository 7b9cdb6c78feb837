//! Seccomp filter for servers in a sandbox. It blocks two interfaces that no namespace covers: `AF_VSOCK` sockets,
//! which reach the hypervisor and other virtual machines and belong to no network namespace, and `io_uring`, which
//! opens sockets without passing a filter. Both fail with EPERM. A program of another architecture (32 bits) is killed,
//! because its system calls have other numbers.

use std::collections::BTreeMap;
use std::io;
use std::sync::LazyLock;

use nix::errno::Errno;
use nix::libc;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    apply_filter,
};

static PROGRAM: LazyLock<Result<BpfProgram, String>> =
    LazyLock::new(|| compile().map_err(|error| format!("cannot filter system calls: {error}")));

#[derive(Clone, Copy)]
pub(super) struct SyscallFilter(&'static BpfProgram);

impl SyscallFilter {
    /// Compiles the filter once per process. Fails on architectures without support.
    pub(super) fn new() -> io::Result<Self> {
        PROGRAM.as_ref().map(Self).map_err(|why| io::Error::other(why.clone()))
    }

    /// Applies the filter to the calling process and its descendants. Async-signal-safe.
    pub(super) fn apply(self) -> io::Result<()> {
        // Formatting the library's error may allocate, so only the errno is returned.
        apply_filter(self.0).map_err(|_| Errno::last().into())
    }
}

fn compile() -> Result<BpfProgram, seccompiler::BackendError> {
    let vsock = u64::from(libc::AF_VSOCK.unsigned_abs());
    let family = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, vsock)?;
    let mut rules = BTreeMap::from([
        (libc::SYS_socket, vec![SeccompRule::new(vec![family.clone()])?]),
        (libc::SYS_io_uring_setup, Vec::new()),
    ]);
    if cfg!(target_arch = "x86_64") {
        // The same calls under the numbers of the x32 interface.
        const X32: libc::c_long = 0x4000_0000;
        rules.insert(X32 | libc::SYS_socket, vec![SeccompRule::new(vec![family])?]);
        rules.insert(X32 | libc::SYS_io_uring_setup, Vec::new());
    }
    let refuse = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refuse, std::env::consts::ARCH.try_into()?)?;
    filter.try_into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filter_is_compiled_for_this_architecture() {
        assert!(SyscallFilter::new().is_ok_and(|filter| !filter.0.is_empty()));
    }
}
