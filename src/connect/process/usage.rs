//! What a process uses, as the kernel tells.

/// See [`usage`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Usage {
    /// Resident memory.
    pub rss_bytes: u64,
    /// Processor time, user and system.
    pub cpu_seconds: f64,
}

/// The memory and processor time of one process, without what it started; `None` if it is gone.
pub fn usage(pid: u32) -> Option<Usage> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command in parentheses may contain anything: the fields begin behind the last one.
    let fields: Vec<&str> = stat.get(stat.rfind(')')? + 2..)?.split(' ').collect();
    let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
    // Numbered from 3 in proc(5): utime is 14, stime 15, rss 24, in ticks and pages.
    let (ticks, pages) = (number(11)? + number(12)?, number(21)?);
    let ticks_per_second = rustix::param::clock_ticks_per_second();
    Some(Usage {
        rss_bytes: pages * rustix::param::page_size() as u64,
        cpu_seconds: ticks as f64 / ticks_per_second as f64,
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn this_process_uses_memory_and_one_that_is_not_there_uses_nothing() {
        let own = super::usage(std::process::id()).expect("this process is there");
        assert!(own.rss_bytes > 64 * 1024, "{own:?}");
        assert_eq!(super::usage(u32::MAX), None);
    }
}
