//! The endpoint over real sockets, as a client sees it. Behind it is a fake handler (`fake`), scripted servers
//! (`played`) or a whole runtime with real servers (`whole`).

#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]
#![allow(clippy::needless_pass_by_value, reason = "`json!` is written where it is used")]

mod abandoned;
mod access;
mod client;
mod connections;
mod drain;
mod fake;
mod flat;
mod fuzz;
mod guests;
mod lossless;
mod meta_tools;
#[cfg(target_os = "linux")]
mod mirror;
mod mixed;
mod notices;
mod played;
mod questions;
mod search;
mod stateless;
mod strangers;
mod streams;
mod tls;
mod tools;
mod truth;
mod whole;
