//! Configuration files of MCP clients: where they are, which servers they contain, and edits that add, replace or remove
//! one entry and leave every other byte unchanged. The crate writes no file.

mod client;

pub use client::Client;
