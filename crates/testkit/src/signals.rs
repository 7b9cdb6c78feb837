//! Default signal actions for child processes, independent of how the tests were started.

use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::sys::signal::{SigHandler, Signal, signal};

/// Resets SIGINT, SIGTERM, SIGHUP and SIGQUIT to their default action in the child. A background job of a script
/// (`setsid … &`) ignores SIGINT and SIGQUIT, and `nohup` ignores SIGHUP; children inherit this and the satellite keeps
/// it.
pub fn reset_signal_actions(command: &mut Command) -> &mut Command {
    let listen = || {
        for what in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT] {
            #[expect(unsafe_code, reason = "there is no safe way to set a signal's action")]
            // SAFETY: it is the default action, not a handler.
            unsafe { signal(what, SigHandler::SigDfl) }?;
        }
        Ok(())
    };
    #[expect(unsafe_code, reason = "what is inherited can only be changed between fork and exec")]
    // SAFETY: `signal` is async-signal-safe, and nothing is allocated.
    unsafe {
        command.pre_exec(listen)
    }
}
