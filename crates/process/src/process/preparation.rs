//! Preparation of a child between fork and exec.
//!
//! The order of the steps matters: the session first, then limits and user namespace, then the parent-death signal, which
//! a change of credentials clears, then privileges, keyring and filter, and descriptors and signals last.

use std::io;
use std::os::fd::{BorrowedFd, RawFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::libc;
use nix::sys::prctl::{set_no_new_privs, set_pdeathsig};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::{getppid, setsid};
use rustix::thread::{Gid, Uid, set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use serde::{Deserialize, Serialize};

use super::descriptors::OPTIONS_FILE_FD;
use super::filter::SyscallFilter;
use super::limits::ResourceLimits;
use super::run_mark;
use super::userns::{self, IdMapPipes};
use crate::huge_pages;

/// Steps of a child between fork and exec. The spawn helper receives it as JSON.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(super) struct ChildPreparation {
    /// Process id of the parent that the child must have: the keeper, or the satellite without one.
    pub(super) parent: libc::pid_t,
    /// Soft and hard limit of open files.
    pub(super) descriptor_limits: Option<(libc::rlim_t, libc::rlim_t)>,
    pub(super) confinement: Option<ChildConfinement>,
    pub(super) user: Option<u32>,
    pub(super) mark: Option<u64>,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
pub(super) struct ChildConfinement {
    pub(super) namespaces_below: u8,
    pub(super) limits: ResourceLimits,
}

/// Descriptors that only some children need. They stay open in the parent until the child has executed.
#[derive(Clone, Copy, Default)]
pub(super) struct ExtraDescriptors<'a> {
    pub(super) cgroup: Option<BorrowedFd<'a>>,
    /// The child keeps it as [`OPTIONS_FILE_FD`].
    pub(super) options_file: Option<BorrowedFd<'a>>,
    pub(super) id_map: Option<IdMapPipes<'a>>,
}

impl ChildPreparation {
    /// Runs in the child. Every call is async-signal-safe.
    pub(super) fn carry_out(&self, extra: &ExtraDescriptors<'_>, filter: Option<SyscallFilter>) -> io::Result<()> {
        // A new session has its own process group and no terminal to read from or write to.
        setsid()?;
        if let Some(mark) = self.mark {
            run_mark::set_limit(mark);
        }
        if let Some((soft, hard)) = self.descriptor_limits {
            setrlimit(Resource::RLIMIT_NOFILE, soft, hard)?;
        }
        if let Some(confinement) = self.confinement {
            userns::enter(confinement.namespaces_below, extra.id_map)?;
            confinement.limits.set()?;
        }
        if let Some(id) = self.user {
            // The system calls themselves: glibc's functions lock its list of threads, which another thread may have held
            // at the fork.
            let (user, group) = (Uid::from_raw(id), Gid::from_raw(id));
            set_thread_groups(&[])?;
            set_thread_res_gid(group, group, group)?;
            set_thread_res_uid(user, user, user)?;
        }
        // Repeated after the changes of user namespace and user, because a change of credentials may clear it.
        set_parent_death_signal(self.parent)?;
        set_no_new_privs()?;
        huge_pages::restore_in_child();
        if let Some(filter) = filter {
            restrict_keyring_and_sockets();
            filter.apply()?;
        }
        close_on_exec();
        if extra.options_file.is_some() {
            keep_on_exec(OPTIONS_FILE_FD)?;
        }
        reset_signals();
        // Blocked since before the fork (see the fork thread and the spawn helper) and unblocked only here: no handler of the satellite can
        // run in the child.
        Ok(SigSet::empty().thread_set_mask()?)
    }
}

/// Makes the kernel kill the calling process when the thread whose child it is ends.
pub(super) fn set_parent_death_signal(parent: libc::pid_t) -> io::Result<()> {
    set_pdeathsig(Signal::SIGKILL)?;
    // A parent that ended before the line above sends no signal any more.
    if getppid().as_raw() == parent { Ok(()) } else { Err(Errno::ESRCH.into()) }
}

/// Sets close-on-exec on every descriptor but the three standard ones. The satellite's have the flag already; those of
/// an embedding host may not. No effect on kernels before 5.11.
fn close_on_exec() {
    #[expect(unsafe_code, reason = "no wrapper of this system call exists that works on every libc")]
    // SAFETY: a system call on numbers only; it changes a flag of descriptors and closes none.
    unsafe {
        libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC);
    }
}

fn keep_on_exec(descriptor: RawFd) -> io::Result<()> {
    #[expect(unsafe_code, reason = "the child has put the descriptor under a fixed number")]
    // SAFETY: it is open, and no other code of the child uses it.
    let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
    Ok(fcntl(descriptor, FcntlArg::F_SETFD(FdFlag::empty())).map(drop)?)
}

/// Leaves the session keyring, which is inherited, and blocks the machine's abstract sockets, which belong to the
/// network namespace: no namespace of a sandbox covers them. No effect on kernels without support (Landlock version 6,
/// Linux 6.12).
fn restrict_keyring_and_sockets() {
    #[repr(C)]
    struct Ruleset {
        files: u64,
        network: u64,
        scoped: u64,
    }
    const JOIN_SESSION_KEYRING: libc::c_int = 1;
    const ABSTRACT_SOCKETS_AND_SIGNALS: u64 = 3;
    let rules = Ruleset { files: 0, network: 0, scoped: ABSTRACT_SOCKETS_AND_SIGNALS };
    #[expect(unsafe_code, reason = "no wrapper of these system calls exists that does not allocate")]
    // SAFETY: system calls on numbers and on a structure that outlives them; a failed call has no effect.
    unsafe {
        libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, std::ptr::null::<libc::c_char>());
        let ruleset = libc::syscall(libc::SYS_landlock_create_ruleset, &raw const rules, size_of::<Ruleset>(), 0);
        if ruleset >= 0 {
            // The exec closes it.
            libc::syscall(libc::SYS_landlock_restrict_self, ruleset, 0);
        }
    }
}

/// Gives every signal its default action. Exec resets handlers, but an ignored signal stays ignored, which the program
/// does not expect.
fn reset_signals() {
    const LAST: libc::c_int = 64;
    for signal in 1..=LAST {
        #[expect(unsafe_code, reason = "the safe wrappers do not know the real-time signals")]
        // SAFETY: `signal` is async-signal-safe, no handler is installed, and a signal number that cannot be changed is
        // rejected without effect.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
        }
    }
}
