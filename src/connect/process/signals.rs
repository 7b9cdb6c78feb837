//! What this process does with a signal, as the kernel tells.

use nix::sys::signal::Signal;

/// Whether a signal is ignored: by whoever started this process (`nohup`), or by a host.
pub(crate) fn are_ignored(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default();
    mask & (1 << (signal as u32 - 1)) != 0
}
