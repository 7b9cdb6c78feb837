//! Continuation of a session that an earlier satellite began with a server that still runs. The handshake is not
//! repeated; any response to a check proves that the server is there. Only then the session begins to read the lists.
//!
//! Open requests, log levels and subscriptions of the earlier session are lost. The ids of this one are higher than all
//! earlier ones, so that a late response to an earlier request belongs to no request.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mcp_satellite_model::session_description::SessionDescription;

use crate::handshake::parse_handshake_result;
use crate::interface::{Outlet, SessionEvent, SessionHost, SessionOptions};
use crate::pending::PendingPurpose;
use crate::session::SessionCore;
use crate::state::ResumedSession;

/// Maximum time for the response to the check of a session that continues.
pub const RESUME_TIMEOUT: Duration = Duration::from_secs(5);

impl ResumedSession {
    /// Reads the description of a session whose handshake was completed at `initialized_at`.
    ///
    /// # Errors
    ///
    /// Returns the reason why this version cannot continue the session.
    pub fn new(description: &SessionDescription, initialized_at: Instant) -> Result<Self, String> {
        let (server, offers) = parse_handshake_result(description.era, &description.handshake_result)?;
        Ok(Self { server: Arc::new(server), offers, initialized_at })
    }
}

impl<O: Outlet, H: SessionHost> SessionCore<O, H> {
    /// Continues a session: sends a check. The ids of `options.gate` must begin after all earlier ones.
    pub fn resume(options: SessionOptions, resumed: ResumedSession, outlet: O, host: H, now: Instant) -> Self {
        let mut this = Self::unopened(options, outlet, host);
        this.era = resumed.server.era;
        this.resuming = Some(Box::new(resumed));
        this.send_own_request(this.era.check_method(), None, PendingPurpose::Resume, now + RESUME_TIMEOUT);
        this
    }

    /// Handles the response to the check, a result or an error.
    pub(crate) fn on_resumed(&mut self, now: Instant) {
        let Some(resumed) = self.resuming.take() else { return };
        let ResumedSession { server, offers, initialized_at } = *resumed;
        tracing::debug!(instance = %self.spec.name, protocol = %server.protocol, "the session continues");
        self.enter_session(server.clone(), offers, initialized_at, SessionEvent::Resumed(server, initialized_at), now);
    }
}

#[cfg(test)]
mod tests {
    use mcp_satellite_model::remote::ServerInfo;
    use mcp_satellite_protocol::era::Era;
    use serde_json::json;
    use serde_json::value::to_raw_value;

    use super::*;
    use crate::interface::{MessageOutcome, PassedDeadline};
    use crate::session::tests::{Lines, Reports, SECOND, TestSession, call, hear, options, spec};

    const FIRST_ID: u64 = 3 << 32;

    fn description(era: Era) -> SessionDescription {
        let result = match era {
            Era::Sessions => json!({
                "protocolVersion": "2025-11-25",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "s", "version": "1"},
            }),
            Era::Stateless => json!({
                "resultType": "complete",
                "supportedVersions": ["2026-07-28"],
                "capabilities": {"tools": {"listChanged": true}},
            }),
        };
        let server = ServerInfo {
            name: String::new(),
            version: String::new(),
            era,
            protocol: String::new(),
            capabilities: to_raw_value(&json!({})).unwrap(),
            instructions: None,
            handshake_result: to_raw_value(&result).unwrap(),
        };
        SessionDescription::new(&spec().id, &server, "2026-11-21T06:33:00Z".parse().unwrap())
    }

    fn resumed(era: Era, initialized_at: Instant, now: Instant) -> TestSession {
        let resumed = ResumedSession::new(&description(era), initialized_at).unwrap();
        SessionCore::resume(options(FIRST_ID, now), resumed, Lines::default(), Reports::default(), now)
    }

    fn answer(id: u64) -> String {
        format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{{}}}}"#)
    }

    #[test]
    fn a_session_continues_without_a_handshake_after_any_response_to_its_check() {
        let earlier = Instant::now();
        let now = earlier + SECOND * 100;
        let refused = format!(r#"{{"jsonrpc":"2.0","id":{FIRST_ID},"error":{{"code":-32601,"message":"no"}}}}"#);
        for response in [answer(FIRST_ID), refused] {
            let mut session = resumed(Era::Sessions, earlier, now);
            let sent = session.outlet.take();
            assert_eq!((sent.len(), &sent[0]["method"], &sent[0]["id"]), (1, &"ping".into(), &FIRST_ID.into()));
            assert_eq!((session.initialized_at, session.gate.version()), (None, None));
            assert!(matches!(hear(&mut session, &response, now), MessageOutcome::Initialized));
            let sent = session.outlet.take();
            assert_eq!((sent.len(), &sent[0]["method"]), (1, &"tools/list".into()), "no `initialized` is sent");
            assert_eq!((session.initialized_at, session.gate.version()), (Some(earlier), Some("2025-11-25")));
            let (id, mut result) = call(&mut session, SECOND, now);
            assert!(id > FIRST_ID);
            hear(&mut session, &answer(id), now);
            assert!(result.try_recv().unwrap().is_ok(), "calls do not wait for the lists");
            assert_eq!(session.host.take(), ["resumed s"]);
        }
    }

    #[test]
    fn a_server_without_sessions_is_asked_for_its_changes_again() {
        let now = Instant::now();
        let mut session = resumed(Era::Stateless, now, now);
        let sent = session.outlet.take();
        assert_eq!((sent.len(), &sent[0]["method"]), (1, &"server/discover".into()));
        assert!(sent[0]["params"]["_meta"].is_object(), "a request without a session contains its context");
        hear(&mut session, &answer(FIRST_ID), now);
        let sent = session.outlet.take();
        assert_eq!(
            (&sent[0]["method"], &sent[1]["method"]),
            (&"subscriptions/listen".into(), &"tools/list".into()),
            "a change during the read is announced"
        );
        assert_eq!(session.log_level(), None);
    }

    #[test]
    fn responses_to_requests_of_the_earlier_session_change_nothing() {
        let now = Instant::now();
        let mut session = resumed(Era::Sessions, now, now);
        session.outlet.take();
        for id in [1, 2, FIRST_ID - 1] {
            assert!(matches!(hear(&mut session, &answer(id), now), MessageOutcome::Nothing));
        }
        let progress =
            r#"{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":2,"progress":1}}"#;
        hear(&mut session, progress, now);
        assert_eq!((session.initialized_at, session.next_deadline()), (None, Some(now + RESUME_TIMEOUT)));
        assert!(session.host.take().is_empty() && session.outlet.take().is_empty());
    }

    #[test]
    fn a_server_that_does_not_answer_the_check_ends_the_session() {
        let now = Instant::now();
        let mut session = resumed(Era::Sessions, now, now);
        assert!(session.expire_next(now + RESUME_TIMEOUT / 2).is_none());
        assert!(matches!(session.expire_next(now + RESUME_TIMEOUT), Some(PassedDeadline::Resume)));
    }

    #[test]
    fn a_description_of_an_unsupported_version_is_refused() {
        let mut unsupported = description(Era::Sessions);
        let result =
            json!({"protocolVersion": "1999-01-01", "capabilities": {}, "serverInfo": {"name": "s", "version": "1"}});
        unsupported.handshake_result = to_raw_value(&result).unwrap();
        let why = ResumedSession::new(&unsupported, Instant::now()).err().unwrap();
        assert!(why.contains("1999-01-01"), "{why}");
    }
}
