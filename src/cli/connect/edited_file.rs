//! A configuration file of a client: read once, and replaced as a whole unless somebody changed it meanwhile.

use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use mcp_satellite_clients::FILE_SIZE_MAX;
use nix::libc::{O_NOCTTY, O_NONBLOCK};
use nix::unistd::{AccessFlags, access, geteuid};

/// The bits of a mode that permissions consist of.
const PERMISSIONS: u32 = 0o7777;

/// A client's file at the time of reading.
#[derive(Debug)]
pub(super) struct EditedFile {
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

/// The reason why a client's file is not edited. The file is unchanged.
#[derive(Debug, thiserror::Error)]
pub(super) enum FileEditError {
    #[error("cannot edit `{}`: {cause}; check the path and its permissions", path.display())]
    Io { path: PathBuf, cause: io::Error },
    #[error("cannot edit `{}`: it is not a regular file; name the configuration with --file", .0.display())]
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
    pub(super) fn open(path: &Path) -> Result<Self, FileEditError> {
        let failed = |cause| FileEditError::Io { path: path.to_owned(), cause };
        let target = match path.canonicalize() {
            Ok(target) => target,
            Err(error) if error.kind() == ErrorKind::NotFound && path.is_symlink() => {
                return Err(FileEditError::BrokenLink(path.to_owned()));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => path.to_owned(),
            Err(error) => return Err(failed(error)),
        };
        // Opening a FIFO must not wait for a writer.
        let opened = File::options().read(true).custom_flags(O_NONBLOCK | O_NOCTTY).open(&target);
        let before = match opened {
            Ok(file) => Some(FileSnapshot::read(file, &target)?),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            // A socket.
            Err(error) if error.raw_os_error() == Some(nix::libc::ENXIO) => {
                return Err(FileEditError::NotAFile(path.to_owned()));
            }
            Err(error) => return Err(failed(error)),
        };
        Ok(Self { path: path.to_owned(), target, before })
    }

    /// The contents; `None` if the file does not exist.
    pub(super) fn contents(&self) -> Option<&[u8]> {
        self.before.as_ref().map(|before| &before.contents[..])
    }

    /// Fails if the file or its directory is read-only.
    pub(super) fn check_writable(&self) -> Result<(), FileEditError> {
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

    /// Replaces the file as a whole, or creates it. Mode, owner and group remain.
    pub(super) fn replace(&self, contents: &[u8]) -> Result<(), FileEditError> {
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
        let mut temporary = tempfile::Builder::new().prefix(".satellite-").tempfile_in(directory)?;
        temporary.write_all(contents)?;
        if let Some(before) = &self.before {
            let file = temporary.as_file();
            if file.metadata()?.gid() != before.group {
                fchown(file, None, Some(before.group))?;
            }
            file.set_permissions(fs::Permissions::from_mode(before.mode))?;
        }
        temporary.as_file().sync_all()?;
        self.check_unchanged()?;
        let written = match self.before {
            Some(_) => temporary.persist(&self.target),
            None => temporary.persist_noclobber(&self.target),
        };
        written.map_err(|failed| match failed.error.kind() {
            ErrorKind::AlreadyExists => WriteError::Edit(FileEditError::Changed(self.path.clone())),
            _ => WriteError::Io(failed.error),
        })?;
        sync_directory(directory);
        Ok(())
    }

    /// Deletes the file.
    pub(super) fn delete(&self) -> Result<(), FileEditError> {
        self.check_writable()?;
        self.check_unchanged()?;
        fs::remove_file(&self.target).map_err(|cause| FileEditError::Io { path: self.path.clone(), cause })?;
        if let Some(directory) = self.target.parent() {
            sync_directory(directory);
        }
        Ok(())
    }

    /// Fails if the file is not as it was read.
    pub(super) fn check_unchanged(&self) -> Result<(), FileEditError> {
        let now = Self::open(&self.path)?;
        if now.target == self.target && now.before == self.before {
            Ok(())
        } else {
            Err(FileEditError::Changed(self.path.clone()))
        }
    }
}

impl FileSnapshot {
    fn read(file: File, path: &Path) -> Result<Self, FileEditError> {
        let failed = |cause| FileEditError::Io { path: path.to_owned(), cause };
        let about = file.metadata().map_err(failed)?;
        if !about.is_file() {
            return Err(FileEditError::NotAFile(path.to_owned()));
        }
        let user = geteuid().as_raw();
        if about.uid() != user {
            return Err(FileEditError::OtherOwner { path: path.to_owned(), owner: about.uid(), user });
        }
        let mut contents = Vec::new();
        file.take(FILE_SIZE_MAX as u64 + 1).read_to_end(&mut contents).map_err(failed)?;
        if contents.len() > FILE_SIZE_MAX {
            return Err(FileEditError::TooLarge(path.to_owned()));
        }
        Ok(Self { contents, mode: about.mode() & PERMISSIONS, group: about.gid() })
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
