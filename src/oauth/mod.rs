//! Authorization of remote servers by OAuth 2.1: who has been granted what, and how it stays valid.
//!
//! An instance that brings no `Authorization` of its own uses the grant that its user has given it, if there is one:
//! [`Grants`] is where the connector takes tokens from, and where it goes when a server refuses one. A grant is one
//! instance's and serves no other. Its tokens are in no configuration: a renewal changes nothing but what is masked.

mod discovery;
mod flow;
mod grant;
mod http;
mod keeper;
mod refused;
mod rules;
mod token;

pub(crate) use self::flow::{Answered, Begun, Wanted};
pub(crate) use self::keeper::{Grants, Teller};
pub(crate) use self::rules::is_safe_in_a_command;

/// Why there is no token. Nothing of it is a secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Trouble {
    /// Nobody answers, or not as an authorization server does: another time it may.
    #[error("{0}")]
    Away(String),
    /// The authorization server says no.
    #[error("its authorization server refuses: {said}")]
    Refused {
        /// OAuth's word for it.
        error: String,
        /// With what it says besides.
        said: String,
    },
    /// What is there cannot be used, or not like this.
    #[error("{0}")]
    Unusable(String),
}
