//! The MCP endpoint: every client's way in.

pub mod access;
