//! Checks of `[telemetry]`.

use std::net::SocketAddr;

use mcp_satellite_clients::may_be_secret;

use super::check::ConfigCheck;
use super::reader::{ParsedValue, TableReader};

/// Share of the traces that is recorded by default.
pub const SAMPLE: f64 = 0.1;

#[derive(Default)]
pub(crate) struct TelemetryTable {
    listen: ParsedValue<String>,
    endpoint: ParsedValue<String>,
    sample: ParsedValue<f64>,
    payloads: ParsedValue<bool>,
}

/// Metrics and traces.
#[derive(Debug, Clone, PartialEq)]
pub struct TelemetryPlan {
    /// Loopback address of `/metrics`, which needs no token there.
    pub listen: Option<SocketAddr>,
    /// Base URL of the OTLP receiver, without credentials. The environment can name another one.
    pub endpoint: Option<String>,
    /// Share of the traces that begin here and are recorded, from 0 to 1.
    pub sample: f64,
    /// True if spans contain arguments and results.
    pub payloads: bool,
}

impl Default for TelemetryPlan {
    fn default() -> Self {
        Self { listen: None, endpoint: None, sample: SAMPLE, payloads: false }
    }
}

impl TelemetryTable {
    pub(crate) fn read(fields: &mut TableReader<'_, '_>) -> Self {
        Self {
            listen: fields.text("listen"),
            endpoint: fields.text("endpoint"),
            sample: fields.number("sample"),
            payloads: fields.flag("payloads"),
        }
    }

    pub(crate) fn into_plan(self, check: &mut ConfigCheck<'_, '_>) -> TelemetryPlan {
        let listen = self.listen.get().and_then(|text| {
            let address = check.address(text)?;
            if !address.ip().is_loopback() {
                let hint = "use 127.0.0.1 or [::1]; other machines read the metrics through the console, with a token";
                check.findings.error(text.span, format!("`listen` of [telemetry] is {address}, not loopback"), hint);
            }
            Some(address)
        });
        let endpoint = self.endpoint.get().and_then(|text| {
            let url = check.url("endpoint", text)?;
            if url.query_pairs().any(|(name, value)| may_be_secret(&name, &value)) {
                let hint = "remove it from the URL and set OTEL_EXPORTER_OTLP_HEADERS in the environment";
                check.findings.error(text.span, "the URL of the OTLP receiver seems to contain a secret", hint);
            }
            Some(String::from(url))
        });
        let sample = self.sample.get().map_or(SAMPLE, |sample| {
            if !(0.0..=1.0).contains(&sample.value) {
                let message = format!("`sample` is {}, not a share of the traces", sample.value);
                check.findings.error(sample.span, message, "give a number from 0 to 1");
            }
            sample.value
        });
        let payloads = self.payloads.get().is_some_and(|payloads| payloads.value);
        TelemetryPlan { listen, endpoint, sample, payloads }
    }
}
