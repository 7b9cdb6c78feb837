//! A server of a test, in threads of its own: it can go away and come back on its port.

use std::net::SocketAddr;

use axum::Router;
use tokio::runtime::Runtime;

pub(crate) struct Served {
    address: SocketAddr,
    router: Router,
    runtime: Option<Runtime>,
}

impl Served {
    pub(crate) fn start(router: Router) -> Self {
        let mut served = Self { address: SocketAddr::from(([127, 0, 0, 1], 0)), router, runtime: None };
        served.begin();
        served
    }

    pub(crate) fn begin(&mut self) {
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind(self.address)).unwrap();
        self.address = listener.local_addr().unwrap();
        let router = self.router.clone();
        runtime.spawn(async move { axum::serve(listener, router).await });
        self.runtime = Some(runtime);
    }

    /// Ends it with every connection.
    pub(crate) fn end(&mut self) {
        self.runtime.take().unwrap().shutdown_timeout(std::time::Duration::from_secs(5));
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }
}
