//! The handshake in both eras. A session tries one era first, and the other one if the server's refusal may mean that
//! it supports only that. `era` decides the order.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mcp_satellite_model::exit::CallError;
use mcp_satellite_model::failure::{ExchangeFailure, FailureKind};
use mcp_satellite_model::remote::ServerInfo;
use mcp_satellite_model::spec::{RemoteTransport, ServerTarget};
use mcp_satellite_protocol::era::{Era, SESSION_VERSIONS, STATELESS_VERSION};
use mcp_satellite_protocol::meta::SERVER_INFO;
use mcp_satellite_protocol::rpc::member;
use rmcp::model::{
    ClientCapabilities, ElicitationCapability, FormElicitationCapability, Implementation, InitializeRequestParams,
    ProtocolVersion, RootsCapabilities, SamplingCapability, UrlElicitationCapability,
};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::era;
use crate::interface::{MessageOutcome, Outlet, PassedDeadline, SessionEvent, SessionHost};
use crate::lists::OfferedLists;
use crate::pending::{PendingPurpose, PendingRequest};
use crate::session::{SessionCore, masked_excerpt};
use crate::state::{HandshakeProgress, HandshakeRefusal};

/// Reason why an answer does not complete the handshake. `may_be_other` is true if a server of the other era may answer
/// so.
struct HandshakeMismatch {
    why: String,
    may_be_other: bool,
}

pub(crate) fn satellite_capabilities() -> ClientCapabilities {
    // The satellite forwards requests of a server to an attached client, or declines them.
    let mut roots = RootsCapabilities::default();
    roots.list_changed = Some(true);
    let mut capabilities = ClientCapabilities::default();
    capabilities.roots = Some(roots);
    capabilities.sampling = Some(SamplingCapability::default());
    let (form, url) = (FormElicitationCapability::new(), UrlElicitationCapability::new());
    capabilities.elicitation = Some(ElicitationCapability::new().with_form(form).with_url(url));
    capabilities
}

pub(crate) fn satellite_info() -> Implementation {
    Implementation::new("mcp-satellite", env!("CARGO_PKG_VERSION"))
}

impl<O: Outlet, H: SessionHost> SessionCore<O, H> {
    pub(crate) fn begin_handshake(&mut self, since: Instant, remembered: Option<Era>, now: Instant) {
        self.handshake.deadline = Some(since + self.spec.policy.session.handshake_timeout);
        let first = if self.may_be_stateless() { remembered } else { None };
        self.send_opening_request(era::first_era(self.spec.policy.session.protocol, first), now);
    }

    fn send_opening_request(&mut self, as_era: Era, now: Instant) {
        self.era = as_era;
        let left = self.handshake.deadline.map_or(Duration::ZERO, |until| until.saturating_duration_since(now));
        let is_second = self.handshake.first_refusal.is_some();
        let deadline = now + era::opening_timeout(self.spec.policy.session.protocol, as_era, is_second, left);
        let params = match as_era {
            Era::Sessions => {
                let params = InitializeRequestParams::new(satellite_capabilities(), satellite_info())
                    .with_protocol_version(ProtocolVersion::LATEST_WITH_INITIALIZE);
                Some(serde_json::to_string(&params).unwrap_or_default())
            }
            Era::Stateless => None,
        };
        self.send_own_request(as_era.opening_method(), params.as_deref(), PendingPurpose::Handshake, deadline);
    }

    pub(crate) fn may_be_stateless(&self) -> bool {
        // HTTP+SSE supports only sessions, and the configuration may require them.
        !matches!(self.spec.target, ServerTarget::Remote { transport: RemoteTransport::Sse, .. })
            && self.spec.policy.session.protocol != Some(Era::Sessions)
    }

    fn try_other_era(&mut self, refused: &HandshakeRefusal, now: Instant) -> bool {
        let may = self.handshake.first_refusal.is_none()
            && self.spec.policy.session.protocol.is_none()
            && self.may_be_stateless()
            && self.handshake.deadline.is_some_and(|until| now < until);
        if may {
            let other = self.era.other();
            tracing::debug!(
                instance = %self.spec.name, refused = self.era.opening_method(), next = other.opening_method(),
                "handshake refused; trying the other era of the protocol"
            );
            self.handshake.first_refusal = Some(refused.clone());
            self.host.report(SessionEvent::EraChanged(other));
            self.send_opening_request(other, now);
        }
        may
    }

    fn fail_handshake(&mut self, refused: HandshakeRefusal) -> MessageOutcome {
        // The error reports the refusal of `initialize`, which users know. The next start assumes nothing about the
        // era.
        let other = self.handshake.first_refusal.take();
        if other.is_some() {
            self.host.report(SessionEvent::EraChanged(Era::Sessions));
        }
        match (self.era, other) {
            (Era::Stateless, Some(other)) => MessageOutcome::HandshakeRefused(other),
            (Era::Sessions | Era::Stateless, _) => MessageOutcome::HandshakeRefused(refused),
        }
    }

    pub(crate) fn on_handshake(
        &mut self,
        id: u64,
        answer: Result<&RawValue, CallError>,
        now: Instant,
    ) -> MessageOutcome {
        if self.handshake.late_request.take_if(|late| *late == id).is_some() {
            return self.on_late_answer(answer, now);
        }
        let opened = match answer {
            Ok(result) => parse_opening_result(self.era, result),
            Err(error) => {
                Err(HandshakeMismatch { may_be_other: era::may_be_other(self.era, &error), why: error.to_string() })
            }
        };
        match opened {
            Ok((server, offers)) => {
                self.complete_handshake(server, offers, now);
                MessageOutcome::Initialized
            }
            Err(HandshakeMismatch { why, may_be_other }) => {
                let refused = HandshakeRefusal::Rejected(masked_excerpt(&self.spec.mask, &why));
                if may_be_other && self.try_other_era(&refused, now) {
                    return MessageOutcome::Nothing;
                }
                if self.handshake.late_request.is_some() {
                    self.handshake.second_refusal = Some(refused);
                    return MessageOutcome::Nothing;
                }
                self.fail_handshake(refused)
            }
        }
    }

    fn on_late_answer(&mut self, answer: Result<&RawValue, CallError>, now: Instant) -> MessageOutcome {
        // The first message on a pipe fixes its era, so the server refuses the other request, or will.
        let opened = answer
            .map_err(|error| error.to_string())
            .and_then(|result| parse_discover_result(result).map_err(|no| no.why));
        match (opened, self.handshake.second_refusal.take()) {
            (Ok((server, offers)), _) => {
                self.era = Era::Stateless;
                self.complete_handshake(server, offers, now);
                MessageOutcome::Initialized
            }
            (Err(_), Some(refused)) => self.fail_handshake(refused),
            (Err(_), None) => MessageOutcome::Nothing,
        }
    }

    /// Handles the failed exchange of a handshake.
    pub fn on_handshake_failed(&mut self, failure: ExchangeFailure, now: Instant) -> MessageOutcome {
        let may_be_other = match self.era {
            Era::Sessions => era::may_be_stateless(&failure.kind),
            // Some servers fail with an internal error on unknown methods.
            Era::Stateless => era::is_refusal(&failure.kind) || matches!(failure.kind, FailureKind::ServerError { .. }),
        };
        let refused = HandshakeRefusal::Failed(failure);
        if may_be_other && self.try_other_era(&refused, now) {
            return MessageOutcome::Nothing;
        }
        if may_be_other { self.fail_handshake(refused) } else { MessageOutcome::HandshakeRefused(refused) }
    }

    pub(crate) fn on_handshake_timeout(
        &mut self,
        id: u64,
        pending: PendingRequest,
        now: Instant,
    ) -> Option<PassedDeadline> {
        // Returns `None` if the other era is tried instead.
        if self.handshake.late_request.take_if(|late| *late == id).is_some() {
            return self.handshake.second_refusal.take().map(PassedDeadline::HandshakeRefused);
        }
        if self.era == Era::Stateless {
            let silent = HandshakeRefusal::Rejected("no answer to server/discover".to_owned());
            let until = self.handshake.deadline;
            if self.try_other_era(&silent, now) {
                if let Some(deadline) = until.filter(|_| !O::REPEATS) {
                    self.calls.insert(id, PendingRequest { deadline, ..pending });
                    self.handshake.late_request = Some(id);
                }
                return None;
            }
            // The server is reachable and has already refused the other era; that explains more than a timeout.
            if let Some(other) = self.handshake.first_refusal.take() {
                return Some(PassedDeadline::HandshakeRefused(other));
            }
        }
        Some(PassedDeadline::Handshake)
    }

    fn complete_handshake(&mut self, server: ServerInfo, offers: OfferedLists, now: Instant) {
        let ServerInfo { name, version, protocol, .. } = &server;
        tracing::debug!(
            instance = %self.spec.name, server = masked_excerpt(&self.spec.mask, name),
            version = masked_excerpt(&self.spec.mask, version), %protocol, "initialized"
        );
        self.handshake = HandshakeProgress::default();
        // The request of the other era may still be open.
        self.calls.forget_handshakes();
        if self.era == Era::Sessions {
            let words = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;
            self.outlet.send_initialized(protocol, &[words]);
        }
        let server = Arc::new(server);
        self.enter_session(server.clone(), offers, now, SessionEvent::Initialized(server), now);
    }

    /// Begins the session with a server whose handshake was completed at `initialized_at`, and reports `event`.
    pub(crate) fn enter_session(
        &mut self,
        server: Arc<ServerInfo>,
        offers: OfferedLists,
        initialized_at: Instant,
        event: SessionEvent,
        now: Instant,
    ) {
        self.gate.set_version(&server.protocol);
        self.initialized_at = Some(initialized_at);
        self.lists.offers = offers;
        self.host.on_server_proved();
        self.record_server(&server, now);
        self.server = Some(server);
        self.host.report(event);
        self.host.on_session_started();
        // Listens before it reads the lists, so that changes during the read are reported.
        self.listen(now);
        if self.lists.reads_by_itself {
            self.read_lists(now);
        }
    }
}

/// Reads the complete result of a handshake.
pub(crate) fn parse_handshake_result(era: Era, result: &RawValue) -> Result<(ServerInfo, OfferedLists), String> {
    parse_opening_result(era, result).map_err(|mismatch| mismatch.why)
}

fn parse_opening_result(era: Era, result: &RawValue) -> Result<(ServerInfo, OfferedLists), HandshakeMismatch> {
    match era {
        Era::Sessions => parse_initialize_result(result),
        Era::Stateless => parse_discover_result(result),
    }
}

fn parse_initialize_result(result: &RawValue) -> Result<(ServerInfo, OfferedLists), HandshakeMismatch> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct InitializeResult {
        protocol_version: String,
        capabilities: Box<RawValue>,
        server_info: ServerIdentity,
        #[serde(default)]
        instructions: Option<String>,
    }
    let no_answer = |why: String| HandshakeMismatch { why, may_be_other: false };
    let InitializeResult { protocol_version: protocol, capabilities, server_info, instructions } =
        serde_json::from_str(result.get())
            .map_err(|error| no_answer(format!("invalid response to initialize: {error}")))?;
    if !SESSION_VERSIONS.contains(&&*protocol) {
        let why = format!("the server speaks protocol version {protocol}, which is not supported");
        return Err(HandshakeMismatch { may_be_other: protocol == STATELESS_VERSION, why });
    }
    let offers = serde_json::from_str(capabilities.get())
        .map_err(|error| no_answer(format!("invalid response to initialize: capabilities: {error}")))?;
    let ServerIdentity { name, version } = server_info;
    let (era, greeting) = (Era::Sessions, result.to_owned());
    Ok((ServerInfo { name, version, era, protocol, capabilities, instructions, handshake_result: greeting }, offers))
}

#[derive(Default, Deserialize)]
struct ServerIdentity {
    name: String,
    version: String,
}

fn parse_discover_result(result: &RawValue) -> Result<(ServerInfo, OfferedLists), HandshakeMismatch> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct DiscoverResult {
        supported_versions: Vec<String>,
        capabilities: Box<RawValue>,
        #[serde(default)]
        instructions: Option<String>,
    }
    let no_answer = |why: String| HandshakeMismatch { why, may_be_other: true };
    let malformed = |why: String| no_answer(format!("invalid response to server/discover: {why}"));
    if !matches!(member(result.get(), "resultType"), None | Some(r#""complete""#)) {
        return Err(malformed("`resultType` is not \"complete\"".to_owned()));
    }
    let DiscoverResult { supported_versions, capabilities, instructions } =
        serde_json::from_str(result.get()).map_err(|error| malformed(error.to_string()))?;
    if !supported_versions.iter().any(|version| version == STATELESS_VERSION) {
        let known = supported_versions.join(", ");
        return Err(no_answer(format!("the server speaks only unsupported protocol versions: {known}")));
    }
    let offers =
        serde_json::from_str(capabilities.get()).map_err(|error| malformed(format!("capabilities: {error}")))?;
    let info = member(result.get(), "_meta").and_then(|meta| member(meta, SERVER_INFO));
    // The server's identity is optional.
    let info = info.and_then(|info| serde_json::from_str(info).ok());
    let ServerIdentity { name, version } = info.unwrap_or_default();
    let (era, protocol, greeting) = (Era::Stateless, STATELESS_VERSION.to_owned(), result.to_owned());
    Ok((ServerInfo { name, version, era, protocol, capabilities, instructions, handshake_result: greeting }, offers))
}

pub(crate) fn discovered_server(result: &RawValue) -> Option<Arc<ServerInfo>> {
    parse_discover_result(result).ok().map(|(server, _)| Arc::new(server))
}
