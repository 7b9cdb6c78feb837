//! Sessions that represent a stateless client for one request or subscription. Messages on behalf of the request find
//! the session by its number; clients cannot refer to it. Questions to it are part of the response, and the client
//! repeats its request with the answers.

use mcp_satellite_protocol::error_code::{INTERNAL_ERROR, SERVER_ERROR};
use mcp_satellite_protocol::meta::SUBSCRIPTION_ID;
use mcp_satellite_protocol::method;
use std::sync::Arc;

use bytes::Bytes;
use mcp_satellite_actors::audience::{ClientQuestion, SessionSource};
use mcp_satellite_actors::byte_budget::ByteShare;
use mcp_satellite_protocol::rpc::{RpcMessage, join_parts};

use super::super::answer::{CallAnswer, RpcError};
use super::super::endpoint_id::EndpointId;
use super::super::era::{can_require_input, request_meta, translation};
use super::super::shared_session::McpLogLevel;
use super::super::stream::SESSION_STREAM;
use super::super::subscription::SubscriptionFilter;
use super::super::tools::raw::{JsonMembers, json_string};
use super::{ClientLifetime, ClientSession, SESSION_ENDED, SentQuestion, SessionState};

#[derive(Debug)]
pub(super) struct StatelessSubscription {
    // Id of the request, as JSON text.
    id: Arc<str>,
    filter: SubscriptionFilter,
    _share: ByteShare,
}

impl SessionState {
    pub(super) fn store_question(
        &mut self,
        source: SessionSource,
        question: ClientQuestion,
        mut share: ByteShare,
    ) -> Option<ClientQuestion> {
        if !share.try_take(question.message().text().len()) {
            return Some(question);
        }
        self.questions_sent += 1;
        let sent = SentQuestion { source, question, call: None, position: (SESSION_STREAM, 0), _share: Some(share) };
        self.questions.insert(self.questions_sent, sent);
        None
    }

    pub(super) fn final_answer(&self) -> CallAnswer {
        match &self.subscription {
            Some(StatelessSubscription { id, .. }) => {
                let meta = format!("{{{}:{id}}}", json_string(SUBSCRIPTION_ID));
                CallAnswer::Result(format!(r#"{{"resultType":"complete","_meta":{meta}}}"#))
            }
            None if self.is_stateless => CallAnswer::Error(RpcError::new(INTERNAL_ERROR, SESSION_ENDED)),
            None => CallAnswer::Error(RpcError::new(SERVER_ERROR, SESSION_ENDED)),
        }
    }
}

fn input_key(number: u64) -> String {
    format!("input-{number}")
}

impl ClientSession {
    pub fn is_stateless(&self) -> bool {
        self.facts.lifetime != ClientLifetime::Session
    }

    /// Passes a server's message on: on behalf of `call`, if that is a call of this client. A stateless session
    /// receives only messages that belong to its request or match its subscription.
    pub fn deliver(&self, call: Option<u64>, message: &RpcMessage) {
        let method = message.method().unwrap_or_default();
        match &self.facts.lifetime {
            ClientLifetime::Session => self.send(call, &[message.text()]),
            ClientLifetime::Request { level, .. } => {
                let is_delivered = match method {
                    method::LOG_MESSAGE => {
                        level.is_some_and(|from| McpLogLevel::from_message(message).is_none_or(|level| from <= level))
                    }
                    method::RESOURCE_UPDATED | method::TASK_STATUS => false,
                    method::ELICITATION_COMPLETE => false,
                    other => !other.ends_with("/list_changed"),
                };
                if is_delivered && call.is_some() {
                    self.send(call, &[message.text()]);
                }
            }
            ClientLifetime::Listening { level } => {
                // Servers log on behalf of requests; log messages for a subscriber come from the satellite and only on
                // `/mcp`.
                let is_notice = method == method::LOG_MESSAGE
                    && self.facts.endpoint == EndpointId::Tools
                    && level.is_some_and(|from| McpLogLevel::from_message(message).is_none_or(|level| from <= level));
                let receives =
                    |subscription: &&StatelessSubscription| is_notice || subscription.filter.is_subscribed_to(message);
                let mut state = self.state();
                let Some(subscription) = state.subscription.as_ref().filter(receives) else { return };
                let Some(tagged) = translation::tag_with_subscription(message, &subscription.id) else { return };
                let outcome = state.send(None, &[&tagged]);
                drop(state);
                self.end_if_slow(outcome);
            }
        }
    }

    pub fn set_progress_token(&self, token: Option<&str>) {
        self.state().progress_token = token.map(Into::into);
    }

    pub fn deliver_progress(&self, call: u64, message: &RpcMessage) {
        if !self.is_stateless() {
            return self.send(Some(call), &[message.text()]);
        }
        let mut state = self.state();
        let Some(token) = state.progress_token.clone() else { return };
        let outcome = state.send(Some(call), &message.with_token(&token));
        drop(state);
        self.end_if_slow(outcome);
    }

    pub fn check_can_answer(&self, question: &RpcMessage) -> Result<(), String> {
        let (method, client) = (question.method().unwrap_or_default(), &self.facts.client);
        let why = match &self.facts.lifetime {
            ClientLifetime::Session if client.can_answer(method) => return Ok(()),
            ClientLifetime::Session => format!("the client does not support `{method}`"),
            ClientLifetime::Request { method: request_method, .. } if can_require_input(request_method) => {
                match request_meta::missing_capability(client, question) {
                    None => return Ok(()),
                    Some(what) => format!("the client does not support {what}"),
                }
            }
            ClientLifetime::Request { method: request_method, .. } => {
                format!("a server cannot send requests to the client during `{request_method}`")
            }
            ClientLifetime::Listening { .. } => "the client only receives notifications".to_owned(),
        };
        Err(why)
    }

    /// Starts a subscription by sending the acknowledgement. Returns false if there is no memory for the filter.
    #[must_use]
    pub fn acknowledge_subscription(&self, id: &Arc<str>, filter: SubscriptionFilter) -> bool {
        let params =
            format!(r#"{{"_meta":{{{}:{id}}},"notifications":{}}}"#, json_string(SUBSCRIPTION_ID), filter.to_json());
        let parts = [r#"{"jsonrpc":"2.0","method":"notifications/subscriptions/acknowledged","params":"#, &params, "}"];
        let mut share = self.budget.share();
        if !share.try_take(params.len()) {
            return false;
        }
        let mut state = self.state();
        let outcome = state.send(None, &parts);
        state.subscription = Some(StatelessSubscription { id: id.clone(), filter, _share: share });
        drop(state);
        self.end_if_slow(outcome);
        true
    }

    pub async fn wait_for_question(&self) {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            if !self.state().questions.is_empty() {
                return;
            }
            changed.await;
        }
    }

    pub fn input_requests(&self) -> String {
        let state = self.state();
        let mut sent: Vec<_> = state.questions.iter().collect();
        sent.sort_unstable_by_key(|(number, _)| **number);
        let request = |(number, sent): (&u64, &SentQuestion)| {
            let message = sent.question.message();
            let method = json_string(message.method().unwrap_or_default());
            let params = message.params().unwrap_or("{}");
            format!(r#""{}":{{"method":{method},"params":{params}}}"#, input_key(*number))
        };
        let requests: Vec<String> = sent.into_iter().map(request).collect();
        format!("{{{}}}", requests.join(","))
    }

    /// Passes the answers of a repeated request to the servers. Malformed answers and those to unknown questions are
    /// ignored.
    pub(crate) fn accept_input_responses(&self, responses: &JsonMembers<'_>) {
        for (name, value) in responses.iter().filter(|(_, value)| value.starts_with('{')) {
            let number = name.strip_prefix("input-").and_then(|number| number.parse().ok());
            let sent = number.and_then(|number: u64| self.state().questions.remove(&number));
            let Some(sent) = sent else { continue };
            let answer = join_parts(&[r#"{"jsonrpc":"2.0","id":0,"result":"#, value, "}"]);
            // The text is derived from a valid message and stays valid.
            if let Ok(answer) = RpcMessage::parse(answer) {
                sent.question.answer(answer);
            }
        }
    }

    pub fn decline_questions(&self, why: &str) {
        let questions = std::mem::take(&mut self.state().questions);
        for sent in questions.into_values() {
            sent.question.decline(INTERNAL_ERROR, why);
        }
    }
}

/// Returns a message of the satellite, to be sent like those of servers.
pub(crate) fn own_message(text: &'static str) -> Option<RpcMessage> {
    RpcMessage::parse(Bytes::from_static(text.as_bytes())).ok()
}
