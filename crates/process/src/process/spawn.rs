//! Fork and exec without the standard library, which cannot start a process *in* a cgroup. Moving a process there
//! afterwards costs eight milliseconds: the kernel waits until no thread of the machine is in the middle of a fork.
//!
//! [`ChildPlan::fork`] carries out a start. It runs in the spawn helper (see `spawn_helper`) or, without one, in this
//! process. [`spawn`] is the part that is the same for both: it creates the pipes and waits until the child
//! has executed its program.

use std::ffi::{CStr, OsStr, OsString};
use std::hint::black_box;
use std::io::{self, PipeReader, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};
use std::{ptr, thread};

use nix::libc::{self, c_char, c_int};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use serde::{Deserialize, Serialize};

use super::descriptors::{OPTIONS_FILE_FD, move_above_reserved};
use super::filter::SyscallFilter;
use super::preparation::{ChildPreparation, ExtraDescriptors, set_parent_death_signal};

#[expect(unsafe_code, reason = "exec searches the PATH that this points to")]
unsafe extern "C" {
    static mut environ: *const *const c_char;
}

// Value of the kernel headers' constant of the same name; libc's type is too narrow for it.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Deadline for the child's exec, in case its file system does not respond: every start waits for the one before it.
pub(super) const EXEC_PATIENCE: Duration = Duration::from_secs(10);

/// Arguments, environment and directory of a child: words that each end with a NUL, one after the other. Not `Debug`,
/// because it contains secrets; overwritten when it is dropped.
pub(super) struct ExecImage {
    words: Vec<u8>,
    shape: ImageShape,
}

/// Numbers of the words in an [`ExecImage`], in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ImageShape {
    // The first is the program: a name to be found in the child's `PATH`, or a path.
    args: usize,
    variables: usize,
    // 0 or 1.
    directories: usize,
}

/// A child to be started, in a form that another process can carry out.
pub(super) struct ChildPlan {
    pub(super) image: ExecImage,
    pub(super) preparation: ChildPreparation,
}

/// Descriptors that a child uses before exec. It keeps the first three and `options_file`.
#[derive(Clone, Copy)]
pub(super) struct ChildDescriptors<'a> {
    pub(super) standard: [BorrowedFd<'a>; 3],
    /// The child writes here why it could not execute its program; exec closes it.
    pub(super) failure: BorrowedFd<'a>,
    pub(super) extra: ExtraDescriptors<'a>,
}

/// The parent that a child gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChildParent {
    /// The calling thread.
    Caller,
    /// The thread that forked this process.
    ParentOfCaller,
}

/// A child that has executed its program. The owner must wait for it.
pub(super) struct SpawnedChild {
    pub(super) pid: Pid,
    pub(super) stdin: OwnedFd,
    pub(super) stdout: OwnedFd,
    pub(super) stderr: OwnedFd,
}

#[derive(Debug)]
pub(super) enum SpawnError {
    /// Any step before or at exec, except entering the working directory.
    Exec(io::Error),
    ChangeDirectory(io::Error),
    /// The spawn helper ended before it answered. It may have forked the child; if so, the child has executed.
    HelperLost,
    /// The keeper does not wait for the child, which was not forked.
    Keeper(io::Error),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SpawnStage {
    Exec,
    ChangeDirectory,
}

impl From<io::Error> for SpawnError {
    fn from(error: io::Error) -> Self {
        Self::Exec(error)
    }
}

impl ExecImage {
    /// Fails if a word contains a NUL.
    pub(super) fn new<'a>(
        args: &[&OsStr],
        environment: impl Iterator<Item = (&'a OsString, &'a OsString)> + Clone,
        directory: Option<&Path>,
    ) -> io::Result<Self> {
        // The buffer never grows: growing leaves a copy of the secrets behind.
        let words = args.iter().map(|arg| arg.len() + 1).sum::<usize>()
            + environment.clone().map(|(name, value)| name.len() + value.len() + 2).sum::<usize>()
            + directory.map_or(0, |path| path.as_os_str().len() + 1);
        let shape = ImageShape {
            args: args.len(),
            variables: environment.clone().count(),
            directories: usize::from(directory.is_some()),
        };
        let mut image = Self { words: Vec::with_capacity(words), shape };
        for arg in args {
            image.push(&[arg.as_bytes()]);
        }
        for (name, value) in environment {
            image.push(&[name.as_bytes(), b"=", value.as_bytes()]);
        }
        if let Some(path) = directory {
            image.push(&[path.as_os_str().as_bytes()]);
        }
        if image.is_complete() { Ok(image) } else { Err(io::Error::other("a word contains a NUL byte")) }
    }

    /// Takes over received words. Returns `None` if they are not those that `shape` describes.
    pub(super) fn from_words(words: Vec<u8>, shape: ImageShape) -> Option<Self> {
        let image = Self { words, shape };
        image.is_complete().then_some(image)
    }

    pub(super) fn words(&self) -> &[u8] {
        &self.words
    }

    pub(super) fn shape(&self) -> ImageShape {
        self.shape
    }

    fn push(&mut self, parts: &[&[u8]]) {
        for part in parts {
            self.words.extend_from_slice(part);
        }
        self.words.push(0);
    }

    fn is_complete(&self) -> bool {
        let ImageShape { args, variables, directories } = self.shape;
        args > 0 && directories <= 1 && self.pointers().count() == args + variables + directories
    }

    fn pointers(&self) -> impl Iterator<Item = *const c_char> {
        let words = self.words.split_inclusive(|byte| *byte == 0);
        words.map_while(|word| CStr::from_bytes_with_nul(word).ok()).map(CStr::as_ptr)
    }
}

impl Drop for ExecImage {
    fn drop(&mut self) {
        self.words.fill(0);
        // Without this the compiler may leave out writes to memory that is freed next.
        black_box(&mut self.words);
    }
}

impl ChildPlan {
    /// Forks a child that prepares itself and executes the program, without waiting for that.
    pub(super) fn fork(&self, descriptors: &ChildDescriptors<'_>, parent: ChildParent) -> io::Result<Pid> {
        let ImageShape { args, variables, .. } = self.image.shape;
        let mut words = self.image.pointers();
        // Only a sandbox is filtered: without one a server has the rights of the satellite.
        let filter = self.preparation.confinement.map(|_| SyscallFilter::new()).transpose()?;
        let child = ForkedChild {
            descriptors,
            preparation: &self.preparation,
            filter,
            args: words.by_ref().take(args).chain([ptr::null()]).collect(),
            environment: words.by_ref().take(variables).chain([ptr::null()]).collect(),
            directory: words.next().unwrap_or(ptr::null()),
        };
        #[expect(unsafe_code, reason = "there is no other way to start a process in a cgroup")]
        // SAFETY: after the fork of a threaded process only async-signal-safe calls are allowed. `exec_or_exit` makes no
        // others, does not allocate, and never returns.
        let pid = unsafe { fork(descriptors.extra.cgroup, parent) }?;
        match pid {
            Some(pid) => Ok(pid),
            None => child.exec_or_exit(),
        }
    }
}

/// Starts a child by means of `fork`, which returns its process id or, if the helper was lost, `None`. It also gets the other
/// ends of the child's standard descriptors. Waits until the child has executed its program.
pub(super) fn spawn(
    extra: ExtraDescriptors<'_>,
    fork: impl FnOnce(&ChildDescriptors<'_>, [BorrowedFd<'_>; 3]) -> Result<Option<Pid>, SpawnError>,
) -> Result<SpawnedChild, SpawnError> {
    let (its_stdin, stdin) = io::pipe()?;
    let (stdout, its_stdout) = io::pipe()?;
    let (stderr, its_stderr) = io::pipe()?;
    let (failure, its_failure) = io::pipe()?;
    // `move_above_reserved` closes the originals: while one is open here, no reader sees the end of a pipe.
    let its_stdin = move_above_reserved(its_stdin.into())?;
    let its_stdout = move_above_reserved(its_stdout.into())?;
    let its_stderr = move_above_reserved(its_stderr.into())?;
    let its_failure = move_above_reserved(its_failure.into())?;
    let standard = [its_stdin.as_fd(), its_stdout.as_fd(), its_stderr.as_fd()];
    let own = [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()];
    let forked = fork(&ChildDescriptors { standard, failure: its_failure.as_fd(), extra }, own)?;
    drop((its_stdin, its_stdout, its_stderr, its_failure));
    let has_executed = is_readable_within(&failure, EXEC_PATIENCE);
    let Some(pid) = forked else { return Err(SpawnError::HelperLost) };
    if !has_executed {
        let _ = kill_process(pid, Signal::KILL);
        // The child may hang in the kernel, and a wait here would hang as well. It is not reaped yet, so its number
        // is not reused.
        let _ = thread::Builder::new().name("satellite-wait".into()).spawn(move || wait(pid));
        let why = "the file system of its program or working directory does not respond";
        return Err(io::Error::new(io::ErrorKind::TimedOut, why).into());
    }
    match read_failure(failure) {
        None => Ok(SpawnedChild { pid, stdin: stdin.into(), stdout: stdout.into(), stderr: stderr.into() }),
        Some(failed) => {
            wait(pid);
            Err(failed)
        }
    }
}

/// The child before exec. Contains pointers into an [`ExecImage`], collected before the fork because the child may not
/// allocate.
struct ForkedChild<'a> {
    descriptors: &'a ChildDescriptors<'a>,
    preparation: &'a ChildPreparation,
    filter: Option<SyscallFilter>,
    args: Vec<*const c_char>,
    environment: Vec<*const c_char>,
    directory: *const c_char,
}

impl ForkedChild<'_> {
    fn exec_or_exit(&self) -> ! {
        let (stage, error) = self.try_exec();
        let [one, two, three, four] = error.raw_os_error().unwrap_or(libc::EIO).to_ne_bytes();
        let message = [stage as u8, one, two, three, four];
        #[expect(unsafe_code, reason = "between fork and exec only plain system calls are permitted")]
        // SAFETY: `failure` is open and `message` has the length that is passed. `_exit` runs no code of this process.
        unsafe {
            libc::write(self.descriptors.failure.as_raw_fd(), message.as_ptr().cast(), message.len());
            libc::_exit(127)
        }
    }

    fn try_exec(&self) -> (SpawnStage, io::Error) {
        if let Err(error) = self.prepare() {
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

    fn prepare(&self) -> io::Result<()> {
        let ChildDescriptors { standard, extra, .. } = self.descriptors;
        // First of all, so that the child never outlives its parent, whatever it waits for.
        set_parent_death_signal(self.preparation.parent)?;
        for (from, to) in standard.iter().zip(0..) {
            replace_descriptor(*from, to)?;
        }
        if let Some(options_file) = extra.options_file {
            replace_descriptor(options_file, OPTIONS_FILE_FD)?;
        }
        self.preparation.carry_out(extra, self.filter)
    }
}

fn replace_descriptor(from: BorrowedFd<'_>, to: RawFd) -> io::Result<()> {
    #[expect(unsafe_code, reason = "the safe wrapper needs an owned descriptor")]
    // SAFETY: both are numbers of descriptors, and a descriptor closed by this was inherited.
    if unsafe { libc::dup2(from.as_raw_fd(), to) } == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Forks, into a cgroup if there is one. Returns `None` in the child.
///
/// # Safety
///
/// The child may make async-signal-safe calls only, and must not return from the caller's function.
#[expect(unsafe_code, reason = "there is no safe fork, and no other way to start a process in a cgroup")]
unsafe fn fork(cgroup: Option<BorrowedFd<'_>>, parent: ChildParent) -> io::Result<Option<Pid>> {
    let has_other_parent = parent == ChildParent::ParentOfCaller;
    let pid = match cgroup {
        // SAFETY: the caller guarantees the conditions above.
        None if !has_other_parent => unsafe { libc::fork() },
        None => {
            const NOTHING: libc::c_ulong = 0;
            // Not `clone3`, which the system call filters of some containers reject. The exit signal is inherited.
            // SAFETY: the caller guarantees the conditions above; without shared memory and stack `clone` is a fork.
            let pid = unsafe { libc::syscall(libc::SYS_clone, libc::CLONE_PARENT, NOTHING, NOTHING, NOTHING, NOTHING) };
            c_int::try_from(pid).unwrap_or(-1)
        }
        Some(cgroup) => {
            // SAFETY: a structure of integers, for which all zeros is valid and means "not set".
            let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
            args.flags = CLONE_INTO_CGROUP;
            if has_other_parent {
                args.flags |= u64::from(libc::CLONE_PARENT.unsigned_abs());
            } else {
                args.exit_signal = u64::from(libc::SIGCHLD.unsigned_abs());
            }
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
    match unsafe { fork(Some(cgroup), ChildParent::Caller) }? {
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
fn read_failure(mut failure: PipeReader) -> Option<SpawnError> {
    let mut message = [0; 5];
    match failure.read_exact(&mut message) {
        Ok(()) => {
            let [stage, error @ ..] = message;
            let error = io::Error::from_raw_os_error(c_int::from_ne_bytes(error));
            let is_directory = stage == SpawnStage::ChangeDirectory as u8;
            Some(if is_directory { SpawnError::ChangeDirectory(error) } else { SpawnError::Exec(error) })
        }
        Err(_) => None,
    }
}

pub(super) fn wait(pid: Pid) {
    while let Err(rustix::io::Errno::INTR) = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(args: &[&str], directory: Option<&str>) -> io::Result<ChildPlan> {
        let args: Vec<&OsStr> = args.iter().map(OsStr::new).collect();
        let image = ExecImage::new(&args, std::iter::empty(), directory.map(Path::new))?;
        let parent = nix::unistd::getpid().as_raw();
        let preparation =
            ChildPreparation { parent, descriptor_limits: None, confinement: None, user: None, mark: None };
        Ok(ChildPlan { image, preparation })
    }

    fn start(plan: &ChildPlan) -> Result<SpawnedChild, SpawnError> {
        spawn(ExtraDescriptors::default(), |descriptors, _| Ok(Some(plan.fork(descriptors, ChildParent::Caller)?)))
    }

    fn errno(error: &io::Error) -> Option<i32> {
        error.raw_os_error()
    }

    #[test]
    fn a_failed_spawn_reports_its_stage_and_error() {
        let failed = |args: &[&str], directory| start(&plan(args, directory).unwrap()).err().unwrap();
        assert!(matches!(failed(&["/missing"], None), SpawnError::Exec(error) if errno(&error) == Some(libc::ENOENT)));
        assert!(
            matches!(failed(&["/bin/sh"], Some("/missing")), SpawnError::ChangeDirectory(error) if errno(&error) == Some(libc::ENOENT))
        );
        let mut orphan = plan(&["/bin/sh"], None).unwrap();
        orphan.preparation.parent = 1;
        assert!(matches!(start(&orphan).err().unwrap(), SpawnError::Exec(error) if errno(&error) == Some(libc::ESRCH)));
    }

    #[test]
    fn an_argument_with_a_nul_is_rejected() {
        assert!(plan(&["a\0b"], None).is_err());
    }

    #[test]
    fn received_words_must_fit_their_description() {
        let shape = |args, variables, directories| ImageShape { args, variables, directories };
        let fits = |words: &[u8], shape| ExecImage::from_words(words.to_vec(), shape).is_some();
        assert!(fits(b"sh\0A=b\0/\0", shape(1, 1, 1)) && fits(b"sh\0\0", shape(2, 0, 0)));
        for (words, shape) in [
            (&b"sh\0A=b\0"[..], shape(1, 1, 1)),
            (b"sh\0A=b\0/", shape(1, 1, 1)),
            (b"sh\0A=b", shape(1, 1, 0)),
            (b"", shape(0, 0, 0)),
            (b"", shape(1, 0, 0)),
            (b"sh\0/\0/\0", shape(1, 0, 2)),
        ] {
            assert!(!fits(words, shape), "{shape:?}");
        }
    }

    #[test]
    fn stdout_and_stderr_are_separate_pipes() {
        let plan = plan(&["/bin/sh", "-c", "read -r line; echo \"$line\"; echo wrong >&2"], None).unwrap();
        let child = start(&plan).map_err(drop).unwrap();
        io::Write::write_all(&mut std::fs::File::from(child.stdin), b"hello\n").unwrap();
        let read = |from: OwnedFd| io::read_to_string(std::fs::File::from(from)).unwrap();
        assert_eq!((read(child.stdout), read(child.stderr)), ("hello\n".to_owned(), "wrong\n".to_owned()));
        wait(child.pid);
    }
}
