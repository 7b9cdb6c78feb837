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
/// Consecutive idle looks, two seconds, after which the process has come to rest for the first time.
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
    workers: usize,
    holds: Mutex<WorkerHolds>,
    changed: Condvar,
    /// The number of active workers; it wakes the tasks that hold workers.
    wanted: watch::Sender<usize>,
    /// Number of times that an active worker has run a task of the observer.
    beats: AtomicU64,
}

#[derive(Debug)]
struct WorkerHolds {
    /// Number of workers that are not to be held; `None` once the runtime ends.
    active: Option<usize>,
    /// Number of workers that are held.
    held: usize,
}

impl SharedState {
    fn new(workers: usize) -> Arc<Self> {
        Arc::new(Self {
            workers,
            holds: Mutex::new(WorkerHolds { active: Some(workers), held: 0 }),
            changed: Condvar::new(),
            wanted: watch::Sender::new(workers),
            beats: AtomicU64::new(0),
        })
    }

    fn holds(&self) -> MutexGuard<'_, WorkerHolds> {
        self.holds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Spawns the tasks that hold all workers but one.
    fn spawn_holders(self: &Arc<Self>, runtime: &Handle) {
        for at in 1..self.workers {
            let shared = Arc::clone(self);
            runtime.spawn(async move {
                let mut wanted = shared.wanted.subscribe();
                // The channel stays open, because `shared` contains its sender.
                while wanted.wait_for(|wanted| *wanted <= at).await.is_ok() {
                    // A worker may take this task from the queue of all workers while the task that it is to run next, which
                    // no other worker can take, waits. After the yield the worker takes this task from its own queue, when
                    // nothing is left that only this worker can run.
                    tokio::task::yield_now().await;
                    if shared.hold(at) {
                        return;
                    }
                }
            });
        }
    }

    /// Blocks the calling worker while at most `at` workers are to be active. Returns true if the runtime ends.
    fn hold(&self, at: usize) -> bool {
        let mut holds = self.holds();
        holds.held += 1;
        self.changed.notify_all();
        let is_held = |holds: &mut WorkerHolds| holds.active.is_some_and(|active| active <= at);
        let mut holds = self.changed.wait_while(holds, is_held).unwrap_or_else(PoisonError::into_inner);
        holds.held -= 1;
        holds.active.is_none()
    }

    /// Sets the number of active workers. Returns false if the runtime ends.
    fn set_active(self: &Arc<Self>, active: usize, runtime: &Handle) -> bool {
        let mut holds = self.holds();
        let Some(before) = holds.active.replace(active) else {
            holds.active = None;
            return false;
        };
        if active == before {
            return true;
        }
        self.wanted.send_replace(active);
        self.changed.notify_all();
        if active < before {
            let is_missing = |holds: &mut WorkerHolds| holds.active.is_some() && holds.held < self.workers - active;
            drop(self.changed.wait_timeout_while(holds, LOOK_INTERVAL, is_missing));
            // The worker that waited for sockets and timers may be a held one now. Another one does it after its next task.
            self.send_beat(runtime);
        }
        true
    }

    /// Sends a task to the active workers.
    fn send_beat(self: &Arc<Self>, runtime: &Handle) {
        let shared = Arc::clone(self);
        runtime.spawn(async move { shared.beats.fetch_add(1, Ordering::AcqRel) });
    }

    fn release_all(&self) {
        self.holds().active = None;
        self.changed.notify_all();
        self.wanted.send_replace(0);
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
    /// Starts to observe a runtime. `at_rest` is called when the process has been idle for a while, less
    /// often the longer it is idle.
    pub(super) fn start(runtime: &Handle, at_rest: impl Fn() + Send + 'static) -> std::io::Result<Self> {
        let shared = SharedState::new(runtime.metrics().num_workers());
        shared.spawn_holders(runtime);
        let (observed, runtime) = (Arc::clone(&shared), runtime.clone());
        let work = move || observe(&observed, &runtime, at_rest);
        thread::Builder::new().name("satellite-load".into()).spawn(work)?;
        Ok(Self(shared))
    }
}

fn observe(shared: &Arc<SharedState>, runtime: &Handle, at_rest: impl Fn()) {
    let mut policy = WorkerPolicy { active: shared.workers, workers: shared.workers, quiet_looks: 0 };
    let (mut looked_at, mut cpu, mut beats) = (Instant::now(), cpu_time(), None);
    let (mut pause, mut idle_looks) = (LOOK_INTERVAL, 0_u32);
    loop {
        let goes_on = |holds: &mut WorkerHolds| holds.active.is_some();
        let waited = shared.changed.wait_timeout_while(shared.holds(), pause, goes_on);
        if waited.unwrap_or_else(PoisonError::into_inner).0.active.is_none() {
            return;
        }
        let (now, used) = (Instant::now(), cpu_time());
        let load = used.saturating_sub(cpu).as_secs_f64() / now.duration_since(looked_at).as_secs_f64().max(1e-6);
        // If the task of the last look has not run, the active workers are blocked or far behind.
        let done = shared.beats.load(Ordering::Acquire);
        let is_blocked = beats == Some(done);
        policy.look(load, is_blocked);
        (looked_at, cpu) = (now, used);
        if !shared.set_active(policy.active, runtime) {
            return;
        }
        beats = (policy.active < shared.workers).then_some(done);
        if beats.is_some() && !is_blocked {
            shared.send_beat(runtime);
        }
        let is_idle = load < IDLE_LOAD && policy.active == 1;
        pause = if is_idle { IDLE_INTERVAL } else { LOOK_INTERVAL };
        idle_looks = if is_idle { idle_looks.saturating_add(1) } else { 0 };
        // Again after 4, 8, 16 s and so on: timers that expired meanwhile ran code that is not needed again soon.
        if idle_looks >= REST_AFTER && idle_looks.is_power_of_two() {
            at_rest();
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
        let shared = SharedState::new(2);
        shared.spawn_holders(runtime.handle());
        // Releases the workers, or a failure would wait for them.
        let observer = WorkerObserver(Arc::clone(&shared));
        // Messages through sockets wake tasks as the messages of servers do.
        let exchange = |_| {
            let (progress, rounds) = mpsc::channel();
            let guard = runtime.enter();
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
            rounds
        };
        let exchanges: Vec<_> = (0..4).map(exchange).collect();
        for change in 0..2_000 {
            assert!(shared.set_active(1 + change % 2, runtime.handle()));
            for rounds in &exchanges {
                // Rounds of before, and one more. As in operation, tasks are sent meanwhile.
                rounds.try_iter().for_each(drop);
                let is_done = |_: &_| {
                    shared.send_beat(runtime.handle());
                    rounds.recv_timeout(LOOK_INTERVAL).is_ok()
                };
                assert!((0..500).any(|look| is_done(&look)), "a task is stuck");
            }
        }
        drop((exchanges, observer));
    }

    #[test]
    fn a_task_runs_although_the_only_active_worker_is_blocked() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
        let observer = WorkerObserver::start(runtime.handle(), || {}).unwrap();
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
