//! The built satellite with real sandboxes: a server cannot escape, runs as documented, and ends with its sandbox.
//!
//! `.ci/install-sandboxes` installs nsjail and bubblewrap; the tests are ignored without them unless
//! `MCP_SANDBOX=required`. Each test runs in each sandbox as the user of the tests. If that user is root, it also runs
//! as `nobody`.

#![cfg(all(feature = "cli", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

/// Declares each test once per sandbox and user: as the user of the tests and as `nobody`.
macro_rules! in_each_sandbox {
    ($($(#[$meta:meta])* $test:ident),+ $(,)?) => {
        in_each_sandbox!(in nsjail, Nsjail, Ourselves, unix: $($(#[$meta])* $test),+);
        in_each_sandbox!(in nsjail_as_nobody, Nsjail, Nobody, not(no_root): $($(#[$meta])* $test),+);
        in_each_sandbox!(in bubblewrap, Bubblewrap, Ourselves, unix: $($(#[$meta])* $test),+);
        in_each_sandbox!(in bubblewrap_as_nobody, Bubblewrap, Nobody, not(no_root): $($(#[$meta])* $test),+);
    };
    (in $module:ident, $sandbox:ident, $user:ident, $possible:meta: $($(#[$meta:meta])* $test:ident),+) => {
        // Only root can start a process as another user.
        #[cfg($possible)]
        mod $module {
            use crate::fixture::{Fixture, Sandbox, User};

            $(
                #[test]
                $(#[$meta])*
                #[cfg_attr(no_sandboxes, ignore = "needs nsjail and bubblewrap; install them with .ci/install-sandboxes")]
                fn $test() {
                    super::$test(&mut Fixture::new(Sandbox::$sandbox, User::$user));
                }
            )+
        }
    };
}

mod ends;
mod escapes;
mod facts;
mod fixture;
mod refusals;
mod servers;

/// The binary under test.
const SATELLITE: &str = env!("CARGO_BIN_EXE_satellite");
