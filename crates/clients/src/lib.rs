//! Configuration files of MCP clients: where they are, which servers they contain, and edits that add, replace or remove
//! one entry and leave every other byte unchanged. The crate writes no file.

mod client;
mod edit;
mod entry;

pub use client::Client;
pub use edit::{
    ConfigFormat, ConnectRecord, ContentHash, EditError, EntryState, RestoreBackup, Undo, UndoRemainder, add_entry,
    disconnect, entry_state, remove_entry, replace_servers,
};
pub use entry::{
    ENTRY_NAME, EntryForm, SatelliteEntry, TOKEN_VARIABLE, TokenReference, connect_path, connect_paths, supported_forms,
};
