//! The satellite around the runtime of `mcp-satellite-actors`: what touches the world.

#[cfg(feature = "cli")]
pub mod config;
