//! Tables of series with a limit. Names that clients and servers choose cannot make them grow without bound: beyond the
//! limit a name is counted as `_other`.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, SystemTime};

use mcp_satellite_actors::seam::ToolCallFate;
use mcp_satellite_protocol::trace::TraceParent;

use crate::histogram::DurationHistogram;
use crate::names;

/// Name of everything beyond a limit.
pub(crate) const OTHER: &str = "_other";

/// Maximum number of operations of one side with a name of their own.
pub(crate) const OPERATIONS_MAX: usize = 96;
/// Maximum number of different errors of one operation. Beyond it, errors are counted as `_OTHER`.
const ERRORS_MAX: usize = 8;
/// Maximum number of error series of one side.
const ERROR_SERIES_MAX: u64 = 32;

/// Labels of an operation or a session without its error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OperationLabels<'a> {
    /// Empty for a session.
    pub(crate) method: &'a str,
    /// Tool or prompt.
    pub(crate) target: &'a str,
    pub(crate) version: &'a str,
    /// `pipe` or `tcp`.
    pub(crate) transport: &'static str,
    /// Host of a remote server.
    pub(crate) host: &'a str,
    pub(crate) port: Option<u16>,
}

/// One operation: a method with its target on one connection.
#[derive(Debug)]
pub(crate) struct Operation {
    pub(crate) method: Box<str>,
    pub(crate) target: Box<str>,
    pub(crate) version: Box<str>,
    pub(crate) transport: &'static str,
    pub(crate) host: Box<str>,
    pub(crate) port: Option<u16>,
    pub(crate) succeeded: DurationHistogram,
    failed: RwLock<HashMap<Box<str>, Arc<DurationHistogram>>>,
    error_series: Arc<AtomicU64>,
}

/// Operations, or sessions, of one side.
#[derive(Debug)]
pub(crate) struct OperationTable {
    max: usize,
    // Keyed by a hash of target and host; operations of the same hash are in one list.
    operations: RwLock<HashMap<u64, Vec<Arc<Operation>>>>,
    count: AtomicU64,
    error_series: Arc<AtomicU64>,
    hasher: std::hash::RandomState,
}

impl Operation {
    fn has(&self, labels: &OperationLabels<'_>) -> bool {
        *self.method == *labels.method
            && *self.target == *labels.target
            && *self.version == *labels.version
            && self.transport == labels.transport
            && *self.host == *labels.host
            && self.port == labels.port
    }

    /// Records the end of a request. `error` is the value of `error.type`.
    pub(crate) fn record(&self, error: Option<&str>, took: Duration, span: Option<(TraceParent, SystemTime)>) {
        match error {
            None => self.succeeded.record(took, span),
            Some(error) => self.failure(error).record(took, span),
        }
    }

    fn failure(&self, error: &str) -> Arc<DurationHistogram> {
        if let Some(known) = read(&self.failed).get(error) {
            return known.clone();
        }
        let mut failed = write(&self.failed);
        let is_new = !failed.contains_key(error);
        let is_full = failed.len() >= ERRORS_MAX || self.error_series.load(Ordering::Relaxed) >= ERROR_SERIES_MAX;
        let error = if is_new && is_full { names::OTHER_ERROR } else { error };
        if !failed.contains_key(error) {
            self.error_series.fetch_add(1, Ordering::Relaxed);
        }
        failed.entry(error.into()).or_default().clone()
    }

    /// Returns the histograms of the operation with their errors; those without a duration are left out.
    pub(crate) fn series(&self) -> Vec<(Option<Box<str>>, crate::histogram::HistogramReading)> {
        let succeeded = (None, self.succeeded.read());
        let failed = read(&self.failed);
        let failed = failed.iter().map(|(error, histogram)| (Some(error.clone()), histogram.read()));
        std::iter::once(succeeded).chain(failed).filter(|(_, reading)| reading.count() > 0).collect()
    }
}

impl OperationTable {
    /// Creates a table of at most `max` operations with a tool, prompt or host.
    pub(crate) fn new(max: usize) -> Self {
        Self {
            max,
            operations: RwLock::default(),
            count: AtomicU64::new(0),
            error_series: Arc::default(),
            hasher: std::hash::RandomState::new(),
        }
    }

    /// Returns the operation with these labels, or one that stands for all beyond the limit.
    pub(crate) fn get(&self, labels: OperationLabels<'_>) -> Arc<Operation> {
        if let Some(known) = self.find(&labels) {
            return known;
        }
        // Operations without a target of their own are bounded by the protocol and the configuration.
        let is_full = self.count.load(Ordering::Relaxed) >= self.max as u64;
        let is_named = !labels.target.is_empty() || !labels.host.is_empty();
        let labels = if is_full && is_named {
            let target = if labels.target.is_empty() { "" } else { OTHER };
            let other = OperationLabels { target, host: "", port: None, ..labels };
            if let Some(known) = self.find(&other) {
                return known;
            }
            other
        } else {
            labels
        };
        let mut operations = write(&self.operations);
        let same_hash = operations.entry(self.hash(&labels)).or_default();
        if let Some(known) = same_hash.iter().find(|known| known.has(&labels)) {
            return known.clone();
        }
        let operation = Arc::new(Operation {
            method: labels.method.into(),
            target: labels.target.into(),
            version: labels.version.into(),
            transport: labels.transport,
            host: labels.host.into(),
            port: labels.port,
            succeeded: DurationHistogram::default(),
            failed: RwLock::default(),
            error_series: self.error_series.clone(),
        });
        same_hash.push(operation.clone());
        self.count.fetch_add(1, Ordering::Relaxed);
        operation
    }

    fn find(&self, labels: &OperationLabels<'_>) -> Option<Arc<Operation>> {
        let operations = read(&self.operations);
        operations.get(&self.hash(labels))?.iter().find(|known| known.has(labels)).cloned()
    }

    fn hash(&self, labels: &OperationLabels<'_>) -> u64 {
        // The other labels have few values, and hashing them takes longer than comparing a few operations.
        std::hash::BuildHasher::hash_one(&self.hasher, (labels.target, labels.host))
    }

    /// Returns all operations.
    pub(crate) fn all(&self) -> Vec<Arc<Operation>> {
        read(&self.operations).values().flatten().cloned().collect()
    }
}

/// Counters with a limited number of keys.
#[derive(Debug)]
pub(crate) struct CountTable<K> {
    counts: RwLock<HashMap<K, Arc<AtomicU64>>>,
    max: usize,
}

impl<K: Hash + Eq + Clone> CountTable<K> {
    pub(crate) fn new(max: usize) -> Self {
        Self { counts: RwLock::default(), max }
    }

    /// Adds one to the counter of a key, or to that of `other` if there is no capacity for another key.
    pub(crate) fn add(&self, key: K, other: impl FnOnce() -> K) {
        if let Some(count) = read(&self.counts).get(&key) {
            count.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let mut counts = write(&self.counts);
        let key = if counts.len() >= self.max && !counts.contains_key(&key) { other() } else { key };
        counts.entry(key).or_default().fetch_add(1, Ordering::Relaxed);
    }

    /// Returns all counters.
    pub(crate) fn all(&self) -> Vec<(K, u64)> {
        read(&self.counts).iter().map(|(key, count)| (key.clone(), count.load(Ordering::Relaxed))).collect()
    }
}

/// Maximum number of tools of one server that are counted by name.
const TOOLS_PER_SERVER_MAX: usize = 50;
/// Maximum number of tools of all servers that are counted by name.
const TOOLS_MAX: usize = 1_000;

/// Tool calls by server, tool and fate.
#[derive(Debug, Default)]
pub(crate) struct CallTable {
    servers: RwLock<HashMap<Box<str>, ToolCounts>>,
    tools: AtomicU64,
}

/// Counts by tool.
type ToolCounts = HashMap<Box<str>, FateCounts>;
/// Counts by fate.
type FateCounts = [AtomicU64; ToolCallFate::ALL.len()];

/// Number of calls of one tool with one fate.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CallCount {
    pub(crate) server: Box<str>,
    pub(crate) tool: Box<str>,
    pub(crate) fate: &'static str,
    pub(crate) count: u64,
}

impl CallTable {
    pub(crate) fn add(&self, server: &str, tool: &str, fate: ToolCallFate) {
        {
            let servers = read(&self.servers);
            let tools = servers.get(server);
            let is_full = tools.is_some_and(|tools| tools.len() > TOOLS_PER_SERVER_MAX) || self.is_full();
            let known = tools.and_then(|tools| tools.get(tool).or_else(|| tools.get(OTHER).filter(|_| is_full)));
            if let Some(counts) = known {
                counts[fate as usize].fetch_add(1, Ordering::Relaxed);
                return;
            }
        }
        let mut servers = write(&self.servers);
        let tools = servers.entry(server.into()).or_default();
        let is_full = tools.len() >= TOOLS_PER_SERVER_MAX || self.is_full();
        let name = if is_full && !tools.contains_key(tool) { OTHER } else { tool };
        if !tools.contains_key(name) {
            self.tools.fetch_add(1, Ordering::Relaxed);
        }
        tools.entry(name.into()).or_default()[fate as usize].fetch_add(1, Ordering::Relaxed);
    }

    fn is_full(&self) -> bool {
        self.tools.load(Ordering::Relaxed) >= TOOLS_MAX as u64
    }

    /// Returns all counts that are not zero, in order.
    pub(crate) fn all(&self) -> Vec<CallCount> {
        let mut all = Vec::new();
        for (server, tools) in read(&self.servers).iter() {
            for (tool, counts) in tools {
                for fate in ToolCallFate::ALL {
                    let count = counts[fate as usize].load(Ordering::Relaxed);
                    if count > 0 {
                        let (server, tool, fate) = (server.clone(), tool.clone(), fate.as_str());
                        all.push(CallCount { server, tool, fate, count });
                    }
                }
            }
        }
        all.sort_unstable();
        all
    }

    /// Removes the servers that are not `wanted`.
    pub(crate) fn retain(&self, wanted: impl Fn(&str) -> bool) {
        if read(&self.servers).keys().all(|server| wanted(server)) {
            return;
        }
        let mut servers = write(&self.servers);
        servers.retain(|server, _| wanted(server));
        self.tools.store(servers.values().map(|tools| tools.len() as u64).sum(), Ordering::Relaxed);
    }
}

// No holder of a lock calls code that could panic halfway through a change.
fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_beyond_the_limit_are_counted_together() {
        let calls = CallTable::default();
        for nth in 0..100_000 {
            calls.add("one", &format!("tool-{nth}"), ToolCallFate::Ok);
        }
        for nth in 0..100_000 {
            calls.add(&format!("server-{}", nth % 200), &format!("tool-{nth}"), ToolCallFate::ServerError);
        }
        let all = calls.all();
        // Each server has one more series for the tools beyond the limit.
        assert!(all.len() <= TOOLS_MAX + 201, "{}", all.len());
        assert_eq!(all.iter().map(|count| count.count).sum::<u64>(), 200_000);
        let of_one: Vec<_> = all.iter().filter(|count| &*count.server == "one").collect();
        assert_eq!(of_one.len(), TOOLS_PER_SERVER_MAX + 1);
        assert!(of_one.iter().any(|count| &*count.tool == OTHER && count.count == 99_950));
        calls.retain(|server| server == "one");
        assert_eq!(calls.all().len(), TOOLS_PER_SERVER_MAX + 1);
    }

    #[test]
    fn operations_beyond_the_limit_are_counted_together() {
        let table = OperationTable::new(OPERATIONS_MAX);
        let names: Vec<String> = (0..100_000).map(|nth| format!("tool-{nth}")).collect();
        for (nth, name) in names.iter().enumerate() {
            let labels = OperationLabels {
                method: "tools/call",
                target: name,
                version: "",
                transport: "tcp",
                host: name,
                port: Some(443),
            };
            let error = format!("-{nth}");
            table.get(labels).record(Some(&error), Duration::from_millis(1), None);
        }
        let operations = table.all();
        assert_eq!(operations.len(), OPERATIONS_MAX + 1);
        let series: Vec<_> = operations.iter().flat_map(|operation| operation.series()).collect();
        let errors: std::collections::HashSet<_> = series.iter().filter_map(|(error, _)| error.clone()).collect();
        assert!(errors.len() as u64 <= ERROR_SERIES_MAX + 1, "{}", errors.len());
        assert_eq!(series.iter().map(|(_, reading)| reading.count()).sum::<u64>(), 100_000);
    }

    #[test]
    fn errors_of_an_operation_beyond_the_limit_are_counted_together() {
        let table = OperationTable::new(OPERATIONS_MAX);
        let labels =
            OperationLabels { method: "ping", target: "", version: "", transport: "pipe", host: "", port: None };
        for nth in 0..100 {
            table.get(labels).record(Some(&format!("-{nth}")), Duration::ZERO, None);
        }
        let series = table.get(labels).series();
        assert_eq!(series.len(), ERRORS_MAX + 1);
        let others = series.iter().find(|(error, _)| error.as_deref() == Some(names::OTHER_ERROR));
        assert_eq!(others.map(|(_, reading)| reading.count()), Some(100 - ERRORS_MAX as u64));
    }

    #[test]
    fn keys_beyond_the_limit_are_counted_together() {
        let table = CountTable::new(3);
        for nth in 0..10 {
            table.add(nth, || 99);
            table.add(0, || 99);
        }
        let mut all = table.all();
        all.sort_unstable();
        assert_eq!(all, [(0, 11), (1, 1), (2, 1), (99, 7)]);
    }
}
