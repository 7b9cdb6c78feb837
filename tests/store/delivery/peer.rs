//! An HTTP server for events whose replies a test sets.

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

/// One received request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ReceivedBatch {
    /// The id of the batch.
    pub(crate) key: String,
    pub(crate) seqs: Vec<u64>,
    /// The seqs that the server stored, whether or not its response arrived.
    pub(crate) stored: Vec<u64>,
}

/// The server's reaction to a batch.
#[derive(Debug, Clone)]
pub(crate) enum Reply {
    /// Stores all events.
    Accept,
    /// Stores nothing and responds with this status, headers and body.
    Status(u16, Vec<(&'static str, String)>, String),
    /// Stores all events except those at these indexes.
    Partial(Vec<usize>),
    /// Stores nothing and never responds.
    Hang,
    /// Stores all events; the response never ends.
    Stall,
    /// Stores all events; the connection breaks within the response.
    Abort,
    /// Stores all events and responds with this body instead of a report.
    OtherBody(String),
    /// Stores all events and sends an endless response.
    Endless,
}

type ReplyFn = Box<dyn FnMut(&[u64]) -> Reply + Send>;

#[derive(Clone)]
pub(crate) struct Peer {
    batches: Arc<Mutex<Vec<ReceivedBatch>>>,
    count: watch::Sender<usize>,
    reply_to: Arc<Mutex<ReplyFn>>,
    /// The stored events without repetitions.
    events: Arc<Mutex<Vec<Value>>>,
}

/// A bound address. Until the peer listens, it refuses connections and no other program can bind it.
pub(crate) struct BoundAddress(TcpSocket);

impl BoundAddress {
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
    /// A peer that accepts everything but does not listen yet.
    pub(crate) fn new() -> Self {
        let reply_to: ReplyFn = Box::new(|_| Reply::Accept);
        Self {
            batches: Arc::default(),
            count: watch::Sender::new(0),
            reply_to: Arc::new(Mutex::new(reply_to)),
            events: Arc::default(),
        }
    }

    pub(crate) fn start() -> (Self, String) {
        let (peer, address) = (Self::new(), BoundAddress::new());
        let url = address.url();
        drop(peer.listen(address));
        (peer, url)
    }

    pub(crate) fn listen(&self, address: BoundAddress) -> JoinHandle<()> {
        let listener: TcpListener = address.0.listen(64).unwrap();
        let router = Router::new().fallback(receive).with_state(self.clone());
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() })
    }

    /// Sets the reply to the batches from now on.
    pub(crate) fn reply_with(&self, reply_to: impl FnMut(&[u64]) -> Reply + Send + 'static) {
        *self.reply_to.lock().unwrap() = Box::new(reply_to);
    }

    pub(crate) fn batches(&self) -> Vec<ReceivedBatch> {
        self.batches.lock().unwrap().clone()
    }

    /// Waits until `count` requests have been received.
    pub(crate) async fn wait_for_batches(&self, count: usize) {
        self.count.subscribe().wait_for(|received| *received >= count).await.unwrap();
    }

    /// The stored seqs in order. A batch with a known key is a repetition.
    pub(crate) fn stored_seqs(&self) -> Vec<u64> {
        self.events.lock().unwrap().iter().map(|event| event["seq"].as_u64().unwrap()).collect()
    }

    pub(crate) fn events(&self) -> Vec<Value> {
        self.events.lock().unwrap().clone()
    }
}

async fn receive(State(peer): State<Peer>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let mut body: Value = serde_json::from_slice(&to_bytes(body, usize::MAX).await.unwrap()).unwrap();
    let Value::Array(events) = body["events"].take() else { panic!("no events: {body}") };
    let seqs: Vec<u64> = events.iter().map(|event| event["seq"].as_u64().unwrap()).collect();
    assert!(seqs.is_sorted_by(|one, next| one < next), "{seqs:?}");
    let key = parts.headers["idempotency-key"].to_str().unwrap().to_owned();
    let reply = (peer.reply_to.lock().unwrap())(&seqs);
    let stored: Vec<u64> = match &reply {
        Reply::Accept | Reply::Stall | Reply::Abort | Reply::OtherBody(_) | Reply::Endless => seqs.clone(),
        Reply::Partial(failed) => {
            seqs.iter().enumerate().filter(|(at, _)| !failed.contains(at)).map(|(_, seq)| *seq).collect()
        }
        Reply::Status(..) | Reply::Hang => Vec::new(),
    };
    {
        let mut batches = peer.batches.lock().unwrap();
        let repeated = batches.iter().any(|before| before.key == key && !before.stored.is_empty());
        if !repeated {
            let is_taken = |event: &Value| stored.contains(&event["seq"].as_u64().unwrap());
            peer.events.lock().unwrap().extend(events.into_iter().filter(is_taken));
        }
        batches.push(ReceivedBatch { key, seqs: seqs.clone(), stored });
        peer.count.send_replace(batches.len());
    }
    answer(reply, seqs.len()).await
}

async fn answer(reply: Reply, count: usize) -> Response {
    match reply {
        Reply::Accept => axum::Json(report(count, &[])).into_response(),
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
        Reply::Stall => {
            let begun = stream::iter([Ok::<_, String>("{\"success\": ".to_owned())]);
            Response::new(Body::from_stream(begun.chain(stream::pending())))
        }
        Reply::Abort => {
            let cut = stream::iter([Ok("{\"success\": ".to_owned()), Err("cut".to_owned())]);
            Response::new(Body::from_stream(cut))
        }
        Reply::OtherBody(text) => text.into_response(),
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
