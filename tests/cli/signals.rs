//! Programs that are sent signals, whatever the tests were started from.

use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::sys::signal::{SigHandler, Signal, signal};

/// Gives the program the default action of what people end programs by. A script's background job (`setsid … &`) ignores
/// SIGINT and SIGQUIT, one of `nohup` SIGHUP, all that they start inherits it, and the satellite leaves it so.
pub(crate) fn heard_by(command: &mut Command) -> &mut Command {
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
