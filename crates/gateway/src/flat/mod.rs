//! The endpoint `/mcp?mode=flat`: the tools, prompts and resources of all of a caller's servers, each kind in one list.
//! A request is passed on to the server that owns the item, under the server's own name for it; the rest of the request
//! is unchanged.
//!
//! ```text
//! snapshot ──> MergedLists (for all clients of a user) ──> pages
//!    │            └── owner of `git__log`? ──> runtime.relay ──> the server's own answer
//!    └──> the user's watcher ──> changes that last 250 ms ──> list_changed
//! ```

mod client_list;
mod list_cursor;
mod merged_lists;
mod merged_names;
mod server_section;
mod user_state;

use mcp_satellite_protocol::error_code::{INVALID_PARAMS, RESOURCE_NOT_FOUND};
use mcp_satellite_protocol::header_params::may_have_header_params;
use mcp_satellite_protocol::method;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::{BoxFuture, ready};
use mcp_satellite_actors::model::catalogue::ListKind;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::{RuntimeHandle, is_repeatable};
use mcp_satellite_protocol::rpc::{RpcMessage, member};

pub use self::list_cursor::ListPosition;
pub use self::merged_lists::{ListPage, MergedLists, PAGE_LIMITS, PageLimits};
pub use self::merged_names::MergedNames;
use self::server_section::LISTS;
use self::user_state::{FlatUserState, FlatUserStates};
use super::access::User;
use super::answer::{CallAnswer, InitializeAnswer, RpcError};
use super::client_description::ClientDescription;
use super::era::translation;
use super::forward::forward;
use super::instructions::aggregate_instructions;
use super::names;
use super::refusal::CallRefusal;
use super::request::EndpointRequest;
use super::session::ClientSession;
use super::subscription::SubscriptionFilter;
use super::tools::endpoint::{initialize_answer, unknown_method};
use super::tools::raw::{find_string, replace_string};
use super::tools::resources::SEPARATOR;
use super::tools::{CallerCache, CallerSnapshot};

const CAPABILITIES: &str = r#"{"tools":{"listChanged":true},"prompts":{"listChanged":true},"resources":{"listChanged":true},"completions":{}}"#;

const INSTRUCTIONS: &str = "This endpoint combines several MCP servers and lists their tools, prompts and resources. \
The name of a tool or a prompt begins with its server's name and two underscores; the URI of a resource with its \
server's name and a bar. Only servers that are online are included. When a call fails, the last sentence of the error \
text is the next step.";

#[derive(Debug)]
pub struct FlatEndpoint {
    runtime: RuntimeHandle,
    callers: Arc<CallerCache>,
    states: Arc<FlatUserStates>,
}

impl FlatEndpoint {
    pub fn new(runtime: RuntimeHandle, callers: Arc<CallerCache>) -> Self {
        Self { runtime, callers, states: Arc::default() }
    }

    pub(super) fn initialize(
        &self,
        user: &User,
        client: &ClientDescription,
    ) -> BoxFuture<'static, Result<InitializeAnswer, RpcError>> {
        ready(Ok(initialize_answer(client, CAPABILITIES, &self.instructions(user)))).boxed()
    }

    pub(super) fn discover(&self, user: &User) -> String {
        translation::own_discovery_result(CAPABILITIES, &self.instructions(user))
    }

    fn instructions(&self, user: &User) -> String {
        aggregate_instructions(INSTRUCTIONS, &self.callers.caller(self.runtime.snapshot(), &user.team, &user.user))
    }

    pub(super) fn definition(self: &Arc<Self>, user: Arc<User>, tool: &str) -> BoxFuture<'static, Option<Box<str>>> {
        let (flat, tool) = (self.clone(), tool.to_owned());
        async move {
            let state = flat.states.keep_for_request(&user, &flat.runtime, &flat.callers);
            let caller = flat.callers.caller(flat.runtime.snapshot(), &user.team, &user.user);
            let lists = state.merged_lists(caller).await?;
            let (id, own_name) = lists.names(ListKind::Tools).owner(&tool)?;
            let view = flat.runtime.status(id)?;
            let definition = view.catalogue.as_deref()?.tool(own_name)?.raw.get();
            may_have_header_params(definition).then(|| definition.into())
        }
        .boxed()
    }

    pub(super) fn listen(
        self: &Arc<Self>,
        session: &Arc<ClientSession>,
        filter: SubscriptionFilter,
    ) -> BoxFuture<'static, Result<SubscriptionFilter, RpcError>> {
        let (flat, session) = (self.clone(), session.clone());
        async move {
            let accepted = filter.restrict_to(CAPABILITIES);
            let state = flat.states.add_client(&session, &flat.runtime, &flat.callers);
            // The session may have ended before this call.
            if session.end_reason().is_some() {
                flat.states.remove_client(&session);
                return Err(CallRefusal::closing().to_rpc_error());
            }
            let lists =
                state.merged_lists(flat.caller(&session)).await.ok_or_else(|| CallRefusal::closing().to_rpc_error())?;
            for list in LISTS {
                state.record_read(&session, (list, &lists), None, None);
            }
            Ok(accepted)
        }
        .boxed()
    }

    pub(super) fn handle_session_start(&self, session: &Arc<ClientSession>) {
        self.states.add_client(session, &self.runtime, &self.callers);
        // The session may have been evicted before this call.
        if session.end_reason().is_some() {
            self.states.remove_client(session);
        }
    }

    pub(super) fn handle_session_end(&self, session: &ClientSession) {
        self.states.remove_client(session);
    }

    pub(super) fn handle_request(self: &Arc<Self>, request: EndpointRequest) -> BoxFuture<'static, CallAnswer> {
        let flat = self.clone();
        async move {
            let session = &request.session;
            let state = if session.is_stateless() {
                flat.states.keep_for_request(session.user(), &flat.runtime, &flat.callers)
            } else if let Some(state) = flat.states.find_for_session(session) {
                state
            } else {
                // The session has just ended.
                return CallAnswer::Cancelled;
            };
            match request.method() {
                method::PING => CallAnswer::Result("{}".to_owned()),
                method::TOOLS_CALL | method::PROMPTS_GET | method::RESOURCES_READ | method::COMPLETE => {
                    match flat.resolve_target(&state, &request).await {
                        Ok(target) => flat.forward_to_target(request, target).await,
                        Err(refusal) => refusal.to_answer(request.method()),
                    }
                }
                other => match LISTS.into_iter().find(|list| list.method() == other) {
                    Some(list) => flat.list(&state, &request, list).await,
                    None => unknown_method(Some(other)),
                },
            }
        }
        .boxed()
    }

    fn caller(&self, session: &ClientSession) -> CallerSnapshot {
        let user = session.user();
        self.callers.caller(self.runtime.snapshot(), &user.team, &user.user)
    }

    async fn list(&self, state: &FlatUserState, request: &EndpointRequest, list: ListKind) -> CallAnswer {
        let cursor = request.message.params().and_then(|params| member(params, "cursor"));
        let after = cursor.filter(|cursor| *cursor != "null").map(|cursor| read_cursor(cursor, list));
        if after == Some(None) {
            let message = "the cursor is invalid; read the list again from its beginning, without a cursor";
            return CallAnswer::Error(RpcError::new(INVALID_PARAMS, message));
        }
        let after = after.flatten();
        let lists = state.merged_lists(self.caller(&request.session)).await;
        let Some(lists) = lists else { return CallAnswer::Error(CallRefusal::closing().to_rpc_error()) };
        let page = lists.page(list, after.as_ref(), PAGE_LIMITS);
        state.record_read(&request.session, (list, &lists), after, page.next);
        CallAnswer::Result(page.text)
    }

    async fn resolve_target(
        &self,
        state: &FlatUserState,
        request: &EndpointRequest,
    ) -> Result<FlatItemTarget, CallRefusal> {
        let (session, message) = (&request.session, &request.message);
        let text = message.text();
        let name = |path: &[&str]| find_string(text, path).map(|(_, name)| name);
        let path: &[&str] = match message.method().unwrap_or_default() {
            method::RESOURCES_READ => &["params", "uri"],
            method::COMPLETE => match name(&["params", "ref", "type"]).as_deref() {
                Some("ref/resource") => &["params", "ref", "uri"],
                _ => &["params", "ref", "name"],
            },
            _ => &["params", "name"],
        };
        let member = path[path.len() - 1];
        let missing = || CallRefusal::bad_input(format!("`{member}` is missing, or not a string"));
        let (range, name) = find_string(text, path).ok_or_else(missing)?;
        let caller = self.caller(session);
        let is_tool = message.method() == Some(method::TOOLS_CALL);
        let (id, own) = if !is_tool && member == "uri" {
            resolve_resource(state, session, &caller, &name)?
        } else {
            let list = if is_tool { ListKind::Tools } else { ListKind::Prompts };
            self.resolve_name(state, session, caller, list, &name).await?
        };
        Ok(FlatItemTarget { name_range: range, id, own_name: own, is_tool })
    }

    /// Finds the owner of a name: in the pages that this client has read, because the name may belong to another server
    /// by now; else in the current lists. The tools of a server that is not online are found, too, so that the call
    /// returns the reason.
    async fn resolve_name(
        &self,
        state: &FlatUserState,
        session: &ClientSession,
        caller: CallerSnapshot,
        list: ListKind,
        name: &str,
    ) -> Result<(InstanceId, String), CallRefusal> {
        if let Some(read) = state.find_read(session, list, |read| read.owner(name)) {
            return Ok(read);
        }
        let lists = state.merged_lists(caller.clone()).await.ok_or_else(CallRefusal::closing)?;
        let what = if list == ListKind::Tools { "tool" } else { "prompt" };
        let current = lists.names(list).owner(name).map(|(id, own_name)| (id.clone(), own_name.to_owned()));
        current.or_else(|| find_offline_owner(&caller, list, name)).ok_or_else(|| CallRefusal::not_found(what, name))
    }

    async fn forward_to_target(&self, request: EndpointRequest, target: FlatItemTarget) -> CallAnswer {
        let FlatItemTarget { name_range, id, own_name: own, is_tool } = target;
        let method = request.message.method_text().cloned().unwrap_or_default();
        let text = replace_string(request.message.text(), &name_range, &own);
        let message = match RpcMessage::parse(Bytes::from(text)) {
            Ok(renamed) => renamed,
            Err(why) => return CallAnswer::Error(RpcError::new(INVALID_PARAMS, why.to_string())),
        };
        let repeatable = if is_tool {
            let view = self.runtime.status(&id);
            let catalogue = view.as_ref().and_then(|view| view.catalogue.as_deref());
            catalogue.and_then(|catalogue| catalogue.tool(&own)).is_some_and(|tool| tool.repeatable)
        } else {
            is_repeatable(&method)
        };
        let request = EndpointRequest { message, ..request };
        match forward(&self.runtime, &id, request, repeatable, is_tool.then(|| own.into())).await {
            Ok(answer) => answer,
            Err(error) => CallRefusal::from_instance_error(&error, &self.runtime, &id, None).to_answer(&method),
        }
    }
}

struct FlatItemTarget {
    // Range of the name in the text of the request.
    name_range: Range<usize>,
    id: InstanceId,
    own_name: String,
    is_tool: bool,
}

/// Finds the owner of a resource: by the labels that this client has read, because they may belong to another server by
/// now; else by the current names.
fn resolve_resource(
    state: &FlatUserState,
    session: &ClientSession,
    caller: &CallerSnapshot,
    uri: &str,
) -> Result<(InstanceId, String), CallRefusal> {
    for list in [ListKind::Resources, ListKind::ResourceTemplates] {
        if let Some(read) = state.find_read(session, list, |read| read.split(uri)) {
            return Ok(read);
        }
    }
    match caller.split_server(uri, SEPARATOR, "server|uri") {
        Ok((view, _, own_name)) => Ok((view.spec.id.clone(), own_name.to_owned())),
        Err(refusal) if refusal.kind == "ambiguous" => Err(refusal),
        Err(_) => Err(CallRefusal::not_found("resource", uri).with_code(RESOURCE_NOT_FOUND)),
    }
}

fn read_cursor(cursor: &str, list: ListKind) -> Option<ListPosition> {
    ListPosition::from_cursor(&serde_json::from_str::<String>(cursor).ok()?, list)
}

fn find_offline_owner(caller: &CallerSnapshot, list: ListKind, name: &str) -> Option<(InstanceId, String)> {
    let offline = caller.servers().filter(|(_, view)| view.offered_catalogue().is_none());
    let mut fallback = None;
    for (label, view) in offline {
        let Some(rest) = name.strip_prefix(&*names::flat_prefix(label)) else { continue };
        match &view.catalogue {
            None => fallback = Some((view.spec.id.clone(), rest.to_owned())),
            Some(catalogue) => {
                let own_name: Vec<&str> = if list == ListKind::Tools {
                    catalogue.tools.iter().map(|tool| &*tool.name).collect()
                } else {
                    catalogue.prompts.iter().map(|prompt| &*prompt.key).collect()
                };
                let pairs: Vec<(&str, &str)> = own_name.iter().map(|own_name| (label, *own_name)).collect();
                if let Some(at) = names::flat_names(&pairs).iter().position(|flat| flat == name) {
                    return Some((view.spec.id.clone(), own_name[at].to_owned()));
                }
            }
        }
    }
    fallback
}
