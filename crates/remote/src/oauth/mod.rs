//! OAuth 2.1 authorization for remote servers.
//!
//! An instance without a configured `Authorization` header uses the grant of its user, if there is one. [`Grants`]
//! supplies the tokens to the connector and replaces a token that a server rejects. A grant belongs to a single
//! instance. Its tokens are not part of the configuration, so a renewal changes only the masking.
//!
//! A new token is stored, then masked, then used. A change of the mask alone does not count as new credentials of a
//! connection, because a request that was refused had the newest token.

mod discovery;
mod error;
mod flow;
mod grant;
mod grants;
mod http;

mod rules;
mod token;
mod token_source;

pub use self::error::OAuthError;
pub use self::flow::{FlowCompletion, FlowRequest, FlowStart};
pub use self::grant::GrantStore;
pub use self::grants::{Grants, TokenListener};
pub use self::rules::is_safe_in_a_command;
