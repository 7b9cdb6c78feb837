//! Replacement of files outside the data directory, such as a configuration: complete or not at all, through symbolic
//! links, with mode and group kept.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

/// Failures of a replacement. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum ReplaceError {
    /// The file belongs to somebody else.
    #[error("cannot change `{}`: it belongs to the user {owner}; run the command as that user", path.display())]
    Owner { path: PathBuf, owner: u32 },
    /// The file must not be written.
    #[error("cannot change `{}`: it is read-only; make it writable with `chmod u+w`", path.display())]
    ReadOnly { path: PathBuf },
    /// Somebody else wrote the file meanwhile.
    #[error("cannot change `{}`: another program has just changed it; run the command again", path.display())]
    Changed { path: PathBuf },
    #[error("cannot write `{}`: {source}; check the directory and the space on the disk", path.display())]
    Io { path: PathBuf, source: io::Error },
}

/// Replaces the content of a file if it is still `before`; `None` means that the file does not exist. A symbolic link is
/// followed. A new file gets `mode`, and its directory is created.
pub fn replace_file(path: &Path, before: Option<&[u8]>, content: &[u8], mode: u32) -> Result<(), ReplaceError> {
    let failed = |source| ReplaceError::Io { path: path.to_owned(), source };
    let Some(before) = before else { return create_file(path, content, mode).map_err(failed) };
    let target = fs::canonicalize(path).map_err(failed)?;
    let status = fs::metadata(&target).map_err(failed)?;
    if status.uid() != nix::unistd::geteuid().as_raw() {
        return Err(ReplaceError::Owner { path: target, owner: status.uid() });
    }
    if status.mode() & 0o200 == 0 {
        return Err(ReplaceError::ReadOnly { path: target });
    }
    let folder = target.parent().unwrap_or(Path::new("/"));
    let unfinished = unfinished_name(&target);
    let write = || -> io::Result<bool> {
        let mut file = new_file(&unfinished, 0o600)?;
        file.write_all(content)?;
        if file.metadata()?.gid() != status.gid() {
            fchown(&file, None, Some(status.gid()))?;
        }
        file.set_permissions(fs::Permissions::from_mode(status.mode() & 0o7777))?;
        file.sync_all()?;
        if fs::read(&target)? != before {
            return Ok(false);
        }
        fs::rename(&unfinished, &target)?;
        File::open(folder)?.sync_all()?;
        Ok(true)
    };
    let outcome = write();
    if !matches!(outcome, Ok(true)) {
        // It does not exist after a rename.
        let _ = fs::remove_file(&unfinished);
    }
    match outcome {
        Ok(true) => Ok(()),
        Ok(false) => Err(ReplaceError::Changed { path: target }),
        Err(source) => Err(failed(source)),
    }
}

/// Creates a file that must not exist, and its directory. A half written file is removed.
fn create_file(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        fs::create_dir_all(folder)?;
    }
    let unfinished = unfinished_name(path);
    let write = || {
        let mut file = new_file(&unfinished, mode)?;
        file.write_all(content)?;
        file.sync_all()?;
        // Unlike a rename, a link does not replace a file that exists.
        fs::hard_link(&unfinished, path)
    };
    let outcome = write();
    let _ = fs::remove_file(&unfinished);
    outcome
}

fn new_file(path: &Path, mode: u32) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(mode).open(path)
}

fn unfinished_name(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}.tmp", std::process::id()))
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

    #[test]
    fn a_file_is_replaced_behind_a_link_and_keeps_its_mode() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, "before").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink("file", &link).unwrap();
        replace_file(&link, Some(b"before"), b"after", 0o600).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "after");
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o7777, 0o640);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(names(folder.path()), ["file", "link"]);
    }

    #[test]
    fn a_refused_replacement_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "of somebody").unwrap();
        let refused = replace_file(&file, Some(b"before"), b"after", 0o600);
        assert!(matches!(refused, Err(ReplaceError::Changed { .. })));
        assert!(matches!(replace_file(&file, None, b"after", 0o600), Err(ReplaceError::Io { .. })));
        fs::set_permissions(&file, fs::Permissions::from_mode(0o400)).unwrap();
        let refused = replace_file(&file, Some(b"of somebody"), b"after", 0o600);
        assert!(matches!(refused, Err(ReplaceError::ReadOnly { .. })));
        assert_eq!((fs::read_to_string(&file).unwrap().as_str(), names(folder.path()).len()), ("of somebody", 1));
    }

    #[test]
    fn a_new_file_has_the_given_mode_and_gets_its_directory() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a/b/file");
        replace_file(&file, None, b"new", 0o600).unwrap();
        assert_eq!(
            (fs::read_to_string(&file).unwrap().as_str(), fs::metadata(&file).unwrap().mode() & 0o777),
            ("new", 0o600)
        );
        assert_eq!(names(file.parent().unwrap()), ["file"]);
    }
}
