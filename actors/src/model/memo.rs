//! What an instance has come to, in the form that outlives the satellite: plain data with the wall clock's time. Members
//! that a later version adds are passed over, and those that an earlier one did not know are as if nothing had happened.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::era::Era;
use super::event::rfc3339;

/// The history of one instance. A wall clock can be set: a time that is in the future when it is read counts as now.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StoredMemo {
    /// Tells the configuration that it came to this with from others: the host's word, which the runtime leaves empty.
    pub config: Option<String>,
    /// A person wants it to stay down.
    pub stopped: bool,
    /// It ended once too often: what its user is told.
    pub failed: Option<String>,
    /// It sleeps.
    pub dormant: Option<Asleep>,
    /// A restart's delay was running.
    pub delayed: Option<Delay>,
    /// Its unwanted exits, oldest first.
    pub exits: Vec<Exit>,
    /// Consecutive runs that were quick to end.
    pub quick: usize,
    /// Started again after an unwanted exit or on request, over all.
    pub restarts: u64,
    /// How the last run ended.
    pub last_exit: Option<String>,
    /// What went wrong last.
    pub last_error: Option<String>,
    /// The era of the protocol that its server speaks, where that is not the one that is tried first anyway.
    pub era: Option<Era>,
}

/// See [`StoredMemo::dormant`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asleep {
    /// Since when.
    #[serde(with = "rfc3339")]
    pub since: Timestamp,
}

/// See [`StoredMemo::delayed`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Delay {
    /// When this was written: what is left is never more than it was then.
    #[serde(with = "rfc3339")]
    pub from: Timestamp,
    /// When it is over.
    #[serde(with = "rfc3339")]
    pub until: Timestamp,
}

/// An unwanted exit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// When.
    #[serde(with = "rfc3339")]
    pub at: Timestamp,
    /// Whether it was a crash.
    pub crash: bool,
}

impl StoredMemo {
    /// What of it holds for another configuration: that its user wants it to stay down, and nothing else.
    #[must_use]
    pub fn for_another_configuration(&self) -> Self {
        Self { stopped: self.stopped, ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_another_version_wrote_is_read_as_far_as_it_is_known() {
        let text = r#"{"stopped":true,"mood":{"of":"tomorrow"},"exits":[{"at":"2026-11-21T06:33:00.000Z","crash":true,"why":"?"}]}"#;
        let memo: StoredMemo = serde_json::from_str(text).unwrap();
        let at = "2026-11-21T06:33:00Z".parse().unwrap();
        assert_eq!(memo, StoredMemo { stopped: true, exits: vec![Exit { at, crash: true }], ..StoredMemo::default() });
        assert_eq!(serde_json::from_str::<StoredMemo>("{}").unwrap(), StoredMemo::default());
    }

    #[test]
    fn another_configuration_has_a_clean_slate_and_a_stop_stays() {
        let exits = vec![Exit { at: Timestamp::UNIX_EPOCH, crash: true }];
        let failed = Some("Process crashed".to_owned());
        let memo = StoredMemo { stopped: true, failed, exits, quick: 1, restarts: 7, ..StoredMemo::default() };
        assert_eq!(memo.for_another_configuration(), StoredMemo { stopped: true, ..StoredMemo::default() });
    }
}
