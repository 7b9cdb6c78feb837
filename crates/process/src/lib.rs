//! Processes: the connector for stdio servers, process trees with cgroups and a ledger, sandboxes, and the keeper that ends
//! everything a killed satellite leaves. All `unsafe` code of the product is here.
#![deny(unsafe_code)]
#![allow(missing_docs, reason = "the embedding API documents its own items; this crate is internal")]

pub mod environment;
pub mod huge_pages;
pub mod isolation;
pub mod keeper;
mod left_servers;
pub mod memory;
pub mod memory_limit;
pub mod process;
pub mod program_pages;
pub mod service_manager;
pub mod stdio;
pub mod suspend;
pub mod usage;
