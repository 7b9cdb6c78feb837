//! Configuration files of MCP clients: where they are, which servers they contain, and edits that add, replace or remove
//! one entry and leave every other byte unchanged. The crate writes no file.
//!
//! [`existing_files`] lists the files of all clients, and [`read`] returns the servers of one file. The caller reads the
//! files. Values are [`HiddenText`], so that no `Debug` output contains a secret.

mod client;
mod edit;
mod error;
mod hidden;
mod json_options;
mod locations;
mod node;
mod read;
mod secrets;
mod server;
mod template;

pub use client::Client;
pub use edit::{
    ConnectRecord, ContentHash, ENTRY_NAME, EditError, EntryForm, EntryState, RestoreBackup, SatelliteEntry,
    TOKEN_VARIABLE, TokenReference, Undo, UndoRemainder, add_entry, connect_paths, disconnect, entry_state,
    entry_warnings, remove_entry, replace_servers, server_names, supported_forms,
};
pub use error::ClientFileError;
pub use hidden::HiddenText;
pub use locations::{
    ClientFile, ClientScope, ClientVariables, FileFormat, Machine, candidate_files, describe_file, existing_files,
};
pub use read::{FILE_SIZE_MAX, read};
pub use secrets::{SecretArg, looks_secret, may_be_secret, secret_args, secret_in_arg, template_has_secret};
pub use server::{
    ClientInput, ClientServer, ClientServers, HttpProtocol, ImportNote, InputKind, OAuthHints, ServerTimeouts,
    ServerTransport, ToolSelection, UnreadableServer,
};
pub use template::{TemplatePart, TextTemplate};
