//! Programs and measurements shared by the benches of the endpoint: a light server, a light load generator, and the
//! processes that are measured. The bench binary executes itself to become the server or the load generator.

pub(crate) mod echo_server;
pub(crate) mod http;
#[allow(dead_code, reason = "each bench uses a part of this module")]
pub(crate) mod load;
#[expect(dead_code, reason = "each bench uses a part of this module")]
pub(crate) mod processes;

use std::process::Command;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Runs the program that the first argument selects. Returns false if the argument selects none: this process is the
/// bench. Must run before any thread starts.
pub(crate) fn run_role() -> bool {
    let mut arguments = std::env::args().skip(1);
    match arguments.next().as_deref() {
        Some(echo_server::ROLE) => echo_server::serve(arguments.next().as_deref()),
        Some(load::ROLE) => load::serve(&arguments.next().unwrap()),
        _ => return false,
    }
    true
}

/// Returns the command that executes this binary in another role.
pub(crate) fn role(name: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.arg(name).args(arguments);
    command
}

/// Raises the limit of open files of this process and its children as far as permitted.
pub(crate) fn raise_open_files() {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
}

/// Returns the median. Panics if there are no values.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
