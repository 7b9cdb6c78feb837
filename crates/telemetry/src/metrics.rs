//! The numbers that the observer counts: calls, starts, exits, durations of requests and sessions.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::RwLock;
use std::time::Duration;

use mcp_satellite_actors::model::era::{SESSION_VERSIONS, STATELESS_VERSION};
use mcp_satellite_actors::model::exit::ExitCause;
use mcp_satellite_actors::model::spec::{InstanceSpec, ServerTarget};
use mcp_satellite_actors::seam::{ObservedCall, ObservedSide};
use mcp_satellite_protocol::method;

use crate::histogram::{DurationHistogram, HistogramReading};
use crate::names;
use crate::operations::{CallTable, CountTable, OTHER, Operation, OperationLabels, OperationTable, read, write};

/// Maximum number of pairs of a team and a cause, and of a team and a transport.
const TEAMS_MAX: usize = 2_000;

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

/// Key of a counted start or exit: team, and transport or cause.
pub(crate) type TeamKey = (Box<str>, &'static str);

/// Counters and histograms.
#[derive(Debug)]
pub(crate) struct Metrics {
    /// Requests of clients.
    pub(crate) server_operations: OperationTable,
    /// Requests to servers.
    pub(crate) client_operations: OperationTable,
    /// Sessions of clients, by version.
    server_sessions: SessionTable,
    /// Sessions with servers, by version and transport.
    client_sessions: SessionTable,
    pub(crate) calls: CallTable,
    pub(crate) starts: CountTable<TeamKey>,
    pub(crate) exits: CountTable<TeamKey>,
    /// Durations of starts and recoveries, by transport.
    pub(crate) start_durations: TransportHistograms,
    pub(crate) recovery_durations: TransportHistograms,
}

/// Histogram for each transport of servers.
pub(crate) type TransportHistograms = [(&'static str, DurationHistogram); 3];

type SessionKey = (Box<str>, &'static str);
type SessionTable = RwLock<HashMap<SessionKey, Arc<DurationHistogram>>>;

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
        let by_transport = || ["stdio", "http", "sse"].map(|transport| (transport, DurationHistogram::default()));
        Self {
            server_operations: OperationTable::default(),
            client_operations: OperationTable::default(),
            server_sessions: SessionTable::default(),
            client_sessions: SessionTable::default(),
            calls: CallTable::default(),
            starts: CountTable::new(TEAMS_MAX),
            exits: CountTable::new(TEAMS_MAX),
            start_durations: by_transport(),
            recovery_durations: by_transport(),
        }
    }
}

impl Metrics {
    /// Returns the operation of a request.
    pub(crate) fn operation(&self, call: &ObservedCall<'_>, labels: OperationLabels<'_>) -> Arc<Operation> {
        match call.side {
            ObservedSide::Server { .. } => self.server_operations.get(labels),
            ObservedSide::Client => self.client_operations.get(labels),
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

    pub(crate) fn record_client_session(&self, spec: &InstanceSpec, version: Option<&str>, took: Duration) {
        session(&self.client_sessions, version, network_transport(Some(spec))).record(took, None);
    }

    pub(crate) fn record_server_session(&self, version: &str, took: Duration) {
        session(&self.server_sessions, Some(version), "tcp").record(took, None);
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
                session_series(&self.server_sessions),
            ),
            family(
                names::CLIENT_SESSION_DURATION,
                "Duration of sessions with servers.",
                session_series(&self.client_sessions),
            ),
        ]
    }
}

/// Returns the labels of a request.
pub(crate) fn labels_of<'a>(call: &ObservedCall<'a>) -> OperationLabels<'a> {
    let spec = match call.side {
        ObservedSide::Server { .. } => None,
        ObservedSide::Client => call.spec,
    };
    let is_server = matches!(call.side, ObservedSide::Server { .. });
    let (host, port) = match spec.map(|spec| &spec.target) {
        Some(ServerTarget::Remote { url, .. }) => host_and_port(url),
        Some(ServerTarget::Stdio { .. }) | None => ("", None),
    };
    OperationLabels {
        method: METHODS.into_iter().find(|known| *known == call.method).unwrap_or(names::OTHER_ERROR),
        target: call.target.unwrap_or_default(),
        version: known_version(call.version),
        transport: if is_server { "tcp" } else { network_transport(spec) },
        host,
        port,
    }
}

fn known_version(version: Option<&str>) -> &'static str {
    let Some(version) = version else { return "" };
    SESSION_VERSIONS.into_iter().chain([STATELESS_VERSION]).find(|known| *known == version).unwrap_or(OTHER)
}

fn network_transport(spec: Option<&InstanceSpec>) -> &'static str {
    if spec.is_some_and(InstanceSpec::is_remote) { "tcp" } else { "pipe" }
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

fn session(table: &SessionTable, version: Option<&str>, transport: &'static str) -> Arc<DurationHistogram> {
    let key = (Box::from(known_version(version)), transport);
    if let Some(known) = read(table).get(&key) {
        return known.clone();
    }
    write(table).entry(key).or_default().clone()
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
    }
}

fn operation_series(table: &OperationTable) -> Vec<LabelledHistogram> {
    let mut operations = table.all();
    operations.sort_by(|one, other| {
        (&one.method, &one.target, &one.version).cmp(&(&other.method, &other.target, &other.version))
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
    let mut labels = vec![(names::METHOD_NAME, Cow::Owned(operation.method.to_string()))];
    let mut add = |name, value: &str| {
        if !value.is_empty() {
            labels.push((name, Cow::Owned(value.to_owned())));
        }
    };
    if *operation.method == *method::TOOLS_CALL {
        add(names::TOOL_NAME, &operation.target);
        add(names::OPERATION_NAME, names::EXECUTE_TOOL);
    } else {
        add(names::PROMPT_NAME, &operation.target);
    }
    add(names::PROTOCOL_VERSION, &operation.version);
    add_network(&mut add, operation.transport);
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

fn add_network(add: &mut dyn FnMut(&'static str, &str), transport: &'static str) {
    add(names::NETWORK_TRANSPORT, transport);
    if transport == "tcp" {
        add(names::NETWORK_PROTOCOL_NAME, "http");
        add(names::NETWORK_PROTOCOL_VERSION, "1.1");
    }
}

fn session_series(table: &SessionTable) -> Vec<LabelledHistogram> {
    let table = read(table);
    let series = table.iter().map(|((version, transport), histogram)| {
        let mut labels = Vec::new();
        let mut add = |name, value: &str| {
            if !value.is_empty() {
                labels.push((name, Cow::Owned(value.to_owned())));
            }
        };
        add(names::PROTOCOL_VERSION, version);
        add_network(&mut add, transport);
        LabelledHistogram { labels, reading: histogram.read() }
    });
    series.collect()
}

/// Records a duration in the histogram of a transport.
pub(crate) fn record_by_transport(histograms: &TransportHistograms, transport: &str, took: Duration) {
    if let Some((_, histogram)) = histograms.iter().find(|(known, _)| *known == transport) {
        histogram.record(took, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_and_port_are_read_from_a_url() {
        assert_eq!(host_and_port("https://a.example/mcp?x=1"), ("a.example", Some(443)));
        assert_eq!(host_and_port("http://127.0.0.1:8080"), ("127.0.0.1", Some(8080)));
        assert_eq!(host_and_port("http://[::1]/a:b"), ("::1", Some(80)));
        assert_eq!(host_and_port("http://[::1]:81/"), ("::1", Some(81)));
    }
}
