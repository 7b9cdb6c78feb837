//! The built satellite with real sandboxes: what is in one cannot get out, runs as it should, and ends when it must.
//!
//! `.ci/install-sandboxes` installs nsjail and bubblewrap; the tests are ignored without them unless `MCP_SANDBOX=required`. Each test runs in each sandbox as whoever runs the tests, and where that is root as nobody,
//! too.

#![cfg(all(feature = "cli", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

/// Each of these tests in each sandbox, as whom the tests run and as nobody.
macro_rules! everywhere {
    ($($(#[$meta:meta])* $test:ident),+ $(,)?) => {
        everywhere!(in nsjail, Nsjail, Ourselves, unix: $($(#[$meta])* $test),+);
        everywhere!(in nsjail_as_nobody, Nsjail, Nobody, not(no_root): $($(#[$meta])* $test),+);
        everywhere!(in bubblewrap, Bubblewrap, Ourselves, unix: $($(#[$meta])* $test),+);
        everywhere!(in bubblewrap_as_nobody, Bubblewrap, Nobody, not(no_root): $($(#[$meta])* $test),+);
    };
    (in $module:ident, $sandbox:ident, $user:ident, $possible:meta: $($(#[$meta:meta])* $test:ident),+) => {
        // Only root runs anything as somebody else.
        #[cfg($possible)]
        mod $module {
            use crate::yard::{Sandbox, User, Yard};

            $(
                #[test]
                $(#[$meta])*
                #[cfg_attr(no_sandboxes, ignore = "needs nsjail and bubblewrap; install them with .ci/install-sandboxes")]
                fn $test() {
                    super::$test(&mut Yard::new(Sandbox::$sandbox, User::$user));
                }
            )+
        }
    };
}

mod ends;
mod escapes;
mod facts;
mod refusals;
mod servers;
#[path = "../cli/support.rs"]
#[allow(dead_code, reason = "shared with the tests of the command line, which need all of it")]
mod support;
mod yard;
