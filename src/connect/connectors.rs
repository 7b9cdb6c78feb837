//! The connectors of a satellite: each transport has its own.

use std::sync::Arc;

use futures::future::BoxFuture;
use mcp_satellite_actors::model::ids::Run;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::seam::{Connector, Line, Link, OpenError};

use super::remote::RemoteConnector;
use super::stdio::StdioConnector;

/// Child processes by one connector, remote servers by the other.
#[derive(Clone)]
pub struct Connectors {
    /// For child processes.
    pub stdio: StdioConnector,
    /// For remote servers.
    pub remote: RemoteConnector,
}

impl Connector for Connectors {
    fn open(&self, spec: Arc<InstanceSpec>, run: Run) -> BoxFuture<'static, Result<Link, OpenError>> {
        self.stdio.open(spec, run)
    }

    fn dial(&self, spec: &Arc<InstanceSpec>, run: Run) -> Box<dyn Line> {
        self.remote.dial(spec, run)
    }
}
