//! Errors of edits.

use super::entry::{ENTRY_NAME, EntryForm};
use crate::Client;
use crate::locations::FileFormat;

/// The reason why a client's configuration was not edited. No message contains a value of the configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EditError {
    /// The file is not UTF-8.
    #[error("cannot read the configuration: it is not UTF-8 text; convert it to UTF-8")]
    NotUtf8,
    /// The file is not valid in its format, or nested too deeply.
    #[error("cannot read the configuration: invalid {format} in line {line}: {message}; correct the file")]
    Syntax {
        /// The format of the client's configuration.
        format: FileFormat,
        /// Line, from 1.
        line: usize,
        /// Message of the parser.
        message: String,
    },
    /// The root of the file is not an object.
    #[error("cannot edit the configuration: it must contain an object and contains {found}; correct the file")]
    WrongRoot {
        /// The type that the root has.
        found: &'static str,
    },
    /// The value that contains the servers has the wrong type.
    #[error("cannot edit the configuration: `{key}` must be {expected} and is {found}; correct the file")]
    WrongServers {
        /// The key of the root object.
        key: &'static str,
        /// The type that the client expects.
        expected: &'static str,
        /// The type that the value has.
        found: &'static str,
    },
    /// A key occurs twice where the edit needs one.
    #[error("cannot edit the configuration: the key `{key}` occurs twice; remove one of them")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// The client has an entry with our name that connect did not write.
    #[error(
        "cannot edit the entry `{ENTRY_NAME}` in `{key}`: it does not start this satellite; rename it and try again"
    )]
    ForeignEntry {
        /// The key of the root object that contains the entry.
        key: &'static str,
    },
    /// A server to be replaced is not in the file.
    #[error(
        "cannot replace the server `{name}`: the configuration does not contain it; import the configuration again"
    )]
    MissingServer {
        /// The name of the server.
        name: String,
    },
    /// The client does not support this kind of entry.
    #[error("cannot connect {client} by {form}: the client has no such reference; connect it without `--http`")]
    UnsupportedForm {
        /// The client.
        client: Client,
        /// The kind of entry.
        form: EntryForm,
    },
    /// The entry is relative, or could contain the token.
    #[error("cannot write the entry: {reason}")]
    InvalidEntry {
        /// The reason.
        reason: &'static str,
    },
    /// The file has a notation that cannot be edited safely.
    #[error("cannot edit the configuration without changing other parts of it; edit it by hand:\n{instruction}")]
    EditByHand {
        /// The parts to add or to remove, as text for a person.
        instruction: String,
    },
}
