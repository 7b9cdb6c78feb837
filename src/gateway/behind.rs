//! The implementation behind the endpoint: dispatches each request to one instance, to the tools that find tools, or to
//! the tools of all instances.

use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::{BoxFuture, ready};
use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::rpc::Message;

use super::access::User;
use super::face::{Answer, Call, Endpoint, Faces, Greeting, RpcError, Welcome};
use super::flat::Flat;
use super::instance::Instances;
use super::room::Rooms;
use super::session::Session;
use super::subscription::Filter;
use super::tools::face::notification;
use super::tools::{Callers, Tools};

/// The satellite's implementation of [`Faces`].
#[derive(Debug)]
pub struct Behind {
    runtime: RuntimeHandle,
    instances: Instances,
    tools: Arc<Tools>,
    flat: Arc<Flat>,
}

impl Behind {
    /// Creates the implementation for the instances of `runtime`, whose audience is `rooms`.
    pub fn new(runtime: &RuntimeHandle, rooms: Arc<Rooms>) -> Self {
        let callers = Arc::<Callers>::default();
        Self {
            runtime: runtime.clone(),
            instances: Instances::new(runtime.clone(), rooms, callers.clone()),
            tools: Arc::new(Tools::new(runtime.clone(), callers.clone())),
            flat: Arc::new(Flat::new(runtime.clone(), callers)),
        }
    }
}

impl Faces for Behind {
    fn instance(&self, user: &User, name: &str) -> Option<InstanceId> {
        self.instances.named(user, name)
    }

    fn initialize(
        &self,
        user: Arc<User>,
        endpoint: Endpoint,
        greeting: Greeting,
    ) -> BoxFuture<'static, Result<Welcome, RpcError>> {
        match endpoint {
            Endpoint::Instance(id) => self.instances.initialize(id, greeting),
            Endpoint::Tools => self.tools.initialize(&user, &greeting),
            Endpoint::Flat => self.flat.initialize(&user, &greeting),
        }
    }

    fn discover(&self, user: Arc<User>, endpoint: Endpoint) -> BoxFuture<'static, Result<String, RpcError>> {
        let told = match endpoint {
            Endpoint::Instance(id) => return self.instances.discover(id),
            Endpoint::Tools => self.tools.discover(&user),
            Endpoint::Flat => self.flat.discover(&user),
        };
        ready(Ok(told)).boxed()
    }

    fn definition(&self, user: Arc<User>, endpoint: &Endpoint, tool: &str) -> BoxFuture<'static, Option<Box<str>>> {
        match endpoint {
            Endpoint::Instance(id) => ready(self.instances.definition(id, tool)).boxed(),
            // No argument of these tools is repeated in a header.
            Endpoint::Tools => ready(None).boxed(),
            Endpoint::Flat => self.flat.definition(user, tool),
        }
    }

    fn listen(&self, session: &Arc<Session>, wanted: Filter) -> BoxFuture<'static, Result<Filter, RpcError>> {
        match &session.opening.endpoint {
            Endpoint::Instance(id) => self.instances.listen(session, id.clone(), wanted),
            // The list of these tools never changes; lost and returned servers are reported as log notifications.
            Endpoint::Tools => {
                self.tools.listen(session);
                ready(Ok(Filter::default())).boxed()
            }
            Endpoint::Flat => self.flat.listen(session, wanted),
        }
    }

    fn began(&self, session: &Arc<Session>) {
        match &session.opening.endpoint {
            Endpoint::Instance(id) => self.instances.began(session, id),
            Endpoint::Tools => self.tools.began(session),
            Endpoint::Flat => self.flat.began(session),
        }
        // The session may have ended before this call (evicted or its user removed), and `ended` is not called again.
        if session.ended().is_some() {
            self.ended(session);
        }
    }

    fn request(&self, session: Arc<Session>, call: Call) -> BoxFuture<'static, Answer> {
        match &session.opening.endpoint {
            Endpoint::Instance(id) => self.instances.request(id.clone(), session.clone(), call),
            Endpoint::Tools => self.tools.request(session, call),
            Endpoint::Flat => self.flat.request(session, call),
        }
    }

    fn notification(&self, session: &Arc<Session>, message: Message) {
        match &session.opening.endpoint {
            Endpoint::Instance(id) => self.instances.notification(session, id, message),
            Endpoint::Tools | Endpoint::Flat if message.method() == Some("notifications/initialized") => {
                self.instances.brings_roots_to_all(session);
            }
            Endpoint::Tools | Endpoint::Flat => notification(&self.runtime, session, &message),
        }
    }

    fn ended(&self, session: &Arc<Session>) {
        match &session.opening.endpoint {
            Endpoint::Instance(id) => self.instances.ended(session, id),
            Endpoint::Tools => self.tools.ended(session),
            Endpoint::Flat => self.flat.ended(session),
        }
    }
}
