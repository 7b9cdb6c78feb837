//! Asks for commands, as often as the backend wants to be asked.

use jiff::Timestamp;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::Shared;
use super::contact::Matter;
use super::orders::{Orders, Unreadable};
use super::rules::Pace;
use crate::backend::wire::Command;

/// So many new ones in one answer.
const LIMIT: usize = 10;
/// And so many with those that come again because they are not done yet.
pub(super) const LIMIT_MAX: usize = 100;

/// What has come with one answer.
#[derive(Debug)]
pub(super) struct Received {
    /// Who they were given to.
    pub(super) satellite_id: String,
    pub(super) commands: Vec<Command>,
    /// Those that can only be answered.
    pub(super) unreadable: Vec<Unreadable>,
    /// The backend's clock, and ours at the same moment.
    pub(super) server_time: Timestamp,
    pub(super) at: Instant,
}

/// Polls. Ends when nobody takes commands any more.
pub(super) async fn run(link: &Shared, inbox: mpsc::Sender<Received>) {
    let mut pace = Pace::new(link.plan.poll, link.plan.backoff_max, link.dice("commands"));
    let mut last_poll = None;
    let mut passed_over = 0;
    loop {
        let key = link.key().await;
        // Those that are not done yet come again, as do those that nobody can answer, and must not keep the others out.
        let limit = (LIMIT + link.held() + passed_over).min(LIMIT_MAX);
        let answer = link.backend.commands(&key, last_poll, limit).await;
        link.heard(Matter::Commands, &key, &answer);
        let wait = match answer {
            Ok(given) => {
                let Orders { answer, unreadable, nameless } = given.read(limit);
                if nameless > passed_over {
                    let count = nameless;
                    tracing::warn!(count, "the backend sends commands without an id that can be in a URL: passed over");
                }
                passed_over = nameless;
                let wait = pace.answered(&answer, limit);
                let server_time = answer.server_time.unwrap_or_else(Timestamp::now);
                last_poll = Some(server_time);
                let (satellite_id, commands) = (key.satellite_id.clone(), answer.commands);
                let is_empty = commands.is_empty() && unreadable.is_empty();
                let received = Received { satellite_id, commands, unreadable, server_time, at: Instant::now() };
                if !is_empty && inbox.send(received).await.is_err() {
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
