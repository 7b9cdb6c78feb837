//! Memory limit for data of servers and clients together: a quarter of what the machine, the satellite's cgroup and its
//! address space limit allow. Reading and forwarding a message takes several times its size, and the kernel ends a
//! satellite that runs out of memory, with all its servers.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use mcp_satellite_actors::byte_budget::ByteBudget;
use nix::sys::resource::{Resource, getrlimit};

use crate::process::own_cgroup;

/// Minimum budget in bytes, so that a message can be read at all.
const BUDGET_MIN: u64 = 8 << 20;

pub fn budget() -> Arc<ByteBudget> {
    let limits = [machine_memory(), cgroup_limit(own_cgroup().as_deref()), free_address_space()];
    let bytes = budget_bytes(limits);
    tracing::debug!(bytes, "memory limit for lists, messages and streams");
    ByteBudget::new(usize::try_from(bytes).unwrap_or(usize::MAX))
}

fn budget_bytes(limits: [Option<u64>; 3]) -> u64 {
    (limits.into_iter().flatten().min().unwrap_or(u64::MAX) / 4).max(BUDGET_MIN)
}

fn machine_memory() -> Option<u64> {
    kibibytes(&fs::read_to_string("/proc/meminfo").ok()?, "MemTotal:")
}

fn cgroup_limit(own: Option<&Path>) -> Option<u64> {
    let limit = |directory: &Path| fs::read_to_string(directory.join("memory.max")).ok()?.trim().parse::<u64>().ok();
    own?.ancestors().filter_map(limit).min()
}

/// Returns the rest of the address space limit. Much of the address space in use is reserved and never touched, so it
/// is subtracted.
fn free_address_space() -> Option<u64> {
    let (soft, _) = getrlimit(Resource::RLIMIT_AS).ok()?;
    // `RLIM_INFINITY` means no limit.
    (soft < u64::MAX).then(|| {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        soft.saturating_sub(kibibytes(&status, "VmSize:").unwrap_or_default())
    })
}

fn kibibytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use super::*;

    #[test]
    fn the_budget_is_a_quarter_of_the_lowest_limit() {
        assert_eq!(budget_bytes([Some(4 << 30), Some(512 << 20), None]), 128 << 20);
        assert_eq!(budget_bytes([Some(4 << 30), None, Some(1 << 20)]), BUDGET_MIN);
        assert_eq!(kibibytes("MemFree: 1 kB\nMemTotal:       16 kB\n", "MemTotal:"), Some(16 << 10));
        assert_eq!(kibibytes("MemTotal: much\n", "MemTotal:"), None);
    }

    #[test]
    fn the_limit_of_a_cgroup_is_the_lowest_of_itself_and_its_parents() {
        let top = tempfile::tempdir().unwrap();
        let own = top.path().join("a/b");
        fs::create_dir_all(&own).unwrap();
        assert_eq!(cgroup_limit(Some(&own)), None);
        fs::write(top.path().join("a/memory.max"), "1048576\n").unwrap();
        fs::write(own.join("memory.max"), "max\n").unwrap();
        assert_eq!((cgroup_limit(Some(&own)), cgroup_limit(None)), (Some(1 << 20), None));
        fs::write(own.join("memory.max"), "4096\n").unwrap();
        assert_eq!(cgroup_limit(Some(&own)), Some(4096));
    }
}
