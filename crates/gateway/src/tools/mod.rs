//! The six tools of `/mcp`. They give access to all servers of a caller without filling the client's context with their
//! tools. Four tools answer from a snapshot; `execute_mcp_tool` and `read_mcp_resource` pass a request on to a server.
//!
//! ```text
//! tools/call ──> Caller (its own instances, now) ──> discover, list… ──> Result
//!                                               └──> execute, read  ──> runtime.relay ──> the server's own answer
//! ```

mod arguments;
mod caller;
mod discover;
pub(super) mod endpoint;
mod execute;
mod notices;
pub(super) mod raw;
pub(super) mod resources;
mod result;
pub mod schema;
mod servers;

use mcp_satellite_protocol::error_code::INVALID_PARAMS;
use std::sync::Arc;
use std::time::Instant;

use jiff::Timestamp;
use mcp_satellite_actors::RuntimeHandle;

pub use self::caller::{CallerCache, CallerSnapshot, OfferedCatalogues};
use self::discover::discover;
use self::execute::tool_request;
use self::notices::ServerNotices;
use self::resources::{list as list_resources, resource_request, to_resource_result};
use self::servers::{list as list_servers, reconnect};
use super::access::User;
use super::answer::{CallAnswer, RpcError};
use super::request::EndpointRequest;
use super::search::CatalogueIndexes;

#[derive(Debug)]
pub struct MetaTools {
    runtime: RuntimeHandle,
    callers: Arc<CallerCache>,
    indexes: Arc<CatalogueIndexes>,
    notices: ServerNotices,
}

impl MetaTools {
    pub fn new(runtime: RuntimeHandle, callers: Arc<CallerCache>) -> Self {
        Self { runtime, callers, indexes: Arc::default(), notices: ServerNotices::default() }
    }

    fn caller(&self, user: &User) -> CallerSnapshot {
        self.callers.caller(self.runtime.snapshot(), &user.team, &user.user)
    }

    /// Answers a `tools/call` of the session's user. Dropping the future cancels it.
    pub async fn call(&self, request: EndpointRequest) -> CallAnswer {
        let params = request.message.params().and_then(raw::members).unwrap_or_default();
        let name = params.get("name").and_then(|name| serde_json::from_str::<String>(name.get()).ok());
        let Some(name) = name else {
            return CallAnswer::Error(RpcError::new(INVALID_PARAMS, "`name` is missing, or not a string"));
        };
        let arguments = params.get("arguments").map(|value| value.get()).filter(|value| *value != "null");
        let (runtime, caller) = (&self.runtime, self.caller(request.session.user()));
        let answer = match &*name {
            "discover_mcp_tools" => discover(&caller, &self.indexes, arguments).await.map(CallAnswer::Result),
            "execute_mcp_tool" => match tool_request(runtime, &caller, arguments, &params) {
                Ok((target, message)) => target.forward(runtime, EndpointRequest { message, ..request }).await,
                Err(refusal) => Err(refusal),
            },
            "list_mcp_resources" => list_resources(&caller, arguments).await.map(CallAnswer::Result),
            "read_mcp_resource" => match resource_request(runtime, &caller, arguments, &params) {
                Ok((target, message)) => {
                    let answer = target.forward(runtime, EndpointRequest { message, ..request }).await;
                    answer.and_then(to_resource_result)
                }
                Err(refusal) => Err(refusal),
            },
            "list_servers" => {
                list_servers(&caller, arguments, Instant::now(), Timestamp::now()).map(CallAnswer::Result)
            }
            "reconnect_server" => reconnect(runtime, &caller, arguments).await.map(CallAnswer::Result),
            _ => {
                let message = format!(
                    "unknown tool `{name}`; call tools of servers through execute_mcp_tool, with `{name}` in tool_path"
                );
                return CallAnswer::Error(RpcError::new(INVALID_PARAMS, message));
            }
        };
        answer.unwrap_or_else(|refusal| CallAnswer::Result(refusal.to_tool_result()))
    }

    fn prepare_indexes(&self, user: &User) {
        let (indexes, caller) = (self.indexes.clone(), self.caller(user));
        let catalogues = caller.offered_catalogues().servers().map(|(_, _, catalogue)| catalogue.clone()).collect();
        tokio::spawn(async move { indexes.get_or_create_all(catalogues).await });
    }
}
