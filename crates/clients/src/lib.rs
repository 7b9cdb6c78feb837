//! Configuration files of MCP clients: where they are, which servers they contain, and edits that add, replace or remove
//! one entry and leave every other byte unchanged. The crate writes no file.

mod client;
mod edit;

pub use client::Client;
pub use edit::{
    ConfigFormat, ConnectRecord, ContentHash, ENTRY_NAME, EditError, EntryForm, EntryState, RestoreBackup,
    SatelliteEntry, TOKEN_VARIABLE, TokenReference, Undo, UndoRemainder, add_entry, connect_path, connect_paths,
    disconnect, entry_state, remove_entry, replace_servers, supported_forms,
};
