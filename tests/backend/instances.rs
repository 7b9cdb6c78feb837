//! The status of instances, and the streams of its changes.

use futures::{Stream, StreamExt as _};
use mcp_satellite::backend::server::schema::MessageSchema;
use reqwest::Method;
use serde_json::{Value, json};
use testkit::wait::GIVE_UP;
use tokio::time::timeout;

use super::support::{SCHEMAS, Satellite, TestBackend, heartbeat, status};

#[derive(Debug, PartialEq)]
struct StreamEvent {
    id: u64,
    kind: String,
    instance: String,
    status: String,
}

fn status_event(instance: &str, status: &str) -> (String, String, String) {
    ("status".to_owned(), instance.to_owned(), status.to_owned())
}

struct EventStream<S> {
    chunks: S,
    text: String,
}

impl<S: Stream<Item = reqwest::Result<bytes::Bytes>> + Unpin> EventStream<S> {
    /// The next event; `None` at the end of the stream.
    async fn next(&mut self) -> Option<StreamEvent> {
        loop {
            if let Some((event, rest)) = self.text.clone().split_once("\n\n") {
                let field = |name: &str| event.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
                let (id, kind, data) = (field("id: "), field("event: "), field("data: "));
                rest.clone_into(&mut self.text);
                let Some(data) = data else { continue };
                if kind.as_deref() == Some("reset") {
                    assert_eq!((id, &*data), (None, "{}"));
                    return Some(StreamEvent {
                        id: 0,
                        kind: "reset".to_owned(),
                        instance: String::new(),
                        status: String::new(),
                    });
                }
                let data: Value = serde_json::from_str(&data).unwrap();
                SCHEMAS.check(MessageSchema::Instance, &data).unwrap();
                let text = |name: &str| data[name].as_str().unwrap().to_owned();
                return Some(StreamEvent {
                    id: id.unwrap().parse().unwrap(),
                    kind: kind.unwrap(),
                    instance: text("instance"),
                    status: text("status"),
                });
            }
            let chunk = timeout(GIVE_UP, self.chunks.next()).await.unwrap();
            // A broken connection is an error, not the end of the stream.
            self.text.push_str(std::str::from_utf8(&chunk?.unwrap()).unwrap());
        }
    }

    async fn take(&mut self, count: usize) -> Vec<(String, String, String)> {
        let mut all = Vec::new();
        for _ in 0..count {
            let StreamEvent { kind, instance, status, .. } = self.next().await.unwrap();
            all.push((kind, instance, status));
        }
        all
    }
}

async fn follow(
    backend: &TestBackend,
    query: &str,
    last: Option<u64>,
) -> EventStream<impl Stream<Item = reqwest::Result<bytes::Bytes>> + Unpin + use<>> {
    let request = backend.admin(Method::GET, &format!("instances/stream?{query}"));
    let request = if let Some(last) = last { request.header("Last-Event-ID", &last.to_string()) } else { request };
    let response = request.0.send().await.unwrap();
    assert_eq!(
        (response.status().as_u16(), &response.headers()["content-type"]),
        (200, &"text/event-stream".parse().unwrap())
    );
    EventStream { chunks: Box::pin(response.bytes_stream()), text: String::new() }
}

async fn send(backend: &TestBackend, satellite: &Satellite, events: &[Value]) {
    let key = format!("{}-{}", events[0]["seq"], events[0]["timestamp"].as_str().unwrap());
    backend.send(satellite, &key, events).await.is(200, MessageSchema::EventBatchResult);
}

async fn statuses(backend: &TestBackend, query: &str) -> Vec<(String, String)> {
    let found =
        backend.admin(Method::GET, &format!("instances?{query}")).send().await.is(200, MessageSchema::Instances);
    let text = |of: &Value, name: &str| of[name].as_str().unwrap().to_owned();
    found["instances"].as_array().unwrap().iter().map(|one| (text(one, "instance"), text(one, "status"))).collect()
}

fn status_of(instance: &str, status: &str) -> (String, String) {
    (instance.to_owned(), status.to_owned())
}

/// The event of a running instance that was uninstalled.
fn uninstalled(seq: u64, instance: &str) -> Value {
    let mut event = status(seq, instance, "offline");
    event["type"] = json!("mcp.server.stopped");
    let data = json!({"kind": "uninstall", "exit_code": 0, "signal": null, "forced": false});
    event["data"].as_object_mut().unwrap().extend(data.as_object().unwrap().clone());
    event
}

#[tokio::test]
async fn an_instance_has_the_status_of_the_last_event() {
    let backend = TestBackend::new().await;
    let (one, other) = (backend.satellite("first-satellite").await, backend.satellite("second-satellite").await);
    send(&backend, &one, &[status(1, "a", "connecting"), status(2, "b", "connecting"), status(3, "a", "online")]).await;
    send(&backend, &other, &[status(1, "a", "error")]).await;
    assert_eq!(
        statuses(&backend, "satellite=first-satellite").await,
        [status_of("a", "online"), status_of("b", "connecting")]
    );
    assert_eq!(statuses(&backend, "satellite=second-satellite").await, [status_of("a", "error")]);
    assert_eq!(statuses(&backend, "").await.len(), 3);
    assert!(statuses(&backend, "user=user_bob").await.is_empty());
    assert_eq!(statuses(&backend, "team=team_acme&instance=b").await, [status_of("b", "connecting")]);
    let a = backend
        .admin(Method::GET, "satellites/first-satellite/instances/a")
        .send()
        .await
        .is(200, MessageSchema::Instance);
    assert_eq!((&a["seq"], &a["since"]), (&json!(3), &json!("2026-11-21T00:00:03Z")));
    assert_eq!((&a["server_slug"], &a["user_id"]), (&json!("files"), &json!("user_alice")));
    let satellites = backend.admin(Method::GET, "satellites").send().await.is(200, MessageSchema::Satellites);
    assert_eq!(satellites["satellites"][0]["instances"], json!({"online": 1, "connecting": 1}));
}

#[tokio::test]
async fn late_events_change_nothing_but_a_new_journal_or_an_earlier_clock_is_not_late() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    send(&backend, &satellite, &[status(10, "a", "online")]).await;
    send(&backend, &satellite, &[status(9, "a", "connecting")]).await;
    assert_eq!(statuses(&backend, "").await, [status_of("a", "online")]);
    let mut set_back = status(11, "a", "offline");
    set_back["timestamp"] = json!("2020-01-01T00:00:00Z");
    send(&backend, &satellite, &[set_back]).await;
    assert_eq!(statuses(&backend, "").await, [status_of("a", "offline")]);
    let mut from_one = status(1, "a", "error");
    from_one["timestamp"] = json!("2026-11-22T00:00:00Z");
    send(&backend, &satellite, &[from_one]).await;
    assert_eq!(statuses(&backend, "").await, [status_of("a", "error")]);
}

#[tokio::test]
async fn a_removed_instance_is_not_listed() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    let all = [status(1, "a", "online"), status(2, "b", "online"), status(3, "c", "awaiting_user_config")];
    send(&backend, &satellite, &all).await;
    send(&backend, &satellite, &[uninstalled(4, "a")]).await;
    assert_eq!(statuses(&backend, "").await, [status_of("b", "online"), status_of("c", "awaiting_user_config")]);
    // A counted instance exists even if it has no process, and events may still be on their way.
    let mut beat = heartbeat(backend.now());
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
        backend.send_heartbeat(&satellite, &beat).await.is(200, MessageSchema::EmptyResponse);
        assert_eq!(statuses(&backend, "").await.len(), left, "{beat}");
    }
    // An event newer than the heartbeat is not affected by it.
    let mut new = status(5, "d", "provisioning");
    new["timestamp"] = json!("2026-11-21T06:33:01Z");
    send(&backend, &satellite, &[new]).await;
    backend.send_heartbeat(&satellite, &beat).await.is(200, MessageSchema::EmptyResponse);
    assert_eq!(statuses(&backend, "").await, [status_of("b", "online"), status_of("d", "provisioning")]);
}

#[tokio::test]
async fn a_stream_starts_with_the_current_statuses_and_continues_with_changes() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    send(&backend, &satellite, &[status(1, "a", "connecting"), status(2, "b", "online"), status(3, "a", "online")])
        .await;
    let mut stream = follow(&backend, "", None).await;
    assert_eq!(stream.take(2).await, [status_event("b", "online"), status_event("a", "online")]);
    send(&backend, &satellite, &[status(4, "a", "restarting"), status(5, "a", "connecting"), status(6, "a", "online")])
        .await;
    assert_eq!(stream.take(3).await, ["restarting", "connecting", "online"].map(|status| status_event("a", status)));
    send(&backend, &satellite, &[uninstalled(7, "b")]).await;
    assert_eq!(stream.take(1).await, [("removed".to_owned(), "b".to_owned(), "online".to_owned())]);
    backend.admin(Method::DELETE, "satellites/first-satellite").send().await.is(200, MessageSchema::EmptyResponse);
    assert_eq!(stream.take(1).await, [("removed".to_owned(), "a".to_owned(), "online".to_owned())]);
}

#[tokio::test]
async fn a_resumed_stream_neither_misses_nor_repeats_events() {
    let mut backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    send(&backend, &satellite, &[status(1, "a", "connecting"), status(2, "b", "online")]).await;
    let mut stream = follow(&backend, "", None).await;
    let last = stream.next().await.unwrap();
    assert_eq!(last.instance, "a");
    drop(stream);
    send(&backend, &satellite, &[status(3, "a", "error"), status(4, "a", "online")]).await;
    let expected = [status_event("b", "online"), status_event("a", "error"), status_event("a", "online")];
    assert_eq!(follow(&backend, "", Some(last.id)).await.take(3).await, expected);
    backend.restart().await;
    assert_eq!(follow(&backend, "", Some(last.id)).await.take(3).await, expected);
    // After an unknown id the stream starts again: a reset and the current statuses.
    let reset = ("reset".to_owned(), String::new(), String::new());
    let anew = [reset.clone(), status_event("b", "online"), status_event("a", "online")];
    let mut stream = follow(&backend, "", Some(999)).await;
    assert_eq!(stream.take(3).await, anew);
    send(&backend, &satellite, &[status(5, "a", "offline")]).await;
    assert_eq!(stream.take(1).await, [status_event("a", "offline")]);
    // The reset comes even without instances.
    assert_eq!(follow(&TestBackend::new().await, "", Some(7)).await.take(1).await, [reset]);
    let nonsense = backend.admin(Method::GET, "instances/stream").header("Last-Event-ID", "x").send().await;
    nonsense.refused(400, "Last-Event-ID");
}

#[tokio::test]
async fn a_stream_contains_only_the_requested_instances() {
    let backend = TestBackend::new().await;
    let (one, other) = (backend.satellite("first-satellite").await, backend.satellite("second-satellite").await);
    let mut stream = follow(&backend, "satellite=second-satellite&instance=b", None).await;
    send(&backend, &one, &[status(1, "b", "online")]).await;
    send(&backend, &other, &[status(1, "a", "online"), status(2, "b", "error")]).await;
    assert_eq!(stream.take(1).await, [status_event("b", "error")]);
    backend.admin(Method::GET, "instances/stream?satellite=nobody").send().await.refused(404, "no such satellite");
}

#[tokio::test]
async fn instances_can_be_filtered_by_satellite_team_user_and_name() {
    let backend = TestBackend::new().await;
    let (one, other) = (backend.satellite("first-satellite").await, backend.satellite("second-satellite").await);
    let of = |seq: u64, instance: &str, team: &str, user: &str| {
        let mut event = status(seq, instance, "online");
        (event["data"]["team_id"], event["data"]["user_id"]) = (team.into(), user.into());
        event
    };
    send(&backend, &one, &[of(1, "b", "acme", "bob"), of(2, "a", "acme", "alice"), of(3, "c", "umbrella", "alice")])
        .await;
    send(&backend, &other, &[of(1, "a", "umbrella", "carol")]).await;
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
        let found: String = statuses(&backend, query).await.into_iter().map(|(instance, _)| instance).collect();
        assert_eq!(found, wanted, "{query}");
    }
    assert_eq!(statuses(&backend, "").await.len(), 4);
}

#[tokio::test]
async fn many_changes_reach_many_streams_in_order() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    let mut streams = Vec::new();
    for _ in 0..5 {
        streams.push(follow(&backend, "", Some(0)).await);
    }
    let statuses = ["connecting", "online", "offline", "error"];
    let all: Vec<Value> = (1..=1200).map(|seq| status(seq, "a", statuses[usize::try_from(seq).unwrap() % 4])).collect();
    for batch in all.chunks(100) {
        send(&backend, &satellite, batch).await;
    }
    for stream in &mut streams {
        for (event, seen) in all.iter().zip(stream.take(all.len()).await) {
            assert_eq!(seen.2, event["data"]["status"].as_str().unwrap());
        }
    }
}

#[tokio::test]
async fn a_backend_ends_its_streams_when_it_stops() {
    let mut backend = TestBackend::new().await;
    let mut stream = follow(&backend, "", None).await;
    backend.stop().await;
    assert_eq!(stream.next().await, None);
}
