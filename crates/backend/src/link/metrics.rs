//! Resource usage of the machine and of the satellite process, measured for each heartbeat.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use nix::sys::statvfs::statvfs;
use sysinfo::{MemoryRefreshKind, Pid, ProcessRefreshKind, ProcessesToUpdate, System};

use crate::wire::{SystemInfo, SystemMetrics};

/// Monitor of the machine and the satellite process. Each one measures the processor load since its own previous
/// measurement, so every reader needs its own.
pub struct SystemMonitor {
    // `None` if the platform provides no metrics.
    system: Mutex<Option<System>>,
    data_dir: PathBuf,
}

impl SystemMonitor {
    /// Creates a monitor. `data_dir` is on the disk whose usage is measured.
    pub fn new(data_dir: &Path) -> Arc<Self> {
        Arc::new(Self { system: Mutex::new(System::new().ok()), data_dir: data_dir.to_owned() })
    }

    /// Returns the current usage. Blocks on files of the kernel. The first measurement has no processor load.
    pub fn measure(&self) -> SystemMetrics {
        // Usable after a panic: every measurement reads all numbers again.
        let mut system = self.system.lock().unwrap_or_else(PoisonError::into_inner);
        let disk = disk_usage(&self.data_dir);
        let (disk_used_bytes, disk_total_bytes) = disk.unzip();
        let metrics = SystemMetrics { disk_used_bytes, disk_total_bytes, ..SystemMetrics::default() };
        let Some(system) = &mut *system else { return metrics };
        system.refresh_cpu_usage();
        system.refresh_memory_specifics(MemoryRefreshKind::nothing().with_ram());
        let pid = Pid::from_u32(std::process::id());
        let memory = ProcessRefreshKind::nothing().with_memory();
        system.refresh_processes_specifics(ProcessesToUpdate::Some(&[pid]), false, memory);
        SystemMetrics {
            cpu_percent: percent(system.global_cpu_usage()),
            memory_used_bytes: system.used_memory(),
            memory_total_bytes: system.total_memory(),
            satellite_rss_bytes: system.process(pid).map(sysinfo::Process::memory),
            ..metrics
        }
    }
}

// Rounding may yield slightly more than 100.
fn percent(measured: f32) -> f32 {
    if measured.is_finite() { measured.clamp(0.0, 100.0) } else { 0.0 }
}

// Used and total bytes. Looked up by path, because a list of mounted disks is incomplete in containers.
fn disk_usage(path: &Path) -> Option<(u64, u64)> {
    let about = statvfs(path).ok()?;
    let (total, free) = (about.blocks(), about.blocks_free());
    let bytes = |blocks: u64| blocks.checked_mul(about.fragment_size());
    Some((bytes(total.saturating_sub(free))?, bytes(total)?))
}

// Blocks on files of the kernel.
pub(super) fn system_info() -> SystemInfo {
    let memory = System::new().map(|mut system| {
        system.refresh_memory_specifics(MemoryRefreshKind::nothing().with_ram());
        system.total_memory()
    });
    SystemInfo {
        os: std::env::consts::OS.to_owned(),
        arch: std::env::consts::ARCH.to_owned(),
        cpus: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        memory_bytes: memory.unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_metrics_of_this_machine_are_plausible() {
        let metrics = SystemMonitor::new(Path::new("/"));
        metrics.measure();
        let until = std::time::Instant::now() + sysinfo::MINIMUM_CPU_UPDATE_INTERVAL;
        while std::time::Instant::now() < until {
            std::hint::black_box((0..10_000).sum::<u64>());
        }
        let now = metrics.measure();
        assert!(now.cpu_percent > 0.0 && now.cpu_percent <= 100.0, "{now:?}");
        assert!(0 < now.memory_used_bytes && now.memory_used_bytes <= now.memory_total_bytes, "{now:?}");
        assert!(now.disk_total_bytes > Some(0) && now.disk_used_bytes <= now.disk_total_bytes, "{now:?}");
        assert!(now.satellite_rss_bytes > Some(1 << 20) && now.satellite_rss_bytes < Some(now.memory_total_bytes));
        let machine = system_info();
        assert_eq!(machine.memory_bytes, now.memory_total_bytes);
        assert!(machine.cpus > 0 && machine.os == "linux", "{machine:?}");
    }

    #[test]
    fn a_percentage_is_clamped_to_0_and_100() {
        for (measured, wanted) in [(-1.0, 0.0), (50.0, 50.0), (100.1, 100.0), (f32::NAN, 0.0), (f32::INFINITY, 0.0)] {
            assert!((percent(measured) - wanted).abs() < f32::EPSILON, "{measured}");
        }
    }
}
