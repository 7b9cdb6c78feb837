//! Roles in the HTTP API.

/// The permissions of a token or a user in the HTTP API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoleAccess {
    pub role: Role,
    /// True to read arguments, results and server logs of other users.
    pub reads_calls: bool,
    /// True to call tools in the name of other users.
    pub acts_as: bool,
}

/// Roles in the HTTP API. A later role includes the earlier ones.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, strum::Display, strum::IntoStaticStr, strum::VariantArray,
)]
#[strum(serialize_all = "snake_case")]
pub enum Role {
    /// Reads states, events and metrics.
    Viewer,
    /// Starts, stops, restarts and reconnects servers, and calls tools.
    Operator,
    /// Changes the configuration.
    Admin,
}
