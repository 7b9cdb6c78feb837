//! One connection: requests in, answers out, as the manners say or as the script does.

use std::io;
use std::ops::Deref;
use std::sync::Arc;

use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::select;
use tokio::time::sleep;
use tokio_rustls::TlsAcceptor;

use super::Shared;
use super::http::{self, Exchange, Headers, NoRequest, Request, event, headers};
use super::mcp::{self, Expiry, Push, Refusal};
use super::record::{Record, Seen};
use super::script::{Answers, Deed};

/// An endless line goes out in parts of this many bytes.
const PART: usize = 16 * 1024;

/// Counts while it is there.
pub(super) struct Counted<S: Deref<Target = Shared>> {
    shared: S,
    uncount: fn(&mut Seen),
}

impl<S: Deref<Target = Shared>> Counted<S> {
    pub(super) fn new(shared: S, count: fn(&mut Seen), uncount: fn(&mut Seen)) -> Self {
        shared.seen.send_modify(count);
        Self { shared, uncount }
    }
}

impl<S: Deref<Target = Shared>> Drop for Counted<S> {
    fn drop(&mut self) {
        self.shared.seen.send_modify(self.uncount);
    }
}

/// Serves a connection until one of the two ends it.
pub(super) async fn serve(nth: usize, stream: TcpStream, tls: Option<TlsAcceptor>, shared: Arc<Shared>) {
    // Small answers are seen at once.
    let _ = stream.set_nodelay(true);
    let mut exchange = match tls {
        None => Exchange::new(Box::new(stream)),
        Some(tls) => match tls.accept(stream).await {
            Ok(stream) => Exchange::new(Box::new(stream)),
            Err(_) => return shared.seen.send_modify(|seen| seen.misunderstood += 1),
        },
    };
    loop {
        let request = match exchange.request().await {
            Ok(request) => request,
            Err(NoRequest::Closed) => return,
            Err(NoRequest::Malformed) => {
                shared.seen.send_modify(|seen| seen.misunderstood += 1);
                let _ = exchange.answer(400, &headers(&[("connection", "close")]), b"Bad Request").await;
                return;
            }
        };
        exchange.closes = !shared.server.lock().unwrap().manners.keeps_alive;
        let record = Record::new(nth, &request);
        let deed = shared.script.lock().unwrap().decide(&record);
        let is_initialize = record.rpc.as_deref() == Some("initialize");
        let _initializing = is_initialize.then(|| Counted::new(&*shared, initializing, |seen| seen.initializing -= 1));
        shared.seen.send_modify(|seen| seen.requests.push(record.clone()));
        let done = match deed {
            Some(deed) => Box::pin(shared.misbehave(&mut exchange, &record, deed)).await,
            None => shared.behave(&mut exchange, &record, &request).await,
        };
        match done {
            Ok(After::Next) if !exchange.closes => {}
            Ok(After::Next | After::Close) | Err(_) => return,
        }
    }
}

/// Ends a session with what it was.
struct Ends<'a> {
    shared: &'a Shared,
    session: &'a str,
}

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.shared.server.lock().unwrap().end(self.session);
    }
}

fn initializing(seen: &mut Seen) {
    seen.initializing += 1;
    seen.initializing_max = seen.initializing_max.max(seen.initializing);
}

/// What becomes of a connection after a request.
enum After {
    Next,
    Close,
}

/// The right answer.
struct Right {
    session: Option<String>,
    message: Value,
}

impl Right {
    fn headers(&self, content_type: &str) -> Headers {
        let session = self.session.iter().map(|session| ("mcp-session-id".to_owned(), session.clone()));
        headers(&[("content-type", content_type)]).into_iter().chain(session).collect()
    }
}

/// The headers of an event stream.
fn stream_headers() -> Headers {
    headers(&[("content-type", "text/event-stream"), ("cache-control", "no-cache"), ("transfer-encoding", "chunked")])
}

impl Shared {
    /// What a message comes to; none if nothing is to be answered.
    fn right(&self, record: &Record) -> Option<Right> {
        let mut server = self.server.lock().unwrap();
        let message = server.answer(&record.body)?;
        let is_new = server.manners.sessions && record.rpc.as_deref() == Some("initialize") && record.path == "/mcp";
        Some(Right { session: is_new.then(|| server.session()), message })
    }

    async fn behave(&self, exchange: &mut Exchange, record: &Record, request: &Request) -> io::Result<After> {
        let admitted = self.server.lock().unwrap().admit(record);
        if let Err(refusal) = admitted {
            return refuse(exchange, &refusal).await;
        }
        let manners = self.server.lock().unwrap().manners.clone();
        match (record.http.as_str(), record.path.as_str()) {
            ("POST", "/mcp") if !record.body.is_object() => {
                exchange.answer(400, &[], format!("{} bytes that are no JSON", request.body.len()).as_bytes()).await?;
            }
            ("POST", "/mcp") => {
                if let After::Close = self.turn_to_sleep(exchange, record).await {
                    return Ok(After::Close);
                }
                match (self.right(record), manners.answers) {
                    (None, _) => exchange.answer(202, &[], b"").await?,
                    (Some(right), Answers::Json) => {
                        let body = right.message.to_string();
                        exchange.answer(200, &right.headers("application/json"), body.as_bytes()).await?;
                    }
                    (Some(right), Answers::Sse) => {
                        let mut head = stream_headers();
                        head.extend(right.headers("text/event-stream").into_iter().skip(1));
                        exchange.head(200, &head).await?;
                        exchange.chunk(&event("message", &right.message.to_string())).await?;
                        exchange.last_chunk().await?;
                    }
                }
            }
            ("GET", "/mcp") if manners.streams => {
                let session = record.session.clone().unwrap_or_default();
                return self.stream(exchange, &session, None).await;
            }
            ("DELETE", "/mcp") if manners.deletes => {
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
                if let After::Close = self.turn_to_sleep(exchange, record).await {
                    return Ok(After::Close);
                }
                if let (Some(right), Some(session)) = (self.right(record), &record.session) {
                    self.server.lock().unwrap().tell_one(session, right.message);
                }
            }
            ("GET", "/health") => exchange.answer(200, &headers(&[("content-type", "text/plain")]), b"well").await?,
            _ => exchange.answer(404, &[], b"Not Found").await?,
        }
        Ok(After::Next)
    }

    /// A call of `sleep` waits here until it is released or its client has gone.
    async fn turn_to_sleep(&self, exchange: &mut Exchange, record: &Record) -> After {
        if record.tool.as_deref() != Some("sleep") {
            return After::Next;
        }
        let mut released = self.released.subscribe();
        select! {
            _ = released.wait_for(|released| *released) => After::Next,
            () = exchange.closed() => After::Close,
        }
    }

    /// A stream of what the server says by itself, until one of the two ends it.
    async fn stream(&self, exchange: &mut Exchange, session: &str, endpoint: Option<&str>) -> io::Result<After> {
        let mut pushes = self.server.lock().unwrap().stream(session);
        exchange.head(200, &stream_headers()).await?;
        if let Some(endpoint) = endpoint {
            exchange.chunk(&event("endpoint", endpoint)).await?;
        }
        let _counted = Counted::new(self, |seen| seen.streams += 1, |seen| seen.streams -= 1);
        // Over HTTP+SSE a session is a stream.
        let _ends = endpoint.map(|_| Ends { shared: self, session });
        loop {
            let push = select! {
                push = pushes.recv() => push,
                () = exchange.closed() => return Ok(After::Close),
            };
            match push {
                Some(Push::Message(message)) => exchange.chunk(&event("message", &message.to_string())).await?,
                // Asked to end, or the session is over.
                Some(Push::End) | None => {
                    exchange.last_chunk().await?;
                    return Ok(After::Next);
                }
            }
        }
    }

    async fn misbehave(&self, exchange: &mut Exchange, record: &Record, deed: Deed) -> io::Result<After> {
        let right = || self.right(record).unwrap_or(Right { session: None, message: json!({}) });
        match deed {
            Deed::Answer { status, headers, body } => {
                let named: Headers = headers.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
                exchange.answer(status, &named, body.as_bytes()).await?;
                return Ok(After::Next);
            }
            Deed::RpcError { code, message } => {
                let body = mcp::error(&record.body["id"], code, message).to_string();
                exchange.answer(200, &headers(&[("content-type", "application/json")]), body.as_bytes()).await?;
                return Ok(After::Next);
            }
            Deed::Silence => exchange.closed().await,
            Deed::HangUp => {}
            Deed::Die => {
                self.dying.send_replace(true);
                std::future::pending::<()>().await;
            }
            Deed::Freeze => {
                self.frozen.send_replace(true);
                exchange.closed().await;
            }
            Deed::Cut(Answers::Json) => {
                let right = right();
                let whole = http::whole(200, &right.headers("application/json"), right.message.to_string().as_bytes());
                exchange.write(&whole[..whole.len() - 5]).await?;
            }
            Deed::Cut(Answers::Sse) => {
                let whole = event("message", &right().message.to_string());
                exchange.head(200, &stream_headers()).await?;
                exchange.chunk(&whole[..whole.len() - 5]).await?;
            }
            Deed::GarbageSse => {
                exchange.head(200, &stream_headers()).await?;
                exchange
                    .chunk(b"\xff\xfe\x00 garbage\n: comment\ndata\nid\nevent: message\ndata: {not json\n\n")
                    .await?;
                exchange.chunk(b"data: []\n\ndata: 17\n\nretry: soon\n\ndata: {\"half\": ").await?;
                exchange.last_chunk().await?;
                return Ok(After::Next);
            }
            Deed::Drip { pause } => {
                let right = right();
                let body = right.message.to_string();
                for byte in http::whole(200, &right.headers("application/json"), body.as_bytes()) {
                    exchange.write([byte]).await?;
                    sleep(pause).await;
                }
                return Ok(After::Next);
            }
            Deed::DripForever { pause } => {
                exchange.head(200, &stream_headers()).await?;
                loop {
                    exchange.chunk(b": alive\n").await?;
                    select! {
                        () = sleep(pause) => {}
                        () = exchange.closed() => break,
                    }
                }
            }
            Deed::EndlessLine(form) => {
                let part = vec![b'x'; PART];
                let (head, first): (_, &[u8]) = match form {
                    Answers::Sse => (stream_headers(), b"data: \""),
                    Answers::Json => {
                        (headers(&[("content-type", "application/json"), ("transfer-encoding", "chunked")]), b"\"")
                    }
                };
                exchange.head(200, &head).await?;
                exchange.chunk(first).await?;
                loop {
                    exchange.chunk(&part).await?;
                    self.seen.send_modify(|seen| seen.endless += part.len());
                }
            }
            Deed::EndStreams => {
                exchange.answer(202, &[], b"").await?;
                self.server.lock().unwrap().end_streams();
                return Ok(After::Next);
            }
            Deed::Endpoint(address) => {
                exchange.head(200, &stream_headers()).await?;
                exchange.chunk(&event("endpoint", &address)).await?;
                exchange.closed().await;
            }
        }
        Ok(After::Close)
    }
}

async fn refuse(exchange: &mut Exchange, refusal: &Refusal) -> io::Result<After> {
    let json = headers(&[("content-type", "application/json")]);
    let nobody = |message| mcp::error(&Value::Null, -32000, message).to_string();
    match refusal {
        Refusal::Unauthorized => {
            let challenge = headers(&[("www-authenticate", "Bearer realm=\"peer\"")]);
            exchange.answer(401, &challenge, b"").await?;
        }
        Refusal::NoSession => exchange.answer(400, &json, nobody("Bad Request: session required").as_bytes()).await?,
        Refusal::Expired(Expiry::NotFound) => {
            exchange.answer(404, &json, nobody("Session not found").as_bytes()).await?;
        }
        Refusal::Expired(Expiry::BadRequest) => {
            let message = "Bad Request: No valid session ID provided";
            exchange.answer(400, &json, nobody(message).as_bytes()).await?;
        }
        Refusal::Expired(Expiry::Plainly) => exchange.answer(400, &[], b"").await?,
    }
    Ok(After::Next)
}
