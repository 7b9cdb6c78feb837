//! The mark of a run, inherited by every process that the run starts. It identifies processes that have left their
//! process group, session and parent.
//!
//! The mark is stored in two places. An environment variable contains satellite and run in full; an exec with another
//! environment loses it. A resource limit contains a number; fork, exec, `setsid` and a cleared environment keep it,
//! and only a process that changes this very limit loses it. The limit is `RLIMIT_RTTIME`, uninterrupted real-time
//! processor time in microseconds: the number is beyond a hundred thousand years, so the limit never takes effect.

use std::{fs, io};

use nix::sys::resource::{Resource, setrlimit};

use super::proc_info::environment_variable;

const VARIABLE: &str = "MCP_SATELLITE_RUN";
// Highest bit of every limit that is a mark. Below it are 30 bits of the satellite id and 32 bits of the run.
const TAG: u64 = 1 << 62;
const RUN_BITS: u32 = 32;

/// Returns a random id for the marks of one satellite.
pub(crate) fn new_satellite_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/uuid")?.trim().replace('-', ""))
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RunMark {
    variable: String,
    limit: Option<u64>,
}

impl RunMark {
    pub(super) fn new(satellite: &str, run: u64) -> Self {
        let limit = limit_base(satellite).map(|base| base | (run & u64::from(u32::MAX)));
        Self { variable: format!("{satellite}.{run}"), limit }
    }

    pub(super) fn variable(&self) -> (&'static str, &str) {
        (VARIABLE, &self.variable)
    }

    pub(super) fn limit(&self) -> Option<u64> {
        self.limit
    }
}

/// Sets the limit of the calling process. Async-signal-safe. Without privileges this fails if the process was started
/// with a lower hard limit: then only the variable marks the run.
pub(super) fn set_limit(limit: u64) {
    let _ = setrlimit(Resource::RLIMIT_RTTIME, limit, limit);
}

#[derive(Debug, Default)]
pub(super) struct ObservedMark {
    variable: Option<String>,
    limit: Option<u64>,
}

impl ObservedMark {
    pub(super) fn read(pid: u32) -> Self {
        Self { variable: environment_variable(pid, VARIABLE), limit: limit_of(pid) }
    }

    pub(super) fn matches(&self, mark: &RunMark) -> bool {
        self.variable.as_ref() == Some(&mark.variable) || (self.limit.is_some() && self.limit == mark.limit)
    }

    /// Returns the run if the mark is one of `satellite`; the inner option is `None` if the run cannot be read.
    #[expect(clippy::option_option, reason = "the mark of another satellite differs from an unreadable run")]
    pub(super) fn run_of(&self, satellite: &str) -> Option<Option<u64>> {
        let named = self.variable.as_ref().and_then(|variable| variable.strip_prefix(satellite)?.strip_prefix('.'));
        if let Some(run) = named {
            return Some(run.parse().ok());
        }
        self.limit.filter(|limit| is_limit_of(*limit, satellite)).map(|limit| Some(run_of_limit(limit)))
    }
}

fn run_of_limit(limit: u64) -> u64 {
    limit & u64::from(u32::MAX)
}

fn is_limit_of(limit: u64, satellite: &str) -> bool {
    limit_base(satellite).is_some_and(|base| limit >> RUN_BITS == base >> RUN_BITS)
}

fn limit_base(satellite: &str) -> Option<u64> {
    const SATELLITE_BITS: u32 = 30;
    const HEX_DIGITS: usize = 15;
    let digits = satellite.get(..satellite.len().min(HEX_DIGITS))?;
    let number = u64::from_str_radix(digits, 16).ok()? & ((1 << SATELLITE_BITS) - 1);
    Some(TAG | number << RUN_BITS)
}

/// Reads the mark from a process's limits. Works for zombies and for processes of other users.
fn limit_of(pid: u32) -> Option<u64> {
    // `prlimit` needs a privilege that root does not have in a container.
    parse(&fs::read_to_string(format!("/proc/{pid}/limits")).ok()?)
}

fn parse(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max realtime timeout"))?;
    let limit: u64 = line.split_ascii_whitespace().nth(1)?.parse().ok()?;
    (limit >> TAG.trailing_zeros() == 1).then_some(limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "0123456789abcdef0123456789abcdef";
    const OTHER: &str = "fedcba9876543210fedcba9876543210";

    #[test]
    fn a_limit_identifies_satellite_and_run() {
        let mark = RunMark::new(ONE, 7);
        let observed = ObservedMark { variable: None, limit: mark.limit() };
        assert!(observed.matches(&mark));
        assert!(!observed.matches(&RunMark::new(ONE, 8)) && !observed.matches(&RunMark::new(OTHER, 7)));
        assert_eq!(observed.run_of(ONE), Some(Some(7)));
        assert_eq!(observed.run_of(OTHER), None);
    }

    #[test]
    fn a_variable_identifies_satellite_and_run() {
        let observed = |variable: &str| ObservedMark { variable: Some(variable.to_owned()), limit: None };
        assert!(observed(&format!("{ONE}.7")).matches(&RunMark::new(ONE, 7)));
        assert_eq!(observed(&format!("{ONE}.7")).run_of(ONE), Some(Some(7)));
        assert_eq!(observed(&format!("{ONE}.x")).run_of(ONE), Some(None));
        assert_eq!(observed(&format!("{ONE}0.7")).run_of(ONE), None);
    }

    #[test]
    fn a_limit_is_parsed_from_the_file_of_the_kernel() {
        let file = |hard: &str| {
            format!(
                "Limit                     Soft Limit           Hard Limit           Units     \n\
                 Max cpu time              unlimited            unlimited            seconds   \n\
                 Max realtime timeout      {hard:<20} {hard:<20} us        \n"
            )
        };
        let limit = RunMark::new(ONE, 7).limit().unwrap();
        assert_eq!(parse(&file(&limit.to_string())), Some(limit));
        assert_eq!(parse(&file("unlimited")), None);
        assert_eq!(parse(&file("200000")), None);
        assert_eq!(limit_of(std::process::id()), None);
    }

    #[test]
    fn no_common_limit_is_a_mark() {
        for limit in [0, 200_000, u64::from(u32::MAX), u64::MAX >> 1, u64::MAX] {
            assert!(!is_limit_of(limit, ONE), "{limit}");
        }
        assert_eq!(limit_base("no number"), None);
        assert!(!ObservedMark::default().matches(&RunMark::new("no number", 1)));
    }
}
