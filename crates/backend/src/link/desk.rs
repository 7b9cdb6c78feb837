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

use super::contact::RequestPurpose;
use super::done::CommandProgress;
use super::effect::{CommandAction, bring_about};
use super::orders::InvalidCommand;
use super::poll::{LIMIT_MAX, ReceivedCommands, ServerTimeReading};
use super::rules::{Backoff, CommandLanes};
use super::{LinkHost, LinkShared};
use crate::wire::{BackendCommand, CommandOutcome, CommandResult};

// Commands that run concurrently.
const BESIDE_MAX: usize = 32;
// Commands that wait, run or have unsent results. The backend delivers any others again.
const HELD_MAX: usize = LIMIT_MAX;
// Results that are sent concurrently.
const TELLING_MAX: usize = 8;
// Before the first retry of a result.
const FIRST_DELAY: Duration = Duration::from_secs(1);

// Ids are unique per satellite only, and this satellite may have been registered under another id before.
#[derive(Debug, Clone)]
struct CommandKey {
    satellite_id: String,
    id: String,
    // Unique for all backends and satellites.
    whole: String,
}

impl CommandKey {
    fn new(link: &LinkShared, satellite_id: &str, id: &str) -> Self {
        let whole = format!("{}/{satellite_id}/{id}", link.plan.url.trim_end_matches('/'));
        Self { satellite_id: satellite_id.to_owned(), id: id.to_owned(), whole }
    }
}

struct QueuedCommand {
    name: CommandKey,
    task: CommandAction,
    expires_at: Option<Timestamp>,
    shown: ServerTimeReading,
    // True if an earlier run of the satellite started the command.
    again: bool,
}

pub(super) async fn run(link: &LinkShared, fleet: &dyn LinkHost, mut inbox: mpsc::Receiver<ReceivedCommands>) {
    let mut desk = CommandExecutor {
        link,
        lanes: CommandLanes::new(BESIDE_MAX),
        orders: HashMap::new(),
        telling: HashSet::new(),
        tellings: FuturesUnordered::new(),
        way: Arc::new(Semaphore::new(TELLING_MAX)),
    };
    let mut running: FuturesUnordered<BoxFuture<'_, (CommandKey, CommandResult)>> = FuturesUnordered::new();
    loop {
        while let Some(whole) = desk.lanes.begin() {
            let Some(order) = desk.orders.remove(&whole) else { continue };
            running.push(carry_out(link, fleet, order).boxed());
        }
        link.in_hand.store(desk.lanes.len(), Ordering::Relaxed);
        link.held.store(desk.held(), Ordering::Relaxed);
        tokio::select! {
            received = inbox.recv() => {
                let Some(received) = received else { return };
                desk.take(received).await;
            }
            Some((name, result)) = running.next() => {
                desk.lanes.end(&name.whole);
                desk.tell(name, result);
            }
            Some(whole) = desk.tellings.next() => {
                desk.telling.remove(&whole);
            }
        }
    }
}

struct CommandExecutor<'a> {
    link: &'a LinkShared,
    lanes: CommandLanes,
    orders: HashMap<String, QueuedCommand>,
    // Commands whose results are being sent.
    telling: HashSet<String>,
    tellings: FuturesUnordered<BoxFuture<'a, String>>,
    // Limits the concurrent requests.
    way: Arc<Semaphore>,
}

impl CommandExecutor<'_> {
    async fn take(&mut self, received: ReceivedCommands) {
        let ReceivedCommands { satellite_id, commands, unreadable, shown } = received;
        for InvalidCommand { id, why } in unreadable {
            if let Some((name, _)) = self.new_one(&satellite_id, &id).await {
                self.settle(name, failed(why.to_owned())).await;
            }
        }
        for command in commands {
            if let Some((name, again)) = self.new_one(&satellite_id, &command.id).await {
                self.take_one(name, again, command, shown).await;
            }
        }
    }

    // The boolean is true if the command was started before.
    async fn new_one(&mut self, satellite_id: &str, id: &str) -> Option<(CommandKey, bool)> {
        let name = CommandKey::new(self.link, satellite_id, id);
        // A command is delivered again until its result has arrived.
        if self.lanes.holds(&name.whole) || self.telling.contains(&name.whole) || self.held() >= HELD_MAX {
            return None;
        }
        match self.link.done.progress(&name.whole).await {
            CommandProgress::Done(result) => {
                let lost = || failed("the command was executed before; its result is no longer known".to_owned());
                self.tell(name, serde_json::from_str(&result).unwrap_or_else(|_| lost()));
                None
            }
            CommandProgress::Begun => Some((name, true)),
            CommandProgress::Unknown => Some((name, false)),
        }
    }

    async fn take_one(&mut self, name: CommandKey, again: bool, command: BackendCommand, shown: ServerTimeReading) {
        if !again && shown.is_late(self.link, command.expires_at) {
            return self.settle(name, expired()).await;
        }
        match CommandAction::of(&command) {
            Ok(task) => {
                self.lanes.push(&name.whole, task.scope(), command.priority);
                let expires_at = command.expires_at;
                self.orders.insert(name.whole.clone(), QueuedCommand { name, task, expires_at, shown, again });
            }
            Err(why) => self.settle(name, failed(why)).await,
        }
    }

    fn held(&self) -> usize {
        self.lanes.len() + self.telling.len()
    }

    // For commands that are not executed.
    async fn settle(&mut self, name: CommandKey, result: CommandResult) {
        note(self.link, &name, &result).await;
        self.tell(name, result);
    }

    fn tell(&mut self, name: CommandKey, result: CommandResult) {
        self.telling.insert(name.whole.clone());
        self.tellings.push(tell(self.link, self.way.clone(), name, result).boxed());
    }
}

async fn carry_out(link: &LinkShared, fleet: &dyn LinkHost, order: QueuedCommand) -> (CommandKey, CommandResult) {
    let name = order.name;
    // The command may have expired while it waited.
    if !order.again && order.shown.is_late(link, order.expires_at) {
        let result = expired();
        note(link, &name, &result).await;
        return (name, result);
    }
    link.done.begun(&name.whole).await;
    let started = Instant::now();
    tracing::info!(command = name.id, what = order.task.name(), "executing a command of the backend");
    let deadline = started + link.plan.command_timeout;
    let effect = AssertUnwindSafe(bring_about(link, fleet, &order.task, order.again, deadline)).catch_unwind().await;
    let mut result = effect
        .unwrap_or_else(|_| failed("the command failed because of an internal error of the satellite".to_owned()));
    result.duration_ms = super::milliseconds(started.elapsed());
    if let Some(error) = &result.error {
        tracing::warn!(command = name.id, what = order.task.name(), error, "a command of the backend has failed");
    }
    note(link, &name, &result).await;
    (name, result)
}

async fn note(link: &LinkShared, name: &CommandKey, result: &CommandResult) {
    // Serialization of this type does not fail.
    link.done.done(&name.whole, serde_json::to_string(result).unwrap_or_default()).await;
}

async fn tell(link: &LinkShared, way: Arc<Semaphore>, name: CommandKey, result: CommandResult) -> String {
    let CommandKey { satellite_id, id, whole } = name;
    let mut backoff = Backoff::new(FIRST_DELAY, link.plan.backoff_max, link.dice(&id));
    loop {
        let key = link.key().await;
        if key.satellite_id != satellite_id {
            tracing::warn!(
                command = id,
                satellite_id,
                "result of a command discarded: the satellite has registered under another id"
            );
            return whole;
        }
        let answer = {
            // Released while waiting for a retry. The semaphore is never closed.
            let _permit = way.acquire().await;
            link.backend.result(&key, &id, &result).await
        };
        link.heard(RequestPurpose::Results, &key, &answer);
        let Err(error) = answer else { return whole };
        if error.status().is_some_and(|status| matches!(status.as_u16(), 400 | 404 | 405 | 409 | 410 | 413 | 422)) {
            // A backend that still needs the result delivers the command again.
            link.contact.went_well(RequestPurpose::Results);
            tracing::error!(command = id, %error, "the backend rejected the result of a command");
            return whole;
        }
        tokio::select! {
            () = link.pause_until(Instant::now() + backoff.failed(error.retry_after())) => {}
            () = link.another_key(&key) => {}
        }
    }
}

fn failed(error: String) -> CommandResult {
    CommandResult { status: CommandOutcome::Failed, result: Map::new(), error: Some(error), duration_ms: 0 }
}

fn expired() -> CommandResult {
    let error = "the command had expired and was not executed".to_owned();
    CommandResult { status: CommandOutcome::Expired, error: Some(error), ..failed(String::new()) }
}
