//! Compresses the debug sections of release builds, and tells the tests which programs and privileges this machine has.
//! A test whose servers, sandboxes or privileges are missing is reported as ignored, with the command that installs them.
//! `MCP_REAL_SERVERS`, `MCP_SANDBOX`, `MCP_CONSOLE` and `MCP_MOUNTS` set to `required` run the test anyway, and it fails.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

fn main() {
    // The line tables in the binary are for backtraces only.
    if std::env::var_os("PROFILE").is_some_and(|profile| profile == "release") {
        println!("cargo::rustc-link-arg-bins=-Wl,--compress-debug-sections=zlib");
    }
    let target = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default()).join("target");
    let servers = directory("MCP_SERVERS_DIR", target.join("mcp-servers"));
    let installed = [".installed-npm", ".installed-python", ".installed-python-old", ".installed-clients"];
    let has_servers = ["node", "python3"].iter().all(|program| find(program, &[]).is_some())
        && installed.iter().all(|stamp| is_there(&servers.join(stamp)));
    without("no_real_servers", "MCP_REAL_SERVERS", has_servers);

    let sandboxes = directory("MCP_SANDBOX_DIR", target.join("sandboxes")).join("bin");
    let has_sandboxes =
        ["nsjail", "bwrap"].iter().all(|program| find(program, std::slice::from_ref(&sandboxes)).is_some());
    without("no_sandboxes", "MCP_SANDBOX", has_sandboxes);

    let console = directory("MCP_CONSOLE_DIR", target.join("console-tools"));
    let has_console = find("chromium", &[]).is_some()
        && is_there(&console.join(".installed-axe"))
        && is_there(&console.join("bin/prometheus"));
    without("no_console_tools", "MCP_CONSOLE", has_console);

    let is_root = Path::new("/proc/self").metadata().is_ok_and(|process| process.uid() == 0);
    without("no_root", "MCP_MOUNTS", is_root);
    // Not PATH: wrappers of programs (pyenv, for example) change it, and each change would build the package again.
    println!("cargo::rerun-if-changed=build.rs");
}

/// Sets `cfg` if a prerequisite is missing and not required.
fn without(cfg: &str, required: &str, is_there: bool) {
    println!("cargo::rustc-check-cfg=cfg({cfg})");
    println!("cargo::rerun-if-env-changed={required}");
    let is_required = std::env::var_os(required).is_some_and(|needed| needed == "required");
    if !is_there && !is_required {
        println!("cargo::rustc-cfg={cfg}");
    }
}

fn directory(variable: &str, default: PathBuf) -> PathBuf {
    println!("cargo::rerun-if-env-changed={variable}");
    std::env::var_os(variable).map_or(default, PathBuf::from)
}

fn find(program: &str, more: &[PathBuf]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = std::env::split_paths(&path).chain(more.iter().cloned());
    let mut files = places.map(|place| place.join(program));
    files.find(|file| is_there(file))
}

// A missing file is not watched: cargo would run this program, and build the package, every time. The scripts that install
// the programs touch `build.rs` instead.
fn is_there(path: &Path) -> bool {
    let is_there = path.exists();
    if is_there {
        println!("cargo::rerun-if-changed={}", path.display());
    }
    is_there
}
