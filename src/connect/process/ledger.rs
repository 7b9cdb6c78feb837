//! What runs, on paper: so that the next satellite on the same data directory finds what this one left if it is killed
//! together with its reaper, and nothing else.
//!
//! A number is worth nothing by itself: a process is meant only if its start time is the same, in the same boot and PID
//! namespace. What its leader has outlived carries the satellite's mark, or is in the satellite's cgroup. One line of
//! JSON is written when something starts and one when it is gone; no `fsync`, because a machine that goes down takes the
//! processes with it.
//!
//! Rows are written by a thread of their own. A start waits for its row, no longer than [`WAIT_MAX`](crate::disk::WAIT_MAX);
//! a process whose row is not written yet is shown in `status`.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use super::census::{Census, Known, Stat};
use super::cgroup;
use crate::data_dir::{Access, DataDir};
use crate::disk::Saver;

/// Its name in the data directory.
const FILE: &str = "ledger";
const FILE_MAX: u64 = 1 << 30;
/// Lines about what is gone are cleared away when there are this many more than needed.
const LINES_SPARE: usize = 1000;
/// What does not die of SIGKILL within this is left to the kernel.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(5);

/// One line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    /// The first: whose ledger it is.
    Satellite(Satellite),
    /// A process was started.
    Started(Started),
    /// In its sandbox.
    Inside(Inside),
    /// Nothing of it is left.
    Ended { run: u64 },
}

/// Whose ledger it is, and in which world its numbers mean something.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Satellite {
    /// Random: what its servers carry in their marks.
    pub(super) id: String,
    pub(super) pid: u32,
    pub(super) boot_id: String,
    pub(super) pid_namespace: String,
    pub(super) cgroup: Option<PathBuf>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Started {
    run: u64,
    instance: String,
    pid: u32,
    start_time: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Inside {
    run: u64,
    pid: u32,
    start_time: u64,
}

/// What a killed satellite had left.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reclaimed {
    /// Processes that were killed.
    pub processes: usize,
    /// Whose they were.
    pub instances: Vec<String>,
    /// The process id that the satellite had.
    pub satellite_pid: u32,
    /// Processes that did not die in time.
    pub left: usize,
}

/// The rows of what runs, and the thread that writes them. Without a data directory nothing is written.
#[derive(Default)]
pub(super) struct Ledger(Option<Writing>);

struct Writing {
    rows: Arc<Mutex<Rows>>,
    saver: Saver,
}

/// The rows in memory. Never locked while the disk is waited for.
#[derive(Default)]
struct Rows {
    running: BTreeMap<u64, Row>,
    /// Lines that are not written yet, numbered.
    queue: VecDeque<(u64, Line)>,
    last: u64,
    /// There were too many of them: all that runs is written anew instead.
    overflow: bool,
}

#[derive(Clone, Default)]
struct Row {
    lines: Vec<Line>,
    is_written: bool,
}

impl Rows {
    fn push(&mut self, line: Line) {
        if self.queue.len() > LINES_SPARE + 4 * self.running.len() {
            self.queue.clear();
            self.overflow = true;
        }
        self.last += 1;
        if !self.overflow {
            self.queue.push_back((self.last, line));
        }
    }

    /// Lines up to `last` are written.
    fn written(&mut self, last: u64) {
        self.queue.retain(|(number, _)| *number > last);
        let waiting: HashSet<u64> = self.queue.iter().map(|(_, line)| line.run()).collect();
        for (run, row) in &mut self.running {
            row.is_written |= !self.overflow && !waiting.contains(run);
        }
    }
}

impl Line {
    /// The run that it is about; 0 for none.
    fn run(&self) -> u64 {
        match self {
            Self::Satellite(_) => 0,
            Self::Started(Started { run, .. }) | Self::Inside(Inside { run, .. }) | Self::Ended { run } => *run,
        }
    }
}

/// The file, as the thread that writes it has it.
struct Open {
    directory: DataDir,
    satellite: Satellite,
    /// None as long as there was no room to begin it.
    file: Option<File>,
    lines: usize,
    /// The last write failed and may have left a part of a line.
    torn: bool,
}

impl Ledger {
    /// Begins a new one in place of what is there. A disk that does not take it is tried again. Fails where no thread can
    /// be started.
    pub(super) fn begin(directory: &DataDir, satellite: Satellite) -> io::Result<Self> {
        let rows = Arc::new(Mutex::new(Rows { overflow: true, ..Rows::default() }));
        let mut open = Open { directory: directory.clone(), satellite, file: None, lines: 0, torn: false };
        let shown = Arc::clone(&rows);
        let saver = Saver::start("ledger", move || open.save(&shown))?;
        // An error is in the log, and each process is shown as not written down.
        let _ = saver.save();
        Ok(Self(Some(Writing { rows, saver })))
    }

    /// Writes a process down, and waits for that. A disk that does not take it holds up no start.
    pub(super) fn started(&self, run: u64, instance: &str, pid: u32) {
        let start_time = Stat::read(pid).map_or(0, |stat| stat.start_time);
        let line = Line::Started(Started { run, instance: instance.to_owned(), pid, start_time });
        let Some(Writing { saver, .. }) = &self.0 else { return };
        if let Some(request) = self.add(line)
            && let Err(error) = saver.wait(request)
        {
            tracing::warn!(instance, pid, %error, "a process is not in the ledger yet: if the satellite and its reaper were killed now, the next start would not find it");
        }
    }

    pub(super) fn inside(&self, run: u64, pid: u32, start_time: u64) {
        self.add(Line::Inside(Inside { run, pid, start_time }));
    }

    pub(super) fn ended(&self, run: u64) {
        self.add(Line::Ended { run });
    }

    /// Whether all rows of a run are written. Without a data directory nothing is missing.
    pub(super) fn is_recorded(&self, run: u64) -> bool {
        let Some(writing) = &self.0 else { return true };
        writing.rows().running.get(&run).is_none_or(|row| row.is_written)
    }

    fn add(&self, line: Line) -> Option<u64> {
        let writing = self.0.as_ref()?;
        let mut rows = writing.rows();
        if let Line::Ended { run } = &line {
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

impl Writing {
    fn rows(&self) -> MutexGuard<'_, Rows> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Open {
    /// Writes all that is not written yet.
    fn save(&mut self, rows: &Mutex<Rows>) -> io::Result<()> {
        let rows = || rows.lock().unwrap_or_else(PoisonError::into_inner);
        let (last, lines, running, overflow) = {
            let rows = rows();
            let is_long = self.lines + rows.queue.len() > LINES_SPARE + 4 * rows.running.len();
            let anew = rows.overflow || self.file.is_none() || is_long;
            let lines: Vec<Line> = rows.queue.iter().map(|(_, line)| line.clone()).collect();
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
                    rows.written(last);
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
        // In one write, so that a kill leaves a whole line or none.
        file.write_all(&text)?;
        (self.torn, self.lines) = (false, self.lines + appended);
        rows().written(last);
        Ok(())
    }
}

/// Writes it anew beside the old one and puts it in its place.
fn rewrite(directory: &DataDir, satellite: &Satellite, running: &[Line]) -> io::Result<File> {
    let new = format!("{FILE}.new");
    let mut file = directory.create_file(&new)?;
    let mut text = Vec::new();
    for line in std::iter::once(&Line::Satellite(satellite.clone())).chain(running) {
        serde_json::to_writer(&mut text, line)?;
        text.push(b'\n');
    }
    file.write_all(&text)?;
    directory.rename(&new, FILE)?;
    directory.open_file(FILE, Access::Append)
}

/// The kernel's name for this run of the machine.
pub(super) fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// The name of the PID namespace that our numbers are of.
pub(super) fn pid_namespace() -> String {
    fs::read_link("/proc/self/ns/pid").unwrap_or_default().to_string_lossy().into_owned()
}

/// Ends what the ledger in `directory` says was left, and waits until it is gone. `None` if nothing was. The caller
/// holds the lock of the directory, so whoever wrote the ledger is dead.
pub(super) fn reclaim(directory: &DataDir) -> io::Result<Option<Reclaimed>> {
    let Some(bytes) = directory.read(FILE, FILE_MAX)? else { return Ok(None) };
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let Some(left) = Left::read(&text) else {
        tracing::warn!(file = %directory.path().join(FILE).display(), "cannot read the ledger; reclaiming nothing");
        return Ok(None);
    };
    let here = left.satellite.boot_id == boot_id() && left.satellite.pid_namespace == pid_namespace();
    if !here {
        // The machine, or the container, went down meanwhile and took everything with it.
        return Ok(None);
    }
    left.end()
}

/// What a ledger says was there at its end.
struct Left {
    satellite: Satellite,
    started: BTreeMap<u64, Started>,
    inside: Vec<Inside>,
}

impl Left {
    fn read(text: &str) -> Option<Self> {
        // The last line may be torn.
        let mut lines = text.lines().filter_map(|line| serde_json::from_str(line).ok());
        let Some(Line::Satellite(satellite)) = lines.next() else { return None };
        let mut left = Self { satellite, started: BTreeMap::new(), inside: Vec::new() };
        for line in lines {
            match line {
                Line::Satellite(_) => {}
                Line::Started(started) => drop(left.started.insert(started.run, started)),
                Line::Inside(inside) => left.inside.push(inside),
                Line::Ended { run } => {
                    left.started.remove(&run);
                    left.inside.retain(|inside| inside.run != run);
                }
            }
        }
        Some(left)
    }

    fn end(&self) -> io::Result<Option<Reclaimed>> {
        let mut killed = HashSet::new();
        let mut instances = HashSet::new();
        let cgroup = self.satellite.cgroup.as_deref().filter(|cgroup| cgroup::was_of(cgroup, &self.satellite.id));
        let in_cgroup = cgroup.map_or(0, cgroup::population);
        let until = Instant::now() + PATIENCE;
        let left = loop {
            let cgroup_gone = cgroup.is_none_or(cgroup::reclaim);
            let found = match Census::take() {
                Ok(census) => self.find(&census),
                // The ledger is the only record: it is not given up before it was looked at.
                Err(_) if Instant::now() < until => {
                    thread::sleep(PAUSE);
                    continue;
                }
                Err(error) => return Err(error),
            };
            for (member, run) in &found {
                if let Some(known) = Known::hold(member.pid, member.start_time) {
                    known.signal(Signal::KILL);
                    killed.insert((member.pid, member.start_time));
                    instances
                        .extend(run.and_then(|run| self.started.get(&run)).map(|started| started.instance.clone()));
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
            instances.extend(self.started.values().map(|started| started.instance.clone()));
        }
        let mut instances: Vec<String> = instances.into_iter().collect();
        instances.sort();
        Ok(Some(Reclaimed { processes, instances, satellite_pid: self.satellite.pid, left }))
    }

    /// The live processes that are meant, each with its run if that is known.
    fn find(&self, census: &Census) -> Vec<(Stat, Option<u64>)> {
        let is_meant = |pid: u32, start_time: u64| census.get(pid).is_some_and(|stat| stat.start_time == start_time);
        let mut roots = BTreeMap::new();
        roots.extend(self.started.values().filter(|it| is_meant(it.pid, it.start_time)).map(|it| (it.pid, it.run)));
        roots.extend(self.inside.iter().filter(|it| is_meant(it.pid, it.start_time)).map(|it| (it.pid, it.run)));
        let under = census.under(&roots.keys().copied().collect());
        let own = std::process::id();
        let run_of = |stat: &Stat| {
            if let Some(run) = under.get(&stat.pid).and_then(|root| roots.get(root)) {
                return Some(Some(*run));
            }
            census.mark_of(stat.pid)?.run_of(&self.satellite.id)
        };
        let live = census.all().filter(|stat| stat.alive && stat.pid != own);
        live.filter_map(|stat| Some((*stat, run_of(stat)?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Ledger {
        fn settle(&self) {
            self.0.as_ref().unwrap().saver.save().unwrap();
        }
    }

    fn satellite() -> Satellite {
        Satellite { id: "feed".into(), pid: 1, boot_id: boot_id(), pid_namespace: pid_namespace(), cgroup: None }
    }

    #[test]
    fn what_ended_is_not_left_and_a_torn_line_harms_nothing() {
        let directory = crate::data_dir::private_tempdir();
        let ledger = Ledger::begin(&DataDir::open(directory.path()).unwrap(), satellite()).unwrap();
        ledger.started(1, "one", 101);
        ledger.started(2, "two", 102);
        ledger.inside(2, 103, 7);
        ledger.ended(1);
        ledger.settle();
        let file = directory.path().join(FILE);
        let text = fs::read_to_string(&file).unwrap() + r#"{"started":{"run":3,"#;
        let left = Left::read(&text).unwrap();
        assert_eq!(left.started.keys().copied().collect::<Vec<_>>(), [2]);
        assert_eq!(left.inside, [Inside { run: 2, pid: 103, start_time: 7 }]);
    }

    #[test]
    fn a_row_that_cannot_be_written_holds_up_nothing_and_is_written_later() {
        let directory = crate::data_dir::private_tempdir();
        // Nothing can be written where a directory has the name of the unfinished file.
        let in_the_way = directory.path().join(format!("{FILE}.new"));
        fs::create_dir(&in_the_way).unwrap();
        let ledger = Ledger::begin(&DataDir::open(directory.path()).unwrap(), satellite()).unwrap();
        ledger.started(1, "one", 101);
        assert!(!ledger.is_recorded(1));
        for run in 2..5000 {
            ledger.started(run, "comes and goes", 102);
            ledger.ended(run);
        }
        fs::remove_dir(&in_the_way).unwrap();
        ledger.settle();
        assert!(ledger.is_recorded(1));
        let text = fs::read_to_string(directory.path().join(FILE)).unwrap();
        assert_eq!(Left::read(&text).unwrap().started.keys().copied().collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn a_ledger_of_a_long_life_stays_short() {
        let directory = crate::data_dir::private_tempdir();
        let ledger = Ledger::begin(&DataDir::open(directory.path()).unwrap(), satellite()).unwrap();
        ledger.started(0, "stays", 100);
        for run in 1..=5000 {
            ledger.started(run, "comes and goes", 101);
            ledger.ended(run);
        }
        ledger.settle();
        let text = fs::read_to_string(directory.path().join(FILE)).unwrap();
        assert!(text.lines().count() <= LINES_SPARE + 20, "{} lines", text.lines().count());
        assert_eq!(Left::read(&text).unwrap().started.keys().copied().collect::<Vec<_>>(), [0]);
    }

    #[test]
    fn a_ledger_of_another_boot_or_another_namespace_reclaims_nothing() {
        let own = std::process::id();
        let start_time = Stat::read(own).unwrap().start_time;
        for other in [
            Satellite { boot_id: "another".into(), ..satellite() },
            Satellite { pid_namespace: "another".into(), ..satellite() },
        ] {
            let directory = crate::data_dir::private_tempdir();
            let ledger = Ledger::begin(&DataDir::open(directory.path()).unwrap(), other).unwrap();
            ledger.inside(1, own, start_time);
            ledger.settle();
            assert_eq!(reclaim(&DataDir::open(directory.path()).unwrap()).unwrap(), None);
        }
        let directory = crate::data_dir::private_tempdir();
        let directory = DataDir::open(directory.path()).unwrap();
        assert_eq!(reclaim(&directory).unwrap(), None, "no ledger");
        directory.replace(FILE, b"not a ledger").unwrap();
        assert_eq!(reclaim(&directory).unwrap(), None);
    }
}
