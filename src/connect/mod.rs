//! Connectors: the I/O that starts MCP servers, connects to them and ends them. A connector returns
//! [`mcp_satellite_actors::seam::ProcessLink`] for a child process and [`mcp_satellite_actors::seam::ServerLine`] for a remote
//! server.

#![deny(unsafe_code)]

#[cfg(feature = "remote")]
mod connectors;
pub mod environment;
pub mod isolation;
pub mod memory;
pub mod process;
#[cfg(feature = "remote")]
pub mod remote;
pub mod sim;
pub mod stdio;
pub mod suspend;

#[cfg(feature = "remote")]
pub use connectors::Connectors;
