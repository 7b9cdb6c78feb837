//! Fork and exec without the standard library, which cannot start a process *in* a cgroup. Moving a process there
//! afterwards costs eight milliseconds: the kernel waits until no thread of the machine is in the middle of a fork.

use std::ffi::{CString, OsStr, OsString};
use std::io::{self, PipeReader, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};
use std::{ptr, thread};

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc::{self, c_char, c_int};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::getpid;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

use super::launch::set_parent_death_signal;

#[expect(unsafe_code, reason = "exec searches the PATH that this points to")]
unsafe extern "C" {
    static mut environ: *const *const c_char;
}

// Value of the kernel headers' constant of the same name; libc's type is too narrow for it.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

// Deadline for the child's exec, in case its file system does not respond: every start waits for the one before it.
const EXEC_PATIENCE: Duration = Duration::from_secs(10);

/// Arguments, environment and directory of a child, in the form that exec takes. Not `Debug`, because it contains
/// secrets.
pub(super) struct ExecImage {
    // The first is the program: a name to be found in the child's `PATH`, or a path.
    args: Vec<CString>,
    environment: Vec<CString>,
    directory: Option<CString>,
}

/// A child that has executed its program. The owner must wait for it.
pub(super) struct SpawnedChild {
    pub(super) pid: Pid,
    pub(super) stdin: OwnedFd,
    pub(super) stdout: OwnedFd,
    pub(super) stderr: OwnedFd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SpawnStage {
    /// Any step before or at exec, except entering the working directory.
    Exec,
    ChangeDirectory,
}

impl ExecImage {
    /// Fails if a word contains a NUL.
    pub(super) fn new<'a>(
        args: impl Iterator<Item = &'a OsStr>,
        environment: impl Iterator<Item = (&'a OsString, &'a OsString)>,
        directory: Option<&Path>,
    ) -> io::Result<Self> {
        let variable =
            |(name, value): (&OsString, &OsString)| CString::new([name.as_bytes(), b"=", value.as_bytes()].concat());
        Ok(Self {
            args: args.map(|arg| CString::new(arg.as_bytes())).collect::<Result<_, _>>()?,
            environment: environment.map(variable).collect::<Result<_, _>>()?,
            directory: directory.map(|path| CString::new(path.as_os_str().as_bytes())).transpose()?,
        })
    }

    /// Forks into `cgroup`, runs `prepare` in the child, and executes the program. `prepare` may make async-signal-safe
    /// calls only.
    pub(super) fn spawn(
        &self,
        cgroup: Option<BorrowedFd<'_>>,
        prepare: impl Fn() -> io::Result<()>,
    ) -> Result<SpawnedChild, (SpawnStage, io::Error)> {
        let becoming = |error: io::Error| (SpawnStage::Exec, error);
        let (its_stdin, stdin) = io::pipe().map_err(becoming)?;
        let (stdout, its_stdout) = io::pipe().map_err(becoming)?;
        let (stderr, its_stderr) = io::pipe().map_err(becoming)?;
        let (failure, its_failure) = io::pipe().map_err(becoming)?;
        // `above_the_standard_ones` closes the originals: while one is open here, no reader sees the end of a pipe.
        let its_stdin = move_above_stdio(its_stdin.into()).map_err(becoming)?;
        let its_stdout = move_above_stdio(its_stdout.into()).map_err(becoming)?;
        let its_stderr = move_above_stdio(its_stderr.into()).map_err(becoming)?;
        let its_failure = move_above_stdio(its_failure.into()).map_err(becoming)?;
        let pointers = |arguments: &[CString]| -> Vec<*const c_char> {
            arguments.iter().map(|word| word.as_ptr()).chain([ptr::null()]).collect()
        };
        let becomes = ExecPointers {
            standard: [its_stdin.as_raw_fd(), its_stdout.as_raw_fd(), its_stderr.as_raw_fd()],
            failure: its_failure.as_raw_fd(),
            args: pointers(&self.args),
            environment: pointers(&self.environment),
            directory: self.directory.as_ref().map_or(ptr::null(), |path| path.as_ptr()),
            parent: getpid(),
        };
        #[expect(unsafe_code, reason = "there is no other way to start a process in a cgroup")]
        // SAFETY: after the fork of a threaded process only async-signal-safe calls are allowed. `become_it` makes no
        // others, does not allocate, and never returns.
        let Some(pid) = (unsafe { fork(cgroup) }).map_err(becoming)? else { becomes.exec_or_exit(prepare) };
        drop((its_stdin, its_stdout, its_stderr, its_failure));
        if !is_readable_within(&failure, EXEC_PATIENCE) {
            let _ = kill_process(pid, Signal::KILL);
            // The child may hang in the kernel, and a wait here would hang as well. It is not reaped yet, so its number
            // is not reused.
            let _ = thread::Builder::new().name("satellite-wait".into()).spawn(move || wait(pid));
            let why = "the file system of its program or working directory does not respond";
            return Err(becoming(io::Error::new(io::ErrorKind::TimedOut, why)));
        }
        match read_failure(failure) {
            None => Ok(SpawnedChild { pid, stdin: stdin.into(), stdout: stdout.into(), stderr: stderr.into() }),
            Some(failed) => {
                wait(pid);
                Err(failed)
            }
        }
    }
}

/// Pointers into an [`ExecImage`], collected before the fork because the child may not allocate.
struct ExecPointers {
    standard: [RawFd; 3],
    failure: RawFd,
    args: Vec<*const c_char>,
    environment: Vec<*const c_char>,
    directory: *const c_char,
    parent: nix::unistd::Pid,
}

impl ExecPointers {
    fn exec_or_exit(&self, prepare: impl Fn() -> io::Result<()>) -> ! {
        let (stage, error) = self.try_exec(prepare);
        let [one, two, three, four] = error.raw_os_error().unwrap_or(libc::EIO).to_ne_bytes();
        let message = [stage as u8, one, two, three, four];
        #[expect(unsafe_code, reason = "between fork and exec only plain system calls are permitted")]
        // SAFETY: `failure` is open and `message` has the length that is passed. `_exit` runs no code of this process.
        unsafe {
            libc::write(self.failure, message.as_ptr().cast(), message.len());
            libc::_exit(127)
        }
    }

    fn try_exec(&self, prepare: impl Fn() -> io::Result<()>) -> (SpawnStage, io::Error) {
        // First of all, so that the child never outlives its parent, whatever it waits for.
        if let Err(error) = set_parent_death_signal(self.parent) {
            return (SpawnStage::Exec, error);
        }
        for (from, to) in self.standard.into_iter().zip(0..) {
            #[expect(unsafe_code, reason = "the safe wrapper needs owned standard descriptors")]
            // SAFETY: both are numbers of descriptors, and a descriptor closed by this was inherited.
            if unsafe { libc::dup2(from, to) } == -1 {
                return (SpawnStage::Exec, io::Error::last_os_error());
            }
        }
        if let Err(error) = prepare() {
            return (SpawnStage::Exec, error);
        }
        // After the change of user: a directory that this user may not enter is an error.
        #[expect(unsafe_code, reason = "the path is a C string already, and nothing may be allocated here")]
        // SAFETY: it points to a C string of the image, which lives in this copy of the parent.
        if !self.directory.is_null() && unsafe { libc::chdir(self.directory) } == -1 {
            return (SpawnStage::ChangeDirectory, io::Error::last_os_error());
        }
        #[expect(unsafe_code, reason = "exec must search the PATH of the new environment")]
        // SAFETY: both arrays end with a null pointer and point to C strings of the image. This process has one thread,
        // so no other thread reads its environment.
        unsafe {
            environ = self.environment.as_ptr();
            libc::execvp(self.args[0], self.args.as_ptr());
        }
        (SpawnStage::Exec, io::Error::last_os_error())
    }
}

/// Forks, into a cgroup if there is one. Returns `None` in the child.
///
/// # Safety
///
/// The child may make async-signal-safe calls only, and must not return from the caller's function.
#[expect(unsafe_code, reason = "there is no safe fork, and no other way to start a process in a cgroup")]
unsafe fn fork(cgroup: Option<BorrowedFd<'_>>) -> io::Result<Option<Pid>> {
    let pid = match cgroup {
        // SAFETY: the caller guarantees the conditions above.
        None => unsafe { libc::fork() },
        Some(cgroup) => {
            // SAFETY: a structure of integers, for which all zeros is valid and means "not set".
            let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
            args.flags = CLONE_INTO_CGROUP;
            args.exit_signal = u64::from(libc::SIGCHLD.unsigned_abs());
            args.cgroup = u64::from(cgroup.as_raw_fd().unsigned_abs());
            // SAFETY: the caller guarantees the conditions above; without shared memory `clone3` is a fork.
            let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<libc::clone_args>()) };
            c_int::try_from(pid).unwrap_or(-1)
        }
    };
    if pid < 0 { Err(io::Error::last_os_error()) } else { Ok(Pid::from_raw(pid)) }
}

pub(super) fn try_cgroup(cgroup: BorrowedFd<'_>) -> io::Result<()> {
    #[expect(unsafe_code, reason = "there is no other way to start a process in a cgroup")]
    // SAFETY: the child only exits.
    match unsafe { fork(Some(cgroup)) }? {
        Some(pid) => wait(pid),
        None => unsafe { libc::_exit(0) },
    }
    Ok(())
}

fn is_readable_within(failure: &PipeReader, timeout: Duration) -> bool {
    let until = Instant::now() + timeout;
    loop {
        let remaining = until.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(remaining).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(failure.as_fd(), PollFlags::POLLIN)], timeout) {
            Ok(0) => return false,
            Err(nix::errno::Errno::EINTR) => {}
            Ok(_) | Err(_) => return true,
        }
    }
}

/// Reads the child's failure from the pipe; returns `None` if the child has executed.
fn read_failure(mut failure: PipeReader) -> Option<(SpawnStage, io::Error)> {
    let mut message = [0; 5];
    match failure.read_exact(&mut message) {
        Ok(()) => {
            let [stage, error @ ..] = message;
            let stage =
                if stage == SpawnStage::ChangeDirectory as u8 { SpawnStage::ChangeDirectory } else { SpawnStage::Exec };
            Some((stage, io::Error::from_raw_os_error(c_int::from_ne_bytes(error))))
        }
        Err(_) => None,
    }
}

fn wait(pid: Pid) {
    while let Err(rustix::io::Errno::INTR) = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED) {}
}

/// Moves a descriptor above the three standard ones, which the child replaces. A host may have closed its own, so that
/// a pipe got their numbers.
fn move_above_stdio(descriptor: OwnedFd) -> io::Result<OwnedFd> {
    if descriptor.as_raw_fd() > libc::STDERR_FILENO {
        return Ok(descriptor);
    }
    let copy = fcntl(&descriptor, FcntlArg::F_DUPFD_CLOEXEC(libc::STDERR_FILENO + 1))?;
    #[expect(unsafe_code, reason = "fcntl returns a plain number")]
    // SAFETY: the kernel has just created this descriptor, and no other code uses it.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spawn(args: &[&str], directory: Option<&str>) -> Result<SpawnedChild, (SpawnStage, io::Error)> {
        let image = ExecImage::new(args.iter().map(OsStr::new), std::iter::empty(), directory.map(Path::new));
        image.map_err(|error| (SpawnStage::Exec, error))?.spawn(None, || Ok(()))
    }

    fn spawn_error(spawned: Result<SpawnedChild, (SpawnStage, io::Error)>) -> (SpawnStage, Option<i32>) {
        spawned.err().map(|(stage, error)| (stage, error.raw_os_error())).unwrap()
    }

    #[test]
    fn a_failed_spawn_reports_its_stage_and_error() {
        assert_eq!(spawn_error(spawn(&["/missing"], None)), (SpawnStage::Exec, Some(libc::ENOENT)));
        assert_eq!(
            spawn_error(spawn(&["/bin/sh"], Some("/missing"))),
            (SpawnStage::ChangeDirectory, Some(libc::ENOENT))
        );
        let image = ExecImage::new([OsStr::new("/bin/sh")].into_iter(), std::iter::empty(), None).unwrap();
        let refused = image.spawn(None, || Err(nix::errno::Errno::EPERM.into()));
        assert_eq!(spawn_error(refused), (SpawnStage::Exec, Some(libc::EPERM)));
    }

    #[test]
    fn an_argument_with_a_nul_is_rejected() {
        assert!(ExecImage::new([OsStr::new("a\0b")].into_iter(), std::iter::empty(), None).is_err());
    }

    #[test]
    fn stdout_and_stderr_are_separate_pipes() {
        let child =
            spawn(&["/bin/sh", "-c", "read -r line; echo \"$line\"; echo wrong >&2"], None).map_err(drop).unwrap();
        io::Write::write_all(&mut std::fs::File::from(child.stdin), b"hello\n").unwrap();
        let read = |from: OwnedFd| io::read_to_string(std::fs::File::from(from)).unwrap();
        assert_eq!((read(child.stdout), read(child.stderr)), ("hello\n".to_owned(), "wrong\n".to_owned()));
        wait(child.pid);
    }
}
