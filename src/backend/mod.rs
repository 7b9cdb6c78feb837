//! The optional control plane that satellites poll: what is said between the two (`wire`), the satellite's side of it
//! (`link`), and a small real backend (`server`).

pub mod link;
pub mod server;
pub mod wire;
