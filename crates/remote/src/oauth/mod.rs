//! OAuth 2.1 authorization for remote servers.
//!
//! An instance without a configured `Authorization` header uses the grant of its user, if there is one. [`Grants`]
//! supplies the tokens to the connector and replaces a token that a server rejects. A grant belongs to a single
//! instance. Its tokens are not part of the configuration, so a renewal changes only the masking.
//!
//! A new token is stored, then masked, then used. A change of the mask alone does not count as new credentials of a
//! connection, because a request that was refused had the newest token.

mod discovery;
mod flow;
mod grant;
mod http;
mod keeper;
mod refused;
mod rules;
mod token;

pub use self::flow::{FlowCompletion, FlowRequest, FlowStart};
pub use self::grant::GrantStore;
pub use self::keeper::{Grants, TokenListener};
pub use self::rules::is_safe_in_a_command;

// Contains no secrets.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OAuthError {
    // No valid response from the authorization server; a retry may succeed.
    #[error("{0}")]
    Unavailable(String),
    // The authorization server rejected the request.
    #[error("the authorization server rejected the request: {said}")]
    Refused {
        // OAuth error code.
        error: String,
        // Error code and description.
        said: String,
    },
    // The configuration or the server does not allow the request; a retry cannot succeed.
    #[error("{0}")]
    Unusable(String),
}
