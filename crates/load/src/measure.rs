//! Measurement of latencies, memory, descriptors and CPU time, and formatting of numbers.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use nix::sys::resource::{Usage, UsageWho, getrusage};
use serde::{Serialize, Serializer};

const BARS_A_DECADE: i32 = 10;

/// Histogram of durations from 1 µs to 1 h with two significant digits, an error of less than 1 %. A third digit would
/// take 180 KiB instead of 25 KiB for each histogram, which would count as memory of the fleet.
#[derive(Debug, Clone)]
pub struct Latency(Histogram<u64>);

impl Default for Latency {
    fn default() -> Self {
        // These bounds are valid. Without bounds the histogram resizes itself.
        let bounded = Histogram::new_with_bounds(1, 3_600_000_000, 2);
        Self(bounded.or_else(|_| Histogram::new(2)).unwrap_or_else(|_| unreachable!("two digits are valid")))
    }
}

impl Latency {
    /// Adds a duration. Durations above one hour count as one hour.
    pub fn record(&mut self, took: Duration) {
        self.0.saturating_record(u64::try_from(took.as_micros()).unwrap_or(u64::MAX).max(1));
    }

    /// Adds all durations of another histogram.
    pub fn merge(&mut self, other: &Self) {
        // Cannot fail: both histograms have the same bounds.
        let _ = self.0.add(&other.0);
    }

    /// Returns the number of durations.
    pub fn len(&self) -> u64 {
        self.0.len()
    }

    /// Returns true if there are no durations.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the duration that the given share of all durations, from 0 to 1, does not exceed.
    pub fn quantile(&self, share: f64) -> Duration {
        Duration::from_micros(self.0.value_at_quantile(share))
    }

    /// Returns bars of equal width on a logarithmic axis, ten per decade, from the shortest to the longest duration
    /// without a gap. All histograms use the same edges, so they can be overlaid.
    pub fn bars(&self) -> Vec<HistogramBar> {
        let edge = |nth: i32| 10f64.powf(f64::from(nth) / f64::from(BARS_A_DECADE));
        let mut counts: BTreeMap<i32, u64> = BTreeMap::new();
        for step in self.0.iter_recorded() {
            #[expect(clippy::cast_possible_truncation, reason = "an hour in microseconds has ten digits")]
            let nth = ((step.value_iterated_to().max(1) as f64).log10() * f64::from(BARS_A_DECADE)).floor() as i32;
            *counts.entry(nth).or_default() += step.count_since_last_iteration();
        }
        let (Some((&first, _)), Some((&last, _))) = (counts.first_key_value(), counts.last_key_value()) else {
            return Vec::new();
        };
        let bar = |nth| HistogramBar {
            from: Duration::from_secs_f64(edge(nth) / 1e6),
            until: Duration::from_secs_f64(edge(nth + 1) / 1e6),
            count: counts.get(&nth).copied().unwrap_or_default(),
        };
        (first..=last).map(bar).collect()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HistogramBar {
    /// Inclusive lower bound.
    pub from: Duration,
    /// Exclusive upper bound.
    pub until: Duration,
    /// Number of durations.
    pub count: u64,
}

// Serialized in milliseconds.
impl Serialize for Latency {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Shown {
            n: u64,
            min: f64,
            p50: f64,
            p90: f64,
            p99: f64,
            p999: f64,
            max: f64,
        }
        let at = |share| if self.is_empty() { 0.0 } else { self.quantile(share).as_secs_f64() * 1e3 };
        let shown = Shown {
            n: self.len(),
            min: at(0.0),
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: at(1.0),
        };
        shown.serialize(serializer)
    }
}

/// Memory of this process in bytes, as counted by the kernel. All values are 0 without `/proc`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProcessMemory {
    /// Resident memory, including mapped files.
    pub resident: u64,
    /// Highest resident memory so far.
    pub peak: u64,
    /// Resident memory that is not backed by files.
    pub anonymous: u64,
}

impl ProcessMemory {
    /// Reads the current values.
    pub fn now() -> Self {
        let status = read("/proc/self/status");
        let of = |name: &str| kibibytes(&status, name) * 1024;
        Self { resident: of("VmRSS:"), peak: of("VmHWM:"), anonymous: of("RssAnon:") }
    }
}

// 0 without such a line.
fn kibibytes(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    line.trim_matches(|letter: char| !letter.is_ascii_digit()).parse().unwrap_or_default()
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// Returns the number of open file descriptors of this process, without the one that reads the list.
pub fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").map_or(0, |entries| entries.count().saturating_sub(1))
}

/// Returns the CPU time of this process, without its children.
pub fn cpu() -> Duration {
    getrusage(UsageWho::RUSAGE_SELF).map_or(Duration::ZERO, |usage| usage_cpu_time(&usage))
}

/// Returns the CPU time of another process, in nanoseconds, or `None` if it has ended. `/proc/PID/stat` is too coarse:
/// its unit is 10 ms, more than a small server needs to start.
pub fn cpu_of(pid: u32) -> Option<Duration> {
    // One entry for each thread. Threads that have ended are not included.
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let nanoseconds = tasks.flatten().filter_map(|task| {
        let text = fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<u64>().ok()
    });
    Some(Duration::from_nanos(nanoseconds.sum()))
}

/// Stopwatch for the CPU time of this process, without its children.
#[derive(Debug, Clone, Copy)]
pub struct CpuClock(Duration);

impl CpuClock {
    pub fn start() -> Self {
        Self(cpu())
    }

    /// Returns the CPU time since the start.
    pub fn elapsed(&self) -> Duration {
        cpu().saturating_sub(self.0)
    }
}

/// CPU time of other programs, as a share of all cores of this machine. Time taken by a hypervisor is included.
#[derive(Debug)]
pub struct ForeignCpu {
    at: Instant,
    busy: Duration,
    own: Duration,
}

impl ForeignCpu {
    /// Starts a measurement. `children` is the CPU time of the children that are still running.
    pub fn start(children: Duration) -> Self {
        Self { at: Instant::now(), busy: busy_cpu_time(), own: own_cpu_time(children) }
    }

    /// Returns the share since the last call, from 0 to 1. It is 0 without `/proc/stat`.
    pub fn share(&mut self, children: Duration) -> f64 {
        let now = Self::start(children);
        let wall = (now.at - self.at).as_secs_f64() * cores() as f64;
        let foreign = now.busy.saturating_sub(self.busy).saturating_sub(now.own.saturating_sub(self.own));
        *self = now;
        (foreign.as_secs_f64() / wall).clamp(0.0, 1.0)
    }
}

// `children` is the CPU time of the children that are still running.
fn own_cpu_time(children: Duration) -> Duration {
    let ended = getrusage(UsageWho::RUSAGE_CHILDREN).map_or(Duration::ZERO, |usage| usage_cpu_time(&usage));
    cpu() + ended + children
}

// CPU time of all processes since the machine was started.
fn busy_cpu_time() -> Duration {
    let text = read("/proc/stat");
    let line = text.lines().next().and_then(|line| line.strip_prefix("cpu ")).unwrap_or_default();
    let ticks: Vec<u64> = line.split_ascii_whitespace().map_while(|field| field.parse().ok()).collect();
    // Columns: user nice system idle iowait irq softirq steal. `user` and `nice` include the later columns.
    let busy: u64 =
        ticks.iter().take(8).enumerate().filter(|(at, _)| ![3, 4].contains(at)).map(|(_, ticks)| ticks).sum();
    Duration::from_secs_f64(busy as f64 / rustix::param::clock_ticks_per_second().max(1) as f64)
}

fn usage_cpu_time(usage: &Usage) -> Duration {
    let of = |time: nix::sys::time::TimeVal| {
        let seconds = Duration::from_secs(u64::try_from(time.tv_sec()).unwrap_or_default());
        seconds + Duration::from_micros(u64::try_from(time.tv_usec()).unwrap_or_default())
    };
    of(usage.user_time()) + of(usage.system_time())
}

/// Returns the number of cores available to this process.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Returns the CPU, memory and kernel of this machine.
pub fn machine() -> BTreeMap<String, String> {
    let cpuinfo = read("/proc/cpuinfo");
    let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("unknown");
    let memory = kibibytes(&read("/proc/meminfo"), "MemTotal:") as f64 / 1024.0 / 1024.0;
    BTreeMap::from([
        ("CPU".to_owned(), format!("{}, {} cores", model.trim_matches([':', ' ', '\t']), cores())),
        ("memory".to_owned(), format!("{memory:.0} GiB")),
        ("kernel".to_owned(), read("/proc/sys/kernel/osrelease").trim().to_owned()),
    ])
}

/// Formats a duration with three digits and a unit.
pub fn format_duration(duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    let (value, unit) = match seconds {
        s if s >= 1.0 => (s, "s"),
        s if s >= 1e-3 => (s * 1e3, "ms"),
        s if s >= 1e-6 => (s * 1e6, "µs"),
        s => (s * 1e9, "ns"),
    };
    format!("{} {unit}", format_number(value))
}

/// Formats a number with at least three significant digits: `1.23`, `123`, `1234`, `12,345`, `1.23 M`.
pub fn format_number(value: f64) -> String {
    match value {
        v if v >= 1e6 => format!("{:.2} M", v / 1e6),
        v if v >= 1e4 => {
            let thousands = format!("{v:.0}");
            let (head, tail) = thousands.split_at(thousands.len() - 3);
            format!("{head},{tail}")
        }
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

/// Formats a number of bytes with three digits and a binary unit.
pub fn format_bytes(count: u64) -> String {
    let count = count as f64;
    let (value, unit) = match count {
        c if c >= 1024.0 * 1024.0 * 1024.0 => (c / 1024.0 / 1024.0 / 1024.0, "GiB"),
        c if c >= 1024.0 * 1024.0 => (c / 1024.0 / 1024.0, "MiB"),
        c if c >= 1024.0 => (c / 1024.0, "KiB"),
        c => return format!("{c} B"),
    };
    format!("{} {unit}", format_number(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn latency_of(milliseconds: impl IntoIterator<Item = u64>) -> Latency {
        let mut latency = Latency::default();
        milliseconds.into_iter().for_each(|took| latency.record(Duration::from_millis(took)));
        latency
    }

    #[test]
    fn the_bars_of_a_histogram_are_contiguous_and_count_every_value_once() {
        let latency = latency_of((1..=1000).chain([60_000]));
        let bars = latency.bars();
        assert_eq!(bars.iter().map(|bar| bar.count).sum::<u64>(), 1001);
        assert!(bars.windows(2).all(|pair| pair[0].until == pair[1].from), "{bars:?}");
        assert!(
            bars.iter().any(|bar| bar.count == 0),
            "there must be empty bars between a second and a minute: {bars:?}"
        );
        let first = bars.first().unwrap();
        assert!(first.from <= Duration::from_millis(1) && Duration::from_millis(1) < first.until, "{first:?}");
        assert!(Latency::default().bars().is_empty());
    }

    #[test]
    fn quantiles_have_an_error_below_one_percent() {
        let micros = |n: u32| 1.07_f64.powi(i32::try_from(n).unwrap()).round();
        for took in (0..300).map(micros) {
            let mut latency = Latency::default();
            latency.record(Duration::from_secs_f64(took / 1e6));
            let median = latency.quantile(0.5).as_secs_f64() * 1e6;
            assert!((median - took).abs() <= took * 0.01, "{median}, not {took}");
        }
    }

    #[test]
    fn a_latency_histogram_uses_little_memory() {
        // Dozens of histograms exist while the memory of the fleet is measured.
        let counts = Latency::default().0.distinct_values();
        assert!(counts * size_of::<u64>() < 32 * 1024, "{counts}");
    }

    #[test]
    fn latencies_are_merged_and_serialized_in_milliseconds() {
        let mut latency = latency_of(1..=100);
        latency.merge(&latency_of(901..=1000));
        let shown = serde_json::to_value(&latency).unwrap();
        assert_eq!(shown["n"], 200);
        let close = |name: &str, to: f64| {
            let found = shown[name].as_f64().unwrap();
            assert!((found - to).abs() <= to * 0.01, "{name}: {found}, not {to}");
        };
        close("min", 1.0);
        close("p50", 100.0);
        close("p90", 980.0);
        close("max", 1000.0);
        assert_eq!(serde_json::to_value(Latency::default()).unwrap()["max"], 0.0);
    }

    #[test]
    fn memory_descriptors_and_cpu_time_of_this_process_are_measured() {
        let memory = ProcessMemory::now();
        assert!(memory.resident >= memory.anonymous && memory.peak >= memory.resident && memory.anonymous > 0);
        let before = descriptors();
        let file = fs::File::open("/proc/self/status").unwrap();
        assert!(before > 0 && descriptors() > 0, "descriptors must be countable");
        drop(file);
        assert!(cpu() > Duration::ZERO);
        assert!(cpu_of(std::process::id()).unwrap() > Duration::ZERO);
        assert_eq!(cpu_of(u32::MAX), None);
        assert!(machine().values().all(|value| !value.is_empty()));
    }

    #[test]
    fn cpu_time_of_this_process_is_not_foreign() {
        let mut foreign = ForeignCpu::start(Duration::ZERO);
        let (before, machine) = (cpu(), busy_cpu_time());
        while busy_cpu_time() < machine + Duration::from_millis(200) || cpu() < before + Duration::from_millis(100) {
            std::hint::spin_loop();
        }
        let all = busy_cpu_time().saturating_sub(machine).as_secs_f64()
            / (foreign.at.elapsed().as_secs_f64() * cores() as f64);
        let share = foreign.share(Duration::ZERO);
        assert!(share < all, "{share} of the machine is foreign, and all programs together use {all}");
    }

    #[test]
    fn numbers_have_three_digits_and_a_unit() {
        let written = [0.5, 1.0, 12.34, 123.4, 1234.0, 12_345.0, 1_234_567.0].map(format_number);
        assert_eq!(written, ["0.50", "1.00", "12.3", "123", "1234", "12,345", "1.23 M"]);
        assert_eq!(format_duration(Duration::from_micros(1500)), "1.50 ms");
        assert_eq!(format_duration(Duration::from_secs(90)), "90.0 s");
        assert_eq!([format_bytes(12), format_bytes(19_456), format_bytes(3 << 30)], ["12 B", "19.0 KiB", "3.00 GiB"]);
    }
}
