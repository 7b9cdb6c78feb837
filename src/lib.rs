//! mcp-satellite around its actors: the connectors that touch the world, where events go, and — with the feature
//! `cli`, on by default — configuration files, the control socket and the command line.

#[cfg(feature = "cli")]
pub mod config;
pub mod connect;
pub mod journal;
pub mod sink;

pub use mcp_satellite_actors as actors;
