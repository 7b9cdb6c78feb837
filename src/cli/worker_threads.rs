//! Worker threads of the async runtime that follow the load.
//!
//! A call passes through several tasks. If two workers are awake, they take these tasks from each other, and each transfer
//! wakes a thread, which costs more than the task itself. So one worker serves a small load, and the others are held: a
//! task blocks each of them. A thread observes the load and releases them when the CPU time of the process approaches what
//! the active workers can use, or when the active workers do not run a task in time because all of them are blocked.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::watch;

/// Pause between two looks at the load while the process works, and while it is idle.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
const IDLE_INTERVAL: Duration = Duration::from_millis(250);
/// CPU time per second below which the process is idle.
const IDLE_LOAD: f64 = 0.02;
/// Share of the CPU time of the active workers above which another one is released.
const RELEASE_ABOVE: f64 = 0.85;
/// Share below which a worker less would suffice, and consecutive looks that must find it.
const HOLD_BELOW: f64 = 0.5;
const HOLD_AFTER: u32 = 10;
/// Consecutive idle looks, two seconds, after which the process has come to rest.
const REST_AFTER: u32 = 8;

/// Decides how many workers are active. `load` is the CPU time of the process per second, in cores.
#[derive(Debug, PartialEq)]
struct WorkerPolicy {
    active: usize,
    workers: usize,
    /// Consecutive looks that found a small load.
    quiet_looks: u32,
}

impl WorkerPolicy {
    fn look(&mut self, load: f64, is_blocked: bool) {
        let of = |workers: usize| workers as f64;
        if is_blocked || load > RELEASE_ABOVE * of(self.active) {
            self.active = (self.active + 1).min(self.workers);
            self.quiet_looks = 0;
        } else if self.active > 1 && load < HOLD_BELOW * of(self.active - 1) {
            self.quiet_looks += 1;
            if self.quiet_looks >= HOLD_AFTER {
                self.active -= 1;
                self.quiet_looks = 0;
            }
        } else {
            self.quiet_looks = 0;
        }
    }
}

#[derive(Debug)]
struct SharedState {
    /// Number of workers that are not held; `None` once the runtime ends.
    active: Mutex<Option<usize>>,
    changed: Condvar,
    /// The same number; it wakes the tasks that hold workers.
    wanted: watch::Sender<usize>,
    /// Number of times that an active worker has run a task of the observer.
    beats: AtomicU64,
}

impl SharedState {
    fn new(workers: usize) -> Self {
        Self {
            active: Mutex::new(Some(workers)),
            changed: Condvar::new(),
            wanted: watch::Sender::new(workers),
            beats: AtomicU64::new(0),
        }
    }

    /// Spawns the tasks that hold all workers but one.
    fn spawn_holders(self: &Arc<Self>, runtime: &Handle, workers: usize) {
        for at in 1..workers {
            let shared = Arc::clone(self);
            runtime.spawn(async move {
                let mut wanted = shared.wanted.subscribe();
                // The channel stays open, because `shared` contains its sender.
                while wanted.wait_for(|wanted| *wanted <= at).await.is_ok() {
                    // A worker may take this task from the queue of all workers while the task that it is to run next, which
                    // no other worker can take, waits. After the yield the worker takes this task from its own queue, when
                    // nothing is left that only this worker can run.
                    tokio::task::yield_now().await;
                    shared.hold(at);
                    if shared.active().is_none() {
                        return;
                    }
                }
            });
        }
    }

    fn active(&self) -> MutexGuard<'_, Option<usize>> {
        self.active.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the number of active workers. Returns false if the runtime ends.
    fn set_active(&self, active: usize) -> bool {
        let before = {
            let mut state = self.active();
            let Some(before) = *state else { return false };
            *state = Some(active);
            before
        };
        if active != before {
            self.wanted.send_replace(active);
            self.changed.notify_all();
        }
        true
    }

    fn release_all(&self) {
        *self.active() = None;
        self.changed.notify_all();
        self.wanted.send_replace(0);
    }

    /// Blocks the calling worker while at most `at` workers are to be active.
    fn hold(&self, at: usize) {
        let held = |active: &mut Option<usize>| active.is_some_and(|active| active <= at);
        drop(self.changed.wait_while(self.active(), held).unwrap_or_else(PoisonError::into_inner));
    }
}

/// Observer of the load. Dropping it releases all workers.
#[derive(Debug)]
pub(super) struct WorkerObserver(Arc<SharedState>);

impl Drop for WorkerObserver {
    fn drop(&mut self) {
        self.0.release_all();
    }
}

impl WorkerObserver {
    /// Starts to observe a runtime with this number of workers. `at_rest` is called each time that the process has become
    /// idle after work.
    pub(super) fn start(
        runtime: &Handle,
        workers: usize,
        at_rest: impl Fn() + Send + 'static,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(SharedState::new(workers));
        shared.spawn_holders(runtime, workers);
        let (observed, runtime) = (Arc::clone(&shared), runtime.clone());
        let work = move || observe(&observed, &runtime, workers, at_rest);
        thread::Builder::new().name("satellite-load".into()).spawn(work)?;
        Ok(Self(shared))
    }
}

fn observe(shared: &Arc<SharedState>, runtime: &Handle, workers: usize, at_rest: impl Fn()) {
    let mut policy = WorkerPolicy { active: workers, workers, quiet_looks: 0 };
    let (mut looked_at, mut cpu, mut sent) = (Instant::now(), cpu_time(), 0);
    let (mut pause, mut idle_looks) = (LOOK_INTERVAL, 0_u32);
    loop {
        let ended = |active: &mut Option<usize>| active.is_some();
        let waited = shared.changed.wait_timeout_while(shared.active(), pause, ended);
        if waited.unwrap_or_else(PoisonError::into_inner).0.is_none() {
            return;
        }
        let (now, used) = (Instant::now(), cpu_time());
        let load = used.saturating_sub(cpu).as_secs_f64() / now.duration_since(looked_at).as_secs_f64().max(1e-6);
        // A task that was sent at the last look has not run: the active workers are blocked or far behind.
        policy.look(load, shared.beats.load(Ordering::Acquire) < sent);
        (looked_at, cpu) = (now, used);
        let is_idle = load < IDLE_LOAD && policy.active == 1;
        idle_looks = if is_idle { idle_looks.saturating_add(1) } else { 0 };
        if idle_looks == REST_AFTER {
            at_rest();
        }
        pause = if is_idle { IDLE_INTERVAL } else { LOOK_INTERVAL };
        if !shared.set_active(policy.active) {
            return;
        }
        if policy.active < workers && shared.beats.load(Ordering::Acquire) >= sent {
            sent += 1;
            let beating = Arc::clone(shared);
            runtime.spawn(async move { beating.beats.fetch_add(1, Ordering::AcqRel) });
        }
    }
}

fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    fn policy(active: usize) -> WorkerPolicy {
        WorkerPolicy { active, workers: 4, quiet_looks: 0 }
    }

    #[test]
    fn workers_are_released_at_once_and_held_after_several_quiet_looks() {
        let mut workers = policy(1);
        workers.look(0.8, false);
        assert_eq!(workers.active, 1);
        workers.look(0.9, false);
        assert_eq!(workers.active, 2);
        workers.look(0.9, false);
        assert_eq!(workers.active, 2, "one worker would be nearly full");
        for _ in 1..HOLD_AFTER {
            workers.look(0.4, false);
        }
        workers.look(0.6, false);
        for _ in 1..HOLD_AFTER {
            workers.look(0.4, false);
        }
        assert_eq!(workers.active, 2, "a busy look starts the count again");
        workers.look(0.4, false);
        assert_eq!(workers.active, 1);
    }

    #[test]
    fn blocked_workers_release_another_one_up_to_their_number() {
        let mut workers = policy(3);
        workers.look(0.0, true);
        workers.look(0.0, true);
        assert_eq!(workers.active, 4);
    }

    #[test]
    fn no_task_is_stuck_on_a_held_worker() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_io().build().unwrap();
        let shared = Arc::new(SharedState::new(2));
        shared.spawn_holders(runtime.handle(), 2);
        // Messages through sockets wake tasks as the messages of servers do.
        let (progress, rounds) = mpsc::channel();
        for _ in 0..4 {
            let (progress, guard) = (progress.clone(), runtime.enter());
            let (mut left, mut right) = tokio::net::UnixStream::pair().unwrap();
            drop(guard);
            runtime.spawn(async move {
                let mut byte = [0];
                while right.read_exact(&mut byte).await.is_ok() && right.write_all(&byte).await.is_ok() {}
            });
            runtime.spawn(async move {
                let mut byte = [0];
                while left.write_all(&byte).await.is_ok() && left.read_exact(&mut byte).await.is_ok() {
                    if progress.send(()).is_err() {
                        return;
                    }
                }
            });
        }
        for change in 0..4_000 {
            assert!(shared.set_active(1 + change % 2));
            for _ in 0..20 {
                rounds.recv_timeout(Duration::from_secs(10)).expect("a task is stuck");
            }
        }
        drop(rounds);
        shared.release_all();
    }

    #[test]
    fn a_task_runs_although_the_only_active_worker_is_blocked() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
        let observer = WorkerObserver::start(runtime.handle(), 2, || {}).unwrap();
        let mut wanted = observer.0.wanted.subscribe();
        runtime.block_on(async { wanted.wait_for(|active| *active == 1).await.map(|active| *active) }).unwrap();
        let (release, blocked) = mpsc::channel();
        let blocking = runtime.spawn(async move { blocked.recv() });
        runtime.block_on(async {
            tokio::spawn(async move { release.send(()) }).await.unwrap().unwrap();
            blocking.await.unwrap().unwrap();
        });
        drop(observer);
        drop(runtime);
    }
}
