//! Checks of `[events]` and `[journal]`.

use mcp_satellite_clients::may_be_secret;
use mcp_satellite_model::settings::JournalLimits;

use super::check::ConfigCheck;
use super::file;
use super::plan::{KEEP, ROTATE_BYTES, SinkPlan};
use super::policy::BatchingTable;
use super::reader::ParsedValue;

/// Minimum of `size_max`, in bytes: a smaller journal has no room for the required data.
const JOURNAL_SIZE_MIN: u64 = 1 << 20;

impl ConfigCheck<'_, '_> {
    pub(crate) fn sink(&mut self, events: file::EventsTable) -> (SinkPlan, BatchingTable) {
        #[derive(Clone, Copy, Default, PartialEq)]
        enum SinkKind {
            #[default]
            Journal,
            File,
            Stdout,
            Http,
        }
        let words = [
            ("journal", SinkKind::Journal),
            ("file", SinkKind::File),
            ("stdout", SinkKind::Stdout),
            ("http", SinkKind::Http),
        ];
        let Some(kind) = self.keyword(&events.sink, "sink", &words) else { return (SinkPlan::default(), events.batch) };
        let mut only = |there: bool, key: &str, wanted: SinkKind, name: &str| {
            if there && kind != wanted {
                let message = format!("`{key}` has no effect with this sink");
                self.findings.error(events.at, message, format!("remove it, or set sink = \"{name}\""));
            }
        };
        only(!events.rotate_at.is_absent(), "rotate_at", SinkKind::File, "file");
        only(events.keep.is_some(), "keep", SinkKind::File, "file");
        only(!events.url.is_absent(), "url", SinkKind::Http, "http");
        only(!events.token.is_absent(), "token", SinkKind::Http, "http");

        let sink = match kind {
            SinkKind::Journal => SinkPlan::Journal,
            SinkKind::Stdout => SinkPlan::Stdout,
            SinkKind::File => {
                let size = events.rotate_at.get();
                if let Some(size) = size.filter(|size| size.value < 4096) {
                    self.findings.error(size.span, "`rotate_at` is less than one batch", "give at least \"4KiB\"");
                }
                SinkPlan::File {
                    rotate_bytes: size.map_or(ROTATE_BYTES, |size| size.value),
                    keep: events.keep.unwrap_or(KEEP),
                }
            }
            SinkKind::Http => {
                let url = match &events.url {
                    ParsedValue::Present(url) => self.url("url", url),
                    ParsedValue::Invalid => None,
                    ParsedValue::Absent => {
                        self.findings.error(events.at, "the http sink has no `url`", "add url = \"https://…\"");
                        None
                    }
                };
                if let Some((at, url)) = events.url.get().map(|typed| typed.span).zip(url.as_ref())
                    && url.query_pairs().any(|(name, value)| may_be_secret(&name, &value))
                {
                    let hint = "remove it from the URL and give token = \"env:NAME\"";
                    self.findings.error(at, "the URL of the sink seems to contain a secret", hint);
                }
                let token = events.token.get();
                let token = token.and_then(|text| self.secret_sources.resolve_secret("the token", text, self.findings));
                SinkPlan::Http { url: url.map(String::from).unwrap_or_default(), token }
            }
        };
        (sink, events.batch)
    }

    pub(crate) fn journal(&mut self, typed: &file::JournalTable) -> JournalLimits {
        let defaults = JournalLimits::default();
        if let Some(size) = typed.size_max.get().filter(|size| size.value < JOURNAL_SIZE_MIN) {
            let hint = "give at least \"1MiB\"";
            self.findings.error(size.span, "`size_max` is too small for the data that must be kept", hint);
        }
        JournalLimits {
            events_age_max: typed.events_age_max.unwrap_or(defaults.events_age_max),
            size_max: typed.size_max.get().map_or(defaults.size_max, |size| size.value),
            server_logs_max: typed.server_logs_max.unwrap_or(defaults.server_logs_max),
            request_logs_max: typed.request_logs_max.unwrap_or(defaults.request_logs_max),
            logs_age_max: typed.logs_age_max.unwrap_or(defaults.logs_age_max),
        }
    }
}
