//! Private files of a satellite: the data directory, which follows no symbolic link and belongs to one user, a record of
//! this user's data directories, and a thread that writes while supervision does not wait for the disk.
#![deny(unsafe_code)]
#![allow(missing_docs, reason = "the embedding API documents its own items; this crate is internal")]

pub mod data_dir;
pub mod disk;
pub mod known_dirs;
pub mod replace_file;
pub mod user_dirs;
