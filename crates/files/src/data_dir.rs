//! Files of the satellite itself, opened relative to a descriptor of its data directory.
//!
//! Symbolic links are not followed. A file that belongs to another user or is accessible to group or others is
//! rejected, and the error contains the command that repairs it. A cloned repository can contain a data directory, and
//! git stores symbolic links: the repository must not choose which files the satellite reads, overwrites or removes.
//! The homes of sandboxed servers (`DIR/homes/*`) belong to the servers and are not checked.

use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

const OPEN_DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Flags for files. `NONBLOCK` keeps a FIFO or a device from blocking the open.
const OPEN_FILE: OFlags = OFlags::NOFOLLOW.union(OFlags::NONBLOCK).union(OFlags::NOCTTY).union(OFlags::CLOEXEC);

const PROBLEMS_MAX: usize = 10;

/// Files and directories directly in a data directory that the satellite or the reference backend creates.
const OWN_NAMES: [&str; 26] = [
    ".gitignore",
    "admin-token",
    "admin.curl",
    "backend-config.json",
    "backend.db",
    "backend.json",
    "backend.json.rehearsal",
    "catalogues",
    "catalogues.key",
    "clients",
    "control.sock",
    "events.jsonl",
    "grants",
    "homes",
    "journal",
    "ledger",
    "listen",
    "lock",
    "registration-token",
    "satellite.log",
    "satellite.log.1",
    "state.db",
    "team-uids.json",
    "to-erase.json",
    "token",
    "values.json",
];

type NameTest = fn(&str) -> bool;
// Directories whose entries belong to the satellite, with a test for the names that it gives.
const OWN_DIRECTORIES: [(&str, NameTest); 4] = [
    ("catalogues", |name| name == "key" || is_hex(name, 64)),
    ("clients", |name| [".json", ".backup"].iter().any(|suffix| name.strip_suffix(suffix).is_some())),
    ("grants", |name| name.strip_suffix(".json").is_some_and(|name| is_hex(name, 32))),
    ("journal", |name| name == "seq" || name.starts_with("journal.db")),
];

#[derive(Debug, thiserror::Error)]
pub enum DataDirError {
    #[error("`{}` is a symbolic link, which the satellite does not follow here; remove it: rm {}", .0.display(), quoted(.0))]
    Link(PathBuf),
    #[error("`{}` is not {expected}; move it away: mv {} {}", .path.display(), quoted(.path), quoted(&suffixed(.path, ".old")))]
    Kind {
        path: PathBuf,
        /// The kind of file that belongs there, with its article.
        expected: &'static str,
    },
    #[error(
        "`{}` belongs to user {owner}, and this process runs as user {user}; run it as the owner, or change the \
         owner: sudo chown {user} {}", .path.display(), quoted(.path)
    )]
    Owner { path: PathBuf, owner: u32, user: u32 },
    #[error(
        "`{}` is accessible to group or others (mode {mode:04o}); make it private: chmod {:o} {}",
        .path.display(), .mode & 0o700, quoted(.path)
    )]
    Mode { path: PathBuf, mode: u32 },
    #[error(
        "`{}` contains files, and no satellite of this user created it on this machine: it may have come with a \
         repository; if it is yours, name it: --data-dir {}", .path.display(), .named.display()
    )]
    Unknown {
        path: PathBuf,
        /// The path by which a person names it.
        named: PathBuf,
    },
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n  "))]
    Several(Vec<DataDirError>),
}

impl From<DataDirError> for io::Error {
    fn from(error: DataDirError) -> Self {
        Self::new(ErrorKind::PermissionDenied, error)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum DataFileKind {
    Directory,
    File,
    Socket,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpenMode {
    /// The file must exist.
    Read,
    /// Creates a missing file.
    Write,
    /// Writes at the end; creates a missing file.
    Append,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileStat {
    /// Device and inode. Two files never share them at the same time.
    pub identity: (u64, u64),
    pub len: u64,
}

/// A directory whose files belong to the satellite alone. Clones share the descriptor.
#[derive(Debug, Clone)]
pub struct DataDir {
    descriptor: Arc<OwnedFd>,
    path: PathBuf,
}

impl DataDir {
    /// Opens an existing directory. `path` itself may be reached through links; no link below it is followed.
    ///
    /// # Errors
    ///
    /// Fails if the directory does not exist. If the owner or the permissions are unsafe, the [`io::Error`] contains a
    /// [`DataDirError`].
    pub fn open(path: &Path) -> io::Result<Self> {
        let path = path.canonicalize()?;
        let descriptor = rustix::fs::open(&path, OPEN_DIRECTORY, Mode::empty())?;
        check(&path, &rustix::fs::fstat(&descriptor)?, DataFileKind::Directory)?;
        Ok(Self { descriptor: Arc::new(descriptor), path })
    }

    /// Creates a missing directory for its owner only.
    ///
    /// # Errors
    ///
    /// Fails as [`DataDir::open`] does, or if the directory cannot be created.
    pub fn create(path: &Path) -> io::Result<Self> {
        Self::create_or_open(path).map(|(directory, _)| directory)
    }

    /// Opens or creates the directory as [`DataDir::create`] does and also returns true if it was created.
    pub fn create_or_open(path: &Path) -> io::Result<(Self, bool)> {
        let mut builder = DirBuilder::new();
        builder.mode(0o700);
        let mut created = builder.create(path);
        if let (Err(error), Some(parent)) = (&created, path.parent())
            && error.kind() == ErrorKind::NotFound
        {
            builder.recursive(true).create(parent)?;
            created = builder.recursive(false).create(path);
        }
        let created = match created {
            Ok(()) => true,
            Err(error) if error.kind() == ErrorKind::AlreadyExists => false,
            Err(error) => return Err(error),
        };
        Ok((Self::open(path)?, created))
    }

    /// Uses another descriptor of the same directory, such as one that has locked it.
    ///
    /// # Errors
    ///
    /// Fails if the descriptor is one of another directory.
    pub fn with_descriptor(self, descriptor: OwnedFd) -> io::Result<Self> {
        let other = Self { descriptor: Arc::new(descriptor), path: self.path.clone() };
        if other.identity()? == self.identity()? { Ok(other) } else { Err(ErrorKind::NotFound.into()) }
    }

    /// Returns the path at which the directory was opened, with links resolved.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns a path that leads to `name` in this directory as long as a clone of this value exists, even if the
    /// directory is renamed.
    pub fn descriptor_path(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{name}", self.descriptor.as_raw_fd()))
    }

    /// Fails as [`DataDir::open_subdirectory`] does, or if the directory cannot be created.
    pub fn create_or_open_subdirectory(&self, name: &str) -> io::Result<Self> {
        match self.open_subdirectory(name) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            opened => return opened,
        }
        match rustix::fs::mkdirat(&self.descriptor, name, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => self.open_subdirectory(name),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Fails if `name` does not exist, is a link, or has an unsafe owner or unsafe permissions.
    pub fn open_subdirectory(&self, name: &str) -> io::Result<Self> {
        let (descriptor, path) = (self.open_at(name, OPEN_DIRECTORY, DataFileKind::Directory)?, self.path.join(name));
        Ok(Self { descriptor: Arc::new(descriptor), path })
    }

    /// Opens or creates a directory of another owner in this one, such as a server's home. Owner and permissions are
    /// not checked.
    pub fn foreign_directory(&self, name: &str) -> io::Result<OwnedFd> {
        // Opened first: creating an existing directory would wait on a disk that hangs.
        match open_beneath(self.descriptor.as_fd(), name, OPEN_DIRECTORY) {
            Err(Errno::NOENT) => {}
            opened => return Ok(opened?),
        }
        match rustix::fs::mkdirat(&self.descriptor, name, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
        Ok(open_beneath(self.descriptor.as_fd(), name, OPEN_DIRECTORY)?)
    }

    /// Locks the directory itself until the last duplicate of the descriptor is closed. Returns false if another process has
    /// locked it. A file system that cannot lock directories is no obstacle.
    pub fn try_lock(&self) -> bool {
        flock(&self.descriptor, FlockOperation::NonBlockingLockExclusive) != Err(Errno::WOULDBLOCK)
    }

    /// Removes the directory `name` with everything in it. Links in it are removed, not followed.
    pub fn remove_tree(&self, name: &str) -> io::Result<()> {
        match fs::remove_dir_all(self.descriptor_path(name)) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Fails if `name` is a link or no regular file, or has an unsafe owner or unsafe permissions.
    pub fn open_file(&self, name: &str, access: OpenMode) -> io::Result<File> {
        let flags = match access {
            OpenMode::Read => OFlags::RDONLY,
            OpenMode::Write => OFlags::RDWR.union(OFlags::CREATE),
            OpenMode::Append => OFlags::RDWR.union(OFlags::CREATE).union(OFlags::APPEND),
        };
        self.open_at(name, flags, DataFileKind::File).map(File::from)
    }

    /// Returns `None` if the file does not exist. A file of more than `max` bytes is an error.
    pub fn read(&self, name: &str, max: u64) -> io::Result<Option<Vec<u8>>> {
        let file = match self.open_file(name, OpenMode::Read) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let mut bytes = Vec::new();
        file.take(max.saturating_add(1)).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > max {
            let path = self.path.join(name);
            let message = format!("`{}` is longer than {max} bytes", path.display());
            return Err(io::Error::new(ErrorKind::InvalidData, message));
        }
        Ok(Some(bytes))
    }

    /// Replaces an existing file.
    pub fn create_file(&self, name: &str) -> io::Result<File> {
        // Remove the file that a satellite left when it was killed while writing.
        self.remove(name)?;
        let flags = OFlags::WRONLY.union(OFlags::CREATE).union(OFlags::EXCL);
        self.open_at(name, flags, DataFileKind::File).map(File::from)
    }

    /// Replaces the file `name` as a whole: a reader finds all of `bytes` or all of the previous content, even after a
    /// power loss.
    ///
    /// # Errors
    ///
    /// Fails if the new content cannot be written. The file is then unchanged.
    pub fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let unfinished = format!("{name}.new");
        let mut file = self.create_file(&unfinished)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        self.rename(&unfinished, name)?;
        // Syncing the directory makes the new name survive a power loss. A failure is not an error: the file is
        // complete.
        let _ = self.sync();
        Ok(())
    }

    pub fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(rustix::fs::renameat(&self.descriptor, from, &self.descriptor, to)?)
    }

    /// Removes a link and not its target. Returns whether `name` existed.
    pub fn remove(&self, name: &str) -> io::Result<bool> {
        match rustix::fs::unlinkat(&self.descriptor, name, AtFlags::empty()) {
            Ok(()) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Flushes the directory itself to the disk.
    pub fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fsync(&self.descriptor)?)
    }

    /// Returns the names in this directory. Names that are not UTF-8 are left out, because the satellite creates none.
    pub fn names(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.descriptor)? {
            let entry = entry?;
            match entry.file_name().to_str() {
                Ok("." | "..") | Err(_) => {}
                Ok(name) => names.push(name.to_owned()),
            }
        }
        Ok(names)
    }

    pub fn stat(&self, name: impl AsRef<Path>) -> Option<FileStat> {
        let stat = rustix::fs::statat(&self.descriptor, name.as_ref(), AtFlags::SYMLINK_NOFOLLOW).ok()?;
        Some(FileStat { identity: (stat.st_dev, stat.st_ino), len: u64::try_from(stat.st_size).unwrap_or(0) })
    }

    pub fn identity(&self) -> io::Result<(u64, u64)> {
        let stat = rustix::fs::fstat(&self.descriptor)?;
        Ok((stat.st_dev, stat.st_ino))
    }

    /// Returns the path by which `SQLite` opens the database `name` with `SQLITE_OPEN_NOFOLLOW`. With that flag
    /// `SQLite` rejects a path below `/proc/self/fd`, because it contains a link. So this is the current path of the
    /// directory, after a check that it still leads to the open directory.
    pub fn database_path(&self, name: &str) -> io::Result<PathBuf> {
        for suffix in ["", "-wal", "-shm", "-journal"] {
            self.check(&format!("{name}{suffix}"), DataFileKind::File)?;
        }
        let path = fs::read_link(format!("/proc/self/fd/{}", self.descriptor.as_raw_fd()))?;
        let found = rustix::fs::lstat(&path).ok();
        if found.map(|stat| (stat.st_dev, stat.st_ino)) != Some(self.identity()?) {
            let message = format!("the directory `{}` was deleted", self.path.display());
            return Err(io::Error::new(ErrorKind::NotFound, message));
        }
        Ok(path.join(name))
    }

    /// A missing socket is not an error.
    pub fn check_socket(&self, name: &str) -> io::Result<()> {
        Ok(self.check(name, DataFileKind::Socket)?)
    }

    /// Checks every file that the satellite reads or writes, so that all problems are reported before anything is
    /// written.
    ///
    /// # Errors
    ///
    /// Returns an [`io::Error`] that contains a [`DataDirError`] with up to ten problems.
    pub fn inspect(&self) -> io::Result<()> {
        let mut problems = Vec::new();
        // Unfinished writes are skipped: the next write removes them, and of a link only the link.
        let is_checked = |name: &&String| name.strip_suffix(".new").is_none();
        for name in self.names()?.iter().filter(|name| is_own(name)).filter(is_checked) {
            let own = OWN_DIRECTORIES.iter().find(|(directory, _)| directory == name);
            let kind = match name.as_str() {
                "control.sock" => DataFileKind::Socket,
                "homes" => DataFileKind::Directory,
                _ if own.is_some() => DataFileKind::Directory,
                _ => DataFileKind::File,
            };
            let checked = self.check(name, kind);
            if let (Ok(()), Some((_, is_own))) = (&checked, own) {
                let directory = self.open_subdirectory(name)?;
                let names = directory.names()?;
                let own = names.iter().filter(|name| is_own(name)).filter(is_checked);
                problems.extend(own.filter_map(|name| directory.check(name, DataFileKind::File).err()));
            }
            problems.extend(checked.err());
        }
        problems.truncate(PROBLEMS_MAX);
        match problems.pop() {
            None => Ok(()),
            Some(problem) if problems.is_empty() => Err(problem.into()),
            Some(problem) => {
                problems.push(problem);
                Err(DataDirError::Several(problems).into())
            }
        }
    }

    /// Writes a `.gitignore` so that git does not store the directory. A directory with foreign files is left as it is.
    pub fn write_gitignore(&self) -> io::Result<()> {
        const FILE: &str = ".gitignore";
        let names = self.names()?;
        if names.iter().any(|name| name == FILE || !is_own(name)) {
            return Ok(());
        }
        self.replace(FILE, b"*\n")
    }

    fn check(&self, name: &str, kind: DataFileKind) -> Result<(), DataDirError> {
        match rustix::fs::statat(&self.descriptor, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => check(&self.path.join(name), &stat, kind),
            // The caller meets the same error when it opens the file.
            Err(_) => Ok(()),
        }
    }

    fn open_at(&self, name: &str, flags: OFlags, kind: DataFileKind) -> io::Result<OwnedFd> {
        let opened = match open_beneath(self.descriptor.as_fd(), name, flags.union(OPEN_FILE)) {
            Ok(opened) => opened,
            // A link, a socket, a FIFO without a reader, a directory that is opened for writing.
            Err(errno @ (Errno::LOOP | Errno::NXIO | Errno::ISDIR | Errno::NOTDIR | Errno::ACCESS)) => {
                self.check(name, kind)?;
                return Err(errno.into());
            }
            Err(errno) => return Err(errno.into()),
        };
        check(&self.path.join(name), &rustix::fs::fstat(&opened)?, kind)?;
        Ok(opened)
    }
}

impl AsFd for DataDir {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Opens `name`, which must be a single path component. If `openat2` is missing or blocked by a container's seccomp
/// filter, `O_NOFOLLOW` forbids the same links.
fn open_beneath(directory: BorrowedFd<'_>, name: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
    if name.contains('/') || matches!(name, "" | "." | "..") {
        return Err(Errno::INVAL);
    }
    let resolve = ResolveFlags::NO_SYMLINKS.union(ResolveFlags::BENEATH);
    // The kernel rejects a mode for an open that creates no file.
    let mode = if flags.contains(OFlags::CREATE) { Mode::RUSR.union(Mode::WUSR) } else { Mode::empty() };
    match rustix::fs::openat2(directory, name, flags, mode, resolve) {
        Err(Errno::NOSYS | Errno::PERM) => rustix::fs::openat(directory, name, flags.union(OFlags::NOFOLLOW), mode),
        opened => opened,
    }
}

fn check(path: &Path, stat: &Stat, kind: DataFileKind) -> Result<(), DataDirError> {
    let user = nix::unistd::geteuid().as_raw();
    let found = FileType::from_raw_mode(stat.st_mode);
    let (belongs, expected) = match kind {
        DataFileKind::Directory => (found.is_dir(), "a directory"),
        DataFileKind::File => (found.is_file(), "a regular file"),
        DataFileKind::Socket => (found.is_socket(), "a socket"),
    };
    let (path, mode) = (path.to_owned(), stat.st_mode & 0o7777);
    if found.is_symlink() {
        return Err(DataDirError::Link(path));
    }
    if !belongs {
        return Err(DataDirError::Kind { path, expected });
    }
    if stat.st_uid != user {
        return Err(DataDirError::Owner { path, owner: stat.st_uid, user });
    }
    // A socket gets its permissions from the umask; the private directory protects it.
    if mode & 0o077 != 0 && kind != DataFileKind::Socket {
        return Err(DataDirError::Mode { path, mode });
    }
    Ok(())
}

fn is_own(name: &str) -> bool {
    let stem = name.strip_suffix(".new").unwrap_or(name);
    let stem = ["-wal", "-shm"].iter().find_map(|suffix| stem.strip_suffix(suffix)).unwrap_or(stem);
    let events = stem.strip_prefix("events.").and_then(|rest| rest.strip_suffix(".jsonl"));
    OWN_NAMES.contains(&stem)
        || events.is_some_and(|digits| digits.len() == 20 && digits.bytes().all(|b| b.is_ascii_digit()))
}

pub fn is_hex(name: &str, len: usize) -> bool {
    name.len() == len && name.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn suffixed(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

fn quoted(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', r"'\''"))
}

#[cfg(any(test, feature = "testing"))]
#[allow(clippy::unwrap_used, clippy::missing_panics_doc, reason = "a test that cannot go on has failed")]
pub fn private_tempdir() -> tempfile::TempDir {
    let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    tempfile::Builder::new().permissions(permissions).tempdir().unwrap()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    fn unwrap_refusal(outcome: io::Result<impl Sized>) -> String {
        let Err(error) = outcome else { panic!("the operation was not refused") };
        assert!(error.get_ref().is_some_and(<dyn std::error::Error + Send + Sync>::is::<DataDirError>), "{error}");
        error.to_string()
    }

    #[test]
    fn links_are_not_followed_when_files_are_read_replaced_or_removed() {
        let home = private_tempdir();
        let victim = home.path().join("victim");
        fs::create_dir(&victim).unwrap();
        fs::write(victim.join("file"), "precious").unwrap();
        set_mode(&victim.join("file"), 0o600);
        let directory = DataDir::create(&home.path().join("data")).unwrap();
        symlink(victim.join("file"), directory.path().join("lock")).unwrap();
        symlink(&victim, directory.path().join("catalogues")).unwrap();
        for access in [OpenMode::Read, OpenMode::Write, OpenMode::Append] {
            let error = unwrap_refusal(directory.open_file("lock", access));
            assert!(error.contains("is a symbolic link") && error.contains("rm '"), "{error}");
        }
        unwrap_refusal(directory.read("lock", 100));
        unwrap_refusal(directory.create_or_open_subdirectory("catalogues"));
        unwrap_refusal(directory.database_path("lock"));
        let both = unwrap_refusal(directory.inspect());
        assert!(both.contains("/lock'") && both.contains("/catalogues'"), "{both}");
        directory.replace("lock", b"own").unwrap();
        assert!(directory.remove("catalogues").unwrap() && !directory.remove("catalogues").unwrap());
        assert_eq!(directory.read("lock", 3).unwrap().unwrap(), b"own");
        assert_eq!(fs::read_to_string(victim.join("file")).unwrap(), "precious");
        assert_eq!(directory.names().unwrap(), ["lock"]);
    }

    #[test]
    fn removing_a_tree_follows_no_links() {
        let home = private_tempdir();
        fs::create_dir(home.path().join("victim")).unwrap();
        fs::write(home.path().join("victim/file"), "precious").unwrap();
        let homes = DataDir::create(&home.path().join("homes")).unwrap();
        homes.foreign_directory("one").unwrap();
        symlink(home.path().join("victim"), homes.path().join("one/link")).unwrap();
        symlink(home.path().join("victim"), homes.path().join("two")).unwrap();
        assert!(homes.foreign_directory("two").is_err());
        for name in ["one", "two", "three"] {
            homes.remove_tree(name).unwrap();
        }
        assert_eq!(homes.names().unwrap(), [""; 0]);
        assert!(home.path().join("victim/file").exists());
    }

    #[test]
    fn files_that_others_can_access_are_refused_with_a_chmod_command() {
        let home = private_tempdir();
        let directory = DataDir::open(home.path()).unwrap();
        directory.replace("token", b"secret").unwrap();
        let path = directory.path().join("token");
        for (permissions, repaired) in [(0o644, 0o600), (0o622, 0o600), (0o701, 0o700)] {
            set_mode(&path, permissions);
            let error = unwrap_refusal(directory.read("token", 100));
            assert!(error.ends_with(&format!("chmod {repaired:o} '{}'", path.display())), "{error}");
            unwrap_refusal(directory.inspect());
        }
        set_mode(&path, 0o600);
        for permissions in [0o755, 0o777, 0o710] {
            set_mode(home.path(), permissions);
            let error = unwrap_refusal(DataDir::open(home.path()));
            assert!(error.contains(&format!("chmod 700 '{}'", directory.path().display())), "{error}");
        }
        set_mode(home.path(), 0o700);
        DataDir::open(home.path()).unwrap().inspect().unwrap();
    }

    #[test]
    fn files_of_another_user_are_refused_with_a_chown_command() {
        let stat = rustix::fs::stat(std::env::temp_dir()).unwrap();
        let user = nix::unistd::geteuid().as_raw();
        let mut other = stat;
        (other.st_uid, other.st_mode) = (user + 1, 0o100_600);
        let error = check(Path::new("/data/token"), &other, DataFileKind::File).unwrap_err().to_string();
        assert!(error.contains(&format!("sudo chown {user} '/data/token'")), "{error}");
        other.st_uid = user;
        check(Path::new("/data/token"), &other, DataFileKind::File).unwrap();
    }

    #[test]
    fn a_fifo_is_refused_without_blocking() {
        let home = private_tempdir();
        nix::unistd::mkfifo(&home.path().join("token"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let directory = DataDir::open(home.path()).unwrap();
        for access in [OpenMode::Read, OpenMode::Write] {
            let error = unwrap_refusal(directory.open_file("token", access));
            assert!(error.contains("is not a regular file"), "{error}");
        }
        unwrap_refusal(directory.inspect());
    }

    #[test]
    fn foreign_files_in_the_directory_are_left_unchanged() {
        let home = private_tempdir();
        fs::write(home.path().join("satellite.toml"), "").unwrap();
        fs::create_dir(home.path().join("src")).unwrap();
        let directory = DataDir::open(home.path()).unwrap();
        directory.inspect().unwrap();
        directory.write_gitignore().unwrap();
        assert!(!home.path().join(".gitignore").exists(), "git would ignore the user's own files too");
        let own = directory.create_or_open_subdirectory("own").unwrap();
        own.write_gitignore().unwrap();
        assert_eq!(own.read(".gitignore", 10).unwrap().unwrap(), b"*\n");
    }

    #[test]
    fn the_database_path_follows_a_moved_directory() {
        let home = private_tempdir();
        let path = home.path().join("data");
        let directory = DataDir::create(&path).unwrap();
        assert_eq!(directory.database_path("journal.db").unwrap(), path.canonicalize().unwrap().join("journal.db"));
        fs::rename(&path, home.path().join("moved")).unwrap();
        fs::create_dir(&path).unwrap();
        let moved = home.path().join("moved").canonicalize().unwrap();
        assert_eq!(directory.database_path("journal.db").unwrap(), moved.join("journal.db"));
        fs::remove_dir(moved).unwrap();
        assert_eq!(directory.database_path("journal.db").unwrap_err().kind(), ErrorKind::NotFound);
    }
}
