//! The interface between HTTP and the code that answers requests. The code before it handles sessions, streams and
//! status codes and does not depend on servers; an implementation of [`EndpointHandler`] handles servers and tools and
//! does not depend on HTTP.

use std::sync::Arc;

use futures::future::BoxFuture;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_protocol::rpc::RpcMessage;

use super::access::User;
use super::answer::{CallAnswer, InitializeAnswer, RpcError};
use super::endpoint_id::EndpointId;
use super::request::{EndpointRequest, OpeningRequest};
use super::session::ClientSession;
use super::subscription::SubscriptionFilter;

pub trait EndpointHandler: Send + Sync + 'static {
    /// Returns the instance that a path names; `None` also if it belongs to another user.
    fn instance(&self, user: &User, name: &str) -> Option<InstanceId>;

    /// Returns true if the user may use the control plane as an MCP server.
    fn admits_to_control(&self, _user: &User) -> bool {
        false
    }

    /// Answers `initialize`. The session is created afterwards.
    fn initialize(&self, request: OpeningRequest) -> BoxFuture<'static, Result<InitializeAnswer, RpcError>>;

    /// Returns the result of `server/discover` for a stateless client, as JSON text.
    fn discover(&self, request: OpeningRequest) -> BoxFuture<'static, Result<String, RpcError>>;

    /// Returns the definition of a tool as `tools/list` returns it to this user. Returns `None` if the tool is unknown or
    /// its definition marks no parameter for a header.
    fn definition(&self, user: Arc<User>, endpoint: &EndpointId, tool: &str) -> BoxFuture<'static, Option<Box<str>>>;

    /// Subscribes a stateless client until its session [ends](Self::handle_session_end). Returns the part of the filter
    /// that is supported.
    fn listen(
        &self,
        session: &Arc<ClientSession>,
        filter: SubscriptionFilter,
    ) -> BoxFuture<'static, Result<SubscriptionFilter, RpcError>>;

    /// Handles the begin of a session, before the client receives its id. Not called for a single stateless request,
    /// for which only [`handle_session_end`](Self::handle_session_end) is called.
    fn handle_session_start(&self, session: &Arc<ClientSession>);

    /// Answers a request. Dropping the future cancels it.
    fn handle_request(&self, request: EndpointRequest) -> BoxFuture<'static, CallAnswer>;

    /// Handles a notification, except the cancellation of an open request.
    fn handle_notification(&self, session: &Arc<ClientSession>, message: RpcMessage);

    /// Handles the end of a session: the client receives no more messages, and its open questions are declined.
    fn handle_session_end(&self, session: &Arc<ClientSession>);
}
