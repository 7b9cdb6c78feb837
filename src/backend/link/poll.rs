//! Asks for commands, as often as the backend wants to be asked.

use jiff::Timestamp;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::Shared;
use super::contact::Matter;
use super::rules::Pace;
use crate::backend::wire::Command;

/// So many new ones in one answer.
const LIMIT: usize = 10;
/// And so many with those that come again because they are not done yet.
const LIMIT_MAX: usize = 100;

/// What has come with one answer.
#[derive(Debug)]
pub(super) struct Received {
    pub(super) commands: Vec<Command>,
    /// The backend's clock, and ours at the same moment.
    pub(super) server_time: Timestamp,
    pub(super) at: Instant,
}

/// Polls. Ends when nobody takes commands any more.
pub(super) async fn run(link: &Shared, inbox: mpsc::Sender<Received>) {
    let mut pace = Pace::new(link.plan.poll, link.plan.backoff_max, link.dice("commands"));
    let mut last_poll = None;
    loop {
        let key = link.key().await;
        // Those that are not done yet come again, and must not keep the others out.
        let limit = (LIMIT + link.in_hand()).min(LIMIT_MAX);
        let answer = link.backend.commands(&key, last_poll, limit).await;
        link.heard(Matter::Commands, &key, &answer);
        let wait = match answer {
            Ok(answer) => {
                let wait = pace.answered(&answer, limit);
                let server_time = answer.server_time.unwrap_or_else(Timestamp::now);
                last_poll = Some(server_time);
                let received = Received { commands: answer.commands, server_time, at: Instant::now() };
                if !received.commands.is_empty() && inbox.send(received).await.is_err() {
                    return;
                }
                wait
            }
            Err(error) => pace.failed(error.retry_after()),
        };
        let next = Instant::now() + wait;
        link.contact.polled(pace.mode(), pace.is_failing(), next);
        tokio::select! {
            () = link.pause_until(next) => {}
            // It is answered with another key at once.
            () = link.another_key(&key) => {}
        }
    }
}
