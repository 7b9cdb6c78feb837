//! A server that takes events, and does with them what a test wants.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use futures::{StreamExt, stream};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// What came in one request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Came {
    /// The batch's id.
    pub(crate) key: String,
    pub(crate) seqs: Vec<u64>,
    /// The answer was that they are taken, or would have been if it had arrived.
    pub(crate) taken: Vec<u64>,
}

/// What a server does with a batch.
#[derive(Debug, Clone)]
pub(crate) enum Reply {
    /// Takes all.
    Take,
    /// Takes none, and says so.
    Status(u16, Vec<(&'static str, String)>, String),
    /// Takes all but these, by their place.
    Partial(Vec<usize>),
    /// Takes none, and never answers.
    Hang,
    /// Takes all, and its answer does not end.
    Stuck,
    /// Takes all, and its answer is cut off in the middle.
    Cut,
    /// Takes all, and says something else about it.
    Babble(String),
    /// Takes all, and has no end of words about it.
    Endless,
}

type Mood = Box<dyn FnMut(&[u64]) -> Reply + Send>;

/// The server.
#[derive(Clone)]
pub(crate) struct Peer {
    came: Arc<Mutex<Vec<Came>>>,
    count: watch::Sender<usize>,
    mood: Arc<Mutex<Mood>>,
    /// The whole events that were taken, repeats left out.
    events: Arc<Mutex<Vec<Value>>>,
}

/// Its place: what is bound and not listened to refuses, and nobody else can get it.
pub(crate) struct Place(TcpSocket);

impl Place {
    pub(crate) fn new() -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        Self(socket)
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/events", self.0.local_addr().unwrap())
    }
}

impl Peer {
    /// One that takes everything, once it is at its place.
    pub(crate) fn new() -> Self {
        let mood: Mood = Box::new(|_| Reply::Take);
        Self {
            came: Arc::default(),
            count: watch::Sender::new(0),
            mood: Arc::new(Mutex::new(mood)),
            events: Arc::default(),
        }
    }

    pub(crate) fn start() -> (Self, String) {
        let (peer, place) = (Self::new(), Place::new());
        let url = place.url();
        drop(peer.listen(place));
        (peer, url)
    }

    pub(crate) fn listen(&self, place: Place) -> JoinHandle<()> {
        let listener: TcpListener = place.0.listen(64).unwrap();
        let router = Router::new().fallback(take).with_state(self.clone());
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() })
    }

    /// From now on.
    pub(crate) fn does(&self, mood: impl FnMut(&[u64]) -> Reply + Send + 'static) {
        *self.mood.lock().unwrap() = Box::new(mood);
    }

    pub(crate) fn came(&self) -> Vec<Came> {
        self.came.lock().unwrap().clone()
    }

    /// Waits until so many requests have come.
    pub(crate) async fn until_came(&self, count: usize) {
        self.count.subscribe().wait_for(|came| *came >= count).await.unwrap();
    }

    /// What it has, in the order in which it was first taken: a batch whose key is known is none that is new.
    pub(crate) fn has(&self) -> Vec<u64> {
        self.events.lock().unwrap().iter().map(|event| event["seq"].as_u64().unwrap()).collect()
    }

    pub(crate) fn events(&self) -> Vec<Value> {
        self.events.lock().unwrap().clone()
    }
}

async fn take(State(peer): State<Peer>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let mut body: Value = serde_json::from_slice(&to_bytes(body, usize::MAX).await.unwrap()).unwrap();
    let Value::Array(events) = body["events"].take() else { panic!("no events: {body}") };
    let seqs: Vec<u64> = events.iter().map(|event| event["seq"].as_u64().unwrap()).collect();
    assert!(seqs.is_sorted_by(|one, next| one < next), "{seqs:?}");
    let key = parts.headers["idempotency-key"].to_str().unwrap().to_owned();
    let reply = (peer.mood.lock().unwrap())(&seqs);
    let taken: Vec<u64> = match &reply {
        Reply::Take | Reply::Stuck | Reply::Cut | Reply::Babble(_) | Reply::Endless => seqs.clone(),
        Reply::Partial(failed) => {
            seqs.iter().enumerate().filter(|(at, _)| !failed.contains(at)).map(|(_, seq)| *seq).collect()
        }
        Reply::Status(..) | Reply::Hang => Vec::new(),
    };
    {
        let mut came = peer.came.lock().unwrap();
        let repeated = came.iter().any(|before| before.key == key && !before.taken.is_empty());
        if !repeated {
            let is_taken = |event: &Value| taken.contains(&event["seq"].as_u64().unwrap());
            peer.events.lock().unwrap().extend(events.into_iter().filter(is_taken));
        }
        came.push(Came { key, seqs: seqs.clone(), taken });
        peer.count.send_replace(came.len());
    }
    answer(reply, seqs.len()).await
}

async fn answer(reply: Reply, count: usize) -> Response {
    match reply {
        Reply::Take => axum::Json(report(count, &[])).into_response(),
        Reply::Partial(failed) => axum::Json(report(count, &failed)).into_response(),
        Reply::Status(status, headers, body) => {
            let mut response = Response::builder().status(status);
            for (name, value) in headers {
                response = response.header(name, value);
            }
            response.body(Body::from(body)).unwrap()
        }
        Reply::Hang => {
            tokio::time::sleep(Duration::from_secs(3600)).await;
            StatusCode::OK.into_response()
        }
        Reply::Stuck => {
            let begun = stream::iter([Ok::<_, String>("{\"success\": ".to_owned())]);
            Response::new(Body::from_stream(begun.chain(stream::pending())))
        }
        Reply::Cut => {
            let cut = stream::iter([Ok("{\"success\": ".to_owned()), Err("cut".to_owned())]);
            Response::new(Body::from_stream(cut))
        }
        Reply::Babble(text) => text.into_response(),
        Reply::Endless => Response::new(Body::from_stream(stream::repeat(Ok::<_, String>(" ".repeat(1000))))),
    }
}

fn report(count: usize, failed: &[usize]) -> Value {
    let failures: Vec<Value> =
        failed.iter().map(|index| json!({"index": index, "type": "x", "error": "not this one"})).collect();
    json!({
        "success": failed.is_empty(), "processed": count - failed.len(), "failed": failed.len(), "event_ids": [],
        "failures": failures,
    })
}
