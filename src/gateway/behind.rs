//! What answers behind the endpoint: one instance as if directly, the tools that find tools, or the tools themselves.

use std::sync::Arc;

use futures::future::BoxFuture;
use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::rpc::Message;

use super::access::User;
use super::face::{Answer, Call, Endpoint, Faces, Greeting, RpcError, Welcome};
use super::instance::Instances;
use super::room::Rooms;
use super::session::Session;
use super::tools::Tools;

/// See the module.
#[derive(Debug)]
pub struct Behind {
    instances: Instances,
    tools: Tools,
}

impl Behind {
    /// In front of the instances of `runtime`, whose audience are `rooms`.
    pub fn new(runtime: &RuntimeHandle, rooms: Arc<Rooms>) -> Self {
        Self { instances: Instances::new(runtime.clone(), rooms), tools: Tools::new(runtime.clone()) }
    }
}

impl Faces for Behind {
    fn instance(&self, user: &User, name: &str) -> Option<InstanceId> {
        self.instances.named(user, name)
    }

    fn initialize(
        &self,
        _user: Arc<User>,
        endpoint: Endpoint,
        greeting: Greeting,
    ) -> BoxFuture<'static, Result<Welcome, RpcError>> {
        match endpoint {
            Endpoint::Instance(id) => self.instances.initialize(id, greeting),
            Endpoint::Tools | Endpoint::Flat => self.tools.initialize(&greeting),
        }
    }

    fn began(&self, session: &Arc<Session>) {
        if let Endpoint::Instance(id) = &session.opening.endpoint {
            self.instances.began(session, id);
        }
    }

    fn request(&self, session: Arc<Session>, call: Call) -> BoxFuture<'static, Answer> {
        match &session.opening.endpoint {
            Endpoint::Instance(id) => self.instances.request(id.clone(), session.clone(), call),
            Endpoint::Tools | Endpoint::Flat => self.tools.request(session, call),
        }
    }

    fn notification(&self, session: &Arc<Session>, message: Message) {
        if let Endpoint::Instance(id) = &session.opening.endpoint {
            self.instances.notification(session, id, message);
        }
    }

    fn ended(&self, session: &Arc<Session>) {
        if let Endpoint::Instance(id) = &session.opening.endpoint {
            self.instances.ended(session, id);
        }
    }
}
