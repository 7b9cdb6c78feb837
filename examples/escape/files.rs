//! Attempts to read or write foreign files, and to read files in `/proc` that reveal other processes.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use nix::errno::Errno;
use nix::libc;
use nix::unistd::Pid;

use crate::arguments::AttemptArguments;
use crate::outcome::{AttemptOutcome, AttemptSteps};
use crate::procfs;

const READ_MAX: u64 = 64 * 1024;

pub(crate) fn unique(folder: impl AsRef<Path>) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    folder.as_ref().join(format!(".escape-{}-{number}", std::process::id()))
}

pub(crate) fn read_file(arguments: &AttemptArguments) -> Result<AttemptOutcome, String> {
    let path = Path::new(arguments.text("path")?);
    let mut steps = AttemptSteps::default();
    steps.saw(format!("read {}", path.display()), read(path));
    Ok(steps.into())
}

fn read(path: &Path) -> io::Result<String> {
    let kind = fs::metadata(path)?.file_type();
    if kind.is_dir() {
        let entries = fs::read_dir(path)?.collect::<io::Result<Vec<_>>>()?;
        return Ok(format!("{} entries", entries.len()));
    }
    if !kind.is_file() {
        // Reading a device may have side effects; `device` opens some.
        return Err(Errno::EINVAL.into());
    }
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    let mut text = Vec::new();
    file.take(READ_MAX).read_to_end(&mut text)?;
    Ok(format!("{} bytes", text.len()))
}

/// Reads the environment of one process or of all. Returns no values, and names only for a process given by its id.
pub(crate) fn read_environ(arguments: &AttemptArguments) -> Result<AttemptOutcome, String> {
    let needle = arguments.optional_text("needle")?;
    let any = arguments.0.get("pid").is_none_or(|pid| *pid == "any");
    let Some(pid) = (if any { None } else { arguments.pid()? }) else { return Ok(read_any_environ(needle)) };
    let mut steps = AttemptSteps::default();
    match environ(pid.as_raw(), needle) {
        Ok((escaped, environment)) => {
            let seen = format!("{} bytes, {}", environment.len(), names(&environment));
            steps.record(pid.to_string(), escaped, seen);
        }
        Err(error) => steps.done(pid.to_string(), Err::<(), _>(error)),
    }
    Ok(steps.into())
}

fn read_any_environ(needle: Option<&str>) -> AttemptOutcome {
    let (mut escaped, mut readable, mut refused) = (false, 0, 0);
    let mut found = Vec::new();
    for pid in procfs::pids() {
        match environ(pid, needle) {
            Ok((found_here, _)) => {
                readable += 1;
                escaped |= found_here;
                if found_here && found.len() < 20 {
                    found.push(pid.to_string());
                }
            }
            Err(_) => refused += 1,
        }
    }
    let found = if escaped { format!("; found in that of {}", found.join(" ")) } else { String::new() };
    AttemptOutcome::new(escaped, format!("{readable} readable, {refused} refused{found}"))
}

/// Reads the environment of a process. Also returns true if it contains `needle` or, without one, if it is that of
/// another process.
fn environ(pid: i32, needle: Option<&str>) -> io::Result<(bool, Vec<u8>)> {
    let environment = fs::read(format!("/proc/{pid}/environ"))?;
    let escaped = match needle {
        Some(needle) => contains(&environment, needle.as_bytes()),
        // Its own environment is no secret to the process, and an empty one reveals nothing.
        None => pid != Pid::this().as_raw() && !environment.is_empty(),
    };
    Ok((escaped, environment))
}

fn names(environment: &[u8]) -> String {
    let variables = environment.split(|byte| *byte == 0).filter(|variable| !variable.is_empty());
    let name = |variable: &[u8]| {
        String::from_utf8_lossy(variable.split(|byte| *byte == b'=').next().unwrap_or_default()).into_owned()
    };
    variables.map(name).collect::<Vec<_>>().join(" ")
}

fn contains(text: &[u8], needle: &[u8]) -> bool {
    !needle.is_empty() && text.windows(needle.len()).any(|window| window == needle)
}

/// Lists inherited file descriptors beyond stdin, stdout and stderr. No mount hides an open file.
pub(crate) fn descriptors(_: &AttemptArguments) -> Result<AttemptOutcome, String> {
    let mut steps = AttemptSteps::default();
    for (number, target) in procfs::descriptors() {
        steps.record(number.to_string(), number > 2, target);
    }
    Ok(steps.into())
}

/// Opens an existing file for writing without a change; otherwise creates a file and removes it.
pub(crate) fn write_file(arguments: &AttemptArguments) -> Result<AttemptOutcome, String> {
    let path = Path::new(arguments.text("path")?);
    let mut steps = AttemptSteps::default();
    steps.saw(format!("write {}", path.display()), write(path));
    Ok(steps.into())
}

fn write(path: &Path) -> io::Result<String> {
    match fs::symlink_metadata(path).map(|metadata| metadata.file_type()) {
        Ok(kind) if kind.is_symlink() => write(&fs::canonicalize(path)?),
        Ok(kind) if kind.is_dir() => make(&unique(path)),
        Ok(kind) if kind.is_file() => {
            open_for_writing(path)?;
            Ok("opened".to_owned())
        }
        Ok(kind) => {
            let kind = if kind.is_socket() { "a socket" } else { "a device or a pipe" };
            Err(io::Error::other(format!("{kind} is not opened: who knows what that does")))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => make(path),
        Err(error) => Err(error),
    }
}

fn make(path: &Path) -> io::Result<String> {
    let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
    let written = file.write_all(b"x");
    fs::remove_file(path)?;
    written?;
    Ok("made and removed a file".to_owned())
}

pub(crate) fn open_for_writing(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)
}
