//! `/i/{instance}/mcp`: one instance as if directly connected. What comes goes on as it came, both ways.

use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::rpc::Message;
use mcp_satellite_actors::{Relay, RuntimeHandle, is_repeatable};
use serde::Deserialize;
use tokio::time::Duration;

use super::access::User;
use super::era;
use super::face::{Answer, Call, Greeting, RpcError, Welcome};
use super::refusal::Refusal;
use super::room::Rooms;
use super::session::Session;
use super::tools::Callers;
use super::tools::raw::respelled;

/// How long a client that connects waits for a server that has to be started.
const GREETING_TIMEOUT: Duration = Duration::from_secs(60);

/// See the module.
#[derive(Debug)]
pub(super) struct Instances {
    runtime: RuntimeHandle,
    rooms: Arc<Rooms>,
    callers: Arc<Callers>,
}

impl Instances {
    pub(super) fn new(runtime: RuntimeHandle, rooms: Arc<Rooms>, callers: Arc<Callers>) -> Self {
        Self { runtime, rooms, callers }
    }

    /// The caller's own instance of this name.
    pub(super) fn named(&self, user: &User, name: &str) -> Option<InstanceId> {
        let caller = self.callers.of(self.runtime.snapshot(), &user.team, &user.user);
        caller.server(name).ok().map(|view| view.spec.id.clone())
    }

    pub(super) fn initialize(
        &self,
        id: InstanceId,
        greeting: Greeting,
    ) -> BoxFuture<'static, Result<Welcome, RpcError>> {
        let runtime = self.runtime.clone();
        async move {
            let server = runtime.greeting(&id, GREETING_TIMEOUT).await;
            let server = server.map_err(|error| Refusal::of_instance(&error, &runtime, &id, None).rpc())?;
            let version = era::agreed(&greeting.version, &server.protocol);
            let result = respelled(server.greeting.get(), &["protocolVersion"], |_| version.clone());
            Ok(Welcome { result, version })
        }
        .boxed()
    }

    pub(super) fn began(&self, session: &Arc<Session>, id: &InstanceId) {
        self.rooms.enter(session, id);
    }

    pub(super) fn request(&self, id: InstanceId, session: Arc<Session>, call: Call) -> BoxFuture<'static, Answer> {
        let _ = session;
        let runtime = self.runtime.clone();
        async move {
            let Call { message, origin, withdrawn, timeout } = call;
            let tool = (message.method() == Some("tools/call")).then(|| name_of(&message)).flatten();
            let view = runtime.status(&id);
            let known = tool
                .as_ref()
                .and_then(|tool| view.as_ref()?.catalogue.as_deref()?.tool(tool).map(|tool| tool.repeatable));
            let repeatable = known.unwrap_or_else(|| message.method().is_some_and(is_repeatable));
            let relay = Relay { message, origin, repeatable, tool };
            match runtime.relay(&id, relay, timeout, withdrawn).await {
                Ok(Some(answer)) => Answer::Message(answer),
                Ok(None) => Answer::Withdrawn,
                Err(error) => Answer::Error(Refusal::of_instance(&error, &runtime, &id, None).rpc()),
            }
        }
        .boxed()
    }

    pub(super) fn notification(&self, session: &Arc<Session>, id: &InstanceId, message: Message) {
        if let Err(error) = self.runtime.tell(id, message) {
            tracing::debug!(session_id = session.public_id(), %error, "a client's notification was not passed on");
        }
    }

    pub(super) fn ended(&self, session: &Arc<Session>, id: &InstanceId) {
        self.rooms.leave(session, id);
    }
}

/// The name in the params of a request.
fn name_of(message: &Message) -> Option<String> {
    #[derive(Deserialize)]
    struct Params {
        name: String,
    }
    serde_json::from_str::<Params>(message.params()?).ok().map(|params| params.name)
}
