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
mod execute;
pub(super) mod face;
mod notices;
pub(super) mod raw;
pub(super) mod resources;
pub mod schema;
mod servers;

use std::sync::Arc;
use std::time::Instant;

use jiff::Timestamp;
use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::ids::{TeamId, UserId};
use mcp_satellite_protocol::error_code::INVALID_PARAMS;
use serde::Serialize;
use serde_json::value::RawValue;

pub use self::caller::{CallerCache, CallerSnapshot, OfferedCatalogues};
use self::discover::discover;
use self::execute::{MetaToolCall, execute};
use self::notices::ServerNotices;
use self::resources::{list as list_resources, read as read_resource};
use self::servers::{list as list_servers, reconnect};
use super::face::{CallAnswer, EndpointCall, RpcError};
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

    fn caller(&self, team: &TeamId, user: &UserId) -> CallerSnapshot {
        self.callers.caller(self.runtime.snapshot(), team, user)
    }

    /// Answers a `tools/call` of this user. Dropping the future cancels it.
    pub async fn call(&self, (team, user): (&TeamId, &UserId), call: EndpointCall) -> CallAnswer {
        let params = call.message.params().and_then(raw::members).unwrap_or_default();
        let name = params.get("name").and_then(|name| serde_json::from_str::<String>(name.get()).ok());
        let Some(name) = name else {
            return CallAnswer::Error(RpcError::new(INVALID_PARAMS, "`name` is missing, or not a string"));
        };
        let given = params.get("arguments").map(|arguments| arguments.get()).filter(|arguments| *arguments != "null");
        // Members that belong to the call, not to the tool, are passed on.
        let beside = ["_meta", "inputResponses", "requestState"];
        let beside = beside.into_iter().filter_map(|name| Some((name, params.get(name)?.get()))).collect();
        let asked = || MetaToolCall {
            arguments: given,
            other_members: beside,
            origin: call.origin,
            cancellation: call.cancellation,
            timeout: call.timeout,
            era: call.era,
            client: call.client,
        };
        let (runtime, caller) = (&self.runtime, self.caller(team, user));
        let answered = match &*name {
            "discover_mcp_tools" => discover(&caller, &self.indexes, given).await.map(CallAnswer::Result),
            "execute_mcp_tool" => execute(runtime, &caller, asked()).await,
            "list_mcp_resources" => list_resources(&caller, given).await.map(CallAnswer::Result),
            "read_mcp_resource" => read_resource(runtime, &caller, asked()).await,
            "list_servers" => list_servers(&caller, given, Instant::now(), Timestamp::now()).map(CallAnswer::Result),
            "reconnect_server" => reconnect(runtime, &caller, given).await.map(CallAnswer::Result),
            _ => {
                let message = format!(
                    "unknown tool `{name}`; call tools of servers through execute_mcp_tool, with `{name}` in tool_path"
                );
                return CallAnswer::Error(RpcError::new(INVALID_PARAMS, message));
            }
        };
        answered.unwrap_or_else(|refusal| CallAnswer::Result(refusal.to_tool_result()))
    }

    fn prepare_indexes(&self, team: &TeamId, user: &UserId) {
        let (indexes, caller) = (self.indexes.clone(), self.caller(team, user));
        let catalogues = caller.offered_catalogues().servers().map(|(_, _, catalogue)| catalogue.clone()).collect();
        tokio::spawn(async move { indexes.get_or_create_all(catalogues).await });
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct StructuredResult<'a, C: Serialize> {
    content: C,
    structured_content: &'a RawValue,
}

fn structured_result(data: &impl Serialize) -> String {
    #[derive(Serialize)]
    struct Text<'a> {
        r#type: &'static str,
        text: &'a str,
    }
    let data = raw::raw_value(raw::to_json(data));
    raw::to_json(&StructuredResult { content: [Text { r#type: "text", text: data.get() }], structured_content: &data })
}

fn structured_result_with(content: &impl Serialize, data: &impl Serialize) -> String {
    let data = raw::raw_value(raw::to_json(data));
    raw::to_json(&StructuredResult { content, structured_content: &data })
}
