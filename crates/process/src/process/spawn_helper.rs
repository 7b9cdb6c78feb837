//! Spawn helper: a small process with one thread that forks the servers. A fork copies the page tables of the process
//! that forks, and each page that the parent or the child then writes; of the satellite that is thousands of pages, of
//! the helper a few. The cost of a start therefore does not depend on the memory of the satellite.
//!
//! ```text
//!  satellite ── ChildPlan, descriptors ──► helper ── clone(CLONE_PARENT) ─┐
//!             ◄──── process id or error ─────                             ▼
//!  keeper ─────────────────── parent of helper and ────────────────────► server
//! ```
//!
//! The keeper forks the helper before the satellite. The helper forks each server as a child of its own parent. So the
//! keeper waits for servers, and the kernel kills them with the keeper, as if it had forked them itself. The helper keeps
//! no descriptor of a server and overwrites each description, which contains secrets. It ends with the satellite. If it
//! ends before, the satellite requests another one of the keeper; only if there is none does it fork servers itself. A
//! satellite that is embedded in a host always does.
//!
//! The helper forks without `CLONE_VM`: a child that shared the memory would also share what it changes for itself
//! before exec, such as the flag that hides the memory from other processes.

use std::ffi::CStr;
use std::fs::{self, OpenOptions};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use nix::errno::Errno;
use nix::libc;
use nix::sys::prctl::set_name;
use nix::sys::signal::SigSet;
use nix::unistd::{ForkResult, close, dup2_stderr, dup2_stdin, dup2_stdout, fork, getpid};
use rustix::cmsg_space;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use super::preparation::{ChildPreparation, ExtraDescriptors, set_parent_death_signal};
use super::spawn::{ChildDescriptors, ChildParent, ChildPlan, EXEC_PATIENCE, ExecImage, ImageShape, wait};
use super::userns::IdMapPipes;
use crate::keeper::run_client::{HeldRun, RunClient};
use crate::program_pages::ProgramPages;

/// Process name, shown to people.
pub(crate) const SPAWN_HELPER_NAME: &CStr = c"satellite-spawn";

// Standard descriptors, failure pipe, cgroup, file of options, and both pipes of the id map.
const DESCRIPTORS_MAX: usize = 8;

/// Fixed part of a request: the lengths of the JSON text and of the words that follow it.
const LENGTHS: usize = 8;

/// The helper until the process launcher takes it.
static STARTED: Mutex<Option<SpawnHelper>> = Mutex::new(None);

/// Process id of the last helper, or 0.
static PID: AtomicU32 = AtomicU32::new(0);

/// Request to fork a child, without its words and descriptors.
#[derive(Serialize, Deserialize)]
struct ForkRequest {
    preparation: ChildPreparation,
    shape: ImageShape,
    has_cgroup: bool,
    has_options_file: bool,
    has_id_map: bool,
}

/// Errors of the machine with which no part of a request is sent.
const NOTHING_SENT: [rustix::io::Errno; 4] = {
    use rustix::io::Errno;
    [Errno::NOMEM, Errno::NOBUFS, Errno::TOOMANYREFS, Errno::INTR]
};

/// A helper process that was just forked, a child of this process.
#[derive(Debug)]
pub(crate) struct ForkedHelper {
    pub(crate) pid: u32,
    /// The helper ends when it is closed.
    pub(crate) stream: UnixStream,
}

/// A helper process in use.
struct SpawnHelper {
    stream: UnixStream,
    // The process, if it is a child of this one. It is killed when this is dropped.
    child: Option<Pid>,
}

/// Forks the children of this process: through the spawn helper if there is one.
pub(super) struct Forker {
    helper: Option<SpawnHelper>,
    // Absent if this process has no keeper, or if the kernel refuses the forks of a helper.
    keeper: Option<&'static Arc<RunClient>>,
}

impl Forker {
    /// Takes over the helper of this process.
    pub(super) fn new() -> Self {
        let helper = STARTED.lock().unwrap_or_else(PoisonError::into_inner).take();
        Self { helper, keeper: RunClient::current() }
    }

    /// Prepares the keeper for a child that will be its own, with these pipes. Requests another helper if the last one was
    /// lost. Returns `None` if the next child will be one of this process.
    pub(super) fn hold(&mut self, run: u64, pipes: [BorrowedFd<'_>; 3]) -> io::Result<Option<HeldRun>> {
        let Some(keeper) = self.keeper else { return Ok(None) };
        if self.helper.is_none() {
            match keeper.new_helper() {
                Ok((pid, stream)) => {
                    PID.store(pid, Ordering::Relaxed);
                    self.helper = Some(SpawnHelper { stream: stream.into(), child: None });
                }
                // The keeper has ended, and this process ends, too.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Err(error),
                Err(error) => {
                    tracing::error!(%error, "the keeper cannot start the process satellite-spawn: the satellite starts the server itself");
                    return Ok(None);
                }
            }
        }
        keeper.hold(run, pipes).map(Some)
    }

    /// Returns true if the last child is a child of the keeper.
    pub(super) fn forks_below_keeper(&self) -> bool {
        self.keeper.is_some() && self.helper.is_some()
    }

    /// Forks a child. Returns `None` if the helper was lost, in which case it may have forked the child.
    pub(super) fn fork(&mut self, plan: &mut ChildPlan, descriptors: &ChildDescriptors<'_>) -> io::Result<Option<Pid>> {
        let own = getpid().as_raw();
        plan.preparation.parent = own;
        let Some(helper) = &mut self.helper else {
            return plan.fork(descriptors, ChildParent::Caller).map(Some);
        };
        if let Some(keeper) = self.keeper {
            plan.preparation.parent = keeper.keeper().pid.cast_signed();
        }
        match helper.fork(plan, descriptors) {
            // Some kernels and system call filters have no such fork; no child exists then.
            Ok(Err(error)) if is_unsupported(&error) => {
                tracing::warn!(%error, "the process satellite-spawn cannot fork here: the satellite starts servers itself");
                (self.helper, self.keeper) = (None, None);
                plan.preparation.parent = own;
                plan.fork(descriptors, ChildParent::Caller).map(Some)
            }
            Ok(forked) => forked.map(Some),
            Err(error) => {
                tracing::error!(%error, "the process satellite-spawn has ended");
                self.helper = None;
                Ok(None)
            }
        }
    }
}

fn is_unsupported(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(errno, Some(Errno::EINVAL | Errno::ENOSYS | Errno::EPERM))
}

/// Forks a helper as a child of this process, which must have one thread.
pub(crate) fn fork_spawn_helper() -> io::Result<ForkedHelper> {
    let (stream, requests) = UnixStream::pair()?;
    // A helper that was stopped by a signal must not stop the satellite.
    stream.set_read_timeout(Some(EXEC_PATIENCE))?;
    stream.set_write_timeout(Some(EXEC_PATIENCE))?;
    let parent = getpid();
    #[expect(unsafe_code, reason = "there is no safe fork")]
    // SAFETY: this process has one thread, so the child may call any function.
    match unsafe { fork() }? {
        ForkResult::Child => {
            drop(stream);
            // An error means that the parent has ended, or that the helper cannot do its work: it ends, and the satellite
            // reads the end of the stream.
            if let Ok(requests) = isolate(requests, parent.as_raw()) {
                serve(&requests);
            }
            std::process::exit(0)
        }
        ForkResult::Parent { child } => Ok(ForkedHelper { pid: child.as_raw().unsigned_abs(), stream }),
    }
}

/// Makes a helper that the keeper has forked the one of this process, for the first process launcher.
pub(crate) fn use_spawn_helper(helper: ForkedHelper) {
    install(helper, None);
}

/// Starts a helper for a process without a keeper. Must be called while the process has one thread.
pub fn start_spawn_helper() -> io::Result<()> {
    let helper = fork_spawn_helper()?;
    let child = Pid::from_raw(helper.pid.cast_signed());
    install(helper, child);
    Ok(())
}

fn install(ForkedHelper { pid, stream }: ForkedHelper, child: Option<Pid>) {
    PID.store(pid, Ordering::Relaxed);
    *STARTED.lock().unwrap_or_else(PoisonError::into_inner) = Some(SpawnHelper { stream, child });
}

/// Returns the process id of the helper of this process, if it was started.
pub fn spawn_helper_pid() -> Option<u32> {
    Some(PID.load(Ordering::Relaxed)).filter(|pid| *pid != 0)
}

impl SpawnHelper {
    /// Returns the outcome of the fork. The outer error means that the helper does not answer.
    fn fork(&mut self, plan: &ChildPlan, descriptors: &ChildDescriptors<'_>) -> io::Result<io::Result<Pid>> {
        let ExtraDescriptors { cgroup, options_file, id_map } = descriptors.extra;
        let request = ForkRequest {
            preparation: plan.preparation,
            shape: plan.image.shape(),
            has_cgroup: cgroup.is_some(),
            has_options_file: options_file.is_some(),
            has_id_map: id_map.is_some(),
        };
        let mut passed = [descriptors.standard.as_slice(), &[descriptors.failure]].concat();
        passed.extend(cgroup);
        passed.extend(options_file);
        passed.extend(id_map.iter().flat_map(|pipes| [pipes.request, pipes.response]));
        if let Err(error) = self.send(&serde_json::to_vec(&request)?, plan.image.words(), &passed)? {
            return Ok(Err(error));
        }
        let mut answer = [0; 8];
        self.stream.read_exact(&mut answer)?;
        let [pid, errno] = [[answer[0], answer[1], answer[2], answer[3]], [answer[4], answer[5], answer[6], answer[7]]]
            .map(i32::from_ne_bytes);
        Ok(Pid::from_raw(pid).ok_or_else(|| io::Error::from_raw_os_error(errno)))
    }

    /// Sends a request. The inner error means that nothing was sent, because the machine lacks memory or the request is too
    /// long: the helper can take the next request.
    fn send(&mut self, request: &[u8], words: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<io::Result<()>> {
        let (Ok(request_length), Ok(words_length)) = (u32::try_from(request.len()), u32::try_from(words.len())) else {
            return Ok(Err(io::Error::from_raw_os_error(libc::E2BIG)));
        };
        let lengths = [request_length, words_length];
        let head = [lengths.map(u32::to_ne_bytes).as_flattened(), request].concat();
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut passed = SendAncillaryBuffer::new(&mut space);
        passed.push(SendAncillaryMessage::ScmRights(descriptors));
        let parts = [IoSlice::new(&head), IoSlice::new(words)];
        let sent = match sendmsg(&self.stream, &parts, &mut passed, SendFlags::NOSIGNAL) {
            Ok(sent) => sent,
            Err(error) if NOTHING_SENT.contains(&error) => return Ok(Err(error.into())),
            Err(error) => return Err(error.into()),
        };
        // Only a long list of words does not fit into the buffer of the socket.
        let rest = sent.checked_sub(head.len()).ok_or(io::ErrorKind::WriteZero)?;
        self.stream.write_all(&words[rest..]).map(Ok)
    }
}

impl Drop for SpawnHelper {
    fn drop(&mut self) {
        let Some(pid) = self.child else { return };
        // It is not reaped yet, so its number is not reused.
        let _ = kill_process(pid, Signal::KILL);
        // On its own thread: a helper that hangs in the kernel must not stop the satellite.
        let _ = thread::Builder::new().name("satellite-wait".into()).spawn(move || wait(pid));
    }
}

// ---- in the helper ----

/// Gives up everything that the helper inherited and does not need. Returns the stream as the lowest descriptor above
/// the standard ones, so that no descriptor of a child gets its number.
fn isolate(requests: UnixStream, parent: libc::pid_t) -> io::Result<UnixStream> {
    set_parent_death_signal(parent)?;
    let _ = set_name(SPAWN_HELPER_NAME);
    // It ends with the stream and not by a signal that a terminal or a service manager sends to all processes. A
    // child unblocks the signals after it has reset their actions.
    SigSet::all().thread_block()?;
    let null = OpenOptions::new().read(true).write(true).open("/dev/null")?;
    dup2_stdin(&null)?;
    dup2_stdout(&null)?;
    dup2_stderr(&null)?;
    drop(null);
    let names = fs::read_dir("/proc/self/fd")?.map(|entry| entry.map(|entry| entry.file_name()));
    let open = names.collect::<io::Result<Vec<_>>>()?;
    let open = open.iter().filter_map(|name| name.to_str()?.parse::<RawFd>().ok());
    for descriptor in open.filter(|open| *open > libc::STDERR_FILENO && *open != requests.as_raw_fd()) {
        // The owners are in stack frames to which this process does not return. One of the numbers is that of the
        // directory, which is closed already.
        let _ = close(descriptor);
    }
    // An error costs some memory and nothing else.
    let _ = ProgramPages::find().and_then(|pages| pages.release());
    let lowest = requests.try_clone()?;
    Ok(if lowest.as_raw_fd() < requests.as_raw_fd() { lowest } else { requests })
}

/// Forks a child for each request, until the satellite closes the stream.
fn serve(mut stream: &UnixStream) {
    while let Ok((plan, received)) = receive(stream) {
        let outcome =
            received.descriptors().and_then(|descriptors| plan.fork(&descriptors, ChildParent::ParentOfCaller));
        // Closes the descriptors and overwrites the words before the satellite learns the outcome.
        drop((plan, received));
        let answer = match outcome {
            Ok(pid) => [pid.as_raw_nonzero().get(), 0],
            Err(error) => [0, error.raw_os_error().unwrap_or(libc::EIO)],
        };
        if stream.write_all(answer.map(i32::to_ne_bytes).as_flattened()).is_err() {
            return;
        }
    }
}

/// Descriptors of a request, in the order in which they were sent.
struct ReceivedDescriptors {
    request: ForkRequest,
    all: Vec<OwnedFd>,
}

impl ReceivedDescriptors {
    fn descriptors(&self) -> io::Result<ChildDescriptors<'_>> {
        let ForkRequest { has_cgroup, has_options_file, has_id_map, .. } = self.request;
        let mut all = self.all.iter().map(AsFd::as_fd);
        // The kernel passes fewer descriptors than were sent if the helper may open no more.
        let mut next = || all.next().ok_or(Errno::EMFILE);
        let (standard, failure) = ([next()?, next()?, next()?], next()?);
        let cgroup = has_cgroup.then(&mut next).transpose()?;
        let options_file = has_options_file.then(&mut next).transpose()?;
        let id_map = if has_id_map { Some(IdMapPipes { request: next()?, response: next()? }) } else { None };
        Ok(ChildDescriptors { standard, failure, extra: ExtraDescriptors { cgroup, options_file, id_map } })
    }
}

fn receive(mut stream: &UnixStream) -> io::Result<(ChildPlan, ReceivedDescriptors)> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut passed = RecvAncillaryBuffer::new(&mut space);
    let mut lengths = [0; LENGTHS];
    // All descriptors come with the first byte.
    let received = recvmsg(stream, &mut [IoSliceMut::new(&mut lengths)], &mut passed, RecvFlags::CMSG_CLOEXEC)?;
    let rights = passed.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(rights) => Some(rights),
        _ => None,
    });
    let all: Vec<OwnedFd> = rights.flatten().collect();
    stream.read_exact(&mut lengths[received.bytes..])?;
    let [one, two, three, four, five, six, seven, eight] = lengths;
    let mut read = |length: [u8; 4]| {
        let mut bytes = vec![0; u32::from_ne_bytes(length) as usize];
        stream.read_exact(&mut bytes).map(|()| bytes)
    };
    let (request, words) = (read([one, two, three, four])?, read([five, six, seven, eight])?);
    let request: ForkRequest = serde_json::from_slice(&request)?;
    let image = ExecImage::from_words(words, request.shape).ok_or(io::ErrorKind::InvalidData)?;
    Ok((ChildPlan { image, preparation: request.preparation }, ReceivedDescriptors { request, all }))
}
