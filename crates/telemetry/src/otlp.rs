//! Export over OTLP/HTTP with protobuf: spans by `opentelemetry-otlp`, histograms by messages of our own, because the
//! SDK's data of metrics cannot be created outside it.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::{Bytes, BytesMut};
use http::{HeaderName, HeaderValue, Request, Response};
use mcp_satellite_http::client;
use opentelemetry::KeyValue;
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{ExporterBuildError, SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue as ProtoKeyValue};
use opentelemetry_proto::tonic::metrics::v1::exemplar::Value as ExemplarValue;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Exemplar, Histogram, HistogramDataPoint, Metric, ResourceMetrics, ScopeMetrics,
};
use opentelemetry_proto::tonic::resource::v1::Resource as ProtoResource;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SpanData, SpanExporter as _};
use prost::Message as _;
use tokio::time::timeout;

use crate::environment::OtlpTarget;
use crate::histogram::HistogramReading;
use crate::metrics::{HistogramFamily, LabelledHistogram};
use crate::names::DURATION_BOUNDS;
use crate::spans::{BATCH_DELAY, BATCH_MAX, SpanQueue};

/// Maximum length of a receiver's response.
const RESPONSE_MAX: usize = 64 * 1024;

/// Reasons why data cannot be exported.
#[derive(Debug, thiserror::Error)]
pub enum OtlpError {
    /// The HTTP client cannot be created, for example because a certificate is not valid.
    #[error("cannot create the HTTP client for {url}: {why}; check OTEL_EXPORTER_OTLP_CERTIFICATE")]
    Client {
        /// URL of the receiver.
        url: String,
        /// Reason of the failure.
        why: String,
    },
    /// The exporter rejects its settings.
    #[error("cannot prepare the export to {url}: {source}")]
    Exporter {
        /// URL of the receiver.
        url: String,
        /// Reason of the failure.
        source: ExporterBuildError,
    },
}

/// Connection to a receiver. Clones share the state.
#[derive(Clone)]
pub(crate) struct OtlpConnection {
    client: reqwest::Client,
    target: OtlpTarget,
    health: Arc<ExportHealth>,
}

/// State of the export of one kind of data.
#[derive(Debug)]
pub(crate) struct ExportHealth {
    /// URL of the receiver without its query.
    url: String,
    succeeded: AtomicU64,
    failed: AtomicU64,
    /// `None` after a success.
    problem: Mutex<Option<ExportProblem>>,
}

/// Failure of the last export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportProblem {
    /// Time of the first of the failed exports in a row.
    pub since: SystemTime,
    /// Reason of the last failure, without credentials.
    pub reason: String,
}

/// State of the export of one kind of data at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportState {
    /// URL of the receiver, without credentials.
    pub endpoint: String,
    /// Exports that the receiver accepted.
    pub succeeded: u64,
    /// Exports that failed.
    pub failed: u64,
    /// The failure, if the last export failed.
    pub problem: Option<ExportProblem>,
}

impl ExportHealth {
    fn new(url: String) -> Self {
        Self { url, succeeded: AtomicU64::new(0), failed: AtomicU64::new(0), problem: Mutex::default() }
    }

    pub(crate) fn read(&self) -> ExportState {
        ExportState {
            endpoint: self.url.clone(),
            succeeded: self.succeeded.load(Ordering::Relaxed),
            failed: self.failed.load(Ordering::Relaxed),
            problem: self.problem.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }

    /// Records the end of an export. Logs a problem when it occurs first and when it changes, and its end.
    fn record(&self, problem: Option<String>) {
        let counter = if problem.is_none() { &self.succeeded } else { &self.failed };
        counter.fetch_add(1, Ordering::Relaxed);
        let mut known = self.problem.lock().unwrap_or_else(PoisonError::into_inner);
        if known.as_ref().map(|known| &known.reason) == problem.as_ref() {
            return;
        }
        let url = &*self.url;
        let Some(reason) = problem else {
            tracing::info!(url, "telemetry is exported again");
            *known = None;
            return;
        };
        let hint = "check the receiver and `endpoint` of [telemetry] or OTEL_EXPORTER_OTLP_ENDPOINT";
        tracing::warn!(url, reason, hint, "cannot export telemetry");
        let since = known.as_ref().map_or_else(SystemTime::now, |known| known.since);
        *known = Some(ExportProblem { since, reason });
    }
}

impl fmt::Debug for OtlpConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OtlpConnection").field("target", &self.target).finish_non_exhaustive()
    }
}

impl OtlpConnection {
    pub(crate) fn new(target: OtlpTarget) -> Result<Self, OtlpError> {
        let client = client::client_with_certificates(&target.url, target.certificates.as_deref());
        let client = client.map_err(|error| OtlpError::Client {
            url: target.shown_url(),
            why: client::root_cause(&error).unwrap_or_else(|| error.to_string()),
        })?;
        let health = Arc::new(ExportHealth::new(target.shown_url()));
        Ok(Self { client, target, health })
    }

    pub(crate) fn health(&self) -> &Arc<ExportHealth> {
        &self.health
    }

    async fn post(&self, body: Vec<u8>) -> Result<(), ()> {
        let mut request = Request::post(self.target.url.as_str()).body(Bytes::from(body)).map_err(|_| ())?;
        let headers = request.headers_mut();
        headers.insert(http::header::CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
        headers.extend(self.target.headers.iter().cloned());
        let response = self.send_bytes(request).await.map_err(drop)?;
        if response.status().is_success() { Ok(()) } else { Err(()) }
    }

    async fn exchange(&self, request: Request<Bytes>) -> reqwest::Result<Response<Bytes>> {
        let mut request = reqwest::Request::try_from(request)?;
        *request.timeout_mut() = Some(self.target.timeout);
        let mut response = self.client.execute(request).await?;
        let (status, headers) = (response.status(), std::mem::take(response.headers_mut()));
        let mut body = BytesMut::new();
        while let Some(chunk) = response.chunk().await? {
            if body.len() + chunk.len() > RESPONSE_MAX {
                break;
            }
            body.extend_from_slice(&chunk);
        }
        let mut response = Response::new(body.freeze());
        (*response.status_mut(), *response.headers_mut()) = (status, headers);
        Ok(response)
    }
}

#[async_trait::async_trait]
impl HttpClient for OtlpConnection {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        match self.exchange(request).await {
            Ok(response) => {
                let problem = (!response.status().is_success()).then(|| format!("HTTP status {}", response.status()));
                self.health.record(problem);
                Ok(response)
            }
            Err(error) => {
                // The error's own text contains the URL with its query.
                let reason = if error.is_timeout() {
                    "the receiver did not answer in time".to_owned()
                } else {
                    client::root_cause(&error).unwrap_or_else(|| "the exchange failed".to_owned())
                };
                self.health.record(Some(reason.clone()));
                Err(reason.into())
            }
        }
    }
}

/// Creates the exporter of spans.
pub(crate) fn span_exporter(
    connection: OtlpConnection,
    resource: &[(String, String)],
) -> Result<SpanExporter, OtlpError> {
    let target = connection.target.clone();
    let text = |(name, value): &(HeaderName, HeaderValue)| {
        Some((name.to_string(), std::str::from_utf8(value.as_bytes()).ok()?.to_owned()))
    };
    let exporter = SpanExporter::builder()
        .with_http()
        .with_http_client(connection)
        .with_endpoint(target.url.as_str())
        .with_timeout(target.timeout)
        .with_headers(target.headers.iter().filter_map(text).collect())
        .build();
    let mut exporter = exporter.map_err(|source| OtlpError::Exporter { url: target.shown_url(), source })?;
    let attributes = resource.iter().map(|(name, value)| KeyValue::new(name.clone(), value.clone()));
    exporter.set_resource(&Resource::builder_empty().with_attributes(attributes).build());
    Ok(exporter)
}

/// Exports the spans of a queue until it is closed and empty.
pub(crate) async fn export_spans(mut queue: SpanQueue, exporter: SpanExporter) {
    let closing = queue.closing.clone();
    loop {
        let (mut batch, mut is_open) = (Vec::with_capacity(BATCH_MAX), false);
        tokio::select! {
            // A span that arrives after this is dropped and counted.
            () = closing.notified() => queue.spans.close(),
            more = collect(&mut queue, &mut batch) => is_open = more,
        }
        if is_open {
            export_batch(&queue, &exporter, batch).await;
            continue;
        }
        while let Ok(span) = queue.spans.try_recv() {
            batch.push(span);
            if batch.len() == BATCH_MAX {
                export_batch(&queue, &exporter, std::mem::take(&mut batch)).await;
            }
        }
        export_batch(&queue, &exporter, batch).await;
        return;
    }
}

/// Receives a batch. Returns false if no span will follow.
async fn collect(queue: &mut SpanQueue, batch: &mut Vec<SpanData>) -> bool {
    let Some(first) = queue.spans.recv().await else { return false };
    batch.push(first);
    let more = async {
        while batch.len() < BATCH_MAX
            && let Some(span) = queue.spans.recv().await
        {
            batch.push(span);
        }
    };
    // The timeout is the normal end of an incomplete batch.
    let _ = timeout(BATCH_DELAY, more).await;
    true
}

async fn export_batch(queue: &SpanQueue, exporter: &SpanExporter, batch: Vec<SpanData>) {
    let count = batch.len() as u64;
    if count == 0 {
        return;
    }
    // The connection logs the reason of a failure.
    let counter =
        if exporter.export(batch).await.is_ok() { &queue.counts.exported } else { &queue.counts.export_failed };
    counter.fetch_add(count, Ordering::Relaxed);
}

/// Histograms of one export.
pub(crate) struct MetricsExport<'a> {
    pub(crate) resource: &'a [(String, String)],
    pub(crate) families: &'a [HistogramFamily],
    pub(crate) started_at: SystemTime,
    pub(crate) now: SystemTime,
}

impl OtlpConnection {
    /// Exports histograms. The connection logs the reason of a failure.
    pub(crate) async fn export_metrics(&self, export: &MetricsExport<'_>) {
        if export.families.iter().any(|family| !family.series.is_empty()) {
            let _ = self.post(export.to_message().encode_to_vec()).await;
        }
    }
}

impl MetricsExport<'_> {
    pub(crate) fn to_message(&self) -> ExportMetricsServiceRequest {
        let metrics = self.families.iter().filter(|family| !family.series.is_empty()).map(|family| Metric {
            name: family.name.to_owned(),
            description: family.help.to_owned(),
            unit: "s".to_owned(),
            data: Some(Data::Histogram(Histogram {
                data_points: family.series.iter().map(|series| self.data_point(series)).collect(),
                aggregation_temporality: AggregationTemporality::Cumulative.into(),
            })),
            ..Metric::default()
        });
        let scope = InstrumentationScope {
            name: "mcp-satellite".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..InstrumentationScope::default()
        };
        let scope_metrics = ScopeMetrics { scope: Some(scope), metrics: metrics.collect(), ..ScopeMetrics::default() };
        let attributes = self.resource.iter().map(|(name, value)| attribute(name, value)).collect();
        let resource = ProtoResource { attributes, ..ProtoResource::default() };
        let resource_metrics = ResourceMetrics {
            resource: Some(resource),
            scope_metrics: vec![scope_metrics],
            ..ResourceMetrics::default()
        };
        ExportMetricsServiceRequest { resource_metrics: vec![resource_metrics] }
    }

    fn data_point(&self, series: &LabelledHistogram) -> HistogramDataPoint {
        let HistogramReading { buckets, sum, exemplar } = &series.reading;
        let exemplar = exemplar.iter().map(|exemplar| Exemplar {
            filtered_attributes: Vec::new(),
            time_unix_nano: nanoseconds(exemplar.at),
            span_id: exemplar.trace.span_id.to_vec(),
            trace_id: exemplar.trace.trace_id.to_vec(),
            value: Some(ExemplarValue::AsDouble(exemplar.seconds)),
        });
        HistogramDataPoint {
            attributes: series.labels.iter().map(|(name, value)| attribute(name, value)).collect(),
            start_time_unix_nano: nanoseconds(self.started_at),
            time_unix_nano: nanoseconds(self.now),
            count: series.reading.count(),
            sum: Some(*sum),
            bucket_counts: buckets.to_vec(),
            explicit_bounds: DURATION_BOUNDS.to_vec(),
            exemplars: exemplar.collect(),
            ..HistogramDataPoint::default()
        }
    }
}

fn attribute(name: &str, value: &str) -> ProtoKeyValue {
    // The convention defines the port as a number.
    let value = match value.parse() {
        Ok(port) if name == crate::names::SERVER_PORT => Value::IntValue(port),
        _ => Value::StringValue(value.to_owned()),
    };
    ProtoKeyValue { key: name.to_owned(), value: Some(AnyValue { value: Some(value) }), ..ProtoKeyValue::default() }
}

fn nanoseconds(at: SystemTime) -> u64 {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_keeps_the_time_of_its_begin_until_a_success() {
        let health = ExportHealth::new("http://127.0.0.1/v1/traces".to_owned());
        health.record(Some("refused".to_owned()));
        let first = health.read().problem.map(|problem| problem.since);
        health.record(Some("HTTP status 500".to_owned()));
        let state = health.read();
        let reason = "HTTP status 500".to_owned();
        assert_eq!(state.problem, first.map(|since| ExportProblem { since, reason }));
        assert_eq!((state.succeeded, state.failed), (0, 2));
        health.record(None);
        let state = health.read();
        assert_eq!((state.problem, state.succeeded, state.failed), (None, 1, 2));
    }

    #[test]
    fn the_port_is_exported_as_a_number() {
        let value = |name| attribute(name, "443").value.and_then(|value| value.value);
        assert_eq!(value(crate::names::SERVER_PORT), Some(Value::IntValue(443)));
        assert_eq!(value(crate::names::ERROR_TYPE), Some(Value::StringValue("443".to_owned())));
    }
}
