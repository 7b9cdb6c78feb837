//! Output of the command line. What servers, clients and files contain is printed as text and never controls the
//! terminal; see [`printable`](crate::printable).

use std::io::Write;

use super::{DONE, FAILED, Failed};
use crate::printable;

/// Prints text to stdout.
pub(super) fn say(text: &str) {
    say_styled(&printable::lines(text));
}

/// Prints JSON to stdout: one value, or one on each line.
pub(super) fn say_json(text: &str) {
    say_styled(&printable::json(text));
}

/// Prints to stdout what may contain styles of our own. Parts of it that come from elsewhere are printable already. A
/// reader that has left (`| head`) ends the process quietly.
pub(super) fn say_styled(text: &str) {
    match writeln!(std::io::stdout().lock(), "{text}") {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(i32::from(DONE)),
        Err(error) => {
            complain(&format!("cannot write to stdout: {error}"));
            std::process::exit(i32::from(FAILED));
        }
    }
}

/// Prints to stdout from a satellite that runs. It does not end because nobody reads its output.
pub(super) fn tell(text: &str) {
    let _ = writeln!(std::io::stdout().lock(), "{}", printable::lines(text));
}

/// Prints text to stderr. If stderr is closed, there is no other place for it.
pub(super) fn complain(text: &str) {
    complain_styled(&printable::lines(text));
}

/// Prints to stderr what may contain styles of our own; see [`say_styled`].
pub(super) fn complain_styled(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "satellite: {text}");
}

/// Returns one line of text that came from elsewhere in printable form.
pub(super) fn printable(text: &str) -> String {
    printable::line(text)
}

/// Returns a value as indented JSON.
pub(super) fn to_json(value: &impl serde::Serialize) -> Result<String, Failed> {
    serde_json::to_string_pretty(value).map_err(|error| Failed::new(FAILED, format!("cannot write JSON: {error}")))
}
