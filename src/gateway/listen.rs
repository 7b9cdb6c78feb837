//! The listener: TCP without delay, HTTP/1 only, TLS if there is a certificate, and limits on what a connection may do
//! before it has said anything.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::Router;
use axum_server::Handle;
use axum_server::accept::Accept;
use axum_server::tls_rustls::{RustlsAcceptor, RustlsConfig};
use hyper_util::rt::TokioTimer;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;
use tokio::time::Duration;

/// For the head of a request, which includes the pause since the last one.
const HEAD_TIMEOUT: Duration = Duration::from_secs(75);
const HEADERS_MAX: usize = 64;
const TCP_KEEP_ALIVE: Duration = Duration::from_secs(60);

/// A certificate and its key.
#[derive(Debug, Clone)]
pub(crate) struct Identity(RustlsConfig);

/// Reads a certificate's chain and its key.
pub(crate) fn identity(cert: &Path, key: &Path) -> io::Result<Identity> {
    let pem = |error: rustls::pki_types::pem::Error| io::Error::new(io::ErrorKind::InvalidData, error.to_string());
    let chain: Vec<_> = CertificateDer::pem_file_iter(cert).map_err(pem)?.collect::<Result<_, _>>().map_err(pem)?;
    let key = PrivateKeyDer::from_pem_file(key).map_err(pem)?;
    let tls = |error: rustls::Error| io::Error::new(io::ErrorKind::InvalidData, error);
    let mut config = ServerConfig::builder().with_no_client_auth().with_single_cert(chain, key).map_err(tls)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Identity(RustlsConfig::from_config(Arc::new(config))))
}

impl Identity {
    /// New connections use the other from now on.
    pub(crate) fn renew(&self, other: &Self) {
        self.0.reload_from_config(other.0.get_inner());
    }
}

/// Takes the address, so that one that is taken is known before anything else begins.
pub(crate) fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// A listener at work. Dropped, it ends at once.
#[derive(Debug)]
pub(crate) struct Door {
    handle: Handle<SocketAddr>,
    task: JoinHandle<()>,
}

impl Drop for Door {
    fn drop(&mut self) {
        self.handle.shutdown();
        self.task.abort();
    }
}

impl Door {
    pub(crate) fn open(
        listener: TcpListener,
        router: Router,
        identity: Option<&Identity>,
        connections_max: usize,
    ) -> io::Result<Self> {
        let handle = Handle::new();
        let mut server = axum_server::from_tcp(listener)?.handle(handle.clone());
        server
            .http_builder()
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            .max_headers(HEADERS_MAX);
        let places = Arc::new(Semaphore::new(connections_max.min(Semaphore::MAX_PERMITS)));
        let limited = Limited { places };
        let service = router.into_make_service_with_connect_info::<SocketAddr>();
        let task = match identity {
            Some(Identity(config)) => {
                let acceptor = RustlsAcceptor::new(config.clone()).acceptor(limited);
                tokio::spawn(serve(server.acceptor(acceptor).http1_only().serve(service)))
            }
            None => tokio::spawn(serve(server.acceptor(limited).http1_only().serve(service))),
        };
        Ok(Self { handle, task })
    }

    /// Takes no more connections; those that there are end with their answers, at the latest after `left`.
    pub(crate) async fn close(mut self, left: Duration) {
        self.handle.graceful_shutdown(Some(left));
        // An error says that it has panicked: it is over, too.
        let _ = (&mut self.task).await;
    }
}

async fn serve(serving: impl Future<Output = io::Result<()>>) {
    if let Err(error) = serving.await {
        tracing::error!(%error, "the endpoint failed; no client can connect any more");
    }
}

/// Lets so many connections in, and sends what is written at once: a delay of TCP's own costs 40 ms an event.
#[derive(Debug, Clone)]
struct Limited {
    places: Arc<Semaphore>,
}

impl<S> Accept<TcpStream, S> for Limited {
    type Stream = Connection;
    type Service = S;
    type Future = std::future::Ready<io::Result<(Connection, S)>>;

    fn accept(&self, stream: TcpStream, service: S) -> Self::Future {
        std::future::ready(self.admit(stream).map(|connection| (connection, service)))
    }
}

impl Limited {
    fn admit(&self, stream: TcpStream) -> io::Result<Connection> {
        let place = self.places.clone().try_acquire_owned().map_err(|_| {
            tracing::debug!("a connection was closed: there are as many as there may be");
            io::Error::other("too many connections")
        })?;
        stream.set_nodelay(true)?;
        rustix::net::sockopt::set_socket_keepalive(&stream, true)?;
        rustix::net::sockopt::set_tcp_keepidle(&stream, TCP_KEEP_ALIVE)?;
        Ok(Connection { stream, _place: place })
    }
}

/// A connection and its place.
#[derive(Debug)]
struct Connection {
    stream: TcpStream,
    _place: OwnedSemaphorePermit,
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, from)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        from: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, from)
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
