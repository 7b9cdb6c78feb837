//! The numbers that the observer counts: calls, starts, exits, durations of requests and sessions.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mcp_satellite_actors::model::era::{SESSION_VERSIONS, STATELESS_VERSION};
use mcp_satellite_actors::model::event::ActionOutcome;
use mcp_satellite_actors::model::exit::ExitCause;
use mcp_satellite_actors::model::spec::{InstanceSpec, ServerTarget};
use mcp_satellite_actors::seam::{ObservedCall, ObservedRun, ObservedSide};
use mcp_satellite_protocol::method;

use crate::histogram::{DurationHistogram, HistogramReading};
use crate::names;
use crate::operations::{CallTable, CountTable, OPERATIONS_MAX, OTHER, Operation, OperationLabels, OperationTable};

/// Maximum number of pairs of a team and a cause, and of a team and a transport.
const TEAMS_MAX: usize = 2_000;
/// Maximum number of actions and outcomes.
const ACTIONS_MAX: usize = 64;
/// Maximum number of versions and hosts of sessions of one side.
const SESSIONS_MAX: usize = 32;

/// Methods that are counted by name: clients can send any.
const METHODS: [&str; 17] = [
    method::INITIALIZE,
    method::DISCOVER,
    method::PING,
    method::LISTEN,
    method::TOOLS_LIST,
    method::TOOLS_CALL,
    method::RESOURCES_LIST,
    method::RESOURCE_TEMPLATES_LIST,
    method::RESOURCES_READ,
    method::RESOURCES_SUBSCRIBE,
    method::RESOURCES_UNSUBSCRIBE,
    method::PROMPTS_LIST,
    method::PROMPTS_GET,
    method::COMPLETE,
    method::SET_LOG_LEVEL,
    method::TASKS_GET,
    method::TASKS_CANCEL,
];

/// Transports of servers.
const TRANSPORTS: [&str; 3] = ["stdio", "http", "sse"];

/// Key of a counted start, exit or action: team or action, and transport, cause or outcome.
pub(crate) type CountKey = (Box<str>, &'static str);

/// Counters and histograms.
#[derive(Debug)]
pub(crate) struct Metrics {
    /// Requests of clients.
    pub(crate) server_operations: OperationTable,
    /// Requests to servers.
    pub(crate) client_operations: OperationTable,
    /// Sessions of clients, by version.
    server_sessions: OperationTable,
    /// Sessions with servers, by version, transport and host.
    client_sessions: OperationTable,
    pub(crate) calls: CallTable,
    pub(crate) starts: CountTable<CountKey>,
    pub(crate) exits: CountTable<CountKey>,
    /// Durations of starts and recoveries, by transport.
    pub(crate) start_durations: TransportHistograms,
    pub(crate) recovery_durations: TransportHistograms,
    /// Bytes of messages from and to servers, by transport.
    pub(crate) server_bytes: [(&'static str, TransferredBytes); 3],
    /// Changes that somebody requested, by action and outcome.
    pub(crate) actions: CountTable<CountKey>,
}

/// Numbers of bytes.
#[derive(Debug, Default)]
pub(crate) struct TransferredBytes {
    pub(crate) received: AtomicU64,
    pub(crate) sent: AtomicU64,
}

/// Histogram for each transport of servers.
pub(crate) type TransportHistograms = [(&'static str, DurationHistogram); 3];

/// One of the four histograms of the convention.
#[derive(Debug)]
pub(crate) struct HistogramFamily {
    pub(crate) name: &'static str,
    pub(crate) help: &'static str,
    pub(crate) series: Vec<LabelledHistogram>,
}

/// Histogram with its attributes.
#[derive(Debug)]
pub(crate) struct LabelledHistogram {
    pub(crate) labels: Vec<(&'static str, Cow<'static, str>)>,
    pub(crate) reading: HistogramReading,
}

impl Default for Metrics {
    fn default() -> Self {
        let by_transport = || TRANSPORTS.map(|transport| (transport, DurationHistogram::default()));
        Self {
            server_operations: OperationTable::new(OPERATIONS_MAX),
            client_operations: OperationTable::new(OPERATIONS_MAX),
            server_sessions: OperationTable::new(SESSIONS_MAX),
            client_sessions: OperationTable::new(SESSIONS_MAX),
            calls: CallTable::default(),
            starts: CountTable::new(TEAMS_MAX),
            exits: CountTable::new(TEAMS_MAX),
            start_durations: by_transport(),
            recovery_durations: by_transport(),
            server_bytes: TRANSPORTS.map(|transport| (transport, TransferredBytes::default())),
            actions: CountTable::new(ACTIONS_MAX),
        }
    }
}

impl Metrics {
    /// Returns the operation of a request.
    pub(crate) fn operation(&self, call: &ObservedCall<'_>, labels: OperationLabels<'_>) -> Arc<Operation> {
        match call.side {
            ObservedSide::Server { .. } => self.server_operations.get(labels),
            ObservedSide::Client { .. } => self.client_operations.get(labels),
        }
    }

    pub(crate) fn count_start(&self, spec: &InstanceSpec) {
        let transport = spec.transport();
        self.starts.add((spec.team_slug.as_str().into(), transport), || (OTHER.into(), transport));
    }

    pub(crate) fn count_exit(&self, spec: &InstanceSpec, cause: &ExitCause) {
        let cause = cause_name(cause);
        self.exits.add((spec.team_slug.as_str().into(), cause), || (OTHER.into(), cause));
    }

    /// Records a session with a server, which ended for this cause.
    pub(crate) fn record_client_session(&self, run: &ObservedRun<'_>, cause: &ExitCause, took: Duration) {
        let error = (*cause != ExitCause::Requested).then(|| cause_name(cause));
        let (host, port) = remote_address(run.spec);
        let transport = network_transport(Some(run.spec));
        let labels = OperationLabels { host, port, ..session_labels(run.version, transport) };
        self.client_sessions.get(labels).record(error, took, None);
    }

    pub(crate) fn record_server_session(&self, version: &str, took: Duration) {
        self.server_sessions.get(session_labels(Some(version), "tcp")).record(None, took, None);
    }

    /// Counts bytes of messages from servers of a transport.
    pub(crate) fn count_received(&self, transport: &str, bytes: usize) {
        if let Some(counts) = self.bytes_of(transport) {
            counts.received.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }

    /// Counts bytes of messages to servers of a transport.
    pub(crate) fn count_sent(&self, transport: &str, bytes: usize) {
        if let Some(counts) = self.bytes_of(transport) {
            counts.sent.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }

    fn bytes_of(&self, transport: &str) -> Option<&TransferredBytes> {
        self.server_bytes.iter().find(|(known, _)| *known == transport).map(|(_, counts)| counts)
    }

    /// Counts a change that somebody requested.
    pub(crate) fn count_action(&self, action: &str, outcome: ActionOutcome) {
        let outcome = match outcome {
            ActionOutcome::Succeeded => "succeeded",
            ActionOutcome::Refused => "refused",
            ActionOutcome::Failed => "failed",
        };
        self.actions.add((action.into(), outcome), || (OTHER.into(), outcome));
    }

    /// Returns the histograms of the convention.
    pub(crate) fn families(&self) -> [HistogramFamily; 4] {
        let family = |name, help, series| HistogramFamily { name, help, series };
        [
            family(
                names::SERVER_OPERATION_DURATION,
                "Duration of requests of clients.",
                operation_series(&self.server_operations),
            ),
            family(
                names::CLIENT_OPERATION_DURATION,
                "Duration of requests to servers.",
                operation_series(&self.client_operations),
            ),
            family(
                names::SERVER_SESSION_DURATION,
                "Duration of sessions of clients.",
                operation_series(&self.server_sessions),
            ),
            family(
                names::CLIENT_SESSION_DURATION,
                "Duration of sessions with servers.",
                operation_series(&self.client_sessions),
            ),
        ]
    }
}

/// Returns the labels of a request.
pub(crate) fn labels_of<'a>(call: &ObservedCall<'a>) -> OperationLabels<'a> {
    let spec = match call.side {
        ObservedSide::Server { .. } => None,
        ObservedSide::Client { .. } => call.spec,
    };
    let is_server = matches!(call.side, ObservedSide::Server { .. });
    let (host, port) = spec.map_or(("", None), remote_address);
    OperationLabels {
        method: METHODS.into_iter().find(|known| *known == call.method).unwrap_or(names::OTHER_ERROR),
        target: call.target.unwrap_or_default(),
        version: known_version(call.version),
        transport: if is_server { "tcp" } else { network_transport(spec) },
        host,
        port,
    }
}

fn session_labels(version: Option<&str>, transport: &'static str) -> OperationLabels<'static> {
    OperationLabels { method: "", target: "", version: known_version(version), transport, host: "", port: None }
}

fn known_version(version: Option<&str>) -> &'static str {
    let Some(version) = version else { return "" };
    SESSION_VERSIONS.into_iter().chain([STATELESS_VERSION]).find(|known| *known == version).unwrap_or(OTHER)
}

fn network_transport(spec: Option<&InstanceSpec>) -> &'static str {
    if spec.is_some_and(InstanceSpec::is_remote) { "tcp" } else { "pipe" }
}

/// Returns host and port of a remote server.
fn remote_address(spec: &InstanceSpec) -> (&str, Option<u16>) {
    match &spec.target {
        ServerTarget::Remote { url, .. } => host_and_port(url),
        ServerTarget::Stdio { .. } => ("", None),
    }
}

/// Returns host and port of a URL that was checked with the configuration.
fn host_and_port(url: &str) -> (&str, Option<u16>) {
    let Some((scheme, rest)) = url.split_once("://") else { return ("", None) };
    let default = if scheme == "https" { 443 } else { 80 };
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    // The colons of an IPv6 address are in brackets.
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, port.parse().unwrap_or(default)),
        _ => (authority, default),
    };
    (host.trim_start_matches('[').trim_end_matches(']'), Some(port))
}

/// Returns the name of a cause, without its text.
pub(crate) fn cause_name(cause: &ExitCause) -> &'static str {
    match cause {
        ExitCause::Requested => "requested",
        ExitCause::Exited => "exited",
        ExitCause::Spawn(_) => "spawn",
        ExitCause::Machine(_) => "machine",
        ExitCause::Handshake(_) => "handshake",
        ExitCause::Wire(_) => "wire",
        ExitCause::Unresponsive => "unresponsive",
        ExitCause::Lost(_) => "lost",
        ExitCause::Panicked(_) => "panicked",
        ExitCause::NotAdopted(_) => "not_adopted",
    }
}

fn operation_series(table: &OperationTable) -> Vec<LabelledHistogram> {
    let mut operations = table.all();
    operations.sort_by(|one, other| {
        let key = |of: &Operation| (of.method.clone(), of.target.clone(), of.version.clone(), of.host.clone(), of.port);
        key(one).cmp(&key(other))
    });
    let mut all = Vec::with_capacity(operations.len());
    for operation in operations {
        for (error, reading) in operation.series() {
            all.push(LabelledHistogram { labels: operation_labels(&operation, error), reading });
        }
    }
    all
}

fn operation_labels(operation: &Operation, error: Option<Box<str>>) -> Vec<(&'static str, Cow<'static, str>)> {
    let mut labels = Vec::new();
    let mut add = |name, value: &str| {
        if !value.is_empty() {
            labels.push((name, Cow::Owned(value.to_owned())));
        }
    };
    // A session has no method.
    add(names::METHOD_NAME, &operation.method);
    if *operation.method == *method::TOOLS_CALL {
        add(names::TOOL_NAME, &operation.target);
        add(names::OPERATION_NAME, names::EXECUTE_TOOL);
    } else {
        add(names::PROMPT_NAME, &operation.target);
    }
    add(names::PROTOCOL_VERSION, &operation.version);
    add(names::NETWORK_TRANSPORT, operation.transport);
    if operation.transport == "tcp" {
        add(names::NETWORK_PROTOCOL_NAME, "http");
        add(names::NETWORK_PROTOCOL_VERSION, "1.1");
    }
    if let Some(port) = operation.port {
        add(names::SERVER_ADDRESS, &operation.host);
        add(names::SERVER_PORT, &port.to_string());
    }
    if let Some(error) = error {
        if error.parse::<i64>().is_ok() {
            add(names::RESPONSE_STATUS_CODE, &error);
        }
        add(names::ERROR_TYPE, &error);
    }
    labels
}

/// Records a duration in the histogram of a transport.
pub(crate) fn record_by_transport(histograms: &TransportHistograms, transport: &str, took: Duration) {
    if let Some((_, histogram)) = histograms.iter().find(|(known, _)| *known == transport) {
        histogram.record(took, None);
    }
}

#[cfg(test)]
mod tests {
    use mcp_satellite_actors::model::ids::InstanceId;
    use mcp_satellite_actors::model::policy::Policy;
    use mcp_satellite_actors::model::secret::SecretMask;
    use mcp_satellite_actors::model::spec::{ProcessLifetime, RemoteTransport, UpdateMethod};
    use mcp_satellite_actors::seam::TraceOrigin;

    use super::*;

    fn remote(url: &str) -> InstanceSpec {
        InstanceSpec {
            id: InstanceId::new("acme".into(), "alice".into(), "far".into()),
            name: "far-acme-alice".into(),
            server: "far".into(),
            team_slug: "acme".into(),
            user_slug: "alice".into(),
            target: ServerTarget::Remote { transport: RemoteTransport::Http, url: url.to_owned(), health_url: None },
            args: Vec::new(),
            env: [].into(),
            headers: [].into(),
            query: [].into(),
            missing: Vec::new(),
            problems: Vec::new(),
            lifetime: ProcessLifetime::Listed,
            update_method: UpdateMethod::default(),
            request_logging: false,
            mask: SecretMask::default(),
            policy: Arc::new(Policy::default()),
        }
    }

    #[test]
    fn a_session_is_recorded_with_the_host_of_its_server_and_the_cause_of_its_end() {
        let (metrics, spec) = (Metrics::default(), remote("https://mcp.example/v1"));
        let run = ObservedRun { spec: &spec, version: Some("2025-11-25") };
        for cause in [ExitCause::Requested, ExitCause::Exited] {
            metrics.record_client_session(&run, &cause, Duration::from_secs(1));
        }
        let [_, _, _, sessions] = metrics.families();
        assert_eq!(sessions.name, names::CLIENT_SESSION_DURATION);
        let known = [
            (names::PROTOCOL_VERSION, "2025-11-25"),
            (names::NETWORK_TRANSPORT, "tcp"),
            (names::NETWORK_PROTOCOL_NAME, "http"),
            (names::NETWORK_PROTOCOL_VERSION, "1.1"),
            (names::SERVER_ADDRESS, "mcp.example"),
            (names::SERVER_PORT, "443"),
        ];
        let of = |labels: &LabelledHistogram| -> Vec<(&str, String)> {
            labels.labels.iter().map(|(name, value)| (*name, value.to_string())).collect()
        };
        let mut wanted: Vec<_> = known.map(|(name, value)| (name, value.to_owned())).into();
        let all: Vec<_> = sessions.series.iter().map(of).collect();
        assert!(all.contains(&wanted), "{all:?}");
        wanted.push((names::ERROR_TYPE, "exited".to_owned()));
        assert!(all.contains(&wanted) && all.len() == 2, "{all:?}");
    }

    #[test]
    fn hosts_of_sessions_are_bounded() {
        let metrics = Metrics::default();
        for nth in 0..1_000 {
            let spec = remote(&format!("https://host-{nth}.example/"));
            let run = ObservedRun { spec: &spec, version: None };
            metrics.record_client_session(&run, &ExitCause::Requested, Duration::ZERO);
        }
        let [_, _, _, sessions] = metrics.families();
        assert_eq!(sessions.series.len(), SESSIONS_MAX + 1);
        assert_eq!(sessions.series.iter().map(|series| series.reading.count()).sum::<u64>(), 1_000);
    }

    #[test]
    fn methods_and_versions_that_clients_make_up_are_counted_together() {
        let call = ObservedCall {
            side: ObservedSide::Client { attempt: 1 },
            trace: TraceOrigin::Within(None),
            method: "made/up",
            target: None,
            params: None,
            request_id: &1,
            version: Some("made-up"),
            spec: None,
        };
        let labels = labels_of(&call);
        assert_eq!((labels.method, labels.version), (names::OTHER_ERROR, OTHER));
    }

    #[test]
    fn actions_and_bytes_are_counted() {
        let metrics = Metrics::default();
        for nth in 0..200 {
            metrics.count_action(&format!("action-{nth}"), ActionOutcome::Refused);
        }
        let actions = metrics.actions.all();
        assert_eq!(actions.len(), ACTIONS_MAX + 1);
        assert!(actions.contains(&((OTHER.into(), "refused"), 200 - ACTIONS_MAX as u64)), "{actions:?}");
        metrics.count_received("sse", 7);
        metrics.count_sent("sse", 5);
        let bytes = metrics.server_bytes.each_ref().map(|(transport, bytes)| {
            (*transport, bytes.received.load(Ordering::Relaxed), bytes.sent.load(Ordering::Relaxed))
        });
        assert_eq!(bytes, [("stdio", 0, 0), ("http", 0, 0), ("sse", 7, 5)]);
    }

    #[test]
    fn host_and_port_are_read_from_a_url() {
        assert_eq!(host_and_port("https://a.example/mcp?x=1"), ("a.example", Some(443)));
        assert_eq!(host_and_port("http://127.0.0.1:8080"), ("127.0.0.1", Some(8080)));
        assert_eq!(host_and_port("http://[::1]/a:b"), ("::1", Some(80)));
        assert_eq!(host_and_port("http://[::1]:81/"), ("::1", Some(81)));
    }
}
