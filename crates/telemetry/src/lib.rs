//! Metrics and traces. [`Telemetry`] observes the runtime: it counts for Prometheus at `/metrics`, and exports
//! spans and histograms over OTLP/HTTP, in the terms of the MCP semantic conventions.
//!
//! ```text
//! runtime, gateway ──► observer ──┬──► counters, histograms ──┬──► exposition ──► /metrics
//!                                 │                           └──► OTLP, every minute
//!                                 └──► spans ──► bounded queue ──► task ──► OTLP
//! ```
//!
//! A call waits for nothing here. The crate reads no state of the satellite: the satellite passes [`ScrapeFacts`].
#![forbid(unsafe_code)]

mod environment;
mod exposition;
mod facts;
mod histogram;
mod metrics;
pub mod names;
mod open_metrics;
mod operations;
mod otlp;
mod spans;

use std::fmt;
use std::net::TcpListener;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use axum::body::Body;
use axum::http::{HeaderValue, Method, StatusCode, header, request};
use axum::response::Response;
use bytes::Bytes;
use mcp_satellite_actors::model::event::{ActionOutcome, EventSubject};
use mcp_satellite_actors::model::exit::ExitCause;
use mcp_satellite_actors::seam::{
    CallEnd, CallSpan, ObservedCall, ObservedRun, RunStart, RuntimeObserver, StartLoad, ToolCallFate, TraceParent,
};
use mcp_satellite_http::client::is_loopback;
use mcp_satellite_http::server::{AdmitAll, HttpServer};
use mcp_satellite_protocol::method;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use environment::{ConfiguredExport, ExportSettings};
use exposition::ScrapeCounters;
use metrics::{Metrics, labels_of, record_by_transport};
use operations::Operation;
use otlp::{ExportHealth, MetricsExport, OtlpConnection, export_spans, span_exporter};
use spans::{OpenSpan, OperationOutcome, SpanCounts, SpanQueue, SpanRecorder};

pub use environment::WITHHELD_PREFIX;
pub use facts::{
    ActorFacts, BackendFacts, ConsoleFacts, DeliveryFacts, EndpointFacts, HttpFacts, InstanceFacts, JournalFacts,
    OrphanFacts, ProcessFacts, ScrapeFacts, TimedFacts, TreeFacts,
};
pub use open_metrics::CONTENT_TYPE;
pub use otlp::{ExportProblem, ExportState, OtlpError};

/// Maximum time for the last spans at the end of the satellite.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for which a second scraper gets the same text.
const SCRAPE_AGE_MAX: Duration = Duration::from_secs(1);

/// Settings of the telemetry, from the configuration. The environment has precedence.
#[derive(Debug, Clone)]
pub struct TelemetryOptions {
    /// Base URL of the OTLP receiver.
    pub endpoint: Option<String>,
    /// Share of the traces that begin here and are recorded.
    pub sample: f64,
    /// True if spans contain arguments and results.
    pub payloads: bool,
    /// Name of the satellite.
    pub name: String,
    /// Identity of the satellite, the same after a restart.
    pub instance: String,
}

/// Function that returns the facts of the satellite. It may block for some milliseconds.
pub type FactsSource = Box<dyn Fn() -> ScrapeFacts + Send + Sync>;

/// Counters, histograms and spans of a satellite. Clones share them.
#[derive(Clone)]
pub struct Telemetry(Arc<TelemetryState>);

struct TelemetryState {
    metrics: Metrics,
    spans: Option<SpanRecorder>,
    span_export: Option<Arc<ExportHealth>>,
    metrics_export: Option<Arc<ExportHealth>>,
    span_counts: Arc<SpanCounts>,
    observes_calls: bool,
    starts: Mutex<StartLoad>,
    facts: OnceLock<FactsSource>,
    scraped: tokio::sync::Mutex<Option<Scrape>>,
    started_at: SystemTime,
    resource: Vec<(String, String)>,
}

/// State of the exports over OTLP at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportStates {
    /// Export of spans; `None` if none are exported.
    pub traces: Option<ExportState>,
    /// Export of histograms; `None` if none are exported.
    pub metrics: Option<ExportState>,
    /// Spans that the receiver accepted.
    pub spans_exported: u64,
    /// Spans that were dropped, for any reason.
    pub spans_dropped: u64,
}

struct Scrape {
    at: Instant,
    took: Duration,
    text: Bytes,
}

/// Tasks that export telemetry. Dropping it ends them without the last spans.
pub struct TelemetryExport {
    closing: Arc<Notify>,
    spans: Option<JoinHandle<()>>,
    metrics: Option<JoinHandle<()>>,
}

impl fmt::Debug for Telemetry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Telemetry").finish_non_exhaustive()
    }
}

impl Telemetry {
    /// Creates the telemetry and starts its exports. `variable` reads the environment. Settings that are ignored are
    /// logged as warnings.
    ///
    /// # Errors
    ///
    /// Fails if an export cannot be prepared, for example because a certificate is not valid.
    pub fn start(
        options: &TelemetryOptions,
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Result<(Self, TelemetryExport), OtlpError> {
        let configured = ConfiguredExport {
            endpoint: options.endpoint.as_deref(),
            sample: options.sample,
            service_name: &options.name,
            service_instance: &options.instance,
        };
        let settings = ExportSettings::read(&configured, variable);
        for warning in &settings.warnings {
            tracing::warn!(%warning, "a setting of the telemetry is not used");
        }
        let span_counts = Arc::<SpanCounts>::default();
        let mut export = TelemetryExport { closing: Arc::default(), spans: None, metrics: None };
        let (mut spans, mut span_export) = (None, None);
        if let Some(target) = settings.traces {
            let connection = OtlpConnection::new(target)?;
            span_export = Some(connection.health().clone());
            let exporter = span_exporter(connection, &settings.resource)?;
            let (recorder, queue) = SpanRecorder::new(settings.sampler, options.payloads, span_counts.clone());
            let queue = SpanQueue { closing: export.closing.clone(), ..queue };
            export.spans = Some(tokio::spawn(export_spans(queue, exporter)));
            spans = Some(recorder);
        }
        let metrics_connection = settings.metrics.map(OtlpConnection::new).transpose()?;
        let telemetry = Self(Arc::new(TelemetryState {
            metrics: Metrics::default(),
            spans,
            span_export,
            metrics_export: metrics_connection.as_ref().map(|connection| connection.health().clone()),
            span_counts,
            observes_calls: settings.observes_calls,
            starts: Mutex::default(),
            facts: OnceLock::new(),
            scraped: tokio::sync::Mutex::default(),
            started_at: SystemTime::now(),
            resource: settings.resource,
        }));
        if let Some(connection) = metrics_connection {
            let exported = telemetry.clone().export_metrics(connection, settings.metrics_interval);
            export.metrics = Some(tokio::spawn(exported));
        }
        Ok((telemetry, export))
    }

    /// Sets the source of the facts; only the first call has an effect. Before it a scrape shows counters only.
    pub fn set_facts(&self, source: FactsSource) {
        let _ = self.0.facts.set(source);
    }

    /// Counts a change that somebody requested.
    pub fn count_action(&self, action: &str, outcome: ActionOutcome) {
        self.0.metrics.count_action(action, outcome);
    }

    /// Returns the state of the exports.
    pub fn exports(&self) -> ExportStates {
        let state = |health: &Option<Arc<ExportHealth>>| health.as_deref().map(ExportHealth::read);
        let counts = &self.0.span_counts;
        ExportStates {
            traces: state(&self.0.span_export),
            metrics: state(&self.0.metrics_export),
            spans_exported: counts.exported.load(Ordering::Relaxed),
            spans_dropped: counts.dropped(),
        }
    }

    /// Returns the text of `/metrics`, of the type [`CONTENT_TYPE`]. One scrape runs at a time, and its text is used for
    /// one second.
    ///
    /// # Errors
    ///
    /// Fails if the source of the facts panics, or the tokio runtime ends.
    pub async fn scrape(&self) -> Result<Bytes, tokio::task::JoinError> {
        let mut last = self.0.scraped.lock().await;
        if let Some(Scrape { at, text, .. }) = &*last
            && at.elapsed() < SCRAPE_AGE_MAX
        {
            return Ok(text.clone());
        }
        let (state, last_scrape) = (self.0.clone(), last.as_ref().map(|scrape| scrape.took));
        let begun = Instant::now();
        let text = tokio::task::spawn_blocking(move || state.expose(last_scrape)).await?;
        let text = Bytes::from(text);
        *last = Some(Scrape { at: Instant::now(), took: begun.elapsed(), text: text.clone() });
        Ok(text)
    }

    /// Serves `/metrics` without a token on a nonblocking listener at a loopback address.
    ///
    /// # Errors
    ///
    /// Fails if the listener cannot be used.
    pub fn serve(&self, listener: TcpListener) -> std::io::Result<HttpServer> {
        tracing::info!(url = format!("http://{}/metrics", listener.local_addr()?), "the metrics are served");
        let telemetry = self.clone();
        HttpServer::start(listener, AdmitAll, move |_, request| {
            let telemetry = telemetry.clone();
            async move { telemetry.answer(&request.into_parts().0).await }
        })
    }

    async fn answer(&self, request: &request::Parts) -> Response {
        let plain = |status: StatusCode, text: &'static str| {
            let mut response = Response::new(Body::from(text));
            *response.status_mut() = status;
            response
        };
        // A web page that has its own host name resolve to this machine must not read the metrics.
        let host = request.headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
        if !reqwest::Url::parse(&format!("http://{host}/")).is_ok_and(|url| is_loopback(&url)) {
            return plain(StatusCode::FORBIDDEN, "the host is not this machine; use http://127.0.0.1 or localhost\n");
        }
        if request.uri.path() != "/metrics" {
            return plain(StatusCode::NOT_FOUND, "the metrics are at /metrics\n");
        }
        if request.method != Method::GET {
            return plain(StatusCode::METHOD_NOT_ALLOWED, "use GET\n");
        }
        match self.scrape().await {
            Ok(text) => {
                let mut response = Response::new(Body::from(text));
                response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(CONTENT_TYPE));
                response
            }
            Err(error) => {
                tracing::error!(%error, "a scrape failed");
                plain(StatusCode::INTERNAL_SERVER_ERROR, "the scrape failed; the log contains the reason\n")
            }
        }
    }

    async fn export_metrics(self, connection: OtlpConnection, interval: Duration) {
        loop {
            tokio::time::sleep(interval).await;
            let export = MetricsExport {
                resource: &self.0.resource,
                families: &self.0.metrics.families(),
                started_at: self.0.started_at,
                now: SystemTime::now(),
            };
            connection.export_metrics(&export).await;
        }
    }
}

impl TelemetryState {
    fn expose(&self, last_scrape: Option<Duration>) -> String {
        let facts = self.facts.get().map(|facts| facts()).unwrap_or_default();
        let starts = *self.starts.lock().unwrap_or_else(PoisonError::into_inner);
        let exports = [("traces", &self.span_export), ("metrics", &self.metrics_export)];
        let exports = exports.into_iter().filter_map(|(signal, health)| Some((signal, health.as_deref()?.read())));
        let counted = ScrapeCounters {
            metrics: &self.metrics,
            spans: &self.span_counts,
            spans_queued: self.spans.as_ref().map(SpanRecorder::queued),
            exports: exports.collect(),
            starts,
            last_scrape,
        };
        exposition::expose(&facts, &counted)
    }
}

impl TelemetryExport {
    /// Exports the last spans, for at most two seconds.
    pub async fn close(mut self) {
        self.closing.notify_one();
        if let Some(spans) = &mut self.spans {
            // After the timeout the task is aborted: the satellite does not wait longer for a slow receiver.
            let _ = tokio::time::timeout(FLUSH_TIMEOUT, spans).await;
        }
    }
}

impl Drop for TelemetryExport {
    fn drop(&mut self) {
        for task in self.spans.iter().chain(&self.metrics) {
            task.abort();
        }
    }
}

impl RuntimeObserver for Telemetry {
    fn observes_calls(&self) -> bool {
        self.0.observes_calls
    }

    fn begin_call(&self, call: &ObservedCall<'_>) -> Option<Box<dyn CallSpan>> {
        if !self.0.observes_calls {
            return None;
        }
        let labels = labels_of(call);
        let span = self.0.spans.as_ref().and_then(|spans| spans.begin(call, &labels)).map(Box::new);
        let operation = self.0.metrics.operation(call, labels);
        let is_tool_call = call.method == method::TOOLS_CALL;
        Some(Box::new(CallInProgress {
            state: self.0.clone(),
            operation,
            span,
            is_tool_call,
            begun: Instant::now(),
            is_over: false,
        }))
    }

    fn tool_called(&self, of: &EventSubject, tool: &str, fate: ToolCallFate) {
        if self.0.observes_calls {
            self.0.metrics.calls.add(of.installation_id.as_str(), tool, fate);
        }
    }

    fn run_ready(&self, run: &ObservedRun<'_>, start: RunStart) {
        let (metrics, transport) = (&self.0.metrics, run.spec.transport());
        metrics.count_start(run.spec);
        record_by_transport(&metrics.start_durations, transport, start.took);
        if let Some(took) = start.recovered_after {
            record_by_transport(&metrics.recovery_durations, transport, took);
        }
    }

    fn run_ended(&self, run: &ObservedRun<'_>, cause: &ExitCause, uptime: Option<Duration>) {
        self.0.metrics.count_exit(run.spec, cause);
        if let Some(uptime) = uptime {
            self.0.metrics.record_client_session(run, cause, uptime);
        }
    }

    fn permits_changed(&self, load: StartLoad) {
        *self.0.starts.lock().unwrap_or_else(PoisonError::into_inner) = load;
    }

    fn client_session_ended(&self, version: &str, took: Duration) {
        self.0.metrics.record_server_session(version, took);
    }

    fn bytes_received(&self, transport: &'static str, bytes: usize) {
        self.0.metrics.count_received(transport, bytes);
    }

    fn bytes_sent(&self, transport: &'static str, bytes: usize) {
        self.0.metrics.count_sent(transport, bytes);
    }
}

struct CallInProgress {
    state: Arc<TelemetryState>,
    operation: Arc<Operation>,
    // Boxed, because most calls have none.
    span: Option<Box<OpenSpan>>,
    is_tool_call: bool,
    begun: Instant,
    is_over: bool,
}

impl CallInProgress {
    fn finish(&mut self, end: &CallEnd<'_>) {
        self.is_over = true;
        let took = self.begun.elapsed();
        let outcome = OperationOutcome::of(end, self.is_tool_call);
        let exemplar = self.span.as_ref().map(|span| (span.identity, span.started_at + took));
        self.operation.record(outcome.error.as_deref(), took, exemplar);
        if let (Some(spans), Some(span)) = (&self.state.spans, self.span.take()) {
            spans.end(*span, end, &outcome, took);
        }
    }
}

impl CallSpan for CallInProgress {
    fn trace(&self) -> Option<TraceParent> {
        self.span.as_ref().map(|span| span.identity)
    }

    fn end(mut self: Box<Self>, end: CallEnd<'_>) {
        self.finish(&end);
    }
}

impl Drop for CallInProgress {
    fn drop(&mut self) {
        if !self.is_over {
            self.finish(&CallEnd::Cancelled);
        }
    }
}
