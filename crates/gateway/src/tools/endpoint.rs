//! The endpoint `/mcp`: an MCP server of the satellite itself with six tools.

use mcp_satellite_protocol::era::NEWEST_SESSION_VERSION;
use mcp_satellite_protocol::error_code::{INVALID_PARAMS, METHOD_NOT_FOUND};
use mcp_satellite_protocol::method;
use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::{BoxFuture, ready};
use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_protocol::rpc::{RpcMessage, join_parts, member};

use super::MetaTools;
use super::raw::json_string;
use super::schema::{INSTRUCTIONS, TOOLS};
use crate::access::User;
use crate::answer::{CallAnswer, InitializeAnswer, RpcError};
use crate::client_description::ClientDescription;
use crate::era::{self, translation};
use crate::instructions::aggregate_instructions;
use crate::request::EndpointRequest;
use crate::session::ClientSession;
use crate::shared_session::McpLogLevel;

const CAPABILITIES: &str = r#"{"tools":{},"logging":{}}"#;

pub(crate) fn initialize_answer(
    client: &ClientDescription,
    capabilities: &str,
    instructions: &str,
) -> InitializeAnswer {
    let version = era::negotiate_version(&client.version, NEWEST_SESSION_VERSION);
    let result = format!(
        r#"{{"protocolVersion":{},"capabilities":{capabilities},"serverInfo":{{"name":"mcp-satellite","version":{}}},"instructions":{}}}"#,
        json_string(&version),
        json_string(env!("CARGO_PKG_VERSION")),
        json_string(instructions),
    );
    InitializeAnswer { result, version }
}

pub(crate) fn unknown_method(method: Option<&str>) -> CallAnswer {
    let method = method.unwrap_or_default();
    CallAnswer::Error(RpcError::new(METHOD_NOT_FOUND, format!("this endpoint has no method `{method}`")))
}

pub(crate) fn single_page(params: Option<&str>, list: impl FnOnce() -> String) -> CallAnswer {
    match params.and_then(|params| member(params, "cursor")) {
        None | Some("null") => CallAnswer::Result(list()),
        Some(_) => CallAnswer::Error(RpcError::new(INVALID_PARAMS, "unknown cursor: the list has a single page")),
    }
}

/// Handles a notification from a client of several servers. Progress on a question goes to the server that asked; all
/// other notifications concern no server.
pub(crate) fn handle_notification(runtime: &RuntimeHandle, session: &ClientSession, message: &RpcMessage) {
    let Some(token) = message.token().filter(|_| message.method() == Some(method::PROGRESS)) else { return };
    let Some((source, server_token)) = session.find_question(token) else { return };
    let translated = RpcMessage::parse(join_parts(&message.with_token(&server_token)));
    // The text is derived from a valid message and stays valid.
    let sent = translated.map(|translated| runtime.notify(&source.id, translated));
    if let Ok(Err(error)) = sent {
        tracing::debug!(session_id = session.public_id(), %error, "a client's progress was not passed on");
    }
}

impl MetaTools {
    pub(crate) fn initialize(
        &self,
        user: &User,
        client: &ClientDescription,
    ) -> BoxFuture<'static, Result<InitializeAnswer, RpcError>> {
        ready(Ok(initialize_answer(client, CAPABILITIES, &self.instructions(user)))).boxed()
    }

    pub(crate) fn discover(&self, user: &User) -> String {
        translation::own_discovery_result(CAPABILITIES, &self.instructions(user))
    }

    fn instructions(&self, user: &User) -> String {
        aggregate_instructions(INSTRUCTIONS, &self.caller(user))
    }

    pub(crate) fn handle_session_start(&self, session: &Arc<ClientSession>) {
        self.prepare_indexes(session.user());
        self.listen(session);
    }

    pub(crate) fn listen(&self, session: &Arc<ClientSession>) {
        self.notices.add_client(session, &self.runtime, &self.callers);
        // The session may have been evicted before this call.
        if session.end_reason().is_some() {
            self.notices.remove_client(session);
        }
    }

    pub(crate) fn handle_session_end(&self, session: &ClientSession) {
        self.notices.remove_client(session);
    }

    pub(crate) fn handle_request(self: &Arc<Self>, request: EndpointRequest) -> BoxFuture<'static, CallAnswer> {
        let tools = self.clone();
        async move {
            match request.message.method() {
                Some(method::TOOLS_CALL) => tools.call(request).await,
                Some(method::TOOLS_LIST) => single_page(request.message.params(), || TOOLS.to_owned()),
                Some(method::PING) => CallAnswer::Result("{}".to_owned()),
                Some(method::SET_LOG_LEVEL) => match McpLogLevel::from_message(&request.message) {
                    Some(level) => {
                        tools.notices.set_level(&request.session, level);
                        CallAnswer::Result("{}".to_owned())
                    }
                    None => CallAnswer::Error(RpcError::new(INVALID_PARAMS, "`level` is missing or unknown")),
                },
                method => unknown_method(method),
            }
        }
        .boxed()
    }
}
