//! Tasks and panics. An actor spawns every task through its own state, so that the task ends with the actor. Code of
//! the host runs in [`guarded`], so that a panic there does not end an actor.

use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tokio::task::{JoinHandle, JoinSet};

#[derive(Default)]
pub(crate) struct ActorTasks(JoinSet<()>);

impl ActorTasks {
    pub(crate) fn spawn(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        // Reaps the tasks that have ended.
        while self.0.try_join_next().is_some() {}
        self.0.spawn(task);
    }
}

pub(crate) fn spawn_observer<T: Send + 'static>(task: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    tokio::spawn(task)
}

/// Calls code of the host and logs a panic; returns `None` if it panicked.
pub(crate) fn catch_panic<T>(method: &'static str, call: impl FnOnce() -> T) -> Option<T> {
    let called = catch_unwind(AssertUnwindSafe(call));
    called
        .inspect_err(|panic| tracing::error!(method, panic = panic_text(panic.as_ref()), "the host's code panicked"))
        .ok()
}

pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}
