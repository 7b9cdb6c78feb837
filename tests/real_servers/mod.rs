//! Real MCP servers, where `.ci/install-servers` has put them.

use std::io::Write;
use std::path::{Path, PathBuf};

pub(crate) fn directory() -> PathBuf {
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("target/mcp-servers");
    std::env::var_os("MCP_SERVERS_DIR").map_or_else(default, PathBuf::from)
}

/// The path of what is installed, if it can be run by `interpreter` here.
pub(crate) fn installed(interpreter: &str, file: &str) -> Option<String> {
    // Only looked for, not tried: another test may be counting this process's children.
    let found = std::env::split_paths(&std::env::var_os("PATH").unwrap()).any(|path| path.join(interpreter).exists());
    let path = directory().join(file);
    let why = if !found {
        format!("`{interpreter}` is not installed")
    } else if !path.exists() {
        format!("{} is not there: run .ci/install-servers", path.display())
    } else {
        return Some(path.to_str().unwrap().to_owned());
    };
    assert!(std::env::var_os("MCP_REAL_SERVERS").is_none_or(|needed| needed != "required"), "{why}");
    // Not by `eprintln`: what a passing test prints that way is not shown.
    let _ = std::io::stderr().write_all(format!("\n!!! SKIPPED, a test with a real MCP server: {why}\n\n").as_bytes());
    None
}
