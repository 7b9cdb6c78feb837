//! The ledger: a file in the data directory that records the running processes. If a satellite is killed together with
//! its keeper, the next satellite on the same data directory reads it and ends the processes that are left.
//!
//! A process id alone identifies no process: a row applies only if boot, PID namespace and start time match as well.
//! Processes that outlive their leader are found by the satellite's mark or in the satellite's cgroup. One line of JSON
//! is written when a process starts and one when its run has ended. There is no `fsync`, because a machine that goes
//! down takes the processes with it.
//!
//! A thread writes the rows, while the child executes its program. A start waits for its row, at most [`WAIT_MAX`](mcp_satellite_files::disk::WAIT_MAX); `status` shows a
//! process whose row is not written yet.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use super::cgroup;
use super::proc_info::{PidfdProcess, ProcessCensus, ProcessStat};
use crate::keeper::run_client::RunClient;
use mcp_satellite_files::data_dir::{DataDir, OpenMode};
use mcp_satellite_files::disk::DiskSaver;

const FILE: &str = "ledger";
const FILE_MAX: u64 = 1 << 30;
// Number of superfluous lines at which the file is rewritten.
const LINES_SPARE: usize = 1000;
// Time after which a process that did not die of SIGKILL is left to the kernel.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(5);

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum LedgerLine {
    Satellite(LedgerHeader),
    Started(StartedRow),
    Inside(SandboxRow),
    Ended { run: u64 },
}

/// The satellite that writes a ledger: the first line. Its process ids are valid in this boot and PID namespace only.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct LedgerHeader {
    pub(super) id: String,
    /// Process id of the keeper or, without one, of the satellite.
    pub(super) pid: u32,
    pub(super) boot_id: String,
    pub(super) pid_namespace: String,
    pub(super) cgroup: Option<PathBuf>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct StartedRow {
    pub(super) run: u64,
    pub(super) instance: String,
    pub(super) pid: u32,
    pub(super) start_time: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct SandboxRow {
    run: u64,
    pid: u32,
    start_time: u64,
}

/// Processes left by a killed satellite and ended by this one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReclaimedProcesses {
    pub processes: usize,
    pub instances: Vec<String>,
    /// Process id of the killed keeper or, without one, of the satellite.
    pub keeper_pid: u32,
    /// Number of processes that did not die in time.
    pub left: usize,
}

/// Rows of the running processes and the thread that writes them. Without a data directory nothing is written.
#[derive(Default)]
pub(super) struct Ledger(Option<LedgerWriter>);

struct LedgerWriter {
    rows: Arc<Mutex<LedgerRows>>,
    saver: DiskSaver,
}

/// Rows in memory. The lock is never held during disk I/O.
#[derive(Default)]
struct LedgerRows {
    running: BTreeMap<u64, LedgerRow>,
    // Lines not written yet, with their sequence numbers.
    queue: VecDeque<(u64, LedgerLine)>,
    last: u64,
    // True after the queue overflowed: the next save writes all running rows anew.
    overflow: bool,
}

#[derive(Clone, Default)]
struct LedgerRow {
    lines: Vec<LedgerLine>,
    is_written: bool,
}

impl LedgerRows {
    fn push(&mut self, line: LedgerLine) {
        if self.queue.len() > LINES_SPARE + 4 * self.running.len() {
            self.queue.clear();
            self.overflow = true;
        }
        self.last += 1;
        if !self.overflow {
            self.queue.push_back((self.last, line));
        }
    }

    fn mark_written(&mut self, last: u64) {
        self.queue.retain(|(number, _)| *number > last);
        let waiting: HashSet<u64> = self.queue.iter().map(|(_, line)| line.run()).collect();
        for (run, row) in &mut self.running {
            row.is_written |= !self.overflow && !waiting.contains(run);
        }
    }
}

impl LedgerLine {
    fn run(&self) -> u64 {
        match self {
            Self::Satellite(_) => 0,
            Self::Started(StartedRow { run, .. }) | Self::Inside(SandboxRow { run, .. }) | Self::Ended { run } => *run,
        }
    }
}

struct LedgerFile {
    directory: DataDir,
    satellite: LedgerHeader,
    // Absent until the disk had room to create the file.
    file: Option<File>,
    lines: usize,
    // True if the last write failed and may have left a part of a line.
    torn: bool,
}

impl Ledger {
    /// Replaces the existing ledger by a new one with the processes that an earlier satellite has left to this one. A failed
    /// write is retried. Fails only if the thread cannot be started.
    pub(super) fn begin(directory: &DataDir, satellite: LedgerHeader, left: Vec<StartedRow>) -> io::Result<Self> {
        let row = |row: StartedRow| (row.run, LedgerRow { lines: vec![LedgerLine::Started(row)], is_written: false });
        let running = left.into_iter().map(row).collect();
        let rows = Arc::new(Mutex::new(LedgerRows { running, overflow: true, ..LedgerRows::default() }));
        let mut open = LedgerFile { directory: directory.clone(), satellite, file: None, lines: 0, torn: false };
        let shown = Arc::clone(&rows);
        let saver = DiskSaver::start("ledger", move || open.save(&shown))?;
        // A failed write is logged, and each process is shown as not recorded.
        let _ = saver.save();
        Ok(Self(Some(LedgerWriter { rows, saver })))
    }

    /// Adds a process. Returns the request to wait for, if there is a data directory.
    pub(super) fn record_start(&self, run: u64, instance: &str, pid: u32) -> Option<u64> {
        self.0.as_ref()?;
        let start_time = ProcessStat::read(pid).map_or(0, |stat| stat.start_time);
        self.add(LedgerLine::Started(StartedRow { run, instance: instance.to_owned(), pid, start_time }))
    }

    /// Waits until the row of a process is written. A failed write is logged and does not prevent the start.
    pub(super) fn wait_recorded(&self, request: u64, instance: &str, pid: u32) {
        let Some(LedgerWriter { saver, .. }) = &self.0 else { return };
        if let Err(error) = saver.wait(request) {
            tracing::warn!(instance, pid, %error, "a process is not in the ledger yet: if the satellite and its keeper were killed now, the next start would not find it");
        }
    }

    pub(super) fn record_sandbox_process(&self, run: u64, pid: u32, start_time: u64) {
        self.add(LedgerLine::Inside(SandboxRow { run, pid, start_time }));
    }

    pub(super) fn record_end(&self, run: u64) {
        self.add(LedgerLine::Ended { run });
    }

    /// Returns true if all rows of a run are written, or if there is no data directory.
    pub(super) fn is_recorded(&self, run: u64) -> bool {
        let Some(writing) = &self.0 else { return true };
        writing.rows().running.get(&run).is_none_or(|row| row.is_written)
    }

    fn add(&self, line: LedgerLine) -> Option<u64> {
        let writing = self.0.as_ref()?;
        let mut rows = writing.rows();
        if let LedgerLine::Ended { run } = &line {
            rows.running.remove(run);
        } else {
            let row = rows.running.entry(line.run()).or_default();
            row.lines.push(line.clone());
            row.is_written = false;
        }
        rows.push(line);
        drop(rows);
        Some(writing.saver.request())
    }
}

impl LedgerWriter {
    fn rows(&self) -> MutexGuard<'_, LedgerRows> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LedgerFile {
    fn save(&mut self, rows: &Mutex<LedgerRows>) -> io::Result<()> {
        let rows = || rows.lock().unwrap_or_else(PoisonError::into_inner);
        let (last, lines, running, overflow) = {
            let rows = rows();
            let is_long = self.lines + rows.queue.len() > LINES_SPARE + 4 * rows.running.len();
            let anew = rows.overflow || self.file.is_none() || is_long;
            let lines: Vec<LedgerLine> = rows.queue.iter().map(|(_, line)| line.clone()).collect();
            let running = anew.then(|| rows.running.values().flat_map(|row| row.lines.clone()).collect::<Vec<_>>());
            (rows.last, lines, running, rows.overflow)
        };
        let appended = lines.len();
        if let Some(running) = running {
            match rewrite(&self.directory, &self.satellite, &running) {
                Ok(file) => {
                    (self.file, self.lines, self.torn) = (Some(file), 0, false);
                    let mut rows = rows();
                    // Lines that arrived meanwhile were not queued; their callers have requested another save.
                    if overflow {
                        rows.overflow = rows.last > last;
                    }
                    rows.mark_written(last);
                    return Ok(());
                }
                // If the disk has no room for a new file, lines are appended to the old one.
                Err(error) if overflow || self.file.is_none() => return Err(error),
                Err(_) => {}
            }
        }
        let Some(file) = &mut self.file else { return Ok(()) };
        let mut text = if self.torn { b"\n".to_vec() } else { Vec::new() };
        for line in &lines {
            serde_json::to_writer(&mut text, line)?;
            text.push(b'\n');
        }
        self.torn = true;
        // A single write, so that a kill leaves the whole line or nothing of it.
        file.write_all(&text)?;
        (self.torn, self.lines) = (false, self.lines + appended);
        rows().mark_written(last);
        Ok(())
    }
}

fn rewrite(directory: &DataDir, satellite: &LedgerHeader, running: &[LedgerLine]) -> io::Result<File> {
    let new = format!("{FILE}.new");
    let mut file = directory.create_file(&new)?;
    let mut text = Vec::new();
    for line in std::iter::once(&LedgerLine::Satellite(satellite.clone())).chain(running) {
        serde_json::to_writer(&mut text, line)?;
        text.push(b'\n');
    }
    file.write_all(&text)?;
    directory.rename(&new, FILE)?;
    directory.open_file(FILE, OpenMode::Append)
}

pub(super) fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

pub(super) fn pid_namespace() -> String {
    fs::read_link("/proc/self/ns/pid").unwrap_or_default().to_string_lossy().into_owned()
}

/// Ends the processes recorded in the ledger of `directory` and waits until they are gone. Returns `None` if there were
/// none. The caller holds the lock of the directory, so the satellite that wrote the ledger is dead. If it ran below the
/// keeper of this process, that one has left only processes that this satellite continues.
pub(super) fn reclaim(directory: &DataDir) -> io::Result<Option<ReclaimedProcesses>> {
    let Some(bytes) = directory.read(FILE, FILE_MAX)? else { return Ok(None) };
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let Some(left) = LedgerContents::parse(&text) else {
        tracing::warn!(file = %directory.path().join(FILE).display(), "cannot read the ledger; reclaiming nothing");
        return Ok(None);
    };
    if RunClient::current().is_some_and(|runs| runs.keeper().id == left.satellite.id) {
        return Ok(None);
    }
    let here = left.satellite.boot_id == boot_id() && left.satellite.pid_namespace == pid_namespace();
    if !here {
        // The machine or the container has restarted since, so the processes are gone.
        return Ok(None);
    }
    left.kill_processes()
}

struct LedgerContents {
    satellite: LedgerHeader,
    started_rows: BTreeMap<u64, StartedRow>,
    sandbox_rows: Vec<SandboxRow>,
}

impl LedgerContents {
    fn parse(text: &str) -> Option<Self> {
        // The last line may be torn.
        let mut lines = text.lines().filter_map(|line| serde_json::from_str(line).ok());
        let Some(LedgerLine::Satellite(satellite)) = lines.next() else { return None };
        let mut left = Self { satellite, started_rows: BTreeMap::new(), sandbox_rows: Vec::new() };
        for line in lines {
            match line {
                LedgerLine::Satellite(_) => {}
                LedgerLine::Started(started) => drop(left.started_rows.insert(started.run, started)),
                LedgerLine::Inside(inside) => left.sandbox_rows.push(inside),
                LedgerLine::Ended { run } => {
                    left.started_rows.remove(&run);
                    left.sandbox_rows.retain(|inside| inside.run != run);
                }
            }
        }
        Some(left)
    }

    fn kill_processes(&self) -> io::Result<Option<ReclaimedProcesses>> {
        let mut killed = HashSet::new();
        let mut instances = HashSet::new();
        let cgroup =
            self.satellite.cgroup.as_deref().filter(|cgroup| cgroup::is_of_dead_satellite(cgroup, &self.satellite.id));
        let in_cgroup = cgroup.map_or(0, cgroup::population);
        let until = Instant::now() + PATIENCE;
        let left = loop {
            let cgroup_gone = cgroup.is_none_or(cgroup::reclaim);
            let found = match ProcessCensus::take() {
                Ok(census) => self.find_processes(&census),
                // The ledger is the only record of the processes, so a failed census is retried.
                Err(_) if Instant::now() < until => {
                    thread::sleep(PAUSE);
                    continue;
                }
                Err(error) => return Err(error),
            };
            for (member, run) in &found {
                if let Some(known) = PidfdProcess::open(member.pid, member.start_time) {
                    known.signal(Signal::KILL);
                    killed.insert((member.pid, member.start_time));
                    instances.extend(
                        run.and_then(|run| self.started_rows.get(&run)).map(|started| started.instance.clone()),
                    );
                }
            }
            if found.is_empty() && cgroup_gone {
                break 0;
            }
            if Instant::now() >= until {
                break found.len().max(usize::from(!cgroup_gone));
            }
            thread::sleep(PAUSE);
        };
        let processes = killed.len().max(in_cgroup);
        if processes == 0 && left == 0 {
            return Ok(None);
        }
        if in_cgroup > killed.len() {
            instances.extend(self.started_rows.values().map(|started| started.instance.clone()));
        }
        let mut instances: Vec<String> = instances.into_iter().collect();
        instances.sort();
        Ok(Some(ReclaimedProcesses { processes, instances, keeper_pid: self.satellite.pid, left }))
    }

    fn find_processes(&self, census: &ProcessCensus) -> Vec<(ProcessStat, Option<u64>)> {
        let is_same_process =
            |pid: u32, start_time: u64| census.get(pid).is_some_and(|stat| stat.start_time == start_time);
        let mut roots = BTreeMap::new();
        roots.extend(
            self.started_rows.values().filter(|it| is_same_process(it.pid, it.start_time)).map(|it| (it.pid, it.run)),
        );
        roots.extend(
            self.sandbox_rows.iter().filter(|it| is_same_process(it.pid, it.start_time)).map(|it| (it.pid, it.run)),
        );
        let under = census.members_under(&roots.keys().copied().collect());
        let own = std::process::id();
        let run_of = |stat: &ProcessStat| {
            if let Some(run) = under.get(&stat.pid).and_then(|root| roots.get(root)) {
                return Some(Some(*run));
            }
            census.marked_run(stat.pid, &self.satellite.id)
        };
        let live = census.all().filter(|stat| stat.alive && stat.pid != own);
        live.filter_map(|stat| Some((*stat, run_of(stat)?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Ledger {
        fn save(&self) {
            self.0.as_ref().unwrap().saver.save().unwrap();
        }

        fn start(&self, run: u64, instance: &str, pid: u32) {
            self.wait_recorded(self.record_start(run, instance, pid).unwrap(), instance, pid);
        }
    }

    fn satellite() -> LedgerHeader {
        LedgerHeader { id: "feed".into(), pid: 1, boot_id: boot_id(), pid_namespace: pid_namespace(), cgroup: None }
    }

    #[test]
    fn ended_runs_are_removed_and_an_incomplete_line_is_ignored() {
        let directory = mcp_satellite_files::data_dir::private_tempdir();
        let ledger = Ledger::begin(&DataDir::open(directory.path()).unwrap(), satellite(), Vec::new()).unwrap();
        ledger.start(1, "one", 101);
        ledger.start(2, "two", 102);
        ledger.record_sandbox_process(2, 103, 7);
        ledger.record_end(1);
        ledger.save();
        let file = directory.path().join(FILE);
        let text = fs::read_to_string(&file).unwrap() + r#"{"started":{"run":3,"#;
        let left = LedgerContents::parse(&text).unwrap();
        assert_eq!(left.started_rows.keys().copied().collect::<Vec<_>>(), [2]);
        assert_eq!(left.sandbox_rows, [SandboxRow { run: 2, pid: 103, start_time: 7 }]);
    }

    #[test]
    fn a_row_that_cannot_be_written_blocks_nothing_and_is_written_later() {
        let directory = mcp_satellite_files::data_dir::private_tempdir();
        // Every write fails while a directory has the name of the unfinished file.
        let obstacle = directory.path().join(format!("{FILE}.new"));
        fs::create_dir(&obstacle).unwrap();
        let ledger = Ledger::begin(&DataDir::open(directory.path()).unwrap(), satellite(), Vec::new()).unwrap();
        ledger.start(1, "one", 101);
        assert!(!ledger.is_recorded(1));
        for run in 2..5000 {
            ledger.start(run, "comes and goes", 102);
            ledger.record_end(run);
        }
        fs::remove_dir(&obstacle).unwrap();
        ledger.save();
        assert!(ledger.is_recorded(1));
        let text = fs::read_to_string(directory.path().join(FILE)).unwrap();
        assert_eq!(LedgerContents::parse(&text).unwrap().started_rows.keys().copied().collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn a_ledger_stays_short_after_many_runs() {
        let directory = mcp_satellite_files::data_dir::private_tempdir();
        let ledger = Ledger::begin(&DataDir::open(directory.path()).unwrap(), satellite(), Vec::new()).unwrap();
        ledger.start(0, "stays", 100);
        for run in 1..=5000 {
            ledger.start(run, "comes and goes", 101);
            ledger.record_end(run);
        }
        ledger.save();
        let text = fs::read_to_string(directory.path().join(FILE)).unwrap();
        assert!(text.lines().count() <= LINES_SPARE + 20, "{} lines", text.lines().count());
        assert_eq!(LedgerContents::parse(&text).unwrap().started_rows.keys().copied().collect::<Vec<_>>(), [0]);
    }

    #[test]
    fn a_ledger_of_another_boot_or_namespace_reclaims_nothing() {
        let own = std::process::id();
        let start_time = ProcessStat::read(own).unwrap().start_time;
        for other in [
            LedgerHeader { boot_id: "another".into(), ..satellite() },
            LedgerHeader { pid_namespace: "another".into(), ..satellite() },
        ] {
            let directory = mcp_satellite_files::data_dir::private_tempdir();
            let ledger = Ledger::begin(&DataDir::open(directory.path()).unwrap(), other, Vec::new()).unwrap();
            ledger.record_sandbox_process(1, own, start_time);
            ledger.save();
            assert_eq!(reclaim(&DataDir::open(directory.path()).unwrap()).unwrap(), None);
        }
        let directory = mcp_satellite_files::data_dir::private_tempdir();
        let directory = DataDir::open(directory.path()).unwrap();
        assert_eq!(reclaim(&directory).unwrap(), None, "no ledger");
        directory.replace(FILE, b"not a ledger").unwrap();
        assert_eq!(reclaim(&directory).unwrap(), None);
    }
}
