//! Plain data types of the runtime. Nothing here reads a clock, starts a process or opens a connection.

pub mod actor_tree;
pub mod backoff;
pub mod byte_budget;
pub mod catalogue;
pub mod event;
pub mod exit;
pub mod failure;
pub mod ids;
pub mod json_text;
pub mod memo;
pub mod policy;
pub mod printable;
pub mod remedy;
pub mod remote;
pub mod secret;
pub mod session_description;
pub mod settings;
pub mod spec;
pub mod status;
pub mod variables;

pub use mcp_satellite_protocol::era;
