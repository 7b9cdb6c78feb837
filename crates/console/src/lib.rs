//! The console: an HTTP API with roles, its description in `OpenAPI`, the login of browsers, and the pages.
//!
//! ```text
//! routes     a request: path → access → role → query and body → handler → response or problem document
//! changes    requested changes, their bodies, and the events about them
//! access     tokens, logins and the principal behind a request
//! api        shapes of requests and responses, shared with the control socket
//! feed       changes of the instances as a stream; page_stream: together with events
//! pages      the pages of browsers, with their script and style
//! v1         those that only the HTTP API has
//! mcp_tools  tools of the control plane's MCP server
//! ```
//!
//! The crate knows no satellite. A server of the API, such as the satellite, implements [`routes::ApiServer`] and
//! registers its handlers with [`routes::Routes`].
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "the embedding API documents its own items; this crate is internal")]

pub mod access;
pub mod api;
mod call_queries;
pub mod changes;
pub mod feed;
pub mod mcp_tools;
mod openapi;
pub mod page_stream;
pub mod pages;
pub mod principal;
pub mod problem;
mod query_text;
pub mod routes;
mod row;
pub mod sse;
mod stream_queries;
pub mod v1;
