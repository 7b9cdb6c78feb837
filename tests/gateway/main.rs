//! The endpoint over real sockets: what a client sees, byte for byte where it matters. What answers is a fake: servers have
//! tests of their own.

#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]
#![allow(clippy::needless_pass_by_value, reason = "`json!` is written where it is used")]

mod abandoned;
mod access;
mod client;
mod drain;
mod fake;
mod fuzz;
mod strangers;
mod streams;
mod tls;
