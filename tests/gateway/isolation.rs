//! Twelve clients use the same ids and tokens. Every response, progress notification and server request is marked with
//! its client and must never reach another one. `MIXED_CALLS` sets the total number of calls.

use serde_json::{Value, json};
use testkit::wait::GIVE_UP;
use tokio::time::timeout;

use super::client::{Client, request};
use super::whole_satellite::{Server, SessionClient, TestSatellite};

const CLIENTS: u64 = 12;

fn calls() -> u64 {
    let setting = std::env::var("MIXED_CALLS").ok();
    setting.map_or(5_000, |calls| calls.parse().expect("MIXED_CALLS is a number"))
}

/// The messages that one client received.
#[derive(Debug, Default)]
struct Count {
    answers: u64,
    progress: u64,
    server_requests: u64,
}

/// A client that makes one call after the other and checks every message.
struct Caller {
    mark: String,
    attached: SessionClient,
    answers: Client,
    count: Count,
}

impl Caller {
    async fn connect(satellite: &TestSatellite, user: &str, name: &str, number: u64) -> Self {
        let mut client = satellite.connect(name).await;
        client.token = Some(format!("{user}-token"));
        let attached = SessionClient::connect(client, json!({"sampling": {}})).await;
        // The first request comes at once: `header_timeout` closes a connection without one.
        let mut answers = attached.posts.second_connection().await;
        assert_eq!(answers.post(&request(0, "ping", json!({}))).await.head.status, 200);
        Self { mark: format!("client {number}"), attached, answers, count: Count::default() }
    }

    /// The payload that marks all messages of this call.
    fn payload(&self, id: u64) -> Value {
        json!({"mark": self.mark, "call": id})
    }

    async fn call(&mut self, id: u64) {
        let request = match id % 4 {
            0 | 1 => request(id, "x/echo", self.payload(id)),
            kind => {
                let progress = json!({"progressToken": "$token", "progress": 1, "of": self.payload(id)});
                let progress = json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": progress});
                let server_request = json!({
                    "jsonrpc": "2.0", "id": format!("{} {id}", self.mark), "method": "sampling/createMessage",
                    "params": {"of": self.payload(id), "_meta": {"progressToken": 1}},
                });
                let answer = json!({"jsonrpc": "2.0", "id": "$id", "result": {"of": self.payload(id)}});
                let second = if kind == 2 { progress.clone() } else { server_request };
                let params = json!({"_meta": {"progressToken": id}, "messages": [progress, second, answer]});
                request(id, "mirror/say", params)
            }
        };
        self.attached.posts.send("POST", &[], &request.to_string()).await;
        let head = self.attached.posts.head().await;
        if head.is_stream() {
            while let Some(event) = self.attached.posts.event().await {
                if !event.data.is_empty() {
                    self.check_message(id, &event.json()).await;
                }
            }
        } else {
            let answer = self.attached.posts.body(&head).await;
            self.check_message(id, &serde_json::from_str(&answer).unwrap()).await;
        }
        assert_eq!(self.count.answers, id, "{} got no response to {id}", self.mark);
    }

    async fn check_message(&mut self, id: u64, message: &Value) {
        let of = self.payload(id);
        match message["method"].as_str() {
            None => {
                assert_eq!(message["id"], id, "{} {message}", self.mark);
                let result = &message["result"];
                let echoed = if result["of"].is_null() { &result["reflected"]["params"] } else { &result["of"] };
                assert_eq!(*echoed, of, "{message}");
                self.count.answers += 1;
            }
            Some("notifications/progress") => {
                assert_eq!((&message["params"]["progressToken"], &message["params"]["of"]), (&json!(id), &of));
                self.count.progress += 1;
            }
            Some("sampling/createMessage") => {
                assert_eq!(message["params"]["of"], of, "{message}");
                let answer = json!({"jsonrpc": "2.0", "id": message["id"], "result": {"of": of}});
                let response = self.answers.post(&answer).await;
                assert_eq!(response.head.status, 202);
                self.count.server_requests += 1;
            }
            // The mirror reports the response to its request to all clients.
            Some("notifications/mirrored") => {}
            Some(other) => panic!("{other}: {message}"),
        }
    }

    async fn calls(mut self, count: u64) -> Count {
        for id in 1..=count {
            timeout(GIVE_UP, self.call(id))
                .await
                .unwrap_or_else(|_| panic!("{} got no response to {id} in time", self.mark));
        }
        self.count
    }
}

async fn mixed(satellite: &TestSatellite, user: impl Fn(u64) -> &'static str) {
    let each = calls().div_ceil(CLIENTS);
    let mut callers = Vec::new();
    for number in 0..CLIENTS {
        callers.push(tokio::spawn(Caller::connect(satellite, user(number), "mirror", number).await.calls(each)));
    }
    let mut all = Count::default();
    for caller in callers {
        let count = caller.await.unwrap();
        all.answers += count.answers;
        all.progress += count.progress;
        all.server_requests += count.server_requests;
    }
    assert_eq!(all.answers, each * CLIENTS);
    let of_kind = |kind: u64| (1..=each).filter(|id| id % 4 == kind).count() as u64;
    assert_eq!(all.progress, CLIENTS * (2 * of_kind(2) + of_kind(3)));
    // A request over a pipe does not identify its call. While several clients call, it is rejected.
    assert!(all.server_requests <= CLIENTS * of_kind(3));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_of_one_user_with_the_same_ids_get_their_own_answers() {
    let satellite = TestSatellite::start().await;
    satellite.online(Server::mirror("mirror")).await;
    mixed(&satellite, |_| "alice").await;
    // A single client gets all requests of the server.
    let alone = Caller::connect(&satellite, "alice", "mirror", 99).await.calls(8).await;
    assert_eq!((alone.answers, alone.progress, alone.server_requests), (8, 6, 2));
    satellite.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_of_two_users_with_the_same_ids_get_their_own_answers() {
    let satellite = TestSatellite::start().await;
    for user in ["alice", "bob"] {
        satellite.online(Server::mirror("mirror").for_user(user)).await;
    }
    mixed(&satellite, |number| if number % 2 == 0 { "alice" } else { "bob" }).await;
    satellite.end().await;
}
