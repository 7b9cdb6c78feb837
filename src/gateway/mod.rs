//! The MCP endpoint: every client's way in.

pub mod flat;
pub mod names;
pub mod search;
pub mod tools;
