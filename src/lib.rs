//! Supervision runtime for MCP servers, based on the actors of `mcp_satellite_actors`: connectors to processes and
//! remote servers, event sinks and the journal. The feature `cli`, on by default, adds configuration files, the MCP
//! endpoint, the control socket and the command line.

#[cfg(feature = "cli")]
mod active_configuration;
#[cfg(feature = "cli")]
pub use mcp_satellite_backend as backend;
#[cfg(feature = "cli")]
pub mod cli;
#[cfg(feature = "cli")]
pub use mcp_satellite_config as config;
pub mod connect;
#[cfg(feature = "cli")]
pub mod console;
mod embed;
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
pub use mcp_satellite_load as load;
#[cfg(feature = "cli")]
mod satellite;
#[cfg(feature = "cli")]
mod values;
#[cfg(feature = "cli")]
mod watch;

pub use embed::{
    FunctionError, Functions, Instance, InstanceError, InstanceHandle, Runtime, RuntimeBuilder, RuntimeStartError,
    ToolCall, ToolResult,
};
pub use mcp_satellite_actors as actors;
pub use mcp_satellite_actors::ShutdownReport;
pub use mcp_satellite_actors::model::exit::RuntimeEnd;
pub use mcp_satellite_actors::model::remedy::Remedy;
pub use mcp_satellite_files::data_dir;
pub use mcp_satellite_store::sink;
#[cfg(feature = "cli")]
pub use mcp_satellite_store::state;
#[cfg(feature = "journal")]
pub use mcp_satellite_store::{delivery, journal};
