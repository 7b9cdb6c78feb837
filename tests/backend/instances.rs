//! How each instance is, and who follows it.

use futures::{Stream, StreamExt as _};
use mcp_satellite::backend::server::schema::MessageSchema;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::support::{GIVE_UP, SCHEMAS, Satellite, World, heartbeat, status};

/// One thing that a stream has told.
#[derive(Debug, PartialEq)]
struct Told {
    id: u64,
    what: String,
    instance: String,
    status: String,
}

fn told(instance: &str, status: &str) -> (String, String, String) {
    ("status".to_owned(), instance.to_owned(), status.to_owned())
}

struct Following<S> {
    chunks: S,
    text: String,
}

impl<S: Stream<Item = reqwest::Result<bytes::Bytes>> + Unpin> Following<S> {
    /// The next thing that is told; `None` at the end of the stream.
    async fn next(&mut self) -> Option<Told> {
        loop {
            if let Some((event, rest)) = self.text.clone().split_once("\n\n") {
                let field = |name: &str| event.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
                let (id, what, data) = (field("id: "), field("event: "), field("data: "));
                rest.clone_into(&mut self.text);
                let Some(data) = data else { continue };
                if what.as_deref() == Some("reset") {
                    assert_eq!((id, &*data), (None, "{}"));
                    return Some(Told {
                        id: 0,
                        what: "reset".to_owned(),
                        instance: String::new(),
                        status: String::new(),
                    });
                }
                let data: Value = serde_json::from_str(&data).unwrap();
                SCHEMAS.check(MessageSchema::Instance, &data).unwrap();
                let text = |name: &str| data[name].as_str().unwrap().to_owned();
                return Some(Told {
                    id: id.unwrap().parse().unwrap(),
                    what: what.unwrap(),
                    instance: text("instance"),
                    status: text("status"),
                });
            }
            let chunk = timeout(GIVE_UP, self.chunks.next()).await.unwrap();
            // A stream that breaks off has not ended.
            self.text.push_str(std::str::from_utf8(&chunk?.unwrap()).unwrap());
        }
    }

    async fn take(&mut self, count: usize) -> Vec<(String, String, String)> {
        let mut all = Vec::new();
        for _ in 0..count {
            let Told { what, instance, status, .. } = self.next().await.unwrap();
            all.push((what, instance, status));
        }
        all
    }
}

async fn follow(
    world: &World,
    query: &str,
    last: Option<u64>,
) -> Following<impl Stream<Item = reqwest::Result<bytes::Bytes>> + Unpin + use<>> {
    let asking = world.admin(Method::GET, &format!("instances/stream?{query}"));
    let asking = if let Some(last) = last { asking.header("Last-Event-ID", &last.to_string()) } else { asking };
    let response = asking.0.send().await.unwrap();
    assert_eq!(
        (response.status().as_u16(), &response.headers()["content-type"]),
        (200, &"text/event-stream".parse().unwrap())
    );
    Following { chunks: Box::pin(response.bytes_stream()), text: String::new() }
}

async fn send(world: &World, satellite: &Satellite, events: &[Value]) {
    let key = format!("{}-{}", events[0]["seq"], events[0]["timestamp"].as_str().unwrap());
    world.send(satellite, &key, events).await.is(200, MessageSchema::EventsTaken);
}

async fn statuses(world: &World, query: &str) -> Vec<(String, String)> {
    let found = world.admin(Method::GET, &format!("instances?{query}")).send().await.is(200, MessageSchema::Instances);
    let text = |of: &Value, name: &str| of[name].as_str().unwrap().to_owned();
    found["instances"].as_array().unwrap().iter().map(|one| (text(one, "instance"), text(one, "status"))).collect()
}

fn is(instance: &str, status: &str) -> (String, String) {
    (instance.to_owned(), status.to_owned())
}

/// An instance was uninstalled while it ran.
fn uninstalled(seq: u64, instance: &str) -> Value {
    let mut event = status(seq, instance, "offline");
    event["type"] = json!("mcp.server.stopped");
    let data = json!({"kind": "uninstall", "exit_code": 0, "signal": null, "forced": false});
    event["data"].as_object_mut().unwrap().extend(data.as_object().unwrap().clone());
    event
}

#[tokio::test]
async fn an_instance_is_what_its_satellite_has_told_last() {
    let world = World::new().await;
    let (one, other) = (world.satellite("first-satellite").await, world.satellite("second-satellite").await);
    send(&world, &one, &[status(1, "a", "connecting"), status(2, "b", "connecting"), status(3, "a", "online")]).await;
    send(&world, &other, &[status(1, "a", "error")]).await;
    assert_eq!(statuses(&world, "satellite=first-satellite").await, [is("a", "online"), is("b", "connecting")]);
    assert_eq!(statuses(&world, "satellite=second-satellite").await, [is("a", "error")]);
    assert_eq!(statuses(&world, "").await.len(), 3);
    assert!(statuses(&world, "user=user_bob").await.is_empty());
    assert_eq!(statuses(&world, "team=team_acme&instance=b").await, [is("b", "connecting")]);
    let a = world
        .admin(Method::GET, "satellites/first-satellite/instances/a")
        .send()
        .await
        .is(200, MessageSchema::Instance);
    assert_eq!((&a["seq"], &a["since"]), (&json!(3), &json!("2026-11-21T00:00:03Z")));
    assert_eq!((&a["server_slug"], &a["user_id"]), (&json!("files"), &json!("user_alice")));
    let satellites = world.admin(Method::GET, "satellites").send().await.is(200, MessageSchema::Satellites);
    assert_eq!(satellites["satellites"][0]["instances"], json!({"online": 1, "connecting": 1}));
}

#[tokio::test]
async fn what_comes_late_changes_nothing_and_neither_a_lost_journal_nor_a_clock_set_back_is_late() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    send(&world, &satellite, &[status(10, "a", "online")]).await;
    send(&world, &satellite, &[status(9, "a", "connecting")]).await;
    assert_eq!(statuses(&world, "").await, [is("a", "online")]);
    let mut set_back = status(11, "a", "offline");
    set_back["timestamp"] = json!("2020-01-01T00:00:00Z");
    send(&world, &satellite, &[set_back]).await;
    assert_eq!(statuses(&world, "").await, [is("a", "offline")]);
    let mut from_one = status(1, "a", "error");
    from_one["timestamp"] = json!("2026-11-22T00:00:00Z");
    send(&world, &satellite, &[from_one]).await;
    assert_eq!(statuses(&world, "").await, [is("a", "error")]);
}

#[tokio::test]
async fn an_instance_that_was_removed_is_not_listed() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    let all = [status(1, "a", "online"), status(2, "b", "online"), status(3, "c", "awaiting_user_config")];
    send(&world, &satellite, &all).await;
    send(&world, &satellite, &[uninstalled(4, "a")]).await;
    assert_eq!(statuses(&world, "").await, [is("b", "online"), is("c", "awaiting_user_config")]);
    // What is counted and not listed is there; so is what may still be on its way.
    let mut beat = heartbeat(world.now());
    let b =
        json!({"instance": "b", "installation_id": "abc123", "user_id": "user_alice", "status": "online", "pid": 4711});
    beat["processes_by_team"] = json!({"team_acme": [b]});
    for (counts, backlog, left) in [
        (json!({"online": 1, "awaiting_user_config": 1}), 0, 2),
        (json!({"online": 1}), 1, 2),
        (json!({"online": 1}), 0, 1),
    ] {
        beat["counts"] = counts;
        beat["events"]["backlog"] = json!(backlog);
        world.beat(&satellite, &beat).await.is(200, MessageSchema::Received);
        assert_eq!(statuses(&world, "").await.len(), left, "{beat}");
    }
    // What was told after the heartbeat was made is news.
    let mut new = status(5, "d", "provisioning");
    new["timestamp"] = json!("2026-11-21T06:33:01Z");
    send(&world, &satellite, &[new]).await;
    world.beat(&satellite, &beat).await.is(200, MessageSchema::Received);
    assert_eq!(statuses(&world, "").await, [is("b", "online"), is("d", "provisioning")]);
}

#[tokio::test]
async fn a_stream_begins_with_how_everything_is_and_goes_on_with_every_change() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    send(&world, &satellite, &[status(1, "a", "connecting"), status(2, "b", "online"), status(3, "a", "online")]).await;
    let mut stream = follow(&world, "", None).await;
    assert_eq!(stream.take(2).await, [told("b", "online"), told("a", "online")]);
    send(&world, &satellite, &[status(4, "a", "restarting"), status(5, "a", "connecting"), status(6, "a", "online")])
        .await;
    assert_eq!(stream.take(3).await, ["restarting", "connecting", "online"].map(|status| told("a", status)));
    send(&world, &satellite, &[uninstalled(7, "b")]).await;
    assert_eq!(stream.take(1).await, [("removed".to_owned(), "b".to_owned(), "online".to_owned())]);
    world.admin(Method::DELETE, "satellites/first-satellite").send().await.is(200, MessageSchema::Received);
    assert_eq!(stream.take(1).await, [("removed".to_owned(), "a".to_owned(), "online".to_owned())]);
}

#[tokio::test]
async fn who_comes_back_to_a_stream_misses_nothing_and_hears_nothing_twice() {
    let mut world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    send(&world, &satellite, &[status(1, "a", "connecting"), status(2, "b", "online")]).await;
    let mut stream = follow(&world, "", None).await;
    let last = stream.next().await.unwrap();
    assert_eq!(last.instance, "a");
    drop(stream);
    send(&world, &satellite, &[status(3, "a", "error"), status(4, "a", "online")]).await;
    let expected = [told("b", "online"), told("a", "error"), told("a", "online")];
    assert_eq!(follow(&world, "", Some(last.id)).await.take(3).await, expected);
    world.restart().await;
    assert_eq!(follow(&world, "", Some(last.id)).await.take(3).await, expected);
    // A number that no stream has told: everything is told as it is, to be taken for what was known.
    let reset = ("reset".to_owned(), String::new(), String::new());
    let anew = [reset.clone(), told("b", "online"), told("a", "online")];
    let mut stream = follow(&world, "", Some(999)).await;
    assert_eq!(stream.take(3).await, anew);
    send(&world, &satellite, &[status(5, "a", "offline")]).await;
    assert_eq!(stream.take(1).await, [told("a", "offline")]);
    // Also where there is nothing.
    assert_eq!(follow(&World::new().await, "", Some(7)).await.take(1).await, [reset]);
    let nonsense = world.admin(Method::GET, "instances/stream").header("Last-Event-ID", "x").send().await;
    nonsense.refused(400, "Last-Event-ID");
}

#[tokio::test]
async fn a_stream_tells_only_what_was_asked_for() {
    let world = World::new().await;
    let (one, other) = (world.satellite("first-satellite").await, world.satellite("second-satellite").await);
    let mut stream = follow(&world, "satellite=second-satellite&instance=b", None).await;
    send(&world, &one, &[status(1, "b", "online")]).await;
    send(&world, &other, &[status(1, "a", "online"), status(2, "b", "error")]).await;
    assert_eq!(stream.take(1).await, [told("b", "error")]);
    world.admin(Method::GET, "instances/stream?satellite=nobody").send().await.refused(404, "no such satellite");
}

#[tokio::test]
async fn instances_are_found_by_satellite_team_user_and_name() {
    let world = World::new().await;
    let (one, other) = (world.satellite("first-satellite").await, world.satellite("second-satellite").await);
    let of = |seq: u64, instance: &str, team: &str, user: &str| {
        let mut event = status(seq, instance, "online");
        (event["data"]["team_id"], event["data"]["user_id"]) = (team.into(), user.into());
        event
    };
    send(&world, &one, &[of(1, "b", "acme", "bob"), of(2, "a", "acme", "alice"), of(3, "c", "umbrella", "alice")])
        .await;
    send(&world, &other, &[of(1, "a", "umbrella", "carol")]).await;
    for (query, wanted) in [
        ("satellite=first-satellite", "abc"),
        ("team=acme", "ab"),
        ("user=alice", "ac"),
        ("instance=c", "c"),
        ("instance=a&team=acme", "a"),
        ("satellite=second-satellite&team=acme", ""),
        ("team=umbrella&user=carol", "a"),
        ("team=%27%20OR%201--", ""),
    ] {
        let found: String = statuses(&world, query).await.into_iter().map(|(instance, _)| instance).collect();
        assert_eq!(found, wanted, "{query}");
    }
    assert_eq!(statuses(&world, "").await.len(), 4);
}

#[tokio::test]
async fn many_changes_reach_many_followers_in_order() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    let mut streams = Vec::new();
    for _ in 0..5 {
        streams.push(follow(&world, "", Some(0)).await);
    }
    let statuses = ["connecting", "online", "offline", "error"];
    let all: Vec<Value> = (1..=1200).map(|seq| status(seq, "a", statuses[usize::try_from(seq).unwrap() % 4])).collect();
    for batch in all.chunks(100) {
        send(&world, &satellite, batch).await;
    }
    for stream in &mut streams {
        for (event, seen) in all.iter().zip(stream.take(all.len()).await) {
            assert_eq!(seen.2, event["data"]["status"].as_str().unwrap());
        }
    }
}

#[tokio::test]
async fn a_backend_that_ends_ends_its_streams() {
    let mut world = World::new().await;
    let mut stream = follow(&world, "", None).await;
    world.stop().await;
    assert_eq!(stream.next().await, None);
}
