//! Recovery that is noticed by a call, and the reading of the lists beside it.

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
use tokio::time::{Instant, sleep};
use tracing::{Level, Metadata, Subscriber, span};

use crate::remote_support::{
    BROKEN_INSIDE, DAY, REFUSED, lose, story_after_start, until_attempting, until_attempts, until_back, until_seen,
};
use crate::support::{Fleet, Server, seconds, tenths};

#[tokio::test(start_paused = true)]
async fn a_call_that_brings_a_server_back_is_answered_before_its_tools_are_read_again_and_they_are_read_once() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    lose(&fleet, &id).await;
    until_attempts(&remote, 8).await;
    remote.bring_up();
    remote.change(|manner| manner.silent_on = ["tools/list"].into());
    let lists = remote.received_at("tools/list").len();
    let answers = join_all((0..10).map(|nth| fleet.call(&id, "echo", json!({"text": nth})))).await;
    for (nth, answer) in answers.into_iter().enumerate() {
        assert_eq!(answer.unwrap()["structuredContent"]["text"], nth);
    }
    let view = fleet.view(&id);
    assert_eq!((view.status, view.connection), (Status::DiscoveringTools, Some(ConnectionState::Connected)));
    assert!(
        view.catalogue.is_some() && view.offered_catalogue().is_none(),
        "its old tools are kept, and not offered yet"
    );
    assert!(fleet.call(&id, "add", json!({"a": 1, "b": 2})).await.is_ok(), "also who comes meanwhile is answered");
    assert_eq!(remote.received_at("tools/list").len(), lists + 1, "one discovery for all");
    // It answers after all: the list timed out, and is read again on the schedule.
    remote.change(|manner| manner.silent_on.clear());
    until_back(&fleet, &id).await;
    assert_eq!(remote.attempts().len(), 9, "on the same connection");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_discovery_that_fails_after_a_reconnect_keeps_the_tools_and_the_link_and_is_repeated() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a").script(SimScript { tools: 5, ..SimScript::default() })).await;
    let remote = fleet.remote(&id);
    lose(&fleet, &id).await;
    remote.change(|manner| {
        let script = SimScript { tools: 4, list_error_times: 3, ..SimScript::default() };
        (manner.down, manner.script) = (None, Some(script.into()));
    });
    let view = fleet.until(&id, Status::Error).await;
    assert_eq!(view.connection, Some(ConnectionState::Connected), "the link is kept");
    let message = view.message.as_deref().unwrap();
    assert!(message.contains("cannot list the tools") && message.contains("next attempt in 1 s"), "{message}");
    assert_eq!(view.catalogue.as_ref().unwrap().tools.len(), 5, "what was known is known");
    assert!(view.offered_catalogue().is_none());
    until_back(&fleet, &id).await;
    assert_eq!(fleet.view(&id).offered_catalogue().unwrap().tools.len(), 4);
    let lists = remote.served_at("tools/list");
    let gaps: Vec<f64> = lists.windows(2).map(|pair| tenths(pair[1] - pair[0])).collect();
    assert_eq!(gaps[gaps.len() - 3..], [1.0, 2.0, 4.0], "on the schedule of a reconnect");
    assert_eq!((remote.sessions().opened, remote.attempts().len()), (2, 3));
    assert_eq!(fleet.told(&id, "mcp.server.reconnected").await.len(), 1);
    assert_eq!(fleet.told(&id, "mcp.tools.updated").await.len(), 1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_that_succeeds_where_the_tools_could_not_be_read_has_them_read_at_once_and_once() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    lose(&fleet, &id).await;
    remote.change(|manner| {
        let script = SimScript { list_error_times: 6, ..SimScript::default() };
        (manner.down, manner.script) = (None, Some(script.into()));
    });
    fleet.until(&id, Status::Error).await;
    let lists = remote.received_at("tools/list").len();
    until_seen(&remote, |remote| remote.received_at("tools/list").len() == lists + 5).await;
    let view = fleet.until_view(&id, |view| view.attempt == Some(6)).await;
    assert_eq!(view.status, Status::Error);
    let began = Instant::now();
    let answers = join_all((0..5).map(|_| fleet.call(&id, "echo", json!({})))).await;
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    until_back(&fleet, &id).await;
    assert_eq!(tenths(began.elapsed()), 0.0, "not after half a minute");
    assert_eq!(remote.received_at("tools/list").len(), lists + 6);
    let story = story_after_start(&fleet, &id).await;
    let recovered = "connecting: Server recovered, re-discovering tools";
    assert_eq!(story.iter().filter(|line| *line == recovered).count(), 2, "{story:#?}");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_busy_while_its_tools_are_read_keeps_its_connection_and_one_that_is_lost_does_not() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    lose(&fleet, &id).await;
    remote.change(|manner| (manner.down, manner.delay) = (None, seconds(1.0)));
    until_attempting(&remote).await;
    // The handshake is on its way already: this is for what follows it.
    remote.fail_next([BROKEN_INSIDE]);
    let view = fleet.until(&id, Status::Error).await;
    assert_eq!(view.connection, Some(ConnectionState::Connected));
    let message = view.message.as_deref().unwrap();
    assert!(message.contains("the server failed (HTTP 500)"), "{message}");
    until_back(&fleet, &id).await;
    assert_eq!(remote.sessions().opened, 2);

    lose(&fleet, &id).await;
    remote.change(|manner| (manner.down, manner.silent_on) = (None, ["tools/list"].into()));
    let lists = remote.received_at("tools/list").len();
    until_seen(&remote, |remote| remote.received_at("tools/list").len() > lists).await;
    remote.kill(FailureKind::Dns);
    let view = fleet.until(&id, Status::Offline).await;
    assert_eq!(view.message.as_deref(), Some("Server unreachable: the response ended before it was complete"));
    assert!(view.catalogue.is_some());
    remote.change(|manner| (manner.down, manner.silent_on) = (None, [].into()));
    until_back(&fleet, &id).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn tools_that_change_in_a_session_are_read_again_once_however_often_that_is_said() {
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
async fn calls_in_flight_while_the_tools_are_read_again_learn_their_fate_like_any_other() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    lose(&fleet, &id).await;
    remote.bring_up();
    remote.change(|manner| manner.silent_on = ["tools/list", "tools/call"].into());
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
async fn a_change_that_cannot_be_read_while_it_is_online_is_read_again_until_it_can_and_the_tools_are_kept() {
    for failure in [BROKEN_INSIDE, FailureKind::Throttled { retry_after: None }] {
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
            "kept, and offered"
        );
        sleep(seconds(1000.0)).await;
        assert_eq!(remote.tried_at("tools/list").len(), before + 5, "it has succeeded");
        // The next change is read at once, whatever was before.
        remote.fail_next([BROKEN_INSIDE]);
        for _ in 0..2 {
            remote.say(json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}).to_string());
            sleep(seconds(0.5)).await;
        }
        assert_eq!(remote.tried_at("tools/list").len(), before + 7);
        fleet.finish().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_list_beside_the_tools_that_cannot_be_read_after_a_reconnect_stays_as_it_was_until_it_can() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a").script(SimScript { resources: 2, ..SimScript::default() })).await;
    let remote = fleet.remote(&id);
    let known = |view: &InstanceView| {
        let catalogue = view.catalogue.clone().unwrap();
        (catalogue.tools.len(), catalogue.resources.len(), catalogue.unreadable.clone())
    };
    lose(&fleet, &id).await;
    remote.change(|manner| manner.silent_on = ["resources/list"].into());
    remote.bring_up();
    until_back(&fleet, &id).await;
    assert_eq!(known(&fleet.view(&id)), (3, 2, vec![ListKind::Resources]));
    let told = &fleet.told(&id, "mcp.server.reconnected").await[0];
    assert_eq!(told["changed"], json!([]), "nothing is known to have changed");
    let before = remote.tried_at("resources/list").len();
    until_seen(&remote, |remote| remote.tried_at("resources/list").len() == before + 3).await;
    remote.change(|manner| manner.silent_on = [].into());
    let view = fleet.until_view(&id, |view| view.catalogue.as_ref().unwrap().unreadable.is_empty()).await;
    assert_eq!((view.status, known(&view)), (Status::Online, (3, 2, vec![])));
    let asked = remote.tried_at("resources/list").len();
    sleep(DAY).await;
    assert_eq!(remote.tried_at("resources/list").len(), asked, "it has succeeded");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_list_beside_the_tools_that_is_refused_for_good_is_asked_for_at_jittered_delays_and_complained_of_once() {
    let complaints = Complaints::default();
    let _guard = tracing::subscriber::set_default(complaints.clone());
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
    assert_eq!(complaints.0.load(Ordering::Relaxed), 1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_asks_to_be_left_alone_is_not_asked_for_its_lists_before_that() {
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
    // That was while it was online, and this is before that.
    lose(&fleet, &id).await;
    remote.change(|manner| (manner.down, manner.delay) = (None, seconds(1.0)));
    until_attempting(&remote).await;
    let before = remote.tried_at("tools/list").len();
    remote.fail_next([LATER, LATER]);
    let view = fleet.until(&id, Status::Error).await;
    assert!(view.message.as_deref().unwrap().ends_with("next attempt in 10 s"), "{:?}", view.message);
    until_back(&fleet, &id).await;
    assert_eq!(gaps(remote.tried_at("tools/list")[before..].to_vec()), [11.0, 11.0], "a second of it is the way there");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn what_a_server_offers_otherwise_after_its_return_is_named_when_that_is_told() {
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
        lose(&fleet, &id).await;
        remote.change(|manner| (manner.down, manner.script) = (None, Some(script.into())));
        until_back(&fleet, &id).await;
        let told = fleet.told(&id, "mcp.server.reconnected").await;
        assert_eq!((told.len(), &told[nth]["changed"]), (nth + 1, &json!(changed)));
    }
    fleet.finish().await;
}

fn tenths_of(seconds: f64) -> f64 {
    tenths(Duration::from_secs_f64(seconds))
}

/// Counts what is complained of a list.
#[derive(Clone, Default)]
struct Complaints(Arc<AtomicUsize>);

impl Subscriber for Complaints {
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
