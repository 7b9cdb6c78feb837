//! Replaceable parts of a run. Tests use them to break an invariant and check that the break is detected.

use std::sync::Arc;

use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::seam::{Connector, EventSink};

use super::drive::LoadCaller;
use super::measure::ProcessMemory;

/// Wrappers around the parts of a run. The default changes nothing.
#[derive(Clone)]
pub struct TestHooks {
    // Applied outside the counting connector: the runtime sees the result.
    pub connector: fn(Arc<dyn Connector>) -> Arc<dyn Connector>,
    // Applied outside the recorder: the runtime sees the result.
    pub sink: fn(Arc<dyn EventSink>) -> Arc<dyn EventSink>,
    pub caller: fn(Arc<dyn LoadCaller>) -> Arc<dyn LoadCaller>,
    pub spec: fn(InstanceSpec) -> InstanceSpec,
    // Returns the memory in use, in bytes. Tests that run in parallel count their own thread.
    pub memory: fn() -> u64,
}

impl Default for TestHooks {
    fn default() -> Self {
        Self {
            connector: |connector| connector,
            sink: |sink| sink,
            caller: |caller| caller,
            spec: |spec| spec,
            memory: || ProcessMemory::now().anonymous,
        }
    }
}
