//! Description of a session with a process, for the satellite that continues it after a crash of the present one. It
//! contains no value of the configuration; the texts of the server are as sent.

use jiff::Timestamp;
use mcp_satellite_protocol::era::Era;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

use super::event::rfc3339;
use super::ids::{InstallationId, InstanceId, TeamId, UserId};
use super::remote::ServerInfo;

/// Maximum size of a serialized description in bytes.
pub const SESSION_DESCRIPTION_MAX: usize = 64 * 1024;

/// Format of the descriptions that this version writes. It reads them and all earlier ones.
const FORMAT: u32 = 1;

/// State of a session that outlives its satellite, written after the handshake.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SessionDescription {
    format: u32,
    team: TeamId,
    user: UserId,
    installation: InstallationId,
    /// Fingerprint of the configuration with which the process was started. Set by the connector; the runtime leaves it
    /// empty.
    #[serde(default)]
    pub config: Option<String>,
    /// Era of the handshake.
    pub era: Era,
    /// Complete result of `initialize` or `server/discover`, as sent.
    pub handshake_result: Box<RawValue>,
    /// Time of the handshake.
    #[serde(with = "rfc3339")]
    pub initialized_at: Timestamp,
    /// Identity of the process in the form of its connector. Set by the connector; the runtime leaves it empty.
    #[serde(default)]
    pub process: Value,
}

/// Reason why a description cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum SessionDescriptionError {
    /// The description exceeds [`SESSION_DESCRIPTION_MAX`].
    #[error("the description of a session has {0} bytes; at most {SESSION_DESCRIPTION_MAX} are read")]
    TooLong(usize),
    /// A newer version wrote the description.
    #[error("the description of a session has format {0}; formats up to {FORMAT} are known")]
    NewerFormat(u32),
    /// The description is not valid JSON, or a field is missing.
    #[error("the description of a session cannot be read")]
    Malformed(#[from] serde_json::Error),
}

impl SessionDescription {
    /// Describes the session of an instance whose handshake was completed at `initialized_at`.
    pub fn new(instance: &InstanceId, server: &ServerInfo, initialized_at: Timestamp) -> Self {
        Self {
            format: FORMAT,
            team: instance.team.clone(),
            user: instance.user.clone(),
            installation: instance.installation.clone(),
            config: None,
            era: server.era,
            handshake_result: server.handshake_result.clone(),
            initialized_at,
            process: Value::Null,
        }
    }

    /// Returns the instance whose session is described.
    pub fn instance(&self) -> InstanceId {
        InstanceId::new(self.team.clone(), self.user.clone(), self.installation.clone())
    }

    /// Serializes the description. Returns `None` if it would exceed [`SESSION_DESCRIPTION_MAX`]: such a session cannot
    /// be continued.
    pub fn to_bytes(&self) -> Option<Vec<u8>> {
        let bytes = serde_json::to_vec(self).ok()?;
        (bytes.len() <= SESSION_DESCRIPTION_MAX).then_some(bytes)
    }

    /// Reads a serialized description.
    ///
    /// # Errors
    ///
    /// Fails if the description is too long, has a newer format, or is damaged.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, SessionDescriptionError> {
        #[derive(Deserialize)]
        struct DescriptionFormat {
            format: u32,
        }
        if bytes.len() > SESSION_DESCRIPTION_MAX {
            return Err(SessionDescriptionError::TooLong(bytes.len()));
        }
        // The other fields of a newer format may be unknown.
        let DescriptionFormat { format } = serde_json::from_slice(bytes)?;
        if format > FORMAT {
            return Err(SessionDescriptionError::NewerFormat(format));
        }
        Ok(serde_json::from_slice(bytes)?)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn server(handshake_result: &str) -> ServerInfo {
        let raw = |text: &str| RawValue::from_string(text.to_owned()).unwrap();
        ServerInfo {
            name: "files".to_owned(),
            version: "1".to_owned(),
            era: Era::Stateless,
            protocol: "2026-07-28".to_owned(),
            capabilities: raw("{}"),
            instructions: None,
            handshake_result: raw(handshake_result),
        }
    }

    fn description(handshake_result: &str) -> SessionDescription {
        let instance = InstanceId::new("acme".into(), "alice".into(), "files".into());
        let at = "2026-11-21T06:33:00Z".parse().unwrap();
        SessionDescription::new(&instance, &server(handshake_result), at)
    }

    #[test]
    fn a_description_is_read_as_it_was_written() {
        let sent = r#"{"capabilities": {"tools": {}},  "unknown": 1e400}"#;
        let written = SessionDescription {
            config: Some("c0ffee".to_owned()),
            process: json!({"cgroup": "/a"}),
            ..description(sent)
        };
        let read = SessionDescription::from_bytes(&written.to_bytes().unwrap()).unwrap();
        assert_eq!(read.instance().to_string(), "acme/alice/files");
        assert_eq!((read.era, read.handshake_result.get()), (Era::Stateless, sent));
        assert_eq!(
            (read.initialized_at, read.config, read.process),
            (written.initialized_at, written.config, written.process)
        );
    }

    #[test]
    fn a_newer_format_is_refused_by_its_number() {
        let error = SessionDescription::from_bytes(br#"{"format":2,"peer":"unknown here"}"#).unwrap_err();
        assert!(matches!(error, SessionDescriptionError::NewerFormat(2)), "{error:?}");
        for damaged in ["", "{}", r#"{"format":1}"#, r#"{"format":-1}"#] {
            let error = SessionDescription::from_bytes(damaged.as_bytes()).unwrap_err();
            assert!(matches!(error, SessionDescriptionError::Malformed(_)), "{damaged}: {error:?}");
        }
    }

    #[test]
    fn a_description_over_the_limit_is_neither_written_nor_read() {
        let of_size = |size: usize| description(&format!("\"{}\"", "x".repeat(size)));
        let empty = of_size(0).to_bytes().unwrap().len();
        let longest = of_size(SESSION_DESCRIPTION_MAX - empty).to_bytes().unwrap();
        assert_eq!(longest.len(), SESSION_DESCRIPTION_MAX);
        assert!(SessionDescription::from_bytes(&longest).is_ok());
        assert!(of_size(SESSION_DESCRIPTION_MAX - empty + 1).to_bytes().is_none());
        let longer = [&longest[..], b" "].concat();
        assert!(matches!(SessionDescription::from_bytes(&longer), Err(SessionDescriptionError::TooLong(_))));
    }
}
