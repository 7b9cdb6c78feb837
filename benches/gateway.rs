//! Throughput, latency and cost of calls through the MCP endpoint, compared with other gateways in front of the same
//! light stdio server; disk writes of the satellite per call; latency of tool discovery.
//!
//! Every gateway, its server and the load generator are separate processes. The load generator has one thread and needs
//! about as little CPU time as the kernel does for its system calls, so that it is not the bottleneck.
//!
//! `cargo bench --bench gateway -- SECTION…` runs the sections `calls`, `disk` and `discovery`; without an argument, all.
//! Environment variables select a part of the measurement. With any of them, tables are printed and not stored:
//!
//! | variable | selects | default |
//! | --- | --- | --- |
//! | `BENCH_PATHS` | names of paths, separated by commas: `floor`, `instance`, `execute`, … | all |
//! | `BENCH_CLIENTS` | numbers of clients | `1,8,32,128,1000` |
//! | `BENCH_ROUNDS` | rounds per path and number of clients | `5` |
//! | `BENCH_SECONDS` | duration of a round; of a rate in the section `disk` | `1`; `10` |
//! | `BENCH_RATES` | calls per second in the section `disk` | `1,10,100,1000,10000` |
//!
//! `mcp-proxy` 0.6.0 is measured if the path in `MCP_PROXY`, or else `target/tools/bin/mcp-proxy`, exists.
#![allow(clippy::unwrap_used, reason = "a bench panics on any unexpected error")]

#[path = "gateway/calls.rs"]
mod calls;
#[expect(dead_code, reason = "each bench uses a part of this module")]
mod common;
#[path = "gateway/discovery.rs"]
mod discovery;
#[path = "gateway/disk.rs"]
mod disk;
mod endpoint;
#[path = "gateway/floor.rs"]
mod floor;
#[path = "gateway/paths.rs"]
mod paths;
#[path = "gateway/sdk.rs"]
mod sdk;

fn main() {
    if endpoint::run_role() {
        return;
    }
    match std::env::args().nth(1).as_deref() {
        Some(floor::ROLE) => return floor::serve(),
        Some(sdk::ROLE) => return common::tokio_runtime().block_on(sdk::serve()),
        _ => {}
    }
    endpoint::raise_open_files();
    // Cargo adds `--bench`.
    let sections: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let runs = |section: &str| sections.is_empty() || sections.iter().any(|selected| selected == section);
    if runs("calls") {
        calls::measure();
    }
    if runs("disk") {
        disk::measure();
    }
    if runs("discovery") {
        discovery::measure();
    }
}
