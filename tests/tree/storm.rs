//! Storms of crashes and starts: permits and budgets hold, and teams do not affect each other.

use std::time::Duration;

use futures::future::join_all;
use mcp_satellite::connect::sim::SimScript;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::status::Status;
use serde_json::json;
use testkit::fleet::{Fleet, Server, exits, seconds, tenths};
use tokio::time::{Instant, sleep};

fn answering_after(delay: f64) -> SimScript {
    SimScript { handshake_delay: seconds(delay), ..SimScript::default() }
}

/// Waits until all of these are online after this number of restarts.
async fn until_all_online(fleet: &Fleet, ids: &[InstanceId], restarts: u64) {
    let began = Instant::now();
    loop {
        let snapshot = fleet.runtime.snapshot();
        let back = |id: &&InstanceId| {
            snapshot.get(id).is_some_and(|view| view.status == Status::Online && view.restarts == restarts)
        };
        let count = ids.iter().filter(back).count();
        if count == ids.len() {
            return;
        }
        assert!(began.elapsed() < seconds(3600.0), "only {count} of {} came back", ids.len());
        sleep(seconds(0.1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn three_thousand_crashed_servers_restart_within_the_start_permits() {
    let fleet = Fleet::with(|options| {
        options.start_permits = 16;
        options.team_budget.max_exits = 1000;
        options.batch.queue_max = 200_000;
    })
    .await;
    let mut ids = Vec::new();
    for nth in 0..3000 {
        let (team, name) = (format!("team{}", nth % 30), format!("s{nth}"));
        ids.push(fleet.add(Server::of(&team, &name).script(answering_after(0.02))).await);
    }
    until_all_online(&fleet, &ids, 0).await;
    assert_eq!(fleet.world.take_starting_max("team0").0, 16, "the permits limit the first starts, too");
    for id in &ids {
        fleet.server(id).signal(9);
    }
    until_all_online(&fleet, &ids, 1).await;
    assert_eq!(fleet.world.take_starting_max("team0").0, 16, "as many starts at once as permits");
    assert!(ids.iter().all(|id| fleet.world.openings(id).len() == 2));
    assert_eq!(fleet.world.sim.alive_count(), 3000);
    let answers = join_all(ids.iter().step_by(100).map(|id| fleet.call(id, "add", json!({"a": 1, "b": 1})))).await;
    assert!(answers.iter().all(Result::is_ok));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn in_a_storm_no_server_starts_beyond_its_crash_limit() {
    let fleet = Fleet::start().await;
    let mut ids = Vec::new();
    for nth in 0..300 {
        let (team, name) = (format!("team{}", nth % 30), format!("s{nth}"));
        ids.push(fleet.add(Server::of(&team, &name).script(exits(0.5, 1))).await);
    }
    for id in &ids {
        fleet.until(id, Status::PermanentlyFailed).await;
    }
    sleep(seconds(3600.0)).await;
    assert!(ids.iter().all(|id| fleet.world.openings(id).len() == 3));
    fleet.finish().await;
}

/// Returns how long ten crashed servers of a calm team take to recover beside `noisy` crashed servers of another team.
async fn calm_recovery_time(noisy: usize) -> Duration {
    let fleet = Fleet::start().await;
    let add = |team: &'static str, count| {
        let servers = (0..count).map(move |nth| Server::of(team, &format!("s{nth}")).script(answering_after(0.2)));
        join_all(servers.map(|server| fleet.add(server)))
    };
    let (noisy, calm) = (add("noisy", noisy).await, add("calm", 10).await);
    until_all_online(&fleet, &noisy, 0).await;
    until_all_online(&fleet, &calm, 0).await;
    fleet.world.take_starting_max("noisy");
    let began = Instant::now();
    for id in noisy.iter().chain(&calm) {
        fleet.server(id).exit(1);
    }
    until_all_online(&fleet, &calm, 1).await;
    let took = began.elapsed();
    until_all_online(&fleet, &noisy, 1).await;
    if !noisy.is_empty() {
        assert_eq!(fleet.world.take_starting_max("noisy").1, 1, "a team over its budget starts one server at a time");
        assert!(began.elapsed() > seconds(0.2 * 70.0));
        sleep(seconds(60.0)).await;
        let events = fleet.events().await;
        let events: Vec<_> = events.iter().map(|event| serde_json::to_value(event).unwrap()).collect();
        let of_kind = |kind: &str| events.iter().filter(|event| event["type"] == kind).collect::<Vec<_>>();
        let (throttled, unthrottled) = (of_kind("mcp.team.throttled"), of_kind("mcp.team.unthrottled"));
        assert_eq!((throttled.len(), unthrottled.len()), (1, 1));
        let data = json!({"team_id": "noisy", "exits_in_window": 61, "window_seconds": 60});
        assert_eq!(throttled[0]["data"], data);
        assert_eq!(unthrottled[0]["data"]["team_id"], "noisy");

        for id in &noisy[..20] {
            fleet.server(id).exit(1);
        }
        until_all_online(&fleet, &noisy[..20], 2).await;
        assert!(fleet.world.take_starting_max("noisy").1 > 1, "the throttling has ended");
    }
    fleet.finish().await;
    took
}

#[tokio::test(start_paused = true)]
async fn a_team_over_its_budget_is_throttled_without_delaying_other_teams() {
    let alone = calm_recovery_time(0).await;
    let beside = calm_recovery_time(70).await;
    assert_eq!(tenths(beside), tenths(alone));
}

#[tokio::test(start_paused = true)]
async fn hanging_handshakes_delay_other_starts_by_at_most_two_seconds() {
    let fleet = Fleet::with(|options| options.start_permits = 4).await;
    let mute = SimScript { handshake_never: true, ..SimScript::default() };
    for nth in 0..4 {
        let id = fleet.add(Server::new(&format!("mute{nth}")).script(mute.clone())).await;
        fleet.world.until_openings(&id, 1).await;
    }
    let began = Instant::now();
    let healthy = fleet.online(Server::of("other", "healthy")).await;
    assert!((1.5..=2.0).contains(&tenths(began.elapsed())), "{:?}", began.elapsed());
    assert_eq!(fleet.world.openings(&healthy).len(), 1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_called_server_starts_before_uncalled_ones() {
    let fleet = Fleet::with(|options| options.start_permits = 1).await;
    let asleep = fleet.online(Server::new("asleep").plans([exits(1.0, 0).into(), SimScript::default().into()])).await;
    fleet.until_view(&asleep, |view| view.dormant).await;
    sleep(seconds(10.0)).await;
    let servers = (0..10).map(|nth| Server::of("other", &format!("s{nth}")).script(answering_after(1.0)));
    let ids = join_all(servers.map(|server| fleet.add(server))).await;
    fleet.world.until_openings(&ids[0], 1).await;
    let began = Instant::now();
    fleet.call(&asleep, "echo", json!({"text": 1})).await.unwrap();
    assert!(began.elapsed() < seconds(1.1), "{:?}", began.elapsed());
    until_all_online(&fleet, &ids, 0).await;
    assert!(began.elapsed() > seconds(9.0));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_called_during_its_restart_delay_starts_before_uncalled_ones() {
    let fleet = Fleet::with(|options| options.start_permits = 1).await;
    let id = fleet.online(Server::new("called").plans([exits(1.0, 1).into(), SimScript::default().into()])).await;
    fleet.until(&id, Status::Connecting).await;
    let servers = (0..10).map(|nth| Server::new(&format!("s{nth}")).script(answering_after(1.0)));
    let ids = join_all(servers.map(|server| fleet.add(server))).await;
    fleet.world.until_openings(&ids[0], 1).await;
    let began = Instant::now();
    fleet.call(&id, "echo", json!({"text": 1})).await.unwrap();
    assert!(began.elapsed() < seconds(2.1), "{:?}", began.elapsed());
    until_all_online(&fleet, &ids, 0).await;
    assert!(began.elapsed() > seconds(9.0));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_a_throttled_team_does_not_end_its_throttling() {
    let fleet = Fleet::with(|options| options.team_budget.max_exits = 5).await;
    let servers = (0..6).map(|nth| Server::new(&format!("s{nth}")).script(answering_after(0.2)));
    let ids = join_all(servers.map(|server| fleet.add(server))).await;
    until_all_online(&fleet, &ids, 0).await;
    for id in &ids {
        fleet.server(id).exit(1);
    }
    until_all_online(&fleet, &ids, 1).await;
    fleet.world.take_starting_max("acme");
    fleet.runtime.panic(mcp_satellite_actors::RuntimePart::Team("acme".into()));
    until_all_online(&fleet, &ids, 2).await;
    assert_eq!(fleet.world.take_starting_max("acme").1, 1, "still one start at a time");
    sleep(seconds(60.0)).await;
    let events = fleet.events().await;
    let count = |kind: &str| events.iter().filter(|envelope| envelope.event.kind() == kind).count();
    assert_eq!((count("mcp.team.throttled"), count("mcp.team.unthrottled")), (1, 1));
    for id in &ids[..3] {
        fleet.server(id).exit(1);
    }
    until_all_online(&fleet, &ids[..3], 3).await;
    assert!(fleet.world.take_starting_max("acme").1 > 1, "the throttling has ended");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn the_wait_for_a_permit_does_not_count_as_handshake_time() {
    let fleet = Fleet::with(|options| options.start_permits = 1).await;
    let servers = (0..40).map(|nth| Server::new(&format!("s{nth}")).script(answering_after(1.5)));
    let ids = join_all(servers.map(|server| fleet.add(server))).await;
    until_all_online(&fleet, &ids, 0).await;
    assert!(ids.iter().all(|id| fleet.world.openings(id).len() == 1), "the last one waited for a minute");
    fleet.finish().await;
}
