//! Memory available to the satellite and its servers: that of the machine, or of the cgroups (version 2) around the
//! satellite if their limit is tighter, as in a container.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mcp_satellite_actors::rules::memory::MemoryReading;

use super::process::own_cgroup;

const INTERVAL: Duration = Duration::from_secs(2);

/// Calls `tell` with each reading, one every two seconds, and never returns. `tell` is not called if the kernel does
/// not report memory sizes.
pub async fn watch(mut report: impl FnMut(MemoryReading)) {
    let sources = MemorySources::detect();
    loop {
        if let Some(reading) = sources.read() {
            report(reading);
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

#[derive(Debug, Clone)]
pub struct MemorySources {
    proc: PathBuf,
    // Directories of cgroups, from the innermost outwards.
    cgroups: Vec<PathBuf>,
}

impl MemorySources {
    pub fn detect() -> Self {
        Self::new("/proc", own_cgroup().as_deref())
    }

    /// Returns the sources in another `/proc` and in the directory of a cgroup and its ancestors.
    pub fn new(proc: impl Into<PathBuf>, cgroup: Option<&Path>) -> Self {
        let above = |path: &Path| path.join("cgroup.procs").exists();
        let cgroups = cgroup.into_iter().flat_map(Path::ancestors).take_while(|path| above(path));
        Self { proc: proc.into(), cgroups: cgroups.map(Path::to_owned).collect() }
    }

    /// Returns `None` if the kernel does not report memory sizes.
    pub fn read(&self) -> Option<MemoryReading> {
        let info = fs::read_to_string(self.proc.join("meminfo")).ok()?;
        let bytes = |key| Some(kibibytes(&info, key)? << 10);
        let mut reading = MemoryReading {
            pressure_percent: pressure(&self.proc.join("pressure/memory")),
            available_bytes: bytes("MemAvailable:")?,
            total_bytes: bytes("MemTotal:")?,
        };
        for cgroup in &self.cgroups {
            let own_pressure = pressure(&cgroup.join("memory.pressure"));
            // The higher pressure of machine and cgroup counts, as far as they are known.
            reading.pressure_percent = reading.pressure_percent.into_iter().chain(own_pressure).reduce(f64::max);
            if let Some((available, total)) = cgroup_memory(cgroup)
                && available < reading.available_bytes
            {
                (reading.available_bytes, reading.total_bytes) = (available, total);
            }
        }
        Some(reading)
    }
}

/// Returns the unused part of a cgroup's memory limit and the limit in bytes; `None` without a limit.
fn cgroup_memory(cgroup: &Path) -> Option<(u64, u64)> {
    let number = |file: &str| fs::read_to_string(cgroup.join(file)).ok()?.trim().parse::<u64>().ok();
    let total = number("memory.max")?;
    let used = number("memory.current")?;
    let stat = fs::read_to_string(cgroup.join("memory.stat")).unwrap_or_default();
    // The kernel reclaims inactive file pages first, so they count as available.
    let inactive = stat.lines().find_map(|line| line.strip_prefix("inactive_file ")?.trim().parse().ok()).unwrap_or(0);
    Some((total.saturating_sub(used.saturating_sub(inactive)), total))
}

/// Returns the share of the last ten seconds, in percent, in which some task waited for memory.
fn pressure(file: &Path) -> Option<f64> {
    let text = fs::read_to_string(file).ok()?;
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    some.split(' ').find_map(|word| word.strip_prefix("avg10=")?.parse().ok())
}

fn kibibytes(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.trim().strip_suffix(" kB")?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_this_machine_is_read() {
        let reading = MemorySources::detect().read().unwrap();
        assert!(reading.available_bytes > 0 && reading.available_bytes <= reading.total_bytes, "{reading:?}");
        let has_pressure = Path::new("/proc/pressure/memory").exists();
        assert_eq!(reading.pressure_percent.is_some(), has_pressure, "{reading:?}");
        assert!(reading.pressure_percent.is_none_or(|percent| (0.0..=100.0).contains(&percent)), "{reading:?}");
    }

    #[test]
    fn the_lowest_limit_and_the_highest_pressure_count() {
        let home = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let path = home.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("proc/meminfo", "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    600 kB\n");
        write("proc/pressure/memory", "some avg10=1.50 avg60=0.00 avg300=0.00 total=7\nfull avg10=0.70 avg60=0.00\n");
        let proc = home.path().join("proc");
        let bare = MemoryReading { pressure_percent: Some(1.5), available_bytes: 600 << 10, total_bytes: 1000 << 10 };
        assert_eq!(MemorySources::new(&proc, None).read(), Some(bare));

        // The inner cgroup has no limit; the outer one has.
        write("cgroup/cgroup.procs", "");
        write("cgroup/memory.max", "500000\n");
        write("cgroup/memory.current", "450000\n");
        write("cgroup/memory.stat", "anon 1\ninactive_file 20000\n");
        write("cgroup/inner/cgroup.procs", "");
        write("cgroup/inner/memory.max", "max\n");
        write("cgroup/inner/memory.pressure", "some avg10=33.25 avg60=0.00 avg300=0.00 total=7\n");
        let inner = home.path().join("cgroup/inner");
        let tight = MemoryReading { pressure_percent: Some(33.25), available_bytes: 70_000, total_bytes: 500_000 };
        assert_eq!(MemorySources::new(&proc, Some(&inner)).read(), Some(tight));
        assert_eq!(MemorySources::new(home.path(), Some(&inner)).read(), None, "no meminfo");
    }
}
