//! Starts and dormancy while the machine is short of memory.

use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::memory::MemoryReading;
use testkit::fleet::{Fleet, Server, seconds};
use tokio::time::{Duration, sleep};

const SHORT: MemoryReading = MemoryReading { pressure_percent: Some(0.0), available_bytes: 1, total_bytes: 100 };
const ENOUGH: MemoryReading = MemoryReading { pressure_percent: Some(0.0), available_bytes: 50, total_bytes: 100 };

#[tokio::test(start_paused = true)]
async fn while_memory_is_short_one_server_starts_per_interval_called_ones_first() {
    let fleet = Fleet::start().await;
    fleet.runtime.observe_memory(SHORT);
    let (first, second, called) =
        (fleet.add(Server::new("a")).await, fleet.add(Server::new("b")).await, fleet.add(Server::new("c")).await);
    let calling = tokio::spawn({
        let (runtime, called) = (fleet.runtime.clone(), called.clone());
        async move { runtime.call(&called, "echo", None, Some(seconds(60.0))).await }
    });
    sleep(seconds(9.0)).await;
    fleet.runtime.observe_memory(SHORT);
    fleet.runtime.sync_snapshot().await;
    assert!(
        [&first, &second, &called].iter().all(|id| fleet.world.openings(id).is_empty()),
        "no server is started yet"
    );
    let status = fleet.runtime.memory();
    assert_eq!((status.is_short, status.starts_waiting, status.reading), (true, 3, Some(SHORT)));
    assert_eq!(fleet.view(&first).status, Status::CommandReceived);

    sleep(seconds(1.0)).await;
    fleet.runtime.observe_memory(SHORT);
    calling.await.unwrap().unwrap();
    sleep(seconds(5.0)).await;
    assert_eq!(fleet.world.openings(&called).len(), 1);
    assert!(
        fleet.world.openings(&first).is_empty() && fleet.world.openings(&second).is_empty(),
        "only the called server is started"
    );

    fleet.runtime.observe_memory(ENOUGH);
    fleet.until(&first, Status::Online).await;
    fleet.until(&second, Status::Online).await;
    assert!(!fleet.runtime.memory().is_short);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn the_longest_idle_server_falls_asleep_first_and_always_on_ones_stay() {
    let fleet = Fleet::start().await;
    let never = |server: Server| server.policy(|policy| policy.idle.idle = Duration::MAX);
    let (old, young) = (fleet.add(Server::new("old")).await, fleet.add(Server::new("young")).await);
    let staying = [fleet.add(never(Server::new("never"))).await, fleet.add(Server::new("on").always_on()).await];
    for id in [&old, &young, &staying[0], &staying[1]] {
        fleet.until(id, Status::Online).await;
    }
    sleep(seconds(30.0)).await;
    fleet.runtime.call(&young, "echo", None, None).await.unwrap();
    fleet.runtime.observe_memory(SHORT);
    fleet.until_view(&old, |view| view.dormant).await;
    assert!(!fleet.view(&young).dormant, "it was called recently");

    sleep(seconds(12.0)).await;
    fleet.runtime.observe_memory(SHORT);
    fleet.until_view(&young, |view| view.dormant).await;
    sleep(seconds(12.0)).await;
    fleet.runtime.observe_memory(SHORT);
    sleep(seconds(5.0)).await;
    for id in &staying {
        assert!(!fleet.view(id).dormant && fleet.view(id).pid.is_some(), "{id}");
    }
    let asleep = fleet.event_data(&old, "mcp.server.dormant").await;
    assert_eq!(asleep[0]["idle_duration_seconds"], 30);

    // A call wakes it as soon as starts are allowed again.
    fleet.runtime.observe_memory(ENOUGH);
    fleet.runtime.call(&old, "echo", None, None).await.unwrap();
    fleet.finish().await;
}
