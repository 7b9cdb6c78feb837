//! Connectors: where servers come from. Each implements the seam's [`Connector`](mcp_satellite_actors::seam::Connector).

pub mod sim;
