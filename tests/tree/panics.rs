//! A panic in each part of the actor tree, and the state that survives it.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::future::{BoxFuture, join_all};
use jiff::Timestamp;
use mcp_satellite::connect::sim::SimScript;
use mcp_satellite_actors::audience::{Audience, CallOrigin, ClientQuestion, MessageCause, SessionSource};
use mcp_satellite_actors::model::actor_tree::{ActorKind, ActorReport};
use mcp_satellite_actors::model::exit::{CallError, CallFate, RuntimeEnd};
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::memo::StoredMemo;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rpc::RpcMessage;
use mcp_satellite_actors::rules::slot::RequestedState;
use mcp_satellite_actors::seam::{EventSink, SinkAnswer, SinkBatch, StateStore};
use mcp_satellite_actors::{ControlError, InstallOutcome, RuntimeHandle, RuntimePart};
use serde_json::json;
use testkit::fleet::{Fleet, LONG, Server, SinkMode, exits, seconds, tenths};
use tokio::time::{Instant, sleep, timeout};

use crate::control::removals;

/// Sends the panic right after the messages of the joined futures.
#[expect(clippy::unused_async, reason = "joined with other futures, so that it runs among them")]
async fn panic(runtime: &RuntimeHandle, part: RuntimePart) {
    runtime.panic(part);
}

fn acme() -> RuntimePart {
    RuntimePart::Team("acme".into())
}

/// Ends the supervisor twice in a row: it is then replaced only after five seconds.
async fn remove_supervisor(fleet: &Fleet) {
    fleet.runtime.panic(acme());
    sleep(seconds(0.5)).await;
    fleet.runtime.panic(acme());
    sleep(seconds(0.5)).await;
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_a_worker_costs_that_instance_one_run() {
    let fleet = Fleet::start().await;
    let (hurt, other) = (fleet.online(Server::new("hurt")).await, fleet.online(Server::new("other")).await);
    let (hurt_pid, other_pid) = (fleet.pid(&hurt), fleet.pid(&other));
    let in_flight = fleet.call(&hurt, "sleep", json!({"ms": 5000}));
    let (answer, ()) = futures::join!(in_flight, async {
        sleep(seconds(1.0)).await;
        fleet.runtime.panic(RuntimePart::Worker(hurt.clone()));
    });
    assert_eq!(answer.unwrap_err().fate(), Some(CallFate::MaybeExecuted), "the caller gets an error");
    fleet.until_replaced(&hurt, hurt_pid).await;
    assert_eq!(fleet.view(&hurt).exits_in_window(Instant::now().into_std()), 1, "the panic counts as an exit");
    let crashed = fleet.event_data(&hurt, "mcp.server.crashed").await;
    let reason = crashed[0]["reason"].as_str().unwrap();
    assert!(reason.starts_with("worker panicked") && reason.contains("asked to panic"), "{reason}");
    assert_eq!((fleet.pid(&other), fleet.view(&other).restarts), (other_pid, 0));
    assert_eq!(fleet.world.sim.alive_count(), 2, "the process of the worker that panicked is gone");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_a_team_leaves_others_alone_and_restores_its_own_instances() {
    let fleet = Fleet::start().await;
    let mut others = Vec::new();
    for nth in 0..5 {
        let id = fleet.online(Server::of("other", &format!("s{nth}")).always_on()).await;
        others.push((fleet.pid(&id), id));
    }
    let running = fleet.online(Server::new("running")).await;
    let stopped = fleet.online(Server::new("stopped")).await;
    fleet.runtime.stop(&stopped).await.unwrap();
    let failed = fleet.add(Server::new("failed").script(exits(0.1, 1))).await;
    let message = fleet.until(&failed, Status::PermanentlyFailed).await.message.clone();
    let asleep = fleet.online(Server::new("asleep").plans([exits(1.0, 0).into(), SimScript::default().into()])).await;
    fleet.until_view(&asleep, |view| view.dormant).await;
    let unconfigured = fleet.add(Server::new("unconfigured").missing("KEY")).await;
    let once = fleet.online(Server::new("once")).await;
    let pid = fleet.pid(&once);
    fleet.server(&once).exit(1);
    fleet.until_replaced(&once, pid).await;

    let (pid, starts) = (fleet.pid(&running), fleet.world.all_openings().len());
    fleet.runtime.panic(acme());
    fleet.until_replaced(&running, pid).await;
    fleet.until_view(&once, |view| view.status == Status::Online && view.restarts == 2).await;
    sleep(seconds(600.0)).await;
    assert_eq!(fleet.world.all_openings().len(), starts + 2, "only running instances were started again");
    for (pid, id) in &others {
        assert_eq!((fleet.pid(id), fleet.view(id).restarts), (*pid, 0), "{id}");
    }
    let view = fleet.view(&failed);
    assert_eq!((view.status, view.message.clone()), (Status::PermanentlyFailed, message));
    assert_eq!(
        (fleet.view(&stopped).status, fleet.view(&stopped).requested_state),
        (Status::Offline, RequestedState::Stopped)
    );
    assert_eq!(fleet.view(&unconfigured).status, Status::AwaitingUserConfig);
    let view = fleet.view(&asleep);
    assert_eq!((view.status, view.dormant, view.offered_catalogue().unwrap().tools.len()), (Status::Online, true, 3));
    assert!(fleet.call(&asleep, "echo", json!({"text": 1})).await.is_ok(), "a call wakes it");
    let runs: HashSet<_> = fleet.world.all_openings().iter().map(|opening| opening.run).collect();
    assert_eq!(runs.len(), fleet.world.all_openings().len(), "no number of a run is used twice");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn the_crash_history_survives_a_panic_of_the_team() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    for restarts in 1..=2 {
        fleet.server(&id).exit(1);
        fleet.until_view(&id, |view| view.status == Status::Online && view.restarts == restarts).await;
    }
    fleet.runtime.panic(acme());
    fleet.until_view(&id, |view| view.status == Status::Online && view.restarts == 3).await;
    fleet.server(&id).exit(1);
    let view = fleet.until(&id, Status::PermanentlyFailed).await;
    assert_eq!(view.exits_in_window(Instant::now().into_std()), 3);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_a_team_fails_running_calls_and_keeps_waiting_ones() {
    let fleet = Fleet::start().await;
    let running = fleet
        .online(Server::new("running").script(SimScript { call_delay: seconds(5.0), ..SimScript::default() }))
        .await;
    let slow = SimScript { handshake_delay: seconds(5.0), ..SimScript::default() };
    let starting = fleet.add(Server::new("starting").script(slow)).await;
    fleet.until(&starting, Status::Connecting).await;
    let (plain, read_only, waiting, ()) = futures::join!(
        fleet.call(&running, "echo", json!({"text": 1})),
        fleet.call(&running, "add", json!({"a": 1, "b": 2})),
        fleet.call(&starting, "echo", json!({"text": "waited"})),
        async {
            sleep(seconds(1.0)).await;
            fleet.runtime.panic(acme());
        }
    );
    assert!(matches!(plain, Err(CallError::Terminated { fate: CallFate::MaybeExecuted, .. })), "{plain:?}");
    assert_eq!(read_only.unwrap()["structuredContent"]["result"], 3, "repeated on the next run");
    assert_eq!(waiting.unwrap()["structuredContent"]["text"], "waited");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_stop_just_before_a_panic_of_the_team_takes_effect() {
    let fleet = Fleet::start().await;
    let id = fleet.add(Server::new("a").script(exits(0.1, 1))).await;
    fleet.until(&id, Status::PermanentlyFailed).await;
    let other = fleet.online(Server::new("b")).await;
    let (stopped, also, ()) =
        futures::join!(fleet.runtime.stop(&id), fleet.runtime.stop(&other), panic(&fleet.runtime, acme()));
    assert_eq!((stopped, also), (Ok(()), Ok(())));
    sleep(seconds(60.0)).await;
    for id in [&id, &other] {
        assert_eq!(
            (fleet.view(id).status, fleet.view(id).requested_state),
            (Status::Offline, RequestedState::Stopped),
            "{id}"
        );
    }
    assert_eq!(fleet.world.openings(&other).len(), 1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_stop_and_start_just_before_a_panic_of_the_team_take_effect() {
    let fleet = Fleet::start().await;
    let id = fleet.add(Server::new("a").script(exits(0.1, 1))).await;
    fleet.until(&id, Status::PermanentlyFailed).await;
    fleet.runtime.restart(&id).await.unwrap();
    fleet.until(&id, Status::PermanentlyFailed).await;
    let before = fleet.world.openings(&id).len();
    // The memo of the stop and the start is still on its way when the supervisor dies.
    let (_, started, ()) =
        futures::join!(fleet.runtime.stop(&id), fleet.runtime.start(&id), panic(&fleet.runtime, acme()));
    started.unwrap();
    fleet.world.until_openings(&id, before + 3).await;
    fleet.until(&id, Status::PermanentlyFailed).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn commands_to_a_team_without_supervisor_are_carried_out_by_the_next_one() {
    let fleet = Fleet::start().await;
    let (stop, restart) = (fleet.online(Server::new("stop")).await, fleet.online(Server::new("restart")).await);
    let remove = fleet.online(Server::new("remove")).await;
    let mut plans = vec![exits(0.1, 1).into(); 3];
    plans.push(SimScript::default().into());
    let failing = Server::new("failing").plans(plans);
    let failed = fleet.add(failing.clone()).await;
    fleet.until(&failed, Status::PermanentlyFailed).await;
    remove_supervisor(&fleet).await;
    assert_eq!(fleet.world.sim.alive_count(), 0);

    let began = Instant::now();
    let new = Server::new("new");
    fleet.world.plan(&new);
    let (stopped, restarted, removed, updated, installed, called) = futures::join!(
        fleet.runtime.stop(&stop),
        fleet.runtime.restart(&restart),
        fleet.runtime.uninstall(&remove),
        fleet.runtime.install(failing.env("FIXED", "yes").spec),
        fleet.runtime.install(new.spec.clone()),
        fleet.call(&restart, "echo", json!({"text": 1})),
    );
    assert_eq!((stopped, restarted), (Ok(()), Ok(())));
    assert!(removed.is_ok(), "{removed:?}");
    assert_eq!((updated, installed), (Ok(InstallOutcome::Updated), Ok(InstallOutcome::New)));
    assert!(called.is_ok(), "{called:?}");
    assert!(began.elapsed() < seconds(6.0));
    fleet.until(&failed, Status::Online).await;
    fleet.until(&new.spec.id, Status::Online).await;
    fleet.until(&restart, Status::Online).await;
    let view = fleet.view(&stop);
    assert_eq!((view.status, view.requested_state), (Status::Offline, RequestedState::Stopped));
    assert!(fleet.runtime.snapshot().get(&remove).is_none());
    assert_eq!(removals(&fleet, &remove).await, [(false, false)]);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn an_uninstall_survives_a_panic_of_the_team() {
    let fleet = Fleet::start().await;
    let stubborn = SimScript { ignore_sigterm: true, ignore_eof: true, ..SimScript::default() };
    let id = fleet.online(Server::new("a").script(stubborn.clone())).await;
    let remains = fleet.online(Server::new("b")).await;
    let pid = fleet.pid(&remains);
    let (uninstalled, ()) = futures::join!(fleet.runtime.uninstall(&id), async {
        sleep(seconds(1.0)).await;
        fleet.runtime.panic(acme());
    });
    assert!(uninstalled.is_ok(), "{uninstalled:?}");
    fleet.until_replaced(&remains, pid).await;
    sleep(seconds(60.0)).await;
    assert!(fleet.runtime.snapshot().get(&id).is_none());
    assert_eq!((fleet.world.openings(&id).len(), fleet.world.sim.alive_count()), (1, 1));
    assert_eq!(removals(&fleet, &id).await, [(false, false)]);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn no_start_permit_is_lost_when_a_supervisor_dies() {
    let fleet = Fleet::with(|options| options.start_permits = 2).await;
    let ids: Vec<InstanceId> =
        join_all((0..6).map(|nth| fleet.add(Server::new(&format!("s{nth}")).script(exits(0.1, 1))))).await;
    for id in &ids {
        fleet.until(id, Status::PermanentlyFailed).await;
    }
    fleet.runtime.panic(acme());
    sleep(seconds(0.5)).await;
    // The restarts request permits, and their supervisor dies before it receives one.
    let restarts = join_all(ids.iter().map(|id| fleet.runtime.restart(id)));
    let (_, ()) = futures::join!(restarts, panic(&fleet.runtime, acme()));
    let began = Instant::now();
    let other = fleet.online(Server::of("other", "a")).await;
    assert!(began.elapsed() < seconds(1.0), "{:?}", began.elapsed());
    sleep(seconds(30.0)).await;
    fleet.world.take_starting_max("acme");
    let slow = SimScript { handshake_delay: seconds(1.0), ..SimScript::default() };
    let servers = (0..4).map(|nth| fleet.online(Server::of("other", &format!("slow{nth}")).script(slow.clone())));
    let began = Instant::now();
    join_all(servers).await;
    assert_eq!(tenths(began.elapsed()), 2.0, "two at a time, as before");
    assert_eq!(fleet.view(&other).restarts, 0);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_team_that_keeps_panicking_is_restarted_after_growing_delays_forever() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    for delay in [0.0, 5.0, 15.0, 15.0, 15.0] {
        let pid = fleet.pid(&id);
        let began = Instant::now();
        fleet.runtime.panic(acme());
        fleet.until_replaced(&id, pid).await;
        assert_eq!(tenths(began.elapsed()), delay);
    }
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn snapshot_receivers_stay_valid_over_a_panic_of_the_registry() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    let (pid, mut watch) = (fleet.pid(&id), fleet.runtime.watch());
    let (answer, ()) = futures::join!(fleet.call(&id, "sleep", json!({"ms": 5000})), async {
        sleep(seconds(1.0)).await;
        fleet.runtime.panic(RuntimePart::Registry);
    });
    assert!(answer.is_ok(), "calls continue");
    let snapshot = watch.borrow_and_update().clone();
    assert_eq!(snapshot.get(&id).unwrap().pid, pid, "the new registry has the old state");
    assert!(fleet.call(&id, "echo", json!({"text": 1})).await.is_ok());
    fleet.server(&id).exit(1);
    let seen = watch.wait_for(|snapshot| snapshot.get(&id).is_some_and(|view| view.restarts == 1));
    assert!(timeout(LONG, seen).await.is_ok(), "an old receiver sees what the new registry publishes");
    fleet.until_replaced(&id, pid).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_revision_increases_with_every_publication() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    let other = fleet.online(Server::new("b")).await;
    let mut watch = fleet.runtime.watch();
    let mut last = watch.borrow_and_update().clone();
    assert!(last.revision() > 0);
    for round in 0..3 {
        let pid = fleet.pid(&id);
        if round == 1 {
            panic(&fleet.runtime, RuntimePart::Registry).await;
        }
        fleet.runtime.restart(&id).await.unwrap();
        // Follows each publication until the instance runs again.
        loop {
            timeout(LONG, watch.changed()).await.unwrap().unwrap();
            let next = watch.borrow_and_update().clone();
            assert!(next.revision() > last.revision(), "{} after {}", next.revision(), last.revision());
            let changes = next.changes_since(&last);
            assert!(changes.removed.is_empty());
            assert!(round != 2 || changes.changed.iter().all(|view| view.spec.id != other), "the other did not change");
            last = next;
            let view = last.get(&id).unwrap();
            if view.status == Status::Online && view.pid != pid {
                break;
            }
        }
    }
    let before = last.revision();
    fleet.finish().await;
    let end = watch.borrow_and_update().clone();
    assert!(end.end().is_some() && end.revision() > before);
}

#[tokio::test(start_paused = true)]
async fn changes_during_a_panic_of_the_registry_are_not_lost() {
    let fleet = Fleet::start().await;
    let stays = fleet.online(Server::new("stays")).await;
    let goes = fleet.add(Server::new("goes").script(exits(0.1, 1))).await;
    fleet.until(&goes, Status::PermanentlyFailed).await;
    let new = Server::new("new");
    fleet.world.plan(&new);
    let ((), uninstalled, stopped, installed) = futures::join!(
        panic(&fleet.runtime, RuntimePart::Registry),
        fleet.runtime.uninstall(&goes),
        fleet.runtime.stop(&stays),
        fleet.runtime.install(new.spec.clone()),
    );
    assert!(uninstalled.is_ok() && stopped.is_ok() && installed.is_ok());
    fleet.until(&new.spec.id, Status::Online).await;
    sleep(seconds(1.0)).await;
    assert_eq!(fleet.view(&stays).status, Status::Offline);
    assert!(fleet.runtime.snapshot().get(&goes).is_none(), "the removed instance is not in the snapshot");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn queued_and_in_flight_events_survive_a_panic_of_the_batcher() {
    let fleet = Fleet::start().await;
    fleet.sink.set_mode(SinkMode::Block);
    let id = fleet.online(Server::new("a")).await;
    fleet.sink.until_attempts(1).await;
    let old = fleet.pid(&id);
    fleet.server(&id).exit(1);
    fleet.until_replaced(&id, old).await;
    fleet.runtime.panic(RuntimePart::Batcher);
    fleet.sink.until_attempts(2).await;
    let attempts = fleet.sink.attempts();
    assert_eq!(attempts[0].batch, attempts[1].batch, "the same events under the same id");
    assert!(attempts[1].at > attempts[0].at);
    fleet.sink.set_mode(SinkMode::Accept);
    let kinds: Vec<_> = fleet.events().await.iter().map(|event| event.event.kind()).collect();
    assert!(kinds.contains(&"mcp.server.crashed") && kinds.contains(&"mcp.server.restarted"), "{kinds:?}");
    assert_eq!(fleet.runtime.event_statistics().dropped, 0);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn repeated_panics_of_the_batcher_lose_no_event() {
    let fleet = Fleet::start().await;
    let mut subscription = fleet.runtime.subscribe();
    for nth in 0..10 {
        fleet.online(Server::new(&format!("s{nth}"))).await;
        fleet.runtime.panic(RuntimePart::Batcher);
    }
    fleet.events().await;
    let mut next = 1;
    while let Ok(envelope) = subscription.try_recv() {
        assert_eq!(envelope.seq, next, "a subscriber sees every event once");
        next += 1;
    }
    assert_eq!(next, 81, "eight for each start");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_the_sink_counts_as_a_failed_send() {
    let fleet = Fleet::start().await;
    fleet.sink.set_mode(SinkMode::Panic);
    let id = fleet.online(Server::new("a")).await;
    fleet.sink.until_attempts(3).await;
    let error = fleet.runtime.event_statistics().last_error.unwrap();
    assert!(error.contains("the sink panicked"), "{error}");
    fleet.sink.set_mode(SinkMode::Accept);
    assert_eq!(fleet.event_data(&id, "mcp.server.started").await.len(), 1);
    let attempts = fleet.sink.attempts();
    assert!(attempts.iter().all(|attempt| attempt.batch == attempts[0].batch));
    fleet.finish().await;
}

/// Code of a host that panics in every method.
struct PanickingHost;

impl StateStore for PanickingHost {
    fn save(&self, _spec: &Arc<InstanceSpec>, _memo: StoredMemo) {
        panic!("the state store panics");
    }

    fn delete(&self, _id: &InstanceId) {
        panic!("the state store panics");
    }
}

impl Audience for PanickingHost {
    fn on_notification(&self, _of: &SessionSource, _cause: MessageCause, _message: RpcMessage) {
        panic!("the audience panics");
    }

    fn on_progress(&self, _origin: CallOrigin, _message: RpcMessage) {
        panic!("the audience panics");
    }

    fn on_request(&self, _of: &SessionSource, _cause: MessageCause, _question: ClientQuestion) {
        panic!("the audience panics");
    }

    fn on_request_withdrawn(&self, _of: &SessionSource, _question: u64, _message: RpcMessage) {
        panic!("the audience panics");
    }

    fn on_session_started(&self, _of: &SessionSource) {
        panic!("the audience panics");
    }

    fn on_session_ended(&self, _of: &SessionSource) {
        panic!("the audience panics");
    }
}

#[tokio::test(start_paused = true)]
async fn panics_of_state_store_audience_and_clock_end_nothing() {
    let fleet = Fleet::with(|options| {
        options.state_store = Arc::new(PanickingHost);
        options.audience = Arc::new(PanickingHost);
        options.wall = Arc::new(|| -> Timestamp { panic!("the clock panics") });
    })
    .await;
    let script = SimScript { list_changed_after: Some(seconds(1.0)), ..SimScript::default() };
    let (id, other) = (fleet.online(Server::new("a").script(script)).await, fleet.online(Server::new("b")).await);
    sleep(seconds(5.0)).await;
    let pid = fleet.pid(&id);
    assert!(fleet.call(&id, "echo", json!({"text": 1})).await.is_ok());
    assert_eq!(fleet.view(&id).restarts, 0, "no panic of the audience costs a run");
    fleet.server(&id).exit(1);
    fleet.until_replaced(&id, pid).await;
    assert!(fleet.runtime.uninstall(&id).await.is_ok());
    assert!(fleet.call(&other, "echo", json!({"text": 1})).await.is_ok());
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_failure_of_the_root_supervisor_ends_the_runtime_and_takes_instances_offline() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    let never = fleet.runtime.wait_for(&id, |view| view.status == Status::Error);
    let (waited, ()) = futures::join!(timeout(LONG, never), panic(&fleet.runtime, RuntimePart::Root));
    assert!(waited.unwrap().is_none(), "a waiting caller gets `None`");
    let end = RuntimeEnd::Failed("asked to panic".to_owned());
    assert_eq!(fleet.runtime.wait_for_end().await, end);
    assert_eq!(fleet.runtime.snapshot().end(), Some(&end));
    let view = fleet.view(&id);
    assert_eq!((view.status, view.pid, view.port.is_none()), (Status::Offline, None, true));
    assert!(view.message.as_ref().is_some_and(|message| message.contains("asked to panic")), "{:?}", view.message);
    assert!(!fleet.runtime.shutdown().await.in_time);
    assert_eq!(fleet.finish_after_shutdown().await, end);

    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    fleet.runtime.kill();
    assert_eq!(fleet.runtime.wait_for_end().await, RuntimeEnd::Killed);
    assert_eq!(fleet.view(&id).status, Status::Offline);
    assert_eq!(fleet.finish_after_shutdown().await, RuntimeEnd::Killed);
}

#[tokio::test(start_paused = true)]
async fn an_instance_that_keeps_panicking_its_team_fails_permanently() {
    for bad in [Server::new("bad"), Server::remote("bad")] {
        let fleet = Fleet::start().await;
        let (bad, good) = (fleet.online(bad).await, fleet.online(Server::new("good")).await);
        for _ in 0..3 {
            let pid = fleet.pid(&good);
            fleet.runtime.panic(RuntimePart::Instance(bad.clone()));
            fleet.until_replaced(&good, pid).await;
        }
        let view = fleet.until(&bad, Status::PermanentlyFailed).await;
        let message = "The satellite itself failed 3 times while it handled this server; last: asked to panic.";
        assert_eq!(view.message.as_deref(), Some(message));
        let refused = fleet.call(&bad, "echo", json!({"text": 1})).await.unwrap_err();
        assert!(matches!(refused, CallError::Refused { status: Status::PermanentlyFailed, .. }), "{refused:?}");
        sleep(seconds(600.0)).await;
        assert_eq!(fleet.view(&bad).status, Status::PermanentlyFailed);
        assert!(fleet.call(&good, "echo", json!({"text": 1})).await.is_ok());
        fleet.runtime.restart(&bad).await.unwrap();
        fleet.until(&bad, Status::Online).await;
        fleet.finish().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_command_gets_an_answer_although_the_supervisor_keeps_failing() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    let panics = async {
        loop {
            fleet.runtime.panic(acme());
            sleep(seconds(0.001)).await;
        }
    };
    let asks = async {
        sleep(seconds(0.5)).await;
        timeout(seconds(600.0), fleet.runtime.stop(&id)).await
    };
    let answer = tokio::select! {
        answer = asks => answer.unwrap(),
        () = panics => unreachable!("the loop does not end"),
    };
    assert!(matches!(answer, Err(ControlError::Refused { .. })), "{answer:?}");
    fleet.until(&id, Status::Online).await;
    fleet.finish().await;
}

/// A sink that panics before it returns a future.
struct PanickingSink {
    sink: Arc<dyn EventSink>,
    panics: Arc<AtomicBool>,
}

impl EventSink for PanickingSink {
    fn send(&self, batch: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
        assert!(!self.panics.load(Ordering::Relaxed), "the sink panics at once");
        self.sink.send(batch)
    }

    fn is_prompt(&self) -> bool {
        assert!(!self.panics.load(Ordering::Relaxed), "the sink panics at once");
        false
    }
}

#[tokio::test(start_paused = true)]
async fn a_sink_that_panics_before_its_future_counts_as_a_failed_send() {
    let panics = Arc::new(AtomicBool::new(true));
    let fleet = Fleet::with(|options| {
        options.sink = Arc::new(PanickingSink { sink: options.sink.clone(), panics: panics.clone() });
    })
    .await;
    let id = fleet.online(Server::new("a")).await;
    sleep(seconds(10.0)).await;
    let error = fleet.runtime.event_statistics().last_error.unwrap();
    assert!(error.contains("the sink panicked"), "{error}");
    panics.store(false, Ordering::Relaxed);
    sleep(seconds(60.0)).await;
    assert_eq!(fleet.event_data(&id, "mcp.server.started").await.len(), 1);
    fleet.finish().await;
}

/// State store that blocks its caller until it is released.
struct BlockingStore {
    entered: std::sync::mpsc::SyncSender<()>,
    released: std::sync::Mutex<std::sync::mpsc::Receiver<()>>,
}

impl StateStore for BlockingStore {
    fn save(&self, _spec: &Arc<InstanceSpec>, _memo: StoredMemo) {
        self.entered.send(()).unwrap();
        self.released.lock().unwrap().recv().unwrap();
    }

    fn delete(&self, _id: &InstanceId) {}
}

/// Shows a report and its children: kind, name, restarts, permits, backlog of a team, and `?` without an answer.
fn shown(report: &ActorReport) -> String {
    let permits = report.permits.iter().map(|load| {
        let max = load.max.map_or(String::new(), |max| format!("/{max}"));
        format!(" {:?} {}+{}{max}", load.pool, load.held, load.waiting)
    });
    let backlog = report.backlog.filter(|_| report.kind == ActorKind::Team);
    let backlog = backlog.map_or(String::new(), |backlog| format!(" backlog {backlog}"));
    let unanswered = if report.answered_ms.is_none() { "?" } else { "" };
    let mut lines = format!(
        "{:?}{unanswered} {} restarts {}{}{backlog}\n",
        report.kind,
        report.name,
        report.restarts,
        permits.collect::<String>()
    );
    for child in &report.children {
        lines.extend(shown(child).lines().map(|line| format!("  {line}\n")));
    }
    lines
}

#[tokio::test(start_paused = true)]
async fn the_actors_describe_themselves() {
    let fleet = Fleet::with(|options| (options.start_permits, options.connect_permits) = (3, 2)).await;
    let id = fleet.online(Server::new("notes").always_on()).await;
    let pid = fleet.pid(&id);
    fleet.server(&id).exit(1);
    fleet.until_replaced(&id, pid).await;
    let stuck =
        fleet.add(Server::new("stuck").script(SimScript { handshake_never: true, ..SimScript::default() })).await;
    fleet.runtime.panic(RuntimePart::Registry);
    let (runtime, call_id) = (fleet.runtime.clone(), stuck.clone());
    let call = tokio::spawn(async move { runtime.call(&call_id, "echo", None, None).await });
    let tree = loop {
        let tree = fleet.runtime.describe(seconds(1.0)).await;
        if tree.children.iter().any(|child| child.backlog == Some(1)) {
            break tree;
        }
        sleep(seconds(0.1)).await;
    };
    assert_eq!(
        shown(&tree),
        "Root root restarts 0 Processes 1+0/3 Connections 0+0/2\n  \
           Registry registry restarts 1\n  \
           Batcher batcher restarts 0\n  \
           Team acme restarts 0 Processes 1+0 backlog 1\n    \
             Worker files-acme-alice-notes restarts 1 Calls 0+0/1024\n    \
             Worker files-acme-alice-stuck restarts 0 Calls 0+0/1024\n"
    );
    assert!(tree.children[1].backlog.is_some(), "the queue of the batcher");
    assert_eq!(tree.children[2].team_id, Some(id.team.clone()));
    call.abort();
    fleet.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_probe_is_answered_only_while_every_actor_handles_its_messages() {
    let ((entered, blocked), (release, released)) =
        (std::sync::mpsc::sync_channel(8), std::sync::mpsc::sync_channel(8));
    let store = BlockingStore { entered, released: std::sync::Mutex::new(released) };
    let fleet = Fleet::with(|options| options.state_store = Arc::new(store)).await;
    let id = fleet.online(Server::new("notes").always_on()).await;
    assert!(fleet.runtime.answers(seconds(60.0)).await);
    let stopping = tokio::spawn({
        let (runtime, id) = (fleet.runtime.clone(), id.clone());
        async move { runtime.stop(&id).await }
    });
    tokio::task::spawn_blocking(move || blocked.recv().unwrap()).await.unwrap();
    assert!(!fleet.runtime.answers(seconds(0.02)).await);
    let tree = fleet.runtime.describe(seconds(0.02)).await;
    assert_eq!(shown(&tree), "Root? root restarts 0\n");
    for _ in 0..8 {
        release.send(()).unwrap();
    }
    assert!(fleet.runtime.answers(seconds(60.0)).await);
    stopping.await.unwrap().unwrap();
    fleet.runtime.kill();
}
