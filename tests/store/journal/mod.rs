//! The journal with real files: `kill -9`, full and read-only disks, damaged and deleted files, clock changes. The
//! tests of full and read-only disks mount file systems, which requires root: they are ignored for other users and fail
//! with `MCP_MOUNTS=required`.

mod crash;
mod damage;
mod disk;
mod numbers;
mod outbox;
mod reading;
mod recent;
mod retention;
mod schema;
mod storing;
pub(crate) mod support;
