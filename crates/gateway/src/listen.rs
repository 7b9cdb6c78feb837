//! The listener: TCP without delay, HTTP/1 only, TLS if there is a certificate, and limits for connections that have
//! not sent a valid token.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsRawFd as _;
use std::pin::Pin;
use std::sync::{Arc, PoisonError, RwLock};
use std::task::{Context, Poll};

use axum::response::Response;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Duration, Instant, Sleep, sleep_until};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::either::Either;

use mcp_satellite_http::tls::TlsIdentity;

use super::connections::{ConnectionLimits, ConnectionPlace, Connections};
use super::http_requests::{self, EndpointService};
use mcp_satellite_http::server::{Admission, HttpServer, IncomingRequest};

const TCP_KEEP_ALIVE: Duration = Duration::from_secs(60);
// Time after which the system closes a connection whose client does not acknowledge sent data.
const UNREAD_MS: u32 = 60_000;

pub(crate) fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Certificate and connection limits of all listeners. Changes apply to future connections.
#[derive(Debug)]
pub(crate) struct ListenerTerms {
    identity: RwLock<Option<TlsIdentity>>,
    connections: Arc<Connections>,
}

impl ListenerTerms {
    pub(crate) fn new(identity: Option<TlsIdentity>, connections: Arc<Connections>) -> Self {
        Self { identity: RwLock::new(identity), connections }
    }

    pub(crate) fn set(&self, identity: Option<TlsIdentity>, limits: ConnectionLimits) {
        *self.identity.write().unwrap_or_else(PoisonError::into_inner) = identity;
        self.connections.set_limits(limits);
    }

    pub(crate) fn load_identity(&self) -> Option<TlsIdentity> {
        self.identity.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[derive(Debug)]
pub(crate) struct EndpointListener {
    // Duplicate of the socket, for a listener that replaces this one. `None` once it closes: as long as any duplicate
    // is open, the system accepts connections that no task serves.
    socket: Option<TcpListener>,
    server: HttpServer,
}

impl EndpointListener {
    pub(crate) fn open<S, F>(listener: TcpListener, terms: Arc<ListenerTerms>, answer: S) -> io::Result<Self>
    where
        S: Fn(SocketAddr, IncomingRequest) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Response> + Send + 'static,
    {
        let socket = Some(listener.try_clone()?);
        let server = HttpServer::start(listener, EndpointAdmission { terms }, answer)?;
        Ok(Self { socket, server })
    }

    pub(crate) fn open_endpoint(
        listener: TcpListener,
        endpoint: Arc<EndpointService>,
        terms: Arc<ListenerTerms>,
    ) -> io::Result<Self> {
        Self::open(listener, terms, move |peer, request| http_requests::handle(endpoint.clone(), peer, request))
    }

    /// Opens another listener on the same socket.
    pub(crate) fn reopen<S, F>(&self, terms: Arc<ListenerTerms>, answer: S) -> io::Result<Self>
    where
        S: Fn(SocketAddr, IncomingRequest) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Response> + Send + 'static,
    {
        let socket = self.socket.as_ref().ok_or_else(|| io::Error::other("the listener is closed"))?;
        Self::open(socket.try_clone()?, terms, answer)
    }

    pub(crate) fn reopen_endpoint(
        &self,
        endpoint: Arc<EndpointService>,
        terms: Arc<ListenerTerms>,
    ) -> io::Result<Self> {
        self.reopen(terms, move |peer, request| http_requests::handle(endpoint.clone(), peer, request))
    }

    /// Returns a duplicate of the listening socket.
    pub(crate) fn duplicate_socket(&self) -> Option<TcpListener> {
        self.socket.as_ref()?.try_clone().ok()
    }

    pub(crate) async fn stop_accepting(&mut self) {
        self.socket = None;
        self.server.stop_accepting().await;
    }

    /// Stops accepting; open connections end after their responses, at the latest after `left`.
    pub(crate) async fn close(mut self, time_left: Duration) {
        self.socket = None;
        self.server.close(time_left).await;
    }
}

#[derive(Debug)]
struct EndpointAdmission {
    terms: Arc<ListenerTerms>,
}

impl Admission for EndpointAdmission {
    type Admitted = Connection;
    type Stream = Either<Connection, TlsStream<Connection>>;

    async fn admit(&self, stream: TcpStream, peer: SocketAddr) -> io::Result<Connection> {
        let stream = self.move_out_of_reserve(stream).await?;
        let now = Instant::now();
        let entry = self.terms.connections.admit(peer, stream.as_raw_fd(), now);
        let entry = entry.ok_or_else(|| io::Error::other("too many connections"))?;
        // TCP's own delay of small packets costs 40 ms per event.
        stream.set_nodelay(true)?;
        rustix::net::sockopt::set_socket_keepalive(&stream, true)?;
        rustix::net::sockopt::set_tcp_keepidle(&stream, TCP_KEEP_ALIVE)?;
        rustix::net::sockopt::set_tcp_user_timeout(&stream, UNREAD_MS)?;
        let deadline = Some(Box::pin(sleep_until(now + entry.header_timeout)));
        Ok(Connection { stream, entry, deadline })
    }

    async fn prepare(&self, connection: Connection) -> io::Result<Self::Stream> {
        match self.terms.load_identity() {
            None => Ok(Either::Left(connection)),
            Some(TlsIdentity(config)) => TlsAcceptor::from(config).accept(connection).await.map(Either::Right),
        }
    }
}

impl EndpointAdmission {
    /// Gives a connection whose descriptor is of the reserve the descriptor of the oldest unauthenticated connection, which
    /// is closed for it.
    async fn move_out_of_reserve(&self, stream: TcpStream) -> io::Result<TcpStream> {
        if !self.terms.connections.evict_for_descriptor(stream.as_raw_fd()) {
            return Ok(stream);
        }
        self.terms.connections.wait_evicted_closed().await;
        // The copy has the lowest number that is free.
        TcpStream::from_std(stream.into_std()?.try_clone()?)
    }
}

#[derive(Debug)]
struct Connection {
    stream: TcpStream,
    entry: ConnectionPlace,
    deadline: Option<Pin<Box<Sleep>>>,
}

impl Connection {
    fn count_written(&self, written: &Poll<io::Result<usize>>) {
        if let Poll::Ready(Ok(bytes)) = written {
            self.entry.traffic().count_sent(*bytes);
        }
    }

    fn poll_should_close(&mut self, context: &mut Context<'_>) -> bool {
        let Some(deadline) = &mut self.deadline else { return false };
        if self.entry.is_authenticated() {
            self.deadline = None;
            return false;
        }
        if deadline.as_mut().poll(context).is_ready() {
            tracing::debug!("a connection without a valid token was closed after `header_timeout`");
            return true;
        }
        self.entry.poll_evicted(context)
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.poll_should_close(context) {
            // Reports the end of the stream, so an open response is still written.
            return Poll::Ready(Ok(()));
        }
        let before = into.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, into);
        self.entry.traffic().count_received(into.filled().len() - before);
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, from);
        self.count_written(&written);
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        from: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, from);
        self.count_written(&written);
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
