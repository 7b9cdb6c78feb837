//! Execution of commands: each one once, in sequence for the same instance and concurrently otherwise. Results are sent
//! until the backend accepts them.

use std::collections::{HashMap, HashSet};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use jiff::Timestamp;
use serde_json::Map;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::Instant;

use super::command_log::CommandProgress;
use super::contact::RequestPurpose;
use super::effect::{CommandAction, execute_action};
use super::poll::{LIMIT_MAX, ReceivedCommands, ServerTimeReading};
use super::poll_response::InvalidCommand;
use super::rules::{CommandLanes, RetryPacer};
use super::{LinkHost, LinkShared};
use crate::wire::{BackendCommand, CommandOutcome, CommandResult};

// Commands that run concurrently.
const CONCURRENT_COMMANDS_MAX: usize = 32;
// Commands that wait, run or have unsent results. The backend delivers any others again.
const UNFINISHED_COMMANDS_MAX: usize = LIMIT_MAX;
// Results that are sent concurrently.
const CONCURRENT_REPORTS_MAX: usize = 8;
// Before the first retry of a result.
const FIRST_DELAY: Duration = Duration::from_secs(1);

// Ids are unique per satellite only, and this satellite may have been registered under another id before.
#[derive(Debug, Clone)]
struct CommandKey {
    satellite_id: String,
    id: String,
    // Unique for all backends and satellites.
    global_id: String,
}

impl CommandKey {
    fn new(link: &LinkShared, satellite_id: &str, id: &str) -> Self {
        let global_id = format!("{}/{satellite_id}/{id}", link.plan.url.trim_end_matches('/'));
        Self { satellite_id: satellite_id.to_owned(), id: id.to_owned(), global_id }
    }
}

struct QueuedCommand {
    name: CommandKey,
    task: CommandAction,
    expires_at: Option<Timestamp>,
    clock_reading: ServerTimeReading,
    // True if an earlier run of the satellite started the command.
    started_before: bool,
}

pub(super) async fn run(link: &LinkShared, fleet: &dyn LinkHost, mut inbox: mpsc::Receiver<ReceivedCommands>) {
    let mut executor = CommandExecutor {
        link,
        lanes: CommandLanes::new(CONCURRENT_COMMANDS_MAX),
        queued: HashMap::new(),
        sending: HashSet::new(),
        send_tasks: FuturesUnordered::new(),
        send_permits: Arc::new(Semaphore::new(CONCURRENT_REPORTS_MAX)),
    };
    let mut running: FuturesUnordered<BoxFuture<'_, (CommandKey, CommandResult)>> = FuturesUnordered::new();
    loop {
        while let Some(global_id) = executor.lanes.start_next() {
            let Some(order) = executor.queued.remove(&global_id) else { continue };
            running.push(execute_command(link, fleet, order).boxed());
        }
        link.active_commands.store(executor.lanes.len(), Ordering::Relaxed);
        link.unfinished_commands.store(executor.unfinished_commands(), Ordering::Relaxed);
        tokio::select! {
            received = inbox.recv() => {
                let Some(received) = received else { return };
                executor.enqueue_batch(received).await;
            }
            Some((name, result)) = running.next() => {
                executor.lanes.finish(&name.global_id);
                executor.start_sending_result(name, result);
            }
            Some(global_id) = executor.send_tasks.next() => {
                executor.sending.remove(&global_id);
            }
        }
    }
}

struct CommandExecutor<'a> {
    link: &'a LinkShared,
    lanes: CommandLanes,
    queued: HashMap<String, QueuedCommand>,
    // Commands whose results are being sent.
    sending: HashSet<String>,
    send_tasks: FuturesUnordered<BoxFuture<'a, String>>,
    // Limits the concurrent requests.
    send_permits: Arc<Semaphore>,
}

impl CommandExecutor<'_> {
    async fn enqueue_batch(&mut self, received: ReceivedCommands) {
        let ReceivedCommands { satellite_id, commands, invalid: unreadable, clock_reading: server_time } = received;
        for InvalidCommand { id, why } in unreadable {
            if let Some((name, _)) = self.claim(&satellite_id, &id).await {
                self.finish_unexecuted(name, failed_result(why.to_owned())).await;
            }
        }
        for command in commands {
            if let Some((name, again)) = self.claim(&satellite_id, &command.id).await {
                self.enqueue(name, again, command, server_time).await;
            }
        }
    }

    // The boolean is true if the command was started before.
    async fn claim(&mut self, satellite_id: &str, id: &str) -> Option<(CommandKey, bool)> {
        let name = CommandKey::new(self.link, satellite_id, id);
        // A command is delivered again until its result has arrived.
        if self.lanes.contains(&name.global_id)
            || self.sending.contains(&name.global_id)
            || self.unfinished_commands() >= UNFINISHED_COMMANDS_MAX
        {
            return None;
        }
        match self.link.command_log.progress(&name.global_id).await {
            CommandProgress::Done(result) => {
                let lost =
                    || failed_result("the command was executed before; its result is no longer known".to_owned());
                self.start_sending_result(name, serde_json::from_str(&result).unwrap_or_else(|_| lost()));
                None
            }
            CommandProgress::Started => Some((name, true)),
            CommandProgress::Unknown => Some((name, false)),
        }
    }

    async fn enqueue(
        &mut self,
        name: CommandKey,
        again: bool,
        command: BackendCommand,
        server_time: ServerTimeReading,
    ) {
        if !again && server_time.is_expired(self.link, command.expires_at) {
            return self.finish_unexecuted(name, expired_result()).await;
        }
        match CommandAction::from_command(&command) {
            Ok(task) => {
                self.lanes.push(&name.global_id, task.scope(), command.priority);
                let expires_at = command.expires_at;
                self.queued.insert(
                    name.global_id.clone(),
                    QueuedCommand { name, task, expires_at, clock_reading: server_time, started_before: again },
                );
            }
            Err(why) => self.finish_unexecuted(name, failed_result(why)).await,
        }
    }

    fn unfinished_commands(&self) -> usize {
        self.lanes.len() + self.sending.len()
    }

    // For commands that are not executed.
    async fn finish_unexecuted(&mut self, name: CommandKey, result: CommandResult) {
        record_result(self.link, &name, &result).await;
        self.start_sending_result(name, result);
    }

    fn start_sending_result(&mut self, name: CommandKey, result: CommandResult) {
        self.sending.insert(name.global_id.clone());
        self.send_tasks.push(send_result(self.link, self.send_permits.clone(), name, result).boxed());
    }
}

async fn execute_command(link: &LinkShared, fleet: &dyn LinkHost, order: QueuedCommand) -> (CommandKey, CommandResult) {
    let name = order.name;
    // The command may have expired while it waited.
    if !order.started_before && order.clock_reading.is_expired(link, order.expires_at) {
        let result = expired_result();
        record_result(link, &name, &result).await;
        return (name, result);
    }
    link.command_log.record_start(&name.global_id).await;
    let started = Instant::now();
    tracing::info!(command = name.id, what = order.task.name(), "executing a command of the backend");
    let deadline = started + link.plan.command_timeout;
    let effect =
        AssertUnwindSafe(execute_action(link, fleet, &order.task, order.started_before, deadline)).catch_unwind().await;
    let mut result = effect.unwrap_or_else(|_| {
        failed_result("the command failed because of an internal error of the satellite".to_owned())
    });
    result.duration_ms = super::milliseconds(started.elapsed());
    if let Some(error) = &result.error {
        tracing::warn!(command = name.id, what = order.task.name(), error, "a command of the backend has failed");
    }
    record_result(link, &name, &result).await;
    (name, result)
}

async fn record_result(link: &LinkShared, name: &CommandKey, result: &CommandResult) {
    // Serialization of this type does not fail.
    link.command_log.record_result(&name.global_id, serde_json::to_string(result).unwrap_or_default()).await;
}

async fn send_result(link: &LinkShared, permits: Arc<Semaphore>, name: CommandKey, result: CommandResult) -> String {
    let CommandKey { satellite_id, id, global_id } = name;
    let mut pacer = RetryPacer::new(FIRST_DELAY, link.plan.backoff_max, link.jitter_rng(&id));
    loop {
        let key = link.wait_for_key().await;
        if key.satellite_id != satellite_id {
            tracing::warn!(
                command = id,
                satellite_id,
                "result of a command discarded: the satellite has registered under another id"
            );
            return global_id;
        }
        let answer = {
            // Released while waiting for a retry. The semaphore is never closed.
            let _permit = permits.acquire().await;
            link.backend.send_result(&key, &id, &result).await
        };
        link.record_response(RequestPurpose::Results, &key, &answer);
        let Err(error) = answer else { return global_id };
        if error.status().is_some_and(|status| matches!(status.as_u16(), 400 | 404 | 405 | 409 | 410 | 413 | 422)) {
            // A backend that still needs the result delivers the command again.
            link.reachability.record_success(RequestPurpose::Results);
            tracing::error!(command = id, %error, "the backend rejected the result of a command");
            return global_id;
        }
        tokio::select! {
            () = link.pause_until(Instant::now() + pacer.delay_after_failure(error.retry_after())) => {}
            () = link.wait_for_new_key(&key) => {}
        }
    }
}

fn failed_result(error: String) -> CommandResult {
    CommandResult { status: CommandOutcome::Failed, result: Map::new(), error: Some(error), duration_ms: 0 }
}

fn expired_result() -> CommandResult {
    let error = "the command had expired and was not executed".to_owned();
    CommandResult { status: CommandOutcome::Expired, error: Some(error), ..failed_result(String::new()) }
}
