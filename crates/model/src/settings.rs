//! Settings of a satellite that several parts use: the configuration produces them, processes, journal and OAuth obey
//! them.

use std::str::FromStr;
use std::time::Duration;

use crate::secret::Secret;

/// User and group of servers in a sandbox.
pub const SANDBOX_USER: u32 = 99999;
// The first id that does not belong to system accounts.
const FIRST_MIN: u32 = 1000;
// The largest user id; `u32::MAX` means "none" to the kernel.
const LAST_MAX: u32 = u32::MAX - 1;

/// Configured sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Isolation {
    /// In development no sandbox, in production the best one that works.
    #[default]
    Auto,
    /// No sandbox.
    None,
    /// The tool nsjail.
    Nsjail,
    /// The tool bubblewrap.
    Bubblewrap,
}

/// Mode of operation: the meaning of [`Isolation::Auto`], and the resolution of commands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OperatingMode {
    /// With `auto`, servers run without a sandbox.
    #[default]
    Development,
    /// With `auto`, servers run in a sandbox or not at all. Each command is resolved to a path once.
    Production,
}

/// Use of cgroups: one for each run, if any.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CgroupMode {
    /// Use cgroups where they are available.
    #[default]
    Auto,
    /// Use no cgroups.
    Off,
    /// Fail if cgroups are not available.
    Required,
}

/// Range of user ids for teams, first and last inclusive. Each user has a group of the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UidRange {
    /// First id.
    pub first: u32,
    /// Last id.
    pub last: u32,
}

/// Parses `FIRST-LAST`, for example `200000-200999`.
impl FromStr for UidRange {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (first, last) = text.split_once('-').ok_or("a range consists of two numbers separated by a hyphen")?;
        let number = |text: &str| text.trim().parse::<u32>().map_err(|_| "its two parts must be user ids");
        let (first, last) = (number(first)?, number(last)?);
        match (first, last) {
            (first, _) if first < FIRST_MIN => Err("user ids below 1000 belong to the system"),
            (_, last) if last > LAST_MAX => Err("the last number is larger than any user id"),
            (first, last) if first > last => Err("the first number is larger than the last"),
            (first, last) if (first..=last).contains(&SANDBOX_USER) => {
                Err("it contains 99999, the user id of servers in sandboxes")
            }
            _ => Ok(Self { first, last }),
        }
    }
}

/// Retention limits of the journal. Data is removed as soon as one of them is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JournalLimits {
    /// Maximum age of events. Events that are still to be delivered are kept longer.
    pub events_age_max: Duration,
    /// Maximum size of the database in bytes. Beyond it the oldest events are removed, even if they are still to be
    /// delivered.
    pub size_max: u64,
    /// Maximum number of log lines per instance.
    pub server_logs_max: usize,
    /// Maximum number of stored calls per instance.
    pub request_logs_max: usize,
    /// Maximum age of log lines and calls.
    pub logs_age_max: Duration,
}

impl Default for JournalLimits {
    fn default() -> Self {
        const DAY: Duration = Duration::from_secs(24 * 3600);
        Self {
            events_age_max: 30 * DAY,
            size_max: 512 << 20,
            server_logs_max: 100,
            request_logs_max: 100,
            logs_age_max: 30 * DAY,
        }
    }
}

/// OAuth settings of a server, for details that its authorization server does not provide.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OAuthPlan {
    /// True if the satellite itself is granted access with its client secret, without a user.
    pub machine: bool,
    /// Client id of the satellite; `None` registers a client.
    pub client_id: Option<String>,
    /// Client secret of the satellite.
    pub client_secret: Option<Secret>,
    /// URL of the client metadata document, for authorization servers that support such documents.
    pub client_metadata_url: Option<String>,
    /// Issuer of the only trusted authorization server.
    pub issuer: Option<String>,
    /// Scopes to request. If empty, the scopes that the server names are used.
    pub scopes: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_valid_uid_ranges_are_parsed() {
        assert_eq!("200000-200999".parse(), Ok(UidRange { first: 200_000, last: 200_999 }));
        for wrong in ["", "5", "0-10", "999-2000", "3000-2000", "90000-100000", "1000-4294967295", "a-b", "1000-"] {
            assert!(wrong.parse::<UidRange>().is_err(), "{wrong}");
        }
    }
}
