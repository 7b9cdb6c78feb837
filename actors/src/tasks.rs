//! The one way in which an actor spawns: the task belongs to the actor's state and ends with it.

use std::any::Any;
use std::future::Future;

use tokio::task::JoinSet;

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

/// What a panic said.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}
