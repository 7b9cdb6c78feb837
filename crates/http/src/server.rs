//! An HTTP/1.1 server: one loop accepts connections, each connection has a task. The MCP endpoint and the reference backend
//! use it. Written by hand around hyper, because `axum-server` spawns the task of a connection before the connection can be
//! refused or wait for its descriptor.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use axum::http::Request;
use axum::response::Response;
use futures::FutureExt as _;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::{Duration, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

/// Timeout for the header of a request, including the pause since the last request.
const HEADER_TIMEOUT: Duration = Duration::from_secs(75);
/// Bytes that are read ahead of a connection. A longer header is refused.
const READ_AHEAD: usize = 64 * 1024;
/// Pause after a failed `accept(2)`, which fails again at once while descriptors are missing.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Request whose body is read from the connection.
pub type IncomingRequest = Request<Incoming>;

pub trait Admission: Send + Sync + 'static {
    type Admitted: Send + 'static;
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// Admits or refuses a connection. The next one is not accepted before.
    fn admit(&self, stream: TcpStream, peer: SocketAddr) -> impl Future<Output = io::Result<Self::Admitted>> + Send;

    /// Prepares a connection in its own task, for example by a TLS handshake.
    fn prepare(&self, admitted: Self::Admitted) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

/// Admits each connection and turns off TCP's own delay of small packets.
#[derive(Debug)]
pub struct AdmitAll;

impl Admission for AdmitAll {
    type Admitted = TcpStream;
    type Stream = TcpStream;

    async fn admit(&self, stream: TcpStream, _: SocketAddr) -> io::Result<TcpStream> {
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    async fn prepare(&self, stream: TcpStream) -> io::Result<TcpStream> {
        Ok(stream)
    }
}

/// Signal that ends connections. A connection is polled for each message, so it waits for the signal only once, and looks
/// at a flag from then on; [`CancellationToken`] takes a lock that all connections share.
#[derive(Debug, Default)]
struct EndSignal {
    is_sent: AtomicBool,
    notify: Notify,
}

impl EndSignal {
    fn send(&self) {
        self.is_sent.store(true, Ordering::Release);
        self.notify.notify_waiters();
    }

    /// Waits for the signal. Must be polled by one task only.
    async fn wait(&self) {
        let mut notified = pin!(self.notify.notified());
        // From here on the signal is not missed; the task that polls first is woken.
        notified.as_mut().enable();
        let mut is_registered = false;
        poll_fn(|context| {
            if self.is_sent.load(Ordering::Acquire) {
                return Poll::Ready(());
            }
            if is_registered {
                return Poll::Pending;
            }
            is_registered = true;
            notified.as_mut().poll(context)
        })
        .await;
    }
}

/// A running server. Dropped, it ends at once, with its connections.
#[derive(Debug)]
pub struct HttpServer {
    /// Ends the loop.
    closing: CancellationToken,
    /// Ends each connection after the response under way.
    graceful: Arc<EndSignal>,
    /// Ends each connection at once.
    abort: Arc<EndSignal>,
    connections: TaskTracker,
    accept_loop: AbortOnDropHandle<()>,
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        self.abort.send();
    }
}

impl HttpServer {
    /// Serves a nonblocking listener. `service` answers the requests of a client at an address.
    pub fn start<A, S, F>(listener: TcpListener, admission: A, service: S) -> io::Result<Self>
    where
        A: Admission,
        S: Fn(SocketAddr, IncomingRequest) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Response> + Send + 'static,
    {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let (graceful, abort) = <(Arc<EndSignal>, Arc<EndSignal>)>::default();
        let (closing, connections) = <(CancellationToken, TaskTracker)>::default();
        let (ending, aborting, tasks) = (graceful.clone(), abort.clone(), connections.clone());
        let admission = Arc::new(admission);
        let accept_all = async move {
            loop {
                let (stream, peer) = match listener.accept().await {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        tracing::debug!(%error, "accepting a connection failed");
                        sleep(ACCEPT_PAUSE).await;
                        continue;
                    }
                };
                let admitted = match admission.admit(stream, peer).await {
                    Ok(admitted) => admitted,
                    Err(error) => {
                        tracing::debug!(%error, "a connection was refused");
                        continue;
                    }
                };
                let (admission, service) = (Arc::clone(&admission), service.clone());
                let (ending, aborting) = (ending.clone(), aborting.clone());
                // Boxed: each future around it stores it twice, and most connections are idle.
                let served = Box::pin(async move {
                    if let Ok(stream) = admission.prepare(admitted).await {
                        serve_connection(stream, peer, service, ending).await;
                    }
                });
                tasks.spawn(async move {
                    tokio::select! {
                        biased;
                        () = aborting.wait() => {}
                        () = served => {}
                    }
                });
            }
        };
        let accept_loop = closing.clone().run_until_cancelled_owned(accept_all).map(drop);
        let accept_loop = AbortOnDropHandle::new(tokio::spawn(accept_loop));
        Ok(Self { closing, graceful, abort, connections, accept_loop })
    }

    /// Accepts no more connections.
    pub async fn stop_accepting(&mut self) {
        self.closing.cancel();
        if !self.accept_loop.is_finished() {
            // An error means that the loop has panicked; it has ended, too.
            let _ = (&mut self.accept_loop).await;
        }
    }

    /// Accepts no more connections. Each connection ends after the response under way, at the latest after `deadline`.
    pub async fn close(&mut self, deadline: Duration) {
        self.graceful.send();
        self.stop_accepting().await;
        self.connections.close();
        if timeout(deadline, self.connections.wait()).await.is_err() {
            self.abort.send();
            self.connections.wait().await;
        }
    }

    /// Waits until the accept loop has ended and returns the reason; by itself it ends only if it panics.
    pub async fn wait_ended(&mut self) -> io::Error {
        match (&mut self.accept_loop).await {
            Ok(()) => io::Error::other("the server was closed"),
            Err(error) => io::Error::other(error),
        }
    }
}

async fn serve_connection<I, S, F>(stream: I, peer: SocketAddr, service: S, graceful: Arc<EndSignal>)
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    S: Fn(SocketAddr, IncomingRequest) -> F,
    F: Future<Output = Response> + Send + 'static,
{
    // Boxed: hyper keeps room for the future in each connection, and most connections are idle.
    let service = service_fn(|request| service(peer, request).map(Ok::<_, Infallible>).boxed());
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
    builder.max_buf_size(READ_AHEAD);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    // Errors are not reported: how a connection ends is its client's matter.
    tokio::select! {
        biased;
        _ = connection.as_mut() => return,
        () = graceful.wait() => connection.as_mut().graceful_shutdown(),
    }
    let _ = connection.await;
}
