//! Delays between the attempts to reconnect to a remote server.

use std::time::Duration;

use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::model::failure::FailureKind;
use mcp_satellite_actors::model::policy::ReconnectPolicy;
use mcp_satellite_actors::model::remote::ConnectionState;
use mcp_satellite_actors::model::status::Status;
use serde_json::json;
use testkit::fleet::{Fleet, Server, seconds, tenths};
use tokio::time::{Instant, sleep};

use crate::remote_support::{REFUSED, until_attempts, until_reconnected, waits, waits_for_next_attempt};

const WEEK: Duration = Duration::from_secs(7 * 24 * 3600);

/// Installs a server that is down from the beginning and returns the delays between its first attempts.
async fn delays_while_down(fleet: &Fleet, server: Server, attempts: usize) -> Vec<f64> {
    let remote = fleet.remote(&server.spec.id);
    remote.take_down(REFUSED);
    fleet.add(server).await;
    until_attempts(&remote, attempts).await;
    waits(&remote)
}

#[tokio::test(start_paused = true)]
async fn an_unreachable_server_is_retried_after_one_second_up_to_three_minutes() {
    let fleet = Fleet::start().await;
    let waits = delays_while_down(&fleet, Server::remote("a"), 12).await;
    assert_eq!(waits, [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 180.0, 180.0, 180.0]);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn each_delay_varies_by_at_most_a_tenth_and_differs_between_servers() {
    let fleet = Fleet::start().await;
    let jittered = |name: &str| Server::remote(name).policy(|policy| policy.reconnect = ReconnectPolicy::persistent());
    let (one, other) =
        futures::join!(delays_while_down(&fleet, jittered("a"), 101), delays_while_down(&fleet, jittered("b"), 101));
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
        let waits = delays_while_down(&fleet, server, 20).await;
        fleet.finish().await;
        waits
    };
    let first = with_seed(1).await;
    assert_eq!(first, with_seed(1).await);
    assert_ne!(first, with_seed(2).await);
}

#[tokio::test(start_paused = true)]
async fn bounded_reconnecting_stops_after_five_attempts_until_a_call() {
    let fleet = Fleet::start().await;
    let bounded = ReconnectPolicy { jitter_percent: 0, ..ReconnectPolicy::bounded() };
    let id = fleet.online(Server::remote("a").policy(|policy| policy.reconnect = bounded)).await;
    let remote = fleet.remote(&id);
    remote.kill(REFUSED);
    remote.report_session_lost(FailureKind::Cut);
    let view = fleet.until(&id, Status::Error).await;
    assert_eq!(view.message.as_deref(), Some("Connection failed after max retries"));
    assert_eq!((view.connection, view.next_retry_at), (Some(ConnectionState::Error), None));
    assert_eq!(waits(&remote)[1..], [2.0, 4.0, 8.0, 16.0], "each is twice the previous one");
    sleep(seconds(3600.0)).await;
    assert_eq!(remote.attempts().len(), 6, "one before the loss and five after it");

    let Err(error) = fleet.call(&id, "echo", json!({"text": 1})).await else {
        panic!("the call succeeded although the server is down")
    };
    let CallError::Reconnecting { next_retry_ms: None, last_error, .. } = &error else { panic!("{error:?}") };
    assert_eq!((&**last_error, remote.attempts().len()), ("connection refused", 7));
    assert_eq!(fleet.view(&id).status, Status::Error);
    remote.bring_up();
    assert!(fleet.call(&id, "echo", json!({"text": 1})).await.is_ok());
    until_reconnected(&fleet, &id).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn bounded_reconnecting_waits_at_most_thirty_seconds() {
    let fleet = Fleet::start().await;
    let eight = ReconnectPolicy { jitter_percent: 0, attempts_max: Some(8), ..ReconnectPolicy::bounded() };
    let server = Server::remote("a").policy(|policy| policy.reconnect = eight);
    let waits = delays_while_down(&fleet, server, 9).await;
    assert_eq!(waits, [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn unbounded_reconnecting_continues_for_a_week_with_few_events() {
    // With the default interval, the cycles of the batcher would dominate the run time of the test.
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
    let events = fleet.event_data(&id, "mcp.server.reconnecting").await;
    assert_eq!(events.len(), 14, "the first five and one per doubling");
    assert_eq!(fleet.event_data(&id, "mcp.server.status_changed").await.len(), 7, "one event says offline");
    remote.bring_up();
    let began = Instant::now();
    until_reconnected(&fleet, &id).await;
    assert!(began.elapsed() < seconds(198.0), "{:?}", began.elapsed());
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn delays_start_at_the_end_of_an_attempt_and_success_resets_them() {
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
        assert_eq!(began, [1.0, 13.0, 27.0], "round {round}: each attempt takes ten seconds");
        remote.bring_up();
        until_reconnected(&fleet, &id).await;
    }
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn retry_after_delays_the_next_attempt_by_at_most_an_hour() {
    let fleet = Fleet::start().await;
    let server = Server::remote("a");
    let (id, remote) = (server.spec.id.clone(), fleet.remote(&server.spec.id));
    let retry_after = |seconds| Some(Duration::from_secs(seconds));
    remote.fail_next([
        FailureKind::Throttled { retry_after: retry_after(60) },
        FailureKind::ServerError { status: 503, retry_after: retry_after(90) },
        FailureKind::Throttled { retry_after: retry_after(1) },
        FailureKind::Throttled { retry_after: None },
        // The maximum is an hour.
        FailureKind::Throttled { retry_after: retry_after(24 * 3600) },
    ]);
    fleet.add(server).await;
    let view = fleet.until_view(&id, waits_for_next_attempt).await;
    assert_eq!(
        (view.status, view.message.as_deref()),
        (Status::Error, Some("too many requests (HTTP 429); try again in 60 s"))
    );
    until_attempts(&remote, 6).await;
    until_reconnected(&fleet, &id).await;
    assert_eq!(waits(&remote), [60.0, 90.0, 4.0, 8.0, 3600.0]);
    fleet.finish().await;
}
