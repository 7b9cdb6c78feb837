//! A server that tries to get out: the program that the sandboxes are tested with.
//!
//! It speaks MCP over stdio and has two tools. `facts` tells what it sees of itself and of the machine. `attempt` tries
//! one escape and tells, as `structuredContent`, whether it came off: `{what, escaped, detail}`. Any client can drive it:
//!
//! ```text
//! cargo build --example escape
//! echo '{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"attempt","arguments":{"what":"unshare"}}}' |
//!     target/debug/examples/escape
//! ```
//!
//! | flag | does |
//! | --- | --- |
//! | `--on-term FILE` | a handler of SIGTERM writes `handled` to FILE (in HOME, if relative) and exits 0; the end of stdin ends nothing |
//! | `--no-term-handler` | nobody handles SIGTERM; the end of stdin ends nothing |
//! | `--crash cpu\|memory\|file-size` | once initialized, uses that without bound |
//! | `--identity` | prints the ids and capabilities of this process, and exits: for a copy with the setuid bit |
//!
//! It is harmless where nothing holds it, even as root: what it changes it changes to what it was, in namespaces or
//! children of its own, or in files that it made; and it uses no more of anything than is named in [`limits`].

#![deny(unsafe_code)]
#![allow(clippy::unnecessary_wraps, reason = "every attempt has the same signature, whether it takes arguments or not")]

#[cfg(target_os = "linux")]
mod arguments;
#[cfg(target_os = "linux")]
mod facts;
#[cfg(target_os = "linux")]
mod files;
#[cfg(target_os = "linux")]
mod flags;
#[cfg(target_os = "linux")]
mod kernel;
#[cfg(target_os = "linux")]
mod keys;
#[cfg(target_os = "linux")]
mod limits;
#[cfg(target_os = "linux")]
mod network;
#[cfg(target_os = "linux")]
mod outcome;
#[cfg(target_os = "linux")]
mod privileges;
#[cfg(target_os = "linux")]
mod processes;
#[cfg(target_os = "linux")]
mod procfs;
#[cfg(target_os = "linux")]
mod server;

#[cfg(target_os = "linux")]
fn main() -> std::process::ExitCode {
    use std::process::ExitCode;

    let flags = match flags::Flags::parse(std::env::args().skip(1)) {
        Ok(flags) => flags,
        Err(error) => {
            complain(&error);
            return ExitCode::from(2);
        }
    };
    match flags.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&error.to_string());
            ExitCode::FAILURE
        }
    }
}

#[cfg(not(target_os = "linux"))]
fn main() {
    complain("there are no sandboxes to escape from here: Linux only");
}

/// Tells stderr, whether anyone reads it or not.
fn complain(error: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "escape: {error}");
}
