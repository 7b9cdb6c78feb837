//! One connection of the peer: reads requests and responds as the behavior or the script specifies.

use std::io;
use std::ops::Deref;
use std::sync::Arc;

use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::select;
use tokio::time::sleep;
use tokio_rustls::TlsAcceptor;

use super::Shared;
use super::http::{self, Exchange, Headers, ReadError, Request, event, headers};
use super::mcp::{self, Expiry, Push, Refusal};
use super::record::{PeerLog, Record};
use super::script::{Action, ResponseFormat};

/// The size of the parts of an endless line, in bytes.
const PART: usize = 16 * 1024;

/// Increments a counter and decrements it when dropped.
pub(super) struct CountGuard<S: Deref<Target = Shared>> {
    shared: S,
    uncount: fn(&mut PeerLog),
}

impl<S: Deref<Target = Shared>> CountGuard<S> {
    pub(super) fn new(shared: S, count: fn(&mut PeerLog), uncount: fn(&mut PeerLog)) -> Self {
        shared.log.send_modify(count);
        Self { shared, uncount }
    }
}

impl<S: Deref<Target = Shared>> Drop for CountGuard<S> {
    fn drop(&mut self) {
        self.shared.log.send_modify(self.uncount);
    }
}

/// Serves a connection until client or server closes it.
pub(super) async fn serve(nth: usize, stream: TcpStream, tls: Option<TlsAcceptor>, shared: Arc<Shared>) {
    // Small responses are sent at once.
    let _ = stream.set_nodelay(true);
    let mut exchange = match tls {
        None => Exchange::new(Box::new(stream)),
        Some(tls) => match tls.accept(stream).await {
            Ok(stream) => Exchange::new(Box::new(stream)),
            Err(_) => return shared.log.send_modify(|log| log.malformed += 1),
        },
    };
    loop {
        let request = match exchange.request().await {
            Ok(request) => request,
            Err(ReadError::Closed) => return,
            Err(ReadError::Malformed) => {
                shared.log.send_modify(|log| log.malformed += 1);
                let _ = exchange.answer(400, &headers(&[("connection", "close")]), b"Bad Request").await;
                return;
            }
        };
        exchange.closes = !shared.server.lock().unwrap().behavior.keeps_alive;
        let record = Record::new(nth, &request);
        let action = shared.script.lock().unwrap().decide(&record);
        let is_initialize = record.rpc.as_deref() == Some("initialize");
        let _initializing = is_initialize.then(|| CountGuard::new(&*shared, initializing, |log| log.initializing -= 1));
        shared.log.send_modify(|log| log.requests.push(record.clone()));
        let done = match action {
            Some(action) => Box::pin(shared.misbehave(&mut exchange, &record, action)).await,
            None => shared.respond(&mut exchange, &record, &request).await,
        };
        match done {
            Ok(NextStep::Next) if !exchange.closes => {}
            Ok(NextStep::Next | NextStep::Close) | Err(_) => return,
        }
    }
}

/// Ends a session when dropped.
struct SessionGuard<'a> {
    shared: &'a Shared,
    session: &'a str,
}

impl Drop for SessionGuard<'_> {
    fn drop(&mut self) {
        self.shared.server.lock().unwrap().end(self.session);
    }
}

fn initializing(log: &mut PeerLog) {
    log.initializing += 1;
    log.initializing_max = log.initializing_max.max(log.initializing);
}

/// The next step on a connection after a request.
enum NextStep {
    Next,
    Close,
}

struct RegularResponse {
    session: Option<String>,
    message: Value,
}

impl RegularResponse {
    fn headers(&self, content_type: &str) -> Headers {
        let session = self.session.iter().map(|session| ("mcp-session-id".to_owned(), session.clone()));
        headers(&[("content-type", content_type)]).into_iter().chain(session).collect()
    }
}

fn stream_headers() -> Headers {
    headers(&[("content-type", "text/event-stream"), ("cache-control", "no-cache"), ("transfer-encoding", "chunked")])
}

impl Shared {
    /// Returns the regular response to a message; `None` for a notification or a response.
    fn regular_response(&self, record: &Record) -> Option<RegularResponse> {
        let mut server = self.server.lock().unwrap();
        let message = server.answer(&record.body)?;
        let is_new = server.behavior.sessions && record.rpc.as_deref() == Some("initialize") && record.path == "/mcp";
        Some(RegularResponse { session: is_new.then(|| server.session()), message })
    }

    async fn respond(&self, exchange: &mut Exchange, record: &Record, request: &Request) -> io::Result<NextStep> {
        let admitted = self.server.lock().unwrap().admit(record);
        if let Err(refusal) = admitted {
            return refuse(exchange, &refusal).await;
        }
        let behavior = self.server.lock().unwrap().behavior.clone();
        match (record.http.as_str(), record.path.as_str()) {
            ("POST", "/mcp") if !record.body.is_object() => {
                exchange.answer(400, &[], format!("{} bytes that are no JSON", request.body.len()).as_bytes()).await?;
            }
            ("POST", "/mcp") => {
                if let NextStep::Close = self.wait_if_sleep(exchange, record).await {
                    return Ok(NextStep::Close);
                }
                match (self.regular_response(record), behavior.format) {
                    (None, _) => exchange.answer(202, &[], b"").await?,
                    (Some(right), ResponseFormat::Json) => {
                        let body = right.message.to_string();
                        exchange.answer(200, &right.headers("application/json"), body.as_bytes()).await?;
                    }
                    (Some(right), ResponseFormat::Sse) => {
                        let mut head = stream_headers();
                        head.extend(right.headers("text/event-stream").into_iter().skip(1));
                        exchange.head(200, &head).await?;
                        exchange.chunk(&event("message", &right.message.to_string())).await?;
                        exchange.last_chunk().await?;
                    }
                }
            }
            ("GET", "/mcp") if behavior.streams => {
                let session = record.session.clone().unwrap_or_default();
                return self.stream(exchange, &session, None).await;
            }
            ("DELETE", "/mcp") if behavior.deletes => {
                let session = record.session.clone().unwrap_or_default();
                self.server.lock().unwrap().end(&session);
                exchange.answer(200, &[], b"").await?;
            }
            ("GET" | "DELETE", "/mcp") => exchange.answer(405, &headers(&[("allow", "POST")]), b"").await?,
            ("GET", "/sse") => {
                let session = self.server.lock().unwrap().session();
                let endpoint = format!("/message?session={session}");
                return self.stream(exchange, &session, Some(&endpoint)).await;
            }
            ("POST", "/message") => {
                exchange.answer(202, &[], b"Accepted").await?;
                if let NextStep::Close = self.wait_if_sleep(exchange, record).await {
                    return Ok(NextStep::Close);
                }
                if let (Some(right), Some(session)) = (self.regular_response(record), &record.session) {
                    self.server.lock().unwrap().send_to(session, right.message);
                }
            }
            ("GET", "/health") => exchange.answer(200, &headers(&[("content-type", "text/plain")]), b"well").await?,
            _ => exchange.answer(404, &[], b"Not Found").await?,
        }
        Ok(NextStep::Next)
    }

    /// Delays a call of `sleep` until it is released or the client has disconnected.
    async fn wait_if_sleep(&self, exchange: &mut Exchange, record: &Record) -> NextStep {
        if record.tool.as_deref() != Some("sleep") {
            return NextStep::Next;
        }
        let mut released = self.released.subscribe();
        select! {
            _ = released.wait_for(|released| *released) => NextStep::Next,
            () = exchange.closed() => NextStep::Close,
        }
    }

    /// Sends messages of the server on a stream until client or server ends it.
    async fn stream(&self, exchange: &mut Exchange, session: &str, endpoint: Option<&str>) -> io::Result<NextStep> {
        let mut pushes = self.server.lock().unwrap().stream(session);
        exchange.head(200, &stream_headers()).await?;
        if let Some(endpoint) = endpoint {
            exchange.chunk(&event("endpoint", endpoint)).await?;
        }
        let _counted = CountGuard::new(self, |log| log.streams += 1, |log| log.streams -= 1);
        // Over HTTP+SSE a session ends with its stream.
        let _ends = endpoint.map(|_| SessionGuard { shared: self, session });
        loop {
            let push = select! {
                push = pushes.recv() => push,
                () = exchange.closed() => return Ok(NextStep::Close),
            };
            match push {
                Some(Push::Message(message)) => exchange.chunk(&event("message", &message.to_string())).await?,
                // The test has ended the streams, or the session has ended.
                Some(Push::End) | None => {
                    exchange.last_chunk().await?;
                    return Ok(NextStep::Next);
                }
            }
        }
    }

    async fn misbehave(&self, exchange: &mut Exchange, record: &Record, action: Action) -> io::Result<NextStep> {
        let right = || self.regular_response(record).unwrap_or(RegularResponse { session: None, message: json!({}) });
        match action {
            Action::Respond { status, headers, body } => {
                let named: Headers = headers.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
                exchange.answer(status, &named, body.as_bytes()).await?;
                return Ok(NextStep::Next);
            }
            Action::RpcError { code, message } => {
                let body = mcp::error(&record.body["id"], code, message).to_string();
                exchange.answer(200, &headers(&[("content-type", "application/json")]), body.as_bytes()).await?;
                return Ok(NextStep::Next);
            }
            Action::Silence => exchange.closed().await,
            Action::HangUp => {}
            Action::Die => {
                self.dying.send_replace(true);
                std::future::pending::<()>().await;
            }
            Action::Freeze => {
                self.frozen.send_replace(true);
                exchange.closed().await;
            }
            Action::Cut(ResponseFormat::Json) => {
                let right = right();
                let whole = http::whole(200, &right.headers("application/json"), right.message.to_string().as_bytes());
                exchange.write(&whole[..whole.len() - 5]).await?;
            }
            Action::Cut(ResponseFormat::Sse) => {
                let whole = event("message", &right().message.to_string());
                exchange.head(200, &stream_headers()).await?;
                exchange.chunk(&whole[..whole.len() - 5]).await?;
            }
            Action::GarbageSse => {
                exchange.head(200, &stream_headers()).await?;
                exchange
                    .chunk(b"\xff\xfe\x00 garbage\n: comment\ndata\nid\nevent: message\ndata: {not json\n\n")
                    .await?;
                exchange.chunk(b"data: []\n\ndata: 17\n\nretry: soon\n\ndata: {\"half\": ").await?;
                exchange.last_chunk().await?;
                return Ok(NextStep::Next);
            }
            Action::Drip { pause } => {
                let right = right();
                let body = right.message.to_string();
                for byte in http::whole(200, &right.headers("application/json"), body.as_bytes()) {
                    exchange.write([byte]).await?;
                    sleep(pause).await;
                }
                return Ok(NextStep::Next);
            }
            Action::DripForever { pause } => {
                exchange.head(200, &stream_headers()).await?;
                loop {
                    exchange.chunk(b": alive\n").await?;
                    select! {
                        () = sleep(pause) => {}
                        () = exchange.closed() => break,
                    }
                }
            }
            Action::EndlessLine(form) => {
                let part = vec![b'x'; PART];
                let (head, first): (_, &[u8]) = match form {
                    ResponseFormat::Sse => (stream_headers(), b"data: \""),
                    ResponseFormat::Json => {
                        (headers(&[("content-type", "application/json"), ("transfer-encoding", "chunked")]), b"\"")
                    }
                };
                exchange.head(200, &head).await?;
                exchange.chunk(first).await?;
                loop {
                    exchange.chunk(&part).await?;
                    self.log.send_modify(|log| log.endless += part.len());
                }
            }
            Action::EndStreams => {
                exchange.answer(202, &[], b"").await?;
                self.server.lock().unwrap().end_streams();
                return Ok(NextStep::Next);
            }
            Action::Endpoint(address) => {
                exchange.head(200, &stream_headers()).await?;
                exchange.chunk(&event("endpoint", &address)).await?;
                exchange.closed().await;
            }
        }
        Ok(NextStep::Close)
    }
}

async fn refuse(exchange: &mut Exchange, refusal: &Refusal) -> io::Result<NextStep> {
    let json = headers(&[("content-type", "application/json")]);
    let without_id = |message| mcp::error(&Value::Null, -32000, message).to_string();
    match refusal {
        Refusal::Unauthorized => {
            let challenge = headers(&[("www-authenticate", "Bearer realm=\"peer\"")]);
            exchange.answer(401, &challenge, b"").await?;
        }
        Refusal::NoSession => {
            exchange.answer(400, &json, without_id("Bad Request: session required").as_bytes()).await?;
        }
        Refusal::Expired(Expiry::NotFound) => {
            exchange.answer(404, &json, without_id("Session not found").as_bytes()).await?;
        }
        Refusal::Expired(Expiry::BadRequest) => {
            let message = "Bad Request: No valid session ID provided";
            exchange.answer(400, &json, without_id(message).as_bytes()).await?;
        }
        Refusal::Expired(Expiry::EmptyBadRequest) => exchange.answer(400, &[], b"").await?,
    }
    Ok(NextStep::Next)
}
