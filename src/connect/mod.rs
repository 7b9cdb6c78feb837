//! Connectors: the I/O that brings MCP servers to life and ends them. What they hand over is
//! [`mcp_satellite_actors::seam::Link`].

#![deny(unsafe_code)]

pub mod environment;
pub mod isolation;
pub mod process;
pub mod sim;
pub mod stdio;
pub mod suspend;
