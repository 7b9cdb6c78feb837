//! Servers as child processes: `satellite sim-server` over pipes, or over HTTP for remote servers. Each process reads
//! its script from a file when it starts. A fault replaces this file or sends a signal.

use std::collections::HashMap;
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, TryStreamExt};
use mcp_satellite_actors::model::ids::RunNumber;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::runtime::RuntimeHandle;
use mcp_satellite_actors::seam::{Connectors, LineConnector, OpenError, ProcessConnector, ProcessLink, ServerLine};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;
use tokio::task::spawn_blocking;

use super::{FleetScripts, InjectionFuture, ServerFaults, ServerWorld};
use crate::types::{FaultKind, InstanceNo, LoadTarget, PlannedFault};
use mcp_satellite_process::keeper::is_orphan;
use mcp_satellite_process::process::raise_descriptor_limit;
use mcp_satellite_process::process::spawn_helper_pid;
use mcp_satellite_process::stdio::StdioConnector;
use mcp_satellite_remote::RemoteConnector;
use mcp_satellite_sim::SimScript;

// Concurrent starts of remote servers.
const STARTS: usize = 8;

pub(crate) struct ProcessWorld {
    connectors: ClosableConnector,
    scripts: Arc<FleetScripts>,
    program: PathBuf,
    // Directory of the script files.
    script_dir: TempDir,
    remote: Mutex<HashMap<InstanceNo, RemoteProcess>>,
}

// A remote server keeps its address while its process is down.
struct RemoteProcess {
    address: SocketAddr,
    process: Option<Child>,
}

impl Drop for RemoteProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

impl RemoteProcess {
    // Kills the process, as a failing machine would.
    fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            // Errors mean that the process has already ended.
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// Closable connector. Closed, it has no connectors any more, and neither have its clones.
#[derive(Clone)]
struct ClosableConnector(Arc<Mutex<Connectors>>);

impl ClosableConnector {
    fn connectors(&self) -> MutexGuard<'_, Connectors> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ProcessConnector for ClosableConnector {
    fn open(&self, spec: Arc<InstanceSpec>, run: RunNumber) -> BoxFuture<'static, Result<ProcessLink, OpenError>> {
        self.connectors().open(spec, run)
    }
}

impl LineConnector for ClosableConnector {
    fn dial(&self, spec: &Arc<InstanceSpec>, run: RunNumber) -> Box<dyn ServerLine> {
        self.connectors().dial(spec, run)
    }
}

impl ProcessWorld {
    pub(crate) async fn new(scripts: &Arc<FleetScripts>, program: &Path) -> io::Result<Self> {
        // Each process needs three pipes and more. If the limit cannot be raised, only smaller fleets are possible.
        let _ = raise_descriptor_limit();
        let connectors =
            Connectors::default().with_process(StdioConnector::new(Vec::new())?).with_line(RemoteConnector::new()?);
        let world = Self {
            connectors: ClosableConnector(Arc::new(Mutex::new(connectors))),
            scripts: Arc::clone(scripts),
            program: program.to_owned(),
            script_dir: TempDir::with_prefix("satellite-load-")?,
            remote: Mutex::default(),
        };
        let fleet = &scripts.fleet;
        for nth in fleet.shape.all() {
            world.write_script(nth, scripts.own_script(nth))?;
        }
        let remote = fleet.shape.all().filter(|nth| fleet.is_remote(*nth));
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let start = |nth| world.start(nth, any);
        let start = futures::stream::iter(remote).map(start).buffer_unordered(STARTS);
        start.try_for_each(|()| futures::future::ready(Ok(()))).await?;
        Ok(world)
    }

    fn remote(&self) -> MutexGuard<'_, HashMap<InstanceNo, RemoteProcess>> {
        self.remote.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn script_file(&self, nth: InstanceNo) -> PathBuf {
        self.script_dir.path().join(format!("i{}.json", nth.0))
    }

    // Replaces the file atomically: a process that starts now reads the old or the new script.
    fn write_script(&self, nth: InstanceNo, script: &SimScript) -> io::Result<()> {
        let (file, fresh) = (self.script_file(nth), self.script_dir.path().join(format!("i{}.new", nth.0)));
        fs::write(&fresh, serde_json::to_vec(script)?)?;
        fs::rename(fresh, file)
    }

    async fn start(&self, nth: InstanceNo, address: SocketAddr) -> io::Result<()> {
        let mut command = Command::new(&self.program);
        command.args(["sim-server", "--http", &address.to_string(), "--script-file"]).arg(self.script_file(nth));
        // A tokio process would keep additional descriptors.
        let started = spawn_blocking(move || start_remote(command)).await.map_err(io::Error::other)??;
        self.remote().insert(nth, started);
        Ok(())
    }

    fn stop(&self, nth: InstanceNo) -> Result<SocketAddr, String> {
        let mut remote = self.remote();
        let remote = remote.get_mut(&nth).ok_or("not a remote server")?;
        remote.kill();
        Ok(remote.address)
    }

    async fn restart(&self, nth: InstanceNo) -> Result<(), String> {
        let address = self.remote().get(&nth).map(|remote| remote.address).ok_or("not a remote server")?;
        self.start(nth, address).await.map_err(|error| error.to_string())
    }

    fn signal(&self, nth: InstanceNo, signal: Signal, runtime: &RuntimeHandle) -> Result<(), String> {
        let view = runtime.status(self.scripts.fleet.id(nth));
        let pid = view.and_then(|view| view.pid).ok_or("the instance has no running process")?;
        kill(Pid::from_raw(pid.cast_signed()), signal).map_err(|error| error.to_string())
    }
}

fn start_remote(mut command: Command) -> io::Result<RemoteProcess> {
    let mut process = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
    let stdout = process.stdout.take();
    // From here on, dropping `remote` ends the process.
    let mut remote = RemoteProcess { address: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), process: Some(process) };
    let mut line = String::new();
    if let Some(stdout) = stdout {
        BufReader::new(stdout).read_line(&mut line)?;
    }
    let address = line.trim_end().strip_prefix("listening on http://").and_then(|rest| rest.strip_suffix("/mcp"));
    let address = address.and_then(|address| address.parse().ok());
    remote.address = address.ok_or_else(|| io::Error::other("a remote server did not print its address"))?;
    Ok(remote)
}

impl ServerWorld for ProcessWorld {
    fn connectors(&self) -> Connectors {
        Connectors::default().with_process(self.connectors.clone()).with_line(self.connectors.clone())
    }

    fn target(&self, nth: InstanceNo, _kind: usize) -> LoadTarget {
        if let Some(remote) = self.remote().get(&nth) {
            return LoadTarget::Remote(format!("http://{}/mcp", remote.address));
        }
        let file = self.script_file(nth).display().to_string();
        let arguments = ["sim-server", "--script-file", &file].map(str::to_owned);
        LoadTarget::Process(self.program.display().to_string(), arguments.into())
    }

    fn set_script(&self, nth: InstanceNo, script: Option<SimScript>) -> Result<(), String> {
        self.write_script(nth, script.as_ref().unwrap_or_else(|| self.scripts.own_script(nth)))
            .map_err(|error| error.to_string())
    }

    fn kill(&self, nth: InstanceNo, runtime: &RuntimeHandle) -> Result<(), String> {
        self.signal(nth, Signal::SIGKILL, runtime)
    }

    fn freeze(&self, nth: InstanceNo, runtime: &RuntimeHandle) -> Result<(), String> {
        self.signal(nth, Signal::SIGSTOP, runtime)
    }

    fn exit<'a>(&'a self, nth: InstanceNo, faults: &'a ServerFaults) -> InjectionFuture<'a> {
        faults.call_tool(nth, "crash", r#"{"code":0}"#).boxed()
    }

    fn inject_remote<'a>(
        &'a self,
        nth: InstanceNo,
        what: &'a PlannedFault,
        faults: &'a ServerFaults,
    ) -> InjectionFuture<'a> {
        async move {
            match what.kind {
                // The sessions are lost because a new process listens on the same address.
                FaultKind::SessionLost => {
                    self.stop(nth)?;
                    self.restart(nth).await?;
                }
                FaultKind::Refused => drop(self.stop(nth)?),
                _ => return Err("a real server cannot simulate this fault".to_owned()),
            }
            faults.trigger_detection(nth).await;
            Ok(())
        }
        .boxed()
    }

    fn heal_remote<'a>(
        &'a self,
        nth: InstanceNo,
        _what: &'a PlannedFault,
        _hand: &'a ServerFaults,
    ) -> InjectionFuture<'a> {
        self.restart(nth).boxed()
    }

    fn close(&self) {
        drop(std::mem::take(&mut *self.connectors.connectors()));
        self.remote().clear();
    }

    fn server_count(&self) -> usize {
        // Servers started by the runtime are counted as processes.
        self.remote().len()
    }

    fn process_count(&self) -> usize {
        descendants(std::process::id()).len()
    }
}

/// Returns the descendants of this process, including zombies and those adopted by its keeper.
fn descendants(root_pid: u32) -> Vec<u32> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let pid = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok());
        let Some((pid, parent)) = pid.and_then(|pid| Some((pid, parent_of(pid)?))) else { continue };
        children.entry(parent).or_default().push(pid);
    }
    // The keeper is the parent of this process, of the servers and of the spawn helper.
    let top = if is_orphan(root_pid) { Some(root_pid) } else { parent_of(root_pid) };
    let mut open = Vec::from_iter(top);
    let mut found = Vec::new();
    while let Some(pid) = open.pop() {
        for child in children.remove(&pid).unwrap_or_default() {
            if child != root_pid && Some(child) != spawn_helper_pid() {
                found.push(child);
            }
            open.push(child);
        }
    }
    found
}

fn parent_of(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The process name in parentheses may contain anything. After it follow the state and the parent's id.
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn descendants_include_processes_that_a_child_started() {
        // The child prints the id of its own child, which reads stdin until it is closed. The extra descriptor is
        // necessary because a shell redirects the stdin of background processes.
        let mut child = Command::new("sh")
            .args(["-c", "exec 3<&0; sh -c 'read line <&3' & echo $!; wait"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let left: u32 = line.trim().parse().unwrap();
        let found = descendants(std::process::id());
        assert!(found.contains(&child.id()) && found.contains(&left), "{left} and {} in {found:?}", child.id());
        child.stdin.take().unwrap().write_all(b"end\n").unwrap();
        let ended = child.id();
        child.wait().unwrap();
        assert!(!descendants(std::process::id()).contains(&ended));
    }
}
