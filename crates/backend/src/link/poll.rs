//! Poll loop for commands.

use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::LinkShared;
use super::contact::RequestPurpose;
use super::poll_response::{InvalidCommand, ParsedPollResponse};
use super::rules::{PollPacer, is_expired};
use crate::wire::BackendCommand;

// New commands per response.
const LIMIT: usize = 10;
// Including commands that are delivered again because they are not finished.
pub(super) const LIMIT_MAX: usize = 100;

// The longest time for which a backend is asked to hold a poll back until a command arrives.
const HOLD_MAX: Duration = Duration::from_secs(25);

#[derive(Debug)]
pub(super) struct ReceivedCommands {
    // Satellite to which the commands belong.
    pub(super) satellite_id: String,
    pub(super) commands: Vec<BackendCommand>,
    // Commands that can only be answered with a failure.
    pub(super) invalid: Vec<InvalidCommand>,
    pub(super) clock_reading: ServerTimeReading,
}

/// Time of the backend's clock, and the moment at which it was read.
#[derive(Debug, Clone, Copy)]
pub(super) struct ServerTimeReading {
    server_time: Timestamp,
    at: Instant,
    // `Instant` does not count the time that the machine was suspended.
    suspended: Duration,
}

impl ServerTimeReading {
    pub(super) fn is_expired(&self, link: &LinkShared, expires_at: Option<Timestamp>) -> bool {
        let suspended = (link.suspended)().saturating_sub(self.suspended);
        is_expired(expires_at, self.server_time, self.at.elapsed() + suspended)
    }
}

pub(super) async fn run(link: &LinkShared, inbox: mpsc::Sender<ReceivedCommands>) {
    let mut pace = PollPacer::new(link.plan.poll, link.plan.backoff_max, link.jitter_rng("commands"));
    let mut last_poll = None;
    let mut skipped = 0;
    // A backend that holds polls back delivers an urgent command at once instead of at the next poll.
    let mut hold = Duration::ZERO;
    // True if the backend holds polls back; unknown until it was asked to.
    let mut holds = None;
    loop {
        let key = link.wait_for_key().await;
        // Unfinished and unusable commands are delivered again; the higher limit leaves room for new ones.
        let limit = (LIMIT + link.unfinished_commands() + skipped).min(LIMIT_MAX);
        // Read before the request, because the machine may be suspended while the response waits.
        let before = (link.suspended)();
        let began = Instant::now();
        let mut wakes = link.suspend_count.subscribe();
        let answer = tokio::select! {
            answer = link.backend.poll_commands(&key, last_poll, limit, hold) => answer,
            // The connection of a held poll may not have survived the suspend of the machine. Commands come again.
            _ = wakes.changed(), if !hold.is_zero() => {
                hold = Duration::ZERO;
                continue;
            }
        };
        let is_long_poll = hold >= Duration::from_secs(1);
        let was_held = is_long_poll && began.elapsed() >= hold / 2;
        link.record_response(RequestPurpose::Commands, &key, &answer);
        let wait = match answer {
            Ok(body) => {
                let ParsedPollResponse { answer, invalid: unreadable, without_id: nameless } = body.parse(limit);
                if nameless > skipped {
                    let count = nameless;
                    tracing::warn!(count, "commands without an id that is valid in a URL ignored");
                }
                skipped = nameless;
                let wait = pace.delay_after_response(&answer, limit);
                let shown = match answer.server_time {
                    Some(server_time) => ServerTimeReading { server_time, at: Instant::now(), suspended: before },
                    None => ServerTimeReading {
                        server_time: Timestamp::now(),
                        at: Instant::now(),
                        suspended: (link.suspended)(),
                    },
                };
                last_poll = Some(shown.server_time);
                let (satellite_id, commands) = (key.satellite_id.clone(), answer.commands);
                let is_empty = commands.is_empty() && unreadable.is_empty();
                let received = ReceivedCommands { satellite_id, commands, invalid: unreadable, clock_reading: shown };
                if !is_empty && inbox.send(received).await.is_err() {
                    return;
                }
                if is_long_poll && is_empty {
                    holds = Some(was_held);
                }
                hold = wait.min(HOLD_MAX);
                let can_hold = hold >= Duration::from_secs(1);
                match holds {
                    // The next poll is held back, or shows whether polls are.
                    None | Some(true) if is_empty && can_hold => Duration::ZERO,
                    // Unfinished commands are delivered at once, so a held poll would not wait.
                    Some(true) => wait.min(link.plan.poll.immediate),
                    None | Some(false) => wait,
                }
            }
            Err(error) => {
                hold = Duration::ZERO;
                pace.delay_after_failure(error.retry_after())
            }
        };
        let next = Instant::now() + wait;
        link.reachability.record_poll(pace.mode(), pace.is_failing(), next);
        tokio::select! {
            () = link.pause_until(next) => {}
            // The new key is used at once.
            () = link.wait_for_new_key(&key) => {}
        }
    }
}
