//! Cost of a call through the runtime, compared with rmcp's client on the pipes of the same kind of process.
#![allow(clippy::unwrap_used, reason = "a bench panics on any unexpected error")]

#[expect(dead_code, reason = "each bench uses a part of this module")]
mod common;

use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mcp_satellite::connect::stdio::StdioConnector;
use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::policy::Policy;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, ClientCapabilities, ClientConfig, Implementation, ProtocolVersion,
};
use rmcp::service::{Peer, RoleClient, RunningService};
use rmcp::{ClientHandler, ServiceExt};
use serde_json::value::RawValue;

use common::{
    BenchReport, CpuClock, NullSink, TIMEOUT, format_duration, format_number, is_online, median, spec, start,
};

const ROUNDS: usize = 15;
const CALLS: u32 = 4096;

struct CallRound {
    cpu: Duration,
    wall: Duration,
}

fn main() {
    common::tokio_runtime().block_on(measure());
}

async fn measure() {
    let program = [env!("CARGO_BIN_EXE_satellite").to_owned(), "sim-server".to_owned()];
    let spec = spec(0, 1, 1, &program, &Arc::new(Policy::default()));
    let id = spec.id.clone();
    let runtime = start(StdioConnector::new(Vec::new()).unwrap(), NullSink, |_| {}).await;
    runtime.install(spec).await.unwrap();
    tokio::time::timeout(TIMEOUT, runtime.wait_for(&id, is_online)).await.unwrap().unwrap();
    let direct = DirectClient::start(&program).await;

    let mut report = BenchReport::new(
        "call",
        ["concurrency", "CPU per call, runtime", "CPU per call, rmcp", "ratio", "calls/s, runtime", "calls/s, rmcp"],
    );
    for callers in [1, 32] {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            ours.push(runtime_round(&runtime, &id, callers).await);
            theirs.push(rmcp_round(direct.client.peer(), callers).await);
        }
        let per_call = |rounds: &[CallRound], time: fn(&CallRound) -> Duration| median(rounds.iter().map(time)) / CALLS;
        let (our_cpu, their_cpu) = (per_call(&ours, |round| round.cpu), per_call(&theirs, |round| round.cpu));
        let rate = |rounds: &[CallRound]| format_number(1.0 / per_call(rounds, |round| round.wall).as_secs_f64());
        let ratio = our_cpu.as_secs_f64() / their_cpu.as_secs_f64();
        report.row([
            callers.to_string(),
            format_duration(our_cpu),
            format_duration(their_cpu),
            format_number(ratio),
            rate(&ours),
            rate(&theirs),
        ]);
        report.goal(&format!("CPU per call, runtime / rmcp, concurrency {callers}"), 1.0, "×", ratio);
    }
    report.publish();
    direct.end().await;
    runtime.shutdown().await;
}

async fn runtime_round(runtime: &RuntimeHandle, id: &InstanceId, callers: u32) -> CallRound {
    round(callers, |calls| {
        let (runtime, id) = (runtime.clone(), id.clone());
        async move {
            for _ in 0..calls {
                let arguments = RawValue::from_string(r#"{"text":"hello"}"#.to_owned()).unwrap();
                let result = runtime.call(&id, "echo", Some(arguments), None).await.unwrap();
                assert!(result.get().contains("hello"));
            }
        }
    })
    .await
}

async fn rmcp_round(peer: &Peer<RoleClient>, callers: u32) -> CallRound {
    round(callers, |calls| {
        let peer = peer.clone();
        async move {
            for _ in 0..calls {
                let arguments = serde_json::Map::from_iter([("text".to_owned(), "hello".into())]);
                let params = CallToolRequestParams::new("echo").with_arguments(arguments);
                let response = peer.call_tool_once(params).await.unwrap();
                assert!(matches!(response, CallToolResponse::Complete(result) if !result.content.is_empty()));
            }
        }
    })
    .await
}

async fn round<F: Future<Output = ()> + Send + 'static>(callers: u32, caller: impl Fn(u32) -> F) -> CallRound {
    let (began, cpu) = (Instant::now(), CpuClock::start());
    let tasks: Vec<_> = (0..callers).map(|_| tokio::spawn(caller(CALLS / callers))).collect();
    for task in tasks {
        task.await.unwrap();
    }
    CallRound { cpu: cpu.elapsed(), wall: began.elapsed() }
}

/// Baseline: rmcp's client directly on the pipes of a child.
struct DirectClient {
    client: RunningService<RoleClient, Handler>,
    child: tokio::process::Child,
}

struct Handler;

impl ClientHandler for Handler {
    fn get_info(&self) -> ClientConfig {
        ClientConfig::new(ClientCapabilities::default(), Implementation::new("bench", "0"))
            .with_protocol_version(ProtocolVersion::V_2025_11_25)
    }
}

impl DirectClient {
    async fn start(program: &[String]) -> Self {
        let mut child = tokio::process::Command::new(&program[0])
            .args(&program[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let pipes = (child.stdout.take().unwrap(), child.stdin.take().unwrap());
        Self { client: Handler.serve(pipes).await.unwrap(), child }
    }

    async fn end(self) {
        let Self { client, mut child } = self;
        client.cancel().await.unwrap();
        child.kill().await.unwrap();
    }
}
