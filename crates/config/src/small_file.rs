//! Files that a configuration names: secrets and certificates.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

/// Maximum size of a file in bytes.
const SIZE_MAX: u64 = 1024 * 1024;

/// Opens a file that is read at once. Whoever may check a configuration may name any path.
///
/// # Errors
/// The file cannot be opened, is not a regular file, or is larger than 1 MiB.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    // Asked before the open, which waits for a writer if the file is a FIFO.
    let metadata = std::fs::metadata(path)?;
    let problem = if !metadata.is_file() {
        "it is not a regular file"
    } else if metadata.len() > SIZE_MAX {
        "it is larger than 1 MiB"
    } else {
        return File::open(path);
    };
    Err(io::Error::other(problem))
}

/// Reads a file that [`open`] accepts.
///
/// # Errors
/// Those of [`open`], and text that is not UTF-8.
pub(crate) fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    open(path)?.take(SIZE_MAX).read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_small_regular_files_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        for path in [&fifo, Path::new("/dev/zero"), folder.path()] {
            let error = read(path).unwrap_err();
            assert_eq!(error.to_string(), "it is not a regular file", "{}", path.display());
        }
        let file = folder.path().join("file");
        let large = File::create(&file).unwrap();
        large.set_len(SIZE_MAX + 1).unwrap();
        assert_eq!(read(&file).unwrap_err().to_string(), "it is larger than 1 MiB");
        std::fs::write(&file, "secret").unwrap();
        assert_eq!(read(&file).unwrap(), "secret");
    }
}
