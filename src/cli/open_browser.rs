//! Opens a page in the user's browser.

use std::process::Stdio;

/// Opens the page in a browser if there is a display. Other users may see the address in the process list; it is of no
/// use without the satellite's secrets.
pub(super) fn open_browser(page: &str) -> bool {
    let given = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let has_display = given("DISPLAY").or(given("WAYLAND_DISPLAY")).is_some();
    let browser = given("BROWSER").or(has_display.then(|| "xdg-open".to_owned()));
    let Some(browser) = browser else { return false };
    let mut command = std::process::Command::new(browser);
    command.arg(page).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().is_ok()
}
