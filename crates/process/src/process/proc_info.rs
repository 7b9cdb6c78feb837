//! Process information from `/proc`: state, parent, group, session, start time and resource usage. A process id alone
//! does not identify a process for long; a `PidfdProcess` is one whose identity was checked.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::OwnedFd;

use nix::errno::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::run_mark::{ObservedMark, RunMark};

/// A process as described by `/proc/PID/stat`, see proc(5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessStat {
    pub pid: u32,
    pub parent: u32,
    pub(super) group: u32,
    pub(super) session: u32,
    /// Clock ticks since boot. Pid and start time together are unique within a boot.
    pub start_time: u64,
    /// User and system time in clock ticks, including children that were waited for.
    pub(super) cpu_ticks: u64,
    pub(super) rss_pages: u64,
    /// False if the process has ended and only waits to be reaped.
    pub alive: bool,
    /// State as a letter.
    pub(super) state: u8,
}

impl ProcessStat {
    pub fn read(pid: u32) -> Option<Self> {
        Self::parse(pid, &read(&format!("/proc/{pid}/stat")).ok()?)
    }

    fn parse(pid: u32, stat: &[u8]) -> Option<Self> {
        // The name is in parentheses and may contain anything, parentheses and spaces too.
        let after_name = stat.iter().rposition(|byte| *byte == b')')? + 1;
        let mut fields = [""; 22];
        let mut words = str::from_utf8(&stat[after_name..]).ok()?.split_ascii_whitespace();
        for field in &mut fields {
            *field = words.next()?;
        }
        // Field numbers are those of proc(5), where the field after the name is 3.
        let number = |field: usize| fields[field - 3].parse::<u64>().ok();
        let id = |field: usize| fields[field - 3].parse::<u32>().ok();
        // A process whose first thread has ended is shown as a zombie while its other threads run.
        let dead = matches!(fields[0], "Z" | "X") && fields[17] == "1";
        Some(Self {
            pid,
            parent: id(4)?,
            group: id(5)?,
            session: id(6)?,
            start_time: number(22)?,
            cpu_ticks: number(14)? + number(15)? + number(16)? + number(17)?,
            rss_pages: number(24)?,
            alive: !dead,
            state: fields[0].bytes().next()?,
        })
    }
}

/// Returns the name of a process, which the process chooses itself. At most 15 bytes, unless it is a thread of the kernel.
pub(super) fn process_name(pid: u32) -> Option<String> {
    let name = read(&format!("/proc/{pid}/comm")).ok()?;
    Some(String::from_utf8_lossy(name.trim_ascii_end()).into_owned())
}

fn read(path: &str) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(512);
    File::open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

pub struct ProcessCensus {
    all: HashMap<u32, ProcessStat>,
    // Marks of the processes for which one was needed.
    marks: RefCell<HashMap<u32, ObservedMark>>,
}

impl ProcessCensus {
    /// Reads all processes. Fails if `/proc` cannot be read or descriptors or memory are short: a partial snapshot is
    /// never returned.
    pub fn take() -> io::Result<Self> {
        let mut all = HashMap::new();
        for entry in fs::read_dir("/proc")? {
            let name = entry?.file_name();
            let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
            match read(&format!("/proc/{pid}/stat")) {
                Ok(stat) => all.extend(ProcessStat::parse(pid, &stat).map(|stat| (pid, stat))),
                Err(error) if is_shortage(&error) => return Err(error),
                // The process has ended meanwhile, or is hidden from this user and thus not one of ours.
                Err(_) => {}
            }
        }
        Ok(Self::new(all))
    }

    fn new(all: HashMap<u32, ProcessStat>) -> Self {
        Self { all, marks: RefCell::default() }
    }

    pub fn all(&self) -> impl Iterator<Item = &ProcessStat> {
        self.all.values()
    }

    pub(super) fn get(&self, pid: u32) -> Option<&ProcessStat> {
        self.all.get(&pid)
    }

    pub(super) fn is_marked(&self, pid: u32, mark: &RunMark) -> bool {
        self.with_mark(pid, |observed| observed.matches(mark))
    }

    /// Returns the run of a process of `satellite`; the inner option is `None` if the run cannot be read.
    #[expect(clippy::option_option, reason = "the mark of another satellite differs from an unreadable run")]
    pub(super) fn marked_run(&self, pid: u32, satellite: &str) -> Option<Option<u64>> {
        self.with_mark(pid, |observed| observed.run_of(satellite))
    }

    fn with_mark<T>(&self, pid: u32, read: impl FnOnce(&ObservedMark) -> T) -> T {
        let mut marks = self.marks.borrow_mut();
        read(marks.entry(pid).or_insert_with(|| {
            let is_alive = self.all.get(&pid).is_some_and(|stat| stat.alive);
            if is_alive { ObservedMark::read(pid) } else { ObservedMark::default() }
        }))
    }

    /// Returns the live members of the trees under these leaders, each with its leader: the processes in a leader's
    /// group or session, and their descendants.
    pub(super) fn members_under(&self, leaders: &HashSet<u32>) -> HashMap<u32, u32> {
        self.trace(|stat| [stat.pid, stat.group, stat.session].into_iter().find(|number| leaders.contains(number)))
    }

    /// Returns the live descendants of a process.
    pub(super) fn descendants_of(&self, ancestor: u32) -> HashSet<u32> {
        self.trace(|stat| Some(ancestor).filter(|ancestor| *ancestor == stat.parent)).into_keys().collect()
    }

    /// Returns the live processes that `root_of` accepts and their descendants, each with its root.
    fn trace(&self, root_of: impl Fn(&ProcessStat) -> Option<u32>) -> HashMap<u32, u32> {
        let mut found: HashMap<u32, Option<u32>> = HashMap::new();
        let mut path = Vec::new();
        for stat in self.all.values() {
            let mut at = Some(stat);
            let root = loop {
                let Some(stat) = at else { break None };
                if let Some(known) = found.get(&stat.pid) {
                    break *known;
                }
                path.push(stat.pid);
                // A parent is older than its child. If it is not, its number was reused during the scan.
                at = match root_of(stat) {
                    Some(root) => break Some(root),
                    None => self.all.get(&stat.parent).filter(|parent| parent.start_time <= stat.start_time),
                };
                if path.contains(&at.map_or(0, |parent| parent.pid)) {
                    break None;
                }
            };
            found.extend(path.drain(..).map(|pid| (pid, root)));
        }
        let alive = |pid: &u32| self.all.get(pid).is_some_and(|stat| stat.alive);
        found.into_iter().filter_map(|(pid, root)| Some((pid, root?))).filter(|(pid, _)| alive(pid)).collect()
    }
}

fn is_shortage(error: &io::Error) -> bool {
    let shortages = [Errno::EMFILE, Errno::ENFILE, Errno::ENOMEM];
    error.raw_os_error().is_some_and(|raw| shortages.contains(&Errno::from_raw(raw)))
}

pub(super) fn environment_variable(pid: u32, name: &str) -> Option<String> {
    let environment = read(&format!("/proc/{pid}/environ")).ok()?;
    let name = name.as_bytes();
    let mut variables = environment.split(|byte| *byte == 0);
    let value = variables.find_map(|variable| variable.strip_prefix(name)?.strip_prefix(b"="))?;
    String::from_utf8(value.to_vec()).ok()
}

pub fn children_of(pid: u32) -> io::Result<Vec<u32>> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
    Ok(children.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect())
}

/// A process identified by a pidfd, so that a signal cannot reach another process.
pub(super) struct PidfdProcess {
    pub(super) pid: u32,
    pub(super) start_time: u64,
    pidfd: OwnedFd,
}

impl PidfdProcess {
    pub(super) fn open(pid: u32, start_time: u64) -> Option<Self> {
        Self::open_if(pid, |stat| stat.start_time == start_time)
    }

    /// Opens the process with this number if `is_expected` accepts it after the pidfd was opened.
    pub(super) fn open_if(pid: u32, is_expected: impl Fn(&ProcessStat) -> bool) -> Option<Self> {
        let pidfd = pidfd_open(Pid::from_raw(pid.cast_signed())?, PidfdFlags::empty()).ok()?;
        // Read after the pidfd was opened: either the process that is alive under this number is the one of the pidfd,
        // or the pidfd refers to a dead process and its signals have no effect.
        let stat = ProcessStat::read(pid).filter(|stat| is_expected(stat))?;
        Some(Self { pid, start_time: stat.start_time, pidfd })
    }

    pub(super) fn signal(&self, signal: Signal) {
        let _ = pidfd_send_signal(&self.pidfd, signal);
    }

    pub(super) fn is_alive(&self) -> bool {
        ProcessStat::read(self.pid).is_some_and(|stat| stat.start_time == self.start_time && stat.alive)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat(name: &str, state: &str, threads: u32) -> Vec<u8> {
        format!("7 ({name}) {state} 1 42 43 0 -1 0 1 2 3 4 5 6 7 8 20 0 {threads} 0 99 0 12 0").into_bytes()
    }

    fn alive(stat: &[u8]) -> Option<bool> {
        ProcessStat::parse(7, stat).map(|stat| stat.alive)
    }

    #[test]
    fn the_fields_of_stat_are_parsed_by_position() {
        let expected = ProcessStat {
            pid: 7,
            parent: 1,
            group: 42,
            session: 43,
            start_time: 99,
            cpu_ticks: 5 + 6 + 7 + 8,
            rss_pages: 12,
            alive: true,
            state: b'S',
        };
        assert_eq!(ProcessStat::parse(7, &stat("sh", "S", 1)), Some(expected));
    }

    #[test]
    fn a_process_is_alive_while_it_or_one_of_its_threads_runs() {
        assert_eq!(alive(&stat("sh", "T", 1)), Some(true));
        assert_eq!(alive(&stat("sh", "Z", 1)), Some(false));
        assert_eq!(alive(&stat("server", "Z", 2)), Some(true));
    }

    #[test]
    fn parentheses_in_a_name_do_not_change_the_fields_after_it() {
        assert_eq!(ProcessStat::parse(7, &stat("a) Z 1 7 (", "S", 1)).map(|stat| stat.group), Some(42));
        assert_eq!(ProcessStat::parse(7, b"7 (torn"), None);
    }

    fn census(processes: &[(u32, u32, u32, u32)]) -> ProcessCensus {
        let stat = |&(pid, parent, group, session): &(u32, u32, u32, u32)| ProcessStat {
            pid,
            parent,
            group,
            session,
            start_time: u64::from(pid),
            cpu_ticks: 0,
            rss_pages: 0,
            alive: true,
            state: b'S',
        };
        ProcessCensus::new(processes.iter().map(|process| (process.0, stat(process))).collect())
    }

    #[test]
    fn a_tree_is_found_by_group_session_and_descent() {
        let census = census(&[
            (1, 0, 1, 1),
            (10, 1, 10, 10),
            (11, 10, 10, 10), // a child
            (12, 1, 10, 10),  // an orphan in the group
            (13, 1, 13, 10),  // left the group, not the session
            (14, 11, 14, 14), // left both, its parent is alive
            (15, 14, 14, 14), // the child of 14
            (20, 1, 20, 20),
            (21, 20, 20, 20),
        ]);
        let mut members: Vec<u32> = census.members_under(&HashSet::from([10])).into_keys().collect();
        members.sort_unstable();
        assert_eq!(members, [10, 11, 12, 13, 14, 15]);
        assert_eq!(census.members_under(&HashSet::from([10, 20])).get(&21), Some(&20));
        let mut descendants: Vec<u32> = census.descendants_of(10).into_iter().collect();
        descendants.sort_unstable();
        assert_eq!(descendants, [11, 14, 15], "neither the process itself nor others of its group and session");
    }

    #[test]
    fn a_process_is_opened_only_with_its_pid_and_start_time() {
        let own = std::process::id();
        let stat = ProcessStat::read(own).unwrap();
        assert!(PidfdProcess::open(own, stat.start_time).is_some_and(|process| process.is_alive()));
        assert!(PidfdProcess::open(own, stat.start_time + 1).is_none());
        assert!(ProcessCensus::take().is_ok_and(|census| census.get(own).is_some_and(|stat| stat.alive)));
    }
}
