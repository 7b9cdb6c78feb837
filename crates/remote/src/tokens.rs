//! Tokens that are not configured: they come from an authorization that was given once and is renewed while the server
//! is in use. The line gets a token for each request, and another one after a server has refused a token.

use std::sync::Arc;

use futures::FutureExt;
use futures::future::{BoxFuture, ready};
use mcp_satellite_actors::model::failure::FailureKind;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::secret::Secret;
use mcp_satellite_actors::model::spec::{InstanceSpec, ServerTarget};

/// Instance and server that a token belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenHolder {
    /// Id of the instance. The token is never used for another one.
    pub id: InstanceId,
    pub name: Arc<str>,
    /// Address of the server, without query.
    pub url: String,
}

#[derive(Debug)]
pub struct TokenRefusal {
    /// HTTP status: 401 or 403.
    pub status: u16,
    pub token: Option<Secret>,
    /// Value of `WWW-Authenticate`, unmasked: it may echo the token.
    pub challenge: Option<String>,
    /// True for the first request to the server (`initialize`, `server/discover`): the refusal then concerns more than
    /// a single call.
    pub is_first_request: bool,
    /// True if the request was refused before, with another token. It is not sent again.
    pub is_retry: bool,
}

/// Source of tokens for instances without a credential of their own.
pub trait TokenSource: Send + Sync + 'static {
    /// Returns the current token. Called for each request, so it must not block.
    fn token(&self, holder: &TokenHolder) -> Option<Secret>;

    /// Returns another token, with which the request is sent once more, or `None` if this source does not handle the
    /// refusal.
    ///
    /// # Errors
    ///
    /// Fails with the reason why there is no token.
    fn replacement_token(
        &self,
        holder: &TokenHolder,
        refusal: TokenRefusal,
    ) -> BoxFuture<'static, Result<Option<Secret>, FailureKind>>;
}

pub(super) struct InstanceTokens {
    holder: TokenHolder,
    tokens: Arc<dyn TokenSource>,
}

impl InstanceTokens {
    pub(super) fn from_spec(spec: &InstanceSpec, tokens: &Arc<dyn TokenSource>) -> Option<Self> {
        TokenHolder::from_spec(spec).map(|holder| Self { holder, tokens: Arc::clone(tokens) })
    }

    pub(super) fn token(&self) -> Option<Secret> {
        self.tokens.token(&self.holder)
    }

    pub(super) async fn replacement_token(&self, refusal: TokenRefusal) -> Result<Option<Secret>, FailureKind> {
        self.tokens.replacement_token(&self.holder, refusal).await
    }
}

#[derive(Debug, Clone, Copy, Default)]
pub struct NoTokens;

impl TokenSource for NoTokens {
    fn token(&self, _holder: &TokenHolder) -> Option<Secret> {
        None
    }

    fn replacement_token(
        &self,
        _holder: &TokenHolder,
        _refusal: TokenRefusal,
    ) -> BoxFuture<'static, Result<Option<Secret>, FailureKind>> {
        ready(Ok(None)).boxed()
    }
}

impl TokenHolder {
    /// Returns the holder for an instance of a remote server that has no `Authorization` header of its own.
    pub fn from_spec(spec: &InstanceSpec) -> Option<Self> {
        let ServerTarget::Remote { url, .. } = &spec.target else { return None };
        let has_own_header = spec.headers.keys().any(|name| name.eq_ignore_ascii_case("authorization"));
        (!has_own_header).then(|| Self { id: spec.id.clone(), name: spec.name.clone(), url: url.clone() })
    }
}
