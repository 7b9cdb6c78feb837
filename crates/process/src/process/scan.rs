//! The thread that detects empty trees and reaps their leaders only then. A cgroup reports that it is empty; for other
//! trees the thread reads `/proc`, once for all of them. It also kills processes that have left a tree that is being
//! killed.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::proc_info::ProcessCensus;
use super::tree::{ProcessTree, StraySearch};

const PAUSE: Duration = Duration::from_millis(5);

// Minimum pause as a multiple of the duration of a round, so that on a machine with very many processes the thread is
// still mostly idle.
const IDLE_SHARE: u32 = 4;

// Delay of a search for processes that have left their cgroup. A restart is thus not slowed down by it, and one census
// serves several searches.
const SWEEP_DELAY: Duration = Duration::from_millis(20);

// Number of rounds without an ended process after which the pause grows, up to `PAUSE_MAX`.
const QUIET_ROUNDS: u32 = 20;
const PAUSE_MAX: Duration = Duration::from_millis(50);

// Handle to the thread, which ends with its last handle and the last tree it watches.
#[derive(Clone)]
pub(super) struct TreeScanner(mpsc::Sender<ScanOrder>);

enum ScanOrder {
    Watch(WatchedTree),
    Terminate(Arc<ProcessTree>),
    Sweep(StraySearch),
}

struct WatchedTree {
    tree: Arc<ProcessTree>,
    // Receiver of the report; `None` if the tree is only to be reaped.
    reply: Option<oneshot::Sender<()>>,
}

impl WatchedTree {
    fn is_abandoned(&self) -> bool {
        self.reply.as_ref().is_some_and(oneshot::Sender::is_closed)
    }
}

impl TreeScanner {
    /// Starts the thread. Fails if `/proc` cannot be read, because the end of a tree could then not be detected.
    pub(super) fn start() -> io::Result<Self> {
        ProcessCensus::take().map_err(|error| io::Error::new(error.kind(), format!("cannot read /proc: {error}")))?;
        let (sender, orders) = mpsc::channel();
        thread::Builder::new().name("satellite-scan".into()).spawn(move || ScanLoop::default().run(&orders))?;
        Ok(Self(sender))
    }

    /// Resolves when the leader has ended and is reaped, and no member of its tree is left.
    pub(super) async fn wait_all(&self, tree: &Arc<ProcessTree>) {
        if tree.is_reaped() {
            return;
        }
        // With a cgroup the answer is immediate.
        if tree.is_empty(None) {
            return self.reap_and_sweep(tree);
        }
        let (reply_sender, reply_receiver) = oneshot::channel();
        let _ = self.0.send(ScanOrder::Watch(WatchedTree { tree: Arc::clone(tree), reply: Some(reply_sender) }));
        // The thread has ended: kill and reap the tree here.
        if reply_receiver.await.is_err() {
            tree.kill();
            tree.reap();
        }
    }

    /// Reaps an empty tree. Processes that have left its cgroup are killed afterwards, so that no caller waits for the
    /// search.
    fn reap_and_sweep(&self, tree: &ProcessTree) {
        tree.reap();
        if let Some(search) = tree.stray_search() {
            self.sweep(search);
        }
    }

    /// Kills all processes that a search finds, until it finds none.
    pub(super) fn sweep(&self, search: StraySearch) {
        let _ = self.0.send(ScanOrder::Sweep(search));
    }

    pub(super) fn terminate(&self, tree: &Arc<ProcessTree>) {
        let _ = self.0.send(ScanOrder::Terminate(Arc::clone(tree)));
    }

    pub(super) fn reap_in_background(&self, tree: Arc<ProcessTree>) {
        let _ = self.0.send(ScanOrder::Watch(WatchedTree { tree, reply: None }));
    }
}

#[derive(Default)]
struct ScanLoop {
    watched: Vec<WatchedTree>,
    to_terminate: Vec<Arc<ProcessTree>>,
    to_sweep: Vec<StraySearch>,
    // Time of the next round of searches, if there are any.
    sweep_at: Option<Instant>,
    quiet_rounds: u32,
    // Trees whose server may ignore SIGTERM, see `ProcessTree::kill_server_ignoring_sigterm`.
    terminating: Vec<Arc<ProcessTree>>,
}

impl ScanLoop {
    fn run(mut self, orders: &mpsc::Receiver<ScanOrder>) {
        loop {
            if self.is_idle() {
                match self.receive(orders) {
                    Ok(first) => self.accept(first),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) if self.to_sweep.is_empty() => return,
                    Err(RecvTimeoutError::Disconnected) => self.sweep_at = Some(Instant::now()),
                }
                if self.is_idle() {
                    continue;
                }
            }
            for order in orders.try_iter() {
                self.accept(order);
            }
            self.watched.retain(|one| !one.is_abandoned());
            let (began, before) = (Instant::now(), self.watched.len());
            // A panic that ended this thread would leave every ended server unreaped.
            if catch_unwind(AssertUnwindSafe(|| self.run_round())).is_err() {
                tracing::error!("the thread that reaps ended servers panicked and continues");
            }
            self.quiet_rounds = if self.watched.len() == before { self.quiet_rounds + 1 } else { 0 };
            // The pause grows for trees that use their whole grace period or never die.
            let pause = (PAUSE * (1 + self.quiet_rounds / QUIET_ROUNDS)).min(PAUSE_MAX);
            thread::sleep(pause.max(began.elapsed() * IDLE_SHARE));
        }
    }

    fn receive(&self, orders: &mpsc::Receiver<ScanOrder>) -> Result<ScanOrder, RecvTimeoutError> {
        match self.sweep_at {
            Some(at) => orders.recv_timeout(at.saturating_duration_since(Instant::now())),
            None => orders.recv().map_err(RecvTimeoutError::from),
        }
    }

    fn is_idle(&self) -> bool {
        self.watched.is_empty() && self.terminating.is_empty() && self.to_terminate.is_empty() && !self.is_sweep_due()
    }

    fn is_sweep_due(&self) -> bool {
        self.sweep_at.is_some_and(|at| at <= Instant::now())
    }

    fn add_search(&mut self, search: StraySearch) {
        self.to_sweep.push(search);
        self.sweep_at.get_or_insert_with(|| Instant::now() + SWEEP_DELAY);
    }

    fn accept(&mut self, order: ScanOrder) {
        self.quiet_rounds = 0;
        match order {
            ScanOrder::Watch(watched) => self.watched.push(watched),
            ScanOrder::Terminate(tree) => self.to_terminate.push(tree),
            ScanOrder::Sweep(search) => self.add_search(search),
        }
    }

    fn run_round(&mut self) {
        self.terminating.retain(|tree| tree.end().is_none());
        // Only trees whose leader had ended before the census: from then on only members can create new members.
        let ended = |one: &WatchedTree| one.tree.end().is_some();
        let due: Vec<bool> = self.watched.iter().map(|one| ended(one) || one.tree.is_kill_requested()).collect();
        let in_question = self.watched.iter().zip(&due).any(|(one, due)| *due && one.tree.needs_census());
        // A census fails if descriptors or memory are short; the next one may succeed.
        let sweeps = self.is_sweep_due();
        let is_requested = !self.terminating.is_empty() || !self.to_terminate.is_empty() || sweeps;
        let census = (in_question || is_requested).then(ProcessCensus::take).and_then(Result::ok);
        if let Some(census) = &census {
            for tree in std::mem::take(&mut self.to_terminate) {
                tree.terminate(census);
                if tree.can_ignore_sigterm() {
                    self.terminating.push(tree);
                }
            }
            self.terminating.iter().for_each(|tree| tree.kill_server_ignoring_sigterm(census));
            if sweeps {
                // Repeated until no process is found: a process may fork while it is being killed.
                self.to_sweep.retain_mut(|search| search.kill(census));
                self.sweep_at = self.sweep_at.filter(|_| !self.to_sweep.is_empty());
            }
        }
        let (mut due, mut searches) = (due.into_iter(), Vec::new());
        self.watched.retain_mut(|one| {
            if !due.next().unwrap_or_default() {
                return true;
            }
            if one.tree.is_empty(census.as_ref()) {
                one.tree.reap();
                searches.extend(one.tree.stray_search());
                if let Some(reply_sender) = one.reply.take() {
                    let _ = reply_sender.send(());
                }
                return false;
            }
            if one.tree.is_kill_requested() {
                match &census {
                    Some(census) => one.tree.kill_members(census),
                    None => one.tree.kill(),
                }
            }
            true
        });
        for search in searches {
            self.add_search(search);
        }
    }
}
