//! Runs one MCP server in this process, calls its tool `echo` and ends it.
//!
//! ```text
//! cargo run --example embed -- npx -y @modelcontextprotocol/server-everything
//! ```

#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;

use mcp_satellite::connect::stdio::StdioConnector;
use mcp_satellite::sink::stdout::StdoutSink;
use mcp_satellite::{Instance, InstanceError, InstanceHandle, Runtime};
use serde_json::json;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut command = std::env::args().skip(1);
    let program = command.next().ok_or("give the command of an MCP server, such as: npx -y SERVER")?;

    let runtime = Runtime::builder(StdioConnector::new(Vec::new())?).events(StdoutSink::new()?).start().await?;
    let server = runtime.install(Instance::stdio(program).args(command)).await?;
    let outcome = call_echo(&server).await;

    // The host must end the satellite before itself, so that servers end gracefully and events are delivered.
    let report = runtime.shutdown().await;
    println!("events lost: {}, all servers ended in time: {}", report.events_lost, report.in_time);
    outcome?;
    Ok(())
}

async fn call_echo(server: &InstanceHandle) -> Result<(), InstanceError> {
    let view = server.ready().await?;
    for tool in view.offered_catalogue().into_iter().flat_map(|catalogue| &catalogue.tools) {
        println!("  {}", tool.name);
    }
    let result = server.call("echo", json!({ "message": "hello" })).await?;
    println!("{}", result.text());
    Ok(())
}
