//! The backend: the parsed `[backend]` table, the checks, and the validated configuration.

use std::time::Duration;

use mcp_satellite_model::secret::Secret;
use toml_span::Span;

use super::check::ConfigCheck;
use super::gateway::is_sendable;
use super::reader::{ParsedValue, TableReader};
use mcp_satellite_http::client::is_loopback;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackendPlan {
    /// URL of the backend: `https`, or `http` on this machine only, without a trailing slash.
    pub url: String,
    /// Registration token, which is valid once.
    pub token: Option<Secret>,
    pub request_timeout: Duration,
    pub heartbeat_interval: Duration,
    /// Interval between requests for the configuration. A command can request it earlier.
    pub config_interval: Duration,
    pub command_timeout: Duration,
    pub backoff_max: Duration,
    pub poll: PollIntervals,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the modes, by name")]
pub struct PollIntervals {
    pub immediate: Duration,
    pub high: Duration,
    pub normal: Duration,
    pub idle: Duration,
}

impl Default for PollIntervals {
    fn default() -> Self {
        Self {
            immediate: Duration::from_secs(2),
            high: Duration::from_secs(10),
            normal: Duration::from_secs(30),
            idle: Duration::from_secs(60),
        }
    }
}

impl BackendPlan {
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            token: None,
            request_timeout: Duration::from_secs(10),
            heartbeat_interval: Duration::from_secs(30),
            config_interval: Duration::from_secs(5 * 60),
            command_timeout: Duration::from_secs(60),
            backoff_max: Duration::from_secs(5 * 60),
            poll: PollIntervals::default(),
        }
    }
}

#[derive(Default)]
pub(crate) struct BackendTable {
    at: Span,
    is_present: bool,
    url: ParsedValue<String>,
    token: ParsedValue<String>,
    request_timeout: Option<Duration>,
    heartbeat_interval: Option<Duration>,
    config_interval: Option<Duration>,
    command_timeout: Option<Duration>,
    backoff_max: Option<Duration>,
    immediate: Option<Duration>,
    high: Option<Duration>,
    normal: Option<Duration>,
    idle: Option<Duration>,
}

impl BackendTable {
    pub(crate) fn read(fields: &mut TableReader<'_, '_>) -> Self {
        let mut backend = Self {
            at: fields.at,
            is_present: true,
            url: fields.text("url"),
            token: fields.text("token"),
            request_timeout: fields.positive("request_timeout"),
            heartbeat_interval: fields.positive("heartbeat_interval"),
            config_interval: fields.positive("config_interval"),
            command_timeout: fields.positive("command_timeout"),
            backoff_max: fields.positive("backoff_max"),
            ..Self::default()
        };
        fields.section("poll", |fields| {
            backend.immediate = fields.positive("immediate");
            backend.high = fields.positive("high");
            backend.normal = fields.positive("normal");
            backend.idle = fields.positive("idle");
        });
        backend
    }

    pub(crate) fn is_present(&self) -> bool {
        self.is_present
    }

    pub(crate) fn into_plan(self, check: &mut ConfigCheck<'_, '_>) -> Option<BackendPlan> {
        if !self.is_present {
            return None;
        }
        if self.url.is_absent() {
            check.findings.error(self.at, "[backend] has no `url`", "add url = \"https://…\"");
        }
        let token = self.token.get();
        let token =
            token.and_then(|text| check.secret_sources.resolve_secret("the registration token", text, check.findings));
        if let Some(at) = self.token.get()
            && token.as_ref().is_some_and(|token| !is_sendable(token.expose()))
        {
            let hint = "copy it from the backend: one line of letters, digits and -._~+/";
            check.findings.error(at.span, "the registration token cannot be sent as a bearer token", hint);
        }
        let url = self.validate_url(check).unwrap_or_default();
        let base = BackendPlan::new(url);
        let poll = PollIntervals {
            immediate: self.immediate.unwrap_or(base.poll.immediate),
            high: self.high.unwrap_or(base.poll.high),
            normal: self.normal.unwrap_or(base.poll.normal),
            idle: self.idle.unwrap_or(base.poll.idle),
        };
        Some(BackendPlan {
            token,
            request_timeout: self.request_timeout.unwrap_or(base.request_timeout),
            heartbeat_interval: self.heartbeat_interval.unwrap_or(base.heartbeat_interval),
            config_interval: self.config_interval.unwrap_or(base.config_interval),
            command_timeout: self.command_timeout.unwrap_or(base.command_timeout),
            backoff_max: self.backoff_max.unwrap_or(base.backoff_max),
            poll,
            url: base.url,
        })
    }

    fn validate_url(&self, check: &mut ConfigCheck<'_, '_>) -> Option<String> {
        let text = self.url.get()?;
        let url = check.url("url", text)?;
        if url.query().is_some() || url.fragment().is_some() {
            check.findings.error(text.span, "the `url` of the backend has a query or a fragment", "remove it");
        }
        if url.scheme() == "http" {
            if is_loopback(&url) {
                let message = "the backend is reached without encryption: its `url` is http, not https".to_owned();
                check.findings.warning(text.span, message);
            } else {
                let hint = "write \"https://…\": credentials and configurations would go over the network in the clear";
                check.findings.error(text.span, "the `url` of the backend is http, not https", hint);
            }
        }
        Some(url.as_str().trim_end_matches('/').to_owned())
    }
}
