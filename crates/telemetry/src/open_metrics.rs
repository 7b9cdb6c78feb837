//! Writer of the text format of `OpenMetrics`. `prometheus-client` 0.26 encodes exemplars only of its own histograms, whose
//! counts cannot be read for OTLP, and its tables of series have no limit.

use std::fmt::{self, Write as _};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::histogram::HistogramReading;
use crate::names::DURATION_BOUNDS;

/// Value of the header `Content-Type`.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Kinds of metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MetricKind {
    Counter,
    Gauge,
    Histogram,
    Info,
    Summary,
}

/// Text under construction.
#[derive(Debug, Default)]
pub(crate) struct MetricsText {
    text: String,
}

/// Family under construction.
pub(crate) struct Family<'a> {
    text: &'a mut String,
    name: &'a str,
    kind: MetricKind,
}

type Label<'a> = (&'a str, &'a str);

impl MetricsText {
    pub(crate) fn with_capacity(bytes: usize) -> Self {
        Self { text: String::with_capacity(bytes) }
    }

    /// Returns the length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.text.len()
    }

    /// Begins a family. `name` is without the suffix of its kind, such as `_total`.
    pub(crate) fn family<'a>(&'a mut self, name: &'a str, kind: MetricKind, help: &str) -> Family<'a> {
        let word = match kind {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram => "histogram",
            MetricKind::Info => "info",
            MetricKind::Summary => "summary",
        };
        write(&mut self.text, format_args!("# HELP {name} {help}\n# TYPE {name} {word}\n"));
        Family { text: &mut self.text, name, kind }
    }

    pub(crate) fn finish(mut self) -> String {
        self.text.push_str("# EOF\n");
        self.text
    }
}

impl Family<'_> {
    /// Adds a sample of a counter or gauge. A value that is no number is left out.
    pub(crate) fn sample(&mut self, labels: &[Label<'_>], value: impl Into<MetricValue>) -> &mut Self {
        let value = value.into();
        if !value.is_finite() {
            return self;
        }
        let suffix = match self.kind {
            MetricKind::Counter => "_total",
            MetricKind::Info => "_info",
            MetricKind::Gauge | MetricKind::Histogram | MetricKind::Summary => "",
        };
        self.start(suffix, labels, None);
        write(self.text, format_args!(" {value}\n"));
        self
    }

    /// Adds the samples of a histogram.
    pub(crate) fn histogram(&mut self, labels: &[Label<'_>], reading: &HistogramReading) -> &mut Self {
        let mut sum_of_counts = 0;
        let exemplar = reading.exemplar.map(|exemplar| (crate::histogram::bucket_of(exemplar.seconds), exemplar));
        for (at, count) in reading.buckets.iter().enumerate() {
            sum_of_counts += count;
            let bound = DURATION_BOUNDS.get(at).map_or(f64::INFINITY, |bound| *bound);
            self.start("_bucket", labels, Some(bound));
            write(self.text, format_args!(" {sum_of_counts}"));
            if let Some((_, exemplar)) = exemplar.filter(|(bucket, _)| *bucket == at) {
                let trace = u128::from_be_bytes(exemplar.trace.trace_id);
                let span = u64::from_be_bytes(exemplar.trace.span_id);
                let at = seconds_since_epoch(exemplar.at);
                write(
                    self.text,
                    format_args!(
                        " # {{trace_id=\"{trace:032x}\",span_id=\"{span:016x}\"}} {} {at:.3}",
                        MetricValue::Float(exemplar.seconds)
                    ),
                );
            }
            self.text.push('\n');
        }
        self.start("_sum", labels, None);
        write(self.text, format_args!(" {}\n", MetricValue::Float(reading.sum)));
        self.start("_count", labels, None);
        write(self.text, format_args!(" {sum_of_counts}\n"));
        self
    }

    /// Adds number and sum of durations.
    pub(crate) fn summary(&mut self, count: u64, sum: Duration) -> &mut Self {
        self.start("_count", &[], None);
        write(self.text, format_args!(" {count}\n"));
        self.start("_sum", &[], None);
        write(self.text, format_args!(" {}\n", MetricValue::Float(sum.as_secs_f64())));
        self
    }

    fn start(&mut self, suffix: &str, labels: &[Label<'_>], bound: Option<f64>) {
        self.text.push_str(self.name);
        self.text.push_str(suffix);
        let mut open = '{';
        for (name, value) in labels {
            self.text.push(open);
            open = ',';
            self.text.push_str(name);
            self.text.push_str("=\"");
            escape(self.text, value);
            self.text.push('"');
        }
        if let Some(bound) = bound {
            self.text.push(open);
            open = ',';
            write(self.text, format_args!("le=\"{}\"", MetricValue::Float(bound)));
        }
        if open == ',' {
            self.text.push('}');
        }
    }
}

/// Value of a sample.
#[derive(Debug, Clone, Copy)]
pub(crate) enum MetricValue {
    Whole(u64),
    Float(f64),
}

impl MetricValue {
    fn is_finite(self) -> bool {
        match self {
            Self::Whole(_) => true,
            Self::Float(value) => value.is_finite(),
        }
    }
}

impl fmt::Display for MetricValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole(value) => write!(f, "{value}"),
            Self::Float(value) if value.is_infinite() => f.write_str(if *value > 0.0 { "+Inf" } else { "-Inf" }),
            // With a decimal point, as the format recommends for bounds.
            Self::Float(value) => write!(f, "{value:?}"),
        }
    }
}

impl From<u64> for MetricValue {
    fn from(value: u64) -> Self {
        Self::Whole(value)
    }
}

impl From<usize> for MetricValue {
    fn from(value: usize) -> Self {
        Self::Whole(value as u64)
    }
}

impl From<bool> for MetricValue {
    fn from(value: bool) -> Self {
        Self::Whole(value.into())
    }
}

impl From<f64> for MetricValue {
    fn from(value: f64) -> Self {
        Self::Float(value)
    }
}

fn escape(text: &mut String, value: &str) {
    for letter in value.chars() {
        match letter {
            '\\' => text.push_str("\\\\"),
            '"' => text.push_str("\\\""),
            '\n' => text.push_str("\\n"),
            letter => text.push(letter),
        }
    }
}

fn write(text: &mut String, arguments: fmt::Arguments<'_>) {
    // Writing into a string does not fail.
    let _ = text.write_fmt(arguments);
}

fn seconds_since_epoch(at: SystemTime) -> f64 {
    at.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use mcp_satellite_protocol::trace::TraceParent;

    use super::*;
    use crate::histogram::DurationHistogram;

    #[test]
    fn samples_are_written_with_escaped_labels() {
        let mut text = MetricsText::default();
        text.family("calls", MetricKind::Counter, "Calls.").sample(&[("tool", "a\"b\\c\nd"), ("fate", "ok")], 3_u64);
        text.family("size", MetricKind::Gauge, "Size.").sample(&[], 0.5).sample(&[("kind", "x")], f64::NAN);
        text.family("wait", MetricKind::Summary, "Wait.").summary(2, Duration::from_millis(1500));
        let wanted = "# HELP calls Calls.\n# TYPE calls counter\ncalls_total{tool=\"a\\\"b\\\\c\\nd\",fate=\"ok\"} 3\n\
                      # HELP size Size.\n# TYPE size gauge\nsize 0.5\n\
                      # HELP wait Wait.\n# TYPE wait summary\nwait_count 2\nwait_sum 1.5\n# EOF\n";
        assert_eq!(text.finish(), wanted);
    }

    #[test]
    fn a_histogram_is_cumulative_and_shows_its_exemplar() {
        let histogram = DurationHistogram::default();
        let trace = TraceParent { trace_id: [1; 16], span_id: [2; 8], flags: 1 };
        histogram.record(Duration::from_millis(15), Some((trace, UNIX_EPOCH + Duration::from_millis(1500))));
        histogram.record(Duration::from_secs(1000), None);
        let mut text = MetricsText::default();
        text.family("d", MetricKind::Histogram, "D.").histogram(&[("a", "b")], &histogram.read());
        let text = text.finish();
        let exemplar = format!("# {{trace_id=\"{}\",span_id=\"{}\"}} 0.015 1.500", "01".repeat(16), "02".repeat(8));
        for line in [
            "d_bucket{a=\"b\",le=\"0.01\"} 0",
            &format!("d_bucket{{a=\"b\",le=\"0.02\"}} 1 {exemplar}"),
            "d_bucket{a=\"b\",le=\"300.0\"} 1",
            "d_bucket{a=\"b\",le=\"+Inf\"} 2",
            "d_sum{a=\"b\"} 1000.015",
            "d_count{a=\"b\"} 2",
        ] {
            assert!(text.lines().any(|written| written == line), "{line}\n{text}");
        }
    }
}
