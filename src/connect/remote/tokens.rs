//! Where tokens come from that nobody has configured: an authorization that was given once, and is renewed while the
//! server is used. The line asks for one with each request, and once more when a server has refused the one it had.

use std::sync::Arc;

use futures::FutureExt;
use futures::future::{BoxFuture, ready};
use mcp_satellite_actors::model::failure::FailureKind;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::secret::Secret;
use mcp_satellite_actors::model::spec::{InstanceSpec, Target};

/// Whose token is meant, and for which server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// The instance: nobody else's token is ever given for it.
    pub id: InstanceId,
    /// What it is called.
    pub name: Arc<str>,
    /// Its server, without a query.
    pub url: String,
}

/// A request that a server has refused for its token.
#[derive(Debug)]
pub struct Refusal {
    /// 401 or 403.
    pub status: u16,
    /// What it was sent with.
    pub used: Option<Secret>,
    /// `WWW-Authenticate`, as it was sent: it may echo the token.
    pub challenge: Option<String>,
    /// Whether it was to begin what there is with the server (`initialize`, `server/discover`): not one call alone.
    pub first: bool,
    /// Whether it was refused before, with another token: it is not sent once more.
    pub again: bool,
}

/// Has the tokens of instances that bring none of their own.
pub trait Tokens: Send + Sync + 'static {
    /// The one that there is. It is asked for with each request, so it waits for nothing.
    fn token(&self, holder: &Holder) -> Option<Secret>;

    /// Another one, with which the request is sent once more; none where that is not its business; or why there is none.
    fn another(&self, holder: &Holder, refusal: Refusal) -> BoxFuture<'static, Result<Option<Secret>, FailureKind>>;
}

/// Where one instance's tokens come from.
pub(super) struct Purse {
    holder: Holder,
    tokens: Arc<dyn Tokens>,
}

impl Purse {
    pub(super) fn of(spec: &InstanceSpec, tokens: &Arc<dyn Tokens>) -> Option<Self> {
        Holder::of(spec).map(|holder| Self { holder, tokens: Arc::clone(tokens) })
    }

    pub(super) fn token(&self) -> Option<Secret> {
        self.tokens.token(&self.holder)
    }

    pub(super) async fn another(&self, refusal: Refusal) -> Result<Option<Secret>, FailureKind> {
        self.tokens.another(&self.holder, refusal).await
    }
}

/// Nobody has any.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoTokens;

impl Tokens for NoTokens {
    fn token(&self, _holder: &Holder) -> Option<Secret> {
        None
    }

    fn another(&self, _holder: &Holder, _refusal: Refusal) -> BoxFuture<'static, Result<Option<Secret>, FailureKind>> {
        ready(Ok(None)).boxed()
    }
}

impl Holder {
    /// An instance that may have a token: one of a remote server that brings no credential of its own where a token goes.
    pub fn of(spec: &InstanceSpec) -> Option<Self> {
        let Target::Remote { url, .. } = &spec.target else { return None };
        let brings_its_own = spec.headers.keys().any(|name| name.eq_ignore_ascii_case("authorization"));
        (!brings_its_own).then(|| Self { id: spec.id.clone(), name: spec.name.clone(), url: url.clone() })
    }
}
