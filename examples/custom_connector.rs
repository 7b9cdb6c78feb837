//! Implements a connector: every server is started through another program. `nice` is here; `docker run -i IMAGE` or
//! `ssh HOST` work in the same way.
//!
//! ```text
//! cargo run --example custom_connector -- npx -y @modelcontextprotocol/server-everything
//! ```

#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;
use std::sync::Arc;

use futures::future::BoxFuture;
use mcp_satellite::actors::model::ids::RunNumber;
use mcp_satellite::actors::model::spec::{InstanceSpec, ServerTarget};
use mcp_satellite::actors::seam::{Connectors, OpenError, ProcessConnector, ProcessLink};
use mcp_satellite::connect::stdio::StdioConnector;
use mcp_satellite::{Instance, Runtime};
use serde_json::json;

/// Connector that starts servers with a low priority.
struct NiceConnector(StdioConnector);

impl ProcessConnector for NiceConnector {
    fn open(&self, spec: Arc<InstanceSpec>, run: RunNumber) -> BoxFuture<'static, Result<ProcessLink, OpenError>> {
        let mut nice = InstanceSpec::clone(&spec);
        if let ServerTarget::Stdio { command, .. } = &mut nice.target {
            let program = std::mem::replace(command, "nice".to_owned());
            println!("{}: {run:?} of {program}", spec.name);
            nice.args.insert(0, program.into());
        }
        self.0.open(Arc::new(nice), run)
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut command = std::env::args().skip(1);
    let program = command.next().ok_or("give the command of an MCP server, such as: npx -y SERVER")?;

    let connector = NiceConnector(StdioConnector::new(Vec::new())?);
    let runtime = Runtime::builder(Connectors::default().with_process(connector)).start().await?;
    let server = runtime.install(Instance::stdio(program).args(command)).await?;
    let outcome = server.call("echo", json!({ "message": "hello" })).await;

    let report = runtime.shutdown().await;
    println!("events lost: {}, all servers ended in time: {}", report.events_lost, report.in_time);
    println!("{}", outcome?.text());
    Ok(())
}
