//! The log levels and subscriptions that the clients of one instance requested, and those that its server has
//! confirmed. The clients share the server's one session: each client has its own log level and subscriptions, and the
//! server gets the lowest level and all subscriptions. Pure: no clock, no socket.

use std::collections::{BTreeMap, BTreeSet};

use mcp_satellite_actors::model::ids::RunNumber;
use mcp_satellite_protocol::method;
use mcp_satellite_protocol::rpc::{MessageKind, RpcMessage, member};
use serde::Deserialize;
use serde::de::DeserializeOwned;

// Maximum subscriptions of one client. They are kept and repeated to every run of the server.
pub(super) const SUBSCRIPTIONS_MAX: usize = 1024;
// Maximum length of a subscribed URI in bytes.
pub(super) const URI_BYTES_MAX: usize = 8 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize, strum::IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum McpLogLevel {
    Debug,
    Info,
    Notice,
    Warning,
    Error,
    Critical,
    Alert,
    Emergency,
}

impl McpLogLevel {
    /// Returns the level in the params of `logging/setLevel` or of a log notification; `None` if it is unknown.
    pub(super) fn from_message(message: &RpcMessage) -> Option<Self> {
        param(message, "level")
    }

    pub(super) fn as_str(self) -> &'static str {
        self.into()
    }
}

pub(super) fn uri_of(message: &RpcMessage) -> Option<String> {
    param(message, "uri")
}

/// Returns true if a subscription to `of` includes `uri`, because they are equal or `uri` is a part of it.
pub(super) fn covers(of: &str, uri: &str) -> bool {
    uri.strip_prefix(of).is_some_and(|rest| rest.is_empty() || of.ends_with('/') || rest.starts_with(['/', '?', '#']))
}

fn param<T: DeserializeOwned>(message: &RpcMessage, name: &str) -> Option<T> {
    serde_json::from_str(member(message.params()?, name)?).ok()
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum SharedSessionRequest {
    Level(McpLogLevel),
    Subscribe(String),
    Unsubscribe(String),
}

impl SharedSessionRequest {
    /// Reads a request; `None` for other methods. Malformed params are left to the server to reject.
    pub(super) fn from_message(message: &RpcMessage) -> Option<Self> {
        if message.kind() != MessageKind::Request {
            return None;
        }
        match message.method()? {
            method::SET_LOG_LEVEL => McpLogLevel::from_message(message).map(Self::Level),
            method::RESOURCES_SUBSCRIBE => uri_of(message).map(Self::Subscribe),
            method::RESOURCES_UNSUBSCRIBE => uri_of(message).map(Self::Unsubscribe),
            _ => None,
        }
    }

    pub(super) fn method(&self) -> &'static str {
        match self {
            Self::Level(_) => method::SET_LOG_LEVEL,
            Self::Subscribe(_) => method::RESOURCES_SUBSCRIBE,
            Self::Unsubscribe(_) => method::RESOURCES_UNSUBSCRIBE,
        }
    }

    pub(super) fn params(&self) -> serde_json::Value {
        match self {
            Self::Level(level) => serde_json::json!({ "level": level.as_str() }),
            Self::Subscribe(uri) | Self::Unsubscribe(uri) => serde_json::json!({ "uri": uri }),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RequestDisposition {
    // The server does so already for another client, so no request is necessary.
    Granted,
    // The client's own request must be sent to the server, and its outcome reported.
    Pending(PendingSessionRequest),
    Refused(SubscriptionLimitError),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum SubscriptionLimitError {
    #[error("this client has {SUBSCRIPTIONS_MAX} subscriptions, the maximum; unsubscribe from one first")]
    Subscriptions,
    #[error("the URI of the subscription is longer than {URI_BYTES_MAX} bytes")]
    Uri,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PendingSessionRequest {
    client: u64,
    request: SharedSessionRequest,
    // The client's level before the request, restored if the request fails.
    previous_level: Option<McpLogLevel>,
    // The run that accepted calls when the request was sent.
    run: Option<RunNumber>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SessionRequestOutcome {
    // The server confirmed it. The value is the run that accepted calls at that time.
    Done(Option<RunNumber>),
    Refused,
    // No answer, so the server may or may not have processed the request.
    Unknown,
}

#[derive(Debug, Default)]
struct ResourceSubscription {
    clients: BTreeSet<u64>,
    pending: usize,
}

#[derive(Debug, Default)]
struct RunSettings {
    run: Option<RunNumber>,
    level: Option<McpLogLevel>,
    uris: BTreeSet<String>,
}

#[derive(Debug, Default)]
pub(super) struct SharedSessionState {
    levels: BTreeMap<u64, McpLogLevel>,
    subscriptions: BTreeMap<String, ResourceSubscription>,
    counts: BTreeMap<u64, usize>,
    run_settings: RunSettings,
}

impl SharedSessionState {
    pub(super) fn record_request(
        &mut self,
        client: u64,
        shared_request: &SharedSessionRequest,
        run: Option<RunNumber>,
    ) -> RequestDisposition {
        self.set_run(run);
        let mut before = None;
        let granted = match shared_request {
            SharedSessionRequest::Level(level) => {
                before = self.levels.insert(client, *level);
                let others = self.levels.iter().filter(|(other, _)| **other != client);
                let lowest = others.map(|(_, level)| *level).min();
                lowest.is_some_and(|lowest| {
                    lowest <= *level && self.run_settings.level.is_some_and(|sent| sent <= lowest)
                })
            }
            SharedSessionRequest::Subscribe(uri) => {
                if let Some(too_much) = self.exceeded_limit(client, uri) {
                    return RequestDisposition::Refused(too_much);
                }
                let subscription = self.subscriptions.entry(uri.clone()).or_default();
                let others = subscription.clients.iter().any(|other| *other != client);
                if subscription.clients.insert(client) {
                    *self.counts.entry(client).or_default() += 1;
                }
                others && self.run_settings.uris.contains(uri)
            }
            SharedSessionRequest::Unsubscribe(uri) => {
                self.unsubscribe(client, uri);
                self.has_subscribers(uri)
            }
        };
        if granted {
            return RequestDisposition::Granted;
        }
        if let SharedSessionRequest::Subscribe(uri) = shared_request
            && let Some(subscription) = self.subscriptions.get_mut(uri)
        {
            subscription.pending += 1;
        }
        RequestDisposition::Pending(PendingSessionRequest {
            client,
            request: shared_request.clone(),
            previous_level: before,
            run,
        })
    }

    pub(super) fn record_outcome(&mut self, pending_request: PendingSessionRequest, outcome: SessionRequestOutcome) {
        let PendingSessionRequest { client, request: shared_request, previous_level: before, run } = pending_request;
        if let SharedSessionRequest::Subscribe(uri) = &shared_request
            && let Some(subscription) = self.subscriptions.get_mut(uri)
        {
            subscription.pending -= 1;
            self.remove_if_unused(uri);
        }
        let same_run = |this: &mut Self, now: Option<RunNumber>| {
            this.set_run(now);
            // If the run has changed, it is unknown which run received the request.
            now.is_some() && now == run
        };
        match (outcome, shared_request) {
            (SessionRequestOutcome::Done(now), SharedSessionRequest::Level(level)) => {
                if same_run(self, now) {
                    self.run_settings.level = Some(level);
                }
            }
            (SessionRequestOutcome::Done(now), SharedSessionRequest::Subscribe(uri)) => {
                if same_run(self, now) {
                    self.run_settings.uris.insert(uri);
                }
            }
            (SessionRequestOutcome::Done(now), SharedSessionRequest::Unsubscribe(uri)) => {
                self.set_run(now);
                self.run_settings.uris.remove(&uri);
            }
            (SessionRequestOutcome::Refused | SessionRequestOutcome::Unknown, SharedSessionRequest::Level(level)) => {
                if self.levels.get(&client) == Some(&level) {
                    match before {
                        Some(before) => self.levels.insert(client, before),
                        None => self.levels.remove(&client),
                    };
                }
                // The server's level is now unknown.
                if outcome == SessionRequestOutcome::Unknown && self.run_settings.run == run {
                    self.run_settings.level = None;
                }
            }
            (SessionRequestOutcome::Refused, SharedSessionRequest::Subscribe(uri)) => self.unsubscribe(client, &uri),
            (SessionRequestOutcome::Unknown, SharedSessionRequest::Subscribe(uri)) => {
                self.unsubscribe(client, &uri);
                // Counts as subscribed, so that the next `owed` unsubscribes from it.
                if self.run_settings.run == run && run.is_some() {
                    self.run_settings.uris.insert(uri);
                }
            }
            // The server still counts as subscribed.
            (SessionRequestOutcome::Refused | SessionRequestOutcome::Unknown, SharedSessionRequest::Unsubscribe(_)) => {
            }
        }
    }

    pub(super) fn remove_client(&mut self, client: u64) {
        self.levels.remove(&client);
        let uris: Vec<String> = self.subscriptions.keys().cloned().collect();
        for uri in uris {
            self.unsubscribe(client, &uri);
        }
    }

    /// Records the run that accepts calls now. A new run has received no settings yet.
    pub(super) fn set_run(&mut self, run: Option<RunNumber>) {
        if run.is_some() && self.run_settings.run != run {
            self.run_settings = RunSettings { run, ..RunSettings::default() };
        }
    }

    pub(super) fn end_run(&mut self, run: RunNumber) {
        if self.run_settings.run == Some(run) {
            self.run_settings = RunSettings::default();
        }
    }

    /// Returns the next request that the satellite itself must send to the server, and records it as sent.
    pub(super) fn take_owed_request(&mut self) -> Option<SharedSessionRequest> {
        let lowest = self.levels.values().min().copied();
        if let Some(level) = lowest.filter(|level| self.run_settings.level != Some(*level)) {
            self.run_settings.level = Some(level);
            return Some(SharedSessionRequest::Level(level));
        }
        if let Some(uri) = self.run_settings.uris.iter().find(|uri| !self.has_subscribers(uri)).cloned() {
            self.run_settings.uris.remove(&uri);
            return Some(SharedSessionRequest::Unsubscribe(uri));
        }
        // A client's own request for this resource is on its way.
        let missing =
            |(uri, of): &(&String, &ResourceSubscription)| of.pending == 0 && !self.run_settings.uris.contains(*uri);
        let uri = self.subscriptions.iter().find(missing).map(|(uri, _)| uri.clone())?;
        self.run_settings.uris.insert(uri.clone());
        Some(SharedSessionRequest::Subscribe(uri))
    }

    /// Records that a request from `take_owed_request` did not reach this run, so that it is returned again.
    pub(super) fn record_not_sent(&mut self, shared_request: &SharedSessionRequest, run: RunNumber) {
        if self.run_settings.run != Some(run) {
            return;
        }
        match shared_request {
            // Another level may have been sent meanwhile.
            SharedSessionRequest::Level(level) => {
                self.run_settings.level = self.run_settings.level.filter(|sent| sent != level);
            }
            SharedSessionRequest::Subscribe(uri) => {
                self.run_settings.uris.remove(uri);
            }
            SharedSessionRequest::Unsubscribe(uri) => {
                self.run_settings.uris.insert(uri.clone());
            }
        }
    }

    /// Records an unsubscription that the satellite sent. A client may have subscribed before it took effect, so the
    /// server no longer counts as subscribed.
    pub(super) fn record_unsubscribed(&mut self, uri: &str) {
        self.run_settings.uris.remove(uri);
    }

    pub(super) fn has_subscriptions(&self) -> bool {
        self.subscriptions.values().any(|subscription| !subscription.clients.is_empty())
    }

    /// Returns true if a client receives log messages of this level. A client without a level receives all.
    pub(super) fn is_level_enabled(&self, client: u64, level: Option<McpLogLevel>) -> bool {
        match (self.levels.get(&client), level) {
            (Some(from), Some(level)) => *from <= level,
            (None, _) | (_, None) => true,
        }
    }

    pub(super) fn subscribers(&self, uri: &str) -> BTreeSet<u64> {
        let subscriptions = self.subscriptions.iter().filter(|(of, _)| covers(of, uri));
        subscriptions.flat_map(|(_, subscription)| subscription.clients.iter().copied()).collect()
    }

    /// Sets the level of a stateless client. The server receives it through `take_owed_request`, not through a client's
    /// request.
    pub(super) fn set_level(&mut self, client: u64, level: McpLogLevel) {
        self.levels.insert(client, level);
    }

    fn has_subscribers(&self, uri: &str) -> bool {
        self.subscriptions.get(uri).is_some_and(|subscription| !subscription.clients.is_empty())
    }

    fn exceeded_limit(&self, client: u64, uri: &str) -> Option<SubscriptionLimitError> {
        if uri.len() > URI_BYTES_MAX {
            return Some(SubscriptionLimitError::Uri);
        }
        let has = |of: &ResourceSubscription| of.clients.contains(&client);
        let is_full = self.counts.get(&client).is_some_and(|count| *count >= SUBSCRIPTIONS_MAX);
        (is_full && !self.subscriptions.get(uri).is_some_and(has)).then_some(SubscriptionLimitError::Subscriptions)
    }

    fn unsubscribe(&mut self, client: u64, uri: &str) {
        let Some(subscription) = self.subscriptions.get_mut(uri) else { return };
        if subscription.clients.remove(&client)
            && let Some(count) = self.counts.get_mut(&client)
        {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&client);
            }
        }
        self.remove_if_unused(uri);
    }

    fn remove_if_unused(&mut self, uri: &str) {
        if self.subscriptions.get(uri).is_some_and(|of| of.clients.is_empty() && of.pending == 0) {
            self.subscriptions.remove(uri);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Option<RunNumber> = Some(RunNumber(1));
    const TWO: Option<RunNumber> = Some(RunNumber(2));

    fn subscribe(uri: &str) -> SharedSessionRequest {
        SharedSessionRequest::Subscribe(uri.to_owned())
    }

    fn unsubscribe(uri: &str) -> SharedSessionRequest {
        SharedSessionRequest::Unsubscribe(uri.to_owned())
    }

    fn record_pending(
        state: &mut SharedSessionState,
        client: u64,
        shared_request: &SharedSessionRequest,
        run: Option<RunNumber>,
    ) -> PendingSessionRequest {
        match state.record_request(client, shared_request, run) {
            RequestDisposition::Pending(pending_request) => pending_request,
            other => panic!("{shared_request:?} of {client} is not sent to the server: {other:?}"),
        }
    }

    fn record_done(
        state: &mut SharedSessionState,
        client: u64,
        shared_request: &SharedSessionRequest,
        run: Option<RunNumber>,
    ) {
        let pending_request = record_pending(state, client, shared_request, run);
        state.record_outcome(pending_request, SessionRequestOutcome::Done(run));
    }

    fn take_owed_requests(state: &mut SharedSessionState) -> Vec<SharedSessionRequest> {
        std::iter::from_fn(|| state.take_owed_request()).collect()
    }

    #[test]
    fn the_first_subscriber_subscribes_and_the_last_one_unsubscribes() {
        let mut state = SharedSessionState::default();
        record_done(&mut state, 1, &subscribe("a"), ONE);
        assert_eq!(state.record_request(2, &subscribe("a"), ONE), RequestDisposition::Granted);
        // A repeated subscription is answered by the server, as if this client were alone.
        record_done(&mut state, 3, &subscribe("b"), ONE);
        record_done(&mut state, 3, &subscribe("b"), ONE);
        assert_eq!(state.subscribers("a"), [1, 2].into());
        assert_eq!(state.record_request(1, &unsubscribe("a"), ONE), RequestDisposition::Granted);
        assert!(state.has_subscriptions());
        record_done(&mut state, 2, &unsubscribe("a"), ONE);
        assert_eq!(take_owed_requests(&mut state), []);
        state.remove_client(3);
        assert_eq!(take_owed_requests(&mut state), [unsubscribe("b")]);
        assert!(!state.has_subscriptions());
    }

    #[test]
    fn a_subscription_covers_sub_resources_but_not_siblings() {
        let mut state = SharedSessionState::default();
        record_done(&mut state, 1, &subscribe("file:///a"), ONE);
        record_done(&mut state, 2, &subscribe("file:///"), ONE);
        for (uri, subscribers) in [
            ("file:///a", vec![1, 2]),
            ("file:///a/b", vec![1, 2]),
            ("file:///a?q", vec![1, 2]),
            ("file:///ab", vec![2]),
            ("file:/", vec![]),
        ] {
            assert_eq!(state.subscribers(uri), subscribers.into_iter().collect(), "{uri}");
        }
    }

    #[test]
    fn a_new_run_gets_all_requests_again_except_those_in_progress() {
        let mut state = SharedSessionState::default();
        record_done(&mut state, 1, &subscribe("a"), ONE);
        record_done(&mut state, 1, &SharedSessionRequest::Level(McpLogLevel::Info), ONE);
        state.end_run(RunNumber(1));
        let asking = record_pending(&mut state, 2, &subscribe("b"), None);
        // There is no run, so the first request starts one.
        let again = record_pending(&mut state, 2, &subscribe("a"), None);
        state.set_run(TWO);
        assert_eq!(take_owed_requests(&mut state), [SharedSessionRequest::Level(McpLogLevel::Info)]);
        state.record_outcome(again, SessionRequestOutcome::Done(TWO));
        // It is unknown which run received it, so this run gets it, perhaps twice.
        assert_eq!(take_owed_requests(&mut state), [subscribe("a")]);
        state.record_outcome(asking, SessionRequestOutcome::Refused);
        assert_eq!(take_owed_requests(&mut state), []);
        assert_eq!(state.subscribers("b"), [].into());
        // An outdated end of a run changes nothing.
        state.end_run(RunNumber(1));
        assert_eq!(take_owed_requests(&mut state), []);
    }

    #[test]
    fn a_possibly_executed_subscription_without_a_client_is_undone() {
        let mut state = SharedSessionState::default();
        let asking = record_pending(&mut state, 1, &subscribe("a"), ONE);
        state.remove_client(1);
        state.record_outcome(asking, SessionRequestOutcome::Unknown);
        assert_eq!(take_owed_requests(&mut state), [unsubscribe("a")]);

        // A client that left before the answer.
        let asking = record_pending(&mut state, 1, &subscribe("a"), ONE);
        state.remove_client(1);
        state.record_outcome(asking, SessionRequestOutcome::Done(ONE));
        assert_eq!(take_owed_requests(&mut state), [unsubscribe("a")]);

        // A client that subscribes while the unsubscription is on its way may have been first.
        record_done(&mut state, 2, &subscribe("a"), ONE);
        state.record_unsubscribed("a");
        assert_eq!(take_owed_requests(&mut state), [subscribe("a")]);
    }

    #[test]
    fn an_unsent_request_is_owed_again() {
        let mut state = SharedSessionState::default();
        record_done(&mut state, 1, &subscribe("a"), ONE);
        record_done(&mut state, 2, &subscribe("b"), ONE);
        record_done(&mut state, 2, &SharedSessionRequest::Level(McpLogLevel::Error), ONE);
        state.remove_client(1);
        state.set_run(TWO);
        state.set_run(ONE);
        for expected in [SharedSessionRequest::Level(McpLogLevel::Error), subscribe("b")] {
            for _ in 0..2 {
                assert_eq!(state.take_owed_request().as_ref(), Some(&expected));
                state.record_not_sent(&expected, RunNumber(1));
            }
            assert_eq!(state.take_owed_request(), Some(expected));
        }
        state.remove_client(2);
        assert_eq!(state.take_owed_request(), Some(unsubscribe("b")));
        state.record_not_sent(&unsubscribe("b"), RunNumber(1));
        assert_eq!(take_owed_requests(&mut state), [unsubscribe("b")]);
        // Another run does not have this subscription.
        state.record_not_sent(&unsubscribe("b"), RunNumber(2));
        assert_eq!(take_owed_requests(&mut state), []);
    }

    #[test]
    fn the_server_has_the_lowest_log_level_and_each_client_its_own() {
        let mut state = SharedSessionState::default();
        let asking = record_pending(&mut state, 1, &SharedSessionRequest::Level(McpLogLevel::Error), ONE);
        // A request that is still on its way may be refused, so the second client's request is sent, too.
        let other = record_pending(&mut state, 3, &SharedSessionRequest::Level(McpLogLevel::Error), ONE);
        for pending_request in [asking, other] {
            state.record_outcome(pending_request, SessionRequestOutcome::Done(ONE));
        }
        record_done(&mut state, 2, &SharedSessionRequest::Level(McpLogLevel::Debug), ONE);
        assert_eq!(
            state.record_request(3, &SharedSessionRequest::Level(McpLogLevel::Info), ONE),
            RequestDisposition::Granted
        );
        assert_eq!(take_owed_requests(&mut state), []);
        let enabled_clients = |state: &SharedSessionState, level| {
            (1..=4).filter(|client| state.is_level_enabled(*client, level)).collect::<Vec<_>>()
        };
        assert_eq!(enabled_clients(&state, Some(McpLogLevel::Debug)), [2, 4]);
        assert_eq!(enabled_clients(&state, Some(McpLogLevel::Info)), [2, 3, 4]);
        assert_eq!(enabled_clients(&state, Some(McpLogLevel::Emergency)), [1, 2, 3, 4]);
        assert_eq!(enabled_clients(&state, None), [1, 2, 3, 4]);
        // The client with the lowest level raises it: the other levels count at once.
        assert_eq!(
            state.record_request(2, &SharedSessionRequest::Level(McpLogLevel::Alert), ONE),
            RequestDisposition::Granted
        );
        assert_eq!(take_owed_requests(&mut state), [SharedSessionRequest::Level(McpLogLevel::Info)]);
        state.remove_client(3);
        assert_eq!(take_owed_requests(&mut state), [SharedSessionRequest::Level(McpLogLevel::Error)]);
        // A refused level does not count.
        let asking = record_pending(&mut state, 2, &SharedSessionRequest::Level(McpLogLevel::Debug), ONE);
        state.record_outcome(asking, SessionRequestOutcome::Refused);
        assert_eq!(enabled_clients(&state, Some(McpLogLevel::Error)), [1, 3, 4]);
        assert_eq!(take_owed_requests(&mut state), []);
    }

    #[test]
    fn only_valid_session_requests_are_recognised() {
        let shared_request = |text: &str| {
            RpcMessage::parse(text.to_owned().into()).ok().as_ref().and_then(SharedSessionRequest::from_message)
        };
        let request = |method: &str, params: &str| {
            shared_request(&format!(r#"{{"jsonrpc":"2.0","id":1,"method":"{method}","params":{params}}}"#))
        };
        assert_eq!(
            request("logging/setLevel", r#"{"level":"notice","x":1e400}"#),
            Some(SharedSessionRequest::Level(McpLogLevel::Notice))
        );
        assert_eq!(request("logging/setLevel", r#"{"level":"loud"}"#), None);
        assert_eq!(request("resources/subscribe", r#"{"uri":"\u0061"}"#), Some(subscribe("a")));
        assert_eq!(request("resources/unsubscribe", r#"{"uri":"a"}"#), Some(unsubscribe("a")));
        assert_eq!(request("resources/read", r#"{"uri":"a"}"#), None);
        assert_eq!(shared_request(r#"{"jsonrpc":"2.0","method":"resources/subscribe","params":{"uri":"a"}}"#), None);
        for shared_request in [SharedSessionRequest::Level(McpLogLevel::Critical), subscribe("a"), unsubscribe("a")] {
            assert_eq!(request(shared_request.method(), &shared_request.params().to_string()), Some(shared_request));
        }
    }
}
