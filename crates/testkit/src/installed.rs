//! The real MCP servers that `.ci/install-servers` has installed.

use std::path::{Path, PathBuf};

pub fn directory() -> PathBuf {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let default = || repository.join("target/mcp-servers");
    std::env::var_os("MCP_SERVERS_DIR").map_or_else(default, PathBuf::from)
}

/// Returns the path of an installed file that `interpreter` runs. Panics if either is missing: the test that needs it
/// is ignored then unless `MCP_REAL_SERVERS=required`.
pub fn installed(interpreter: &str, file: &str) -> String {
    // The interpreter is not executed: another test may be counting the children of this process.
    let found = std::env::split_paths(&std::env::var_os("PATH").unwrap()).any(|path| path.join(interpreter).exists());
    let path = directory().join(file);
    assert!(found, "`{interpreter}` is not in PATH");
    assert!(path.exists(), "{} is missing: run .ci/install-servers", path.display());
    path.to_str().unwrap().to_owned()
}
