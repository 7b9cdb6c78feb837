//! Optional control plane for satellites: the wire protocol (`wire`), the client inside the satellite (`link`) and a
//! small backend server (`server`).

pub mod link;
pub mod server;
pub mod wire;
