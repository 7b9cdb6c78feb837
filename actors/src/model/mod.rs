//! The nouns: plain data with no behaviour that touches the world.

pub mod catalogue;
pub mod era;
pub mod event;
pub mod exit;
pub mod failure;
pub mod ids;
pub mod memo;
pub mod policy;
pub mod remedy;
pub mod remote;
pub mod secret;
pub mod snapshot;
pub mod spec;
pub mod status;
