//! MCP server with all features that the conformance suite (`@modelcontextprotocol/conformance`) tests, of protocol
//! 2025-11-25 and 2026-07-28. Usually it runs behind an endpoint over stdio. It can also serve HTTP with rmcp's own
//! server: a test that fails there, too, does not show a fault of the endpoint.
//!
//! ```text
//! conformance              over stdio
//! conformance 127.0.0.1:0  over HTTP; prints the URL
//! ```

#![expect(clippy::print_stdout, reason = "where it listens, for who started it")]

mod rounds;
mod server;

use std::error::Error;
use std::net::SocketAddr;

use rmcp::ServiceExt;
use rmcp::model::ServerNotification;
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use tokio::net::TcpListener;
use tokio::sync::broadcast;

use server::ConformanceServer;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    match std::env::args().nth(1) {
        None => {
            let pipes = (tokio::io::stdin(), tokio::io::stdout());
            ConformanceServer::new(changes()).serve(pipes).await?.waiting().await?;
        }
        Some(address) => listen(address.parse()?).await?,
    }
    Ok(())
}

async fn listen(address: SocketAddr) -> Result<(), Box<dyn Error>> {
    let listener = TcpListener::bind(address).await?;
    println!("http://{}/mcp", listener.local_addr()?);
    let sessions = LocalSessionManager::default().into();
    let changes = changes();
    let fixture = move || Ok(ConformanceServer::new(changes.clone()));
    let service = StreamableHttpService::new(fixture, sessions, StreamableHttpServerConfig::default());
    axum::serve(listener, axum::Router::new().nest_service("/mcp", service)).await?;
    Ok(())
}

fn changes() -> broadcast::Sender<ServerNotification> {
    broadcast::Sender::new(16)
}
