//! Samples of the memory and processor time of every server, so that readers of the last hour never read `/proc`
//! themselves. A sample reads all processes of the machine; its period grows with the time that this takes.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::ids::InstanceId;
use rustix::time::{ClockId, Timespec, clock_gettime};

use crate::process::TreeUsage;
use crate::stdio::StdioConnector;

/// Minimum period of the samples.
const PERIOD_MIN: Duration = Duration::from_secs(10);
/// Period as a multiple of the processor time of a sample: sampling uses at most 0.5 % of a core.
const PERIOD_PER_COST: u32 = 200;
/// Maximum number of points of a series.
pub const USAGE_POINTS_MAX: usize = 60;
/// Time between two points of a series.
pub const USAGE_POINT_SPAN: Duration = Duration::from_secs(60);

/// Usage of a server's process tree at its last sample.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UsageSample {
    pub rss_bytes: u64,
    /// User and system time since the start of the run.
    pub cpu_seconds: f64,
    /// Share of one core since the previous sample, above 100 for several cores. `None` in the first sample of a run.
    pub cpu_percent: Option<f64>,
    /// Time of the sample.
    pub at: Instant,
}

/// Usage during one span of a series.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UsagePoint {
    /// Memory at the end of the span.
    pub rss_bytes: u64,
    /// Average share of one core, above 100 for several cores. `None` if a run had only one sample so far.
    pub cpu_percent: Option<f64>,
}

/// State of the sampler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SamplerStatus {
    /// Time of the last sample; `None` before the first one.
    pub sampled_at: Option<Instant>,
    /// Processor time that the last sample used.
    pub cost: Duration,
    /// Time until the next sample, from the last one.
    pub period: Duration,
}

/// Sampler of the usage of all servers. Clones share the samples.
#[derive(Clone)]
pub struct UsageSampler {
    runtime: RuntimeHandle,
    connector: StdioConnector,
    history: Arc<Mutex<UsageHistory>>,
}

impl UsageSampler {
    /// Creates a sampler without samples.
    pub fn new(runtime: RuntimeHandle, connector: StdioConnector) -> Self {
        Self { runtime, connector, history: Arc::default() }
    }

    /// Takes samples until the runtime ends.
    pub async fn run(self) {
        let ended = self.runtime.wait_for_end();
        let mut ended = std::pin::pin!(ended);
        loop {
            let period = self.sample().await;
            tokio::select! {
                biased;
                _ = &mut ended => return,
                () = tokio::time::sleep(period) => {}
            }
        }
    }

    /// Takes a sample on a blocking thread, and returns the time until the next one.
    pub async fn sample(&self) -> Duration {
        let sampler = self.clone();
        let taken = tokio::task::spawn_blocking(move || {
            let began = thread_cpu_time();
            let usage = sampler.connector.usage();
            let snapshot = sampler.runtime.snapshot();
            let servers = snapshot.iter().map(|view| (&view.spec.id, view.pid));
            let mut history = sampler.history();
            history.record(Instant::now(), servers, &usage);
            history.set_cost(thread_cpu_time().saturating_sub(began))
        });
        // An error means that the sample panicked or the tokio runtime ends.
        taken.await.unwrap_or(PERIOD_MIN)
    }

    /// Returns the last sample of an instance; `None` if it had no process then.
    pub fn latest(&self, id: &InstanceId) -> Option<UsageSample> {
        self.history().servers.get(id)?.latest()
    }

    /// Returns the last samples of all instances that had a process then.
    pub fn all_latest(&self) -> HashMap<InstanceId, UsageSample> {
        let history = self.history();
        history.servers.iter().filter_map(|(id, server)| Some((id.clone(), server.latest()?))).collect()
    }

    /// Returns the usage of an instance in the last hour, oldest first, one for each [`USAGE_POINT_SPAN`]; the last one is
    /// the current span. `None` for spans without a sample of a process. Empty if there is no sample.
    pub fn series(&self, id: &InstanceId) -> Vec<Option<UsagePoint>> {
        let history = self.history();
        history.servers.get(id).map(|server| server.series(history.span_at(Instant::now()))).unwrap_or_default()
    }

    /// Returns the state of the sampler.
    pub fn status(&self) -> SamplerStatus {
        self.history().status
    }

    fn history(&self) -> MutexGuard<'_, UsageHistory> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Samples of all servers.
struct UsageHistory {
    began: Instant,
    status: SamplerStatus,
    servers: HashMap<InstanceId, ServerUsage>,
}

impl Default for UsageHistory {
    fn default() -> Self {
        Self { began: Instant::now(), status: SamplerStatus::default(), servers: HashMap::new() }
    }
}

impl UsageHistory {
    /// Adds a sample: the installed instances with the process ids of their servers, and the usage by process id. Series of
    /// other instances are removed.
    fn record<'a>(
        &mut self,
        now: Instant,
        installed: impl Iterator<Item = (&'a InstanceId, Option<u32>)>,
        usage: &HashMap<u32, TreeUsage>,
    ) {
        self.status.sampled_at = Some(now);
        let span = self.span_at(now);
        let mut earlier = std::mem::take(&mut self.servers);
        for (id, pid) in installed {
            let measured = pid.and_then(|pid| Some((pid, *usage.get(&pid)?)));
            let (id, mut server) = match earlier.remove_entry(id) {
                Some(known) => known,
                None if measured.is_none() => continue,
                None => (id.clone(), ServerUsage::default()),
            };
            server.record(now, span, measured);
            if !server.points.is_empty() {
                self.servers.insert(id, server);
            }
        }
    }

    fn set_cost(&mut self, cost: Duration) -> Duration {
        self.status.cost = cost;
        self.status.period = PERIOD_MIN.max(cost * PERIOD_PER_COST);
        self.status.period
    }

    fn span_at(&self, now: Instant) -> u32 {
        let spans = now.saturating_duration_since(self.began).as_secs() / USAGE_POINT_SPAN.as_secs();
        u32::try_from(spans).unwrap_or(u32::MAX)
    }
}

/// Samples of one server.
#[derive(Default)]
struct ServerUsage {
    run: Option<RunUsage>,
    /// Oldest first.
    points: VecDeque<StoredPoint>,
}

/// Samples of a running process.
#[derive(Clone, Copy)]
struct RunUsage {
    pid: u32,
    last: UsageSample,
    /// Last sample before the current span, or the first one of the run: time and processor time in seconds.
    base: (Instant, f64),
}

#[derive(Clone, Copy)]
struct StoredPoint {
    span: u32,
    rss_kib: u32,
    /// Not a number if it is not known.
    cpu_percent: f32,
}

impl ServerUsage {
    fn latest(&self) -> Option<UsageSample> {
        self.run.map(|run| run.last)
    }

    fn record(&mut self, now: Instant, span: u32, measured: Option<(u32, TreeUsage)>) {
        let first = (span + 1).saturating_sub(u32::try_from(USAGE_POINTS_MAX).unwrap_or(u32::MAX));
        self.points.retain(|point| point.span >= first);
        let Some((pid, TreeUsage { rss_bytes, cpu_seconds })) = measured else {
            self.run = None;
            return;
        };
        let before = self.run.filter(|run| run.pid == pid);
        let is_new_span = self.points.back().is_none_or(|point| point.span != span);
        let base = match before {
            Some(run) if is_new_span => (run.last.at, run.last.cpu_seconds),
            Some(run) => run.base,
            None => (now, cpu_seconds),
        };
        let since = |(at, seconds): (Instant, f64)| {
            let elapsed = now.saturating_duration_since(at).as_secs_f64();
            // The time of a process that has ended may be missing in the sum.
            (elapsed > 0.0).then(|| (cpu_seconds - seconds).max(0.0) / elapsed * 100.0)
        };
        let cpu_percent = before.and_then(|run| since((run.last.at, run.last.cpu_seconds)));
        self.run = Some(RunUsage { pid, last: UsageSample { rss_bytes, cpu_seconds, cpu_percent, at: now }, base });
        if !is_new_span {
            self.points.pop_back();
        }
        self.points.push_back(StoredPoint {
            span,
            rss_kib: u32::try_from(rss_bytes >> 10).unwrap_or(u32::MAX),
            cpu_percent: since(base).map_or(f32::NAN, single_precision),
        });
    }

    fn series(&self, span: u32) -> Vec<Option<UsagePoint>> {
        let first = (span + 1).saturating_sub(u32::try_from(USAGE_POINTS_MAX).unwrap_or(u32::MAX));
        let mut points = vec![None; usize::try_from(span + 1 - first).unwrap_or_default()];
        for stored in self.points.iter().filter(|point| point.span >= first) {
            let at = usize::try_from(stored.span - first).unwrap_or_default();
            if let Some(point) = points.get_mut(at) {
                *point = Some(UsagePoint {
                    rss_bytes: u64::from(stored.rss_kib) << 10,
                    cpu_percent: Some(f64::from(stored.cpu_percent)).filter(|percent| !percent.is_nan()),
                });
            }
        }
        points
    }
}

#[expect(clippy::cast_possible_truncation, reason = "a percentage is shown with few digits")]
fn single_precision(percent: f64) -> f32 {
    percent as f32
}

fn thread_cpu_time() -> Duration {
    let Timespec { tv_sec, tv_nsec } = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(tv_sec.unsigned_abs(), u32::try_from(tv_nsec).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn id(nth: usize) -> InstanceId {
        InstanceId::new("acme".into(), "alice".into(), format!("{nth}").into())
    }

    fn usage(pid: u32, mebibytes: u64, cpu_seconds: f64) -> HashMap<u32, TreeUsage> {
        HashMap::from([(pid, TreeUsage { rss_bytes: mebibytes * MIB, cpu_seconds })])
    }

    /// Points as mebibytes and percent, `-` for an unknown value or a gap.
    fn shown(points: &[Option<UsagePoint>]) -> String {
        let percent = |point: &UsagePoint| point.cpu_percent.map_or("-".to_owned(), |percent| format!("{percent:.0}"));
        let point = |point: &UsagePoint| format!("{}:{}", point.rss_bytes / MIB, percent(point));
        points.iter().map(|at| at.as_ref().map_or("-".to_owned(), point)).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_series_has_the_average_of_each_minute_and_gaps_without_a_process() {
        let mut history = UsageHistory::default();
        let (began, one) = (history.began, id(1));
        let mut record = |seconds: u64, pid: Option<u32>, usage: &HashMap<u32, TreeUsage>| {
            history.record(began + Duration::from_secs(seconds), [(&one, pid)].into_iter(), usage);
            history.servers.get(&one).map(|server| {
                let span = history.span_at(began + Duration::from_secs(seconds));
                (server.latest().and_then(|sample| sample.cpu_percent), shown(&server.series(span)))
            })
        };
        assert_eq!(record(5, None, &usage(7, 1, 1.0)), None, "without a process there is no series");
        let sampled = |percent: Option<f64>, series: &str| Some((percent, series.to_owned()));
        assert_eq!(record(10, Some(7), &usage(7, 10, 1.0)), sampled(None, "10:-"));
        assert_eq!(record(20, Some(7), &usage(7, 20, 6.0)), sampled(Some(50.0), "20:50"));
        assert_eq!(record(50, Some(7), &usage(7, 30, 21.0)), sampled(Some(50.0), "30:50"));
        // The first sample of a minute is compared with the last one of the minute before.
        assert_eq!(record(60, Some(7), &usage(7, 30, 41.0)), sampled(Some(200.0), "30:50 30:200"));
        assert_eq!(record(110, Some(7), &usage(7, 40, 41.0)), sampled(Some(0.0), "30:50 40:33"));
        // Processor time that was lost with a process is not negative.
        assert_eq!(record(120, Some(7), &usage(7, 40, 3.0)), sampled(Some(0.0), "30:50 40:33 40:0"));
        assert_eq!(record(150, None, &HashMap::new()), sampled(None, "30:50 40:33 40:0"), "the process has ended");
        // A new process begins with its first sample.
        assert_eq!(record(310, Some(8), &usage(8, 5, 100.0)), sampled(None, "30:50 40:33 40:0 - - 5:-"));
    }

    #[test]
    fn series_are_bounded_and_those_of_removed_instances_are_removed() {
        let mut history = UsageHistory::default();
        let began = history.began;
        let ids: Vec<InstanceId> = (0..10_000).map(id).collect();
        let usage: HashMap<u32, TreeUsage> =
            (0..10_000).map(|pid| (pid, TreeUsage { rss_bytes: u64::MAX, cpu_seconds: 1.0 })).collect();
        let servers = || ids.iter().zip(0..).map(|(id, pid)| (id, Some(pid)));
        for minute in 0..90 {
            history.record(began + minute * USAGE_POINT_SPAN, servers(), &usage);
        }
        assert_eq!(history.servers.len(), 10_000);
        assert!(history.servers.values().all(|server| server.points.len() == USAGE_POINTS_MAX));
        let size: usize =
            history.servers.values().map(|server| server.points.capacity()).sum::<usize>() * size_of::<StoredPoint>();
        assert!(size <= 10 << 20, "{size} bytes");
        let now = began + 89 * USAGE_POINT_SPAN;
        assert_eq!(history.servers[&ids[0]].series(history.span_at(now)).len(), USAGE_POINTS_MAX);
        history.record(now, servers().take(1), &usage);
        assert_eq!(history.servers.keys().collect::<Vec<_>>(), [&ids[0]]);
        // Without a process for an hour the series is empty.
        history.record(now + 61 * USAGE_POINT_SPAN, [(&ids[0], None)].into_iter(), &HashMap::new());
        assert_eq!(history.servers.len(), 0);
    }

    #[test]
    fn samples_use_at_most_half_a_percent_of_a_core() {
        let mut history = UsageHistory::default();
        for cost in [0, 1, 49, 50, 51, 300, 2_000].map(Duration::from_millis) {
            let period = history.set_cost(cost);
            assert!(period >= PERIOD_MIN && cost.as_secs_f64() / period.as_secs_f64() <= 0.005, "{cost:?}: {period:?}");
        }
        assert_eq!(history.set_cost(Duration::from_millis(50)), PERIOD_MIN);
    }
}
