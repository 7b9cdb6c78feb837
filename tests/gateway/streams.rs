//! Streams: messages before, beside and without a response, and the calls of clients that disconnect.

use std::net::SocketAddr;

use rustix::fd::OwnedFd;
use rustix::net::sockopt;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use serde_json::json;
use testkit::wait::GIVE_UP;
use tokio::time::{Duration, timeout};

use super::client::{Client, notification, request};
use super::fake::{FakeEndpoint, HandlerEvent};

#[tokio::test]
async fn a_notification_before_the_response_starts_a_stream() {
    let endpoint = FakeEndpoint::new(|_| {});
    let mut client = Client::initialized(endpoint.address, "2025-11-25").await;
    client.open("POST", &[], &request(5, "chat", json!("x")).to_string()).await;
    let priming = client.event().await.unwrap();
    assert_eq!((priming.data.as_str(), priming.retry), ("", Some(1000)));
    assert_eq!(client.event().await.unwrap().json()["params"], "first");
    let answer = client.event().await.unwrap();
    assert_eq!(answer.json(), json!({"jsonrpc": "2.0", "id": 5, "result": "x"}));
    assert_eq!(client.event().await, None);
    // The connection can be reused.
    assert_eq!(client.post(&request(6, "echo", json!(1))).await.head.status, 200);
    // A completed stream cannot be resumed.
    let mut late = client.second_connection().await;
    assert_eq!(late.ask("GET", &[("last-event-id", &answer.id)], "").await.head.status, 405);
}

#[tokio::test]
async fn an_older_client_gets_no_priming_event() {
    let endpoint = FakeEndpoint::new(|_| {});
    let mut client = Client::initialized(endpoint.address, "2025-06-18").await;
    client.open("POST", &[], &request(5, "chat", json!("x")).to_string()).await;
    assert_eq!(client.event().await.unwrap().json()["params"], "first");
}

#[tokio::test]
async fn a_json_only_client_gets_notifications_on_its_get_stream() {
    let endpoint = FakeEndpoint::new(|_| {});
    let mut client = Client::initialized(endpoint.address, "2025-11-25").await;
    let mut get = client.second_connection().await;
    get.open("GET", &[], "").await;
    assert_eq!(get.event().await.unwrap().id, "0-0");
    let chat = request(5, "chat", json!("x")).to_string();
    let answer = client.ask("POST", &[("accept", "application/json")], &chat).await;
    assert_eq!(answer.json()["result"], "x");
    let event = get.event().await.unwrap();
    assert_eq!((event.id.as_str(), event.json()["params"].as_str()), ("0-1", Some("first")));
}

#[tokio::test]
async fn a_stream_only_client_gets_a_stream() {
    let endpoint = FakeEndpoint::new(|_| {});
    let mut client = Client::initialized(endpoint.address, "2025-11-25").await;
    let echo = request(5, "echo", json!("x")).to_string();
    client.open("POST", &[("accept", "text/event-stream")], &echo).await;
    client.event().await.unwrap();
    assert_eq!(client.event().await.unwrap().json()["result"], "x");
    assert_eq!(client.event().await, None);
}

#[tokio::test]
async fn buffered_messages_go_to_the_newest_get_stream() {
    let mut endpoint = FakeEndpoint::new(|_| {});
    let mut client = Client::initialized(endpoint.address, "2025-11-25").await;
    client.post(&notification("shout", json!([3, 0]))).await;
    endpoint.wait_for(HandlerEvent::Notification("shout".into())).await;
    let mut first = client.second_connection().await;
    first.open("GET", &[], "").await;
    let ids: Vec<_> = [first.event().await, first.event().await, first.event().await, first.event().await]
        .map(|event| event.unwrap().id)
        .into();
    assert_eq!(ids, ["0-0", "0-1", "0-2", "0-3"]);
    let mut second = client.second_connection().await;
    second.open("GET", &[("last-event-id", "0-1")], "").await;
    assert_eq!(first.event().await, None, "the newer stream replaced this one");
    assert_eq!(second.event().await.unwrap().id, "0-2");
    assert_eq!(second.event().await.unwrap().id, "0-3");
    client.post(&notification("shout", json!([1, 0]))).await;
    assert_eq!(second.event().await.unwrap().id, "0-4");
}

#[tokio::test]
async fn a_disconnect_before_the_response_starts_cancels_the_call() {
    let mut endpoint = FakeEndpoint::new(|_| {});
    let mut client = Client::initialized(endpoint.address, "2025-11-25").await;
    client.send("POST", &[], &request(5, "hold", json!("x")).to_string()).await;
    endpoint.wait_for(HandlerEvent::Request("hold".into())).await;
    drop(client);
    endpoint.wait_for(HandlerEvent::RequestDropped("hold".into())).await;
}

#[tokio::test]
async fn the_resume_grace_cancels_the_call_of_a_lost_client() {
    let mut endpoint = FakeEndpoint::new(|settings| settings.limits.resume_grace = Duration::from_millis(50));
    let mut client = Client::initialized(endpoint.address, "2025-11-25").await;
    client.open("POST", &[], &request(5, "talk", json!("x")).to_string()).await;
    assert_eq!(client.event().await.unwrap().id, "1-0");
    drop(client);
    endpoint.wait_for(HandlerEvent::RequestDropped("talk".into())).await;
}

#[tokio::test]
async fn a_resumed_stream_delivers_the_response() {
    let mut endpoint = FakeEndpoint::new(|_| {});
    let mut client = Client::initialized(endpoint.address, "2025-11-25").await;
    let mut back = client.second_connection().await;
    client.open("POST", &[], &request(5, "talk", json!("x")).to_string()).await;
    client.event().await.unwrap();
    let first = client.event().await.unwrap();
    drop(client);
    back.open("GET", &[("last-event-id", &first.id)], "").await;
    endpoint.release.add_permits(1);
    let answer = back.event().await.unwrap();
    assert_eq!((answer.id.as_str(), answer.json()["id"].as_u64()), ("1-2", Some(5)));
    assert_eq!(back.event().await, None);
    assert!(
        std::iter::from_fn(|| endpoint.seen.try_recv().ok())
            .all(|seen| seen != HandlerEvent::RequestDropped("talk".into()))
    );
}

#[tokio::test]
async fn a_cancelled_request_ends_its_stream_without_a_response() {
    let mut endpoint = FakeEndpoint::new(|_| {});
    let mut client = Client::initialized(endpoint.address, "2025-11-25").await;
    let mut other = client.second_connection().await;
    for (id, method) in [(5, "talk"), (6, "hold")] {
        client.send("POST", &[], &request(id, method, json!("x")).to_string()).await;
        endpoint.wait_for(HandlerEvent::Request(method.into())).await;
        assert_eq!(
            other.post(&notification("notifications/cancelled", json!({"requestId": id}))).await.head.status,
            202
        );
        endpoint.wait_for(HandlerEvent::RequestCancelled(id.to_string())).await;
        let head = client.head().await;
        assert!(head.status == 200 && head.is_stream(), "{head:?}");
        assert!(!client.body(&head).await.contains("result"));
    }
    // A cancellation with an unknown id is delivered as a notification.
    other.post(&notification("notifications/cancelled", json!({"requestId": 99}))).await;
    endpoint.wait_for(HandlerEvent::Notification("notifications/cancelled".into())).await;
}

#[tokio::test]
async fn an_id_in_use_is_rejected() {
    let mut endpoint = FakeEndpoint::new(|_| {});
    let mut client = Client::initialized(endpoint.address, "2025-11-25").await;
    let mut other = client.second_connection().await;
    client.send("POST", &[], &request(5, "hold", json!("x")).to_string()).await;
    endpoint.wait_for(HandlerEvent::Request("hold".into())).await;
    assert_eq!(other.post(&request(5, "echo", json!(1))).await.head.status, 400);
    endpoint.release.add_permits(1);
    assert_eq!(client.head().await.status, 200);
    assert_eq!(other.post(&request(5, "echo", json!(1))).await.head.status, 200);
}

#[tokio::test]
async fn a_batch_is_accepted_only_in_a_version_with_batches() {
    let endpoint = FakeEndpoint::new(|_| {});
    let mut client = Client::initialized(endpoint.address, "2025-03-26").await;
    let batch = json!([request(1, "echo", json!("a")), notification("n", json!({})), request(2, "echo", json!("b"))]);
    let answer = client.post(&batch).await;
    let expected = json!([{"jsonrpc": "2.0", "id": 1, "result": "a"}, {"jsonrpc": "2.0", "id": 2, "result": "b"}]);
    assert_eq!((answer.head.status, answer.json()), (200, expected));
    assert_eq!(client.post(&json!([notification("n", json!({}))])).await.head.status, 202);
    let mut newer = Client::initialized(endpoint.address, "2025-06-18").await;
    assert_eq!(newer.post(&batch).await.head.status, 400);
}

/// The endpoint's socket of a client's connection, which is in this process, too.
fn server_side(client: &Client) -> OwnedFd {
    let this = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    let fds =
        std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let copies = fds.filter_map(|fd: i32| pidfd_getfd(&this, fd, PidfdGetfdFlags::empty()).ok());
    let is_peer = |copy: &OwnedFd| {
        let peer = rustix::net::getpeername(copy).ok().flatten();
        peer.and_then(|peer| SocketAddr::try_from(peer).ok()) == Some(client.local_address)
    };
    copies.into_iter().find(is_peer).unwrap()
}

#[tokio::test]
async fn server_sockets_have_nodelay_keepalive_and_user_timeout() {
    let endpoint = FakeEndpoint::new(|_| {});
    let client = Client::initialized(endpoint.address, "2025-11-25").await;
    let socket = server_side(&client);
    assert!(sockopt::tcp_nodelay(&socket).unwrap());
    assert!(sockopt::socket_keepalive(&socket).unwrap());
    assert_eq!(sockopt::tcp_keepidle(&socket).unwrap(), Duration::from_secs(60));
    assert_eq!(sockopt::tcp_user_timeout(&socket).unwrap(), 60_000);
}

#[tokio::test]
async fn a_slow_request_becomes_a_stream_with_keep_alives() {
    let endpoint = FakeEndpoint::new(|settings| {
        (settings.sse_after, settings.keep_alive) = (Duration::from_millis(10), Duration::from_millis(10));
    });
    let mut client = Client::initialized(endpoint.address, "2025-11-25").await;
    client.open("POST", &[], &request(5, "hold", json!("x")).to_string()).await;
    assert_eq!(client.event().await.unwrap().id, "1-0");
    for _ in 0..3 {
        assert_eq!(client.chunk().await.unwrap(), b":\n\n");
    }
    endpoint.release.add_permits(1);
    assert_eq!(client.event().await.unwrap().json()["result"], "x");
    assert_eq!(client.event().await, None);
}

#[tokio::test]
async fn a_client_that_does_not_read_is_ended_without_delaying_others() {
    let mut endpoint = FakeEndpoint::new(|settings| settings.limits.session_idle = Duration::from_millis(200));
    let slow = Client::initialized(endpoint.address, "2025-11-25").await;
    let mut unread = slow.second_connection().await;
    unread.open("GET", &[], "").await;
    let mut other = Client::initialized(endpoint.address, "2025-11-25").await;
    let mut other_get = other.second_connection().await;
    other_get.open("GET", &[], "").await;
    other_get.event().await.unwrap();
    // Much more than the buffers of the kernel and of the endpoint.
    let shout = notification("shout", json!([64, 1 << 20]));
    let mut shouts = slow.second_connection().await;
    assert_eq!(shouts.post(&shout).await.head.status, 202);
    for number in 1..=3 {
        assert_eq!(other.post(&notification("shout", json!([1, 0]))).await.head.status, 202);
        assert_eq!(other_get.event().await.unwrap().id, format!("0-{number}"));
    }
    endpoint.wait_for(HandlerEvent::SessionEnded("slow")).await;
    assert_eq!((slow.second_connection().await.echo().await, other.echo().await), (404, 200));
}

#[tokio::test]
async fn a_disconnect_after_a_pipelined_request_cancels_the_call() {
    let mut endpoint = FakeEndpoint::new(|settings| {
        (settings.sse_after, settings.keep_alive) = (Duration::from_millis(10), Duration::from_millis(10));
        settings.limits.resume_grace = Duration::from_millis(10);
    });
    let mut client = Client::initialized(endpoint.address, "2025-11-25").await;
    client.send("POST", &[], &request(5, "hold", json!("x")).to_string()).await;
    endpoint.wait_for(HandlerEvent::Request("hold".into())).await;
    client.send("POST", &[], &request(6, "echo", json!("x")).to_string()).await;
    drop(client);
    endpoint.wait_for(HandlerEvent::RequestDropped("hold".into())).await;
}

#[tokio::test]
async fn the_bodies_of_all_clients_share_a_memory_limit() {
    let mut endpoint =
        FakeEndpoint::new(|settings| (settings.limits.body_max, settings.limits.bodies_max) = (2000, 2000));
    let mut first = Client::initialized(endpoint.address, "2025-11-25").await;
    let mut second = Client::initialized(endpoint.address, "2025-11-25").await;
    let large = |method| request(5, method, json!("x".repeat(1200))).to_string();
    first.send("POST", &[], &large("hold")).await;
    endpoint.wait_for(HandlerEvent::Request("hold".into())).await;
    let answer = second.ask("POST", &[], &large("echo")).await;
    assert_eq!((answer.head.status, answer.head.header("retry-after")), (503, Some("1")));
    let why = "requests in progress use all memory for messages; send this one again in a moment";
    assert_eq!(answer.json()["error"]["message"], why);
    // An announced length reserves no memory.
    let mut announces = second.second_connection().await;
    announces.send("POST", &[("content-length", "700")], "{").await;
    second = second.second_connection().await;
    assert_eq!(second.echo().await, 200, "a small message still fits");
    endpoint.release.add_permits(1);
    assert_eq!(first.head().await.status, 200);
    assert_eq!(second.ask("POST", &[], &large("echo")).await.head.status, 200);
}

#[tokio::test]
async fn without_memory_nothing_is_buffered_for_absent_listeners() {
    let mut endpoint = FakeEndpoint::new(|settings| settings.limits.streams_max = 100);
    let mut client = Client::initialized(endpoint.address, "2025-11-25").await;
    client.post(&notification("shout", json!([10, 100]))).await;
    endpoint.wait_for(HandlerEvent::Notification("shout".into())).await;
    let mut get = client.second_connection().await;
    get.open("GET", &[], "").await;
    assert_eq!(get.event().await.unwrap().id, "0-10");
    client.post(&notification("shout", json!([1, 100]))).await;
    assert_eq!(get.event().await.unwrap().id, "0-11");
}

#[tokio::test]
async fn a_burst_before_the_stream_starts_arrives_completely() {
    let endpoint = FakeEndpoint::new(|_| {});
    let mut client = Client::initialized(endpoint.address, "2025-11-25").await;
    client.open("POST", &[], &request(5, "burst", json!(900)).to_string()).await;
    for number in 0..=900 {
        assert_eq!(client.event().await.unwrap().id, format!("1-{number}"));
    }
    assert_eq!(client.event().await.unwrap().json(), json!({"jsonrpc": "2.0", "id": 5, "result": 900}));
    assert_eq!(client.event().await, None);
}

#[tokio::test]
async fn a_reading_client_gets_20000_messages_that_are_sent_at_once() {
    let endpoint = FakeEndpoint::new(|_| {});
    let mut client = Client::initialized(endpoint.address, "2025-11-25").await;
    let mut get = client.second_connection().await;
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
async fn a_message_goes_to_an_open_connection_instead_of_a_broken_one() {
    let endpoint = FakeEndpoint::new(|settings| settings.limits.resume_grace = 2 * GIVE_UP);
    let mut broken = Client::initialized(endpoint.address, "2025-11-25").await;
    let (mut posts, mut get) = (broken.second_connection().await, broken.second_connection().await);
    get.open("GET", &[], "").await;
    assert_eq!(get.event().await.unwrap().id, "0-0");
    broken.open("POST", &[], &request(5, "talk", json!("x")).to_string()).await;
    assert_eq!(broken.event().await.unwrap().id, "1-0");
    drop(broken);
    // Messages go to the broken connection until the endpoint notices that it is broken.
    let shouts = async {
        loop {
            posts.post(&notification("shout", json!([1, 0]))).await;
            tokio::task::yield_now().await;
        }
    };
    let first_message = async {
        tokio::select! {
            event = get.event() => event.unwrap().id,
            () = shouts => String::new(),
        }
    };
    assert_eq!(timeout(GIVE_UP, first_message).await.expect("no message on the open connection in time"), "0-1");
}
