//! Record of executed commands, so that each is executed once, however often it is delivered.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, ready};

use mcp_satellite_store::journal::{CommandRecord, Journal};

// Longest wait for the persistent record.
const PATIENCE: Duration = Duration::from_secs(5);

// Older commands are forgotten: the backend has not delivered them for a long time.
const KNOWN_MAX: usize = 10_000;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandProgress {
    Unknown,
    /// The command was started, but the satellite ended before the result was recorded.
    Started,
    /// The command has finished with this result, as JSON.
    Done(String),
}

/// Persistent record of commands. An error means that the record is currently unavailable.
pub trait CommandLog: Send + Sync + 'static {
    fn progress(&self, id: &str) -> BoxFuture<'_, Result<CommandProgress, String>>;
    fn record_start(&self, id: &str) -> BoxFuture<'_, Result<(), String>>;
    fn record_result(&self, id: &str, result: String) -> BoxFuture<'_, Result<(), String>>;
}

#[derive(Debug, Default)]
pub struct InMemoryCommandLog(Mutex<CommandLogEntries>);

#[derive(Debug, Default)]
struct CommandLogEntries {
    progress: HashMap<String, CommandProgress>,
    // Oldest first.
    order: VecDeque<String>,
}

impl CommandLogEntries {
    fn insert(&mut self, id: &str, progress: CommandProgress) {
        if self.progress.insert(id.to_owned(), progress).is_none() {
            self.order.push_back(id.to_owned());
        }
        while self.order.len() > KNOWN_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.progress.remove(&oldest);
        }
    }
}

impl InMemoryCommandLog {
    fn remove(&self, id: &str) {
        let mut known = self.entries();
        if known.progress.remove(id).is_some() {
            known.order.retain(|known| known != id);
        }
    }

    fn entries(&self) -> MutexGuard<'_, CommandLogEntries> {
        // No call between changes can panic and leave the data inconsistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CommandLog for InMemoryCommandLog {
    fn progress(&self, id: &str) -> BoxFuture<'_, Result<CommandProgress, String>> {
        let progress = self.entries().progress.get(id).cloned().unwrap_or(CommandProgress::Unknown);
        ready(Ok(progress)).boxed()
    }

    fn record_start(&self, id: &str) -> BoxFuture<'_, Result<(), String>> {
        self.entries().insert(id, CommandProgress::Started);
        ready(Ok(())).boxed()
    }

    fn record_result(&self, id: &str, result: String) -> BoxFuture<'_, Result<(), String>> {
        self.entries().insert(id, CommandProgress::Done(result));
        ready(Ok(())).boxed()
    }
}

impl CommandLog for Journal {
    fn progress(&self, id: &str) -> BoxFuture<'_, Result<CommandProgress, String>> {
        let id = id.to_owned();
        async move {
            match self.command(&id).await.map_err(|error| error.to_string())? {
                None => Ok(CommandProgress::Unknown),
                Some(CommandRecord::Started) => Ok(CommandProgress::Started),
                Some(CommandRecord::Done(result)) => Ok(CommandProgress::Done(result)),
            }
        }
        .boxed()
    }

    fn record_start(&self, id: &str) -> BoxFuture<'_, Result<(), String>> {
        let id = id.to_owned();
        async move { self.record_command_start(&id).await.map_err(|error| error.to_string()) }.boxed()
    }

    fn record_result(&self, id: &str, result: String) -> BoxFuture<'_, Result<(), String>> {
        let id = id.to_owned();
        async move { self.record_command_result(&id, result).await.map_err(|error| error.to_string()) }.boxed()
    }
}

// Keeps in memory only what the persistent record cannot store at the moment.
pub(super) struct FallbackCommandLog {
    pub(super) persistent: std::sync::Arc<dyn CommandLog>,
    memory: InMemoryCommandLog,
}

impl FallbackCommandLog {
    pub(super) fn new(persistent: std::sync::Arc<dyn CommandLog>) -> Self {
        Self { persistent, memory: InMemoryCommandLog::default() }
    }

    pub(super) async fn progress(&self, id: &str) -> CommandProgress {
        let here = self.memory.progress(id).await.unwrap_or(CommandProgress::Unknown);
        if here != CommandProgress::Unknown {
            return here;
        }
        with_timeout(self.persistent.progress(id)).await.unwrap_or_else(|why| {
            tracing::warn!(command = id, why, "cannot read whether a command was executed before");
            CommandProgress::Unknown
        })
    }

    pub(super) async fn record_start(&self, id: &str) {
        let _ = self.memory.record_start(id).await;
        if let Err(why) = with_timeout(self.persistent.record_start(id)).await {
            tracing::warn!(command = id, why, "cannot store that a command was started");
        }
    }

    pub(super) async fn record_result(&self, id: &str, result: String) {
        match with_timeout(self.persistent.record_result(id, result.clone())).await {
            // Frees the memory: results may be long and numerous.
            Ok(()) => self.memory.remove(id),
            Err(why) => {
                tracing::warn!(command = id, why, "cannot store the result of a command");
                let _ = self.memory.record_result(id, result).await;
            }
        }
    }
}

// A disk that hangs delays a command at most by this timeout.
async fn with_timeout<T>(remembering: BoxFuture<'_, Result<T, String>>) -> Result<T, String> {
    let late = |_| Err(format!("the disk did not answer within {PATIENCE:?}"));
    tokio::time::timeout(PATIENCE, remembering).await.unwrap_or_else(late)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;

    fn expect_ready<T>(future: BoxFuture<'_, Result<T, String>>) -> T {
        future.now_or_never().unwrap().unwrap()
    }

    #[derive(Default)]
    struct Disk {
        memory: InMemoryCommandLog,
        is_full: std::sync::atomic::AtomicBool,
    }

    impl CommandLog for Disk {
        fn progress(&self, id: &str) -> BoxFuture<'_, Result<CommandProgress, String>> {
            self.memory.progress(id)
        }

        fn record_start(&self, id: &str) -> BoxFuture<'_, Result<(), String>> {
            self.memory.record_start(id)
        }

        fn record_result(&self, id: &str, result: String) -> BoxFuture<'_, Result<(), String>> {
            if self.is_full.load(std::sync::atomic::Ordering::Relaxed) {
                return ready(Err("disk full".to_owned())).boxed();
            }
            self.memory.record_result(id, result)
        }
    }

    #[tokio::test]
    async fn results_are_kept_in_memory_only_if_the_disk_rejects_them() {
        let disk = std::sync::Arc::new(Disk::default());
        let both = FallbackCommandLog::new(disk.clone());
        for (id, is_full, in_memory) in [("a", false, 0), ("b", true, 1)] {
            disk.is_full.store(is_full, std::sync::atomic::Ordering::Relaxed);
            both.record_start(id).await;
            assert_eq!(both.progress(id).await, CommandProgress::Started);
            both.record_result(id, "{}".to_owned()).await;
            assert_eq!(both.progress(id).await, CommandProgress::Done("{}".to_owned()));
            let known = both.memory.entries();
            assert_eq!((known.progress.len(), known.order.len()), (in_memory, in_memory), "{id}");
        }
    }

    #[test]
    fn the_memory_log_tracks_progress_and_drops_the_oldest_commands() {
        let memory = InMemoryCommandLog::default();
        assert_eq!(expect_ready(memory.progress("a")), CommandProgress::Unknown);
        expect_ready(memory.record_start("a"));
        assert_eq!(expect_ready(memory.progress("a")), CommandProgress::Started);
        expect_ready(memory.record_result("a", "{}".to_owned()));
        assert_eq!(expect_ready(memory.progress("a")), CommandProgress::Done("{}".to_owned()));
        for number in 0..KNOWN_MAX {
            expect_ready(memory.record_start(&number.to_string()));
        }
        assert_eq!(expect_ready(memory.progress("a")), CommandProgress::Unknown);
        assert_eq!(expect_ready(memory.progress("0")), CommandProgress::Started);
        assert_eq!(memory.entries().progress.len(), KNOWN_MAX);
    }
}
