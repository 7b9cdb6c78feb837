//! Who calls.

mod direct;
mod http;

use futures::future::BoxFuture;

use super::types::{Answered, PlannedCall};

/// A way to the servers.
pub(crate) trait Caller: Send + Sync {
    /// Makes a call and waits for what comes of it.
    fn call<'a>(&'a self, call: &'a PlannedCall) -> BoxFuture<'a, Answered>;
}
