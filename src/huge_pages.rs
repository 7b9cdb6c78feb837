//! Transparent huge pages. The satellite turns them off for itself: many small allocations would each keep a page of 2 MiB
//! resident, and memory that a burst of calls has used would stay. Children inherit the setting, so it is turned on again
//! in each server.

use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::prctl::set_thp_disable;

static TURNED_OFF: AtomicBool = AtomicBool::new(false);

/// Turns huge pages off for this process. A kernel that does not know the setting has none to turn off.
#[cfg(feature = "cli")]
pub(crate) fn turn_off() {
    TURNED_OFF.store(set_thp_disable(true).is_ok(), Ordering::Relaxed);
}

/// Turns them on again where the binary has turned them off. Async-signal-safe: it runs in a child before `exec`.
pub(crate) fn restore_in_child() {
    if TURNED_OFF.load(Ordering::Relaxed) {
        // The server runs without them as well.
        let _ = set_thp_disable(false);
    }
}
