//! When a remote server that is away is tried again.

use std::time::Duration;

use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::model::failure::FailureKind;
use mcp_satellite_actors::model::policy::ReconnectPolicy;
use mcp_satellite_actors::model::remote::ConnectionState;
use mcp_satellite_actors::model::status::Status;
use serde_json::json;
use tokio::time::{Instant, sleep};

use crate::remote_support::{REFUSED, until_attempts, until_back, waits, waits_for_its_time};
use crate::support::{Fleet, Server, seconds, tenths};

const WEEK: Duration = Duration::from_secs(7 * 24 * 3600);

/// A server that is away from the beginning, after so many attempts.
async fn tried(fleet: &Fleet, server: Server, attempts: usize) -> Vec<f64> {
    let remote = fleet.remote(&server.spec.id);
    remote.take_down(REFUSED);
    fleet.add(server).await;
    until_attempts(&remote, attempts).await;
    waits(&remote)
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_away_is_tried_after_one_second_then_two_and_at_last_every_three_minutes() {
    let fleet = Fleet::start().await;
    let waits = tried(&fleet, Server::remote("a"), 12).await;
    assert_eq!(waits, [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 180.0, 180.0, 180.0]);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn each_delay_is_at_most_a_tenth_longer_or_shorter_and_no_two_servers_have_the_same() {
    let fleet = Fleet::start().await;
    let jittered = |name: &str| Server::remote(name).policy(|policy| policy.reconnect = ReconnectPolicy::persistent());
    let (one, other) = futures::join!(tried(&fleet, jittered("a"), 101), tried(&fleet, jittered("b"), 101));
    for waits in [&one, &other] {
        let exact = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0].into_iter().chain(std::iter::repeat(180.0));
        for (wait, exact) in waits.iter().zip(exact) {
            assert!((wait - exact).abs() <= exact / 10.0 + 0.05, "{wait} for {exact}");
        }
        let late = &waits[8..];
        assert!(late.iter().any(|wait| *wait < 170.0) && late.iter().any(|wait| *wait > 190.0), "{late:?}");
    }
    assert_ne!(one, other);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn the_same_seed_gives_the_same_delays_and_another_seed_others() {
    let with_seed = async |seed| {
        let fleet = Fleet::with(|options| options.seed = seed).await;
        let server = Server::remote("a").policy(|policy| policy.reconnect = ReconnectPolicy::persistent());
        let waits = tried(&fleet, server, 20).await;
        fleet.finish().await;
        waits
    };
    let first = with_seed(1).await;
    assert_eq!(first, with_seed(1).await);
    assert_ne!(first, with_seed(2).await);
}

#[tokio::test(start_paused = true)]
async fn where_attempts_are_bounded_five_are_made_and_then_none_until_somebody_calls() {
    let fleet = Fleet::start().await;
    let bounded = ReconnectPolicy { jitter_percent: 0, ..ReconnectPolicy::bounded() };
    let id = fleet.online(Server::remote("a").policy(|policy| policy.reconnect = bounded)).await;
    let remote = fleet.remote(&id);
    remote.kill(REFUSED);
    remote.report_session_lost(FailureKind::Cut);
    let view = fleet.until(&id, Status::Error).await;
    assert_eq!(view.message.as_deref(), Some("Connection failed after max retries"));
    assert_eq!((view.connection, view.next_retry_at), (Some(ConnectionState::Error), None));
    assert_eq!(waits(&remote)[1..], [2.0, 4.0, 8.0, 16.0], "each twice as long as the one before");
    sleep(seconds(3600.0)).await;
    assert_eq!(remote.attempts().len(), 6, "one, and five after the loss");

    let Err(error) = fleet.call(&id, "echo", json!({"text": 1})).await else { panic!("it is away") };
    let CallError::Reconnecting { next_retry_ms: None, last_error, .. } = &error else { panic!("{error:?}") };
    assert_eq!((&**last_error, remote.attempts().len()), ("connection refused", 7));
    assert_eq!(fleet.view(&id).status, Status::Error);
    remote.bring_up();
    assert!(fleet.call(&id, "echo", json!({"text": 1})).await.is_ok());
    until_back(&fleet, &id).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_bounded_delay_is_half_a_minute_at_most() {
    let fleet = Fleet::start().await;
    let eight = ReconnectPolicy { jitter_percent: 0, attempts_max: Some(8), ..ReconnectPolicy::bounded() };
    let server = Server::remote("a").policy(|policy| policy.reconnect = eight);
    let waits = tried(&fleet, server, 9).await;
    assert_eq!(waits, [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn without_a_bound_it_is_tried_for_a_week_and_more_and_its_events_do_not_pile_up() {
    // The batcher's cycles are most of what happens in a week of waiting.
    let fleet = Fleet::with(|options| options.batch.interval = seconds(3600.0)).await;
    let server = Server::remote("a").policy(|policy| policy.reconnect = ReconnectPolicy::persistent());
    let id = fleet.online(server).await;
    let remote = fleet.remote(&id);
    remote.kill(REFUSED);
    remote.report_session_lost(REFUSED);
    sleep(WEEK).await;
    let attempts = remote.attempts().len();
    assert!((3300..3420).contains(&attempts), "{attempts}");
    assert_eq!(remote.overlaps(), 0);
    let view = fleet.view(&id);
    assert_eq!((view.status, view.connection), (Status::Offline, Some(ConnectionState::Reconnecting)));
    assert!(view.attempt.is_some_and(|attempt| attempt >= attempts - 1), "{:?} of {attempts}", view.attempt);
    let told = fleet.told(&id, "mcp.server.reconnecting").await;
    assert_eq!(told.len(), 14, "the first five and each doubling");
    assert_eq!(fleet.told(&id, "mcp.server.status_changed").await.len(), 7, "that it is offline is told once");
    remote.bring_up();
    let began = Instant::now();
    until_back(&fleet, &id).await;
    assert!(began.elapsed() < seconds(198.0), "{:?}", began.elapsed());
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn the_next_delay_is_counted_from_the_end_of_an_attempt_and_a_success_begins_anew() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    let timed_out = FailureKind::ConnectTimeout(seconds(10.0));
    for round in 0..3 {
        let before = remote.attempts().len();
        remote.kill(timed_out.clone());
        remote.report_session_lost(FailureKind::Cut);
        let lost = Instant::now();
        until_attempts(&remote, before + 3).await;
        let attempts = &remote.attempts()[before..];
        let began: Vec<f64> = attempts.iter().map(|attempt| tenths(attempt.began - lost)).collect();
        assert_eq!(began, [1.0, 13.0, 27.0], "round {round}: each takes ten seconds");
        remote.bring_up();
        until_back(&fleet, &id).await;
    }
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_asks_for_patience_is_given_it() {
    let fleet = Fleet::start().await;
    let server = Server::remote("a");
    let (id, remote) = (server.spec.id.clone(), fleet.remote(&server.spec.id));
    let patience = |seconds| Some(Duration::from_secs(seconds));
    remote.fail_next([
        FailureKind::Throttled { retry_after: patience(60) },
        FailureKind::ServerError { status: 503, retry_after: patience(90) },
        FailureKind::Throttled { retry_after: patience(1) },
        FailureKind::Throttled { retry_after: None },
        // A server may ask for a day; it is tried after an hour.
        FailureKind::Throttled { retry_after: patience(24 * 3600) },
    ]);
    fleet.add(server).await;
    let view = fleet.until_view(&id, waits_for_its_time).await;
    assert_eq!(
        (view.status, view.message.as_deref()),
        (Status::Error, Some("too many requests (HTTP 429); try again in 60 s"))
    );
    until_attempts(&remote, 6).await;
    until_back(&fleet, &id).await;
    assert_eq!(waits(&remote), [60.0, 90.0, 4.0, 8.0, 3600.0]);
    fleet.finish().await;
}
