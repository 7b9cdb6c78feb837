//! The satellite's side of the runs whose leaders are children of the keeper. The keeper reports the end of a leader, and
//! reaps it when the satellite requests that. It holds the pipes of the servers, so that the next satellite can adopt the
//! runs if this one crashes.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::time::{Duration, Instant};
use std::{io, thread};

use mcp_satellite_actors::model::session_description::SESSION_DESCRIPTION_MAX;
use mcp_satellite_actors::seam::ProcessEnd;
use nix::sys::memfd::{MFdFlags, memfd_create};
use rustix::fs::{SealFlags, fcntl_add_seals};
use tokio::sync::watch;

use super::inherited::{InheritedRuns, KeeperIdentity, RunDescriptors};
use super::messages::{KeeperSocket, RunEvent, RunRequest};
use super::runs::KeptRun;

/// Time to wait for an answer of the keeper, which can be stopped by a signal.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Number of bits of the request ids that one satellite uses for a server. A server that is adopted gets higher ones.
const REQUEST_ID_BITS: u32 = 32;

static CURRENT: OnceLock<Arc<RunClient>> = OnceLock::new();

/// Connection of the satellite to the keeper that waits for its servers.
pub(crate) struct RunClient {
    keeper: KeeperIdentity,
    // Read by a thread, because the keeper can be stopped and then reads nothing. At most four requests of a run wait.
    requests: mpsc::Sender<(RunRequest, Vec<OwnedFd>)>,
    // One byte for each run: 1 while a line to its server may be incomplete. It outlives the satellite.
    open_lines: File,
    left: Mutex<Vec<LeftRun>>,
    answers: Mutex<KeeperAnswers>,
    answered: Condvar,
    reaped_orphans: AtomicU64,
}

#[derive(Default)]
struct KeeperAnswers {
    // Error number of a run that is not held.
    holds: HashMap<u64, Option<i32>>,
    ends: HashMap<u64, watch::Sender<Option<ProcessEnd>>>,
    helper: Option<io::Result<(u32, OwnedFd)>>,
    // True after the keeper has ended.
    is_closed: bool,
}

impl KeeperAnswers {
    fn answer_hold(&mut self, run: u64, errno: Option<i32>) {
        // Nobody waits for a late answer.
        if self.ends.contains_key(&run) {
            self.holds.insert(run, errno);
        }
    }
}

impl RunClient {
    /// Starts the thread that sends the requests. The ends of inherited runs are noted from now on.
    pub(super) fn start(
        socket: Arc<KeeperSocket>,
        keeper: KeeperIdentity,
        inherited: InheritedRuns,
    ) -> io::Result<Arc<Self>> {
        let InheritedRuns { runs, open_lines } = inherited;
        let (requests, to_send) = mpsc::channel::<(RunRequest, Vec<OwnedFd>)>();
        let (answers, answered, reaped_orphans) = (Mutex::default(), Condvar::new(), AtomicU64::new(0));
        let left = Mutex::default();
        let client = Arc::new(Self { keeper, requests, open_lines, left, answers, answered, reaped_orphans });
        let answered = Arc::downgrade(&client);
        let send = move || {
            for (request, descriptors) in to_send {
                let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
                // Another error means that the keeper has ended, which the receiving thread reports.
                if let Err(error) = socket.send_patiently(&request, &descriptors)
                    && let (RunRequest::Hold { run }, Some(errno)) = (&request, error.raw_os_error())
                    && let Some(client) = answered.upgrade()
                {
                    client.receive(RunEvent::NotHeld { run: *run, errno }, Vec::new());
                }
            }
        };
        thread::Builder::new().name("satellite-above".into()).spawn(send)?;
        let left = runs.into_iter().map(|(kept, descriptors)| LeftRun::new(&client, kept, descriptors));
        let left: Vec<LeftRun> = left.collect();
        *client.left.lock().unwrap_or_else(PoisonError::into_inner) = left;
        Ok(client)
    }

    /// Returns the runs that earlier satellites have left, once. A run that is dropped is not waited for any more.
    pub(crate) fn take_left(&self) -> Vec<LeftRun> {
        std::mem::take(&mut self.left.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Makes this the client that [`current`](Self::current) returns.
    pub(super) fn install(self: &Arc<Self>) {
        let _ = CURRENT.set(Arc::clone(self));
    }

    /// Returns the client of this process; `None` if no keeper is above it.
    pub(crate) fn current() -> Option<&'static Arc<Self>> {
        CURRENT.get()
    }

    pub(crate) fn keeper(&self) -> &KeeperIdentity {
        &self.keeper
    }

    /// Returns the number of adopted processes that the keeper has reaped.
    pub(crate) fn reaped_orphans(&self) -> u64 {
        self.reaped_orphans.load(Ordering::Relaxed)
    }

    /// Makes the keeper wait for the leader of a run, which may be forked afterwards, and hold its pipes: the write end of
    /// stdin, and the read ends of stdout and stderr. Blocks.
    ///
    /// # Errors
    /// The keeper refuses or does not answer, or this process has no descriptor left.
    pub(crate) fn hold(self: &Arc<Self>, run: u64, pipes: [BorrowedFd<'_>; 3]) -> io::Result<HeldRun> {
        let pipes = pipes.iter().map(BorrowedFd::try_clone_to_owned).collect::<io::Result<Vec<OwnedFd>>>()?;
        // Discards the run if it is dropped because of an error.
        let held = self.expect_end(run, None);
        self.send_with(RunRequest::Hold { run }, pipes);
        match self.wait(|answers| answers.holds.remove(&run))? {
            None => Ok(held),
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    /// Returns process id and stream of a new spawn helper. The keeper kills the last one. Blocks.
    ///
    /// # Errors
    /// The keeper cannot start one or does not answer.
    pub(crate) fn new_helper(&self) -> io::Result<(u32, OwnedFd)> {
        self.answers().helper = None;
        self.send(RunRequest::NewHelper);
        self.wait(|answers| answers.helper.take())?
    }

    /// Notes a message of the keeper.
    pub(super) fn receive(&self, event: RunEvent, descriptors: Vec<OwnedFd>) {
        let mut answers = self.answers();
        match event {
            RunEvent::Held { run } => answers.answer_hold(run, None),
            RunEvent::NotHeld { run, errno } => answers.answer_hold(run, Some(errno)),
            RunEvent::Ended { run, code, signal } => {
                if let Some(end) = answers.ends.get(&run) {
                    end.send_replace(Some(ProcessEnd { code, signal }));
                }
            }
            RunEvent::Helper { pid } => {
                let stream = descriptors.into_iter().next().ok_or(io::ErrorKind::InvalidData.into());
                answers.helper = Some(stream.map(|stream| (pid, stream)));
            }
            RunEvent::NoHelper { errno } => answers.helper = Some(Err(io::Error::from_raw_os_error(errno))),
            RunEvent::Orphans { reaped } => self.reaped_orphans.store(reaped, Ordering::Relaxed),
        }
        drop(answers);
        self.answered.notify_all();
    }

    /// Notes that the keeper has ended.
    pub(super) fn close(&self) {
        self.answers().is_closed = true;
        self.answered.notify_all();
    }

    fn expect_end(self: &Arc<Self>, run: u64, known: Option<ProcessEnd>) -> HeldRun {
        let (sender, end) = watch::channel(known);
        self.answers().ends.insert(run, sender);
        HeldRun { client: Arc::clone(self), run, end, is_reaped: AtomicBool::new(false) }
    }

    fn send(&self, request: RunRequest) {
        self.send_with(request, Vec::new());
    }

    fn send_with(&self, request: RunRequest, descriptors: Vec<OwnedFd>) {
        // An error means that the keeper has ended.
        let _ = self.requests.send((request, descriptors));
    }

    fn wait<T>(&self, mut take: impl FnMut(&mut KeeperAnswers) -> Option<T>) -> io::Result<T> {
        let until = Instant::now() + ANSWER_TIMEOUT;
        let mut answers = self.answers();
        loop {
            if let Some(answer) = take(&mut answers) {
                return Ok(answer);
            }
            let remaining = until.saturating_duration_since(Instant::now());
            if answers.is_closed || remaining.is_zero() {
                let kind = if answers.is_closed { io::ErrorKind::BrokenPipe } else { io::ErrorKind::TimedOut };
                return Err(io::Error::new(kind, "the keeper does not answer"));
            }
            answers = self.answered.wait_timeout(answers, remaining).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn answers(&self) -> MutexGuard<'_, KeeperAnswers> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A run for whose leader the keeper waits. Dropping it leaves the leader to the keeper.
pub(crate) struct HeldRun {
    client: Arc<RunClient>,
    run: u64,
    end: watch::Receiver<Option<ProcessEnd>>,
    is_reaped: AtomicBool,
}

impl HeldRun {
    /// Reports the leader, which has executed its program. From now on the keeper reports its end.
    pub(crate) fn start(&self, pid: u32, start_time: u64) {
        self.client.send(RunRequest::Started { run: self.run, pid, start_time });
    }

    /// Lets the keeper hold a description of the session for the next satellite, instead of the last one.
    ///
    /// # Errors
    /// This process has no descriptor or memory left.
    pub(crate) fn describe(&self, description: &[u8]) -> io::Result<()> {
        let file = memfd_create(c"satellite-session", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
        let mut file = File::from(file);
        file.write_all(description)?;
        fcntl_add_seals(&file, SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE)?;
        self.client.send_with(RunRequest::Describe { run: self.run }, vec![file.into()]);
        Ok(())
    }

    /// Lets the keeper close stdin of the server, as this process does.
    pub(crate) fn close_stdin(&self) {
        self.client.send(RunRequest::CloseStdin { run: self.run });
    }

    /// Returns true if the last line to the server may be incomplete.
    pub(crate) fn is_line_open(&self) -> bool {
        let mut flag = [0];
        // Behind the end of the file no flag was ever set.
        matches!(self.client.open_lines.read_at(&mut flag, self.run), Ok(1)) && flag != [0]
    }

    /// Notes whether the last line to the server may be incomplete. The note outlives a crash of this process.
    pub(crate) fn set_line_open(&self, is_open: bool) {
        if let Err(error) = self.client.open_lines.write_at(&[u8::from(is_open)], self.run) {
            tracing::debug!(%error, run = self.run, "cannot note an incomplete line");
        }
    }

    pub(crate) fn run(&self) -> u64 {
        self.run
    }

    /// Returns the end of the leader, if the keeper has reported it.
    pub(crate) fn end(&self) -> Option<ProcessEnd> {
        *self.end.borrow()
    }

    pub(crate) async fn wait(&self) {
        // An error is impossible: the sender lives as long as this.
        let _ = self.end.clone().wait_for(Option::is_some).await;
    }

    /// Lets the keeper reap the leader. Its process id may be reused afterwards.
    pub(crate) fn reap(&self) {
        self.is_reaped.store(true, Ordering::Relaxed);
        self.client.send(RunRequest::Reap { run: self.run });
    }

    /// Returns true after the keeper has ended: the end of the leader will not be reported.
    pub(crate) fn is_keeper_gone(&self) -> bool {
        self.client.answers().is_closed
    }
}

impl Drop for HeldRun {
    fn drop(&mut self) {
        if !self.is_reaped.load(Ordering::Relaxed) {
            self.client.send(RunRequest::Discard { run: self.run });
        }
        let mut answers = self.client.answers();
        answers.ends.remove(&self.run);
        answers.holds.remove(&self.run);
    }
}

/// A run that an earlier satellite has left.
pub(crate) struct LeftRun {
    pub(crate) held: HeldRun,
    pub(crate) pid: u32,
    /// Start time of the leader in clock ticks since boot.
    pub(crate) start_time: u64,
    /// Id of the first request that this satellite may send to the server.
    pub(crate) first_id: u64,
    /// Write end of stdin, unless a satellite has closed it.
    pub(crate) stdin: Option<OwnedFd>,
    pub(crate) stdout: OwnedFd,
    pub(crate) stderr: OwnedFd,
    /// Last description of the session, if there is one.
    pub(crate) description: Option<Vec<u8>>,
}

impl LeftRun {
    fn new(client: &Arc<RunClient>, kept: KeptRun, descriptors: RunDescriptors) -> Self {
        let KeptRun { run, pid, start_time, attachment, end } = kept;
        let RunDescriptors { stdin, stdout, stderr, description } = descriptors;
        let held = client.expect_end(run, end);
        let description = description.and_then(|file| read_description(&File::from(file)).ok());
        Self { held, pid, start_time, first_id: attachment << REQUEST_ID_BITS, stdin, stdout, stderr, description }
    }
}

/// Reads a file whose position is shared with other processes.
fn read_description(file: &File) -> io::Result<Vec<u8>> {
    let length = usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX).min(SESSION_DESCRIPTION_MAX + 1);
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::super::messages::SatelliteMessage;
    use super::*;

    fn open_lines() -> File {
        File::from(memfd_create(c"satellite-open-lines", MFdFlags::MFD_CLOEXEC).unwrap())
    }

    fn client_with(inherited: InheritedRuns) -> (Arc<RunClient>, KeeperSocket) {
        let (keeper, below) = KeeperSocket::pair().unwrap();
        let identity = KeeperIdentity { pid: 1, start_time: 0, id: "feed".into(), first_run: 1 };
        (RunClient::start(Arc::new(below), identity, inherited).unwrap(), keeper)
    }

    fn client() -> (Arc<RunClient>, KeeperSocket) {
        client_with(InheritedRuns { runs: Vec::new(), open_lines: open_lines() })
    }

    fn requests(keeper: &KeeperSocket, count: usize) -> Vec<RunRequest> {
        let receive = |_| match keeper.receive().unwrap().unwrap().0 {
            SatelliteMessage::Run(request) => request,
            SatelliteMessage::Lifecycle(other) => panic!("{other:?}"),
        };
        (0..count).map(receive).collect()
    }

    /// Holds a run, which the keeper answers with `event`.
    fn hold(client: &Arc<RunClient>, keeper: &KeeperSocket, run: u64, event: RunEvent) -> io::Result<HeldRun> {
        thread::scope(|scope| {
            let held = scope.spawn(|| client.hold(run, [keeper.as_fd(); 3]));
            assert_eq!(requests(keeper, 1), [RunRequest::Hold { run }]);
            client.receive(event, Vec::new());
            held.join().unwrap()
        })
    }

    #[tokio::test]
    async fn a_leader_is_reaped_on_request_and_a_failed_start_is_discarded() {
        let (client, keeper) = client();
        let held = hold(&client, &keeper, 1, RunEvent::Held { run: 1 }).unwrap();
        held.start(70, 100);
        assert_eq!(held.end(), None);
        client.receive(RunEvent::Ended { run: 1, code: Some(3), signal: None }, Vec::new());
        held.wait().await;
        assert_eq!(held.end(), Some(ProcessEnd { code: Some(3), signal: None }));
        held.reap();
        drop(held);
        let started = RunRequest::Started { run: 1, pid: 70, start_time: 100 };
        assert_eq!(requests(&keeper, 2), [started, RunRequest::Reap { run: 1 }]);
        drop(hold(&client, &keeper, 2, RunEvent::Held { run: 2 }).unwrap());
        assert_eq!(requests(&keeper, 1), [RunRequest::Discard { run: 2 }]);
        assert!(client.answers().ends.is_empty() && client.answers().holds.is_empty());
    }

    #[test]
    fn a_refused_run_is_an_error() {
        let (client, keeper) = client();
        let refused = hold(&client, &keeper, 1, RunEvent::NotHeld { run: 1, errno: 24 }).err().unwrap();
        assert_eq!(refused.raw_os_error(), Some(24));
        assert_eq!(requests(&keeper, 1), [RunRequest::Discard { run: 1 }]);
    }

    #[test]
    fn the_stream_of_a_new_helper_arrives_with_its_process_id() {
        let (client, keeper) = client();
        thread::scope(|scope| {
            let helper = scope.spawn(|| client.new_helper());
            assert_eq!(requests(&keeper, 1), [RunRequest::NewHelper]);
            client.receive(RunEvent::Helper { pid: 70 }, vec![keeper.as_fd().try_clone_to_owned().unwrap()]);
            assert_eq!(helper.join().unwrap().unwrap().0, 70);
            let helper = scope.spawn(|| client.new_helper());
            assert_eq!(requests(&keeper, 1), [RunRequest::NewHelper]);
            client.receive(RunEvent::NoHelper { errno: 11 }, Vec::new());
            assert_eq!(helper.join().unwrap().unwrap_err().raw_os_error(), Some(11));
        });
    }

    #[test]
    fn after_the_end_of_the_keeper_nothing_waits_for_it() {
        let (client, keeper) = client();
        let held = hold(&client, &keeper, 1, RunEvent::Held { run: 1 }).unwrap();
        let below = open_lines();
        drop(keeper);
        client.close();
        assert!(held.is_keeper_gone() && client.hold(2, [below.as_fd(); 3]).is_err() && client.new_helper().is_err());
    }

    #[test]
    fn a_description_and_an_incomplete_line_outlive_the_satellite() {
        let lines = open_lines();
        let (client, keeper) = client_with(InheritedRuns { runs: Vec::new(), open_lines: lines.try_clone().unwrap() });
        let held = hold(&client, &keeper, 9000, RunEvent::Held { run: 9000 }).unwrap();
        assert!(!held.is_line_open());
        held.set_line_open(true);
        held.describe(b"the session").unwrap();
        let (message, descriptors) = keeper.receive::<RunRequest>().unwrap().unwrap();
        assert_eq!((message, descriptors.len()), (RunRequest::Describe { run: 9000 }, 1));
        let description = descriptors.into_iter().next().unwrap();
        assert!(File::from(description.try_clone().unwrap()).write_all(b"x").is_err(), "it is sealed");

        let pipe = || keeper.as_fd().try_clone_to_owned().unwrap();
        let descriptors =
            RunDescriptors { stdin: Some(pipe()), stdout: pipe(), stderr: pipe(), description: Some(description) };
        let kept = KeptRun { run: 9000, pid: 70, start_time: 100, attachment: 2, end: None };
        let (next, keeper) = client_with(InheritedRuns { runs: vec![(kept, descriptors)], open_lines: lines });
        let left = next.take_left().remove(0);
        assert_eq!((left.pid, left.start_time, left.first_id), (70, 100, 2 << 32));
        assert_eq!(left.description.as_deref(), Some(&b"the session"[..]));
        assert!(left.held.is_line_open() && left.stdin.is_some() && left.held.end().is_none());
        next.receive(RunEvent::Ended { run: 9000, code: Some(0), signal: None }, Vec::new());
        assert_eq!(left.held.end(), Some(ProcessEnd { code: Some(0), signal: None }));
        left.held.set_line_open(false);
        assert!(!left.held.is_line_open());
        left.held.close_stdin();
        left.held.reap();
        assert_eq!(requests(&keeper, 2), [RunRequest::CloseStdin { run: 9000 }, RunRequest::Reap { run: 9000 }]);
        assert!(next.take_left().is_empty(), "a run is left to one owner");
    }
}
