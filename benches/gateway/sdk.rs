//! Baseline: rmcp's `StreamableHttpService` in front of rmcp's client of the same server. It runs in a child process, so
//! that its CPU time is measured without that of the clients.

use axum::serve::ListenerExt;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, ClientCapabilities, ClientConfig, ErrorData, Implementation,
    ProtocolVersion, ServerCapabilities, ServerConfig,
};
use rmcp::service::{Peer, RequestContext};
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use rmcp::{ClientHandler, RoleClient, RoleServer, ServerHandler, ServiceExt};
use std::process::Stdio;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::process::Command;

use crate::endpoint::echo_server;

pub(crate) const ROLE: &str = "sdk";

#[expect(clippy::print_stdout, reason = "the parent process reads the output")]
pub(crate) async fn serve() {
    let command = echo_server::command(None);
    let mut child = Command::new(&command[0])
        .args(&command[1..])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let pipes = (child.stdout.take().unwrap(), child.stdin.take().unwrap());
    let client = SdkClient.serve(pipes).await.unwrap();
    let handler = SdkProxy { server: client.peer().clone() };
    let sessions = Arc::new(LocalSessionManager::default());
    let service =
        StreamableHttpService::new(move || Ok(handler.clone()), sessions, StreamableHttpServerConfig::default());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("http://{}/mcp", listener.local_addr().unwrap());
    // Nagle's algorithm would delay events until the client's acknowledgement.
    let listener = listener.tap_io(|stream| stream.set_nodelay(true).unwrap());
    axum::serve(listener, axum::Router::new().nest_service("/mcp", service)).await.unwrap();
}

struct SdkClient;

impl ClientHandler for SdkClient {
    fn get_info(&self) -> ClientConfig {
        ClientConfig::new(ClientCapabilities::default(), Implementation::new("bench", "0"))
            .with_protocol_version(ProtocolVersion::V_2025_11_25)
    }
}

#[derive(Clone)]
struct SdkProxy {
    server: Peer<RoleClient>,
}

impl ServerHandler for SdkProxy {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(Implementation::new("bench", "0"))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let response = self.server.call_tool_once(request).await;
        response.map_err(|error| ErrorData::internal_error(error.to_string(), None))
    }
}
