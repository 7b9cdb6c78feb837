//! The path of this program that other programs can store.

use std::path::PathBuf;

use super::exit::{CommandFailure, FAILED};
use super::print::print_error;
use crate::console::client_entries::program_path;

/// Files that mark a directory of caches (bford.info/cachedir), for example that of uv, and a directory of cargo's builds.
const CACHE_MARKS: [&str; 2] = ["CACHEDIR.TAG", ".cargo-lock"];
/// The cache in which npx installs packages.
const NPX_CACHE: &str = "_npx";

/// Returns the path of this program for the configuration of another one, and prints a warning if the file may disappear.
pub(super) fn installed_binary() -> Result<PathBuf, CommandFailure> {
    let binary = program_path()
        .map_err(|error| CommandFailure::new(FAILED, format!("cannot find the path of this program: {error}")))?;
    let shown = binary.display();
    if !binary.exists() {
        print_error(&format!("warning: `{shown}` was deleted; install the satellite and run this command again"));
    } else if binary
        .ancestors()
        .skip(1)
        .any(|directory| CACHE_MARKS.iter().any(|mark| directory.join(mark).exists()) || directory.ends_with(NPX_CACHE))
    {
        print_error(&format!(
            "warning: `{shown}` is in a directory of builds or caches, which may be deleted; install the satellite \
             elsewhere and run that one"
        ));
    }
    Ok(binary)
}
