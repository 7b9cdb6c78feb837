//! Metrics and traces of a satellite: collects the facts for `/metrics`, and withholds the variables with the keys of the
//! OTLP receiver from servers.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::byte_budget::ByteBudget;
use mcp_satellite_actors::model::actor_tree::{ActorKind, ActorReport};
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::seam::RuntimeObserver;
use mcp_satellite_console::feed::StreamLimits;
use mcp_satellite_http::server::HttpServer;
use mcp_satellite_process::keeper::{DescriptorName, KeeperClient};
use mcp_satellite_process::process::OrphanCounts;
use mcp_satellite_process::usage::UsageSampler;
use mcp_satellite_telemetry::{
    ActorFacts, BackendFacts, ConsoleFacts, DeliveryFacts, HttpFacts, InstanceFacts, JournalFacts, OrphanFacts,
    OtlpError, ProcessFacts, ScrapeFacts, Telemetry, TelemetryExport, TelemetryOptions, TimedFacts, TreeFacts,
    WITHHELD_PREFIX,
};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;
use tokio_util::task::AbortOnDropHandle;

use crate::backend::link::BackendLink;
use crate::config::Plan;
use crate::console::listener::ConsoleListener;
use crate::delivery::Delivery;
use crate::endpoint::SatelliteEndpoint;
use crate::gateway;
use crate::journal::{Journal, JournalState};

/// Metrics and traces of a running satellite.
pub(crate) struct SatelliteTelemetry {
    telemetry: Telemetry,
    export: Mutex<Option<TelemetryExport>>,
    // Serves `/metrics` without a token, if the configuration says so.
    server: Mutex<Option<HttpServer>>,
    listen: Option<SocketAddr>,
    keeper: KeeperClient,
}

/// Parts of a satellite that a scrape reads.
pub(crate) struct FactsOrigin {
    pub(crate) name: String,
    pub(crate) runtime: RuntimeHandle,
    pub(crate) usage: UsageSampler,
    pub(crate) journal: Journal,
    pub(crate) delivery: Option<Arc<Delivery>>,
    pub(crate) link: Option<BackendLink>,
    pub(crate) endpoint: Arc<SatelliteEndpoint>,
    pub(crate) memory: Arc<ByteBudget>,
    pub(crate) http: Arc<ConsoleListener>,
    pub(crate) streams: StreamLimits,
    pub(crate) probes: ActorProbes,
}

/// Answers of the actors to the last probe. A scrape shows them and starts the next probe, so it waits for no actor.
#[derive(Default)]
pub(crate) struct ActorProbes {
    last: Arc<Mutex<Vec<ActorFacts>>>,
    running: Mutex<Option<AbortOnDropHandle<()>>>,
}

/// Time within which an actor must answer a probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

impl ActorProbes {
    /// Returns the last answers, and starts another probe unless one is under way. Must be called in a Tokio runtime.
    fn latest(&self, runtime: &RuntimeHandle) -> Vec<ActorFacts> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if running.as_ref().is_none_or(AbortOnDropHandle::is_finished) {
            let (runtime, last) = (runtime.clone(), self.last.clone());
            *running = Some(AbortOnDropHandle::new(tokio::spawn(async move {
                let report = runtime.describe(PROBE_TIMEOUT).await;
                *last.lock().unwrap_or_else(PoisonError::into_inner) = actor_facts(&report);
            })));
        }
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Sums up the tree of actors by kind.
fn actor_facts(report: &ActorReport) -> Vec<ActorFacts> {
    let mut facts: Vec<ActorFacts> = Vec::new();
    let mut rest = vec![report];
    while let Some(actor) = rest.pop() {
        rest.extend(&actor.children);
        let kind = match actor.kind {
            ActorKind::Root => "root",
            ActorKind::Registry => "registry",
            ActorKind::Batcher => "batcher",
            ActorKind::Team => "team",
            ActorKind::Worker => "worker",
        };
        let at = facts.iter().position(|known| known.kind == kind).unwrap_or_else(|| {
            facts.push(ActorFacts { kind, slowest: None, unanswered: 0, backlog: None });
            facts.len() - 1
        });
        let known = &mut facts[at];
        let answered = actor.answered_ms.map(|milliseconds| Duration::from_secs_f64(milliseconds.max(0.0) / 1_000.0));
        known.slowest = known.slowest.max(answered);
        known.unanswered += usize::from(answered.is_none());
        known.backlog = known.backlog.map_or(actor.backlog, |sum| Some(sum + actor.backlog.unwrap_or_default()));
    }
    facts.sort_unstable_by_key(|actor| actor.kind);
    facts
}

impl SatelliteTelemetry {
    /// Starts the exports. `/metrics` is served after [`Self::open`].
    pub(crate) fn start(plan: &Plan, data_dir: &Path, keeper: KeeperClient) -> Result<Self, OtlpError> {
        let options = TelemetryOptions {
            endpoint: plan.telemetry.endpoint.clone(),
            sample: plan.telemetry.sample,
            payloads: plan.telemetry.payloads,
            name: plan.name.clone(),
            instance: identity_of(data_dir),
        };
        let (telemetry, export) = Telemetry::start(&options, &|name| std::env::var(name).ok())?;
        let (export, server) = (Mutex::new(Some(export)), Mutex::default());
        Ok(Self { telemetry, export, server, listen: plan.telemetry.listen, keeper })
    }

    pub(crate) fn metrics(&self) -> Telemetry {
        self.telemetry.clone()
    }

    pub(crate) fn observer(&self) -> Arc<dyn RuntimeObserver> {
        Arc::new(self.telemetry.clone())
    }

    /// Shows the facts of the satellite from now on, and serves `/metrics` at the configured address.
    pub(crate) fn open(&self, origin: FactsOrigin) -> io::Result<()> {
        self.telemetry.set_facts(Box::new(move || origin.read()));
        if let Some(address) = self.listen {
            let in_use = |error: io::Error| io::Error::new(error.kind(), format!("{address}: {error}"));
            let left = self.keeper.take_listener_at(DescriptorName::Metrics, address);
            let listener = left.map_or_else(|| gateway::bind(address), Ok).map_err(in_use)?;
            self.keeper.keep(DescriptorName::Metrics, &listener);
            let server = self.telemetry.serve(listener).map_err(in_use)?;
            *self.server.lock().unwrap_or_else(PoisonError::into_inner) = Some(server);
        }
        Ok(())
    }

    /// Ends the exports after the last spans, which takes a few seconds at most.
    pub(crate) async fn close(&self) {
        self.keeper.forget(DescriptorName::Metrics);
        drop(self.server.lock().unwrap_or_else(PoisonError::into_inner).take());
        let export = self.export.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(export) = export {
            export.close().await;
        }
    }
}

/// Returns the names of the environment variables that servers must not receive: they contain keys of the receiver.
pub(crate) fn withheld_variables() -> impl Iterator<Item = String> {
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    names.filter(|name| name.starts_with(WITHHELD_PREFIX))
}

/// Returns an identity that is the same after a restart and reveals neither the path nor the machine.
fn identity_of(data_dir: &Path) -> String {
    let host = std::fs::read("/etc/machine-id").unwrap_or_default();
    let mut digest = ring::digest::Context::new(&ring::digest::SHA256);
    digest.update(&host);
    digest.update(data_dir.as_os_str().as_encoded_bytes());
    let digest = digest.finish();
    let first = digest.as_ref().first_chunk().copied().unwrap_or_default();
    format!("{:032x}", u128::from_be_bytes(first))
}

impl FactsOrigin {
    fn read(&self) -> ScrapeFacts {
        let now = Instant::now();
        let snapshot = self.runtime.snapshot();
        let usage = |id: &InstanceId| {
            let sample = self.usage.latest(id)?;
            Some(TreeFacts { memory_bytes: sample.rss_bytes, cpu_seconds: sample.cpu_seconds })
        };
        let instances = snapshot.iter().map(|view| InstanceFacts::from_view(view, now, usage));
        let (journal, delivery) = (self.journal.status(), self.delivery.as_ref().map(|delivery| delivery.status()));
        let state = if self.journal.is_hanging() { "hanging" } else { state_name(journal.state) };
        let stored =
            journal.first_seq.zip(journal.last_seq).map_or(0, |(first, last)| (last + 1).saturating_sub(first));
        let backlog = delivery.as_ref().map_or(0, |delivery| delivery.backlog);
        let (traffic, orphans) = (self.endpoint.traffic(), OrphanCounts::read());
        let (received, sent) = traffic.bytes();
        ScrapeFacts {
            name: self.name.clone(),
            instances: instances.collect(),
            events: self.runtime.event_statistics(),
            memory: self.runtime.memory(),
            journal: JournalFacts {
                events: stored,
                bytes: journal.bytes,
                state: state.to_owned(),
                writes: timed(self.journal.write_times()),
            },
            delivery: self.delivery.as_ref().zip(delivery).map(|(delivery, status)| DeliveryFacts {
                pending: status.backlog,
                failed: status.failed,
                attempts: timed(delivery.attempt_times()),
            }),
            backend: self.link.as_ref().map(|link| {
                let status = link.status(backlog);
                let last = status.last_contact.and_then(|text| text.parse::<Timestamp>().ok());
                let seconds = last.map(|last| Timestamp::now().duration_since(last).as_secs_f64().max(0.0));
                BackendFacts { connected: status.connected, last_contact_seconds: seconds }
            }),
            endpoint: self.endpoint.facts(),
            http: HttpFacts { requests: traffic.requests(), received, sent },
            console: ConsoleFacts { logins: self.http.access.login_count(), streams: self.streams.open_count() },
            actors: self.probes.latest(&self.runtime),
            orphans: OrphanFacts { reaped: orphans.reaped, killed: orphans.killed },
            message_memory: (self.memory.used() as u64, self.memory.max() as u64),
            process: process_facts(),
        }
    }
}

fn timed((count, total): (u64, Duration)) -> TimedFacts {
    TimedFacts { count, total }
}

fn state_name(state: JournalState) -> &'static str {
    match state {
        JournalState::Ok => "ok",
        JournalState::Memory => "memory",
    }
}

fn process_facts() -> ProcessFacts {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kilobytes =
        status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix("kB")?.trim().parse().ok());
    let seconds =
        |time: TimeVal| Duration::new(time.tv_sec().unsigned_abs(), 0).as_secs_f64() + time.tv_usec() as f64 / 1e6;
    let usage = getrusage(UsageWho::RUSAGE_SELF).ok();
    ProcessFacts {
        memory_bytes: kilobytes.map(|kilobytes: u64| kilobytes * 1024),
        cpu_seconds: usage.map(|usage| seconds(usage.user_time()) + seconds(usage.system_time())),
        open_files: std::fs::read_dir("/proc/self/fd").ok().map(Iterator::count),
    }
}
