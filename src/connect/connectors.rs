//! The connectors of a satellite, one for each transport.

use std::sync::Arc;

use futures::future::BoxFuture;
use mcp_satellite_actors::model::ids::RunNumber;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::seam::{Connector, OpenError, ProcessLink, ServerLine};

use super::remote::RemoteConnector;
use super::stdio::StdioConnector;

/// Connectors for child processes and remote servers.
#[derive(Clone)]
pub struct Connectors {
    /// Connector for child processes.
    pub stdio: StdioConnector,
    /// Connector for remote servers.
    pub remote: RemoteConnector,
}

impl Connector for Connectors {
    fn open(&self, spec: Arc<InstanceSpec>, run: RunNumber) -> BoxFuture<'static, Result<ProcessLink, OpenError>> {
        self.stdio.open(spec, run)
    }

    fn dial(&self, spec: &Arc<InstanceSpec>, run: RunNumber) -> Box<dyn ServerLine> {
        self.remote.dial(spec, run)
    }
}
