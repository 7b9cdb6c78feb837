//! State of an instance that is stored over restarts of the satellite, with wall-clock times. Unknown members, which a
//! later version may add, are ignored; missing ones take their default.

use jiff::Timestamp;
use mcp_satellite_protocol::era::Era;
use serde::{Deserialize, Serialize};

use super::event::rfc3339;

/// Stored history of one instance. The wall clock may be set back: a time in the future counts as now.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StoredMemo {
    /// Fingerprint of the configuration to which the history belongs. Set by the host; the runtime leaves it empty.
    pub config: Option<String>,
    /// True if a person stopped the instance.
    pub stopped: bool,
    /// Status message of an instance that failed permanently.
    pub failed: Option<String>,
    /// Set while the instance sleeps.
    pub dormant: Option<StoredSleep>,
    /// Set while a restart delay runs.
    pub delayed: Option<StoredDelay>,
    /// Unwanted exits, oldest first.
    pub exits: Vec<StoredExit>,
    /// Number of consecutive quick exits.
    pub quick: usize,
    /// Total number of restarts, after an unwanted exit or on request.
    pub restarts: u64,
    /// Reason of the last exit.
    pub last_exit: Option<String>,
    /// Message of the last failure.
    pub last_error: Option<String>,
    /// Protocol era of the server, if it is not the default.
    pub era: Option<Era>,
}

/// Sleep of an instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredSleep {
    /// Start of the sleep.
    #[serde(with = "rfc3339")]
    pub since: Timestamp,
}

/// A restart delay.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredDelay {
    /// Time of writing. The remaining delay is never longer than it was at this time.
    #[serde(with = "rfc3339")]
    pub from: Timestamp,
    /// End of the delay.
    #[serde(with = "rfc3339")]
    pub until: Timestamp,
}

/// An unwanted exit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredExit {
    /// Time of the exit.
    #[serde(with = "rfc3339")]
    pub at: Timestamp,
    /// True if the exit was a crash.
    pub crash: bool,
}

impl StoredMemo {
    /// Returns the part that is valid for another configuration: only that a person stopped the instance.
    #[must_use]
    pub fn for_another_configuration(&self) -> Self {
        Self { stopped: self.stopped, ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_fields_of_a_stored_memo_are_ignored() {
        let text = r#"{"stopped":true,"mood":{"of":"tomorrow"},"exits":[{"at":"2026-11-21T06:33:00.000Z","crash":true,"why":"?"}]}"#;
        let memo: StoredMemo = serde_json::from_str(text).unwrap();
        let at = "2026-11-21T06:33:00Z".parse().unwrap();
        assert_eq!(
            memo,
            StoredMemo { stopped: true, exits: vec![StoredExit { at, crash: true }], ..StoredMemo::default() }
        );
        assert_eq!(serde_json::from_str::<StoredMemo>("{}").unwrap(), StoredMemo::default());
    }

    #[test]
    fn another_configuration_clears_the_memo_except_a_stop() {
        let exits = vec![StoredExit { at: Timestamp::UNIX_EPOCH, crash: true }];
        let failed = Some("Process crashed".to_owned());
        let memo = StoredMemo { stopped: true, failed, exits, quick: 1, restarts: 7, ..StoredMemo::default() };
        assert_eq!(memo.for_another_configuration(), StoredMemo { stopped: true, ..StoredMemo::default() });
    }
}
