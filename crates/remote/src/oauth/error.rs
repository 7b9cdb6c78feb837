//! Errors of an authorization. They contain no secrets.

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OAuthError {
    // No valid response from the authorization server; a retry may succeed.
    #[error("{0}")]
    Unavailable(String),
    // The authorization server rejected the request.
    #[error("the authorization server rejected the request: {message}")]
    Refused {
        // OAuth error code.
        error: String,
        // Error code and description.
        message: String,
    },
    // The configuration or the server does not allow the request; a retry cannot succeed.
    #[error("{0}")]
    Unusable(String),
}
