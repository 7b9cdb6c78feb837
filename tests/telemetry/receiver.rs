//! A receiver of OTLP over HTTP on loopback.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::metrics::v1::Metric;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use testkit::wait::wait_for;

/// How the receiver answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answering {
    Ok,
    /// HTTP status 500.
    Failing,
    /// Reads and never answers.
    Silent,
}

/// One request.
#[derive(Debug, Clone)]
pub(crate) struct Received {
    pub(crate) path: String,
    /// Request line and headers.
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

pub(crate) struct Receiver {
    pub(crate) address: SocketAddr,
    received: Arc<Mutex<Vec<Received>>>,
}

impl Receiver {
    pub(crate) fn start(answering: Answering) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let received = Arc::<Mutex<Vec<Received>>>::default();
        let into = received.clone();
        // The threads end with the test process.
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let into = into.clone();
                std::thread::spawn(move || serve(stream, answering, &into));
            }
        });
        Self { address, received }
    }

    pub(crate) fn received(&self) -> Vec<Received> {
        self.received.lock().unwrap().clone()
    }

    /// Returns all spans received.
    pub(crate) fn spans(&self) -> Vec<Span> {
        let mut spans = Vec::new();
        for received in self.received().iter().filter(|received| received.path == "/v1/traces") {
            let request = ExportTraceServiceRequest::decode(&received.body[..]).unwrap();
            let scopes = request.resource_spans.into_iter().flat_map(|resource| resource.scope_spans);
            spans.extend(scopes.flat_map(|scope| scope.spans));
        }
        spans
    }

    /// Waits until `wanted` accepts the spans, and returns them.
    #[track_caller]
    pub(crate) fn wait_spans(&self, what: &str, wanted: impl Fn(&[Span]) -> bool) -> Vec<Span> {
        let look = || Some(self.spans()).filter(|spans| wanted(spans));
        wait_for(what, look, || format!("{:#?}", self.spans()))
    }

    /// Returns the metrics of the last export.
    pub(crate) fn metrics(&self) -> Vec<Metric> {
        let all = self.received();
        let Some(last) = all.iter().rfind(|received| received.path == "/v1/metrics") else { return Vec::new() };
        let request = ExportMetricsServiceRequest::decode(&last.body[..]).unwrap();
        let scopes = request.resource_metrics.into_iter().flat_map(|resource| resource.scope_metrics);
        scopes.flat_map(|scope| scope.metrics).collect()
    }
}

fn serve(stream: TcpStream, answering: Answering, into: &Mutex<Vec<Received>>) {
    let mut writer = stream.try_clone().unwrap();
    let mut reader = BufReader::new(stream);
    loop {
        let mut head = String::new();
        // The end of the headers is an empty line.
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head).unwrap_or_default() == 0 {
                return;
            }
        }
        let header = |name: &str| {
            let lines = head.lines().filter_map(|line| line.split_once(':'));
            lines.clone().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim().to_owned())
        };
        let length = header("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
        let mut body = vec![0; length];
        if reader.read_exact(&mut body).is_err() {
            return;
        }
        let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
        into.lock().unwrap().push(Received { path, head, body });
        let status = match answering {
            Answering::Ok => "200 OK",
            Answering::Failing => "500 Internal Server Error",
            Answering::Silent => continue,
        };
        let answer = format!("HTTP/1.1 {status}\r\nContent-Type: application/x-protobuf\r\nContent-Length: 0\r\n\r\n");
        if writer.write_all(answer.as_bytes()).is_err() {
            return;
        }
    }
}

/// Returns an attribute as text.
pub(crate) fn attribute(attributes: &[KeyValue], name: &str) -> Option<String> {
    let value = attributes.iter().find(|attribute| attribute.key == name)?.value.clone()?.value?;
    Some(match value {
        Value::StringValue(text) => text,
        Value::IntValue(number) => number.to_string(),
        other => format!("{other:?}"),
    })
}

/// Returns the attributes of all points of a histogram.
pub(crate) fn histogram_points(metrics: &[Metric], name: &str) -> Vec<Vec<KeyValue>> {
    let found = metrics.iter().filter(|metric| metric.name == name);
    let histograms = found.filter_map(|metric| match &metric.data {
        Some(Data::Histogram(histogram)) => Some(histogram.data_points.clone()),
        _ => None,
    });
    histograms.flatten().map(|point| point.attributes).collect()
}
