//! Facts that the satellite reads for each scrape.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::memory::MemoryStatus;
use mcp_satellite_actors::rules::outbox::OutboxStatistics;

/// Facts of a satellite at the time of a scrape.
#[derive(Debug, Clone, Default)]
pub struct ScrapeFacts {
    /// Name of the satellite.
    pub name: String,
    /// The instances.
    pub instances: Vec<InstanceFacts>,
    /// Statistics of the event queue.
    pub events: OutboxStatistics,
    /// Memory of the machine.
    pub memory: MemoryStatus,
    /// The journal.
    pub journal: JournalFacts,
    /// Delivery of events; `None` if they stay in the journal.
    pub delivery: Option<DeliveryFacts>,
    /// Link to the backend, if there is one.
    pub backend: Option<BackendFacts>,
    /// The MCP endpoint, if it is open.
    pub endpoint: Option<EndpointFacts>,
    /// HTTP requests and bytes of clients.
    pub http: HttpFacts,
    /// The console.
    pub console: ConsoleFacts,
    /// Actors, as they answered the last probe.
    pub actors: Vec<ActorFacts>,
    /// Processes that servers have left behind.
    pub orphans: OrphanFacts,
    /// Memory for messages: bytes in use and the maximum.
    pub message_memory: (u64, u64),
    /// The process of the satellite.
    pub process: ProcessFacts,
}

/// Facts of one instance.
#[derive(Debug, Clone)]
pub struct InstanceFacts {
    /// Name of the instance.
    pub name: Arc<str>,
    /// Id of its installation.
    pub installation: String,
    /// Name of its team.
    pub team: String,
    /// `stdio`, `http` or `sse`.
    pub transport: &'static str,
    /// Status of the instance.
    pub status: Status,
    /// Unanswered calls.
    pub calls_in_flight: usize,
    /// Remaining unwanted exits before the instance fails permanently; `None` without a charged exit.
    pub restart_budget: Option<usize>,
    /// Usage of its process tree.
    pub usage: Option<TreeFacts>,
}

impl InstanceFacts {
    /// Returns the facts of an instance at `now`. `usage` is called if it has a process.
    pub fn from_view(view: &InstanceView, now: Instant, usage: impl FnOnce(&InstanceId) -> Option<TreeFacts>) -> Self {
        let spec = &view.spec;
        let exits = view.exits_in_window(now);
        Self {
            name: spec.name.clone(),
            installation: spec.id.installation.to_string(),
            team: spec.team_slug.to_string(),
            transport: spec.transport(),
            status: view.status,
            calls_in_flight: view.calls_in_flight(),
            restart_budget: (exits > 0).then(|| spec.policy.restart.max_crashes.saturating_sub(exits)),
            usage: view.pid.and_then(|_| usage(&spec.id)),
        }
    }
}

/// Usage of a process tree.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TreeFacts {
    /// Resident memory in bytes.
    pub memory_bytes: u64,
    /// Processor time in seconds.
    pub cpu_seconds: f64,
}

/// Facts of the journal.
#[derive(Debug, Clone, Default)]
pub struct JournalFacts {
    /// Stored events.
    pub events: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// State, as `satellite status` shows it.
    pub state: String,
    /// Writes of batches of events.
    pub writes: TimedFacts,
}

/// Number and total duration of operations.
#[derive(Debug, Clone, Copy, Default)]
pub struct TimedFacts {
    /// Number of operations.
    pub count: u64,
    /// Sum of their durations.
    pub total: Duration,
}

/// Facts of the delivery of events.
#[derive(Debug, Clone, Copy, Default)]
pub struct DeliveryFacts {
    /// Stored events that are not settled.
    pub pending: u64,
    /// Events that the receiver rejected for good.
    pub failed: u64,
    /// Attempts to send a batch.
    pub attempts: TimedFacts,
}

/// Facts of the link to the backend.
#[derive(Debug, Clone, Copy, Default)]
pub struct BackendFacts {
    /// True if the last request succeeded.
    pub connected: bool,
    /// Seconds since the last response; `None` before the first one.
    pub last_contact_seconds: Option<f64>,
}

/// Facts of the MCP endpoint.
#[derive(Debug, Clone, Copy, Default)]
pub struct EndpointFacts {
    /// Number of sessions.
    pub sessions: usize,
    /// Connected clients, with and without sessions.
    pub clients: usize,
    /// Open requests and streams of clients.
    pub open: usize,
    /// Bytes of unread events for clients.
    pub stream_bytes: usize,
    /// Connections with and without a valid token.
    pub connections: (usize, usize),
    /// Stateless calls that wait for a response of their client.
    pub parked_calls: usize,
}

/// Facts of the satellite's own process.
#[derive(Debug, Clone, Copy, Default)]
pub struct ProcessFacts {
    /// Resident memory in bytes.
    pub memory_bytes: Option<u64>,
    /// Processor time in seconds.
    pub cpu_seconds: Option<f64>,
    /// Open file descriptors.
    pub open_files: Option<usize>,
}

/// Numbers of HTTP requests and bytes of clients.
#[derive(Debug, Clone, Default)]
pub struct HttpFacts {
    /// Kind of route, class of the status and number of requests.
    pub requests: Vec<(&'static str, &'static str, u64)>,
    /// Bytes read from the connections.
    pub received: u64,
    /// Bytes written to the connections.
    pub sent: u64,
}

/// Facts of the console.
#[derive(Debug, Clone, Copy, Default)]
pub struct ConsoleFacts {
    /// Logged-in browsers.
    pub logins: usize,
    /// Open event streams of browsers and of the API.
    pub streams: usize,
}

/// Answers of the actors of one kind.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ActorFacts {
    /// Kind, such as `team`.
    pub kind: &'static str,
    /// Time of the slowest answer; `None` if none has answered.
    pub slowest: Option<Duration>,
    /// Actors that did not answer in time.
    pub unanswered: usize,
    /// Entries of their queues; `None` if this kind has none.
    pub backlog: Option<usize>,
}

/// Numbers of processes that servers have left behind and that have ended. A process can count in both.
#[derive(Debug, Clone, Copy, Default)]
pub struct OrphanFacts {
    /// Adopted processes whose end was collected.
    pub reaped: u64,
    /// Processes that had left the cgroup of their run and were killed.
    pub killed: u64,
}
