//! Lines to remote servers, tested over loopback with a scripted peer that writes HTTP byte by byte.

mod failures;
mod legacy;
mod listening;
mod peer;
mod requests;
mod stateless;
mod support;
mod surroundings;
