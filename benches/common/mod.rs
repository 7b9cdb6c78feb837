//! Helpers shared by the benches: instances to install, memory and time measurements, and reports.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Stdio;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use jiff::Timestamp;
use mcp_satellite::load::measure::{self, ProcessMemory};
#[allow(unused_imports, reason = "each bench uses a part of this module")]
pub(crate) use mcp_satellite::load::measure::{CpuClock, format_duration, format_number};
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::spec::{
    ConfigTier, InstanceConfig, InstanceInputs, InstanceSpec, ProcessLifetime, ServerTarget, UpdateMethod,
};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::seam::{Connectors, EventSink, SinkAnswer, SinkBatch};
use mcp_satellite_actors::{RuntimeHandle, RuntimeOptions};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

/// Allocator of the satellite, so that memory and time match those of the binary.
#[cfg(feature = "mimalloc")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Limit for operations that must succeed; a bench panics when it is exceeded.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);

// ---- measurements ----

pub(crate) struct NullSink;

impl EventSink for NullSink {
    fn send(&self, _: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
        Box::pin(std::future::ready(SinkAnswer::Accepted))
    }
}

pub(crate) fn tokio_runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap()
}

pub(crate) async fn start(
    connectors: impl Into<Connectors>,
    sink: impl EventSink,
    tune: impl FnOnce(&mut RuntimeOptions),
) -> RuntimeHandle {
    let mut options = RuntimeOptions::new(connectors, Arc::new(sink), Arc::new(Timestamp::now));
    tune(&mut options);
    mcp_satellite_actors::start(options).await.unwrap().0
}

pub(crate) fn spec(nth: usize, teams: usize, users: usize, program: &[String], policy: &Arc<Policy>) -> InstanceSpec {
    let (team, user) = (nth % teams, nth / teams % users);
    let [command, args @ ..] = program else { panic!("the command is empty") };
    let config = InstanceConfig {
        team: format!("team_{team}").into(),
        team_slug: format!("team-{team}").into(),
        user: format!("user_{team}_{user}").into(),
        user_slug: format!("user-{user}").into(),
        installation: format!("installation_{}", nth / teams / users).into(),
        server: "server".into(),
        target: ServerTarget::Stdio { command: command.clone(), cwd: None },
        server_tier: ConfigTier { args: args.iter().map(|arg| arg.as_str().into()).collect(), ..ConfigTier::default() },
        team_tier: ConfigTier::default(),
        user_tier: ConfigTier::default(),
        user_required: Vec::new(),
        inputs: InstanceInputs::default(),
        lifetime: ProcessLifetime::AlwaysOn,
        update_method: UpdateMethod::default(),
        request_logging: true,
        policy: Arc::clone(policy),
    };
    config.merge()
}

/// Returns true if the instance is callable and its tools are known.
pub(crate) fn is_online(view: &InstanceView) -> bool {
    view.status == Status::Online && view.port.is_some()
}

/// Returns the resident memory of this process and its peak, in bytes.
pub(crate) fn resident() -> (usize, usize) {
    let memory = ProcessMemory::now();
    (usize::try_from(memory.resident).unwrap(), usize::try_from(memory.peak).unwrap())
}

pub(crate) fn median(values: impl IntoIterator<Item = Duration>) -> Duration {
    quantile(values, 0.5)
}

/// Returns the value below which `fraction` (0 to 1) of the values lie. Panics if there are no values.
pub(crate) fn quantile(values: impl IntoIterator<Item = Duration>, fraction: f64) -> Duration {
    let mut values: Vec<Duration> = values.into_iter().collect();
    values.sort_unstable();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index of a vector in memory")]
    let index = (values.len() as f64 * fraction) as usize;
    values[index.min(values.len() - 1)]
}

// ---- baseline ----

pub(crate) struct BareServer {
    pub(crate) child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl BareServer {
    pub(crate) fn start(program: &[String]) -> Self {
        let mut child = Command::new(&program[0])
            .args(&program[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self { child, stdin, stdout: BufReader::new(stdout) }
    }

    pub(crate) async fn send_line(&mut self, line: &str) {
        self.stdin.write_all(format!("{line}\n").as_bytes()).await.unwrap();
    }

    pub(crate) async fn handshake(&mut self) {
        self.request(r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"bench","version":"0"}}}"#)
            .await;
        self.send_line(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#).await;
    }

    /// Sends a request and waits for its response; other messages are ignored.
    pub(crate) async fn request(&mut self, line: &str) {
        self.send_line(line).await;
        let response = async {
            let mut line = String::new();
            while !line.contains(r#""result""#) {
                line.clear();
                assert!(self.stdout.read_line(&mut line).await.unwrap() > 0, "the server closed its output");
            }
        };
        tokio::time::timeout(TIMEOUT, response).await.unwrap();
    }
}

/// Returns the script of `server-everything` if npm has installed it.
#[expect(clippy::print_stderr, reason = "a message to the person who runs the bench")]
pub(crate) fn server_everything() -> Option<String> {
    let configured = std::env::var_os("MCP_SERVERS_DIR").map(PathBuf::from);
    let defaults = [PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("target/mcp-servers"), "/tmp/mcpnpm".into()];
    let script = "node_modules/@modelcontextprotocol/server-everything/dist/index.js";
    let found =
        configured.into_iter().chain(defaults).map(|directory| directory.join(script)).find(|script| script.exists());
    if found.is_none() {
        eprintln!("server-everything is not measured: it is not installed; set MCP_SERVERS_DIR");
    }
    found.map(|script| script.to_string_lossy().into_owned())
}

// ---- report ----

#[derive(Serialize, Deserialize)]
pub(crate) struct BenchReport {
    name: String,
    measured: MeasurementContext,
    columns: Vec<String>,
    rows: Vec<Vec<String>>,
    goals: Vec<Goal>,
}

/// Machine, time and load average (one minute) of a measurement.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct MeasurementContext {
    pub(crate) machine: BTreeMap<String, String>,
    pub(crate) at: Timestamp,
    load: f64,
}

#[derive(Serialize, Deserialize)]
struct Goal {
    name: String,
    bound: GoalBound,
    unit: String,
    value: f64,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
enum GoalBound {
    AtMost(f64),
    AtLeast(f64),
}

impl BenchReport {
    pub(crate) fn new<const N: usize>(name: &str, columns: [&str; N]) -> Self {
        let columns = columns.map(str::to_owned).to_vec();
        let measured = MeasurementContext { machine: machine(), at: Timestamp::now(), load: load_average() };
        Self { name: name.to_owned(), measured, columns, rows: Vec::new(), goals: Vec::new() }
    }

    pub(crate) fn row<const N: usize>(&mut self, cells: [String; N]) {
        assert_eq!(N, self.columns.len(), "a row needs one cell for each column");
        self.rows.push(cells.into());
    }

    /// Adds a goal that is met if the value is at most the bound.
    pub(crate) fn goal(&mut self, name: &str, at_most: f64, unit: &str, value: f64) {
        let (name, unit) = (name.to_owned(), unit.to_owned());
        self.goals.push(Goal { name, bound: GoalBound::AtMost(at_most), unit, value });
    }

    /// Adds a goal that is met if the value is at least the bound.
    pub(crate) fn goal_at_least(&mut self, name: &str, at_least: f64, unit: &str, value: f64) {
        let (name, unit) = (name.to_owned(), unit.to_owned());
        self.goals.push(Goal { name, bound: GoalBound::AtLeast(at_least), unit, value });
    }

    /// Prints the report and stores it for `BENCHMARKS.md`.
    #[expect(clippy::print_stdout, reason = "the result of a bench")]
    pub(crate) fn publish(&self) {
        println!("\n{}\n\n{}", self.name, self.text());
        let json = serde_json::to_vec_pretty(self).unwrap();
        store(&format!("{}.json", self.name), &json);
    }

    pub(crate) fn all() -> BTreeMap<String, Self> {
        let files = std::fs::read_dir(directory()).into_iter().flatten();
        let read = |path: PathBuf| serde_json::from_slice::<Self>(&std::fs::read(path).unwrap()).ok();
        files.filter_map(|file| read(file.unwrap().path())).map(|report| (report.name.clone(), report)).collect()
    }

    pub(crate) fn measured(&self) -> &MeasurementContext {
        &self.measured
    }

    pub(crate) fn text(&self) -> String {
        let lines = || std::iter::once(&self.columns).chain(&self.rows);
        let width = |column: usize| lines().map(|line| line[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let mut text = String::new();
        for (at, line) in lines().enumerate() {
            let cells = line.iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
                let gap = " ".repeat(width - cell.chars().count());
                if column == 0 { format!("{cell}{gap}") } else { format!("{gap}{cell}") }
            });
            writeln!(text, "| {} |", cells.collect::<Vec<_>>().join(" | ")).unwrap();
            if at == 0 {
                let rules = widths.iter().enumerate().map(|(column, width)| {
                    if column == 0 { "-".repeat(*width) } else { format!("{}:", "-".repeat(width - 1)) }
                });
                writeln!(text, "| {} |", rules.collect::<Vec<_>>().join(" | ")).unwrap();
            }
        }
        text.push('\n');
        for Goal { name, bound, unit, value } in &self.goals {
            let (is_met, bound) = match bound {
                GoalBound::AtMost(bound) => (value <= bound, format!("≤ {bound}")),
                GoalBound::AtLeast(bound) => (value >= bound, format!("≥ {bound}")),
            };
            let verdict = if is_met { "met" } else { "**missed**" };
            let unit = if unit.is_empty() { String::new() } else { format!(" {unit}") };
            writeln!(text, "- {name}: {}{unit}; goal {bound}{unit}: {verdict}", format_number(*value)).unwrap();
        }
        let time = self.measured.at.strftime("%Y-%m-%d %H:%M UTC");
        text + &format!("- measured {time}, load average {:.1}\n", self.measured.load)
    }
}

/// Returns the values of an environment variable that are separated by commas. A variable whose name begins with
/// `BENCH_` selects a part of a measurement.
pub(crate) fn selected<T: FromStr>(variable: &str) -> Option<Vec<T>> {
    let parse = |text: &str| text.parse().unwrap_or_else(|_| panic!("{variable}: `{text}` is not valid"));
    std::env::var(variable).ok().map(|values| values.split(',').map(parse).collect())
}

/// Stores a result of a bench for `cargo bench --bench summary`, unless a part of the measurement is selected.
pub(crate) fn store(file: &str, content: &[u8]) {
    if std::env::vars_os().any(|(name, _)| name.as_encoded_bytes().starts_with(b"BENCH_")) {
        return;
    }
    let directory = directory();
    std::fs::create_dir_all(&directory).unwrap();
    std::fs::write(directory.join(file), content).unwrap();
}

/// Returns the directory of stored results.
pub(crate) fn directory() -> PathBuf {
    // The binary of a bench is in TARGET/release/deps.
    let binary = std::env::current_exe().unwrap();
    binary.ancestors().nth(3).unwrap().join("bench")
}

fn load_average() -> f64 {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or_default()
}

fn machine() -> BTreeMap<String, String> {
    let rustc = std::process::Command::new("rustc").arg("--version").output();
    let rustc =
        rustc.map_or_else(|_| "unknown".to_owned(), |out| String::from_utf8_lossy(&out.stdout).trim().to_owned());
    let mut machine = measure::machine();
    machine.insert("compiler".to_owned(), rustc);
    machine
}

// ---- load harness ----

pub(crate) fn run_harness(args: &[&str]) -> serde_json::Value {
    let run = std::process::Command::new(env!("CARGO_BIN_EXE_satellite"))
        .args(["load", "--json"])
        .args(args)
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    serde_json::from_slice(&run.stdout).unwrap_or_else(|error| panic!("{args:?}: {error}"))
}
