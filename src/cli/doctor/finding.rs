//! The results of the probes, and their form on the terminal.

use std::time::Duration;

use comfy_table::{Cell, Color};
use serde::Serialize;
use tokio::time::timeout;

use crate::cli::print::printable;
use crate::cli::table::{new_table, render_table};

/// Result of one probe.
#[derive(Debug, Clone, Serialize)]
pub(super) struct DoctorFinding {
    /// Part of the system: `satellite`, `configuration`, `machine`, `tool`, `client`, `server` or `endpoint`.
    pub(super) section: &'static str,
    pub(super) subject: String,
    pub(super) state: FindingState,
    pub(super) message: String,
    /// The next step; `None` if none is necessary.
    pub(super) next_step: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, strum::Display)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub(super) enum FindingState {
    Ok,
    Warning,
    Error,
}

impl DoctorFinding {
    pub(super) fn ok(section: &'static str, subject: impl Into<String>, message: impl Into<String>) -> Self {
        let (subject, message) = (subject.into(), message.into());
        Self { section, subject, state: FindingState::Ok, message, next_step: None }
    }

    pub(super) fn warning(section: &'static str, subject: impl Into<String>, message: impl Into<String>) -> Self {
        Self { state: FindingState::Warning, ..Self::ok(section, subject, message) }
    }

    pub(super) fn error(section: &'static str, subject: impl Into<String>, message: impl Into<String>) -> Self {
        Self { state: FindingState::Error, ..Self::ok(section, subject, message) }
    }

    pub(super) fn next(self, step: impl Into<String>) -> Self {
        Self { next_step: Some(step.into()), ..self }
    }
}

/// Runs a probe with a time limit.
pub(super) async fn probe(
    section: &'static str,
    limit: Duration,
    findings: impl Future<Output = Vec<DoctorFinding>>,
) -> Vec<DoctorFinding> {
    timeout(limit, findings).await.unwrap_or_else(|_| vec![unfinished(section, limit)])
}

/// Runs a probe that blocks on a separate thread, with a time limit.
pub(super) async fn probe_blocking(
    section: &'static str,
    limit: Duration,
    findings: impl FnOnce() -> Vec<DoctorFinding> + Send + 'static,
) -> Vec<DoctorFinding> {
    let running = tokio::task::spawn_blocking(findings);
    match timeout(limit, running).await {
        Ok(Ok(findings)) => findings,
        Ok(Err(_)) | Err(_) => vec![unfinished(section, limit)],
    }
}

fn unfinished(section: &'static str, limit: Duration) -> DoctorFinding {
    let message = format!("the probe has no result after {} s", limit.as_secs());
    DoctorFinding::warning(section, section, message)
        .next("look for a hanging disk, network or process, then run it again")
}

/// Renders findings as a table with one row each.
pub(super) fn render(findings: &[DoctorFinding]) -> String {
    let mut table = new_table(&["STATE", "CHECK", "RESULT"]);
    for DoctorFinding { section, subject, state, message, next_step } in findings {
        let color = match state {
            FindingState::Ok => Color::Green,
            FindingState::Warning => Color::Yellow,
            FindingState::Error => Color::Red,
        };
        let check = if subject == section { subject.clone() } else { format!("{section} {subject}") };
        let next = next_step.as_ref().map(|step| format!("\nnext: {}", printable(step))).unwrap_or_default();
        let result = format!("{}{next}", printable(message));
        table.add_row([Cell::new(state.to_string()).fg(color), Cell::new(printable(&check)), Cell::new(result)]);
    }
    render_table(&table)
}
