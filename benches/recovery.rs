//! Downtime of a server after SIGKILL with an immediate restart, compared with a bare spawn, handshake and `tools/list`
//! of the same program. This program is itself the lightest of the servers.
#![allow(clippy::unwrap_used, reason = "a bench panics on any unexpected error")]

#[expect(dead_code, reason = "each bench uses a part of this module")]
mod common;

use std::io::{BufRead, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mcp_satellite::connect::process::start_spawn_helper;
use mcp_satellite::connect::stdio::StdioConnector;
use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::policy::{Policy, RestartPolicy, TeamBudgetPolicy};
use mcp_satellite_actors::model::snapshot::InstanceView;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::value::RawValue;

use common::{
    BareServer, BenchReport, NullSink, TIMEOUT, format_duration, format_number, is_online, median, server_everything,
    spec, start,
};

/// Argument with which this program is a server.
const LIGHT_SERVER: &str = "light-server";

/// Uptime before each kill: a crash right after the start takes another path.
const UPTIME: Duration = Duration::from_millis(100);

struct RecoveryRound {
    initialized: Duration,
    online: Duration,
}

struct MeasuredServer {
    name: &'static str,
    program: Vec<String>,
    rounds: usize,
    echo: &'static str,
}

fn main() {
    if std::env::args().nth(1).as_deref() == Some(LIGHT_SERVER) {
        return serve_light();
    }
    // Before any thread exists, as in the binary.
    start_spawn_helper().unwrap();
    common::tokio_runtime().block_on(measure());
}

/// Serves MCP on stdin and stdout without a runtime, so that its handshake takes less than a millisecond.
fn serve_light() {
    let mut stdout = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let message: serde_json::Value = serde_json::from_str(&line.unwrap()).unwrap();
        let Some(id) = message.get("id") else { continue };
        let params = &message["params"];
        let outcome = match message["method"].as_str() {
            Some("initialize") => serde_json::json!({"result": {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "light", "version": "0"},
            }}),
            Some("tools/list") => serde_json::json!({"result": {
                "tools": [{"name": "echo", "inputSchema": {"type": "object"}}],
            }}),
            Some("tools/call") => serde_json::json!({"result": {
                "content": [{"type": "text", "text": params["arguments"]["text"]}],
            }}),
            _ => serde_json::json!({"error": {"code": -32601, "message": "method not found"}}),
        };
        let mut response = outcome;
        response["jsonrpc"] = "2.0".into();
        response["id"] = id.clone();
        writeln!(stdout, "{response}").unwrap();
    }
}

async fn measure() {
    let satellite = env!("CARGO_BIN_EXE_satellite").to_owned();
    let own = std::env::current_exe().unwrap().to_str().unwrap().to_owned();
    let server = |name, program: [String; 2]| MeasuredServer {
        name,
        program: program.to_vec(),
        rounds: 101,
        echo: r#"{"text":"hello"}"#,
    };
    let mut subjects = vec![
        server("light server", [own, LIGHT_SERVER.to_owned()]),
        server("sim-server", [satellite, "sim-server".to_owned()]),
    ];
    if let Some(script) = server_everything() {
        let program = ["node".to_owned(), script, "stdio".to_owned()].to_vec();
        subjects.push(MeasuredServer {
            name: "server-everything",
            program,
            rounds: 31,
            echo: r#"{"message":"hello"}"#,
        });
    }
    let mut report =
        BenchReport::new("recovery", ["server", "state", "satellite", "bare start", "ratio", "difference"]);
    for subject in subjects {
        let (ours, bare) = compare(&subject).await;
        for (state, time) in [
            ("initialized", (|round| round.initialized) as fn(&RecoveryRound) -> Duration),
            ("tools listed", |round| round.online),
        ] {
            // Ratios and differences of adjacent rounds, because the load of the machine varies.
            let pairs = || ours.iter().zip(&bare).map(|(ours, bare)| (time(ours), time(bare)));
            let ratio = median_number(pairs().map(|(ours, bare)| ours.div_duration_f64(bare)));
            let longer = median_number(pairs().map(|(ours, bare)| (ours.as_secs_f64() - bare.as_secs_f64()) * 1e3));
            report.row([
                subject.name.to_owned(),
                state.to_owned(),
                format_duration(median(pairs().map(|(ours, _)| ours))),
                format_duration(median(pairs().map(|(_, bare)| bare))),
                format_number(ratio),
                format!("{longer:.2} ms"),
            ]);
            report.goal(&format!("recovery longer than bare start, {}, {state}", subject.name), 1.0, "ms", longer);
        }
    }
    report.publish();
}

fn median_number(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

async fn compare(subject: &MeasuredServer) -> (Vec<RecoveryRound>, Vec<RecoveryRound>) {
    let restart = RestartPolicy { max_crashes: usize::MAX, delays: vec![Duration::ZERO], ..RestartPolicy::default() };
    let policy = Arc::new(Policy { restart, ..Policy::default() });
    let spec = spec(0, 1, 1, &subject.program, &policy);
    let id = spec.id.clone();
    let runtime = start(StdioConnector::new(Vec::new()).unwrap(), NullSink, |options| {
        options.team_budget = TeamBudgetPolicy { max_exits: usize::MAX, ..TeamBudgetPolicy::default() };
    })
    .await;
    runtime.install(spec).await.unwrap();
    wait_until(&runtime, &id, is_online).await;

    let (mut ours, mut bare) = (Vec::new(), Vec::new());
    for _ in 0..subject.rounds {
        tokio::time::sleep(UPTIME).await;
        bare.push(bare_start(&subject.program).await);
        ours.push(recovery(&runtime, &id).await);
        let arguments = RawValue::from_string(subject.echo.to_owned()).unwrap();
        let result = runtime.call(&id, "echo", Some(arguments), None).await.unwrap();
        assert!(result.get().contains("hello"));
    }
    runtime.shutdown().await;
    (ours, bare)
}

async fn recovery(runtime: &RuntimeHandle, id: &InstanceId) -> RecoveryRound {
    let old = runtime.snapshot().get(id).unwrap().pid.unwrap();
    let began = Instant::now();
    kill(Pid::from_raw(old.cast_signed()), Signal::SIGKILL).unwrap();
    let is_new = |view: &InstanceView| view.pid.is_some_and(|pid| pid != old);
    wait_until(runtime, id, |view| is_new(view) && view.initialized_at.is_some()).await;
    let initialized = began.elapsed();
    wait_until(runtime, id, |view| is_new(view) && is_online(view)).await;
    RecoveryRound { initialized, online: began.elapsed() }
}

async fn wait_until(runtime: &RuntimeHandle, id: &InstanceId, condition: impl FnMut(&InstanceView) -> bool) {
    tokio::time::timeout(TIMEOUT, runtime.wait_for(id, condition)).await.unwrap().unwrap();
}

/// Measures the baseline: spawn, handshake and `tools/list`.
async fn bare_start(program: &[String]) -> RecoveryRound {
    let began = Instant::now();
    let mut server = BareServer::start(program);
    server.handshake().await;
    let initialized = began.elapsed();
    server.request(r#"{"jsonrpc":"2.0","id":2,"method":"tools/list"}"#).await;
    let online = began.elapsed();
    server.child.kill().await.unwrap();
    RecoveryRound { initialized, online }
}
