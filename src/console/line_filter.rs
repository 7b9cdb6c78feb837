//! Selection of log lines by level and text.

use mcp_satellite_actors::model::event::{Envelope, Event, LogLevel, LogLine};
use mcp_satellite_console::problem::Problem;
use serde_json::Value;

/// Filter for log lines. Both conditions must hold.
#[derive(Debug, Clone, Default)]
pub(super) struct LineFilter {
    /// Accepted levels; `None` for all.
    levels: Option<Vec<LogLevel>>,
    /// Text that a line must contain.
    text: Option<String>,
}

impl LineFilter {
    /// Reads the parameters `level`, a list of levels separated by commas, and `q`. Empty ones select all lines.
    ///
    /// # Errors
    /// There is no such level.
    pub(super) fn new(level: Option<&str>, q: Option<String>) -> Result<Self, Problem> {
        let level_of = |text: &str| -> Result<LogLevel, Problem> {
            let why = || {
                let text = text.escape_debug();
                Problem::new("bad_input", format!("unknown level `{text}`; use one of: debug, info, warn, error"))
            };
            serde_json::from_value(Value::from(text)).map_err(|_| why())
        };
        let levels = level.filter(|level| !level.is_empty());
        let levels: Option<Result<Vec<_>, Problem>> =
            levels.map(|levels| levels.split(',').map(|text| level_of(text.trim())).collect());
        Ok(Self { levels: levels.transpose()?, text: q })
    }

    pub(super) fn matches(&self, line: &LogLine) -> bool {
        self.levels.as_ref().is_none_or(|levels| levels.contains(&line.level))
            && self.text.as_ref().is_none_or(|text| line.message.contains(text))
    }

    /// Returns the event about logs with its matching lines; `None` if there are none.
    pub(super) fn select(&self, envelope: &Envelope) -> Option<Envelope> {
        let Event::ServerLogs { of, logs } = &envelope.event else { return None };
        let logs: Vec<_> = logs.iter().filter(|line| self.matches(line)).cloned().collect();
        let Envelope { seq, timestamp, .. } = *envelope;
        (!logs.is_empty()).then(|| Envelope { seq, timestamp, event: Event::ServerLogs { of: of.clone(), logs } })
    }
}
