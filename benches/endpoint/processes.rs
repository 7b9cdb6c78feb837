//! The measured processes: the satellite, `mcp-proxy`, and other gateways; their CPU time, memory and disk writes.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Seek};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::time::{clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use super::echo_server;
use crate::common::TIMEOUT;

pub(crate) const MCP_PROXY: &str = "mcp-proxy 0.6.0";

/// Name of the only server. With several servers, a number is appended to the name of each.
pub(crate) const SERVER: &str = "echo";

/// Time without a write after which all writes are counted.
const SETTLED: Duration = Duration::from_secs(3);

pub(crate) const SATELLITE: &str = env!("CARGO_BIN_EXE_satellite");

/// CPU time of the process so far, without its children.
pub(crate) fn cpu_time(pid: i32) -> Duration {
    clock_gettime(clock_getcpuclockid(Pid::from_raw(pid)).unwrap()).unwrap().into()
}

/// Resident memory of the process in bytes.
pub(crate) fn resident(pid: i32) -> usize {
    number(pid, "smaps_rollup", "Rss:") * 1024
}

/// Part of the resident memory that is in transparent huge pages, in bytes.
pub(crate) fn huge_pages(pid: i32) -> usize {
    number(pid, "smaps_rollup", "AnonHugePages:") * 1024
}

/// Disk writes of a satellite so far.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct DiskWrites {
    /// Pages of files that the process has changed, in bytes.
    pub(crate) bytes: usize,
    /// Transactions of the journal; `None` if it has no index of its write-ahead log.
    pub(crate) transactions: Option<u32>,
}

impl DiskWrites {
    /// Waits until the process has written nothing for a while. Panics if it never stops.
    pub(crate) fn settled(pid: i32, journal_index: &Path) -> Self {
        let began = Instant::now();
        let (mut bytes, mut since) = (written(pid), began);
        while since.elapsed() < SETTLED {
            assert!(began.elapsed() < TIMEOUT, "the satellite writes all the time");
            std::thread::sleep(Duration::from_millis(50));
            let now = written(pid);
            if now != bytes {
                (bytes, since) = (now, Instant::now());
            }
        }
        // The third number of the index counts the transactions (`iChange` of SQLite's `WalIndexHdr`).
        let index = fs::read(journal_index).unwrap_or_default();
        let transactions = index.get(8..12).map(|bytes| u32::from_ne_bytes(bytes.try_into().unwrap()));
        Self { bytes, transactions }
    }

    pub(crate) fn since(self, before: Self) -> Self {
        let transactions = self.transactions.zip(before.transactions).map(|(now, before)| now.wrapping_sub(before));
        Self { bytes: self.bytes - before.bytes, transactions }
    }
}

fn written(pid: i32) -> usize {
    number(pid, "io", "write_bytes:")
}

/// Returns the number of the line with this name in a file of `/proc/PID`.
fn number(pid: i32, file: &str, name: &str) -> usize {
    let text = fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim_matches(|letter: char| !letter.is_ascii_digit()).parse().unwrap()
}

fn children(pid: i32) -> Vec<i32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let of_tasks = tasks.map(|task| fs::read_to_string(task.unwrap().path().join("children")).unwrap_or_default());
    of_tasks.flat_map(|pids| pids.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<_>>()).collect()
}

/// Waits until the condition is true. Panics if it takes too long.
pub(crate) fn wait_until(expectation: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < TIMEOUT, "not within {TIMEOUT:?}: {expectation}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(crate) struct GatewayProcess {
    pub(crate) address: SocketAddr,
    /// Process whose CPU time and memory are measured.
    pub(crate) pid: i32,
    child: Child,
    /// Output on stderr.
    log: File,
    home: Option<TempDir>,
}

impl Drop for GatewayProcess {
    #[expect(clippy::print_stderr, reason = "a message to the person who runs the bench")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("output of the gateway at {}:\n{}", self.address, read_log(&mut self.log));
        }
        // An error means that the process has ended already. SIGTERM lets a supervisor end its servers.
        let _ = nix::sys::signal::kill(Pid::from_raw(self.parent_pid()), nix::sys::signal::Signal::SIGTERM);
        let _ = self.child.wait();
    }
}

impl GatewayProcess {
    /// Returns the id of the started process. For the satellite, this is its keeper.
    pub(crate) fn parent_pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    /// CPU time so far of the process, and of its parent and children that run the same program: the keeper and the
    /// spawn helper of the satellite.
    pub(crate) fn cpu_time_of_program(&self) -> Duration {
        let program = |pid: i32| fs::read_link(format!("/proc/{pid}/exe")).ok();
        let children = [self.parent_pid(), self.pid].into_iter().flat_map(children);
        let of_program = children.filter(|pid| program(*pid) == program(self.pid));
        let pids: BTreeSet<i32> = of_program.chain([self.parent_pid()]).collect();
        pids.into_iter().map(cpu_time).sum()
    }

    /// Returns the path of a file in the data directory of the satellite.
    pub(crate) fn data_file(&self, name: &str) -> PathBuf {
        self.home.as_ref().unwrap().path().join("data").join(name)
    }
}

/// Servers behind a gateway, each with a process of its own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ServerFleet<'a> {
    pub(crate) servers: usize,
    /// File to which each server appends one byte when it is ready.
    pub(crate) ready: Option<&'a Path>,
}

impl ServerFleet<'_> {
    pub(crate) const ONE: ServerFleet<'static> = ServerFleet { servers: 1, ready: None };

    fn command(self) -> (String, Vec<String>) {
        let [program, arguments @ ..] = &echo_server::command(self.ready)[..] else { panic!("the command is empty") };
        (program.clone(), arguments.to_vec())
    }

    fn names(self) -> impl Iterator<Item = String> {
        (0..self.servers).map(move |nth| if self.servers == 1 { SERVER.to_owned() } else { format!("{SERVER}-{nth}") })
    }
}

/// Properties of a satellite that differ from its defaults.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SatelliteOptions {
    pub(crate) has_journal: bool,
    pub(crate) has_request_logging: bool,
}

impl Default for SatelliteOptions {
    fn default() -> Self {
        Self { has_journal: true, has_request_logging: true }
    }
}

/// Starts the built binary with one user and default settings, except for the limits of clients and authentication.
pub(crate) fn satellite(fleet: ServerFleet<'_>, options: SatelliteOptions) -> GatewayProcess {
    satellite_of(Command::new(SATELLITE), fleet, options)
}

/// Does the same with another build of the binary or with environment variables.
pub(crate) fn satellite_of(mut command: Command, fleet: ServerFleet<'_>, options: SatelliteOptions) -> GatewayProcess {
    let home = home();
    let (server, arguments) = fleet.command();
    let mut config = "[gateway]\nlisten = \"127.0.0.1:0\"\nauth = \"none\"\n\
         connections_max = 16384\nsessions_per_user_max = 16384\nunauthenticated_max = 16384\n\
         requests_per_second = \"off\"\ncalls_per_user_max = \"off\"\n\n\
         [[teams]]\nid = \"team_acme\"\nslug = \"acme\"\n\n[[teams.users]]\nid = \"user_alice\"\nslug = \"alice\"\n"
        .to_owned();
    for name in fleet.names() {
        write!(
            config,
            "\n[[teams.installations]]\nid = \"{name}\"\nserver = \"{name}\"\ncommand = {server:?}\n\
             args = {arguments:?}\nkeep = \"always_on\"\nrequest_logging_enabled = {}\n",
            options.has_request_logging
        )
        .unwrap();
    }
    let file = home.path().join("satellite.toml");
    fs::write(&file, config).unwrap();
    let data = home.path().join("data");
    command.arg("run").arg("--config").arg(&file).arg("--data-dir").arg(&data);
    let (child, line, log) = start(command, |line| line.contains("MCP: http://"));
    let address = line.split_once("http://").unwrap().1.split('/').next().unwrap().parse().unwrap();
    // The child is the keeper; the satellite is its child.
    let pid = children(child.id().cast_signed())[0];
    if !options.has_journal {
        // A file in place of the directory: the satellite notices the loss, and can create no other database.
        fs::rename(data.join("journal"), data.join("lost")).unwrap();
        fs::write(data.join("journal"), "").unwrap();
    }
    GatewayProcess { address, pid, child, log, home: Some(home) }
}

/// Starts a gateway that prints its URL.
pub(crate) fn gateway(command: Command) -> GatewayProcess {
    let (child, url, log) = start(command, |line| line.starts_with("http://"));
    let address = url.split_once("http://").unwrap().1.split('/').next().unwrap().parse().unwrap();
    GatewayProcess { address, pid: child.id().cast_signed(), child, log, home: None }
}

/// Starts `mcp-proxy`, if it is installed, and waits until it listens.
pub(crate) fn mcp_proxy(fleet: ServerFleet<'_>) -> Option<GatewayProcess> {
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("target/tools/bin/mcp-proxy");
    let program = std::env::var_os("MCP_PROXY").map_or_else(default, PathBuf::from);
    if !program.exists() {
        report_missing(&program);
        return None;
    }
    let home = home();
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
    let (command, arguments) = fleet.command();
    let mut config = format!(
        "[proxy]\nname = \"bench\"\nseparator = \"__\"\n\n[proxy.listen]\nhost = \"127.0.0.1\"\nport = {port}\n"
    );
    for name in fleet.names() {
        write!(
            config,
            "\n[[backends]]\nname = \"{name}\"\ntransport = \"stdio\"\ncommand = {command:?}\nargs = {arguments:?}\n"
        )
        .unwrap();
    }
    let file = home.path().join("proxy.toml");
    fs::write(&file, config).unwrap();
    let mut command = Command::new(program);
    // Its log has a line for each call, which goes nowhere.
    let log = tempfile::tempfile().unwrap();
    command.arg("--config").arg(&file).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let child = command.spawn().unwrap();
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    wait_until("mcp-proxy listens", || TcpStream::connect(address).is_ok());
    Some(GatewayProcess { address, pid: child.id().cast_signed(), child, log, home: Some(home) })
}

#[expect(clippy::print_stderr, reason = "a message to the person who runs the bench")]
fn report_missing(program: &Path) {
    eprintln!("{MCP_PROXY} is not measured: {} does not exist; set MCP_PROXY", program.display());
}

/// Returns a new directory on the disk of the build, because `/tmp` may be in memory.
fn home() -> TempDir {
    TempDir::new_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap()
}

/// Starts the process and waits for the first line of its output that matches. Panics if the process ends before.
/// Returns the process, the line, and the output on stderr.
fn start(mut command: Command, matches: impl Fn(&str) -> bool) -> (Child, String, File) {
    let mut log = tempfile::tempfile().unwrap();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log.try_clone().unwrap());
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let Some(line) = lines.find(|line| matches(line)) else {
        panic!("{command:?} does not serve: {}\n{}", child.wait().unwrap(), read_log(&mut log));
    };
    // Drain further output so that the process does not block.
    std::thread::spawn(move || lines.for_each(drop));
    (child, line, log)
}

fn read_log(log: &mut File) -> String {
    let mut text = String::new();
    log.rewind().unwrap();
    log.read_to_string(&mut text).unwrap();
    text
}
