//! Contention between snapshot readers and writers: reads per second during 100,000 status changes, compared with reads
//! without changes, and the time until a crash is visible.
#![allow(clippy::unwrap_used, reason = "a bench panics on any unexpected error")]

#[expect(dead_code, reason = "each bench uses a part of this module")]
mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mcp_satellite::connect::sim::{SimConnector, SimScript};
use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::event::Event;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::policy::{Policy, RestartPolicy, TeamBudgetPolicy};

use common::{BenchReport, NullSink, TIMEOUT, format_duration, format_number, is_online, quantile, spec, start};

const INSTANCES: usize = 1_000;
const TEAMS: usize = 100;
const CHANGES: usize = 100_000;

const QUIET: Duration = Duration::from_secs(1);

/// In a storm, one of this many crashes is watched.
const WATCHED: usize = 20;
/// Number of single crashes.
const SINGLE_CRASHES: usize = 1_000;

/// One of this many reads is timed, because reading the clock costs as much as a read.
const TIMED: u64 = 64;

fn main() {
    common::tokio_runtime().block_on(measure());
}

struct Fleet {
    runtime: RuntimeHandle,
    connector: SimConnector,
    ids: Vec<InstanceId>,
}

async fn measure() {
    let fleet = Fleet::start().await;
    let each = fleet.count_changes_of_crash().await;
    let mut report = BenchReport::new(
        "snapshot",
        ["readers", "reads/s, quiet", "reads/s, storm", "ratio", "read p99.9, storm", "storm duration"],
    );
    for readers in [0, 1, 4, 256] {
        let quiet = fleet.read(readers, async || tokio::time::sleep(QUIET).await).await;
        let storm = fleet.read(readers, async || fleet.storm(CHANGES / each).await).await;
        let rate = |count: u64, took: Duration| count as f64 / took.as_secs_f64();
        let (quiet_rate, storm_rate) = (rate(quiet.reads, quiet.took), rate(storm.reads, storm.took));
        let cells = if readers == 0 {
            [const { String::new() }; 4]
        } else {
            [
                format_number(quiet_rate),
                format_number(storm_rate),
                format_number(storm_rate / quiet_rate),
                format_duration(quantile(storm.timed, 0.999)),
            ]
        };
        let [quiet_rate, storm_rate, ratio, p999] = cells;
        report.row([readers.to_string(), quiet_rate, storm_rate, ratio, p999, format_duration(storm.took)]);
    }
    report.publish();
    visible(&fleet, each).await;
    fleet.runtime.shutdown().await;
}

/// Measures the time from a crash until a reader sees it, for single crashes and for every 20th crash of a storm.
async fn visible(fleet: &Fleet, each: usize) {
    let mut report = BenchReport::new("visible", ["crash", "samples", "p50", "p99", "max"]);
    let alone = fleet.watch_during(async |watcher: &CrashSender| {
        for _ in 0..SINGLE_CRASHES {
            let before = fleet.restarts();
            fleet.kill(&fleet.ids[0], Some(watcher));
            fleet.wait_until_restarted(before + 1).await;
        }
    });
    let alone = alone.await;
    let storm = fleet
        .watch_during(async |watcher: &CrashSender| fleet.storm_watched(CHANGES / each, Some(watcher)).await)
        .await;
    for (name, seen) in [("one at a time", alone), ("1,000 at once", storm)] {
        let at = |fraction| format_duration(quantile(seen.iter().copied(), fraction));
        report.row([name.to_owned(), format_number(seen.len() as f64), at(0.5), at(0.99), at(1.0)]);
    }
    report.publish();
}

struct WatchedCrash {
    id: InstanceId,
    restarts: u64,
    at: Instant,
}

type CrashSender = std::sync::mpsc::Sender<WatchedCrash>;

/// Polls the snapshot without pause until every reported crash is visible; returns the delays.
fn watch(runtime: &RuntimeHandle, crashes: &std::sync::mpsc::Receiver<WatchedCrash>) -> Vec<Duration> {
    let (mut open, mut seen): (Vec<WatchedCrash>, Vec<Duration>) = (Vec::new(), Vec::new());
    loop {
        if open.is_empty() {
            // The sender was dropped and all crashes were seen.
            let Ok(crash) = crashes.recv() else { return seen };
            open.push(crash);
        }
        open.extend(crashes.try_iter());
        let snapshot = runtime.snapshot();
        open.retain(|crash| {
            let view = snapshot.get(&crash.id).unwrap();
            let is_seen = !is_online(view) || view.restarts > crash.restarts;
            seen.extend(is_seen.then(|| crash.at.elapsed()));
            !is_seen
        });
    }
}

impl Fleet {
    async fn start() -> Self {
        let connector = SimConnector::new(SimScript::default());
        let runtime = start(connector.clone(), NullSink, |options| {
            options.team_budget = TeamBudgetPolicy { max_exits: usize::MAX, ..TeamBudgetPolicy::default() };
        })
        .await;
        let restart =
            RestartPolicy { max_crashes: usize::MAX, delays: vec![Duration::ZERO], ..RestartPolicy::default() };
        let policy = Arc::new(Policy { restart, ..Policy::default() });
        let mut ids = Vec::new();
        for nth in 0..INSTANCES {
            let spec = spec(nth, TEAMS, 10, &["simulated".to_owned()], &policy);
            ids.push(spec.id.clone());
            runtime.install(spec).await.unwrap();
        }
        let fleet = Self { runtime, connector, ids };
        fleet.wait_until_restarted(0).await;
        fleet
    }

    /// Returns the number of status changes from a crash until the server is online again.
    async fn count_changes_of_crash(&self) -> usize {
        self.runtime.flush().await;
        let mut events = self.runtime.subscribe();
        self.connector.handle(&self.ids[0]).unwrap().signal(9);
        let mut changes = 0;
        loop {
            let envelope = tokio::time::timeout(TIMEOUT, events.recv()).await.unwrap().unwrap();
            match &envelope.event {
                Event::StatusChanged { .. } => changes += 1,
                Event::Restarted { .. } => break,
                _ => {}
            }
        }
        // `online` is emitted next to `restarted`, before or after it.
        self.runtime.flush().await;
        while let Ok(envelope) = events.try_recv() {
            changes += usize::from(matches!(envelope.event, Event::StatusChanged { .. }));
        }
        changes
    }

    async fn watch_during(&self, meanwhile: impl AsyncFnOnce(&CrashSender)) -> Vec<Duration> {
        let (watcher, crashes) = std::sync::mpsc::channel();
        let runtime = self.runtime.clone();
        let thread = std::thread::spawn(move || watch(&runtime, &crashes));
        meanwhile(&watcher).await;
        drop(watcher);
        thread.join().unwrap()
    }

    fn kill(&self, id: &InstanceId, watcher: Option<&CrashSender>) {
        if let Some(watcher) = watcher {
            let restarts = self.runtime.snapshot().get(id).unwrap().restarts;
            watcher.send(WatchedCrash { id: id.clone(), restarts, at: Instant::now() }).unwrap();
        }
        self.connector.handle(id).unwrap().signal(9);
    }

    async fn storm(&self, crashes: usize) {
        self.storm_watched(crashes, None).await;
    }

    /// Crashes this many servers, each instance in turn.
    async fn storm_watched(&self, crashes: usize, watcher: Option<&CrashSender>) {
        let mut left = crashes;
        while left > 0 {
            let before: u64 = self.restarts();
            let now = left.min(self.ids.len());
            for (nth, id) in self.ids[..now].iter().enumerate() {
                self.kill(id, watcher.filter(|_| nth % WATCHED == 0));
            }
            left -= now;
            self.wait_until_restarted(before + now as u64).await;
        }
    }

    fn restarts(&self) -> u64 {
        self.runtime.snapshot().iter().map(|view| view.restarts).sum()
    }

    async fn wait_until_restarted(&self, restarts: u64) {
        let mut watch = self.runtime.watch();
        let done = async {
            while self.restarts() < restarts
                || self.runtime.snapshot().len() < self.ids.len()
                || !self.runtime.snapshot().iter().all(|view| is_online(view))
            {
                watch.changed().await.unwrap();
                // Polling each snapshot would cost more than producing it.
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(TIMEOUT, done).await.unwrap();
    }

    async fn read(&self, readers: usize, meanwhile: impl AsyncFnOnce()) -> ReadCounts {
        let stop = Arc::new(AtomicBool::new(false));
        let began = Instant::now();
        let threads: Vec<JoinHandle<(u64, Vec<Duration>)>> = (0..readers)
            .map(|nth| {
                let (runtime, stop, id) = (self.runtime.clone(), Arc::clone(&stop), self.ids[nth].clone());
                std::thread::spawn(move || reader(&runtime, &id, &stop))
            })
            .collect();
        meanwhile().await;
        let took = began.elapsed();
        stop.store(true, Ordering::Release);
        let mut read = ReadCounts { reads: 0, timed: Vec::new(), took };
        for thread in threads {
            let (reads, timed) = thread.join().unwrap();
            read.reads += reads;
            read.timed.extend(timed);
        }
        read
    }
}

struct ReadCounts {
    reads: u64,
    timed: Vec<Duration>,
    took: Duration,
}

fn reader(runtime: &RuntimeHandle, id: &InstanceId, stop: &AtomicBool) -> (u64, Vec<Duration>) {
    let (mut reads, mut timed) = (0, Vec::new());
    while !stop.load(Ordering::Acquire) {
        let began = (reads % TIMED == 0).then(Instant::now);
        assert!(runtime.snapshot().get(id).is_some());
        timed.extend(began.map(|began| began.elapsed()));
        reads += 1;
    }
    (reads, timed)
}
