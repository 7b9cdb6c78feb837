//! Delivery from the journal to an HTTP server, with every kind of response: no event is lost, the order is kept, each
//! event is delivered at least once, and the id of a batch identifies repetitions.

mod answers;
mod disk;
mod outage;
mod peer;
mod restart;
mod support;
