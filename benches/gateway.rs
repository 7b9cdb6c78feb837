//! Throughput, latency and cost of the MCP endpoint: calls of an echo tool of one stdio server, compared with the
//! server's pipe without a gateway, with rmcp's HTTP server in front of the same runtime, and with `mcp-proxy`. Every
//! gateway is a separate process, so its CPU time is measured alone; the bench process runs the clients.
//!
//! `mcp-proxy` 0.6.0 is measured if the path in `MCP_PROXY`, or else `target/tools/bin/mcp-proxy`, exists.
#![allow(clippy::unwrap_used, reason = "a bench panics on any unexpected error")]

#[path = "gateway/client.rs"]
mod client;
#[expect(dead_code, reason = "each bench uses a part of this module")]
mod common;
#[path = "gateway/discovery.rs"]
mod discovery;
#[path = "gateway/gateways.rs"]
mod gateways;
#[path = "gateway/pipe.rs"]
mod pipe;
#[path = "gateway/sdk.rs"]
mod sdk;

use std::time::{Duration, Instant};

use client::BenchClient;
use common::{BenchReport, format_duration, format_number, median, quantile};
use gateways::GatewayProcess;
use pipe::SharedPipe;

/// Number of concurrent clients, and calls per round of all clients together.
const LOADS: [(usize, usize); 3] = [(1, 5_000), (8, 20_000), (32, 20_000)];

/// Rounds per gateway, taken in turns; the median is reported.
const ROUNDS: usize = 7;

const WARM_UP: usize = 200;

struct GatewayRound {
    wall: Duration,
    cpu: Option<Duration>,
    calls: Vec<Duration>,
}

enum CallPath {
    Pipe(SharedPipe),
    Gateway(GatewayProcess, Vec<BenchClient>),
}

impl CallPath {
    async fn open(gateway: GatewayProcess) -> Self {
        let mut clients = Vec::new();
        let clients_max = LOADS.iter().map(|(clients, _)| *clients).max().unwrap();
        for _ in 0..clients_max {
            let mut client = BenchClient::open(&gateway.url, gateway.call.clone()).await;
            for _ in 0..WARM_UP {
                client.call().await;
            }
            clients.push(client);
        }
        Self::Gateway(gateway, clients)
    }

    fn name(&self) -> &str {
        match self {
            Self::Pipe(_) => "server's pipe, no gateway",
            Self::Gateway(gateway, _) => gateway.name,
        }
    }

    async fn round(&mut self, clients: usize, calls: usize) -> GatewayRound {
        let each = calls / clients;
        match self {
            Self::Pipe(pipe) => {
                let began = Instant::now();
                let tasks: Vec<_> = (0..clients).map(|_| tokio::spawn(pipe.caller().calls(each))).collect();
                GatewayRound { calls: join_all(tasks).await, wall: began.elapsed(), cpu: None }
            }
            Self::Gateway(gateway, idle) => {
                for client in &mut idle[..clients] {
                    client.reconnect().await;
                }
                let (began, cpu) = (Instant::now(), gateway.cpu());
                let start = |mut client: BenchClient| {
                    tokio::spawn(async move {
                        let mut took = Vec::with_capacity(each);
                        for _ in 0..each {
                            let began = Instant::now();
                            client.call().await;
                            took.push(began.elapsed());
                        }
                        (client, took)
                    })
                };
                let tasks: Vec<_> = idle.drain(..clients).map(start).collect();
                let mut calls = Vec::with_capacity(each * clients);
                for task in tasks {
                    let (client, took) = task.await.unwrap();
                    idle.push(client);
                    calls.extend(took);
                }
                GatewayRound { wall: began.elapsed(), cpu: Some(gateway.cpu().saturating_sub(cpu)), calls }
            }
        }
    }
}

async fn join_all(tasks: Vec<tokio::task::JoinHandle<Vec<Duration>>>) -> Vec<Duration> {
    let mut all = Vec::new();
    for task in tasks {
        all.extend(task.await.unwrap());
    }
    all
}

struct LoadFindings {
    per_second: f64,
    cpu: Option<Duration>,
}

fn main() {
    if sdk::is_child() {
        common::tokio_runtime().block_on(sdk::serve());
    } else {
        // The argument `discovery` skips the measurement of the gateways.
        if !std::env::args().any(|argument| argument == "discovery") {
            common::tokio_runtime().block_on(measure());
        }
        discovery::measure();
    }
}

async fn measure() {
    let mut paths = vec![CallPath::Pipe(SharedPipe::start(&gateways::echo(1)).await)];
    for gateway in gateways::all().await {
        paths.push(CallPath::open(gateway).await);
    }
    let columns = ["path", "concurrency", "requests/s", "p50", "p99", "CPU per call", "RSS"];
    let mut report = BenchReport::new("gateway", columns);
    for (clients, calls) in LOADS {
        let mut rounds: Vec<Vec<GatewayRound>> = paths.iter().map(|_| Vec::new()).collect();
        for _ in 0..ROUNDS {
            for (path, rounds) in paths.iter_mut().zip(&mut rounds) {
                rounds.push(path.round(clients, calls).await);
            }
        }
        let found: Vec<LoadFindings> =
            paths.iter().zip(&rounds).map(|(path, rounds)| row(&mut report, path, clients, rounds)).collect();
        goals(&mut report, &paths, &found, clients);
    }
    report.publish();
}

fn row(report: &mut BenchReport, path: &CallPath, clients: usize, rounds: &[GatewayRound]) -> LoadFindings {
    let per_call = |time: Duration, round: &GatewayRound| time / u32::try_from(round.calls.len()).unwrap();
    let wall = median(rounds.iter().map(|round| per_call(round.wall, round)));
    let cpu: Option<Vec<Duration>> = rounds.iter().map(|round| round.cpu.map(|cpu| per_call(cpu, round))).collect();
    let found = LoadFindings { per_second: 1.0 / wall.as_secs_f64(), cpu: cpu.map(median) };
    let calls = |fraction| median(rounds.iter().map(|round| quantile(round.calls.iter().copied(), fraction)));
    let none = || "-".to_owned();
    let memory = match path {
        CallPath::Pipe(_) => none(),
        CallPath::Gateway(gateway, _) => format!("{} MiB", format_number(gateway.resident() as f64 / 1024.0 / 1024.0)),
    };
    report.row([
        path.name().to_owned(),
        clients.to_string(),
        format_number(found.per_second),
        format_duration(calls(0.5)),
        format_duration(calls(0.99)),
        found.cpu.map_or_else(none, format_duration),
        memory,
    ]);
    found
}

/// Adds the goals: at most half the CPU time of `mcp-proxy`, and at least 1.5 times its requests per second, stated as
/// the inverse ratio.
fn goals(report: &mut BenchReport, paths: &[CallPath], found: &[LoadFindings], clients: usize) {
    let of = |name: &str| paths.iter().zip(found).find(|(path, _)| path.name() == name).map(|(_, found)| found);
    let Some(proxy) = of(gateways::MCP_PROXY) else { return };
    for name in [gateways::INSTANCE, gateways::EXECUTE, gateways::EXECUTE_OF_MANY] {
        let Some(ours) = of(name) else { continue };
        if let (Some(cpu), Some(proxy)) = (ours.cpu, proxy.cpu) {
            let ratio = cpu.div_duration_f64(proxy);
            report.goal(
                &format!("CPU per call, satellite / mcp-proxy, {name}, concurrency {clients}"),
                0.5,
                "×",
                ratio,
            );
        }
        let ratio = proxy.per_second / ours.per_second;
        let goal = format!("requests/s, mcp-proxy / satellite, {name}, concurrency {clients}");
        report.goal(&goal, 0.667, "×", ratio);
    }
}
