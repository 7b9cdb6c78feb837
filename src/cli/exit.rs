//! Exit codes, and failures of commands.

use std::time::Duration;

use crate::console::client::ClientError;

/// Upper limit for the time to wait at exit for tasks on blocking threads.
pub(super) const LAST_TASKS: Duration = Duration::from_millis(500);

pub(super) const DONE: u8 = 0;
pub(super) const FAILED: u8 = 1;
pub(super) const BAD_INPUT: u8 = 2;
pub(super) const NO_SATELLITE: u8 = 3;

pub(super) struct CommandFailure {
    pub(super) code: u8,
    pub(super) message: String,
}

impl CommandFailure {
    pub(super) fn new(code: u8, message: impl Into<String>) -> Self {
        let message: String = message.into();
        Self { code, message: mcp_satellite_actors::model::printable::lines(&message) }
    }

    pub(super) fn from_styled(code: u8, message: String) -> Self {
        Self { code, message }
    }
}

impl From<ClientError> for CommandFailure {
    fn from(error: ClientError) -> Self {
        let code = match &error {
            ClientError::NotRunning { .. } => NO_SATELLITE,
            ClientError::Refused(failure) => match failure.kind.as_str() {
                "bad_input" | "ambiguous" | "not_found" => BAD_INPUT,
                _ => FAILED,
            },
            ClientError::Unsafe(_) | ClientError::ConnectionLost(_) => FAILED,
        };
        let (next, step) = match &error {
            ClientError::Refused(failure) => (failure.details.next_retry_ms, failure.details.next_step.as_ref()),
            ClientError::NotRunning { .. } | ClientError::Unsafe(_) | ClientError::ConnectionLost(_) => (None, None),
        };
        let next = next.map(|left| format!("; next attempt in {:.1} s", left as f64 / 1000.0)).unwrap_or_default();
        let step = step.map(|step| format!(" (next: {step})")).unwrap_or_default();
        Self::new(code, format!("{error}{next}{step}"))
    }
}

impl From<std::io::Error> for CommandFailure {
    fn from(error: std::io::Error) -> Self {
        Self::new(FAILED, error.to_string())
    }
}
