//! Remote servers with OAuth: the built binary, an authorization server and a protected MCP server, all on loopback.

mod authority;
mod first;
mod fixture;
mod machines;
mod people;
mod protected;
mod renewal;
mod secrets;
mod served;
