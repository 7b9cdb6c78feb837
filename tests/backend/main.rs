//! The reference backend over real HTTP: what it takes, what it refuses, and what it keeps.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod schemas;
