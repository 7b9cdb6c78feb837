//! Description of a process to be started, and errors of a start.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;

use nix::errno::Errno;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::getpid;

use super::cgroup::CgroupLimits;
use super::descriptors::child_limits;
use super::filter::SyscallFilter;
use super::limits::ResourceLimits;
use super::preparation::{ChildConfinement, ChildPreparation, ExtraDescriptors};
use super::spawn::{ChildDescriptors, ChildPlan, ExecImage, SpawnError, SpawnedChild, spawn};
use super::spawn_helper::Forker;
use super::userns::IdMapPipes;

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
    /// Content of a file that a sandbox reads from `OPTIONS_FILE_FD`, if not empty: options and the variables of the
    /// server, which do not show in the argument list and in the environment of the sandbox.
    pub options_file: Vec<u8>,
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
    #[error("the keeper does not wait for it: {}", reason(.0))]
    Keeper(#[source] io::Error),
}

impl LaunchError {
    pub(crate) fn is_command_missing(&self) -> bool {
        matches!(self, Self::System(error) if error.kind() == io::ErrorKind::NotFound)
    }

    pub(crate) fn is_machine_fault(&self) -> bool {
        match self {
            Self::Directory(_, error) | Self::System(error) | Self::Cgroup(error) => is_machine_fault(error),
            // Not the fault of the server, which may be started again by the next satellite.
            Self::Keeper(_) | Self::HelperLost | Self::ShuttingDown => true,
            Self::Sandbox { .. } | Self::Thread => false,
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
    /// Forks into `cgroup` and executes. Calls `hold` with the parent's ends of stdin, stdout and stderr before the fork, and
    /// `on_forked` with the process id before the child has executed. Blocks.
    /// The child's life is tied to that of its parent: the calling thread or, with a spawn helper, the parent of the helper.
    pub(super) fn spawn(
        &self,
        forker: &mut Forker,
        cgroup: Option<BorrowedFd<'_>>,
        id_map: Option<IdMapPipes<'_>>,
        mark: Option<u64>,
        hold: impl FnOnce(&mut Forker, [BorrowedFd<'_>; 3]) -> io::Result<()>,
        on_forked: impl FnOnce(u32),
    ) -> Result<SpawnedChild, LaunchError> {
        let options_file = self.write_options_file()?;
        let args: Vec<&OsStr> = [&self.command].into_iter().chain(&self.args).map(OsString::as_os_str).collect();
        let confinement = self.confinement.map(|Confinement { namespaces_below, limits, .. }| {
            // Compiled here, too, because the spawn helper can return only the number of an error.
            SyscallFilter::new().map(|_| ChildConfinement { namespaces_below, limits })
        });
        let mut plan = ChildPlan {
            image: ExecImage::new(&args, self.environment.iter(), self.directory.as_deref())?,
            preparation: ChildPreparation {
                // The forker replaces it if the child gets another parent.
                parent: getpid().as_raw(),
                descriptor_limits: child_limits()?,
                confinement: confinement.transpose()?,
                user: self.user,
                mark,
            },
        };
        let extra = ExtraDescriptors { cgroup, options_file: options_file.as_ref().map(AsFd::as_fd), id_map };
        let fork = |descriptors: &ChildDescriptors<'_>, own: [BorrowedFd<'_>; 3]| {
            hold(forker, own).map_err(SpawnError::Keeper)?;
            let child = forker.fork(&mut plan, descriptors)?;
            child.inspect(|pid| on_forked(pid.as_raw_nonzero().get().unsigned_abs()));
            Ok(child)
        };
        spawn(extra, fork).map_err(|error| match (error, &self.directory) {
            (SpawnError::ChangeDirectory(error), Some(directory)) => LaunchError::Directory(directory.clone(), error),
            (SpawnError::ChangeDirectory(error) | SpawnError::Exec(error), _) => error.into(),
            (SpawnError::HelperLost, _) => LaunchError::HelperLost,
            (SpawnError::Keeper(error), _) => LaunchError::Keeper(error),
        })
    }

    fn write_options_file(&self) -> io::Result<Option<File>> {
        if self.options_file.is_empty() {
            return Ok(None);
        }
        let mut file = File::from(memfd_create(c"satellite-options", MFdFlags::MFD_CLOEXEC)?);
        file.write_all(&self.options_file)?;
        file.rewind()?;
        Ok(Some(file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(LaunchError::ShuttingDown.is_machine_fault(), "a killed keeper must not spend the budgets of servers");
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
