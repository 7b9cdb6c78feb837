//! The endpoint over real sockets, as a client sees it. Behind it is a fake handler (`fake`), scripted servers
//! (`played`) or a whole runtime with real servers (`whole`).

#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]
#![allow(clippy::needless_pass_by_value, reason = "`json!` is written where it is used")]

mod access;
mod client;
mod connections;
mod drain;
mod fake;
mod flat;
mod fuzz;
mod instance_statuses;
mod isolation;
mod lossless;
mod meta_tools;
#[cfg(target_os = "linux")]
mod mirror;
mod notices;
mod rejections;
mod scripted;
mod search;
mod server_requests;
mod stateless;
mod stateless_clients;
mod streams;
mod tls;
mod tools;
mod vanished_clients;
mod whole_satellite;
