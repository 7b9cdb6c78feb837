//! Errors of a whole file. A fault in one server is reported with that server.

use std::path::PathBuf;

use crate::locations::FileFormat;

/// A file that cannot be read. The message contains no value of the file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClientFileError {
    /// The file is larger than [`FILE_SIZE_MAX`](crate::FILE_SIZE_MAX).
    #[error("cannot read `{}`: {bytes} bytes are more than the limit of 16 MiB; check that it is a configuration file", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size in bytes.
        bytes: usize,
    },
    /// The file contains bytes that are not UTF-8.
    #[error("cannot read `{}`: line {line}, column {column} is not UTF-8; save the file as UTF-8", path.display())]
    NotText {
        /// The file.
        path: PathBuf,
        /// Line of the first such byte, from 1.
        line: usize,
        /// Column of the first such byte in characters, from 1.
        column: usize,
    },
    /// The text is not valid in its format.
    #[error("cannot read `{}`: invalid {format} at line {line}, column {column}: {message}; correct the file there", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The format of the file.
        format: FileFormat,
        /// Line, from 1.
        line: usize,
        /// Column in characters, from 1.
        column: usize,
        /// Message of the parser.
        message: String,
    },
    /// The text ends within a value.
    #[error("cannot read `{}`: the {format} ends too early, at line {line}, column {column}; the file is truncated, so restore it or complete it", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// The format of the file.
        format: FileFormat,
        /// Line of the end, from 1.
        line: usize,
        /// Column of the end in characters, from 1.
        column: usize,
    },
    /// Lists and tables are nested deeper than any client's configuration.
    #[error("cannot read `{}`: too many nested values at line {line}, column {column}; check that it is a configuration file", path.display())]
    TooDeep {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Column in characters, from 1.
        column: usize,
    },
}
