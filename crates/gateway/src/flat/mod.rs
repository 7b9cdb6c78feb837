//! The endpoint `/mcp?mode=flat`: the tools, prompts and resources of all of a caller's servers, each kind in one list.
//! A request is passed on to the server that owns the item, under the server's own name for it; the rest of the request
//! is unchanged.
//!
//! ```text
//! snapshot ──> Picture (one for all clients of a user) ──> lists
//!    │            └── owner of `git__log`? ──> runtime.relay ──> the server's own answer
//!    └──> the user's watcher ──> changes that last 250 ms ──> list_changed
//! ```

mod desk;
mod picture;

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::{BoxFuture, ready};
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::rpc::RpcMessage;
use mcp_satellite_actors::{RuntimeHandle, is_repeatable};

use self::desk::{FlatUserState, FlatUserStates};
pub use self::picture::{ItemKind, MergedList, MergedLists};
use super::access::User;
use super::era::change;
use super::face::{CallAnswer, ClientDescription, EndpointCall, InitializeAnswer, RpcError};
use super::forward::forward;
use super::instructions::aggregated;
use super::names;
use super::refusal::{CallRefusal, INVALID_PARAMS};
use super::session::ClientSession;
use super::subscription::SubscriptionFilter;
use super::tools::face::{unknown, welcome, whole};
use super::tools::raw::{place, with};
use super::tools::resources::SEPARATOR;
use super::tools::{CallerCache, CallerSnapshot};

// Error code of the protocol for a missing resource.
const RESOURCE_NOT_FOUND: i64 = -32002;

const CAPABILITIES: &str = r#"{"tools":{"listChanged":true},"prompts":{"listChanged":true},"resources":{"listChanged":true},"completions":{}}"#;

const INSTRUCTIONS: &str = "This endpoint combines several MCP servers and lists their tools, prompts and resources. \
The name of a tool or a prompt begins with its server's name and two underscores; the URI of a resource with its \
server's name and a bar. Only servers that are online are included. When a call fails, the last sentence of the error \
text is the next step.";

/// The flat endpoint, for all users.
#[derive(Debug)]
pub struct FlatEndpoint {
    runtime: RuntimeHandle,
    callers: Arc<CallerCache>,
    desks: Arc<FlatUserStates>,
}

impl FlatEndpoint {
    /// Creates the endpoint for the instances of `runtime`.
    pub fn new(runtime: RuntimeHandle, callers: Arc<CallerCache>) -> Self {
        Self { runtime, callers, desks: Arc::default() }
    }

    pub(super) fn initialize(
        &self,
        user: &User,
        greeting: &ClientDescription,
    ) -> BoxFuture<'static, Result<InitializeAnswer, RpcError>> {
        ready(Ok(welcome(greeting, CAPABILITIES, &self.instructions(user)))).boxed()
    }

    pub(super) fn discover(&self, user: &User) -> String {
        change::own_discovery(CAPABILITIES, &self.instructions(user))
    }

    fn instructions(&self, user: &User) -> String {
        aggregated(INSTRUCTIONS, &self.callers.of(self.runtime.snapshot(), &user.team, &user.user))
    }

    pub(super) fn definition(self: &Arc<Self>, user: Arc<User>, tool: &str) -> BoxFuture<'static, Option<Box<str>>> {
        let (flat, tool) = (self.clone(), tool.to_owned());
        async move {
            let desk = flat.desks.visited(&user, &flat.runtime, &flat.callers);
            let caller = flat.callers.of(flat.runtime.snapshot(), &user.team, &user.user);
            let picture = desk.picture(caller).await?;
            let (id, own) = picture.part(ItemKind::Tools).owner(&tool)?;
            let view = flat.runtime.status(id)?;
            view.catalogue.as_deref()?.tool(own).map(|tool| tool.raw.get().into())
        }
        .boxed()
    }

    pub(super) fn listen(
        self: &Arc<Self>,
        session: &Arc<ClientSession>,
        wanted: SubscriptionFilter,
    ) -> BoxFuture<'static, Result<SubscriptionFilter, RpcError>> {
        let (flat, session) = (self.clone(), session.clone());
        async move {
            let agreed = wanted.within(CAPABILITIES);
            let desk = flat.desks.enter(&session, &flat.runtime, &flat.callers);
            let picture = desk.picture(flat.caller(&session)).await.ok_or_else(|| CallRefusal::ending().rpc())?;
            for thing in ItemKind::ALL {
                desk.read(&session, thing, picture.part(thing));
            }
            Ok(agreed)
        }
        .boxed()
    }

    pub(super) fn began(&self, session: &Arc<ClientSession>) {
        self.desks.enter(session, &self.runtime, &self.callers);
        // The session may have been evicted before this call.
        if session.ended().is_some() {
            self.desks.leave(session);
        }
    }

    pub(super) fn ended(&self, session: &ClientSession) {
        self.desks.leave(session);
    }

    pub(super) fn request(
        self: &Arc<Self>,
        session: Arc<ClientSession>,
        call: EndpointCall,
    ) -> BoxFuture<'static, CallAnswer> {
        let flat = self.clone();
        async move {
            let desk = if session.is_guest() {
                flat.desks.visited(session.user(), &flat.runtime, &flat.callers)
            } else if let Some(desk) = flat.desks.of(&session) {
                desk
            } else {
                // The session has just ended.
                return CallAnswer::Withdrawn;
            };
            let method = call.message.method().unwrap_or_default();
            match method {
                "ping" => CallAnswer::Result("{}".to_owned()),
                "tools/list" => flat.list(&desk, &session, &call, ItemKind::Tools, MergedLists::tools).await,
                "prompts/list" => flat.list(&desk, &session, &call, ItemKind::Prompts, MergedLists::prompts).await,
                "resources/list" => {
                    flat.list(&desk, &session, &call, ItemKind::Resources, MergedLists::resources).await
                }
                "resources/templates/list" => {
                    flat.list(&desk, &session, &call, ItemKind::Resources, MergedLists::resource_templates).await
                }
                "tools/call" | "prompts/get" | "resources/read" | "completion/complete" => {
                    match flat.addressee(&desk, &session, &call.message).await {
                        Ok(addressee) => flat.pass_on(call, addressee).await,
                        Err(refusal) => refusal.answer(method),
                    }
                }
                other => unknown(Some(other)),
            }
        }
        .boxed()
    }

    fn caller(&self, session: &ClientSession) -> CallerSnapshot {
        let user = session.user();
        self.callers.of(self.runtime.snapshot(), &user.team, &user.user)
    }

    async fn list(
        &self,
        desk: &FlatUserState,
        session: &ClientSession,
        call: &EndpointCall,
        thing: ItemKind,
        text: fn(&MergedLists) -> &str,
    ) -> CallAnswer {
        let picture = desk.picture(self.caller(session)).await;
        let Some(picture) = picture else { return CallAnswer::Error(CallRefusal::ending().rpc()) };
        whole(call.message.params(), || {
            desk.read(session, thing, picture.part(thing));
            text(&picture).to_owned()
        })
    }

    async fn addressee(
        &self,
        desk: &FlatUserState,
        session: &ClientSession,
        message: &RpcMessage,
    ) -> Result<FlatItemTarget, CallRefusal> {
        let text = message.text();
        let said = |path: &[&str]| place(text, path).map(|(_, said)| said);
        let path: &[&str] = match message.method().unwrap_or_default() {
            "resources/read" => &["params", "uri"],
            "completion/complete" => match said(&["params", "ref", "type"]).as_deref() {
                Some("ref/resource") => &["params", "ref", "uri"],
                _ => &["params", "ref", "name"],
            },
            _ => &["params", "name"],
        };
        let member = path[path.len() - 1];
        let missing = || CallRefusal::bad_input(format!("`{member}` is missing, or not a string"));
        let (place, said) = place(text, path).ok_or_else(missing)?;
        let caller = self.caller(session);
        let thing = match (message.method(), member) {
            (Some("tools/call"), _) => ItemKind::Tools,
            (_, "uri") => ItemKind::Resources,
            _ => ItemKind::Prompts,
        };
        let (id, own) = match thing {
            ItemKind::Resources => resource(desk, session, &caller, &said)?,
            ItemKind::Tools | ItemKind::Prompts => self.named(desk, session, caller, thing, &said).await?,
        };
        Ok(FlatItemTarget { place, id, own, is_tool: thing == ItemKind::Tools })
    }

    /// Finds the owner of a name: in the list that this client has read, because the name may belong to another server
    /// by now; else in the current lists. The tools of a server that is not online are found, too, so that the call
    /// returns the reason.
    async fn named(
        &self,
        desk: &FlatUserState,
        session: &ClientSession,
        caller: CallerSnapshot,
        thing: ItemKind,
        name: &str,
    ) -> Result<(InstanceId, String), CallRefusal> {
        let found = |part: &MergedList| part.owner(name).map(|(id, own)| (id.clone(), own.to_owned()));
        if let Some(read) = desk.known_to(session, thing).and_then(|part| found(&part)) {
            return Ok(read);
        }
        let picture = desk.picture(caller.clone()).await.ok_or_else(CallRefusal::ending)?;
        let what = if thing == ItemKind::Tools { "tool" } else { "prompt" };
        found(picture.part(thing))
            .or_else(|| absent(&caller, thing, name))
            .ok_or_else(|| CallRefusal::not_found(what, name))
    }

    async fn pass_on(&self, call: EndpointCall, addressee: FlatItemTarget) -> CallAnswer {
        let FlatItemTarget { place, id, own, is_tool } = addressee;
        let method = call.message.method().unwrap_or_default().to_owned();
        let text = with(call.message.text(), &place, &own);
        let message = match RpcMessage::read(Bytes::from(text)) {
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
        let call = EndpointCall { message, ..call };
        match forward(&self.runtime, &id, call, repeatable, is_tool.then_some(own)).await {
            Ok(answer) => answer,
            Err(error) => CallRefusal::of_instance(&error, &self.runtime, &id, None).answer(&method),
        }
    }
}

struct FlatItemTarget {
    // Range of the name in the text of the request.
    place: Range<usize>,
    id: InstanceId,
    own: String,
    is_tool: bool,
}

/// Finds the owner of a resource: by the labels that this client has read, because they may belong to another server by
/// now; else by the current names.
fn resource(
    desk: &FlatUserState,
    session: &ClientSession,
    caller: &CallerSnapshot,
    uri: &str,
) -> Result<(InstanceId, String), CallRefusal> {
    let read = desk.known_to(session, ItemKind::Resources);
    if let Some((id, own)) = read.as_ref().and_then(|part| part.split(uri)) {
        return Ok((id.clone(), own.to_owned()));
    }
    match caller.part(uri, SEPARATOR, "server|uri") {
        Ok((view, _, own)) => Ok((view.spec.id.clone(), own.to_owned())),
        Err(refusal) if refusal.kind == "ambiguous" => Err(refusal),
        Err(_) => Err(CallRefusal::not_found("resource", uri).coded(RESOURCE_NOT_FOUND)),
    }
}

fn absent(caller: &CallerSnapshot, thing: ItemKind, name: &str) -> Option<(InstanceId, String)> {
    let away = caller.servers().filter(|(_, view)| view.offered().is_none());
    let mut guess = None;
    for (label, view) in away {
        let Some(rest) = name.strip_prefix(&*names::flat_start(label)) else { continue };
        match &view.catalogue {
            None => guess = Some((view.spec.id.clone(), rest.to_owned())),
            Some(catalogue) => {
                let own: Vec<&str> = match thing {
                    ItemKind::Tools => catalogue.tools.iter().map(|tool| &*tool.name).collect(),
                    ItemKind::Prompts | ItemKind::Resources => {
                        catalogue.prompts.iter().map(|prompt| &*prompt.key).collect()
                    }
                };
                let pairs: Vec<(&str, &str)> = own.iter().map(|own| (label, *own)).collect();
                if let Some(at) = names::flat(&pairs).iter().position(|flat| flat == name) {
                    return Some((view.spec.id.clone(), own[at].to_owned()));
                }
            }
        }
    }
    guess
}
