//! Description of a process to be started, preparation of the child between fork and exec, and errors of a start.
//!
//! The order of the steps in the child matters: the session first, then limits and user namespace, then the
//! parent-death signal, which a change of credentials clears, then privileges, keyring and filter, and descriptors and
//! signals last.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::path::PathBuf;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::libc;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::prctl::{set_no_new_privs, set_pdeathsig};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::{getpid, getppid, setsid};
use rustix::thread::{Gid, Uid, set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use serde::{Deserialize, Serialize};

use super::cgroup::CgroupLimits;
use super::descriptors;
use super::filter::SyscallFilter;
use super::limits::ResourceLimits;
use super::run_mark;
use super::spawn::{ChildDescriptors, ChildPlan, ExecImage, ExtraDescriptors, SpawnError, SpawnedChild};
use super::spawn_helper::Forker;
use super::userns::{self, IdMapPipes};
use crate::huge_pages;

/// Number of the descriptor of [`LaunchSpec::file_args`] in the child.
pub(super) const FILE_ARGS_FD: RawFd = 3;

/// A process to be started. Not `Debug`: arguments and environment contain secrets.
pub(crate) struct LaunchSpec {
    pub instance: String,
    pub command: OsString,
    /// Passed unchanged, never through a shell.
    pub args: Vec<OsString>,
    pub environment: BTreeMap<OsString, OsString>,
    /// The working directory; by default that of the satellite.
    pub directory: Option<PathBuf>,
    /// User and group id to change to, without supplementary groups. Requires root. By default those of the satellite.
    pub user: Option<u32>,
    /// Further words for a sandbox, before `args`. Passed in a file, so that they do not show in the argument list of a
    /// process.
    pub file_args: Vec<OsString>,
    pub confinement: Option<Confinement>,
    pub cgroup_limits: CgroupLimits,
}

/// Confinement that the child applies to itself before it executes a sandbox.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Confinement {
    pub sandbox: &'static str,
    /// Number of generations from the leader to the server; 1 if the server is the leader's child.
    pub depth: usize,
    /// Maximum number of user namespaces below the child's own: the sandbox's, and none for the server.
    pub namespaces_below: u8,
    pub limits: ResourceLimits,
    /// Returns true if exit code and stderr are those of a failure of the sandbox itself, before it started the server.
    pub is_own_failure: fn(Option<i32>, &str) -> bool,
}

/// Error of a process start. The message is the reason alone and follows the command's name.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LaunchError {
    #[error("working directory `{}`: {}", .0.display(), reason(.1))]
    Directory(PathBuf, #[source] io::Error),
    #[error("{}", reason(.0))]
    System(#[from] io::Error),
    #[error("cannot create its cgroup: {}", reason(.0))]
    Cgroup(#[source] io::Error),
    #[error("the sandbox {sandbox} failed: {output}")]
    Sandbox { sandbox: &'static str, output: String },
    #[error("the satellite is ending")]
    ShuttingDown,
    #[error("the thread that starts processes failed: restart the satellite")]
    Thread,
    #[error("the process that starts servers was killed")]
    HelperLost,
}

impl LaunchError {
    pub(crate) fn is_command_missing(&self) -> bool {
        matches!(self, Self::System(error) if error.kind() == io::ErrorKind::NotFound)
    }

    pub(crate) fn is_machine_fault(&self) -> bool {
        match self {
            Self::Directory(_, error) | Self::System(error) | Self::Cgroup(error) => is_machine_fault(error),
            Self::Sandbox { .. } | Self::ShuttingDown | Self::Thread | Self::HelperLost => false,
        }
    }
}

/// Returns true for errors of the machine: descriptors, memory, processes or disk space are short, or a disk fails.
pub(crate) fn is_machine_fault(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(errno, Some(Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM | Errno::EAGAIN | Errno::ENOSPC | Errno::EIO))
}

fn reason(error: &io::Error) -> String {
    let Some(errno) = error.raw_os_error().map(Errno::from_raw) else { return error.to_string() };
    let hint = match errno {
        Errno::EAGAIN => ": no more processes are allowed, raise `ulimit -u` or the cgroup's pids.max",
        Errno::ENOMEM => ": the machine or the cgroup is out of memory",
        Errno::EMFILE => ": the satellite may open no more files, raise `ulimit -n`",
        Errno::ENFILE => ": the machine may open no more files, raise fs.file-max",
        Errno::ENOSPC => ": a disk is full, make room",
        Errno::EIO => ": a disk fails, read the kernel's log",
        _ => "",
    };
    format!("{}{hint}", errno.desc())
}

impl LaunchSpec {
    /// Forks into `cgroup` and executes. Calls `on_forked` with the process id before the child has executed. Blocks. The
    /// child's life is tied to that of the calling thread or, with a spawn
    /// helper, to that of the satellite's first thread.
    pub(super) fn spawn(
        &self,
        forker: &mut Forker,
        cgroup: Option<BorrowedFd<'_>>,
        id_map: Option<IdMapPipes<'_>>,
        mark: Option<u64>,
        on_forked: impl FnOnce(u32),
    ) -> Result<SpawnedChild, LaunchError> {
        let file_args = self.write_file_args()?;
        let number = OsString::from(FILE_ARGS_FD.to_string());
        let mut args: Vec<&OsStr> = vec![&self.command];
        if file_args.is_some() {
            args.extend([OsStr::new("--args"), &number]);
        }
        args.extend(self.args.iter().map(OsString::as_os_str));
        let confinement = self.confinement.map(|Confinement { namespaces_below, limits, .. }| {
            // Compiled here, too, because the spawn helper can return only the number of an error.
            SyscallFilter::new().map(|_| ChildConfinement { namespaces_below, limits })
        });
        let plan = ChildPlan {
            image: ExecImage::new(&args, self.environment.iter(), self.directory.as_deref())?,
            preparation: ChildPreparation {
                parent: getpid().as_raw(),
                descriptors: descriptors::child_limits()?,
                confinement: confinement.transpose()?,
                user: self.user,
                mark,
            },
        };
        let extra = ExtraDescriptors { cgroup, file_args: file_args.as_ref().map(AsFd::as_fd), id_map };
        let fork = |descriptors: &ChildDescriptors<'_>| {
            let forked = forker.fork(&plan, descriptors)?;
            forked.inspect(|pid| on_forked(pid.as_raw_nonzero().get().unsigned_abs()));
            Ok(forked)
        };
        plan.spawn(extra, fork).map_err(|error| match (error, &self.directory) {
            (SpawnError::ChangeDirectory(error), Some(directory)) => LaunchError::Directory(directory.clone(), error),
            (SpawnError::ChangeDirectory(error) | SpawnError::Exec(error), _) => error.into(),
            (SpawnError::HelperLost, _) => LaunchError::HelperLost,
        })
    }

    fn write_file_args(&self) -> io::Result<Option<File>> {
        if self.file_args.is_empty() {
            return Ok(None);
        }
        let mut file = File::from(memfd_create(c"satellite-args", MFdFlags::MFD_CLOEXEC)?);
        for word in &self.file_args {
            file.write_all(word.as_encoded_bytes())?;
            file.write_all(&[0])?;
        }
        file.rewind()?;
        Ok(Some(file))
    }
}

/// Steps of a child between fork and exec. The spawn helper receives it as JSON.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(super) struct ChildPreparation {
    /// Process id of the satellite, the parent that the child must have.
    pub(super) parent: libc::pid_t,
    /// Soft and hard limit of open files.
    descriptors: Option<(libc::rlim_t, libc::rlim_t)>,
    pub(super) confinement: Option<ChildConfinement>,
    user: Option<u32>,
    mark: Option<u64>,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
pub(super) struct ChildConfinement {
    namespaces_below: u8,
    limits: ResourceLimits,
}

impl ChildPreparation {
    /// Runs in the child. Every call is async-signal-safe.
    pub(super) fn carry_out(&self, extra: &ExtraDescriptors<'_>, filter: Option<SyscallFilter>) -> io::Result<()> {
        // A new session has its own process group and no terminal to read from or write to.
        setsid()?;
        if let Some(mark) = self.mark {
            run_mark::set_limit(mark);
        }
        if let Some((soft, hard)) = self.descriptors {
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
        if extra.file_args.is_some() {
            keep_on_exec(FILE_ARGS_FD)?;
        }
        reset_signals();
        // Blocked since before the fork (see the fork thread) and unblocked only here: no handler of the satellite can
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

#[cfg(test)]
mod tests {
    use super::*;

    impl ChildPreparation {
        pub(in super::super) fn for_child_of_this_process() -> Self {
            Self { parent: getpid().as_raw(), descriptors: None, confinement: None, user: None, mark: None }
        }
    }

    #[test]
    fn faults_of_the_machine_are_distinguished_from_those_of_the_command() {
        let of = |errno: Errno| io::Error::from(errno);
        for errno in [Errno::EMFILE, Errno::ENFILE, Errno::ENOMEM, Errno::EAGAIN, Errno::ENOSPC, Errno::EIO] {
            assert!(LaunchError::System(of(errno)).is_machine_fault(), "{errno}");
            assert!(LaunchError::Cgroup(of(errno)).is_machine_fault(), "{errno}");
            assert!(LaunchError::Directory("/x".into(), of(errno)).is_machine_fault(), "{errno}");
        }
        for errno in [Errno::ENOENT, Errno::EACCES, Errno::ENOEXEC, Errno::ENOTDIR] {
            assert!(!LaunchError::System(of(errno)).is_machine_fault(), "{errno}");
        }
        assert!(!LaunchError::System(io::Error::other("no such thing")).is_machine_fault());
    }

    #[test]
    fn the_error_of_a_lack_of_resources_names_the_remedy() {
        let message = |errno: Errno| LaunchError::from(io::Error::from(errno)).to_string();
        assert_eq!(message(Errno::ENOENT), "No such file or directory");
        assert!(message(Errno::EAGAIN).contains("ulimit -u"));
        assert!(message(Errno::ENOMEM).contains("out of memory"));
        assert!(message(Errno::EMFILE).contains("ulimit -n"));
    }
}
