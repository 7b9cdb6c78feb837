//! Configuration files of MCP clients: where they are, which servers they contain, and edits that add, replace or remove
//! one entry and leave every other byte unchanged. The crate writes no file.
//!
//! [`existing_files`] lists the files of all clients, and [`read`] returns the servers of one file. The caller reads the
//! files. Values are [`HiddenText`], so that no `Debug` output contains a secret.

mod client;
mod entry;
mod error;
mod hidden;
mod locations;
mod node;
mod read;
mod secrets;
mod server;
mod template;

pub use client::Client;
pub use error::ReadError;
pub use hidden::HiddenText;
pub use locations::{ClientFile, ClientScope, FileFormat, Machine, candidate_files, existing_files};
pub use node::FILE_SIZE_MAX;
pub use read::read;
pub use secrets::{SecretArg, looks_secret, secret_args, secret_in_arg};
pub use server::{
    ClientInput, ClientServer, ClientServers, HttpProtocol, ImportNote, InputKind, OAuthHints, ServerTimeouts,
    ServerTransport, ToolFilter, UnreadableServer,
};
pub use template::{TemplatePart, TextTemplate};
