//! Environment variables of OpenTelemetry, which have precedence over the configuration.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use mcp_satellite_protocol::trace::TraceParent;
use reqwest::Url;

/// Start of the names of variables that servers must not receive: the headers contain keys.
pub const WITHHELD_PREFIX: &str = "OTEL_EXPORTER_OTLP";

const TIMEOUT: Duration = Duration::from_secs(10);
const METRICS_INTERVAL: Duration = Duration::from_secs(60);
/// Shortest interval between two exports of metrics, so that a mistake does not cost a core.
const METRICS_INTERVAL_MIN: Duration = Duration::from_millis(100);

/// Settings of the exports, from the configuration and the environment.
#[derive(Debug, Clone)]
pub(crate) struct ExportSettings {
    /// Receiver of spans; `None` if none are recorded.
    pub(crate) traces: Option<OtlpTarget>,
    /// Receiver of metrics.
    pub(crate) metrics: Option<OtlpTarget>,
    pub(crate) metrics_interval: Duration,
    pub(crate) sampler: Sampler,
    /// False if `OTEL_SDK_DISABLED` is set: calls are neither counted nor recorded.
    pub(crate) observes_calls: bool,
    /// Attributes of the satellite.
    pub(crate) resource: Vec<(String, String)>,
    /// Settings that were ignored, with the reason.
    pub(crate) warnings: Vec<String>,
}

/// Receiver of one kind of data.
#[derive(Clone)]
pub(crate) struct OtlpTarget {
    pub(crate) url: Url,
    /// Headers, which may contain keys.
    pub(crate) headers: Vec<(HeaderName, HeaderValue)>,
    pub(crate) timeout: Duration,
    /// Further accepted certificate authorities, as PEM.
    pub(crate) certificates: Option<Bytes>,
}

impl fmt::Debug for OtlpTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OtlpTarget").field("url", &self.shown_url()).finish_non_exhaustive()
    }
}

impl OtlpTarget {
    /// Returns the URL without its query, which may contain a key.
    pub(crate) fn shown_url(&self) -> String {
        let mut url = self.url.clone();
        url.set_query(None);
        url.set_fragment(None);
        url.into()
    }
}

/// Decision whether a trace is recorded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sampler {
    /// Share of the traces, from 0 to 1.
    pub(crate) ratio: f64,
    /// True if the decision of the sender has precedence.
    pub(crate) follows_parent: bool,
}

impl Sampler {
    pub(crate) fn is_recorded(self, parent: Option<&TraceParent>, trace_id: &[u8; 16]) -> bool {
        match parent.filter(|_| self.follows_parent) {
            Some(parent) => parent.is_sampled(),
            None => self.is_chosen(trace_id),
        }
    }

    // As the SDKs do it: the lower half of the id decides, so that all of them choose the same traces.
    #[expect(clippy::cast_sign_loss, clippy::cast_possible_truncation, reason = "the ratio is from 0 to 1")]
    fn is_chosen(self, trace_id: &[u8; 16]) -> bool {
        if self.ratio >= 1.0 {
            return true;
        }
        let [_, _, _, _, _, _, _, _, low @ ..] = trace_id;
        u64::from_be_bytes(*low) >> 1 < (self.ratio * (1_u64 << 63) as f64) as u64
    }
}

/// Settings of the configuration.
pub(crate) struct ConfiguredExport<'a> {
    pub(crate) endpoint: Option<&'a str>,
    pub(crate) sample: f64,
    pub(crate) service_name: &'a str,
    pub(crate) service_instance: &'a str,
}

struct Environment<'a> {
    variable: &'a dyn Fn(&str) -> Option<String>,
    warnings: Vec<String>,
}

impl ExportSettings {
    /// Reads the variables by `variable`.
    pub(crate) fn read(configured: &ConfiguredExport<'_>, variable: &dyn Fn(&str) -> Option<String>) -> Self {
        // An empty variable counts as one that is not set.
        let variable =
            |name: &str| variable(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
        let mut environment = Environment { variable: &variable, warnings: Vec::new() };
        let is_disabled = variable("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"));
        let mut target = |signal| if is_disabled { None } else { environment.target(signal, configured.endpoint) };
        let (traces, metrics) = (target("TRACES"), target("METRICS"));
        let interval = environment.milliseconds("OTEL_METRIC_EXPORT_INTERVAL").unwrap_or(METRICS_INTERVAL);
        let sampler = environment.sampler(configured.sample);
        let resource = environment.resource(configured);
        Self {
            traces,
            metrics,
            metrics_interval: interval.max(METRICS_INTERVAL_MIN),
            sampler,
            observes_calls: !is_disabled,
            resource,
            warnings: environment.warnings,
        }
    }
}

impl Environment<'_> {
    fn of_signal(&self, signal: &str, name: &str) -> Option<(String, String)> {
        let names = [format!("OTEL_EXPORTER_OTLP_{signal}_{name}"), format!("OTEL_EXPORTER_OTLP_{name}")];
        names.into_iter().find_map(|name| Some((name.clone(), (self.variable)(&name)?)))
    }

    fn ignore(&mut self, name: &str, why: impl fmt::Display) {
        self.warnings.push(format!("{name} is ignored: {why}"));
    }

    fn target(&mut self, signal: &str, configured: Option<&str>) -> Option<OtlpTarget> {
        let exporter = format!("OTEL_{signal}_EXPORTER");
        match (self.variable)(&exporter).as_deref() {
            Some("none") => return None,
            None | Some("otlp") => {}
            Some(_) => self.ignore(&exporter, "only `otlp` and `none` are supported"),
        }
        let whole = format!("OTEL_EXPORTER_OTLP_{signal}_ENDPOINT");
        let path = format!("v1/{}", signal.to_ascii_lowercase());
        let (name, text, is_base) = if let Some(url) = (self.variable)(&whole) {
            (whole, url, false)
        } else if let Some(url) = (self.variable)("OTEL_EXPORTER_OTLP_ENDPOINT") {
            ("OTEL_EXPORTER_OTLP_ENDPOINT".to_owned(), url, true)
        } else {
            ("`endpoint` of [telemetry]".to_owned(), configured?.to_owned(), true)
        };
        let url = match parse_url(&text) {
            Ok(url) if is_base => {
                let mut url = url;
                let base = url.path().trim_end_matches('/').to_owned();
                url.set_path(&format!("{base}/{path}"));
                url
            }
            Ok(url) => url,
            Err(why) => {
                // The text may contain a password.
                self.ignore(&name, why);
                return None;
            }
        };
        if let Some((name, protocol)) = self.of_signal(signal, "PROTOCOL")
            && protocol != "http/protobuf"
        {
            self.ignore(&name, "only `http/protobuf` is supported");
        }
        if let Some((name, compression)) = self.of_signal(signal, "COMPRESSION")
            && compression != "none"
        {
            self.ignore(&name, "only `none` is supported");
        }
        let headers = match self.of_signal(signal, "HEADERS") {
            Some((name, text)) => self.headers(&name, &text),
            None => Vec::new(),
        };
        let timeout = self.of_signal(signal, "TIMEOUT").and_then(|(name, _)| self.milliseconds(&name));
        let certificates = self.of_signal(signal, "CERTIFICATE").and_then(|(name, path)| match std::fs::read(&path) {
            Ok(pem) => Some(Bytes::from(pem)),
            Err(error) => {
                self.ignore(&name, format_args!("cannot read {path}: {error}"));
                None
            }
        });
        Some(OtlpTarget { url, headers, timeout: timeout.unwrap_or(TIMEOUT), certificates })
    }

    // `name=value` pairs, separated by commas; values are percent-encoded.
    fn headers(&mut self, variable: &str, text: &str) -> Vec<(HeaderName, HeaderValue)> {
        let mut headers = Vec::new();
        for pair in text.split(',').filter(|pair| !pair.trim().is_empty()) {
            let parsed = pair.split_once('=').and_then(|(name, value)| {
                let mut value = HeaderValue::from_str(&decode_percent(value.trim())?).ok()?;
                value.set_sensitive(true);
                Some((HeaderName::try_from(name.trim()).ok()?, value))
            });
            match parsed {
                Some(header) => headers.push(header),
                // The text may contain a key.
                None => self.ignore(variable, "an entry is not a header of the form `name=value`"),
            }
        }
        headers
    }

    fn milliseconds(&mut self, name: &str) -> Option<Duration> {
        let text = (self.variable)(name)?;
        let parsed = text.parse().ok().filter(|milliseconds| *milliseconds > 0).map(Duration::from_millis);
        if parsed.is_none() {
            self.ignore(name, "it is not a number of milliseconds");
        }
        parsed
    }

    fn sampler(&mut self, configured: f64) -> Sampler {
        let name = "OTEL_TRACES_SAMPLER";
        let default = Sampler { ratio: configured, follows_parent: true };
        let Some(kind) = (self.variable)(name) else { return default };
        let (kind, follows_parent) = match kind.strip_prefix("parentbased_") {
            Some(kind) => (kind.to_owned(), true),
            None => (kind, false),
        };
        let ratio = match &*kind {
            "always_on" => 1.0,
            "always_off" => 0.0,
            "traceidratio" => {
                let argument = "OTEL_TRACES_SAMPLER_ARG";
                match (self.variable)(argument).map(|text| text.parse::<f64>()) {
                    None => 1.0,
                    Some(Ok(ratio)) if (0.0..=1.0).contains(&ratio) => ratio,
                    Some(_) => {
                        self.ignore(argument, "it is not a number from 0 to 1");
                        configured
                    }
                }
            }
            _ => {
                let known = "use always_on, always_off, traceidratio or one of these with parentbased_ in front";
                self.ignore(name, known);
                return default;
            }
        };
        Sampler { ratio, follows_parent }
    }

    fn resource(&mut self, configured: &ConfiguredExport<'_>) -> Vec<(String, String)> {
        let mut resource = vec![
            ("service.name".to_owned(), configured.service_name.to_owned()),
            ("service.instance.id".to_owned(), configured.service_instance.to_owned()),
            ("service.version".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        ];
        let mut set = |name: String, value: String| match resource.iter_mut().find(|(known, _)| *known == name) {
            Some(known) => known.1 = value,
            None => resource.push((name, value)),
        };
        let name = "OTEL_RESOURCE_ATTRIBUTES";
        for pair in (self.variable)(name).unwrap_or_default().split(',').filter(|pair| !pair.trim().is_empty()) {
            match pair.split_once('=').and_then(|(name, value)| Some((name.trim(), decode_percent(value.trim())?))) {
                Some((name, value)) => set(name.to_owned(), value),
                None => self.ignore(name, "an entry is not an attribute of the form `name=value`"),
            }
        }
        if let Some(service) = (self.variable)("OTEL_SERVICE_NAME") {
            set("service.name".to_owned(), service);
        }
        resource
    }
}

fn parse_url(text: &str) -> Result<Url, &'static str> {
    let url = Url::parse(text).map_err(|_| "it is not a URL")?;
    if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
        return Err("it is neither http nor https");
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("it contains a user name or a password; set OTEL_EXPORTER_OTLP_HEADERS instead");
    }
    Ok(url)
}

fn decode_percent(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        if *first == b'%' {
            let digits = std::str::from_utf8(after.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            rest = &after[2..];
        } else {
            bytes.push(*first);
            rest = after;
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(endpoint: Option<&str>, variables: &[(&str, &str)]) -> ExportSettings {
        let configured =
            ConfiguredExport { endpoint, sample: 0.25, service_name: "mcp-satellite", service_instance: "one" };
        let variable =
            |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        ExportSettings::read(&configured, &variable)
    }

    fn urls(settings: &ExportSettings) -> [Option<&str>; 2] {
        [&settings.traces, &settings.metrics].map(|target| target.as_ref().map(|target| target.url.as_str()))
    }

    #[test]
    fn the_environment_has_precedence_over_the_configuration() {
        assert_eq!(urls(&read(None, &[])), [None, None]);
        let configured = Some("http://127.0.0.1:4318");
        let (traces, metrics) = ("http://127.0.0.1:4318/v1/traces", "http://127.0.0.1:4318/v1/metrics");
        assert_eq!(urls(&read(configured, &[])), [Some(traces), Some(metrics)]);
        let variables = [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://otel.example/base/"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://traces.example/"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Bearer%20key, x-tenant=1"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "250"),
        ];
        let settings = read(configured, &variables);
        assert_eq!(urls(&settings), [Some("https://traces.example/"), Some("https://otel.example/base/v1/metrics")]);
        let traces = settings.traces.as_ref().unwrap();
        assert_eq!(traces.headers[0].0, "authorization");
        assert_eq!(traces.headers[0].1, "Bearer key");
        assert_eq!((traces.headers.len(), traces.timeout), (2, Duration::from_millis(250)));
        assert!(!format!("{settings:?}").contains("key"), "{settings:?}");
        assert_eq!(urls(&read(configured, &[("OTEL_SDK_DISABLED", "true")])), [None, None]);
        assert_eq!(urls(&read(configured, &[("OTEL_TRACES_EXPORTER", "none")]))[0], None);
    }

    #[test]
    fn an_unusable_variable_is_reported_without_its_value() {
        let variables = [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://me:hunter2@otel.example"),
            ("OTEL_TRACES_SAMPLER", "jaeger_remote"),
            ("OTEL_METRIC_EXPORT_INTERVAL", "soon"),
        ];
        let settings = read(None, &variables);
        assert_eq!(urls(&settings), [None, None]);
        assert_eq!(settings.sampler, Sampler { ratio: 0.25, follows_parent: true });
        assert_eq!(settings.warnings.len(), 4, "{:?}", settings.warnings);
        assert!(!format!("{settings:?}").contains("hunter2"));
        let keyed = read(None, &[("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://otel.example/v1?api_key=hunter2#x")]);
        assert_eq!(keyed.traces.as_ref().unwrap().shown_url(), "https://otel.example/v1");
        assert!(!format!("{keyed:?}").contains("hunter2"));
        let settings = read(
            Some("http://127.0.0.1:1"),
            &[("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"), ("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")],
        );
        assert_eq!(settings.warnings.len(), 4, "{:?}", settings.warnings);
    }

    #[test]
    fn the_sampler_follows_the_parent_or_the_ratio() {
        let parent = |flags| TraceParent { trace_id: [0xff; 16], span_id: [1; 8], flags };
        let of = |name: &str, argument: &str| {
            read(None, &[("OTEL_TRACES_SAMPLER", name), ("OTEL_TRACES_SAMPLER_ARG", argument)]).sampler
        };
        let ratio = of("parentbased_traceidratio", "0.5");
        assert!(ratio.is_recorded(Some(&parent(1)), &[0xff; 16]));
        assert!(!ratio.is_recorded(Some(&parent(0)), &[0; 16]));
        assert!(ratio.is_recorded(None, &[0; 16]) && !ratio.is_recorded(None, &[0xff; 16]));
        assert!(of("always_on", "").is_recorded(Some(&parent(0)), &[0xff; 16]));
        assert!(!of("always_off", "").is_recorded(Some(&parent(1)), &[0; 16]));
        assert!(!of("parentbased_always_off", "").is_recorded(None, &[0; 16]));
        let none = Sampler { ratio: 0.0, follows_parent: true };
        assert!(!none.is_recorded(None, &[0; 16]));
    }

    #[test]
    fn resource_attributes_are_merged() {
        let settings = read(
            None,
            &[("OTEL_RESOURCE_ATTRIBUTES", "a=1%2C2,service.name=x,,broken"), ("OTEL_SERVICE_NAME", "mine")],
        );
        let get = |name: &str| settings.resource.iter().find(|(known, _)| known == name).map(|(_, value)| &**value);
        assert_eq!(
            (get("service.name"), get("a"), get("service.instance.id")),
            (Some("mine"), Some("1,2"), Some("one"))
        );
        assert_eq!(settings.warnings.len(), 1);
    }
}
