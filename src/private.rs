//! Files for their owner only: what they hold is nobody else's business, and whoever reads one finds all of it, or what
//! was there before, also after a loss of power.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;

/// All of a file of ours; none if there is no file. An error shows nothing of what is in it.
pub(crate) fn read(path: &Path, max: u64) -> Result<Option<Vec<u8>>, String> {
    let no_link = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let file = match OpenOptions::new().read(true).custom_flags(no_link.bits()).open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        file => file.map_err(|error| error.to_string())?,
    };
    let about = file.metadata().map_err(|error| error.to_string())?;
    if !about.is_file() || about.uid() != nix::unistd::geteuid().as_raw() || about.len() > max {
        return Err("it is not a file of ours".to_owned());
    }
    if about.mode() & 0o077 != 0 {
        // Whoever copied it here did not mean to show it.
        file.set_permissions(Permissions::from_mode(0o600)).map_err(|error| error.to_string())?;
    }
    let mut bytes = Vec::new();
    file.take(max).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    Ok(Some(bytes))
}

/// Puts a file in the place of what is there, whole.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut unfinished = path.as_os_str().to_owned();
    unfinished.push(".new");
    let unfinished = PathBuf::from(unfinished);
    write_new(&unfinished, bytes)?;
    std::fs::rename(unfinished, path)?;
    // That it is there must survive the machine, too; a directory that cannot be synced holds it all the same.
    let directory = path.parent().and_then(|directory| File::open(directory).ok());
    if let Some(directory) = directory {
        let _ = directory.sync_all();
    }
    Ok(())
}

/// Writes a file, in the place of one that was left unfinished.
pub(crate) fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        // Of a satellite that was killed while it wrote.
        Ok(()) | Err(_) => {}
    }
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}
