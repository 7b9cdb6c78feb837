//! Output of the command line. Text from servers, clients and files is made printable, so that it never controls the
//! terminal; see [`printable`](mcp_satellite_actors::model::printable).

use std::io::Write;

use super::{CommandFailure, DONE, FAILED};
use mcp_satellite_actors::model::printable;

pub(super) fn print_text(text: &str) {
    print_styled(&printable::lines(text));
}

pub(super) fn print_json(text: &str) {
    print_styled(&printable::json(text));
}

/// Prints text to stdout that may contain terminal styles of the satellite; foreign parts must be printable already. A
/// reader that closes the pipe (`| head`) ends the process quietly.
pub(super) fn print_styled(text: &str) {
    match writeln!(std::io::stdout().lock(), "{text}") {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(i32::from(DONE)),
        Err(error) => {
            print_error(&format!("cannot write to stdout: {error}"));
            std::process::exit(i32::from(FAILED));
        }
    }
}

/// Prints to stdout from a running satellite, which does not end if its stdout is closed.
pub(super) fn try_print(text: &str) {
    let _ = writeln!(std::io::stdout().lock(), "{}", printable::lines(text));
}

pub(super) fn print_error(text: &str) {
    print_styled_error(&printable::lines(text));
}

pub(super) fn print_styled_error(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "satellite: {text}");
}

pub(super) fn printable(text: &str) -> String {
    printable::line(text)
}

pub(super) fn to_json(value: &impl serde::Serialize) -> Result<String, CommandFailure> {
    serde_json::to_string_pretty(value)
        .map_err(|error| CommandFailure::new(FAILED, format!("cannot write JSON: {error}")))
}
