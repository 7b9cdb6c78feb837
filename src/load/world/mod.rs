//! Where the servers are.

mod real;
mod sim;

use std::sync::Arc;

use futures::future::BoxFuture;
use mcp_satellite_actors::runtime::RuntimeHandle;
use mcp_satellite_actors::seam::Connector;

use super::types::{Injection, Nth, Target};

/// Servers, and how they are hurt.
pub(crate) trait World: Send + Sync {
    /// What the runtime starts them with.
    fn connector(&self) -> Arc<dyn Connector>;
    /// What an instance's configuration says.
    fn target(&self, nth: Nth, kind: usize) -> Target;
    /// Carries out a fault of a server. The error says what was in the way.
    fn hurt<'a>(&'a self, what: &'a Injection, runtime: &'a RuntimeHandle) -> BoxFuture<'a, Result<(), String>>;
    /// Takes it back.
    fn heal<'a>(&'a self, what: &'a Injection, runtime: &'a RuntimeHandle) -> BoxFuture<'a, Result<(), String>>;
    /// Servers and lines to servers that are there.
    fn left(&self) -> usize;
}
