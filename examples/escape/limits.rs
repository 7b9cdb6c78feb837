//! Attempts to use more of a resource than an instance may have. Each has its own bound, so that it does not harm a
//! machine without limits.

use std::fs::{self, File, OpenOptions};
use std::hint::black_box;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigHandler, Signal};

use crate::arguments::AttemptArguments;
use crate::files::unique;
use crate::flags::{handle, home};
use crate::outcome::{AttemptOutcome, AttemptSteps, in_child, name};

const DISK_MAX: usize = 1 << 30;
const MEMORY_MAX: usize = 4 << 30;
const DESCRIPTORS_MAX: usize = 100_000;
const FILES_MAX: usize = 100_000;

const CHUNK: usize = 1 << 20;
/// Size in bytes that is below any limit for a file.
const FILE: usize = 8 << 20;

/// Created file or directory; dropping it removes it.
struct TemporaryPath(PathBuf);

impl Drop for TemporaryPath {
    fn drop(&mut self) {
        let _ = if self.0.is_dir() { fs::remove_dir_all(&self.0) } else { fs::remove_file(&self.0) };
    }
}

/// Writes up to `bytes` of data. Returns the number of written bytes and the error that stopped it.
fn fill(path: &Path, bytes: usize) -> (usize, Option<io::Error>) {
    let chunk = vec![b'x'; CHUNK];
    let mut written = 0;
    let open = OpenOptions::new().write(true).create_new(true).open(path);
    let mut file = match open {
        Ok(file) => file,
        Err(error) => return (0, Some(error)),
    };
    while written < bytes {
        match file.write(&chunk[..CHUNK.min(bytes - written)]) {
            Ok(count) => written += count,
            Err(error) => return (written, Some(error)),
        }
    }
    (written, None)
}

fn write_outcome(written: usize, bytes: usize, error: Option<&io::Error>) -> AttemptOutcome {
    let why = error.map_or_else(String::new, |error| format!(", then {}", name(error)));
    AttemptOutcome::new(written == bytes, format!("{written} bytes{why}"))
}

/// Fills a directory with many files, because the size of one file has its own limit.
pub(crate) fn fill_tmp(arguments: &AttemptArguments) -> Result<AttemptOutcome, String> {
    let bytes = arguments.at_most("bytes", DISK_MAX)?;
    let folder = unique(arguments.optional_text("path")?.unwrap_or("/tmp"));
    handle(Signal::SIGXFSZ, SigHandler::SigIgn).map_err(|error| error.to_string())?;
    if let Err(error) = fs::create_dir(&folder) {
        return Ok(write_outcome(0, bytes, Some(&error)));
    }
    let folder = TemporaryPath(folder);
    let (mut written, mut stopped) = (0, None);
    while written < bytes && stopped.is_none() {
        let (more, error) = fill(&unique(&folder.0), FILE.min(bytes - written));
        written += more;
        stopped = error;
    }
    Ok(write_outcome(written, bytes, stopped.as_ref()))
}

/// Creates empty files, which use memory of the kernel.
pub(crate) fn many_files(arguments: &AttemptArguments) -> Result<AttemptOutcome, String> {
    let count = arguments.at_most("count", FILES_MAX)?;
    let folder = unique(arguments.optional_text("path")?.unwrap_or("/tmp"));
    fs::create_dir(&folder).map_err(|error| error.to_string())?;
    let folder = TemporaryPath(folder);
    for number in 0..count {
        if let Err(error) = File::create(folder.0.join(number.to_string())) {
            return Ok(AttemptOutcome::new(false, format!("{number} files, then {}", name(&error))));
        }
    }
    Ok(AttemptOutcome::new(true, format!("{count} files")))
}

pub(crate) fn big_file(arguments: &AttemptArguments) -> Result<AttemptOutcome, String> {
    let bytes = arguments.at_most("bytes", DISK_MAX)?;
    let folder = arguments.optional_text("path")?.map_or_else(home, PathBuf::from);
    handle(Signal::SIGXFSZ, SigHandler::SigIgn).map_err(|error| error.to_string())?;
    let file = TemporaryPath(unique(folder));
    let (written, error) = fill(&file.0, bytes);
    Ok(write_outcome(written, bytes, error.as_ref()))
}

/// Allocates memory in this process, not in a child: an instance reaches its limit in this way, and the test sees if it
/// is killed.
pub(crate) fn memory(arguments: &AttemptArguments) -> Result<AttemptOutcome, String> {
    let bytes = arguments.at_most("bytes", MEMORY_MAX)?;
    let mut chunks: Vec<Vec<u8>> = Vec::new();
    let mut had = 0;
    while had < bytes {
        let size = CHUNK.min(bytes - had);
        let mut chunk = Vec::new();
        if chunk.try_reserve_exact(size).is_err() {
            break;
        }
        // Only touched memory counts.
        chunk.resize(size, 1);
        chunks.push(black_box(chunk));
        had += size;
    }
    let why = if had < bytes { ", then ENOMEM" } else { "" };
    Ok(AttemptOutcome::new(had == bytes, format!("{had} bytes{why}")))
}

pub(crate) fn open_files(arguments: &AttemptArguments) -> Result<AttemptOutcome, String> {
    let count = arguments.at_most("count", DESCRIPTORS_MAX)?;
    let mut files = Vec::new();
    while files.len() < count {
        match File::open("/dev/null") {
            Ok(file) => files.push(file),
            Err(error) => {
                return Ok(AttemptOutcome::new(false, format!("{} files, then {}", files.len(), name(&error))));
            }
        }
    }
    Ok(AttemptOutcome::new(true, format!("{count} files")))
}

pub(crate) fn raise_limits(_: &AttemptArguments) -> Result<AttemptOutcome, String> {
    const LIMITS: [(&str, Resource); 6] = [
        ("address space", Resource::RLIMIT_AS),
        ("processor time", Resource::RLIMIT_CPU),
        ("file size", Resource::RLIMIT_FSIZE),
        ("open files", Resource::RLIMIT_NOFILE),
        ("processes", Resource::RLIMIT_NPROC),
        ("core", Resource::RLIMIT_CORE),
    ];
    let raise = |steps: &mut AttemptSteps| {
        for (what, resource) in LIMITS {
            match getrlimit(resource) {
                Ok((_, u64::MAX)) => steps.record(what, false, "unlimited"),
                Ok((soft, hard)) => {
                    steps.done(format!("{what} above {hard}"), setrlimit(resource, soft, hard + 1));
                }
                Err(error) => steps.done(what, Err::<(), _>(error)),
            }
        }
    };
    Ok(in_child(raise).into())
}
