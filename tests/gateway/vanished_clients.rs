//! Clients that disappear without ending their sessions: the endpoint frees their resources.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;
use testkit::signals::reset_signal_actions;
use testkit::wait::GIVE_UP;

use super::client::Client;
use super::fake::FakeEndpoint;

const SESSIONS: usize = 10_000;
/// Several rounds, because a small leak shows only after some of them.
const ROUNDS: usize = 4;
/// Number of concurrent clients.
const CLIENTS: u8 = 8;
/// The built binary with one user and no server.
struct Satellite {
    dir: TempDir,
    child: Child,
    address: SocketAddr,
    /// The serving process, which is a child of the keeper.
    pid: i32,
}

impl Drop for Satellite {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(i32::try_from(self.child.id()).unwrap()), Signal::SIGTERM);
        let _ = self.child.wait();
    }
}

fn write_config(dir: &Path, session_idle: &str) {
    let text = format!(
        "[gateway]\nlisten = \"127.0.0.1:0\"\nsession_idle = \"{session_idle}\"\nsessions_max = 20000\n\
         sessions_per_user_max = 20000\nrequests_per_second = \"off\"\n[[teams]]\nid = \"t\"\nslug = \"acme\"\n\
         [[teams.users]]\nid = \"u\"\nslug = \"alice\"\ntoken = \"env:ABANDONED_TOKEN\"\n"
    );
    fs::write(dir.join("satellite.toml"), text).unwrap();
}

impl Satellite {
    fn start() -> Self {
        let dir = TempDir::new().unwrap();
        write_config(dir.path(), "1h");
        let mut command = Command::new(env!("CARGO_BIN_EXE_satellite"));
        command.args(["run", "--config", "satellite.toml", "--data-dir", "data"]).current_dir(dir.path());
        command.env("ABANDONED_TOKEN", "alice-token").stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = reset_signal_actions(&mut command).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let address = lines.find_map(|line| {
            let line = line.unwrap();
            let (_, url) = line.split_once("MCP: http://")?;
            url.split('/').next()?.parse().ok()
        });
        // Later output must be read too, or the pipe fills.
        std::thread::spawn(move || lines.for_each(drop));
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", child.id())).unwrap();
        let pid = children.split_whitespace().next().unwrap().parse().unwrap();
        Self { dir, child, address: address.unwrap(), pid }
    }

    /// Number of sessions according to `satellite status`.
    fn sessions(&self) -> Option<usize> {
        let mut status = Command::new(env!("CARGO_BIN_EXE_satellite"));
        let args = ["status", "--satellite", "--json", "--data-dir", "data"];
        let status_output = status.args(args).current_dir(self.dir.path()).output().unwrap();
        let status_output: serde_json::Value = serde_json::from_slice(&status_output.stdout).ok()?;
        usize::try_from(status_output["endpoint"]["sessions"].as_u64()?).ok()
    }

    fn reload(&self, session_idle: &str) {
        write_config(self.dir.path(), session_idle);
        kill(Pid::from_raw(i32::try_from(self.child.id()).unwrap()), Signal::SIGHUP).unwrap();
    }

    /// Resident memory in bytes.
    fn memory(&self) -> u64 {
        let statm = fs::read_to_string(format!("/proc/{}/statm", self.pid)).unwrap();
        statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
    }

    fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.pid)).unwrap().count()
    }

    /// Opens sessions, drops their connections, and waits until all are counted.
    async fn open_sessions(&self) {
        let opened = (1..=CLIENTS).map(|number| {
            let address = self.address;
            tokio::spawn(async move {
                for _ in 0..SESSIONS / usize::from(CLIENTS) {
                    // An address of its own: so many connections would use up the ports of 127.0.0.1.
                    let own = Ipv4Addr::new(127, 7, 0, number);
                    Client::try_connect_from(own, address).await.unwrap().open_session("2025-11-25").await;
                }
            })
        });
        futures::future::join_all(opened).await.into_iter().for_each(|opened| opened.unwrap());
        self.wait_until("all sessions", || self.sessions() == Some(SESSIONS));
    }

    fn wait_until(&self, what: &str, is_reached: impl Fn() -> bool) {
        let started = Instant::now();
        while !is_reached() {
            let state = (self.sessions(), self.memory(), self.descriptors());
            assert!(
                started.elapsed() < GIVE_UP,
                "gave up waiting for {what}; sessions, memory, descriptors: {state:?}"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_clients_that_vanish_leak_nothing() {
    let satellite = Satellite::start();
    let descriptors = satellite.descriptors();
    // The allocator and the satellite keep memory of the first round for reuse. Only growth after it is a leak.
    let mut memory = None;
    for _ in 0..ROUNDS {
        satellite.reload("1h");
        satellite.open_sessions().await;
        satellite.reload("1s");
        satellite.wait_until("no session", || satellite.sessions() == Some(0));
        satellite.wait_until("the former number of descriptors", || satellite.descriptors() <= descriptors);
        match memory {
            None => memory = Some(satellite.memory()),
            Some(before) => {
                satellite.wait_until("the former memory", || satellite.memory() <= before + before / 10);
            }
        }
    }
}

#[tokio::test]
async fn a_user_who_abandons_sessions_keeps_at_most_256() {
    let endpoint = FakeEndpoint::new(|_| {});
    for _ in 0..300 {
        Client::initialized(endpoint.address, "2025-11-25").await;
    }
    assert_eq!(endpoint.gateway.session_count(), 256);
}
