//! The built satellite with real sandboxes: what is in one cannot get out, runs as it should, and ends when it must.
//!
//! `.ci/install-sandboxes` installs nsjail and bubblewrap; where one is not there its tests say so and are skipped, unless
//! `MCP_SANDBOX=required`. Each test runs in each sandbox as whoever runs the tests, and where that is root as nobody,
//! too.

#![cfg(all(feature = "cli", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

/// Each of these tests in each sandbox, as whom the tests run and as nobody.
macro_rules! everywhere {
    ($($test:ident),+ $(,)?) => {
        everywhere!(in nsjail, Nsjail, Ourselves: $($test),+);
        everywhere!(in nsjail_as_nobody, Nsjail, Nobody: $($test),+);
        everywhere!(in bubblewrap, Bubblewrap, Ourselves: $($test),+);
        everywhere!(in bubblewrap_as_nobody, Bubblewrap, Nobody: $($test),+);
    };
    (in $module:ident, $sandbox:ident, $user:ident: $($test:ident),+) => {
        mod $module {
            use crate::yard::{Sandbox, User, Yard};

            $(
                #[test]
                fn $test() {
                    if let Some(mut yard) = Yard::new(Sandbox::$sandbox, User::$user) {
                        super::$test(&mut yard);
                    }
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
