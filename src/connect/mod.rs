//! Connectors: the I/O that starts MCP servers, connects to them and ends them. A connector returns
//! [`mcp_satellite_actors::seam::ProcessLink`] for a child process and [`mcp_satellite_actors::seam::ServerLine`] for a remote
//! server.

pub use mcp_satellite_process::{environment, isolation, memory, process, stdio, suspend};
#[cfg(feature = "remote")]
pub use mcp_satellite_remote as remote;
pub use mcp_satellite_sim as sim;
