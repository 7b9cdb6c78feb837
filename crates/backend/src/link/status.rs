//! Status of the link, as the control socket shows it.

use std::fmt;

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct BackendStatus {
    /// True if the last request to the backend succeeded.
    pub connected: bool,
    pub url: String,
    /// Id that the backend assigned to this satellite; `None` before the registration.
    pub satellite_id: Option<String>,
    /// Time of the last response of any kind, in RFC 3339.
    pub last_contact: Option<String>,
    pub last_error: Option<String>,
    /// Poll mode: `immediate`, `high`, `normal`, `idle`, `registering` or `backing_off`.
    pub mode: String,
    pub next_poll_ms: Option<u64>,
    pub commands: usize,
    pub backlog: u64,
    pub config_hash: Option<String>,
}

impl fmt::Display for BackendStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let connected = if self.connected { "connected" } else { "not connected" };
        write!(f, "backend: {} {connected}", self.url)?;
        if let Some(id) = &self.satellite_id {
            write!(f, " as {id}")?;
        }
        write!(f, ", {}", self.mode)?;
        if let Some(next) = self.next_poll_ms {
            write!(f, ", next poll in {:.0} s", (next as f64 / 1000.0).ceil())?;
        }
        if let Some(last) = &self.last_contact {
            write!(f, ", last contact {last}")?;
        }
        write!(f, ", {} events to send", self.backlog)?;
        match &self.last_error {
            Some(error) => write!(f, "\n  {error}"),
            None => Ok(()),
        }
    }
}
