//! The question before a file is written.

use std::io::{BufRead, IsTerminal, Write};

use super::exit::{BAD_INPUT, CommandFailure};

/// Asks at the terminal whether to make a change. Everything but `y` and `yes` means no. Without a terminal, `--yes` must
/// permit the change.
pub(super) fn confirm(question: &str, is_permitted: bool) -> Result<bool, CommandFailure> {
    if is_permitted {
        return Ok(true);
    }
    if !std::io::stdin().is_terminal() {
        let message =
            "nothing was changed: stdin is not a terminal, so there is nobody to ask; add --yes to write the change";
        return Err(CommandFailure::new(BAD_INPUT, message));
    }
    let _ = write!(std::io::stderr(), "{question} [y/N] ");
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes"))
}
