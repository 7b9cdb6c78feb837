//! A server that tries to escape from its sandbox, for tests of the sandboxes.
//!
//! It speaks MCP over stdio and has two tools. `facts` returns what the process can see of itself and of the machine.
//! `attempt` tries one escape and returns its outcome as `structuredContent`: `{what, escaped, detail}`. Any client can
//! use it:
//!
//! ```text
//! cargo build --example escape
//! echo '{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"attempt","arguments":{"what":"unshare"}}}' |
//!     target/debug/examples/escape
//! ```
//!
//! | flag | effect |
//! | --- | --- |
//! | `--on-term FILE` | SIGTERM writes `handled` to FILE (relative to HOME) and exits 0; the end of stdin is ignored |
//! | `--no-term-handler` | SIGTERM has its default action; the end of stdin is ignored |
//! | `--crash cpu\|memory\|file-size` | after initialization, uses this resource without bound |
//! | `--identity` | prints the ids and capabilities of this process and exits: for a copy with the setuid bit |
//!
//! The program is harmless without a sandbox, even as root. It changes settings only to their current values, or works
//! in namespaces, children and files of its own, and it uses no more of a resource than [`limits`] allows.

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

    let flags = match flags::EscapeFlags::parse(std::env::args().skip(1)) {
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

fn complain(error: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "escape: {error}");
}
