//! Optional control plane for satellites: the wire protocol (`wire`), the client inside the satellite (`link`) and a
//! small backend server (`server`).
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "the embedding API documents its own items; this crate is internal")]

pub mod link;
pub mod server;
pub mod wire;
