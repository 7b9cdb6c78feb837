//! The text of `/metrics`: what the observer has counted, and the facts that the satellite reads for each scrape.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::Ordering;
use std::time::Duration;

use mcp_satellite_actors::seam::StartLoad;

use crate::facts::{ActorFacts, HttpFacts, InstanceFacts, ProcessFacts, ScrapeFacts};
use crate::metrics::{HistogramFamily, Metrics, TransportHistograms};
use crate::open_metrics::{MetricKind, MetricsText};
use crate::otlp::ExportState;
use crate::spans::SpanCounts;

/// Length beyond which process trees are left out, in bytes. The rest stays below 300 KB, so the text below 5 MB.
const TREES_UNTIL: usize = 4_700_000;
/// Maximum number of instances whose restart budget is shown.
const BUDGETS_MAX: usize = 1_000;

/// Inputs of a scrape besides the facts.
pub(crate) struct ScrapeCounters<'a> {
    pub(crate) metrics: &'a Metrics,
    pub(crate) spans: &'a SpanCounts,
    /// Spans that wait for their export; `None` if none are exported.
    pub(crate) spans_queued: Option<usize>,
    /// Exports by the kind of data.
    pub(crate) exports: Vec<(&'static str, ExportState)>,
    pub(crate) starts: StartLoad,
    /// Duration of the last scrape.
    pub(crate) last_scrape: Option<Duration>,
}

/// Returns the text of a scrape.
pub(crate) fn expose(facts: &ScrapeFacts, counted: &ScrapeCounters<'_>) -> String {
    forget_removed(facts, counted.metrics);
    let mut text = MetricsText::with_capacity(64 * 1024 + 300 * facts.instances.len());
    let info = [("name", &*facts.name), ("version", env!("CARGO_PKG_VERSION"))];
    text.family("satellite", MetricKind::Info, "Name and version.").sample(&info, 1_u64);
    instances(&mut text, &facts.instances);
    runs(&mut text, facts, counted);
    events(&mut text, facts);
    for (name, help, value) in machine(facts) {
        if let Some(value) = value {
            text.family(name, MetricKind::Gauge, help).sample(&[], value);
        }
    }
    calls(&mut text, counted);
    for family in counted.metrics.families() {
        histograms(&mut text, &family);
    }
    endpoint(&mut text, facts);
    traffic(&mut text, facts, counted.metrics);
    control(&mut text, facts, counted.metrics);
    actors(&mut text, &facts.actors);
    spans(&mut text, counted);
    process(&mut text, facts);
    // Last, because they fill the rest of the permitted length.
    process_trees(&mut text, &facts.instances);
    text.finish()
}

/// Removes the counters of servers and teams that no longer exist.
fn forget_removed(facts: &ScrapeFacts, metrics: &Metrics) {
    let servers: HashSet<&str> = facts.instances.iter().map(|instance| &*instance.installation).collect();
    metrics.calls.retain(|server| servers.contains(server));
}

fn instances(text: &mut MetricsText, instances: &[InstanceFacts]) {
    let mut by_status: BTreeMap<(&str, &str, &str), u64> = BTreeMap::new();
    let mut in_flight: BTreeMap<&str, u64> = BTreeMap::new();
    for InstanceFacts { team, transport, status, calls_in_flight, .. } in instances {
        *by_status.entry((team, status.as_str(), transport)).or_default() += 1;
        *in_flight.entry(team).or_default() += *calls_in_flight as u64;
    }
    let mut family = text.family("satellite_instances", MetricKind::Gauge, "Instances by status.");
    for ((team, status, transport), count) in &by_status {
        family.sample(&[("team", team), ("status", status), ("transport", transport)], *count);
    }
    let mut family = text.family("satellite_calls_in_flight", MetricKind::Gauge, "Unanswered calls.");
    for (team, count) in &in_flight {
        family.sample(&[("team", team)], *count);
    }
    let help = "Unwanted exits left before the instance fails permanently, for instances with at least one.";
    let mut family = text.family("satellite_restart_budget_remaining", MetricKind::Gauge, help);
    let charged = instances.iter().filter_map(|instance| Some((instance.restart_budget?, instance)));
    let mut charged: Vec<_> = charged.collect();
    charged.sort_by_key(|(left, _)| *left);
    for (left, instance) in charged.into_iter().take(BUDGETS_MAX) {
        family.sample(&[("team", &instance.team), ("instance", &instance.name)], left);
    }
}

fn runs(text: &mut MetricsText, facts: &ScrapeFacts, counted: &ScrapeCounters<'_>) {
    let ScrapeCounters { metrics, starts, .. } = counted;
    let mut family = text.family("satellite_starts", MetricKind::Counter, "Starts that succeeded.");
    for ((team, transport), count) in metrics.starts.all() {
        family.sample(&[("team", &team), ("transport", transport)], count);
    }
    let mut family = text.family("satellite_exits", MetricKind::Counter, "Ends of runs by cause.");
    for ((team, cause), count) in metrics.exits.all() {
        family.sample(&[("team", &team), ("cause", cause)], count);
    }
    let mut by_transport = |name, help, histograms: &TransportHistograms| {
        let mut family = text.family(name, MetricKind::Histogram, help);
        for (transport, histogram) in histograms {
            let reading = histogram.read();
            if reading.count() > 0 {
                family.histogram(&[("transport", transport)], &reading);
            }
        }
    };
    by_transport("satellite_start_seconds", "Time from a start until calls are taken.", &metrics.start_durations);
    let help = "Time from an unwanted exit until calls are taken again.";
    by_transport("satellite_recovery_seconds", help, &metrics.recovery_durations);
    let help = "Start permits in use, and instances that wait for one.";
    let mut family = text.family("satellite_start_permits", MetricKind::Gauge, help);
    for (pool, load) in [("process", starts.processes), ("connection", starts.connections)] {
        family.sample(&[("pool", pool), ("state", "held")], load.held);
        family.sample(&[("pool", pool), ("state", "waiting")], load.waiting);
    }
    let help = "Processes that servers left behind and that have ended.";
    let mut family = text.family("satellite_orphans_ended", MetricKind::Counter, help);
    family.sample(&[("how", "reaped")], facts.orphans.reaped).sample(&[("how", "killed")], facts.orphans.killed);
    let help = "Teams whose servers start one at a time.";
    text.family("satellite_teams_throttled", MetricKind::Gauge, help).sample(&[], starts.throttled_teams);
}

fn events(text: &mut MetricsText, facts: &ScrapeFacts) {
    let statistics = &facts.events;
    let mut family = text.family("satellite_events", MetricKind::Counter, "Events by result.");
    let results = [
        ("emitted", statistics.emitted),
        ("sent", statistics.sent),
        ("failed", statistics.failed),
        ("dropped", statistics.dropped),
    ];
    for (result, count) in results {
        family.sample(&[("result", result)], count);
    }
    let mut gauge = |name, help, value: u64| {
        text.family(name, MetricKind::Gauge, help).sample(&[], value);
    };
    gauge("satellite_event_queue", "Events that wait for the journal.", statistics.queue_size as u64);
    gauge("satellite_journal_events", "Stored events.", facts.journal.events);
    gauge("satellite_journal_bytes", "Size of the journal in bytes.", facts.journal.bytes);
    let writes = facts.journal.writes;
    text.family("satellite_journal_write_seconds", MetricKind::Summary, "Duration of writes of events to the journal.")
        .summary(writes.count, writes.total);
    if let Some(delivery) = facts.delivery {
        let help = "Stored events that are to be delivered.";
        text.family("satellite_delivery_pending", MetricKind::Gauge, help).sample(&[], delivery.pending);
        text.family("satellite_delivery_failures", MetricKind::Counter, "Events that the receiver rejected.")
            .sample(&[], delivery.failed);
        let help = "Duration of attempts to deliver events, until the receiver answers.";
        text.family("satellite_delivery_seconds", MetricKind::Summary, help)
            .summary(delivery.attempts.count, delivery.attempts.total);
    }
    text.family("satellite_journal_state", MetricKind::Gauge, "State of the journal.")
        .sample(&[("state", &facts.journal.state)], 1_u64);
    if let Some(backend) = facts.backend {
        text.family("satellite_backend_connected", MetricKind::Gauge, "1 if the last request succeeded.")
            .sample(&[], backend.connected);
        if let Some(seconds) = backend.last_contact_seconds {
            let help = "Seconds since the last response of the backend.";
            text.family("satellite_backend_last_contact_seconds", MetricKind::Gauge, help).sample(&[], seconds);
        }
    }
}

fn machine(facts: &ScrapeFacts) -> [(&'static str, &'static str, Option<f64>); 3] {
    let reading = facts.memory.reading;
    [
        (
            "satellite_machine_memory_available_bytes",
            "Memory that is available without swapping.",
            reading.map(|reading| reading.available_bytes as f64),
        ),
        (
            "satellite_machine_memory_short",
            "1 while memory is short and starts are delayed.",
            Some(f64::from(u8::from(facts.memory.is_short))),
        ),
        (
            "satellite_machine_pressure_ratio",
            "Share of the last ten seconds in which tasks waited for memory.",
            reading.and_then(|reading| reading.pressure_percent).map(|percent| percent / 100.0),
        ),
    ]
}

fn calls(text: &mut MetricsText, counted: &ScrapeCounters<'_>) {
    let mut family = text.family("satellite_calls", MetricKind::Counter, "Tool calls by fate.");
    for call in counted.metrics.calls.all() {
        family.sample(&[("server", &call.server), ("tool", &call.tool), ("fate", call.fate)], call.count);
    }
}

fn histograms(text: &mut MetricsText, family: &HistogramFamily) {
    let name = format!("{}_seconds", family.name.replace('.', "_"));
    let mut written = text.family(&name, MetricKind::Histogram, family.help);
    for series in &family.series {
        let names: Vec<Cow<'_, str>> = series.labels.iter().map(|(name, _)| name.replace('.', "_").into()).collect();
        let labels: Vec<(&str, &str)> =
            names.iter().zip(&series.labels).map(|(name, (_, value))| (&**name, &**value)).collect();
        written.histogram(&labels, &series.reading);
    }
}

fn endpoint(text: &mut MetricsText, facts: &ScrapeFacts) {
    let mut gauge = |name, help, value: u64| {
        text.family(name, MetricKind::Gauge, help).sample(&[], value);
    };
    if let Some(endpoint) = facts.endpoint {
        gauge("satellite_sessions", "Sessions of clients.", endpoint.sessions as u64);
        gauge("satellite_clients", "Connected clients, with and without sessions.", endpoint.clients as u64);
        gauge("satellite_streams", "Open requests and streams of clients.", endpoint.open as u64);
        gauge(
            "satellite_parked_calls",
            "Calls that wait for a response of their client.",
            endpoint.parked_calls as u64,
        );
        gauge("satellite_stream_bytes", "Bytes that clients have not read.", endpoint.stream_bytes as u64);
    }
    if let Some((authenticated, others)) = facts.endpoint.map(|endpoint| endpoint.connections) {
        let mut family = text.family("satellite_connections", MetricKind::Gauge, "Connections of clients.");
        family.sample(&[("state", "authenticated")], authenticated).sample(&[("state", "unauthenticated")], others);
    }
    let (used, max) = facts.message_memory;
    let mut family = text.family("satellite_message_memory_bytes", MetricKind::Gauge, "Memory for messages.");
    family.sample(&[("kind", "used")], used).sample(&[("kind", "max")], max);
}

fn traffic(text: &mut MetricsText, facts: &ScrapeFacts, metrics: &Metrics) {
    let HttpFacts { requests, received, sent } = &facts.http;
    let help = "HTTP requests by kind of path and class of status.";
    let mut family = text.family("satellite_http_requests", MetricKind::Counter, help);
    for (route, code, count) in requests {
        family.sample(&[("route", route), ("code", code)], *count);
    }
    let mut family = text.family("satellite_http_bytes", MetricKind::Counter, "Bytes of the connections of clients.");
    family.sample(&[("direction", "received")], *received).sample(&[("direction", "sent")], *sent);
    let help = "Bytes of messages from and to servers.";
    let mut family = text.family("satellite_server_bytes", MetricKind::Counter, help);
    for (transport, bytes) in &metrics.server_bytes {
        for (direction, count) in [("received", &bytes.received), ("sent", &bytes.sent)] {
            family.sample(&[("transport", transport), ("direction", direction)], count.load(Ordering::Relaxed));
        }
    }
}

fn control(text: &mut MetricsText, facts: &ScrapeFacts, metrics: &Metrics) {
    let mut gauge = |name, help, value: usize| {
        text.family(name, MetricKind::Gauge, help).sample(&[], value);
    };
    gauge("satellite_console_logins", "Logged-in browsers.", facts.console.logins);
    gauge("satellite_console_streams", "Open event streams of the console and the API.", facts.console.streams);
    let help = "Changes that somebody requested, by outcome.";
    let mut family = text.family("satellite_control_actions", MetricKind::Counter, help);
    let mut actions = metrics.actions.all();
    actions.sort_unstable();
    for ((action, outcome), count) in actions {
        family.sample(&[("action", &action), ("outcome", outcome)], count);
    }
}

fn actors(text: &mut MetricsText, actors: &[ActorFacts]) {
    let help = "Time of the slowest answer of an actor to the last probe.";
    let mut family = text.family("satellite_actor_response_seconds", MetricKind::Gauge, help);
    for actor in actors {
        if let Some(slowest) = actor.slowest {
            family.sample(&[("kind", actor.kind)], slowest.as_secs_f64());
        }
    }
    let help = "Actors that did not answer the last probe.";
    let mut family = text.family("satellite_actors_unanswered", MetricKind::Gauge, help);
    for actor in actors {
        family.sample(&[("kind", actor.kind)], actor.unanswered);
    }
    // The batcher's queue is that of the events.
    if let Some(waiting) = actors.iter().find(|actor| actor.kind == "team").and_then(|teams| teams.backlog) {
        let help = "Calls that wait until their server takes calls, at the last probe.";
        text.family("satellite_calls_waiting", MetricKind::Gauge, help).sample(&[], waiting);
    }
}

fn spans(text: &mut MetricsText, counted: &ScrapeCounters<'_>) {
    let ScrapeCounters { spans, spans_queued, exports, last_scrape, .. } = counted;
    let mut family = text.family("satellite_spans", MetricKind::Counter, "Spans by result.");
    let results = [
        ("exported", &spans.exported),
        ("queue_full", &spans.queue_full),
        ("export_failed", &spans.export_failed),
        ("shutdown", &spans.shutdown),
    ];
    for (result, count) in results {
        family.sample(&[("result", result)], count.load(Ordering::Relaxed));
    }
    if let Some(queued) = spans_queued {
        let help = "Spans that wait for their export.";
        text.family("satellite_span_queue", MetricKind::Gauge, help).sample(&[], *queued);
    }
    let mut family = text.family("satellite_telemetry_exports", MetricKind::Counter, "Exports over OTLP by result.");
    for (signal, state) in exports {
        family.sample(&[("signal", signal), ("result", "succeeded")], state.succeeded);
        family.sample(&[("signal", signal), ("result", "failed")], state.failed);
    }
    if let Some(took) = last_scrape {
        let help = "Duration of the last scrape.";
        text.family("satellite_scrape_seconds", MetricKind::Gauge, help).sample(&[], took.as_secs_f64());
    }
}

fn process(text: &mut MetricsText, facts: &ScrapeFacts) {
    let ProcessFacts { memory_bytes, cpu_seconds, open_files } = facts.process;
    if let Some(bytes) = memory_bytes {
        let help = "Resident memory of the satellite.";
        text.family("satellite_process_memory_bytes", MetricKind::Gauge, help).sample(&[], bytes);
    }
    if let Some(seconds) = cpu_seconds {
        let help = "Processor time of the satellite.";
        text.family("satellite_process_cpu_seconds", MetricKind::Counter, help).sample(&[], seconds);
    }
    if let Some(files) = open_files {
        let help = "Open file descriptors of the satellite.";
        text.family("satellite_process_open_files", MetricKind::Gauge, help).sample(&[], files);
    }
}

fn process_trees(text: &mut MetricsText, instances: &[InstanceFacts]) {
    let mut trees: Vec<_> = instances.iter().filter_map(|instance| Some((instance, instance.usage?))).collect();
    trees.sort_by_key(|(_, usage)| std::cmp::Reverse(usage.memory_bytes));
    let room = TREES_UNTIL.saturating_sub(text.len());
    // Both families show the same instances. The names of metrics and labels and the values take at most 170 bytes.
    let escaped = |text: &str| text.len() + text.bytes().filter(|byte| matches!(byte, b'\\' | b'"' | b'\n')).count();
    let line = |instance: &InstanceFacts| 170 + 2 * (escaped(&instance.name) + escaped(&instance.team));
    let mut bytes = 0;
    let shown = trees.iter().take_while(|(instance, _)| {
        bytes += line(instance);
        bytes <= room
    });
    let shown = shown.count();
    let omitted = trees.len() - shown;
    trees.truncate(shown);
    let labels = |instance: &InstanceFacts| [("team", instance.team.clone()), ("instance", instance.name.to_string())];
    let help = "Resident memory of the process tree of a server.";
    let mut family = text.family("satellite_process_tree_memory_bytes", MetricKind::Gauge, help);
    for (instance, usage) in &trees {
        let labels = labels(instance);
        family.sample(&labels.each_ref().map(|(name, value)| (*name, &**value)), usage.memory_bytes);
    }
    let help = "Processor time of the process tree of a server.";
    let mut family = text.family("satellite_process_tree_cpu_seconds", MetricKind::Counter, help);
    for (instance, usage) in &trees {
        let labels = labels(instance);
        family.sample(&labels.each_ref().map(|(name, value)| (*name, &**value)), usage.cpu_seconds);
    }
    let help = "Process trees that are left out because the text would be too long.";
    text.family("satellite_process_trees_omitted", MetricKind::Gauge, help).sample(&[], omitted);
}

#[cfg(test)]
mod tests {
    use mcp_satellite_actors::model::status::Status;

    use super::*;
    use crate::facts::TreeFacts;

    fn instance(nth: usize, name: &str) -> InstanceFacts {
        InstanceFacts {
            name: format!("{name}-{nth}").into(),
            installation: format!("installation-{}", nth % 500),
            team: format!("team-{}", nth % 100),
            transport: ["stdio", "http", "sse"][nth % 3],
            status: Status::ALL[nth % Status::ALL.len()],
            calls_in_flight: nth % 4,
            restart_budget: nth.is_multiple_of(7).then_some(nth % 5),
            usage: Some(TreeFacts { memory_bytes: 100_000_000 + nth as u64 * 4096, cpu_seconds: nth as f64 * 1.37 }),
        }
    }

    fn fill(metrics: &Metrics) {
        use crate::operations::OperationLabels;
        use mcp_satellite_actors::seam::ToolCallFate;
        for nth in 0..100_000_usize {
            let tool = format!("a-tool-with-a-long-name-{nth}");
            for table in [&metrics.server_operations, &metrics.client_operations] {
                let labels = OperationLabels {
                    method: "tools/call",
                    target: &tool,
                    version: "2025-11-25",
                    transport: "tcp",
                    host: "mcp.a-long-host-name.example",
                    port: Some(443),
                };
                let trace = mcp_satellite_protocol::trace::TraceParent { trace_id: [1; 16], span_id: [1; 8], flags: 1 };
                let span = Some((trace, std::time::SystemTime::now()));
                table.get(labels).record(None, Duration::from_millis(nth as u64), span);
                table.get(labels).record(Some(&nth.to_string()), Duration::from_millis(1), span);
            }
            metrics.calls.add(&format!("installation-{}", nth % 500), &tool, ToolCallFate::Ok);
        }
    }

    fn counted<'a>(metrics: &'a Metrics, spans: &'a SpanCounts) -> ScrapeCounters<'a> {
        ScrapeCounters {
            metrics,
            spans,
            spans_queued: None,
            exports: Vec::new(),
            starts: StartLoad::default(),
            last_scrape: Some(Duration::from_millis(20)),
        }
    }

    #[test]
    fn ten_thousand_instances_and_any_number_of_tools_stay_below_5_mb() {
        let metrics = Metrics::default();
        fill(&metrics);
        let counts = SpanCounts::default();
        let counted = counted(&metrics, &counts);
        // The tables of calls and errors are full, which costs some process trees.
        for (name, omitted_max) in [("acme-alice-files", 1_500), (&*"a-very-long-name".repeat(20), 9_000)] {
            let facts = ScrapeFacts {
                instances: (0..10_000).map(|nth| instance(nth, name)).collect(),
                ..ScrapeFacts::default()
            };
            let text = expose(&facts, &counted);
            assert!(text.len() < 5_000_000, "{} bytes", text.len());
            let omitted = text.lines().find_map(|line| line.strip_prefix("satellite_process_trees_omitted ")).unwrap();
            let trees = text.lines().filter(|line| line.starts_with("satellite_process_tree_memory_bytes{")).count();
            let omitted = omitted.parse::<usize>().unwrap();
            assert!(omitted <= omitted_max, "{omitted}");
            assert_eq!(trees + omitted, 10_000);
            assert!(text.ends_with("# EOF\n"));
        }
    }

    #[test]
    fn the_calls_of_a_removed_server_are_forgotten() {
        let metrics = Metrics::default();
        fill(&metrics);
        let counts = SpanCounts::default();
        let counted = counted(&metrics, &counts);
        let facts = ScrapeFacts { instances: vec![instance(3, "a")], ..ScrapeFacts::default() };
        let text = expose(&facts, &counted);
        let calls: Vec<_> = text.lines().filter(|line| line.starts_with("satellite_calls_total")).collect();
        assert!(!calls.is_empty());
        assert!(calls.iter().all(|line| line.contains("server=\"installation-3\"")), "{calls:?}");
    }
}
