//! Load generator in a process of its own: one thread, `epoll`, and a connection for each client. In a closed loop each
//! client sends its next call as soon as it has its response; in an open loop calls are sent at a constant rate.
//!
//! Each call has its own number, as its id and in its text. A response that does not contain both ends the bench.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use memchr::memmem::Finder;
use rustix::event::{Timespec, epoll};
use serde::{Deserialize, Serialize};

use super::http::{McpClient, McpRequest, ResponseState};
use super::processes::{DiskWrites, cpu_time, resident};
use super::role;
pub(crate) const ROLE: &str = "load";

/// Place of the number of the call in its request: as many digits as every number has.
pub(crate) const NUMBER: &str = "##########";
const FIRST_NUMBER: u64 = 1_000_000_000;

/// Time without any response after which the open calls count as unanswered.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// Requests of the clients of one path.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct LoadTarget {
    pub(crate) address: SocketAddr,
    pub(crate) path: String,
    pub(crate) has_session: bool,
    /// Call of the tool `echo`. The body contains [`NUMBER`] twice.
    pub(crate) call: McpRequest,
    /// Call of the tool `reads`.
    pub(crate) reads: McpRequest,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Load {
    pub(crate) clients: usize,
    pub(crate) warm_up: Duration,
    pub(crate) duration: Duration,
    /// Calls per second of all clients in an open loop; `None` means a closed loop.
    pub(crate) rate: Option<f64>,
    /// Process whose CPU time and memory are measured.
    pub(crate) pid: i32,
    /// Index of the journal's write-ahead log, if disk writes are measured.
    pub(crate) journal_index: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct LoadFindings {
    pub(crate) calls: u32,
    pub(crate) wall: Duration,
    pub(crate) p50: Duration,
    pub(crate) p99: Duration,
    /// CPU time of the measured process.
    pub(crate) cpu: Duration,
    /// CPU time of the load generator.
    pub(crate) client_cpu: Duration,
    /// Resident memory of the measured process at the end of the load, in bytes.
    pub(crate) resident: usize,
    /// `read` calls of the server for each call of its tool.
    pub(crate) reads_per_call: f64,
    /// Connections that the gateway has closed while a call was open. The calls were repeated.
    pub(crate) closed: u32,
    /// Calls without a response when no other response had arrived for [`SILENCE_MAX`].
    pub(crate) unanswered: u32,
    /// Disk writes from the first call until the measured process wrote nothing more.
    pub(crate) disk: Option<DiskWrites>,
}

impl LoadFindings {
    pub(crate) fn per_second(&self) -> f64 {
        f64::from(self.calls) / self.wall.as_secs_f64()
    }

    pub(crate) fn cpu_per_call(&self) -> Duration {
        self.cpu / self.calls
    }
}

/// Runs the load generator as a child process. Returns `None` if the gateway hangs: no client had a response.
pub(crate) fn run(target: &LoadTarget, load: &Load) -> Option<LoadFindings> {
    let plan = serde_json::to_string(&(target, load)).unwrap();
    let child = role(ROLE, &[&plan]).stdin(Stdio::null()).stderr(Stdio::inherit()).output().unwrap();
    assert!(child.status.success(), "the load generator failed: {target:?}, {load:?}");
    serde_json::from_slice(&child.stdout).unwrap()
}

/// Generates the load that the JSON text describes, and prints the findings.
#[expect(clippy::print_stdout, reason = "the parent process reads the output")]
pub(crate) fn serve(plan: &str) {
    let (target, load): (LoadTarget, Load) = serde_json::from_str(plan).unwrap();
    println!("{}", serde_json::to_string(&measure(&target, &load)).unwrap());
}

fn measure(target: &LoadTarget, load: &Load) -> Option<LoadFindings> {
    let mut generator = LoadGenerator::open(target, load);
    generator.generate(load.warm_up);
    let (reads_before, calls_before) = generator.server_counts(&target.reads)?;
    let disk_writes = || load.journal_index.as_deref().map(|index| DiskWrites::settled(load.pid, index));
    let disk = disk_writes();
    let (began, cpu, client_cpu) = (Instant::now(), cpu_time(load.pid), own_cpu_time());
    let mut latencies = generator.generate(load.duration);
    let wall = generator.last_response.duration_since(began);
    let cpu = cpu_time(load.pid).saturating_sub(cpu);
    let client_cpu = own_cpu_time().saturating_sub(client_cpu);
    let resident = resident(load.pid);
    let disk = disk_writes().zip(disk).map(|(after, before)| after.since(before));
    let (reads, calls) = generator.server_counts(&target.reads)?;
    let LoadGenerator { closed, unanswered, idle, clients, .. } = generator;
    for (_, client) in clients.into_iter().enumerate().filter(|(nth, _)| idle.contains(nth)) {
        client.mcp.close();
    }
    latencies.sort_unstable();
    let quantile = |percent: usize| latencies[(latencies.len() * percent / 100).min(latencies.len() - 1)];
    Some(LoadFindings {
        calls: u32::try_from(latencies.len()).unwrap(),
        wall,
        p50: quantile(50),
        p99: quantile(99),
        cpu,
        client_cpu,
        resident,
        reads_per_call: (reads - reads_before) as f64 / (calls - calls_before) as f64,
        closed,
        unanswered,
        disk,
    })
}

fn own_cpu_time() -> Duration {
    Duration::try_from(rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime)).unwrap()
}

struct LoadGenerator {
    epoll: OwnedFd,
    clients: Vec<LoadClient>,
    idle: Vec<usize>,
    rate: Option<f64>,
    next_number: u64,
    /// Connections that the gateway has closed while a call was open.
    closed: u32,
    unanswered: u32,
    last_response: Instant,
}

struct LoadClient {
    mcp: McpClient,
    request: Vec<u8>,
    /// Places of the number in the request.
    places: Vec<usize>,
    number: [u8; NUMBER.len()],
    /// When the call was sent, or in an open loop: when it was due.
    began: Instant,
}

impl LoadGenerator {
    fn open(target: &LoadTarget, load: &Load) -> Self {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let clients: Vec<_> = (0..load.clients).map(|_| LoadClient::open(target)).collect();
        for (nth, client) in clients.iter().enumerate() {
            add(&epoll, nth, client);
        }
        let idle = (0..clients.len()).collect();
        Self {
            epoll,
            clients,
            idle,
            rate: load.rate,
            next_number: FIRST_NUMBER,
            closed: 0,
            unanswered: 0,
            last_response: Instant::now(),
        }
    }

    /// Generates load for this time and waits for the last response, or until no response arrives any more. Returns the
    /// latencies.
    fn generate(&mut self, duration: Duration) -> Vec<Duration> {
        for client in &self.clients {
            client.mcp.http.stream().set_nonblocking(true).unwrap();
        }
        let mut latencies = Vec::with_capacity(1 << 18);
        let mut events = Vec::with_capacity(256);
        let began = Instant::now();
        let end = began + duration;
        let (mut sent, mut now) = (0_u32, began);
        loop {
            let next_due = self.send_due(&mut sent, now, began, end);
            if next_due.is_none() && self.idle.len() == self.clients.len() {
                return latencies;
            }
            // In an open loop, a wait ends when the next call is due, if a client is idle.
            let timeout = next_due.filter(|_| !self.idle.is_empty()).map(|due| due.saturating_duration_since(now));
            let timeout = Timespec::try_from(timeout.unwrap_or(SILENCE_MAX)).unwrap();
            epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&timeout)).unwrap();
            now = Instant::now();
            if events.is_empty() && next_due.is_none() {
                self.unanswered += u32::try_from(self.clients.len() - self.idle.len()).unwrap();
                return latencies;
            }
            for event in events.drain(..) {
                let event: epoll::Event = event;
                let nth = usize::try_from(event.data.u64()).unwrap();
                let client = &mut self.clients[nth];
                match client.mcp.http.receive() {
                    ResponseState::Incomplete => {}
                    ResponseState::Complete => {
                        now = Instant::now();
                        client.check();
                        latencies.push(now - client.began);
                        self.last_response = now;
                        self.idle.push(nth);
                        self.send_due(&mut sent, now, began, end);
                    }
                    ResponseState::Closed => self.repeat_call(nth),
                }
            }
        }
    }

    /// Sends the calls that are due, as far as clients are idle. Returns when the next call is due, or `None` if it is
    /// due after the end.
    fn send_due(&mut self, sent: &mut u32, now: Instant, began: Instant, end: Instant) -> Option<Instant> {
        loop {
            let due = self.rate.map_or(now, |rate| began + Duration::from_secs_f64(f64::from(*sent) / rate));
            if due >= end {
                return None;
            }
            if due > now {
                return Some(due);
            }
            let Some(nth) = self.idle.pop() else { return Some(due) };
            self.clients[nth].send(self.next_number, due);
            self.next_number += 1;
            *sent += 1;
        }
    }

    /// Opens another connection for a client whose connection was closed, and sends its call again.
    fn repeat_call(&mut self, nth: usize) {
        self.closed += 1;
        let client = &mut self.clients[nth];
        client.mcp.reconnect();
        client.mcp.http.stream().set_nonblocking(true).unwrap();
        // The closed connection has left the set by itself.
        add(&self.epoll, nth, client);
        client.mcp.http.send(&client.request);
    }

    /// Returns the number of `read` calls of the server and of calls of its tool so far, or `None` if no client can ask:
    /// each waits for a response.
    fn server_counts(&mut self, request: &McpRequest) -> Option<(u64, u64)> {
        let client = *self.idle.first()?;
        let response = self.clients[client].mcp.request(request);
        let text = response.split_once(r#""text":""#).and_then(|(_, text)| text.split_once('"')).unwrap().0;
        let (reads, calls) = text.split_once(' ').unwrap();
        Some((reads.parse().unwrap(), calls.parse().unwrap()))
    }
}

fn add(epoll: &OwnedFd, nth: usize, client: &LoadClient) {
    let data = epoll::EventData::new_u64(nth.try_into().unwrap());
    epoll::add(epoll, client.mcp.http.stream(), data, epoll::EventFlags::IN).unwrap();
}

impl LoadClient {
    fn open(target: &LoadTarget) -> Self {
        let mcp = if target.has_session {
            McpClient::open_session(target.address, &target.path)
        } else {
            McpClient::connect(target.address, &target.path)
        };
        let request = mcp.post(&target.call);
        let places: Vec<_> = Finder::new(NUMBER).find_iter(&request).collect();
        assert_eq!(places.len(), 2, "{:?}", target.call);
        Self { mcp, request, places, number: [0; NUMBER.len()], began: Instant::now() }
    }

    fn send(&mut self, number: u64, began: Instant) {
        let mut rest = number;
        for digit in self.number.iter_mut().rev() {
            *digit = b'0' + u8::try_from(rest % 10).unwrap();
            rest /= 10;
        }
        for place in &self.places {
            self.request[*place..place + NUMBER.len()].copy_from_slice(&self.number);
        }
        self.began = began;
        self.mcp.http.send(&self.request);
    }

    /// Panics unless the response contains the number of the call as id and as text.
    fn check(&self) {
        let http = &self.mcp.http;
        let numbers = Finder::new(&self.number).find_iter(http.response()).count();
        assert!(http.status() == 200 && numbers == 2, "status {}, {numbers} numbers: {}", http.status(), http.text());
    }
}
