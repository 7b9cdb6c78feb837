//! Where commands are carried out: each once, those for one instance one after the other, those for others beside it. What
//! comes of them is told until the backend has taken it.

use std::collections::{HashMap, HashSet};
use std::panic::AssertUnwindSafe;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use jiff::Timestamp;
use serde_json::Map;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::contact::Matter;
use super::done::Progress;
use super::effect::{Task, bring_about};
use super::key::is_id;
use super::poll::Received;
use super::rules::{Backoff, Lanes, is_expired};
use super::{Fleet, Shared};
use crate::backend::wire::{Command, CommandResult, Outcome};

/// So many commands are carried out beside each other.
const BESIDE_MAX: usize = 32;
/// Before a result is sent again for the first time.
const FIRST_DELAY: Duration = Duration::from_secs(1);

/// A command that waits or runs.
struct Order {
    task: Task,
    expires_at: Option<Timestamp>,
    server_time: Timestamp,
    at: Instant,
    /// Whether it was begun by a satellite that was ended meanwhile.
    again: bool,
}

/// Takes what comes. Ends when nothing comes any more.
pub(super) async fn run(link: &Shared, fleet: &dyn Fleet, mut inbox: mpsc::Receiver<Received>) {
    let mut desk = Desk {
        link,
        lanes: Lanes::new(BESIDE_MAX),
        orders: HashMap::new(),
        telling: HashSet::new(),
        tellings: FuturesUnordered::new(),
    };
    let mut running: FuturesUnordered<BoxFuture<'_, (String, CommandResult)>> = FuturesUnordered::new();
    loop {
        while let Some(id) = desk.lanes.begin() {
            let Some(order) = desk.orders.remove(&id) else { continue };
            running.push(carry_out(link, fleet, id, order).boxed());
        }
        link.in_hand.store(desk.lanes.len(), Ordering::Relaxed);
        tokio::select! {
            received = inbox.recv() => {
                let Some(received) = received else { return };
                desk.take(received).await;
            }
            Some((id, result)) = running.next() => {
                desk.lanes.end(&id);
                desk.tell(id, result);
            }
            Some(id) = desk.tellings.next() => {
                desk.telling.remove(&id);
            }
        }
    }
}

struct Desk<'a> {
    link: &'a Shared,
    lanes: Lanes,
    orders: HashMap<String, Order>,
    /// Whose results are on their way.
    telling: HashSet<String>,
    tellings: FuturesUnordered<BoxFuture<'a, String>>,
}

impl Desk<'_> {
    async fn take(&mut self, received: Received) {
        let Received { commands, server_time, at } = received;
        for command in commands {
            self.take_one(command, server_time, at).await;
        }
    }

    async fn take_one(&mut self, command: Command, server_time: Timestamp, at: Instant) {
        if !is_id(&command.id) {
            tracing::warn!("the backend sends a command whose id cannot be in a URL; it is passed over");
            return;
        }
        // It comes again until its result has arrived.
        if self.lanes.holds(&command.id) || self.telling.contains(&command.id) {
            return;
        }
        let again = match self.link.done.progress(&command.id).await {
            Progress::Done(result) => {
                let lost = || failed("it was carried out before; what came of it is not known any more".to_owned());
                self.tell(command.id, serde_json::from_str(&result).unwrap_or_else(|_| lost()));
                return;
            }
            Progress::Begun => true,
            Progress::Unknown => false,
        };
        if !again && is_expired(command.expires_at, server_time, at.elapsed()) {
            return self.settle(command.id, expired()).await;
        }
        match Task::of(&command) {
            Ok(task) => {
                self.lanes.push(&command.id, task.scope(), command.priority);
                let Command { id, expires_at, .. } = command;
                self.orders.insert(id, Order { task, expires_at, server_time, at, again });
            }
            Err(why) => self.settle(command.id, failed(why)).await,
        }
    }

    /// It is done with, and nothing was done.
    async fn settle(&mut self, id: String, result: CommandResult) {
        note(self.link, &id, &result).await;
        self.tell(id, result);
    }

    fn tell(&mut self, id: String, result: CommandResult) {
        let link = self.link;
        self.telling.insert(id.clone());
        self.tellings.push(tell(link, id, result).boxed());
    }
}

async fn carry_out(link: &Shared, fleet: &dyn Fleet, id: String, order: Order) -> (String, CommandResult) {
    // It has waited for its turn.
    if !order.again && is_expired(order.expires_at, order.server_time, order.at.elapsed()) {
        let result = expired();
        note(link, &id, &result).await;
        return (id, result);
    }
    link.done.begun(&id).await;
    let started = Instant::now();
    tracing::info!(command = id, what = order.task.name(), "a command of the backend");
    let deadline = started + link.plan.command_timeout;
    let effect = AssertUnwindSafe(bring_about(link, fleet, &order.task, order.again, deadline)).catch_unwind().await;
    let mut result = effect.unwrap_or_else(|_| failed("it failed by a fault of the satellite's own".to_owned()));
    result.duration_ms = super::milliseconds(started.elapsed());
    if let Some(error) = &result.error {
        tracing::warn!(command = id, what = order.task.name(), error, "a command of the backend has failed");
    }
    note(link, &id, &result).await;
    (id, result)
}

async fn note(link: &Shared, id: &str, result: &CommandResult) {
    // Nothing in it cannot be written.
    link.done.done(id, serde_json::to_string(result).unwrap_or_default()).await;
}

/// Tells a result until it is taken, or refused for good.
async fn tell(link: &Shared, id: String, result: CommandResult) -> String {
    let mut backoff = Backoff::new(FIRST_DELAY, link.plan.backoff_max, link.dice(&id));
    loop {
        let key = link.key().await;
        let answer = link.backend.result(&key, &id, &result).await;
        link.heard(Matter::Results, &key, &answer);
        let Err(error) = answer else { return id };
        if error.status().is_some_and(|status| matches!(status.as_u16(), 400 | 404 | 405 | 409 | 410 | 413 | 422)) {
            // If the backend wants it all the same, the command comes again.
            link.contact.went_well(Matter::Results);
            tracing::error!(command = id, %error, "the backend does not want the result of its command");
            return id;
        }
        tokio::select! {
            () = link.pause_until(Instant::now() + backoff.failed(error.retry_after())) => {}
            () = link.another_key(&key) => {}
        }
    }
}

fn failed(error: String) -> CommandResult {
    CommandResult { status: Outcome::Failed, result: Map::new(), error: Some(error), duration_ms: 0 }
}

fn expired() -> CommandResult {
    let error = "it came after its time, and nothing was done".to_owned();
    CommandResult { status: Outcome::Expired, error: Some(error), ..failed(String::new()) }
}
