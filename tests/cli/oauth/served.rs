//! An HTTP server with its own threads, which can be stopped and restarted on the same port.

use std::net::SocketAddr;

use axum::Router;
use tokio::runtime::Runtime;

pub(crate) struct TestServer {
    address: SocketAddr,
    router: Router,
    runtime: Option<Runtime>,
}

impl TestServer {
    pub(crate) fn start(router: Router) -> Self {
        let mut server = Self { address: SocketAddr::from(([127, 0, 0, 1], 0)), router, runtime: None };
        server.listen();
        server
    }

    pub(crate) fn listen(&mut self) {
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind(self.address)).unwrap();
        self.address = listener.local_addr().unwrap();
        let router = self.router.clone();
        runtime.spawn(async move { axum::serve(listener, router).await });
        self.runtime = Some(runtime);
    }

    /// Stops the server and closes all connections.
    pub(crate) fn stop(&mut self) {
        self.runtime.take().unwrap().shutdown_timeout(std::time::Duration::from_secs(5));
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }
}
