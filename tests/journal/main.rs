//! The journal against real files, and what really happens to them: `kill -9`, full and read-only disks, damage,
//! files that vanish, clocks that jump. Disks that are full or read-only are mounted, which takes root: these tests
//! are ignored for other users, and fail with `MCP_MOUNTS=required`.
#![cfg(feature = "journal")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod crash;
mod damage;
mod disk;
mod numbers;
mod outbox;
mod reading;
mod retention;
mod schema;
mod storing;
mod support;
