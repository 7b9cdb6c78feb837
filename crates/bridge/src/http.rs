//! An HTTP/1.1 client for one address, as small as possible: a bridge runs for every client. Connections are reused; a
//! request that a reused connection has not sent is sent on a new one. Dropping a response closes its connection, which
//! cancels the request.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, EXPECT, HOST, USER_AGENT};
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use mcp_satellite_model::secret::Secret;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use super::certificate::pinned_connector;

const AGENT: HeaderValue = HeaderValue::from_static(concat!("mcp-satellite-stdio/", env!("CARGO_PKG_VERSION")));
const JSON: HeaderValue = HeaderValue::from_static("application/json");
const ANY_ANSWER: HeaderValue = HeaderValue::from_static("application/json, text/event-stream");
const STREAM: HeaderValue = HeaderValue::from_static("text/event-stream");
const CONTINUE: HeaderValue = HeaderValue::from_static("100-continue");
const EVENT_STREAM: &str = "text/event-stream";

/// The endpoint is on this machine: a connection that is not accepted within this time will not be.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes that are read ahead of a slow client, on each connection.
const READ_AHEAD: usize = 64 << 10;
/// Maximum size of a body that is sent without asking first. The satellite closes the connection when it rejects a
/// request, and its answer is lost if the rest of the body is on the way.
const UNASKED_MAX: usize = 256 << 10;
/// Connections that are kept for the next requests.
const IDLE_MAX: usize = 8;

/// Address of the endpoint of a running satellite, and access to it.
#[derive(Debug, Clone)]
pub struct SatelliteAddress {
    pub address: SocketAddr,
    /// Value of the `Host` header.
    pub host: String,
    /// Bearer token; `None` without authentication.
    pub token: Option<Secret>,
    /// PEM file with the certificate of the endpoint; `None` for plain HTTP.
    pub certificate: Option<PathBuf>,
}

/// A request without a response. `sent` is false if no byte of it was sent.
#[derive(Debug)]
pub(crate) struct ExchangeError {
    pub sent: bool,
    pub why: String,
}

type Connection = SendRequest<RequestBody>;

/// Body of a request. A large one is not sent before the satellite asks for it.
struct RequestBody {
    bytes: Bytes,
    permission: Option<Pin<Box<WaitForCancellationFutureOwned>>>,
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some(permission) = &mut self.permission {
            ready!(permission.as_mut().poll(cx));
            self.permission = None;
        }
        let bytes = std::mem::take(&mut self.bytes);
        Poll::Ready((!bytes.is_empty()).then(|| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes.len() as u64)
    }
}

pub(crate) struct EndpointClient {
    address: SocketAddr,
    host: HeaderValue,
    authorization: Option<HeaderValue>,
    tls: Option<TlsConnector>,
    idle: Mutex<Vec<Connection>>,
}

/// A response whose body is read in chunks.
pub(crate) struct SatelliteResponse {
    pub status: StatusCode,
    pub headers: HeaderMap,
    body: Incoming,
    connection: Option<(Arc<EndpointClient>, Connection)>,
}

impl EndpointClient {
    pub(crate) fn new(satellite: &SatelliteAddress) -> io::Result<Self> {
        let invalid = |_| io::Error::new(io::ErrorKind::InvalidData, "the token cannot be sent in a header");
        let authorization = satellite.token.as_ref().map(|token| {
            let mut value = HeaderValue::try_from(format!("Bearer {}", token.expose())).map_err(invalid)?;
            value.set_sensitive(true);
            Ok::<_, io::Error>(value)
        });
        let tls = satellite.certificate.as_ref().map(|file| {
            let why = |error| io::Error::other(format!("cannot use {}: {error}", file.display()));
            pinned_connector(file).map_err(why)
        });
        let host = HeaderValue::try_from(&*satellite.host).map_err(io::Error::other)?;
        Ok(Self {
            address: satellite.address,
            host,
            authorization: authorization.transpose()?,
            tls: tls.transpose()?,
            idle: Mutex::default(),
        })
    }

    /// Sends a message.
    pub(crate) async fn post(
        self: &Arc<Self>,
        path: &str,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<SatelliteResponse, ExchangeError> {
        let mut request = self.request(Method::POST, path, headers, body);
        request.headers_mut().insert(CONTENT_TYPE, JSON);
        request.headers_mut().insert(ACCEPT, ANY_ANSWER);
        self.send(request).await
    }

    /// Opens a stream.
    pub(crate) async fn get(
        self: &Arc<Self>,
        path: &str,
        headers: HeaderMap,
    ) -> Result<SatelliteResponse, ExchangeError> {
        let mut request = self.request(Method::GET, path, headers, Bytes::new());
        request.headers_mut().insert(ACCEPT, STREAM);
        self.send(request).await
    }

    /// Ends a session.
    pub(crate) async fn delete(
        self: &Arc<Self>,
        path: &str,
        headers: HeaderMap,
    ) -> Result<SatelliteResponse, ExchangeError> {
        self.send(self.request(Method::DELETE, path, headers, Bytes::new())).await
    }

    fn request(&self, method: Method, path: &str, headers: HeaderMap, body: Bytes) -> Request<RequestBody> {
        let permission = (body.len() > UNASKED_MAX).then(CancellationToken::new);
        let wait = permission.clone().map(|permission| Box::pin(permission.cancelled_owned()));
        let mut request = Request::new(RequestBody { bytes: body, permission: wait });
        *request.method_mut() = method;
        // The path was validated when the bridge started.
        *request.uri_mut() = path.parse().unwrap_or_default();
        *request.headers_mut() = headers;
        let headers = request.headers_mut();
        headers.insert(HOST, self.host.clone());
        headers.insert(USER_AGENT, AGENT);
        if let Some(authorization) = &self.authorization {
            headers.insert(AUTHORIZATION, authorization.clone());
        }
        if let Some(permission) = permission {
            headers.insert(EXPECT, CONTINUE);
            hyper::ext::on_informational(&mut request, move |_| permission.cancel());
        }
        request
    }

    async fn send(self: &Arc<Self>, mut request: Request<RequestBody>) -> Result<SatelliteResponse, ExchangeError> {
        let is_asking = request.headers().contains_key(EXPECT);
        loop {
            let idle = self.idle().pop();
            let is_reused = idle.is_some();
            let mut connection = match idle {
                Some(connection) => connection,
                None => self.connect().await.map_err(|error| ExchangeError { sent: false, why: error.to_string() })?,
            };
            if connection.ready().await.is_err() && is_reused {
                continue;
            }
            match connection.try_send_request(request).await {
                Ok(response) => {
                    let (parts, body) = response.into_parts();
                    // An answer may come instead of the permission; the rest of the request is never sent then.
                    let connection = (!is_asking || parts.status.is_success()).then(|| (Arc::clone(self), connection));
                    return Ok(SatelliteResponse { status: parts.status, headers: parts.headers, body, connection });
                }
                Err(mut error) => match error.take_message() {
                    Some(unsent) if is_reused => request = unsent,
                    unsent => {
                        return Err(ExchangeError { sent: unsent.is_none(), why: describe(error.error()) });
                    }
                },
            }
        }
    }

    async fn connect(&self) -> io::Result<Connection> {
        let connect = async {
            let stream = TcpStream::connect(self.address).await?;
            stream.set_nodelay(true)?;
            let Some(tls) = &self.tls else { return start_connection(stream).await };
            start_connection(tls.connect(ServerName::IpAddress(self.address.ip().into()), stream).await?).await
        };
        timeout(CONNECT_TIMEOUT, connect).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Connection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn start_connection(
    stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin + 'static,
) -> io::Result<Connection> {
    let handshake = http1::Builder::new().max_buf_size(READ_AHEAD).handshake(TokioIo::new(stream));
    let (sender, connection) = handshake.await.map_err(io::Error::other)?;
    tokio::spawn(async move {
        // The request that uses the connection reports its error.
        let _ = connection.await;
    });
    Ok(sender)
}

/// Describes the root cause of an error.
fn describe(error: &hyper::Error) -> String {
    let causes = std::iter::successors(Some(error as &dyn std::error::Error), |error| error.source());
    causes.last().map(ToString::to_string).unwrap_or_default()
}

impl SatelliteResponse {
    pub(crate) fn is_stream(&self) -> bool {
        let kind = self.headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        kind.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case(EVENT_STREAM))
    }

    pub(crate) fn header(&self, name: &http::HeaderName) -> Option<&HeaderValue> {
        self.headers.get(name)
    }

    /// Returns the size of the body, if it was announced.
    pub(crate) fn announced_length(&self) -> Option<usize> {
        self.headers.get(http::header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
    }

    /// Returns the next part of the body; `None` at its end. After the end, the connection serves other requests.
    pub(crate) async fn chunk(&mut self) -> Result<Option<Bytes>, ExchangeError> {
        loop {
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
                Some(Err(error)) => return Err(ExchangeError { sent: true, why: describe(&error) }),
                None => {
                    if let Some((client, connection)) = self.connection.take() {
                        let mut idle = client.idle();
                        if idle.len() < IDLE_MAX && !connection.is_closed() {
                            idle.push(connection);
                        }
                    }
                    return Ok(None);
                }
            }
        }
    }
}
