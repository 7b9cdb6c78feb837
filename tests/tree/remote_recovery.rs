//! Recovery that a call detects, and the repeated discovery after it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::future::join_all;
use mcp_satellite::connect::sim::SimScript;
use mcp_satellite_actors::model::catalogue::ListKind;
use mcp_satellite_actors::model::exit::{CallError, CallFate};
use mcp_satellite_actors::model::failure::FailureKind;
use mcp_satellite_actors::model::policy::{Policy, ReconnectPolicy};
use mcp_satellite_actors::model::remote::ConnectionState;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::status::Status;
use serde_json::json;
use testkit::fleet::{Fleet, Server, seconds, tenths};
use tokio::time::{Instant, sleep};
use tracing::{Dispatch, Level, Metadata, Subscriber, span};

use crate::remote_support::{
    DAY, INTERNAL_ERROR, REFUSED, event_lines_after_start, lose_connection, until_attempting, until_attempts,
    until_reconnected, until_seen,
};

#[tokio::test(start_paused = true)]
async fn a_call_that_reconnects_is_answered_before_the_tools_are_read_again() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    lose_connection(&fleet, &id).await;
    until_attempts(&remote, 8).await;
    remote.bring_up();
    remote.change(|behavior| behavior.silent_on = ["tools/list"].into());
    let lists = remote.received_at("tools/list").len();
    let answers = join_all((0..10).map(|nth| fleet.call(&id, "echo", json!({"text": nth})))).await;
    for (nth, answer) in answers.into_iter().enumerate() {
        assert_eq!(answer.unwrap()["structuredContent"]["text"], nth);
    }
    let view = fleet.view(&id);
    assert_eq!((view.status, view.connection), (Status::DiscoveringTools, Some(ConnectionState::Connected)));
    assert!(
        view.catalogue.is_some() && view.offered_catalogue().is_none(),
        "the old tools are kept, but not offered yet"
    );
    assert!(fleet.call(&id, "add", json!({"a": 1, "b": 2})).await.is_ok(), "calls during discovery succeed");
    assert_eq!(remote.received_at("tools/list").len(), lists + 1, "one discovery for all");
    // The server responds again: the list request timed out and is repeated on the schedule.
    remote.change(|behavior| behavior.silent_on.clear());
    until_reconnected(&fleet, &id).await;
    assert_eq!(remote.attempts().len(), 9, "on the same connection");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_failed_discovery_after_a_reconnect_is_repeated_on_the_same_connection() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a").script(SimScript { tools: 5, ..SimScript::default() })).await;
    let remote = fleet.remote(&id);
    lose_connection(&fleet, &id).await;
    remote.change(|behavior| {
        let script = SimScript { tools: 4, list_error_times: 3, ..SimScript::default() };
        (behavior.down, behavior.script) = (None, Some(script.into()));
    });
    let view = fleet.until(&id, Status::Error).await;
    assert_eq!(view.connection, Some(ConnectionState::Connected), "the connection is kept");
    let message = view.message.as_deref().unwrap();
    assert!(message.contains("cannot list the tools") && message.contains("next attempt in 1 s"), "{message}");
    assert_eq!(view.catalogue.as_ref().unwrap().tools.len(), 5, "the old tools are kept");
    assert!(view.offered_catalogue().is_none());
    until_reconnected(&fleet, &id).await;
    assert_eq!(fleet.view(&id).offered_catalogue().unwrap().tools.len(), 4);
    let lists = remote.served_at("tools/list");
    let gaps: Vec<f64> = lists.windows(2).map(|pair| tenths(pair[1] - pair[0])).collect();
    assert_eq!(gaps[gaps.len() - 3..], [1.0, 2.0, 4.0], "discovery is retried with the delays of a reconnect");
    assert_eq!((remote.sessions().opened, remote.attempts().len()), (2, 3));
    assert_eq!(fleet.event_data(&id, "mcp.server.reconnected").await.len(), 1);
    assert_eq!(fleet.event_data(&id, "mcp.tools.updated").await.len(), 1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_successful_call_repeats_a_failed_discovery_at_once() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    lose_connection(&fleet, &id).await;
    remote.change(|behavior| {
        let script = SimScript { list_error_times: 6, ..SimScript::default() };
        (behavior.down, behavior.script) = (None, Some(script.into()));
    });
    fleet.until(&id, Status::Error).await;
    let lists = remote.received_at("tools/list").len();
    until_seen(&remote, |remote| remote.received_at("tools/list").len() == lists + 5).await;
    let view = fleet.until_view(&id, |view| view.attempt == Some(6)).await;
    assert_eq!(view.status, Status::Error);
    let began = Instant::now();
    let answers = join_all((0..5).map(|_| fleet.call(&id, "echo", json!({})))).await;
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    until_reconnected(&fleet, &id).await;
    assert_eq!(tenths(began.elapsed()), 0.0, "not after half a minute");
    assert_eq!(remote.received_at("tools/list").len(), lists + 6);
    let event_lines = event_lines_after_start(&fleet, &id).await;
    let recovered = "connecting: Server recovered, re-discovering tools";
    assert_eq!(event_lines.iter().filter(|line| *line == recovered).count(), 2, "{event_lines:#?}");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_error_during_discovery_keeps_the_connection_and_a_loss_ends_it() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    lose_connection(&fleet, &id).await;
    remote.change(|behavior| (behavior.down, behavior.delay) = (None, seconds(1.0)));
    until_attempting(&remote).await;
    // The handshake is in progress already: the failure meets the discovery after it.
    remote.fail_next([INTERNAL_ERROR]);
    let view = fleet.until(&id, Status::Error).await;
    assert_eq!(view.connection, Some(ConnectionState::Connected));
    let message = view.message.as_deref().unwrap();
    assert!(message.contains("the server failed (HTTP 500)"), "{message}");
    until_reconnected(&fleet, &id).await;
    assert_eq!(remote.sessions().opened, 2);

    lose_connection(&fleet, &id).await;
    remote.change(|behavior| (behavior.down, behavior.silent_on) = (None, ["tools/list"].into()));
    let lists = remote.received_at("tools/list").len();
    until_seen(&remote, |remote| remote.received_at("tools/list").len() > lists).await;
    remote.kill(FailureKind::Dns);
    let view = fleet.until(&id, Status::Offline).await;
    assert_eq!(view.message.as_deref(), Some("Server unreachable: the response ended before it was complete"));
    assert!(view.catalogue.is_some());
    remote.change(|behavior| (behavior.down, behavior.silent_on) = (None, [].into()));
    until_reconnected(&fleet, &id).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn several_change_notifications_cause_one_new_reading_of_the_tools() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    let lists = remote.received_at("tools/list").len();
    for what in ["tools", "resources", "prompts", "tools"] {
        remote.say(json!({"jsonrpc": "2.0", "method": format!("notifications/{what}/list_changed")}).to_string());
    }
    sleep(seconds(1.0)).await;
    assert_eq!(remote.received_at("tools/list").len(), lists + 1);
    assert_eq!(fleet.view(&id).status, Status::Online);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_loss_during_rediscovery_reports_the_fate_of_calls_in_flight() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    lose_connection(&fleet, &id).await;
    remote.bring_up();
    remote.change(|behavior| behavior.silent_on = ["tools/list", "tools/call"].into());
    let calls = remote.received_at("tools/call").len();
    let (lost, ()) = futures::join!(fleet.call(&id, "echo", json!({})), async {
        until_seen(&remote, |remote| remote.received_at("tools/call").len() > calls).await;
        remote.kill(REFUSED);
    });
    assert!(matches!(lost, Err(CallError::Terminated { fate: CallFate::MaybeExecuted, .. })), "{lost:?}");
    fleet.until(&id, Status::Offline).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn an_unreadable_list_change_is_retried_and_the_tools_are_kept() {
    for failure in [INTERNAL_ERROR, FailureKind::Throttled { retry_after: None }] {
        let fleet = Fleet::start().await;
        let id = fleet.online(Server::remote("a")).await;
        let remote = fleet.remote(&id);
        let before = remote.tried_at("tools/list").len();
        remote.fail_next(vec![failure; 4]);
        remote.say(json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}).to_string());
        until_seen(&remote, |remote| remote.tried_at("tools/list").len() == before + 5).await;
        let lists = remote.tried_at("tools/list");
        let gaps: Vec<f64> = lists[before..].windows(2).map(|pair| tenths(pair[1] - pair[0])).collect();
        assert_eq!(gaps, [1.0, 2.0, 4.0, 8.0]);
        let view = fleet.view(&id);
        assert_eq!(
            (view.status, view.offered_catalogue().unwrap().tools.len()),
            (Status::Online, 3),
            "the tools are kept and offered"
        );
        sleep(seconds(1000.0)).await;
        assert_eq!(remote.tried_at("tools/list").len(), before + 5, "no request after the success");
        // The next change is read at once, without the delay of the earlier failure.
        remote.fail_next([INTERNAL_ERROR]);
        for _ in 0..2 {
            remote.say(json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}).to_string());
            sleep(seconds(0.5)).await;
        }
        assert_eq!(remote.tried_at("tools/list").len(), before + 7);
        fleet.finish().await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_unreadable_resource_list_keeps_its_content_until_it_is_read() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a").script(SimScript { resources: 2, ..SimScript::default() })).await;
    let remote = fleet.remote(&id);
    let known = |view: &InstanceView| {
        let catalogue = view.catalogue.clone().unwrap();
        (catalogue.tools.len(), catalogue.resources.len(), catalogue.unreadable.clone())
    };
    lose_connection(&fleet, &id).await;
    remote.change(|behavior| behavior.silent_on = ["resources/list"].into());
    remote.bring_up();
    until_reconnected(&fleet, &id).await;
    assert_eq!(known(&fleet.view(&id)), (3, 2, vec![ListKind::Resources]));
    let reconnected = &fleet.event_data(&id, "mcp.server.reconnected").await[0];
    assert_eq!(reconnected["changed"], json!([]), "no known change");
    let before = remote.tried_at("resources/list").len();
    until_seen(&remote, |remote| remote.tried_at("resources/list").len() == before + 3).await;
    remote.change(|behavior| behavior.silent_on = [].into());
    let view = fleet.until_view(&id, |view| view.catalogue.as_ref().unwrap().unreadable.is_empty()).await;
    assert_eq!((view.status, known(&view)), (Status::Online, (3, 2, vec![])));
    let asked = remote.tried_at("resources/list").len();
    sleep(DAY).await;
    assert_eq!(remote.tried_at("resources/list").len(), asked, "no request after the success");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_permanently_failing_resource_list_is_retried_with_jitter_and_logged_once() {
    let warnings = ListWarnings::default();
    // With one dispatcher alive, tracing asks only that of the thread that first reaches a log statement, which may
    // belong to another test. With two, it asks all.
    let _second = Dispatch::new(ListWarnings::default());
    let _guard = tracing::subscriber::set_default(warnings.clone());
    let fleet = Fleet::start().await;
    let script = SimScript { resources: 1, resources_error: true, ..SimScript::default() };
    let jittered = |policy: &mut Policy| policy.reconnect = ReconnectPolicy::persistent();
    let id = fleet.online(Server::remote("a").script(script).policy(jittered)).await;
    let remote = fleet.remote(&id);
    until_seen(&remote, |remote| remote.tried_at("resources/list").len() == 15).await;
    let lists = remote.tried_at("resources/list");
    let gaps: Vec<f64> = lists.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
    assert!((0.9..=1.1).contains(&gaps[0]) && (1.8..=2.2).contains(&gaps[1]), "{gaps:?}");
    assert!(gaps[8..].iter().all(|gap| (162.0..=198.0).contains(gap)), "{gaps:?}");
    assert!(gaps[8..].windows(2).all(|pair| tenths_of(pair[0]) != tenths_of(pair[1])), "{gaps:?}");
    assert_eq!(warnings.0.load(Ordering::Relaxed), 1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn list_requests_wait_for_the_retry_after_of_the_server() {
    const LATER: FailureKind = FailureKind::Throttled { retry_after: Some(Duration::from_secs(10)) };
    let gaps = |lists: Vec<Instant>| lists.windows(2).map(|pair| tenths(pair[1] - pair[0])).collect::<Vec<_>>();
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    let before = remote.tried_at("tools/list").len();
    remote.fail_next([LATER, LATER]);
    remote.say(json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}).to_string());
    until_seen(&remote, |remote| remote.tried_at("tools/list").len() == before + 3).await;
    assert_eq!(gaps(remote.tried_at("tools/list")[before..].to_vec()), [10.0, 10.0]);
    // The requests above came while the server was online; these come before it is online.
    lose_connection(&fleet, &id).await;
    remote.change(|behavior| (behavior.down, behavior.delay) = (None, seconds(1.0)));
    until_attempting(&remote).await;
    let before = remote.tried_at("tools/list").len();
    remote.fail_next([LATER, LATER]);
    let view = fleet.until(&id, Status::Error).await;
    assert!(view.message.as_deref().unwrap().ends_with("next attempt in 10 s"), "{:?}", view.message);
    until_reconnected(&fleet, &id).await;
    assert_eq!(
        gaps(remote.tried_at("tools/list")[before..].to_vec()),
        [11.0, 11.0],
        "10 s of `retry_after` and 1 s of latency"
    );
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn the_reconnected_event_names_the_changed_lists() {
    let fleet = Fleet::start().await;
    let first = SimScript { resources: 1, prompts: 1, ..SimScript::default() };
    let id = fleet.online(Server::remote("a").script(first.clone())).await;
    let remote = fleet.remote(&id);
    let changes: [(SimScript, &[&str]); 6] = [
        (SimScript { resources: 2, prompts: 1, ..SimScript::default() }, &["resources"]),
        (SimScript { resources: 2, prompts: 2, ..SimScript::default() }, &["prompts"]),
        (SimScript { resources: 2, prompts: 2, tools: 2, ..SimScript::default() }, &["tools"]),
        (SimScript { resources: 2, tools: 2, ..SimScript::default() }, &["capabilities", "prompts"]),
        (first.clone(), &["capabilities", "tools", "resources", "prompts"]),
        (first, &[]),
    ];
    for (nth, (script, changed)) in changes.into_iter().enumerate() {
        lose_connection(&fleet, &id).await;
        remote.change(|behavior| (behavior.down, behavior.script) = (None, Some(script.into())));
        until_reconnected(&fleet, &id).await;
        let reconnected = fleet.event_data(&id, "mcp.server.reconnected").await;
        assert_eq!((reconnected.len(), &reconnected[nth]["changed"]), (nth + 1, &json!(changed)));
    }
    fleet.finish().await;
}

fn tenths_of(seconds: f64) -> f64 {
    tenths(Duration::from_secs_f64(seconds))
}

/// Counts the warnings about lists in the log.
#[derive(Clone, Default)]
struct ListWarnings(Arc<AtomicUsize>);

impl Subscriber for ListWarnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN && metadata.fields().field("list").is_some()
    }

    fn event(&self, _event: &tracing::Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn new_span(&self, _span: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _span: &span::Id, _values: &span::Record<'_>) {}
    fn record_follows_from(&self, _span: &span::Id, _follows: &span::Id) {}
    fn enter(&self, _span: &span::Id) {}
    fn exit(&self, _span: &span::Id) {}
}
