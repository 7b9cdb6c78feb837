//! Transparent huge pages. The satellite turns them off for itself: many small allocations would each keep a page of 2
//! MiB resident, and memory used by a burst of calls would not be freed. Children inherit the setting, so it is turned
//! on again in each server.

use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::prctl::set_thp_disable;

static TURNED_OFF: AtomicBool = AtomicBool::new(false);

/// Turns huge pages off for this process. A kernel without this setting has no huge pages to turn off.
pub fn turn_off() {
    TURNED_OFF.store(set_thp_disable(true).is_ok(), Ordering::Relaxed);
}

/// Turns huge pages on again if the binary has turned them off. Async-signal-safe, because it runs in a child before
/// `exec`.
pub fn restore_in_child() {
    if TURNED_OFF.load(Ordering::Relaxed) {
        // A failure is ignored: the server also runs without huge pages.
        let _ = set_thp_disable(false);
    }
}
