//! Rules about the repository itself: its code, its language and its documents.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod architecture;
mod cycles;
mod docs;
mod language;

use std::fs;
use std::path::{Path, PathBuf};

/// Directories of the product's code.
const SOURCES: [&str; 3] = ["src", "actors/src", "crates"];

/// The root directory of the repository.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns all files with an extension below a directory of the repository. Panics if there are none.
fn files(directory: &str, extension: &str) -> Vec<PathBuf> {
    fn walk(directory: &Path, wanted: &str, into: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, wanted, into);
            } else if path.extension().is_some_and(|extension| extension == wanted) {
                into.push(path);
            }
        }
    }
    let mut found = Vec::new();
    walk(&root().join(directory), extension, &mut found);
    assert!(!found.is_empty(), "no .{extension} file in {directory}");
    found.sort();
    found
}

/// Returns a path relative to the repository, for messages.
fn shown(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}
