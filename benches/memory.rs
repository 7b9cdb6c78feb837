//! Memory of a satellite with light stdio servers and with idle sessions of clients, and the start of these servers,
//! compared with `mcp-proxy`; memory and CPU time with other allocators. Every server is a process.
//!
//! `cargo bench --bench memory -- SECTION…` runs the sections `servers`, `sessions` and `allocators`; without an
//! argument, all. The section `allocators` needs a satellite without mimalloc, see `memory/allocators.rs`.
//!
//! Environment variables select a part of the measurement. With any of them, tables are printed and not stored:
//! `BENCH_SERVERS` (`1,100,1000`), `BENCH_SESSIONS` (`1000`) and `BENCH_ROUNDS` (`3`). `MCP_PROXY` is the path of
//! `mcp-proxy`, as in the bench `gateway`.
#![allow(clippy::unwrap_used, reason = "a bench panics on any unexpected error")]

#[path = "memory/allocators.rs"]
mod allocators;
#[expect(dead_code, reason = "each bench uses a part of this module")]
mod common;
mod endpoint;

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{BenchReport, format_duration, format_number, selected};
use endpoint::http::McpClient;
use endpoint::median;
use endpoint::processes::{
    GatewayProcess, SERVER, SatelliteOptions, ServerFleet, huge_pages, mcp_proxy, resident, satellite, wait_until,
};
use serde_json::Value;

const SERVERS: [usize; 3] = [1, 100, 1_000];
const SESSIONS: usize = 1_000;
const ROUNDS: usize = 3;

/// Sessions that are opened and closed before the measurement of sessions.
const WARM_UP: usize = 32;

/// Time in which the satellite frees temporary memory.
const SETTLE: Duration = Duration::from_secs(10);

const MB: f64 = 1e6;
const KIB: f64 = 1024.0;

fn main() {
    if endpoint::run_role() {
        return;
    }
    endpoint::raise_open_files();
    let sections: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    for (name, section) in [("servers", servers as fn()), ("sessions", sessions), ("allocators", allocators::measure)] {
        if sections.is_empty() || sections.iter().any(|selected| selected == name) {
            section();
        }
    }
}

/// Findings of one start of all servers. Memory is in bytes.
#[derive(Debug, Clone, Copy)]
struct StartFindings {
    ready: Duration,
    /// CPU time until all servers were ready. For the satellite, its keeper and its spawn helper are included.
    cpu: Duration,
    resident: usize,
    huge_pages: usize,
    /// Memory of the process that was started. For the satellite, this is its keeper.
    parent_resident: usize,
}

fn servers() {
    let mut memory = BenchReport::new(
        "memory",
        ["servers", "RSS", "of which in huge pages", "RSS per server, KiB", "RSS of the keeper", "mcp-proxy, RSS"],
    );
    let mut starts = BenchReport::new(
        "starts",
        ["servers", "all ready", "mcp-proxy, all ready", "ratio", "CPU per start", "mcp-proxy, CPU per start"],
    );
    for servers in selected("BENCH_SERVERS").unwrap_or_else(|| SERVERS.to_vec()) {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..selected("BENCH_ROUNDS").map_or(ROUNDS, |rounds| rounds[0]) {
            ours.extend(measure_start(servers, |fleet| Some(satellite(fleet, SatelliteOptions::default()))));
            theirs.extend(measure_start(servers, mcp_proxy));
        }
        let of = |found: &[StartFindings], value: fn(&StartFindings) -> f64| {
            (!found.is_empty()).then(|| median(found.iter().map(value)))
        };
        let megabytes = |bytes: f64| format!("{} MB", format_number(bytes / MB));
        let optional = |value: Option<f64>, format: fn(f64) -> String| value.map_or_else(|| "-".to_owned(), format);
        let seconds = |value: f64| format_duration(Duration::from_secs_f64(value));

        let rss = of(&ours, |found| found.resident as f64).unwrap();
        let keeper = of(&ours, |found| found.parent_resident as f64).unwrap();
        let proxy_rss = of(&theirs, |found| found.resident as f64);
        memory.row([
            format_number(servers as f64),
            megabytes(rss),
            megabytes(of(&ours, |found| found.huge_pages as f64).unwrap()),
            format_number(rss / servers as f64 / KIB),
            megabytes(keeper),
            optional(proxy_rss, megabytes),
        ]);
        if let Some(goal) = SERVERS.iter().position(|size| *size == servers).map(|at| [10.0, 25.0, 90.0][at]) {
            memory.goal(&format!("RSS, servers: {servers}"), goal, "MB", rss / MB);
            memory.goal(&format!("RSS of the keeper, servers: {servers}"), 2.0, "MB", keeper / MB);
        }

        let ready = of(&ours, |found| found.ready.as_secs_f64()).unwrap();
        let cpu = of(&ours, |found| found.cpu.as_secs_f64()).unwrap() / servers as f64;
        let proxy_cpu = of(&theirs, |found| found.cpu.as_secs_f64()).map(|cpu| cpu / servers as f64);
        let pairs = ours.iter().zip(&theirs);
        let ratio =
            (!theirs.is_empty()).then(|| median(pairs.map(|(ours, theirs)| ours.ready.div_duration_f64(theirs.ready))));
        starts.row([
            format_number(servers as f64),
            seconds(ready),
            optional(of(&theirs, |found| found.ready.as_secs_f64()), seconds),
            optional(ratio, format_number),
            seconds(cpu),
            optional(proxy_cpu, seconds),
        ]);
        if servers == SERVERS[SERVERS.len() - 1] {
            starts.goal(&format!("CPU per start, servers: {servers}"), 0.4, "ms", cpu * 1e3);
            if let Some(ratio) = ratio {
                starts.goal(&format!("all ready, satellite / mcp-proxy, servers: {servers}"), 1.2, "×", ratio);
            }
        }
    }
    memory.publish();
    starts.publish();
}

/// Starts a gateway and measures until each of its servers has returned its tools. Returns `None` if the gateway is not
/// installed.
fn measure_start(
    servers: usize,
    start: impl FnOnce(ServerFleet<'_>) -> Option<GatewayProcess>,
) -> Option<StartFindings> {
    let ready = tempfile::NamedTempFile::new().unwrap();
    let began = Instant::now();
    let gateway = start(ServerFleet { servers, ready: Some(ready.path()) })?;
    let all = u64::try_from(servers).unwrap();
    wait_until("all servers are ready", || ready.as_file().metadata().unwrap().len() == all);
    let elapsed = began.elapsed();
    let is_satellite = gateway.pid != gateway.parent_pid();
    let cpu = gateway.cpu_time_of_program();
    std::thread::sleep(SETTLE);
    let found = StartFindings {
        ready: elapsed,
        cpu,
        resident: resident(gateway.pid),
        huge_pages: huge_pages(gateway.pid),
        parent_resident: resident(gateway.parent_pid()),
    };
    // Last, because a request of the status takes memory.
    if is_satellite {
        wait_until("all servers are online", || online(&gateway) == servers);
    }
    Some(found)
}

/// Returns the number of servers that the satellite reports as online.
fn online(gateway: &GatewayProcess) -> usize {
    let mut command = Command::new(env!("CARGO_BIN_EXE_satellite"));
    command.args(["status", "--json", "--data-dir"]).arg(gateway.data_file("")).stderr(Stdio::inherit());
    let status: Value = serde_json::from_slice(&command.output().unwrap().stdout).unwrap();
    status.as_array().unwrap().iter().filter(|instance| instance["status"] == "online").count()
}

fn sessions() {
    let mut report = BenchReport::new("sessions", ["1,000 idle sessions", "connections", "RSS per session, KiB"]);
    let sessions = selected("BENCH_SESSIONS").map_or(SESSIONS, |sessions| sessions[0]);
    let instance = format!("/i/{SERVER}/mcp");
    for path in [instance.as_str(), "/mcp"] {
        let gateway = satellite(ServerFleet::ONE, SatelliteOptions::default());
        let open = |count: usize| -> Vec<McpClient> {
            (0..count).map(|_| McpClient::open_session(gateway.address, path)).collect()
        };
        let settled = || {
            std::thread::sleep(SETTLE);
            resident(gateway.pid) as f64
        };
        for mut client in open(WARM_UP) {
            client.request(&r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#.into());
            client.close();
        }
        let before = settled();
        let clients = open(sessions);
        let with_connections = settled();
        drop(clients);
        let without_connections = settled();
        for (connections, after) in [("open", with_connections), ("closed", without_connections)] {
            let kib = (after - before) / sessions as f64 / KIB;
            report.row([format!("`{path}`"), connections.to_owned(), format_number(kib)]);
            report.goal(&format!("RSS per session, `{path}`, connections {connections}"), 15.0, "KiB", kib);
        }
    }
    report.publish();
}
