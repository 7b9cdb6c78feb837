//! The measured gateways: start, address, CPU time and memory of each.

use std::fs;
use std::io::{BufRead, BufReader, Read, Seek};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::unistd::{SysconfVar, sysconf};
use tempfile::TempDir;

use super::common::TIMEOUT;
use super::sdk;

pub(crate) const INSTANCE: &str = "`/i/{instance}/mcp`";
pub(crate) const EXECUTE: &str = "`execute_mcp_tool`";
pub(crate) const EXECUTE_OF_MANY: &str = "`execute_mcp_tool`, 1,000 tools";
pub(crate) const MCP_PROXY: &str = "mcp-proxy 0.6.0";

const SATELLITE: &str = env!("CARGO_BIN_EXE_satellite");

/// Call on an endpoint that exposes the tool under its own name.
const ECHO: &str =
    r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"NAME","arguments":{"text":"hello"}}}"#;
const EXECUTE_ECHO: &str = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"execute_mcp_tool","arguments":{"tool_path":"echo:echo","arguments":{"text":"hello"}}}}"#;

/// Returns the command of a server with this many tools, of which `echo` is the first.
pub(crate) fn echo(tools: usize) -> Vec<String> {
    [SATELLITE, "sim-server", "--tools", &tools.to_string()].map(str::to_owned).into()
}

pub(crate) struct GatewayProcess {
    pub(crate) name: &'static str,
    pub(crate) url: String,
    pub(crate) call: String,
    /// Process whose CPU time is counted.
    pid: u32,
    child: Child,
    _home: Option<TempDir>,
}

impl Drop for GatewayProcess {
    fn drop(&mut self) {
        let pid = nix::unistd::Pid::from_raw(self.child.id().cast_signed());
        // An error means that the process has ended already. SIGTERM lets a supervisor end its servers.
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        let _ = self.child.wait();
    }
}

impl GatewayProcess {
    /// Returns the CPU time that the process has used so far, without its children.
    pub(crate) fn cpu(&self) -> Duration {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap();
        // Fields after the name, which may contain any character: field 3 is the state, 14 and 15 are the times.
        let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
        let per_second = sysconf(SysconfVar::CLK_TCK).unwrap().unwrap().cast_unsigned();
        Duration::from_secs(ticks) / u32::try_from(per_second).unwrap()
    }

    pub(crate) fn resident(&self) -> usize {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim_matches(|c: char| !c.is_ascii_digit()).parse::<usize>().unwrap() * 1024
    }
}

pub(crate) async fn all() -> Vec<GatewayProcess> {
    // Starting a process blocks the thread.
    tokio::task::spawn_blocking(|| {
        let satellites = [
            satellite(INSTANCE, "json", 1, "/i/echo/mcp", ECHO.replace("NAME", "echo")),
            satellite("`/i/{instance}/mcp`, SSE responses", "sse", 1, "/i/echo/mcp", ECHO.replace("NAME", "echo")),
            satellite(EXECUTE, "json", 1, "/mcp", EXECUTE_ECHO.to_owned()),
            satellite(EXECUTE_OF_MANY, "json", 1_000, "/mcp", EXECUTE_ECHO.to_owned()),
        ];
        satellites.into_iter().chain([rmcp()]).chain(mcp_proxy()).collect()
    })
    .await
    .unwrap()
}

/// Starts the built binary with default settings, except for the limits of a user.
fn satellite(name: &'static str, answers: &str, tools: usize, path: &str, call: String) -> GatewayProcess {
    let home = TempDir::new().unwrap();
    let [program, arguments @ ..] = &echo(tools)[..] else { unreachable!("the command is not empty") };
    let config = format!(
        "[gateway]\nlisten = \"127.0.0.1:0\"\nauth = \"none\"\nanswers = {answers:?}\nrequests_per_second = 0\n\
         calls_per_user_max = 0\n\n\
         [events]\nsink = \"file\"\n\n\
         [servers.echo]\ncommand = {program:?}\nargs = {arguments:?}\n\n\
         [[teams]]\nid = \"team_acme\"\nslug = \"acme\"\n\n[[teams.users]]\nid = \"user_alice\"\nslug = \"alice\"\n\n\
         [[teams.installations]]\nid = \"abc123\"\nserver = \"echo\"\nkeep = \"always_on\"\n",
    );
    let file = home.path().join("satellite.toml");
    fs::write(&file, config).unwrap();
    let mut command = Command::new(SATELLITE);
    command.arg("run").arg("--config").arg(&file).arg("--data-dir").arg(home.path().join("data"));
    let (child, line) = start(command, |line| line.contains("MCP: http://"));
    let base = line.split_once("MCP: ").unwrap().1.split_whitespace().next().unwrap().trim_end_matches("/mcp");
    // The child is the reaper; the satellite is its child.
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", child.id())).unwrap();
    let pid = children.split_whitespace().next().unwrap().parse().unwrap();
    GatewayProcess { name, url: format!("{base}{path}"), call, pid, child, _home: Some(home) }
}

fn rmcp() -> GatewayProcess {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(sdk::CHILD, "1");
    let (child, url) = start(command, |line| line.starts_with("http://"));
    let (name, call) = ("rmcp `StreamableHttpService`", ECHO.replace("NAME", "echo"));
    GatewayProcess { name, url, call, pid: child.id(), child, _home: None }
}

fn mcp_proxy() -> Option<GatewayProcess> {
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("target/tools/bin/mcp-proxy");
    let program = std::env::var_os("MCP_PROXY").map_or_else(default, PathBuf::from);
    if !program.exists() {
        report_missing(&program);
        return None;
    }
    let home = TempDir::new().unwrap();
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
    let [server, arguments @ ..] = &echo(1)[..] else { unreachable!("the command is not empty") };
    let config = format!(
        "[proxy]\nname = \"bench\"\nseparator = \"__\"\n\n[proxy.listen]\nhost = \"127.0.0.1\"\nport = {port}\n\n\
         [[backends]]\nname = \"echo\"\ntransport = \"stdio\"\ncommand = {server:?}\nargs = {arguments:?}\n"
    );
    let file = home.path().join("proxy.toml");
    fs::write(&file, config).unwrap();
    let mut command = Command::new(program);
    command.arg("--config").arg(&file).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let child = command.spawn().unwrap();
    let began = Instant::now();
    while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
        assert!(began.elapsed() < TIMEOUT, "mcp-proxy does not listen");
        std::thread::sleep(Duration::from_millis(20));
    }
    let (url, call) = (format!("http://127.0.0.1:{port}/"), ECHO.replace("NAME", "echo__echo"));
    Some(GatewayProcess { name: MCP_PROXY, url, call, pid: child.id(), child, _home: Some(home) })
}

#[expect(clippy::print_stderr, reason = "a message to the person who runs the bench")]
fn report_missing(program: &Path) {
    eprintln!("{MCP_PROXY} is not measured: {} does not exist; set MCP_PROXY", program.display());
}

/// Starts the process and waits for the first line of its output that matches. Panics if the process ends before.
fn start(mut command: Command, matches: impl Fn(&str) -> bool) -> (Child, String) {
    let mut log = tempfile::tempfile().unwrap();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log.try_clone().unwrap());
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let Some(line) = lines.find(|line| matches(line)) else {
        let mut errors = String::new();
        log.rewind().unwrap();
        log.read_to_string(&mut errors).unwrap();
        panic!("{command:?} does not serve: {}\n{errors}", child.wait().unwrap());
    };
    // Drain further output so that the process does not block.
    std::thread::spawn(move || lines.for_each(drop));
    (child, line)
}
