//! Panic hook for deliberate panics.

use std::any::Any;
use std::panic;
use std::sync::Once;

/// Installs a panic hook that omits deliberate panics from stderr. All other panics are reported as before.
pub fn silence_deliberate_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let others = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !is_deliberate(info.payload()) {
                others(info);
            }
        }));
    });
}

fn is_deliberate(payload: &(dyn Any + Send)) -> bool {
    let text = payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.is_some_and(|text| text.contains("asked to panic"))
}
