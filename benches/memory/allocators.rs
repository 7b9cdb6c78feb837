//! Memory of a satellite and CPU time of its calls with different allocators.
//!
//! A satellite without mimalloc uses the allocator of the system, and jemalloc if that is preloaded. To build it:
//!
//! ```sh
//! cargo bench --no-run --bench memory --no-default-features --features cli
//! cp target/release/satellite target/satellite-system-allocator
//! ```
//!
//! `SATELLITE_SYSTEM_ALLOCATOR` is the path of another such build. `JEMALLOC` is the path of jemalloc; the default is
//! that of Debian's package `libjemalloc2`. Allocators that are not found are left out.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::common::{BenchReport, format_duration, format_number, quantile, selected};
use crate::endpoint::http::McpRequest;
use crate::endpoint::load::{self, Load, LoadFindings, LoadTarget, NUMBER};
use crate::endpoint::median;
use crate::endpoint::processes::{SATELLITE, SERVER, SatelliteOptions, ServerFleet, resident, satellite_of};
use crate::{MB, ROUNDS, SERVERS, SETTLE, measure_start};

const CLIENTS: usize = 32;
const WARM_UP: Duration = Duration::from_millis(250);
const ROUND: Duration = Duration::from_secs(2);

/// A program and the environment that select an allocator.
struct Allocator {
    title: &'static str,
    program: PathBuf,
    environment: Vec<(&'static str, PathBuf)>,
}

impl Allocator {
    fn all() -> Vec<Self> {
        let product = PathBuf::from(SATELLITE);
        let system = path_of(
            "SATELLITE_SYSTEM_ALLOCATOR",
            &Path::new(env!("CARGO_MANIFEST_DIR")).join("target/satellite-system-allocator"),
        );
        let jemalloc = path_of("JEMALLOC", Path::new("/usr/lib/x86_64-linux-gnu/libjemalloc.so.2"));
        let mut all = vec![
            Self { title: "mimalloc without huge pages", program: product.clone(), environment: Vec::new() },
            Self {
                title: "mimalloc with huge pages",
                program: product,
                environment: vec![("MIMALLOC_ALLOW_THP", "1".into()), ("LD_PRELOAD", build_huge_pages_library())],
            },
        ];
        if let Some(system) = system {
            all.push(Self { title: "system (glibc)", program: system.clone(), environment: Vec::new() });
            all.extend(jemalloc.map(|library| Self {
                title: "jemalloc",
                program: system,
                environment: vec![("LD_PRELOAD", library)],
            }));
        }
        all
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }
}

/// Compiles the library that keeps huge pages turned on, and returns its path.
fn build_huge_pages_library() -> PathBuf {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/memory/allow_huge_pages.c");
    let library = Path::new(SATELLITE).with_file_name("allow_huge_pages.so");
    let status = Command::new("cc").args(["-shared", "-fPIC", "-O1", source, "-o"]).arg(&library).status().unwrap();
    assert!(status.success(), "cc cannot compile {source}");
    library
}

/// Returns the path in the environment variable, or else the default. Reports a path that does not exist.
#[expect(clippy::print_stderr, reason = "a message to the person who runs the bench")]
fn path_of(variable: &str, default: &Path) -> Option<PathBuf> {
    let path = std::env::var_os(variable).map_or_else(|| default.to_owned(), PathBuf::from);
    if !path.exists() {
        eprintln!("{} does not exist; set {variable}", path.display());
        return None;
    }
    Some(path)
}

pub(crate) fn measure() {
    let mut report = BenchReport::new(
        "allocators",
        [
            "allocator",
            "RSS, 1 server",
            "RSS, 100 servers",
            "RSS, 1,000 servers",
            "RSS after the calls",
            "CPU per call",
            "requests/s",
        ],
    );
    let allocators = Allocator::all();
    let mut found: Vec<_> = allocators.iter().map(|_| AllocatorFindings::default()).collect();
    for _ in 0..selected("BENCH_ROUNDS").map_or(ROUNDS, |rounds| rounds[0]) {
        for (allocator, found) in allocators.iter().zip(&mut found) {
            for (size, memory) in SERVERS.into_iter().zip(&mut found.memory) {
                let found = measure_start(size, |fleet: ServerFleet<'_>| {
                    Some(satellite_of(allocator.command(), fleet, SatelliteOptions::default()))
                });
                memory.extend(found.map(|found| found.resident as f64));
            }
            found.calls.extend(measure_calls(allocator));
        }
    }
    let megabytes = |bytes: f64| format!("{} MB", format_number(bytes / MB));
    for (allocator, AllocatorFindings { memory, calls }) in allocators.iter().zip(found) {
        let [one, hundred, thousand] = memory.map(|of_size| megabytes(median(of_size)));
        report.row([
            allocator.title.to_owned(),
            one,
            hundred,
            thousand,
            megabytes(median(calls.iter().map(|found| found.resident_at_rest))),
            format_duration(quantile(calls.iter().map(|found| found.load.cpu_per_call()), 0.5)),
            format_number(median(calls.iter().map(|found| found.load.per_second()))),
        ]);
    }
    report.publish();
}

/// Rounds of one allocator. Memory is in bytes, for each number of servers.
#[derive(Default)]
struct AllocatorFindings {
    memory: [Vec<f64>; SERVERS.len()],
    calls: Vec<CallFindings>,
}

struct CallFindings {
    load: LoadFindings,
    /// Resident memory ten seconds after the last call, in bytes.
    resident_at_rest: f64,
}

/// Calls the tool `echo` of one server in a closed loop. Returns `None` if the satellite hangs.
fn measure_calls(allocator: &Allocator) -> Option<CallFindings> {
    let gateway = satellite_of(allocator.command(), ServerFleet::ONE, SatelliteOptions::default());
    let call = |tool: &str, id: &str, arguments: &str| McpRequest {
        headers: String::new(),
        body: format!(
            r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":"{tool}","arguments":{arguments}}}}}"#
        ),
    };
    let target = LoadTarget {
        address: gateway.address,
        path: format!("/i/{SERVER}/mcp"),
        has_session: true,
        call: call("echo", NUMBER, &format!(r#"{{"text":"{NUMBER}{}"}}"#, "x".repeat(89))),
        reads: call("reads", "1", "{}"),
    };
    let load =
        Load { clients: CLIENTS, warm_up: WARM_UP, duration: ROUND, rate: None, pid: gateway.pid, journal_index: None };
    let load = load::run(&target, &load)?;
    std::thread::sleep(SETTLE);
    Some(CallFindings { load, resident_at_rest: resident(gateway.pid) as f64 })
}
