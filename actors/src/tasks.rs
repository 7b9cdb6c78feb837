//! Tasks and panics. An actor spawns in one way only: the task belongs to the actor's state and ends with it. Code of the
//! host runs under [`guarded`], so that its panic ends nothing of ours.

use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tokio::task::{JoinHandle, JoinSet};

/// The tasks of one actor. Dropping it aborts them.
#[derive(Default)]
pub(crate) struct Tasks(JoinSet<()>);

impl Tasks {
    /// Spawns a task that lives no longer than `self`, and reaps those that have ended.
    pub(crate) fn spawn(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        while self.0.try_join_next().is_some() {}
        self.0.spawn(task);
    }
}

/// Spawns the task that outlives every actor of a runtime, to report how the runtime ended.
pub(crate) fn spawn_observer<T: Send + 'static>(task: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    tokio::spawn(task)
}

/// Calls code of the host; a panic there is logged. `None` if it panicked.
pub(crate) fn guarded<T>(method: &'static str, call: impl FnOnce() -> T) -> Option<T> {
    let called = catch_unwind(AssertUnwindSafe(call));
    called
        .inspect_err(|panic| tracing::error!(method, panic = panic_text(panic.as_ref()), "the host's code panicked"))
        .ok()
}

/// What a panic said.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}
