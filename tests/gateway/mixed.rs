//! Twelve clients that all use the same ids and tokens, and answers, progress and questions that all say for whom they are:
//! none of them ever reaches another client. `MIXED_CALLS` says how many calls are made in all.

use serde_json::{Value, json};
use tokio::time::timeout;

use super::client::{Client, request};
use super::whole::{Attached, GIVE_UP, Server, Whole};

const CLIENTS: u64 = 12;

fn calls() -> u64 {
    let given = std::env::var("MIXED_CALLS").ok();
    given.map_or(5_000, |calls| calls.parse().expect("MIXED_CALLS is a number"))
}

/// What has come to one client.
#[derive(Debug, Default)]
struct Count {
    answers: u64,
    progress: u64,
    questions: u64,
}

/// One client's calls, one after the other, and what comes of each.
struct Caller {
    mark: String,
    attached: Attached,
    answers: Client,
    count: Count,
}

impl Caller {
    async fn begin(whole: &Whole, user: &str, name: &str, number: u64) -> Self {
        let mut client = whole.connect(name).await;
        client.token = Some(format!("{user}-token"));
        let attached = Attached::begin(client, json!({"sampling": {}})).await;
        // Used at once: a connection without a request is closed after `header_timeout`.
        let mut answers = attached.posts.again().await;
        assert_eq!(answers.post(&request(0, "ping", json!({}))).await.head.status, 200);
        Self { mark: format!("client {number}"), attached, answers, count: Count::default() }
    }

    /// What everything that belongs to this call says.
    fn of(&self, id: u64) -> Value {
        json!({"mark": self.mark, "call": id})
    }

    async fn call(&mut self, id: u64) {
        let request = match id % 4 {
            // What it says is what it hears.
            0 | 1 => request(id, "x/echo", self.of(id)),
            kind => {
                let progress = json!({"progressToken": "$token", "progress": 1, "of": self.of(id)});
                let progress = json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": progress});
                let question = json!({
                    "jsonrpc": "2.0", "id": format!("{} {id}", self.mark), "method": "sampling/createMessage",
                    "params": {"of": self.of(id), "_meta": {"progressToken": 1}},
                });
                let answer = json!({"jsonrpc": "2.0", "id": "$id", "result": {"of": self.of(id)}});
                let second = if kind == 2 { progress.clone() } else { question };
                let params = json!({"_meta": {"progressToken": id}, "messages": [progress, second, answer]});
                request(id, "mirror/say", params)
            }
        };
        self.attached.posts.send("POST", &[], &request.to_string()).await;
        let head = self.attached.posts.head().await;
        if head.is_stream() {
            while let Some(event) = self.attached.posts.event().await {
                if !event.data.is_empty() {
                    self.hears(id, &event.json()).await;
                }
            }
        } else {
            let answer = self.attached.posts.body(&head).await;
            self.hears(id, &serde_json::from_str(&answer).unwrap()).await;
        }
        assert_eq!(self.count.answers, id, "{} has no answer to {id}", self.mark);
    }

    async fn hears(&mut self, id: u64, message: &Value) {
        let of = self.of(id);
        match message["method"].as_str() {
            None => {
                assert_eq!(message["id"], id, "{} {message}", self.mark);
                let result = &message["result"];
                let said = if result["of"].is_null() { &result["reflected"]["params"] } else { &result["of"] };
                assert_eq!(*said, of, "{message}");
                self.count.answers += 1;
            }
            Some("notifications/progress") => {
                assert_eq!((&message["params"]["progressToken"], &message["params"]["of"]), (&json!(id), &of));
                self.count.progress += 1;
            }
            Some("sampling/createMessage") => {
                assert_eq!(message["params"]["of"], of, "{message}");
                let answer = json!({"jsonrpc": "2.0", "id": message["id"], "result": {"of": of}});
                let taken = self.answers.post(&answer).await;
                assert_eq!(taken.head.status, 202);
                self.count.questions += 1;
            }
            // The mirror shows the answer to a question, and says not to whom.
            Some("notifications/mirrored") => {}
            Some(other) => panic!("{other}: {message}"),
        }
    }

    async fn calls(mut self, count: u64) -> Count {
        for id in 1..=count {
            timeout(GIVE_UP, self.call(id)).await.unwrap_or_else(|_| panic!("{} waits for {id}", self.mark));
        }
        self.count
    }
}

async fn mixed(whole: &Whole, user: impl Fn(u64) -> &'static str) {
    let each = calls().div_ceil(CLIENTS);
    let mut callers = Vec::new();
    for number in 0..CLIENTS {
        callers.push(tokio::spawn(Caller::begin(whole, user(number), "mirror", number).await.calls(each)));
    }
    let mut all = Count::default();
    for caller in callers {
        let count = caller.await.unwrap();
        all.answers += count.answers;
        all.progress += count.progress;
        all.questions += count.questions;
    }
    assert_eq!(all.answers, each * CLIENTS);
    let of_kind = |kind: u64| (1..=each).filter(|id| id % 4 == kind).count() as u64;
    assert_eq!(all.progress, CLIENTS * (2 * of_kind(2) + of_kind(3)));
    // A pipe does not say for which of several clients it asks, and then nobody is asked.
    assert!(all.questions <= CLIENTS * of_kind(3));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_of_one_user_with_the_same_ids_get_their_own_answers() {
    let whole = Whole::begin().await;
    whole.online(Server::mirror("mirror")).await;
    mixed(&whole, |_| "alice").await;
    // One that is alone is asked all that it is asked.
    let alone = Caller::begin(&whole, "alice", "mirror", 99).await.calls(8).await;
    assert_eq!((alone.answers, alone.progress, alone.questions), (8, 6, 2));
    whole.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_of_two_users_with_the_same_ids_get_their_own_answers() {
    let whole = Whole::begin().await;
    for user in ["alice", "bob"] {
        whole.online(Server::mirror("mirror").of(user)).await;
    }
    mixed(&whole, |number| if number % 2 == 0 { "alice" } else { "bob" }).await;
    whole.end().await;
}
