//! `/mcp`: a server of our own, whose tools are the six.

use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::{BoxFuture, ready};
use mcp_satellite_actors::RuntimeHandle;

use super::raw::{quoted, written};
use super::schema::{INSTRUCTIONS, TOOLS};
use crate::gateway::era;
use crate::gateway::face::{Answer, Call, Greeting, RpcError, Welcome};
use crate::gateway::reply::METHOD_NOT_FOUND;
use crate::gateway::search::Indexes;
use crate::gateway::session::Session;

/// See the module.
#[derive(Debug)]
pub(in crate::gateway) struct Tools {
    runtime: RuntimeHandle,
    indexes: Arc<Indexes>,
}

impl Tools {
    pub(in crate::gateway) fn new(runtime: RuntimeHandle) -> Self {
        Self { runtime, indexes: Arc::default() }
    }

    pub(in crate::gateway) fn initialize(&self, greeting: &Greeting) -> BoxFuture<'static, Result<Welcome, RpcError>> {
        let version = era::agreed(&greeting.version, era::NEWEST);
        let result = format!(
            r#"{{"protocolVersion":{},"capabilities":{{"tools":{{}}}},"serverInfo":{{"name":"mcp-satellite","version":{}}},"instructions":{}}}"#,
            quoted(&version),
            quoted(env!("CARGO_PKG_VERSION")),
            written(&INSTRUCTIONS),
        );
        ready(Ok(Welcome { result, version })).boxed()
    }

    pub(in crate::gateway) fn request(&self, session: Arc<Session>, call: Call) -> BoxFuture<'static, Answer> {
        let (runtime, indexes) = (self.runtime.clone(), self.indexes.clone());
        async move {
            match call.message.method() {
                Some("tools/call") => {
                    let user = session.user();
                    super::call(&runtime, &indexes, (&user.team, &user.user), call).await
                }
                Some("tools/list") => Answer::Result(TOOLS.to_owned()),
                Some("ping") => Answer::Result("{}".to_owned()),
                method => {
                    let method = method.unwrap_or_default();
                    Answer::Error(RpcError::new(METHOD_NOT_FOUND, format!("there is no method `{method}` here")))
                }
            }
        }
        .boxed()
    }
}
