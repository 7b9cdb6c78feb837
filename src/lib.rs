//! Supervision runtime for MCP servers: the embedding API of `mcp_satellite_embed`, connectors to processes and remote
//! servers, event sinks and the journal. The feature `cli`, on by default, adds configuration files, the MCP endpoint,
//! the control socket and the command line.

#[cfg(feature = "cli")]
mod active_configuration;
#[cfg(feature = "cli")]
pub use mcp_satellite_backend as backend;
#[cfg(feature = "cli")]
pub mod backend_console;
#[cfg(feature = "cli")]
pub mod cli;
#[cfg(feature = "cli")]
pub use mcp_satellite_config as config;
pub mod connect;
#[cfg(feature = "cli")]
pub mod console;
#[cfg(feature = "cli")]
mod endpoint;
#[cfg(feature = "cli")]
mod erasures;
#[cfg(feature = "cli")]
pub use mcp_satellite_gateway as gateway;
#[cfg(feature = "cli")]
mod grants;
#[cfg(feature = "cli")]
pub use mcp_satellite_gateway::remedy;
#[cfg(feature = "cli")]
mod import;
#[cfg(feature = "cli")]
pub use mcp_satellite_load as load;
#[cfg(feature = "cli")]
mod satellite;
#[cfg(feature = "cli")]
mod telemetry;
#[cfg(feature = "cli")]
mod values;
#[cfg(feature = "cli")]
mod watch;

#[doc(inline)]
pub use mcp_satellite_embed::{
    FunctionError, Functions, Instance, InstanceError, InstanceHandle, Remedy, Runtime, RuntimeBuilder, RuntimeEnd,
    RuntimeStartError, ShutdownReport, ToolCall, ToolResult, actors,
};
pub use mcp_satellite_files::data_dir;
pub use mcp_satellite_store::sink;
#[cfg(feature = "cli")]
pub use mcp_satellite_store::state;
#[cfg(feature = "journal")]
pub use mcp_satellite_store::{delivery, journal};
