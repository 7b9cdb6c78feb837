//! From the journal to whoever wants the events, over real HTTP and through every answer that there is: nothing is lost,
//! the order is kept, each event is taken at least once, and whoever has taken a batch can tell that it comes again.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod answers;
mod disk;
mod outage;
mod peer;
mod restart;
mod support;
