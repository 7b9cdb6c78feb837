//! Spans of recorded calls, and the queue to the task that exports them. A call never waits for the queue: a span for
//! which it has no room is dropped and counted.

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime};

use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::model::secret::SecretMask;
use mcp_satellite_actors::rules::request_log::LoggedPayload;
use mcp_satellite_actors::seam::{CallEnd, ObservedCall, ObservedSide, TraceOrigin};
use mcp_satellite_protocol::method;
use mcp_satellite_protocol::rpc::{is_tool_error, member};
use mcp_satellite_protocol::trace::{SAMPLED, TraceParent};
use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};
use tokio::sync::{Notify, mpsc};

use crate::environment::Sampler;
use crate::names::{self, own};
use crate::operations::OperationLabels;

/// Maximum number of spans that wait for their export.
const QUEUE_MAX: usize = 2048;
/// Maximum number of spans in one export.
pub(crate) const BATCH_MAX: usize = 512;
/// Maximum time that a span waits for others.
pub(crate) const BATCH_DELAY: Duration = Duration::from_secs(5);
/// Maximum length of a text of a client or server, in bytes.
const TEXT_MAX: usize = 256;
/// Maximum length of arguments and of a result, in bytes.
const PAYLOAD_MAX: usize = 4096;

static SCOPE: LazyLock<InstrumentationScope> =
    LazyLock::new(|| InstrumentationScope::builder("mcp-satellite").with_version(env!("CARGO_PKG_VERSION")).build());

/// Numbers of spans by result.
#[derive(Debug, Default)]
pub(crate) struct SpanCounts {
    pub(crate) exported: AtomicU64,
    pub(crate) queue_full: AtomicU64,
    pub(crate) export_failed: AtomicU64,
    pub(crate) shutdown: AtomicU64,
}

impl SpanCounts {
    /// Returns the number of spans that did not reach the receiver.
    pub(crate) fn dropped(&self) -> u64 {
        let all = [&self.queue_full, &self.export_failed, &self.shutdown];
        all.into_iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }
}

/// Recorder of spans.
#[derive(Debug)]
pub(crate) struct SpanRecorder {
    pub(crate) sampler: Sampler,
    /// True if spans contain arguments and results.
    pub(crate) payloads: bool,
    queue: mpsc::Sender<SpanData>,
    counts: Arc<SpanCounts>,
}

/// Receiving side of the queue.
pub(crate) struct SpanQueue {
    pub(crate) spans: mpsc::Receiver<SpanData>,
    pub(crate) counts: Arc<SpanCounts>,
    /// Notified when the satellite ends.
    pub(crate) closing: Arc<Notify>,
}

/// Span of a call in progress.
pub(crate) struct OpenSpan {
    pub(crate) identity: TraceParent,
    pub(crate) started_at: SystemTime,
    parent: Option<TraceParent>,
    kind: SpanKind,
    name: String,
    attributes: Vec<KeyValue>,
    mask: Option<SecretMask>,
    has_result: bool,
}

/// Outcome of a call in the terms of the convention.
pub(crate) struct OperationOutcome {
    /// Value of `error.type`; `None` after a success.
    pub(crate) error: Option<Cow<'static, str>>,
    /// Value of `rpc.response.status_code`, if the response has an error code.
    pub(crate) code: Option<i64>,
}

impl SpanRecorder {
    pub(crate) fn new(sampler: Sampler, payloads: bool, counts: Arc<SpanCounts>) -> (Self, SpanQueue) {
        let (queue, spans) = mpsc::channel(QUEUE_MAX);
        let recorder = Self { sampler, payloads, queue, counts: counts.clone() };
        (recorder, SpanQueue { spans, counts, closing: Arc::default() })
    }

    /// Begins the span of a call; `None` if it is not recorded.
    pub(crate) fn begin(&self, call: &ObservedCall<'_>, labels: &OperationLabels<'_>) -> Option<OpenSpan> {
        let (parent, trace_id) = match call.trace {
            TraceOrigin::Within(parent) => (Some(parent?), parent?.trace_id),
            TraceOrigin::Entry(parent) => {
                let trace_id = parent.map_or_else(random_id, |parent| parent.trace_id);
                self.sampler.is_recorded(parent.as_ref(), &trace_id).then_some((parent, trace_id))?
            }
        };
        let flags = parent.map_or(0, |parent| parent.flags) | SAMPLED;
        let identity = TraceParent { trace_id, span_id: random_id(), flags };
        let mask = call.spec.map(|spec| spec.mask.clone());
        let name = match call.target {
            Some(target) => format!("{} {}", cut(call.method), cut(target)),
            None => cut(call.method).to_owned(),
        };
        let kind = match call.side {
            ObservedSide::Server { .. } => SpanKind::Server,
            ObservedSide::Client { .. } => SpanKind::Client,
        };
        let is_tool_call = call.method == method::TOOLS_CALL;
        let mut span = OpenSpan {
            identity,
            started_at: SystemTime::now(),
            parent,
            kind,
            name,
            attributes: Vec::with_capacity(18),
            has_result: self.payloads && is_tool_call && mask.is_some(),
            mask,
        };
        span.describe(call, labels);
        if span.has_result
            && let Some(params) = call.params
        {
            // A call without a message passes its arguments alone.
            let arguments = member(params, "arguments").unwrap_or(params);
            span.add_payload(names::TOOL_ARGUMENTS, arguments);
        }
        Some(span)
    }

    /// Returns the number of spans that wait for their export.
    pub(crate) fn queued(&self) -> usize {
        self.queue.max_capacity() - self.queue.capacity()
    }

    /// Ends a span and queues it for the export.
    pub(crate) fn end(&self, mut span: OpenSpan, end: &CallEnd<'_>, outcome: &OperationOutcome, took: Duration) {
        let status = span.describe_end(end, outcome);
        let ended_at = span.started_at + took;
        let dropped = match self.queue.try_send(span.into_data(ended_at, status)) {
            Ok(()) => return,
            Err(mpsc::error::TrySendError::Full(_)) => &self.counts.queue_full,
            Err(mpsc::error::TrySendError::Closed(_)) => &self.counts.shutdown,
        };
        dropped.fetch_add(1, Ordering::Relaxed);
    }
}

impl OpenSpan {
    fn add(&mut self, name: &'static str, value: impl Into<opentelemetry::Value>) {
        self.attributes.push(KeyValue::new(name, value));
    }

    fn describe(&mut self, call: &ObservedCall<'_>, labels: &OperationLabels<'_>) {
        self.add(names::METHOD_NAME, cut(call.method).to_owned());
        if let Some(target) = call.target {
            let target = cut(target).to_owned();
            if call.method == method::TOOLS_CALL {
                self.add(names::TOOL_NAME, target);
                self.add(names::OPERATION_NAME, names::EXECUTE_TOOL);
            } else {
                self.add(names::PROMPT_NAME, target);
            }
        }
        let id = call.request_id.to_string();
        if id != "null" {
            let text = serde_json::from_str::<String>(&id).unwrap_or(id);
            self.add(names::REQUEST_ID, cut(&text).to_owned());
        }
        if let Some(version) = call.version {
            self.add(names::PROTOCOL_VERSION, cut(version).to_owned());
        }
        self.add(names::NETWORK_TRANSPORT, labels.transport);
        if labels.transport == "tcp" {
            self.add(names::NETWORK_PROTOCOL_NAME, "http");
            self.add(names::NETWORK_PROTOCOL_VERSION, "1.1");
        }
        if let Some(uri) = self.resource_uri(call) {
            self.add(names::RESOURCE_URI, uri);
        }
        match call.side {
            ObservedSide::Server { team, user, session, peer } => {
                self.add(own::TEAM, team.to_string());
                self.add(own::USER, user.to_string());
                if let Some(peer) = peer {
                    self.add(names::CLIENT_ADDRESS, peer.ip().to_canonical().to_string());
                    self.add(names::CLIENT_PORT, i64::from(peer.port()));
                }
                if let Some(session) = session {
                    self.add(names::SESSION_ID, session.to_owned());
                }
            }
            ObservedSide::Client { attempt } => {
                if attempt > 1 {
                    self.add(own::ATTEMPT, i64::from(attempt));
                }
                if let Some(spec) = call.spec {
                    self.add(own::TEAM, spec.id.team.to_string());
                    self.add(own::USER, spec.id.user.to_string());
                }
                if let Some(port) = labels.port {
                    self.add(names::SERVER_ADDRESS, labels.host.to_owned());
                    self.add(names::SERVER_PORT, i64::from(port));
                }
            }
        }
        if let Some(spec) = call.spec {
            self.add(own::INSTANCE, spec.name.to_string());
        }
    }

    // A URI may contain credentials, so it needs the mask of an instance.
    fn resource_uri(&self, call: &ObservedCall<'_>) -> Option<String> {
        let is_of_a_resource =
            matches!(call.method, method::RESOURCES_READ | method::RESOURCES_SUBSCRIBE | method::RESOURCES_UNSUBSCRIBE);
        let params = call.params.filter(|_| is_of_a_resource)?;
        let uri: String = serde_json::from_str(member(params, "uri")?).ok()?;
        Some(cut(&self.mask.as_ref()?.apply(&uri)).to_owned())
    }

    fn describe_end(&mut self, end: &CallEnd<'_>, outcome: &OperationOutcome) -> Status {
        if let CallEnd::Result(result) = end
            && self.has_result
        {
            self.add_payload(names::TOOL_RESULT, result);
        }
        if let CallEnd::Failed(error) = end
            && let Some(fate) = error.fate()
        {
            self.add(own::FATE, mcp_satellite_actors::seam::ToolCallFate::from(Some(fate)).as_str());
        }
        if let Some(code) = outcome.code {
            self.add(names::RESPONSE_STATUS_CODE, code.to_string());
        }
        let Some(error) = &outcome.error else { return Status::Unset };
        self.add(names::ERROR_TYPE, error.to_string());
        let description = match end {
            CallEnd::Result(_) => "the tool reports an error".to_owned(),
            CallEnd::Error { message, .. } => message.to_string(),
            CallEnd::Failed(error) => error.to_string(),
            CallEnd::Cancelled => "cancelled by the caller".to_owned(),
        };
        // Masked before it is cut: a secret across the cut must not leave its beginning.
        let description = self.mask.as_ref().map_or_else(|| description.clone(), |mask| mask.apply(&description));
        Status::error(cut(&description).to_owned())
    }

    fn add_payload(&mut self, name: &'static str, json: &str) {
        if let Some(mask) = &self.mask {
            let text = LoggedPayload::from_json(json, PAYLOAD_MAX, mask).into_json(mask);
            self.add(name, text.as_str().to_owned());
        }
    }

    fn into_data(self, ended_at: SystemTime, status: Status) -> SpanData {
        let TraceParent { trace_id, span_id, flags } = self.identity;
        SpanData {
            span_context: SpanContext::new(
                TraceId::from_bytes(trace_id),
                SpanId::from_bytes(span_id),
                TraceFlags::new(flags),
                false,
                TraceState::NONE,
            ),
            parent_span_id: self.parent.map_or(SpanId::INVALID, |parent| SpanId::from_bytes(parent.span_id)),
            parent_span_is_remote: self.parent.is_some() && self.kind == SpanKind::Server,
            span_kind: self.kind,
            name: self.name.into(),
            start_time: self.started_at,
            end_time: ended_at,
            attributes: self.attributes,
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status,
            instrumentation_scope: SCOPE.clone(),
        }
    }
}

impl OperationOutcome {
    /// Returns the outcome of a call.
    pub(crate) fn of(end: &CallEnd<'_>, is_tool_call: bool) -> Self {
        match end {
            CallEnd::Result(result) if is_tool_call && is_tool_error(result) => {
                Self { error: Some(names::TOOL_ERROR.into()), code: None }
            }
            CallEnd::Result(_) => Self { error: None, code: None },
            CallEnd::Error { code, .. } | CallEnd::Failed(CallError::Server { code, .. }) => {
                Self { error: Some(code.to_string().into()), code: Some(*code) }
            }
            CallEnd::Failed(error) => Self { error: Some(error.kind().into()), code: None },
            CallEnd::Cancelled => Self { error: Some("cancelled".into()), code: None },
        }
    }
}

fn random_id<const N: usize>() -> [u8; N] {
    loop {
        let id: [u8; N] = rand::random();
        if id != [0; N] {
            return id;
        }
    }
}

fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(TEXT_MAX)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(trace: TraceOrigin) -> ObservedCall<'static> {
        ObservedCall {
            side: ObservedSide::Client { attempt: 1 },
            trace,
            method: method::TOOLS_CALL,
            target: Some("echo"),
            params: None,
            request_id: &7,
            version: None,
            spec: None,
        }
    }

    fn begin(recorder: &SpanRecorder, trace: TraceOrigin) -> Option<OpenSpan> {
        let call = call(trace);
        recorder.begin(&call, &crate::metrics::labels_of(&call))
    }

    #[test]
    fn a_span_without_room_is_dropped_and_counted() {
        let counts = Arc::<SpanCounts>::default();
        let sampler = Sampler { ratio: 1.0, follows_parent: true };
        let (recorder, queue) = SpanRecorder::new(sampler, false, counts.clone());
        let record = || {
            let span = begin(&recorder, TraceOrigin::Entry(None)).unwrap();
            let end = CallEnd::Result("{}");
            recorder.end(span, &end, &OperationOutcome::of(&end, true), Duration::ZERO);
        };
        for _ in 0..QUEUE_MAX + 3 {
            record();
        }
        assert_eq!(queue.spans.len(), QUEUE_MAX);
        assert_eq!(counts.queue_full.load(Ordering::Relaxed), 3);
        drop(queue);
        record();
        assert_eq!(counts.shutdown.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_part_of_a_call_is_recorded_exactly_if_the_whole_call_is() {
        let sampler = Sampler { ratio: 1.0, follows_parent: true };
        let (recorder, _queue) = SpanRecorder::new(sampler, false, Arc::default());
        assert!(begin(&recorder, TraceOrigin::Within(None)).is_none());
        let parent = TraceParent { trace_id: [1; 16], span_id: [2; 8], flags: SAMPLED };
        let span = begin(&recorder, TraceOrigin::Within(Some(parent))).unwrap();
        assert_eq!((span.identity.trace_id, span.parent), (parent.trace_id, Some(parent)));
        assert_ne!(span.identity.span_id, parent.span_id);
        let not_recorded = TraceParent { flags: 0, ..parent };
        assert!(begin(&recorder, TraceOrigin::Entry(Some(not_recorded))).is_none());
    }

    #[test]
    fn a_span_names_its_peer_or_a_later_attempt() {
        let sampler = Sampler { ratio: 1.0, follows_parent: true };
        let (recorder, _queue) = SpanRecorder::new(sampler, false, Arc::default());
        let attributes = |side| {
            let call = ObservedCall { side, ..call(TraceOrigin::Entry(None)) };
            recorder.begin(&call, &crate::metrics::labels_of(&call)).unwrap().attributes
        };
        let (team, user) = ("acme".into(), "alice".into());
        let peer = Some("[::ffff:10.1.2.80]:4711".parse().unwrap());
        let of_client = attributes(ObservedSide::Server { team: &team, user: &user, session: None, peer });
        assert!(of_client.contains(&KeyValue::new(names::CLIENT_ADDRESS, "10.1.2.80")), "{of_client:?}");
        assert!(of_client.contains(&KeyValue::new(names::CLIENT_PORT, 4711)), "{of_client:?}");
        let attempt = |attempt| {
            let found = attributes(ObservedSide::Client { attempt });
            found.into_iter().find(|attribute| attribute.key.as_str() == own::ATTEMPT).map(|attribute| attribute.value)
        };
        assert_eq!((attempt(1), attempt(2)), (None, Some(2_i64.into())));
    }
}
