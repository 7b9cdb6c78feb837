//! The curves: one task that looks at everything from time to time, and asks for nothing but to be told how long Root and
//! the registry let others wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mcp_satellite_actors::runtime::RuntimeHandle;
use tokio::time::{Instant, interval_at};
use tokio_util::sync::CancellationToken;

use super::drive::Tally;
use super::measure::{Memory, descriptors};
use super::recorder::Recorder;
use super::types::{Mode, Sample, Show};

/// Points of a curve.
const SAMPLES: u32 = 600;
/// The shortest time between two, and how much longer for each instance that is looked at.
const EVERY_MIN: Duration = Duration::from_millis(100);
const EACH: Duration = Duration::from_micros(10);

/// See the module.
pub(crate) struct Watch<'a> {
    pub(crate) runtime: RuntimeHandle,
    pub(crate) recorder: Arc<Recorder>,
    pub(crate) tally: Arc<Tally>,
    pub(crate) injected: Arc<AtomicU64>,
    pub(crate) mode: Mode,
    pub(crate) instances: usize,
    pub(crate) show: &'a dyn Show,
    /// Set when somebody wants it to end early.
    pub(crate) stop: CancellationToken,
}

impl Watch<'_> {
    /// Looks until it is dropped; what it saw is in `samples`.
    pub(crate) async fn run(&self, lasts: Duration, samples: &mut Vec<Sample>) {
        let each = EACH * u32::try_from(self.instances).unwrap_or(u32::MAX);
        let every = (lasts / SAMPLES).max(EVERY_MIN + each);
        let lag = Arc::new(AtomicU64::new(0));
        let mut ticks = interval_at(Instant::now(), every);
        let mut asked = tokio::task::JoinSet::new();
        loop {
            ticks.tick().await;
            // Not waited for: a sample says what was, also where Root has no time.
            while asked.try_join_next().is_some() {}
            if self.mode != Mode::Virtual && asked.is_empty() {
                let (runtime, lag) = (self.runtime.clone(), Arc::clone(&lag));
                asked.spawn(async move {
                    let began = Instant::now();
                    runtime.see().await;
                    lag.store(u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
                });
            }
            let sample = self.look(lag.load(Ordering::Relaxed));
            self.show.sample(&sample, self.injected.load(Ordering::Relaxed), self.recorder.ledger().judge.count());
            samples.push(sample);
            if self.show.is_stopped() {
                self.stop.cancel();
            }
        }
    }

    fn look(&self, lag_us: u64) -> Sample {
        let (snapshot, events) = (self.runtime.snapshot(), self.runtime.event_statistics());
        let mut sample = Sample {
            at_ms: u64::try_from(self.recorder.clock.now().as_millis()).unwrap_or(u64::MAX),
            rss: Memory::now().anonymous,
            descriptors: u32::try_from(descriptors()).unwrap_or(u32::MAX),
            backlog: events.queue_size as u64,
            dropped: events.dropped,
            calls: self.tally.ended.load(Ordering::Relaxed),
            failed: self.tally.failed.load(Ordering::Relaxed),
            in_flight: u32::try_from(self.tally.in_flight.load(Ordering::Relaxed)).unwrap_or(u32::MAX),
            lag_us,
            ..Sample::default()
        };
        for view in snapshot.iter() {
            sample.by_status[view.status as usize] += 1;
            sample.dormant += u32::from(view.dormant);
        }
        sample
    }
}
