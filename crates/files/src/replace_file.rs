//! Files outside the data directory, such as a configuration of a user or of a client: read once, and replaced as a whole
//! unless somebody changed them meanwhile. Symbolic links are followed; mode and group remain.

use std::fs::{self, DirBuilder, File, Metadata};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use nix::libc::{ENXIO, O_NOCTTY, O_NONBLOCK};
use nix::unistd::{AccessFlags, access, geteuid};

/// The largest file in bytes that is read.
const FILE_SIZE_MAX: u64 = 16 << 20;
/// The bits of a mode that permissions consist of.
const PERMISSIONS: u32 = 0o7777;
/// The permissions of the group and of others.
const PERMISSIONS_OF_OTHERS: u32 = 0o077;
/// The mode of a new file.
const PRIVATE: u32 = 0o600;

/// A file at the time of reading.
#[derive(Debug)]
pub struct EditedFile {
    /// The path as named.
    path: PathBuf,
    /// The path with links resolved.
    target: PathBuf,
    /// The file; `None` if it does not exist.
    before: Option<FileSnapshot>,
}

#[derive(PartialEq, Eq)]
struct FileSnapshot {
    contents: Vec<u8>,
    mode: u32,
    group: u32,
}

impl std::fmt::Debug for FileSnapshot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "<{} bytes>", self.contents.len())
    }
}

/// The reason why a file is not edited. The file is unchanged.
#[derive(Debug, thiserror::Error)]
pub enum FileEditError {
    #[error("cannot edit `{}`: {cause}; check the path and its permissions", path.display())]
    Io { path: PathBuf, cause: io::Error },
    #[error("cannot edit `{}`: it is not a regular file; name another file", .0.display())]
    NotAFile(PathBuf),
    #[error("cannot edit `{}`: it is a link to a file that does not exist; create that file, or remove the link", .0.display())]
    BrokenLink(PathBuf),
    #[error("cannot edit `{}`: it belongs to user {owner}, and this command runs as user {user}; run it as the owner", path.display())]
    OtherOwner { path: PathBuf, owner: u32, user: u32 },
    #[error("cannot edit `{}`: the file is read-only; make it writable: chmod u+w", .0.display())]
    ReadOnlyFile(PathBuf),
    #[error("cannot edit `{}`: the directory `{}` is read-only; make it writable: chmod u+w", path.display(), directory.display())]
    ReadOnlyDirectory { path: PathBuf, directory: PathBuf },
    #[error("cannot edit `{}`: it is larger than 16 MiB; check that it is a configuration file", .0.display())]
    TooLarge(PathBuf),
    #[error("cannot edit `{}`: another program has just changed it; run the command again", .0.display())]
    Changed(PathBuf),
}

impl EditedFile {
    /// Reads the file at `path`, which need not exist, through symbolic links.
    pub fn open(path: &Path) -> Result<Self, FileEditError> {
        let failed = |cause| FileEditError::Io { path: path.to_owned(), cause };
        let target = match path.canonicalize() {
            Ok(target) => target,
            Err(error) if error.kind() == ErrorKind::NotFound && path.is_symlink() => {
                return Err(FileEditError::BrokenLink(path.to_owned()));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => path.to_owned(),
            Err(error) => return Err(failed(error)),
        };
        let before = match read_file(&target) {
            Ok((contents, about)) => Some(FileSnapshot::new(contents, &about, path)?),
            Err(FileReadError::Io(error)) if error.kind() == ErrorKind::NotFound => None,
            Err(FileReadError::Io(error)) => return Err(failed(error)),
            Err(FileReadError::NotAFile) => return Err(FileEditError::NotAFile(path.to_owned())),
            Err(FileReadError::TooLarge) => return Err(FileEditError::TooLarge(path.to_owned())),
        };
        Ok(Self { path: path.to_owned(), target, before })
    }

    /// Returns the contents, or `None` if the file does not exist.
    pub fn contents(&self) -> Option<&[u8]> {
        self.before.as_ref().map(|before| &before.contents[..])
    }

    /// Returns true if the file exists and only its owner can access it.
    pub fn is_private(&self) -> bool {
        self.before.as_ref().is_some_and(|before| before.mode & PERMISSIONS_OF_OTHERS == 0)
    }

    /// Fails if the file or its directory is read-only.
    pub fn check_writable(&self) -> Result<(), FileEditError> {
        if self.before.as_ref().is_some_and(|before| before.mode & 0o200 == 0) {
            return Err(FileEditError::ReadOnlyFile(self.path.clone()));
        }
        let Some(directory) = self.target.ancestors().skip(1).find(|directory| directory.exists()) else {
            return Ok(());
        };
        // Root may write anywhere, so the mode is checked as well.
        let is_writable = fs::metadata(directory).is_ok_and(|found| found.mode() & 0o222 != 0)
            && access(directory, AccessFlags::W_OK | AccessFlags::X_OK).is_ok();
        if is_writable {
            Ok(())
        } else {
            Err(FileEditError::ReadOnlyDirectory { path: self.path.clone(), directory: directory.to_owned() })
        }
    }

    /// Replaces the file as a whole, or creates it for its owner only. Mode, owner and group remain.
    pub fn replace(&self, contents: &[u8]) -> Result<(), FileEditError> {
        self.check_writable()?;
        self.write(contents).map_err(|error| match error {
            WriteError::Edit(error) => error,
            WriteError::Io(cause) => FileEditError::Io { path: self.path.clone(), cause },
        })
    }

    fn write(&self, contents: &[u8]) -> Result<(), WriteError> {
        let directory = self.target.parent().unwrap_or(Path::new("/"));
        if self.before.is_none() {
            DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        }
        let unfinished = UnfinishedFile::create(&self.target)?;
        let mut file = &unfinished.file;
        file.write_all(contents)?;
        if let Some(before) = &self.before {
            if file.metadata()?.gid() != before.group {
                fchown(file, None, Some(before.group))?;
            }
            file.set_permissions(fs::Permissions::from_mode(before.mode))?;
        }
        file.sync_all()?;
        self.check_unchanged()?;
        let written = match self.before {
            Some(_) => fs::rename(&unfinished.path, &self.target),
            // Unlike a rename, a link does not replace a file that was created meanwhile.
            None => fs::hard_link(&unfinished.path, &self.target),
        };
        written.map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists => WriteError::Edit(FileEditError::Changed(self.path.clone())),
            _ => WriteError::Io(error),
        })?;
        sync_directory(directory);
        Ok(())
    }

    /// Deletes the file.
    pub fn delete(&self) -> Result<(), FileEditError> {
        self.check_writable()?;
        self.check_unchanged()?;
        fs::remove_file(&self.target).map_err(|cause| FileEditError::Io { path: self.path.clone(), cause })?;
        if let Some(directory) = self.target.parent() {
            sync_directory(directory);
        }
        Ok(())
    }

    /// Fails if the file is not as it was read.
    pub fn check_unchanged(&self) -> Result<(), FileEditError> {
        let now = Self::open(&self.path)?;
        if now.target == self.target && now.before == self.before {
            Ok(())
        } else {
            Err(FileEditError::Changed(self.path.clone()))
        }
    }
}

impl FileSnapshot {
    fn new(contents: Vec<u8>, about: &Metadata, path: &Path) -> Result<Self, FileEditError> {
        let user = geteuid().as_raw();
        if about.uid() != user {
            return Err(FileEditError::OtherOwner { path: path.to_owned(), owner: about.uid(), user });
        }
        Ok(Self { contents, mode: about.mode() & PERMISSIONS, group: about.gid() })
    }
}

/// The reason why a file is not read.
#[derive(Debug, thiserror::Error)]
pub enum FileReadError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("it is not a regular file")]
    NotAFile,
    #[error("it is larger than 16 MiB")]
    TooLarge,
}

/// Reads a file of at most 16 MiB through symbolic links. A FIFO or a device is an error and does not block.
pub fn read_file(path: &Path) -> Result<(Vec<u8>, Metadata), FileReadError> {
    let file = match File::options().read(true).custom_flags(O_NONBLOCK | O_NOCTTY).open(path) {
        // A socket.
        Err(error) if error.raw_os_error() == Some(ENXIO) => return Err(FileReadError::NotAFile),
        file => file?,
    };
    let about = file.metadata()?;
    if !about.is_file() {
        return Err(FileReadError::NotAFile);
    }
    let mut contents = Vec::new();
    file.take(FILE_SIZE_MAX + 1).read_to_end(&mut contents)?;
    if contents.len() as u64 > FILE_SIZE_MAX {
        return Err(FileReadError::TooLarge);
    }
    Ok((contents, about))
}

/// A file beside the one that it replaces. Its name is removed at the end, unless it was renamed.
struct UnfinishedFile {
    file: File,
    path: PathBuf,
}

impl UnfinishedFile {
    fn create(target: &Path) -> io::Result<Self> {
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        let mut number = 0;
        loop {
            // A killed command may have left a file.
            let path = target.with_file_name(format!(".{name}.{}-{number}.tmp", std::process::id()));
            match File::options().write(true).create_new(true).mode(PRIVATE).open(&path) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
                file => return Ok(Self { file: file?, path }),
            }
        }
    }
}

impl Drop for UnfinishedFile {
    fn drop(&mut self) {
        // After a rename it does not exist.
        let _ = fs::remove_file(&self.path);
    }
}

enum WriteError {
    Edit(FileEditError),
    Io(io::Error),
}

impl From<FileEditError> for WriteError {
    fn from(error: FileEditError) -> Self {
        Self::Edit(error)
    }
}

impl From<io::Error> for WriteError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Makes a new name survive a power loss. A failure is not an error: the file is complete.
fn sync_directory(directory: &Path) {
    let _ = File::open(directory).and_then(|directory| directory.sync_all());
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn a_file_is_replaced_behind_a_link_and_keeps_its_mode() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, "before").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink("file", &link).unwrap();
        let edited = EditedFile::open(&link).unwrap();
        assert_eq!((edited.contents(), edited.is_private()), (Some(&b"before"[..]), false));
        edited.replace(b"after").unwrap();
        assert_eq!((fs::read_to_string(&file).unwrap().as_str(), mode(&file)), ("after", 0o640));
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(names(folder.path()), ["file", "link"]);
    }

    #[test]
    fn a_file_that_was_changed_or_created_meanwhile_remains() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        let missing = EditedFile::open(&file).unwrap();
        fs::write(&file, "of somebody").unwrap();
        assert!(matches!(missing.replace(b"mine"), Err(FileEditError::Changed(_))));
        let edited = EditedFile::open(&file).unwrap();
        fs::write(&file, "of others").unwrap();
        assert!(matches!(edited.replace(b"mine"), Err(FileEditError::Changed(_))));
        assert!(matches!(edited.delete(), Err(FileEditError::Changed(_))));
        let edited = EditedFile::open(&file).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o400)).unwrap();
        assert!(matches!(edited.replace(b"mine"), Err(FileEditError::Changed(_))));
        let edited = EditedFile::open(&file).unwrap();
        assert!(matches!(edited.replace(b"mine"), Err(FileEditError::ReadOnlyFile(_))));
        assert_eq!((fs::read_to_string(&file).unwrap().as_str(), names(folder.path()).len()), ("of others", 1));
    }

    #[test]
    fn a_new_file_is_private_and_gets_its_directory_beside_a_file_that_a_killed_command_left() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a/b/file");
        let left = format!(".file.{}-0.tmp", std::process::id());
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file.with_file_name(&left), "half").unwrap();
        EditedFile::open(&file).unwrap().replace(b"new").unwrap();
        assert_eq!((fs::read_to_string(&file).unwrap().as_str(), mode(&file)), ("new", 0o600));
        assert_eq!(names(file.parent().unwrap()), [left, "file".to_owned()]);
        let deep = folder.path().join("c/d/file");
        EditedFile::open(&deep).unwrap().replace(b"new").unwrap();
        assert_eq!(mode(deep.parent().unwrap()), 0o700);
    }

    #[test]
    fn a_fifo_and_a_large_file_are_refused_without_blocking() {
        let folder = tempfile::tempdir().unwrap();
        let (fifo, large) = (folder.path().join("fifo"), folder.path().join("large"));
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(matches!(read_file(&fifo), Err(FileReadError::NotAFile)));
        assert!(matches!(read_file(folder.path()), Err(FileReadError::NotAFile)));
        assert!(matches!(EditedFile::open(&fifo), Err(FileEditError::NotAFile(_))));
        File::create(&large).unwrap().set_len(FILE_SIZE_MAX + 1).unwrap();
        assert!(matches!(read_file(&large), Err(FileReadError::TooLarge)));
        assert!(matches!(EditedFile::open(&large), Err(FileEditError::TooLarge(_))));
        File::options().write(true).open(&large).unwrap().set_len(FILE_SIZE_MAX).unwrap();
        assert_eq!(read_file(&large).unwrap().0.len() as u64, FILE_SIZE_MAX);
    }
}
