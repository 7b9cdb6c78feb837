//! What is said before an answer, beside it and without one; and what becomes of a call whose client goes away.

use std::net::SocketAddr;

use rustix::fd::OwnedFd;
use rustix::net::sockopt;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use serde_json::json;
use tokio::time::{Duration, timeout};

use super::client::{Client, notification, request};
use super::fake::{Seen, Stage};
use super::whole::GIVE_UP;

#[tokio::test]
async fn what_is_said_before_the_answer_makes_it_a_stream() {
    let stage = Stage::new(|_| {});
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    client.open("POST", &[], &request(5, "chat", json!("x")).to_string()).await;
    let priming = client.event().await.unwrap();
    assert_eq!((priming.data.as_str(), priming.retry), ("", Some(1000)));
    assert_eq!(client.event().await.unwrap().json()["params"], "first");
    let answer = client.event().await.unwrap();
    assert_eq!(answer.json(), json!({"jsonrpc": "2.0", "id": 5, "result": "x"}));
    assert_eq!(client.event().await, None);
    // The connection is good for another request.
    assert_eq!(client.post(&request(6, "echo", json!(1))).await.head.status, 200);
    // What is over is over.
    let mut late = client.again().await;
    assert_eq!(late.ask("GET", &[("last-event-id", &answer.id)], "").await.head.status, 405);
}

#[tokio::test]
async fn an_older_client_gets_no_event_without_data() {
    let stage = Stage::new(|_| {});
    let mut client = Client::initialized(stage.address, "2025-06-18").await;
    client.open("POST", &[], &request(5, "chat", json!("x")).to_string()).await;
    assert_eq!(client.event().await.unwrap().json()["params"], "first");
}

#[tokio::test]
async fn a_client_that_takes_only_json_hears_the_rest_on_its_get() {
    let stage = Stage::new(|_| {});
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    let mut get = client.again().await;
    get.open("GET", &[], "").await;
    assert_eq!(get.event().await.unwrap().id, "0-0");
    let chat = request(5, "chat", json!("x")).to_string();
    let answer = client.ask("POST", &[("accept", "application/json")], &chat).await;
    assert_eq!(answer.json()["result"], "x");
    let event = get.event().await.unwrap();
    assert_eq!((event.id.as_str(), event.json()["params"].as_str()), ("0-1", Some("first")));
}

#[tokio::test]
async fn a_client_that_takes_only_streams_gets_one() {
    let stage = Stage::new(|_| {});
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    let echo = request(5, "echo", json!("x")).to_string();
    client.open("POST", &[("accept", "text/event-stream")], &echo).await;
    client.event().await.unwrap();
    assert_eq!(client.event().await.unwrap().json()["result"], "x");
    assert_eq!(client.event().await, None);
}

#[tokio::test]
async fn what_nobody_hears_waits_and_the_newest_listener_gets_it() {
    let mut stage = Stage::new(|_| {});
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    client.post(&notification("shout", json!([3, 0]))).await;
    stage.saw(Seen::Told("shout".into())).await;
    let mut first = client.again().await;
    first.open("GET", &[], "").await;
    let ids: Vec<_> = [first.event().await, first.event().await, first.event().await, first.event().await]
        .map(|event| event.unwrap().id)
        .into();
    assert_eq!(ids, ["0-0", "0-1", "0-2", "0-3"]);
    let mut second = client.again().await;
    second.open("GET", &[("last-event-id", "0-1")], "").await;
    assert_eq!(first.event().await, None, "another has its place");
    assert_eq!(second.event().await.unwrap().id, "0-2");
    assert_eq!(second.event().await.unwrap().id, "0-3");
    client.post(&notification("shout", json!([1, 0]))).await;
    assert_eq!(second.event().await.unwrap().id, "0-4");
}

#[tokio::test]
async fn a_client_that_goes_away_before_anything_was_said_cancels_its_call() {
    let mut stage = Stage::new(|_| {});
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    client.send("POST", &[], &request(5, "hold", json!("x")).to_string()).await;
    stage.saw(Seen::Asked("hold".into())).await;
    drop(client);
    stage.saw(Seen::Cancelled("hold".into())).await;
}

#[tokio::test]
async fn a_client_that_could_come_back_and_does_not_cancels_its_call() {
    let mut stage = Stage::new(|settings| settings.limits.resume_grace = Duration::from_millis(50));
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    client.open("POST", &[], &request(5, "talk", json!("x")).to_string()).await;
    assert_eq!(client.event().await.unwrap().id, "1-0");
    drop(client);
    stage.saw(Seen::Cancelled("talk".into())).await;
}

#[tokio::test]
async fn a_client_that_comes_back_gets_its_answer() {
    let mut stage = Stage::new(|_| {});
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    let mut back = client.again().await;
    client.open("POST", &[], &request(5, "talk", json!("x")).to_string()).await;
    client.event().await.unwrap();
    let first = client.event().await.unwrap();
    drop(client);
    back.open("GET", &[("last-event-id", &first.id)], "").await;
    stage.release.add_permits(1);
    let answer = back.event().await.unwrap();
    assert_eq!((answer.id.as_str(), answer.json()["id"].as_u64()), ("1-2", Some(5)));
    assert_eq!(back.event().await, None);
    assert!(std::iter::from_fn(|| stage.seen.try_recv().ok()).all(|seen| seen != Seen::Cancelled("talk".into())));
}

#[tokio::test]
async fn a_client_takes_its_request_back_and_its_stream_ends_without_an_answer() {
    let mut stage = Stage::new(|_| {});
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    let mut other = client.again().await;
    for (id, method) in [(5, "talk"), (6, "hold")] {
        client.send("POST", &[], &request(id, method, json!("x")).to_string()).await;
        stage.saw(Seen::Asked(method.into())).await;
        assert_eq!(
            other.post(&notification("notifications/cancelled", json!({"requestId": id}))).await.head.status,
            202
        );
        stage.saw(Seen::Withdrawn(id.to_string())).await;
        let head = client.head().await;
        assert!(head.status == 200 && head.is_stream(), "{head:?}");
        assert!(!client.body(&head).await.contains("result"));
    }
    // What nobody knows of goes the way of any notification.
    other.post(&notification("notifications/cancelled", json!({"requestId": 99}))).await;
    stage.saw(Seen::Told("notifications/cancelled".into())).await;
}

#[tokio::test]
async fn an_id_is_used_once_at_a_time() {
    let mut stage = Stage::new(|_| {});
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    let mut other = client.again().await;
    client.send("POST", &[], &request(5, "hold", json!("x")).to_string()).await;
    stage.saw(Seen::Asked("hold".into())).await;
    assert_eq!(other.post(&request(5, "echo", json!(1))).await.head.status, 400);
    stage.release.add_permits(1);
    assert_eq!(client.head().await.status, 200);
    assert_eq!(other.post(&request(5, "echo", json!(1))).await.head.status, 200);
}

#[tokio::test]
async fn a_batch_is_answered_in_one_where_the_version_has_batches() {
    let stage = Stage::new(|_| {});
    let mut client = Client::initialized(stage.address, "2025-03-26").await;
    let batch = json!([request(1, "echo", json!("a")), notification("n", json!({})), request(2, "echo", json!("b"))]);
    let answer = client.post(&batch).await;
    let expected = json!([{"jsonrpc": "2.0", "id": 1, "result": "a"}, {"jsonrpc": "2.0", "id": 2, "result": "b"}]);
    assert_eq!((answer.head.status, answer.json()), (200, expected));
    assert_eq!(client.post(&json!([notification("n", json!({}))])).await.head.status, 202);
    let mut newer = Client::initialized(stage.address, "2025-06-18").await;
    assert_eq!(newer.post(&batch).await.head.status, 400);
}

/// The other side of a client's connection, which is in this process, too.
fn server_side(of: &Client) -> OwnedFd {
    let this = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    let fds =
        std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let copies = fds.filter_map(|fd: i32| pidfd_getfd(&this, fd, PidfdGetfdFlags::empty()).ok());
    let is_it = |copy: &OwnedFd| {
        let peer = rustix::net::getpeername(copy).ok().flatten();
        peer.and_then(|peer| SocketAddr::try_from(peer).ok()) == Some(of.own)
    };
    copies.into_iter().find(is_it).unwrap()
}

#[tokio::test]
async fn what_is_written_is_sent_at_once_and_a_connection_without_a_peer_is_found() {
    let stage = Stage::new(|_| {});
    let client = Client::initialized(stage.address, "2025-11-25").await;
    let socket = server_side(&client);
    assert!(sockopt::tcp_nodelay(&socket).unwrap());
    assert!(sockopt::socket_keepalive(&socket).unwrap());
    assert_eq!(sockopt::tcp_keepidle(&socket).unwrap(), Duration::from_secs(60));
    assert_eq!(sockopt::tcp_user_timeout(&socket).unwrap(), 60_000);
}

#[tokio::test]
async fn a_request_without_an_answer_becomes_a_stream_that_is_never_silent_for_long() {
    let stage = Stage::new(|settings| {
        (settings.sse_after, settings.keep_alive) = (Duration::from_millis(10), Duration::from_millis(10));
    });
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    client.open("POST", &[], &request(5, "hold", json!("x")).to_string()).await;
    assert_eq!(client.event().await.unwrap().id, "1-0");
    for _ in 0..3 {
        assert_eq!(client.chunk().await.unwrap(), b":\n\n");
    }
    stage.release.add_permits(1);
    assert_eq!(client.event().await.unwrap().json()["result"], "x");
    assert_eq!(client.event().await, None);
}

#[tokio::test]
async fn a_client_that_does_not_read_is_ended_and_holds_nobody_up() {
    let mut stage = Stage::new(|settings| settings.limits.session_idle = Duration::from_millis(200));
    let slow = Client::initialized(stage.address, "2025-11-25").await;
    let mut deaf = slow.again().await;
    deaf.open("GET", &[], "").await;
    let mut other = Client::initialized(stage.address, "2025-11-25").await;
    let mut hears = other.again().await;
    hears.open("GET", &[], "").await;
    hears.event().await.unwrap();
    // Much more than the kernel keeps for a reader, and than we do.
    let shout = notification("shout", json!([64, 1 << 20]));
    let mut shouts = slow.again().await;
    assert_eq!(shouts.post(&shout).await.head.status, 202);
    for number in 1..=3 {
        assert_eq!(other.post(&notification("shout", json!([1, 0]))).await.head.status, 202);
        assert_eq!(hears.event().await.unwrap().id, format!("0-{number}"));
    }
    stage.saw(Seen::Ended("slow")).await;
    assert_eq!((slow.again().await.echo().await, other.echo().await), (404, 200));
}

#[tokio::test]
async fn a_client_that_has_sent_more_before_it_goes_away_cancels_its_call_all_the_same() {
    let mut stage = Stage::new(|settings| {
        (settings.sse_after, settings.keep_alive) = (Duration::from_millis(10), Duration::from_millis(10));
        settings.limits.resume_grace = Duration::from_millis(10);
    });
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    client.send("POST", &[], &request(5, "hold", json!("x")).to_string()).await;
    stage.saw(Seen::Asked("hold".into())).await;
    client.send("POST", &[], &request(6, "echo", json!("x")).to_string()).await;
    drop(client);
    stage.saw(Seen::Cancelled("hold".into())).await;
}

#[tokio::test]
async fn messages_of_all_clients_together_have_so_much_room() {
    let mut stage = Stage::new(|settings| (settings.limits.body_max, settings.limits.bodies_max) = (2000, 2000));
    let mut first = Client::initialized(stage.address, "2025-11-25").await;
    let mut second = Client::initialized(stage.address, "2025-11-25").await;
    let large = |method| request(5, method, json!("x".repeat(1200))).to_string();
    first.send("POST", &[], &large("hold")).await;
    stage.saw(Seen::Asked("hold".into())).await;
    let answer = second.ask("POST", &[], &large("echo")).await;
    assert_eq!((answer.head.status, answer.head.header("retry-after")), (503, Some("1")));
    let why = "requests in progress use all memory for messages; send this one again in a moment";
    assert_eq!(answer.json()["error"]["message"], why);
    // What was announced takes no room before it is there.
    let mut announces = second.again().await;
    announces.send("POST", &[("content-length", "700")], "{").await;
    second = second.again().await;
    assert_eq!(second.echo().await, 200, "a small one finds room");
    stage.release.add_permits(1);
    assert_eq!(first.head().await.status, 200);
    assert_eq!(second.ask("POST", &[], &large("echo")).await.head.status, 200);
}

#[tokio::test]
async fn without_room_nothing_is_kept_for_who_does_not_listen() {
    let mut stage = Stage::new(|settings| settings.limits.streams_max = 100);
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    client.post(&notification("shout", json!([10, 100]))).await;
    stage.saw(Seen::Told("shout".into())).await;
    let mut get = client.again().await;
    get.open("GET", &[], "").await;
    assert_eq!(get.event().await.unwrap().id, "0-10");
    client.post(&notification("shout", json!([1, 100]))).await;
    assert_eq!(get.event().await.unwrap().id, "0-11");
}

#[tokio::test]
async fn what_is_said_at_once_before_the_stream_begins_arrives_whole() {
    let stage = Stage::new(|_| {});
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    client.open("POST", &[], &request(5, "burst", json!(900)).to_string()).await;
    for number in 0..=900 {
        assert_eq!(client.event().await.unwrap().id, format!("1-{number}"));
    }
    assert_eq!(client.event().await.unwrap().json(), json!({"jsonrpc": "2.0", "id": 5, "result": 900}));
    assert_eq!(client.event().await, None);
}

#[tokio::test]
async fn a_client_that_reads_hears_very_many_small_messages_that_are_said_at_once() {
    let stage = Stage::new(|_| {});
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    let mut get = client.again().await;
    get.open("GET", &[], "").await;
    assert_eq!(client.post(&notification("shout", json!([20_000, 0]))).await.head.status, 202);
    for number in 0..=20_000 {
        assert_eq!(get.event().await.unwrap().id, format!("0-{number}"));
    }
    client.open("POST", &[], &request(5, "burst", json!(20_000)).to_string()).await;
    for number in 0..=20_000 {
        assert_eq!(client.event().await.unwrap().id, format!("1-{number}"));
    }
    assert_eq!(client.event().await.unwrap().json()["result"], 20_000);
}

#[tokio::test]
async fn a_message_goes_to_a_connection_that_is_there_and_not_to_one_that_broke() {
    let stage = Stage::new(|settings| settings.limits.resume_grace = 2 * GIVE_UP);
    let mut broken = Client::initialized(stage.address, "2025-11-25").await;
    let (mut posts, mut get) = (broken.again().await, broken.again().await);
    get.open("GET", &[], "").await;
    assert_eq!(get.event().await.unwrap().id, "0-0");
    broken.open("POST", &[], &request(5, "talk", json!("x")).to_string()).await;
    assert_eq!(broken.event().await.unwrap().id, "1-0");
    drop(broken);
    // Until it is known to be broken it hears what is said.
    let shouts = async {
        loop {
            posts.post(&notification("shout", json!([1, 0]))).await;
            tokio::task::yield_now().await;
        }
    };
    let heard = async {
        tokio::select! {
            event = get.event() => event.unwrap().id,
            () = shouts => String::new(),
        }
    };
    assert_eq!(timeout(GIVE_UP, heard).await.expect("it is said where nobody hears it"), "0-1");
}
