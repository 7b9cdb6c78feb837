//! Implements a connector for servers that are functions of the host, neither processes nor URLs. They are supervised
//! like any other server; only the connector knows their kind.
//!
//! ```text
//! cargo run --example custom_connector
//! ```

#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;
use std::sync::Arc;

use futures::future::BoxFuture;
use jiff::Timestamp;
use mcp_satellite::actors::model::ids::RunNumber;
use mcp_satellite::actors::model::spec::{
    ConfigTier, InstanceConfig, InstanceSpec, ProcessLifetime, ServerTarget, UpdateMethod,
};
use mcp_satellite::actors::model::status::Status;
use mcp_satellite::actors::seam::{Connectors, OpenError, ProcessConnector, ProcessEnd, ProcessLink, ServerProcess};
use mcp_satellite::actors::{RuntimeOptions, start};
use mcp_satellite::sink::stdout::StdoutSink;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWrite, AsyncWriteExt, BufReader, duplex, split};
use tokio_util::sync::CancellationToken;

const PIPE: usize = 4096;

/// Implementation of a server. The command of a configuration selects it by name.
type Function = fn(&Value) -> Result<String, String>;

const FUNCTIONS: [(&str, Function); 2] = [("shout", shout), ("count", count)];

fn shout(arguments: &Value) -> Result<String, String> {
    let text = arguments["text"].as_str().ok_or("`text` is missing")?;
    Ok(text.to_uppercase())
}

fn count(arguments: &Value) -> Result<String, String> {
    let text = arguments["text"].as_str().ok_or("`text` is missing")?;
    Ok(text.chars().count().to_string())
}

struct FunctionConnector;

impl ProcessConnector for FunctionConnector {
    fn open(&self, spec: Arc<InstanceSpec>, _run: RunNumber) -> BoxFuture<'static, Result<ProcessLink, OpenError>> {
        Box::pin(async move {
            let ServerTarget::Stdio { command, .. } = &spec.target else {
                return Err(OpenError::Server("a function has no URL".to_owned()));
            };
            let (name, function) = FUNCTIONS
                .into_iter()
                .find(|(name, _)| name == command)
                .ok_or_else(|| OpenError::Server(format!("there is no function `{command}`")))?;
            let (ours, theirs) = duplex(PIPE);
            let (reader, writer) = split(ours);
            let life = CancellationToken::new();
            // The server ends when its input ends, or at once when killed; `over` reports either.
            let (alive, over) = (life.clone(), CancellationToken::new());
            let process = InProcessServer { life: life.clone(), over: over.clone() };
            let guard = life.drop_guard();
            tokio::spawn(async move {
                let ended = over.drop_guard();
                let _ = alive.run_until_cancelled(serve(name, function, theirs)).await;
                drop(ended);
            });
            Ok(ProcessLink {
                reader: Box::new(reader),
                writer: Box::new(writer),
                stderr: None,
                process: Box::new(process),
                guard: Box::new(guard),
            })
        })
    }
}

/// Process handle with the functions that supervision needs.
struct InProcessServer {
    life: CancellationToken,
    over: CancellationToken,
}

impl ServerProcess for InProcessServer {
    fn pid(&self) -> Option<u32> {
        None
    }

    fn wait(&mut self) -> BoxFuture<'_, ProcessEnd> {
        Box::pin(async {
            self.over.cancelled().await;
            ProcessEnd { code: Some(0), signal: None }
        })
    }

    fn wait_all(&mut self) -> BoxFuture<'_, ()> {
        Box::pin(self.over.cancelled())
    }

    fn terminate(&mut self) {
        self.life.cancel();
    }

    fn kill(&mut self) {
        self.life.cancel();
    }
}

/// Serves MCP over JSON lines, limited to what a server with one tool needs.
async fn serve(name: &str, function: Function, pipe: impl AsyncRead + AsyncWrite) -> std::io::Result<()> {
    let (input, mut output) = split(pipe);
    let mut lines = BufReader::new(input).lines();
    while let Some(line) = lines.next_line().await? {
        let Ok(message) = serde_json::from_str::<Value>(&line) else { continue };
        let (Some(id), Some(method)) = (message.get("id"), message["method"].as_str()) else { continue };
        let answer = match method {
            "initialize" => json!({ "result": {
                "protocolVersion": message["params"]["protocolVersion"],
                "capabilities": { "tools": {} },
                "serverInfo": { "name": name, "version": "1" },
            } }),
            "ping" => json!({ "result": {} }),
            "tools/list" => json!({ "result": { "tools": [{
                "name": name,
                "inputSchema": { "type": "object", "properties": { "text": { "type": "string" } } },
            }] } }),
            "tools/call" => {
                let (text, is_error) = match function(&message["params"]["arguments"]) {
                    Ok(text) => (text, false),
                    Err(error) => (error, true),
                };
                json!({ "result": { "content": [{ "type": "text", "text": text }], "isError": is_error } })
            }
            other => json!({ "error": { "code": -32601, "message": format!("no method `{other}`") } }),
        };
        let mut answer = answer;
        answer["jsonrpc"] = json!("2.0");
        answer["id"] = id.clone();
        output.write_all(format!("{answer}\n").as_bytes()).await?;
    }
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let options = RuntimeOptions::new(
        Connectors::default().with_process(FunctionConnector),
        Arc::new(StdoutSink::new()?),
        Arc::new(Timestamp::now),
    );
    let (satellite, ended) = start(options).await?;
    for (name, _) in FUNCTIONS {
        let spec = function(name);
        let id = spec.id.clone();
        satellite.install(spec).await?;
        let settled = satellite.wait_for(&id, |view| !view.status.is_transitional()).await.ok_or("it ended")?;
        if settled.status != Status::Online {
            return Err(format!("{name} is {}", settled.status).into());
        }
        let arguments = RawValue::from_string(json!({ "text": "supervised" }).to_string())?;
        println!("{name}: {}", satellite.call(&id, name, Some(arguments), None).await?.get());
    }
    let farewell = satellite.shutdown().await;
    println!("events lost: {}, all servers ended in time: {}", farewell.events_lost, farewell.in_time);
    ended.await?;
    Ok(())
}

fn function(name: &str) -> InstanceSpec {
    InstanceConfig {
        team: "team".into(),
        team_slug: "team".into(),
        user: "user".into(),
        user_slug: "user".into(),
        installation: name.into(),
        server: name.into(),
        target: ServerTarget::Stdio { command: name.to_owned(), cwd: None },
        server_tier: ConfigTier::default(),
        team_tier: ConfigTier::default(),
        user_tier: ConfigTier::default(),
        user_required: Vec::new(),
        lifetime: ProcessLifetime::default(),
        update_method: UpdateMethod::default(),
        request_logging: true,
        policy: Arc::default(),
    }
    .merge()
}
