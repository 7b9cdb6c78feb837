//! What a test may put between the runtime and those who watch it, to see that a broken promise is caught.

use std::sync::Arc;

use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::seam::{Connector, EventSink};

use super::drive::Caller;
use super::measure::Memory;

/// The product uses the default, in which nothing is between.
#[derive(Clone)]
pub(crate) struct Seams {
    /// The runtime sees what this gives; what counts is beneath it.
    pub(crate) connector: fn(Arc<dyn Connector>) -> Arc<dyn Connector>,
    /// The runtime sees what this gives; what records is beneath it.
    pub(crate) sink: fn(Arc<dyn EventSink>) -> Arc<dyn EventSink>,
    pub(crate) caller: fn(Arc<dyn Caller>) -> Arc<dyn Caller>,
    pub(crate) spec: fn(InstanceSpec) -> InstanceSpec,
    /// How much memory there is in use, in bytes. Tests that run beside others look at their own.
    pub(crate) memory: fn() -> u64,
}

impl Default for Seams {
    fn default() -> Self {
        Self {
            connector: |connector| connector,
            sink: |sink| sink,
            caller: |caller| caller,
            spec: |spec| spec,
            memory: || Memory::now().anonymous,
        }
    }
}
