//! Baseline: rmcp's `StreamableHttpService` in front of the same runtime. It runs in a child process, so that its CPU
//! time is measured without that of the clients.

use std::sync::Arc;

use axum::serve::ListenerExt;
use mcp_satellite::connect::stdio::StdioConnector;
use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::policy::Policy;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ErrorData, Implementation, ServerCapabilities,
    ServerConfig,
};
use rmcp::service::RequestContext;
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use rmcp::{RoleServer, ServerHandler};
use serde_json::value::RawValue;
use tokio::net::TcpListener;

use super::common::{NullSink, TIMEOUT, is_online, spec, start};
use super::gateways;

pub(crate) const CHILD: &str = "SATELLITE_BENCH_GATEWAY_SDK";

pub(crate) fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

#[expect(clippy::print_stdout, reason = "the parent process reads the output")]
pub(crate) async fn serve() {
    let spec = spec(0, 1, 1, &gateways::echo(1), &Arc::new(Policy::default()));
    let id = spec.id.clone();
    let runtime = start(StdioConnector::new(Vec::new()).unwrap(), NullSink, |_| {}).await;
    runtime.install(spec).await.unwrap();
    tokio::time::timeout(TIMEOUT, runtime.wait_for(&id, is_online)).await.unwrap().unwrap();
    let handler = RuntimeHandler { runtime, id };
    let sessions = Arc::new(LocalSessionManager::default());
    let service =
        StreamableHttpService::new(move || Ok(handler.clone()), sessions, StreamableHttpServerConfig::default());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("http://{}/mcp", listener.local_addr().unwrap());
    // Nagle's algorithm would delay events until the client's acknowledgement.
    let listener = listener.tap_io(|stream| stream.set_nodelay(true).unwrap());
    axum::serve(listener, axum::Router::new().nest_service("/mcp", service)).await.unwrap();
}

#[derive(Clone)]
struct RuntimeHandler {
    runtime: RuntimeHandle,
    id: InstanceId,
}

impl ServerHandler for RuntimeHandler {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(Implementation::new("bench", "0"))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let internal = |error: String| ErrorData::internal_error(error, None);
        let arguments = request.arguments.unwrap_or_default();
        let arguments = RawValue::from_string(serde_json::to_string(&arguments).unwrap()).unwrap();
        let result = self.runtime.call(&self.id, &request.name, Some(arguments), None).await;
        let result = result.map_err(|error| internal(error.to_string()))?;
        let result: CallToolResult = serde_json::from_str(result.get()).map_err(|error| internal(error.to_string()))?;
        Ok(result.into())
    }
}
