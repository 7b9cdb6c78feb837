//! Samples of a run over time, and response times of the runtime's supervisors and registry. Requests are sent at fixed
//! times, whether or not earlier ones have been answered. Response times count from the planned time, so a slow part
//! also lengthens the response times of the requests that wait behind it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::runtime::RuntimeHandle;
use tokio::task::JoinSet;
use tokio::time::{Instant, interval_at};
use tokio_util::sync::CancellationToken;

use super::drive::CallCounters;
use super::measure::{ForeignCpu, Latency, ProcessMemory, cpu_of, descriptors};
use super::recorder::RunRecorder;
use super::types::{ProgressDisplay, RunSample, ServerEnvironment};

// Maximum number of samples during the load.
const SAMPLES_MAX: u32 = 600;
// Shortest sampling interval, and its increase per instance.
const SAMPLE_INTERVAL_MIN: Duration = Duration::from_millis(100);
const SAMPLE_INTERVAL_PER_INSTANCE: Duration = Duration::from_micros(10);
// Interval of requests to a supervisor and to the registry.
const REQUEST_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Debug, Default)]
pub(crate) struct ResponseTimes {
    supervisors: Mutex<Latency>,
    registry: Mutex<Latency>,
    // Longest response time of the registry since the last sample, in microseconds.
    longest: AtomicU64,
}

impl ResponseTimes {
    pub(crate) fn take(&self) -> (Latency, Latency) {
        let take = |of: &Mutex<Latency>| std::mem::take(&mut *of.lock().unwrap_or_else(PoisonError::into_inner));
        (take(&self.supervisors), take(&self.registry))
    }
}

/// Pending request. Its response time is recorded on drop, so that unanswered requests count too.
struct ResponseTimer {
    due: Instant,
    times: Arc<ResponseTimes>,
    histogram: fn(&ResponseTimes) -> &Mutex<Latency>,
}

impl Drop for ResponseTimer {
    fn drop(&mut self) {
        let took = self.due.elapsed();
        (self.histogram)(&self.times).lock().unwrap_or_else(PoisonError::into_inner).record(took);
    }
}

pub(crate) struct RunSampler<'a> {
    pub runtime: RuntimeHandle,
    pub ids: Arc<[InstanceId]>,
    pub response_times: Arc<ResponseTimes>,
    pub recorder: Arc<RunRecorder>,
    pub tally: Arc<CallCounters>,
    pub injected: Arc<AtomicU64>,
    pub mode: ServerEnvironment,
    pub display: &'a dyn ProgressDisplay,
    // Cancelled if the user asks for an early end.
    pub stop: CancellationToken,
}

impl RunSampler<'_> {
    // Runs until the future is dropped.
    pub(crate) async fn run(&self, lasts: Duration, samples: &mut Vec<RunSample>) {
        let each = SAMPLE_INTERVAL_PER_INSTANCE * u32::try_from(self.ids.len()).unwrap_or(u32::MAX);
        let every = (lasts / SAMPLES_MAX).max(SAMPLE_INTERVAL_MIN + each);
        let (mut looks, mut measurements) =
            (interval_at(Instant::now(), every), interval_at(Instant::now(), REQUEST_INTERVAL));
        let mut stops = interval_at(Instant::now(), SAMPLE_INTERVAL_MIN);
        let mut measurement_tasks = JoinSet::new();
        let mut foreign = ForeignCpu::start(self.children_cpu());
        let mut ids = self.ids.iter().cycle();
        loop {
            tokio::select! {
                biased;
                // Spawned, not awaited, so that samples are taken while Root is busy. Virtual time has no response
                // times.
                due = measurements.tick(), if self.mode != ServerEnvironment::Virtual => {
                    while measurement_tasks.try_join_next().is_some() {}
                    // Response times during the start of the fleet are not measured.
                    let is_up = self.recorder.state().recovery_log.all_online.is_some();
                    if let Some(id) = ids.next().filter(|_| is_up) {
                        self.measure_response(id.clone(), due, &mut measurement_tasks);
                    }
                }
                _ = looks.tick() => {
                    let sample = self.take_sample(self.response_times.longest.swap(0, Ordering::Relaxed), &mut foreign);
                    let violations = self.recorder.state().checks.violation_count();
                    self.display.show_sample(&sample, self.injected.load(Ordering::Relaxed), violations);
                    samples.push(sample);
                }
                // Checked more often than samples of a long run are taken.
                _ = stops.tick() => {
                    if self.display.is_stopped() {
                        self.stop.cancel();
                    }
                }
            }
        }
    }

    fn measure_response(&self, id: InstanceId, due: Instant, measurement_tasks: &mut JoinSet<()>) {
        let wait = |of| ResponseTimer { due, times: Arc::clone(&self.response_times), histogram: of };
        let (runtime, team) = (self.runtime.clone(), wait(|waits| &waits.supervisors));
        measurement_tasks.spawn(async move {
            let _team = team;
            // No instance is stopped by an operator during a run, and for all others a start changes nothing.
            let _ = runtime.start(&id).await;
        });
        let (runtime, registry) = (self.runtime.clone(), wait(|waits| &waits.registry));
        measurement_tasks.spawn(async move {
            runtime.sync_snapshot().await;
            let took = u64::try_from(registry.due.elapsed().as_micros()).unwrap_or(u64::MAX);
            registry.times.longest.fetch_max(took, Ordering::Relaxed);
        });
    }

    fn children_cpu(&self) -> Duration {
        if self.mode != ServerEnvironment::Real {
            return Duration::ZERO;
        }
        let pids: Vec<u32> = self.runtime.snapshot().iter().filter_map(|view| view.pid).collect();
        pids.into_iter().filter_map(cpu_of).sum()
    }

    fn foreign_cpu_percent(&self, foreign: &mut ForeignCpu) -> u8 {
        if self.mode == ServerEnvironment::Virtual {
            return 0;
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share is from 0 to 1")]
        let percent = (foreign.share(self.children_cpu()) * 100.0) as u8;
        percent
    }

    fn take_sample(&self, lag_us: u64, foreign: &mut ForeignCpu) -> RunSample {
        let (snapshot, events) = (self.runtime.snapshot(), self.runtime.event_statistics());
        let mut sample = RunSample {
            at_ms: u64::try_from(self.recorder.clock.now().as_millis()).unwrap_or(u64::MAX),
            rss: ProcessMemory::now().anonymous,
            descriptors: u32::try_from(descriptors()).unwrap_or(u32::MAX),
            backlog: events.queue_size as u64,
            dropped: events.dropped,
            calls: self.tally.ended.load(Ordering::Relaxed),
            failed: self.tally.failed.load(Ordering::Relaxed),
            in_flight: u32::try_from(self.tally.in_flight.load(Ordering::Relaxed)).unwrap_or(u32::MAX),
            lag_us,
            foreign_cpu_percent: self.foreign_cpu_percent(foreign),
            ..RunSample::default()
        };
        for view in snapshot.iter() {
            sample.by_status[view.status as usize] += 1;
            sample.dormant += u32::from(view.dormant);
        }
        sample
    }
}
