//! The endpoints of the satellite: the one that a path names, and the one that was found for it.

use mcp_satellite_actors::model::ids::InstanceId;

/// Endpoint that a client is connected to. A session is bound to one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum EndpointId {
    /// Path `/i/{instance}/mcp`: one instance, passed through.
    Instance(InstanceId),
    /// Path `/mcp`: all instances of the user behind a few tools.
    Tools,
    /// Path `/mcp?mode=flat`: the tools of all instances of the user.
    Flat,
    /// Path `/i/satellite/mcp`: the control plane of the satellite.
    Control,
}

/// Endpoint that a request path names. Whether there is such an instance is not checked yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndpointPath<'a> {
    Instance(&'a str),
    Tools,
    Flat,
}
